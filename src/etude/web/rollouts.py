"""What reinforcement learning did, rollout by rollout, as the ledger tells it: which steps, which groups, which rewards.

Of a rollout only its reward and the place of its line are held, so that a hundred thousand of them are some tens of megabytes; all
else is read when somebody looks at it.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from etude.errors import UserError
from etude.rl.algorithm import ALGORITHMS, Algorithm
from etude.rl.exchange import episode_file
from etude.rl.ledger import Batched, Closed, Event, Failed, Finished, Opened, Stale, Trained, Weighted, from_line
from etude.rl.processes import LEDGER
from etude.rl.settings import RlSettings
from etude.web.reading import Follower

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from etude.web.reading import Stage

KEPT = ("best", "worst", "strangest")  # samples of a step
MOST_TAUGHT = 8  # rollouts named as those that taught the most
AHEAD = 2  # steps that may be batched before the first of them is trained


@dataclass(slots=True)
class Group:
    """Rollouts of one task."""

    number: int
    task: str
    opened: int  # the step that was next to be trained when it began
    fate: str = "open"  # open, ready, flat, void, stale, or trained
    step: int = 0  # in which it was trained; else the one that was next when its fate was known
    rewards: dict[int, float] = field(default_factory=dict)  # by rollout, weighted
    lines: dict[int, int] = field(default_factory=dict)  # of the ledger, by finished rollout
    passed: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)  # why the infrastructure failed, by rollout

    @property
    def mean(self) -> float:
        return sum(self.rewards.values()) / max(1, len(self.rewards))


Taught = tuple[Group, int, float]  # a rollout, and its advantage


class Rollouts(Follower):
    """The ledger of a stage, followed as it grows."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage.lines(LEDGER), stage.run.patience)
        self.stage = stage
        self.algorithm, self.fallback = _algorithm(stage)
        self.clear()

    def clear(self) -> None:
        self.groups: list[Group] = []
        # Groups by the step they were trained in, or that was next when their fate was known.
        self.steps: defaultdict[int, list[int]] = defaultdict(list)
        self.taught: list[Taught] = []  # of all groups, those that taught the most
        self.weights: list[tuple[int, dict[str, float]]] = []  # of the reward's parts: from which step on
        self.trained = self.rollouts = 0
        self.damage = ""

    def take(self, line: bytes, number: int) -> None:
        """Add a line. One that makes no sense ends the reading, and is named."""
        if self.damage:
            return
        try:
            self._apply(from_line(line), number)
        except (ValueError, LookupError) as error:
            self.damage = f"line {number + 1} of {LEDGER} makes no sense ({error}); what comes after it is not shown"

    def _apply(self, event: Event, line: int) -> None:  # noqa: C901 - one case a kind of event
        match event:
            case Opened(number, task):
                if number != len(self.groups):
                    raise ValueError(f"group {number} is out of turn")
                self.groups.append(Group(number, task, self.trained + 1))
            case Finished(number, episode, outcome):
                group = self.groups[number]
                group.lines[episode] = line
                group.passed |= {episode} if outcome == "pass" else set()
                self.rollouts += 1
            case Failed(number, episode, cause):
                self.groups[number].failed[episode] = cause
            case Closed():
                self._close(event)
            case Stale(number):
                self.groups[number].fate = "stale"
            case Batched(step, numbers):
                self._batch(step, numbers)
            case Trained(step):
                if step != self.trained + 1:
                    raise ValueError(f"step {step} is out of turn")
                self.trained = step
            case Weighted(weights, step):
                self.weights.append((step, dict(weights)))

    def _close(self, event: Closed) -> None:
        group = self.groups[event.group]
        if not all(map(math.isfinite, event.rewards.values())):
            raise ValueError(f"a reward of group {event.group} is not finite")
        group.fate, group.step, group.rewards = event.fate, self.trained + 1, dict(event.rewards)
        self.steps[group.step].append(event.group)

    def _batch(self, step: int, numbers: Sequence[int]) -> None:
        if not self.trained < step <= self.trained + AHEAD:
            raise ValueError(f"step {step} is out of turn")
        for number in numbers:
            group = self.groups[number]
            self.steps[group.step].remove(number)
            group.fate, group.step = "trained", step
            self.steps[step].append(number)
            self.taught = _largest([*self.taught, *self._teaching(group)])

    def group(self, number: int) -> Group:
        """Return a group. KeyError: there is none."""
        if not 0 <= number < len(self.groups):
            raise KeyError(number)
        return self.groups[number]

    def finished(self, group: Group, episode: int) -> Finished | None:
        """Return what the ledger says of a rollout that was scored."""
        if episode not in group.lines:
            return None
        event = from_line(self.lines.line(group.lines[episode]))
        return event if isinstance(event, Finished) else None

    def advantages(self, group: Group) -> dict[int, float]:
        """Return by how much each rollout of a group was above the others, as the algorithm counts it."""
        if len(group.rewards) < 2:
            return {}
        return dict(zip(group.rewards, self.algorithm.advantages(list(group.rewards.values())), strict=True))

    def weights_of(self, step: int) -> dict[str, float]:
        """Return the weights of the reward's parts that a step's rewards were made with, as far as the ledger tells."""
        known = [weights for first, weights in self.weights if first <= max(step, 1)]
        return known[-1] if known else self.weights[0][1] if self.weights else {}

    def trace_of(self, group: int, episode: int) -> str | None:
        """Return where the trace of a rollout lies below the stage; None: it was not kept."""
        if self.stage.has(name := episode_file(group, episode)):
            return name
        step = self.groups[group].step if group < len(self.groups) else 0
        return self._samples_of(step).get((group, episode))

    def _samples_of(self, step: int) -> dict[tuple[Any, Any], str]:
        """Return the rollouts of a step that the monitor kept: the best, the worst, the strangest."""
        about = self.stage.json(f"samples/{step:08d}/about.json") if step else None
        entries = about if isinstance(about, dict) else {}
        return {(entry.get("group"), entry.get("episode")): f"samples/{step:08d}/{name}.json"
                for name, entry in entries.items() if name in KEPT and isinstance(entry, dict)}  # fmt: skip

    def teaching(self, numbers: Sequence[int]) -> list[Taught]:
        """Return the rollouts of trained groups with the largest advantages, up or down: those that taught the most."""
        return _largest(each for number in numbers for each in self._teaching(self.group(number)))

    def _teaching(self, group: Group) -> list[Taught]:
        return [(group, *each) for each in self.advantages(group).items()] if group.fate == "trained" else []


