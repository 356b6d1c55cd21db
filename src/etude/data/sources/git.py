"""A git repository: its files at a revision, or its last commits as messages with their changes.

A repository may come from anybody: only plumbing is called, which no configuration can make run a program, and a broken
object costs one document. Local repositories are read in place, others from a bare clone in the cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from collections import deque
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from etude.data.sources.opened import Entry, FilesPart, OpenSource, entry_of, over
from etude.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from etude.data.settings import SourceSettings
    from etude.progress import Reporter

GIT = ["git", "--no-pager", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.quotePath=false"]  # fmt: skip
OTHERS = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY"}  # would lead to another repository
FIXED = {"GIT_TERMINAL_PROMPT": "0", "GIT_NO_REPLACE_OBJECTS": "1", "GIT_NO_LAZY_FETCH": "1", "LC_ALL": "C"}
OFFLINE = {"GIT_ALLOW_PROTOCOL": "none"}
CHANGES = ["diff-tree", "--root", "-p", "--format=%B%x00", "--encoding=UTF-8", "--unified=3", "--no-color", "--no-renames",
           "--no-ext-diff", "--no-textconv"]  # fmt: skip
BRANCHES_AND_TAGS = ("+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*")
BROKEN = "broken object"
FAULTS = {b"120000": "a link", b"160000": "a submodule"}  # by mode
PEOPLE = re.compile(rb"^([\w-]+-by|cc):.*\n?", re.IGNORECASE | re.MULTILINE)  # trailers with names and addresses
OBJECT_NAMES = re.compile(rb"^index [0-9a-f]+\.\.[0-9a-f]+.*\n", re.MULTILINE)  # nothing to be learnt from


def shown(where: str) -> str:
    """Return where a repository lies, without the user and password that an address may carry."""
    return re.sub(r"//[^/@]*@", "//", where)


def commit_of(settings: SourceSettings) -> str:
    """Return the commit that the revision stands for now."""
    folder = _local(settings)
    if not folder:
        return _remote_commit(settings)
    _git(folder, "rev-parse", "--git-dir", refusal=f"source {settings.name!r}: {folder} is no git repository")
    asked = _git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{settings.revision}^{{commit}}")
    if asked.returncode:
        raise UserError(
            f"source {settings.name!r}: {folder} is empty or has no commit {settings.revision!r}; set `revision`"
        )
    return asked.stdout.decode().strip()


def open_git(settings: SourceSettings, most_bytes: int, cache: Path, reporter: Reporter) -> OpenSource:
    """List the files at a revision, or the commits that led to it, and share them out in parts."""
    if settings.reports and "{number}" not in settings.reports:
        raise UserError(f"source {settings.name!r}: reports = {settings.reports!r} must say where the {{number}} goes")
    commit = commit_of(settings)
    folder = _local(settings) or _clone(settings, commit, cache, reporter)
    name = re.split("[/:]", str(_local(settings) or settings.git).rstrip("/"))[-1].removesuffix(".git")
    part = GitPart(str(folder), name, most_bytes, tuple(_files(folder, commit, most_bytes))).with_licences()
    if settings.history:
        commits = tuple(_commits(folder, commit, settings.history))
        part = HistoryPart(str(folder), name, most_bytes, commits, part.licences, commit, settings.reports)
    return OpenSource(f"git {shown(str(settings.git))}", commit, [*part.shared_out()])


def _local(settings: SourceSettings) -> Path | None:
    folder = Path(str(settings.git)).expanduser().resolve()
    return folder if folder.is_dir() else None


def _environment(folder: Path, *, network: bool = False) -> dict[str, str]:
    """Keep git in this repository, and from fetching by itself what is missing in it, which would run what it names."""
    kept = {name: value for name, value in os.environ.items() if name not in OTHERS}
    return kept | FIXED | ({} if network else OFFLINE) | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}


def _git(
    folder: Path, *arguments: str, network: bool = False, refusal: str = "", given: str = ""
) -> subprocess.CompletedProcess[bytes]:
    """Run git to its end; if it fails, raise the refusal with git's reason, if there is one."""
    command = [*GIT, "-C", str(folder), *arguments]
    environment = _environment(folder, network=network)
    try:
        done = subprocess.run(command, env=environment, input=given.encode(), capture_output=True, check=False)
    except FileNotFoundError:
        raise UserError("git is not installed, which reads sources with `git`; install it") from None
    if done.returncode and refusal:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["git gives no reason"]
        raise UserError(f"{refusal}: {shown(said[-1])}")
    return done


def _remote_commit(settings: SourceSettings) -> str:
    """Ask the server; a full commit id stands for itself."""
    url, revision = str(settings.git), settings.revision
    if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", revision):
        return revision
    where = f"source {settings.name!r}: {shown(url)}"
    asked = ("ls-remote", "--", url, revision, f"{revision}^{{}}")
    lines = _git(Path.cwd(), *asked, network=True, refusal=f"{where} is no folder and cannot be reached").stdout
    found = {name: commit for commit, name in (line.split("\t") for line in lines.decode().splitlines())}
    for name in (revision, f"refs/tags/{revision}^{{}}", f"refs/tags/{revision}", f"refs/heads/{revision}"):
        if name in found:
            return found[name]
    raise UserError(f"{where} has no branch or tag {revision!r}; set `revision`")


