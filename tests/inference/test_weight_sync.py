"""The folder of weights: every version comes back bit for bit, whatever was damaged, pruned or killed on the way."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.inference.weight_sync import WANTED, BrokenStore, File, Held, WeightStore, ways

Weights = dict[str, torch.Tensor]


def weights_at(version: int, size: int = 2000) -> Weights:
    """Weights of which every version changes one number in forty, and one tensor tied to another."""
    generator = torch.Generator().manual_seed(7)
    matrix = torch.randn(size, generator=generator).bfloat16()
    for step in range(version):
        matrix[step % 40 :: 40] += 0.25
    return {"embed": matrix, "frozen": torch.ones(5), "head": matrix, "norm": torch.full((3,), 0.1 * version)}


def filled(folder: Path, versions: int, anchor_every: int = 4) -> WeightStore:
    store = WeightStore(folder, anchor_every)
    for version in range(versions):
        store.publish(weights_at(version), version, step=version)
    return store


def same(held: Held, version: int) -> bool:
    expected = weights_at(version)
    del expected["head"]  # the same as "embed"
    return (
        held.version == version
        and held.tensors.keys() == expected.keys()
        and all(torch.equal(held.tensors[name], tensor) for name, tensor in expected.items())
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES: list[Callable[[Path], None]] = [flip, tear, Path.unlink]


@contextlib.contextmanager
def room_for(size: int) -> Iterator[None]:
    """Let no file become longer: a write fails as it does on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_one_follows_by_deltas_and_one_who_joins_late_gets_any_version(tmp_path: Path) -> None:
    store, reader, held = WeightStore(tmp_path, 4), WeightStore(tmp_path, 4), None
    assert reader.newest() is None
    for version in range(10):
        done = store.publish(weights_at(version), version, step=version)
        assert reader.newest() == version
        held = reader.pull(version, held)
        assert same(held, version)
        assert (done.kind, done.anchored) == ("delta" if version else "anchor", version % 4 == 0)
        assert done.full_bytes == 2000 * 2 + 5 * 4 + 3 * 4
        assert held.bytes == done.bytes
    for version in range(10):
        for late in (None, reader.pull(3), held):
            assert same(WeightStore(tmp_path, 4).pull(version, late), version)
    assert names(tmp_path) == [
        "00000000.anchor", "00000001-00000000.delta", "00000002-00000001.delta", "00000003-00000002.delta",
        "00000004-00000003.delta", "00000004.anchor", "00000005-00000004.delta", "00000006-00000005.delta",
        "00000007-00000006.delta", "00000008-00000007.delta", "00000008.anchor", "00000009-00000008.delta",
    ]  # fmt: skip


def test_what_is_held_is_not_changed_and_what_was_published_may_change(tmp_path: Path) -> None:
    store, weights = WeightStore(tmp_path, 4), weights_at(0)
    store.publish(weights, 0, step=0)
    held = store.pull(0)
    weights["embed"].copy_(weights_at(1)["embed"])  # as an optimiser does
    weights["norm"].copy_(weights_at(1)["norm"])
    store.publish(weights, 1, step=1)
    assert same(store.pull(1, held), 1)
    assert same(held, 0)


def test_no_number_is_used_twice(tmp_path: Path) -> None:
    store = filled(tmp_path, 1)
    for publisher in (store, WeightStore(tmp_path, 4)):
        with pytest.raises(ValueError, match="no number is used twice"):
            publisher.publish(weights_at(0), 0, step=0)


def test_other_weights_come_whole(tmp_path: Path) -> None:
    store = filled(tmp_path, 2)
    other = {"embed": torch.ones(7)}
    assert store.publish(other, 2, step=2).kind == "anchor"
    assert store.pull(2, store.pull(1)).tensors["embed"].tolist() == [1] * 7
    assert store.publish(other, 3, step=3).kind == "delta"


