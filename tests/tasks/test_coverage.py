from __future__ import annotations

from etude.tasks.make import Coverage
from etude.tasks.task import Edit

TEXT = "import x\n\n\ndef f():\n    return 1\n\n\ndef g():\n    return 2\n"
COVERED = Coverage({"a.py": {"": [1, 4, 8], "t::f": [5], "t::g": [9], "t::both": [5, 9]}, "b.py": {"t::b": [1]}})


def edit(old: str, new: str) -> Edit:
    return Edit("a.py", TEXT.replace(old, new), TEXT)


def test_only_tests_that_run_a_changed_line_can_see_it() -> None:
    assert COVERED.tests_of([edit("return 1", "return 3")]) == {"t::f", "t::both"}
    assert COVERED.tests_of([edit("return 2", "pass")]) == {"t::g", "t::both"}
    assert COVERED.tests_of([edit("return 1", "return 3"), Edit("b.py", "x = 1\n", "x = 2\n")]) == {
        "t::f",
        "t::both",
        "t::b",
    }


def test_a_change_on_import_can_be_seen_by_all() -> None:
    assert COVERED.tests_of([edit("import x", "import y")]) is None
    assert COVERED.tests_of([edit("def g()", "def h()")]) is None
    assert COVERED.tests_of([Edit("a.py", None, TEXT)]) is None
    assert COVERED.tests_of([Edit("data.json", "1", "2")]) is None


def test_lines_run_by_tests_leave_out_those_run_on_import() -> None:
    assert COVERED.run_by_tests() == {"a.py": {5, 9}, "b.py": {1}}
    assert COVERED.tests_of_file("a.py") == {"t::f", "t::g", "t::both"}
