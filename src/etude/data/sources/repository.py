"""A repository, as a folder of files or as git has it.

**A folder** is one repository, or holds several. In a git checkout the tracked files count, elsewhere all but those in hidden,
installed and built folders. Links are never followed, so there are no loops and no ways out.

**Git**: the files at a revision, or its last commits as messages with their changes. A repository may come from anybody:
nothing in it can make git run a program (git.py), and a broken object costs one document. Local repositories
are read in place, others from a bare clone in the cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import stat
import subprocess
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from etude.data.codebase import git_revision, passed_over, tracked_files, walked
from etude.data.document import TOO_LARGE, Entry, OpenSource, entry_of, licences_among, local, printable, share_out
from etude.errors import UserError
from etude.files import digest_of
from etude.git import commit_id, fetching, git, repository_of
from etude.rooted import Rooted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from etude.data.settings import SourceSettings
    from etude.progress import Reporter

    Done = subprocess.CompletedProcess[bytes]

FILE_FAULTS = {stat.S_IFREG: "", stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder not entered"}
CHANGES = ["diff-tree", "--root", "-p", "--format=%B%x00", "--encoding=UTF-8", "--unified=3", "--no-color", "--no-renames",
           "--no-ext-diff", "--no-textconv"]  # fmt: skip
REFS = ("+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*")  # branches and tags
MOST_REPORTS = 20  # a message that mentions more is a list
BROKEN = "broken object"
GIT_FAULTS = {b"120000": "a link", b"160000": "a submodule"}  # by mode
PEOPLE = re.compile(rb"^([\w-]+-by|cc):.*\n?", re.IGNORECASE | re.MULTILINE)  # trailers with names and addresses
OBJECT_NAMES = re.compile(rb"^index [0-9a-f]+\.\.[0-9a-f]+.*\n", re.MULTILINE)  # nothing to be learnt from


def identify_folder(settings: SourceSettings) -> str:
    """Return a digest of what is listed; files by size and time of change, without reading any."""
    root = _root(settings)
    listed = [path for paths in _repositories(root).values() for path in paths]
    return digest_of(sorted([printable(os.path.relpath(path, root)), *_status(path)] for path in listed))


def open_folder(settings: SourceSettings, most_bytes: int) -> OpenSource:
    """List the files of each repository, and share them out in parts."""
    root = _root(settings)
    parts = []
    for folder, paths in _repositories(root).items():
        listed = [(os.path.relpath(path, folder), *_status(path)) for path in sorted(paths)]
        entries = [entry_of(name, name, size, fault, most_bytes) for name, fault, size, _ in listed]
        contents = partial(_contents, folder, most_bytes)
        parts += share_out(folder.name, entries, contents, licences_among(entries, contents))
    return OpenSource(printable(f"folder {settings.folder}"), git_revision(root), parts)


def _root(settings: SourceSettings) -> Path:
    root = local(settings.folder or "").resolve()
    if not root.is_dir():
        raise UserError(f"source {settings.name!r}: there is no folder {settings.folder!r} (looked in {Path.cwd()})")
    return root


def _repositories(root: Path) -> dict[Path, list[Path]]:
    """Return what lies in each repository.

    A folder of repositories has nothing but folders in it, or checkouts; what lies loose beside those is its own.
    """
    tracked = tracked_files(root)
    top = sorted(root.iterdir())
    folders = [path for path in top if path.is_dir()]
    of_repositories = len(folders) == len(top) or any(os.path.lexists(folder / ".git") for folder in folders)
    if tracked or os.path.lexists(root / ".git") or not of_repositories:
        return {root: tracked or list(walked(root))}
    entered = {folder: tracked_files(folder) or list(walked(folder)) for folder in folders if not passed_over(folder)}
    return entered | {root: [path for path in top if path not in entered]}


def _status(path: Path) -> tuple[str, int, int]:
    """Return why a path is not read, if so; else its size and time of change."""
    try:
        about = path.lstat()
    except OSError:  # it vanished meanwhile, or its folder gives no more than names
        return "unreadable", 0, 0
    fault = FILE_FAULTS.get(stat.S_IFMT(about.st_mode), "a special file")
    return (fault, 0, 0) if fault else ("", about.st_size, about.st_mtime_ns)


def _contents(root: Path, most_bytes: int, names: list[str]) -> Iterator[bytes | str]:
    """Read each file, in bounded memory even if it has grown since it was listed."""
    with Rooted(root) as rooted:
        for name in names:
            try:
                content = rooted.read(name, most_bytes + 1)
            except OSError:
                yield "unreadable"
            else:
                yield content if len(content) <= most_bytes else TOO_LARGE


def shown(where: str) -> str:
    """Return where a repository lies, without the user and password that an address may carry."""
    return re.sub(r"//[^/]*@", "//", where)


def commit_of(settings: SourceSettings) -> str:
    """Return the commit that the revision stands for now; of a server, a full commit id stands for itself."""
    folder, url, revision = _local(settings), str(settings.git), settings.revision
    if folder:
        refusal = f"source {settings.name!r}: {folder} has no commit {revision!r}; set `revision`"
        repository = repository_of(folder, above=False, bare=True)
        name, how = re.fullmatch("([^~^@:]*)(.*)", revision, re.DOTALL).groups()  # type: ignore[union-attr]
        commit = f"{(commit_id(repository, name) if repository else None) or name}{how}^{{commit}}"
        done = _git(folder, "rev-parse", "--verify", "--end-of-options", commit, refusal=refusal)
        return done.stdout.decode().strip()
    if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", revision):
        return revision
    where = f"source {settings.name!r}: {shown(url)}"
    asked = ("ls-remote", "--", url, revision, f"{revision}^{{}}")
    lines = _accepted(fetching(Path(os.devnull), *asked), f"{where} is no folder and cannot be reached").stdout
    commits = {name: commit for commit, name in (line.split("\t") for line in lines.decode().splitlines())}
    for name in (revision, f"refs/tags/{revision}^{{}}", f"refs/tags/{revision}", f"refs/heads/{revision}"):
        if name in commits:
            return commits[name]
    raise UserError(f"{where} has no branch or tag {revision!r}; set `revision` to one, or to the full id of a commit")


def open_git(settings: SourceSettings, most_bytes: int, cache: Path, reporter: Reporter) -> OpenSource:
    """List the files at a revision, or the commits that led to it, and share them out in parts."""
    if settings.reports and "{number}" not in settings.reports:
        raise UserError(f"source {settings.name!r}: reports = {settings.reports!r} must say where the {{number}} goes")
    folder, commit = history_of(settings, cache, reporter)
    name = re.split("[/:]", str(_local(settings) or settings.git).rstrip("/"))[-1].removesuffix(".git")
    files, blobs = _files(folder, commit, most_bytes), partial(_blobs, folder)
    licences = licences_among(files, blobs)
    if settings.history:
        history = History(folder, commit, settings.reports, most_bytes, whole=settings.kind == "repair")
        parts = share_out(name, history.commits(settings.history), partial(map, history.document), licences, "commit")
    else:
        parts = share_out(name, files, blobs, licences)
    return OpenSource(f"git {shown(str(settings.git))}", commit, parts)


def history_of(settings: SourceSettings, cache: Path, reporter: Reporter) -> tuple[Path, str]:
    """Return a repository here, with all of its history, and the commit that the revision stands for."""
    commit = commit_of(settings)
    return _local(settings) or _clone(settings, commit, cache, reporter), commit


def _local(settings: SourceSettings) -> Path | None:
    folder = local(str(settings.git)).resolve()
    return folder if folder.is_dir() else None


def _clone(settings: SourceSettings, commit: str, cache: Path, reporter: Reporter) -> Path:
    """Return a bare repository in the cache that has the commit; one process at a time looks after it."""
    url = str(settings.git)
    folder = cache / "git" / hashlib.sha256(url.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    refusal = f"source {settings.name!r}: git cannot fetch {shown(url)}"
    with folder.with_suffix(".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _git(folder, "cat-file", "-e", commit).returncode:
            reporter.say(f"fetching {shown(url)} …")
            form = "sha1" if len(commit) == 40 else "sha256"
            for command in (["init", "--quiet", "--bare", "--template=", f"--object-format={form}"],
                            ["fetch", "--quiet", "--update-shallow", "--", url, *REFS]):  # fmt: skip
                _accepted(fetching(folder, *command), refusal)
    _git(folder, "cat-file", "-e", commit, refusal=f"{refusal}: no branch or tag leads to {commit}")
    return folder


def _git(folder: Path, *arguments: str, refusal: str = "", given: str = "", most: int | None = None) -> Done:
    """Run git on a repository; if it fails, raise the refusal with git's reason, if there is one."""
    repository = repository_of(folder, above=False, bare=True)
    if repository is None:
        done = subprocess.CompletedProcess(arguments, 128, b"", b"fatal: not a git repository")
    else:
        done = git(repository, *arguments, given=given.encode(), most=most)
    return _accepted(done, refusal)


