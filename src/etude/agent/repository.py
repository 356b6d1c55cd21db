"""The agent on a user's own repository: it works on a copy; only changes that the user has seen as a diff and accepted are applied.

The steps are: a copy of the repository as a layer of a sandbox (in a git repository the files that git tracks or would add, elsewhere
all files except version control, environments and caches; so ignored secrets are not copied); the episode, with the same harness as
in training; the diff, which is applied by changes.py. A repository may come from anybody: git runs no program that it names (git.py),
and links in it are not followed (rooted.py).
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
import tempfile
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from etude.agent.changes import unified, visible
from etude.agent.harness import SYSTEM, Harness, HarnessSettings
from etude.agent.search import Searcher, installed_embedder
from etude.agent.summary import SummarySettings
from etude.agent.toolbox import SKIPPED_FOLDERS
from etude.agent.tools import Toolset, ToolSettings
from etude.errors import UserError
from etude.git import git, repository_of
from etude.rooted import DEEPEST, READ, WRITE, Rooted
from etude.sandbox import cgroups
from etude.sandbox.box import Entry, Limits, Place, Sandbox
from etude.sandbox.layers import prepare
from etude.sandbox.local import open_sandbox

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from etude.agent.formats import ChatFormat
    from etude.agent.trace import Node, Trace
    from etude.inference.policy import Policy

LARGEST = 2 << 30  # bytes of a repository that is copied


def files_of(folder: Path) -> list[str]:
    """Return the files and links that belong to a folder, relative to it."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; name one with --repo")
    repository = repository_of(folder)
    with Rooted(folder) as rooted:
        if repository is None:
            names = {name for name, _ in rooted.walk(passed=SKIPPED_FOLDERS)}
        else:
            listed = git(repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard", folder=folder)
            if listed.returncode:  # what it ignores would be copied
                reason = " ".join(listed.stderr.decode(errors="replace").split())[:300]
                raise UserError(f"git cannot list the files of {folder}: {reason}")
            names = {os.fsdecode(name) for name in listed.stdout.split(b"\0") if name}
        if deep := next((name for name in names if name.count("/") > DEEPEST), None):
            too_deep = f"{folder} has folders more than {DEEPEST} deep: {visible(deep)[:80]}…"
            raise UserError(f"{too_deep}; name a smaller folder with --repo")
        # An index may name anything: what lies behind a link, outside or in .git is not there for us.
        files = [(name, rooted.stat(name)) for name in names if ".git" not in name.casefold().split("/")]
    return sorted(name for name, about in files if about and stat.S_IFMT(about.st_mode) in {stat.S_IFREG, stat.S_IFLNK})


def copy_files(folder: Path, names: list[str], target: Path) -> None:
    """Copy files and links to a new folder, as they are when they are read; no link is followed on either side."""
    room = LARGEST
    target.mkdir()
    with Rooted(folder) as source, Rooted(target) as sink:
        for name in names:
            room -= _copy(source, sink, name, room)
            if room < 0:
                holds = f"{folder} holds more than {LARGEST >> 30} GiB in {len(names)} files"
                raise UserError(f"{holds}; name a smaller folder with --repo, or add to .gitignore")


def _copy(source: Rooted, sink: Rooted, name: str, room: int) -> int:
    with source.holder(name) as (held, base), sink.holder(name, make=True) as (into, _):
        if stat.S_ISLNK(os.stat(base, dir_fd=held, follow_symlinks=False).st_mode):
            os.symlink(os.readlink(base, dir_fd=held), base, dir_fd=into)
            return 0
        with os.fdopen(os.open(base, READ, dir_fd=held), "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_size > room:
                return about.st_size
            with os.fdopen(os.open(base, WRITE, 0o600, dir_fd=into), "wb") as copy:
                shutil.copyfileobj(file, copy)
                os.fchmod(copy.fileno(), stat.S_IMODE(about.st_mode))
            os.utime(base, ns=(about.st_atime_ns, about.st_mtime_ns), dir_fd=into, follow_symlinks=False)
            return about.st_size


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
    for left in cgroups.stale(tempfile.gettempdir()):  # by one that was killed
        shutil.rmtree(left, ignore_errors=True)
    above = Path(tempfile.mkdtemp(prefix=cgroups.own_name("agent-")))
    try:
        above.chmod(0o711)  # whoever the sandbox runs as must reach the layer
        copy_files(repository, names, above / "copy")
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
    trace: Trace, copy: SandboxedCopy, policy: Policy, talk: ChatFormat, settings: HarnessSettings, tools: ToolSettings,
    *, cache: Path, watch: Callable[[Node], None],
) -> list[Entry]:  # fmt: skip
    """Have the agent work on the request of a new trace, which grows meanwhile; return what it changed, caches left out."""
    searcher = Searcher(cache, installed_embedder()) if "search" in tools.tools else None
    toolset = Toolset(copy.sandbox, tools, searcher)
    trace.made_by["sandbox"] = copy.sandbox.backend
    await Harness(policy, talk, toolset, settings, trace, watch=watch).run(SYSTEM, trace.task)
    changed = await copy.sandbox.diff()
    entries = [entry for entry in changed if not SKIPPED_FOLDERS & set(entry.path.split("/"))]
    trace.counts["cache_entries_left_out"] = len(changed) - len(entries)
    trace.diff = unified(entries, [copy.layer])
    return entries


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end the process as an error does: what was made for it is removed. Further ones are ignored."""

    def leave(number: int, _: object) -> None:
        for ending in endings:
            signal.signal(ending, signal.SIG_IGN)
        sys.exit(128 + number)

    endings = {ending: signal.signal(ending, leave) for ending in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for ending, before in endings.items():
            signal.signal(ending, before)
