from __future__ import annotations

import hashlib
import html
import random
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from etude.errors import UserError
from etude.files import files_below
from etude.lineage.licences import (
    CONDITION,
    carry,
    headline_duties,
    held,
    identify,
    letters_hash,
    licence_files,
    obligations,
    plain,
    refuse_losses,
)
from etude.lineage.record import CarriedLicence, Lineage
from etude.models.bases import known_bases
from tests.lineage.licence_texts import KIMI, MINIMAX, MIT
from tests.lineage.records import full_record

LICENSE = Path(__file__).resolve().parents[2] / "LICENSE"
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
    assume(not CONDITION.search(plain(owner)))  # an owner called "License" would have to be read
    assert identify(MIT.format(owner=f"{year} {owner}")) == "MIT"


def test_layout_does_not_matter_to_the_hash() -> None:
    text = MIT.format(owner="2026 Somebody")
    reflowed = "\r\n".join(f"  * {line}  " for line in re.sub(r"\s+", " ", text).upper().split(" "))
    assert letters_hash(plain(reflowed)) == letters_hash(plain(text))
    assert letters_hash(plain(text.replace("free of charge", "for a charge"))) != letters_hash(plain(text))


def sprinkled(text: str, invisible: str) -> str:
    chance = random.Random(0)
    return "".join(one + invisible * (one.isalpha() and chance.random() < 0.2) for one in text)


def wrapped(text: str) -> str:
    return "\n".join(textwrap.fill(line, 40) for line in text.splitlines())


