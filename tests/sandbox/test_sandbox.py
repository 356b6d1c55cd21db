"""What a sandbox promises, as whoever runs the tests; and, where that is root, as nobody too."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from etude.errors import UserError
from etude.sandbox import isolate, local, probe
from etude.sandbox.box import MIB, Entry, Limits, Missing, Place, Sandbox, SandboxError
from etude.sandbox.layers import prepare, write_layer
from etude.sandbox.local import open_sandbox

TRIED = asyncio.run(probe.try_namespaces())
pytestmark = pytest.mark.skipif(not TRIED.works, reason=TRIED.detail)
ODD = ["new\nline", "\udcff\udcfe", "-rf", "a b", "é"]


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "src").mkdir(parents=True)
    (tree / "src" / "a.py").write_text("print('a')\n")
    (tree / "keep").write_text("kept")
    (tree / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tree / "run.sh").chmod(0o755)
    (tree / "link").symlink_to("keep")
    assert prepare(tree, tmp_path / "layer") == 0
    return tmp_path / "layer"


def within(place: Place, use: Callable[[Any], Awaitable[Any]]) -> Any:
    """Return what comes of using a sandbox that is closed afterwards."""

    async def work() -> Any:
        box = await open_sandbox(place)
        assert box.backend == "namespaces"
        try:
            return await asyncio.wait_for(use(box), 60)
        finally:
            await box.close()

    return asyncio.run(work())


def test_a_call_returns_output_status_and_nothing_of_the_host(layer: Path) -> None:
    async def use(box: Sandbox) -> None:
        done = await box.exec("pwd; cat link; echo oops >&2; exit 3")
        assert (done.rc, done.out, done.err) == (3, b"/workspace\nkept", b"oops\n")
        assert not (done.timed_out)
        assert not (done.oom)
        assert done.cut == (0, 0)
        assert done.seconds > 0
        assert (await box.exec(["./run.sh"])).out == b"ran\n"
        assert (await box.exec("kill -9 $$")).rc == -9
        assert (await box.exec(["no such command"])).rc == 127
        assert (await box.exec(["./keep"])).rc == 126
        assert (await box.exec("echo \0")).rc == (await box.exec(["echo", "\ud800"])).rc == 126
        assert (await box.exec(["pwd"], cwd="src")).out == b"/workspace/src\n"
        with pytest.raises(Missing):
            await box.exec(["pwd"], cwd="nowhere")
        assert (await box.exec("hostname; id -u")).out == b"sandbox\n1000\n"

    within(Place((layer,)), use)


def test_environment_is_only_what_was_given(layer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of the host")

    async def use(box: Sandbox) -> None:
        lines = (await box.exec(["env"], env={"B": "2"})).out.decode().splitlines()
        names = {line.split("=")[0] for line in lines} - {"PWD", "OLDPWD", "SHLVL", "_"}  # what a shell adds
        assert names == {"PATH", "HOME", "LANG", "PYTHONDONTWRITEBYTECODE", "PYTHONNOUSERSITE", "A", "B"}
        assert {"A=1", "B=2"} <= set(lines)

    within(Place((layer,), env={"A": "1", "B": "1"}), use)


def test_stdin_is_fed_whole_and_may_be_ignored(layer: Path) -> None:
    async def use(box: Sandbox) -> None:
        big = os.urandom(3 * MIB)
        done = await box.exec("sha256sum", stdin=big)
        assert done.out.split()[0].decode() == hashlib.sha256(big).hexdigest()
        assert (await box.exec(["true"], stdin=big)).rc == 0
        assert (await box.exec(["cat"])).out == b""

    within(Place((layer,)), use)


def test_a_call_that_takes_too_long_ends_with_all_it_started(layer: Path) -> None:
    async def use(box: Sandbox) -> None:
        done = await box.exec("trap '' TERM INT HUP; echo begun; (setsid sleep 1000 &) ; sleep 1000", timeout=0.5)
        assert done.timed_out
        assert done.rc == -9
        assert done.out == b"begun\n"
        done = await box.exec("(setsid sh -c 'sleep 1000; touch late' >/dev/null 2>&1 &) ; echo out")
        assert done.out == b"out\n"
        assert not done.timed_out
        left = await box.exec("ls /proc | grep -c '^[0-9]' ")
        assert int(left.out) <= 5, "only the call's own processes"

    within(Place((layer,)), use)


def test_output_is_kept_from_both_ends_and_counted(layer: Path) -> None:
    size = 50_000_000

    async def use(box: Sandbox) -> None:
        done = await box.exec(f"printf head; head -c {size} /dev/zero; printf tail; echo err >&2")
        assert len(done.out) == 1000
        assert done.out[:4] == b"head"
        assert done.out[-4:] == b"tail"
        assert done.cut == (size + 8 - 1000, 0)
        assert done.err == b"err\n"

    within(Place((layer,), limits=Limits(output=1000)), use)


def test_memory_processes_and_disk_are_bounded(layer: Path) -> None:
    async def use(box: Sandbox) -> None:
        eat = "import time\nkept = []\nfor _ in range(64): kept.append(bytearray(b'x') * (8 << 20))\nprint('ate all')"
        done = await box.exec(["/usr/bin/python3", "-c", eat])
        assert b"ate all" not in done.out
        assert done.oom or b"MemoryError" in done.err
        done = await box.exec("for i in $(seq 200); do sleep 100 & done; echo all", timeout=20)
        assert b"all" not in done.out
        assert b"fork" in done.err or done.rc == -9
        done = await box.exec("head -c 100000000 /dev/zero > big; wc -c < big; rm big")
        assert int(done.out) <= 32 * MIB
        done = await box.exec(
            "mkdir d; i=0; while true > d/$i 2>/dev/null; do i=$((i+1)); done; echo $i; rm -r d", timeout=60
        )
        assert 0 < int(done.out) <= 500
        assert (await box.exec("echo fine")).out == b"fine\n"

    limits = Limits(memory=200 * MIB, processes=30, disk=32 * MIB, files=500)
    within(Place((layer,), limits=limits), use)


@pytest.mark.skipif(not shutil.which("python3", path="/usr/bin"), reason="needs a system Python")
def test_cpu_seconds_of_a_process_are_bounded(layer: Path) -> None:
    async def use(box: Sandbox) -> int:
        return int((await box.exec(["/usr/bin/python3", "-c", "while True: pass"])).rc)

    assert within(Place((layer,), limits=Limits(cpu_seconds=1)), use) == -24  # SIGXCPU


LOCKS = """
import fcntl, os, signal, struct
for name in "abcdef":
    file = os.open(f"/tmp/{name}", os.O_RDWR | os.O_CREAT)
    for place in range(MANY):
        fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * place)
