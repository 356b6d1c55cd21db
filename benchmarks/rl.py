"""What asynchrony is worth: the same tasks, model and settings, sampled and trained one after the other, then at the same time.

    python benchmarks/rl.py RECIPE... [--steps 10] [--warm 2] [--seconds 200] [--out FILE] [--set rl.groups=4 …]

RECIPE is one whose last stage is `rl`; the stages before it are run first, once. Both modes start from the same weights in folders
of their own, with real sandboxes and real test runs. The first `--warm` steps are left out: kernels are compiled in them.
Steps an hour are counted from the end of the last warm step to the end of the last one. With `--seconds` a mode is stopped then,
as by Ctrl-C, and the steps that it made count.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from etude.lineage import environment

MODES = ("sync", "async")
RATES = ("steps", "episodes", "sampled tokens")


def command(arguments: argparse.Namespace, *more: str) -> list[str]:
    """Return a call of `etude run` for the recipe."""
    settings = [word for each in arguments.set for word in ("--set", each)]
    return [sys.executable, "-m", "etude", "run", *arguments.recipes, *settings, *more]


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return the rows of the steps, in their order."""
    found = [file for file in run.rglob("metrics.jsonl") if file.parent.name.startswith("rl")]
    path = max(found, key=lambda file: file.stat().st_mtime)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted((row for row in rows if row["key"].startswith("train/")), key=lambda row: row["key"])


def mean(rows: list[dict[str, Any]], name: str) -> float | None:
    """Return the mean of what rows have."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistics.fmean(values) if values else None


def measured(run: Path, warm: int, seconds: float) -> dict[str, Any]:
    """Return what one mode did after its warm-up."""
    steps = rows_of(run)
    if len(steps) <= warm:
        raise SystemExit(f"{run} has only {len(steps)} steps; give --steps more than --warm {warm}")
    span, counted = steps[-1]["time"] - steps[warm - 1]["time"], steps[warm:]
    names = [name for name in counted[-1] if name.startswith("idle_")]
    means = ("reward", "solved", "entropy", "mismatch_mean", "mismatch_p99", "masked", "ratio_max", "turns", *names)
    paused = [row["swap_paused"] for row in counted if "swap_paused" in row]
    update = {
        "seconds": mean(counted, "swap_seconds"), "paused_ms": 1e3 * (statistics.fmean(paused) if paused else 0.0),
        "paused_most_ms": 1e3 * max(paused, default=0.0), "publish_seconds": mean(counted, "publish_seconds"),
        "delta_bytes": min((row["publish_bytes"] for row in counted if "publish_bytes" in row), default=None),
        "full_bytes": mean(counted, "publish_full_bytes"),
    }  # fmt: skip
    return {
        "steps": len(counted), "seconds": span, "seconds_with_start": seconds, "steps_an_hour": 3600 * len(counted) / span,
        "episodes": sum(row.get("episodes", 0) for row in counted),
        "sampled_a_second": sum(row.get("sampled_tokens", 0) for row in counted) / span,
        "trained_a_second": sum(row.get("tokens", 0) for row in counted) / span,
        "train_seconds": mean(counted, "seconds"),
        "update": update, "means": {name: mean(counted, name) for name in means},
        "staleness": {name: mean(counted, name) for name in sorted({n for row in counted for n in row if n.startswith("staleness_")})},
    }  # fmt: skip


def rate(mode: dict[str, Any], name: str) -> float:
    """Return how much of something a mode did in a second."""
    return float(mode["sampled_a_second"] if name == "sampled tokens" else mode[name] / mode["seconds"])


def run_mode(arguments: argparse.Namespace, mode: str, run: Path) -> float:
    """Run one mode in a new folder and return the seconds it took, its start included."""
    shutil.rmtree(run, ignore_errors=True)
    began = time.monotonic()
    staleness = ["--set", "rl.staleness=0"] if mode == "sync" else []
    words = command(
        arguments, "--out", str(run), "--set", f"rl.mode={mode}", "--set", f"rl.steps={arguments.steps}", *staleness
    )
    with subprocess.Popen(words) as process:
        try:
            process.wait(arguments.seconds or None)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        else:
            if process.returncode:
                raise SystemExit(f"{mode}: `etude run` ended with {process.returncode}")
    return time.monotonic() - began


def main() -> None:
    """Run both modes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-rl"))
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for mode in arguments.modes:
        run = arguments.work / mode
        found[mode] = measured(run, arguments.warm, run_mode(arguments, mode, run))
    # Steps may use episodes that were sampled while kernels were compiled; episodes and tokens are counted as they are sampled.
    ratios = (
        {name: rate(found["async"], name) / rate(found["sync"], name) for name in RATES}
        if len(found) == len(MODES)
        else None
    )
    width = max(map(len, ("steps_an_hour", "sampled_a_second", "trained_a_second", "paused_most_ms")))
    for name in ("steps_an_hour", "sampled_a_second", "trained_a_second", "episodes"):
        print(f"{name:{width}}  " + "  ".join(f"{mode} {each[name]:,.1f}" for mode, each in found.items()))
    for name in ("seconds", "publish_seconds", "paused_ms", "paused_most_ms", "delta_bytes", "full_bytes"):
        print(
            f"{name:{width}}  " + "  ".join(f"{mode} {each['update'][name] or 0:,.2f}" for mode, each in found.items())
        )
    for mode, each in found.items():
        print(mode, {name: round(value, 4) for name, value in each["means"].items() if value is not None})
    if ratios:
        print("asynchronous / synchronous: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))
    import torch

    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "command": " ".join(sys.argv),
        "settings": arguments.set, "steps": arguments.steps,
        "warm": arguments.warm, "device": environment.device_name("cuda" if torch.cuda.is_available() else "cpu"),
        "versions": environment.packages(),
        "modes": found, "ratios": ratios,
    }  # fmt: skip
    line = json.dumps(result)
    if arguments.out:
        arguments.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
