"""Sandboxes on this machine, seen from the host: `open_sandbox`, and the launchers behind it.

A launcher is started when it is first needed, one for each host process and set of warm modules, and ends with the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import UserError, nearest
from etude.sandbox.box import Place, Result, Sandbox, SandboxError, answered
from etude.sandbox.inside import LENGTHS, pack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


NAMESPACES = "namespaces"
ENGINES = ("podman", "docker")
# No user site: what a call has put into /tmp, the home, does not start with the next one's Python.
BASE_ENV = {"HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1"}  # noqa: S108
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", **BASE_ENV}
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

_launchers: dict[tuple[object, ...], tuple[subprocess.Popen[bytes], socket.socket]] = {}
_lock = threading.Lock()


def _start_launcher(warm: tuple[Path, tuple[str, ...]] | None, settings: Mapping[str, str]) -> socket.socket:
    """Return the launcher for warm modules; one that has ended, or was this process's parent's, is not used."""
    key = (os.getpid(), warm, *sorted(settings.items()))
    with _lock:
        if key in _launchers and _launchers[key][0].poll() is None:
            return _launchers[key][1]
        python, modules = (str(warm[0]), warm[1]) if warm else (sys.executable, ())
        # A warm Python must find its packages; it is not isolated (-I), because that would show in what it runs.
        flags = ["-s"] if warm else ["-I", "-S"]
        command = [python, *flags, "-c", "import os; exec(os.environ.pop('LAUNCHER'))", *modules]
        env = {**ENVIRONMENT, **settings, "LAUNCHER": BOOTSTRAP, "ETUDE": str(PACKAGE)}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                options: dict[str, Any] = {"env": env, "cwd": "/", "start_new_session": True}
                process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, **options)
            except OSError as error:
                raise SandboxError(f"cannot start {python}: {error.strerror}") from error
        _launchers[key] = process, ours
        return ours


class LocalSandbox(Sandbox):
    """A sandbox of this machine. Answers come in any order; one task hands them to those who wait."""

    backend = NAMESPACES
    memory_counted = False
    _task: asyncio.Task[None]

    def __init__(self, place: Place, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.place, self._reader, self._writer = place, reader, writer
        self._waiting: dict[int, tuple[asyncio.Future[tuple[dict[str, Any], bytes]], bytearray]] = {}
        self._numbers = itertools.count()
        self._why = ""

    @classmethod
    async def open(cls, place: Place) -> LocalSandbox:
        """Have a keeper forked that serves a socket. The launcher holds it open, too, until all of the sandbox is gone."""
        service, theirs = socket.socketpair()
        launcher = _start_launcher(place.warm, warm_settings(place))
        try:
            socket.send_fds(launcher, [json.dumps(describe(place)).encode()], [theirs.fileno()])
        except OSError as error:
            service.close()
            raise SandboxError(f"the launcher has gone: {error.strerror}") from error
        finally:
            theirs.close()
        sandbox = cls(place, *await asyncio.open_connection(sock=service))
        try:
            answer, _ = await sandbox._receive()
        except (asyncio.IncompleteReadError, ConnectionError):
            answer = {"error": "its launcher or its keeper is gone"}
        except BaseException:  # the caller has given up
            sandbox._writer.close()
            raise
        if "error" in answer:
            sandbox._writer.close()
            raise SandboxError(f"no sandbox by namespaces: {answer['error']}")
        sandbox.memory_counted = answer["counted"]
        sandbox._task = asyncio.create_task(sandbox._hand_out())
        return sandbox

    async def _receive(self) -> tuple[dict[str, Any], bytes]:
        header_size, payload_size = LENGTHS.unpack(await self._reader.readexactly(LENGTHS.size))
        header = json.loads(await self._reader.readexactly(header_size))
        return header, await self._reader.readexactly(payload_size)

    async def _hand_out(self) -> None:
        """Give answers to those who wait, until nothing is left of the sandbox."""
        trouble = "its launcher or its keeper is gone"
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                header, payload = await self._receive()
                if "id" not in header:  # the last words of a keeper or of the launcher
                    trouble = header["error"]
                    continue
                future, parts = self._waiting[header["id"]]
                parts += payload
                if not header.get("more") and not future.done():
                    future.set_result((header, bytes(parts)))
        self._writer.close()
        self._why = self._why or f"the sandbox has ended: {trouble}"
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxError(self._why))

    async def _ask(self, header: dict[str, Any], payload: bytes = b"") -> tuple[dict[str, Any], bytes]:
        if self._why:
            raise SandboxError(self._why)
        number = next(self._numbers)
        future: asyncio.Future[tuple[dict[str, Any], bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future, bytearray()
        # Also where nobody waits any more.
        future.add_done_callback(lambda done: (self._waiting.pop(number), done.exception()))
        self._writer.write(pack({"id": number, **header}, payload))
        return answered(*await asyncio.shield(future))

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

    async def close(self) -> None:
        self._why = self._why or "the sandbox is closed"
        self._writer.write_eof()
        await self._task


def describe(place: Place) -> dict[str, Any]:
    """Return what a keeper must know, with all paths resolved: links of the host lead nowhere once its root has changed."""
    warm = place.warm and {"python": str(place.warm[0]), "modules": place.warm[1], "settings": warm_settings(place)}
    readonly = sorted((source, path) for path, source in shown(place).items())
    return {"layers": [str(layer.resolve()) for layer in place.layers], "readonly": readonly, "hidden": list(place.hidden),
            "fixed": list(place.fixed), "warm": warm, "limits": dataclasses.asdict(place.limits)}  # fmt: skip


def shown(place: Place) -> dict[str, str]:
    """Return the host's folders that are seen inside, by the paths they are seen at: environments and their Pythons, but /usr."""
    folders = [*place.readonly, *([place.warm[0].parent.parent] if place.warm else [])]
    paths = {str(path.absolute()): str(path.resolve()) for each in folders for path in (each, *_python_base(each))}
    return {path: source for path, source in paths.items() if not f"{path}/".startswith("/usr/")}


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
    """Open a sandbox by a backend's name: namespaces, docker:IMAGE or podman:IMAGE (see images.py); auto: namespaces."""
    from etude.sandbox import container

    if backend == "auto":
        from etude.sandbox import probe

        backend = await probe.strongest()
    for layer in place.layers:
        if not layer.is_dir():
            raise UserError(f"the layer {layer} is not a folder")
    if backend == NAMESPACES:
        return await LocalSandbox.open(place)
    engine, _, image = backend.partition(":")
    if engine in ENGINES and image:
        from etude.sandbox import images  # with pydantic, which the Python of a bare sandbox may not have

        image = image if image.startswith("sha256:") else await asyncio.to_thread(images.digest, engine, image)
        return await container.ContainerSandbox.open(engine, image, place)
    raise UserError(wrong_name(backend))


def wrong_name(backend: str, *, bare: bool = False) -> str:
    """Say what is wrong with a backend's name, if anything is. `bare`: an engine may go without an image."""
    engine, _, image = backend.partition(":")
    if backend in {"auto", NAMESPACES} or (engine in ENGINES and (image or bare)):
        return ""
    if engine in ENGINES:
        return f"{engine} needs an image: {engine}:IMAGE, one with python3, sh and tar"
    known = [NAMESPACES, *(f"{name}:IMAGE" for name in ENGINES), "auto"]
    return f"there is no sandbox backend {backend!r}{nearest(backend, known)}"


def checked_name(backend: str) -> str:
    """Return a backend's name as it is, for settings. An engine may lack an image: tasks of public benchmarks have their own."""
    if why := wrong_name(backend, bare=True):
        raise ValueError(why)
    return backend
