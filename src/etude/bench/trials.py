"""Trials on disk: a folder with one JSON line an attempt, under a header that says by which rules they were made.

The log is appended to as attempts end, and survives a kill (etude.jsonl). Numbers made under different integrity policies or on
different tasks look alike and mean different things, so they are never shown side by side. Other harness versions or sampling
settings may be what a comparison is about: those are shown, and the report says so.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from etude.errors import UserError
from etude.files import canonical_json
from etude.jsonl import MetricsLog, read_lines
from etude.tasks.score import How

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FILE = "trials.jsonl"
KEPT_APART = ("integrity policy", "task set")
Outcome = Literal["pass", "fail", "invalid"]
Stored = TypeVar("Stored", bound=BaseModel)


class Header(BaseModel, extra="forbid", strict=True, frozen=True):
    """The rules that all trials of a folder share."""

    integrity: dict[str, Any]  # what the agent could reach and what was restored before scoring
    harness: str
    tasks: str  # digest of the task set
    sampling: dict[str, Any]
    about: dict[str, float] = {}  # the task set, by axes.set_statistics

    def differing(self, other: Header) -> list[str]:
        """Return the rules in which two headers differ."""
        names = (*KEPT_APART, "harness version", "sampling settings")
        one, two = ((each.integrity, each.tasks, each.harness, each.sampling) for each in (self, other))
        return [name for name, here, there in zip(names, one, two, strict=True) if here != there]


class Trial(BaseModel, extra="forbid", strict=True, frozen=True):
    """One attempt of one model at one task."""

    model: str
    task: str
    package: str
    category: str
    generator: str
    style: str  # of the prompt
    number: int  # of the attempt
    outcome: Outcome  # invalid: the machinery failed, and nothing is known of the model
    why: str = ""  # it is invalid
    how: How = "run"  # the outcome was found: by tests, by those of the same change before, or as nothing was changed
    passed: dict[str, int] = {}  # tests by kind: fail_to_pass, pass_to_pass
    expected: dict[str, int] = {}
    tokens: dict[str, int] = {}  # by kind, as axes.effort names them
    calls: int = 0
    turns: int = 0
    seconds: float = 0.0
    stop: str = ""
    quality: dict[str, float | None] = {}  # empty: nothing was changed; none: does not apply
    interaction: dict[str, float | None] = {}
    trace: str = ""  # where it lies, relative to the folder


def trial_key(model: str, task: str, number: int) -> str:
    """Return what tells an attempt from all others of a folder."""
    return canonical_json([model, task, number])


class TrialLog(MetricsLog):
    """The trials of one folder, by key, written as they end. Opened again it goes on; with other rules it refuses to."""

    def __init__(self, folder: Path, header: Header) -> None:
        super().__init__(folder / FILE)
        stored = self.get("header")
        if stored is None:
            self.put("header", **header.model_dump())
        elif differing := _read(Header, stored, self.path).differing(header):
            self.close()
            raise UserError(f"{folder} holds trials made with another {' and '.join(differing)}; choose another folder")

    def add(self, trial: Trial) -> None:
        self.put(trial_key(trial.model, trial.task, trial.number), **trial.model_dump())


@dataclass(frozen=True)
class Results:
    """Trials that may be looked at together."""

    header: Header
    trials: tuple[Trial, ...]
    differing: tuple[str, ...] = ()  # rules that are not the same for all

    @property
    def models(self) -> list[str]:
        """Return the names of the models, in the order of their first trials."""
        return list(dict.fromkeys(trial.model for trial in self.trials))

    @property
    def attempts(self) -> int:
        """Return k: the most attempts that every model has made at some task."""
        made = Counter((trial.model, trial.task) for trial in self.trials)
        return min(max(count for (model, _), count in made.items() if model == each) for each in self.models)


def read_results(folder: Path) -> Results:
    """Read one folder, also while trials are still being written to it: a torn last line is not there yet."""
    path = folder / FILE
    try:
        whole, _torn = read_lines(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder} holds no {FILE}; give a folder that `etude bench` wrote") from None
    if len(whole) < 2:
        raise UserError(f"{path} holds no trials yet; run `etude bench` first")
    header = _read(Header, whole[0], f"line 1 of {path}")
    trials = (_read(Trial, line, f"line {number} of {path}") for number, line in enumerate(whole[1:], 2))
    return Results(header, tuple(trials))


def read_together(folders: Sequence[Path]) -> Results:
    """Read several folders to be compared. A model that is in more than one is told apart by its folder."""
    by_folder = {folder: read_results(folder) for folder in dict.fromkeys(folders)}
    first, *others = by_folder
    header, differing = by_folder[first].header, list[str]()
    for other in others:
        rules = header.differing(by_folder[other].header)
        if unlike := [rule for rule in rules if rule in KEPT_APART]:
            raise UserError(f"{first} and {other} differ in {' and '.join(unlike)}; they are not shown side by side")
        differing += rules
    owners = Counter(model for results in by_folder.values() for model in results.models)
    names = Counter(folder.name for folder in by_folder)
    trials: list[Trial] = []
    for folder, results in by_folder.items():
        label = folder.name if names[folder.name] == 1 else str(folder)
        named = {model: f"{model} ({label})" if owners[model] > 1 else model for model in results.models}
        trials += (trial.model_copy(update={"model": named[trial.model]}) for trial in results.trials)
    return Results(header, tuple(trials), tuple(dict.fromkeys(differing)))


def unsolved(folders: Sequence[Path]) -> dict[str, str]:
    """Return the tasks that nobody passed in any trial, full request included: it is not known that they can be solved."""
    trials = [trial for folder in folders for trial in read_results(folder).trials if trial.outcome != "invalid"]
    solved = {trial.task for trial in trials if trial.outcome == "pass"}
    counts = Counter(trial.task for trial in trials if trial.style == "full")
    return {task: f"never solved, {n} times with its full request" for task, n in counts.items() if task not in solved}


def _read(kind: type[Stored], row: bytes | dict[str, Any], where: object) -> Stored:
    try:
        values = row if isinstance(row, dict) else json.loads(row)
        return kind.model_validate({name: value for name, value in values.items() if name not in {"key", "time"}})
    except (ValueError, AttributeError, ValidationError):
        advice = "the file is damaged, or of another version of Etude: run the benchmark into a new folder"
        raise UserError(f"{where} is no {kind.__name__.lower()}; {advice}") from None
