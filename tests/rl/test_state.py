"""The state machine: in any order of events and kills against an oracle, and its rules one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from etude.errors import UserError
from etude.rl.environment import Item
from etude.rl.ledger import Batched, Closed, Event, Failed, Opened, Stale, Trained, Weighted
from etude.rl.settings import RlSettings
from etude.rl.state import Group, State
from tests.rl.world import WEIGHTS, World, check, finished, none_lost, rules, tasks

SETTINGS = st.builds(
    rules,
    steps=st.integers(1, 6),
    groups=st.integers(1, 4),
    group_size=st.integers(2, 4),
    epochs=st.integers(1, 3),
    staleness=st.integers(1, 3),
    late=st.sampled_from(["drop", "wait"]),
    mode=st.sampled_from(["async", "sync"]),
    concurrency=st.sampled_from([0, 1, 3, 9, 40]),
)


@given(SETTINGS, st.integers(0, 14), st.integers(0, 2**32), st.integers(0, 2), st.integers(0, 300))
@hypothesis_settings(max_examples=300)
def test_any_order_of_events_and_kills_keeps_the_rules(
    settings: RlSettings, number: int, seed: int, lag: int, turns: int
) -> None:
    world = World(settings, tasks(number), seed, lag if settings.mode == "async" else 0)
    world.live(turns)
    world.drain()
    check(world.log, settings)
    if world.state.exhausted:
        none_lost(world)


@given(SETTINGS, st.integers(1, 14), st.integers(0, 2**32), st.integers(1, 200))
@hypothesis_settings(max_examples=100)
def test_a_kill_forgets_nothing(settings: RlSettings, number: int, seed: int, turns: int) -> None:
    world = World(settings, tasks(number), seed, 1)
    world.live(turns)
    before, after = world.state, world.folded()
    for query in ("next_group", "wanted", "closing", "stale", "batch"):
        assert getattr(after, query)() == getattr(before, query)()
    for name in ("exhausted", "trained", "batched", "version", "counts", "causes", "weights", "queues", "experience"):
        assert getattr(after, name) == getattr(before, name)
    assert all(after.group(each) == before.group(each) for each in range(before.counts["opened"]))


class Plain:
    """The questions as they are meant, each answered by looking at every group."""

    def __init__(self, state: State) -> None:
        self.state, self.settings = state, state.settings
        groups = [state.group(number) for number in range(state.counts["opened"])]
        self.open, self.ready = ([each for each in groups if each.status == status] for status in ("open", "ready"))

    def oldest(self, group: Group) -> int:
        expected = [group.begun] if group.status == "open" else []
        return min([each.oldest for each in group.finished.values()] + expected)

    def is_late(self, group: Group, step: int) -> bool:
        behind = self.state.version + (step - 1 - self.state.trained) - self.oldest(group)
        return behind > self.settings.staleness

    def in_time(self, groups: list[Group], step: int) -> bool:
        """Whether a queue can be trained in time, from `step` on."""
        queue = sorted((each for each in groups if not self.is_late(each, self.state.batched + 1)), key=self.oldest)
        return not any(self.is_late(each, step + place // self.settings.groups) for place, each in enumerate(queue))

    def wanted(self) -> list[tuple[int, int]]:
        size = self.settings.group_size
        return [(each.number, e) for each in self.open for e in range(size) if e not in {*each.finished, *each.lost}]

    def closing(self) -> list[int]:
        return [each.number for each in self.open if len({*each.finished, *each.lost}) == self.settings.group_size]

    def stale(self) -> list[Stale]:
        return [Stale(each.number) for each in self.ready if self.is_late(each, self.state.batched + 1)]

    def batch(self) -> Batched | None:
        state, size, step = self.state, self.settings.groups, self.state.batched + 1
        if state.batched >= min(state.trained + (1 if self.settings.mode == "sync" else 2), self.settings.steps):
            return None
        ready = sorted((each for each in self.ready if not self.is_late(each, step)), key=self.oldest)
        held = self.settings.late == "wait" and self.open and not self.in_time([*ready[size:], *self.open], step + 1)
        return None if len(ready) < size or held else Batched(step, tuple(each.number for each in ready[:size]))

    def has_use(self) -> bool:
        own, begun = self.settings, len(self.open) + len(self.ready)
        return len(self.wanted()) < own.at_once and begun < (own.steps - self.state.batched) * own.groups

    def has_room(self) -> bool:
        state, own, begun = self.state, self.settings, len(self.open) + len(self.ready)
        if not self.has_use():
            return False
        if own.mode == "sync":
            return state.batched == state.trained and begun < own.groups
        if own.late == "drop":
            return len(self.ready) < (own.staleness + 1 - (state.batched - state.trained)) * own.groups
        new, step = Group(10**6, "", 0, state.version), state.batched + 1
        return not self.is_late(new, step) and self.in_time([*self.open, *self.ready, new], step)


@given(SETTINGS, st.integers(0, 14), st.integers(0, 2**32), st.integers(0, 2))
@hypothesis_settings(max_examples=150)
def test_what_is_kept_for_the_questions_answers_as_a_look_at_every_group_does(
    settings: RlSettings, number: int, seed: int, lag: int
) -> None:
    world = World(settings, tasks(number), seed, lag if settings.mode == "async" else 0)
    for _ in range(200):
        plain, state = Plain(world.state), world.state
        assert (state.wanted(), state.unplayed) == (plain.wanted(), len(plain.wanted()))
        assert [closed.group for closed in state.closing()] == plain.closing()
        assert (state.stale(), state.batch()) == (plain.stale(), plain.batch())
        assert [state.queues[each] for each in ("open", "ready")] == [len(plain.open), len(plain.ready)]
        assert (state.next_group() is not None) == (state.queues["undrawn"] > 0 and plain.has_room())
        if (settings.late, settings.mode) == ("wait", "async"):
            assert state.held_back == (state.queues["undrawn"] > 0 and plain.has_use() and not plain.has_room())
        assert all(each.oldest == plain.oldest(each) for each in (*plain.open, *plain.ready))
        if not world.act():
            break


@given(SETTINGS, st.integers(1, 14), st.integers(0, 2**32))
@hypothesis_settings(max_examples=150)
def test_waiting_makes_no_group_stale_if_the_engine_is_up_to_date(settings: RlSettings, number: int, seed: int) -> None:
    world = World(settings.model_copy(update={"late": "wait", "mode": "async"}), tasks(number), seed)
    world.drain()
    assert not [event for event in world.log if isinstance(event, Stale)]
    check(world.log, world.settings)


def played(state: State, *groups: int, oldest: int = 0, rewards: tuple[float, ...] = (0.0, 1.0)) -> None:
    """Play and close whole groups."""
    for group in groups:
        for episode, reward in enumerate(rewards):
            state.apply(finished(group, episode, reward=reward, oldest=oldest))
        (closed,) = state.closing()
        state.apply(closed)


def begun(settings: RlSettings, number: int = 20) -> State:
    """A state that has opened all the groups it may."""
    state = State(tasks(number), settings, 0, [Weighted(WEIGHTS, 1)])
    while opened := state.next_group():
        state.apply(opened)
    return state


def stepped(state: State) -> Batched:
    batch = state.batch()
    assert batch is not None
    state.apply(batch)
    return batch


def test_an_overtaken_group_is_drawn_again_in_its_epoch() -> None:
    state = begun(rules(groups=1, staleness=1, concurrency=6), number=3)
    task = state.group(0).task
    for step, group in enumerate((1, 2), 1):
        played(state, group, oldest=0)
        assert stepped(state) == Batched(step, (group,))
        state.apply(Trained(step, step))
    assert state.group(2).step == 2  # one version behind in it, which is allowed
    played(state, 0, oldest=0)  # two versions behind in step 3
    assert state.stale() == [Stale(0)]
    assert state.batch() is None
    assert not state.exhausted
    state.apply(Stale(0))
    assert state.next_group() == Opened(3, task, 0, 1)
    assert state.counts["stale"] == 1


def test_waiting_holds_a_batch_back_for_a_slow_group() -> None:
    state = begun(rules(groups=1, staleness=1, late="wait", concurrency=40, steps=9))
    assert state.queues == {"undrawn": 18, "open": 2, "ready": 0, "training": 0}  # one for each step they may reach
    played(state, 1)
    stepped(state)
    state.apply(Trained(1, 1))
    opened = state.next_group()
    assert opened is not None
    state.apply(opened)
    played(state, 2, oldest=1)
    assert state.batch() is None  # it would leave group 0 behind
    played(state, 0)
    assert stepped(state) == Batched(2, (0,))
    assert stepped(state) == Batched(3, (2,))


@pytest.mark.parametrize("late", ["wait", "drop"])
def test_no_group_begins_that_two_batches_under_way_make_late_already(late: str) -> None:
    state = begun(rules(groups=1, staleness=1, late=late, concurrency=4, steps=9))
    played(state, 0, 1)
    assert (stepped(state), stepped(state)) == (Batched(1, (0,)), Batched(2, (1,)))
    assert state.next_group() is None  # it would be trained in step 3, two versions on
    state.apply(Trained(1, 1))
    assert state.next_group() is not None


def test_dropping_begins_no_group_that_surely_comes_too_late() -> None:
    state = begun(rules(groups=1, staleness=1, concurrency=4, steps=9))
    played(state, 0, 1)
    assert state.next_group() is None  # two are ready: one for each step that a group begun now could reach
    stepped(state)
    assert state.next_group() is None
    state.apply(Trained(1, 1))
    assert state.next_group() is not None


def test_sync_replaces_a_group_that_teaches_nothing_and_goes_no_further() -> None:
    state = begun(rules(mode="sync", staleness=0, concurrency=40))
    assert len(state.wanted()) == 4
    played(state, 0)
    played(state, 1, rewards=(1.0, 1.0))
    opened = state.next_group()
    assert opened is not None
    state.apply(opened)
    assert state.next_group() is None
    played(state, 2)
    assert stepped(state) == Batched(1, (0, 2))
    assert state.next_group() is None
    state.apply(Trained(1, 1))
    assert state.next_group() is not None


def test_sync_hands_over_one_batch_at_a_time_however_many_are_ready() -> None:
    opened = [Opened(each, f"t{each}", 0) for each in range(4)]
    state = State(tasks(4), rules(mode="sync"), 0, [Weighted(WEIGHTS, 1), *opened])
    played(state, 0, 1, 2, 3)
    stepped(state)
    assert state.batch() is None
    state.apply(Trained(1, 1))
    assert stepped(state) == Batched(2, (2, 3))


def test_nothing_is_sampled_beyond_the_last_step() -> None:
    state = begun(rules(steps=1, concurrency=40))
    assert len(state.wanted()) == 4
    played(state, 0, 1)
    stepped(state)
    assert state.next_group() is None
    state.apply(Trained(1, 1))
    assert (state.next_group(), state.batch(), state.exhausted) == (None, None, False)


def test_fates_follow_the_weights_of_the_moment() -> None:
    state = begun(rules(group_size=3, groups=3))
    rewards = {0: (0.0, 0.5, 0.5), 1: (0.4, 0.4, 0.4 + 5e-7)}
    for group, each in rewards.items():
        for episode, reward in enumerate(each):
            state.apply(finished(group, episode, reward=reward))
    for event in (Failed(2, 0, "disk", False), Failed(2, 0, "hung", True), Failed(2, 1, "disk", True), finished(2, 2)):
        state.apply(event)
    assert state.attempts(2, 0) == 2
    assert state.causes == {"disk": 2, "hung": 1}
    assert state.closing() == [
        Closed(0, "ready", {0: 0.0, 1: 0.5, 2: 0.5}),
        Closed(1, "flat", {0: 0.4, 1: 0.4, 2: 0.4 + 5e-7}),
        Closed(2, "void", {2: 0.0}),
    ]
    state.apply(Weighted({"outcome": 2.0, "length": 0.0}, 1))
    assert state.closing()[0] == Closed(0, "ready", {0: 0.0, 1: 1.0, 2: 1.0})
    state.apply(Weighted({"outcome": 0.0, "length": 1.0}, 1))
    assert state.closing()[0].fate == "flat"


def test_rewards_that_are_alike_are_judged_by_the_trainer_where_a_penalty_comes_between() -> None:
    state = begun(rules(group_size=3, groups=3, kl={"coefficient": 0.1}))
    for episode in range(3):
        state.apply(finished(0, episode, reward=1.0))
    assert state.closing() == [Closed(0, "ready", {0: 1.0, 1: 1.0, 2: 1.0})]


def test_the_batch_takes_the_oldest_tokens_first() -> None:
    state = begun(rules(concurrency=24))
    for group, oldest in enumerate((2, 1, 2, 0, 2, 2)):  # the engine may be ahead of what the trainer has reported
        played(state, group, oldest=oldest)
    assert stepped(state).groups == (3, 1)
    assert stepped(state).groups == (0, 2)
    assert state.batch() is None  # the trainer is two behind


def test_draws_follow_the_seed_and_the_curriculum() -> None:
    def order(seed: int) -> list[str]:
        state = State(tasks(12), rules(groups=12), seed)
        for _ in range(12):
            opened = state.next_group()
            assert opened is not None
            state.apply(opened)
        return [state.group(number).task for number in range(12)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    settings = rules(steps=100, concurrency=4000, group_size=40, curriculum={"hard": 3.0, "solved": 0.0, "begin": 0.0})
    items = [Item(f"{family}{each}", family) for each in range(30) for family in ("easy", "hard")]
    state = State(items, settings, 3, [Opened(0, "easy0", 0), Opened(1, "hard0", 0)])
    for group, turns in enumerate((1, 30)):
        for episode in range(40):
            state.apply(replace(finished(group, episode), turns=turns, behaviour={}))
    while len(state.wanted()) < 20 * 40:
        opened = state.next_group()
        assert opened is not None
        state.apply(opened)
    drawn = Counter(state.group(number).task[:4] for number in range(2, 22))
    assert drawn["hard"] > 3 * drawn["easy"]


@pytest.mark.parametrize(
    "event",
    [
        Opened(3, "t0", 0),
        finished(0, 2),
        Failed(9, 0, "disk", False),
        Stale(0),
        Batched(1, (0, 1)),
        Batched(2, ()),
        Trained(1, 1),
        Closed(7, "flat"),
    ],
)
def test_what_cannot_have_happened_is_refused(event: Event) -> None:
    state = begun(rules())
    with pytest.raises((AssertionError, IndexError)):
        state.apply(event)


def test_an_episode_ends_once() -> None:
    state = begun(rules())
    state.apply(finished(0, 0))
    with pytest.raises(AssertionError, match="episode 0/0 was over before"):
        state.apply(finished(0, 0))


def test_a_task_that_is_gone_is_named() -> None:
    with pytest.raises(UserError, match="a task gone, which is gone; begin in a new folder"):
        State(tasks(2), rules(), 0, [Opened(0, "gone", 0)])


def test_without_tasks_a_run_is_exhausted_at_once() -> None:
    assert State([], rules(), 0).exhausted
