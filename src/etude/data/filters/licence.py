"""The licence of each document, by the surest evidence there is, cheapest first.

1. an SPDX tag in the file's heading;
2. the words of a grant in the heading ("… redistribute it and/or modify it under the terms of the GNU …"). The name of a
   licence alone is no grant: licence checkers and their tests are full of names;
3. the nearest licence file above it: by the hash of its normalised words, else by a classifier, whose finding counts
   only if next to nothing is left over (people add clauses to well-known texts, and detectors read past them);
4. what the metadata state; where they and the licence file differ, both must be allowed;
5. what the user declares.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import lru_cache
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from licenseclassifier import identify_license

from etude.data.document import UNKNOWN, Document, LicenceFile
from etude.data.filters import HEAD, heading
from etude.data.filters.spdx import canonical, ids
from etude.lineage.licences import identify, obligations

if TYPE_CHECKING:
    from collections.abc import Iterable

TAG = re.compile(r"SPDX-License-Identifier:[ \t]*([^\n*]+?)[ \t]*(?:\*+/|-->|\"\"\"|$)", re.MULTILINE)
CLUES = ("licen", "gpl", " mpl", "confidential", "prohibited", "forbidden")  # else a heading says nothing
PROPRIETARY = "LicenseRef-proprietary"
# In lower case, and every branch begins with a letter: otherwise the search is ten times slower.
FAMILIES = {
    "AGPL": r"affero\s+(?:gnu\s+)?general\s+public|agpl", "GPL": r"general\s+public|gpl",
    "LGPL": r"lesser\s+(?:gnu\s+)?general\s+public|library\s+general\s+public|lgpl", "MPL": r"mozilla\s+public|mpl",
    "EPL": r"eclipse\s+public|epl", "CDDL": r"common\s+development\s+and\s+distribution|cddl",
    "EUPL": r"european\s+union\s+public|eupl", "CC-BY-SA": r"attribution-sharealike|cc-by-sa",
    "CC-BY-NC": r"attribution-noncommercial|cc-by-nc", "Apache": r"apache\s+(?:software\s+)?licen[cs]e",
    PROPRIETARY: r"proprietary\s+and\s+confidential|confidential\s+and\s+proprietary"
                 r"|unauthori[sz]ed\s+(?:copying|use|reproduction|distribution)\b[^.]{0,90}\b(?:prohibited|forbidden)",
}  # fmt: skip
NAME = re.compile("|".join(FAMILIES.values()))
NEWEST = {"EUPL": "1.2", "CDDL": "1.0", "CC-BY-SA": "4.0", "CC-BY-NC": "4.0"}  # of the others it is 2.0
GRANT = re.compile(  # what must stand before the name of a licence for it to be the licence of this file
    r"""(?:
        redistribute\s+(?:it|this|them)\b[^.]{0,60}?\bmodify\b[^.]{0,60}?
      | \b(?:this|these|the)\s+(?:[\w-]+\s+){0,3}?
        (?:files?|programs?|software|library|module|package|code|project|script|work|plugin|form)\b[^.]{0,40}?\b(?:is|are|be)\b[^.]{0,40}?
      | \blicenses\s+this\s+\w+\s+to\s+you\s+
      | ^\W*(?-i:Licen[cs]ed|Released|Distributed|Published|Available)\s[^.]{0,30}?
    )
    (?:under|to|by)\s+(?:the\s+|a\s+)?(?:terms?(?:\s+and\s+conditions)?\s+of\s+)?(?:either\s+)?(?:version\s+(?P<version>[\d.]+)\s+of\s+)?
    (?:the\s+|a\s+)?(?:gnu\s+|creative\s+commons\s+)?\Z""",
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
# Files that say what parts are under, not the whole.
ATTRIBUTION = re.compile(r"notice|copyright|.*(?:third|3rd|extern|depend|vendor|bundle|\.python$)", re.IGNORECASE)
OWNER = re.compile(r"^\W*(?:(?:portions\s+)?copyright|\(c\)|©|all rights reserved).*$", re.IGNORECASE | re.MULTILINE)
GNU_APPENDIX = re.compile(r"How to Apply These Terms to Your New (?:Programs|Libraries).*", re.DOTALL | re.IGNORECASE)
POINTER = re.compile(r"(?:licen[cs]es?|copying)[./_-]\w|include::|\.\./", re.IGNORECASE)
# In what is left of a licence text, words that lay down conditions mean another licence, or a changed one.
CONDITIONS = re.compile(
    r"\b(?:must|shall|may\s+not|not\s+(?:be\s+)?(?:permitted|allowed|for)|prohibit\w*|provided\s+that|commercial(?:ly)?|non-?commercial"
    r"|(?<!free\sof\s)(?<!without\s)restrict\w*|hereby\s+granted|permission\s+to|commons\s+clause|field\s+of\s+use|only\s+(?:for|if|to|with)"
    r"|required\s+to|free\s+for)\b",
    re.IGNORECASE,
)
LEFT_OVER = 15  # words of explanation that no second witness has to confirm
Told = tuple[str, str]  # a licence, and what told it


class LicenceText(NamedTuple):
    """What a licence file says: the licences in it, how that is known, and whether it says more than they do."""

    found: tuple[str, ...]
    evidence: str
    more: bool = False  # explanations besides; the metadata have to agree
    changed: bool = False  # conditions that are none of the licences found


class Licences:
    """The licences of one part of a source."""

    def __init__(self, files: Iterable[LicenceFile], stated: str | None, declared: str | None) -> None:
        self._stated = canonical(stated) if stated else None
        self._declared = canonical(declared) if declared else None
        texts: dict[str, list[LicenceText]] = defaultdict(list)
        for file in files:
            if not ATTRIBUTION.match(file.name):  # in a wheel, they speak for what lies beside its metadata
                folder = re.sub(r"(?:^|/)[^/]+\.dist-info(?:/.*)?$", "", file.folder.strip("/"))
                texts[folder].append(read_licence(file.text))
        self._folders = {folder: told for folder in texts if (told := self._together(folder, texts[folder]))}

    def of(self, document: Document) -> Told:
        """Return the licence of a document and what told it."""
        told = from_heading(document.text)
        if told is None and document.licence != UNKNOWN:
            told = canonical(document.licence) or UNKNOWN, document.evidence
        if told is None:
            above = [str(folder) for folder in PurePosixPath(document.path).parents]
            nearest = next((self._folders[name] for name in above if name in self._folders), self._folders.get(""))
            told = nearest or ((self._stated, "metadata") if self._stated else (UNKNOWN, ""))
        return (self._declared, "declared") if told[0] == UNKNOWN and self._declared else told

    def _together(self, folder: str, texts: list[LicenceText]) -> Told | None:
        """Put together what the files of one folder say, at the top also the metadata; None if they only point elsewhere."""
        texts = [text for text in texts if text.found or text.more or text.changed]
        if not texts:
            return None
        found = list(dict.fromkeys(spdx for text in texts for spdx in text.found))
        families, stated = set(map(_family, found)), set(map(_family, ids(self._stated or "")))
        agreed = bool(stated) and stated <= families
        if not found or any(text.changed or (text.more and not agreed) for text in texts):
            return UNKNOWN, "classifier"
        evidence = "text-hash" if all(text.evidence == "text-hash" for text in texts) else "classifier"
        if self._stated and stated == families:
            return self._stated, evidence  # it also knows "or" from "and", and "or later" from "only"
        return _joined([*found, *([self._stated] if self._stated and not agreed and not folder else [])]), evidence


def _family(spdx: str) -> str:
    return re.sub(r"(?:-only|-or-later|\+)$", "", spdx)


def _joined(expressions: Iterable[str]) -> str:
    parts = (part for one in expressions for part in ([one] if "(" in one else one.split(" AND ")))
    distinct = list(dict.fromkeys(parts))
    return " AND ".join(f"({one})" if " OR " in one and len(distinct) > 1 else one for one in distinct)


def from_heading(text: str) -> Told | None:
    """Return the licence that a file's own heading grants, and how it says so."""
    head = text[:HEAD].lower()
    if not any(clue in head for clue in CLUES):
        return None
    top = heading(text)
    if tags := [canonical(tag) or UNKNOWN for tag in TAG.findall(top)]:
        return (UNKNOWN if UNKNOWN in tags else _joined(tags)), "spdx-tag"
    names = NAME.finditer(top.replace("İ", "I").lower())  # the one letter that grows in lower case
    granted = [told for name in names if (told := _granted(top, name))]
    return (_joined(granted), "header") if granted else None


