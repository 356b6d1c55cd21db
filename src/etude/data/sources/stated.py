"""The licence a package's metadata states, as an SPDX expression. It is the weakest evidence: a text says more."""

from __future__ import annotations

import re
from email.parser import BytesHeaderParser

from etude.data.filters.spdx import canonical

FILLERS = {"the", "license", "licence", "software", "foundation", "version", "v", "clause", "style", "public", "gnu"}
# By the words of the name in alphabetical order, fillers left out. Where a name leaves the version open it stands for the
# one that asks for more, or, for the GNU licences, for any.
# fmt: off
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
