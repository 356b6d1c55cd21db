from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.lineage.licences import carry, headline_duties, identify, licence_files, normalised_hash, obligations
from etude.models.bases import known_bases

LICENSE = Path(__file__).resolve().parents[2] / "LICENSE"
MIT = """MIT License

Copyright (c) {owner}

Permission is hereby granted, free of charge, to any person obtaining a copy
of this software and associated documentation files (the "Software"), to deal
in the Software without restriction, including without limitation the rights
to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
SOFTWARE.
"""
OUR_CLAUSE = (
    "\nIf the Software is used for any commercial product with more than 100 million monthly active users,\n"
    'you shall prominently display "Tiny" on its user interface.\n'
)
OWNERS = st.text(st.characters(categories=("L", "N", "Zs", "P")), max_size=30)


def test_our_own_licence_is_known() -> None:
    assert identify(LICENSE.read_text(encoding="utf-8")) == "Apache-2.0"


@settings(deadline=None)
@given(OWNERS, st.integers(1990, 2030))
def test_mit_is_known_whoever_owns_it(owner: str, year: int) -> None:
    assert identify(MIT.format(owner=f"{year} {owner}")) == "MIT"


def test_layout_does_not_matter_to_the_hash() -> None:
    text = MIT.format(owner="2026 Somebody")
    reflowed = "\r\n".join(f"  * {line}  " for line in re.sub(r"\s+", " ", text).upper().split(" "))
    assert normalised_hash(reflowed) == normalised_hash(text)
    assert normalised_hash(text.replace("free of charge", "for a charge")) != normalised_hash(text)


@pytest.mark.parametrize("clause", [OUR_CLAUSE, "\nThe Software shall be used for Good, not Evil.\n"])
def test_mit_with_another_clause_is_not_mit(clause: str) -> None:
    text = MIT.format(owner="2026 Moonshot AI")
    assert identify(text + clause) is None
    assert identify(text.replace("\nTHE SOFTWARE IS", clause + "\nTHE SOFTWARE IS", 1)) is None


def test_a_clause_that_starts_with_the_word_copyright_is_not_an_owner() -> None:
    clause = "\nCopyright notices shall be displayed in the user interface of every product above 20 million a month.\n"
    assert identify(MIT.format(owner="2026 Somebody") + clause) is None


def test_the_grant_of_apache_cannot_be_taken_out() -> None:
    text = LICENSE.read_text(encoding="utf-8")
    grant = "copyright license to reproduce, prepare Derivative Works of,\n"
    assert grant in text
    assert identify(text.replace(grant, "copyright license to look at, but never to copy,\n")) is None


def test_apache_is_known_whatever_its_layout() -> None:
    paragraphs = LICENSE.read_text(encoding="utf-8").split("\n\n")
    assert identify("\n\n".join(textwrap.fill(paragraph, 60) for paragraph in paragraphs)) == "Apache-2.0"


@settings(deadline=None)
@given(st.data())
def test_a_text_that_lost_a_word_is_unknown(data: st.DataObject) -> None:
    text = LICENSE.read_text(encoding="utf-8")
    not_compared = [line.span() for line in re.finditer(r"(?im)^[ ]*copyright.*$", text)]
    words = [
        word
        for word in re.finditer(r"[A-Za-z0-9]+", text)
        if not any(start <= word.start() < end for start, end in not_compared)
    ]
    lost = data.draw(st.sampled_from(words))
    assert identify(text[: lost.start()] + text[lost.end() :]) is None


def test_carry_copies_licences_notices_and_policies_unchanged(tmp_path: Path) -> None:
    source, target = tmp_path / "base", tmp_path / "child"
    source.mkdir()
    contents = {
        "LICENSE": LICENSE.read_bytes(),
        "LICENSE-MODEL": MIT.format(owner="2025 A").encode().replace(b"\n", b"\r\n"),
        "NOTICE": b"\xef\xbb\xbfTiny \xa9 no UTF-8\r\n",
        "USE_POLICY.md": b"# Be good\n",
    }
    others = {"README.md": b"read me", "config.json": b"{}", "UNLICENSED.txt": b"", "my-license-notes.py": b""}
    for name, content in (contents | others).items():
        (source / name).write_bytes(content)
    (source / "LICENSES").mkdir()

    carried = carry(source, target, inherited_from="base")

    assert {path.name: path.read_bytes() for path in target.iterdir()} == contents
    assert [(licence.file, licence.licence) for licence in carried] == [
        ("LICENSE", "Apache-2.0"),
        ("LICENSE-MODEL", "MIT"),
        ("NOTICE", None),
        ("USE_POLICY.md", None),
    ]
    assert {licence.inherited_from for licence in carried} == {"base"}
    assert [path.name for path in licence_files(target)] == sorted(contents)
    assert carry(target, tmp_path / "grandchild", inherited_from="base") == carried


def test_the_duties_of_kimi_name_the_words_to_show_and_both_thresholds() -> None:
    assert headline_duties("Kimi-K2.5-Modified-MIT") == [
        "ship the licence text",
        "keep the copyright line",
        "display “Kimi K2.5” if monthly active users > 100,000,000 or revenue > 20,000,000 USD",
    ]


def test_conditions_that_must_all_hold_are_joined_by_and() -> None:
    assert any(
        duty.endswith("if operates model as a service and revenue > 20,000,000 USD")
        for duty in headline_duties("Kimi-K3")
    )


@pytest.mark.parametrize("licence", [None, "Never-Heard-Of-1.0", "mit"])
def test_an_unknown_licence_has_the_duty_to_be_read(licence: str | None) -> None:
    assert headline_duties(licence) == ["unknown licence: read it"]


@pytest.mark.parametrize("licence", obligations(), ids=lambda licence: str(licence["id"]))
def test_every_known_licence_shows_all_its_clauses(licence: dict[str, Any]) -> None:
    duties = headline_duties(licence["id"])
    shown = "\n".join(duties)
    clauses = [*licence.get("unconditional", []), *licence.get("conditional", [])]
    forbids = str(licence.get("output_training", "")).startswith("must not")
    assert len(duties) == len(licence.get("redistribution", [])) + len(clauses) + forbids > 0
    for clause in clauses:
        assert clause.get("text", "") in shown
        for part in [*clause.get("if_any", []), *clause.get("if_all", [])]:
            assert part["value"] is True or f"{part['value']:,}" in shown
    assert ("may not train" in shown) == forbids
    assert "_" not in shown


def test_licence_ids_and_texts_are_each_listed_once() -> None:
    ids = [licence["id"] for licence in obligations()]
    texts = [
        text
        for licence in obligations()
        for text in [licence["text_sha256_norm"], *licence.get("texts_without_copyright_lines", [])]
        if text is not None
    ]
    assert len(set(ids)) == len(ids)
    assert len(set(texts)) == len(texts)


def test_the_licence_of_every_known_base_has_facts_or_is_reported_as_unknown() -> None:
    facts = {licence["id"] for licence in obligations()}
    licences = {known.licence for known in known_bases().values()}
    unknown = {licence for licence in licences if headline_duties(licence) == ["unknown licence: read it"]}
    assert unknown == licences - facts == {"LicenseRef-BigCode-OpenRAIL-M"}
