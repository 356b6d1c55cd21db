"""Packages at versions, as their source archives; kept in the cache, and checked whenever they are used again.

pip's own index client fetches them, so that the user's index, proxy and credentials hold. `pip download` would run a
package's setup.py to learn its dependencies; here no package code runs. pip's internals stay in a process of their own.

Archives are read as streams: nothing is ever unpacked to disk, and no member takes more memory than it may. An archive may
come from anybody. Members that lead out of it, links and devices are dropped by their headers, declared sizes are not
believed, and what unpacks to too much is left where that shows.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import posixpath
import re
import stat
import subprocess
import sys
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import parse

from etude.data.document import MOST_LICENCES, USUAL_RATIO, Drop, Entry, OpenSource, Part, Raw, entry_of, is_licence
from etude.errors import UserError, nearest
from etude.files import digest_of, read_json, sha256_file, whole_file, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Member = tuple[str, int, str, Callable[[], bytes]]  # name, size, fault, what reads it
    from etude.data.settings import SourceSettings
    from etude.progress import Reporter

SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
OPENERS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".tgz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
LONGEST_HEADER = 1 << 20  # bytes; a longer name is an attack on memory
OUTSIDE = re.compile(r"/|[A-Za-z]:|(.*/)?\.\.(/|$)", re.DOTALL)  # names that could stand for a file outside, anywhere
DAMAGE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError, RuntimeError)


@dataclass(frozen=True)
class Archive:
    """One source archive. It is walked twice at most: once for its licences, once for its documents."""

    path: str
    most_bytes: int
    most_unpacked: int = 4_000_000_000

    def part(self) -> Part:
        """Return it as a part of a source."""
        about = USUAL_RATIO * Path(self.path).stat().st_size
        return Part(about, self.read, self.licences, self.path)

    def licences(self) -> dict[str, bytes]:
        """Return the licence texts and the metadata in it."""
        top, texts = self._survey
        return {path.removeprefix(top): text for path, text in texts.items()}

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
    def _survey(self) -> tuple[str, dict[str, bytes]]:
        """The folder that all members lie in (`toolz-1.2.0/`), or nothing; licence texts and metadata by path."""
        top, room = None, MOST_LICENCES
        texts: dict[str, bytes] = {}
        for entry, content in self._walk(lambda path: is_licence(path) or posixpath.basename(path) == "PKG-INFO"):
            if not entry.fault:
                folder = entry.path[: entry.path.find("/") + 1]
                top = folder if top in {None, folder} else ""
            if content is not None and (room := room - len(content)) >= 0:
                texts.setdefault(entry.path, content)
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
    extra: dict[bytes, bytes] = {}  # by extended headers, of the member that follows
    end = 0
    with OPENERS[path.suffix](path) as tar:
        while any(block := tar.read(512)):
            name, size, kind = _header(block)
            extended = kind in b"xLKgX"
            size = size if extended else int(extra.get(b"size", size))
            end += 512 + (0 if kind in b"123456" else size + -size % 512)
            if size < 0 or end > most or (extended and size > LONGEST_HEADER):
                raise OverflowError
            if extended:
                text = tar.read(size)
                extra |= _pax(text) if kind == b"x" else {b"path": text.rstrip(b"\0")} if kind == b"L" else {}
            elif kind != b"5":
                fault = "" if kind in b"0\0" else "a link" if kind in b"12" else "a special file"
                yield extra.get(b"path", name).decode("utf-8", "surrogateescape"), size, fault, partial(tar.read, size)
            extra = extra if extended else {}
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
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(text):
        space = text.index(b" ", at)
        end = at + int(text[at:space])
        key, _, value = text[space + 1 : end - 1].partition(b"=")
        records |= {key: value} if key in {b"path", b"size"} else {}
        at = max(end, space)  # forwards, whatever it says
    return records


FETCHERS = 4
SHOWN = 12  # newest versions to choose from
CLIENT = "import sys; from etude.data.sources.package import fetch; fetch(*sys.argv[1:])"


def open_pypi(settings: SourceSettings, most_bytes: int, cache: Path, reporter: Reporter) -> OpenSource:
    """Fetch what is not in the cache; each archive is a part."""
    pins, folder = list(dict.fromkeys(settings.pypi)), cache / "sdists"
    archives: dict[str, str] = {}  # digests; two pins may stand for the same one
    with reporter.task("fetching packages", len(pins), "packages") as task, ThreadPoolExecutor(FETCHERS) as pool:
        try:
            for note in pool.map(partial(_fetched, folder), pins):
                archives[note["file"]] = note["sha256"]
                task.advance()
        finally:
            pool.shutdown(cancel_futures=True)
    parts = [Archive(str(folder / name), most_bytes).part() for name in archives]
    return OpenSource(f"package {', '.join(pins)}", digest_of(archives), parts)


def _fetched(folder: Path, pin: str) -> dict[str, str]:
    """Return the name and the digest of a package's archive in the cache, fetching it if it is not there as it was."""
    note = folder / f"{pin}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # not there, or not whole
        known: dict[str, str] = read_json(note)
        if sha256_file(folder / known["file"]) == known["sha256"]:
            return known
    command = [sys.executable, "-P", "-c", CLIENT, pin, str(folder)]  # -P: nothing from the current folder is imported
    client = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if client.returncode:
        lines = client.stderr.strip().splitlines() or ["pip said nothing"]
        raise UserError(f"cannot fetch {pin}: {lines[-1]}")
    return dict(read_json(note))


def fetch(pin: str, folder: str) -> None:
    """Fetch an archive into a folder, and write down its name and digest beside it. Ends the process if it cannot."""
    try:
        from pip._internal.commands import create_command
    except ImportError:
        sys.exit(f"{sys.executable} has no pip; install it: python -m ensurepip")
    command: Any = create_command("download")
    options, _ = command.parse_args(["--no-input"])
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session, ignore_requires_python=True)  # noqa: SLF001 - as pip does
        link = _chosen(finder.find_all_candidates(pin.partition("==")[0]), pin)
        name = Path(link.filename).name
        response = session.get(link.url_without_fragment, headers={"Accept-Encoding": "identity"}, stream=True)
        response.raise_for_status()
        with whole_file(Path(folder, name)) as beside:
            with beside.open("wb") as file:
                file.writelines(response.iter_content(1 << 20))
            digest = sha256_file(beside)
            if link.hash_name == "sha256" and link.hash != digest:
                sys.exit(f"{name} is not what the index promises: its SHA-256 differs; try again, or check the index")
    write_json(Path(folder, f"{pin}.json"), {"file": name, "sha256": digest})


def _chosen(candidates: list[Any], pin: str) -> Any:
    """Return pip's link to the source archive at the pinned version."""
    name, version = pin.split("==")
    if not candidates:
        sys.exit(f"the index has no {name!r} or cannot be reached; check the name, the network and pip's settings")
    archives = sorted((one for one in candidates if one.link.filename.endswith(SUFFIXES)), key=lambda one: one.version)
    links = [one.link for one in archives if parse(str(one.version)) == parse(version)]
    if not links:
        known = [str(one.version) for one in archives[-SHOWN:]]
        sys.exit(f"{name} has no source archive at version {version}{nearest(version, known)}")
    return min(links, key=lambda link: str(link.filename))
