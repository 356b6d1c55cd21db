"""An agent's changes: git itself reads the diff, and hostile paths reach nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agent.changes import apply, unified
from etude.errors import UserError
from etude.sandbox.box import Entry

NAMES = st.sampled_from(["a.py", "b.txt", "sub/c.py", "sub/deep/d", "e"])
TEXTS = st.text(alphabet="ab \n\r\t\u2028é", max_size=40)
TREES = st.dictionaries(NAMES, TEXTS, max_size=5)


def write(folder: Path, tree: dict[str, str]) -> Path:
    """Write files byte for byte."""
    folder.mkdir(parents=True)
    for name, text in tree.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    return folder


def read(folder: Path) -> dict[str, str]:
    """Return all files."""
    files = [each for each in folder.rglob("*") if each.is_file() and ".git" not in each.parts]
    return {str(each.relative_to(folder)): each.read_bytes().decode() for each in files}


def between(old: dict[str, str], new: dict[str, str]) -> list[Entry]:
    """Return the entries of a diff, by brute force."""
    gone = [Entry(name, "gone") for name in old.keys() - new.keys()]
    files = [Entry(n, "file", mode=0o644, content=t.encode()) for n, t in new.items() if old.get(n) != t]
    return sorted(gone + files, key=lambda each: each.path)


@settings(max_examples=40, deadline=None)
@given(TREES, TREES)
def test_git_applies_the_diff_and_apply_gives_the_same(
    tmp_path_factory: pytest.TempPathFactory, old: dict[str, str], new: dict[str, str]
) -> None:
    top = tmp_path_factory.mktemp("changes")
    layer, mine, theirs = write(top / "layer", old), write(top / "mine", old), write(top / "theirs", old)
    entries = between(old, new)
    empties = [n for n in new if new[n] == "" and n not in old] + [n for n in old if old[n] == "" and n not in new]
    text = unified(entries, [layer])
    if text and not empties:  # an empty file has no hunk for git to read
        subprocess.run(["git", "init", "-q"], cwd=theirs, check=True)
        done = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", "-"],
            cwd=theirs,
            input=text.encode(),
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert read(theirs) == new
    assert apply(entries, mine, layer) == len(entries)
    assert read(mine) == new
    shutil.rmtree(top)


@pytest.mark.parametrize(
    "entry",
    [
        Entry("/etc/x", "file", content=b""),
        Entry("../x", "file", content=b""),
        Entry("a/../../x", "file", content=b""),
        Entry(".git/hooks/pre-commit", "file", content=b"#!/bin/sh"),
        Entry("out/x", "file", content=b"behind a link"),
        Entry("fifo", "other"),
        Entry("to", "link", content=b"/etc/passwd"),
        Entry("to", "link", content=b"../../x"),
        Entry("mine.py", "file", content=b"theirs"),
        Entry("new.py", "file", content=b"theirs"),
    ],
    ids=lambda entry: entry.path,
)
def test_nothing_is_written_where_one_entry_is_wrong(tmp_path: Path, entry: Entry) -> None:
    layer = write(tmp_path / "layer", {"mine.py": "as it was"})
    folder = write(tmp_path / "repo", {"mine.py": "changed meanwhile", "new.py": "made meanwhile"})
    (tmp_path / "outside").mkdir()
    (folder / "out").symlink_to(tmp_path / "outside")
    good = Entry("good.py", "file", mode=0o644, content=b"good")
    with pytest.raises(UserError, match="nothing was applied"):
        apply([good, entry], folder, layer)
    assert read(folder) == {"mine.py": "changed meanwhile", "new.py": "made meanwhile"}
    assert not list((tmp_path / "outside").iterdir())


def test_a_removed_folder_keeps_what_was_never_in_the_layer(tmp_path: Path) -> None:
    layer = write(tmp_path / "layer", {"p/a.py": "a", "p/q/b.py": "b"})
    folder = write(tmp_path / "repo", {"p/a.py": "a", "p/q/b.py": "b", "p/local.env": "the user's own"})
    apply([Entry("p", "gone")], folder, layer)
    assert read(folder) == {"p/local.env": "the user's own"}


def test_modes_links_and_folders_are_written(tmp_path: Path) -> None:
    layer, folder = write(tmp_path / "layer", {}), write(tmp_path / "repo", {})
    run = Entry("bin/run", "file", mode=0o755, content=b"#!/bin/sh\n")
    apply([Entry("bin", "folder"), run, Entry("link", "link", content=b"bin/run")], folder, layer)
    assert os.access(folder / "bin/run", os.X_OK)
    assert (folder / "link").readlink() == Path("bin/run")


def test_a_binary_file_is_named_and_odd_names_stay_one_line(tmp_path: Path) -> None:
    layer = write(tmp_path / "layer", {})
    text = unified([Entry("b", "file", content=b"\xff\x00"), Entry("n\nm\udcff", "file", content=b"x\n")], [layer])
    assert "Binary files /dev/null and b/b differ" in text
    assert "+++ b/n\\nm\\xff" in text


def test_a_change_of_mode_alone_is_shown_and_applied(tmp_path: Path) -> None:
    layer, folder = write(tmp_path / "layer", {"run": "x\n"}), write(tmp_path / "repo", {"run": "x\n"})
    entries = [Entry("run", "file", mode=0o755, content=b"x\n")]
    assert unified(entries, [layer]) == "diff --git a/run b/run\nold mode 100644\nnew mode 100755\n"
    apply(entries, folder, layer)
    assert os.access(folder / "run", os.X_OK)
