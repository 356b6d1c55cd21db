"""Which image a sandbox is opened with: one that is there, one that is pulled, or one built from a Dockerfile; known by its digest.

`podman:IMAGE` and `docker:IMAGE` name an image; where IMAGE begins with `.` or `/` it is a Dockerfile, or the folder of one. What
it builds is kept by the engine under a name made of the contents of that folder: it is built once, and again when something in it
changes. A tag may come to mean another image, so what a record holds is the digest, which can be given as IMAGE again.
"""

from __future__ import annotations

import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from etude.errors import UserError
from etude.files import digest_of, files_below, sha256_file
from etude.sandbox.container import bounded
from etude.sandbox.local import ENGINES, checked_name, wrong_name

Backend = Annotated[str, AfterValidator(checked_name)]  # as settings have it
WHERE = "where code runs: auto, namespaces, podman:IMAGE or docker:IMAGE (docs/sandbox.md)"
LARGEST = 1 << 30  # bytes of a folder that an image is built from
PULLED = 3600.0  # seconds


def decides(sandbox: str) -> dict[str, str]:
    """Return what a stage's inputs say of its sandbox: nothing of the default, which came before there was a choice."""
    return {} if sandbox == "auto" else {"sandbox": sandbox}


def settled(sandbox: str) -> str:
    """Return a backend with its image named by digest, fetched or built where it is not there; others as they are."""
    engine, _, image = sandbox.partition(":")
    if why := wrong_name(sandbox):
        raise UserError(why)
    return f"{engine}:{digest(engine, image)}" if engine in ENGINES and image else sandbox


@lru_cache(maxsize=256)
def digest(engine: str, image: str, build: Path | None = None) -> str:
    """Return the id of an image. `build`: the folder of a Dockerfile to build it from where it is not there and cannot be pulled."""
    if image.startswith((".", "/")):
        return built(engine, Path(image))
    there = known(engine, image)
    if not there and (why := _ran(engine, "pull", "-q", image)[1]):
        if build is not None:
            return built(engine, build)
        missing = f"{engine} has no image {image} and cannot pull it: {why}"
        raise UserError(f"{missing}; `{engine} images` shows what is there")
    return there or known(engine, image)


def known(engine: str, image: str) -> str:
    """Return the id of an image that is there, or nothing."""
    said, why = _ran(engine, "image", "inspect", "--format", "{{.Id}}", image)
    return "" if why else f"sha256:{said.strip().removeprefix('sha256:')}"


def built(engine: str, place: Path) -> str:
    """Return the id of the image of a Dockerfile, built if no image of the same contents is there."""
    file = place / "Dockerfile" if place.is_dir() else place
    if not file.is_file():
        raise UserError(f"{place} is no Dockerfile, and no folder of one; name one, or an image without `./` before it")
    paths = files_below(file.parent)
    if sum(path.stat().st_size for path in paths) > LARGEST:
        large = f"{file.parent} holds more than {LARGEST >> 30} GiB to build from"
        raise UserError(f"{large}; put the Dockerfile into a folder of its own")
    named = [(path.relative_to(file.parent).as_posix(), path) for path in paths]
    contents = [[name, path.stat().st_mode & 0o777, sha256_file(path)] for name, path in named]
    name = f"localhost/etude:{digest_of([file.name, contents])[:32]}"
    if there := known(engine, name):
        return there
    said, why = _ran(engine, "build", "-q", *bounded(), "-t", name, "-f", str(file), str(file.parent))
    if why:
        raise UserError(f"{engine} cannot build {file}: {(why or said)[-400:]}")
    return known(engine, name)


def _ran(engine: str, *words: str) -> tuple[str, str]:
    """Return what an engine says; where it fails, why."""
    try:
        call = [engine, *words]
        done = subprocess.run(call, capture_output=True, text=True, check=False, errors="replace", timeout=PULLED)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"cannot run {engine}: {error}; `etude sandbox probe` says what works here") from None
    why = " ".join(done.stderr.split())[-400:] or f"exit code {done.returncode}"
    return done.stdout, why if done.returncode else ""
