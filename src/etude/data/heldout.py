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


def choose_heldout(sizes: Mapping[str, Mapping[str, int]], share: float, seed: int) -> set[str]:
    """Return repositories with about `share` of the bytes of each domain; `sizes` are bytes by domain and repository.

    Never all of a domain. None if every one is too large for the share in some domain: better nothing to measure with than
    most of it lost to training, unasked. An empty repository has nothing to measure with and is not chosen.
    """
    whole = {domain: sum(each.values()) for domain, each in sizes.items()}
    taken = dict.fromkeys(sizes, 0)
    chosen = set()
    for name in sorted({name for each in sizes.values() for name in each}, key=lambda name: _place(name, seed)):
        here = {domain: each[name] for domain, each in sizes.items() if each.get(name)}
        wanted = any(taken[domain] < share * whole[domain] for domain in here)
        after = {domain: taken[domain] + size for domain, size in here.items()}
        if wanted and all(size <= GROSS * share * whole[at] and size < whole[at] for at, size in after.items()):
            chosen.add(name)
            taken |= after
    return chosen


def _place(name: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}\0{name}".encode(errors="surrogateescape")).digest()
