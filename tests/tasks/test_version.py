"""Differences of releases: real changes are kept, reformatting and versions are not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from etude.tasks.generators import history
from etude.tasks.task import Candidate, Edit

OLD = '''\
"""Doc."""
__version__ = "1.0"


def one(a):
    return a


def two(a):
    return a + 1


class Kept:
    x = 1
    y = 2
    z = 3
    v = 4


def three(a):
    b = a
    return b
'''
NEW = OLD.replace('"1.0"', '"1.1"').replace("return a\n", "return -a\n").replace("    b = a\n", "    b = a or 0\n")


def release(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def test_a_release_is_its_changed_files_with_the_newer_version_in_them(tmp_path: Path) -> None:
    shared = {"pkg__test_a_dot_py": "old"}
    older = release(
        tmp_path / "a", pkg__a_dot_py=OLD, pkg__same_dot_py="x = 'a'\n", pkg__gone_dot_py="y = 1\n", **shared
    )
    newer = release(
        tmp_path / "b",
        pkg__a_dot_py=NEW,
        pkg__same_dot_py='"""New."""\nx = "a"  # b\n',
        pkg__new_dot_py="z = 1\n",
        pkg__test_a_dot_py="new",
    )
    candidate = history.candidate_between(older, newer, ["pkg"], Counter())
    assert candidate is not None
    assert candidate.edits == (
        Edit("pkg/a.py", OLD.replace('"1.0"', '"1.1"'), NEW),
        Edit("pkg/gone.py", "y = 1\n", None),
        Edit("pkg/new.py", None, "z = 1\n"),
    )
    assert candidate.about["names"] == ["one", "three"]


def test_reformatting_versions_and_lost_names_make_no_task(tmp_path: Path) -> None:
    left_out: Counter[str] = Counter()
    older = release(tmp_path / "a", pkg__a_dot_py=OLD)
    newer = release(tmp_path / "b", pkg__a_dot_py=OLD.replace("1.0", "1.1").replace("a + 1", "(a+1)  # more"))
    assert history.candidate_between(older, newer, ["pkg"], left_out) is None
    many = "".join(f"def f{i}(): pass\n" for i in range(history.MOST_LOST + 1))
    assert history.candidate_between(release(tmp_path / "c", pkg__a_dot_py=many), newer, ["pkg"], left_out) is None
    assert history.candidate_between(release(tmp_path / "d", pkg__a_dot_py="def (\n"), newer, ["pkg"], left_out) is None
    assert {k: n for k, n in left_out.items() if n} == {
        "release changes no meaning": 1, "release drops public names": 1, "release is not Python of this version": 1,
    }  # fmt: skip


def test_meaning_is_not_lost_with_docstrings() -> None:
    assert history.same_meaning("a.py", 'def f():\n    "a"\n    return 1\n', "def f():\n    return 1\n")
    assert not history.same_meaning("a.py", "x = 1\n", "x = 2\n")
    assert not history.same_meaning("a.txt", "x = 1\n", "x = 1 \n")


def test_pieces_are_single_hunks_that_add_up_to_the_change(tmp_path: Path) -> None:
    older = release(tmp_path / "a", pkg__a_dot_py=OLD, pkg__b_dot_py="x = 1\n", CHANGES_dot_md="- old entry here\n")
    log = (
        "# 1.1\n- Fix `three()` for empty input (#12, by @me)\n- [Something](http://x) else is new\n- old entry here\n"
    )
    newer = release(tmp_path / "b", pkg__a_dot_py=NEW, pkg__b_dot_py="x = 2\n", CHANGES_dot_md=log)
    whole = history.candidate_between(older, newer, ["pkg"], Counter())
    assert whole is not None
    assert whole.about["changelog"] == ["Fix three for empty input", "Something else is new"]
    parts = list(history.pieces(whole))
    assert [(p.kinds[0], [e.path for e in p.edits]) for p in parts] == [
        ("release", ["pkg/a.py", "pkg/b.py"]), ("file", ["pkg/a.py"]), ("file", ["pkg/b.py"]), ("hunk", ["pkg/a.py"]), ("hunk", ["pkg/a.py"]),
    ]  # fmt: skip
    one, three = (p.edits[0].broken for p in parts[-2:])
    assert one == NEW.replace("return -a\n", "return a\n")
    assert three == NEW.replace("b = a or 0", "b = a")
    assert [p.about["names"] for p in parts[-2:]] == [["one"], ["three"]]
    assert "three" in parts[-1].about["changelog"][0]
    assert parts[-2].about["changelog"] == []


def test_a_release_that_is_too_large_comes_in_pieces_only() -> None:
    rows = "".join(f"x{i} = {i}\n" for i in range(history.MOST_LINES + 1))
    edit = Edit("a.py", OLD, OLD.replace("a + 1", "a + 2").replace("return a\n", "return -a\n") + rows)
    parts = list(history.pieces(Candidate("version", ("release",), (edit,), ())))
    assert [part.kinds for part in parts] == [("hunk",)]
    assert [(span.name, span.first) for span in parts[0].spans] == [("one", 6), ("two", 10)]


def test_changelog_entries_lose_their_references() -> None:
    lines = history._entries(
        "* Added a thing that works, see `PR <https://x>`_ (issue12, by joe)\n  over two lines. Thanks to joe!\n* short\n- 522: Fix the regression\n"
    )
    assert list(lines) == ["Added a thing that works, see PR over two lines", "Fix the regression"]
