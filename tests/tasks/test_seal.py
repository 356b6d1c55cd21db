"""The gate finds every planted leak, and nothing in a clean tree."""

from __future__ import annotations

import py_compile
import shutil
from pathlib import Path

import pytest

from etude.tasks import seal
from etude.tasks.task import Candidate, Codebase, Edit

HELPER = "def helper(value):\n    return [item for item in value if item]\n"
SOLVED = f'''{HELPER}

def wanted(first, second):
    """Return the documented sum of first and second as everybody knows."""
    # a comment that is long enough to make a run of eight words of its own
    total = first * 3 + second * 7 - helper([first, second])[0]
    return {{"total": total, "first": first, "second": second}}
'''
BROKEN = SOLVED.replace("first * 3 + second * 7", "first * 3 - second * 7")


@pytest.fixture
def codebase(tmp_path: Path) -> Codebase:
    tree = tmp_path / "pristine"
    (tree / "my_pkg").mkdir(parents=True)
    (tree / "my_pkg" / "a.py").write_text(SOLVED, encoding="utf-8")
    (tree / "my_pkg" / "build.py").write_text("x = 1\n", encoding="utf-8")
    (tree / "tests").mkdir()
    (tree / "tests" / "test_a.py").write_text("def test_a():\n    assert wanted(1, 2) == {}\n", encoding="utf-8")
    (tree / "README.md").write_text(
        "Return the documented sum of first and second as everybody knows.\n", encoding="utf-8"
    )
    return Codebase("My-Pkg", "1", "d", tree, ("my_pkg",), ("tests",), Path("python"))


@pytest.fixture
def candidate() -> Candidate:
    return Candidate("mutation", ("binop",), (Edit("my_pkg/a.py", BROKEN, SOLVED),), ())


@pytest.fixture
def visible(codebase: Codebase, tmp_path: Path) -> Path:
    tree = tmp_path / "visible"
    shutil.copytree(codebase.tree, tree)
    (tree / "my_pkg" / "a.py").write_text(BROKEN, encoding="utf-8")
    return tree


def test_a_clean_tree_passes(visible: Path, candidate: Candidate, codebase: Codebase) -> None:
    assert seal.gate(visible, candidate, codebase) == []


@pytest.mark.parametrize(
    "path", ["docs/a.txt", "build/lib/my_pkg/a.py", "my_pkg/a.py.orig", "notes", "my_pkg/_vendor/z.py"]
)
def test_the_solution_anywhere_in_the_tree_is_found(
    visible: Path, candidate: Candidate, codebase: Codebase, path: str
) -> None:
    (visible / path).parent.mkdir(parents=True, exist_ok=True)
    (visible / path).write_text(SOLVED, encoding="utf-8")
    assert any(leak.startswith((path, "build")) for leak in seal.gate(visible, candidate, codebase))


def test_one_line_of_the_solution_is_enough_whatever_the_spaces(
    visible: Path, candidate: Candidate, codebase: Codebase
) -> None:
    (visible / "hint.md").write_text("try\n\ttotal   = first * 3\n + second * 7\n", encoding="utf-8")
    assert seal.gate(visible, candidate, codebase) == ["hint.md: holds 2 runs of the solution"]


def test_what_cleaning_removes_is_what_the_gate_refuses(
    visible: Path, candidate: Candidate, codebase: Codebase, tmp_path: Path
) -> None:
    py_compile.compile(str(visible / "my_pkg" / "a.py"), doraise=True)
    (tmp_path / "outside").write_text("x", encoding="utf-8")
    (visible / "link").symlink_to(tmp_path / "outside")
    for name in (
        "My_Pkg.egg-info/SOURCES.txt",
        "build/x",
        "my_pkg/.mypy_cache/a.json",
        "a.rej",
        "old.whl",
        ".coverage",
        "env/pyvenv.cfg",
    ):
        (visible / name).parent.mkdir(parents=True, exist_ok=True)
        (visible / name).write_text("x", encoding="utf-8")
    (visible / "my_pkg" / "dist").mkdir()
    (visible / "my_pkg" / "dist" / "__init__.py").write_text("", encoding="utf-8")
    (visible / ".git").mkdir()
    assert len(seal.gate(visible, candidate, codebase)) == 9 + 1
    assert sum(seal.clean(visible).values()) == 9 + 1
    assert seal.gate(visible, candidate, codebase) == []
    kept = sorted(path.relative_to(visible).as_posix() for path in visible.rglob("*") if path.is_file())
    assert kept == ["README.md", "my_pkg/a.py", "my_pkg/build.py", "my_pkg/dist/__init__.py", "tests/test_a.py"]


def test_copies_in_an_environment_are_found_by_content_and_by_name(
    candidate: Candidate, codebase: Codebase, tmp_path: Path
) -> None:
    def environment(name: str, **files: str) -> list[str]:
        for path, text in {"python3/site-packages/dep/a.py": HELPER, **files}.items():
            at = tmp_path / name / path
            at.parent.mkdir(parents=True, exist_ok=True)
            at.write_text(text, encoding="utf-8")
        return seal.gate(tmp_path / name, candidate, codebase, environment=True)

    assert environment("clean") == []
    assert environment("idiom", **{"python3/z.py": "q = first * 3 + second * 7 - 1\n"}) == []
    (found,) = environment("vendored", **{"python3/site-packages/dep/other.py": SOLVED.replace("    ", "\t")})
    assert found.startswith("python3/site-packages/dep/other.py: holds")
    for path in (
        "my_pkg/__init__.py",
        "my_pkg-1.0.dist-info/RECORD",
        "dep/_vendor/my_pkg.py",
        "My.Pkg-1.0.tar.gz",
        "__pycache__/my_pkg.cpython-311.pyc",
    ):
        (found,) = environment(path.replace("/", "-"), **{f"python3/site-packages/{path}": "x"})
        assert "bears the name" in found


def test_form_feeds_and_comments_do_not_shift_code() -> None:
    text = "a = 1  # one\n\f\nb = 2  # two \x1c three\nc = '" + "x" * 40 + "'\nd = 4\n"
    assert "".join(seal.code_pieces("a.py", text)).split() == ["a", "=", "1", "b", "=", "2", "c", "=", "d", "=", "4"]


def test_an_added_file_is_all_solution_and_repeated_code_is_none(codebase: Codebase) -> None:
    added = Candidate("deletion", ("module",), (Edit("my_pkg/a.py", None, SOLVED),), ())
    repeated = Candidate("deletion", ("function",), (Edit("my_pkg/a.py", "", "x = 1\n"),), ())
    assert len(seal.solution_runs(added, codebase)) > 30
    assert len(seal.solution_runs(repeated, codebase)) == 0
