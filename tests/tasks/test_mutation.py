"""Mutations change the spans they name and nothing else, in code that tests can see."""

from __future__ import annotations

import ast
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import etude
from etude.tasks.generators import mutation
from etude.tasks.generators.parsed import Cut, Parsed, changed_lines, is_test_path

SOURCE = '''\
"""A module."""

LIMIT = 10  # not in a function


def clamp(value, low=0, high=10):
    """Keep 'value' between bounds: 1 < 2."""
    # too small
    if value < low:
        return low
    elif value > high:
        return high
    else:
        value = value + 1
    try:
        value = int(value)
    except (TypeError, ValueError):
        value = 0
    log.debug("value %s", value + 5)
    return max(low, value - 1)  # kept comment


class Box:
    def __repr__(self):
        a = 1
        b = 2
        return f"{a + b}"

    def put(self, item, *, twice=False):
        for each in [item, "ü", item]:
            if not twice and each is None:
                continue
            self.items.append(each)
        self.size = len(self.items[1:])
        return sorted(self.items, key=str)[0]

    def __version__(self):
        x = 1
        y = 2
        return x < y
'''


ALL = {path: set(range(1, 1000)) for path in ("box.py", "crlf.py")}  # lines that tests run


def sites(text: str) -> list[mutation.Site]:
    return mutation.sites_of(Parsed("m.py", text))


