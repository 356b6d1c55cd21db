"""Weights of tasks, against numbers worked out by hand and against what they promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.rl.curriculum import PRIOR, Experience, ramp_at
from etude.rl.environment import Item
from etude.rl.ledger import Finished
from etude.rl.settings import CurriculumSettings

ALIKE = CurriculumSettings(hard=0.0, solved=0.0, begin=0.0)
HARD = CurriculumSettings(hard=1.0, solved=0.0, begin=0.0)
SOLVED = CurriculumSettings(hard=0.0, solved=0.8, begin=0.0)
ONE, TWO, OTHER, UNSEEN = Item("one", "x"), Item("two", "x"), Item("other", "y"), Item("unseen", "z")


def seen(*, solved: bool = False, turns: int = 1, thinking: float = 0.0) -> Finished:
    outcome = "pass" if solved else "fail"
    return Finished(0, 0, outcome, {}, {"thinking_tokens": thinking}, 0, 0, 1, turns, 1.0)  # type: ignore[arg-type]


def experience(*episodes: tuple[Item, Finished]) -> Experience:
    made = Experience()
    for item, finished in episodes:
        made.add(item, finished)
    return made


@pytest.mark.parametrize(
    ("progress", "begin", "ramp"),
    [
        (0, 0.25, 0),
        (0.25, 0.25, 0),
        (0.375, 0.25, 0.5),
        (0.5, 0.25, 1),
        (1, 0.25, 1),
        (0, 0, 1),
        (1, 1, 0),
        (1, 0.8, 0.25),
    ],
)
def test_it_begins_and_is_full_at_twice_that(progress: float, begin: float, ramp: float) -> None:
    assert ramp_at(progress, begin) == pytest.approx(ramp)


def test_effort_is_the_mean_of_both_shares() -> None:
    known = experience(
        *[(ONE, seen(turns=6, thinking=220))] * PRIOR, *[(OTHER, seen(turns=2, thinking=180))] * PRIOR
    )  # means of all: 4 turns, 200 tokens
    kin_x = ((6 + 4) / 2, (220 + 200) / 2)  # its 8 episodes, and the mean of all counted as 8
    one = ((6 + kin_x[0]) / 2, (220 + kin_x[1]) / 2)
    expected = [(turns / 4 + thinking / 200) / 2 for turns, thinking in (one, kin_x, (4, 200))]
    assert known.weights([ONE, TWO, UNSEEN], HARD, 1.0) == pytest.approx(expected)
    halfway = HARD.model_copy(update={"begin": 0.4})
    assert known.weights([ONE, TWO, UNSEEN], halfway, 0.6) == pytest.approx([each**0.5 for each in expected])
    squared = HARD.model_copy(update={"hard": 2.0})
    assert known.weights([ONE, TWO, UNSEEN], squared, 1.0) == pytest.approx([each**2 for each in expected])


def test_tasks_that_always_or_never_pass_become_rarer() -> None:
    always, never, half = (Item(name, name) for name in ("always", "never", "half"))
    known = experience(
        *[(always, seen(solved=True))] * 4000,
        *[(never, seen())] * 4000,
        *[(half, seen()), (half, seen(solved=True))] * 50,
    )
    assert known.weights([always, never, half], SOLVED, 1.0) == pytest.approx([0.2, 0.2, 1.0], abs=0.01)
    halfway = SOLVED.model_copy(update={"begin": 0.4})
    assert known.weights([always], halfway, 0.6) == pytest.approx([0.6], abs=0.01)


def test_no_thinking_anywhere_leaves_the_turns() -> None:
    known = experience(*[(ONE, seen(turns=3))] * PRIOR, *[(OTHER, seen(turns=1))] * PRIOR)
    assert known.weights([UNSEEN], HARD, 1.0) == [1.0]
    one, other = known.weights([ONE, OTHER], HARD, 1.0)
    assert (one, other) == pytest.approx((2.75 / 2, 1.25 / 2))  # 3 and 2.5; 1 and 1.5


def test_all_are_alike_before_it_begins_and_before_anything_is_known() -> None:
    known = experience((ONE, seen(turns=9, solved=True)), (OTHER, seen()))
    late = CurriculumSettings(begin=0.5)
    assert known.weights([ONE, OTHER, UNSEEN], late, 0.5) == [1.0, 1.0, 1.0]
    assert Experience().weights([ONE, OTHER], HARD, 1.0) == [1.0, 1.0]
    assert known.weights([ONE, OTHER, UNSEEN], ALIKE, 1.0) == [1.0, 1.0, 1.0]


EPISODES = st.builds(seen, solved=st.booleans(), turns=st.integers(0, 500), thinking=st.floats(0, 1e6))
CURRICULA = st.builds(CurriculumSettings, hard=st.floats(0, 4), solved=st.floats(0, 0.99), begin=st.floats(0, 1))


@given(st.lists(st.tuples(st.sampled_from([ONE, TWO, OTHER]), EPISODES), max_size=30), CURRICULA, st.floats(0, 1))
def test_every_task_can_always_be_drawn(
    episodes: list[tuple[Item, Finished]], settings: CurriculumSettings, progress: float
) -> None:
    known = experience(*episodes)
    before = repr(known)
    weights = known.weights([ONE, TWO, OTHER, UNSEEN], settings, progress)
    assert all(0 < weight < float("inf") for weight in weights)
    assert repr(known) == before  # asking changes nothing


@given(st.lists(st.tuples(st.sampled_from([ONE, TWO, OTHER]), EPISODES), min_size=1, max_size=30), st.floats(1.01, 9))
def test_more_turns_and_thinking_never_make_a_task_rarer(episodes: list[tuple[Item, Finished]], factor: float) -> None:
    """Against tasks of other family, whose numbers stay as they are."""
    harder = [
        (item, replace(each, turns=int(each.turns * factor) + 1)) if item is OTHER else (item, each)
        for item, each in episodes
    ]
    before = experience(*episodes).weights([OTHER, UNSEEN], HARD, 1.0)
    after = experience(*harder).weights([OTHER, UNSEEN], HARD, 1.0)
    assert after[0] / after[1] >= before[0] / before[1] - 1e-9
