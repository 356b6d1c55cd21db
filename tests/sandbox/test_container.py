from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from etude.sandbox.box import MIB, Limits, Missing, Place, SandboxError
from etude.sandbox.container import ContainerSandbox
from etude.sandbox.layers import write_layer
from tests.sandbox.backends import engine, program

LIMITS = Limits(memory=300 * MIB, processes=50, disk=20 * MIB, output=1000)
SPACES = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "true"]


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    (tmp_path / "layer" / "folder").mkdir(parents=True)
    (tmp_path / "layer" / "a.txt").write_text("hello")
    (tmp_path / "layer" / "folder" / "b.txt").write_text("b")
    (tmp_path / "layer" / "c.txt").write_text("c")
    return tmp_path / "layer"


@pytest.fixture(
    params=["fake", pytest.param("podman", marks=pytest.mark.slow), pytest.param("docker", marks=pytest.mark.slow)]
)
def container(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """What gives an engine; the fake one has room for one container, so each gets a fake of its own."""
    if request.param == "fake":
        if subprocess.run(SPACES, capture_output=True, check=False).returncode:
            pytest.skip("no process namespaces here")

        return lambda: fake(tmp_path / f"fake{len(list(tmp_path.glob('fake*')))}", "podman")
    if request.param == "podman" and os.getuid():
        pytest.skip("podman without root needs a network of ids")
    try:
        path = engine(request.param, tmp_path)
    except OSError as error:
        pytest.skip(str(error))
    return lambda: path


def fake(state: Path, name: str) -> str:
    return program(state, name, f'exec {sys.executable} {Path(__file__).with_name("fake_engine.py")} {state} "$@"')


def using(engine: str, place: Place, work: Callable[[ContainerSandbox], Awaitable[None]]) -> None:
    async def run() -> None:
        box = await ContainerSandbox.open(engine, "IMAGE", place)
        try:
            await work(box)
        finally:
            await box.close()
            await box.close()

    asyncio.run(run())


def test_commands(container: Callable[[], str], layer: Path) -> None:
    async def work(box: ContainerSandbox) -> None:
        done = await box.exec('cat; echo "$A"; cat a.txt >&2; exit 3', stdin=b"in ", env={"A": "two words\nand lines"})
        assert (done.rc, done.out, done.err) == (3, b"in two words\nand lines\n", b"hello")
        assert (await box.exec(["cat", "b.txt"], cwd="folder")).out == b"b"
        assert (await box.exec("kill -9 $$")).rc == -9
        assert (await box.exec(["no such program"])).rc == 127
        done = await box.exec("head -c 5000 /dev/zero | tr '\\0' x; echo end")
        assert (len(done.out), done.cut, done.out[-5:]) == (1000, (4004, 0), b"xend\n")
        done = await box.exec("echo up; trap '' TERM; while :; do :; done", timeout=1)
        assert (done.timed_out, done.rc, done.out) == (True, -9, b"up\n")

    using(container(), Place((layer,), limits=LIMITS), work)


def test_nothing_outlives_a_call(container: Callable[[], str], layer: Path) -> None:
    async def work(box: ContainerSandbox) -> None:
        done = await box.exec("sleep 1000 & (setsid sleep 1000 >/dev/null 2>&1 &); echo started")
        assert (done.out, done.timed_out) == (b"started\n", False)
        seen = await box.exec("for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done")
        assert b"sleep 1000" not in seen.out.replace(b"sleep 1000 &", b"")

    using(container(), Place((layer,), limits=LIMITS), work)


def test_files(container: Callable[[], str], layer: Path) -> None:
    async def work(box: ContainerSandbox) -> None:
        await box.write("new/deep/\udcff\n.txt", b"\0data", 0o755)
        assert await box.read("new/deep/\udcff\n.txt") == b"\0data"
        assert [(each.path, each.kind, each.mode, each.size) for each in await box.list("new/deep")] == [
            ("new/deep/\udcff\n.txt", "file", 0o755, 5)
        ]
        assert [each.path for each in await box.list()] == ["a.txt", "c.txt", "folder", "new"]
        await box.exec("mkfifo fifo; ln -s /etc/passwd out; ln -s a.txt in; chmod 444 c.txt")
        assert await box.read("in") == b"hello"
        for path in ("fifo", "out", "folder", "nothing", "../layer/a.txt", "/etc/passwd"):
            with pytest.raises(Missing):
                await box.read(path)
        with pytest.raises(SandboxError, match="larger than 3"):
            await box.read("a.txt", limit=3)
        for path in ("fifo", "folder", "../x", "a.txt/x"):
            with pytest.raises(Missing):
                await box.write(path, b"x")
        await box.write("c.txt", b"over a read-only one")
        assert (await box.exec("cat c.txt")).out == b"over a read-only one"

    using(container(), Place((layer,), limits=LIMITS), work)


def test_differences(container: Callable[[], str], layer: Path, tmp_path: Path) -> None:
    async def work(box: ContainerSandbox) -> None:
        assert await box.diff() == []
        await box.exec(
            "echo x >> a.txt; rm -r folder; mkdir n; ln -s a.txt l; echo s > n/s; chmod 0 n/s n; mkfifo f; truncate -s 15M big1 big2"
        )
        changed = {each.path: (each.kind, each.content) for each in await box.diff()}
        wanted = {
            "a.txt": ("file", b"hellox\n"),
            "folder": ("gone", None),
            "n": ("folder", None),
            "n/s": ("file", b"s\n"),
            "l": ("link", b"a.txt"),
        }
        assert {path: changed[path] for path in wanted} == wanted
        assert changed["f"] == ("other", None)
        assert [each.mode for each in await box.diff() if each.path == "n"] == [0]
        assert set(changed) - set(wanted) == {"f", "big1", "big2"}
        assert changed["big1"] == ("file", bytes(15 * MIB))
        assert changed["big2"] == (
            "other",
            None,
        )  # together they are larger than the disk: holes, not to be read for ever
        snap = write_layer(tmp_path / "snap", await box.diff(), (layer,))
        other = await ContainerSandbox.open(container(), "IMAGE", Place((snap, layer), limits=LIMITS))
        try:
            assert (await other.exec("rm big1; cat a.txt n/s; ls")).out == b"hellox\ns\na.txt\nc.txt\nl\nn\n"
            assert [(each.path, each.kind) for each in await other.diff()] == [("big1", "gone")]
        finally:
            await other.close()

    using(container(), Place((layer,), limits=LIMITS), work)


def test_the_container_is_shut_in(tmp_path: Path, layer: Path) -> None:
    """What is asked of an engine, read by a fake one: a flag that is missing here is missing everywhere."""
    if subprocess.run(SPACES, capture_output=True, check=False).returncode:
        pytest.skip("no process namespaces here")
    place = Place((layer,), (Path("/opt/env"),), ("/usr/games",), limits=LIMITS)

    async def work(box: ContainerSandbox) -> None:
        await box.exec("true")

    using(fake(tmp_path / "fake", "docker"), place, work)
    started, filled, called = map(json.loads, (tmp_path / "fake" / "log").read_text().splitlines())
    text = " ".join(started)
    held = 6 * 4096 + 3 * 4096  # two blocks each, and one more for a folder of the host's
    for wanted in ("--network none", "--read-only", "--cap-drop ALL", "--security-opt no-new-privileges", "--pids-limit 52", "--cpus 2.0",
                   "--pull never", "--rm", "--ulimit core=0:0", "--volume /opt/env:/opt/env:ro", "--tmpfs /usr/games:ro"):  # fmt: skip
        assert wanted in text
    assert abs(int(started[started.index("--memory") + 1]) - LIMITS.memory - held) <= held
    assert "nosuid,nodev,size=" in started[started.index("--tmpfs") + 1]
    assert "nr_inodes=100000" in started[started.index("--tmpfs") + 1]
    for call in (filled, called):
        assert call[:4] == ["exec", "-i", "--user", "61185:61185"]
    rules = json.loads((tmp_path / "fake" / "profile.json").read_text())["syscalls"]
    refused = {name for rule in rules if "args" not in rule for name in rule["names"]}
    assert {"mount", "unshare", "ptrace", "keyctl", "io_uring_setup", "clone3"} <= refused
    assert {
        "names": ["socket"],
        "action": "SCMP_ACT_ERRNO",
        "errnoRet": 1,
        "args": [{"index": 0, "value": 40, "op": "SCMP_CMP_EQ"}],
    } in rules


def test_an_engine_that_fails_is_told(tmp_path: Path, layer: Path) -> None:
    script = program(tmp_path / "bin", "podman", "echo 'no such image' >&2; exit 125")
    with pytest.raises(SandboxError, match="podman:IMAGE: no container was started: no such image"):
        asyncio.run(ContainerSandbox.open(script, "IMAGE", Place((layer,))))


def test_a_container_that_ends_is_no_result(container: Callable[[], str], layer: Path) -> None:
    async def work(box: ContainerSandbox) -> None:
        assert box.process is not None
        box.process.kill()  # the engine's client; with its end the container's input ends
        with pytest.raises(SandboxError):
            await box.exec("sleep 5; echo done", timeout=20)
        with pytest.raises(SandboxError):
            await box.exec("true")

    using(container(), Place((layer,), limits=LIMITS), work)
