"""Sandboxes on this machine, seen from the host: `open_sandbox`, and the launchers behind it.

A launcher is started when it is first needed, one for each host process and set of warm modules, and ends with the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from etude.errors import UserError, nearest
from etude.sandbox import cgroups, launcher
from etude.sandbox.box import MIB, Entry, Missing, Result, Sandbox, SandboxError
from etude.sandbox.inside import LENGTHS, pack, take
from etude.sandbox.layers import checked, differences, write_layer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from etude.sandbox.box import Place

NAMESPACES = "namespaces"
ENGINES: tuple[Literal["podman"], Literal["docker"]] = ("podman", "docker")
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",  # noqa: S108 - of the sandbox
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
}
# Imports the launcher and nothing else of this package, whichever Python runs it and whatever it has installed.
# It comes by the environment, which other processes cannot read as they can a command line.
BOOTSTRAP = """
import os, sys, types
root = os.environ.pop("ETUDE")
for name, folder in (("etude", root), ("etude.sandbox", root + "/sandbox")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
sys.path[:] = filter(None, sys.path)
from etude.sandbox import launcher
launcher.main()
"""
PACKAGE = Path(__file__).parent.parent

Entries: TypeAlias = list[Entry]  # a method is called `list`, too
_launchers: dict[tuple[object, ...], Launcher] = {}
_lock = threading.Lock()


class Launcher:
    """The host's end of a launcher."""

    def __init__(self, warm: tuple[Path, tuple[str, ...]] | None, settings: Mapping[str, str]) -> None:
        python, modules = (str(warm[0]), warm[1]) if warm else (sys.executable, ())
        # A warm Python must find its packages; it is not isolated (-I), because that would show in what it runs.
        flags = ["-s"] if warm else ["-I", "-S"]
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [python, *flags, "-c", "import os; exec(os.environ.pop('LAUNCHER'))", *modules]
        env = {**ENVIRONMENT, **settings, "LAUNCHER": BOOTSTRAP, "ETUDE": str(PACKAGE)}
        with theirs:
            try:
                self.process = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=env, cwd="/", start_new_session=True
                )
            except OSError as error:
                raise SandboxError(f"cannot start {python}: {error.strerror}") from error

    def open(self, limits: dict[str, Any], service: socket.socket, ended: int) -> None:
        """Have a keeper forked that serves a socket."""
        try:
            socket.send_fds(self.socket, [json.dumps({"limits": limits}).encode()], [service.fileno(), ended])
        except OSError as error:
            raise SandboxError(f"the launcher has gone: {error.strerror}") from error


def _launcher(place: Place) -> Launcher:
    """Return the launcher for a place's warm modules; one that has ended, or was this process's parent's, is not used."""
    settings = warm_settings(place)
    key = (os.getpid(), place.warm, *sorted(settings.items()))
    with _lock:
        known = _launchers.get(key)
        if known is None or known.process.poll() is not None:
            known = _launchers[key] = Launcher(place.warm, settings)
        return known


