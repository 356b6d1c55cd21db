"""Experiment 5, speed: what guessing brings while the agent answers its tasks, before and after RL, by requests at once.

    python benchmarks/study_guessing.py runs/study-sprout/heads-0 runs/study-sprout/heads-1

Prompts are the openings of the tasks of the run's benchmark; ends are ignored, so that all write as much. `sft` and `rl` have the
heads as they were before that stage; `heads` and `heads-after` are the same models with heads that were trained a little more.

    python benchmarks/study_guessing.py runs/quickstart --stages sft rl --lookup 4

looks drafts up in what was read and written; no heads are needed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from inference import guessing, with_heads
from report import finish

NEW = 64  # tokens, about a call


def openings(run: Path) -> list[list[int]]:
    """Return what the model is told in each task of the benchmark, in tokens."""
    traces = [json.loads(line) for line in min(run.glob("*/traces.jsonl")).read_text().splitlines()]
    return list({trace["task"]: trace["nodes"][0]["tokens"] for trace in traces}.values())


def measured(run: Path, stage: str, sizes: tuple[int, ...], lookup: int) -> list[dict[str, Any]]:
    """Return rows of one model, with and without guessing, greedy and drawn."""
    engine, prompts = with_heads(run / stage / "model", max(sizes), lookup), openings(run)
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
        for temperature in (0.0, 1.0)
        for row in guessing(engine, sizes, prompts, NEW, temperature)
    ]


def main() -> None:
    """Measure the wanted models of every run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--stages", nargs="+", default=["sft", "heads", "rl", "heads-after"])
    parser.add_argument("--lookup", type=int, default=0, help="draft tokens that are looked up; 0: the heads' own")
    arguments = parser.parse_args()
    gpu = torch.cuda.is_available()
    sizes = (1, 8, 32, 128) if gpu else (1, 4, 16)
    rows = [
        row
        for run in arguments.runs
        for stage in arguments.stages
        for row in measured(run, stage, sizes, arguments.lookup)
    ]
    finish("study_lookup" if arguments.lookup else "study_guessing", rows, "h200" if gpu else "cpu")


if __name__ == "__main__":
    main()
