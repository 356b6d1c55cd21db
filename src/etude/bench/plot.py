"""A comparison as one picture: how good, how fast, how large."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

from etude.bench.report import human, ranked

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from etude.bench.compare import CandidateResult

    Interval = tuple[float, float] | None

COLOUR = "#3b6ea8"


def draw(results: Sequence[CandidateResult], path: Path) -> None:
    """Write the picture as PNG: bits per byte, state tracking, and writing speed, a bar a candidate."""
    order = ranked(results)
    bits = [(result.bits.bits_per_byte, result.bits.interval) for result in order]
    states = [(state.distance_per_character, state.interval) for result in order if (state := result.state)]
    speeds = [(result.speed["decode_single"], None) for result in order]
    panels = 3 if states else 2
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(4.0 * panels, 1.4 + 0.55 * len(order)), layout="constrained")
        axes = figure.subplots(1, panels, sharey=True)
        _bars(axes[0], order, bits, "bits per byte\n(lower is better)")
        if order[0].state:
            _bars(axes[1], order, states, "state: edits per character\n(lower is better; dashed: copying)")
            axes[1].axvline(order[0].state.copying_per_character, color="#d08020", linestyle="--", linewidth=1.5)
        _bars(axes[-1], order, speeds, "writing one sequence, tokens/s\n(higher is better)")
        axes[0].invert_yaxis()
        figure.savefig(path, format="png", dpi=150, metadata={"Software": "etude"})


def _bars(axis: Any, order: Sequence[CandidateResult], measured: Sequence[tuple[float, Interval]], title: str) -> None:
    places = list(range(len(order)))
    axis.barh(places, [value for value, _ in measured], color=COLOUR, height=0.6)
    for place, (value, interval) in zip(places, measured, strict=True):
        if interval:
            axis.plot(interval, [place, place], color="black", linewidth=1.2)
        axis.annotate(f" {value:.3g}", (max(value, interval[1] if interval else value), place), va="center")
    axis.set_yticks(places, [f"{result.name}\n{human(result.parameters)}" for result in order])
    axis.set_title(title, fontsize=9, loc="left")
    axis.margins(x=0.18)
    axis.set_xlim(left=0)
