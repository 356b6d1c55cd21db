from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.rewards.quality import churn, decisions, hunks, measure, owners, size, touched
from etude.tasks.generators.parsed import LARGEST_FILE

BEFORE = textwrap.dedent("""
    import os


    class Box:
        def size(self):
            return os.path.getsize(self.path) + 1

        def name(self):
            return os.path.basename(self.path)


    def far(x):
        return [x]
""").lstrip()
REFERENCE = BEFORE.replace(" + 1", "")
SAME: dict[str, Any] = {"a.py": (BEFORE, REFERENCE)}
LINES = st.lists(st.sampled_from(["a", "b", "c", ""]), max_size=12)


def quality(change: dict[str, Any], reference: dict[str, Any] = SAME) -> dict[str, Any]:
    return asdict(measure(change, reference, ("tests", "conftest.py")))


@given(LINES, LINES)
def test_hunks_turn_one_text_into_the_other(before: list[str], after: list[str]) -> None:
    texts = "\n".join(before), "\n".join(after)
    old, new = (text.splitlines() for text in texts)
    made, end = [], 0
    for i, j, k, m in hunks(texts):
        made += old[end:i] + new[k:m]
        end = j
    assert made + old[end:] == new
    assert (size({"a": texts}) == 0) == (old == new)


def test_the_reference_itself_has_nothing_to_blame() -> None:
    found = quality(SAME)
    assert (found.pop("lines"), found.pop("reference_lines"), found.pop("files")) == (2, 2, 1)
    assert set(found.values()) == {0}


def test_nothing_changed_is_nothing() -> None:
    found = quality({})
    assert found["comment_density"] is None
    assert (found["lines"], found["files"], found["lint"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("import sys", {"lint": 1}),
        ("import sys  # noqa", {"lint": 1, "comment_density": 1 / 2}),
        ("print(os)", {"debug_prints": 1}),
        ("breakpoint()", {"debug_prints": 1}),
        ("# x = far(1)", {"commented_code": 1, "comment_density": 1 / 2}),
        ("# why it is so", {"comment_density": 1 / 2}),
        ("x = os.name and os.sep if os else 1", {"complexity": 2}),
    ],
)
def test_one_line_too_many_is_seen_as_what_it_is(line: str, wrong: dict[str, float]) -> None:
    fixed = quality(SAME)
    found = quality({"a.py": (BEFORE, REFERENCE.replace("import os\n", f"import os\n{line}\n"))})
    assert {name: value for name, value in found.items() if value != fixed[name]} == {"lines": 3, **wrong}


def test_findings_that_were_there_or_that_the_reference_adds_are_not_blamed() -> None:
    old = "import sys\nprint(1)\n"
    assert quality({"a.py": (old, f"\n\n{old}")}, {})["lint"] == 0
    printing = {"a.py": (old, f"{old}print(2)\n")}
    assert quality(printing, printing)["debug_prints"] == 0
    assert quality(printing, {})["debug_prints"] == 1


def test_what_the_reference_leaves_alone_is_unrelated() -> None:
    after = REFERENCE.replace("[x]", "[x, x]").replace("basename", "dirname") + "\n\ndef helper():\n    return 1\n"
    found = quality({"a.py": (BEFORE, after), "b.py": ("x = 1\n", "x = 2\n"), "tests/test_a.py": (None, "x = 1\n")})
    assert (found["unrelated_functions"], found["unrelated_files"], found["files"]) == (2, 1, 2)  # a helper is welcome


@pytest.mark.parametrize(
    ("path", "before", "scratch"),
    [("repro_bug.py", None, 1), ("src/a.py.orig", None, 1), ("test_it.py", None, 1), ("src/new.py", None, 0),
     ("tests/test_it.py", None, 0), ("debug.py", "x = 1\n", 0)],
)  # fmt: skip
def test_new_files_with_telling_names_are_leftovers(path: str, before: str | None, scratch: int) -> None:
    assert quality({path: (before, "x = 2\n")})["scratch_files"] == scratch


def test_files_that_are_no_longer_python_are_counted_and_nothing_else_of_them() -> None:
    found = quality(
        {"a.py": (BEFORE, BEFORE.replace("def far(x):", "def far(x:")), "b.py": (None, "\0"), "c.txt": (None, "def (")}
    )
    assert (found["unparsable"], found["complexity"], found["lint"]) == (2, 0, 0)


