"""What Ray costs: the same RL run as one machine does it, and with all parts placed by a Ray that runs on the same machine.

    python benchmarks/cluster_overhead.py [--steps 12] [--repeats 3] [--hardware cpu]

sprout learns seven tasks of the quickstart, one step after the other (`mode = "sync"`), so that both ways sample the same tokens and
train the same batches; each process has one thread. Both ways take turns, so that a machine whose speed drifts favours neither.

`begin s`: from the command to its first episode (processes start, Ray is joined, places are made); Ray's own start is not counted.
`steps/hour`: from the end of step 1 to that of the last one. `command s`: all of it. The ratios are of medians, with Ray / without.
`reward`: the sum over all steps, which is the same in every run: else they did not do the same. Goal: 1.1 at most.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from etude.jsonl import read_rows

ROOT = Path(__file__).parents[1]
RECIPE = """
name = "overhead"
base = "sprout"
stages = ["rl"]

[rl]
tasks = "recipes/tasks/quick.jsonl"
only = '''
  texttable-deletion-1504 texttable-deletion-9bd9 texttable-mutation-4e3e texttable-mutation-758e
  uritemplate-deletion-67e2 uritemplate-mutation-0532 uritemplate-mutation-7d19
'''
style = "told"
steps = {steps}
groups = 2
group_size = 4
epochs = 1000
normaliser = 128
mode = "sync"
staleness = 0
compile = "off"
concurrency = 4
optimiser = {{ lr = 1.5e-4 }}
curriculum = {{ hard = 0.0, solved = 0.0 }}
tools = {{ tools = ["edit"] }}
rewards = {{ communication = 0.0, style = 0.0, length = 0.1 }}
harness = {{ turns = 1, tokens = 100, turn_tokens = 100, seconds = 600.0, summary = {{ kind = "none" }} }}

[cluster]
trainer = {{ cpus = 1 }}
engines = {{ cpus = 1 }}
sandboxes = {{ cpus = 2, pool = 2 }}
"""
PLACES = 4  # CPUs of the table


def measured(recipe: Path, out: Path, cache: Path, address: str) -> dict[str, Any]:
    """Run the recipe once and return its times."""
    words = [sys.executable, "-m", "etude", "run", str(recipe), "--out", str(out), "--cache", str(cache)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    began, first = time.monotonic(), None
    process = subprocess.Popen(
        [*words, *(["--cluster", address] if address else [])], cwd=ROOT, env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while process.poll() is None:
        if first is None and any(out.glob("**/ledger.jsonl")):
            first = time.monotonic()
        time.sleep(0.02)
    whole = time.monotonic() - began
    if process.returncode or first is None:
        assert process.stderr is not None
        sys.exit(f"{' '.join(words)} ended with {process.returncode}: {process.stderr.read()[-2000:]}")
    rows = sorted(read_rows(out / "rl/metrics.jsonl", "train/"), key=lambda row: row["step"])
    seconds = rows[-1]["time"] - rows[0]["time"]
    return {
        "with Ray": "yes" if address else "no", "command s": round(whole, 1), "begin s": round(first - began, 1),
        "steps": len(rows), "steps/hour": round(3600 * (len(rows) - 1) / seconds, 1),
        "reward": round(sum(row["reward"] for row in rows), 4),
    }  # fmt: skip


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return with Ray / without, of medians; more than 1 is slower."""

    def middle(way: str, name: str) -> float:
        return float(statistics.median(row[name] for row in rows if row["with Ray"] == way))

    found = {name: middle("yes", name) / middle("no", name) for name in ("command s", "begin s")}
    return {
        name: round(value, 3)
        for name, value in {**found, "a step": middle("no", "steps/hour") / middle("yes", "steps/hour")}.items()
    }


def main() -> None:
    """Measure both ways in turns and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hardware", default="cpu")
    options = parser.parse_args()
    import ray

    import report

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a token would be written into the home folder
    os.environ["OMP_NUM_THREADS"] = "1"
    known = ray.init(
        address="local", num_cpus=PLACES, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.toml"
        recipe.write_text(RECIPE.format(steps=options.steps), encoding="utf-8")
        for number in range(2 * options.repeats + 1):  # the first one unpacks the tasks, and does not count
            address = known.address_info["gcs_address"] if number % 2 else ""
            shutil.rmtree(Path(folder) / "cache/stages", ignore_errors=True)  # else a finished run would be taken over
            row = measured(recipe, Path(folder) / str(number), Path(folder) / "cache", address)
            print(row if number else f"not counted: {row}", file=sys.stderr)
            rows += [row] if number else []
    ray.shutdown()
    if len({row["reward"] for row in rows}) > 1:
        print("rewards differ: the runs did not do the same", file=sys.stderr)
    found = ratios(rows)
    print(f"with Ray / without, of medians: {found}; goal: a step 1.1 at most")
    report.finish("cluster_overhead", rows, options.hardware, ratios=found)


if __name__ == "__main__":
    main()
