"""Children are started again when they die, given up when that is in vain, and never outlive their parent."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from etude.errors import UserError
from etude.rl.processes import BIND, LAUNCH, WITH_ALL, Child, as_child

UP = "exec 3>fifo; echo up >&3; "  # says so, and holds the other end of the test's pipe open as long as it lives


def child_of(tmp_path: Path, script: str, said: list[str] | None = None, grace: float = 60) -> Child:
    """Return a child that runs a script of the shell in the test's folder."""
    news = [] if said is None else said
    return Child("worker", ["sh", "-c", f"cd {tmp_path}; {script}"], tmp_path / "log", news.append, grace=grace)


async def up(tmp_path: Path) -> asyncio.StreamReader:
    """Return a pipe from a child that has begun; it ends when the child and all its own are dead."""
    reader = asyncio.StreamReader()
    file = await asyncio.to_thread((tmp_path / "fifo").open, "rb", 0)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    assert await reader.readline() == b"up\n"
    return reader


def failing(times: int) -> str:
    """Return a script that fails so many times before it succeeds."""
    return f"echo x >> tries; test $(wc -l < tries) -gt {times} || exit 7"


def test_a_child_that_dies_is_started_again_until_it_succeeds(tmp_path: Path) -> None:
    said: list[str] = []
    child = child_of(tmp_path, failing(2), said)
    asyncio.run(child.run())
    assert child.deaths == 2
    assert said == ["the worker ended with status 7; starting it again"] * 2
    assert child.pid is None


def test_deaths_in_a_row_end_it_with_the_last_lines_of_its_log(tmp_path: Path) -> None:
    said: list[str] = []
    child = child_of(tmp_path, "echo first; echo; echo the device is lost >&2; kill -11 $$", said)
    with pytest.raises(UserError) as given_up:
        asyncio.run(child.run())
    assert "the worker died 3 times in a row; the last was ended by SIGSEGV" in str(given_up.value)
    assert "after: the device is lost | first | the device is lost; see" in str(given_up.value)
    assert "\n" not in str(given_up.value)
    assert (child.deaths, len(said)) == (3, 2)


def test_deaths_with_progress_between_them_are_not_in_a_row(tmp_path: Path) -> None:
    child = child_of(tmp_path, failing(5))
    child.say = lambda _: child.progressed()
    asyncio.run(child.run())
    assert child.deaths == 5


def test_what_a_user_must_put_right_is_not_tried_again(tmp_path: Path) -> None:
    child = child_of(tmp_path, "echo loading; echo the model is not there >&2; exit 2")
    with pytest.raises(UserError, match=r"^the worker: the model is not there$"):
        asyncio.run(child.run())
    assert child.deaths == 1


@pytest.mark.parametrize(
    ("script", "grace"),
    [
        pytest.param(UP + "sleep 1000; true", 60, id="it does as asked"),
        pytest.param(f"trap '' TERM; {UP} sleep 1000; true", 0.2, id="it does not"),
        pytest.param(UP + "(trap '' TERM; exec sleep 1000) & wait", 60, id="one it started does not"),
    ],
)
def test_cancelling_ends_the_child_and_all_its_own(tmp_path: Path, script: str, grace: float) -> None:
    os.mkfifo(tmp_path / "fifo")
    child = child_of(tmp_path, script, grace=grace)

    async def main() -> None:
        running = asyncio.create_task(child.run())
        pipe = await up(tmp_path)
        assert child.pid is not None
        assert os.getsid(child.pid) == child.pid  # Ctrl-C goes to the parent only
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        assert await asyncio.wait_for(pipe.read(), 60) == b""

    asyncio.run(main())
    assert child.pid is None


def test_a_killed_child_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    child = child_of(tmp_path, UP + "exec sleep 1000")

    async def main() -> None:
        running = asyncio.create_task(child.run())
        pipe = await up(tmp_path)
        first = child.pid
        child.kill()
        assert await asyncio.wait_for(pipe.read(), 60) == b""
        await up(tmp_path)
        assert child.pid != first
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(main())
    assert child.deaths == 1


