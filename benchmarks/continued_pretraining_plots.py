"""Draw what benchmarks/continued_pretraining.py measured: four questions, four panels.

python benchmarks/continued_pretraining_plots.py benchmarks/results/continued_pretraining-h200.json docs/continued-pretraining.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

COLOURS = {"rust": "#b5532a", "code": "#3b6ea8", "docs": "#6a9a3b"}
LABELS = {"rust": "Rust, the new domain", "code": "Python code", "docs": "documentation"}
MILLION = 10**6


def changes(axis: Any, places: list[float], entries: list[dict[str, Any]], ticks: list[str], title: str) -> None:
    """Draw each domain's change over a setting, with the interval over seeds."""
    for domain, colour in COLOURS.items():
        means = [entry[domain]["mean"] for entry in entries]
        margins = [entry[domain]["margin"] for entry in entries]
        axis.errorbar(places, means, margins, color=colour, marker="o", markersize=4, capsize=3, label=LABELS[domain])
    axis.axhline(0, color="black", linewidth=0.7)
    axis.set_xticks(places, ticks)
    axis.set_title(title, fontsize=9, loc="left")


def tokens(axis: Any, found: dict[str, Any]) -> None:
    """Draw the changes over log tokens, and the line fitted to the new domain's."""
    entries = found["tokens"]
    millions = [entry["tokens"] / MILLION for entry in entries]
    places = [float(place) for place in np.log2(millions)]
    changes(axis, places, entries, [f"{each:g}M" for each in millions], "tokens trained on (5% replay)")
    slope = found["line"]["per_doubling"]
    mean = np.mean([entry["rust"]["mean"] for entry in entries])
    fitted = mean + slope * (np.array(places) - np.mean(places))
    axis.plot(places, fitted, color="grey", linestyle="--", linewidth=1, label=f"line: {slope:+.3f} a doubling")


def mixing(axis: Any, found: dict[str, Any]) -> None:
    """Draw where early and late mixing end, in bits per byte."""
    for place, (name, shade) in enumerate({"early": 1.0, "late": 0.45}.items()):
        for index, (domain, colour) in enumerate(COLOURS.items()):
            entry = found["mixing"][name][domain]
            where = index + (place - 0.5) * 0.36
            axis.bar(where, entry["mean"], 0.34, yerr=entry["margin"], color=colour, alpha=shade, capsize=3)
            axis.annotate(name, (where, 0.02), ha="center", fontsize=8, color="white" if shade == 1 else "black")
    axis.set_xticks(range(len(COLOURS)), list(COLOURS))
    total = found["mixing"]["total_tokens"] / MILLION
    axis.set_title(f"from random weights, {total:g}M tokens, 5% of them Rust: bits per byte", fontsize=9, loc="left")


def main() -> None:
    """Read the measurements, write the picture."""
    found = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10, 7), layout="constrained")
        (replay, rewarm), (over_tokens, early) = figure.subplots(2, 2)
        shares = [entry["share"] for entry in found["replay"]]
        changes(replay, shares, found["replay"], [f"{each:.0%}" for each in shares], "share of replay (8M tokens)")
        peaks = [entry["of_peak"] for entry in found["rewarm"]]
        ticks = [f"{each:.0%}" for each in peaks]
        changes(rewarm, [float(place) for place in np.log(peaks)], found["rewarm"], ticks,
                "peak, of pretraining's (8M tokens, 5% replay)")  # fmt: skip
        tokens(over_tokens, found)
        mixing(early, found)
        for axis in (replay, over_tokens):
            axis.set_ylabel("change in bits per byte")
        replay.legend(frameon=False, fontsize=8)
        over_tokens.legend(frameon=False, fontsize=8)
        figure.savefig(sys.argv[2], format="png", dpi=110, metadata={"Software": "etude"})


if __name__ == "__main__":
    main()
