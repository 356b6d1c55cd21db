"""What every report is made of: tables, pages and pictures.

Names and excerpts are the words of strangers: `errors.visible` spells out what does not show or changes how the rest does, and each
writer then escapes at the one place where it writes.

A page is blocks under headings, put together once and written twice, as Markdown and as HTML that needs no other file. Pictures lie
beside the page; the HTML holds them, too. All pictures have one style, axes with labels, and a file that is whole or not there.
matplotlib is imported where something is drawn: commands that draw nothing must not wait for it.
"""

from __future__ import annotations

import base64
import html
import re
from contextlib import contextmanager
from importlib import resources
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from rich import table as rich_table
from rich.text import Text

from etude.errors import LAYOUT, visible
from etude.files import whole_file, write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure
    from rich.console import Console, RenderableType

Cell = str | float
MARKUP = {sign: f"\\{sign}" for sign in "\\`*_{}[]~$!#"}
ESCAPES = str.maketrans(MARKUP | {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;"})
WIDE = "body { max-width: 92rem; } td:first-child { min-width: 12rem; }"  # for tables with a column a model
COLOURS = ("#3b6ea8", "#d08020", "#4f9d69", "#a8557f", "#7d7d7d", "#5cb3cc", "#c4b13c", "#6a51a3")
RED, SOFT, GRID = "#b3372b", "#c3c9d0", "#e3e6e9"
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10,
         "axes.titleweight": "bold", "text.parse_math": False,
         "figure.constrained_layout.w_pad": 0.12, "figure.constrained_layout.h_pad": 0.12}  # fmt: skip


class Table(NamedTuple):
    """Whole numbers are counts, others are shares; a head that begins with `>` stands over numbers, which go to the right."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def written(cell: Cell, layout: str = "") -> str:
    """Write a cell out, its hidden characters as escapes; those in `layout` stay."""
    text = cell if isinstance(cell, str) else f"{cell:,}" if isinstance(cell, int) else f"{cell:.1%}"
    return visible(text, layout)


def terminal(table: Table, **look: Any) -> rich_table.Table:
    drawn = rich_table.Table(title_justify="left", **{"box": None, "pad_edge": False, **look})
    for head in table.heads:
        title = Text(visible(head.removeprefix(">"), LAYOUT))
        drawn.add_column(title, justify="right" if head.startswith(">") else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(written(cell, LAYOUT)) for cell in row))
    return drawn


def print_parts(console: Console, parts: Iterable[RenderableType]) -> None:
    """Print tables as they are, and lines in full, whatever is written in them."""
    for part in parts:
        line = Text(visible(part, LAYOUT)) if isinstance(part, str) else part
        console.print(line, highlight=False, soft_wrap=isinstance(line, Text))


def human(count: float) -> str:
    """Return a count in at most four characters and a unit: 4.7M, 135M, 1.03T."""
    sizes = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    return next((f"{count / size:.3g}{unit}" for size, unit in sizes if count >= size), f"{count:.0f}")


def abridged(name: str, most: int) -> str:
    """Return a name of at most so many characters, cut in its middle: names differ at both ends."""
    return name if len(name) <= most else f"{name[: most // 2]}…{name[1 - most // 2 :]}"


class Folded(NamedTuple):
    """Texts as they were found, each with what it is; HTML shows them when asked to."""

    title: str
    texts: Sequence[tuple[str, str]]


class Picture(NamedTuple):
    """A PNG beside the page, and what it shows."""

    file: str
    about: str


class Link(NamedTuple):
    """Another page, by its address relative to this one."""

    text: str
    address: str


Block = str | Table | Folded | Picture | Link
Page = dict[str, list[Block]]  # by heading


def write_page(folder: Path, title: str, page: Page, *, wide: bool = False, in_run: bool = False) -> None:
    """Write report.md and report.html beside the pictures that are already there. `in_run`: a stage's, with the way to the others."""
    if in_run:
        page = {**page, "The run": [Link("All stages of this run, and their reports", "../report.html")]}
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
    return written(cell).translate(ESCAPES)


def in_html(cell: Cell, layout: str = "") -> str:
    return html.escape(written(cell, layout))


def fenced(text: str) -> str:
    """Return a text as code in Markdown; the fence is longer than any inside."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return "\n".join([fence, visible(text, LAYOUT), fence])


def block_in_markdown(block: Block) -> str:
    if isinstance(block, str):
        return in_markdown(block)
    if isinstance(block, Picture):
        return f"![{in_markdown(block.about)}]({block.file})"
    if isinstance(block, Link):
        return f"[{in_markdown(block.text)}]({quote(block.address)})"
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
    if isinstance(block, Link):
        return f'<p><a href="{html.escape(quote(block.address))}">{in_html(block.text)}</a></p>'
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


@contextmanager
def drawing(path: Path, wide: float, high: float, dpi: int = 150) -> Iterator[Figure]:
    """Give a figure of so many inches to draw on, and save it as PNG: the same figure gives the same bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE), whole_file(path) as beside:
        figure = Figure(figsize=(wide, high), layout="constrained")
        yield figure
        figure.savefig(beside, format="png", dpi=dpi, metadata={"Software": None})


def label(axis: Any, title: str, across: str = "", up: str = "", *, grid: str = "y") -> None:
    axis.set_title(title, loc="left")
    axis.set_xlabel(across)
    axis.set_ylabel(up)
    if grid:
        axis.grid(axis=grid, color=GRID, linewidth=0.6)
        axis.set_axisbelow(True)


def token_scale(axis: Any, linear_to: float = 0.0) -> None:
    """Make the horizontal axis one of token counts: logarithmic, marked 1k, 2k, 5k, 10k; `linear_to`: linear from 0 to there."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if linear_to:
        axis.set_xscale("symlog", linthresh=linear_to)
    else:
        axis.set_xscale("log")
        low, high = axis.get_xlim()
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda count, _: human(count)))
