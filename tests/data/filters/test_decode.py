from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.data.document import UNKNOWN, Document, Raw
from etude.data.filters.content import decode

CAFE = "# café\nprice = '5 €'\n"
LINES = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\ufeff"), min_size=1).filter(
    str.strip
)


def decoded(content: bytes) -> str:
    """Return the text, or the reason in angle brackets."""
    outcome = decode(Raw("repository", "a/file.py", content))
    return outcome.text if isinstance(outcome, Document) else f"<{outcome}>"


@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
        (codecs.BOM_UTF32_BE, "utf-32-be"),
        (b"", "utf-8"),
    ],
)
@given(text=LINES)
def test_every_unicode_encoding_with_its_mark(mark: bytes, encoding: str, text: str) -> None:
    assert decoded(mark + text.encode(encoding)) == text


def test_a_mark_in_a_row_of_text_is_removed() -> None:
    assert decoded("\ufefftext".encode()) == "text"


@pytest.mark.parametrize(
    ("encoding", "first_lines"),
    [
        ("latin-1", "# -*- coding: latin-1 -*-\n"),
        ("iso-8859-15", "#!/usr/bin/python\n# vim: set fileencoding=iso-8859-15 :\n"),
        ("cp1252", '<?xml version="1.0" encoding="windows-1252"?>\n'),
        ("shift_jis", ";; -*- coding: shift_jis -*-\n"),
        ("koi8-r", "# coding=koi8-r\n"),
    ],
)
def test_a_declared_character_set_is_believed(encoding: str, first_lines: str) -> None:
    text = first_lines + {"shift_jis": "日本", "koi8-r": "привет"}.get(encoding, "café") + "\n"
    assert decoded(text.encode(encoding)) == text


def test_utf8_wins_over_what_is_declared() -> None:
    assert decoded(("# coding: latin-1\n" + CAFE).encode()) == "# coding: latin-1\n" + CAFE


@pytest.mark.parametrize(
    "content",
    [
        "# café\n".encode("latin-1"),
        b"# coding: utf-8\n\xff\n",
        b"# coding: no-such-codec\n\xff\n",
        b"# coding: unicode_escape\n\xff\n",
        b"# coding: rot13\n\xff\n",
        b"# coding: punycode\n\xff\n",
        b"one\ntwo\n# coding: latin-1\n\xff\n",
        b"# coding: shift_jis\n\xff\n",
        codecs.BOM_UTF16_LE + b"\x00\xd8a\x00",
    ],
)
def test_nothing_is_guessed(content: bytes) -> None:
    assert decoded(content) == "<not UTF-8>"


@pytest.mark.parametrize("content", [b"\x89PNG\0\0", b"abc\0def", b"row\0row", "café".encode("utf-16-le")])
def test_binary(content: bytes) -> None:
    assert decoded(content) == "<binary>"


@pytest.mark.parametrize("content", [b"", b" \r\n\t\n", codecs.BOM_UTF8, "\u2003\n".encode()])
def test_empty(content: bytes) -> None:
    assert decoded(content) == "<empty>"


def test_line_ends_become_lf() -> None:
    assert decoded(b"a\r\nb\rc\nd\r\n") == "a\nb\nc\nd\n"


def test_form_feeds_tabs_and_a_few_control_characters_stay() -> None:
    assert decoded(b"a\x0c\tb\x1b[0m" + b"\x07" * 7) == "a\x0c\tb\x1b[0m" + "\x07" * 7


def test_many_control_characters() -> None:
    assert decoded(b"\x1b[0m" * 9) == "<control characters>"
    assert decoded(b"\x1b[0m" * 9 + b"letters " * 2000) != "<control characters>"


def test_lone_surrogates() -> None:
    assert decoded(b"a\xed\xa0\x80b") == "<not UTF-8>"


def test_code_points_are_kept_as_they_are() -> None:
    both = "é = 'e\u0301'\nﬁ = 'Å'\n"
    assert decoded(both.encode()) == both


def test_the_rest_of_the_document_comes_from_the_source() -> None:
    document = decode(Raw("rows", "17", b"text", kind="row", licence="MIT"))
    assert document == Document("rows", "17", "text", kind="row", licence="MIT", evidence="metadata")
    plain = decode(Raw("rows", "18", b"text"))
    assert plain == Document("rows", "18", "text", licence=UNKNOWN)
