"""The `compare` stage: which base suits this code? A report, not a model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from rich.text import Text

from etude.bench.base_comparison import Candidate, CandidateResult, CompareConfig, check_fits, make_chains, measure
from etude.data.codebase import Codebase, EditChain, read_codebase
from etude.errors import UserError
from etude.files import digest_of, read_json, write_json, write_text
from etude.lineage import environment
from etude.models.bases import known_bases, resolve
from etude.models.load import choose_device
from etude.report.bases import draw, markdown, ranked, table, verdict
from etude.run.stage import Job, Outcome, Stage, code_used, fetch_source

if TYPE_CHECKING:
    from rich.console import RenderableType

    from etude.lineage.record import Parent

RESULTS = "results.json"  # the same on every run
SPEED = "speed.json"  # not


class CompareStage(Stage):
    """Measures candidates on a source tree."""

    settings = CompareConfig

    def check(self, settings: CompareConfig) -> None:
        for word in settings.bases:
            resolve(word)
        read_codebase(_code_folder(settings), settings.keep)

    def inputs(self, settings: CompareConfig, parent_digest: str | None, seed: int) -> dict[str, Any]:
        """Return the code and the tasks by content, the candidates by identity, and the machine, which decides the speed."""
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
            data=[code_used(_code_folder(settings), code)],
            device=environment.device_name(device.type),
            summary={"best": best.name, "bits_per_byte": best.bits.bits_per_byte, "candidates": len(results)},
        )

    def show(self, folder: Path) -> list[RenderableType]:
        results = load_results(folder)
        lines = (folder / "report.md").read_text(encoding="utf-8").splitlines()
        legend = [Text(line, "dim") for line in lines if line.startswith("- ")]
        where = f"report: {folder / 'report.md'}, picture: {folder / 'comparison.png'}"
        return [table(results), *legend, Text(verdict(results), "bold"), where]


def _code_folder(settings: CompareConfig) -> Path:
    return Path(settings.on).expanduser()


def _chains(code: Codebase, settings: CompareConfig, seed: int) -> list[EditChain]:
    return make_chains(code, settings.state_tasks, settings.state_diffs, settings.state_chars, seed)


def load_results(folder: Path) -> list[CandidateResult]:
    speeds = read_json(folder / SPEED)
    entries = [{**entry, "speed": speeds[entry["name"]]} for entry in read_json(folder / RESULTS)]
    return TypeAdapter(list[CandidateResult]).validate_python(entries)


def _candidates(settings: CompareConfig, job: Job, device: Any) -> tuple[list[Candidate], list[Parent]]:
    """Return the candidates, checked, with their places in the family tree: the recipe's own model first."""
    candidates: list[Candidate] = []
    parents: list[Parent] = []
    if job.parent:
        name = str(job.parent.record.summary.get("base") or job.parent.record.stage)
        origin = job.parent.record.origin
        known = known_bases().get(name) if origin and origin.source.startswith(("hub ", "package ")) else None
        candidates.append(Candidate(name, job.parent.folder, device, known.licence if known else None))
        parents.append(job.parent.as_parent("compared", name))
    for base in map(resolve, settings.bases):
        source = fetch_source(base, job, "compared", [parent.name for parent in parents])
        if source.edge.model_digest in (parent.model_digest for parent in parents):
            job.work.reporter.say(f"compare: {base.name} is among the candidates already; it is measured once")
            continue
        licence = base.known.licence if base.known else None
        candidates.append(Candidate(source.edge.name, source.folder, device, licence))
        parents.append(source.edge)
    return candidates, parents


def _measured(
    candidate: Candidate, code: Codebase, chains: list[EditChain], settings: CompareConfig, job: Job
) -> CandidateResult:
    import torch

    try:
        return measure(candidate, code, chains, settings, job.work)
    except torch.cuda.OutOfMemoryError:
        advice = "lower compare.window or compare.speed_batch, or set compare.device=cpu"
        raise UserError(f"{candidate.name} does not fit into the GPU's memory with these settings; {advice}") from None


def _write(results: list[CandidateResult], code: Codebase, total_files: int, folder: Path) -> None:
    write_json(folder / RESULTS, [result.quality() for result in results])
    write_json(folder / SPEED, {result.name: result.speed for result in results})
    write_text(folder / "report.md", markdown(results, code, total_files))
    draw(results, folder / "comparison.png")
