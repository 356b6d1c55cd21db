"""What is taken out is gone with its imports, and the package still imports."""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from etude.tasks.generators import deletion
from etude.tasks.generators.parsed import Parsed
from etude.tasks.task import Candidate

FILES = {
    "src/pkg/__init__.py": '''\
"""A package."""

from .area import (
    circle,  # the circle
    square,
    Shape,
)
from .text import *
from pkg.only import single

__all__ = ["circle", "square", "Shape",
           "single"]
''',
    "src/pkg/area.py": '''\
import math

from ._help import _scaled, shared


def decorate(function):
    function.marked = _mark()
    return function


def _mark():
    """Called while the package is imported."""
    mark = 1
    return mark


# comment of the circle
@decorate
def circle(r):
    """Area of a circle.

    Longer text.
    """
    # inner comment
    x = _scaled(r)
    return math.pi * x * _private(x)


def _private(x):
    y = x + shared(x)
    return y


def square(a):
    b = shared(a)
    c = b
    return b * c


class Shape:
    def area(self):
        a = 1
        b = 2
        return a + b

    def name(self):
        return "x"


class Round(Shape):
    def area(self):
        a = 1
        b = 2
        return a * b
''',
    "src/pkg/_help.py": "def _scaled(x):\n    y = x\n    z = y\n    return z\n\n\ndef shared(x):\n    y = x\n    z = y\n    return z\n",
    "src/pkg/only.py": "def single():\n    a = 1\n    b = 2\n    return a\n",
    "src/pkg/text.py": "def upper(t):\n    a = t\n    b = a\n    return b.upper()\n",
}


ALL = {path: set(range(1, 1000)) for path in FILES}  # lines that tests run


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    return tmp_path


def made(tree: Path, left_out: Counter[str]) -> dict[tuple[str, str], Candidate]:
    return {
        (c.kinds[0], c.about["name"] or c.about["path"]): c
        for c in deletion.candidates(tree, ["src/pkg"], random.Random(1), ALL, left_out)
    }


def broken(candidate: Candidate) -> dict[str, str | None]:
    return {edit.path.removeprefix("src/pkg/"): edit.broken for edit in candidate.edits}


def test_a_body_leaves_signature_and_docstring(tree: Path) -> None:
    candidate = made(tree, Counter())["body", "circle"]
    start, end = FILES["src/pkg/area.py"].split("    # inner comment\n")
    expected = start + "    raise NotImplementedError\n" + end[end.index("\n\n\ndef _private") + 1 :]
    assert broken(candidate) == {"area.py": expected}
    assert candidate.about["signature"] == "def circle(r)"
    assert candidate.about["docstring"] == "Area of a circle."
    assert [(s.name, s.first, s.last) for s in candidate.spans] == [("circle", 24, 26)]


def test_a_function_goes_from_imports_and_all_through_re_exports(tree: Path) -> None:
    edits = broken(made(tree, Counter())["function", "circle"])
    assert edits["__init__.py"] == FILES["src/pkg/__init__.py"].replace(
        "    circle,  # the circle\n    square", "    square"
    ).replace('"circle", ', "")
    area = edits["area.py"]
    assert area is not None
    assert "circle" not in area
    assert "_private" in area
    assert "return mark\n\n\ndef _private" in area


def test_helpers_that_nobody_else_uses_go_too_also_from_other_files(tree: Path) -> None:
    candidate = made(tree, Counter())["helpers", "circle"]
    edits = broken(candidate)
    assert sorted(candidate.about["names"]) == ["_private", "_scaled", "circle"]
    assert set(edits) == {"__init__.py", "area.py", "_help.py"}
    assert "from ._help import shared\n" in (edits["area.py"] or "")
    assert "def shared" in (edits["_help.py"] or "")


def test_a_module_goes_with_its_imports(tree: Path) -> None:
    edits = broken(made(tree, Counter())["module", "src/pkg/only.py"])
    assert edits["only.py"] is None
    assert edits["__init__.py"] == FILES["src/pkg/__init__.py"].replace("from pkg.only import single\n", "").replace(
        ',\n           "single"', ""
    )
    assert "import *" not in (broken(made(tree, Counter())["module", "src/pkg/text.py"])["__init__.py"] or "import *")


def test_what_importing_needs_is_left_and_counted(tree: Path) -> None:
    left_out: Counter[str] = Counter()
    candidates = made(tree, left_out)
    assert ("function", "decorate") not in candidates
    assert ("class", "Shape") not in candidates, "Round derives from it"
    assert ("class", "Round") in candidates
    assert ("function", "_mark") not in candidates, "a decorator calls it"
    assert left_out["class: used while the package is imported"] == 1
    assert left_out["function: used while the package is imported"] == 1


def test_every_candidate_parses_differs_and_imports(tree: Path) -> None:
    candidates = list(deletion.candidates(tree, ["src/pkg"], random.Random(1), ALL, Counter()))
    assert {c.kinds[0] for c in candidates} == {*deletion.LEVELS}
    assert candidates == list(deletion.candidates(tree, ["src/pkg"], random.Random(1), ALL, Counter()))
    run = []
    for number, candidate in enumerate(candidates):
        folder = tree / f"broken{number}" / "pkg"
        for path, text in FILES.items():
            edits = {edit.path: edit.broken for edit in candidate.edits}
            if (kept := edits.get(path, text)) is not None:
                folder.mkdir(parents=True, exist_ok=True)
                folder.joinpath(Path(path).name).write_text(kept, encoding="utf-8")
        for edit in candidate.edits:
            assert edit.fixed == FILES[edit.path]
            assert edit.broken is None or ast.dump(ast.parse(edit.broken)) != ast.dump(ast.parse(edit.fixed))
        run.append(
            f"sys.path.insert(0, {str(folder.parent)!r})\nimport pkg\n[sys.modules.pop(m) for m in list(sys.modules) if m.startswith('pkg')]"
        )
    subprocess.run([sys.executable, "-B", "-c", "import sys\n" + "\n".join(run)], check=True)


def test_only_what_tests_run_is_taken(tree: Path) -> None:
    covered = {"src/pkg/area.py": {36}}  # in square
    candidates = list(deletion.candidates(tree, ["src/pkg"], random.Random(1), covered, Counter()))
    assert {(c.kinds[0], c.about["name"]) for c in candidates} == {
        ("body", "square"),
        ("function", "square"),
        ("module", ""),
    }


def test_parts_go_out_of_a_list_whatever_their_number() -> None:
    file = Parsed("x.py", "from a import (b, c as d,\n    e, f)  # g\n")
    names = [node for node in ast.walk(file.tree) if isinstance(node, ast.alias)]
    for mask in range(1, 15):
        gone = {i for i in range(4) if mask >> i & 1}
        left = ast.walk(ast.parse(file.cut(deletion.fewer(file, names, gone))))
        assert [node.name for node in left if isinstance(node, ast.alias)] == [
            n.name for i, n in enumerate(names) if i not in gone
        ]
