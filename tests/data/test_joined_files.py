"""Files of a repository in order, joined without losing any."""

from __future__ import annotations

import graphlib

from hypothesis import given
from hypothesis import strategies as st

from etude.data.document import Document, in_groups
from etude.data.tokenise import header, in_order, joined_length


def file(path: str, text: str = "x\n") -> Document:
    return Document("repo", path, text)


def order(*files: Document, how: str = "imports") -> list[str]:
    return [each.path for each in in_order(files, how)]


def test_path_order_is_by_path() -> None:
    assert order(file("b.py"), file("a/z.py"), file("a.py"), how="path") == ["a.py", "a/z.py", "b.py"]


def test_imported_files_come_first() -> None:
    files = [
        file("src/pack/app.py", "from pack.deep import thing\nimport pack.util\n"),
        file("src/pack/deep/__init__.py", "from ..util import helper\n"),
        file("src/pack/util.py", "import os\n"),
        file("README.md"),
        file("src/pack/first.py", "from . import app, util\n"),
        file("src/pack/wrapped.py", "from pack.first import (\n    one,\n)\n"),
    ]
    found = order(*files)
    place = {path: index for index, path in enumerate(found)}
    assert sorted(found) == sorted(each.path for each in files)
    assert place["src/pack/util.py"] < place["src/pack/deep/__init__.py"] < place["src/pack/app.py"]
    assert place["src/pack/app.py"] < place["src/pack/first.py"] < place["src/pack/wrapped.py"]


def test_cycles_lose_nothing() -> None:
    assert sorted(order(file("a.py", "import b\n"), file("b.py", "import a\n"))) == ["a.py", "b.py"]


@given(
    st.integers(1, 9).flatmap(
        lambda count: st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=20).map(
            lambda edges: (count, edges)
        )
    )
)
def test_any_import_graph_without_cycles_is_respected(case: tuple[int, list[tuple[int, int]]]) -> None:
    count, edges = case
    forward = [(min(pair), max(pair)) for pair in edges if pair[0] != pair[1]]  # the smaller imports the larger
    files = [
        file(f"m{number}.py", "".join(f"import m{other}\n" for one, other in forward if one == number))
        for number in range(count)
    ]
    found = order(*files)
    place = {path: index for index, path in enumerate(found)}
    graph = graphlib.TopologicalSorter({number: {b for a, b in forward if a == number} for number in range(count)})
    assert sorted(found) == sorted(f"m{number}.py" for number in graph.static_order())
    assert all(place[f"m{other}.py"] < place[f"m{one}.py"] for one, other in forward)


@given(st.lists(st.integers(0, 300), max_size=20), st.integers(50, 400))
def test_joining_keeps_every_file_once_and_in_order(sizes: list[int], most: int) -> None:
    files = [file(f"f{number:02d}.py", "y" * size) for number, size in enumerate(sizes)]
    groups = list(in_groups(files, joined_length, most))
    assert [each for group in groups for each in group] == files
    for group in groups:
        length = sum(len(header(each.path)) + len(each.text) + 1 for each in group)
        assert length <= most or len(group) == 1