@pytest.mark.parametrize(
    "text", ["x = " + "+".join(["a"] * 5000), "if a:\n    b\n" + "elif a:\n    b\n" * 900, "(" * 5000, "\n" * 50_000]
)
def test_odd_files_break_nothing(text: str) -> None:
    found = quality({"a.py": (BEFORE, text), "b.py": (text, text + "y")})
    assert found["lines"] > 0
    assert found["unparsable"] == bool(text.strip())


def test_names_a_model_chose_reach_no_file_system() -> None:
    assert quality({"../../etc/x.py": (None, "import os\n"), "a\n/__init__.py": (None, "import os\n")})["lint"] == 2


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ("f(a, b)", "f(\n    a,\n    b,\n)", 5),
        ("x = 'a b'", 'x = "a b"', 2),
        ("x = 'a b'", "x = 'ab'", 0),
        ("x=1", "x = 1", 2),
        ("if a:\n    b\n    c", "if a:\n    b\nc", 0),
        ("(a + b) * c", "a + b * c", 0),
        ("a", "\n\na", 2),
        ("a  # why", "a  # how", 0),
        ("a\nb", "a", 0),
        ("else :", "else:", 0),  # does not stand alone: not told from other changes
    ],
)
def test_layout_is_told_from_meaning(before: str, after: str, lines: int) -> None:
    assert churn((before, after)) == lines


def test_lines_belong_to_the_innermost_function() -> None:
    text = "@wrap\ndef f():\n    def g():\n        pass\n    return g\n\nclass C:\n    x = 1\n    async def h(self):\n        pass\n"
    assert owners(text) == {0: "f", 1: "f", 2: "f.g", 3: "f.g", 4: "f", 8: "C.h", 9: "C.h"}
    assert touched((text, text.replace("x = 1", "x = 2").replace("@wrap\n", ""))) == {"f"}


@pytest.mark.parametrize(
    ("code", "points"),
    [
        ("if a:\n  b\nelif c:\n  d\nelse:\n  e", 2), ("x = a if b else c", 1), ("for a in b:\n  c\nelse:\n  d", 2), ("while a:\n  b", 1),
        ("try:\n  a\nexcept B:\n  c\nexcept D:\n  e\nelse:\n  f\nfinally:\n  g", 3), ("a and b and c or d", 3), ("assert a", 1),
        ("[a for b in c if d if e for f in g]", 4), ("match a:\n  case 1:\n    b\n  case _:\n    c", 1), ("with a:\n  b", 0),
    ],
)  # fmt: skip
def test_decision_points_by_hand(code: str, points: int) -> None:
    assert decisions(ast.parse(code)) == points


def test_decision_points_as_radon_counts_them() -> None:
    radon = pytest.importorskip("radon.visitors", reason="radon is not a dependency")
    for module in (ast, textwrap):
        tree = ast.parse(inspect.getsource(module))
        counted = {each.lineno: each.complexity for each in radon.ComplexityVisitor.from_ast(tree).functions}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not any(isinstance(each, ast.FunctionDef | ast.Assert) for part in node.body for each in ast.walk(part)):  # fmt: skip
                assert 1 + sum(map(decisions, node.body)) == counted[node.lineno]


def test_a_file_too_long_to_be_code_is_not_read_as_code() -> None:
    long = "".join(f"value_{number} = {number}  # {number}\n" for number in range(20_000))
    found = measure({"a.py": ("x = 1\n", long)}, {"a.py": ("x = 1\n", "x = 2\n")})
    assert len(long) > LARGEST_FILE
    assert (found.lines, found.unparsable, found.lint, found.complexity) == (20_001, 1, 0, 0)
    assert hunks((long, long + "y = 1\n")) == [(0, 20_000, 0, 20_001)]
    assert hunks((long, long)) == []
    shorter = long[: LARGEST_FILE // 2].rpartition("\n")[0] + "\n"
    assert hunks((shorter, shorter + "y = 1\n")) == [
        (shorter.count("\n"),) * 2 + (shorter.count("\n"), shorter.count("\n") + 1)
    ]
