"""A world for the state machine to be tried in, and an oracle that knows the rules and reads nothing but the log of events."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from etude.rl.environment import Item
from etude.rl.ledger import Batched, Closed, Event, Failed, Finished, Opened, Stale, Trained, Weighted
from etude.rl.settings import RlSettings
from etude.rl.state import State

WEIGHTS = {"outcome": 1.0, "length": 0.1}


def rules(**changed: Any) -> RlSettings:
    return RlSettings(**{"tasks": "none", "steps": 3, "groups": 2, "group_size": 2, **changed})


def tasks(number: int) -> list[Item]:
    return [Item(f"t{each}", f"k{each % 3}") for each in range(number)]


def finished(group: int, episode: int, *, reward: float = 0.0, oldest: int = 0, newest: int = 0) -> Finished:
    outcome = "pass" if reward > 0.5 else "fail"
    behaviour = {"thinking_tokens": 3.0 + group}
    return Finished(group, episode, outcome, {"outcome": reward, "length": 0.0}, behaviour, oldest, newest, 5, 2, 1.0)  # type: ignore[arg-type]


class World:
    """All that is around the state: episodes under way, an engine, a trainer, and a ledger that kills cut short."""

    def __init__(self, settings: RlSettings, items: list[Item], seed: int, lag: int = 0) -> None:
        self.settings, self.items, self.chance, self.lag = settings, items, random.Random(seed), lag
        self.log: list[Event] = []
        self.playing: dict[tuple[int, int], int] = {}  # the version each episode began with
        self.trainer, self.laggard = (self.chance.choice([1.0, 0.1, 0.01]) for _ in range(2))  # how fast they are
        self.state = self.folded()
        self.record(Weighted(WEIGHTS, 1))

    def folded(self) -> State:
        return State(self.items, self.settings, 7, self.log)

    def record(self, event: Event) -> None:
        self.log.append(event)
        self.state.apply(event)

    def actions(self) -> list[Any]:
        """What could happen next: every answer of the state, and whatever the world may do to it."""
        state = self.state
        answers: list[Any] = [*state.closing(), *state.stale(), state.batch(), state.next_group()]
        begin = [("begin", place) for place in state.wanted() if place not in self.playing]
        end = [("end", place) for place in self.playing]
        train = [("train", (0, 0))] if state.batched > state.trained else []
        return [*filter(None, answers), *begin[:2], *end, *train]

    def pace(self, action: Any) -> float:
        """How likely this comes next: the trainer may be slow, and so may every third group."""
        kind, place = action if isinstance(action, tuple) else ("answer", (1, 0))
        return self.trainer if kind == "train" else self.laggard if kind == "end" and place[0] % 3 == 0 else 1.0

    def act(self) -> bool:
        """Let one thing happen; False: nothing can."""
        if not (actions := self.actions()):
            return False
        assert not self.state.exhausted
        action = self.chance.choices(actions, [self.pace(each) for each in actions])[0]
        self.happen(action)
        return True

    def happen(self, action: Any) -> None:
        if not isinstance(action, tuple):
            return self.record(action)
        kind, place = action
        if kind == "train":
            self.record(Trained(self.state.trained + 1, self.state.trained + 1))
        elif kind == "begin":
            self.playing[place] = max(0, self.state.version - self.chance.randint(0, self.lag))
        else:
            self.end(place)
        return None

    def end(self, place: tuple[int, int]) -> None:
        oldest = self.playing.pop(place)
        if self.chance.random() < 0.15:
            final = self.state.attempts(*place) >= 1
            return self.record(Failed(*place, self.chance.choice(["disk", "hung"]), final))
        reward = self.chance.choice([0.0, 1.0, 0.3])
        return self.record(finished(*place, reward=reward, oldest=oldest, newest=self.state.version))

    def kill(self) -> None:
        """Lose the process; perhaps the last event had not reached the disk, and some episodes cannot be taken up."""
        if len(self.log) > 1 and self.chance.random() < 0.5:
            self.log.pop()
        self.state = self.folded()
        wanted = set(self.state.wanted())
        self.playing = {
            place: at for place, at in self.playing.items() if place in wanted and self.chance.random() < 0.5
        }

    def live(self, turns: int) -> None:
        for _ in range(turns):
            if self.chance.random() < 0.03:
                self.kill()
            self.act()

    def drain(self) -> None:
        """Do what can be done until nothing can: no order of events may have led into a dead end."""
        for _ in range(20_000):
            if self.state.trained == self.settings.steps or not self.act():
                break
        assert self.state.trained == self.settings.steps or self.state.exhausted


def check(log: list[Event], settings: RlSettings) -> None:
    """Every rule that holds at any moment, from the log alone."""
    opened: dict[int, Opened] = {}
    ends: dict[int, list[Finished | Failed]] = {}
    fates: dict[int, str] = {}
    running: Counter[tuple[int, str]] = Counter()
    used: set[int] = set()
    batches: list[tuple[int, ...]] = []
    trained = 0
    for event in log:
        match event:
            case Opened(number, task, epoch, again):
                assert number == len(opened)
                assert running[epoch, task] == 0, "a task is under way or over, and opened again in the same epoch"
                assert again == sum((each.epoch, each.task) == (epoch, task) for each in opened.values())
                running[epoch, task] += 1
                opened[number] = event
                assert len(batches) == trained or settings.mode == "async", "sync ran ahead"
                under_way = [each for each in opened if each not in fates]
                played = sum(len(ends.get(each, [])) for each in under_way)
                assert len(under_way) * settings.group_size - played < settings.at_once + settings.group_size
            case Finished(number) | Failed(number, final=True):
                assert number not in fates
                ends.setdefault(number, []).append(event)
            case Closed(number, fate, rewards):
                assert sorted(each.episode for each in ends[number]) == list(range(settings.group_size))
                valid = {
                    each.episode: 1.0 * each.parts["outcome"] for each in ends[number] if isinstance(each, Finished)
                }
                assert rewards == valid
                spread = len(set(valid.values()))
                assert fate == ("void" if len(valid) < 2 else "flat" if spread == 1 else "ready")
                fates[number] = fate
            case Stale(number):
                assert fates[number] == "ready"
                assert number not in used
                fates[number] = "stale"
                running[opened[number].epoch, opened[number].task] -= 1
            case Batched(step, numbers):
                batches.append(numbers)
                assert step == len(batches) <= settings.steps
                assert len(set(numbers)) == len(numbers) == settings.groups
                assert not used.intersection(numbers), "a group is in two batches"
                used.update(numbers)
                assert len(batches) - trained <= (1 if settings.mode == "sync" else 2)
                for number in numbers:
                    assert fates[number] == "ready"
                    oldest = min(each.oldest for each in ends[number] if isinstance(each, Finished))
                    assert trained - oldest <= step - 1 - oldest <= settings.staleness, "staleness is over its bound"
                    assert step - 1 == oldest or settings.mode == "async", "sync trains on what it has just sampled"
            case Trained(step, _):
                trained = step
    uses = Counter((opened[number].epoch, opened[number].task) for number in used)
    assert all(count == 1 for count in uses.values()), "a task was trained twice in an epoch"


def none_lost(world: World) -> None:
    """When a run is exhausted every task of every epoch has ended: trained, flat, void, or left over in too small a batch."""
    state, settings = world.state, world.settings
    groups = [state.group(number) for number in range(state.counts["opened"])]
    ended = Counter((each.epoch, each.task) for each in groups if each.status in {"ready", "flat", "void", "batched"})
    assert ended == {(epoch, item.id): 1 for epoch in range(settings.epochs) for item in world.items}
    assert sum(each.status == "ready" for each in groups) < settings.groups
