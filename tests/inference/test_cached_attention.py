"""Attention over pages against attention worked out slowly, and inside a model of transformers."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.inference.attention import Pass, Probe, _one_by_one, _together, cached_attention, during
from etude.inference.kv_cache import Cache, LayerShape, Plan, plan
from tests.inference.attending import CASES, Case, Requests, attended, filled

CPU = torch.device("cpu")
MORE = {
    "a page is the whole context, neighbours": Case(6, 2, 16, 16, 50, [([1], 9, 1), ([2], 41, 1), ([3], 0, 1)]),
    "a page is the whole context, apart": Case(6, 2, 16, 16, 50, [([4], 9, 1), ([2], 41, 1), ([1], 0, 1)]),
    "pages of three": Case(4, 2, 8, 8, 3, [([1, 5, 2, 4], 3, 8), ([3], 0, 2)]),
    "pages of one": Case(2, 1, 8, 8, 1, [([3, 1, 2], 0, 3), ([5, 6, 4], 1, 2)], window=2),
}


def together(where: Plan) -> bool:
    return where.each > 0 and all(len(pages) == 1 for pages in where.pages)


def differs_by(case: Case, *, sinks: bool = False) -> list[float]:
    """Return how far each way that can do it is from the slow one."""
    cache, where, query, key, value = filled(case, CPU, torch.float32)
    cache.write(1, where, key, value)
    weights = torch.randn(case.heads) * 2 if sinks else None
    expected = attended(case, cache, 1, query, 0.3, weights)
    ways = [_one_by_one, _together] if together(where) else [_one_by_one]
    found = [way(query, 1, Pass(cache, where, 1), 0.3, case.window, weights) for way in ways]
    return [float((each - expected).abs().max()) for each in found]


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("case", (CASES | MORE).values(), ids=list(CASES | MORE))
def test_both_ways_attend_to_what_is_there(case: Case, *, sinks: bool) -> None:
    assert max(differs_by(case, sinks=sinks)) < 5e-5


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw requests that share no page they write to, each as far as it likes."""
    size, kv_heads = draw(st.sampled_from([1, 2, 5, 16])), draw(st.integers(1, 3))
    alike = draw(st.booleans())
    count = draw(st.integers(1, 6))
    requests: Requests = []
    free = iter(draw(st.permutations(range(1, 120))))
    for _ in range(draw(st.integers(1, 4))):
        first = draw(st.integers(0, 20))
        new = count if alike else draw(st.integers(1, 6))
        pages = [next(free) for _ in range(-(-(first + new) // size) + draw(st.integers(0, 1)))]
        requests.append((pages, first, new))
    width = draw(st.sampled_from([4, 8]))
    return Case(
        kv_heads * draw(st.integers(1, 3)),
        kv_heads,
        width,
        draw(st.sampled_from([4, 8])),
        size,
        requests,
        draw(st.integers(0, 9)),
    )


@settings(max_examples=40)
@given(cases())
def test_any_pass(case: Case) -> None:
    assert max(differs_by(case)) < 5e-5


@given(cases())
def test_a_plan_puts_every_token_where_its_request_has_it(case: Case) -> None:
    made = plan(case.requests, case.size, CPU)
    by_hand = [
        (pages[position // case.size], position % case.size, position)
        for pages, first, count in case.requests
        for position in range(first, first + count)
    ]
    assert list(zip(made.page_N.tolist(), made.offset_N.tolist(), made.position_N.tolist(), strict=True)) == by_hand
    counts = [count for _, _, count in case.requests]
    assert made.begin_G.diff().tolist() == made.counts == counts
    assert made.length_G.tolist() == made.lengths == [first + count for _, first, count in case.requests]
    assert made.longest == max(counts)
    assert made.each == (counts[0] if len({*counts}) == 1 else 0)
    for row, (pages, _, _) in zip(made.table_GP.tolist(), case.requests, strict=True):
        assert row == pages + [0] * (len(row) - len(pages))


@pytest.mark.parametrize("case", (CASES | MORE).values(), ids=list(CASES | MORE))
def test_a_pass_writes_its_own_places_and_nothing_else(case: Case) -> None:
    cache, where, query, key, value = filled(case, CPU, torch.float32)
    before = [each.clone() for each in (*cache.keys, *cache.values)]
    with during(Pass(cache, where, 1)):
        got = cached_attention(query[None], key[None], value[None], 0.3, case.window)
    way = _together if together(where) else _one_by_one
    assert torch.equal(got[0], way(query, 1, Pass(cache, where, 1), 0.3, case.window, None))
    before[1][where.page_N, :, where.offset_N] = key.transpose(0, 1)
    before[3][where.page_N, :, where.offset_N] = value.transpose(0, 1)
    assert all(torch.equal(one, other) for one, other in zip(before, (*cache.keys, *cache.values), strict=True))


def test_layers_come_in_order_and_threads_do_not_meet() -> None:
    case = CASES["drafts of each"]
    cache, where, query, key, value = filled(case, CPU, torch.float32)
    other_cache, *_ = filled(case, CPU, torch.float32)
    inside, ready = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with during(Pass(other_cache, where)):
            inside.set()
            ready.wait(60)
            cached_attention(query[None], 2 * key[None], value[None], 0.3, 0)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    assert inside.wait(60)
    with during(Pass(cache, where)):
        for factor in (1, 3):
            cached_attention(query[None], factor * key[None], value[None], 0.3, 0)
    ready.set()
    thread.join(60)
    for held, factor in ((cache.keys[0], 1), (cache.keys[1], 3), (other_cache.keys[0], 2)):
        assert torch.equal(held[where.page_N, :, where.offset_N], factor * key.transpose(0, 1))


def test_what_one_request_leaves_does_not_reach_another() -> None:
    """PrefixCache beyond a text, and places beyond its end, may hold anything a request before has left there."""
    case = CASES["a page each, drafts, a window"]
    cache, where, query, key, value = filled(case, CPU, torch.float32)
    cache.write(1, where, key, value)
    before = _together(query, 1, Pass(cache, where, 1), 0.3, 0, None)
    for held in (cache.keys[1], cache.values[1]):
        kept = torch.zeros(held.shape[0], held.shape[2], dtype=torch.bool)
        for pages, first, count in case.requests:
            for position in range(first + count):
                kept[pages[position // case.size], position % case.size] = True
        held.transpose(1, 2)[~kept] = 1e30
    assert torch.equal(_together(query, 1, Pass(cache, where, 1), 0.3, 0, None), before)
    assert torch.allclose(_one_by_one(query, 1, Pass(cache, where, 1), 0.3, 0, None), before, atol=1e-5)


def test_probing_learns_the_shapes_and_attends_to_nothing() -> None:
    query, key, value = torch.randn(1, 6, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 4)
    with during(Probe()) as found:
        assert torch.equal(cached_attention(query, key, value, 0.5, 7), torch.zeros(1, 5, 6, 4))
    (shape,) = found.layers
    assert (shape.scaling, shape.window) == (0.5, 7)
    assert (shape.heads, shape.key_width, shape.value_width) == (2, 8, 4)
    assert shape.bytes(torch.bfloat16) == 2 * (8 + 4) * 2


def test_a_copy_takes_the_beginning_of_a_page_in_all_layers() -> None:
    cache = Cache([LayerShape(2, 4, 8), LayerShape(1, 3, 3)], 3, 5, CPU, torch.float32)
    for each in (*cache.keys, *cache.values):
        each.copy_(torch.randn_like(each))
    before = [each.clone() for each in (*cache.keys, *cache.values)]
    cache.copy(1, 3, 2)
    for old, new in zip(before, (*cache.keys, *cache.values), strict=True):
        old[3, :, :2] = old[1, :, :2]
        assert torch.equal(old, new)


GROWTH = """
import psutil, torch
from etude.inference.kv_cache import Cache, LayerShape
process, size = psutil.Process(), 1 << 28
for dtype in (torch.float32, torch.bfloat16):
    before = process.memory_info().rss
    cache = Cache([LayerShape(1, 64, 64)], size // 64 // dtype.itemsize // 64, 64, torch.device("cpu"), dtype)
    grown = process.memory_info().rss - before
    for each in (cache.keys[0], cache.values[0]):
        assert each.shape[1:] == (1, 64, 64) and each.dtype == dtype and not each[:: len(each) // 8].any()
        each[3] = 1
        assert float(each[2:5].sum()) == 64 * 64
    print(grown)
"""


def test_memory_of_a_cache_is_taken_as_it_is_written() -> None:
    """In a process of its own: one that has trained keeps freed memory, which must be cleared before it is used again."""
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert max(map(int, done.stdout.split())) < 1 << 26  # keys and values are 1 << 29


def test_a_narrower_cache_takes_what_is_computed_wider() -> None:
    case = CASES["one token of each"]
    cache, where, _, key, value = filled(case, CPU, torch.bfloat16)
    cache.write(0, where, key.float(), value.float())
    assert torch.equal(cache.keys[0][where.page_N, :, where.offset_N], key.transpose(0, 1))
