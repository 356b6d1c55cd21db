"""Which repositories are held out: whole ones, so that no neighbour of a held-out file was trained on.

A repository's place in the order is a hash of the seed and its name alone. So the choice is the same whatever order the
repositories come in, and one more or one fewer moves only those near the limit. Rows that belong to no repository are held
out one by one, each by its own hash.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.parquet as pq

from etude.data.deduplicate import DOCUMENTS, KEPT
from etude.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from etude.data.filter_documents import UnitJob
    from etude.data.manifest import SourceEntry
    from etude.data.settings import DataSettings

    Entries = Mapping[str, SourceEntry]  # by source

GROSS = 1.5  # times the wanted share: a repository that would lead beyond it is passed over


def draw(seed: int, *identity: str) -> random.Random:
    """Return the random numbers of one document: the same in any order, on any machine, in any worker."""
    digest = hashlib.blake2b("\0".join([str(seed), *identity]).encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(digest))  # noqa: S311 - not a secret


def is_heldout(repository: str, heldout: frozenset[str] | float, seed: int) -> bool:
    """Return whether a repository is held out: by name, or for loose rows by chance, fixed by its hash."""
    if isinstance(heldout, frozenset):
        return repository in heldout
    return draw(seed, "heldout", repository).random() < heldout


def choose_heldout(sizes: Mapping[str, Mapping[str, int]], share: float, seed: int) -> set[str]:
    """Return repositories with about `share` of the bytes of each domain; `sizes` are bytes by domain and repository.

    Never all of a domain, and none if each is too large for the share of some domain: then nothing is held out, rather than most of
    the domain. Empty repositories are not chosen.
    """

    def place(name: str) -> bytes:
        return hashlib.sha256(f"{seed}\0{name}".encode(errors="surrogateescape")).digest()

    whole = {domain: sum(each.values()) for domain, each in sizes.items()}
    taken = dict.fromkeys(sizes, 0)
    chosen = set()
    for name in sorted({name for each in sizes.values() for name in each}, key=place):
        here = {domain: each[name] for domain, each in sizes.items() if each.get(name)}
        wanted = any(taken[domain] < share * whole[domain] for domain in here)
        after = {domain: taken[domain] + size for domain, size in here.items()}
        if wanted and all(size <= GROSS * share * whole[at] and size < whole[at] for at, size in after.items()):
            chosen.add(name)
            taken |= after
    return chosen


def hold_out(units: Sequence[UnitJob], data: DataSettings, entries: Entries, seed: int) -> frozenset[str]:
    """Choose whole repositories, domain by domain; one held out in a domain is held out in every source it occurs in."""
    sizes: dict[str, Counter[str]] = defaultdict(Counter)  # by domain and repository
    repositories: dict[str, set[str]] = {source.name: set() for source in data.source}
    for unit in units:
        kept = np.load(unit.folder / KEPT)
        if unit.loose:
            entries[unit.source.name].repositories += int(kept.sum())
            continue
        table = pq.read_table(unit.folder / DOCUMENTS, columns=["repository", "bytes"]).filter(kept)
        for name, size in zip(*(table.column(key).to_pylist() for key in ("repository", "bytes")), strict=True):
            sizes[unit.source.domain][name] += size
            repositories[unit.source.name].add(name)
    by_wish: dict[bool | str, set[str]] = defaultdict(set)
    for each in data.source:
        by_wish[each.hold_out] |= repositories[each.name]
    never, always = by_wish[False], by_wish["all"]
    if both := sorted(never & always):
        where = 'a source with hold_out = false and in one with hold_out = "all"'
        raise UserError(f"{both[0]} is in {where}; take it out of one")
    rest = {domain: {k: v for k, v in each.items() if k not in always} for domain, each in sizes.items()}
    chosen = choose_heldout(rest, data.heldout, seed) - never | always
    for source, names in repositories.items():
        entries[source].repositories += len(names)
        entries[source].heldout_repositories = sorted(chosen & names)
    return frozenset(chosen)