def tree_of(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.py").write_bytes(text.encode())
    return folder


def test_every_operator_is_found_where_it_applies() -> None:
    found = Counter(site.kind for site in sites(SOURCE))
    for kind in (
        "compare",
        "boolop",
        "negate",
        "if_swap",
        "del_if",
        "binop",
        "constant",
        "default",
        "twin",
        "index",
        "slice",
    ):
        assert found[kind], kind
    for kind in (
        "del_elif",
        "del_else",
        "swap_args",
        "drop_keyword",
        "wrong_variable",
        "del_assign",
        "del_expr",
        "del_for",
    ):
        assert found[kind], kind
    for kind in ("ret_none", "loop_exit", "remove_try", "except_less"):
        assert found[kind], kind
    assert found.keys() <= mutation.WEIGHTS.keys()


def test_messages_logs_reprs_versions_and_docstrings_are_left_alone() -> None:
    cut = {site.file.content[c.first : c.last].decode() for site in sites(SOURCE) for c in site.cuts}
    assert not any("5" in text for text in cut if "log" not in text)
    assert {site.function for site in sites(SOURCE)} == {"clamp", "Box.put"}
    assert not any("1 < 2" in text for text in cut)
    raising = 'def f(a, b):\n    if a:\n        raise ValueError("bad %s" % (a + 1))\n    return b\n'
    assert {s.kind for s in sites(raising) if s.line == 3} == {"del_raise"}  # as a whole; its message stays
    typing = "def f(a, b):\n    if TYPE_CHECKING:\n        a = a + 1\n    return b\n"
    assert {s.line for s in sites(typing)} == {4}


@pytest.mark.parametrize(
    ("kind", "line", "after"),
    [
        ("compare", "    if value < low:", "    if value <= low:"),
        ("except_less", "    except (TypeError, ValueError):", "    except ValueError:"),
        ("twin", "    return max(low, value - 1)  # kept comment", "    return min(low, value - 1)  # kept comment"),
        ("binop", "    return max(low, value - 1)  # kept comment", "    return max(low, value + 1)  # kept comment"),
        (
            "swap_args",
            "    return max(low, value - 1)  # kept comment",
            "    return max(value - 1, low)  # kept comment",
        ),
        ("boolop", "            if not twice and each is None:", "            if not twice or each is None:"),
        ("negate", "            if not twice and each is None:", "            if twice and each is None:"),
        ("slice", "        self.size = len(self.items[1:])", "        self.size = len(self.items[:])"),
        ("drop_keyword", "        return sorted(self.items, key=str)[0]", "        return sorted(self.items)[0]"),
        ("default", "    def put(self, item, *, twice=False):", "    def put(self, item, *, twice=True):"),
    ],
)
def test_an_operator_changes_its_span_only(kind: str, line: str, after: str) -> None:
    results = [
        broken[0].broken for site in sites(SOURCE) if site.kind == kind and (broken := mutation.broken_by([site]))
    ]
    assert SOURCE.replace(line, after) in results


def test_statements_go_with_their_comments_and_wrappers_go_from_around_them() -> None:
    results = {s.kind: b[0].broken for s in sites(SOURCE) if (b := mutation.broken_by([s]))}
    assert results["remove_try"] == SOURCE.replace(
        "    try:\n        value = int(value)\n    except (TypeError, ValueError):\n        value = 0\n",
        "    value = int(value)\n",
    )
    commented = "def f(a):\n    b = 1\n    # why\n    if a:\n        b = 2\n    return b\n"
    gone = {s.kind: b[0].broken for s in sites(commented) if (b := mutation.broken_by([s]))}
    assert gone["del_if"] == "def f(a):\n    b = 1\n    return b\n"
    assert gone["del_assign"] == "def f(a):\n    b = 1\n    # why\n    if a:\n        pass\n    return b\n"


def test_a_long_string_keeps_its_indentation_when_a_wrapper_goes() -> None:
    text = 'def f(a):\n    with lock:\n        b = """x\n        y"""\n        a += b\n    return a\n'
    results = {s.kind: b[0].broken for s in sites(text) if (b := mutation.broken_by([s]))}
    assert results["remove_with"] == 'def f(a):\n    b = """x\n        y"""\n    a += b\n    return a\n'


def test_all_sites_of_our_own_source_parse_and_differ_or_are_refused() -> None:
    files = sorted(Path(etude.__file__).parent.joinpath("data").glob("*.py"))[:4]
    kept = refused = 0
    for path in files:
        file = Parsed(path.name, path.read_text(encoding="utf-8"))
        for site in mutation.sites_of(file)[::40]:
            edits = mutation.broken_by([site])
            kept, refused = kept + (edits is not None), refused + (edits is None)
            if edits:
                assert ast.dump(ast.parse(edits[0].broken or "")) != ast.dump(ast.parse(file.text))
                removed = sum(len(file.content[c.first : c.last].decode()) for c in site.cuts)
                assert len(edits[0].broken or "") == len(file.text) - removed + sum(len(c.text) for c in site.cuts)
    assert kept > 15 * max(1, refused)


def test_candidates_are_the_same_for_a_seed_without_duplicates_and_in_covered_lines(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, box=SOURCE, test_box=SOURCE, crlf=SOURCE.replace("\n", "\r\n"), bad="def f(:\n")
    left_out: Counter[str] = Counter()
    every = list(mutation.candidates(tree, ["."], random.Random(4), ALL, left_out))
    assert every == list(mutation.candidates(tree, ["."], random.Random(4), ALL, Counter()))
    assert every != list(mutation.candidates(tree, ["."], random.Random(5), ALL, Counter()))
    assert len({c.edits for c in every}) == len(every) > 60
    assert left_out["file is not Python of this version"] == 1
    assert {e.path for c in every for e in c.edits} == {"box.py", "crlf.py"}
    assert all(
        "\r\n" in (e.broken or "") and "\n" not in (e.broken or "").replace("\r\n", "")
        for c in every
        for e in c.edits
        if e.path == "crlf.py"
    )
    assert {1, 2, 3} == {len(c.kinds) for c in every}
    some = list(mutation.candidates(tree, ["box.py"], random.Random(4), {"box.py": {9}}, left_out))
    assert {line for c in some for s in c.spans for line in range(s.first, s.last + 1)} <= {6, 8, 9, 10}
    assert left_out["site is run by no test"] > 0


def test_spans_are_the_lines_of_the_solution(tmp_path: Path) -> None:
    for candidate in mutation.candidates(tree_of(tmp_path, box=SOURCE), ["box.py"], random.Random(0), ALL, Counter()):
        (edit,) = candidate.edits
        assert edit.fixed == SOURCE
        assert edit.broken is not None
        fixed, kept = SOURCE.split("\n"), edit.broken.split("\n")
        inside = {line for span in candidate.spans for line in range(span.first, span.last + 1)}
        rest = Counter(text for line, text in enumerate(fixed, 1) if line not in inside)
        assert not rest - Counter(kept), "a line outside the spans is changed"
        assert all(span.name in {"clamp", "Box.put"} for span in candidate.spans)


@given(st.lists(st.sampled_from("abc"), max_size=12), st.lists(st.sampled_from("abc"), max_size=12))
def test_changed_lines_leave_a_common_subsequence(old: list[str], new: list[str]) -> None:
    runs = changed_lines("\n".join(old), "\n".join(new))
    inside = {line for first, last in runs for line in range(first, last + 1)}
    rest = iter("\n".join(old).split("\n"))
    assert all(text in rest for line, text in enumerate("\n".join(new).split("\n"), 1) if line not in inside)
    assert bool(runs) == ("\n".join(old) != "\n".join(new))


@given(st.text(max_size=40), st.data())
def test_cuts_are_made_on_bytes(text: str, data: st.DataObject) -> None:
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=4, max_size=4)))
    at = [len(text[:end].encode()) for end in ends]
    cuts = [Cut(at[0], at[1], "é"), Cut(at[2], at[3])] if ends[1] < ends[2] else [Cut(at[0], at[1], "é")]
    expected = (
        text[: ends[0]] + "é" + (text[ends[1] : ends[2]] + text[ends[3] :] if len(cuts) == 2 else text[ends[1] :])
    )
    assert Parsed("x", text).cut(cuts) == expected


def test_test_files_are_known_by_their_paths() -> None:
    assert all(map(is_test_path, ["tests/a.py", "a/test/b.py", "a/test_b.py", "b_test.py", "conftest.py"]))
    assert not any(map(is_test_path, ["a/latest.py", "attest.py", "pkg/contest/a.py", "src/testament.py"]))
