"""What every page is made of: elements whose text is escaped where it is written, the frame around them, curves.

What the world wrote reaches a page through `element` alone, which escapes it and spells out what does not show (terminal codes,
bidirectional controls). Only what this module made is `Html` and passes as it is. Pages link to each other by relative addresses that
end in .html, so the same page is served, and works from a folder on disk.
"""

from __future__ import annotations

import html
import json
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from etude.errors import LAYOUT, visible
from etude.report import page as report_page
from etude.report.page import in_html
from etude.rl.metrics import smooth

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

VOID = {"br", "meta", "link", "input", "rect", "circle", "line", "path"}
POINTS = 600  # of a curve that are sent; of more, each is the mean of several, with their extremes
SMOOTHED = 12  # points from which a curve has a mean beside it
Content = Any  # Html, str, a number, None (nothing), or several of them


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(tag: str, *content: Content, **attributes: Any) -> Html:
    """Return an element. Attributes: `cls` is class, underscores are hyphens, None and False are left out, True stands alone."""
    given = {name: value for name, value in attributes.items() if value is not None and value is not False}
    drawn = "".join(_attribute(name, value) for name, value in given.items())
    if tag in VOID and not content:
        return Html(f"<{tag}{drawn}>" if tag in {"br", "meta", "link", "input"} else f"<{tag}{drawn}/>")
    return Html(f"<{tag}{drawn}>{join(*content)}</{tag}>")


def join(*content: Content) -> Html:
    """Return several as one; what is not HTML is escaped."""
    return Html("".join(map(_written, content)))


def _written(content: Content) -> str:
    if content is None or content is False:
        return ""
    if isinstance(content, Html):
        return content
    if isinstance(content, str):
        return in_html(content, LAYOUT)
    if isinstance(content, int | float):
        return html.escape(str(content))
    return "".join(map(_written, content))


def _attribute(name: str, value: Any) -> str:
    name = "class" if name == "cls" else name.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    return f' {name}="{html.escape(visible(str(value), LAYOUT))}"'


