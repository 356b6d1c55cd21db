"""Is a text worth training on? Counts only, the cheapest first, each with its own limit in `[data.filters]`."""

from __future__ import annotations

import re
import string
import zlib
from typing import TYPE_CHECKING

from etude.data.document import PROSE

if TYPE_CHECKING:
    from etude.data.document import Document
    from etude.data.settings import FilterSettings

ALPHANUMERIC = (string.ascii_letters + string.digits).encode()
NOT_ASCII = re.compile(r"[^\x00-\x7f]+")
FEWEST_LINES = 20  # below, a share of repeated lines says nothing


class Quality:
    """Drops documents that are too short, too long, too wide, too bare of words or too repetitive."""

    def __init__(self, settings: FilterSettings) -> None:
        self.limits = settings

    def __call__(self, document: Document) -> str | None:
        """Return why the document is dropped, or None."""
        text, limits = document.text, self.limits
        if len(text) < limits.min_chars:
            return "too short"
        if len(text) > limits.max_bytes:
            return "too long"
        # A paragraph of prose may well be one line.
        if document.language not in PROSE and len(text) / (text.count("\n") + 1) > limits.max_mean_line:
            return "long lines on average"
        lines = text.split("\n")
        if len(text) > limits.max_line and len(max(lines, key=len)) > limits.max_line:
            return "a very long line"
        enough = limits.min_alphanumeric * len(text)
        # Half a text mostly has enough for all.
        if alphanumeric(text[: len(text) // 2]) < enough and alphanumeric(text) < enough:
            return "few letters and digits"
        if len(lines) > FEWEST_LINES and repeated_share(lines) > limits.max_repeated_lines:
            return "repeated lines"
        return "repetitive" if compresses(text, limits.max_compression) else None


def alphanumeric(text: str) -> int:
    """Count letters and digits of any script."""
    plain = text.encode("ascii", "ignore")
    found = len(plain) - len(plain.translate(None, ALPHANUMERIC))
    return found + sum(map(str.isalnum, "".join(NOT_ASCII.findall(text)))) if len(plain) < len(text) else found


def repeated_share(lines: list[str]) -> float:
    """Return the share of lines that occurred before, among those that are not blank; indentation counts."""
    written = [line for line in lines if line and not line.isspace()]
    return (len(written) - len(set(written))) / max(1, len(written))


def compresses(text: str, ratio: float) -> bool:
    """Say whether zlib (level 1, the fastest) makes the text more than `ratio` times smaller.

    Compressing a part gives about as many bytes as that part adds to the whole. If they are too many already, the answer
    is no, and for ordinary text it is found in the first third.
    """
    content = text.encode()
    enough = len(content) / ratio
    return all(len(zlib.compress(part, 1)) < enough for part in (content[: len(content) // 3], content))
