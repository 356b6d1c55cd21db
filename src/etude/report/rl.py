"""The report of an RL run, finished or going on: one page with its curves, from metrics.jsonl alone.

A curve shows each step faintly, and the mean of the steps around it.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from etude.errors import UserError
from etude.files import read_json
from etude.jsonl import read_rows
from etude.progress import duration
from etude.report.page import COLOURS, RED, Page, Picture, Table, drawing, label, write_page
from etude.rl.metrics import ENOUGH, added, count, ends, smooth, starting
from etude.rl.monitor import ABOUT
from etude.rl.view import number, percent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Row = Mapping[str, Any]
    Points = list[tuple[int, float]]  # step, value

METRICS, PAGE = "metrics.jsonl", "report.html"
TITLE = "what did this agent learn, and what did it cost?"
SHARES = ("solved", "best_of_group", "masked", "idle_", "held_back")  # shown as percentages
SPEEDS = ("device_seconds", "episode_seconds", "sampled_per_second", "trained_per_second", "idle_", "held_back", "seconds_",
          "at_once_", "swap_")  # fmt: skip
LISTED = 30  # lines of samples
NOT_MEASURED = f"as that takes {ENOUGH} episodes at the beginning and as many in other steps at the end"
ACROSS = 3  # panels
SLOW = 1.3  # times as long: slow tasks, which are mostly hard ones, are trained on less than they are tried


@dataclass(frozen=True)
class Panel:
    """Curves over one axis (rl.toml). A name that ends with an underscore stands for all that begin so."""

    title: str
    names: Sequence[str]
    look: str = ""  # percent, log, counts (what a step has not is 0) or stacked: shares of all counts
    unit: str = ""


TABLES = tomllib.loads(Path(__file__).with_name("rl.toml").read_text(encoding="utf-8"))
LABELS: dict[str, str] = TABLES["labels"]  # of curves; others have their own names
PICTURES = {each["file"]: [Panel(**panel) for panel in each["panels"]] for each in TABLES["picture"]}


def steps_of(folder: Path) -> list[Row]:
    """Return the rows of a run's steps; the run may be going on."""
    try:
        rows = read_rows(folder / METRICS, "train/")
    except FileNotFoundError:
        raise UserError(f"{folder} has no {METRICS}: it is not the folder of an rl stage; give runs/NAME") from None
    if not any("reward" in row for row in rows):
        why = "its steps are not those of an rl stage" if rows else "no step is trained yet; try again later"
        raise UserError(f"{folder}: {why}")
    return sorted(rows, key=lambda row: row["step"])


def write_report(folder: Path, target: Path, stage: str = "") -> list[str]:
    """Write report.md, report.html and their pictures; return the first lines."""
    rows = steps_of(folder)
    drawn = pictures(rows)
    for file, panels in drawn.items():
        draw(target / file, panels, rows)
    lines = verdict(rows)
    titled = f"{stage or folder.absolute().name}: {TITLE}"
    write_page(target, titled, _page(rows, lines, list(drawn), _samples(folder)), wide=True, in_run=bool(stage))
    return lines


def verdict(rows: Sequence[Row]) -> list[str]:
    """Return the results of the run, a fact a line."""
    seconds, episodes = (sum(row.get(name, 0) for row in rows) for name in ("device_seconds", "episodes"))
    lines = [f"{len(rows):,} step{'s'[: len(rows) != 1]}, {episodes:,} episodes, {duration(seconds)}"]
    for name in ("reward", "solved", "best_of_group"):
        came = f"change not measured, {NOT_MEASURED}"
        if tenths := ends(rows, name):
            first, last = (written(name, value) for value in tenths)
            came = f"from {first} in the first tenth of the episodes ({ENOUGH} at least) to {last} in the last"
        lines.append(f"{_words(name)}: {came}")
    groups, invalid = added(rows, "groups_"), added(rows, "invalid_")
    if flat := groups["flat"]:
        share = percent(flat / groups.total())
        lines.append(f"{share} of the groups were flat: all rewards alike, nothing to learn from")
    lines += _age(rows, groups)
    if total := invalid.total():
        most = _words(invalid.most_common(1)[0][0])
        lines.append(f"{total:,} invalid episode{'s'[: total != 1]}, most often {most}: excluded, not scored")
    return lines + flags(rows)


