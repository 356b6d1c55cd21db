"""Building a corpus with Etude and with datatrove: the same documents, the same steps, one run, MB/s of each step.

    python benchmarks/corpus.py --sdists FOLDER --tokeniser tokenizer.json

The corpus is the code in the sdists of a folder, some 200 MB of it, as rows of JSONL; making those is not timed. MB are
those that go in, for every step, so that the seconds of the steps add up. datatrove gets its own environment, because its
requirements clash with Etude's; how it is set up, and that it is set up for speed: corpus_datatrove.py.

Not the same on both sides, and so not hidden: Etude also tells licences and languages, looks for secrets with a scanner
where datatrove replaces e-mail and IP addresses, compares near-duplicate candidates before it drops them, and packs whole
documents best-fit where datatrove cuts a stream into windows.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import itertools
import json
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from etude.data.build import Build
from etude.data.codebase import CODE_SUFFIXES
from etude.data.document import Document, Raw
from etude.data.filters.content import decode
from etude.data.settings import ContaminationSettings, DataSettings, DuplicateSettings, FilterSettings
from etude.jsonl import MetricsLog
from etude.progress import Reporter
from etude.work import Work
from report import finish

if TYPE_CHECKING:
    from collections.abc import Iterator

    from etude.data.manifest import SourceEntry

DATATROVE = "datatrove[io,processing]==0.10.1"
STEPS = ("filter", "exact duplicates", "near duplicates", "scrub", "decontaminate", "tokenise", "pack")
SHARDS = 8  # files of rows, of equal size; datatrove shares out work by the file
TASKS_OF_EACH = 3  # functions of an sdist to decontaminate against
LENGTH = 2048  # tokens in a packed row
SEPARATOR = "<|endoftext|>"


@dataclass(frozen=True)
class Corpus:
    """What both sides get: files of rows with text, repository, path and id; and benchmark tasks."""

    shards: Path
    tasks: Path
    documents: int
    bytes: int  # of text


@dataclass(frozen=True)
class Side:
    """What one side took and what came out of it."""

    documents: int  # read
    seconds: float  # from beginning to end
    steps: dict[str, float]  # seconds
    left: dict[str, int]  # documents after each step; tokens from `tokenise` on
    more: dict[str, Any]


def prepare(sdists: Path, megabytes: int, folder: Path) -> Corpus:
    """Write the rows of enough sdists, whole ones, in an order that depends on their names only.

    Tasks are functions of the corpus itself: so both sides have something to find, and must find at least the files the
    functions stand in.
    """
    shards = [folder / "shards" / f"{number:02}.jsonl" for number in range(SHARDS)]
    shards[0].parent.mkdir(parents=True)
    written, documents = [0] * SHARDS, 0
    tasks: list[dict[str, str]] = []
    with contextlib.ExitStack() as stack:
        outs = [stack.enter_context(shard.open("w", encoding="utf-8")) for shard in shards]
        for sdist in sorted(sdists.glob("*.tar.gz"), key=lambda path: _hash(path.name)):
            if sum(written) >= megabytes * 1_000_000:
                break
            repository, files = sdist.name.removesuffix(".tar.gz"), dict(_code(sdist))
            for path, text in files.items():
                row = {"text": text, "repository": repository, "path": path, "id": f"{repository}/{path}"}
                emptiest = written.index(min(written))
                outs[emptiest].write(json.dumps(row, ensure_ascii=False) + "\n")
                written[emptiest] += len(text.encode())
            documents += len(files)
            tasks += [{"id": repository, "text": text} for text in itertools.islice(_functions(files), TASKS_OF_EACH)]
    if sum(written) < megabytes * 1_000_000:
        raise SystemExit(f"{sdists} holds {sum(written) / 1e6:.0f} MB of code, of {megabytes} wanted")
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
    return Corpus(shards[0].parent, folder / "tasks.jsonl", documents, sum(written))


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _code(sdist: Path) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each source file that Etude would read."""
    with tarfile.open(sdist) as archive:
        for member in archive:
            folder, _, path = member.name.partition("/")
            if not member.isfile() or PurePosixPath(path).suffix.lower() not in CODE_SUFFIXES:
                continue
            opened = archive.extractfile(member) if member.size <= FilterSettings().max_bytes else None
            document = decode(Raw(folder, path, opened.read() if opened else b""))
            if isinstance(document, Document):
                yield path, document.text


def _functions(files: dict[str, str]) -> Iterator[str]:
    """Yield functions the size of a benchmark task."""
    for path in sorted(files, key=_hash):
        if not path.endswith(".py"):
            continue
        try:
            body = ast.parse(files[path]).body
        except (SyntaxError, ValueError, RecursionError):
            continue
        for node in body:
            if isinstance(node, ast.FunctionDef) and 8 <= (node.end_lineno or 0) - node.lineno < 40:
                yield ast.get_source_segment(files[path], node) or ""


