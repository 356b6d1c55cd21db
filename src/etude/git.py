"""Every call of git. A repository may come from anybody, and git runs what a repository's files name; here it cannot.

git never sees the repository's own folder `.git`. Each call gets a new one, which is removed afterwards, with a configuration
written here and nothing else: no hooks, filters, drivers, aliases, helpers, remotes, includes or replaced objects can be named in
it. Of the repository it is lent the objects, the index, where a clone was cut off, and what to ignore; HEAD and other refs are read
here and handed over as commit ids. Settings of the user, the system and the environment are left out, too. A repository that
borrows objects from elsewhere (`objects/info/alternates`) is not read.

Only `.git` makes a folder a repository: one that merely holds HEAD, objects and refs is one where the caller says so (`bare`).
A test looks for anything else that starts git.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
import subprocess
import tempfile
import threading
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, NamedTuple

from etude.errors import UserError, visible
from etude.rooted import DEEPEST, Rooted

if TYPE_CHECKING:
    from collections.abc import Iterator

    Done = subprocess.CompletedProcess[bytes]

CONFIG = """[core]
repositoryFormatVersion = 1
bare = {bare}
fsmonitor = false
untrackedCache = false
preloadIndex = false
hooksPath = /dev/null
attributesFile = /dev/null
quotePath = false
pager = cat
editor = false
askPass = false
[extensions]
objectFormat = {objects}
[credential]
helper =
[submodule]
recurse = false
[gc]
auto = 0
"""
FIXED = {
    "LC_ALL": "C", "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_SYSTEM": "/dev/null", "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_REPLACE_OBJECTS": "1", "GIT_NO_LAZY_FETCH": "1",
    "GIT_OPTIONAL_LOCKS": "0",
}  # fmt: skip
PROGRAMS = {"SSH_ASKPASS", "PAGER", "EDITOR", "VISUAL", "LESSOPEN"}  # of the environment; git starts them
COMMAND = ["git", "--no-pager", "-c", "safe.bareRepository=explicit"]
PROTOCOLS = "file:git:http:https:ssh"  # for fetching; not `ext`, which is a command
SECONDS = 120.0  # for a call that needs no network
READ_IN_TREES = frozenset({".gitignore", ".gitattributes", ".gitmodules", ".mailmap"})  # by git, on its way
SMALL = 1 << 20  # bytes of a file in .git that is read here


class Repository(NamedTuple):
    """Where a repository's parts lie. A work tree added by `git worktree` has its own HEAD and index, and shares the rest."""

    top: Path | None  # of the work tree; None: there is none
    own: Path
    shared: Path


def repository_of(folder: Path, *, above: bool = True, bare: bool = False) -> Repository | None:
    """Return the repository that a folder belongs to (`above`: or a folder above it). `bare`: it may be one itself."""
    folder = folder.resolve()
    for top in [folder, *folder.parents] if above else [folder]:
        own = top / (_path(top, ".git") or ".git")
        if _file(own, "HEAD"):
            return Repository(top, own, own / _path(own, "commondir"))
    return (
        Repository(None, folder, folder) if bare and _file(folder, "HEAD") and (folder / "objects").is_dir() else None
    )


def _path(folder: Path, name: str) -> str:
    """Return the path that a file of a git folder holds; as for git, it ends with a NUL."""
    return os.fsdecode(_file(folder, name).partition(b"\0")[0].removeprefix(b"gitdir:").strip())


def _file(folder: Path, name: str, most: int = SMALL) -> bytes:
    """Return what a file of a git folder holds; nothing if there is none, it is no regular file, or it lies behind a link."""
    with contextlib.suppress(OSError), Rooted(folder) as rooted:
        about = rooted.stat(name)
        return rooted.read(name, most) if about and stat.S_ISREG(about.st_mode) else b""
    return b""


def commit_id(repository: Repository, ref: str, depth: int = 5) -> str | None:
    """Return the id that HEAD, a branch, a tag or a remote's branch stands for; None: there is no such one."""
    for name in [ref] if ref == "HEAD" else [f"refs/{kind}{ref}" for kind in ("", "tags/", "heads/", "remotes/")]:
        value = _file(repository.own if ref == "HEAD" else repository.shared, name).decode(errors="replace").strip()
        if not value and ref != "HEAD":
            line = rb"^([0-9a-f]+) " + re.escape(os.fsencode(name)) + rb"$"
            packed = re.search(line, _file(repository.shared, "packed-refs", 1 << 28), re.MULTILINE)
            value = packed[1].decode() if packed else ""
        if value.startswith("ref: refs/") and depth:
            return commit_id(repository, value.removeprefix("ref: refs/"), depth - 1)
        if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", value):
            return value
    return None


def git(
    repository: Repository, *arguments: str, folder: Path | None = None, given: bytes = b"", most: int | None = None
) -> Done:
    """Have git read a repository, in a folder of its work tree or (None) without one. `most`: bytes of output, then it is ended."""
    if folder and repository.top:
        _refuse_waiting(repository.top, str(folder.resolve().relative_to(repository.top)), READ_IN_TREES)
    _refuse_waiting(repository.shared, "objects")
    with _disposable(repository, repository.top if folder else None) as environment:
        if "--exclude-standard" in arguments:
            ignored = [_file(repository.shared, "info/exclude"), _users_ignored()]
            Path(environment["GIT_DIR"], "info/exclude").write_bytes(b"\n".join(ignored))
        return _run(arguments, environment, folder or Path("/"), given, most)


