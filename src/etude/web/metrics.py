"""The numbers of a stage, step by step, as columns: of ten thousand steps with eighty numbers each, some megabytes."""

from __future__ import annotations

import json
from array import array
from typing import TYPE_CHECKING, Any

from etude.jsonl import numbers
from etude.report.rl import LABELS, PICTURES, Panel
from etude.run.folder import METRICS
from etude.web.html import Html, curve, element, is_number, note
from etude.web.reading import Follower

if TYPE_CHECKING:
    from etude.web.reading import Stage

    Points = list[tuple[float, float]]

# What a verdict reads; and counts.
IN_SHORT = ("step", "reward", "solved", "best_of_group", "episodes", "device_seconds", "flags")
MOST = 400  # columns; what writes more is no stage of ours
TRAINING = (
    Panel("Loss", ("loss", "loss_"), unit="nats a token"),
    Panel("Bits per byte of held-out text, by domain", ("eval/bits_per_byte/",), unit="lower is better"),
    Panel("Forgetting: bits per byte since the beginning", ("change/",), unit="above 0: worse"),
    Panel("Expected acceptance rate of MTP heads", ("eval/acceptance/",), "percent"),
    Panel("Gradient norm", ("gradient",), "log"),
    Panel("Learning rate", ("lr",)),
    Panel("Tokens a second", ("tokens_per_second",)),
)
MEMORY = Panel("Memory at the peak of a step", ("peak_gb",), unit="GB of the GPU")
RL_PICTURES = ("reward.png", "health.png", "staleness.png", "speed.png")


class Metrics(Follower):
    """The rows of metrics.jsonl, as they come."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage.lines(METRICS), stage.run.patience)
        self.clear()

    def clear(self) -> None:
        self.columns: dict[str, tuple[array[float], array[float]]] = {}  # steps and values, by name
        self.rows: list[dict[str, Any]] = []  # of RL's steps, the little that a verdict reads
        self.flags: list[tuple[float, str, str]] = []  # step, behaviour, in words
        self.plan: dict[str, Any] = {}
        self.seconds = self.tokens = 0.0
        self.spoilt = 0  # lines that are no row

    def take(self, line: bytes, number: int) -> None:  # noqa: ARG002 - as its base's
        try:
            row = json.loads(line)
            kind = str(row["key"]).partition("/")[0]
        except (ValueError, TypeError, KeyError, RecursionError):
            self.spoilt += 1
            return
        if kind == "plan":
            self.plan = row
        if kind not in {"train", "eval"}:
            return
        step = row.get("step", row["key"].rpartition("/")[2])
        at = float(step) if is_number(step) or (isinstance(step, str) and step.isdecimal() and len(step) < 15) else 0.0
        for name, value in numbers(row, "eval/" if kind == "eval" else ""):
            self._add(name, at, value)
            if name.startswith("eval/bits_per_byte/"):
                first = self.columns[name][1][0]
                self._add(name.replace("eval/bits_per_byte", "change"), at, value - first)
        if kind == "train":
            self._trained(row, at)

    def _trained(self, row: dict[str, Any], at: float) -> None:
        found: list[Any] = [row.get(name) for name in ("device_seconds", "tokens")]
        seconds, tokens = (float(each) if is_number(each) else 0.0 for each in found)
        self.seconds, self.tokens = self.seconds + seconds, self.tokens + tokens
        if "reward" in row or "episodes" in row:
            counts = {name: value for name, value in row.items() if name.startswith(("groups_", "invalid_"))}
            if all(map(is_number, counts.values())):
                self.rows.append({"step": at, **{name: row[name] for name in IN_SHORT if name in row}, **counts})
        elif seconds:
            self._add("tokens_per_second", at, tokens / seconds)
        if is_number(row.get("peak_bytes")):
            self._add("peak_gb", at, row["peak_bytes"] / 1e9)
        raised = row.get("flags", {})
        if isinstance(raised, dict):
            self.flags += [(at, str(name), str(said)) for name, said in raised.items()]

    def _add(self, name: str, at: float, value: float) -> None:
        if name in self.columns or len(self.columns) < MOST:
            steps, values = self.columns.setdefault(name, (array("d"), array("d")))
            steps.append(at)
            values.append(value)

    def points(self, name: str) -> Points:
        return list(zip(*self.columns[name], strict=True)) if name in self.columns else []

    def at(self, name: str, step: int) -> float | None:
        steps, values = self.columns.get(name) or (array("d"), array("d"))
        return values[steps.index(step)] if step in steps else None

    def last(self, name: str) -> float | None:
        return self.columns[name][1][-1] if name in self.columns else None

    def curves(self, panel: Panel) -> dict[str, Points]:
        """Return the points of every curve of a panel, by its label."""
        found: dict[str, Points] = {}
        for wanted in panel.names:
            for name in self.columns:
                if name == wanted or (wanted[-1] in "_/" and name.startswith(wanted)):
                    words = name[len(wanted) :] if name != wanted else LABELS.get(name, name)
                    found[words.replace("_", " ")] = self.points(name)
        return found


def panels_of(metrics: Metrics, kind: str) -> list[Panel]:
    """Return the panels that a kind of stage has, those with at least one number."""
    if kind != "rl":
        return [panel for panel in (*TRAINING, MEMORY) if metrics.curves(panel)]
    habits = (Panel(name.removeprefix("behaviour_").replace("_", " ").capitalize(), (name,))
              for name in metrics.columns if name.startswith("behaviour_"))  # fmt: skip
    own = (each for file in RL_PICTURES for each in PICTURES[file])
    return [panel for panel in (*own, MEMORY, *habits) if metrics.curves(panel)]


def metrics_of(stage: Stage) -> Metrics:
    """Return the numbers of a stage, read as far as they are written; none, if it has not begun."""
    key = f"metrics of {stage.path}"
    made: Metrics = stage.run.caches.get(key) or stage.run.caches.setdefault(key, Metrics(stage))
    return made.follow()


def charts(metrics: Metrics, kind: str, most: int | None = None) -> Html:
    """Return the curves of a stage, monitors' flags as marks in those they concern."""
    drawn = []
    for panel in panels_of(metrics, kind)[:most]:
        habit = panel.names[0].removeprefix("behaviour_")
        marks = [(at, said) for at, name, said in metrics.flags if f"behaviour_{name}" in panel.names and name == habit]
        drawn.append(curve(panel.title, metrics.curves(panel), unit=panel.unit, look=panel.look, marks=marks))
    return element("div", *drawn, cls="charts") if drawn else note("No step has been written yet.", "empty")
