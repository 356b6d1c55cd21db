"""The study: arms of one experiment after the other, several at once on one GPU, each a recipe with some settings changed.

    python benchmarks/study.py benchmarks/study.toml --arms ladder --at-once 4 --seconds 540 --work DIR --out FILE

An arm is run once for each of its seeds by `etude run`: what is finished is kept, what was interrupted goes on, and stages that arms
have in common are made once if they come first. Whatever has been measured is written to FILE every few seconds: a machine that is
taken away takes nothing with it. Run the same command again in the next ten minutes that you have.
"""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import torch  # noqa: F401 - loaded, so that the record names the GPU

from etude.lineage import environment

LEFT_OUT = (
    "weight_",
    "queue_",
    "at_once_",
    "part_",
    "swap",
)  # of the steps of rl: known from the recipe, or told otherwise
QUALITY = ("lines", "reference_lines", "lint", "complexity", "reference_complexity", "unrelated_files", "unparsable")
INTERACTION = ("claimed", "unverified", "silent", "malformed")
LOOK = 5.0  # seconds between two looks at what is finished


def jobs(plan: dict[str, Any], wanted: list[str], work: Path, stop: str = "") -> dict[str, list[str]]:
    """Return the calls of `etude run` by name, ARM-SEED, in the order of what is wanted: stages are taken over from those before."""
    found = {}
    for arm_name, arm in plan["arm"].items():
        for seed in arm.get("seeds", plan.get("seeds", [0])):
            changes = [*plan.get("set", []), *arm.get("set", []), f"seed={seed}"]
            words = [word for change in changes for word in ("--set", change)]
            until = ["--until", last] if (last := stop or arm.get("until")) else []
            name = f"{arm_name}-{seed}"
            found[name] = ["run", *arm.get("recipes", plan["recipes"]), *words, *until, "--out", str(work / name)]
    return {name: found[name] for each in wanted or [""] for name in found if name.startswith(each)}


def stage(folder: Path) -> dict[str, Any]:
    """Return what a stage's record tells, with its held-out measures and the steps of rl, also of one that is still under way."""
    row: dict[str, Any] = {}
    if (folder / "record.json").exists():
        record = json.loads((folder / "record.json").read_text())
        row = {name: record[name] for name in ("kind", "summary", "compute", "started", "finished")}
    if (folder / "results.json").exists():
        results = json.loads((folder / "results.json").read_text())
        told = ("domains", "acceptance", "curve", "speed", "lines")
        row |= (
            {"bases": results}
            if isinstance(results, list)
            else {name: results[name] for name in told if results.get(name)}
        )
    if (folder / "metrics.jsonl").exists():
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
        if steps := [_short(line) for line in lines if "trained" in line]:
            row["steps"] = steps
    return row


def _short(line: dict[str, Any]) -> dict[str, Any]:
    return {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in line.items()
        if not name.startswith(LEFT_OUT) and isinstance(value, int | float)
    }


def trials(folder: Path) -> list[dict[str, Any]]:
    """Return what became of each attempt of a benchmark: intervals are drawn from these, and all four axes."""
    path = folder / "trials.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
    return [
        {name: line[name] for name in ("task", "package", "number", "outcome", "calls", "turns", "stop", "seconds")}
        | {"tokens": {name: count for name, count in line["tokens"].items() if count}}
        | {name: line["quality"][name] for name in QUALITY if name in line["quality"]}
        | {name: line["interaction"][name] for name in INTERACTION if name in line["interaction"]}
        for line in lines
        if "outcome" in line
    ]


def gathered(work: Path) -> dict[str, Any]:
    """Return all stages of all runs, those under way included."""
    found: dict[str, Any] = {}
    for run in sorted(path for path in work.iterdir() if path.is_dir()):
        folders = [path for path in [*run.iterdir(), *run.glob(".work/*")] if path.is_dir() and path.name != ".work"]
        rows = {path.name: stage(path) | ({"trials": rows} if (rows := trials(path)) else {}) for path in folders}
        found[run.name] = {name: row for name, row in sorted(rows.items()) if row}
    return found


def keep(arguments: argparse.Namespace, began: float) -> None:
    """Write everything that is known, whole or not at all."""
    result = {
        "script": "study",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["python", "benchmarks/study.py", *sys.argv[1:]]),
        "hardware": environment.hardware().model_dump(),
        "code": environment.code().model_dump(),
        "packages": environment.packages(),
        "seconds": round(time.monotonic() - began, 1),
        "plan": tomllib.loads(arguments.plan.read_text()),
        "runs": gathered(arguments.work),
    }
    beside = arguments.out.with_suffix(".part")
    beside.write_text(json.dumps(result) + "\n", encoding="utf-8")
    beside.replace(arguments.out)


def carry_out(arguments: argparse.Namespace) -> dict[str, int | None]:
    """Run all jobs, several at once, until they are done or the time is over; return their exit codes."""
    began = time.monotonic()
    plan = tomllib.loads(arguments.plan.read_text())
    waiting = list(jobs(plan, arguments.arms, arguments.work, arguments.until).items())
    running: dict[str, subprocess.Popen[bytes]] = {}
    codes: dict[str, int | None] = {name: None for name, _ in waiting}
    cache = ["--cache", str(arguments.cache)] if arguments.cache else []
    while (waiting or running) and time.monotonic() - began < arguments.seconds:
        while waiting and len(running) < arguments.at_once:
            name, words = waiting.pop(0)
            with (arguments.work / f"{name}.log").open("ab") as log:
                running[name] = subprocess.Popen(
                    [sys.executable, "-m", "etude", *words, *cache], stdout=log, stderr=subprocess.STDOUT
                )
        time.sleep(LOOK)
        for name in [name for name, process in running.items() if process.poll() is not None]:
            codes[name] = running.pop(name).returncode
            print(f"{time.monotonic() - began:6.0f} s  {name}: exit code {codes[name]}", flush=True)
        keep(arguments, began)
    for process in running.values():
        process.send_signal(signal.SIGINT)  # so that each stops at a safe place, as by Ctrl-C
    for process in running.values():
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
    keep(arguments, began)
    return codes


def main() -> None:
    """Run arms, and print a table of what their stages say."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument(
        "--arms", nargs="*", default=[], help="only those whose names (ARM-SEED) begin so, in this order"
    )
    parser.add_argument("--until", default="", help="stop each arm after this stage; go on without it later")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--work", type=Path, default=Path("runs/study"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/study.json"))
    parser.add_argument("--cache", type=Path)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    codes = carry_out(arguments)
    for run, stages in gathered(arguments.work).items():
        for name, row in stages.items():
            print(f"{run:28} {name:24} {json.dumps(row.get('summary', 'under way'))[:150]}")
    print(json.dumps({"exit codes": codes}))


if __name__ == "__main__":
    main()