def test_a_tie_may_be_cut(tmp_path: Path) -> None:
    store, cut = filled(tmp_path, 2), weights_at(2)
    cut["head"] = cut["head"] + 1
    assert store.publish(cut, 2, step=2).kind == "anchor"
    found = store.pull(2, store.pull(1)).tensors
    assert all(torch.equal(found[name], cut[name]) for name in cut)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_delta_is_passed_over_for_an_anchor(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    store = filled(tmp_path, 6)
    held = store.pull(2)
    damage(tmp_path / "00000004-00000003.delta")
    found = store.pull(5, held)
    assert same(found, 5)
    if damage is not Path.unlink:  # else there is no way from what is held, and nobody tried it
        assert [line.split()[0] for line in found.passed_over] == ["00000004-00000003.delta"]
    assert not (tmp_path / WANTED).exists()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_anchor_is_passed_over_for_the_one_before(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    store = filled(tmp_path, 6)
    damage(tmp_path / "00000004.anchor")
    assert same(store.pull(5), 5)


@pytest.mark.parametrize("damage", [flip, tear])
def test_where_no_way_is_left_the_next_version_comes_with_an_anchor(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    store, reader = filled(tmp_path, 3, anchor_every=50), WeightStore(tmp_path, 50)
    held = reader.pull(1)
    damage(tmp_path / "00000002-00000001.delta")
    with pytest.raises(BrokenStore, match=r"no way to version 2 .* 00000002-00000001.delta does not have its checksum"):
        reader.pull(2, held)
    done = store.publish(weights_at(3), 3, step=3)
    assert (done.kind, done.anchored) == ("delta", True)
    assert same(reader.pull(3, held), 3)
    assert not store.publish(weights_at(4), 4, step=4).anchored


def test_a_delta_of_another_run_or_under_another_name_is_not_applied(tmp_path: Path) -> None:
    store = filled(tmp_path / "one", 2, anchor_every=50)
    other = WeightStore(tmp_path / "two", 50)
    for version in (0, 1):
        other.publish(weights_at(version + 20), version, step=version)
    delta = tmp_path / "one" / "00000001-00000000.delta"
    delta.write_bytes((tmp_path / "two" / delta.name).read_bytes())
    with pytest.raises(BrokenStore, match="gives another embed than it was made from"):
        store.pull(1)
    delta.rename(delta.with_name("00000002-00000000.delta"))
    with pytest.raises(BrokenStore, match="holds version 1, made from 0"):
        store.pull(2)


def test_what_is_held_may_be_wrong(tmp_path: Path) -> None:
    store = filled(tmp_path, 3)
    for wrong in (weights_at(9), {}, {"embed": torch.zeros(2, 2)}):
        found = store.pull(2, Held(1, wrong))
        assert same(found, 2)
        assert [line.split()[0] for line in found.passed_over] == ["00000002-00000001.delta"]


@pytest.mark.parametrize(("room", "delta_fits"), [(100, False), (3000, True)])
def test_a_full_disk_leaves_the_old_versions_good(tmp_path: Path, room: int, delta_fits: bool) -> None:
    store = filled(tmp_path, 4)
    before = names(tmp_path)
    with room_for(room), pytest.raises(OSError, match="File too large"):
        store.publish(weights_at(4), 4, step=4)
    assert names(tmp_path) == before + ["00000004-00000003.delta"] * delta_fits
    assert all(same(store.pull(version), version) for version in range(4 + delta_fits))
    done = store.publish(weights_at(5), 5, step=5)  # space is there again
    assert (done.kind, done.anchored) == ("delta", True)
    assert same(WeightStore(tmp_path, 4).pull(5, store.pull(3)), 5)


KILLED = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.inference.test_weight_sync import filled, weights_at
store = filled(Path(sys.argv[2]), 4)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), -1))
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the write that comes to the limit kills at once
store.publish(weights_at(4), 4, step=4)
"""


@pytest.mark.parametrize(
    ("room", "newest", "half"), [(100, 3, ".00000004-00000003.delta"), (3000, 4, ".00000004.anchor")]
)
def test_a_publisher_killed_while_it_writes(tmp_path: Path, room: int, newest: int, half: str) -> None:
    root = Path(__file__).parents[2]
    dead = subprocess.run([sys.executable, "-c", KILLED, root, tmp_path, str(room)], check=False, capture_output=True)
    assert dead.returncode == -25, dead.stderr  # SIGXFSZ
    assert [name for name in names(tmp_path) if name.startswith(half)]
    reader, publisher = WeightStore(tmp_path, 4), WeightStore(tmp_path, 4)
    held = reader.pull(3)
    assert reader.newest() == newest
    assert same(reader.pull(newest, held), newest)
    assert publisher.publish(weights_at(newest + 1), newest + 1, step=newest + 1).kind == "anchor"
    assert not [name for name in names(tmp_path) if name.startswith(".")]
    publisher.publish(weights_at(newest + 2), newest + 2, step=newest + 2)
    assert same(reader.pull(newest + 2, held), newest + 2)


def test_old_versions_go_and_a_reader_far_behind_begins_at_an_anchor(tmp_path: Path) -> None:
    store = filled(tmp_path, 3)
    slow = store.pull(2)
    for version in range(3, 15):
        store.publish(weights_at(version), version, step=version)
    assert store.prune(keep=2) == 9  # 7 deltas and 2 anchors of versions 0 to 7
    assert store.prune(keep=2) == 0
    assert names(tmp_path)[:3] == ["00000008-00000007.delta", "00000008.anchor", "00000009-00000008.delta"]
    assert all(same(WeightStore(tmp_path, 4).pull(version, slow), version) for version in range(8, 15))
    with pytest.raises(BrokenStore, match="not there, or no longer"):
        store.pull(5, slow)
    assert not (tmp_path / WANTED).exists()
    flip(tmp_path / "00000012.anchor")
    assert same(store.pull(14, slow), 14)


def test_an_empty_store_has_nothing_to_prune(tmp_path: Path) -> None:
    assert WeightStore(tmp_path, 4).prune(keep=1) == 0


def test_readers_go_on_while_versions_come_and_go(tmp_path: Path) -> None:
    last, wrong = 60, list[int]()
    store = filled(tmp_path, 1)

    def read(*, follow: bool) -> None:
        reader, held = WeightStore(tmp_path, 4), None
        while held is None or held.version < last:
            newest = reader.newest()
            assert newest is not None
            with contextlib.suppress(BrokenStore):  # the publisher was faster; the next look finds a newer one
                held = reader.pull(newest, held if follow else None)
                wrong.extend([newest] * (not same(held, newest)))

    readers = [threading.Thread(target=read, kwargs={"follow": follow}) for follow in (True, False)]
    for reader in readers:
        reader.start()
    for version in range(1, last + 1):
        store.publish(weights_at(version), version, step=version)
        store.prune(keep=1)
    for reader in readers:
        reader.join()
    assert wrong == []
    assert len(names(tmp_path)) <= 12


@given(
    anchors=st.dictionaries(st.integers(0, 6), st.integers(1, 99)),
    deltas=st.dictionaries(st.integers(0, 6), st.tuples(st.integers(0, 6), st.integers(1, 99))),
    held=st.none() | st.integers(0, 6),
    version=st.integers(0, 6),
)  # fmt: skip
def test_the_way_of_the_fewest_bytes_comes_first(
    anchors: dict[int, int], deltas: dict[int, tuple[int, int]], held: int | None, version: int
) -> None:
    files = [File(Path(f"a{at}"), at, None, size) for at, size in anchors.items()]
    files += [File(Path(f"d{at}"), at, base, size) for at, (base, size) in deltas.items()]
    costs = {at: [0] * (at == held) + [size for where, size in anchors.items() if where == at] for at in range(7)}
    for at in range(7):  # forwards, while the code walks backwards
        if at in deltas and deltas[at][0] < at:
            costs[at] += [cost + deltas[at][1] for cost in costs[deltas[at][0]]]
    found = ways(files, version, held)
    assert [sum(file.size for file in way) for way in found] == sorted(costs[version])
    for way in found:
        stops = [held if way and way[0].base is not None else None, *(file.version for file in way)]
        assert all(file.base == stop for file, stop in zip(way, stops, strict=False))


class Threads:
    """Ranks that are threads: what torch.distributed does for processes."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, box: list[Any]) -> None:
        self.rank, self.size, self.leads, self._barrier, self._box = rank, size, rank == 0, barrier, box

    def gather(self, value: Any) -> list[Any]:
        self._box[self.rank] = value
        self._barrier.wait()
        values = list(self._box)
        self._barrier.wait()
        return values

    def tell(self, message: Any) -> Any:
        return self.gather(message)[0]

    def sum(self, value: float) -> float:
        return float(sum(self.gather(value)))


