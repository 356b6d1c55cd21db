"""The heading of a file: the comments and the docstring before its first line of code.

What a file says about itself (who licenses it, what generated it) stands there. The same words further down are what it
says about other files: the template of a code generator, a licence checker's patterns, a test's example.
"""

from __future__ import annotations

import re

HEAD = 4096  # characters; no heading worth reading is longer
_BLOCKS = [
    ('[ru]?"""', '"""'),
    ("[ru]?'''", "'''"),
    (r"/\*", r"\*/"),
    ("<!--", "-->"),
    (r"\{-", "-}"),
    (r"\(\*", r"\*\)"),
]
_BLOCK = "|".join(rf"{opening}(?s:.*?)(?:{closing}|\Z)" for opening, closing in _BLOCKS)
_LINE = r"""\.\.[^\n]*(?:\n[ \t]+[^\n]*)*|(?:\#|//|--|;|%|"|'|<\?|<!|@?rem\b|dnl\b|@echo\b)[^\n]*"""
_HEADING = re.compile(rf"(?:\s+|{_BLOCK}|{_LINE})*+", re.IGNORECASE)
_SIGN = re.compile(
    r"^[ \t]*(?:#+:?|//+!?|/?\*+|--+|;+|%+|<!--|\{-|\(\*|\.\.|rem\b|dnl\b|[ru]?\"{3}|[ru]?'{3})[ \t]?", re.I | re.M
)


def heading(text: str) -> str:
    """Return the heading without comment signs, in lines."""
    found = _HEADING.match(text, 0, HEAD)
    return _SIGN.sub("", found.group()) if found else ""
