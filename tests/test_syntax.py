from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor

import pytest

from etude.syntax import parse_python

TEXT = "".join(f"def f{i}(a, b):\n    return [x + {i} for x in (a, b) if x]\n" for i in range(200))


def test_many_threads_get_the_same_tree() -> None:
    wanted = ast.dump(ast.parse(TEXT))
    with ThreadPoolExecutor(8) as pool:
        assert all(ast.dump(tree) == wanted for tree in pool.map(parse_python, [TEXT] * 16))


def test_what_is_not_python_is_told() -> None:
    with pytest.raises(SyntaxError):
        parse_python("def")