SHARES = [("embed", "head"), ("norm",), ("frozen",), ()]  # what is tied is of one rank; one rank may have nothing


def together(folder: Path, versions: range, before: Callable[[int], Any] = lambda version: None) -> list[Any]:
    """Publish versions by four ranks; return what each rank got, or raised. `before`: done by one rank before each version."""
    barrier, box = threading.Barrier(len(SHARES), timeout=60), [None] * len(SHARES)
    results: list[list[Any]] = [[] for _ in SHARES]

    def work(rank: int) -> None:
        store, world = WeightStore(folder, 4), Threads(rank, len(SHARES), barrier, box)
        for version in versions:
            if rank == 0:
                before(version)
            barrier.wait()
            share = {name: weights_at(version)[name] for name in SHARES[rank]}
            if "head" in share:
                share["head"] = share["embed"]  # tied
            try:
                results[rank].append(store.publish(share, version, version, world))  # type: ignore[arg-type]
            except OSError as error:
                results[rank].append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(SHARES))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_what_ranks_publish_together_is_what_one_publishes(tmp_path: Path) -> None:
    results = together(tmp_path / "four", range(7))
    filled(tmp_path / "one", 7)
    reader, held = WeightStore(tmp_path / "four", 4), None
    for version in range(7):
        held = reader.pull(version, held)
        alone = WeightStore(tmp_path / "one", 4).pull(version)
        assert same(held, version)
        assert same(WeightStore(tmp_path / "four", 4).pull(version), version)  # who joins late
        assert {name: each.dtype for name, each in held.tensors.items()} == {
            name: each.dtype for name, each in alone.tensors.items()
        }
        assert len({(each[version].bytes, each[version].full_bytes, each[version].kind) for each in results}) == 1
        assert held.bytes == results[0][version].bytes
        assert results[3][version].full_bytes == 2000 * 2 + 5 * 4 + 3 * 4
    assert [name for name in names(tmp_path / "four") if name.startswith("00000004")] == [
        "00000004-00000003.delta", "00000004-00000003.delta.1", "00000004-00000003.delta.2",
        "00000004.anchor", "00000004.anchor.1", "00000004.anchor.2",
    ]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("part", ["", ".1", ".2"])
