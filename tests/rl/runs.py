"""A made-up run, measured by the real StepMetrics: what views and reports are tested with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etude.jsonl import MetricsLog
from etude.rl.exchange import Report
from etude.rl.ledger import Closed, Failed, Finished, Trained, Weighted
from etude.rl.metrics import StepMetrics

WEIGHTS = {"outcome": 1.0, "length": 0.5}


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def finished(group: int, episode: int, *, passed: bool, length: float = -0.25, **behaviour: float) -> Finished:
    """Return an episode of 10 tokens, 2 turns and 3 seconds."""
    parts = {"outcome": float(passed), "length": length}
    return Finished(group, episode, "pass" if passed else "fail", parts, behaviour, 0, 1, 10, 2, 3.0)


def rows(steps: int) -> list[dict[str, Any]]:
    """Return the rows of a run whose second half solves twice as much; a cause of failure in step 2, a flag in step 3."""
    clock, made = Clock(), []
    step_metrics = StepMetrics(clock)
    for step in range(1, steps + 1):
        step_metrics.apply(Weighted({**WEIGHTS, "length": 0.5 if 2 * step <= steps else 1.0}, step))
        for episode in range(4):
            step_metrics.apply(
                finished(step, episode, passed=episode < (1 if 2 * step <= steps else 2), calls=step + episode)
            )
        if step == 2:
            step_metrics.apply(Failed(step, 4, "sandbox did not start: <b>7</b>", final=True))
        step_metrics.apply(Closed(step, "flat" if step == 1 else "ready"))
        clock.now += 2.0
        told = {
            "tokens": 100.0,
            "flops": 1e9,
            "seconds": 1.0,
            "entropy": 1 / step,
            "staleness_0": 0.75,
            "staleness_1": 0.25,
        }
        step_metrics.trained(Report(step, step, told))
        step_metrics.swapped({"bytes": 10.0, "seconds": 0.5, "paused": 0.02})
        row = step_metrics.row(step, {"ready": 1})
        if step == 3:
            row["flags"] = {"calls": "step 3: calls is 4.5, for 3 steps above 4 (usual in this run: 1)"}
        made.append(row)
        step_metrics.apply(Trained(step, step))
    return made


def write(folder: Path, steps: int) -> Path:
    """Write the metrics of such a run, with a session's row before them as the runner writes it, and return the folder."""
    with MetricsLog(folder / "metrics.jsonl") as log:
        log.put("etude/session/0001", command="etude run r.toml")
        for row in rows(steps):
            log.put(f"train/{row['step']:08d}", **row)
    return folder
