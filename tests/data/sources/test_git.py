from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from etude.data.document import Drop, Raw
from etude.data.sources import open_source
from etude.data.sources.repository import shown
from etude.errors import Interrupted, UserError
from etude.progress import Reporter
from tests import tiny
from tests.data.sources.reading import entries, identity, opened, reasons, settings_of, texts
from tests.data.test_codebase import write
from tests.lineage.refusals import one_line

BROKEN = "broken object"


def commit(folder: Path, message: str, contents: dict[str, bytes]) -> str:
    write(folder, contents)
    tiny.git(folder, "add", "-A")
    tiny.git(folder, "commit", "-q", "--allow-empty", "-m", message)
    return tiny.git(folder, "rev-parse", "HEAD").strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    tiny.git(folder, "init", "-q", "-b", "main")
    commit(folder, "first", {"LICENSE": b"free", "src/a.py": b"a = 1\n", "src/b.py": b"b = 1\n"})
    return folder


def object_file(folder: Path, key: str) -> Path:
    return folder / ".git" / "objects" / key[:2] / key[2:]


def damage(folder: Path, key: str) -> None:
    path = object_file(folder, key)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 :] = b"\xff" * (len(content) - len(content) // 2)
    path.chmod(0o644)
    path.write_bytes(content)


def key_of(folder: Path, name: str) -> str:
    return tiny.git(folder, "rev-parse", f"HEAD:{name}").strip()


def test_files_are_those_of_the_revision(repository: Path) -> None:
    first = tiny.git(repository, "rev-parse", "HEAD").strip()
    tiny.git(repository, "tag", "-a", "v1", "-m", "one")
    second = commit(repository, "second", {"src/a.py": b"a = 2\n", "tab\t \n.py": b"", "ä.py": b"\xff"})
    write(repository, {"src/a.py": b"changed", "untracked.py": b"u"})
    source = opened(git=str(repository))
    assert (source.location, source.revision) == (f"git {repository}", second)
    assert entries(source.parts) == [
        Raw("project", "LICENSE", b"free"),
        Raw("project", "src/a.py", b"a = 2\n"),
        Raw("project", "src/b.py", b"b = 1\n"),
        Raw("project", "tab\t \n.py", b""),
        Raw("project", "ä.py", b"\xff"),
    ]
    assert [part.licences() for part in source.parts] == [{"LICENSE": b"free"}]
    for name in ("v1", first, "HEAD~1", first[:9]):
        old = opened(git=str(repository), revision=name)
        assert (old.revision, texts(old.parts)["src/a.py"]) == (first, b"a = 1\n")
        assert identity(git=str(repository), revision=name) == {"git": str(repository), "commit": first}


def test_links_submodules_large_files_and_foreign_names_are_dropped(repository: Path, tmp_path: Path) -> None:
    (repository / "link").symlink_to("src")
    Path(os.fsdecode(os.fsencode(repository) + b"/caf\xe9.py")).write_bytes(b"z")
    inner = tmp_path / "inner"
    inner.mkdir()
    tiny.git(inner, "init", "-q")
    commit(inner, "first", {"x": b"x"})
    tiny.git(repository, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner), "sub")
    commit(repository, "more", {"large.py": b"x" * 1001, "full.py": b"y" * 1000})
    parts = opened(git=str(repository)).parts
    assert reasons(parts) == {
        "link": "a link", "sub": "a submodule", "large.py": "over max_bytes", r"caf\xe9.py": "name not UTF-8",
    }  # fmt: skip
    assert {*texts(parts)} == {".gitmodules", "LICENSE", "full.py", "src/a.py", "src/b.py"}


def test_a_bare_repository_is_read_too(repository: Path, tmp_path: Path) -> None:
    bare = tmp_path / "copy.git"
    tiny.git(repository, "clone", "-q", "--bare", ".", str(bare))
    files = texts(opened(git=str(repository)).parts)
    assert entries(opened(git=str(bare)).parts) == [Raw("copy", name, content) for name, content in files.items()]


