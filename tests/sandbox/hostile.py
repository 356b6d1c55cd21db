"""Tries everything against one backend, as the user it is run as: `python -m tests.sandbox.hostile BACKEND` prints a JSON report.

A report is {"unavailable": why} or {"found": {attack: [what succeeded, …]}}; empty lists are what a sandbox must give. `bare` runs
the attacks without any sandbox, as far as that is harmless: there they must succeed.
"""

# ruff: noqa: PTH115, T201
from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from etude.sandbox.box import MIB, Limits, Missing, Place, Sandbox, SandboxError
from etude.sandbox.layers import write_layer
from tests.sandbox import attacks
from tests.sandbox.backends import opener
from tests.sandbox.hostile_host import Host, processes, remains

LIMITS = Limits(memory=256 * MIB, processes=64, disk=64 * MIB, files=3000, output=64 << 10, seconds=30, cpu_seconds=60)
SHARED = {"tcp", "udp_as_dns", "unix_sockets", "raw_sockets", "read_files", "read_processes", "own_environment", "descriptors",
          "walk_everything", "open_devices", "make_devices", "write_outside", "namespaces", "gain_rights", "type_for_the_host",
          "shared_memory", "kernel_settings", "system_calls", "other_architecture", "vsock", "socket_families", "port_scan", "host_ipc",
          "host_events", "kernel_parameters", "file_system_ioctls"}  # harmless without a sandbox  # fmt: skip
OWN_NAMESPACE = {"mounts", "change_network", "memory_of_1"}  # these only where they change nothing but themselves
GIB = 1 << 30


async def leaks(before: dict[str, set[str]]) -> list[str]:
    """Return what is left that was not there before. A container engine may take its mounts away a moment after it has answered."""
    for _ in range(100):
        left = [f"{kind}: {sorted(now - before[kind])}" for kind, now in remains().items() if now - before[kind]]
        if not left:
            break
        await asyncio.sleep(0.1)
    return left


