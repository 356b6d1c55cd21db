"""The report of a run, finished or going on: one page, from metrics.jsonl alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from etude.bench.agent.page import Picture, html_page, markdown
from etude.data.report import Table
from etude.errors import UserError
from etude.files import read_json, whole_file, write_text
from etude.jsonl import read_rows
from etude.progress import duration
from etude.rl.course import ends
from etude.rl.figures import changes, draw, pictures
from etude.rl.samples import ABOUT
from etude.rl.view import added, number, percent, starting

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from etude.bench.agent.page import Page

    Row = Mapping[str, Any]

METRICS, PAGE = "metrics.jsonl", "report.html"
TITLE = "What did this agent learn, and what did it cost?"
ABOUT_PICTURES = {
    "reward.png": "Reward, its parts, and tasks solved, by step",
    "health.png": "Entropy, KL, mismatch of log-probs, importance ratio, gradient",
    "staleness.png": "How old trained tokens were; what became of groups; invalid episodes",
    "speed.png": "Tokens a second, idle time, queues, updates of the engine's weights",
    "behaviour.png": "Behaviours that monitors watch; a red line where one raised a flag",
}
SHARES = ("solved", "best_of_group", "masked", "idle_")  # shown as percentages
SPEEDS = ("device_seconds", "episode_seconds", "sampled_per_second", "trained_per_second", "idle_", "at_once_", "swap_")
LISTED = 30  # lines of samples
PICTURED = Picture("reward.png", ABOUT_PICTURES["reward.png"])


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


def write_report(folder: Path, target: Path) -> list[str]:
    """Write report.md, report.html and their pictures; return the first lines."""
    rows = steps_of(folder)
    drawn: dict[str, bytes] = {}
    for file, panels in pictures(rows).items():
        with whole_file(target / file) as beside:
            draw(beside, panels, rows)
        drawn[file] = (target / file).read_bytes()
    said = verdict(rows)
    page = _page(rows, said, list(drawn), _samples(folder))
    write_text(target / "report.md", markdown(TITLE, page))
    write_text(target / PAGE, html_page(TITLE, page, PICTURED, drawn))
    return said


def verdict(rows: Sequence[Row]) -> list[str]:
    """Return what came of it, a fact a line."""
    seconds, episodes = (sum(row.get(name, 0) for row in rows) for name in ("device_seconds", "episodes"))
    lines = [f"{len(rows):,} step{'s'[: len(rows) != 1]}, {episodes:,} episodes, {duration(seconds)}"]
    for name in ("reward", "solved", "best_of_group"):
        if found := ends(rows, name):
            first, last = map(shower(name), found)
            lines.append(f"{_words(name)}: from {first} in the first tenth of the episodes to {last} in the last")
    groups, invalid = added(rows, "groups_"), added(rows, "invalid_")
    if flat := groups["flat"]:
        lines.append(
            f"{percent(flat / groups.total())} of the groups were flat: all rewards alike, nothing to learn from"
        )
    if invalid:
        most = _words(invalid.most_common(1)[0][0])
        lines.append(
            f"{invalid.total():,} invalid episode{'s'[: invalid.total() != 1]}, most often {most}: excluded, not scored"
        )
    return lines + flags(rows)


def _page(rows: Sequence[Row], said: Sequence[str], drawn: Sequence[str], samples: Table) -> Page:
    shown = {file: [Picture(file, ABOUT_PICTURES[file])] if file in drawn else [] for file in ABOUT_PICTURES}
    weights = [(row["step"], *map(number, starting(row, "weight_").values())) for row in [rows[0], *changes(rows)]]
    return {
        "In short": [*(f"{line}." for line in said), PICTURED],
        "Reward": [
            "Of episodes that ended while a step was trained, so of the newest policy. The parts add up to the reward. A dotted line: "
            "the weights of the parts were changed.", _table(rows, ("reward", "reward_", "part_", "solved", "best_of_group")),
            Table(("from step", *(f">weight of {part}" for part in starting(rows[0], "weight_"))), weights)],
        "Is it healthy?": [
            "Entropy that falls to 0 means that nothing new is tried. The mismatch is between the log-probs of trainer and engine for "
            "tokens of the newest weights: it should be small from the start, and stay so.", *shown["health.png"],
            _table(rows, ("entropy", "kl", "mismatch_", "ratio_", "masked", "gradient", "loss", "advantage"))],
        "What became of groups and episodes": [
            "Ready groups are trained on. Flat ones have nothing to teach; void ones have too few valid episodes; stale ones were too "
            "old, and their tasks went back. Invalid episodes are the machinery's failures; those tried again count each time.",
            *shown["staleness.png"],
            Table(("what", ">groups"), [(name, count) for name, count in added(rows, "groups_").items()]),
            Table(("invalid, by cause", ">episodes"), [(_words(name), count) for name, count in added(rows, "invalid_").items()])],
        "Behaviour": [*([f"{line}." for line in flags(rows)] or ["No flag was raised."]), *shown["behaviour.png"],
                      _table(rows, ("behaviour_", "episode_tokens"))],
        "Speed": [*shown["speed.png"], _table(rows, SPEEDS)],
        "Samples": [f"The best, worst and strangest episodes of the last {LISTED // 3} steps: etude trace show FILE.", samples],
    }  # fmt: skip


def flags(rows: Sequence[Row]) -> list[str]:
    """Return what monitors had to say."""
    return [line for row in rows for line in row.get("flags", {}).values()]


def _table(rows: Sequence[Row], wanted: Sequence[str]) -> Table:
    """Return numbers at the beginning, at the end and their extremes; a name that ends with an underscore stands for many."""
    known = {name: None for row in rows for name in row}
    named = [name for want in wanted for name in known if name == want or (want[-1] == "_" and name.startswith(want))]
    lines = []
    for name in named:
        found = ends(rows, name)
        assert found, "it is in a row"
        values = [row[name] for row in rows if name in row]
        show = shower(name)
        lines.append((_words(name), *(show(value) for value in (*found, min(values), max(values)))))
    return Table(("", ">first tenth", ">last tenth", ">smallest", ">largest"), lines)


def shower(name: str) -> Callable[[float], str]:
    """Return how a number is written."""
    return percent if name.startswith(SHARES) else number


def _words(name: str) -> str:
    return name.replace("_", " ").replace("part ", "unweighted ").replace("behaviour ", "")


def _samples(folder: Path) -> Table:
    """Return the kept episodes of the last steps."""
    lines = []
    for place in sorted((folder / "samples").glob("*/" + ABOUT))[-LISTED // 3 :][::-1]:
        for name, about in read_json(place).items():
            told = (about["outcome"], number(about["reward"]), about["why"])
            lines.append((f"samples/{place.parent.name}/{name}.json", *told))
    return Table(("file", "outcome", ">reward", "why"), lines)
