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

COLOUR = "#3b6ea8"


def draw(results: Sequence[CandidateResult], path: Path) -> None:
    """Write the picture as PNG: bits per byte, state tracking, and writing speed, a bar a candidate."""
    order = ranked(results)
    panels = 3 if order[0].state else 2
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(4.0 * panels, 1.4 + 0.55 * len(order)), layout="constrained")
        axes = figure.subplots(1, panels, sharey=True)
        _bars(
            axes[0],
            order,
            [r.bits.bits_per_byte for r in order],
            "bits per byte\n(lower is better)",
            [r.bits.interval for r in order],
        )
        if order[0].state:
            states = [r.state for r in order if r.state]
            values = [state.distance_per_character for state in states]
            _bars(
                axes[1],
                order,
                values,
                "state: edits per character\n(lower is better; dashed: copying)",
                [state.interval for state in states],
            )
            axes[1].axvline(states[0].copying_per_character, color="#d08020", linestyle="--", linewidth=1.5)
        speeds = [r.speed["decode_single"] for r in order]
        _bars(axes[-1], order, speeds, "writing one sequence, tokens/s\n(higher is better)", [None] * len(order))
        axes[0].invert_yaxis()
        figure.savefig(path, format="png", dpi=150, metadata={"Software": "etude"})


def _bars(
    axis: Any,
    order: Sequence[CandidateResult],
    values: list[float],
    title: str,
    intervals: list[tuple[float, float] | None],
) -> None:
    places = list(range(len(order)))
    axis.barh(places, values, color=COLOUR, height=0.6)
    for place, value, interval in zip(places, values, intervals, strict=True):
        if interval:
            axis.plot(interval, [place, place], color="black", linewidth=1.2)
        axis.annotate(f" {value:.3g}", (max(value, interval[1] if interval else value), place), va="center")
    axis.set_yticks(places, [f"{result.name}\n{human(result.parameters)}" for result in order])
    axis.set_title(title, fontsize=9, loc="left")
    axis.margins(x=0.18)
    axis.set_xlim(left=0)