def test_broken_objects_cost_one_document_each(repository: Path) -> None:
    commit(
        repository, "more", {f"{at}.py": b"%d" % at * 40 for at in range(6)} | {"deep/er/x.py": b"x", "deep/y.py": b"y"}
    )
    damage(repository, key_of(repository, "1.py"))
    damage(repository, key_of(repository, "2.py"))
    object_file(repository, key_of(repository, "4.py")).unlink()
    object_file(repository, key_of(repository, "deep/er")).unlink()
    object_file(repository, key_of(repository, "LICENSE")).unlink()
    source = opened(git=str(repository))
    broken = ["1.py", "2.py", "4.py", "LICENSE", "deep/er/"]
    assert reasons(source.parts) == dict.fromkeys(broken, BROKEN)
    assert {*texts(source.parts)} == {"0.py", "3.py", "5.py", "deep/y.py", "src/a.py", "src/b.py"}
    assert texts(source.parts)["3.py"] == b"3" * 40
    assert source.parts[0].licences() == {}


def test_history_is_the_last_commits_oldest_first(repository: Path) -> None:
    made = [commit(repository, f"change {at}", {"src/a.py": b"a = %d\n" % at}) for at in range(5)]
    for count in (1, 3, 100):
        source = opened(git=str(repository), history=count)
        expected = tiny.git(repository, "log", "--format=%H", "--no-merges", f"-{count}").split()[::-1]
        assert [entry.path for entry in entries(source.parts)] == expected
    assert expected[1:] == made
    last = entries(source.parts)[-1]
    assert isinstance(last, Raw)
    assert last == Raw("project", made[-1], last.content, kind="commit")
    assert last.content == (
        b"commit change 4\n\n"
        b"diff --git a/src/a.py b/src/a.py\n--- a/src/a.py\n+++ b/src/a.py\n@@ -1 +1 @@\n-a = 3\n+a = 4\n"
    )
    assert source.parts[0].licences() == {"LICENSE": b"free"}


def test_merges_are_no_documents_and_empty_commits_are_dropped(repository: Path) -> None:
    tiny.git(repository, "checkout", "-q", "-b", "side")
    commit(repository, "side", {"side.py": b"s = 1\n"})
    tiny.git(repository, "checkout", "-q", "main")
    commit(repository, "main", {"main.py": b"m = 1\n"})
    tiny.git(repository, "merge", "-q", "--no-edit", "side")
    empty = commit(repository, "nothing", {})
    binary = commit(repository, "binary", {"x.bin": b"\0\1"})
    read = entries(opened(git=str(repository), history=99).parts)
    assert len(read) == int(tiny.git(repository, "rev-list", "--count", "--no-merges", "HEAD"))
    assert {entry.path: entry.reason for entry in read if isinstance(entry, Drop)} == {
        empty: "no textual changes",
        binary: "no textual changes",
    }


def test_a_commit_holds_its_whole_message_and_textual_changes_but_no_names(repository: Path) -> None:
    message = "Fix it\n\nBody: because\n\nSigned-off-by: Some One <some@example.org>\nco-authored-by: X <x@y.z>\nCc: Q <q@y.z>"
    commit(
        repository, message, {"new.py": b"n = 1\n\xff\n", "x.bin": b"\0", "src/b.py": b"Binary files a and b differ\n"}
    )
    (repository / "src" / "a.py").rename(repository / "src" / "c.py")
    commit(repository, "Move", {})
    *_, fix, move = texts(opened(git=str(repository), history=2).parts).values()
    assert fix == (
        b"commit Fix it\n\nBody: because\n\n"
        b"diff --git a/new.py b/new.py\nnew file mode 100644\n--- /dev/null\n+++ b/new.py\n@@ -0,0 +1,2 @@\n+n = 1\n+\xff\n"
        b"diff --git a/src/b.py b/src/b.py\n--- a/src/b.py\n+++ b/src/b.py\n@@ -1 +1 @@\n-b = 1\n+Binary files a and b differ\n"
    )
    assert isinstance(move, bytes)
    assert b"deleted file mode 100644" in move
    assert b"test@example.org" not in fix + move
    assert b"rename" not in move


