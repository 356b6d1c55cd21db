"""Numbers, names and tables as people read them. Here for the terminal; `page` writes the same tables as Markdown and as HTML.

Names and excerpts are the words of strangers. `visible` spells out characters that do not show or that change how others do, so that
nothing can steer a terminal; each writer then escapes at the one place where it writes.
"""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Any, NamedTuple

from rich import table as rich_table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

LAYOUT = "\n\t"
Cell = str | float


class Table(NamedTuple):
    """Whole numbers are counts, others are shares; a head that begins with `>` stands over numbers, which go to the right."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def visible(cell: Cell, layout: str = "") -> str:
    r"""Write a cell out, its hidden characters as escapes such as \x1b; those in `layout` stay."""
    text = cell if isinstance(cell, str) else f"{cell:,}" if isinstance(cell, int) else f"{cell:.1%}"
    plain = (char in layout or char.isprintable() or unicodedata.category(char) == "Zs" for char in text)
    return "".join(c if shows else c.encode("unicode_escape").decode() for c, shows in zip(text, plain, strict=True))


def terminal(table: Table, **look: Any) -> rich_table.Table:
    drawn = rich_table.Table(title_justify="left", **look)
    for head in table.heads:
        title = Text(visible(head.removeprefix(">"), LAYOUT))
        drawn.add_column(title, justify="right" if head.startswith(">") else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(visible(cell, LAYOUT)) for cell in row))
    return drawn


def human(count: float) -> str:
    """Return a count in at most four characters and a unit: 4.7M, 135M, 1.03T."""
    sizes = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    return next((f"{count / size:.3g}{unit}" for size, unit in sizes if count >= size), f"{count:.0f}")


def mb(size: int) -> str:
    return "<0.01" if 0 < size < 5_000 else f"{size / 1e6:,.2f}"


def shortened(text: str, most: int = 120) -> str:
    """Return a text of at most so many characters, cut at its end."""
    return text if len(text) <= most else text[: most - 1] + "…"


def abridged(name: str, most: int) -> str:
    """Return a name of at most so many characters, cut in its middle: names differ at both ends."""
    return name if len(name) <= most else f"{name[: most // 2]}…{name[1 - most // 2 :]}"
