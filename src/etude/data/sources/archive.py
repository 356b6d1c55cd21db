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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.data.document import Drop, LicenceFile, Raw
from etude.data.filters.spdx import stated_in
from etude.data.sources.opened import MOST_LICENCES, Entry, entry_of, is_licence, licence_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Member = tuple[str, int, str, Callable[[], bytes]]  # name, size, fault, what reads it

SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
OPENERS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".tgz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
LONGEST_HEADER = 1 << 20  # bytes; a longer name is an attack on memory
OUTSIDE = re.compile(r"/|[A-Za-z]:|(.*/)?\.\.(/|$)", re.DOTALL)  # names that could stand for a file outside, anywhere
DAMAGE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError, RuntimeError)


@dataclass(frozen=True)
class ArchivePart:
    """One source archive. It is walked twice at most: once for its licences, once for its documents."""

    path: str
    most_bytes: int
    size: int = 0  # about what it unpacks to, in bytes
    most_unpacked: int = 4_000_000_000

    def licence_files(self) -> list[LicenceFile]:
        """Return the licence texts in it."""
        top, texts = self._survey
        return [licence_file(path.removeprefix(top), text) for path, text in texts if is_licence(path)]

    def stated_licence(self) -> str | None:
        """Return the licence that its outermost PKG-INFO states, if there is one and it is understood."""
        found = [(path.count("/"), text) for path, text in self._survey[1] if not is_licence(path)]
        return stated_in(min(found)[1]) if found else None

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
        top, texts, room = None, [], MOST_LICENCES
        for entry, content in self._walk(lambda path: is_licence(path) or posixpath.basename(path) == "PKG-INFO"):
            if not entry.fault:
                folder = entry.path[: entry.path.find("/") + 1]
                top = folder if top in {None, folder} else ""
            if content is not None and (room := room - len(content)) >= 0:
                texts.append((entry.path, content))
        return top or "", texts

    def _walk(self, wanted: Callable[[str], bool]) -> Iterator[tuple[Entry, bytes | None]]:
        """Yield every file listed, with the content of those that are wanted and have no fault."""
        path, room = Path(self.path), self.most_unpacked
        members = _in_zip(path) if path.suffix == ".zip" else _in_tar(path, room)
        try:
            for listed, size, kind, read in members:
                name = listed.replace("\\", "/")  # Windows writes either
                if name.endswith("/"):
                    continue
                fault = "path leads out of the archive" if OUTSIDE.match(name) else kind
                entry = entry_of(posixpath.normpath(name), "", size, fault, self.most_bytes)
                content = None if entry.fault or not wanted(entry.path) else read()
                if content is not None and len(content) != size:
                    raise EOFError
                room -= len(content or b"")
                if room < 0:
                    raise OverflowError
                yield entry, content
        except OverflowError:
            yield Entry(path.name, "", 0, "archive unpacks to too much"), None
        except DAMAGE:
            yield Entry(path.name, "", 0, "archive is damaged"), None


def _in_zip(path: Path) -> Iterator[Member]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            bounded = info.compress_type in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}  # others take any memory
            fault = "a link" if stat.S_ISLNK(info.external_attr >> 16) else "" if bounded else "unusual compression"
            yield info.filename, info.file_size, fault, partial(_unzipped, archive, info)


def _unzipped(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    with archive.open(info) as member:  # given a size, it unpacks no more; at the declared end it checks the sum
        return member.read(info.file_size + 1)


def _in_tar(path: Path, most: int) -> Iterator[Member]:
    """Yield the members of a tar (ustar, pax, GNU) as they come.

    Python's own reader takes three times as long, takes a broken header for the end, and reads a header of any length.
    """
    said: dict[bytes, bytes] = {}  # by extended headers, of the member that follows
    end = 0
    with OPENERS[path.suffix](path) as tar:
        while any(block := tar.read(512)):
            name, size, kind = _header(block)
            extended = kind in b"xLKgX"
            size = size if extended else int(said.get(b"size", size))
            end += 512 + (0 if kind in b"123456" else size + -size % 512)
            if size < 0 or end > most or (extended and size > LONGEST_HEADER):
                raise OverflowError
            if extended:
                text = tar.read(size)
                said |= _pax(text) if kind == b"x" else {b"path": text.rstrip(b"\0")} if kind == b"L" else {}
            elif kind != b"5":
                fault = "" if kind in b"0\0" else "a link" if kind in b"12" else "a special file"
                yield said.get(b"path", name).decode("utf-8", "surrogateescape"), size, fault, partial(tar.read, size)
            said = said if extended else {}
            if tar.seek(end) < end:
                raise EOFError
        total = tar.seek(most + 1)  # to the end, where the checksum stands
        if not 0 < total <= most:
            raise OverflowError if total else EOFError


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
    said: dict[bytes, bytes] = {}
    at = 0
    while at < len(text):
        space = text.index(b" ", at)
        end = at + int(text[at:space])
        key, _, value = text[space + 1 : end - 1].partition(b"=")
        said |= {key: value} if key in {b"path", b"size"} else {}
        at = max(end, space)  # forwards, whatever it says
    return said
