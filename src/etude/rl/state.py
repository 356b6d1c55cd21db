"""What a run is at, as the sum of its events: pure, so that a kill at any moment is nothing but a shorter sum.

The orchestrator asks a question, writes the event that answers it to the ledger, and applies it here:

    next_group() → Opened     wanted(): episodes to run →  Finished or Failed     closing() → Closed
    stale() → Stale           batch() → Batched                                   Trained when the trainer reports

A group's staleness in a step is the version that step begins with, less the oldest version among the group's tokens. The version is
counted from the newest one trained, and the batches before it that are not trained yet. The bound holds for every batch.

drop: groups begin as long as there is room; one that is overtaken is dropped and its task goes back to be drawn again.
wait: a group begins only if it and all others can still be trained in time, and no batch overtakes one that could then not be.

Questions are asked after every episode, of which thousands are under way: none may take longer the more there are. So what they ask
for is kept as it changes: groups by status, the episodes to run, groups that are complete, and how many groups are how old.
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
    sampled: int | None = None  # oldest version of its finished episodes
    finished: dict[int, Finished] = field(default_factory=dict)
    failures: Counter[int] = field(default_factory=Counter)  # by episode
    lost: set[int] = field(default_factory=set)  # episodes that failed finally
    rewards: dict[int, float] = field(default_factory=dict)  # set when it is closed
    step: int = 0  # in which it is trained

    @property
    def oldest(self) -> int:
        """Return the oldest version of its tokens; while it is open, the oldest to be expected."""
        if self.sampled is None or (self.status == "open" and self.begun < self.sampled):
            return self.begun
        return self.sampled


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
        self._of: dict[Status, dict[int, Group]] = {"open": {}, "ready": {}}
        self._ages: dict[Status, Counter[int]] = {
            "open": Counter(),
            "ready": Counter(),
        }  # of those, by their oldest version
        self._wanted: dict[tuple[int, int], None] = {}  # in their order
        self._complete: set[int] = set()  # open groups whose episodes are all in
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
                assert number in self._complete, f"group {number} was closed out of turn"
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
        self._enter(group)
        self._wanted.update(dict.fromkeys((group.number, episode) for episode in range(self.settings.group_size)))
        self.counts["opened"] += 1

    def _end_episode(self, event: Finished | Failed) -> None:
        place = event.group, event.episode
        assert place in self._wanted, f"episode {event.group}/{event.episode} was over before"
        group = self._groups[event.group]
        if isinstance(event, Finished) or event.final:
            del self._wanted[place]
        if isinstance(event, Finished):
            self._leave(group)
            group.finished[event.episode] = event
            group.sampled = event.oldest if group.sampled is None else min(group.sampled, event.oldest)
            self._enter(group)
            self.experience.add(self.items[group.task], event)
            self.counts["finished"] += 1
        else:
            group.failures[event.episode] += 1
            if event.final:
                group.lost.add(event.episode)
            self.counts.update(failed=1, lost=int(event.final))
            self.causes[event.cause] += 1
        if len(group.finished) + len(group.lost) == self.settings.group_size:
            self._complete.add(group.number)

    def _move(self, number: int, before: Status, after: Status) -> Group:
        group = self._groups[number]
        assert group.status == before, f"group {number} is {group.status}, not {before}"
        self._leave(group)
        group.status = after
        if after == "ready":
            self._enter(group)
        self._complete.discard(number)
        self.counts[after] += 1
        return group

    def _enter(self, group: Group) -> None:
        self._of[group.status][group.number] = group
        self._ages[group.status][group.oldest] += 1

    def _leave(self, group: Group) -> None:
        del self._of[group.status][group.number]
        ages = self._ages[group.status]
        ages[group.oldest] -= 1
        if not ages[group.oldest]:
            del ages[group.oldest]

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
        left = any(self._undrawn) or self._of["open"] or self.stale() or self.batched > self.trained
        return not (left or len(self._of["ready"]) >= self.settings.groups)

    @property
    def queues(self) -> dict[str, int]:
        """Return how many groups are at each point of their way."""
        undrawn, training = sum(map(len, self._undrawn)), (self.batched - self.trained) * self.settings.groups
        return {
            "undrawn": undrawn, "open": len(self._of["open"]), "ready": len(self._of["ready"]), "training": training,
        }  # fmt: skip

    @property
    def unplayed(self) -> int:
        """Return how many episodes are to run."""
        return len(self._wanted)

    def next_group(self) -> Opened | None:
        """Return the group to open now, if any: the same one until something happens."""
        epoch = next((number for number, undrawn in enumerate(self._undrawn) if undrawn), None)
        if epoch is None or not self._has_room():
            return None
        items = list(self._undrawn[epoch].values())
        weights = self.experience.weights(items, self.settings.curriculum, self.batched / self.settings.steps)
        number = len(self._groups)
        alike = weights.count(1.0) == len(weights)  # which draws the same, without adding them up
        drawn = random.Random(f"{self.seed} {number}").choices(items, None if alike else weights)[0].id  # noqa: S311 - reproducible
        return Opened(number, drawn, epoch, self._drawn[epoch, drawn])

    def wanted(self) -> list[tuple[int, int]]:
        """Return the episodes to run, as (group, episode): of open groups, neither finished nor finally failed."""
        return list(self._wanted)

    def closing(self) -> list[Closed]:
        """Return how groups end whose episodes are all in."""
        return [self._end(self._groups[number]) for number in sorted(self._complete)]

    def stale(self) -> list[Stale]:
        """Return the ready groups that are too old for the next batch."""
        if not any(map(self._is_late, self._ages["ready"])):
            return []
        return [Stale(number) for number, group in sorted(self._of["ready"].items()) if self._is_late(group.oldest)]

    def batch(self) -> Batched | None:
        """Return the next step's groups, those with the oldest tokens first, if there are enough and the trainer is near."""
        ahead, size = 1 if self.settings.mode == "sync" else 2, self.settings.groups
        if self.batched >= min(self.trained + ahead, self.settings.steps) or len(self._of["ready"]) < size:
            return None
        left, chosen = size, Counter[int]()  # by age: groups are looked at only if they are taken
        for oldest, groups in sorted(self._ages["ready"].items()):
            if left and not self._is_late(oldest):
                chosen[oldest] = min(left, groups)
                left -= chosen[oldest]
        if left or self._overtakes(chosen):
            return None
        ready = sorted((each.oldest, number) for number, each in self._of["ready"].items() if each.oldest in chosen)
        return Batched(self.batched + 1, tuple(number for _, number in ready[:size]))

    def _has_room(self) -> bool:
        """Whether one more group may begin. Nothing is sampled that no step could use."""
        settings, ready = self.settings, len(self._of["ready"])
        if not self._has_use():
            return False
        if settings.mode == "sync":
            return self.batched == self.trained and len(self._of["open"]) + ready < settings.groups
        if settings.late == "drop":  # those under way may turn out flat, so only those that are ready count
            return ready < (settings.staleness + 1 - (self.batched - self.trained)) * settings.groups
        every = self._ages["open"] + self._ages["ready"] + Counter({self.version: 1})
        return not self._is_late(self.version) and self._are_in_time(every, self.batched + 1)

    @property
    def held_back(self) -> bool:
        """Whether one more group would begin, but for the bound on its age (`late = "wait"`)."""
        return any(self._undrawn) and self._has_use() and not self._has_room()

    def _has_use(self) -> bool:
        """Whether one more group could be played and trained on, whatever the ages."""
        begun, left = len(self._of["open"]) + len(self._of["ready"]), self.settings.steps - self.batched
        return self.unplayed < self.settings.at_once and begun < left * self.settings.groups

    def _behind(self, oldest: int, step: int) -> int:
        """Return the staleness of a group with that oldest version if it is trained in `step`."""
        return self.version + (step - 1 - self.trained) - oldest

    def _is_late(self, oldest: int) -> bool:
        return self._behind(oldest, self.batched + 1) > self.settings.staleness

    def _are_in_time(self, ages: Counter[int], step: int) -> bool:
        """Whether all groups that are not late already can be trained in time, the oldest first, from `step` on.

        Of groups that are equally old the last one in the queue decides.
        """
        place, size, bound = 0, self.settings.groups, self.settings.staleness
        for oldest, groups in sorted(ages.items()):
            if not self._is_late(oldest):
                place += groups
                if self._behind(oldest, step + (place - 1) // size) > bound:
                    return False
        return True

    def _overtakes(self, chosen: Counter[int]) -> bool:
        """Whether a batch of such groups now would leave too little time for a group that is still under way."""
        if self.settings.late == "drop" or not self._of["open"]:
            return False
        return not self._are_in_time(self._ages["open"] + self._ages["ready"] - chosen, self.batched + 2)

    def _end(self, group: Group) -> Closed:
        rewards = {episode: total(each.parts, self.weights) for episode, each in sorted(group.finished.items())}
        if len(rewards) < 2:
            return Closed(group.number, "void", rewards)
        spread = max(rewards.values()) - min(rewards.values())
        # By the trainer: rewards that are alike may differ after the penalty, and a teacher needs none.
        judged_later = self.settings.kl.coefficient > 0 or bool(self.settings.teacher.models)
        return Closed(group.number, "flat" if spread < FLAT and not judged_later else "ready", rewards)
