"""Rows hold exactly what was sampled, each token trained once, whatever the tree."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.trace import Node, Trace
from etude.errors import UserError
from etude.rl.trainer import branches, pack, row_length
from tests.rl import made


@st.composite
def trees(draw: st.DrawFn) -> Trace:
    """Any tree that begins with an opening."""
    rng = random.Random(draw(st.integers(0, 10_000)))
    trace = Trace("any", "task", [made.node(rng, None, "opening")])
    for place in range(1, draw(st.integers(1, 12))):
        kind: Any = draw(st.sampled_from(["turn", "turn", "summary", "answers", "restart"]))
        trace.nodes.append(made.node(rng, draw(st.integers(0, place - 1)), kind, version=place))
    return trace


def told(trace: Trace, *, summaries: bool = True) -> list[Any]:
    """Return all sampled tokens with log-prob and version: versions here name their nodes."""
    return [
        (token, logprob, version)
        for node in trace.nodes if node.sampled and (summaries or node.kind != "summary")
        for token, logprob, version in zip(node.tokens, node.logprobs, node.versions, strict=True)
    ]  # fmt: skip


@given(st.lists(trees(), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_every_sampled_token_is_learnt_once_as_it_was_sampled(found: list[Trace], summaries: bool, fixed: bool) -> None:
    all_branches = [each for number, trace in enumerate(found)
                    for each in branches(trace, number, train_summaries=summaries)]  # fmt: skip
    if not all_branches:
        assert not any(told(trace) for trace in found)
        return
    length = row_length(all_branches, 256, fixed=fixed)
    learnt: list[list[Any]] = [[] for _ in found]
    fresh: list[list[Any]] = [[] for _ in found]
    gains = [0.5 + number for number in range(len(found))]
    for part in pack(all_branches, length, 2, fixed=fixed):
        given_ = part.rows(gains, gains)
        rows = given_.rows
        assert rows.tokens_BT.shape == (2 if fixed else len(part.tokens), length)
        for branch, row, column in part.places:
            here = slice(column, column + len(branch.tokens))
            assert rows.positions_BT[row, here].tolist() == list(range(len(branch.tokens)))
            assert rows.tokens_BT[row, here].tolist() in [
                found[branch.episode].context(leaf)[: len(branch.tokens)]
                for leaf in range(len(found[branch.episode].nodes))
            ]
            for place in range(column, column + len(branch.tokens) - 1):
                which, target = branch.versions[place - column], int(rows.targets_BT[row, place])
                entry = (target, float(given_.sampled_BT[row, place]), int(which))
                if given_.learnt_BT[row, place]:
                    assert rows.weights_BT[row, place] == gains[branch.episode]
                    learnt[branch.episode].append(entry)
                else:
                    assert rows.weights_BT[row, place] == 0
                if branch.fresh[place - column]:
                    fresh[branch.episode].append(entry)
        assert int(given_.learnt_BT.sum()) == sum(int(branch.learnt.sum()) for branch, *_ in part.places)
    for number, trace in enumerate(found):
        for got, wanted in ((learnt[number], told(trace, summaries=summaries)), (fresh[number], told(trace))):
            assert sorted((token, version) for token, _, version in got) == sorted((t, v) for t, _, v in wanted)
            assert sorted(each for _, each, _ in got) == pytest.approx(sorted(each for _, each, _ in wanted))


def test_branches_are_laid_end_to_end_and_bounds_say_where_they_begin() -> None:
    rng = random.Random(1)
    found = branches(made.episode(rng, made.TREE), 0, train_summaries=True)
    assert len(found) == 3  # the summary's, and the two that share a turn
    (part,) = pack(found, row_length(found, 1024, fixed=False), 8, fixed=False)
    assert part.tokens.shape == (1, 64)
    sizes = sorted((len(each.tokens) for each in found), reverse=True)
    begins = [sum(sizes[:place]) for place in range(4)]
    assert part.plain_rows().bounds.tolist() == [*begins, 64]


def test_what_follows_the_last_sampled_token_is_not_computed() -> None:
    trace = made.episode(random.Random(2), made.TREE)
    assert trace.nodes[-1].kind == "answers"
    assert branches(trace, 0, train_summaries=True)[-1].tokens.tolist() == trace.context(9)


def test_a_branch_longer_than_a_row_is_refused() -> None:
    found = branches(made.episode(random.Random(3), made.LINE), 0, train_summaries=True)
    with pytest.raises(UserError, match="does not fit a training row of 8; raise `length`"):
        row_length(found, 8, fixed=False)


def test_a_policy_that_tells_no_log_probs_is_refused() -> None:
    trace = made.episode(random.Random(4), made.LINE)
    trace.nodes[1] = Node(0, "turn", [1, 2], "", True, [], [], [0, 0])
    with pytest.raises(UserError, match="lacks log-probs"):
        branches(trace, 0, train_summaries=True)


def test_a_completion_is_of_the_version_that_began_it() -> None:
    trace = made.episode(random.Random(5), made.LINE)
    for place, (begun, ended) in ((1, (3, 4)), (3, (4, 4))):
        count = len(trace.nodes[place].tokens)
        trace.nodes[place].versions = [begun, *[ended] * (count - 1)]
    (branch,) = branches(trace, 0, train_summaries=True)
    first, second = (len(trace.nodes[place].tokens) for place in (1, 3))
    assert branch.begun_by(4).tolist() == [False] * first + [True] * second
    assert branch.begun_by(3).tolist() == [True] * first + [False] * second
