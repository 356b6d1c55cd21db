"""Batches of a built corpus: mixed by shares, shuffled, resumable to the exact sample.

The order of samples is a function of the corpus, the shares and the seed: the share of each source, whose turn it is, and which of
its rows comes next follow from a few integers. So a run can be resumed anywhere, and every rank works out the same order alone. A
global batch is the next `batch` samples of it, and each rank reads its own stretch of that: the same batches come out for any number
of ranks and of workers, and a state saved by one rank can be loaded by any, however many there are.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import isqrt
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from etude.data.manifest import BUILD_AGAIN, load_manifest
from etude.data.packing import Shard
from etude.errors import UserError, nearest
from etude.files import digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    Place = tuple[str, Shard, int]  # of a row: source, shard, index in the shard
    Counts = dict[str, dict[str, int]]  # "rows" and "tokens" by source

ROUNDING = 1e-9  # shares come from decimal fractions
ROUNDS = 6  # of the Feistel network; four suffice in theory, if the round function is random
WORD = (1 << 64) - 1


def shares(
    tokens: Mapping[str, int], domains: Mapping[str, str], weights: Mapping[str, float],
    domain_shares: Mapping[str, float], replay: tuple[str, float] | None,
) -> dict[str, float]:  # fmt: skip
    """Return the share of each source among the tokens seen; they add up to 1.

    A domain with a stated share gets exactly that, and so does the source of `replay`, which does not count to its domain.
    What is left goes to all other sources. Whatever several sources have together is split by tokens × weight.
    """
    mass = {source: count * weights.get(source, 1.0) for source, count in tokens.items()}
    mixed = [source for source in tokens if not (replay and source == replay[0])]
    by_domain = {domain: [source for source in mixed if domains[source] == domain] for domain in domain_shares}
    stated = [(f"the domain {domain!r}", share, by_domain[domain]) for domain, share in domain_shares.items()]
    if replay:
        stated.append((f"replay of {replay[0]!r}", replay[1], [replay[0]]))
    rest = 1 - sum(share for _, share, _ in stated)
    assert rest >= -ROUNDING, "shares add up to more than 1"
    others = [source for source in mixed if domains[source] not in domain_shares]
    result = dict.fromkeys(tokens, 0.0)
    for what, share, sources in [*stated, ("all that has no stated share", rest if rest > ROUNDING else 0.0, others)]:
        total = sum(mass.get(source, 0) for source in sources)
        if share and not total:
            advice = "change the shares or the sources"
            raise UserError(f"{what} is to be {share:.3g} of the tokens but has none left; {advice}")
        result |= {source: share * mass[source] / total for source in sources if total}
    return result


class Mixer:
    """Takes turns between sources so that each keeps to its share of tokens, however long their rows are.

    The next row, taken as full, goes to the source with the largest share × tokens − taken. No source is then ever more
    than (1 − 1/n) rows ahead of its share, nor more than 1/2 + 1/3 + … + 1/n rows behind (the cup game), for n sources.
    """

    def __init__(self, shares: Mapping[str, float], length: int) -> None:
        assert abs(sum(shares.values()) - 1) < ROUNDING * 1000, f"shares add up to {sum(shares.values())}"
        self.shares = {source: share for source, share in sorted(shares.items()) if share > 0}
        self.length = length
        self.taken = dict.fromkeys(self.shares, 0)  # tokens: the whole state

    def turn(self) -> str:
        """Return the source to take a row from; of equals the first by name."""
        tokens = sum(self.taken.values()) + self.length
        return max(self.shares, key=lambda source: self.shares[source] * tokens - self.taken[source])

    def take(self, source: str, tokens: int) -> None:
        """Count a row."""
        self.taken[source] += tokens


def shuffled(position: int, size: int, key: int) -> int:
    """Return what stands at a position of a pseudo-random order of range(size); `key` has 64 bits.

    A Feistel network on pairs below √size, each round of which can be undone, so it is a bijection; a result outside of
    the range is put in again until it is inside (cycle walking; as the square is hardly larger, rarely needed).
    """
    width = isqrt(size - 1) + 1
    while True:
        left, right = divmod(position, width)
        for step in range(ROUNDS):
            left, right = right, (left + _mixed(key + right * ROUNDS + step)) % width
        position = left * width + right
        if position < size:
            return position


def _mixed(value: int) -> int:
    """Return 64 bits that look unrelated for related values: the output function of SplitMix64."""
    value = value * 0x9E3779B97F4A7C15 & WORD
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB & WORD
    return value ^ value >> 31


AHEAD = 2  # batches read in advance for each worker


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of one length. Padding is a piece of its own: separators, document −1, positions from 0."""

    tokens: npt.NDArray[np.int64]  # [B, L]
    documents: npt.NDArray[np.int32]  # [B, L]: running number of the piece inside its row
    positions: npt.NDArray[np.int32]  # [B, L]: from 0 in each piece
    sources: list[str]  # [B]
    learnt: npt.NDArray[np.bool_] | None = None  # [B, L]: tokens to be predicted; None: every one