class Trial:
    """One backend under attack."""

    def __init__(self, host: Host, opened: Callable[[Place], Awaitable[Sandbox]], backend: str) -> None:
        self.host, self.opened, self.found = host, opened, dict[str, list[str]]()
        self.most = {"most_disk": LIMITS.disk, "most_files": LIMITS.files}
        self.backend = backend
        if backend in {
            "docker",
            "podman",
        }:  # bounds of their own for /tmp and /dev/shm; Podman cannot bound the number of files
            self.most = {"most_disk": 4 * LIMITS.disk, "most_files": 1 << 30}

    def place(self) -> Place:
        return Place((self.host.layer,), limits=LIMITS)

    async def inside(
        self, box: Sandbox, name: str, file: str = "attacks.py", timeout: float = 30, **more: Any
    ) -> list[str]:
        bounds = asdict(LIMITS) | self.most
        facts = json.dumps({**(self.host.facts if file == "attacks.py" else bounds), **more})
        done = await box.exec(["python3", file, name], stdin=facts.encode(), timeout=timeout)
        if done.timed_out or done.rc < 0:
            return []
        try:
            return list(json.loads(done.out))
        except ValueError:
            return [] if b"MemoryError" in done.err or done.oom else [f"did not run: {done.rc} {done.err[-300:]!r}"]

    async def attack(self, name: str, box: Sandbox) -> None:
        print(name, file=sys.stderr, flush=True)
        found = await self.inside(box, name)
        if (await box.exec("echo works; ls forged 2>/dev/null")).out != b"works\n":
            found.append("the sandbox no longer works, or did what it was not asked")
        self.found[name] = found + self.host.harm()

    async def scenario(self, name: str, tried: Callable[[Sandbox], Awaitable[list[str]]]) -> None:
        """Run one in a sandbox of its own, and look at what is left when that is closed."""
        print(name, file=sys.stderr, flush=True)  # where it hangs, if it does
        box = await self.opened(self.place())
        try:
            found = await tried(box)
        except Exception as error:  # noqa: BLE001 - a report of all is wanted, not of the first
            found = [f"{type(error).__name__}: {error}"[:300]]
        finally:
            await box.close()
        self.found[name] = found + self.host.harm()

    async def run(self) -> None:
        """Run all."""
        first = await self.opened(self.place())  # what is started once for all stays: a launcher
        await first.close()
        before = remains()
        box, other = await self.opened(self.place()), await self.opened(self.place())
        await other.exec(f"echo {self.host.secret} > {self.host.token}; cp {self.host.token} /tmp")
        for name in attacks.attacks():
            await self.attack(name, box)
        await box.close()
        await other.close()
        for name in BOMBS:
            await self.scenario(name, functools.partial(self.bomb, name=name))
        for tried in (
            self.output,
            self.forged,
            self.daemon,
            self.stubborn,
            self.odd_files,
            self.links,
            self.races,
            self.marks,
            self.orphans,
            self.forged_status,
            self.planted,
            self.proxy,
            self.locks,
        ):
            await self.scenario(tried.__name__, tried)
        self.found["leaks"] = await leaks(before)

    async def bomb(self, box: Sandbox, name: str) -> list[str]:
        found = await self.inside(box, name, "bombs.py", timeout=2 if name == "fork_bomb" else 30)
        await box.exec("rm -rf fill many /tmp/fill /tmp/many /dev/shm/fill /dev/shm/many")
        works = await box.exec(["python3", "-c", "print('works')"])
        found += [] if works.out == b"works\n" else [f"the sandbox no longer works: {works}"]
        if name in {"deep_folders", "sparse_files", "inodes"}:
            await box.list(".")
            changed = await box.diff()
            found += [] if len(changed) < 10_000 else [f"{len(changed)} differences"]
            held = sum(len(each.content or b"") for each in changed)
            found += [] if held <= 2 * LIMITS.disk else [f"{held} bytes of content"]
        left = processes(self.host.token) + processes("bombs.py")
        return found + [f"left running: {left}" for _ in left[:1]]

    async def output(self, box: Sandbox) -> list[str]:
        """A gigabyte on each stream is cut, counted, and not kept anywhere."""
        done = await box.exec("head -c 1G /dev/zero & head -c 1G /dev/zero >&2; wait", timeout=120)
        sizes = [len(done.out) + done.cut[0], len(done.err) + done.cut[1]]
        found = [] if done.rc == 0 and sizes == [GIB, GIB] else [f"{done.rc} {sizes}"]
        return found + ([] if max(len(done.out), len(done.err)) <= LIMITS.output else ["more is kept than agreed"])

    async def forged(self, box: Sandbox) -> list[str]:
        """Output that looks like a message of whatever runs the sandbox is output."""
        forged = b'\x00\x00\x00\x14{"id": 1, "rc": 0}\n0\n{"rc":0,"out":"","err":""}\n' * 20
        writes = "import os,sys\nd=sys.stdin.buffer.read()\nfor f in range(1,64):\n try: os.write(f,d)\n except OSError: pass\nos._exit(7)"
        done = await box.exec(["python3", "-c", writes], stdin=forged)
        held = done.rc == 7 and done.out == forged and done.err == forged
        again = await box.exec("echo one; exit 3")
        return [] if held and (again.out, again.rc) == (b"one\n", 3) else [f"{done} {again}"[:500]]

    async def daemon(self, box: Sandbox) -> list[str]:
        """What is left in the background ends with the call, also when it holds the call's output open."""
        marker = f"{self.host.token}-daemon"
        script = "import os,sys,time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\nprint('up',flush=True)\ntime.sleep(600)"
        running = asyncio.create_task(box.exec(["sh", "-c", f"python3 -c \"$0\" {marker}; python3 -c \"$0\" {marker} >/dev/null 2>&1; cat", script],
                                               stdin=b"x" * MIB))  # fmt: skip
        done = await running
        return [f"left: {processes(marker)}" for _ in processes(marker)[:1]] + (
            [] if done.rc == 0 else [str(done)[:300]]
        )

    async def stubborn(self, box: Sandbox) -> list[str]:
        """Signals ignored and the processor burnt: the time is up all the same."""
        marker = f"{self.host.token}-stubborn"
        line = "import signal\nfor n in set(range(1,32))-{9,19}: signal.signal(n, signal.SIG_IGN)\nprint('up', flush=True)\nwhile True: pass"
        done = await box.exec(["python3", "-c", line, marker], timeout=2)
        found = [] if done.timed_out and done.out == b"up\n" else [str(done)]
        return found + [f"left: {processes(marker)}" for _ in processes(marker)[:1]]

    async def odd_files(self, box: Sandbox) -> list[str]:
        """Names of any bytes, FIFOs, sockets and huge files: listed as what they are, never waited for or read whole."""
        names = [b"new\nline", b"\xff\xfe", b"-rf", b"$(id)", b"a\tb", b" ", "é".encode()]
        script = (
            "import os,socket,sys\nfor n in eval(sys.argv[1]): open(n,'w').write('x')\nos.mkfifo('fifo')\n"
            "socket.socket(socket.AF_UNIX).bind('sock')\nf=open('large','w'); f.truncate(40<<20)"
        )
        done = await box.exec(["python3", "-c", script, repr(names)])
        found = [] if done.rc == 0 else [str(done)]
        listed = {entry.path: entry.kind for entry in await box.list(".")}
        changed = {entry.path: (entry.kind, entry.content) for entry in await box.diff()}
        for name in map(os.fsdecode, names):
            found += (
                []
                if listed.get(name) == "file" and changed.get(name) == ("file", b"x")
                else [f"{name!r}: {changed.get(name)}"]
            )
            found += [] if await box.read(name) == b"x" else [f"read {name!r}"]
        found += [] if {listed["fifo"], listed["sock"]} == {"other"} else ["special files"]
        for path in ("fifo", "sock", "large", "/dev/zero", "."):
            found += await _refused(f"read {path}", box.read(path, limit=1 << 20))
        for path in ("fifo", "."):
            found += await _refused(f"write {path}", box.write(path, b"x"))
        return found

    async def links(self, box: Sandbox) -> list[str]:
        """The host reads and writes for the workspace only, wherever links lead."""
        host = self.host
        secret, outside = host.facts["secrets"][0], host.outside
        await box.exec(
            f"ln -s {secret} check; ln -s {outside} out; ln -s / root; ln -s loop loop; ln -s ../../../.. up; mkdir d; ln -s ../kept.txt d/fine"
        )
        found = [] if await box.read("d/fine") == b"as it was" else ["a link inside"]
        wanted = [
            "check",
            f"out/{host.token}",
            f"root{secret}",
            "loop",
            f"up{secret}",
            secret,
            f"../..{secret}",
            "root/etc/passwd",
            "up/proc/self/environ",
        ]
        for path in wanted:
            found += await _refused(f"read {path}", box.read(path))
            found += await _refused(f"list {path}", box.list(path))
        for path in ("out/new", f"root{outside}/new", f"{outside}/new", f"../..{outside}/new", "up/tmp/new"):
            found += await _refused(f"write {path}", box.write(path, b"x"))
        with contextlib.suppress(SandboxError):  # over a link: the link is replaced or nothing happens
            await box.write("check", b"x")
        folder = Path(tempfile.mkdtemp(dir=host.folder)) / "layer"
        write_layer(folder, await box.diff(), (host.layer,))
        return found + ([] if os.readlink(folder / "out") == str(outside) else ["the link was followed"])

    async def races(self, box: Sandbox) -> list[str]:
        """A folder and a link to outside change places while the host works on them."""
        swap = f"mkdir -p real; echo fine > real/{self.host.token}; while :; do ln -sfn {self.host.outside} way; rm way; mv real way; mv way real; done"
        running = asyncio.create_task(box.exec(swap, timeout=3))
        found, path = [], f"way/{self.host.token}"
        for index in range(40):
            with contextlib.suppress(SandboxError):
                found += ["read outside"] if self.host.secret.encode() in await box.read(path) else []
            with contextlib.suppress(SandboxError):
                await box.write(f"way/{index}", b"x")
        with contextlib.suppress(SandboxError):
            found += ["diff outside"] if self.host.secret.encode() in str(await box.diff()).encode() else []
        await running
        return found

    async def marks(self, box: Sandbox) -> list[str]:
        """Marks that mean something to overlayfs mean nothing when the workload sets them."""
        script = (
            "import os\nos.mkdir('dir'); open('dir/file','w').write('x')\nfor n in ('opaque','redirect','metacopy','whiteout','origin'):\n"
            " for p in ('user','trusted'):\n  for f in ('dir','dir/file','kept.txt'):\n   for v in (b'y', b'/etc'):\n"
            "    try: os.setxattr(f, p+'.overlay.'+n, v)\n    except OSError: pass\n"
            "for k in (0o020000, 0o060000):\n try: os.mknod('kept2', 0o600|k, 0)\n except OSError: pass"
        )
        await box.exec(["python3", "-c", script])
        folder = Path(tempfile.mkdtemp(dir=self.host.folder)) / "layer"
        layers = write_layer(folder, await box.diff(), (self.host.layer,)), self.host.layer
        other = await self.opened(replace(self.place(), layers=layers))
        try:
            shown = [await each.exec("ls . dir; cat kept.txt dir/file") for each in (box, other)]
        finally:
            await other.close()
        return (
            []
            if shown[0].out == shown[1].out and b"as it was" in shown[0].out
            else [f"{shown[0].out!r} {shown[1].out!r}"]
        )

    async def forged_status(self, box: Sandbox) -> list[str]:
        """How a call ended is told by its first process: by no descriptor of it can another be told."""
        script = (
            "import glob,os\nfor path in glob.glob('/proc/[0-9]*/fd/*') + ['/proc/1/fd/3']:\n"
            " if '/%d/' % os.getpid() in path or path[-2:] in ('/0','/1','/2'): continue\n"
            " try: os.write(os.open(path, os.O_WRONLY|os.O_NONBLOCK), b'{\"rc\": 0}')\n except OSError: pass\nos._exit(7)"
        )
        done = await box.exec(["python3", "-c", script])
        again = await box.exec("exit 3")
        return [] if (done.rc, again.rc) == (7, 3) else [f"{done} {again}"[:500]]

    async def planted(self, box: Sandbox) -> list[str]:
        """Programs, shells and what they read as they start: what a call has put there does not run in the next."""
        script = (
            "for target in /bin/sh /bin/bash /usr/bin/python3 $(command -v python3) /usr/bin/env /etc/profile /etc/ld.so.preload "
            "/etc/bash.bashrc /etc/environment /usr/lib/python3/sitecustomize.py; do echo 'echo planted' > $target; ln -sf /tmp/sh $target; "
            "mv /tmp/sh $target; done 2>/dev/null\n"
            "for name in sh ls python3 bash .bashrc .profile .bash_profile .shrc .pythonrc.py; do for folder in . /tmp /workspace; do "
            "printf '#!/bin/sh\\necho planted\\n' > $folder/$name; chmod 755 $folder/$name; done; done\n"
            "for v in 3.8 3.9 3.10 3.11 3.12 3.13 3.14; do mkdir -p /tmp/.local/lib/python$v/site-packages; "
            "for n in usercustomize sitecustomize; do echo 'print(\"planted\")' | "
            "tee /tmp/.local/lib/python$v/site-packages/$n.py /workspace/$n.py /tmp/$n.py > /dev/null; done; done"
        )
        await box.exec(script)
        words: list[str | list[str]] = [
            "echo works",
            ["python3", "-c", "print('works')"],
            ["sh", "-c", "ls -d /usr > /dev/null; echo works"],
        ]
        shown = [(await box.exec(each)).out for each in words]
        return [] if shown == [b"works\n"] * 3 else [str(shown)]

    async def proxy(self, box: Sandbox) -> list[str]:
        """A service on localhost is seen by nobody outside, and does not outlive its call, however it was started."""
        serve = (
            "import http.server,os,sys\nif os.fork(): os._exit(0) if len(sys.argv) > 1 else os.wait()\nos.setsid()\n"
            "http.server.HTTPServer(('0.0.0.0', 4873), http.server.SimpleHTTPRequestHandler).serve_forever()"
        )
        ask = "import socket,sys\nsocket.create_connection((sys.argv[1], 4873), 2); print('answers')"
        running = asyncio.create_task(box.exec(["python3", "-c", serve], timeout=6))
        while (await box.exec(["python3", "-c", ask, "127.0.0.1"])).out != b"answers\n" and not running.done():
            pass
        other = await self.opened(self.place())
        found = [f"{name} reached it" for name, out in (
            ("another sandbox", (await other.exec(["python3", "-c", ask, "127.0.0.1"])).out), ("the host", _host_asks(4873)),
        ) if out]  # fmt: skip
        await other.close()
        await running
        await box.exec(["python3", "-c", serve, "in the background"])
        again = await box.exec(["python3", "-c", ask, "127.0.0.1"])
        return found + (["it lives on"] if again.out else [])

    async def locks(self, box: Sandbox) -> list[str]:
        """What a call locks is not locked for the host, nor the other way round."""
        script = (
            "import fcntl,os,time\nheld = []\nfor path in ('/usr/bin/env', 'kept.txt', '/usr'):\n file = os.open(path, os.O_RDONLY)\n"
            " fcntl.flock(file, fcntl.LOCK_EX|fcntl.LOCK_NB); held.append(file)\n if path != '/usr': fcntl.lockf(file, fcntl.LOCK_SH|fcntl.LOCK_NB)\n"
            "open('held', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.01)"
        )
        paths = [Path("/usr/bin/env"), self.host.layer / "kept.txt", Path("/usr")]
        running = asyncio.create_task(box.exec(["python3", "-c", script], timeout=20))
        while not any(entry.path == "held" for entry in await box.list()) and not running.done():
            await asyncio.sleep(0.01)
        found = [f"{path} is locked" for path in paths if not _lock(path)]
        await box.write("go", b"")
        done = await running
        found += [] if done.rc == 0 else [f"it could lock nothing: {done.err[-200:]!r}"]
        files = [os.open(path, os.O_RDONLY) for path in paths]
        for file in files:
            fcntl.flock(file, fcntl.LOCK_EX)
        done = await box.exec(["python3", "-c", script])  # goes at once
        for file in files:
            os.close(file)
        return found + ([] if done.rc == 0 else [f"the host's lock is seen: {done.err[-200:]!r}"])

    async def orphans(self, box: Sandbox) -> list[str]:
        """When the process that opened a sandbox is killed, all inside dies."""
        marker = f"{self.host.token}-orphan"
        words = [sys.executable, "-m", "tests.sandbox.hostile", self.backend, str(self.host.layer), marker]
        opener = await asyncio.create_subprocess_exec(*words)
        while not (inside := processes(f"{marker}-inside")) and opener.returncode is None:
            await asyncio.sleep(0.05)
        watched = select.poll()
        for descriptor in map(os.pidfd_open, inside):
            watched.register(descriptor, select.POLLIN)
        opener.kill()
        await opener.wait()
        ended = 0
        while ended < len(inside) and (gone := watched.poll(30_000)):
            for descriptor, _ in gone:
                watched.unregister(descriptor)
                os.close(descriptor)
            ended += len(gone)
        return [] if inside and ended == len(inside) else [f"{len(inside) - ended} of {len(inside)} live on"]


