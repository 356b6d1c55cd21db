"""Test functions cut out of a test file, the rest untouched: what the agent does not see."""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import TYPE_CHECKING

from etude.errors import UserError
from etude.syntax import parse_python
from etude.tasks.generators.parsed import Cut, Definition, Parsed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def function_of(test_id: str) -> str:
    """Return the test function of a test id: its path and names, without the parameters."""
    path, separator, names = test_id.partition("::")
    return path + separator + names.partition("[")[0]


def hide(text: str, functions: Iterable[str]) -> str:
    """Return a test file without some functions (`test_a`, `Class.test_b`; `::` will do for the dot, before it a path).

    Decorators and the comments directly above go with them, and a class goes that has no test left; helpers stay.
    """
    file = _parsed(text)
    wanted = {name.rpartition(".py::")[2].replace("::", ".") for name in functions}
    unknown = wanted - {name for name, _ in file.definitions}
    if unknown:
        raise UserError(
            f"test file has no {sorted(unknown)[0]}; hide functions that are written in it, not inherited ones"
        )
    hidden = file.cut(_cuts(file, file.tree.body, "", wanted))
    parse_python(hidden)
    return hidden


@lru_cache(maxsize=8)
def _parsed(text: str) -> Parsed:
    """Return a file; many tasks hide parts of the same one, and parsing is most of the time it takes to load a set."""
    return Parsed("", text)


def _cuts(file: Parsed, block: Sequence[ast.stmt], prefix: str, wanted: set[str]) -> list[Cut]:
    going = [node for node in block if isinstance(node, Definition) and _goes(node, prefix, wanted)]
    cuts = []
    for node in going:
        cut = file.without(node, block if len(going) < len(block) else [node] if node is going[0] else block)
        assert cut is not None, "a definition shares its lines with no other statement"
        cuts.append(cut)
    for other in block:
        if other in going:
            continue
        inside = f"{prefix}{other.name}." if isinstance(other, ast.ClassDef) else prefix
        for name in ("body", "orelse") if isinstance(other, (ast.ClassDef, ast.If, ast.Try)) else ():
            cuts += _cuts(file, getattr(other, name, []), inside, wanted)
    return cuts


def _goes(node: Definition, prefix: str, wanted: set[str]) -> bool:
    """Whether a definition is wanted out, or is a class whose tests all are."""
    if prefix + node.name in wanted:
        return True
    if not isinstance(node, ast.ClassDef):
        return False
    tests = [each for each in node.body if isinstance(each, Definition) and each.name.lower().startswith("test")]
    return bool(tests) and all(_goes(each, f"{prefix}{node.name}.", wanted) for each in tests)
