"""Which repositories are held out: whole ones, so that no neighbour of a held-out file was trained on.

A repository's place in the order is a hash of the seed and its name alone. So the choice is the same whatever order the
repositories come in, and one more or one fewer moves only those near the limit.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

GROSS = 1.5  # times the wanted share: a repository that would lead beyond it is passed over


def choose_heldout(sizes: Mapping[str, int], share: float, seed: int) -> set[str]:
    """Return repositories with about `share` of all bytes; `sizes` are bytes by repository.

    Never all. None if every one is too large for the share: better nothing to measure with than most of it lost to training,
    unasked. An empty repository has nothing to measure with and is not chosen.
    """
    order = sorted((name for name, size in sizes.items() if size), key=lambda name: _place(name, seed))
    if not share or len(order) < 2:
        return set()
    wanted = share * sum(sizes.values())
    chosen: list[str] = []
    taken = 0
    for name in order:
        if taken < wanted and taken + sizes[name] <= GROSS * wanted:
            chosen.append(name)
            taken += sizes[name]
    if len(chosen) == len(order):
        chosen.pop()
    return set(chosen)


def _place(name: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}\0{name}".encode(errors="surrogateescape")).digest()