BOMBS = ("unix_socket_buffers", "datagram_buffers", "tcp_buffers", "pipe_buffers", "page_tables", "hidden_mappings", "semaphores", "messages",
         "spliced_pages", "many_processes", "many_threads", "fork_bomb", "memory_of_one", "shared_memory", "memory_of_many", "memory_files",
         "disk", "inodes", "many_descriptors", "deep_folders", "sparse_files")  # fmt: skip


def _host_asks(port: int) -> bytes:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return b"answers"
    return b""


def _lock(path: Path) -> bool:
    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


async def _refused(what: str, asked: Awaitable[object]) -> list[str]:
    try:
        return [f"{what}: {await asked!r}"[:200]]
    except (Missing, SandboxError):
        return []


def bare(host: Host) -> dict[str, list[str]]:
    """Return what each attack gets without a sandbox."""
    host.facts |= {"tops": [str(host.folder)], "devices": ["/dev/kmsg"]}
    folder = host.folder / "bare"
    shutil.copytree(host.layer, folder)
    own = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "--net",
        "--pid",
        "--fork",
        "--mount-proc",
        "sh",
        "-c",
        '"$@"; exit $?',
        "sh",
    ]
    found = {}
    for name in sorted(SHARED | OWN_NAMESPACE):
        words = [*(own if name in OWN_NAMESPACE else []), "python3", "attacks.py", name]
        done = subprocess.run(
            words,
            input=json.dumps(host.facts).encode(),
            cwd=folder,
            capture_output=True,
            pass_fds=[host.open_file],
            check=False,
        )
        found[name] = json.loads(done.stdout) if done.returncode == 0 else []
        found[name] += [f"failed: {done.stderr[-200:]!r}"] if done.returncode and not done.stdout else []
    return found


def main(backend: str) -> dict[str, Any]:
    """Return the report."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        Path(name).chmod(0o755)
        host = Host(Path(name))
        try:
            if backend == "bare":
                return {"found": bare(host)}
            opened = opener(backend, Path(name))
            if isinstance(opened, str):
                return {"unavailable": opened}
            trial = Trial(host, opened, backend)
            asyncio.run(trial.run())
            return {"found": trial.found}
        finally:
            host.remove()


def orphan(backend: str, layer: Path, marker: str) -> None:
    """Open a sandbox, start something in it, and wait to be killed."""
    with tempfile.TemporaryDirectory(dir=layer.parents[1]) as name:
        opened = opener(backend, Path(name))
        assert not isinstance(opened, str)

        async def wait() -> None:
            box = await opened(Place((layer,), limits=LIMITS))
            await box.exec(["sh", "-c", "setsid sleep 600 & sleep 600", f"{marker}-inside"])

        asyncio.run(wait())


if __name__ == "__main__":
    if len(sys.argv) > 2:
        orphan(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
    else:
        print(json.dumps(main(sys.argv[1])))
