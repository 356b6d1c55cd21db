"""Source archives, read as streams: nothing is ever unpacked to disk, and no member takes more memory than it may.

An archive may come from anybody. Members that lead out of it, links and devices are dropped by their headers, declared
sizes are not believed, and what unpacks to too much is left where that shows.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import posixpath
import re
import stat
import zipfile
import zlib
from dataclasses import dataclass
from functools import cached_property, partial
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from etude.data.document import Drop, LicenceFile, Raw
from etude.data.sources.opened import MOST_LICENCES, Entry, entry_of, is_licence, licence_file
from etude.data.sources.stated import stated_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Member = tuple[str, int, str, Callable[[], bytes]]  # name, size, fault, what reads it

SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
OPENERS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".tgz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
USUAL_RATIO = 4  # source code to its archive
MOST_MEMBERS = 500_000
BLOCK = 1 << 16
LONGEST_HEADER = 1 << 20  # bytes; a longer name is an attack on memory
OUTSIDE, TOO_MUCH, DAMAGED = "path leads out of the archive", "archive unpacks to too much", "archive is damaged"
DAMAGE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError, RuntimeError)


class TooMuch(Exception):  # noqa: N818 - it is what happened
    """An archive unpacks to more than it may."""


class Metered:
    """A file that is counted as it is read, and may not give more than `most` bytes."""

    def __init__(self, file: IO[bytes], most: int, total: int = 0) -> None:
        self.file, self.most, self.total = file, most, total

    def read(self, size: int) -> bytes:
        """Read up to `size` bytes."""
        content = self.file.read(size)
        self.total += len(content)
        if self.total > self.most:
            raise TooMuch
        return content


@dataclass(frozen=True)
class ArchivePart:
    """One source archive. It is walked twice at most: once for its licences, once for its documents."""

    path: str
    most_bytes: int
    total: int = 4_000_000_000  # bytes it may unpack to
    ratio: int = 200  # times its own size that it may unpack to, from
    ratio_from: int = 200_000_000  # so many bytes on

    @property
    def size(self) -> int:
        """About how many bytes it unpacks to."""
        return USUAL_RATIO * Path(self.path).stat().st_size

    def licence_files(self) -> list[LicenceFile]:
        """Return the licence texts in it."""
        top, texts = self._survey
        return [licence_file(path.removeprefix(top), text) for path, text in texts if is_licence(path)]

    def stated_licence(self) -> str | None:
        """Return the licence that its outermost PKG-INFO states, if there is one and it is understood."""
        found = [(path.count("/"), text) for path, text in self._survey[1] if not is_licence(path)]
        return stated_in(min(found, key=lambda metadata: metadata[0])[1]) if found else None

    def read(self) -> Iterator[Raw | Drop]:
        """Yield its members in their order; what is wrong with the archive as a whole comes last, as one drop."""
        top, _ = self._survey
        repository = top.rstrip("/") or re.sub(r"(\.tar)?\.\w+$", "", Path(self.path).name)
        for entry, content in self._walk(lambda _path: True):
            path = entry.path.removeprefix(top)
            if content is None:
                yield Drop(repository, path, "read", entry.fault, entry.size)
            else:
                yield Raw(repository, path, content)

    @cached_property
    def _survey(self) -> tuple[str, list[tuple[str, bytes]]]:
        """The folder that all members lie in (`toolz-1.2.0/`), or nothing; licence texts and metadata by path."""
        tops, texts, room = set(), [], MOST_LICENCES
        for entry, content in self._walk(lambda path: is_licence(path) or posixpath.basename(path) == "PKG-INFO"):
            if entry.fault not in {OUTSIDE, TOO_MUCH, DAMAGED}:
                tops.add("".join(entry.path.partition("/")[:2]))
            if content is not None and room >= len(content):
                texts.append((entry.path, content))
                room -= len(content)
        top = tops.pop() if len(tops) == 1 else ""
        return top if top.endswith("/") else "", texts

    def _walk(self, wanted: Callable[[str], bool]) -> Iterator[tuple[Entry, bytes | None]]:
        """Yield every file listed, with the content of those that are wanted and have no fault."""
        path = Path(self.path)
        seen: set[str] = set()
        try:
            allowed = min(self.total, max(self.ratio_from, self.ratio * path.stat().st_size))
            for name, size, kind, read in (_in_zip if path.suffix == ".zip" else _in_tar)(path, allowed):
                clean = posixpath.normpath(name)
                fault = _outside(name) or ("named twice" if clean in seen else kind)
                entry = entry_of(clean, "", size, fault, self.most_bytes)
                content = None if entry.fault or not wanted(clean) else read()
                if content is not None and len(content) != size:
                    raise EOFError
                yield entry, content
                seen.add(clean)
                if len(seen) > MOST_MEMBERS:
                    raise TooMuch
        except TooMuch:
            yield Entry(path.name, "", 0, TOO_MUCH), None
        except DAMAGE:
            yield Entry(path.name, "", 0, DAMAGED), None


def _outside(name: str) -> str:
    """Return a fault if a name could stand for a file outside the archive, on any system."""
    bad = name.startswith("/") or "\\" in name or re.match("[A-Za-z]:", name) or ".." in name.split("/")
    return OUTSIDE if bad else ""


def _in_tar(path: Path, allowed: int) -> Iterator[Member]:
    """Yield the members of a tar (ustar, pax, GNU) as they come.

    Python's own reader takes three times as long, takes a broken header for the end, and reads a header of any length.
    """
    said: dict[bytes, bytes] = {}  # by extended headers, of the member that follows
    with OPENERS[path.suffix](path) as unpacked:
        tar = Metered(unpacked, allowed)
        while any(block := tar.read(512)):
            name, size, kind = _header(block)
            if kind in b"xLKgX":
                text = tar.read(_padded(_within(size, LONGEST_HEADER)))[:size]
                said |= _pax(text) if kind == b"x" else {b"path": text.rstrip(b"\0")} if kind == b"L" else {}
                continue
            name, size = said.get(b"path", name), _within(int(said.get(b"size", size)), allowed)
            end = tar.total + (0 if kind in b"123456" else _padded(size))
            if kind != b"5" and not name.endswith(b"/"):
                fault = "" if kind in b"0\0" else "a link" if kind in b"12" else "a special file"
                yield name.decode("utf-8", "surrogateescape"), size, fault, partial(tar.read, size)
            while tar.total < end:
                if not tar.read(min(BLOCK, end - tar.total)):
                    raise EOFError
            said = {}
        while tar.read(BLOCK):  # to the end, where the checksum stands
            pass
        if not tar.total:
            raise EOFError


def _within(size: int, most: int) -> int:
    if not 0 <= size <= most:
        raise TooMuch
    return size


def _padded(size: int) -> int:
    return size + -size % 512


def _header(block: bytes) -> tuple[bytes, int, bytes]:
    """Return name, size and kind of a member."""
    total = sum(block[:148]) + 8 * ord(" ") + sum(block[156:])
    if len(block) != 512 or int(block[148:156].strip(b" \0"), 8) != total:
        raise ValueError("no header")
    folder = block[345:500].rstrip(b"\0") if block[257:263] == b"ustar\0" else b""
    name = block[:100].split(b"\0")[0]
    return folder + b"/" * bool(folder) + name, int(block[124:136].strip(b" \0") or b"0", 8), block[156:157]


def _pax(text: bytes) -> dict[bytes, bytes]:
    """Return what the records say; each is `LENGTH KEY=VALUE` and a newline."""
    said = {}
    at = 0
    while at < len(text):
        space = text.index(b" ", at)
        end = at + int(text[at:space])
        key, _, value = text[space + 1 : end - 1].partition(b"=")
        said[key] = value
        at = max(end, space)  # forwards, whatever it says
    return said


def _in_zip(path: Path, allowed: int) -> Iterator[Member]:
    metered = Metered(BytesIO(), allowed)
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if not info.is_dir():
                usual = info.compress_type in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
                fault = "a link" if stat.S_ISLNK(info.external_attr >> 16) else "" if usual else "unusual compression"
                yield info.filename, info.file_size, fault, partial(_unzipped, archive, info, metered)


def _unzipped(archive: zipfile.ZipFile, info: zipfile.ZipInfo, metered: Metered) -> bytes:
    """Return a member. Given a size, the library unpacks no more than that; it checks the sum at the declared end."""
    with archive.open(info) as metered.file:
        return metered.read(info.file_size + 1)