def test_reports_stand_in_front_of_the_commits_that_mention_them(repository: Path) -> None:
    commit(repository, "Fixes #12 and #7, see #12", {"src/a.py": b"a = 2\n"})
    commit(repository, "Fixes #99", {"src/a.py": b"a = 3\n"})
    commit(repository, "reports", {"issues/7.md": b"It fails.\n", "issues/12.md": b"It hangs.\n\n"})
    _, both, none, _ = texts(opened(git=str(repository), history=9, reports="issues/{number}.md").parts).values()
    assert isinstance(both, bytes)
    assert both.startswith(
        b"bug report:\nIt hangs.\n\nbug report:\nIt fails.\n\ncommit Fixes #12 and #7, see #12\n\ndiff "
    )
    assert isinstance(none, bytes)
    assert none.startswith(b"commit Fixes #99\n\ndiff ")
    _, plain, *_ = texts(opened(git=str(repository), history=9).parts).values()
    assert plain == both.partition(b"It fails.\n\n")[2]
    with pytest.raises(UserError, match=one_line("'issues.md'", "{number}")):
        opened(git=str(repository), history=9, reports="issues.md")


def test_a_commit_that_changes_too_much_or_is_broken_is_dropped(repository: Path) -> None:
    large = commit(repository, "large", {"large.txt": b"line\n" * 300})
    commit(repository, "edit", {"src/b.py": b"b = 2\n"})
    lost = key_of(repository, "src/b.py")
    after = commit(repository, "edit again", {"src/b.py": b"b = 3\n"})
    last = commit(repository, "last", {"z.py": b"z = 1\n"})
    damage(repository, lost)
    source = opened(git=str(repository), history=99)
    read = entries(source.parts)
    assert len(read) == 5
    why = reasons(source.parts)
    assert why.pop(large) == "over max_bytes"
    assert set(why.values()) == {BROKEN}
    assert len(why) == 2
    assert after in why
    assert last in texts(source.parts)


def test_a_broken_commit_hides_the_older_ones_and_says_so(repository: Path) -> None:
    second = commit(repository, "second", {"a": b"a"})
    commit(repository, "third", {"a": b"b"})
    fourth = commit(repository, "fourth", {"a": b"c"})
    object_file(repository, second).unlink()
    read = entries(opened(git=str(repository), history=9).parts)
    assert read[0] == Drop("project", f"before {fourth}", "read", BROKEN, 0)  # git looks one commit ahead
    assert [entry.path for entry in read[1:]] == [fourth]


def test_no_setting_of_a_repository_runs_a_program_or_changes_the_text(repository: Path, tmp_path: Path) -> None:
    commit(repository, "second", {"src/a.py": b"a = 2\n", ".gitattributes": b"*.py diff=bad filter=bad\n"})
    clean = [texts(opened(git=str(repository), history=9).parts), texts(opened(git=str(repository)).parts)]
    marker = tmp_path / "ran"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {marker}\nexit 1\n")
    program.chmod(0o755)
    for key in ("core.fsmonitor", "diff.external", "diff.bad.command", "diff.bad.textconv", "filter.bad.smudge", "filter.bad.process",
                "core.pager", "pager.log", "core.sshCommand", "gpg.program", "credential.helper", "remote.origin.uploadpack"):  # fmt: skip
        tiny.git(repository, "config", key, str(program))
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("post-checkout", "post-index-change", "reference-transaction"):
        (hooks / name).symlink_to(program)
    other = tmp_path / "other"
    other.mkdir()
    tiny.git(other, "init", "-q")
    for key, value in {
        "core.hooksPath": str(hooks), "log.showSignature": "true", "diff.noprefix": "true", "diff.renames": "copies", "diff.context": "0",
        "color.ui": "always", "core.quotePath": "true", "diff.algorithm": "patience", "protocol.allow": "always", "format.pretty": "fuller",
        "remote.origin.promisor": "true", "remote.origin.url": str(other), "extensions.partialClone": "origin",
        "core.repositoryFormatVersion": "1", "log.mailmap": "true",
    }.items():  # fmt: skip
        tiny.git(repository, "config", key, value)
    assert [texts(opened(git=str(repository), history=9).parts), texts(opened(git=str(repository)).parts)] == clean

    object_file(repository, key_of(repository, "src/b.py")).unlink()  # git would now fetch it, by that program
    source = opened(git=str(repository))
    assert reasons(source.parts) == {"src/b.py": BROKEN}
    assert not marker.exists()
    subprocess.run(["git", "-C", str(repository), "cat-file", "-p", "HEAD:src/b.py"], capture_output=True, check=False)
    assert marker.exists()  # as it does when asked in the usual way