def test_a_version_with_a_broken_part_is_passed_over(tmp_path: Path, damage: Callable[[Path], None], part: str) -> None:
    together(tmp_path, range(6))
    reader = WeightStore(tmp_path, 4)
    held = reader.pull(2)
    damage(tmp_path / f"00000004-00000003.delta{part}")
    assert same(reader.pull(5, held), 5)  # by the anchor
    assert same(held, 2)
    damage(tmp_path / f"00000005-00000004.delta{part}")
    with pytest.raises(BrokenStore, match="no way to version 5"):
        WeightStore(tmp_path, 4).pull(5)


def test_a_part_of_another_run_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    together(tmp_path / "a", range(1))
    other = {**weights_at(0), "norm": torch.ones(3)}
    single = WeightStore(tmp_path / "b", 4)
    single.publish({"norm": other["norm"]}, 0, step=0)  # whole and sound by itself
    (tmp_path / "b" / "00000000.anchor").replace(tmp_path / "a" / "00000000.anchor.1")
    with pytest.raises(BrokenStore, match=r"anchor\.1 is another file than the version names"):
        WeightStore(tmp_path / "a", 4).pull(0)


@pytest.mark.parametrize("part", ["", ".1", ".2"])
def test_what_one_rank_cannot_write_fails_on_all_and_the_versions_before_stay(tmp_path: Path, part: str) -> None:
    """Rank 1 or 2 cannot write its part, or rank 0 what makes the version appear: a folder is where the file should begin."""
    blocked = tmp_path / f".00000002-00000001.delta{part}.{os.getpid()}.part"
    results = together(tmp_path, range(4), lambda version: blocked.mkdir() if version == 2 else None)
    assert [[isinstance(each, OSError) for each in rank] for rank in results] == [[False, False, True, False]] * 4
    reader = WeightStore(tmp_path, 4)
    assert {file.version for file in reader._files()} == {0, 1, 3}
    assert same(reader.pull(1), 1)
    assert same(reader.pull(3, reader.pull(1)), 3)
    assert same(reader.pull(3), 3)


def test_parts_of_a_version_that_never_came_to_be_are_removed_by_the_next_publisher(tmp_path: Path) -> None:
    together(tmp_path, range(2))
    for part in (1, 2, 7):
        (tmp_path / f"00000002-00000001.delta.{part}").write_bytes(b"of a trainer with more ranks that was killed")
    filled_by_one = WeightStore(tmp_path, 4)
    filled_by_one.publish(weights_at(2), 2, step=2)
    assert [name for name in names(tmp_path) if name.startswith("00000002")] == ["00000002.anchor"]
    assert all(same(WeightStore(tmp_path, 4).pull(version), version) for version in range(3))


def test_parts_are_removed_with_what_names_them(tmp_path: Path) -> None:
    together(tmp_path, range(14))
    (tmp_path / "00000001-00000000.delta.7").touch()  # a killed publisher's, that nothing names
    WeightStore(tmp_path, 4).prune(keep=2)
    assert {int(name[:8]) for name in names(tmp_path)} == set(range(8, 14))
    assert all(same(WeightStore(tmp_path, 4).pull(version), version) for version in range(8, 14))
