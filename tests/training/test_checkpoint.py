"""Checkpoints: whole or not there, checked before they are used, and what happens when the disk is not kind."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from etude.errors import UserError
from etude.files import read_json, write_json
from etude.training.checkpoint import INDEX, STATE, Checkpoints
from etude.training.distributed import World, join
from tests.training import sessions
from tests.training.test_world import free_port


class Said(list[str]):
    """What was said."""

    def __call__(self, line: str) -> None:
        self.append(line)


SHARDS = "__0_0.distcp"
WEIGHTS = {"a": torch.empty(50)}


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"weights/a": torch.full((50,), float(step)), "optimiser/a:step": torch.tensor(step)}


def write(folder: Path, *steps: int, keep: int = 2) -> None:
    checkpoints = Checkpoints(folder, keep, print, WEIGHTS)
    for step in steps:
        checkpoints.save(step, tensors(step), {"done": step})
    checkpoints.close()


def latest(folder: Path) -> tuple[int | None, Said]:
    """Return the step of the checkpoint that would be used, and what is said on the way."""
    said = Said()
    checkpoints = Checkpoints(folder, 2, said, WEIGHTS)
    found = checkpoints.latest()
    checkpoints.close()
    if found is None:
        return None, said
    held, state = found
    assert {name: value.tolist() for name, value in held.items()} == {
        name: value.tolist() for name, value in tensors(state["done"]).items()
    }
    return state["done"], said


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip_a_bit(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_nothing_is_there_at_first(tmp_path: Path) -> None:
    assert latest(tmp_path / "none") == (None, [])


def test_the_newest_is_used_and_so_many_are_kept(tmp_path: Path) -> None:
    write(tmp_path, 4, 8, 12, keep=2)
    assert names(tmp_path) == ["00000008", "00000012"]
    write(tmp_path, 100, keep=1)
    assert names(tmp_path) == ["00000100"]
    assert latest(tmp_path) == (100, [])


def test_a_checkpoint_is_what_it_was_when_it_was_asked_for(tmp_path: Path) -> None:
    """It is written while training goes on, and changes the same tensors."""
    checkpoints = Checkpoints(tmp_path, 2, print, WEIGHTS)
    weight, held = torch.zeros(100_000), tensors(7)
    checkpoints.save(7, {**held, "large": weight}, {"done": 7})
    weight.fill_(1)
    for value in held.values():
        value.fill_(9)
    checkpoints.close()
    found = checkpoints.latest()
    assert found is not None
    assert not found[0]["large"].any()
    assert found[0]["optimiser/a:step"] == 7


@pytest.mark.parametrize("file", [SHARDS, INDEX])
@pytest.mark.parametrize("place", [0, 9, 100, -1])
def test_one_changed_bit_is_noticed_and_the_one_before_is_used(tmp_path: Path, file: str, place: int) -> None:
    write(tmp_path, 4, 8)
    flip_a_bit(tmp_path / "00000008" / file, place)
    step, said = latest(tmp_path)
    assert step == 4
    assert said == [f"the checkpoint of step 8 is damaged ({file} does not have the checksum in state.json) and is"
                    f" passed over: {tmp_path / '00000008'}"]  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda folder: (folder / STATE).write_text("{"), "state.json cannot be read"),
        (lambda folder: (folder / STATE).write_text("[]"), "state.json cannot be read"),
        (lambda folder: (folder / STATE).write_bytes(b"\xff\xfe\x00"), "state.json cannot be read"),
        (lambda folder: (folder / STATE).write_text('{"done": 8}'), "state.json cannot be read"),
        (lambda folder: (folder / STATE).unlink(), "state.json is missing"),
        (lambda folder: (folder / STATE).write_text('{"sha256": [1]}'), "state.json cannot be read"),
        (lambda folder: (folder / SHARDS).unlink(), "__0_0.distcp is missing"),
        (lambda folder: (folder / INDEX).unlink(), ".metadata is missing"),
        (lambda folder: (folder / STATE).write_text('{"sha256": "c0ffee"}'), "it is of an earlier version of Etude"),
        (lambda folder: os.truncate(folder / SHARDS, 10), "does not have the checksum"),
    ],
)
def test_other_damage(tmp_path: Path, damage: Any, why: str) -> None:
    write(tmp_path, 4, 8)
    damage(tmp_path / "00000008")
    step, said = latest(tmp_path)
    assert step == 4
    (line,) = said
    assert line.startswith("the checkpoint of step 8 is damaged (")
    assert why in line


def test_if_all_are_damaged_it_is_said_that_training_starts_anew(tmp_path: Path) -> None:
    write(tmp_path, 4, 8)
    for name in names(tmp_path):
        flip_a_bit(tmp_path / name / SHARDS, 50)
    step, said = latest(tmp_path)
    assert step is None
    assert [line.partition(" is damaged")[0] for line in said] == [
        "the checkpoint of step 8",
        "the checkpoint of step 4",
        "no checkpoint is left that can be used: training starts anew",
    ]


def test_a_damaged_one_is_written_anew_and_a_good_one_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path, 4, 8)
    flip_a_bit(tmp_path / "00000008" / SHARDS, 50)
    before = (tmp_path / "00000004").stat().st_ino
    checkpoints = Checkpoints(tmp_path, 2, Said(), WEIGHTS)
    assert checkpoints.latest() is not None  # that of step 4
    for step in (4, 8):  # interrupted at once, then trained on
        checkpoints.save(step, tensors(step), {"done": step})
    checkpoints.close()
    assert latest(tmp_path) == (8, [])
    assert (tmp_path / "00000004").stat().st_ino == before  # there was never a moment without it
    assert names(tmp_path) == ["00000004", "00000008"]


def die_at(call: int) -> None:
    """Die at the n-th of the calls by which a checkpoint reaches the disk."""
    calls = itertools.count(1)

    def dying(function: Any) -> Any:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if next(calls) == call:
                sessions.kill_oneself()
            return function(*arguments, **named)

        return wrapped

    for name in ("mkdir", "fsync", "replace", "rename", "unlink", "rmdir"):
        setattr(os, name, dying(getattr(os, name)))


def write_and_die(folder: Path, call: int) -> None:
    die_at(call)
    write(folder, 8, keep=1)


def test_killed_while_writing_the_one_before_is_left(tmp_path: Path) -> None:
    calls = range(1, 24)
    for call in calls:
        write(tmp_path / str(call), 4)
    codes = sessions.processes(write_and_die, *((tmp_path / str(call), call) for call in calls))
    steps = []
    for call, code in zip(calls, codes, strict=True):
        step, said = latest(tmp_path / str(call))
        assert not said
        assert not any(name.endswith(".part") for name in names(tmp_path / str(call)))
        assert code == -signal.SIGKILL or (code, step) == (0, 8)
        steps.append(step)
    assert steps == sorted(steps, key=str)  # up to a moment the old one, from then on the new one
    assert steps.count(4) >= 5
    assert codes[-1] == 0  # so that every call was tried


def as_rank(rank: int, port: int, work: Callable[..., None], *what: Any) -> None:
    """Be one of two ranks, each with half of the rows of the weights."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world, mesh = join(), init_device_mesh("cpu", (2,))
    WEIGHTS["a"] = distribute_tensor(WEIGHTS["a"], mesh, [Shard(0)])
    work(world, *what)


