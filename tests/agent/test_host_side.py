"""The agent's host side against what a repository or an agent may put in its way: links, full disks, odd files, large changes."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from etude.agent import changes
from etude.agent.changes import apply, check, unified
from etude.agent.repository import _copy, copy_files, files_of, sandboxed_copy
from etude.errors import UserError
from etude.rooted import Rooted
from etude.sandbox import cgroups
from etude.sandbox.box import Entry
from tests import tiny
from tests.agent.chat_server import ChatServer
from tests.conftest import Etude

SECRET = "the user's secret"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder that no agent may read or write, with a file in it."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home/key").write_text(SECRET)
    return tmp_path / "home"


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    folder.mkdir(exist_ok=True)
    return folder


def snapshot(folder: Path) -> dict[str, Any]:
    """All of a folder: kinds, modes, contents, targets."""
    seen: dict[str, Any] = {}
    with Rooted(folder) as rooted:
        for path, about in rooted.walk():
            is_folder = (about.st_mode & 0o170000) == 0o040000
            seen[path] = about.st_mode, b"" if is_folder else rooted.read(path)
    return seen


# ---- copying


def planted(repository: Path, name: str) -> Path:
    """A git repository whose index names a path that git itself would never add."""
    tiny.git(repository, "init", "-q", "--template=")
    (repository / "x").write_text("x")
    key, plain = tiny.git(repository, "hash-object", "-w", "x").strip(), "z" * len(name)
    (repository / "x").unlink()
    tiny.git(repository, "update-index", "--add", "--cacheinfo", f"100644,{key},{plain}")
    index = repository / ".git/index"
    content = index.read_bytes()[:-20].replace(plain.encode(), name.encode(), 1)
    index.write_bytes(content + hashlib.sha1(content, usedforsecurity=False).digest())
    return repository


@pytest.mark.parametrize("git", [True, False])
def test_a_copy_follows_no_link(tmp_path: Path, outside: Path, git: bool) -> None:
    repository = tree(tmp_path / "repo", {"a.py": "a"})
    (repository / "to").symlink_to(outside)
    (repository / "file").symlink_to(outside / "key")
    os.mkfifo(repository / "fifo")
    if git:
        planted(repository, "to/key")
    names = files_of(repository)
    assert names == ["a.py", "file", "to"]
    copy_files(repository, names, tmp_path / "copy")
    assert (tmp_path / "copy/to").readlink() == outside
    assert snapshot(outside) == {"key": (0o100644, SECRET.encode())}


@pytest.mark.parametrize("name", ["../home/key", "to/key", ".git/config", "sub/../../home/key", "/home/key"])
def test_an_index_that_names_what_is_outside_is_not_believed(tmp_path: Path, outside: Path, name: str) -> None:
    repository = tree(tmp_path / "repo", {"a.py": "a"})
    (repository / "to").symlink_to(outside)
    planted(repository, name)
    assert name not in files_of(repository)
    with pytest.raises(OSError, match=r"."):
        copy_files(repository, [name if name != ".git/config" else "to/key"], tmp_path / "copy")
    assert SECRET not in str([path.read_text() for path in (tmp_path / "copy").rglob("*") if path.is_file()])


def test_a_link_put_there_after_the_listing_is_not_followed(tmp_path: Path, outside: Path) -> None:
    repository = tree(tmp_path / "repo", {"d/key": "mine"})
    names = files_of(repository)
    shutil.rmtree(repository / "d")
    (repository / "d").symlink_to(outside)
    with pytest.raises(OSError, match=r"."):
        copy_files(repository, names, tmp_path / "copy")


def test_a_link_in_the_copy_is_not_written_through(tmp_path: Path, outside: Path) -> None:
    repository = tree(tmp_path / "repo", {"d/key": "theirs"})
    (repository / "e").symlink_to(outside)

    copy_files(repository, ["e", "d/key"], tmp_path / "copy")
    with Rooted(tmp_path / "copy") as sink, pytest.raises(OSError, match=r"."), sink.holder("e/key", make=True):
        pass
    assert (outside / "key").read_text() == SECRET


def test_a_file_that_becomes_a_link_between_two_looks_at_it_is_not_read(
    tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's own processes may swap it while the host reads: after it was seen to be a file, before it is opened."""
    repository, was, looked = tree(tmp_path / "repo", {"a": "theirs"}), os.stat, list[str]()

    def swapping(name: Any, **how: Any) -> Any:
        about = was(name, **how)
        if name == "a":
            looked.append(name)
            (repository / "a").unlink()
            (repository / "a").symlink_to(outside / "key")
        return about

    with Rooted(repository) as rooted:
        monkeypatch.setattr(os, "stat", swapping)
        with pytest.raises(OSError, match="symbolic links"):
            rooted.read("a")
    assert looked


