"""The agent on a user's own repository: in a copy, and nothing comes back but what the user has seen as a diff and said yes to.

In order: the copy, which becomes a layer of a sandbox (in a git repository what git knows or would add, elsewhere all files but
those of version control, environments and caches; so nothing that is secret by custom); the episode, by the harness that trains the
model; the diff; its way back.

Entries of a diff come out of a sandbox and are not trusted. A path never leads out of the folder, not through a link either, nor into
its `.git`; a file that the user has changed meanwhile is not overwritten; all entries are checked before any is written.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
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
from etude.agent.toolbox import SKIPPED_FOLDERS
from etude.agent.tools import Toolset
from etude.agent.trace import Trace
from etude.errors import UserError
from etude.sandbox.box import Limits, Place
from etude.sandbox.layers import prepare
from etude.sandbox.local import open_sandbox

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from etude.agent.formats import ChatFormat
    from etude.agent.tools import ToolSettings
    from etude.agent.trace import Node
    from etude.inference.policy import Policy
    from etude.sandbox.box import Entry, Sandbox

LARGEST = 2 << 30  # bytes of a repository that is copied


def files_of(repository: Path) -> list[str]:
    """Return the files and links that belong to a folder, relative to it."""
    if not repository.is_dir():
        raise UserError(f"{repository} is no folder; name one with --repo")
    command = ["git", "-C", str(repository), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, check=False)
    names = {os.fsdecode(name) for name in listed.stdout.split(b"\0") if name}
    if listed.returncode:  # not a git repository
        for folder, folders, files in os.walk(repository):
            folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
            names |= {os.path.relpath(Path(folder, name), repository) for name in [*files, *folders]}
    return sorted(name for name in names if (repository / name).is_symlink() or (repository / name).is_file())


@dataclass(frozen=True)
class SandboxedCopy:
    """A copy of a repository in a sandbox."""

    sandbox: Sandbox
    layer: Path  # the repository as it was when the agent began
    files: int


@asynccontextmanager
async def sandboxed_copy(repository: Path, backend: str) -> AsyncIterator[SandboxedCopy]:
    """Copy a repository into a sandbox, where the active virtual environment can be used; nothing is left of it afterwards."""
    names = files_of(repository)
    size = sum((repository / name).lstat().st_size for name in names)
    if size > LARGEST:
        holds = f"{repository} holds {size / 2**30:.1f} GiB in {len(names)} files"
        raise UserError(f"{holds}; name a smaller folder with --repo, or add to .gitignore")
    above = Path(tempfile.mkdtemp(prefix="etude-agent-"))
    try:
        above.chmod(0o711)  # whoever the sandbox runs as must reach the layer
        (above / "copy").mkdir()
        for name in names:
            copy = above / "copy" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(repository / name, copy, follow_symlinks=False)
        prepare(above / "copy", above / "layer")
        shutil.rmtree(above / "copy")
        sandbox = await open_sandbox(_place(above / "layer"), backend)
        try:
            yield SandboxedCopy(sandbox, above / "layer", len(names))
        finally:
            await sandbox.close()
    finally:
        shutil.rmtree(above, ignore_errors=True)


def _place(layer: Path) -> Place:
    if sys.prefix == sys.base_prefix:
        return Place((layer,))
    env = {"PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin", "VIRTUAL_ENV": sys.prefix}
    return Place((layer,), readonly=(Path(sys.prefix),), env=env, limits=Limits(memory=4 << 30))


def settings_for(policy: Policy, *, turns: int, seconds: float, temperature: float) -> HarnessSettings:
    """Return limits that fit a policy's context, whatever its tokens are: an endpoint's are bytes."""
    context = policy.info.context
    summary = SummarySettings(trigger=max(64, context * 3 // 4), tokens=max(1, context // 16))
    return HarnessSettings(
        turns=turns, seconds=seconds, temperature=temperature, turn_tokens=max(1, context // 4),
        tokens=max(65_536, 16 * context), summary=summary,
    )  # fmt: skip


async def run_agent(
    request: str, copy: SandboxedCopy, policy: Policy, talk: ChatFormat, settings: HarnessSettings, tools: ToolSettings,
    *, cache: Path, watch: Callable[[Node], None],
) -> tuple[Trace, list[Entry]]:  # fmt: skip
    """Have the agent work on a request; return its trace and what it changed, caches left out."""
    searcher = Searcher(cache, installed_embedder()) if "search" in tools.tools else None
    toolset = Toolset(copy.sandbox, tools, searcher)
    trace = Trace(uuid.uuid4().hex[:12], request)
    trace.made_by["sandbox"] = copy.sandbox.backend
    await Harness(policy, talk, toolset, settings, trace, watch=watch).run(SYSTEM, request)
    changed = await copy.sandbox.diff()
    entries = [entry for entry in changed if not SKIPPED_FOLDERS & set(entry.path.split("/"))]
    trace.counts["cache_entries_left_out"] = len(changed) - len(entries)
    trace.diff = unified(entries, [copy.layer])
    return trace, entries


def under(layers: Sequence[Path], path: str) -> Path | None:
    """Return where a path lies in the layers, the uppermost first, or none. Nothing is followed."""
    for layer in layers:
        try:
            mode = os.lstat(layer / path).st_mode
        except OSError:
            continue
        return None if stat.S_ISCHR(mode) else layer / path  # a whiteout
    return None


def content_of(path: Path | None) -> bytes:
    """Return a file's bytes, or where a link leads; nothing for anything else."""
    if path is None or _is_folder(path):
        return b""
    return os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def unified(entries: Iterable[Entry], layers: Sequence[Path]) -> str:
    """Return the differences of all files as one text that `patch -p1` and `git apply` read; binary files are only named."""
    return "".join(_entry_diff(entry, layers) for entry in entries if entry.kind in {"file", "link", "gone"})


