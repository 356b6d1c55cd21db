from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.data.loader import Batch, Corpus, Loader
from etude.data.packing import Row, Shard, pack, write_shard
from etude.errors import UserError
from etude.files import write_json
from tests.data.corpora import write_manifest
from tests.lineage.refusals import one_line

LENGTH, SEPARATOR, VOCABULARY = 16, 0, 320
DOMAINS = {"large": "code", "small": "code", "prose": "docs"}
SHARES = {"large": 0.6, "small": 0.1, "prose": 0.3}


def write_corpus(folder: Path, windows: dict[tuple[str, str], list[int]], seed: int = 0) -> Path:
    """Write a corpus of random tokens; for each source and split so many documents for each shard."""
    rng = np.random.default_rng(seed)
    shards = []
    for (source, split), counts in windows.items():
        for number, count in enumerate(counts):
            texts = [rng.integers(1, VOCABULARY, size) for size in rng.integers(1, 24, count)]
            packed = pack([len(text) for text in texts], LENGTH)
            name = f"{source}-{split}-{number:05}"
            said = write_shard(folder / "shards", name, packed, texts, range(count), VOCABULARY)
            shards.append({"name": name, "source": source, "domain": DOMAINS[source], "split": split, **said})
    write_manifest(folder, shards, SHARES, length=LENGTH, separator=SEPARATOR, vocabulary=VOCABULARY)
    return folder


