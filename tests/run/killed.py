"""Runs `etude run` in forked children that end themselves at their n-th touch of the file system.

    python -m tests.run.killed RECIPE FOLDER SEED

Loads torch once, forks a child for every run, and prints one JSON line: the digests of a run that was left alone, and for
each of the others at which touch it was ended, by which signal, and the digests after the same command was run again.
A touch is any event of Python's audit system (open, rename, link, remove, mkdir …) on a path inside FOLDER.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure

import etude.bench.base_comparison
import etude.data.build
import etude.data.replay
import etude.inference.transformers_reference
import etude.models.load
import etude.models.shape
import etude.report.bases
import etude.report.corpus
import etude.report.training
import etude.training.measure
import etude.training.session  # noqa: F401 - loaded before the fork, so that every child starts at once
from etude.cli.main import main
from etude.lineage.record import load_record
from etude.run.runner import stage_settings

KILLS = 6


def child(recipe: Path, folder: Path, name: str, end_at: int | None, by: int, counter: Path) -> tuple[int, str]:
    """Run the recipe in a child; return how it ended and what it said."""
    said = folder / f"{name}.log"
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        os.dup2(2, 1)
        touches = 0

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal touches
            path = arguments[0] if arguments else None
            if isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path).startswith(str(folder / name)):
                touches += 1
                if touches == end_at:
                    os.kill(os.getpid(), by)

        sys.addaudithook(hook)
        sys.argv = [
            "etude",
            "run",
            str(recipe),
            "--out",
            str(folder / name / "run"),
            "--cache",
            str(folder / name / "cache"),
        ]
        try:
            main()
        except SystemExit as leaving:
            counter.write_text(str(touches))
            os._exit(int(leaving.code or 0))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said.read_text(encoding="utf-8")


def digests(run: Path) -> dict[str, str]:
    """Return the digests that must not depend on what happened on the way."""
    records = {name: load_record(run / name) for name in ("base", "data", "cpt", "compare")}
    rows = [json.loads(line) for line in (run / "cpt" / "metrics.jsonl").read_text().splitlines()]
    return {
        "weights": records["base"].model_digest,
        "corpus": records["data"].outputs["manifest.json"].sha256,
        "trained": records["cpt"].model_digest,
        "losses": json.dumps([row["loss"] for row in rows if row["key"].startswith("train/")]),
        "results": records["compare"].outputs["results.json"].sha256,
        "files": json.dumps({name: sorted(record.outputs) for name, record in records.items()}),
    }


def ended_and_run_again(
    recipe: Path, folder: Path, name: str, touches: int, by: int, rng: random.Random
) -> dict[str, object]:
    """End one run at a random touch, run it again, and return what came of it."""
    counter = folder / "counter"
    for attempt in range(5):  # how often progress is written depends on time, so a run may end before the touch comes
        at = rng.randint(1, touches)
        code, said = child(recipe, folder, f"{name}-{attempt}", at, by, counter)
        if code != 0:
            break
    again, said_again = child(recipe, folder, f"{name}-{attempt}", None, by, counter)
    return {
        "at": at, "ended": code, "said": said, "again": again, "said again": said_again,
        "digests": digests(folder / f"{name}-{attempt}" / "run") if again == 0 else None,
    }  # fmt: skip


def run_all(recipe: Path, folder: Path, seed: int) -> dict[str, object]:
    """Do a quiet run, then the ended ones."""
    stage_settings()
    figure = Figure()
    figure.add_subplot().set_title("draws once, so that no child has to load fonts")
    figure.savefig(BytesIO())
    rng = random.Random(seed)
    counter = folder / "counter"
    code, said = child(recipe, folder, "quiet", None, signal.SIGKILL, counter)
    assert code == 0, said
    touches = int(counter.read_text())
    kills = [ended_and_run_again(recipe, folder, f"kill-{n}", touches, signal.SIGKILL, rng) for n in range(KILLS)]
    # A stop is asked for early in the second half, when there is still work left to be stopped.
    stops = [
        ended_and_run_again(recipe, folder, f"stop-{by}", touches // 2, by, rng)
        for by in (signal.SIGINT, signal.SIGTERM)
    ]
    return {"touches": touches, "digests": digests(folder / "quiet/run"), "kills": kills, "stops": stops}


if __name__ == "__main__":
    print(json.dumps(run_all(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))))  # noqa: T201
