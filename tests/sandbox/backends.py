"""The backends that work on this machine, and how a test opens a sandbox with each."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

from etude.sandbox.box import Place, Sandbox, SandboxError
from etude.sandbox.container import ContainerSandbox, Engine

BACKENDS = ("namespaces", "podman", "docker")
FOLDERS = ("usr", "etc", "tmp", "proc", "sys", "dev", "workspace", "run")


def rootfs(folder: Path) -> Path:
    """Make a root that is empty but for where this machine's /usr is to be mounted: an image without a registry."""
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        if (target := Path("/", name)).is_symlink():
            (folder / name).symlink_to(f"usr/{target.name}")
    return folder


def engine(name: str, folder: Path) -> Engine | str:
    """Return an engine that can be used here, or why there is none."""
    if shutil.which(name) is None:
        return f"{name} is not installed"
    root = rootfs(folder / f"root-{name}")
    if name == "podman":
        runtime = ("--runtime", "runc") if shutil.which("runc") else ()
        options = ("--volume", "/usr:/usr:ro", "--read-only-tmpfs=false")
        return Engine("podman", ("podman", *runtime), ("--rootfs", str(root)), options)
    packed = subprocess.run(["tar", "-C", str(root), "-cf", "-", "."], capture_output=True, check=True).stdout
    made = subprocess.run(["docker", "import", "-", "etude-test"], input=packed, capture_output=True, check=False)
    if made.returncode:
        return made.stderr.decode(errors="replace").splitlines()[-1]
    return Engine("docker", ("docker",), ("etude-test",), ("--volume", "/usr:/usr:ro"))


def opener(backend: str, folder: Path) -> Callable[[Place], Awaitable[Sandbox]] | str:
    """Return what opens a sandbox, having opened one; or why none can be."""
    if backend in {"docker", "podman"}:
        found = engine(backend, folder)
        if isinstance(found, str):
            return found

        def opened(place: Place) -> Awaitable[Sandbox]:
            return ContainerSandbox.open(found, place)
    else:
        from etude.sandbox.local import open_sandbox

        def opened(place: Place) -> Awaitable[Sandbox]:
            return open_sandbox(place, backend)

    async def once() -> None:
        (folder / "empty").mkdir()
        await (await opened(Place((folder / "empty",)))).close()

    try:
        asyncio.run(once())
    except (SandboxError, OSError) as error:
        return str(error)
    return opened
