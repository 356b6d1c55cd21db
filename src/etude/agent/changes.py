"""What an agent changed: shown as a diff, checked, and applied to the user's folder: all of it or nothing.

Entries of a diff come out of a sandbox and are not trusted. A path never leads out of the folder, not through a link either, nor into
a `.git`; a file that the user has changed meanwhile is not overwritten; all entries are checked before any is written. No link is
followed (rooted.py).

New files are first written to a folder of their own beside the old ones, where a full disk shows. Then follow renames only, each
with its way back: what is replaced or removed is moved aside, what is new is moved in. If one fails, all are taken back.

Comparing lines takes time that grows with the square of their number, and an agent may change any number: beyond a bound the lines
that differ are shown as one change, and beyond another files are only named. The diff says so in its place.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import secrets
import shutil
import signal
import stat
import unicodedata
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

from etude.errors import UserError
from etude.rooted import DEEPEST, FOLDER, WRITE, Rooted, parts_of
from etude.sandbox.layers import FORMATS, Below, lookup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from etude.sandbox.box import Entry

    Side = tuple[str, bytes] | None  # git's mode and the content of a file or link; None: there is none

LARGEST = 1 << 20  # bytes of a file whose lines are compared
MOST_SHOWN = 4 << 20  # characters of a diff; the files after that are only named
MOST_PAIRS = 2_000_000  # of lines that are compared with each other, in all files together
CONTEXT = 3  # lines shown around a change


def visible(path: str) -> str:
    """Return a path in one line of valid text: bytes that are none, and control codes, are escaped."""
    text = path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def content_of(below: Below) -> bytes:
    """Return what the layers have at a path: a file's bytes, where a link leads, or nothing."""
    if below.file is None:
        return b""
    return os.fsencode(below.file.readlink()) if below.file.is_symlink() else below.file.read_bytes()


def below_folder(path: str, below: Below) -> Iterator[tuple[str, Below]]:
    """Yield all that the layers have at a path and below it, folders before what is in them."""
    pending = [(path, below)]
    while pending:
        path, below = pending.pop()
        yield path, below
        pending += [(f"{path}/{name}", below.child(name)) for name in sorted(below.names(), reverse=True)]


def unified(entries: Iterable[Entry], layers: Sequence[Path]) -> str:
    """Return the differences of all files as one text that `patch -p1` and `git apply` read; binary files are only named."""
    texts, room, pairs = [], MOST_SHOWN, MOST_PAIRS
    for path, old, new in itertools.chain.from_iterable(_sides(entry, layers) for entry in entries):
        text, compared = _diff(path, old, new, pairs if room > 0 else -1)
        texts.append(text)
        room, pairs = room - len(text), max(0, pairs - compared)
    return "".join(texts)


def _sides(entry: Entry, layers: Sequence[Path]) -> Iterator[tuple[str, Side, Side]]:
    """Yield what an entry changes, file by file; a file that becomes a link is one that goes and one that comes."""
    below = lookup(layers, entry.path)
    new = _side(entry.kind, entry.mode, entry.content or b"") if entry.kind in FORMATS else None
    if entry.kind == "other" or (entry.kind == "folder" and below.folders):
        return
    olds = [(path, _old_side(each)) for path, each in below_folder(entry.path, below) if each.file]
    if new and below.file and olds[0][1][0][:3] == new[0][:3]:
        yield entry.path, olds[0][1], new
        return
    yield from ((path, old, None) for path, old in olds)
    if new:
        yield entry.path, None, new


def _side(kind: str, mode: int, content: bytes) -> tuple[str, bytes]:
    return "120000" if kind == "link" else "100755" if mode & 0o100 else "100644", content


def _old_side(below: Below) -> tuple[str, bytes]:
    assert below.found is not None
    kind = "link" if stat.S_ISLNK(below.found.st_mode) else "file"
    return _side(kind, below.found.st_mode, content_of(below))


def _diff(path: str, old: Side, new: Side, pairs: int) -> tuple[str, int]:
    """Return the diff of one file, and how many pairs of lines were compared. Fewer than 0 pairs: it is only named."""
    name, (old_mode, before), (new_mode, after) = visible(path), old or ("", b""), new or ("", b"")
    modes = f"old mode {old_mode}\nnew mode {new_mode}\n" if old_mode != new_mode else ""
    modes = modes if old and new else f"new file mode {new_mode}\n" if new else f"deleted file mode {old_mode}\n"
    head = f"diff --git a/{name} b/{name}\n{modes}"
    if before == after:
        return head if modes else "", 0
    names = f"a/{name}" if old else "/dev/null", f"b/{name}" if new else "/dev/null"
    if pairs < 0 or max(len(before), len(after)) > LARGEST:
        why = f"{len(before)} and {len(after)} bytes, " + ("too long to show" if pairs >= 0 else "the diff is too long")
        return f"{head}Files {names[0]} and {names[1]} differ: {why}\n", 0
    if b"\0" in before + after:
        return f"{head}Binary files {names[0]} and {names[1]} differ\n", 0
    lines = [re.findall(rb"[^\n]*\n|[^\n]+", each) for each in (before, after)]
    hunks, compared = _hunks(lines[0], lines[1], pairs)
    return f"{head}--- {names[0]}\n+++ {names[1]}\n{hunks}", compared


