"""The filters of the corpus, each a small function or class that returns why a document is dropped, or None.

Their order is cheap and certain first, so that the dear ones see little, and no step reads what an earlier one dropped:

1. `decode`: bytes become text, or the file is no text at all.
2. `language`: code or prose? Data files, images and the like leave here; the later steps know what they look at.
3. `generated`: what no person wrote here (vendored, generated, minified, lock files), by path and by its own heading.
4. `quality`: too short, too long lines, too repetitive: counts over the whole text.
5. `licence`: who may use it, file by file; after the counts, because a classifier may have to read licence texts.
6. `private`: secrets and personal data are replaced, not dropped; in batches, because the detector is a program to start.
   Before duplicates, so that two copies that differ in a scrubbed address only count as copies.
7. `contamination`, against the tasks, and 8. `duplicates`, across all sources: both need to see final texts.
"""

from __future__ import annotations

import re

HEAD = 4096  # characters; no heading worth reading is longer
_QUOTES = [('[ru]?"""', '"""'), ("[ru]?'''", "'''")]
_BLOCKS = [*_QUOTES, (r"/\*", r"\*/"), ("<!--", "-->"), (r"\{-", "-}"), (r"\(\*", r"\*\)")]
_BLOCK = "|".join(rf"{opening}(?s:.*?)(?:{closing}|\Z)" for opening, closing in _BLOCKS)
_LINE = r"""\.\.[^\n]*(?:\n[ \t]+[^\n]*)*|(?:\#|//|--|;|%|"|'|<\?|<!|@?rem\b|dnl\b|@echo\b)[^\n]*"""
_HEADING = re.compile(rf"(?:\s+|{_BLOCK}|{_LINE})*+", re.IGNORECASE)
_SIGN = re.compile(
    r"^[ \t]*(?:#+:?|//+!?|/?\*+|--+|;+|%+|<!--|\{-|\(\*|\.\.|rem\b|dnl\b|[ru]?\"{3}|[ru]?'{3})[ \t]?", re.I | re.M
)


def heading(text: str) -> str:
    """Return the comments and the docstring before the first line of code, without comment signs.

    What a file says about itself (who licenses it, what generated it) stands there. The same words further down are what
    it says about other files: the template of a code generator, a licence checker's patterns, a test's example.
    """
    found = _HEADING.match(text, 0, HEAD)
    return _SIGN.sub("", found.group()) if found else ""
