"""Whoever is killed, nothing is left: no process, no control group, no memory. And the warm start."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.sandbox import cgroups, probe
from etude.sandbox.box import Place, Sandbox, SandboxError
from etude.sandbox.layers import prepare
from etude.sandbox.local import open_sandbox

pytestmark = pytest.mark.skipif(not (tried := asyncio.run(probe.try_namespaces())).works, reason=tried.detail)
HOST = """
import asyncio, sys
from etude.sandbox.box import Place
from etude.sandbox.local import open_sandbox
async def main():
    box = await open_sandbox(Place(()), "namespaces")
    other = await open_sandbox(Place(()), "namespaces")
    calls = [asyncio.create_task(one.exec("(setsid sleep 1000 &); sleep 1000")) for one in (box, other)]
    while not any(entry.path == "ready" for entry in await other.list()):
        await other.write("ready", b"")
    print("ready", flush=True)
    await asyncio.gather(*calls)
asyncio.run(main())
"""


def children(pid: int) -> list[int]:
    """Return all processes below one."""
    below: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        below.setdefault(int(words[1]), []).append(int(folder.name))
    found, pending = [], [pid]
    while pending:
        direct = below.get(pending.pop(), [])
        found += direct
        pending += direct
    return found


def wait_for_ends(pids: list[int]) -> None:
    """Wait until processes have ended, however long that takes."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([descriptor], [], [], 60)[0], f"process {pid} lives on"
        os.close(descriptor)


def left_behind(launcher: int) -> list[str]:
    """Return the control groups of a launcher."""
    parent = cgroups.find()
    return [path.name for path in Path(parent).iterdir() if f"-{launcher}-" in path.name] if parent else []


@pytest.fixture
def host() -> Iterator[subprocess.Popen[str]]:
    """A host with two sandboxes, in each of which something runs that would never end."""
    process = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def test_a_killed_host_leaves_nothing(host: subprocess.Popen[str]) -> None:
    below = children(host.pid)
    assert len(below) >= 7, "launcher, two keepers, their calls"
    host.kill()
    wait_for_ends(below)
    assert left_behind(below[0]) == []


def test_a_killed_launcher_takes_its_sandboxes_along(host: subprocess.Popen[str]) -> None:
    launcher, *others = children(host.pid)
    os.kill(launcher, signal.SIGKILL)
    wait_for_ends(others)
    host.communicate(timeout=60)
    assert host.returncode == 1, "its calls failed"
    parent = cgroups.find()
    if parent:
        cgroups.remove_stale(parent)  # as the next launcher does
    assert left_behind(launcher) == []


def test_a_killed_keeper_fails_its_calls_and_no_others() -> None:
    async def work() -> None:
        one, other = await open_sandbox(Place(()), "namespaces"), await open_sandbox(Place(()), "namespaces")
        before = set(children(os.getpid()))
        call = asyncio.create_task(one.exec("sleep 1000"))
        while len(new := set(children(os.getpid())) - before) < 2:
            await asyncio.sleep(0.01)
        parent = Path(f"/proc/{min(new)}/stat").read_text().rpartition(")")[2].split()[1]
        os.kill(int(parent), signal.SIGKILL)
        with pytest.raises(SandboxError, match="keeper ended with -9"):
            await call
        with pytest.raises(SandboxError, match="ended"):
            await one.read("x")
        wait_for_ends(list(new))
        assert (await other.exec("echo on")).out == b"on\n"
        await one.close()
        await other.close()

    asyncio.run(work())


def test_closing_leaves_nothing() -> None:
    async def work() -> None:
        await (await open_sandbox(Place(()), "namespaces")).close()  # the launcher is there from now on
        before, descriptors = children(os.getpid()), list(Path("/proc/self/fd").iterdir())
        boxes = await asyncio.gather(*(open_sandbox(Place(()), "namespaces") for _ in range(5)))
        calls = [asyncio.create_task(box.exec("sleep 1000")) for box in boxes]
        await asyncio.gather(*(box.write("big", bytes(1 << 20)) for box in boxes))
        await asyncio.gather(*(box.close() for box in boxes))
        await asyncio.gather(*calls, return_exceptions=True)
        assert children(os.getpid()) == before
        assert len(list(Path("/proc/self/fd").iterdir())) == len(descriptors)
        assert left_behind(before[0]) == []

    asyncio.run(work())


def test_each_event_loop_may_have_its_own_sandboxes() -> None:
    async def once() -> bytes:
        box = await open_sandbox(Place(()), "namespaces")
        try:
            return (await box.exec("echo x")).out
        finally:
            await box.close()

    assert asyncio.run(once()) == asyncio.run(once()) == b"x\n"


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "code.py").write_text("def f():\n    return 1\n")
    (tree / "test_code.py").write_text(
        "import os, sys, code, threading\n"
        "def test_right(): assert code.__file__ == '/workspace/code.py' and code.f() == 1\n"
        "def test_clean(): assert 'etude' not in sys.modules and 'LAUNCHER' not in os.environ and os.environ['HOME'] == '/tmp'\n"
        "open('words', 'w').write(repr(sys.orig_argv[1:]))\n"
        "def test_open(): assert len(os.listdir('/proc/self/fd')) < 20 and open('/dev/stdout', 'a')\n"
        "def test_wrong(): assert sys.argv[1:] == ['-q', '-p', 'no:cacheprovider', '--tb=line'] and code.f() == 2\n"
    )
    prepare(tree, tmp_path / "layer")
    return tmp_path / "layer"


@pytest.mark.skipif(not Path(pytest.__file__).is_relative_to(sys.prefix), reason="this Python has no pytest of its own")
def test_a_warm_run_tells_what_a_cold_one_tells(suite: Path) -> None:
    python = Path(sys.prefix, "bin", "python")
    place = Place((suite,), readonly=(Path(sys.prefix), Path(sys.base_prefix)), warm=(python, ("pytest",)))
    words = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
    quiet = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    async def work() -> None:
        box: Sandbox = await open_sandbox(place, "namespaces")
        warm = await box.exec(words, env=quiet)
        assert b"LAUNCHER" in await box.read("words"), "this was the launcher's Python"
        again = await box.exec(words, env=quiet)
        cold = await box.exec(words, env={**quiet, "PYTHONHASHSEED": "0"})  # which only a new Python can obey
        assert b"LAUNCHER" not in await box.read("words")
        shared = "import sys; print('pytest' in sys.modules)"
        assert (await box.exec([str(python), "-c", shared])).out == b"False\n"
        for done in (warm, again, cold):
            assert (done.rc, done.err) == (1, b""), done
            assert b"1 failed, 3 passed" in done.out
        await box.close()
        bad = Place((suite,), readonly=place.readonly, warm=(python, ("no_such_module",)))
        with pytest.raises(SandboxError, match="cannot warm up no_such_module"):
            await open_sandbox(bad, "namespaces")

    asyncio.run(work())