WINDOWS = {
    ("large", "train"): [30, 0, 25, 1],
    ("small", "train"): [3],
    ("prose", "train"): [20, 11],
    ("large", "heldout"): [7, 6],
    ("small", "heldout"): [2],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus that no test changes."""
    return write_corpus(tmp_path_factory.mktemp("corpus"), WINDOWS)


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Corpus:
    return Corpus.open(folder)


def batches(loader: Loader, count: int) -> list[Batch]:
    return list(itertools.islice(loader, count))


def same(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(
        one.sources == other.sources
        and all(
            np.array_equal(getattr(one, part), getattr(other, part)) for part in ("tokens", "documents", "positions")
        )
        for one, other in zip(left, right, strict=True)
    )


def rows_of(batch: Batch) -> list[tuple[str, bytes]]:
    """Return source and tokens of each row, without padding."""
    return [
        (source, tokens[documents >= 0].tobytes())
        for source, tokens, documents in zip(batch.sources, batch.tokens, batch.documents, strict=True)
    ]


def stored(corpus: Corpus, split: str, source: str) -> Counter[tuple[str, bytes]]:
    series = corpus.splits[split][source]
    places = [series[index] for index in range(len(series))]
    return Counter((source, shard.row(inside).tokens.astype(np.int64).tobytes()) for _, shard, inside in places)


def test_a_batch_is_padded_and_numbered_token_by_token(corpus: Corpus) -> None:
    series = corpus.splits["train"]["large"]
    places = [series[index] for index in range(len(series))]
    batch = corpus.read(places)
    assert [array.dtype.name for array in (batch.tokens, batch.documents, batch.positions)] == [
        "int64",
        "int32",
        "int32",
    ]
    assert batch.sources == ["large"] * len(places)
    padded = 0
    for index, (_, shard, inside) in enumerate(places):
        row = shard.row(inside)
        document, position = -1, 0
        for at in range(LENGTH):
            if at in row.starts.tolist():
                document, position = document + 1, 0
            if at == len(row.tokens):
                document, position = -1, 0
            expected = (int(row.tokens[at]) if at < len(row.tokens) else SEPARATOR, document, position)
            assert (batch.tokens[index, at], batch.documents[index, at], batch.positions[index, at]) == expected
            position += 1
        padded += len(row.tokens) < LENGTH
    assert 0 < padded < len(places)  # both kinds were seen


def test_an_epoch_of_a_source_is_each_of_its_rows_once_and_the_next_is_in_another_order(corpus: Corpus) -> None:
    loader = Loader(corpus, shares={"large": 1.0}, batch=1)
    size = len(corpus.splits["train"]["large"])
    epochs = [[rows_of(batch)[0] for batch in batches(loader, size)] for _ in range(3)]
    assert all(Counter(epoch) == stored(corpus, "train", "large") for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert loader.achieved()["epochs"] == {"large": 3.0}


def test_every_source_keeps_to_its_share_and_its_epochs_are_whole(corpus: Corpus) -> None:
    loader = Loader(corpus, batch=4)
    got = [row for batch in batches(loader, 200) for row in rows_of(batch)]
    tokens: Counter[str] = Counter()
    for source, content in got:
        tokens[source] += len(content) // 8
    achieved = loader.achieved()
    for source, share in SHARES.items():
        assert abs(tokens[source] - share * tokens.total()) <= LENGTH
        assert achieved["sources"][source] == pytest.approx(tokens[source] / tokens.total())
        rows = [row for row in got if row[0] == source]
        whole = len(rows) // len(corpus.splits["train"][source])
        assert achieved["epochs"][source] == len(rows) / len(corpus.splits["train"][source])
        for row, times in stored(corpus, "train", source).items():
            assert whole * times <= rows.count(row) <= (whole + 1) * times
    assert achieved["domains"] == pytest.approx(
        {"code": achieved["sources"]["large"] + achieved["sources"]["small"], "docs": achieved["sources"]["prose"]}
    )
    assert loader.state()["tokens"] == dict(tokens)


def test_the_seed_changes_the_order_and_nothing_else_does(corpus: Corpus, folder: Path) -> None:
    first = batches(Loader(corpus, seed=1), 5)
    assert same(first, batches(Loader(Corpus.open(folder), seed=1, shares=dict(reversed(SHARES.items()))), 5))
    assert not same(first, batches(Loader(corpus, seed=2), 5))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 12])
def test_the_global_batch_is_the_same_for_any_number_of_ranks(corpus: Corpus, world: int) -> None:
    whole = Loader(corpus, batch=12)
    ranks = [Loader(corpus, batch=12, rank=rank, world=world) for rank in range(world)]
    for _ in range(6):
        expected = next(whole)
        parts = [next(loader) for loader in ranks]
        assert all(part.tokens.shape == (12 // world, LENGTH) for part in parts)
        joined = Batch(
            tokens=np.concatenate([part.tokens for part in parts]),
            documents=np.concatenate([part.documents for part in parts]),
            positions=np.concatenate([part.positions for part in parts]),
            sources=[source for part in parts for source in part.sources],
        )
        assert same([joined], [expected])
        assert all(loader.state() == whole.state() for loader in ranks)
        assert all(loader.achieved() == whole.achieved() for loader in ranks)


@settings(max_examples=40)
@given(stop=st.integers(0, 40), workers=st.sampled_from([0, 2]), after=st.integers(0, 3))
def test_resuming_anywhere_equals_no_interruption(corpus: Corpus, stop: int, workers: int, after: int) -> None:
    expected = batches(Loader(corpus, batch=3), stop + 5)
    with closing(Loader(corpus, batch=3, workers=workers)) as first:
        batches(first, stop)
        state = json.loads(json.dumps(first.state()))
    assert state["samples"] == 3 * stop == sum(state["rows"].values())
    with closing(Loader(corpus, batch=3, workers=workers)) as second:
        batches(second, after)  # what it did before does not matter
        second.load_state(state)
        assert second.state() == state
        assert same(batches(second, 5), expected[stop:])


def test_a_state_can_be_taken_up_by_another_number_of_ranks_and_rows(corpus: Corpus) -> None:
    expected = [row for batch in batches(Loader(corpus, batch=12), 2) for row in rows_of(batch)]
    first = Loader(corpus, batch=12, rank=1, world=2)
    next(first)
    ranks = [Loader(corpus, batch=6, rank=rank, world=3) for rank in range(3)]
    for loader in ranks:
        loader.load_state(first.state())
    got = [row for _ in range(2) for loader in ranks for row in rows_of(next(loader))]
    assert got == expected[12:]


def test_a_state_given_out_does_not_change_any_more(corpus: Corpus) -> None:
    loader = Loader(corpus)
    next(loader)
    state = loader.state()
    before = json.dumps(state)
    second = Loader(corpus)
    second.load_state(state)
    batches(second, 3)
    batches(loader, 3)
    assert json.dumps(state) == before


def test_a_state_of_another_order_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    state = Loader(corpus).state()
    other = Corpus.open(write_corpus(tmp_path, WINDOWS, seed=1))
    for loader, what in [
        (Loader(other), "corpus"),
        (Loader(corpus, seed=1), "seed"),
        (Loader(corpus, shares={"large": 1.0}), "shares"),
    ]:
        with pytest.raises(UserError, match=one_line(f"its {what} is", "begin anew")):
            loader.load_state(state)
        assert loader.state()["samples"] == 0
    with pytest.raises(UserError, match="its corpus is None"):
        Loader(corpus).load_state({})


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_do_not_change_the_order(corpus: Corpus, workers: int) -> None:
    expected = batches(Loader(corpus), 25)
    with closing(Loader(corpus, workers=workers)) as loader:
        assert same(batches(loader, 25), expected)
        assert loader.state()["samples"] == 25 * 8


def loader_threads() -> int:
    return sum(thread.name.startswith("loader") for thread in threading.enumerate())


def test_closing_ends_the_workers_wherever_they_are(corpus: Corpus) -> None:
    for taken in (0, 1, 7):
        loader = Loader(corpus, workers=3)
        batches(loader, taken)
        assert bool(loader_threads()) == bool(taken)
        loader.close()
        assert loader_threads() == 0
        loader.close()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_error_of_a_worker_surfaces_at_its_batch_and_does_not_go_away(
    corpus: Corpus, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = batches(Loader(corpus, batch=1), 60)
    _, damaged, last = corpus.splits["train"]["prose"][len(corpus.splits["train"]["prose"]) - 1]
    at = [rows_of(batch)[0] for batch in expected].index(("prose", damaged.row(last).tokens.astype(np.int64).tobytes()))
    whole = Shard.row

    def row(shard: Shard, index: int) -> Row:
        if (shard, index) == (damaged, last):
            raise OSError("cannot be read")
        return whole(shard, index)

    monkeypatch.setattr(Shard, "row", row)
    with closing(Loader(corpus, batch=1, workers=workers)) as loader:
        assert same(batches(loader, at), expected[:at])
        for _ in range(2):
            with pytest.raises(OSError, match="cannot be read"):
                next(loader)
        assert loader.state()["samples"] == at


def test_heldout_rows_come_once_and_in_order(corpus: Corpus) -> None:
    for size in (1, 4, 100):
        got = list(corpus.heldout("code", batch=size))
        assert all(len(batch.sources) == size for batch in got[:-1])
        rows = [row for batch in got for row in rows_of(batch)]
        assert Counter(rows) == stored(corpus, "heldout", "large") + stored(corpus, "heldout", "small")
        assert rows[:2] == list(stored(corpus, "heldout", "large"))[:2]


def test_nothing_held_out_is_said(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=one_line("nothing of the domain 'docs'", "known: code")):
        corpus.heldout("docs")
    with pytest.raises(UserError, match=one_line("nothing of the domain 'codes'", "did you mean 'code'?")):
        corpus.heldout("codes")
    with pytest.raises(UserError, match="nothing of the domain 'code'"):
        Corpus.open(write_corpus(tmp_path, {("large", "train"): [3], ("large", "heldout"): [0]})).heldout("code")


def test_what_cannot_be_loaded_is_said(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=one_line("'prose'", "no rows to train on")):
        Loader(Corpus.open(write_corpus(tmp_path, {**WINDOWS, ("prose", "train"): [0, 0]})))
    with pytest.raises(UserError, match=one_line("8 rows", "3 ranks")):
        Loader(corpus, world=3)
    with pytest.raises(UserError, match=one_line("'nosuch'", "no rows to train on")):
        Loader(corpus, shares={"nosuch": 0.5, "large": 0.5})


def test_a_folder_without_a_corpus_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=one_line(tmp_path, "is not a corpus", "etude data build")):
        Corpus.open(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"length": "x"}', '"\xff"'])
def test_a_manifest_that_is_none_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(
        UserError, match=one_line("manifest.json cannot be read", "delete the corpus's folder and build it again")
    ):
        Corpus.open(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("rows", 5), ("tokens", 5), ("dtype", "uint32")])
def test_shards_that_are_not_those_of_the_manifest_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    folder = write_corpus(tmp_path, {("large", "train"): [30]})
    manifest = json.loads((folder / "manifest.json").read_text())
    (manifest if key in manifest else manifest["shards"][0])[key] = value
    write_json(folder / "manifest.json", manifest)
    with pytest.raises(UserError, match=one_line("large-train-00000", "not the shard its manifest describes")):
        Corpus.open(folder)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path, {("large", "train"): [30]})
    (folder / "shards" / "large-train-00000.pieces.npy").unlink()
    with pytest.raises(UserError, match=one_line("large-train-00000.pieces.npy cannot be read")):
        Corpus.open(folder)
