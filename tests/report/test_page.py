from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from etude.errors import visible
from etude.report.page import abridged, fenced, human, in_html, in_markdown
from tests.report.parsed import Parsed, parsed_markdown


@given(st.text())
def test_any_text_survives_each_form(text: str) -> None:
    shown = visible(text)
    table, _ = parsed_markdown(f"| head | other |\n|---|---:|\n| {in_markdown(text)} | x |\n")
    assert [row[0].strip() for table in table.tables for row in table] == ["head", shown.strip()]
    assert parsed_markdown(f"Word {in_markdown(text)} word")[0].text.split() == ["Word", *shown.split(), "word"]
    assert Parsed(f"<p>{in_html(text)}</p>").text == shown
    assert not set(shown) & set("\n\r\t\x00\u2028")


@given(st.text("`~ \n\tx<\u2028\ud800"))
@example("one\n```\ntwo")
@example("one\n`````\ntwo")
def test_a_fence_holds_whatever_is_inside(text: str) -> None:
    parsed, made = parsed_markdown(f"{fenced(text)}\n\nafter")
    assert parsed.code == [visible(text, "\n\t") + "\n"]
    assert made.endswith("<p>after</p>\n")


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (5_410_048, "5.41M"),
        (134_515_008, "135M"),
        (1.0264e12, "1.03T"),
        (950, "950"),
        (0, "0"),
        (8192, "8.19k"),
        (1.3e9, "1.3B"),
    ],
)
def test_counts_are_short(count: float, shown: str) -> None:
    assert human(count) == shown


@given(st.text(), st.integers(4, 40))
def test_long_names_keep_both_ends(name: str, most: int) -> None:
    short = abridged(name, most)
    assert len(short) <= most
    assert short == name or (name.startswith(short[: most // 2]) and name.endswith(short[most // 2 + 1 :]))
