"""Is this folder a whole model? Told from names and headers, before anything is loaded.

A safetensors file says in its header how long it must be; a file that was cut off is found here in microseconds instead
of by a loader's traceback, or, worse, by random weights in place of missing ones.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

from etude.errors import UserError
from etude.files import sha256_file
from etude.lineage.record import FileDigest

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from etude.progress import Reporter

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEADER_LIMIT = 100_000_000  # the format's own limit, in bytes


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a model's folder, after checking that each is there and whole."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no model: config.json is missing; give a Hugging Face model folder")
    files = _named_files(folder)
    for file in files:
        check_safetensors(file)
    return files


def _named_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            if not names or any("/" in name for name in names):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{index} is damaged: it must map tensor names to files; fetch it again") from None
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            count = f"{len(missing)} of {len(names)} weight files"
            raise UserError(f"{folder} lacks {missing[0]} ({count}); fetch them again")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if any(folder.glob("*.bin")):
        raise UserError(f"{folder} has pickled weights (*.bin), which can run code; convert them to safetensors first")
    raise UserError(f"{folder} has a config.json but no weights ({SINGLE} or {INDEX})")


def check_safetensors(file: Path) -> None:
    """Refuse a safetensors file whose length is not what its header promises."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        header_length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < header_length <= min(HEADER_LIMIT, size - 8):
            raise UserError(f"{file} is not a whole safetensors file ({size:,} bytes, no valid header); fetch it again")
        try:
            header = json.loads(stream.read(header_length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            expected = 8 + header_length + max(ends, default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            raise UserError(f"{file} has a damaged safetensors header; fetch it again") from None
    if size != expected:
        kind = "is cut off" if size < expected else "has bytes after its end"
        raise UserError(f"{file} {kind}: {size:,} bytes, its header promises {expected:,}; fetch it again")


def digest_files(files: Iterable[Path], folder: Path, reporter: Reporter, label: str) -> dict[str, FileDigest]:
    """Return the digests of files by their path inside `folder`, with a progress bar."""
    listed = list(files)
    digests = {}
    with reporter.task(label, sum(file.stat().st_size for file in listed), "B") as task:
        for file in listed:
            size = file.stat().st_size
            digests[str(file.relative_to(folder))] = FileDigest(sha256=sha256_file(file, task.advance), bytes=size)
    return digests
