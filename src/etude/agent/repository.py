"""The user's own repository as a layer: a copy of what belongs to it, and nothing that is secret by custom.

In a git repository that is what git knows or would add; elsewhere all files but those of version control, environments and caches.

What an episode changed: shown as a unified diff, written to the user's folder.

Entries come out of a sandbox and are not trusted. A path never leads out of the folder, not through a link either,
nor into its `.git`; a file that the user has changed meanwhile is not overwritten.

The agent at work on a user's repository: the harness that trains it, in a copy, with the user looking on.

The copy is a layer of a sandbox. Nothing reaches the repository but what the user has seen as a diff and said yes to.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from etude.agent.harness import SYSTEM, Harness, HarnessSettings
from etude.agent.search import Searcher, installed_embedder
from etude.agent.summary import SummarySettings
from etude.agent.tools import Toolset
from etude.agent.trace import Trace
from etude.errors import UserError
from etude.sandbox.box import Limits, Place
from etude.sandbox.layers import prepare
from etude.sandbox.local import open_sandbox

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from etude.agent.calls import Format
    from etude.agent.tools import ToolSettings
    from etude.agent.trace import Node
    from etude.inference.policy import Policy
    from etude.sandbox.box import Entry, Sandbox

SKIPPED = {
    ".git",
    ".hg",
    ".svn",
    ".venv",
    "venv",
    "node_modules",
    "__pycache__",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".tox",
}
LARGEST = 2 << 30  # bytes of a repository that is copied


def files_of(repository: Path) -> list[str]:
    """Return the files and links that belong to a folder, relative to it."""
    if not repository.is_dir():
        raise UserError(f"{repository} is no folder; name one with --repo")
    listed = subprocess.run(
        ["git", "-C", str(repository), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True, check=False,
    )  # fmt: skip
    if listed.returncode == 0:
        names = sorted({os.fsdecode(name) for name in listed.stdout.split(b"\0") if name})
        return [name for name in names if _is_file(repository / name)]
    found = []
    for folder, folders, names in os.walk(repository):
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        linked = [name for name in folders if (Path(folder) / name).is_symlink()]
        found += [os.path.relpath(Path(folder) / name, repository) for name in [*names, *linked]]
    return sorted(name for name in found if _is_file(repository / name))


def _is_file(path: Path) -> bool:
    return path.is_symlink() or path.is_file()


def check_size(repository: Path, names: list[str]) -> int:
    """Return the bytes of the files; refuse what nobody wants copied into memory."""
    size = sum((repository / name).lstat().st_size for name in names)
    if size > LARGEST:
        raise UserError(
            f"{repository} holds {size / 2**30:.1f} GiB in {len(names)} files; name a smaller folder with --repo, or add to .gitignore"
        )
    return size


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


@dataclass(frozen=True)
class Workshop:
    """A sandboxed copy of a repository."""

    sandbox: Sandbox
    layer: Path  # the repository as it was when the agent began
    files: int
    size: int


@asynccontextmanager
async def workshop(repository: Path, backend: str, python: Path | None = None) -> AsyncIterator[Workshop]:
    """Copy a repository into a sandbox; nothing is left of it afterwards. `python`: an environment to show inside."""
    names = files_of(repository)
    size = check_size(repository, names)
    above = Path(tempfile.mkdtemp(prefix="etude-agent-"))
    try:
        above.chmod(0o711)  # whoever the sandbox runs as must reach the layer
        for name in names:
            copy = above / "copy" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(repository / name, copy, follow_symlinks=False)
        (above / "copy").mkdir(exist_ok=True)
        prepare(above / "copy", above / "layer")
        shutil.rmtree(above / "copy")
        sandbox = await open_sandbox(_place(above / "layer", python), backend)
        try:
            yield Workshop(sandbox, above / "layer", len(names), size)
        finally:
            await sandbox.close()
    finally:
        shutil.rmtree(above, ignore_errors=True)


def _place(layer: Path, python: Path | None) -> Place:
    if python is None:
        return Place((layer,))
    env = {"PATH": f"{python}/bin:/usr/local/bin:/usr/bin:/bin", "VIRTUAL_ENV": str(python)}
    return Place((layer,), readonly=(python,), env=env, limits=Limits(memory=4 << 30))


def active_environment() -> Path | None:
    """Return the virtual environment this process runs in, if it is in one."""
    return Path(sys.prefix) if sys.prefix != sys.base_prefix else None


def settings_for(policy: Policy, *, turns: int, seconds: float, temperature: float) -> HarnessSettings:
    """Return limits that fit a policy's context, whatever its tokens are: an endpoint's are bytes."""
    context = policy.info.context
    summary = SummarySettings(trigger=max(64, context * 3 // 4), tokens=max(1, context // 16))
    return HarnessSettings(
        turns=turns, seconds=seconds, temperature=temperature, turn_tokens=max(1, context // 4),
        tokens=max(65_536, 16 * context), summary=summary,
    )  # fmt: skip


async def attempt(
    request: str,
    shop: Workshop,
    policy: Policy,
    talk: Format,
    settings: HarnessSettings,
    tools: ToolSettings,
    *,
    cache: Path,
    watch: Callable[[Node], None] | None = None,
) -> tuple[Trace, list[Entry]]:
    """Have the agent work on a request; return its trace and what it changed."""
    searcher = Searcher(cache, installed_embedder()) if "search" in tools.tools else None
    toolset = Toolset(shop.sandbox, tools, searcher)
    trace = Trace(uuid.uuid4().hex[:12], request)
    trace.made_by["sandbox"] = shop.sandbox.backend
    await Harness(policy, talk, toolset, settings, trace, watch=watch).run(SYSTEM, request)
    changed = await shop.sandbox.diff()
    entries = [entry for entry in changed if not SKIPPED & set(entry.path.split("/"))]
    trace.counts["cache_entries_left_out"] = len(changed) - len(entries)
    trace.diff = unified(entries, [shop.layer])
    return trace, entries