def _granted(top: str, name: re.Match[str]) -> str | None:
    """Return the licence that is named at a place, if what stands before the name grants it."""
    family = next(family for family, pattern in FAMILIES.items() if re.fullmatch(pattern, name[0]))
    if family == PROPRIETARY:
        return family
    grant = GRANT.search(top[max(0, name.start() - 160) : name.start()])
    if not grant:
        return None
    rest = top[name.end() : name.end() + 150]
    versions = re.findall(r"(?:\bv|\bversion|[ -])\.?\s*(\d(?:\.\d)?)\b", rest, re.IGNORECASE)
    told = grant["version"] or (versions[0] if versions else None)
    number = f"{told}.0" if told and "." not in told else told
    if family.endswith("GPL"):
        any_version = "2.0" if family == "LGPL" else "1.0"
        return f"{family}-{number or any_version}-{'or-later' if number is None or 'later' in rest else 'only'}"
    return f"{family}-{number or NEWEST.get(family, '2.0')}"


@lru_cache(maxsize=4096)
def read_licence(text: str) -> LicenceText:
    """Say what licences a licence file contains. Cached: repositories share their licence texts."""
    if known := identify(text):
        return LicenceText((next(entry["spdx"] for entry in obligations() if entry["id"] == known),), "text-hash")
    text = GNU_APPENDIX.sub("", text)
    found = [canonical(tag) for tag in TAG.findall(text)]
    rest, position = "", 0
    for match in identify_license(text, 0):
        found.append(canonical(match.id) or match.id)
        rest, position = rest + text[position : match.start] + "\n", max(position, match.end)
    rest += text[position:]
    words = len(re.findall(r"[^\W_]{2,}", TAG.sub("", OWNER.sub("", rest))))
    licences = tuple(dict.fromkeys(filter(None, found)))
    pointer = not licences and words < 60 and POINTER.search(rest) is not None
    more = not pointer and (words > LEFT_OVER or not licences)
    owners = re.findall(r"(?i)(?:\A|\n\s*\n)\W*copyright.*", text)  # the classifier takes any such line for one
    told = [rest, *owners]
    return LicenceText(licences, "classifier", more=more, changed=any(map(CONDITIONS.search, told)))
