"""The isolated place where a task's workspace lives and code that a model wrote runs: the seam, and what goes in and out of it.

What a call starts ends with the call: there is no shell that lives on, no daemon, no state but the files of the workspace and of /tmp.
Files are reached only inside the workspace, by paths relative to it; links are followed only inside it.
Nothing that comes out of a sandbox is trusted: names may be any bytes (decoded with surrogateescape), contents are cut at a bound.
"""

from __future__ import annotations

import asyncio
import posixpath
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from etude.sandbox import inside

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

WORKSPACE = inside.WORKSPACE
MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What a sandbox may use, all its processes together unless said otherwise."""

    memory: int = 2048 * MIB
    processes: int = 256
    cpus: float = 2.0
    disk: int = 1024 * MIB  # of changed and new files in the workspace and /tmp; they lie in memory
    files: int = 100_000  # of those
    cpu_seconds: int = 600  # of one process
    output: int = MIB // 4  # bytes kept of each stream of a call: half from its beginning, half from its end
    seconds: float = 120.0  # of a call, where the call names no other bound


@dataclass(frozen=True)
class Place:
    """What a sandbox has inside. Layers are read-only folders, the uppermost first; what is written lies above them all."""

    layers: tuple[Path, ...]
    readonly: tuple[Path, ...] = ()  # host folders visible at their own paths: a Python environment, say
    hidden: tuple[str, ...] = ()  # folders of the system that are shown empty
    env: Mapping[str, str] = field(default_factory=dict)
    warm: tuple[Path, tuple[str, ...]] | None = None  # a Python, and modules it imports before it is forked for a call
    limits: Limits = Limits()
    fixed: tuple[str, ...] = ()  # files of the workspace that nothing in it may write, remove or rename


@dataclass(frozen=True)
class Result:
    """How a call ended."""

    rc: int  # −n: ended by signal n
    out: bytes
    err: bytes
    timed_out: bool = False
    oom: bool = False  # something was killed for want of memory
    cut: tuple[int, int] = (0, 0)  # bytes left out of the middle of out and err
    seconds: float = 0.0


Kind = Literal["file", "link", "folder", "gone", "other"]


@dataclass(frozen=True)
class Entry:
    """One thing in a folder, or one difference from the layers.

    `other`: a FIFO, a socket, a device; in a diff also a file with more gaps, or a folder with a longer path, than can be copied.
    """

    path: str  # relative to the workspace
    kind: Kind
    size: int = 0
    mode: int = 0
    content: bytes | None = None  # of a file, or where a link leads; only in a diff


Entries: TypeAlias = list[Entry]  # a method is called `list`, too


class SandboxError(Exception):
    """The sandbox itself failed, or was asked for something that is not there: infrastructure, never the model's score."""


class Missing(SandboxError):  # noqa: N818 - a state of the file
    """A path that is not there, cannot be used as asked, or is outside the workspace."""


class Sandbox(Protocol):
    """One sandbox: what every backend promises, and what all do alike with files, by asking `inside`. Calls may be made at once."""

    backend: str  # what isolates it, for the trace
    place: Place
    held: int = 0  # bytes of the layers, where they count as written

    async def exec(
        self, command: str | Sequence[str], *, timeout: float | None = None, env: Mapping[str, str] | None = None, stdin: bytes = b"",
        cwd: str = ".",
    ) -> Result:  # fmt: skip
        """Run a command, a line for sh or words, in the workspace.

        `python -m MODULE …` with the warm Python and a warm module starts from its memory.
        """

    async def close(self) -> None:
        """End everything in it and leave nothing behind. May be called twice."""

    async def _ask(self, header: dict[str, Any], payload: bytes = b"") -> tuple[dict[str, Any], bytes]:
        """Have `inside` do something; return its answer and what it sent."""

    async def read(self, path: str, limit: int = 16 * MIB) -> bytes:
        """Return a file's content. Missing: there is none. SandboxError: it is larger than the limit."""
        return (await self._ask({"op": "read", "path": plain_path(path), "limit": limit}))[1]

    async def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file, and the folders above it."""
        await self._ask({"op": "write", "path": plain_path(path), "mode": mode}, content)

    async def diff(self, most: int = 1 << 40) -> Entries:
        """Return all differences from the layers, sorted by path. A file that `most` bytes have no room for comes as `other`."""
        from etude.sandbox.layers import differences

        _, content = await self._ask({"op": "walk", "limit": min(most, self.place.limits.disk) + self.held})
        return await asyncio.to_thread(differences, self.place.layers, inside.take(bytearray(content)))

    async def list(self, path: str = ".") -> Entries:
        """Return what is in a folder, sorted by name."""
        from etude.sandbox.layers import checked

        _, content = await self._ask({"op": "list", "path": plain_path(path)})
        headers = [header for header, _ in inside.take(bytearray(content))]
        entries = [Entry(checked(one["path"]), one["kind"], one["size"], one["mode"]) for one in headers]
        return sorted(entries, key=lambda entry: entry.path)


def plain_path(path: str) -> str:
    """Return a path relative to the workspace in its plainest form; one that leads out is missing."""
    plain = posixpath.normpath(path)
    if path.startswith("/") or plain.split("/")[0] == ".." or "\0" in path:
        raise Missing(f"{path!r} is not a path inside the workspace")
    return plain


def answered(answer: dict[str, Any], content: bytes) -> tuple[dict[str, Any], bytes]:
    """Return an answer of `inside`, or raise what it says went wrong."""
    if "missing" in answer:
        raise Missing(answer["missing"])
    if "error" in answer:
        raise SandboxError(answer["error"])
    return answer, content
