"""What this machine can do: each backend is tried once, for real."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

from etude.errors import UserError, one_line
from etude.sandbox import isolate, local
from etude.sandbox.box import Place, SandboxError
from etude.sandbox.layers import prepare

# Ids, no way to make namespaces, and a folder of the layers replaced, which an old kernel's tmpfs cannot note for an ordinary user.
TRIAL = "test $(id -u) != 0 && ! unshare -m true 2>/dev/null && rm -r folder && mkdir folder && echo works"
BOUNDS = {
    True: "memory, processes and CPU bounded by a cgroup (v2); disk by a tmpfs",
    False: "no cgroup v2 to write to: memory and processes bounded by resource limits and a watchdog, CPU by process; disk by a tmpfs",
}
CONTAINERS = '`--sandbox {engine}:IMAGE`, or `sandbox = "{engine}:IMAGE"`, uses it; IMAGE needs python3, sh and tar'
_works: bool = False


@dataclass(frozen=True)
class Probe:
    """The result of trying one backend."""

    backend: str
    works: bool
    detail: str  # one line: how limits are enforced, or why it does not work


async def try_namespaces() -> Probe:
    """Open a sandbox and run a command in it."""
    with tempfile.TemporaryDirectory(prefix="etude-probe-") as folder:
        (Path(folder) / "tree" / "folder").mkdir(parents=True)
        layer = Path(folder) / "layer"
        prepare(Path(folder) / "tree", layer)
        try:
            sandbox = await local.LocalSandbox.open(Place((layer,)))
            try:
                result = await sandbox.exec(TRIAL)
            finally:
                await sandbox.close()
        except SandboxError as error:
            return Probe(local.NAMESPACES, works=False, detail=one_line(error))
    if result.out != b"works\n":
        said = " ".join(result.err.decode(errors="replace").split())[:200]
        return Probe(local.NAMESPACES, works=False, detail=f"its trial command ended with {result.rc}: {said}")
    who = "as root" if isolate.is_privileged() else "unprivileged"
    return Probe(local.NAMESPACES, works=True, detail=f"{who}; {BOUNDS[sandbox.memory_counted]}")


async def try_engine(name: str) -> Probe:
    """Ask a container engine whether it is there; what an image of it can do is seen when one is named."""
    try:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(name, "info", stdout=pipe, stderr=asyncio.subprocess.STDOUT)
        said, _ = await process.communicate()
    except OSError as error:
        return Probe(name, works=False, detail=f"cannot run {name}: {error.strerror}")
    if process.returncode:
        return Probe(name, works=False, detail=" ".join(said.decode(errors="replace").split())[-200:])
    return Probe(name, works=True, detail=f"the engine answers; {CONTAINERS.format(engine=name)}")


async def probe_all() -> list[Probe]:
    """Try every backend, the strongest first."""
    return [await try_namespaces(), *[await try_engine(name) for name in local.ENGINES]]


async def strongest() -> str:
    """Return the strongest backend that works here without being told an image; tried once in a process."""
    global _works  # noqa: PLW0603
    if not _works:
        tried = await try_namespaces()
        if not tried.works:
            advice = "allow user namespaces (sysctl user.max_user_namespaces), run as root, or use containers"
            instead = CONTAINERS.format(engine="podman")
            raise UserError(f"no sandbox works here ({tried.backend}: {tried.detail}): {advice}: {instead}")
        _works = True
    return local.NAMESPACES