def _accepted(done: Done, refusal: str) -> Done:
    if done.returncode and refusal:
        reason = re.search("^(?:fatal|error): (.+)", done.stderr.decode(errors="replace"), re.MULTILINE)
        raise UserError(f"{refusal}: {shown(reason[1]) if reason else 'git gives no reason'}")
    return done


def _files(folder: Path, tree: str, most_bytes: int, prefix: str = "") -> list[Entry]:
    """List the files of a tree; if a tree below it is broken, each folder by itself."""
    asked = _git(folder, "ls-tree", "-r", "-z", "-l", tree)
    asked = _git(folder, "ls-tree", "-z", "-l", tree) if asked.returncode else asked
    if asked.returncode:
        return [entry_of(prefix, "", 0, BROKEN, most_bytes)]
    entries = []
    for line in asked.stdout.split(b"\0")[:-1]:
        mode, kind, key, size, name = re.split(rb" +|\t", line, maxsplit=4)
        path = prefix + os.fsdecode(name)
        if kind == b"tree":
            entries += _files(folder, key.decode(), most_bytes, f"{path}/")
        else:
            fault = GIT_FAULTS.get(mode) or ("" if size.isdigit() else BROKEN)
            entries.append(entry_of(path, key.decode(), 0 if fault else int(size), fault, most_bytes))
    return entries