def _largest(taught: Iterable[Taught]) -> list[Taught]:
    """Return half of those to do more and half of those to do less: in a model that mostly succeeds all the largest are failures."""
    known = list(taught)
    sides = [[each for each in known if (each[2] > 0) == up] for up in (True, False)]
    return [each for side in sides for each in heapq.nlargest(MOST_TAUGHT // 2, side, key=lambda one: abs(one[2]))]


def _algorithm(stage: Stage) -> tuple[Algorithm, str]:
    """Return the stage's algorithm; where its settings are of another version of Etude, the plain one and a line that says so."""
    try:
        given = {name: value for name, value in stage.settings.items() if name != "kind"}
        settings = RlSettings.model_validate_json(json.dumps(given))
    except ValidationError as error:
        what = f"the settings of {stage.name} are not those of this Etude ({error.errors()[0]['msg']})"
        return Algorithm(cast("Any", _Plain())), f"{what}; advantages are reward − mean of the group"
    return ALGORITHMS[settings.algorithm](settings), ""


class _Plain:
    window = None


def rollouts_of(stage: Stage) -> Rollouts:
    """Return the rollouts of a stage, read as far as they are written. UserError: it has none."""
    if not stage.has(LEDGER):
        raise UserError(f"{stage.name} has no {LEDGER}: no rollout has begun")
    key = f"rollouts of {stage.path}"
    made: Rollouts = stage.run.caches.get(key) or stage.run.caches.setdefault(key, Rollouts(stage))
    return made.follow()
