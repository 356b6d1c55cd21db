"""PrefixCache against a model of the device: what is really in every page, for every order of events."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from etude.inference.prefix_cache import Held, Node, PrefixCache

Written = tuple[object, tuple[int, ...]]  # keys and values depend on the weights and on all the text before


@dataclass(eq=False)
class Writer:
    """A request as an engine runs it."""

    held: Held
    tokens: list[int]
    computed: int
    weights: object  # it began with; keys and values made of those of several weights are good for none


@dataclass
class Device:
    """What is in the pages."""

    size: int
    pages: dict[tuple[int, int], Written] = field(default_factory=dict)

    def write(self, writer: Writer, count: int, weights: object) -> None:
        pages = writer.held.pages
        for place in range(writer.computed, writer.computed + count):
            by = weights if writer.weights is weights else object()
            self.pages[pages[place // self.size], place % self.size] = (by, tuple(writer.tokens[: place + 1]))
        writer.computed += count

    def copy(self, source: int, target: int, count: int) -> None:
        assert source != target
        for offset in range(count):
            self.pages[target, offset] = self.pages[source, offset]

    def holds(self, pages: list[int], text: tuple[int, ...], weights: object) -> bool:
        return all(
            self.pages.get((pages[place // self.size], place % self.size)) == (weights, text[: place + 1])
            for place in range(len(text))
        )


def nodes_of(pages: PrefixCache) -> list[tuple[list[int], tuple[int, ...], Node]]:
    """Return pages, text and node of every node in the tree."""
    found: list[tuple[list[int], tuple[int, ...], Node]] = []
    waiting: list[tuple[list[int], tuple[int, ...], Node]] = [([], (), pages._root)]
    while waiting:
        before, text, node = waiting.pop()
        below = [([*before, child.page], text + child.tokens, child) for child in node.children.values()]
        found += below
        waiting += below
    return found


def to_be_evicted(pages: PrefixCache, count: int) -> list[Node]:
    """Return which nodes must go, by brute force: leaves nobody reads, the longest unused first."""
    there, gone = [node for *_, node in nodes_of(pages)], list[Node]()
    while len(gone) < count:
        parents = {node.parent for node in there}
        leaves = [node for node in there if node.users == 0 and node not in parents]
        gone.append(min(leaves, key=lambda node: node.used))
        there.remove(gone[-1])
    return gone


BITS = st.sampled_from([0, 0, 0, 1])


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order, what is found is right, and every page is somewhere once."""

    @initialize(count=st.integers(1, 20), size=st.sampled_from([1, 2, 4]))
    def start(self, count: int, size: int) -> None:
        self.pages, self.device = PrefixCache(count, size), Device(size)
        self.writers: list[Writer] = []
        self.weights: object = object()

    def in_use(self) -> set[int]:
        return {page for writer in self.writers for page in writer.held.pages}

    def grow(self, held: Held, positions: int) -> bool:
        """Grow, and see that it is refused only where it must be, and that the right pages go."""
        before, kept = list(held.pages), [node for *_, node in nodes_of(self.pages)]
        missing = max(0, -(-positions // self.pages.size) - len(before))
        could = missing <= self.pages.count - len(self.in_use() | set(before))
        expected = to_be_evicted(self.pages, max(0, missing - len(self.pages._free))) if could else []
        assert self.pages.grow(held, positions) is could
        assert {node for node in kept if node.gone} == set(expected)
        assert held.pages[: len(before)] == before
        assert len(held.pages) == len(before) + (missing if could else 0)
        return could

    @rule(like=st.integers(0, 99), cut=st.sampled_from([0, 0, 0, 1, 2, 5]), new=st.lists(BITS, max_size=5))
    def begin(self, like: int, cut: int, new: list[int]) -> None:
        known = [
            *(text for _, text, _ in nodes_of(self.pages)),
            *(tuple(writer.tokens) for writer in self.writers),
            (),
        ]
        text = known[like % len(known)]  # most prompts begin with what is there, or somebody writes
        tokens = [*text[: max(0, len(text) - cut)], *new] or [0]
        held, done, copy = self.pages.begin(tokens)
        assert 0 <= done < len(tokens)
        if not self.grow(held, len(tokens)):
            self.pages.drop(held)
            return
        if copy:
            self.device.copy(*copy)
        assert self.device.holds(held.pages, tuple(tokens[:done]), self.weights)
        self.writers.append(Writer(held, tokens, done, self.weights))

    @precondition(lambda self: self.writers)
    @rule(which=st.integers(0, 99), new=st.lists(BITS, max_size=3), share=st.booleans())
    def write(self, which: int, new: list[int], share: bool) -> None:
        writer = self.writers[which % len(self.writers)]
        if not self.grow(writer.held, len(writer.tokens) + len(new)):
            return
        writer.tokens += new
        self.device.write(writer, len(writer.tokens) - writer.computed, self.weights)
        if share:
            self.pages.publish(writer.held, writer.tokens, writer.computed)

    @precondition(lambda self: self.writers)
    @rule(which=st.integers(0, 99), keep=st.integers(0, 4), less=st.sampled_from([0, 0, 1, 2]))
    def leave(self, which: int, keep: int, less: int) -> None:
        writer = self.writers.pop(which % len(self.writers))
        if keep:
            self.pages.end(writer.held, writer.tokens, max(0, writer.computed - less))
        else:
            self.pages.drop(writer.held)
        assert writer.held.pages == []

    @rule(what=st.integers(0, 11))
    def rarely(self, what: int) -> None:
        """What would leave little in the tree if it happened as often as the rest."""
        if what in {2, 3}:  # new weights
            self.weights = object()
            self.pages.renew()
            assert nodes_of(self.pages) == []
        elif what == 4 and self.writers:  # when all others are set back, the oldest can have every page there is
            for writer in self.writers[1:]:
                self.pages.end(writer.held, writer.tokens, writer.computed)
            del self.writers[1:]
            assert self.grow(self.writers[0].held, self.pages.count * self.pages.size)

    @invariant()
    def every_page_is_somewhere_once(self) -> None:
        tree = [node for *_, node in nodes_of(self.pages)]
        passed = {node for writer in self.writers for node in writer.held.nodes if node.gone}
        own = [page for writer in self.writers for page in writer.held.own]
        everywhere = [*self.pages._free, *(node.page for node in [*tree, *passed]), *own]
        assert sorted(everywhere) == list(range(1, self.pages.count + 1))
        assert self.pages.free() == self.pages.count - len(self.in_use())
        for node in [*tree, *passed]:
            assert node.users == sum(node in writer.held.nodes for writer in self.writers)

    @invariant()
    def the_tree_says_what_the_pages_hold(self) -> None:
        for pages, text, _ in nodes_of(self.pages):
            assert self.device.holds(pages, text, self.weights)

    @invariant()
    def what_a_writer_has_computed_stays(self) -> None:
        for writer in self.writers:
            if writer.weights is self.weights:
                assert self.device.holds(writer.held.pages, tuple(writer.tokens[: writer.computed]), self.weights)


def test_any_order_of_events() -> None:
    run_state_machine_as_test(AnyOrder, settings=settings(max_examples=250, stateful_step_count=50, deadline=None))


def kept(pages: PrefixCache, text: list[int]) -> None:
    """Let a request compute a text and end."""
    held, done, _ = pages.begin(text)
    assert pages.grow(held, len(text))
    assert done < len(text)
    pages.end(held, text, len(text))


def found(pages: PrefixCache, text: list[int]) -> int:
    """Return how many tokens of a text are found, without changing much."""
    held, done, _ = pages.begin([*text, -1])
    pages.drop(held)
    return done


def test_what_was_kept_is_found_to_the_last_token() -> None:
    for length in range(1, 200):
        pages = PrefixCache(8, 64)
        text = list(range(length))
        kept(pages, text)
        loose = length % 64
        assert found(pages, text) == length - (loose if loose < 16 else 0)  # fewer than that are computed again


def alike(one: list[int], other: list[int]) -> int:
    """Return how many tokens two texts begin with in common."""
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


@given(
    st.sampled_from([1, 2, 8, 64]), st.lists(st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=30), max_size=30)
)  # fmt: skip
def test_with_room_enough_the_longest_beginning_is_found(size: int, texts: list[list[int]]) -> None:
    pages, before = PrefixCache(1000, size), [[-1]]
    for text in texts:
        held, done, _ = pages.begin(text)
        longest = max(alike(text[:-1], other) for other in before)
        loose = longest % size
        assert done == longest - (loose if loose < max(1, min(16, size // 2)) else 0)
        assert pages.grow(held, len(text))
        pages.end(held, text, len(text))
        before.append(text)
    assert len(nodes_of(pages)) + len(pages._free) == 1000


def test_the_likest_page_is_copied_though_another_is_alike_further_on() -> None:
    pages = PrefixCache(10, 8)
    kept(pages, [0, 0, 0, 0, 0, 0, 1, 1])
    kept(pages, [0, 0, 0, 0, 1, 0, 0, 1])
    assert pages.begin([0] * 12)[1:] == (6, (1, 3, 6))


def test_two_conversations_share_their_beginning_and_one_page_is_copied() -> None:
    pages = PrefixCache(10, 4)
    kept(pages, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    held, done, copy = pages.begin([1, 2, 3, 4, 5, 6, 7, 0, 0])
    assert (done, held.pages, copy) == (7, [1, held.own[0]], (2, held.own[0], 3))
    other, done, copy = pages.begin([1, 2, 3, 4, 5])
    assert (done, other.pages, copy) == (4, [1], None)


def test_the_loose_end_of_a_conversation_is_taken_over_not_copied() -> None:
    pages = PrefixCache(3, 4)
    kept(pages, [1, 2, 3, 4, 5, 6])
    held, done, copy = pages.begin([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert (done, held.pages, copy) == (6, [1, 2], None)
    again, done, copy = pages.begin([1, 2, 3, 4, 5, 6, 0])  # it is somebody's now
    assert (done, again.pages, copy) == (4, [1], None)


def test_the_longest_unused_goes_first() -> None:
    pages = PrefixCache(8, 2)
    for name in "bacd":
        kept(pages, [ord(name)] * 4)
    assert found(pages, [ord("b")] * 4) == 4  # used again: now the others are older
    assert found(pages, [ord("a")] * 4) == 4
    order = []
    held = pages.begin([0])[0]
    for size in range(1, 9):
        before = {text for _, text, _ in nodes_of(pages)}
        assert pages.grow(held, 2 * size)
        (lost,) = before - {text for _, text, _ in nodes_of(pages)}
        order.append((chr(lost[0]), len(lost)))
    assert order == [(name, length) for name in "cdba" for length in (4, 2)]  # the end of a text before its beginning
    assert not pages.grow(held, 2 * 9)
    assert pages.evicted == 8


def test_a_refusal_costs_nobody_anything() -> None:
    pages = PrefixCache(4, 2)
    kept(pages, [1, 2, 3, 4])
    held, *_ = pages.begin([9])
    assert not pages.grow(held, 2 * 5)
    assert found(pages, [1, 2, 3, 4]) == 4
    assert pages.evicted == 0


def test_a_text_of_ten_thousand_pages() -> None:
    pages, text = PrefixCache(10_000, 2), [*range(20_000)]
    kept(pages, text)
    assert found(pages, text[:-1]) == 19_999 - 1
    held, *_ = pages.begin([-1])
    assert pages.grow(held, 2 * 9_000)
    assert pages.evicted == 9_000
    assert found(pages, text[:-1]) == 2_000
    pages.renew()
    assert pages.free() == 1_000


def test_a_pool_nobody_presses_does_not_fill_up_with_notes() -> None:
    pages = PrefixCache(50, 4)
    for _ in range(2_000):
        kept(pages, [*range(40)])
    assert pages.evicted == 0
    assert len(pages._loose) <= 2 * 50 + 64


@pytest.mark.parametrize("seed", range(3))
def test_a_long_life_with_little_room(seed: int) -> None:
    """Sessions that grow turn by turn in a pool too small for them: every page is accounted for at the end."""
    rng, pages, texts = random.Random(seed), PrefixCache(40, 16), dict[str, list[int]]()
    covered = 0
    for turn in range(600):
        name = f"session {rng.randrange(12)}"
        text = texts.setdefault(name, [int(name.split()[1])])
        text += [rng.randrange(50) for _ in range(rng.randrange(1, 40))]
        if len(text) > 500:
            del texts[name]
            continue
        held, done, _ = pages.begin(text)
        covered += done
        assert pages.grow(held, len(text))
        (pages.end if turn % 7 else lambda held, *_: pages.drop(held))(held, text, len(text))
    assert pages.free() == 40
    assert covered > 5_000
