"""A run as curves: what each step was like, faint, and the mean of the steps around it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from etude.data.report_plot import COLOURS, STYLE
from etude.rl.course import count, smooth
from etude.rl.view import number, starting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    Row = Mapping[str, Any]

ACROSS = 3  # panels
LABELS = {
    "solved": "any episode", "best_of_group": "one of its group", "sampled_per_second": "sampled", "trained_per_second": "trained",
    "mismatch_mean": "mean", "mismatch_p99": "99th percentile", "ratio_min": "smallest", "ratio_mean": "mean",
    "ratio_max": "largest", "swap_seconds": "in all", "swap_paused": "engine paused",
    "queue_episodes": "episodes", "queue_open": "groups open", "queue_ready": "ready", "queue_training": "in training",
}  # fmt: skip
RED, SOFT = "#b3372b", "#e3e6e9"


@dataclass(frozen=True)
class Panel:
    """Curves over one axis. A name that ends with an underscore stands for all that begin so."""

    title: str
    names: tuple[str, ...]
    look: str = ""  # percent, log, counts (what a step has not is 0) or stacked: shares of all counts
    unit: str = ""


PICTURES = {
    "reward.png": (
        Panel("Reward", ("reward",)),
        Panel("Parts of the reward, weighted", ("reward_",)),
        Panel("Tasks solved by", ("solved", "best_of_group"), "percent"),
    ),
    "health.png": (
        Panel("Entropy of what was sampled", ("entropy",), unit="nats a token"),
        Panel("KL to the reference", ("kl",), unit="nats a token"),
        Panel("Log-probs, trainer against engine", ("mismatch_mean", "mismatch_p99"), "log", "nats a token"),
        Panel("Importance ratio", ("ratio_min", "ratio_mean", "ratio_max"), "log"),
        Panel("Left out by the correction", ("masked",), "percent", "of tokens"),
        Panel("Norm of the gradient", ("gradient",), "log"),
    ),
    "staleness.png": (
        Panel("Versions behind when trained on", ("staleness_",), "stacked", "of tokens"),
        Panel("Groups that closed", ("groups_",), "stacked"),
        Panel("Invalid episodes, by cause", ("invalid_",), "counts"),
    ),
    "speed.png": (
        Panel("Tokens a second", ("sampled_per_second", "trained_per_second")),
        Panel("Idle", ("idle_",), "percent", "of the time"),
        Panel("Under way", ("queue_episodes", "queue_open", "queue_ready", "queue_training")),
        Panel("New weights into the engine", ("swap_seconds", "swap_paused"), "log", "seconds"),
        Panel("Seconds a step", ("device_seconds",)),
        Panel("Tokens sampled an episode", ("episode_tokens",)),
    ),
}


def pictures(rows: Sequence[Row]) -> dict[str, list[Panel]]:
    """Return which panels can be drawn, by picture: those with at least one number."""
    found = PICTURES | {"behaviour.png": tuple(_behaviours(rows))}
    drawn = {file: [panel for panel in panels if curves(panel, rows)] for file, panels in found.items()}
    return {file: panels for file, panels in drawn.items() if panels}


def _behaviours(rows: Sequence[Row]) -> list[Panel]:
    names = {name: None for row in rows for name in row if name.startswith("behaviour_")}
    return [Panel(name.removeprefix("behaviour_").replace("_", " ").capitalize(), (name,)) for name in names]


def curves(panel: Panel, rows: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    """Return the points of every curve of a panel, by its label."""
    found: dict[str, list[tuple[int, float]]] = {}
    for wanted in panel.names:
        several = wanted.endswith("_")
        for row in rows:
            here = starting(row, wanted) if several else {wanted: row[wanted]} if wanted in row else {}
            for name, value in here.items():
                found.setdefault(LABELS.get(name, name.replace("_", " ")), []).append((row["step"], value))
    if panel.look in {"counts", "stacked"}:
        tables = {
            label: dict(points) for label, points in sorted(found.items(), key=lambda each: (len(each[0]), each[0]))
        }
        return {label: [(row["step"], here.get(row["step"], 0)) for row in rows] for label, here in tables.items()}
    return found


def draw(path: Path, panels: Sequence[Panel], rows: Sequence[Row]) -> None:
    """Write a picture as PNG."""
    down = math.ceil(len(panels) / ACROSS)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(13, 0.3 + 2.9 * down), layout="constrained")
        axes = figure.subplots(down, ACROSS, squeeze=False).flatten()
        for axis, panel in zip(axes, panels, strict=False):
            _panel(axis, panel, rows)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        figure.savefig(path, format="png", dpi=120, metadata={"Software": None})


def _panel(axis: Any, panel: Panel, rows: Sequence[Row]) -> None:
    found = curves(panel, rows)
    counts = {row["step"]: count(row, panel.names[0]) for row in rows}
    if panel.look == "stacked":
        _stacked(axis, found)
    else:
        for (label, points), colour in zip(found.items(), COLOURS * len(found), strict=False):
            _curve(axis, points, counts, label if len(found) > 1 else "", colour)
    _finish(axis, panel, rows)
    if len(found) > 1:
        look = {"frameon": False, "columnspacing": 1.0, "handlelength": 1.0}
        axis.legend(loc="upper left", bbox_to_anchor=(-0.03, -0.09), ncols=3 if len(found) in {3, 5, 6} else 4, **look)


def _curve(
    axis: Any, points: Sequence[tuple[int, float]], counts: Mapping[int, float], label: str, colour: str
) -> None:
    steps, values = zip(*points, strict=True)
    axis.plot(
        steps, values, color=colour, linewidth=0.8, alpha=0.35, marker="o" if len(points) < 40 else "", markersize=2.5
    )
    near = smooth([(value, counts[step]) for step, value in points], max(1, len(points) // 20))
    axis.plot(steps, near, color=colour, linewidth=1.8, label=label)


def _stacked(axis: Any, found: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    steps = [step for step, _ in next(iter(found.values()))]
    amounts = [[amount for _, amount in points] for points in found.values()]
    wholes = [sum(here) or 1 for here in zip(*amounts, strict=True)]
    reach = max(1, len(steps) // 20)
    shares = [smooth([(one / whole, 1) for one, whole in zip(each, wholes, strict=True)], reach) for each in amounts]
    axis.stackplot(steps, shares, labels=list(found), colors=COLOURS, linewidth=0)


def _finish(axis: Any, panel: Panel, rows: Sequence[Row]) -> None:
    axis.set_title(panel.title, loc="left")
    axis.set_ylabel(panel.unit)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axis.grid(axis="y", color=SOFT, linewidth=0.6)
    axis.set_axisbelow(True)
    _scale(axis, panel)
    for row in changes(rows):
        if panel.names[0].startswith(("reward", "behaviour")):
            axis.axvline(row["step"], color="black", linewidth=0.8, linestyle=":")
    for row in rows:
        if any(f"behaviour_{name}" in panel.names for name in row.get("flags", {})):
            axis.axvline(row["step"], color=RED, linewidth=1.2)


def _scale(axis: Any, panel: Panel) -> None:
    """Begin at 0 wherever that can be, or noise looks like news."""
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    if panel.look == "log":
        axis.set_yscale("log", nonpositive="mask")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
        axis.yaxis.set_minor_formatter(NullFormatter())
    elif axis.dataLim.ymin >= 0:
        least = 0.05 if panel.look == "percent" else 1e-9  # or nothing but zeros get ticks of a millionth
        axis.set_ylim(0, 1 if panel.look == "stacked" else max(1.08 * axis.dataLim.ymax, least))
    if panel.look in {"percent", "stacked"}:
        axis.yaxis.set_major_formatter(PercentFormatter(1))


def changes(rows: Sequence[Row]) -> list[Row]:
    """Return the first row of each new set of reward weights."""
    return [row for before, row in pairwise(rows) if starting(before, "weight_") != starting(row, "weight_")]
