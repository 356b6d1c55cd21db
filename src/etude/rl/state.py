"""What a run is at, as the sum of its events: pure, so that a kill at any moment is nothing but a shorter sum.

The orchestrator asks a question, writes the event that answers it to the ledger, and applies it here:

    next_group() → Opened     wanted(): episodes to run →  Finished or Failed     closing() → Closed
    stale() → Stale           batch() → Batched                                   Trained when the trainer reports

A group's staleness in a step is the version that step begins with, less the oldest version among the group's tokens. The version is
counted from the newest one trained, and the batches before it that are not trained yet. The bound holds for every batch.

drop: groups begin as long as there is room; one that is overtaken is dropped and its task goes back to be drawn again.
wait: a group begins only if it and all others can still be trained in time, and no batch overtakes one that could then not be.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from etude.errors import UserError
from etude.rewards.reward import total
from etude.rl.curriculum import Experience
from etude.rl.ledger import Batched, Closed, Event, Failed, Fate, Finished, Opened, Stale, Trained, Weighted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from etude.rl.environment import Item
    from etude.rl.settings import RlSettings

Status = Literal["open", "stale", "batched"] | Fate
FLAT = 1e-6  # rewards nearer than this are alike: nothing but rounding would be learnt


@dataclass
class Group:
    """Episodes of one task."""

    number: int
    task: str
    epoch: int
    begun: int  # newest version when it was opened
    status: Status = "open"
    finished: dict[int, Finished] = field(default_factory=dict)
    failures: Counter[int] = field(default_factory=Counter)  # by episode
    lost: set[int] = field(default_factory=set)  # episodes that failed finally
    rewards: dict[int, float] = field(default_factory=dict)  # set when it is closed
    step: int = 0  # in which it is trained

    @property
    def oldest(self) -> int:
        """Return the oldest version of its tokens; while it is open, the oldest to be expected."""
        expected = [self.begun] if self.status == "open" else []
        return min([each.oldest for each in self.finished.values()] + expected)


class State:
    """The sum of events. Queries never change it; `apply` never decides anything."""

    def __init__(self, items: Sequence[Item], settings: RlSettings, seed: int, events: Iterable[Event] = ()) -> None:
        self.settings, self.seed = settings, seed
        self.items = {item.id: item for item in items}
        assert len(self.items) == len(items), "two tasks have the same id"
        self.trained = self.version = 0  # steps trained, newest version
        self.weights: dict[str, float] = {}  # of the reward's parts
        self.counts: Counter[str] = Counter()  # groups: opened, then by Status; episodes: finished, failed, lost
        self.causes: Counter[str] = Counter()  # failures by cause
        self.experience = Experience()
        self._groups: list[Group] = []
        self._batches: list[tuple[int, ...]] = []  # the groups of every step
        self._waiting: dict[int, Group] = {}  # open or ready
        self._undrawn = [dict(self.items) for _ in range(settings.epochs)]  # tasks by epoch
        self._drawn: Counter[tuple[int, str]] = Counter()
        for event in events:
            self.apply(event)

    def apply(self, event: Event) -> None:
        """Add an event that has happened."""
        match event:
            case Opened():
                self._open(event)
            case Finished() | Failed():
                self._end_episode(event)
            case Closed(number, fate, rewards):
                self._move(number, "open", fate).rewards = dict(rewards)
            case Stale(number):
                group = self._move(number, "ready", "stale")
                self._undrawn[group.epoch][group.task] = self.items[group.task]
            case Batched(step, numbers):
                assert step == self.batched + 1, f"step {step} was batched out of turn"
                self._batches.append(numbers)
                for number in numbers:
                    self._move(number, "ready", "batched").step = step
            case Trained(step, version):
                assert step == self.trained + 1 <= self.batched, f"step {step} was trained out of turn"
                assert version > self.version, f"version {version} was published before"
                self.trained, self.version = step, version
            case Weighted(weights):
                self.weights = dict(weights)

    def _open(self, event: Opened) -> None:
        assert event.group == len(self._groups), f"group {event.group} was opened out of turn"
        if event.task not in self.items:
            raise UserError(f"this run has begun with a task {event.task}, which is gone; begin in a new folder")
        assert event.task in self._undrawn[event.epoch], f"{event.task} was drawn before in epoch {event.epoch}"
        del self._undrawn[event.epoch][event.task]
        self._drawn[event.epoch, event.task] += 1
        group = Group(event.group, event.task, event.epoch, self.version)
        self._groups.append(group)
        self._waiting[group.number] = group
        self.counts["opened"] += 1

    def _end_episode(self, event: Finished | Failed) -> None:
        assert (event.group, event.episode) in self.wanted(), f"episode {event.group}/{event.episode} was over before"
        group = self._groups[event.group]
        if isinstance(event, Finished):
            group.finished[event.episode] = event
            self.experience.add(self.items[group.task], event)
            self.counts["finished"] += 1
        else:
            group.failures[event.episode] += 1
            if event.final:
                group.lost.add(event.episode)
            self.counts.update(failed=1, lost=int(event.final))
            self.causes[event.cause] += 1

    def _move(self, number: int, before: Status, after: Status) -> Group:
        group = self._groups[number]
        assert group.status == before, f"group {number} is {group.status}, not {before}"
        group.status = after
        if after != "ready":
            del self._waiting[number]
        self.counts[after] += 1
        return group

    @property
    def batched(self) -> int:
        return len(self._batches)

    def group(self, number: int) -> Group:
        return self._groups[number]

    def attempts(self, group: int, episode: int) -> int:
        return self._groups[group].failures[episode]

    def groups_of(self, step: int) -> tuple[int, ...]:
        """Return the groups of a step that was batched."""
        return self._batches[step - 1]

    @property
    def exhausted(self) -> bool:
        """Whether the run ends before its last step: no task is left, and what is ready is too little for a batch."""
        left = any(self._undrawn) or self._of("open") or self.stale() or self.batched > self.trained
        return not (left or len(self._of("ready")) >= self.settings.groups)

    @property
    def queues(self) -> dict[str, int]:
        """Return how many groups are at each point of their way."""
        undrawn, training = sum(map(len, self._undrawn)), (self.batched - self.trained) * self.settings.groups
        ready = len(self._of("ready"))
        return {"undrawn": undrawn, "open": len(self._waiting) - ready, "ready": ready, "training": training}

    def next_group(self) -> Opened | None:
        """Return the group to open now, if any: the same one until something happens."""
        epoch = next((number for number, undrawn in enumerate(self._undrawn) if undrawn), None)
        if epoch is None or not self._has_room():
            return None
        items = list(self._undrawn[epoch].values())
        weights = self.experience.weights(items, self.settings.curriculum, self.batched / self.settings.steps)
        number = len(self._groups)
        drawn = random.Random(f"{self.seed} {number}").choices(items, weights)[0].id  # noqa: S311 - reproducible
        return Opened(number, drawn, epoch, self._drawn[epoch, drawn])

    def wanted(self) -> list[tuple[int, int]]:
        """Return the episodes to run, as (group, episode): of open groups, neither finished nor finally failed."""
        episodes = range(self.settings.group_size)
        return [
            (group.number, episode)
            for group in self._of("open")
            for episode in episodes
            if episode not in group.finished and episode not in group.lost
        ]

    def closing(self) -> list[Closed]:
        """Return how groups end whose episodes are all in."""
        size = self.settings.group_size
        return [self._end(group) for group in self._of("open") if len(group.finished) + len(group.lost) == size]

    def stale(self) -> list[Stale]:
        """Return the ready groups that are too old for the next batch."""
        return [Stale(group.number) for group in self._of("ready") if self._is_late(group)]

    def batch(self) -> Batched | None:
        """Return the next step's groups, those with the oldest tokens first, if there are enough and the trainer is near."""
        ahead, size = 1 if self.settings.mode == "sync" else 2, self.settings.groups
        if self.batched >= min(self.trained + ahead, self.settings.steps):
            return None
        ready = sorted((each for each in self._of("ready") if not self._is_late(each)), key=lambda each: each.oldest)
        if len(ready) < size or self._overtakes([*ready[size:], *self._of("open")]):
            return None
        return Batched(self.batched + 1, tuple(group.number for group in ready[:size]))

    def _of(self, status: Literal["open", "ready"]) -> list[Group]:
        return [group for group in self._waiting.values() if group.status == status]

    def _has_room(self) -> bool:
        """Whether one more group may begin. Nothing is sampled that no step could use."""
        settings, begun, ready = self.settings, len(self._waiting), len(self._of("ready"))
        if len(self.wanted()) >= settings.at_once or begun >= (settings.steps - self.batched) * settings.groups:
            return False
        if settings.mode == "sync":
            return self.batched == self.trained and begun < settings.groups
        if settings.late == "drop":  # those under way may turn out flat, so only those that are ready count
            return ready < (settings.staleness + 1 - (self.batched - self.trained)) * settings.groups
        new = Group(len(self._groups), "", 0, self.version)
        return not self._is_late(new) and self._are_in_time([*self._waiting.values(), new], self.batched + 1)

    def _behind(self, group: Group, step: int) -> int:
        """Return the staleness of a group if it is trained in `step`."""
        return self.version + (step - 1 - self.trained) - group.oldest

    def _is_late(self, group: Group) -> bool:
        return self._behind(group, self.batched + 1) > self.settings.staleness

    def _are_in_time(self, groups: Iterable[Group], step: int) -> bool:
        """Whether all groups that are not late already can be trained in time, the oldest first, from `step` on."""
        queue = sorted((each for each in groups if not self._is_late(each)), key=lambda each: each.oldest)
        size, bound = self.settings.groups, self.settings.staleness
        return all(self._behind(each, step + place // size) <= bound for place, each in enumerate(queue))

    def _overtakes(self, others: list[Group]) -> bool:
        """Whether a batch now would leave too little time for a group that is still under way."""
        if self.settings.late == "drop" or not any(each.status == "open" for each in others):
            return False
        return not self._are_in_time(others, self.batched + 2)

    def _end(self, group: Group) -> Closed:
        rewards = {episode: total(each.parts, self.weights) for episode, each in sorted(group.finished.items())}
        if len(rewards) < 2:
            return Closed(group.number, "void", rewards)
        spread = max(rewards.values()) - min(rewards.values())
        penalised = self.settings.kl.coefficient > 0  # by the trainer: rewards that are alike may differ after it
        return Closed(group.number, "flat" if spread < FLAT and not penalised else "ready", rewards)