def build_with_etude(corpus: Corpus, tokeniser: Path, workers: int, folder: Path) -> Side:
    """Build the corpus with Etude: what `etude data build` does after it has read the recipe."""
    source = {
        "name": "code",
        "jsonl": str(corpus.shards / "*.jsonl"),
        "repository_column": "repository",
        "licences": "any",
        "unknown": "keep",
    }
    data = DataSettings.model_validate(
        {"source": [source], "length": LENGTH, "separator": SEPARATOR, "heldout": 0.0, "workers": workers,
         "contamination": {"tasks": [str(corpus.tasks)]}, "tokeniser": {"source": str(tokeniser.parent)}}
    )  # fmt: skip
    began = time.perf_counter()
    with MetricsLog(folder / "metrics.jsonl") as metrics:
        manifest = Build(data, Work(folder, metrics, Reporter(quiet=True), folder), seed=0, base=None).run()
        seconds = time.perf_counter() - began
        whole = {
            name: sum(row["seconds"] for row in metrics.rows(f"step/{name}/"))
            for name in ("filter", "compare", "shape", "pack")
        }
        spent: Counter[str] = Counter()
        for row in metrics.rows("filter/"):
            spent.update(row["seconds"])
    return _side(manifest.sources[0], seconds, whole, spent)


def _side(source: SourceEntry, seconds: float, whole: dict[str, float], spent: Counter[str]) -> Side:
    """Share the time of the first pass out to what its workers say they spent it on."""
    part = {step: whole["filter"] * each / spent.total() for step, each in spent.items()}
    steps = {
        "exact duplicates": part.pop("hashes"),
        "near duplicates": part.pop("signatures") + whole["compare"],
        "scrub": part.pop("private"),
        "decontaminate": part.pop("contamination"),
        "filter": sum(part.values()),
        "tokenise": whole["shape"],
        "pack": whole["pack"],
    }
    gone = Counter(source.drops)
    exact, near = gone["duplicates: exact duplicate"], gone["duplicates: near-duplicate"]
    shared = sum(count for reason, count in gone.items() if reason.startswith("contamination"))
    left = {"filter": source.kept + exact + near + shared, "decontaminate": source.kept + exact + near}
    left |= {"exact duplicates": source.kept + near, "near duplicates": source.kept}
    left |= {"tokenise": source.tokens["train"], "pack": source.tokens["train"]}
    memory = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return Side(source.documents_in, seconds, steps, left, {"drops": source.drops, "largest_process_MB": memory / 1000})


def build_with_datatrove(corpus: Corpus, tokeniser: Path, workers: int, folder: Path, python: Path) -> Side:
    """Build the corpus with datatrove, in a process of its own environment."""
    job = {
        "shards": str(corpus.shards),
        "tasks": str(corpus.tasks),
        "tokeniser": str(tokeniser),
        "separator": SEPARATOR,
        "workers": workers,
        "length": LENGTH,
        "work": str(folder),
        "filters": FilterSettings().model_dump(),
        "duplicates": DuplicateSettings().model_dump(),
        "contamination": ContaminationSettings().model_dump(),
    }
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    script = Path(__file__).with_name("corpus_datatrove.py")
    environment = {**os.environ, "PYTHONUTF8": "1", "PYTHONPATH": str(script.parents[1] / "src")}
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        done = subprocess.run(
            [python, script, folder / "job.json"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            check=False,
            text=True,
        )
    if done.returncode:
        raise SystemExit(f"datatrove failed:\n{(folder / 'log.txt').read_text(encoding='utf-8')[-3000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    return Side(**told)


def datatrove_python(folder: Path) -> Path:
    """Make an environment with datatrove and return its interpreter."""
    print(f"installing {DATATROVE} in {folder}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin" / "pip", "install", "-qq", DATATROVE], check=True)
    return folder / "bin" / "python"


def table(corpus: Corpus, sides: dict[str, Side]) -> list[dict[str, Any]]:
    """Return a row a step and one for the whole, the sides beside each other."""
    rows = []
    for step in (*STEPS, "end to end"):
        row: dict[str, Any] = {"step": step}
        for name, side in sides.items():
            seconds = side.seconds if step == "end to end" else side.steps[step]
            row |= {f"{name} s": round(seconds, 1), f"{name} MB/s": round(corpus.bytes / 1e6 / seconds, 1)}
            row |= {f"{name} left": f"{side.left[step]:,}" if step in side.left else ""}
        rows.append(row)
    return rows


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--sdists", type=Path, required=True, help="folder with *.tar.gz")
    parser.add_argument("--tokeniser", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--megabytes", type=int, default=200, help="of code, at least")
    parser.add_argument("--sides", nargs="+", choices=["etude", "datatrove"], default=["etude", "datatrove"])
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--datatrove-python", type=Path, help="of an environment that has datatrove; default: make one")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        corpus = prepare(asked.sdists, asked.megabytes, folder)
        sides = {}
        if "etude" in asked.sides:
            sides["etude"] = build_with_etude(corpus, asked.tokeniser, asked.workers, folder / "etude")
        if "datatrove" in asked.sides:
            python = asked.datatrove_python or datatrove_python(folder / "environment")
            sides["datatrove"] = build_with_datatrove(
                corpus, asked.tokeniser, asked.workers, folder / "datatrove", python
            )
    for name, side in sides.items():
        assert side.documents == corpus.documents, f"{name} read {side.documents} documents of {corpus.documents}"
    more = {name: asdict(side) for name, side in sides.items()}
    finish("corpus", table(corpus, sides), "cpu", documents=corpus.documents, bytes=corpus.bytes, **more)


if __name__ == "__main__":
    main()
