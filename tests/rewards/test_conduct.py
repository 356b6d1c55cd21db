from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.trace import Trace
from etude.rewards.interaction import interaction
from etude.rewards.reward import collapse, conduct, penalty, terminal_share
from tests.rewards.episodes import call, played

BROKEN = "@read\npath<<END\nnever closed"
SHELL, READ = call("shell", command="ls"), call("read", path="a")


def part(trace: Trace) -> float:
    return conduct(trace, interaction(trace))


@pytest.mark.parametrize(
    ("turns", "faults"),
    [
        ((READ, "done"), 0.0),
        ((BROKEN, "done"), 1.0),
        ((BROKEN, BROKEN, BROKEN), 3.0),  # the harness ends it
        ((call("todo", open="3"), "done"), 1.5),
        ((call("todo", open="3"), call("todo", open="0"), "done"), 0.0),
        ((call("refuse_it", path="a"), call("refuse_it", path="b"), "done"), 0.25),
        ((SHELL, SHELL, SHELL, SHELL, "done"), 0.0),  # too few to speak of
        ((SHELL, SHELL, SHELL, SHELL, READ, "done"), 0.0),
        ((SHELL, SHELL, SHELL, SHELL, SHELL, "done"), 1.0),
        ((BROKEN, call("todo", open="1"), *[SHELL] * 9, "done"), 1.5 + 0.5),
        (("done",), 3.0),  # babble is no way out of breaking calls
    ],
)
def test_faults_of_whole_episodes(turns: tuple[str, ...], faults: float) -> None:
    assert part(played(*turns)) == pytest.approx(penalty(faults))


def test_where_there_is_nothing_but_a_terminal_using_it_is_no_collapse() -> None:
    bash = call("bash", command="ls")
    trace = played(*[bash] * 9, "done", tools=["bash"])
    assert terminal_share(trace) is None
    assert part(trace) == 0
    assert part(played(*[bash] * 9, "done", tools=["bash", "read"])) == penalty(1)


def test_no_calls_have_no_share() -> None:
    assert terminal_share(played("done")) is None
    assert terminal_share(played(SHELL, READ, "done")) == 0.5


@given(st.integers(5, 60), st.integers(0, 60))
def test_the_collapse_grows_with_the_share_from_nothing_to_one(calls: int, shell: int) -> None:
    def of(shell: int) -> float:
        counts = {"calls": calls, "calls_shell": min(shell, calls)}
        return collapse(Trace("e", "t", counts=counts, made_by={"tools": ["read", "shell"]}))

    assert 0 <= of(shell) <= of(shell + 1) <= of(calls) == pytest.approx(1)
    assert of(int(0.8 * calls)) == pytest.approx(0, abs=1e-9)
