"""Work in several processes: all of it, once, whatever happens to a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from etude.errors import Interrupted, UserError
from etude.work import in_processes


def square(number: int) -> int:
    return number * number


def die(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def fail(number: int) -> int:
    if number == 2:
        raise ValueError("two")
    return number


def mark(path: str) -> int:
    Path(path).touch()
    signal.pause()
    return 0


def going() -> None:
    """The user has not asked to stop."""


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_every_item_once(workers: int) -> None:
    found = dict(in_processes(square, list(range(9)), workers, going))
    assert found == {number: number * number for number in range(9)}


def test_nothing_to_do() -> None:
    assert list(in_processes(square, [], 2, going)) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_comes_through(workers: int) -> None:
    with pytest.raises(ValueError, match="two"):
        list(in_processes(fail, [1, 2, 3], workers, going))


def end(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    return number


def test_a_killed_worker_is_said_and_memory_only_where_it_may_be_the_cause() -> None:
    with pytest.raises(
        UserError,
        match=r"a worker process was ended by signal 9 \(Killed\), perhaps for lack of memory; lower `workers`",
    ):
        list(in_processes(die, [1, 2, 3, 4], 2, going))
    with pytest.raises(
        UserError, match=r"^a worker process was ended by signal 15 \(Terminated\); run the same command again$"
    ):
        list(in_processes(end, [1, 2, 3, 4], 2, going))


def test_the_user_can_stop() -> None:
    def stop() -> None:
        raise Interrupted(signal.SIGINT)

    with pytest.raises(Interrupted):
        list(in_processes(square, list(range(50)), 2, stop))


PARENT = """
import sys
from etude.work import in_processes
from tests.test_work import mark, going
if __name__ == "__main__":
    list(in_processes(mark, sys.argv[1:], 2, going))
"""


def test_workers_go_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    marks = [tmp_path / "one", tmp_path / "two"]
    reader, writer = os.pipe()  # closed everywhere once the last process that inherited it is gone
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    parent = subprocess.Popen([sys.executable, str(script), *map(str, marks)], env=environment, stdout=writer)
    os.close(writer)
    while not all(mark.exists() for mark in marks):
        assert parent.poll() is None
    parent.kill()
    parent.wait()
    assert os.read(reader, 1) == b""  # blocks while a worker lives
    os.close(reader)