class Series:
    """The rows of one source and split, over all its shards."""

    def __init__(self, source: str, shards: Sequence[Shard]) -> None:
        self._source, self._shards = source, shards
        self._begins = list(accumulate((len(shard) for shard in shards), initial=0))

    def __len__(self) -> int:
        return self._begins[-1]

    def __getitem__(self, index: int) -> Place:
        shard = bisect_right(self._begins, index) - 1
        return self._source, self._shards[shard], index - self._begins[shard]


@dataclass(frozen=True, eq=False)
class Corpus:
    """A built corpus, open for reading."""

    folder: Path
    length: int  # tokens in a row of a batch
    separator: int
    vocabulary: int
    shares: dict[str, float]  # by source, as built
    domains: dict[str, str]  # by source
    splits: dict[str, dict[str, Series]]  # by split and source; none is empty
    digest: str  # of everything but the shares

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """Open the corpus in a folder; every shard must be what the manifest says."""
        manifest = load_manifest(folder)
        shape = {key: getattr(manifest, key) for key in ("length", "separator", "vocabulary")}
        opened: dict[str, dict[str, list[Shard]]] = defaultdict(lambda: defaultdict(list))
        for entry in manifest.shards:
            shard = Shard.open(folder / "shards", entry.name)
            if (len(shard), len(shard.tokens), shard.tokens.dtype.name) != (entry.rows, entry.tokens, manifest.dtype):
                what = f"{folder / 'shards' / entry.name} is not the shard its manifest describes"
                raise UserError(f"{what}; {BUILD_AGAIN}")
            if len(shard):
                opened[entry.split][entry.source].append(shard)
        domains = {entry.source: entry.domain for entry in manifest.shards}
        named = {split: each.items() for split, each in opened.items()}
        splits = {split: {name: Series(name, shards) for name, shards in each} for split, each in named.items()}
        digest = digest_of([shape, [entry.model_dump() for entry in manifest.shards]])
        return cls(folder, **shape, shares=manifest.shares, domains=domains, splits=splits, digest=digest)

    def read(self, places: Sequence[Place]) -> Batch:
        """Read rows, pad them to one length and number what they hold."""
        tokens = np.full((len(places), self.length), self.separator, dtype=np.int64)
        learnt = np.zeros(tokens.shape, np.bool_)
        begins, numbers = [], []  # of the pieces and the padding of each row, which may be empty
        for index, (_, shard, inside) in enumerate(places):
            row = shard.row(inside)
            tokens[index, : len(row.tokens)] = row.tokens
            learnt[index, : len(row.tokens)] = row.learnt if row.learnt is not None else False
            begins.append(np.append(row.starts, len(row.tokens)) + index * self.length)
            numbers.append(np.append(np.arange(len(row.starts)), -1))
        begin = np.concatenate(begins)
        spans = np.diff(begin, append=tokens.size)
        documents = np.repeat(np.concatenate(numbers).astype(np.int32), spans)
        positions = np.arange(tokens.size, dtype=np.int32) - np.repeat(begin.astype(np.int32), spans)
        shape, sources = tokens.shape, [source for source, _, _ in places]
        marked = any(shard.learnt is not None for _, shard, _ in places)
        return Batch(tokens, documents.reshape(shape), positions.reshape(shape), sources, learnt if marked else None)

    def heldout(self, domain: str, batch: int = 8, rows: int | None = None) -> Iterator[Batch]:
        """Return the held-out rows of a domain once, in order, or `rows` of them evenly spread; the last batch may be smaller."""
        held = self.splits.get("heldout", {})
        wanted = [series for source, series in held.items() if self.domains[source] == domain]
        if not wanted:
            known = nearest(domain, {self.domains[source] for source in held})
            raise UserError(f"the corpus in {self.folder} holds out nothing of the domain {domain!r}{known}")
        places = [series[index] for series in wanted for index in range(len(series))]
        if rows is not None and rows < len(places):
            places = [places[index * len(places) // rows] for index in range(rows)]
        return (self.read(places[begin : begin + batch]) for begin in range(0, len(places), batch))


class Loader:
    """An endless iterator of batches. `batch` counts the rows of all ranks together; each gets `batch / world` of them."""

    def __init__(
        self, corpus: Corpus, *, seed: int = 0, batch: int = 8, rank: int = 0, world: int = 1,
        shares: Mapping[str, float] | None = None, workers: int = 0,
    ) -> None:  # fmt: skip
        if batch % world:
            raise UserError(f"a batch of {batch} rows cannot be shared by {world} ranks; make it a multiple of {world}")
        self.corpus, self.seed, self.batch = corpus, seed, batch
        self._mine = slice(rank * batch // world, (rank + 1) * batch // world)
        self._mixer = Mixer(corpus.shares if shares is None else shares, corpus.length)
        self._series = corpus.splits.get("train", {})
        if empty := sorted(set(self._mixer.shares) - set(self._series)):
            raise UserError(f"source {empty[0]!r} has a share but no rows to train on in {corpus.folder}")
        self._rows = dict.fromkeys(self._mixer.shares, 0)  # planned so far; batches planned may not be handed over yet
        self._seen = self._counts()  # as of the last batch handed over
        self._ahead: deque[tuple[Counts, Callable[[], Batch]]] = deque()
        self._depth = AHEAD * workers
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="loader") if workers else None

    def _counts(self) -> Counts:
        return {"rows": dict(self._rows), "tokens": dict(self._mixer.taken)}

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        while len(self._ahead) <= self._depth:
            places = [self._next_place() for _ in range(self.batch)]
            read = partial(self.corpus.read, places[self._mine])
            self._ahead.append((self._counts(), self._pool.submit(read).result if self._pool else read))
        seen, read_batch = self._ahead[0]
        batch = read_batch()  # an error of a worker is raised here, and again if asked again: no batch is skipped
        self._ahead.popleft()
        self._seen = seen
        return batch

    def _next_place(self) -> Place:
        source = self._mixer.turn()
        series = self._series[source]
        epoch, position = divmod(self._rows[source], len(series))
        key = hashlib.sha256(f"{self.seed}\0{source}\0{epoch}".encode()).digest()[:8]
        place = series[shuffled(position, len(series), int.from_bytes(key))]
        self._rows[source] += 1
        self._mixer.take(source, place[1].size(place[2]))
        return place

    def _order(self) -> dict[str, Any]:
        """Return all that the order of samples depends on."""
        shares = dict(self._mixer.shares)
        return {"corpus": self.corpus.digest, "split": "train", "seed": self.seed, "shares": shares}

    def state(self) -> dict[str, Any]:
        """Return, fit for JSON, where the order stands after the last batch: the same on every rank."""
        return {**self._order(), "samples": sum(self._seen["rows"].values()), **self._seen}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken; it must be of the same order."""
        for key, value in self._order().items():
            if state.get(key) != value:
                differs = f"its {key} is {state.get(key)!r}, here {value!r}"
                advice = "resume with what the run began with, or begin anew"
                raise UserError(f"the saved position is in another order of samples: {differs}; {advice}")
        self._rows, self._mixer.taken = dict(state["rows"]), dict(state["tokens"])
        self._seen = self._counts()
        self._ahead.clear()

    def achieved(self) -> dict[str, dict[str, float]]:
        """Return shares of the tokens handed over, on all ranks together: by source, by domain; and epochs by source."""
        tokens = self._seen["tokens"]
        sources = {source: count / max(sum(tokens.values()), 1) for source, count in tokens.items()}
        domains: dict[str, float] = defaultdict(float)
        for source, share in sources.items():
            domains[self.corpus.domains[source]] += share
        epochs = {source: count / len(self._series[source]) for source, count in self._seen["rows"].items()}
        return {"sources": sources, "domains": dict(domains), "epochs": epochs}

    def close(self) -> None:
        """Stop the workers; batches not begun are not read."""
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
