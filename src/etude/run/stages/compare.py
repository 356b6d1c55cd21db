"""The `compare` stage: which base suits this code? A report, not a model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from etude.bench.base_comparison import Candidate, CandidateResult, CompareConfig, check_fits, measure
from etude.bench.state_tracking import make_chains
from etude.data.codebase import Codebase, git_revision, read_codebase
from etude.errors import UserError
from etude.files import digest_of, read_json, write_json, write_text
from etude.lineage import environment
from etude.lineage.record import LINEAGE_FILE, DataUse, Parent, load_lineage
from etude.models.bases import known_bases, resolve
from etude.report.bases import draw, markdown, ranked, table, verdict
from etude.run.stage import Job, Outcome

if TYPE_CHECKING:
    from rich.console import Console

    from etude.data.codebase import EditChain

RESULTS = "results.json"  # the same on every run
SPEED = "speed.json"  # not


class CompareStage:
    """Measures candidates on a source tree."""

    version = 1
    settings = CompareConfig
    makes_model = False
    reads_corpus = False

    def check(self, settings: CompareConfig) -> None:
        """Refuse unknown bases and a folder without code."""
        for word in settings.bases:
            resolve(word)
        read_codebase(_code_folder(settings), settings.keep)

    def inputs(self, settings: CompareConfig, parent_digest: str | None, seed: int) -> dict[str, Any]:
        """Return the code and the tasks by content, the candidates by identity, and the machine, on which speed depends."""
        if parent_digest is None and not settings.bases:
            raise UserError("compare: nothing to compare; set `base` in the recipe or `bases` in [compare]")
        code = read_codebase(_code_folder(settings), settings.keep)
        return {
            # `keep` came later: what was finished before it is still what it was, and the code tells what was kept
            "settings": settings.model_dump(exclude={"on", "bases", "keep"}),
            "code": code.digest,
            "tasks": digest_of([asdict(chain) for chain in _chains(code, settings, seed)]),
            "seed": seed,
            "bases": [resolve(word).identity() for word in settings.bases],
            "machine": environment.machine_identity(),
        }

    def run(self, settings: CompareConfig, job: Job) -> Outcome:
        """Measure every candidate and write the report."""
        from etude.models.load import choose_device

        everything = read_codebase(_code_folder(settings), settings.keep)
        code = everything.sample(settings.max_bytes)
        chains = _chains(everything, settings, job.seed)
        device = choose_device(settings.device)
        candidates, parents = _candidates(settings, job, device)
        for candidate in candidates:
            check_fits(candidate, chains, settings)
        if len(chains) < settings.state_tasks:
            few = f"only {len(chains)} of {settings.state_tasks} state-tracking tasks can be made from {settings.on}"
            job.work.reporter.say(f"compare: {few}")
        results = [_measured(candidate, code, chains, settings, job) for candidate in candidates]
        _write(results, code, len(everything.files), job.work.folder)
        best = ranked(results)[0]
        return Outcome(
            parents=parents,
            data=[_data_use(_code_folder(settings), code)],
            device=environment.device_name(device.type),
            summary={"best": best.name, "bits_per_byte": best.bits.bits_per_byte, "candidates": len(results)},
        )

    def show(self, folder: Path, console: Console) -> None:
        """Print the table and what it means."""
        results = load_results(folder)
        page = (folder / "report.md").read_text(encoding="utf-8")
        console.print(table(results))
        for line in page.splitlines():
            if line.startswith("- "):
                console.print(line, style="dim", highlight=False, markup=False)
        console.print(verdict(results), style="bold", highlight=False, markup=False)
        console.print(
            f"report: {folder / 'report.md'}, picture: {folder / 'comparison.png'}", highlight=False, soft_wrap=True
        )


def _code_folder(settings: CompareConfig) -> Path:
    return Path(settings.on).expanduser()


def _chains(code: Codebase, settings: CompareConfig, seed: int) -> list[EditChain]:
    return make_chains(code, settings.state_tasks, settings.state_diffs, settings.state_chars, seed)


def load_results(folder: Path) -> list[CandidateResult]:
    """Read the results of a finished comparison."""
    speeds = read_json(folder / SPEED)
    entries = [{**entry, "speed": speeds[entry["name"]]} for entry in read_json(folder / RESULTS)]
    return TypeAdapter(list[CandidateResult]).validate_python(entries)


def _candidates(settings: CompareConfig, job: Job, device: Any) -> tuple[list[Candidate], list[Parent]]:
    """Return the candidates, checked, with their places in the family tree: the recipe's own model first."""
    from etude.files import digest_of_files
    from etude.models.fetch import fetch
    from etude.models.load import digest_files, weight_files

    candidates: list[Candidate] = []
    parents: list[Parent] = []
    if job.parent:
        name = str(job.parent.record.summary.get("base") or job.parent.record.stage)
        origin = job.parent.record.origin
        known = known_bases().get(name) if origin and origin.source.startswith(("hub ", "package ")) else None
        candidates.append(Candidate(name, job.parent.folder, device, known.licence if known else None))
        parents.append(
            Parent(name=name, role="compared", record=job.parent.record.id, model_digest=job.parent.record.model_digest)
        )
    for word in settings.bases:
        base = resolve(word)
        fetched = fetch(base, job.work.cache, job.work.reporter)
        name = _unique(base.name, [candidate.name for candidate in candidates])
        digests = digest_files(
            weight_files(fetched.folder), fetched.folder, job.work.reporter, f"{name}: hashing weights"
        )
        digest = digest_of_files({file: found.sha256 for file, found in digests.items()})
        if digest in (parent.model_digest for parent in parents):
            job.work.reporter.say(f"compare: {word} is among the candidates already; it is measured once")
            continue
        candidates.append(Candidate(name, fetched.folder, device, base.known.licence if base.known else None))
        lineage = load_lineage(fetched.folder) if (fetched.folder / LINEAGE_FILE).is_file() else None
        parents.append(
            Parent(name=name, role="compared", record=lineage.head if lineage else None, model_digest=digest)
        )
    return candidates, parents


def _measured(
    candidate: Candidate, code: Codebase, chains: list[EditChain], settings: CompareConfig, job: Job
) -> CandidateResult:
    import torch

    try:
        return measure(candidate, code, chains, settings, job.work, job.seed)
    except torch.cuda.OutOfMemoryError:
        raise UserError(
            f"{candidate.name} does not fit into the GPU's memory with these settings; "
            "lower compare.window or compare.speed_batch, or set compare.device=cpu"
        ) from None


def _unique(name: str, taken: list[str]) -> str:
    """Return the name, numbered if another candidate has it."""
    return (
        name
        if name not in taken
        else next(f"{name}-{n}" for n in range(2, len(taken) + 3) if f"{name}-{n}" not in taken)
    )


def _write(results: list[CandidateResult], code: Codebase, total_files: int, folder: Path) -> None:
    write_json(folder / RESULTS, [result.quality() for result in results])
    write_json(folder / SPEED, {result.name: result.speed for result in results})
    write_text(folder / "report.md", markdown(results, code, total_files))
    draw(results, folder / "comparison.png")


def _data_use(source: Path, code: Codebase) -> DataUse:
    return DataUse(
        name="code",
        source=str(source.resolve()),
        revision=git_revision(source),
        digest=code.digest,
        files=len(code.files),
        bytes=code.bytes,
        left_out=code.left_out,
    )