def _clone(settings: SourceSettings, commit: str, cache: Path, reporter: Reporter) -> Path:
    """Return a bare clone in the cache that has the commit; one process at a time looks after it."""
    url = str(settings.git)
    folder = cache / "git" / hashlib.sha256(url.encode()).hexdigest()[:16]
    work = folder.with_suffix(".work")
    folder.parent.mkdir(parents=True, exist_ok=True)
    refusal = f"source {settings.name!r}: git cannot fetch {shown(url)}"
    with folder.with_suffix(".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            reporter.say(f"fetching {shown(url)} …")
            shutil.rmtree(work, ignore_errors=True)  # what a killed process left
            _git(cache, "clone", "--quiet", "--bare", "--", url, str(work), network=True, refusal=refusal)
            work.rename(folder)
        if _git(folder, "cat-file", "-e", commit).returncode:
            _git(folder, "fetch", "--quiet", "--", url, *BRANCHES_AND_TAGS, network=True, refusal=refusal)
    _git(folder, "cat-file", "-e", commit, refusal=f"{refusal}: no branch or tag leads to {commit}")
    return folder


def _files(folder: Path, tree: str, most_bytes: int, prefix: str = "") -> list[Entry]:
    """List the files of a tree; if a tree below it is broken, each folder by itself."""
    asked = _git(folder, "ls-tree", "-r", "-z", "-l", tree)
    asked = _git(folder, "ls-tree", "-z", "-l", tree) if asked.returncode else asked
    if asked.returncode:
        return [Entry(prefix, tree, 0, BROKEN)]
    entries = []
    for line in asked.stdout.split(b"\0")[:-1]:
        mode, kind, key, size, name = re.split(rb" +|\t", line, maxsplit=4)
        path = prefix + os.fsdecode(name)
        if kind == b"tree":
            entries += _files(folder, key.decode(), most_bytes, f"{path}/")
        else:
            fault = FAULTS.get(mode) or ("" if size.isdigit() else BROKEN)
            entries.append(entry_of(path, key.decode(), 0 if fault else int(size), fault, most_bytes))
    return entries


def _commits(folder: Path, commit: str, most: int) -> list[Entry]:
    """List the last commits that are no merges, oldest first; a broken one hides all that are older."""
    asked = _git(folder, "rev-list", "--no-merges", f"--max-count={most}", commit)
    found = [Entry(line, line, 0) for line in asked.stdout.decode().split()]
    hidden = [Entry(f"before {found[-1].path if found else commit}", "", 0, BROKEN)] if asked.returncode else []
    return hidden + found[::-1]


class GitPart(FilesPart):
    """Some files at a revision."""

    def contents(self, keys: list[str]) -> Iterator[bytes | str]:
        """Ask one process for all; if it dies of a broken object, another one goes on behind that."""
        left = deque(keys)
        while left:
            output = BytesIO(_git(Path(self.root), "cat-file", "--batch", given="\n".join([*left, ""])).stdout)
            alive = True
            while left and alive:
                left.popleft()
                about = output.readline().split()  # id, type and size; or id and "missing"; or nothing
                size = int(about[2]) if len(about) == 3 else -1
                content = output.read(size + 1)
                alive = bool(about) and len(content) == size + 1
                yield content[:size] if alive and size >= 0 else BROKEN


@dataclass(frozen=True)
class HistoryPart(GitPart):
    """Some commits, each a document: the bug reports it mentions, its message, its changes; not who wrote it."""

    commit: str = ""
    reports: str | None = None

    kind = "commit"
    overhead = 100_000

    def contents(self, keys: list[str]) -> Iterator[bytes | str]:
        """Yield each commit as a document."""
        return (self._document(commit) for commit in keys)

    def _document(self, commit: str) -> bytes | str:
        whole = self._output(*CHANGES, commit)
        if isinstance(whole, str):
            return whole
        message, _, changes = whole.partition(b"\0")
        files = re.split(rb"^(?=diff --git )", changes, flags=re.MULTILINE)[1:]
        textual = OBJECT_NAMES.sub(b"", b"".join(file for file in files if b"\n@@ " in file))
        if not textual:
            return "no textual changes"
        document = b"%scommit %s\n\n%s" % (self._reported(message), PEOPLE.sub(b"", message).strip(), textual)
        return document if len(document) <= self.most_bytes else over(self.most_bytes)

    def _reported(self, message: bytes) -> bytes:
        """Return the bug reports that a message mentions (#123) and that lie in the repository at its revision."""
        numbers = dict.fromkeys(re.findall(r"#(\d+)", message.decode("ascii", "ignore"))) if self.reports else {}
        paths = [str(self.reports).replace("{number}", number) for number in numbers]
        found = [self._output("cat-file", "blob", f"{self.commit}:{path}") for path in paths]
        return b"".join(b"bug report:\n%s\n\n" % report.strip() for report in found if isinstance(report, bytes))

    def _output(self, *arguments: str) -> bytes | str:
        """Return what git prints, in bounded memory, or why there is nothing."""
        command, environment = [*GIT, "-C", self.root, *arguments], _environment(Path(self.root))
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            content = process.stdout.read(self.most_bytes + 1)
            if len(content) > self.most_bytes:
                process.kill()
                return over(self.most_bytes)
        return BROKEN if process.returncode else content