def data(kind: str, value: Any) -> Html:
    """Return JSON that a script of ours reads. It is not run, so the policy against inline scripts does not touch it."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Html(f'<script type="application/json" class="{kind}">{text}</script>')


def link(address: str, *content: Content, **attributes: Any) -> Html:
    return element("a", *content, href=address, **attributes)


def table(heads: Sequence[str], rows: Iterable[Sequence[Content]], cls: str = "") -> Html:
    """Return a table; a head that begins with `>` stands over numbers, which go to the right."""
    kinds = ["number" if head.startswith(">") else None for head in heads]
    drawn = [
        element("tr", *(element("td", cell, cls=kind) for cell, kind in zip(row, kinds, strict=True))) for row in rows
    ]
    if not drawn:
        return element("p", "None.", cls="empty")
    named = [element("th", h.removeprefix(">"), cls=k, scope="col") for h, k in zip(heads, kinds, strict=True)]
    whole = element("table", element("thead", element("tr", *named)), element("tbody", *drawn), cls=cls or None)
    return element("div", whole, cls="wide", tabindex=0)


def blocks(page: report_page.Page, folder: Path) -> Html:
    """Return a page of a report as sections; its pictures are left out, as the page draws its own."""
    parts = []
    for heading, several in page.items():
        drawn = [Html(report_page.block_in_html(each, folder)) for each in several
                 if not isinstance(each, report_page.Picture | report_page.Link)]  # fmt: skip
        parts.append(section(heading, *drawn))
    return join(*parts)


def section(title: str, *content: Content, live: str = "") -> Html:
    """Return a part of a page. `live`: its name, under which it is replaced while the run goes on."""
    return element("section", element("h2", title) if title else None, *content, id=live or None, data_live=bool(live))


def facts(values: Mapping[str, Content]) -> Html:
    known = [(name, value) for name, value in values.items() if value not in {None, ""}]
    return element(
        "dl", *(element("div", element("dt", name), element("dd", value)) for name, value in known), cls="facts"
    )


def act(action: str, *content: Content, **hidden: str) -> Html:
    """Return a form that asks the server for an action, with fields that do not show, and room for what is said to it."""
    fields = [element("input", type="hidden", name=name, value=value) for name, value in hidden.items()]
    return element("form", *fields, *content, element("output"), data_action=f"/do/{action}", cls="act")


def details(title: Content, *content: Content, open_: bool = False, cls: str = "") -> Html:
    return element("details", element("summary", title), *content, open=open_, cls=cls or None)


def note(text: Content, kind: str = "note") -> Html:
    """Return a remark: note, warning, or a state that has nothing to show (empty)."""
    return element("p", text, cls=kind)


def diff(text: str) -> Html:
    """Return a unified diff, a line an element: what was added and removed is told by its sign, and by colour."""
    kinds = {"+": "added", "-": "removed", "@": "place"}
    lines = text.rstrip("\n").split("\n")
    drawn = [element("span", line + "\n", cls=kinds.get(line[:1])) for line in lines]
    return element("pre", *drawn, cls="diff", tabindex=0)


def pre(text: str, most: int = 20_000) -> Html:
    """Return a text as it stands; of a very long one the beginning, and how much is not shown."""
    cut = f"\n… {len(text) - most:,} characters more" if len(text) > most else ""
    return element("pre", text[:most] + cut, tabindex=0)


def curve(
    title: str, series: Mapping[str, Sequence[tuple[float, float]]], *, unit: str = "", across: str = "step", look: str = "",
    marks: Sequence[tuple[float, str]] = (),
) -> Html:  # fmt: skip
    """Return a chart: series of (x, y) by name, drawn by web.js with uPlot; in words, the last numbers.

    `marks`: places with a remark, drawn as lines, and listed below.
    """
    known = {name: [point for point in points if is_number(point[1])] for name, points in series.items()}
    shown = {name: points for name, points in known.items() if points}
    lines = [{"name": visible(name), **_columns(points, look)} for name, points in shown.items()]
    whole = {"title": title, "unit": unit, "across": across, "look": look, "lines": lines,
             "marks": [[at, visible(text)] for at, text in marks]}  # fmt: skip
    sums: dict[float, float] = defaultdict(float)  # by step, of what is stacked: shares are shown
    for x, y in (point for points in shown.values() for point in points):
        sums[x] += y if look == "stacked" else 0
    last = [
        (name, " → ".join(short(y / (sums[x] or 1), look) for x, y in (points[0], points[-1])))
        for name, points in shown.items()
    ]
    words = element("ul", *(element("li", f"{name}: " if len(shown) > 1 else "", value) for name, value in last))
    caption = element("figcaption", element("strong", title), f" {unit}" if unit else "", words)
    flags = element("ul", *(element("li", "⚑ ", text) for _, text in marks), cls="flags") if marks else None
    return element("figure", caption, data("chart", whole), flags, cls="chart")


def is_number(value: Any) -> bool:
    """Whether it is a number that can be drawn: files of others hold anything."""
    return (isinstance(value, float) and math.isfinite(value)) or (isinstance(value, int) and abs(value) < 1e300)


def _columns(points: Sequence[tuple[float, float]], look: str) -> dict[str, list[float]]:
    """Return what is drawn: values, or of many their means and extremes; and from a dozen on the mean of those around."""
    size = -(-len(points) // POINTS)
    parts = [points[at : at + size] for at in range(0, len(points), size)]
    values = [[y for _, y in part] for part in parts]
    means = [sum(each) / len(each) for each in values]
    drawn = {"x": [part[-1][0] for part in parts], "y": [_rounded(each) for each in means]}
    if size > 1:
        drawn |= {name: [_rounded(pick(each)) for each in values] for name, pick in (("low", min), ("high", max))}
    if len(means) >= SMOOTHED and look != "plain":
        drawn["smooth"] = [_rounded(each) for each in smooth([(mean, 1.0) for mean in means], len(means) // 20 or 1)]
    return drawn


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def short(value: float, look: str = "") -> str:
    """Return a number in few characters; percent: as a share."""
    if look in {"percent", "stacked"}:
        return f"{100 * value:.3g}%"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if value else "0"


def frame(
    title: str, content: Content, *, depth: int, crumbs: Sequence[tuple[str, str]] = (),
    events: str = "", token: str = "", state: str = "", agents: bool = False,
) -> Html:  # fmt: skip
    """Return the whole page. `depth`: folders between it and the top; `events`: where news come from while a run goes on."""
    up = "../" * depth
    head = [
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="etude-token", content=token) if token else None,
        element("link", rel="icon", href="data:,"),
        element("title", f"{title} · Etude"),
        element("link", rel="stylesheet", href=f"{up}static/uplot.min.css"),
        element("link", rel="stylesheet", href=f"{up}static/web.css"),
        Html(f'<script src="{up}static/uplot.min.js" defer></script>'),
        Html(f'<script src="{up}static/web.js" defer></script>'),
    ]
    way = [element("li", link(f"{up}{address}", name)) for name, address in (("Runs", "index.html"), *crumbs)]
    trail = element("ol", *way, element("li", title, aria_current="page"))
    nav = element("nav", trail, link(f"{up}agents.html", "Agents") if agents else None, aria_label="You are here")
    top = element("header", nav, element("p", state, id="state", role="status", data_live=True))
    skip = link("#main", "To the content", cls="skip")
    main = element("main", element("h1", title), content, id="main")
    body = element("body", skip, top, main, data_events=events or None, cls=None if token else "exported")
    page = element("html", element("head", *head), body, lang="en")
    return Html(f"<!DOCTYPE html>\n{page}\n")
