from __future__ import annotations

import pytest

from etude.data.filters.licence import spdx_of, stated_in

OSI = "Classifier: License :: OSI Approved :: "


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("MIT", "MIT"), ("mit", "MIT"), ("MIT License", "MIT"), ("The MIT License (MIT)", "MIT"), ("Expat", "MIT"),
        ("BSD", "BSD-3-Clause"), ("BSD License", "BSD-3-Clause"), ("BSD 3-Clause", "BSD-3-Clause"), ("3-clause BSD", "BSD-3-Clause"),
        ("New BSD License", "BSD-3-Clause"), ("BSD-2-Clause", "BSD-2-Clause"), ("BSD 2-Clause License", "BSD-2-Clause"),
        ("Apache 2.0", "Apache-2.0"), ("Apache License, Version 2.0", "Apache-2.0"), ("Apache Software License", "Apache-2.0"),
        ("Apache License v2", "Apache-2.0"), ("ISC License (ISCL)", "ISC"), ("Python Software Foundation License", "PSF-2.0"),
        ("Mozilla Public License 2.0 (MPL 2.0)", "MPL-2.0"), ("MIT OR Apache-2.0", "MIT OR Apache-2.0"), ("apache-2.0 or mit", "Apache-2.0 OR MIT"),
        ("GNU General Public License v3 or later (GPLv3+)", "GPL-3.0-or-later"), ("GNU General Public License v2 (GPLv2)", "GPL-2.0-only"),
        ("GNU Lesser General Public License v3 (LGPLv3)", "LGPL-3.0-only"), ("GNU Affero General Public License v3 or later (AGPLv3+)", "AGPL-3.0-or-later"),
        ("The Unlicense (Unlicense)", "Unlicense"), ("MIT No Attribution License (MIT-0)", "MIT-0"), ("zlib/libpng License", "Zlib"),
        ("UNKNOWN", None), ("", None), ("Proprietary", "LicenseRef-proprietary"), ("MIT and something", None), ("Apache 1.1", None), ("see LICENSE", None),
        ("GPL MIT", None), ("not MIT", None), ("BSD 4-Clause", None),
    ],
)  # fmt: skip
def test_names_stand_for_licences_only_beyond_doubt(name: str, expected: str | None) -> None:
    assert spdx_of(name) == expected


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (f"License-Expression: Apache-2.0\n{OSI}MIT License\nLicense: GPL-3.0-only", "Apache-2.0"),
        (f"{OSI}MIT License\nLicense: GPL-3.0-only", "MIT"),
        (f"{OSI}MIT License\n{OSI}Apache Software License", "Apache-2.0 AND MIT"),
        (f"{OSI}MIT License\nClassifier: License :: Other/Proprietary License", "LicenseRef-proprietary AND MIT"),
        ("Classifier: License :: OSI Approved\nLicense: BSD", "BSD-3-Clause"),
        ("Classifier: Topic :: MIT License\nLicense: MIT", "MIT"),
        ("License: MIT License\n\n        Permission is hereby granted, free of charge", "MIT"),
        ("License: Copyright (c) 2020 Somebody\n        Permission is hereby granted", None),
        ("Name: toolz", None),
        ("License-Expression: Nonsense-9", None),
        ("Name: toolz\n\nLicense: MIT", None),
    ],
)
def test_the_strongest_statement_counts(metadata: str, expected: str | None) -> None:
    assert stated_in(metadata.encode() + b"\n") == expected


def test_metadata_in_any_bytes_is_read() -> None:
    assert stated_in(b"Author: \xff\xfe\nLicense: MIT\n") == "MIT"
    assert stated_in(b"License: \xff\n") is None
    assert stated_in(b"\0\1\2") is None
