"""The licence of each document, by the surest evidence there is, cheapest first; and whether a source's policy allows it.

1. an SPDX tag in the file's heading;
2. the words of a grant in the heading ("… redistribute it and/or modify it under the terms of the GNU …"). The name of a
   licence alone is no grant: licence checkers and their tests are full of names;
3. the nearest licence file above it: by the hash of its normalised words, else by a classifier, whose finding counts
   only if next to nothing is left over (people add clauses to well-known texts, and detectors read past them);
4. what the metadata state; where they and the licence file differ, both must be allowed;
5. what the user declares.

Licences are SPDX expressions: `A OR B` needs one side to be allowed, `A AND B` both; `A WITH exception` is judged as A, because
an exception only adds permissions. The lists are facts for engineering, not legal advice.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from email.parser import BytesHeaderParser
from functools import lru_cache
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from licenseclassifier import identify_license
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from etude.data.codebase import TABLES
from etude.data.document import UNKNOWN, Document
from etude.data.filters.content import HEAD, heading
from etude.lineage.licences import PROPRIETARY, identify, obligations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

PERMISSIVE = frozenset(name.lower() for name in TABLES["permissive"])
COPYLEFT = tuple(TABLES["copyleft"])  # how their ids begin
FILLERS = {"the", "license", "licence", "software", "foundation", "version", "v", "clause", "style", "public", "gnu"}
NAMES: dict[str, str] = TABLES["licences"]
_ID = re.compile(r"(?<![^\s()])(?<!WITH )(?!(?:AND|OR|WITH)\b)[^\s()]+")


@lru_cache(maxsize=1024)
def canonical(expression: str) -> str | None:
    """Return a valid SPDX expression as SPDX writes it, `GPL-2.0` and `GPL-2.0+` as what they mean; None for anything else.

    `proprietary` and `ours` are what people write for code that they keep.
    """
    if expression.strip().lower() in {"proprietary", "ours"}:
        return PROPRIETARY
    try:
        written = str(canonicalize_license_expression(expression))
    except InvalidLicenseExpression:
        return None
    gnu = r"\b([AL]?GPL-\d\.\d)(\+?)(?![\w.-])"
    return re.sub(gnu, lambda match: match[1] + ("-or-later" if match[2] else "-only"), written)


def ids(expression: str) -> list[str]:
    """Return the licences of a canonical expression, in order, without their exceptions."""
    return _ID.findall(expression)


def evaluate(expression: str, allowed: Callable[[str], bool]) -> bool:
    """Say whether a canonical expression allows use, given what is allowed of single licences."""
    signs = _ID.sub(lambda spdx: "+" if allowed(spdx[0]) else "-", re.sub(r"WITH [^\s()]+", "", expression))
    while "(" in signs:
        signs = re.sub(r"\(([^()]*)\)", lambda inner: _sign(inner[1]), signs)
    return _sign(signs) == "+"


def _sign(flat: str) -> str:
    """Return the sign of signs joined by AND and OR without brackets: AND binds closer."""
    return "+" if any("-" not in side for side in flat.split("OR")) else "-"


def stated_in(metadata: bytes) -> str | None:
    """Return what PKG-INFO states: an expression, else the classifiers (all of them hold), else the plain field."""
    headers = BytesHeaderParser().parsebytes(metadata)
    if expression := headers.get("License-Expression"):
        return spdx_of(str(expression))
    classifiers = [str(line).split(" :: ") for line in headers.get_all("Classifier", [])]
    names = {parts[-1] for parts in classifiers if parts[0] == "License" and parts[-1] != "OSI Approved"}
    if not names:
        return spdx_of(str(headers.get("License", "")))
    ids = {spdx_of(name) for name in names}
    return None if None in ids else " AND ".join(sorted(filter(None, ids)))


def spdx_of(name: str) -> str | None:
    """Return the SPDX expression a name stands for, if that is beyond doubt; of `Long Name (SHORT)`, SHORT is looked at."""
    short = re.fullmatch(r"[^()]*\(([^()]+)\)", name.strip())
    name = short[1] if short else name.strip()
    words = set(re.findall(r"[a-z]+v\d\+?|[a-z]+|\d+(?:\.\d+)*", name.lower())) - FILLERS
    return canonical(name) or NAMES.get(" ".join(sorted(words)))


def refusal(licence: str, licences: str | list[str], unknown: str = "drop") -> str | None:
    """Return why a source with these settings drops documents under a licence, or None. No SPDX expression is unknown."""

    def allows(spdx: str) -> bool:
        spdx = spdx.lower().removesuffix("+")
        if isinstance(licences, list):  # "or later" may be used as what it is later than
            listed = {(canonical(each) or each).lower() for each in licences}
            return spdx in listed or spdx.replace("-or-later", "-only") in listed
        return licences == "any" or spdx in PERMISSIVE or (licences == "copyleft" and spdx.startswith(COPYLEFT))

    expression = None if licence == UNKNOWN else canonical(licence)
    if expression is None:
        return "licence unknown" if unknown == "drop" else None
    return None if evaluate(expression, allows) else f"licence not allowed: {licence}"


TAG = re.compile(r"SPDX-License-Identifier:[ \t]*([^\n*]+?)[ \t]*(?:\*+/|-->|\"\"\"|$)", re.MULTILINE)
CLUES = ("licen", "gpl", " mpl", "confidential", "prohibited", "forbidden")  # else a heading says nothing
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
# Licence texts in these folders speak for the folder around: REUSE's, and beside the metadata of a wheel.
ASIDE = re.compile(r"(?:^|/)(?:LICENSES|[^/]+\.dist-info(?:/.*)?)$")
METADATA = "PKG-INFO"  # the outermost states the licence of a package
LEFT_OVER = 15  # words of explanation that no second witness has to confirm
Finding = tuple[str, str]  # a licence, and the evidence for it


class LicenceText(NamedTuple):
    """What a licence file says: the licences in it, how that is known, and whether it says more than they do."""

    licences: tuple[str, ...]
    evidence: str
    more: bool = False  # explanations besides; the metadata have to agree
    changed: bool = False  # conditions that are none of the licences found


class Licences:
    """The licences of one part of a source."""

    def __init__(self, files: Mapping[str, bytes], declared: str | None) -> None:
        metadata = [(path.count("/"), text) for path, text in files.items() if posixpath.basename(path) == METADATA]
        self._stated = stated_in(min(metadata)[1]) if metadata else None
        self._declared = canonical(declared) if declared else None
        texts: dict[str, list[LicenceText]] = defaultdict(list)
        for path, content in files.items():
            folder, name = posixpath.split(path)
            if name != METADATA and not ATTRIBUTION.match(name):
                texts[ASIDE.sub("", folder)].append(read_licence(content.decode("utf-8", "replace")))
        self._folders = {folder: finding for folder in texts if (finding := self._together(folder, texts[folder]))}

    def of(self, document: Document) -> Finding:
        """Return the licence of a document and its evidence."""
        finding = from_heading(document.text)
        if finding is None and document.licence != UNKNOWN:
            finding = canonical(document.licence) or UNKNOWN, document.evidence
        if finding is None:
            above = [str(folder) for folder in PurePosixPath(document.path).parents]
            nearest = next((self._folders[name] for name in above if name in self._folders), self._folders.get(""))
            finding = nearest or ((self._stated, "metadata") if self._stated else (UNKNOWN, ""))
        return (self._declared, "declared") if finding[0] == UNKNOWN and self._declared else finding

    def _together(self, folder: str, texts: list[LicenceText]) -> Finding | None:
        """Put together what the files of one folder say, at the top also the metadata; None if they only point elsewhere."""
        texts = [text for text in texts if text.licences or text.more or text.changed]
        if not texts:
            return None
        named = list(dict.fromkeys(spdx for text in texts for spdx in text.licences))
        families, stated = set(map(_family, named)), set(map(_family, ids(self._stated or "")))
        agreed = bool(stated) and stated <= families
        if not named or any(text.changed or (text.more and not agreed) for text in texts):
            return UNKNOWN, "classifier"
        evidence = "text-hash" if all(text.evidence == "text-hash" for text in texts) else "classifier"
        if self._stated and stated == families:
            return self._stated, evidence  # it also knows "or" from "and", and "or later" from "only"
        return all_of([*named, *([self._stated] if self._stated and not agreed and not folder else [])]), evidence


def _family(spdx: str) -> str:
    return re.sub(r"(?:-only|-or-later|\+)$", "", spdx)


def all_of(expressions: Iterable[str]) -> str:
    """Return the expression that asks for all of these, each named once."""
    parts = (part for one in expressions for part in ([one] if "(" in one or " OR " in one else one.split(" AND ")))
    distinct = list(dict.fromkeys(parts))
    return " AND ".join(f"({one})" if " OR " in one and len(distinct) > 1 else one for one in distinct)


def from_heading(text: str) -> Finding | None:
    """Return the licence that a file's own heading grants, and how it says so."""
    head = text[:HEAD].lower()
    if not any(clue in head for clue in CLUES):
        return None
    top = heading(text)
    if tags := [canonical(tag) or UNKNOWN for tag in TAG.findall(top)]:
        return (UNKNOWN if UNKNOWN in tags else all_of(tags)), "spdx-tag"
    names = NAME.finditer(top.replace("İ", "I").lower())  # the one letter that grows in lower case
    granted = [licence for name in names if (licence := _granted(top, name))]
    return (all_of(granted), "header") if granted else None


