"""Pages taken apart by parsers that are not ours."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser

from markdown_it import MarkdownIt


class Parsed(HTMLParser):
    """A page taken apart by a parser that is not ours: its tables, its preformatted texts and everything else in it."""

    VOID = frozenset({"meta", "img"})

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.tables: list[list[list[str]]] = []
        self.code: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in {"td", "th"}:
            self.tables[-1][-1].append("")
        elif tag == "pre":
            self.code.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        self.text += data
        if inside in {"td", "th"}:
            self.tables[-1][-1][-1] += data
        elif "pre" in self.open:
            self.code[-1] += data


def parsed_markdown(page: str) -> tuple[Parsed, str]:
    """Markdown through a parser that is not ours; HTML in it is let through, as it would be where people look at it."""
    made = MarkdownIt("commonmark", {"html": True}).enable("table").render(page)
    return Parsed(re.sub("<(hr|br|img)([^>]*?) */>", "", made)), made