def test_a_copy_is_not_written_through_a_link_that_waits_for_it(tmp_path: Path, outside: Path) -> None:
    repository, copy = tree(tmp_path / "repo", {"a": "theirs"}), tree(tmp_path / "copy", {})
    (copy / "a").symlink_to(outside / "key")
    with Rooted(repository) as source, Rooted(copy) as sink, pytest.raises(OSError, match="exists"):
        _copy(source, sink, "a", 100)
    assert (outside / "key").read_text() == SECRET


# ---- applying

OLD = {"a.py": "a\n", "d/x": "x\n", "d/y/z": "z\n", "f": "f\n", "run": "r\n"}
CHANGES = {
    "edit": [Entry("a.py", "file", mode=0o644, content=b"new\n")],
    "folder becomes a file": [Entry("d", "file", mode=0o644, content=b"new\n")],
    "file becomes a folder": [Entry("f", "folder", mode=0o755), Entry("f/g", "file", mode=0o644, content=b"g\n")],
    "file becomes a link": [Entry("f", "link", content=b"a.py")],
    "all at once": [
        Entry("a.py", "gone"), Entry("d", "file", mode=0o755, content=b"new\n"), Entry("f", "folder", mode=0o755),
        Entry("f/g", "file", mode=0o644, content=b"g\n"), Entry("n" * 255, "file", mode=0o644, content=b"long\n"),
        Entry("new/deep/er", "file", mode=0o644, content=b""), Entry("run", "file", mode=0o755, content=b"r\n"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_kinds_may_change(tmp_path: Path, name: str) -> None:
    layer, folder = tree(tmp_path / "layer", OLD), tree(tmp_path / "repo", OLD)
    assert apply(CHANGES[name], folder, layer) == sum(entry.kind != "folder" for entry in CHANGES[name])
    for entry in CHANGES[name]:
        if entry.kind == "file":
            assert (folder / entry.path).read_bytes() == entry.content
            assert (folder / entry.path).stat().st_mode & 0o777 == entry.mode
    assert not list(folder.glob(".etude-*"))


CALLS = ("mkdir", "rename", "rmdir", "open", "symlink", "fchmod", "fsync")


def applied_with_a_failure(folder: Path, layer: Path, place: int, code: int) -> tuple[str, bool]:
    """Apply while the n-th call that changes or opens anything fails; return what was said, and whether the call came at all."""
    left = [place]

    def failing(call: Any) -> Any:
        def wrapped(*words: Any, **more: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(code, os.strerror(code))
            return call(*words, **more)

        return wrapped

    with pytest.MonkeyPatch.context() as patched:
        for name in CALLS:
            patched.setattr(os, name, failing(getattr(os, name)))
        try:
            apply([*CHANGES["all at once"], Entry("to", "link", content=b"run")], folder, layer)
        except UserError as error:
            return str(error), True
    return "", left[0] <= 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.ENAMETOOLONG])
def test_a_failure_anywhere_leaves_everything_as_it_was(tmp_path: Path, code: int) -> None:
    layer, old = tree(tmp_path / "layer", OLD), {**OLD, "mine": "not the agent's"}
    before = snapshot(tree(tmp_path / "old", old))
    done = tree(tmp_path / "done", old)
    assert applied_with_a_failure(done, layer, 10_000, code) == ("", False)
    after, failed = snapshot(done), 0
    for place in range(1, 1000):
        folder = tree(tmp_path / f"{place}", old)
        message, came = applied_with_a_failure(folder, layer, place, code)
        left = {path: about for path, about in snapshot(folder).items() if not path.startswith(".etude-")}
        failed += bool(message)
        if not came:
            break
        assert left == (before if message else after), place
        assert "nothing was applied" in (message or "nothing was applied")
        assert not list(folder.glob(".etude-*")) or not message
    assert failed > 50


def test_a_really_full_disk_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, folder = tree(tmp_path / "layer", OLD), tree(tmp_path / "repo", OLD)
    before = snapshot(folder)
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda path, flags, *more, **kinds: real("/dev/full", os.O_WRONLY) if flags & os.O_CREAT else real(path, flags, *more, **kinds)
    )  # fmt: skip
    with pytest.raises(UserError, match="No space left on device; nothing was applied"):
        apply(CHANGES["all at once"], folder, layer)
    monkeypatch.undo()
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    "entry",
    [
        Entry("sub/.git/config", "file", content=b""),
        Entry(".GIT", "file", content=b"gitdir: x"),
        Entry("sub/.Git/hooks/x", "file", content=b""),
        Entry("sub/GIT~1/config", "file", content=b""),
        Entry(".g\u200cit/config", "file", content=b""),
        Entry(".git. ./config", "file", content=b""),
        Entry(".git::$INDEX_ALLOCATION/config", "file", content=b""),
        Entry("l", "link", content=b".git/config"),
        Entry("d/l", "link", content=b"../.GIT/hooks"),
        Entry("l", "link", content=b"d/../../x"),
        Entry("l", "link", content=b"d/y/../../../x"),
        Entry("d/l", "link", content=b"../../home/key"),
        Entry("l", "link", content=b""),
        Entry("d", "file", content=b"but something of the user's is in it"),
        Entry("/".join("a" * 300), "folder"),
        Entry("a\0b", "file", content=b""),
        Entry("f/under a file", "file", content=b""),
    ],
    ids=lambda entry: entry.path[:20] + str(entry.content)[:20],
)
def test_what_is_refused_is_refused_before_anything_is_written(tmp_path: Path, entry: Entry) -> None:
    layer, folder = tree(tmp_path / "layer", OLD), tree(tmp_path / "repo", {**OLD, "d/mine.env": "ignored by git"})
    before = snapshot(folder)
    with pytest.raises(UserError, match="nothing was applied"):
        check([entry], folder, layer)
        apply([entry], folder, layer)
    assert snapshot(folder) == before