def own_part(world: World, step: int, size: int = 50) -> dict[str, torch.Tensor]:
    """Return what a rank has of `tensors`; what belongs to no weight differs, and that of rank 0 counts."""
    part = torch.full((size // 2,), float(step))
    return {"weights/a": part, "optimiser/a:step": torch.tensor(step if world.leads else -1)}


def write_and_die_as_rank(world: World, folder: Path, victim: int, call: int) -> None:
    checkpoints = Checkpoints(folder, 1, print, WEIGHTS, world)
    if world.rank == victim:
        die_at(call)
    checkpoints.save(8, own_part(world, 8), {"done": 8})
    checkpoints.close()


@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_ranks_killed_while_writing_leaves_the_one_before(tmp_path: Path, victim: int) -> None:
    calls = (1, 2, 3, 5, 8, 12, 30) if victim == 0 else (1, 2)
    for call in calls:
        write(tmp_path / str(call), 4)
        port = free_port()
        ranks = [(rank, port, write_and_die_as_rank, tmp_path / str(call), victim, call) for rank in range(2)]
        codes = sessions.processes(as_rank, *ranks)
        assert codes == [0, 0] if call == calls[-1] else codes[victim] == -signal.SIGKILL
    steps = [latest(tmp_path / str(call)) for call in calls]
    assert steps[0] == (4, [])
    assert steps[-1] == (8, [])
    assert {said == [] and step in {4, 8} for step, said in steps} == {True}


def fill_up_as_rank(world: World, folder: Path) -> None:
    WEIGHTS["a"] = distribute_tensor(torch.empty(100_000), init_device_mesh("cpu", (2,)), [Shard(0)])
    checkpoints = Checkpoints(folder, 2, print, WEIGHTS, world)
    checkpoints.save(8, own_part(world, 8, 100_000), {"done": 8})
    with pytest.raises(OSError, match="No space left on device") as caught:
        checkpoints.close()
    assert caught.value.errno == errno.ENOSPC
    assert str(folder) in caught.value.filename


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of its own, 200 kB large."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(place)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_is_reported_as_the_system_does(small_disk: Path) -> None:
    checkpoints = Checkpoints(small_disk, 2, print, WEIGHTS)
    checkpoints.save(4, tensors(4), {"done": 4})
    checkpoints.save(8, {"large": torch.zeros(100_000)}, {"done": 8})
    with pytest.raises(OSError, match="No space left on device") as caught:
        checkpoints.save(12, tensors(12), {"done": 12})
    assert caught.value.errno == errno.ENOSPC
    assert str(small_disk) in caught.value.filename
    checkpoints.close()
    assert latest(small_disk) == (4, [])
    assert names(small_disk) == ["00000004"]  # what was half-written no longer takes up room


def test_a_disk_that_is_full_is_so_for_every_rank(small_disk: Path) -> None:
    write(small_disk, 4)
    port = free_port()
    assert sessions.processes(as_rank, *((rank, port, fill_up_as_rank, small_disk) for rank in range(2))) == [0, 0]
    assert latest(small_disk) == (4, [])


def test_a_full_disk_ends_a_training_which_goes_on_later(tmp_path: Path, small_disk: Path) -> None:
    corpus, chosen = sessions.write_corpus(tmp_path / "corpus"), sessions.settings()
    with (
        sessions.session(corpus, small_disk / "run", chosen) as training,
        pytest.raises(OSError, match="No space") as caught,
    ):
        training.run()
    assert caught.value.errno == errno.ENOSPC
    subprocess.run(["mount", "-o", "remount,size=50m", small_disk], check=True)
    with sessions.session(corpus, small_disk / "run", chosen) as training:
        training.run()
    with sessions.session(corpus, tmp_path / "straight", chosen) as straight:
        straight.run()
    assert sessions.losses(small_disk / "run") == sessions.losses(tmp_path / "straight")


def test_a_damaged_one_from_further_on_does_not_push_out_new_ones(tmp_path: Path) -> None:
    write(tmp_path, 12, keep=1)
    flip_a_bit(tmp_path / "00000012" / SHARDS, -1)
    write(tmp_path, 4, keep=1)
    assert names(tmp_path) == ["00000004"]
    assert latest(tmp_path) == (4, [])


@pytest.mark.parametrize(
    ("ours", "why"),
    [
        ({"a": torch.empty(51)}, "a is 50 there and 51 here"),
        ({"b": torch.empty(2, 3)}, "a is 50 there and missing here"),
        ({"a": torch.empty(50), "0": torch.empty(2, 3)}, "0 is missing there and 2×3 here"),
    ],
)
def test_one_of_another_training_is_refused(tmp_path: Path, ours: dict[str, torch.Tensor], why: str) -> None:
    write(tmp_path, 4)
    checkpoints = Checkpoints(tmp_path, 2, print, ours)
    with pytest.raises(UserError) as caught:
        checkpoints.latest()
    place = tmp_path / "00000004"
    assert str(caught.value) == f"{place} is of another training: {why}; remove {tmp_path} to start anew"
    checkpoints.close()


def test_states_that_the_plan_no_longer_takes_are_refused(tmp_path: Path) -> None:
    corpus, chosen = sessions.write_corpus(tmp_path / "corpus"), sessions.settings(tokens=4 * 8 * sessions.LENGTH)
    with sessions.session(corpus, tmp_path, chosen) as training:
        training.run()
    file = tmp_path / "checkpoints" / "00000004" / STATE
    write_json(file, {**read_json(file), "states": "8bit"})
    refused = pytest.raises(
        UserError, match="has masters 'float32' and states '8bit', but to fit, masters 'float32' and"
    )
    with refused, sessions.session(corpus, tmp_path, chosen) as training:
        training.run()
