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
_strongest: str | None = None


@dataclass(frozen=True)
class Probe:
    """What came of trying one backend."""

    backend: str
    works: bool
    detail: str  # one line: how limits are enforced, or why it does not work


async def try_own(backend: str) -> Probe:
    """Open a sandbox by namespaces or bubblewrap, and run a command in it."""
    with tempfile.TemporaryDirectory(prefix="etude-probe-") as folder:
        (Path(folder) / "tree" / "folder").mkdir(parents=True)
        layer = Path(folder) / "layer"
        prepare(Path(folder) / "tree", layer)
        try:
            sandbox = await local.open_own(Place((layer,)), backend)
        except SandboxError as error:
            return Probe(backend, works=False, detail=one_line(error))
        try:
            result = await sandbox.exec(TRIAL)
        except SandboxError as error:
            return Probe(backend, works=False, detail=one_line(error))
        finally:
            await sandbox.close()
    if result.out != b"works\n":
        said = " ".join(result.err.decode(errors="replace").split())[:200]
        return Probe(backend, works=False, detail=f"its trial command ended with {result.rc}: {said}")
    who = "as root" if isolate.is_privileged() else "unprivileged"
    bounds = (
        "by control groups" if sandbox.memory_counted else "by rlimits and a watchdog; CPU only in seconds a process"
    )
    return Probe(
        backend, works=True, detail=f"{who}; memory, processes and CPU bounded {bounds}; disk by the size of a tmpfs"
    )


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
    return Probe(name, works=True, detail=f"the engine answers; ask for it by {name}:IMAGE")


async def probe_all() -> list[Probe]:
    """Try every backend, the strongest first."""
    return [await try_own(name) for name in local.OWN_BACKENDS] + [await try_engine(name) for name in local.ENGINES]


def probe() -> list[Probe]:
    """Try every backend, the strongest first."""
    return asyncio.run(probe_all())


async def strongest() -> str:
    """Return the strongest backend that works here, found out once in a process."""
    global _strongest  # noqa: PLW0603
    if _strongest is None:
        failures = []
        for name in local.OWN_BACKENDS:
            tried = await try_own(name)
            if tried.works:
                _strongest = name
                return name
            failures.append(tried)
        why = "; ".join(f"{tried.backend}: {tried.detail}" for tried in failures)
        raise UserError(
            f"no sandbox works here ({why}): allow user namespaces (sysctl user.max_user_namespaces), run as root, "
            "or ask for a container engine by docker:IMAGE or podman:IMAGE"
        )
    return _strongest
