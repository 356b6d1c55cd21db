"""SPDX licence expressions, what a package's metadata state as one, and what a source's policy says of them.

`A OR B` needs one side to be allowed, `A AND B` both; `A WITH exception` is judged as A, because an exception only adds
permissions. The lists are facts for engineering, not legal advice.
"""

from __future__ import annotations

import re
from email.parser import BytesHeaderParser
from functools import lru_cache
from typing import TYPE_CHECKING

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from etude.data.document import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Callable

# fmt: off
PERMISSIVE = frozenset(name.lower() for name in (
    "0BSD", "AFL-2.1", "AFL-3.0", "Apache-1.1", "Apache-2.0", "Artistic-2.0", "BlueOak-1.0.0", "BSD-1-Clause", "BSD-2-Clause",
    "BSD-2-Clause-Patent", "BSD-2-Clause-Views", "BSD-3-Clause", "BSD-3-Clause-Clear", "BSD-3-Clause-LBNL", "BSD-3-Clause-Open-MPI",
    "BSD-4-Clause", "BSD-4-Clause-UC", "BSD-Source-Code", "BSL-1.0", "bzip2-1.0.6", "CC-BY-3.0", "CC-BY-4.0", "CC-PDDC", "CC0-1.0",
    "CFITSIO", "CNRI-Python", "curl", "ECL-2.0", "FSFAP", "FTL", "HPND", "HPND-sell-variant", "ICU", "IJG", "ISC", "libpng",
    "libpng-2.0", "libtiff", "MIT", "MIT-0", "MIT-CMU", "MIT-Modern-Variant", "MulanPSL-2.0", "NCSA", "NTP", "OFL-1.1", "OLDAP-2.8",
    "OpenSSL", "PostgreSQL", "PSF-2.0", "Python-2.0", "Python-2.0.1", "SGI-B-2.0", "TCL", "UPL-1.0", "Unicode-3.0",
    "Unicode-DFS-2016", "Unlicense", "W3C", "WTFPL", "X11", "Zlib", "zlib-acknowledgement", "ZPL-2.0", "ZPL-2.1",
))
COPYLEFT = ("gpl-", "lgpl-", "agpl-", "mpl-", "epl-", "cddl-", "eupl-", "osl-", "cc-by-sa-", "gfdl-", "cecill-", "ms-rl", "cpl-",
            "ipl-", "apsl-", "lppl-", "sleepycat", "artistic-1.0", "qpl-")  # how their ids begin
FILLERS = {"the", "license", "licence", "software", "foundation", "version", "v", "clause", "style", "public", "gnu"}
# By the words of the name in alphabetical order, fillers left out. Where a name leaves the version open it stands for the
# one that asks for more, or, for the GNU licences, for any.
NAMES = {
    "mit": "MIT", "expat mit": "MIT", "expat": "MIT", "isc": "ISC", "iscl": "ISC",
    "bsd": "BSD-3-Clause", "3 bsd": "BSD-3-Clause", "bsd new": "BSD-3-Clause", "bsd modified": "BSD-3-Clause",
    "2 bsd": "BSD-2-Clause", "bsd simplified": "BSD-2-Clause",
    "apache": "Apache-2.0", "2 apache": "Apache-2.0", "2.0 apache": "Apache-2.0", "2.0 asl": "Apache-2.0",
    "psf": "PSF-2.0", "python": "PSF-2.0", "libpng zlib": "Zlib", "zpl": "ZPL-2.1", "zope": "ZPL-2.1",
    "2.0 mpl": "MPL-2.0", "2.0 mozilla": "MPL-2.0", "gpl": "GPL-1.0-or-later",
    "gplv2": "GPL-2.0-only", "gplv2+": "GPL-2.0-or-later", "gplv3": "GPL-3.0-only", "gplv3+": "GPL-3.0-or-later",
    "lgpl": "LGPL-2.0-or-later", "lgplv2": "LGPL-2.0-only", "lgplv2+": "LGPL-2.0-or-later",
    "lgplv3": "LGPL-3.0-only", "lgplv3+": "LGPL-3.0-or-later", "agplv3": "AGPL-3.0-only", "agplv3+": "AGPL-3.0-or-later",
}
# fmt: on
_ID = re.compile(r"(?<![^\s()])(?<!WITH )(?!(?:AND|OR|WITH)\b)[^\s()]+")


@lru_cache(maxsize=1024)
def canonical(expression: str) -> str | None:
    """Return a valid SPDX expression as SPDX writes it, `GPL-2.0` and `GPL-2.0+` as what they mean; None for anything else."""
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


class Policy:
    """What licences may stay: the settings `licences` and `unknown` of a source."""

    def __init__(self, licences: str | list[str], unknown: str) -> None:
        self._named = licences
        self._listed = {(canonical(spdx) or spdx).lower() for spdx in licences} if isinstance(licences, list) else set()
        self._unknown = unknown

    def reason(self, licence: str) -> str | None:
        """Return why documents under a licence are dropped, or None. What is no SPDX expression is unknown."""
        expression = None if licence == UNKNOWN else canonical(licence)
        if expression is None:
            return "licence unknown" if self._unknown == "drop" else None
        return None if evaluate(expression, self._allows) else f"licence not allowed: {licence}"

    def _allows(self, spdx: str) -> bool:
        spdx = spdx.lower().removesuffix("+")
        if self._listed or isinstance(self._named, list):  # "or later" may be used as what it is later than
            return spdx in self._listed or spdx.replace("-or-later", "-only") in self._listed
        return self._named == "any" or spdx in PERMISSIVE or (self._named == "copyleft" and spdx.startswith(COPYLEFT))
