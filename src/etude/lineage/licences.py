"""Licence files travel with the weights; the licence is known by its text, never by a name or a tag.

`licence_obligations.json` holds the facts by the hash of the normalised text. A text that is not in it is `None`:
somebody has to read it. Facts for engineering, not legal advice.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from etude.files import sha256_file, whole_file
from etude.lineage.record import CarriedLicence

if TYPE_CHECKING:
    from pathlib import Path

LICENCE_NAME = re.compile(r"(LICEN[CS]E|NOTICE|COPYING|COPYRIGHT|USE_POLICY|USAGE_POLICY)([-_. ].*)?", re.IGNORECASE)

# Not every line that starts with the word: "copyright notices shall be displayed" is a duty, not an owner.
OWNER_LINE = re.compile(r"\s*copyright\s*(\(c\)|©|\[|\{|<|\d)", re.IGNORECASE)

DUTY_TEXTS = {
    "licence_copy": "ship the licence text",
    "copyright_notice": "keep the copyright line",
    "retain_notices": "keep notices",
    "NOTICE_passthrough_if_present": "pass NOTICE on",
    "modified_files_notice": "mark changed files",
}


def normalised_hash(text: str) -> str:
    """Return the hash that identifies a licence text whatever its layout: lower case, runs of other characters → one space."""
    return hashlib.sha256(re.sub(r"[^a-z0-9]+", " ", text.lower()).strip().encode()).hexdigest()


@cache
def obligations() -> list[dict[str, Any]]:
    """Return the facts of all known licences."""
    text = resources.files("etude.lineage").joinpath("licence_obligations.json").read_text(encoding="utf-8")
    return list(json.loads(text)["licences"])


def identify(text: str) -> str | None:
    """Return the id of a licence text, or None if no known licence has exactly these words."""
    whole = normalised_hash(text)
    # Copies of MIT and BSD differ in the lines that name the owner.
    unowned = normalised_hash("\n".join(line for line in text.splitlines() if not OWNER_LINE.match(line)))
    for licence in obligations():
        if whole == licence["text_sha256_norm"] or unowned in licence.get("texts_without_copyright_lines", []):
            return str(licence["id"])
    return None


def headline_duties(licence_id: str | None) -> list[str]:
    """Return the duties of a licence in a few words each; for an unknown one, the duty to read it."""
    licence = next((entry for entry in obligations() if entry["id"] == licence_id), None)
    if licence is None:
        return ["unknown licence: read it"]
    duties = [DUTY_TEXTS.get(duty, duty.replace("_", " ")) for duty in licence.get("redistribution", [])]
    for clause in [*licence.get("unconditional", []), *licence.get("conditional", [])]:
        what = clause["duty"].replace("_", " ") + (f" “{clause['text']}”" if "text" in clause else "")
        triggers = " or ".join(_trigger(part) for part in clause.get("if_any", []))
        triggers = triggers or " and ".join(_trigger(part) for part in clause.get("if_all", []))
        duties.append(f"{what} if {triggers}" if triggers else what)
    if str(licence.get("output_training", "")).startswith("must not"):
        duties.append("outputs may not train other models")
    return duties


def _trigger(part: dict[str, Any]) -> str:
    metric = str(part["metric"]).replace("_", " ")
    if part["value"] is True:
        return metric
    return f"{metric} {part['op']} {part['value']:,}{' ' + part['currency'] if 'currency' in part else ''}"


def licence_files(folder: Path) -> list[Path]:
    """Return the licence, notice and policy files at the top of a folder, in name order."""
    return sorted(path for path in folder.iterdir() if path.is_file() and LICENCE_NAME.fullmatch(path.name))


def carry(source: Path, target: Path, inherited_from: str) -> list[CarriedLicence]:
    """Copy the licence files of a model's folder to its child's, unchanged, and return what was carried."""
    carried = []
    for file in licence_files(source):
        with whole_file(target / file.name) as beside:
            shutil.copyfile(file, beside)
        known = identify(file.read_text(encoding="utf-8", errors="replace"))
        about = {"file": file.name, "sha256": sha256_file(file), "licence": known, "inherited_from": inherited_from}
        carried.append(CarriedLicence.model_validate(about))
    return carried