def _hunks(old: list[bytes], new: list[bytes], pairs: int) -> tuple[str, int]:
    first = len(os.path.commonprefix([old, new]))  # noqa: RUF071 - of lines
    last = len(os.path.commonprefix([old[first:][::-1], new[first:][::-1]]))  # noqa: RUF071
    inner = old[first : len(old) - last], new[first : len(new) - last]
    compared = len(inner[0]) * len(inner[1])
    changes: Sequence[tuple[str, int, int, int, int]] = [("replace", 0, len(inner[0]), 0, len(inner[1]))]
    whole = b" too many lines to compare: shown as one change" if compared > pairs else b""
    if not whole:
        changes = SequenceMatcher(None, *inner).get_opcodes()
    around: Any = SequenceMatcher()
    around.opcodes = [  # as if it had compared all lines
        ("equal", 0, first, 0, first), *((tag, *(first + at for at in places)) for tag, *places in changes),
        ("equal", len(old) - last, len(old), len(new) - last, len(new)),
    ]  # fmt: skip
    text = []
    for group in around.get_grouped_opcodes(CONTEXT):
        ranges = _range(group[0][1], group[-1][2]), _range(group[0][3], group[-1][4])
        text.append(b"@@ -%s +%s @@%s\n" % (*ranges, whole))
        for tag, i1, i2, j1, j2 in group:
            lines = [(b" " if tag == "equal" else b"-") + line for line in old[i1:i2]]
            lines += [b"+" + line for line in new[j1:j2]] if tag != "equal" else []
            text += [line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines]
    return b"".join(text).decode("utf-8", "backslashreplace"), 0 if whole else compared


def _range(start: int, stop: int) -> bytes:
    begin = start + 1 if stop > start else start
    return b"%d" % begin if stop == start + 1 else b"%d,%d" % (begin, stop - start)


def check(entries: Sequence[Entry], folder: Path, layer: Path) -> None:
    """Raise a UserError if any entry cannot be written to the user's folder as it is now; nothing is written."""
    made = {entry.path for entry in entries if entry.kind == "folder"}
    with Rooted(folder) as root:
        for entry in entries:
            if fault := _fault(entry, root, made) or _conflict(entry, root, lookup([layer], entry.path)):
                raise UserError(f"{fault}; nothing was applied")


def _fault(entry: Entry, root: Rooted, made: set[str]) -> str:
    """Return why an entry cannot be applied, if so."""
    name = f"'{visible(entry.path)}'"
    try:
        parts = parts_of(entry.path)
    except OSError:
        return f"the agent changed {name}, which is not a path to apply"
    if any(map(_is_git, parts)):
        return f"the agent changed {name}, which is not a path to apply: git would run what it names"
    if entry.kind == "other" or len(parts) > DEEPEST:
        return f"the agent made {name}, which is no file, link or folder, or lies more than {DEEPEST} folders deep"
    if entry.kind == "link" and not _stays_inside(entry):
        return f"the agent made {name}, a link that leads outside or into .git"
    for above in itertools.accumulate(parts[:-1], "{}/{}".format):
        if (about := root.stat(above)) is None:
            break
        if stat.S_ISLNK(about.st_mode) and above not in made:
            return f"{name} lies behind a link"
    return ""


def _conflict(entry: Entry, root: Rooted, below: Below) -> str:
    """Return what the user has at an entry's path that the agent did not know, if anything."""
    about, name = root.stat(entry.path), f"'{visible(entry.path)}'"
    if entry.kind == "folder" and not below.file and (about is None or stat.S_ISDIR(about.st_mode)):
        return ""
    known = dict(below_folder(entry.path, below))
    if any(_has_changed(root, path, each) for path, each in known.items()):
        return f"{name} has changed since the agent began"
    becomes_file = bool(below.folders) and entry.kind in FORMATS
    unseen = becomes_file and any(path not in known for path, _ in root.walk(entry.path))
    return f"{name} is a folder with files in it that the agent has not seen" if unseen else ""


def _stays_inside(link: Entry) -> bool:
    """Whether a link leads to something in the folder: up first, if at all, then only down."""
    target = os.fsdecode(link.content or b"").split("/")
    down = itertools.dropwhile(lambda part: part == "..", target)
    inside = target[0] != "" and ".." not in down and target.count("..") <= link.path.count("/")
    return inside and not any(map(_is_git, target))


def _is_git(name: str) -> bool:
    """Whether a name is git's own folder on some file system: they fold case, skip invisible characters, cut and shorten names."""
    plain = "".join(char for char in name.casefold() if unicodedata.category(char) != "Cf")
    return plain.partition(":")[0].rstrip(". ") in {".git", "git~1"}


def _has_changed(root: Rooted, path: str, below: Below) -> bool:
    """Whether something is not what the layers have; of a folder, only whether it is one."""
    about = root.stat(path)
    if about is None or below.found is None:
        return about is not below.found
    try:
        same = stat.S_IFMT(about.st_mode) == stat.S_IFMT(below.found.st_mode)
        return not same or (below.file is not None and root.read(path) != content_of(below))
    except OSError:
        return True


