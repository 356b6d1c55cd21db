"""The report's page: the blocks of etude.data.report and pictures, as Markdown and as HTML that needs no other file."""

from __future__ import annotations

import base64
from importlib import resources
from string import Template
from typing import TYPE_CHECKING, NamedTuple

from etude.data.report import Table, block_in_html, block_in_markdown, in_html, in_markdown

if TYPE_CHECKING:
    from collections.abc import Mapping


class Picture(NamedTuple):
    """A PNG beside the page, and what it shows."""

    file: str
    about: str


WIDE = "body { max-width: 92rem; } td:first-child { min-width: 12rem; }"  # a column a model
Page = dict[str, list[str | Table | Picture]]  # by heading


def markdown(title: str, page: Page) -> str:
    """Return the page as Markdown; pictures lie beside it."""
    parts = [f"# {title}"]
    for head, blocks in page.items():
        shown = (
            f"![{in_markdown(each.about)}]({each.file})" if isinstance(each, Picture) else block_in_markdown(each)
            for each in blocks
        )
        parts += [f"## {head}", *shown]
    return "\n\n".join(parts) + "\n"


def html_page(title: str, page: Page, lead: Picture, pictures: Mapping[str, bytes]) -> str:
    """Return the page as HTML; the template shows the `lead` picture after the first section."""
    template = resources.files("etude.data").joinpath("report_page.html").read_text(encoding="utf-8")
    template = template.replace("</style>", f"{WIDE}\n</style>")
    encoded = {file: base64.b64encode(content).decode() for file, content in pictures.items()}
    sections = []
    for head, blocks in page.items():
        shown = (
            f'<figure class="wide"><img alt="{in_html(each.about)}" src="data:image/png;base64,{encoded[each.file]}"></figure>'
            if isinstance(each, Picture) else block_in_html(each)
            for each in blocks if each != lead
        )  # fmt: skip
        sections.append("\n".join([f"<h2>{head}</h2>", *shown]))
    told = {"title": title, "pictured": in_html(lead.about), "picture": encoded[lead.file]}
    return Template(template).substitute(told, answer=sections[0], more="\n".join(sections[1:]))
