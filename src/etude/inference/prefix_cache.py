"""Which page of the key-value cache belongs to whom: sharing, keeping, evicting. Pure logic; the tensors are elsewhere.

A page holds the keys and values of `size` positions. What was computed once is kept as long as there is room, in a tree by tokens: a
node is a page, its path from the root is the text before it. A new request takes every full page that its prompt begins with,
together with whoever has it; a page of which only the beginning fits is copied, or taken over if it is the loose end of a
conversation and nobody else's.

Keys and values are only good for the weights that made them, so a tree belongs to a version of the weights, and a new version
starts a new tree. Whoever runs on meanwhile keeps its pages, and they go when it ends.

Under pressure the page goes that was used longest ago, and always the end of a text before its beginning.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Text = tuple[int, ...]

WORTH_COPYING = 16  # positions; fewer are computed again


@dataclass(eq=False)
class Node:
    """A page in the tree: full, or the loose end of a text."""

    page: int
    tokens: Text
    parent: Node | None
    children: dict[Text, Node] = field(default_factory=dict)
    users: int = 0  # requests that read it
    used: int = 0  # when last
    gone: bool = False  # out of the tree: evicted, taken over, or its version has passed


@dataclass
class Held:
    """The pages of one request, in order: shared ones from the tree first, then its own."""

    nodes: list[Node] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    end: Node | None = None  # where in the tree its next full page would hang

    @property
    def pages(self) -> list[int]:
        """Return all page numbers."""
        return [node.page for node in self.nodes] + self.own


class PrefixCache:
    """All pages but number 0, which is for what nobody reads."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._worth = max(1, min(WORTH_COPYING, size // 2))
        self._free = list(range(1, count + 1))  # a heap: low numbers first, so that a small load stays together
        self._idle = 0  # pages in the tree that nobody reads
        self._root = Node(0, (), None)
        self._loose: list[tuple[int, int, Node]] = []  # leaves nobody reads, by last use; stale entries are skipped
        self._clock = itertools.count(1)
        self.evicted = 0

    def free(self) -> int:
        """Return how many pages could be had now."""
        return len(self._free) + self._idle

    def begin(self, tokens: Sequence[int]) -> tuple[Held, int, tuple[int, int, int] | None]:
        """Return the pages a text finds done, how many of its tokens they cover, and what has to be copied for that.

        A copy is (source page, target page, positions). The last token is never covered: it must be computed for the model to say
        what comes next.
        """
        held = Held(end=self._root)
        node, done, most = self._root, 0, len(tokens) - 1
        while done + self.size <= most and (child := node.children.get(tuple(tokens[done : done + self.size]))):
            self._read(child, held)
            node, done = child, done + self.size
        best, shared = self._likest(node, tuple(tokens[done:most]))
        if best is None:
            return held, done, None
        if shared == len(best.tokens) < self.size:  # a loose end: nobody reads it, and nothing hangs on it
            self._unhang(best)
            held.own.append(best.page)
            return held, done + shared, None
        best.users += 1  # or it might be evicted for its own copy
        page = self._take()
        best.users -= 1
        self._loosen(best)
        if page is None:
            return held, done, None
        held.own.append(page)
        return held, done + shared, (best.page, page, shared)

    def _likest(self, node: Node, tokens: Text) -> tuple[Node | None, int]:
        best, most = None, self._worth - 1
        for child in node.children.values():
            # There may be thousands: ask first for the one token that must be alike for this child to be the likest so far.
            nearer = child.tokens[most : most + 1] == tokens[most : most + 1]
            if nearer and child.tokens[:most] == tokens[:most]:
                best, most = child, common(child.tokens, tokens)
                if most == len(tokens):
                    break
        return best, most if best else 0

    def _read(self, node: Node, held: Held) -> None:
        self._idle -= node.users == 0
        node.users += 1
        node.used = next(self._clock)
        held.nodes.append(node)
        held.end = node

    def grow(self, held: Held, positions: int) -> bool:
        """Give a request pages for so many positions; False, and nothing changed, if there are not enough."""
        missing = -(-positions // self.size) - len(held.nodes) - len(held.own)
        if missing > self.free():  # or what others may want again would be evicted for nothing
            return False
        held.own += [page for _ in range(missing) if (page := self._take())]
        return True

    def _take(self) -> int | None:
        if not self._free:
            self._evict()
        return heapq.heappop(self._free) if self._free else None

    def _evict(self) -> None:
        while self._loose:
            used, _, node = heapq.heappop(self._loose)
            if _is_loose(node) and node.used == used:
                self._unhang(node)
                heapq.heappush(self._free, node.page)
                self.evicted += 1
                return

    def _unhang(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.tokens]
        node.gone = True
        self._idle -= 1
        self._loosen(node.parent)

    def _loosen(self, node: Node) -> None:
        """Note that a node may be evicted, if nothing keeps it."""
        if _is_loose(node):
            heapq.heappush(self._loose, (node.used, id(node), node))
            if len(self._loose) > 2 * self.count + 64:
                loose = {each for _, _, each in self._loose if _is_loose(each)}
                self._loose = sorted((each.used, id(each), each) for each in loose)

    def publish(self, held: Held, tokens: Sequence[int], computed: int) -> None:
        """Let others share the full pages of a request whose first `computed` tokens are in the cache."""
        if held.end is None or held.end.gone:
            return
        while held.own and (len(held.nodes) + 1) * self.size <= computed:
            begin = len(held.nodes) * self.size
            content = tuple(tokens[begin : begin + self.size])
            if content in held.end.children:  # somebody was faster; this request goes on with its own, unshared
                held.end = None
                return
            self._hang(content, held)

    def _hang(self, content: Text, held: Held) -> None:
        assert held.end is not None
        node = Node(held.own.pop(0), content, held.end)
        self._idle += 1
        held.end.children[content] = node
        self._read(node, held)

    def end(self, held: Held, tokens: Sequence[int], computed: int) -> None:
        """Take back a request's pages; what it computed is kept in the tree as long as there is room."""
        self.publish(held, tokens, computed)
        rest, at = tuple(tokens[len(held.nodes) * self.size : computed]), held.end
        good = held.own and len(rest) >= self._worth  # less would never be asked for
        if good and at and not at.gone and self._likest(at, rest)[1] < len(rest):
            self._hang(rest, held)
        self.drop(held)

    def drop(self, held: Held) -> None:
        """Take back a request's pages; what it wrote into its own is lost."""
        for node in held.nodes:
            node.users -= 1
            if node.gone and not node.users:
                heapq.heappush(self._free, node.page)
            elif not node.users:
                self._idle += 1
                self._loosen(node)
        for page in held.own:
            heapq.heappush(self._free, page)
        held.nodes, held.own, held.end = [], [], None

    def renew(self) -> None:
        """Start a new tree for new weights."""
        passed = [self._root]
        for node in passed:
            passed.extend(node.children.values())
            node.gone = True
            if node.page and not node.users:
                heapq.heappush(self._free, node.page)
        self._root, self._loose, self._idle = Node(0, (), None), [], 0


def _is_loose(node: Node) -> bool:
    """Whether nothing keeps a page in the tree."""
    return node.parent is not None and not (node.users or node.children or node.gone)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two texts begin with in common."""
    most = min(len(one), len(other))
    return next((index for index in range(most) if one[index] != other[index]), most)