def _blobs(folder: Path, keys: list[str]) -> Iterator[bytes | str]:
    """Ask one process for all; if it dies of a broken object, another one goes on from there."""
    output = BytesIO()
    for index in range(len(keys)):
        about = output.readline().split()  # id, type and size; or id and "missing"; or nothing
        if not about:
            output = BytesIO(_git(folder, "cat-file", "--batch", given="\n".join([*keys[index:], ""])).stdout)
            about = output.readline().split()
        size = int(about[2]) if len(about) == 3 else -1
        content = output.read(size + 1)
        yield content[:-1] if 0 <= size < len(content) else BROKEN


@dataclass(frozen=True)
class History:
    """The commits that led to one, each a document: the bug reports it mentions, its message, its changes; not its author."""

    folder: Path
    commit: str
    reports: str | None
    most_bytes: int
    whole: bool = False  # show functions whole that a change is in

    def commits(self, most: int) -> list[Entry]:
        """List the last ones that are no merges, oldest first; a broken one hides all that are older."""
        asked = _git(self.folder, "rev-list", "--no-merges", f"--max-count={most}", self.commit)
        repository = repository_of(self.folder, above=False, bare=True)
        shallow = repository.shared / "shallow" if repository else self.folder / "shallow"
        ends = shallow.read_text().split() if shallow.is_file() else []  # what they change cannot be known
        faults = dict.fromkeys(ends, "the clone is shallow")
        commits = [Entry(name, name, 0, faults.get(name, "")) for name in asked.stdout.decode().split()]
        oldest = commits[-1].path if commits else self.commit
        hidden = [Entry(f"before {oldest}", "", 0, BROKEN)] if asked.returncode else []
        return hidden + commits[::-1]

    def document(self, commit: str) -> bytes | str:
        """Return a commit as a document, or why it is none."""
        shown = self._output(*CHANGES, *["--function-context"] * self.whole, commit)
        if isinstance(shown, str):
            return shown
        message, _, changes = shown.partition(b"\0")
        files = re.split(rb"^(?=diff --git )", changes, flags=re.MULTILINE)[1:]
        textual = OBJECT_NAMES.sub(b"", b"".join(file for file in files if b"\n@@ " in file))
        if not textual:
            return "no textual changes"
        document = b"%scommit %s\n\n%s" % (self._reported(message), PEOPLE.sub(b"", message).strip(), textual)
        return document if len(document) <= self.most_bytes else TOO_LARGE

    def _reported(self, message: bytes) -> bytes:
        """Return the bug reports that a message mentions (#123) and that lie in the repository at its revision."""
        numbers = list(dict.fromkeys(re.findall(r"#(\d+)", message.decode("ascii", "ignore"))))[:MOST_REPORTS]
        paths = [self.reports.replace("{number}", number) for number in numbers] if self.reports else []
        reports = [self._output("cat-file", "blob", f"{self.commit}:{path}") for path in paths]
        return b"".join(b"bug report:\n%s\n\n" % report.strip() for report in reports if isinstance(report, bytes))

    def _output(self, *arguments: str) -> bytes | str:
        """Return what git prints, in bounded memory, or why there is nothing."""
        done = _git(self.folder, *arguments, most=self.most_bytes)
        if len(done.stdout) > self.most_bytes:
            return TOO_LARGE
        return BROKEN if done.returncode else done.stdout