try:
    fcntl.fcntl(file, 37, struct.pack("hhqqi", fcntl.F_WRLCK, 0, 1 << 30, 1, 0))  # F_OFD_SETLK
except PermissionError:
    print("refused", flush=True)
if MANY > 10:
    signal.pause()
"""


@pytest.mark.skipif(not shutil.which("python3", path="/usr/bin"), reason="needs a system Python")
def test_locks_are_bounded_where_nothing_counts_their_memory(layer: Path) -> None:
    async def use(box: Any) -> None:
        few = await box.exec(["/usr/bin/python3", "-c", LOCKS.replace("MANY", "10")])
        assert (few.rc, few.out) == (0, b"refused\n"), few.err
        if not box.memory_counted:
            assert (await box.exec(["/usr/bin/python3", "-c", LOCKS.replace("MANY", "1000")], timeout=20)).oom

    within(Place((layer,)), use)


def test_calls_run_at_once(layer: Path) -> None:
    async def use(box: Sandbox) -> None:
        meet = "echo . > ready-{0}; for i in $(seq 600); do [ -e ready-{1} ] && exit 0; sleep 0.05; done; exit 1"
        done = await asyncio.gather(*(box.exec(meet.format(me, (me + 1) % 4)) for me in range(4)))
        assert [one.rc for one in done] == [0] * 4
        reads = await asyncio.gather(*(box.read("keep") for _ in range(20)))
        assert set(reads) == {b"kept"}

    within(Place((layer,)), use)


def test_a_cancelled_caller_leaves_the_sandbox_usable(layer: Path) -> None:
    async def use(box: Sandbox) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(box.exec("sleep 1"), 0.1)
        assert (await box.exec("echo on")).out == b"on\n"

    within(Place((layer,)), use)


def test_files_are_read_written_and_listed(layer: Path) -> None:
    async def use(box: Sandbox) -> None:
        await box.write("new/deep/x.sh", b"#!/bin/sh\necho x\n", 0o755)
        assert (await box.exec(["new/deep/x.sh"])).out == b"x\n"
        await box.write("keep", b"new")
        assert await box.read("link") == await box.read("./src/../keep") == b"new"
        big = os.urandom(5 * MIB)
        await box.write("big", big)
        assert await box.read("big") == big
        with pytest.raises(SandboxError, match="larger"):
            await box.read("big", limit=5 * MIB - 1)
        assert [entry.path for entry in await box.list("src")] == ["src/a.py"]
        assert await box.list("new/deep") == [Entry("new/deep/x.sh", "file", 17, 0o755)]
        await box.exec("ln -s /workspace/keep inside; ln -s nothing loose")
        assert await box.read("inside") == b"new"
        kinds = {entry.path: entry.kind for entry in await box.list()}
        assert kinds["link"] == kinds["loose"] == "link"
        assert kinds["new"] == "folder"

    within(Place((layer,)), use)


def test_paths_lead_nowhere_else(layer: Path) -> None:
    async def use(box: Sandbox) -> None:
        await box.exec("ln -s /etc/passwd out; ln -s /tmp dir; ln -s self self; mkfifo fifo; echo t > /tmp/t")
        for path in [
            "../etc/passwd",
            "/etc/passwd",
            "out",
            "dir/t",
            "self",
            "fifo",
            "src",
            "src/a.py/x",
            "nothing",
            "a\0b",
        ]:
            with pytest.raises(Missing):
                await box.read(path)
        for path in ["../x", "\ud800", "x" * 300, "/tmp/x", "out", "dir/t", "dir/new/x", "self", "fifo", "src"]:
            with pytest.raises(Missing):
                await box.write(path, b"hacked")
        for path in ["dir", "..", "/", "keep", "nothing"]:
            with pytest.raises(Missing):
                await box.list(path)
        assert (await box.exec("cat /tmp/t; ls /tmp")).out == b"t\nt\n"

    within(Place((layer,)), use)


def test_odd_names_survive(layer: Path) -> None:
    async def use(box: Sandbox) -> None:
        for name in ODD:
            await box.write(f"odd/{name}", name.encode(errors="surrogateescape"))
        assert sorted(entry.path for entry in await box.list("odd")) == sorted(f"odd/{name}" for name in ODD)
        for name in ODD:
            assert await box.read(f"odd/{name}") == (await box.exec(["cat", f"odd/{name}"])).out
        await box.exec("mkfifo odd/fifo; mkdir odd/closed; echo x > odd/closed/y; chmod 0 odd/closed/y odd/closed")
        found = {entry.path: entry for entry in await box.diff()}
        assert found["odd/fifo"].kind == "other"
        assert found["odd/closed/y"].content == b"x\n"
        assert found["odd/closed"].mode == 0
        assert set(found) == {"odd", "odd/fifo", "odd/closed", "odd/closed/y", *(f"odd/{name}" for name in ODD)}

    within(Place((layer,)), use)


def test_more_new_folders_than_descriptors_and_deep_ones(layer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(box: Sandbox) -> None:
        await box.exec("for at in $(seq 1200); do mkdir d$at; done; at=$(seq -s / 1 300); mkdir -p deep/$at")
        entries = {entry.path: entry.kind for entry in await box.diff()}
        assert sum(path.startswith("d") and "/" not in path for path in entries) == 1201
        depths = {path.count("/"): kind for path, kind in entries.items() if path.startswith("deep")}
        assert depths == {**dict.fromkeys(range(200), "folder"), 200: "other"}

    monkeypatch.setattr(local, "_launchers", {})  # a new one, which inherits the bound
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        within(Place((layer,)), use)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_files_that_are_mostly_gaps_do_not_stop_a_diff(layer: Path) -> None:
    async def use(box: Sandbox) -> None:
        await box.exec("truncate -s 1M one two")
        found = {entry.path: (entry.kind, entry.size) for entry in await box.diff()}
        assert sorted(found.values()) == [("file", MIB), ("other", 0)]
        assert set(found) == {"one", "two"}

    within(Place((layer,), limits=Limits(disk=MIB)), use)


def test_place_shows_and_hides_folders(layer: Path, tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    (shown / "secret").mkdir(parents=True)
    (shown / "file").write_text("seen")
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(path.stat().st_mode | 0o711) if path.stat().st_uid == os.geteuid() else None

    async def use(box: Sandbox) -> None:
        assert (
            await box.exec(f"cat {shown}/file; ls -A {shown}/secret; touch {shown}/new || echo no")
        ).out == b"seenno\n"
        assert (await box.exec("ls -A /usr/share; touch /usr/share/x || echo no")).out == b"no\n"

    (shown / "secret" / "check").write_text("hidden")
    within(Place((layer,), readonly=(shown,), hidden=(f"{shown}/secret", "/usr/share", "/no/such")), use)


def test_locks_in_a_shown_folder_are_the_sandboxs_own(layer: Path, tmp_path: Path) -> None:
    shown = tmp_path / "a:b, c\\d"
    shown.mkdir()
    (shown / "file").write_text("seen")
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(path.stat().st_mode | 0o711) if path.stat().st_uid == os.geteuid() else None

    async def use(box: Sandbox) -> None:
        with (shown / "file").open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            taken = await box.exec(["flock", "-n", str(shown / "file"), "cat", str(shown / "file")])
        assert (taken.rc, taken.out) == (0, b"seen"), taken
        other = await open_sandbox(Place((layer,), readonly=(shown,)))
        both = f"flock -n '{shown / 'file'}' sh -c 'touch held; while ! test -e go; do :; done'"
        running = asyncio.create_task(box.exec(both, timeout=20))
        while not any(entry.path == "held" for entry in await box.list()):
            await asyncio.sleep(0)
        assert (await other.exec(["flock", "-n", str(shown / "file"), "true"])).rc == 0
        await box.write("go", b"")
        assert (await running).rc == 0
        await other.close()

    within(Place((layer,), readonly=(shown,)), use)


def test_what_was_written_can_be_a_layer(layer: Path, tmp_path: Path) -> None:
    async def use(box: Sandbox) -> None:
        await box.exec("echo 1 > one; rm keep; rm -r src; mkdir src; echo b > src/b.py; chmod 700 src; mkfifo pipe")
        written = write_layer(tmp_path / "written", await box.diff(), (layer,))
        assert stat.S_ISCHR((written / "keep").lstat().st_mode)
        again = await open_sandbox(Place((written, layer)))
        assert await again.diff() == []
        state = "ls; cat src/* one; stat -c %a src"
        assert (await again.exec(state)).out == b"link\none\nrun.sh\nsrc\nb\n1\n700\n"
        await again.close()

    within(Place((layer,)), use)


def test_many_layers_with_long_and_odd_paths(tmp_path: Path) -> None:
    layers = []
    for number in range(60):
        tree = tmp_path / "tree" / str(number)
        tree.mkdir(parents=True)
        (tree / f"f{number}").write_text(str(number))
        (tree / "same").write_text(str(number))
        layers.append(tmp_path / f"a:b,c\\d {'x' * 180}" / str(number))
        prepare(tree, layers[-1])

    async def use(box: Sandbox) -> None:
        assert (await box.exec("cat same; ls | wc -l")).out == b"061\n"

    within(Place(tuple(layers)), use)


def test_closed_twice_and_used_after(layer: Path) -> None:
    async def work() -> None:
        box = await open_sandbox(Place((layer,)))
        hanging = asyncio.create_task(box.exec("sleep 100"))
        await asyncio.sleep(0)
        await box.close()
        await box.close()
        with pytest.raises(SandboxError):
            await hanging
        with pytest.raises(SandboxError, match="closed"):
            await box.exec(["true"])

    asyncio.run(work())


def test_what_a_user_gets_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a folder"):
        asyncio.run(open_sandbox(Place((tmp_path / "none",)), "namespaces"))
    with pytest.raises(UserError, match="did you mean 'namespaces'"):
        asyncio.run(open_sandbox(Place(()), "namespace"))


@pytest.mark.skipif(not isolate.is_privileged(), reason="this is what the other tests already did")
def test_all_this_holds_for_an_ordinary_user() -> None:
    nobody = 65534
    root = Path(__file__).parents[2]
    packages = f"{root / 'src'}:{root}:{Path(pytest.__file__).parents[1]}"
    seen = [python for python in (sys.executable, "/usr/bin/python3") if _usable(python, nobody, packages)]
    if not seen:
        pytest.skip("no Python with pytest that user nobody may run")
    folder = Path(f"/tmp/etude-nobody-{os.getpid()}")
    folder.mkdir()
    os.chown(folder, nobody, nobody)
    try:
        words = [
            seen[0],
            "-m",
            "pytest",
            "-q",
            "--noconftest",
            "-p",
            "no:cacheprovider",
            f"--basetemp={folder}/t",
            __file__,
        ]
        done = subprocess.run(
            words,
            cwd="/",
            user=nobody,
            group=nobody,
            extra_groups=[],
            env={"PYTHONPATH": packages, "HOME": str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:]
        assert done.stdout.count(".") > 15, "they did run"
    finally:
        shutil.rmtree(folder)


def _usable(python: str, user: int, packages: str) -> bool:
    try:
        words = [python, "-c", "import pytest, sys; sys.exit(sys.version_info < (3, 11))"]
        return (
            subprocess.run(
                words, cwd="/", user=user, env={"PYTHONPATH": packages}, capture_output=True, check=False
            ).returncode
            == 0
        )
    except OSError:
        return False