def _granted(top: str, name: re.Match[str]) -> str | None:
    """Return the licence that is named at a place, if what stands before the name grants it."""
    family = next(family for family, pattern in FAMILIES.items() if re.fullmatch(pattern, name[0]))
    grant = GRANT.search(top[max(0, name.start() - 160) : name.start()])
    if family == PROPRIETARY or not grant:
        return family if family == PROPRIETARY else None
    rest = top[name.end() : name.end() + 150]
    versions = re.findall(r"(?:\bv|\bversion|[ -])\.?\s*(\d(?:\.\d)?)\b", rest, re.IGNORECASE)
    version = grant["version"] or (versions[0] if versions else None)
    number = f"{version}.0" if version and "." not in version else version
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
    named = [canonical(tag) for tag in TAG.findall(text)]
    rest, position = "", 0
    for match in identify_license(text, 0):
        named.append(canonical(match.id) or match.id)
        rest, position = rest + text[position : match.start] + "\n", max(position, match.end)
    rest += text[position:]
    words = len(re.findall(r"[^\W_]{2,}", TAG.sub("", OWNER.sub("", rest))))
    licences = tuple(dict.fromkeys(filter(None, named)))
    pointer = not licences and words < 60 and POINTER.search(rest) is not None
    more = not pointer and (words > LEFT_OVER or not licences)
    owners = re.findall(r"(?i)(?:\A|\n\s*\n)\W*copyright.*", text)  # the classifier takes any such line for one
    return LicenceText(licences, "classifier", more=more, changed=any(map(CONDITIONS.search, [rest, *owners])))
