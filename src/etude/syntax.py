"""Python's own parser, for many threads at once.

CPython 3.11 and 3.12 count how deep a syntax tree is in one place for all threads. Two of them that parse at the same time can upset
the count, and one of them gets `SystemError: AST constructor recursion depth mismatch` (seen after thousands of mutations).
"""

from __future__ import annotations

import ast
import threading

PARSING = threading.RLock()  # also for what parses by itself: `packaging` reads the strings of markers so


def parse_python(source: str | bytes) -> ast.Module:
    """Return the syntax tree; SyntaxError or ValueError if it is not Python."""
    with PARSING:
        return ast.parse(source)