def pages(text: str, foot: str) -> str:
    return "".join(
        line + (foot.format(number // 12) if number % 12 == 11 else "")
        for number, line in enumerate(text.splitlines(keepends=True))
    )


def ligatures(text: str) -> str:
    return text.replace("ffi", "ﬃ").replace("fi", "ﬁ").replace("fl", "ﬂ").replace("ff", "ﬀ")


DISGUISES: dict[str, Callable[[str], str]] = {
    "escaped": html.escape,
    "all punctuation escaped": lambda text: re.sub(r"[^\w\s]", lambda found: f"&#{ord(found[0])};", text),
    "named spaces": lambda text: html.escape(text).replace(" ", "&nbsp;").replace("“", "&ldquo;"),
    "line breaks of HTML": lambda text: f"<p>{html.escape(text)}</p>".replace("\n", "<br/>\n"),
    "40 columns": wrapped,
    "ligatures": ligatures,
    "soft hyphens": lambda text: sprinkled(text, "\u00ad"),
    "zero-width spaces": lambda text: sprinkled(text, "\u200b"),
    "word joiners": lambda text: "\ufeff" + sprinkled(text, "\u2060"),
    "full width": lambda text: "".join(
        chr(ord(one) + 0xFEE0) if one.isascii() and one.isalnum() else one for one in text
    ),
    "hyphenated": lambda text: re.sub(r"(?i)(condi)(tion)", r"\1-\n\2", text),
    "escaped twice, as a page": lambda text: (
        f"<!DOCTYPE html><html><body><pre>{html.escape(html.escape(text))}</pre></body></html>"
    ),
    "bold words": lambda text: re.sub(r"\b(\w{7,})\b", r"**\1**", text),
    "escapes of Markdown": lambda text: re.sub(r"([().\-])", r"\\\1", text),
    "a fence of Markdown": lambda text: f"```text\n{text}\n```",
    "30 columns, tabs": lambda text: "\n".join(textwrap.fill(line, 30) for line in text.splitlines()).replace(
        " ", "\t"
    ),
    "page numbers": lambda text: pages(text, "Page {}\n\f"),
    "page numbers in dashes": lambda text: pages(text, "\n- {} -\n"),
    "full width, brackets too": lambda text: "".join(
        chr(ord(one) + 0xFEE0) if "!" <= one <= "~" else one for one in text
    ),
    "quoted": lambda text: "\n".join(f"> {line}" for line in text.splitlines()),
    "a comment, CRLF": lambda text: "\r\n".join(f" * {line}" for line in text.splitlines()),
    "all at once": lambda text: html.escape(wrapped(ligatures(sprinkled(text, "\u200b")))),
}
APACHE = LICENSE.read_text(encoding="utf-8")
KNOWN = {
    "MIT": MIT.format(owner="2026 Somebody"),
    "Kimi-K2.5-Modified-MIT": KIMI,
    "MiniMax-M2": MINIMAX,
    "Apache-2.0": APACHE,
    "long words": "Section 1.1\n\nSee https://www.example.org/a-very-long-address/that-no-column-of-40-holds/licence for 2.5 % & more.",
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("disguise", DISGUISES)
def test_a_text_is_known_as_it_is_read_however_it_is_written(name: str, disguise: str) -> None:
    assert identify(DISGUISES[disguise](KNOWN[name]), facts_with(KNOWN)) == name


@settings(deadline=None)
@given(st.sampled_from(sorted(KNOWN)), st.sampled_from(sorted(DISGUISES)), st.data())
def test_a_changed_number_makes_another_text_however_it_is_written(
    name: str, disguise: str, data: st.DataObject
) -> None:
    text = re.sub(r"(?im)^[\W_]*copyright.*$", "", KNOWN[name])
    facts = facts_with(KNOWN | {name: text})
    assert identify(DISGUISES[disguise](text), facts) == name
    numbers = list(re.finditer(r"\d+|third|one|two", text))
    if not numbers:
        return
    number = data.draw(st.sampled_from(numbers))
    other = data.draw(
        st.sampled_from([f"{number[0]}0", f"{number[0]}.5", f"{number[0]}²", f"9{number[0]}", "6 7", "٣"])
    )
    assert identify(DISGUISES[disguise](text[: number.start()] + other + text[number.end() :]), facts) is None


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_added_in_another_script_is_not_overlooked(name: str) -> None:
    for clause in ("\nНе для продажи.", "\n不得用于商业用途。"):
        assert identify(KNOWN[name] + clause, facts_with(KNOWN)) is None


def facts_with(texts: dict[str, str]) -> list[dict[str, Any]]:
    """The known facts, and those of texts that are none of them."""
    others = [{"id": name, "text_sha256_letters": [letters_hash(plain(texts[name]))]} for name in texts]
    return [*obligations(), *others]


@pytest.mark.parametrize("clause", [OUR_CLAUSE, "\nThe Software shall be used for Good, not Evil.\n"])
def test_mit_with_another_clause_is_not_mit(clause: str) -> None:
    text = MIT.format(owner="2026 Moonshot AI")
    assert identify(text + clause) is None
    assert identify(text.replace("\nTHE SOFTWARE IS", clause + "\nTHE SOFTWARE IS", 1)) is None


def test_a_clause_that_starts_with_the_word_copyright_is_not_an_owner() -> None:
    clause = "\nCopyright notices shall be displayed in the user interface of every product above 20 million a month.\n"
    assert identify(MIT.format(owner="2026 Somebody") + clause) is None


@pytest.mark.parametrize(
    "owner",
    [
        "2026 Acme. Commercial use above 10 million users is not permitted.",
        "2026 Acme, who may revoke it at any time",
        "2026 Acme; this licence ends on 31 December 2026",
        "2026 Acme. For academic purposes",
        "2026 Acme " + "and others " * 20,
    ],
)
def test_a_condition_in_the_owner_s_line_is_not_overlooked(owner: str) -> None:
    assert identify(MIT.format(owner="2026 Acme Research, Brian May and others <a@b.c>. All rights reserved.")) == "MIT"
    assert identify(MIT.format(owner=owner)) is None
    assert identify(APACHE + f"\nCopyright (c) {owner}\n") is None


@pytest.mark.parametrize(
    ("words", "others"),
    [
        ("100 million", "100 thousand"),
        ("20 million", "\u202e20\u202c million"),
        ("20 million", "&#x202e;20&#x202c; million"),
        ("free of charge", "~~free of charge~~"),
        ("free of charge", "".join(f"{one}\u0336" for one in "free of charge")),
        ("free of charge", '<span style="display:none">free of charge</span>'),
        ("is hereby", "is not hereby"),
        ("50%", "50‰"),
        ("fifty percent (50%)", "fifty percent (60%)"),
        ("You may reproduce", "You may not reproduce"),
    ],
)
def test_what_changes_the_meaning_for_a_reader_is_another_text(words: str, others: str) -> None:
    text = KIMI if words in KIMI else APACHE
    assert words in text
    assert identify(text.replace(words, others)) is None


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


CONTENTS = {
    "LICENSE": LICENSE.read_bytes(),
    "LICENSE-MODEL": MIT.format(owner="2025 A").encode().replace(b"\n", b"\r\n"),
    "NOTICE": b"\xef\xbb\xbfTiny \xa9 no UTF-8\r\n",
    "USE_POLICY.md": b"# Be good\n",
}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def below(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files_below(folder)}


def test_carry_copies_licences_notices_and_policies_unchanged(tmp_path: Path) -> None:
    others = {"README.md": b"read me", "config.json": b"{}", "UNLICENSED.txt": b"", "my-license-notes.py": b""}
    source, target = write(tmp_path / "base", CONTENTS | others), tmp_path / "child"
    carry(source, target, "org/base")
    assert below(target) == {f"LICENSES/org-base/{name}": content for name, content in CONTENTS.items()}
    assert [(licence.file, licence.licence) for licence in held(target)] == [
        ("LICENSES/org-base/LICENSE", "Apache-2.0"),
        ("LICENSES/org-base/LICENSE-MODEL", "MIT"),
        ("LICENSES/org-base/NOTICE", None),
        ("LICENSES/org-base/USE_POLICY.md", None),
    ]
    assert {licence.inherited_from for licence in held(target)} == {"org-base"}
    assert licence_files(source) == [source / name for name in CONTENTS]
    carry(target, tmp_path / "grandchild", "child")
    assert below(tmp_path / "grandchild") == below(target)
    assert held(tmp_path / "grandchild") == held(target)


def test_a_base_keeps_its_files_at_the_top_and_they_are_counted_once(tmp_path: Path) -> None:
    base = write(tmp_path / "base", {"LICENSE": b"be nice"})
    carry(base, base, "tiny")
    assert [licence.file for licence in held(base)] == ["LICENSES/tiny/LICENSE"]
    carry(base, tmp_path / "child", "base")
    assert below(tmp_path / "child") == {"LICENSES/tiny/LICENSE": b"be nice"}


def test_a_model_s_own_licence_is_inherited_under_its_name(tmp_path: Path) -> None:
    made = write(
        tmp_path / "made", {"LICENSE": b"ours", "LICENSES/tiny/LICENSE": b"be nice", "LICENSES/MIT.txt": b"MIT"}
    )
    assert next((licence.file, licence.inherited_from) for licence in held(made)) == ("LICENSE", "this recipe")
    carry(made, tmp_path / "child", "pretrain")
    assert below(tmp_path / "child") == {
        "LICENSES/pretrain/LICENSE": b"ours",
        "LICENSES/pretrain/MIT.txt": b"MIT",
        "LICENSES/tiny/LICENSE": b"be nice",
    }


def test_two_ancestors_of_one_name_both_keep_their_files(tmp_path: Path) -> None:
    child = tmp_path / "child"
    for text in (b"one", b"two", b"one"):
        carry(write(tmp_path / "parent", {"LICENSE": text}), child, "tiny")
    second = f"LICENSES/tiny-{hashlib.sha256(b'two').hexdigest()[:8]}/LICENSE"
    assert below(child) == {"LICENSES/tiny/LICENSE": b"one", second: b"two"}


def test_a_licence_that_an_ancestor_had_may_not_be_lost(tmp_path: Path) -> None:
    text = b"be nice"
    listed = CarriedLicence(
        file="LICENSE", sha256=hashlib.sha256(text).hexdigest(), licence=None, inherited_from="tiny"
    )
    record = full_record(parents=[], licences=[listed])
    lineage = Lineage.of(record, [])
    model = write(tmp_path / "model", {"LICENSES/tiny/LICENSE": text})
    refuse_losses(model, [lineage])
    write(model, {"LICENSES/tiny/LICENSE": text + b"!"})
    with pytest.raises(UserError, match=rf"LICENSE of cpt \(from tiny\) is missing .* {listed.sha256[:12]}"):
        refuse_losses(model, [lineage])


def test_the_duties_of_kimi_name_the_words_to_show_and_both_thresholds() -> None:
    assert headline_duties("Kimi-K2.5-Modified-MIT") == [
        "ship the licence text",
        "keep the copyright line",
        "display “Kimi K2.5” if commercial use and (monthly active users > 100,000,000 or revenue > 20,000,000 USD)",
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
        assert all(words in shown for words in clause.get("text", "").split("|"))
        for part in [*clause.get("if_any", []), *clause.get("if_all", [])]:
            value = part["value"]
            assert value is True or (", ".join(value) if isinstance(value, list) else f"{value:,}") in shown
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