def test_a_file_changed_inside_a_folder_that_goes_is_kept(tmp_path: Path) -> None:
    layer, folder = tree(tmp_path / "layer", OLD), tree(tmp_path / "repo", {**OLD, "d/y/z": "changed meanwhile\n"})
    with pytest.raises(UserError, match="has changed since the agent began; nothing was applied"):
        apply([Entry("d", "gone")], folder, layer)
    assert (folder / "d/y/z").read_text() == "changed meanwhile\n"


@pytest.mark.parametrize(("before", "asked", "after"), [
    (0o600, 0o666, 0o600), (0o600, 0o777, 0o700), (0o640, 0o100, 0o750), (0o755, 0o644, 0o644), (0o444, 0o4666, 0o444),
    (None, 0o666, 0o644), (None, 0o6777, 0o755),
])  # fmt: skip
def test_permissions_that_no_diff_shows_are_the_users(
    tmp_path: Path, before: int | None, asked: int, after: int
) -> None:
    layer, folder = (tree(tmp_path / name, {} if before is None else {"f": "x"}) for name in ("layer", "repo"))
    if before is not None:
        (folder / "f").chmod(before)
    apply([Entry("f", "file", mode=asked, content=b"y")], folder, layer)
    assert (oct((folder / "f").stat().st_mode & 0o7777), (folder / "f").read_text()) == (oct(after), "y")


