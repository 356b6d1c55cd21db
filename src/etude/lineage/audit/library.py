"""The library: sketches of known bases, those that ship with the package and those a user has added."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from etude.errors import UserError
from etude.files import digest_of_files, sha256_file
from etude.lineage.audit.sketch import Sketch
from etude.progress import BYTES

if TYPE_CHECKING:
    from etude.progress import Reporter

SUFFIX = ".sketch.safetensors"
FOLDER = "sketches"  # in the cache
NAME = re.compile(r"[\w][\w.-]{0,99}")


def shipped() -> Path:
    """Return the folder of the sketches that come with the package."""
    return Path(str(resources.files("etude.lineage.audit"))) / FOLDER


def known_sketches(extra: Path | None) -> list[Sketch]:
    """Open the shipped sketches and those of a folder, by name; nothing but their headers is read yet."""
    folders = [shipped(), *([extra] if extra else [])]
    return [Sketch.load(path) for folder in folders for path in sorted(folder.glob(f"*{SUFFIX}"))]


def place_for(name: str, folder: Path) -> Path:
    """Return the file for a new sketch in a user's folder; a name that is taken is refused: no base is replaced unseen."""
    if not NAME.fullmatch(name):
        raise UserError(f"{name[:80]!r} is no name for a sketch; use letters, digits, dots and dashes")
    path = folder / f"{name}{SUFFIX}"
    for taken in (path, shipped() / path.name):
        if taken.exists():
            raise UserError(f"the library has a {name!r} already: {taken}; choose another name or delete that file")
    return path


def add_sketch(sketch: Sketch, folder: Path) -> Path:
    """Write a sketch into a user's folder."""
    path = place_for(sketch.name, folder)
    sketch.save(path)
    return path


def digest_weights(path: Path, reporter: Reporter) -> str:
    """Return the digest by which records name the weights of a folder, all of its safetensors; or that of a single file."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    with reporter.task("hashing", sum(file.stat().st_size for file in files), BYTES) as task:
        return digest_of_files({file.name: sha256_file(file, task.advance) for file in files})