def apply(entries: Sequence[Entry], folder: Path, layer: Path) -> int:
    """Write the changes to the user's folder, all or none; return how many files changed. All are checked before any is written."""
    ending = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ending)  # they wait until all is written
    try:
        check(entries, folder, layer)
        with Rooted(folder) as root:
            _apply(entries, root, layer)
    except OSError as error:
        where = visible(os.fsdecode(error.filename or folder))
        raise UserError(f"cannot write '{where}': {error.strerror}; nothing was applied") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return sum(entry.kind in {"file", "link", "gone"} for entry in entries)


def _apply(entries: Sequence[Entry], root: Rooted, layer: Path) -> None:
    moves = Moves(root)
    try:
        fresh = [(entry.path, moves.written(entry)) for entry in entries if entry.kind in FORMATS]
        for entry in entries:
            below = lookup([layer], entry.path)
            if below.file or (below.folders and entry.kind != "folder"):
                for path, each in reversed(list(below_folder(entry.path, below))):
                    moves.aside(path, each, must_go=entry.kind != "gone")
        for path, number in fresh:
            moves.into(number, path)
    except BaseException as error:
        try:
            moves.take_back()
        except OSError as worse:
            failed = f"taking it back failed, too ({worse})"
            raise UserError(f"{error}; {failed}: the old files are in {moves.name}") from None
        moves.close()
        raise
    moves.close()


class Moves:
    """Renames in a folder, each with its way back. What is new, and what was moved aside, lies in a folder of its own beside it."""

    def __init__(self, root: Rooted) -> None:
        self.root, self.name = root, f".etude-{secrets.token_hex(8)}"
        os.mkdir(self.name, 0o700, dir_fd=root.descriptor)
        try:
            self.own = os.open(self.name, FOLDER, dir_fd=root.descriptor)
        except OSError:
            os.rmdir(self.name, dir_fd=root.descriptor)
            raise
        self.count = itertools.count()
        self.back: list[Callable[[], None]] = []

    def written(self, entry: Entry) -> str:
        """Write a file or a link where nobody looks; return its name there."""
        number, content = str(next(self.count)), entry.content or b""
        if entry.kind == "link":
            os.symlink(os.fsdecode(content), number, dir_fd=self.own)
            return number
        with os.fdopen(os.open(number, WRITE, 0o600, dir_fd=self.own), "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), self._mode(entry))
            os.fsync(file.fileno())
        return number

    def _mode(self, entry: Entry) -> int:
        """Return the user's own permissions with what the diff shows of an entry's: whether the file can be executed."""
        about = self.root.stat(entry.path)
        mode = stat.S_IMODE(about.st_mode) & 0o777 if about and stat.S_ISREG(about.st_mode) else 0o644
        return mode | (mode & 0o444) >> 2 if entry.mode & 0o100 else mode & ~0o111

    def aside(self, path: str, below: Below, *, must_go: bool) -> None:
        """Move a file aside; remove a folder that is empty now. One that is not stays, unless it must go: others' files are in it."""
        about = self.root.stat(path)
        if about is None:
            return
        if below.file:
            number = str(next(self.count))
            self._rename(path, number)
            self.back.append(lambda: self._rename(path, number, back=True))
            return
        with contextlib.suppress(*() if must_go else (OSError,)), self.root.holder(path) as (held, name):
            os.rmdir(name, dir_fd=held)
            self.back.append(lambda: self._make(path, stat.S_IMODE(about.st_mode)))

    def folder(self, path: str) -> None:
        """Make a folder and those above it, where they are missing."""
        for above in itertools.accumulate(path.split("/"), "{}/{}".format):
            if self.root.stat(above) is None:
                self._make(above)
                self.back.append(functools.partial(self._remove, above))

    def into(self, number: str, path: str) -> None:
        """Move what was written to its place."""
        if "/" in path:
            self.folder(path.rpartition("/")[0])
        self._rename(path, number, back=True)
        self.back.append(lambda: self._rename(path, number))

    def take_back(self) -> None:
        """Undo all moves, the last first."""
        for undo in reversed(self.back):
            undo()

    def close(self) -> None:
        """Remove what was moved aside."""
        os.close(self.own)
        shutil.rmtree(self.name, ignore_errors=True, dir_fd=self.root.descriptor)

    def _rename(self, path: str, number: str, *, back: bool = False) -> None:
        with self.root.holder(path) as (held, name):
            ends = ((number, self.own), (name, held)) if back else ((name, held), (number, self.own))
            os.rename(ends[0][0], ends[1][0], src_dir_fd=ends[0][1], dst_dir_fd=ends[1][1])

    def _make(self, path: str, mode: int = 0o777) -> None:
        with self.root.holder(path) as (held, name):
            os.mkdir(name, mode, dir_fd=held)

    def _remove(self, path: str) -> None:
        with self.root.holder(path) as (held, name):
            os.rmdir(name, dir_fd=held)
