"""Commits that change source and tests together, undone."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest

from etude.errors import UserError
from etude.tasks.generators import history
from etude.tasks.task import Edit


class Repository:
    """A real repository."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.git("init", "-q", "-b", "main")

    def git(self, *words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *identity, *words], cwd=self.root, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(self, message: str, **files: str | bytes | None) -> str:
        for name, content in files.items():
            path = self.root / (name.replace("__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "r")
    made.commit("first", pkg__a="def f():\n    return 1\n", pkg__old="x = 1\n", tests__test_a="a")
    return made


def test_a_fix_is_undone_and_its_message_told_without_references(repository: Repository) -> None:
    parent = repository.git("rev-parse", "HEAD")
    name = repository.commit(
        "Fix f for zero (#12)\n\nReverts deadbeef12.\n\nSigned-off-by: A <a@b>",
        pkg__a="def f():\n    return 2\n",
        tests__test_a="b",
    )
    (candidate,) = history.candidates(repository.root, ["pkg"], Counter())
    assert candidate.edits == (Edit("pkg/a.py", "def f():\n    return 1\n", "def f():\n    return 2\n"),)
    assert (candidate.about["commit"], candidate.about["parent"]) == (name, parent)
    assert candidate.about["subject"] == "Fix f for zero"
    assert "deadbeef" not in candidate.about["body"]
    assert "Signed" not in candidate.about["body"]
    assert [(s.name, s.first, s.last) for s in candidate.spans] == [("f", 2, 2)]


def test_a_merged_branch_is_one_change_under_the_title_its_author_gave_it(repository: Repository) -> None:
    repository.git("checkout", "-q", "-b", "side")
    repository.commit("wip", pkg__a="def f():\n    return 2\n")
    last = repository.commit("tests", tests__test_a="b", pkg__b="y = 2\n")
    repository.git("checkout", "-q", "main")
    repository.git(
        "merge", "-q", "--no-ff", "-m", "Merge pull request #7 from me/side\n\nMake f return 2\n\nIt was wrong.", "side"
    )
    left_out: Counter[str] = Counter()
    (candidate,) = history.candidates(repository.root, ["pkg"], left_out)
    assert candidate.edits == (
        Edit("pkg/a.py", "def f():\n    return 1\n", "def f():\n    return 2\n"),
        Edit("pkg/b.py", None, "y = 2\n"),
    )
    assert (candidate.about["subject"], candidate.about["body"]) == ("Make f return 2", "It was wrong.")
    assert candidate.about["tests"] == ["tests/test_a.py"]
    assert not list(history.candidates(repository.root, ["pkg"], left_out, least=4))
    assert left_out["commit is too small"] == 1
    (other,) = history.candidates(repository.root, ["pkg"], left_out, head=last)
    assert (other.about["commit"], other.about["subject"]) == (last, "tests")


def test_a_rename_is_a_removal_and_an_addition(repository: Repository) -> None:
    repository.commit("Rename", pkg__old=None, pkg__new="x = 1\n", tests__test_a="b")
    (candidate,) = history.candidates(repository.root, ["pkg"], Counter())
    assert candidate.edits == (Edit("pkg/new.py", None, "x = 1\n"), Edit("pkg/old.py", "x = 1\n", None))


def test_what_makes_no_task_is_counted_by_reason(repository: Repository) -> None:
    repository.commit("source only", pkg__a="def f():\n    return 3\n")
    repository.commit("tests only", tests__test_a="c")
    repository.commit("comment", pkg__a="def f():\n    return 3  # three\n", tests__test_a="d")
    repository.commit("binary", pkg__b=b"\0\1", tests__test_a="e")
    repository.commit("not python", pkg__c="def (\n", tests__test_a="f")
    repository.commit("large", pkg__d="".join(f"x{i} = {i}\n" for i in range(700)), tests__test_a="g")
    repository.commit("many", **{f"pkg__m{i}": "x = 1\n" for i in range(50)}, tests__test_a="h")
    repository.git("checkout", "-q", "-b", "side", "HEAD~1")
    repository.commit("side", pkg__side="x = 1\n")
    repository.git("checkout", "-q", "main")
    repository.git("merge", "-q", "--no-ff", "-m", "merge", "side")
    left_out: Counter[str] = Counter()
    assert list(history.candidates(repository.root, ["pkg"], left_out)) == []
    assert left_out == {
        "commit changes no tests": 2, "commit changes no source": 1, "commit changes no meaning": 1, "commit has a long or binary file": 1,
        "commit is not Python of this version": 1, "commit is too large": 1, "commit changes too many files": 1,
        "commit is the first": 1,
    }  # fmt: skip


def test_a_folder_without_a_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no git repository"):
        list(history.commits(tmp_path, Counter()))
