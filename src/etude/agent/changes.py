"""What an episode changed: shown as a unified diff, written to the user's folder.

Entries come out of a sandbox and are not trusted. A path never leads out of the folder, not through a link either,
nor into its `.git`; a file that the user has changed meanwhile is not overwritten.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from etude.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from etude.sandbox.box import Entry


def under(layers: Sequence[Path], path: str) -> Path | None:
    """Return where a path lies in the layers, the uppermost first, or none. Nothing is followed."""
    for layer in layers:
        found = layer / path
        try:
            seen = os.lstat(found)
        except OSError:
            continue
        return None if stat.S_ISCHR(seen.st_mode) else found  # a whiteout
    return None


def content_of(found: Path | None) -> bytes:
    """Return a file's bytes, or where a link leads; nothing for anything else."""
    if found is None or (found.is_dir() and not found.is_symlink()):
        return b""
    return os.fsencode(found.readlink()) if found.is_symlink() else found.read_bytes()


def unified(entries: Iterable[Entry], layers: Sequence[Path]) -> str:
    """Return the differences of all files as one text that `patch -p1` and `git apply` read; binary files are only named."""
    return "".join(_one(entry, layers) for entry in entries if entry.kind in {"file", "link", "gone"})


def _one(entry: Entry, layers: Sequence[Path]) -> str:
    before = under(layers, entry.path)
    if entry.kind == "gone" and before is not None and before.is_dir() and not before.is_symlink():
        files = sorted(each for each in before.rglob("*") if each.is_file())
        return "".join(_text(f"{entry.path}/{each.relative_to(before)}", each.read_bytes(), None) for each in files)
    old = content_of(before) if before is not None else None
    if before is not None and entry.kind == "file" and old == entry.content and not before.is_symlink():
        modes = [f"100{'755' if mode & 0o100 else '644'}" for mode in (before.stat().st_mode, entry.mode)]
        return "" if modes[0] == modes[1] else f"{_head(entry.path)}old mode {modes[0]}\nnew mode {modes[1]}\n"
    return _text(entry.path, old, None if entry.kind == "gone" else entry.content or b"")


def _shown(path: str) -> str:
    return (
        path.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="backslashreplace").replace("\n", "\\n")
    )


def _head(path: str) -> str:
    return f"diff --git a/{_shown(path)} b/{_shown(path)}\n"


def _text(path: str, old: bytes | None, new: bytes | None) -> str:
    shown = _shown(path)
    names = ("/dev/null" if old is None else f"a/{shown}", "/dev/null" if new is None else f"b/{shown}")
    if old == new:
        return ""
    made = "new file mode 100644\n" if old is None else "deleted file mode 100644\n" if new is None else ""
    head = f"{_head(path)}{made}"
    try:
        texts = [(each or b"").decode("utf-8") for each in (old, new)]
    except UnicodeDecodeError:
        return head + f"Binary files {names[0]} and {names[1]} differ\n"
    lines = [text.split("\n") for text in texts]
    kept = [[f"{line}\n" for line in each[:-1]] + ([each[-1]] if each[-1] else []) for each in lines]
    changes = difflib.unified_diff(kept[0], kept[1], *names)
    return head + "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in changes
    )


def refuse(entries: Sequence[Entry], folder: Path, layer: Path) -> None:
    """Raise a UserError if any entry cannot be written to the user's folder as it is now; nothing is written."""
    for entry in entries:
        parts = entry.path.split("/")
        if entry.path.startswith("/") or {"", ".", ".."} & set(parts) or parts[0] == ".git":
            raise UserError(f"the agent changed {entry.path!r}, which is not a path to apply; nothing was applied")
        if entry.kind == "other":
            raise UserError(f"the agent made {entry.path!r}, which is no file, link or folder; nothing was applied")
        if entry.kind == "link" and not _stays_inside(entry):
            raise UserError(f"the agent made {entry.path!r}, a link that leads outside; nothing was applied")
        for depth in range(1, len(parts)):
            if (folder / "/".join(parts[:depth])).is_symlink():
                raise UserError(f"{entry.path!r} lies behind a link in {folder}; nothing was applied")
        here, before = folder / entry.path, under([layer], entry.path)
        changed = _differs(here, before) if entry.kind != "folder" else False
        if changed:
            raise UserError(f"{here} has changed since the agent began; nothing was applied")


def _stays_inside(entry: Entry) -> bool:
    target = os.fsdecode(entry.content or b"")
    place = os.path.normpath(Path(entry.path).parent / target)
    return not target.startswith("/") and place != ".." and not place.startswith("../")


def _differs(here: Path, before: Path | None) -> bool:
    if before is None:
        return os.path.lexists(here)
    if before.is_dir() and not before.is_symlink():
        return not here.is_dir()
    return not os.path.lexists(here) or content_of(here) != content_of(before)


def apply(entries: Sequence[Entry], folder: Path, layer: Path) -> int:
    """Write the changes to the user's folder; return how many files changed. All are checked before any is written."""
    refuse(entries, folder, layer)
    for entry in sorted(entries, key=lambda each: (each.kind != "gone", each.path)):
        here = folder / entry.path
        if entry.kind == "gone":
            _remove(here, under([layer], entry.path))
        elif entry.kind == "folder":
            here.mkdir(parents=True, exist_ok=True)
        else:
            here.parent.mkdir(parents=True, exist_ok=True)
            _write(here, entry)
    return sum(entry.kind in {"file", "link", "gone"} for entry in entries)


def _write(here: Path, entry: Entry) -> None:
    beside = here.with_name(f".{here.name[:200]}.etude")
    beside.unlink(missing_ok=True)
    if entry.kind == "link":
        beside.symlink_to(os.fsdecode(entry.content or b""))
    else:
        beside.write_bytes(entry.content or b"")
        beside.chmod(entry.mode & 0o777 or 0o644)
    beside.replace(here)


def _remove(here: Path, before: Path | None) -> None:
    """Remove what the agent removed: of a folder only what it had, since ignored files of the user's were never in the layer."""
    if before is None or before.is_symlink() or not before.is_dir():
        here.unlink(missing_ok=True)
        return
    for each in sorted(before.rglob("*"), reverse=True):
        own = here / each.relative_to(before)
        if each.is_dir() and not each.is_symlink():
            _remove_if_empty(own)
        else:
            own.unlink(missing_ok=True)
    _remove_if_empty(here)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # something else is in it
        folder.rmdir()