def _age(rows: Sequence[Row], groups: Mapping[str, int]) -> list[str]:
    """Return how many groups were too old for a step, and whether they were those of slow tasks."""
    lines = []
    if groups["stale"] and (trained := [row["seconds_trained"] for row in rows if "seconds_trained" in row]):
        late = sum(row["seconds_stale"] * row["groups_stale"] for row in rows if "seconds_stale" in row)
        share = percent(groups["stale"] / (groups["ready"] or 1))
        times = late / groups["stale"] / max(fmean(trained), 1e-9)
        advice = '; late = "wait" holds sampling back instead' if times > SLOW else ""
        said = f"{share} of the ready groups came too late for a step; their episodes took {times:.1f} times as long"
        lines.append(f"{said}{advice}")
    if held := fmean(row.get("held_back", 0.0) for row in rows):
        lines.append(f"sampling was held back for {percent(held)} of the time, so that no group came too late")
    return lines


def _page(rows: Sequence[Row], lines: Sequence[str], drawn: Sequence[str], samples: Table) -> Page:
    described = [Picture(each["file"], each["about"]) for each in TABLES["picture"]]
    shown = {picture.file: [picture] * (picture.file in drawn) for picture in described}
    weights = [(row["step"], *map(number, starting(row, "weight_").values())) for row in [rows[0], *changes(rows)]]
    return {
        "In short": [*(f"{line}." for line in lines), *shown["reward.png"]],
        "Reward": [
            "Of episodes that ended while a step was trained, so of the newest policy. The parts add up to the reward. A dotted line: "
            "the weights of the parts were changed.", _table(rows, ("reward", "reward_", "part_", "solved", "best_of_group")),
            Table(("from step", *(f">weight of {part}" for part in starting(rows[0], "weight_"))), weights)],
        "Is it healthy?": [
            "Entropy that falls to 0 means that nothing new is tried. The mismatch is between the log-probs of trainer and engine for "
            "tokens of the newest weights: it should be small from the start, and stay so.", *shown["health.png"],
            _table(rows, ("entropy", "kl", "teacher_", "mismatch_", "ratio_", "masked", "gradient", "loss", "advantage"))],
        "What became of groups and episodes": [
            "Ready groups are trained on. Flat ones have nothing to teach; void ones have too few valid episodes; stale ones were too "
            "old, and their tasks went back. Invalid episodes are the machinery's failures; those tried again count each time.",
            *shown["staleness.png"],
            Table(("what", ">groups"), list(added(rows, "groups_").items())),
            Table(("invalid, by cause", ">episodes"), [(_words(name), count) for name, count in added(rows, "invalid_").items()])],
        "Behaviour": [*([f"{line}." for line in flags(rows)] or ["No flag was raised."]), *shown["behaviour.png"],
                      _table(rows, ("behaviour_", "episode_tokens"))],
        "Speed": [*shown["speed.png"], _table(rows, SPEEDS)],
        "Samples": [f"The best, worst and strangest episodes of the last {LISTED // 3} steps: etude trace show FILE.", samples],
    }  # fmt: skip


def flags(rows: Sequence[Row]) -> list[str]:
    """Return the flags that monitors raised."""
    return [line for row in rows for line in row.get("flags", {}).values()]


def _table(rows: Sequence[Row], wanted: Sequence[str]) -> Table:
    """Return numbers at the beginning, at the end and their extremes; a name that ends with an underscore stands for many."""
    known = {name: None for row in rows for name in row}
    names = [name for want in wanted for name in known if name == want or (want[-1] == "_" and name.startswith(want))]
    lines = []
    for name in names:
        values = [row[name] for row in rows if name in row]
        shown = [written(name, value) for value in (*(ends(rows, name) or ()), min(values), max(values))]
        lines.append((_words(name), *[""] * (4 - len(shown)), *shown))
    return Table(("", ">first tenth", ">last tenth", ">smallest", ">largest"), lines)


def written(name: str, value: float) -> str:
    """Write a number as what it measures asks for."""
    return percent(value) if name.startswith(SHARES) else number(value)


def _words(name: str) -> str:
    return name.replace("_", " ").replace("part ", "unweighted ").replace("behaviour ", "")


