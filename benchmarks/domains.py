"""What two domains that are not code gave and took: one table from finished runs of recipes/examples/finance.toml and medicine.toml.

    python benchmarks/domains.py runs/finance runs/medicine        writes results/domains-cpu.json

Nothing is measured here. Of each model: accuracy on the held-out questions with its interval, by topic, and bits a byte of Python no
model has seen, beside those of sprout on the same bytes. A stage that a run has not reached is left out, and said to be.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import report
from etude.bench.base_comparison import difference
from etude.bench.trials import read_results
from etude.lineage.record import RECORD_FILE, load_record
from etude.report.benchmark import Scored
from etude.run.stages.compare import load_results

BENCHES = {"taught": "after cpt and sft", "after": "after rl", "merged": "merged with sprout"}
COMPARED = {"kept": "", "recovered": "merged with sprout"}  # the first: whatever came last


def shares(score: Any) -> list[float] | None:
    return [round(value, 4) for value in score[:3]] if score else None


def accuracies(run: Path) -> dict[str, dict[str, Any]]:
    """Return accuracy with its interval, and by topic, by model."""
    found: dict[str, dict[str, Any]] = {}
    for stage, name in BENCHES.items():
        if not (run / stage / RECORD_FILE).is_file():
            print(f"{run}: {stage} is not finished; left out")
            continue
        scored = Scored(read_results(run / stage))
        for model, score in scored.scores.items():
            topics = {topic: shares(by[model]) for topic, by in scored.by["category"].items()}
            made = len(scored.valid[model])
            shown = {
                "accuracy": shares(score),
                "by_topic": topics,
                "trials": made,
                "questions": score.tasks if score else 0,
            }
            found["sprout" if model == "sprout" else name] = shown
    return found


def forgotten(run: Path) -> dict[str, dict[str, Any]]:
    """Return bits a byte of Python by model, and how much more they are than sprout's on the same files, with the interval."""
    found: dict[str, dict[str, Any]] = {}
    last = BENCHES["after" if (run / "rl" / RECORD_FILE).is_file() else "taught"]
    for stage, name in COMPARED.items():
        if (run / stage / RECORD_FILE).is_file():
            results = {each.name: each for each in load_results(run / stage)}
            base = results.pop("sprout")
            found["sprout"] = {"python_bits": base.bits.bits_per_byte}
            for each in results.values():
                more, interval = difference(each.bits, base.bits)
                found[name or last] = {"python_bits": each.bits.bits_per_byte, "forgotten": more, "interval": interval}
    return found


def row(run: Path, model: str, accurate: dict[str, Any], lost: dict[str, Any]) -> dict[str, Any]:
    """Return one line of the table; none where a stage was not run."""
    known, bits = accurate.get(model, {}), lost.get(model, {})
    return {"domain": run.name, "model": model, "accuracy": known.get("accuracy"),
            **{name: round(bits[name], 4) if name in bits else None for name in ("python_bits", "forgotten")}}  # fmt: skip


def main() -> None:
    """Read the runs and keep the table."""
    rows, runs = [], {}
    for run in map(Path, sys.argv[1:]):
        accurate, lost = accuracies(run), forgotten(run)
        rows += [
            row(run, model, accurate, lost)
            for model in ("sprout", *BENCHES.values())
            if model in accurate or model in lost
        ]
        records = {place.parent.name: load_record(place.parent) for place in sorted(run.glob(f"*/{RECORD_FILE}"))}
        stages = {
            name: {"summary": each.summary, "compute": each.compute.model_dump()} for name, each in records.items()
        }
        recipe = (run / "recipe.toml").read_text(encoding="utf-8")
        runs[run.name] = {"accuracies": accurate, "forgotten": lost, "stages": stages, "recipe": recipe}
    report.finish("domains", rows, "cpu", runs=runs)


if __name__ == "__main__":
    main()