def _entry_diff(entry: Entry, layers: Sequence[Path]) -> str:
    before = under(layers, entry.path)
    if entry.kind == "gone" and before is not None and _is_folder(before):
        files = sorted(each for each in before.rglob("*") if each.is_file())
        return "".join(_diff(f"{entry.path}/{each.relative_to(before)}", each.read_bytes(), None) for each in files)
    old = None if before is None else content_of(before)
    new = None if entry.kind == "gone" else entry.content or b""
    if before is not None and entry.kind == "file" and old == new and not before.is_symlink():
        modes = [f"100{'755' if mode & 0o100 else '644'}" for mode in (before.stat().st_mode, entry.mode)]
        return "" if modes[0] == modes[1] else f"{_head(entry.path)}old mode {modes[0]}\nnew mode {modes[1]}\n"
    return _diff(entry.path, old, new)


def _diff(path: str, old: bytes | None, new: bytes | None) -> str:
    """Return the diff of one file; None: there is none on this side."""
    if old == new:
        return ""
    names = "/dev/null" if old is None else f"a/{_shown(path)}", "/dev/null" if new is None else f"b/{_shown(path)}"
    mode = "new file mode 100644\n" if old is None else "deleted file mode 100644\n" if new is None else ""
    try:
        before, after = (re.findall(r"[^\n]*\n|[^\n]+", (each or b"").decode()) for each in (old, new))
    except UnicodeDecodeError:
        return f"{_head(path)}{mode}Binary files {names[0]} and {names[1]} differ\n"
    changes = difflib.unified_diff(before, after, *names)
    ended = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in changes)
    return f"{_head(path)}{mode}{''.join(ended)}"


def _head(path: str) -> str:
    return f"diff --git a/{_shown(path)} b/{_shown(path)}\n"


def _shown(path: str) -> str:
    """Return a path in one line of valid text."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace").replace("\n", "\\n")


def check(entries: Sequence[Entry], folder: Path, layer: Path) -> None:
    """Raise a UserError if any entry cannot be written to the user's folder as it is now; nothing is written."""
    for entry in entries:
        parts = entry.path.split("/")
        if entry.path.startswith("/") or {"", ".", ".."} & set(parts) or parts[0] == ".git":
            raise UserError(f"the agent changed {entry.path!r}, which is not a path to apply; nothing was applied")
        if entry.kind == "other":
            raise UserError(f"the agent made {entry.path!r}, which is no file, link or folder; nothing was applied")
        if entry.kind == "link" and not _stays_inside(entry):
            raise UserError(f"the agent made {entry.path!r}, a link that leads outside; nothing was applied")
        if any((folder / "/".join(parts[:depth])).is_symlink() for depth in range(1, len(parts))):
            raise UserError(f"{entry.path!r} lies behind a link in {folder}; nothing was applied")
        if entry.kind != "folder" and _has_changed(folder / entry.path, under([layer], entry.path)):
            raise UserError(f"{folder / entry.path} has changed since the agent began; nothing was applied")


def _stays_inside(link: Entry) -> bool:
    target = os.fsdecode(link.content or b"")
    return not target.startswith("/") and os.path.normpath(Path(link.path).parent / target).split("/")[0] != ".."


def _has_changed(here: Path, before: Path | None) -> bool:
    if before is None:
        return os.path.lexists(here)
    if _is_folder(before):
        return not here.is_dir()
    return not os.path.lexists(here) or content_of(here) != content_of(before)


def apply(entries: Sequence[Entry], folder: Path, layer: Path) -> int:
    """Write the changes to the user's folder; return how many files changed. All are checked before any is written."""
    check(entries, folder, layer)
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
    if before is None or not _is_folder(before):
        here.unlink(missing_ok=True)
        return
    for each in [*sorted(before.rglob("*"), reverse=True), before]:
        own = here / each.relative_to(before)
        if not _is_folder(each):
            own.unlink(missing_ok=True)
        else:
            with contextlib.suppress(OSError):  # something else is in it
                own.rmdir()