class Frozen:
    """The private layer of a fork, kept for as long as it or a fork of it lives. Launchers remove those of dead hosts."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=cgroups.own_name("frozen-"), dir=launcher.FROZEN))
        self.users = 1

    def leave(self) -> None:
        """Tell that one user less needs it."""
        self.users -= 1
        if not self.users:
            shutil.rmtree(self.folder)


class FileWork:
    """What all sandboxes do with files, by asking `inside` of them; see box.Sandbox for what its methods promise."""

    def __init__(self, place: Place) -> None:
        self.place = place

    async def _ask(self, header: dict[str, Any], payload: bytes = b"") -> tuple[dict[str, Any], bytes]:
        """Have `inside` do something; return its answer and what it sent."""
        raise NotImplementedError

    async def read(self, path: str, limit: int = 16 * MIB) -> bytes:
        return (await self._ask({"op": "read", "path": inside(path), "limit": limit}))[1]

    async def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        await self._ask({"op": "write", "path": inside(path), "mode": mode}, content)

    async def diff(self) -> Entries:
        _, content = await self._ask({"op": "walk", "limit": self._disk()})
        return await asyncio.to_thread(differences, self.place.layers, take(bytearray(content)))

    def _disk(self) -> int:
        """Return how many bytes can have been written."""
        return self.place.limits.disk

    async def list(self, path: str = ".") -> Entries:
        _, content = await self._ask({"op": "list", "path": inside(path)})
        headers = [header for header, _ in take(bytearray(content))]
        entries = [Entry(checked(one["path"]), one["kind"], one["size"], one["mode"]) for one in headers]
        return sorted(entries, key=lambda entry: entry.path)

    async def snapshot(self, folder: Path) -> Path:
        return await asyncio.to_thread(write_layer, folder, await self.diff(), self.place.layers)


def answered(answer: dict[str, Any], content: bytes) -> tuple[dict[str, Any], bytes]:
    """Return an answer of `inside`, or raise what it says went wrong."""
    if "missing" in answer:
        raise Missing(answer["missing"])
    if "error" in answer:
        raise SandboxError(answer["error"])
    return answer, content


class LocalSandbox(FileWork):
    """A sandbox of this machine. Answers come in any order; one task hands them to those who wait."""

    backend = NAMESPACES

    def __init__(self, place: Place, frozen: tuple[Frozen, ...] = ()) -> None:
        super().__init__(place)
        self._frozen = frozen
        self._waiting: dict[int, tuple[asyncio.Future[tuple[dict[str, Any], bytes]], bytearray]] = {}
        self._count = 0
        self._why = ""
        self.memory_counted = False

    @classmethod
    async def open(cls, place: Place, frozen: tuple[Frozen, ...] = ()) -> LocalSandbox:
        sandbox = cls(place, frozen)
        await sandbox._start()
        return sandbox

    async def _start(self) -> None:
        service, theirs = socket.socketpair()
        gone, ended = os.pipe()
        try:
            _launcher(self.place).open(dataclasses.asdict(self.place.limits), theirs, ended)
        except BaseException:
            service.close()
            os.close(gone)
            raise
        finally:
            theirs.close()
            os.close(ended)
        self._reader, self._writer = await asyncio.open_connection(sock=service)
        self._gone = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        pipe = os.fdopen(gone, "rb", buffering=0)
        self._gone_pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(self._gone), pipe)
        try:
            self._writer.write(pack(describe(self.place)))
            answer, _ = await self._receive()
        except (asyncio.IncompleteReadError, ConnectionError):
            answer = {"ready": False}
        except BaseException:  # the caller has given up
            self._writer.close()
            self._gone_pipe.close()
            raise
        if not answer["ready"]:
            self._writer.close()
            why = answer.get("error") or await self._end()
            raise SandboxError(f"no sandbox by namespaces: {why}")
        self.memory_counted = answer["counted"]
        self._task = asyncio.create_task(self._hand_out())

    async def _receive(self) -> tuple[dict[str, Any], bytes]:
        header_size, payload_size = LENGTHS.unpack(await self._reader.readexactly(LENGTHS.size))
        header = json.loads(await self._reader.readexactly(header_size))
        return header, await self._reader.readexactly(payload_size)

    async def _hand_out(self) -> None:
        """Give answers to those who wait, until the keeper has gone."""
        # KeyError: a keeper's dying words, which answer nobody.
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, KeyError):
            while True:
                header, payload = await self._receive()
                future, parts = self._waiting[header["id"]]
                parts += payload
                if not header.get("more") and not future.done():
                    future.set_result((header, bytes(parts)))
        why = await self._end()
        self._why = self._why or f"the sandbox has ended: {why}"
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxError(self._why))

    async def _end(self) -> str:
        """Wait until nothing is left of the sandbox; return what went wrong."""
        trouble = await self._gone.read()
        self._gone_pipe.close()
        return trouble.decode(errors="replace") or "its launcher or its keeper is gone"

    async def _ask(self, header: dict[str, Any], payload: bytes = b"") -> tuple[dict[str, Any], bytes]:
        if self._why:
            raise SandboxError(self._why)
        self._count += 1
        number = self._count
        future: asyncio.Future[tuple[dict[str, Any], bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future, bytearray()
        try:
            self._writer.write(pack({"id": number, **header}, payload))
            answer, content = await asyncio.shield(future)
        finally:
            if future.done():
                del self._waiting[number]
            else:  # the caller has been cancelled; the answer still comes
                future.add_done_callback(lambda done: (self._waiting.pop(number), done.exception()))
        return answered(answer, content)

    async def exec(
        self, command: str | Sequence[str], *, timeout: float | None = None, env: Mapping[str, str] | None = None, stdin: bytes = b"",
        cwd: str = ".",
    ) -> Result:  # fmt: skip
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        merged = {**ENVIRONMENT, **self.place.env, **(env or {})}
        seconds = self.place.limits.seconds if timeout is None else timeout
        request = {"op": "exec", "words": words, "env": merged, "cwd": cwd, "timeout": seconds}
        answer, payload = await self._ask(request, stdin)
        size = answer["out"]
        more = {name: answer[name] for name in ("timed_out", "oom", "seconds")}
        return Result(answer["rc"], payload[:size], payload[size:], cut=tuple(answer["cut"]), **more)

    async def fork(self) -> Sandbox:
        frozen = Frozen()
        try:
            layer = await self.snapshot(frozen.folder / "layer")
            place = dataclasses.replace(self.place, layers=(layer, *self.place.layers))
            fork = await LocalSandbox.open(place, (frozen, *self._frozen))
        except BaseException:
            frozen.leave()
            raise
        for older in self._frozen:
            older.users += 1
        return fork

    async def close(self) -> None:
        self._why = self._why or "the sandbox is closed"
        self._writer.close()
        await self._task
        for frozen in self._frozen:
            frozen.leave()
        self._frozen = ()


def inside(path: str) -> str:
    """Return a path relative to the workspace in its plainest form; one that leads out is missing."""
    plain = os.path.normpath(path)
    if os.path.isabs(path) or plain.split("/")[0] == ".." or "\0" in path:  # noqa: PTH117
        raise Missing(f"{path!r} is not a path inside the workspace")
    return plain


def describe(place: Place) -> dict[str, Any]:
    """Return what a keeper must know, with all paths resolved: links of the host lead nowhere once its root has changed."""
    folders = [*place.readonly, *([place.warm[0].parent.parent] if place.warm else [])]
    shown = {str(path.absolute()): str(path.resolve()) for each in folders for path in (each, *_python_base(each))}
    warm = place.warm and {"python": str(place.warm[0]), "modules": place.warm[1], "settings": warm_settings(place)}
    return {
        "layers": [str(layer.resolve()) for layer in place.layers],
        "readonly": sorted((source, path) for path, source in shown.items() if not f"{path}/".startswith("/usr/")),
        "hidden": list(place.hidden),
        "warm": warm,
        "limits": dataclasses.asdict(place.limits),
    }


def warm_settings(place: Place) -> dict[str, str]:
    """Return what a warm Python must be started with to be as a fresh one would be: all that Python reads only then."""
    given = {**ENVIRONMENT, **place.env} if place.warm else {}
    return {name: value for name, value in given.items() if name.startswith("PYTHON") and name != "PYTHONPATH"}


def _python_base(folder: Path) -> list[Path]:
    """Return the Python that a virtual environment was made with."""
    try:
        lines = (folder / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    homes = [line.partition("=")[2].strip() for line in lines if line.partition("=")[0].strip() == "home"]
    return [Path(home).parent for home in homes]


async def open_sandbox(place: Place, backend: str = "auto") -> Sandbox:
    """Open a sandbox by a backend's name: namespaces, docker:IMAGE or podman:IMAGE; auto: namespaces, if they work here."""
    from etude.sandbox import probe

    if backend == "auto":
        backend = await probe.strongest()
    for layer in place.layers:
        if not layer.is_dir():
            raise UserError(f"the layer {layer} is not a folder")
    if backend == NAMESPACES:
        return await LocalSandbox.open(place)
    engine, _, image = backend.partition(":")
    if engine in ENGINES and image:
        from etude.sandbox.container import ContainerSandbox, Engine

        return await ContainerSandbox.open(Engine(engine, (engine,), (image,)), place)
    known = [NAMESPACES, *(f"{name}:IMAGE" for name in ENGINES), "auto"]
    raise UserError(f"there is no sandbox backend {backend!r}{nearest(backend, known)}")
