"""A report's page: blocks under headings, put together once and written twice, as Markdown and as HTML that needs no other file.

Pictures lie beside the page; the HTML holds them, too. Every block escapes what it shows.
"""

from __future__ import annotations

import base64
import html
import re
from importlib import resources
from string import Template
from typing import TYPE_CHECKING, NamedTuple

from etude.files import write_text
from etude.report.tables import LAYOUT, Cell, Table, visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

ESCAPES = str.maketrans(
    {sign: f"\\{sign}" for sign in "\\`*_{}[]~$!#"} | {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;"}
)
WIDE = "body { max-width: 92rem; } td:first-child { min-width: 12rem; }"  # for tables with a column a model


class Folded(NamedTuple):
    """Texts as they were found, each with what it is; HTML shows them when asked to."""

    title: str
    texts: Sequence[tuple[str, str]]


class Picture(NamedTuple):
    """A PNG beside the page, and what it shows."""

    file: str
    about: str


Block = str | Table | Folded | Picture
Page = dict[str, list[Block]]  # by heading


def write_page(folder: Path, title: str, page: Page, *, wide: bool = False) -> None:
    """Write report.md and report.html beside the pictures that are already there."""
    write_text(folder / "report.md", markdown(title, page))
    template = resources.files("etude.report").joinpath("page.html").read_text(encoding="utf-8")
    content = _joined(page, "<h2>{}</h2>", lambda block: block_in_html(block, folder), "\n")
    text = Template(template).substitute(title=in_html(title), more_style=WIDE if wide else "", content=content)
    write_text(folder / "report.html", text)


def markdown(title: str, page: Page) -> str:
    return f"# {in_markdown(title)}\n\n" + _joined(page, "## {}", block_in_markdown, "\n\n") + "\n"


def _joined(page: Page, head: str, write: Callable[[Block], str], between: str) -> str:
    sections = ([head.format(name)] * bool(name) + [write(block) for block in blocks] for name, blocks in page.items())
    return between.join(part for section in sections for part in section)


def in_markdown(cell: Cell) -> str:
    """Return what Markdown shows as this text, in one line, also in a table."""
    return visible(cell).translate(ESCAPES)


def in_html(cell: Cell, layout: str = "") -> str:
    return html.escape(visible(cell, layout))


def fenced(text: str) -> str:
    """Return a text as code in Markdown; the fence is longer than any inside."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return "\n".join([fence, visible(text, LAYOUT), fence])


def block_in_markdown(block: Block) -> str:
    if isinstance(block, str):
        return in_markdown(block)
    if isinstance(block, Picture):
        return f"![{in_markdown(block.about)}]({block.file})"
    if isinstance(block, Folded):
        texts = [f"{in_markdown(name)}\n\n{fenced(text)}" for name, text in block.texts]
        return "\n\n".join([f"### {in_markdown(block.title)}", *texts])
    heads = [in_markdown(head.removeprefix(">")) for head in block.heads]
    rule = ["---:" if head.startswith(">") else "---" for head in block.heads]
    rows = [map(in_markdown, row) for row in block.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, rule, *rows]) if rows else "None."


def block_in_html(block: Block, folder: Path) -> str:
    """Return the same as HTML, with pictures out of `folder`."""
    if isinstance(block, str):
        return f"<p>{in_html(block)}</p>"
    if isinstance(block, Picture):
        source = f"data:image/png;base64,{base64.b64encode((folder / block.file).read_bytes()).decode()}"
        return f'<figure class="wide"><img alt="{in_html(block.about)}" src="{source}"></figure>'
    if isinstance(block, Folded):
        texts = [f"<p>{in_html(name)}</p>\n<pre>\n{in_html(text, LAYOUT)}</pre>" for name, text in block.texts]
        return "\n".join([f"<details><summary>{in_html(block.title)}</summary>", *texts, "</details>"])
    kinds = [' class="number"' if head.startswith(">") else "" for head in block.heads]

    def row(tag: str, cells: Iterable[Cell]) -> str:
        drawn = (f"<{tag}{kind}>{in_html(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(drawn)}</tr>"

    heads = row("th", (head.removeprefix(">") for head in block.heads))
    rows = "\n".join(row("td", cells) for cells in block.rows)
    drawn = f"<table><thead>{heads}</thead><tbody>\n{rows}\n</tbody></table>"
    return f'<div class="wide" tabindex="0">{drawn}</div>' if rows else "<p>None.</p>"
