"""Experiment 5, speed: what guessing brings while the agent answers its tasks, before and after RL, by requests at once.

    python benchmarks/study_guessing.py runs/study-sprout/heads-0 runs/study-sprout/heads-1

Prompts are the openings of the tasks of the run's benchmark; ends are ignored, so that all write as much. `sft` and `rl` have the
heads as they were before that stage; `heads` and `heads-after` are the same models with heads that were trained a little more.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from inference import guessing
from report import finish

NEW = 64  # tokens, about a call


def openings(run: Path) -> list[list[int]]:
    """Return what the model is told in each task of the benchmark, in tokens."""
    traces = [json.loads(line) for line in (run / "taught" / "traces.jsonl").read_text().splitlines()]
    return list({trace["task"]: trace["nodes"][0]["tokens"] for trace in traces}.values())


def measured(run: Path, stage: str, temperature: float, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return rows of one model, with and without guessing."""
    found = guessing(run / stage / "model", sizes, openings(run), NEW, temperature)
    return [
        {
            "run": run.name,
            "stage": stage,
            "temperature": temperature,
            "requests": row["requests"],
            "plain": round(row["plain"]["tokens_per_second"], 1),
            "guessing": round(row["guessing"]["tokens_per_second"], 1),
            "ratio": round(row["ratio"], 3),
            "kept": round(row["kept_of_guessed"], 3),
            "tokens_a_round": round(row["tokens_a_round"], 2),
        }
        for row in found
    ]


def main() -> None:
    """Measure every model of every run."""
    gpu = torch.cuda.is_available()
    sizes = (1, 8, 32, 128) if gpu else (1, 4, 16)
    rows: list[dict[str, Any]] = []
    for run in map(Path, sys.argv[1:]):
        for stage in ("sft", "heads", "rl", "heads-after"):
            for temperature in (0.0, 1.0):
                rows += measured(run, stage, temperature, sizes)
    finish("study_guessing", rows, "h200" if gpu else "cpu")


if __name__ == "__main__":
    main()
