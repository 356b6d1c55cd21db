"""The report's pictures: score against tokens, scores by group, and how long trials are."""

from __future__ import annotations

import textwrap
from statistics import median
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from etude.bench.report import human
from etude.data.report_plot import COLOURS, STYLE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from etude.bench.agent.results import Trial
    from etude.bench.agent.statistics import Estimate

    Scores = Mapping[str, Estimate | None]  # by model

MARKERS = "osD^vPX*"
SOFT = "#c3c9d0"
BARS = 30


def save(path: Path, draw: Callable[..., Figure], *data: Any) -> None:
    """Write a picture as PNG."""
    with mpl.rc_context(STYLE):
        draw(*data).savefig(path, format="png", dpi=150, metadata={"Software": None})


def wrapped(name: str, line: int = 26, lines: int = 2) -> str:
    """Return a name in a few lines; what is too long is cut in its middle, since versions stand at the end."""
    most = line * lines - lines
    name = name if len(name) <= most else f"{name[: most // 2]}…{name[-(most // 2) :]}"
    return "\n".join(textwrap.wrap(name, line))


def score_against_tokens(scores: Scores, tokens: Mapping[str, float]) -> Figure:
    """Draw what a score takes; the line joins the models that no other beats in both."""
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axis: Any = figure.subplots()
    known = {model: score for model, score in scores.items() if score}
    points = [(max(tokens[model], 1), 100 * score.value) for model, score in known.items()]
    for place, ((across, up), (model, score)) in enumerate(zip(points, known.items(), strict=True)):
        look = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)], "linestyle": ""}
        spread = [[up - 100 * score.low], [100 * score.high - up]]
        axis.errorbar(across, up, spread, label=wrapped(model), markersize=7, capsize=3, clip_on=False, **look)
    axis.plot(
        [tokens for tokens, _ in frontier(points)], [score for _, score in frontier(points)], color=SOFT, zorder=0
    )
    axis.set_ylim(0, max([5.0, *(108 * score.high for score in known.values())]))
    axis.margins(x=0.15)
    _in_tokens(axis)
    axis.set_title("Score against tokens: up and left is better", loc="left")
    axis.set_xlabel("tokens written in a trial, median")
    axis.set_ylabel("avg@k, %")
    axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, labelspacing=0.9)
    return figure


def _in_tokens(axis: Any) -> None:
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda count, _: human(count)))


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other one beats with fewer tokens and at least the score, from left to right."""
    best: list[tuple[float, float]] = []
    for tokens, score in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or score > best[-1][1]:
            best.append((tokens, score))
    return best


def by_group(groups: Mapping[str, Scores], title: str) -> Figure:
    """Draw the scores of each group with their intervals as a table of colours, the easiest group first: there may be many."""
    models = list(next(iter(groups.values())))
    order = sorted(groups.items(), key=lambda group: -sum(score.value for score in group[1].values() if score))
    figure = Figure(figsize=(max(10, 2.8 + 1.3 * len(models)), 1.5 + 0.29 * len(groups)), layout="constrained")
    axis: Any = figure.subplots()
    axis.imshow(
        [[score.value if score else 0 for score in row.values()] for _, row in order],
        "YlGnBu",
        vmin=0,
        vmax=1,
        aspect="auto",
    )
    for down, (_, row) in enumerate(order):
        for across, score in enumerate(row.values()):
            text = f"{100 * score.value:.0f}  [{100 * score.low:.0f}–{100 * score.high:.0f}]" if score else "–"
            colour = "white" if score and score.value > 0.55 else "black"
            axis.text(across, down, text, ha="center", va="center", color=colour, fontsize=8.5)
    tasks = [max((score.tasks for score in row.values() if score), default=0) for _, row in order]
    axis.set_yticks(
        range(len(order)), [f"{wrapped(name, 30, 1)}  ({count})" for (name, _), count in zip(order, tasks, strict=True)]
    )
    axis.set_xticks(range(len(models)), [wrapped(model, 18, 3) for model in models], fontsize=8.5)
    axis.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axis.spines[:].set_visible(False)
    figure.suptitle(f"{title}: avg@k in % [95% interval]  (tasks)", fontsize=10, fontweight="bold", x=0.02, ha="left")
    return figure


def histograms(valid: Mapping[str, Sequence[Trial]]) -> Figure:
    """Draw how many turns and tokens trials take, a line a model, fails upon passes."""
    figure = Figure(figsize=(10, 1.3 + 1.15 * len(valid)), layout="constrained")
    axes = figure.subplots(len(valid), 2, sharex="col", squeeze=False)
    most = max((trial.turns for trials in valid.values() for trial in trials), default=1)
    tokens = [max(trial.tokens.get("written", 0), 1) for trials in valid.values() for trial in trials] or [1]
    steps = np.arange(0.5, most + 1 + -(-most // BARS), -(-most // BARS))
    for (model, trials), (left, right) in zip(valid.items(), axes, strict=True):
        _histogram(left, [trial.turns for trial in trials], trials, steps)
        written = [max(trial.tokens.get("written", 0), 1) for trial in trials]
        _histogram(right, written, trials, np.geomspace(min(tokens) * 0.95, max(tokens) * 1.05, BARS))
        _in_tokens(right)
        left.set_ylabel(wrapped(model), rotation=0, ha="right", va="center")
    axes[0, 0].set_title("Turns of a trial", loc="left")
    axes[0, 1].set_title("Tokens written in a trial", loc="left")
    axes[0, 1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.05), frameon=False)
    return figure


def _histogram(axis: Any, counts: Sequence[int], trials: Sequence[Trial], edges: Any) -> None:
    parts = [[n for n, trial in zip(counts, trials, strict=True) if trial.outcome == kind] for kind in ("pass", "fail")]
    axis.hist(parts, edges, stacked=True, color=[COLOURS[2], SOFT], label=["pass", "fail"])
    axis.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    if counts:
        axis.axvline(median(counts), color="black", linewidth=1.2, label="median")
