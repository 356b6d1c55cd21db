"""The host's account of the batch against one that asks every request."""

from __future__ import annotations

import random
from typing import Any

import pytest

from etude.inference.engine import NEVER, Request, Rows, Stop
from etude.inference.policy import Sampling, Token


def request(number: int, computed: int, **wishes: Any) -> Request:
    sampling = Sampling(**{"max_tokens": 5, **wishes})
    stop = Stop(sampling, lambda _: "")
    return Request(number, sampling, 0, [1], stop, None, lambda _: None, computed=computed)


WISHES: list[dict[str, Any]] = [
    {}, {"top_p": 0.9}, {"top_k": 3}, {"top_k": 3, "temperature": 0.0}, {"alternatives": 2}, {"experts": True}, {"seed": 4},
]  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_the_account_is_right_after_any_comings_and_goings(seed: int) -> None:
    rng, rows, count = random.Random(seed), Rows(6), 0
    state: dict[int, dict[str, Any]] = {}  # by row
    reserved: list[int] = []
    for _ in range(300):
        match rng.randrange(4):
            case 0 if (row := rows.reserve()) is not None:
                taken = {*state, *reserved}
                assert row == min(each for each in range(6) if each not in taken)
                reserved.append(row)
            case 1 if reserved:
                row = reserved.pop(rng.randrange(len(reserved)))
                if rng.random() < 0.3:
                    rows.give_back(row)
                    continue
                count += 1
                of = request(count, rng.randrange(1, 30), max_tokens=rng.randrange(1, 9), **rng.choice(WISHES))
                of.written = [Token(1, 0.0, 0.0, 0)] * rng.randrange(of.sampling.max_tokens)
                room = of.computed + rng.randrange(6)
                rows.start(row, of, room)
                state[row] = {
                    "of": of,
                    "computed": of.computed,
                    "left": of.sampling.max_tokens - len(of.written),
                    "room": room,
                }
            case 2 if state:
                row = rng.choice(list(state))
                rows.stop(row)
                gone = state.pop(row)
                assert gone["of"].computed == gone["computed"]
            case 3:
                rows.launched()
                for each in state.values():
                    each["computed"] += 1
                    each["left"] -= 1
        compare(rows, state)
    for row in list(state):
        rows.stop(row)
    assert (rows.cut, rows.alone, rows.watched, len(rows)) == (0, 0, 0, 0)


def compare(rows: Rows, state: dict[int, dict[str, Any]]) -> None:
    samplings = [each["of"].sampling for each in state.values()]
    assert len(rows) == len(state)
    assert rows.requests() == [state[row]["of"] for row in sorted(state)]
    assert rows.cut == sum(each.temperature > 0 and (each.top_p < 1 or each.top_k > 0) for each in samplings)
    assert rows.alone == sum(each.alternatives > 0 for each in samplings)
    assert rows.watched == sum(each.experts for each in samplings)
    assert rows.seeded == sum(each["of"].seeded for each in state.values())
    if state:
        assert rows.last() == max(state)
    assert rows.done() == [row for row in sorted(state) if state[row]["left"] <= 0]
    for more in (0, 3):
        short = [row for row, each in state.items() if each["room"] < each["computed"] + 1 + more]
        assert rows.short_of_pages(more) == sorted(short, key=lambda row: state[row]["of"].number)
    idle = [row for row in range(rows.count) if row not in state]
    assert all(rows.left[row] == rows.room[row] == NEVER and rows.computed[row] == 0 for row in idle)


def test_no_more_rows_than_there_are() -> None:
    rows = Rows(2)
    assert [rows.reserve() for _ in range(3)] == [0, 1, None]
    rows.give_back(1)
    assert rows.reserve() == 1