def test_the_surroundings_do_not_lead_to_another_repository(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = write(repository / "plain", {"x.py": b"x"})
    with pytest.raises(UserError, match=one_line(plain, "not a git repository")):
        opened(git=str(plain))
    other = repository.parent / "other"
    other.mkdir()
    tiny.git(other, "init", "-q")
    commit(other, "first", {"other.py": b"x"})
    monkeypatch.setenv("GIT_DIR", str(repository / ".git"))
    assert list(texts(opened(git=str(other)).parts)) == ["other.py"]


@pytest.mark.parametrize("use", [opened, identity])
def test_what_is_no_repository_or_no_revision_is_refused(tmp_path: Path, repository: Path, use: object) -> None:
    assert callable(use)
    (tmp_path / "plain").mkdir()
    (tmp_path / "empty").mkdir()
    tiny.git(tmp_path / "empty", "init", "-q")
    with pytest.raises(UserError, match=one_line("'some'", tmp_path / "plain", "not a git repository")):
        use(git=str(tmp_path / "plain"))
    with pytest.raises(UserError, match=one_line("'some'", tmp_path / "empty", "has no commit 'HEAD'")):
        use(git=str(tmp_path / "empty"))
    for revision in ("v9", "--all", "HEAD:src"):
        with pytest.raises(UserError, match=one_line("'some'", repository, f"has no commit {revision!r}")):
            use(git=str(repository), revision=revision)
    with pytest.raises(UserError, match=one_line("'some'", "no folder", "nowhere' does not appear to be")):
        use(git=str(tmp_path / "nowhere"))


def test_an_empty_tree_is_refused(tmp_path: Path) -> None:
    tiny.git(tmp_path, "init", "-q")
    commit(tmp_path, "nothing", {})
    with pytest.raises(UserError, match=one_line("source 'some' holds no files", tmp_path)):
        opened(git=str(tmp_path))


def test_without_git_one_line_says_so(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(repository))
    with pytest.raises(UserError, match=one_line("git is not installed")):
        opened(git=str(repository))


def test_an_address_is_cloned_once_and_fetched_from_when_it_moves(repository: Path, tmp_path: Path) -> None:
    url, cache = f"file://{repository}", tmp_path / "cache"
    first = tiny.git(repository, "rev-parse", "HEAD").strip()
    tiny.git(repository, "tag", "-a", "v1", "-m", "one")
    source = opened(cache, git=url)
    assert (source.location, source.revision) == (f"git {url}", first)
    assert identity(git=url) == identity(git=url, revision="v1") == {"git": url, "commit": first}
    assert {entry.repository for entry in entries(source.parts)} == {"project"}
    assert texts(source.parts)["src/a.py"] == b"a = 1\n"

    second = commit(repository, "second", {"src/a.py": b"a = 2\n"})
    assert identity(git=url, revision="main") == {"git": url, "commit": second}
    assert texts(opened(cache, git=url).parts)["src/a.py"] == b"a = 2\n"
    assert texts(opened(cache, git=url, revision="v1").parts)["src/a.py"] == b"a = 1\n"
    assert len(entries(opened(cache, git=url, history=9).parts)) == 2

    repository.rename(tmp_path / "moved")
    assert entries(opened(cache, git=url, revision=first).parts) == entries(source.parts)  # needs no server
    with pytest.raises(UserError, match=one_line("'some'", url, "cannot be reached")):
        opened(cache, git=url)
    with pytest.raises(UserError, match=one_line("'some'", url, "git cannot fetch")):
        opened(cache, git=url, revision="0" * 40)
    with pytest.raises(UserError, match=one_line("'some'", url, "git cannot fetch")):
        opened(tmp_path / "other", git=url, revision=first)


def test_a_revision_that_an_address_does_not_have_is_refused(repository: Path, tmp_path: Path) -> None:
    url = f"file://{repository}"
    with pytest.raises(UserError, match=one_line(url, "no branch or tag 'v9'")):
        opened(tmp_path / "cache", git=url, revision="v9")
    with pytest.raises(UserError, match=one_line(url, "no branch or tag leads to", "f" * 40)):
        opened(tmp_path / "cache", git=url, revision="f" * 40)


def test_a_fetch_that_the_user_stopped_is_no_failure(tmp_path: Path) -> None:
    def stopped() -> None:
        raise Interrupted(2)

    reporter = Reporter(quiet=True)
    reporter.check_stop = stopped
    with pytest.raises(Interrupted):
        open_source(settings_of(git=f"file://{tmp_path}/nowhere"), 1000, tmp_path, reporter)


def test_passwords_in_addresses_are_not_shown() -> None:
    assert shown("https://me:secret@example.org/a.git") == "https://example.org/a.git"
    assert shown("https://me:sec@ret@example.org/a.git") == "https://example.org/a.git"
    assert shown("https://example.org/a@b.git") == "https://example.org/a@b.git"
    assert shown("git@example.org:a.git") == "git@example.org:a.git"


def test_where_a_shallow_clone_ends_there_are_no_changes(repository: Path, tmp_path: Path) -> None:
    for at in range(3):
        commit(repository, f"change {at}", {"src/a.py": b"a = %d\n" % (at + 2)})
    clone = tmp_path / "shallow"
    tiny.git(tmp_path, "clone", "-q", "--depth", "2", f"file://{repository}", str(clone))
    last = tiny.git(clone, "rev-list", "HEAD").split()
    for place in (str(clone), f"file://{clone}"):
        read = entries(opened(tmp_path / "cache", git=place, history=9).parts)
        assert [entry.path for entry in read] == last[::-1]
        assert [getattr(entry, "reason", None) for entry in read] == ["the clone is shallow", None]
        assert texts(opened(tmp_path / "cache", git=place).parts)["src/b.py"] == b"b = 1\n"


def test_a_broken_tree_in_a_folder_with_a_foreign_name_is_a_drop(repository: Path) -> None:
    name = os.fsdecode(b"caf\xe9/deep")
    (repository / name).mkdir(parents=True)
    (repository / name / "x.py").write_bytes(b"x")
    commit(repository, "more", {})
    object_file(repository, key_of(repository, name)).unlink()
    assert reasons(opened(git=str(repository)).parts) == {r"caf\xe9/deep/": BROKEN}


def test_worktrees_and_repositories_with_sha256_are_read(repository: Path, tmp_path: Path) -> None:
    tiny.git(repository, "worktree", "add", "-q", str(tmp_path / "tree"))
    assert texts(opened(git=str(tmp_path / "tree")).parts) == texts(opened(git=str(repository)).parts)
    new = tmp_path / "new"
    new.mkdir()
    tiny.git(new, "init", "-q", "--object-format=sha256")
    last = commit(new, "first", {"a.py": b"a = 1\n"})
    assert len(last) == 64
    for place in (str(new), f"file://{new}"):
        assert texts(opened(tmp_path / "cache", git=place, revision=last).parts) == {"a.py": b"a = 1\n"}
        assert list(texts(opened(tmp_path / "cache", git=place, history=1).parts)) == [last]


def test_a_message_with_a_zero_byte_ends_there(repository: Path) -> None:
    tree = tiny.git(repository, "rev-parse", "HEAD^{tree}").strip()
    written = f"tree {tree}\nauthor A <a@b.c> 0 +0000\ncommitter A <a@b.c> 0 +0000\n\nbefore\0after diff --git\n"
    making = ["git", "-C", str(repository), "hash-object", "-t", "commit", "-w", "--stdin", "--literally"]
    made = subprocess.run(making, input=written.encode(), capture_output=True, check=True).stdout.decode().strip()
    [text] = texts(opened(git=str(repository), revision=made, history=1).parts).values()
    assert isinstance(text, bytes)
    assert text.startswith(b"commit before\n\ndiff --git a/LICENSE b/LICENSE\n")


def test_a_message_that_is_a_list_of_reports_does_not_bring_them_all(repository: Path) -> None:
    numbers = range(1, 101)
    commit(repository, "reports", {f"issues/{number}.md": b"report %d\n" % number for number in numbers})
    commit(repository, " ".join(f"#{number}" for number in numbers), {"src/a.py": b"a = 2\n"})
    [text] = texts(opened(git=str(repository), history=1, reports="issues/{number}.md", most_bytes=9999).parts).values()
    assert isinstance(text, bytes)
    assert text.count(b"bug report:\nreport") == 20


def test_a_clone_in_the_cache_is_read_whatever_the_user_says_of_bare_repositories(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"home/.gitconfig": b"[safe]\n\tbareRepository = explicit\n"})
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    source = opened(tmp_path / "cache", git=f"file://{repository}")
    assert texts(source.parts) == texts(opened(git=str(repository)).parts)