def test_a_child_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    program = f"""
import asyncio, pathlib
from etude.rl.processes import Child
command = ["sh", "-c", "cd {tmp_path}; {UP} exec sleep 1000"]
asyncio.run(Child("worker", command, pathlib.Path("{tmp_path}") / "log").run())
"""

    async def main() -> None:
        with subprocess.Popen([sys.executable, "-c", program]) as parent:
            pipe = await up(tmp_path)
            parent.send_signal(signal.SIGKILL)
        assert await asyncio.wait_for(pipe.read(), 60) == b""

    asyncio.run(main())


def test_with_a_parent_that_is_killed_dies_what_a_child_has_started(tmp_path: Path) -> None:
    """As vLLM: the process that was started has others below it, which do not look at whether it lives."""
    os.mkfifo(tmp_path / "fifo")
    program = f"""
import asyncio, pathlib, sys
from etude.rl.processes import WITH_ALL, Child
command = [sys.executable, "-I", "-S", "-c", WITH_ALL, "sh", "-c", "cd {tmp_path}; {UP} sleep 1000 & sleep 1000 & wait"]
asyncio.run(Child("worker", command, pathlib.Path("{tmp_path}") / "log").run())
"""

    async def main() -> None:
        with subprocess.Popen([sys.executable, "-c", program]) as parent:
            pipe = await up(tmp_path)
            parent.send_signal(signal.SIGKILL)
        assert await asyncio.wait_for(pipe.read(), 60) == b""

    asyncio.run(main())


@pytest.mark.parametrize(
    ("script", "status"), [("exit 7", 7), ("kill -KILL $$", -9), ("kill -SEGV $$", -11), ("true", 0)]
)
def test_who_stands_before_a_program_ends_as_it_does(tmp_path: Path, script: str, status: int) -> None:
    before = [sys.executable, "-I", "-S", "-c", WITH_ALL, "sh", "-c", f"ulimit -c 0; {script}"]
    assert asyncio.run(Child("worker", before, tmp_path / "log").run_once()) == status


def test_a_program_with_another_before_it_may_end_in_order(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    script = f"trap 'echo saved > done; exit 0' TERM; cd {tmp_path}; {UP} while :; do sleep 0.05; done"
    child = Child(
        "worker", [sys.executable, "-I", "-S", "-c", WITH_ALL, "sh", "-c", script], tmp_path / "log", grace=60
    )

    async def main() -> None:
        running = asyncio.create_task(child.run_once())
        await up(tmp_path)
        await child.end()
        assert await running == 0

    asyncio.run(main())
    assert (tmp_path / "done").read_text() == "saved\n"


def test_a_child_whose_parent_died_before_it_began_does_nothing(tmp_path: Path) -> None:
    another = os.getpid() + 1
    command = [sys.executable, "-c", BIND, str(another), "touch", str(tmp_path / "done")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1
    assert not (tmp_path / "done").exists()


def raising(error: Exception) -> NoReturn:
    raise error


@pytest.mark.parametrize(
    ("error", "line"),
    [(UserError("no such model"), "no such model\n"), (OSError(errno.ENOSPC, "full"), "no space left on the device")],
)
def test_a_child_says_what_a_user_can_put_right(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        as_child(lambda: raising(error))
    assert leaving.value.code == 2
    assert line in capsys.readouterr().err


@pytest.mark.parametrize("error", [OSError(errno.EIO, "disk"), ValueError("a mistake")])
def test_a_child_leaves_other_errors_alone(error: Exception) -> None:
    with pytest.raises(type(error)):
        as_child(lambda: raising(error))


def test_garbage_is_looked_for_in_a_child_only_once_it_has_imported_everything(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("""
import gc, sys
from etude.rl.processes import as_child
imported_with = gc.isenabled()
def main():
    print(imported_with, gc.isenabled(), gc.get_freeze_count() > 1000, sys.argv[1:])
if __name__ == "__main__":
    as_child(main)
""")
    command = [sys.executable, "-c", LAUNCH, "worker", "job.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "False True True ['job.json']\n"