def test_an_empty_folder_that_no_diff_shows_is_not_made(tmp_path: Path) -> None:
    layer, folder = tree(tmp_path / "layer", OLD), tree(tmp_path / "repo", OLD)
    entries = [Entry("new", "folder"), Entry("new/inner", "folder")]
    assert (unified(entries, [layer]), apply(entries, folder, layer)) == ("", 0)
    assert snapshot(folder) == snapshot(layer)


def test_applying_follows_no_link_of_the_user(tmp_path: Path, outside: Path) -> None:
    layer, folder = tree(tmp_path / "layer", {}), tree(tmp_path / "repo", {})
    (folder / "key").symlink_to(outside / "key")
    (layer / "key").symlink_to(outside / "key")
    apply([Entry("key", "file", mode=0o644, content=b"theirs")], folder, layer)
    assert (outside / "key").read_text() == SECRET
    assert (folder / "key").read_text() == "theirs"


# ---- showing


def applied_by_git(text: str, folder: Path) -> None:
    subprocess.run(["git", "init", "-q", "--template="], cwd=folder, check=True)
    done = subprocess.run(["git", "apply", "-"], cwd=folder, input=text.encode(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(folder / ".git")


@pytest.mark.parametrize("name", CHANGES)
def test_git_reads_the_diff_with_modes_and_links(tmp_path: Path, name: str) -> None:
    layer = tree(tmp_path / "layer", OLD)
    mine, theirs = tree(tmp_path / "mine", OLD), tree(tmp_path / "theirs", OLD)
    apply(CHANGES[name], mine, layer)
    applied_by_git(unified(CHANGES[name], [layer]), theirs)
    assert snapshot(mine) == snapshot(theirs)


def test_links_bits_and_bytes_are_shown_as_what_they_are(tmp_path: Path, outside: Path) -> None:
    layer = tree(tmp_path / "layer", {"b": "\u00e9\n"})
    (layer / "old").symlink_to(outside / "key")
    entries = [
        Entry("b", "file", mode=0o644, content="\u00e9\n".encode("latin-1")), Entry("old", "gone"),
        Entry("l", "link", content=b"b"), Entry("x", "file", mode=0o755, content=b"#!\n"),
        Entry("e\x1b[2J\n+++ b/other", "file", mode=0o644, content=b"x\x1b]0;title\x07\n"),
    ]  # fmt: skip
    text = unified(entries, [layer])
    assert "-é\n+\\xe9\n" in text
    assert "new file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+b\n" in text
    assert "new file mode 100755\n" in text
    assert "deleted file mode 120000" in text
    assert SECRET not in text
    assert "b/e\\x1b[2J\\n+++ b/other\n" in text


def test_a_folder_where_a_link_was_does_not_show_what_lay_behind_it(tmp_path: Path, outside: Path) -> None:
    layer = tree(tmp_path / "layer", {})
    (layer / "l").symlink_to(outside)
    text = unified([Entry("l", "folder"), Entry("l/key", "file", mode=0o644, content=b"new\n")], [layer])
    assert SECRET not in text
    assert "deleted file mode 120000" in text


def test_large_changes_are_bounded_and_say_so(tmp_path: Path) -> None:
    lines = [f"{number % 97} {number % 89}\n" for number in range(60_000)]
    layer = tree(tmp_path / "layer", {"a": "same\n" + "".join(lines) + "same\n"})
    folder = tree(tmp_path / "repo", {"a": "same\n" + "".join(lines) + "same\n"})
    new = ("same\n" + "".join(reversed(lines)) + "same\n").encode()
    text = unified([Entry("a", "file", mode=0o644, content=new)], [layer])
    assert "@@ -1,60002 +1,60002 @@ too many lines to compare: shown as one change\n" in text
    applied_by_git(text, folder)
    assert (folder / "a").read_bytes() == new
    long = Entry("long", "file", mode=0o644, content=b"x" * (changes.LARGEST + 1))
    many = [Entry(f"m{number}", "file", mode=0o644, content=b"y\n" * 500_000) for number in range(6)]
    text = unified([long, *many], [layer])
    assert f"differ: 0 and {changes.LARGEST + 1} bytes, too long to show\n" in text
    assert "Files /dev/null and b/m5 differ: 0 and 1000000 bytes, the diff is too long\n" in text
    assert len(text) < 2 * changes.MOST_SHOWN


def test_pairs_are_counted_over_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MOST_PAIRS", 30)
    layer = tree(tmp_path / "layer", dict.fromkeys("ab", "1\n2\n3\n4\n5\n"))
    new = b"5\n4\n3\n2\n1\n"
    text = unified([Entry(name, "file", mode=0o644, content=new) for name in "ab"], [layer])
    assert text.count("shown as one change") == 1


def test_thousands_of_deep_folders_are_compared_and_refused(tmp_path: Path) -> None:
    layer, folder = tree(tmp_path / "layer", OLD), tree(tmp_path / "repo", OLD)
    deep = "/".join(["d"] * 2000)
    entries = [Entry(f"{deep}/{number}", "folder") for number in range(20_000)]
    assert unified(entries, [layer]) == ""
    with pytest.raises(UserError, match="200 folders deep; nothing was applied"):
        apply(entries, folder, layer)


def test_a_very_deep_folder_is_refused_before_it_is_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ("d/" * 300)).mkdir(parents=True)
    opened, calls = os.open, itertools.count()
    monkeypatch.setattr(os, "open", lambda *words, **more: (next(calls), opened(*words, **more))[1])
    with pytest.raises(UserError, match="folders more than 200 deep"):
        files_of(tmp_path)
    assert next(calls) < 25_000  # 200 * 201 / 2, and not 300 * 301 / 2


# ---- messages and signals


def test_control_codes_in_an_error_are_escaped(etude: Etude, tmp_path: Path) -> None:
    said = etude("trace", "show", f"{tmp_path}/\x1b[2Jno\rne")
    assert (said.code, "\x1b[2J" in said.err, "\\x1b[2Jno\\rne" in said.err) == (2, False, True)


def test_ended_by_sigterm_it_leaves_nothing_behind(tmp_path: Path) -> None:
    repository = tree(tmp_path / "repo", {"a.py": "a\n"})
    temporary = tree(tmp_path / "tmp", {})
    before = snapshot(repository)
    with ChatServer(["@shell\ncommand: touch started; sleep 600\n@end"]) as server:
        words = ["agent", "x", "--model", server.url, "--repo", str(repository), "--yes"]
        process = subprocess.Popen(
            [sys.executable, "-m", "etude", *words], env={**os.environ, "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert process.stdout is not None
        while b"sleep 600" not in (line := process.stdout.readline()):
            assert line, "it ended before it began"
        assert list(temporary.glob("etude-agent-*"))
        process.terminate()
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert not list(temporary.iterdir())
    assert snapshot(repository) == before


def test_what_a_killed_one_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    own = cgroups.own_name("agent-")
    dead = own.replace(f"-{os.getpid()}-", f"-{subprocess.Popen(['true']).pid}-")
    tree(tmp_path / "tmp", {f"{dead}x/layer/a": "", f"{own}other/layer/b": "", "etude-agent-mine/c": ""})
    repository = tree(tmp_path / "repo", {"a.py": "a\n"})

    async def opened_and_closed() -> bool:
        async with sandboxed_copy(repository, "auto") as copy:
            return copy.layer.parent.name.startswith(own)

    assert asyncio.run(opened_and_closed())
    assert sorted(path.name for path in (tmp_path / "tmp").iterdir()) == sorted(["etude-agent-mine", f"{own}other"])
