"""Licence files travel with the weights; the licence is known by its text, never by a name or a tag.

`licence_obligations.json` holds the facts by the hash of the normalised text. A text that is not in it is `None`:
somebody has to read it. Facts for engineering, not legal advice.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
import shutil
import unicodedata
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import UserError
from etude.files import files_below, sha256_file, whole_file
from etude.lineage.record import CarriedLicence, Lineage

if TYPE_CHECKING:
    from collections.abc import Iterable


LICENSES = "LICENSES"  # the folder in a model's folder with a folder for each ancestor, its files as they were received
PROPRIETARY = "LicenseRef-proprietary"  # the terms of code that its owner keeps; no list has them
OWN = "this recipe"  # where a licence comes from that came with no ancestor

LICENCE_NAME = re.compile(r"(LICEN[CS]E|NOTICE|COPYING|COPYRIGHT|USE_POLICY|USAGE_POLICY)([-_. ].*)?", re.IGNORECASE)

# Not every line that starts with the word: "copyright notices shall be displayed" is a duty, not an owner, and an owner's line that
# goes on with a condition has to be read.
OWNER_LINE = re.compile(r"[\W_]*copyright[\s*\\]*([(（]c[\\]*[)）]|©|\\?\[|\{|<|\d)", re.IGNORECASE)
CONDITION = re.compile(
    r"\b(must|shall|not|no|only|us(e|es|ed|age|ing)|licen[cs]\w*|permi\w+|prohibit\w*|forbid\w*|revo\w+|pays?|paid|fees?|royalt\w+"
    r"|commercial\w*|revenue|conditions?|require\w*|terminat\w*|expire\w*|delete\w*|agree\w*|except\w*|unless|grant\w*|restrict\w*|purposes?|until)\b"
)
OWNER_LENGTH = 200  # characters
# Simple tags of HTML, fences of Markdown, page numbers: a tag with attributes may hide what it holds.
LAYOUT = re.compile(
    r"(?im)<!doctype html>|</?(?:html|body|p|br|hr|b|i|em|strong|div|span|li|ul|ol|pre|code|blockquote|h[1-6])\s*/?>"
    r"|^[ \t>]*```(?:text|txt|markdown|md)[ \t]*$|^[ \t]*(?:page \d+(?: of \d+)?|[-–—] ?\d+ ?[-–—])[ \t]*$"
)
# What a reader sees and letters do not show: struck-out words, an order of letters that is overridden, thousandths.
UNSEEN = re.compile(r"(?<!~)~~(?!~)|[\u0334-\u0338\u202a-\u202e\u2066-\u2069‰‱]")


def plain(text: str) -> str:
    """Return a text as it is read: entities and simple layout resolved, ligatures as letters, nothing invisible, lower case.

    Letters and numbers of other kinds become the usual ones where they mean the same (“ﬁ”, “２”), or stay and make another text (“²”).
    """
    shown = LAYOUT.sub(" ", html.unescape(html.unescape(LAYOUT.sub(" ", text))))
    kinds = [(letter, unicodedata.category(letter)) for letter in shown]
    kept = (unicodedata.normalize("NFKC", one) if kind[0] in "LN" else one for one, kind in kinds if kind != "Cf")
    return "".join(kept).lower()


def is_proprietary(expression: str) -> bool:
    """Whether whatever one chooses of an SPDX expression is proprietary."""
    return all(PROPRIETARY.lower() in choice.lower() for choice in expression.split(" OR "))


def letters_hash(text: str) -> str:
    """Return the hash that identifies a `plain` text whatever its layout: its letters and digits, wherever lines and words are broken.

    Only between digits a gap counts, as one space: 2.0 is not 20.
    """
    gaps = re.sub(r"(?<=\d)[\W_]+(?=\d)", " ", text)
    return hashlib.sha256(re.sub(r"[^\w ]|_|(?<!\d) | (?!\d)", "", gaps).encode()).hexdigest()


def words_hash(text: str) -> str:
    """Return the older hash, for texts of which only that is known: runs of what is no letter from a to z or digit → one space."""
    return hashlib.sha256(re.sub(r"[^a-z0-9]+", " ", text).strip().encode()).hexdigest()


@cache
def _facts() -> dict[str, Any]:
    return dict(json.loads(Path(__file__).with_name("licence_obligations.json").read_text(encoding="utf-8")))


def obligations() -> list[dict[str, Any]]:
    """Return the facts of all known licences."""
    return list(_facts()["licences"])


def identify(text: str, facts: Iterable[dict[str, Any]] | None = None) -> str | None:
    """Return the id of a licence text, or None if none of the licences we have facts of has exactly these words."""
    shown = plain(text)
    if UNSEEN.search(html.unescape(html.unescape(text))):
        return None
    # Copies of MIT and BSD differ in the lines that name the owner.
    unowned = "\n".join(line for line in shown.splitlines() if not _names_owner(line))
    letters, words = {letters_hash(shown), letters_hash(unowned)}, words_hash(shown)
    for licence in obligations() if facts is None else facts:
        known = licence.get("text_sha256_letters")
        if letters.intersection(known) if known else words == licence["text_sha256_norm"]:
            return str(licence["id"])
    return None


def _names_owner(line: str) -> bool:
    return bool(OWNER_LINE.match(line)) and len(line) <= OWNER_LENGTH and not CONDITION.search(line)


def headline_duties(licence_id: str | None) -> list[str]:
    """Return the duties of a licence in a few words each; for an unknown one, the duty to read it."""
    licence = next((entry for entry in obligations() if entry["id"] == licence_id), None)
    if licence is None:
        return ["unknown licence: read it"]
    duties = [duty_text(duty) for duty in licence.get("redistribution", [])]
    duties += [clause_text(clause) for clause in [*licence.get("unconditional", []), *licence.get("conditional", [])]]
    if str(licence.get("output_training", "")).startswith("must not"):
        duties.append("outputs may not train other models")
    return duties


def duty_text(duty: str) -> str:
    """Return a duty of the facts in words."""
    return str(duty_facts(duty)["text"])


def duty_facts(duty: str) -> dict[str, Any]:
    """Return kind and text of a duty; what stands in brackets after its name is a remark."""
    name = duty.partition("(")[0]
    return dict(_facts()["duties"].get(name, {"kind": "agreement", "text": name.replace("_", " ")}))


def clause_text(clause: dict[str, Any]) -> str:
    """Return a clause in words: the duty, the words it is about, its conditions."""
    words = " or ".join(f"“{word}”" for word in clause["text"].split("|")) if "text" in clause else ""
    some = " or ".join(_trigger(part) for part in clause.get("if_any", []))
    triggers = [_trigger(part) for part in clause.get("if_all", [])]
    triggers += [f"({some})" if triggers else some] if some else []
    when = f"if {' and '.join(triggers)}" if triggers else ""
    return " ".join(part for part in (duty_text(clause["duty"]), words, when) if part)


def _trigger(part: dict[str, Any]) -> str:
    metric = str(part["metric"]).replace("_", " ")
    if part["value"] is True:
        return metric
    if part["op"] == "in":
        return f"{metric} in {', '.join(part['value'])}"
    return f"{metric} {part['op']} {part['value']:,}{' ' + part['currency'] if 'currency' in part else ''}"


def licence_files(folder: Path) -> list[Path]:
    """Return the licence, notice and policy files at the top of a folder and all those below LICENSES, in name order."""
    top = sorted(path for path in folder.iterdir() if path.is_file() and LICENCE_NAME.fullmatch(path.name))
    return top + files_below(folder / LICENSES)


def folder_name(ancestor: str) -> str:
    """Return what the folder of an ancestor is called below LICENSES."""
    return re.sub(r"[^\w.-]+", "-", ancestor).strip(".") or "unnamed"


def carry(source: Path, target: Path, ancestor: str) -> None:
    """Copy the licence files of a model's folder to its child's: those at its top as the ancestor's, the others as they lie.

    A folder that another ancestor of the same name has filled is left alone: then ours has a part of the digest in its name.
    """
    ancestor = folder_name(ancestor)
    below = {sha256_file(file) for file in files_below(source / LICENSES)}
    for file in licence_files(source):
        digest, parts = sha256_file(file), file.relative_to(source).parts
        if file.parent == source and digest in below:
            continue  # a base's own, which it has as an ancestor's as well
        # LICENSES/ANCESTOR/… stays whose it was
        whose, name = (parts[1], "/".join(parts[2:])) if len(parts) > 2 else (ancestor, file.name)
        place = target / LICENSES / whose / name
        if place.exists() and sha256_file(place) != digest:
            place = target / LICENSES / f"{whose}-{digest[:8]}" / name
        with whole_file(place) as beside:
            shutil.copyfile(file, beside)


def held(model: Path) -> list[CarriedLicence]:
    """Return the licence files of a model's folder. One at its top counts if no ancestor brought it: it is the model's own."""
    files = {file: sha256_file(file) for file in licence_files(model)}
    inherited = {digest for file, digest in files.items() if file.parent != model}
    own = {file: digest for file, digest in files.items() if file.parent != model or digest not in inherited}
    licences = []
    for file, digest in own.items():
        place, licence = file.relative_to(model), identify(file.read_text(encoding="utf-8", errors="replace"))
        origin = OWN if file.parent == model else place.parts[1]
        licences.append(CarriedLicence(file=place.as_posix(), sha256=digest, licence=licence, inherited_from=origin))
    return licences


def refuse_losses(model: Path, lineages: Iterable[Lineage]) -> None:
    """Refuse a model that lacks a licence file which one of its ancestors had."""
    present = {sha256_file(file) for file in licence_files(model)}
    records = [record for lineage in lineages for record in lineage.records.values()]
    for record, lost in [(each, licence) for each in records for licence in each.licences]:
        if lost.sha256 not in present:
            what = f"the licence file {lost.file} of {record.stage} (from {lost.inherited_from}) is missing or altered beside"
            fix = f"put back the file with SHA-256 {lost.sha256[:12]}… and run again"
            raise UserError(f"{what} its weights, and must travel on: {fix}")
