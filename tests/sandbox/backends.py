"""The backends that work on this machine, and how a test opens a sandbox with each."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

from etude.sandbox.box import Place, Sandbox, SandboxError
from etude.sandbox.container import ContainerSandbox

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


def program(folder: Path, name: str, line: str) -> str:
    """Write a program that stands for an engine."""
    folder.mkdir(parents=True)
    (folder / name).write_text(f"#!/bin/bash\n{line}\n")
    (folder / name).chmod(0o755)
    return str(folder / name)


def engine(name: str, folder: Path) -> str:
    """Return a program that starts containers with this machine's /usr as their image."""
    if not os.environ.get("PODMAN_IMAGE"):
        raise OSError("real containers are tried where PODMAN_IMAGE names an image")
    real = shutil.which(name)
    if real is None:
        raise OSError(f"{name} is not installed")
    root = rootfs(folder / f"root-{name}")
    image, options = "etude-test", "--volume /usr:/usr:ro"
    if name == "podman":
        real += " --runtime runc" if shutil.which("runc") else ""
        image, options = f"--rootfs {root}", f"{options} --read-only-tmpfs=false"
    line = f"""[ "$1" = run ] || exec {real} "$@"
words=()
for word in "$@"; do [ "$word" = IMAGE ] && words+=({options} {image}) || words+=("$word"); done
exec {real} "${{words[@]}}\""""
    if name == "podman":
        return program(folder / f"bin-{name}", name, line)
    packed = subprocess.run(["tar", "-C", str(root), "-cf", "-", "."], capture_output=True, check=True).stdout
    made = subprocess.run(["docker", "import", "-", "etude-test"], input=packed, capture_output=True, check=False)
    if made.returncode:
        raise OSError(made.stderr.decode(errors="replace").splitlines()[-1])
    return program(folder / f"bin-{name}", name, line)


def opener(backend: str, folder: Path) -> Callable[[Place], Awaitable[Sandbox]] | str:
    """Return what opens a sandbox, having opened one; or why none can be."""
    if backend in {"docker", "podman"}:
        try:
            path = engine(backend, folder)
        except OSError as error:
            return str(error)

        def opened(place: Place) -> Awaitable[Sandbox]:
            return ContainerSandbox.open(path, "IMAGE", place)
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