def git_says(folder: Path, *arguments: str) -> str | None:
    """Return what git prints in a folder of a work tree, or None where there is no repository or no git, or it refuses."""
    repository = repository_of(folder)
    try:
        done = git(repository, *arguments, folder=folder) if repository else None
    except UserError:
        return None
    return (
        None
        if done is None or done.returncode
        else done.stdout.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    )


@functools.cache
def _refuse_waiting(top: Path, below: str, names: frozenset[str] = frozenset()) -> None:
    """Refuse FIFOs and devices that git would open, in a folder and in those above it, and wait for. Looked for once a process."""
    with contextlib.suppress(OSError), Rooted(top) as rooted:
        above = [str(folder / name) for folder in PurePath(below).parents for name in names]
        listed = [(path, rooted.stat(path)) for path in above] + list(rooted.walk("" if below == "." else below))
        for path, about in listed:
            waits = about and (stat.S_ISFIFO(about.st_mode) or stat.S_ISCHR(about.st_mode))
            deep = path.count("/") > DEEPEST
            if deep or (waits and (not names or PurePath(path).name in names)):
                why = f"lies more than {DEEPEST} folders deep" if deep else "is no file, and git would wait for it"
                raise UserError(f"{top}/{visible(path)[:80]} {why}; remove it")


@contextlib.contextmanager
def _disposable(repository: Repository, work_tree: Path | None) -> Iterator[dict[str, str]]:
    """Make a git folder for one call; yield the environment that leads there, and to the repository's objects and index."""
    objects, shallow, index = repository.shared / "objects", repository.shared / "shallow", repository.own / "index"
    if os.path.lexists(objects / "info/alternates"):
        borrowed = f"{repository.top or repository.own} borrows objects from another repository"
        raise UserError(f"{borrowed} ({objects}/info/alternates); clone it again without --shared or --reference")
    sha256 = re.search(rb"objectformat\s*=\s*sha256", _file(repository.shared, "config"), re.IGNORECASE)
    with tempfile.TemporaryDirectory(prefix="etude-git-") as made:
        for name in ("refs", "objects", "info"):
            Path(made, name).mkdir()
        settings = CONFIG.format(bare="false" if work_tree else "true", objects="sha256" if sha256 else "sha1")
        Path(made, "config").write_text(settings, encoding="utf-8")
        Path(made, "HEAD").write_text(commit_id(repository, "HEAD") or "ref: refs/heads/none", encoding="utf-8")
        lent = {"GIT_OBJECT_DIRECTORY": objects, "GIT_INDEX_FILE": index if index.is_file() else f"{made}/index"}
        lent |= {"GIT_SHALLOW_FILE": shallow if shallow.is_file() else ""} | (
            {"GIT_WORK_TREE": work_tree} if work_tree else {}
        )
        yield (
            _environment()
            | {name: str(path) for name, path in lent.items()}
            | {"GIT_DIR": made, "GIT_ALLOW_PROTOCOL": "none"}
        )


def _users_ignored() -> bytes:
    """Return what the user has git ignore everywhere: such files are not to be copied either. Its usual file git reads by itself."""
    environment = {name: value for name, value in _environment().items() if name != "GIT_CONFIG_GLOBAL"}
    asked = _run(("config", "--global", "--path", "--get", "core.excludesFile"), environment, Path("/"))
    path = Path(os.fsdecode(asked.stdout.strip()))
    return path.read_bytes() if asked.stdout.strip() and path.is_file() else b""


def fetching(folder: Path, *arguments: str) -> Done:
    """Have git ask another machine, for a bare repository that is this program's own."""
    environment = _environment() | {"GIT_DIR": str(folder), "GIT_ALLOW_PROTOCOL": PROTOCOLS}
    return _run(arguments, environment, Path("/"), seconds=None)


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") and name not in PROGRAMS}
    absolute = filter(os.path.isabs, kept.get("PATH", os.defpath).split(":"))  # others lead into the repository
    return kept | FIXED | {"PATH": ":".join(absolute)}


def _run(
    arguments: tuple[str, ...], environment: dict[str, str], folder: Path, given: bytes = b"", most: int | None = None,
    seconds: float | None = SECONDS,
) -> Done:  # fmt: skip
    command = [*COMMAND, *arguments]
    try:
        if most is None:
            return subprocess.run(
                command, input=given, capture_output=True, check=False, env=environment, cwd=folder, timeout=seconds
            )
        quiet, pipe = subprocess.DEVNULL, subprocess.PIPE
        with subprocess.Popen(command, stdin=quiet, stdout=pipe, stderr=quiet, env=environment, cwd=folder) as process:
            assert process.stdout is not None
            late = threading.Timer(SECONDS, process.kill)
            late.start()
            content = process.stdout.read(most + 1)
            late.cancel()
            if len(content) > most:
                process.kill()
        return subprocess.CompletedProcess(command, process.returncode, content, b"")
    except subprocess.TimeoutExpired:
        raise UserError(f"git {arguments[0]} took longer than {SECONDS:.0f} s in {folder}") from None
    except FileNotFoundError:
        raise UserError("git is not installed; install it") from None