def _samples(folder: Path) -> Table:
    """Return the sampled episodes of the last steps."""
    lines = []
    for place in sorted((folder / "samples").glob("*/" + ABOUT))[-LISTED // 3 :][::-1]:
        for name, about in read_json(place).items():
            file = f"samples/{place.parent.name}/{name}.json"
            lines.append((file, about["outcome"], number(about["reward"]), about["why"]))
    return Table(("file", "outcome", ">reward", "why"), lines)


def pictures(rows: Sequence[Row]) -> dict[str, list[Panel]]:
    """Return which panels can be drawn, by picture: those with at least one number."""
    behaviours = {name: None for row in rows for name in row if name.startswith("behaviour_")}
    watched = [Panel(_words(name).capitalize(), (name,)) for name in behaviours]
    panels = {**PICTURES, "behaviour.png": watched}
    drawn = {file: [panel for panel in several if curves(panel, rows)] for file, several in panels.items()}
    return {file: several for file, several in drawn.items() if several}


def curves(panel: Panel, rows: Sequence[Row]) -> dict[str, Points]:
    """Return the points of every curve of a panel, by its label."""
    points: dict[str, Points] = {}
    for wanted in panel.names:
        for row in rows:
            here = starting(row, wanted) if wanted[-1] == "_" else {wanted: row[wanted]} if wanted in row else {}
            for name, value in here.items():
                points.setdefault(LABELS.get(name, name.replace("_", " ")), []).append((row["step"], value))
    if panel.look in {"counts", "stacked"}:
        order = sorted(points, key=lambda name: (len(name), name))
        steps = {name: dict(points[name]) for name in order}
        return {name: [(row["step"], known.get(row["step"], 0)) for row in rows] for name, known in steps.items()}
    return points


def draw(path: Path, panels: Sequence[Panel], rows: Sequence[Row]) -> None:
    down = math.ceil(len(panels) / ACROSS)
    with drawing(path, 13, 0.3 + 2.9 * down, dpi=120) as figure:
        axes = figure.subplots(down, ACROSS, squeeze=False).flatten()
        for axis, panel in zip(axes, panels, strict=False):
            _panel(axis, panel, rows)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)


def _panel(axis: Any, panel: Panel, rows: Sequence[Row]) -> None:
    several = curves(panel, rows)
    counts = {row["step"]: count(row, panel.names[0]) for row in rows}
    if panel.look == "stacked":
        _stacked(axis, several)
    else:
        for (name, points), colour in zip(several.items(), COLOURS * len(several), strict=False):
            _curve(axis, points, counts, name if len(several) > 1 else "", colour)
    _finish(axis, panel, rows)
    if len(several) > 1:
        look = {"frameon": False, "columnspacing": 1.0, "handlelength": 1.0}
        columns = 3 if len(several) in {3, 5, 6} else 4
        axis.legend(loc="upper left", bbox_to_anchor=(-0.03, -0.09), ncols=columns, **look)


def _curve(axis: Any, points: Points, counts: Mapping[int, float], name: str, colour: str) -> None:
    steps, values = zip(*points, strict=True)
    dots = "o" if len(points) < 40 else ""
    axis.plot(steps, values, color=colour, linewidth=0.8, alpha=0.35, marker=dots, markersize=2.5)
    near = smooth([(value, counts[step]) for step, value in points], max(1, len(points) // 20))
    axis.plot(steps, near, color=colour, linewidth=1.8, label=name)


def _stacked(axis: Any, several: Mapping[str, Points]) -> None:
    steps = [step for step, _ in next(iter(several.values()))]
    amounts = [[amount for _, amount in points] for points in several.values()]
    wholes = [sum(here) or 1 for here in zip(*amounts, strict=True)]
    reach = max(1, len(steps) // 20)
    shares = [smooth([(one / whole, 1) for one, whole in zip(each, wholes, strict=True)], reach) for each in amounts]
    axis.stackplot(steps, shares, labels=list(several), colors=COLOURS, linewidth=0)


def _finish(axis: Any, panel: Panel, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import MaxNLocator

    label(axis, panel.title, up=panel.unit)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    _scale(axis, panel)
    for row in changes(rows):
        if panel.names[0].startswith(("reward", "behaviour")):
            axis.axvline(row["step"], color="black", linewidth=0.8, linestyle=":")
    for row in rows:
        if any(f"behaviour_{name}" in panel.names for name in row.get("flags", {})):
            axis.axvline(row["step"], color=RED, linewidth=1.2)


def _scale(axis: Any, panel: Panel) -> None:
    """Begin at 0 wherever that can be, or noise looks like news."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

    if panel.look == "log":
        axis.set_yscale("log", nonpositive="mask")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_minor_formatter(NullFormatter())
    elif axis.dataLim.ymin >= 0:
        most = 1.08 * axis.dataLim.ymax or 1.0  # nothing but zeros: a line at the bottom of a plain axis
        axis.set_ylim(0, 1 if panel.look == "stacked" else max(most, 0.05) if panel.look == "percent" else most)
    shares = panel.look in {"percent", "stacked"}
    axis.yaxis.set_major_formatter(PercentFormatter(1) if shares else FuncFormatter(lambda value, _: number(value)))


def changes(rows: Sequence[Row]) -> list[Row]:
    """Return the first row of each new set of reward weights."""
    return [row for before, row in pairwise(rows) if starting(before, "weight_") != starting(row, "weight_")]
