"""Licence texts and headings beside look-alikes. The long texts are the classifier's own or ours; none is copied here."""

from __future__ import annotations

import pytest

from etude.data.document import UNKNOWN, Document
from etude.data.filters.licence import Licences, canonical, from_heading, read_licence
from tests.lineage.licence_texts import MIT
from tests.lineage.test_licences import LICENSE

OURS = LICENSE.read_text(encoding="utf-8")  # Apache-2.0
MIT_TEXT = MIT.format(owner="2020 Somebody")
ISC = """ISC License

Copyright (c) 2021, Somebody

Permission to use, copy, modify, and/or distribute this software for any purpose with or without fee is hereby granted,
provided that the above copyright notice and this permission notice appear in all copies.

THE SOFTWARE IS PROVIDED "AS IS" AND THE AUTHOR DISCLAIMS ALL WARRANTIES WITH REGARD TO THIS SOFTWARE INCLUDING ALL IMPLIED
WARRANTIES OF MERCHANTABILITY AND FITNESS. IN NO EVENT SHALL THE AUTHOR BE LIABLE FOR ANY SPECIAL, DIRECT, INDIRECT, OR
CONSEQUENTIAL DAMAGES OR ANY DAMAGES WHATSOEVER RESULTING FROM LOSS OF USE, DATA OR PROFITS, WHETHER IN AN ACTION OF CONTRACT,
NEGLIGENCE OR OTHER TORTIOUS ACTION, ARISING OUT OF OR IN CONNECTION WITH THE USE OR PERFORMANCE OF THIS SOFTWARE.
"""
GPL3 = """This program is free software: you can redistribute it and/or modify
it under the terms of the GNU General Public License as published by
the Free Software Foundation, either version 3 of the License, or
(at your option) any later version.
"""
CODE = "def add(left, right):\n    return left + right\n"


def commented(text: str, sign: str = "#") -> str:
    return "".join(f"{sign} {line}".rstrip() + "\n" for line in text.splitlines())


def of(
    *files: tuple[str, str],
    stated: str | None = None,
    declared: str | None = None,
    path: str = "src/a.py",
    text: str = CODE,
) -> tuple[str, str]:
    given = {name: content.encode() for name, content in files}
    if stated is not None:
        given["toolz.egg-info/PKG-INFO"] = f"Name: toolz\nLicense-Expression: {stated}\n".encode()
    return Licences(given, declared).of(Document("repository", path, text))


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        ("# SPDX-License-Identifier: MIT\n", "MIT"),
        ("#!/usr/bin/env python\n# Copyright 2020 X\n# SPDX-License-Identifier: GPL-2.0\n", "GPL-2.0-only"),
        ("/* SPDX-License-Identifier: (GPL-2.0-or-later OR mit) */\n", "(GPL-2.0-or-later OR MIT)"),
        ("// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception\n", "Apache-2.0 WITH LLVM-exception"),
        ("<!-- SPDX-License-Identifier: CC-BY-4.0 -->\n", "CC-BY-4.0"),
        (
            "# SPDX-License-Identifier: MIT\n# SPDX-License-Identifier: Apache-2.0 OR ISC\n",
            "MIT AND (Apache-2.0 OR ISC)",
        ),
        ("# SPDX-License-Identifier: Whatever we like\n", UNKNOWN),
        ("# SPDX-License-Identifier: MIT\n" + commented(GPL3), "MIT"),
    ],
)
def test_a_tag_in_the_heading_wins(top: str, expected: str) -> None:
    assert from_heading(top + CODE) == (expected, "spdx-tag")
    assert of(("LICENSE", ISC), stated="ISC", text=top + CODE) == (expected, "spdx-tag")


@pytest.mark.parametrize(
    ("grant", "expected"),
    [
        (GPL3, "GPL-3.0-or-later"),
        (GPL3.replace("GNU General", "GNU Lesser General").replace("version 3", "version 2.1"), "LGPL-2.1-or-later"),
        (GPL3.replace("GNU General", "GNU Affero General"), "AGPL-3.0-or-later"),
        (
            "You can redistribute it and/or modify it under the terms of version 2 of the\nGNU General Public License.",
            "GPL-2.0-only",
        ),
        (
            "This Source Code Form is subject to the terms of the Mozilla Public\nLicense, v. 2.0. If a copy of the MPL",
            "MPL-2.0",
        ),
        ("The contents of this file are subject to the Mozilla Public License Version 1.1", "MPL-1.1"),
        (
            "This program and the accompanying materials are made available under the terms of the Eclipse Public License v1.0",
            "EPL-1.0",
        ),
        ("This file is subject to the terms of the Common Development and Distribution License 1.0", "CDDL-1.0"),
        ("Licensed under the EUPL, Version 1.2", "EUPL-1.2"),
        ("Copyright 2020 X\nLicensed under the GPL v3", "GPL-3.0-only"),
        ("Released under the LGPL", "LGPL-2.0-or-later"),
        ("This work is licensed under a Creative Commons Attribution-NonCommercial 4.0 licence", "CC-BY-NC-4.0"),
        ("Licensed under the Apache License, Version 2.0 (the License)", "Apache-2.0"),
        ("The ASF licenses this file\nto you under the Apache License, Version 2.0", "Apache-2.0"),
        ("Copyright X. All rights reserved.\nProprietary and confidential.", "LicenseRef-proprietary"),
        ("Unauthorized copying of this file, via any medium, is strictly prohibited.", "LicenseRef-proprietary"),
        ("Licensed under the Apache License, Version 2.0\n\n" + GPL3, "Apache-2.0 AND GPL-3.0-or-later"),
        ("İstanbul\n" + GPL3, "GPL-3.0-or-later"),
    ],
)
def test_the_words_of_a_grant(grant: str, expected: str) -> None:
    for text in [commented(grant), f"/*\n{commented(grant, ' *')} */\n", f'"""\n{grant}\n"""\n']:
        assert from_heading(text + CODE) == (expected, "header")
    assert canonical(expected) == expected


@pytest.mark.parametrize(
    "text",
    [
        '"""Tells whether a file is under the GNU General Public License (GPL)."""\n',
        '"""Finds files that are licensed under the GPL and reports them."""\n',
        '"""Finds files\nlicensed under the GPL, the MPL or a proprietary licence."""\n',
        "# GPL, LGPL and MPL are copyleft licences.\n",
        "# Not compatible with the GNU General Public License.\n",
        "# Copyright 2020 X. All rights reserved.\n",
        "# Confidential data are never logged.\n",
        f'import re\n\nGPL = """\n{GPL3}"""\n',
        "PATTERN = '# SPDX-License-Identifier: GPL-3.0-only'\n",
        "x = 1\n" * 20 + commented(GPL3),
        CODE,
    ],
)
def test_the_name_of_a_licence_is_no_grant(text: str) -> None:
    assert from_heading(text + CODE) is None
    assert of(("LICENSE", MIT_TEXT), text=text + CODE) == ("MIT", "text-hash")


def test_known_texts_by_hash_others_by_classifier() -> None:
    assert read_licence(MIT_TEXT)[:2] == (("MIT",), "text-hash")
    assert read_licence(OURS)[:2] == (("Apache-2.0",), "text-hash")
    assert read_licence(ISC)[:2] == (("ISC",), "classifier")
    assert of(("LICENSE", ISC)) == ("ISC", "classifier")


@pytest.mark.parametrize(
    "clause",
    [
        "\nThe Software may not be used for commercial purposes.\n",
        "\nCommons Clause applies.\n",
        "\nIf you have more than a million users you shall display our name.\n",
        "\nFree for academic use.\n",
        "\nCopyright notices shall be displayed in every product.\n",
    ],
)
@pytest.mark.parametrize("stated", [None, "ISC"])
def test_an_added_clause_makes_a_licence_unknown(clause: str, stated: str | None) -> None:
    for text in [ISC + clause, clause + ISC, ISC.replace("\nTHE SOFTWARE", clause + "\nTHE SOFTWARE")]:
        assert of(("LICENSE", text), stated=stated) == (UNKNOWN, "classifier")


def test_a_changed_word_makes_a_licence_unknown() -> None:
    assert of(("LICENSE", ISC.replace("with or without fee", "for a fee")), stated="ISC") == (UNKNOWN, "classifier")


def test_long_explanations_need_a_second_witness() -> None:
    story = "All parts of this project, old ones and new ones, were written by many people over a good number of years, and are under:\n"
    assert of(("LICENSE", story + ISC)) == (UNKNOWN, "classifier")
    assert of(("LICENSE", story + ISC), stated="MIT") == (UNKNOWN, "classifier")
    assert of(("LICENSE", story + ISC), stated="ISC") == ("ISC", "classifier")
    assert of(("LICENSE", "Of this project:\n" + ISC)) == ("ISC", "classifier")


def test_several_licences_in_one_file_all_hold() -> None:
    both = ISC + "\n\nSome files:\n\n" + MIT_TEXT
    assert of(("LICENSE", both)) == ("ISC AND MIT", "classifier")
    assert of(("LICENSE", both), stated="MIT OR ISC") == ("MIT OR ISC", "classifier")
    assert of(("LICENSE", both), stated="MIT") == ("ISC AND MIT", "classifier")


def test_several_files_and_one_that_points_to_them() -> None:
    pointer = (
        "LICENSE",
        "Available under the terms of either of the licences found in LICENSE.APACHE or LICENSE.ISC.\n",
    )
    files = [pointer, ("LICENSE.APACHE", OURS), ("LICENSE.ISC", ISC)]
    assert of(*files) == ("Apache-2.0 AND ISC", "classifier")
    assert of(*files, stated="Apache-2.0 OR ISC") == ("Apache-2.0 OR ISC", "classifier")
    assert of(pointer, stated="ISC") == ("ISC", "metadata")


def test_metadata_that_contradict_the_text() -> None:
    assert of(("LICENSE", ISC), stated="GPL-3.0-only") == ("ISC AND GPL-3.0-only", "classifier")
    assert of(("LICENSE", ISC), stated="MIT OR GPL-3.0-only") == ("ISC AND (MIT OR GPL-3.0-only)", "classifier")


def test_a_text_nobody_knows() -> None:
    assert of(("LICENSE", "Tiny Licence: do as you like.\n")) == (UNKNOWN, "classifier")
    assert of(("LICENSE", "Tiny Licence: do as you like.\n"), stated="MIT") == (UNKNOWN, "classifier")
    assert of(("LICENSE", "Tiny Licence: do as you like.\n"), declared="MIT") == ("MIT", "declared")


def test_a_licence_file_may_be_a_tag() -> None:
    assert of(("LICENSE", "SPDX-License-Identifier: GPL-2.0-only\n")) == ("GPL-2.0-only", "classifier")


def test_a_folder_called_licenses_speaks_for_the_folder_around_it_and_the_outermost_metadata_count() -> None:
    assert of(("LICENSES/MIT.txt", MIT_TEXT)) == ("MIT", "text-hash")
    inner, outer = b"License-Expression: GPL-3.0-only\n", b"License-Expression: mit\n"
    licences = Licences({"a.egg-info/PKG-INFO": inner, "PKG-INFO": outer}, None)
    assert licences.of(Document("repository", "src/a.py", CODE)) == ("MIT", "metadata")


def test_the_nearest_licence_file_counts() -> None:
    files = [("LICENSE", MIT_TEXT), ("src/parts/COPYING", ISC), ("docs/license.rst", ".. include:: ../LICENSE\n")]
    assert of(*files, path="src/a.py", stated="MIT") == ("MIT", "text-hash")
    assert of(*files, path="src/parts/deep/b.py", stated="MIT") == ("ISC", "classifier")
    assert of(*files, path="src/parts_of/b.py") == ("MIT", "text-hash")
    assert of(*files, path="docs/index.rst") == ("MIT", "text-hash")
    assert of(*files[1:], path="src/a.py") == (UNKNOWN, "")


def test_files_about_parts_say_nothing_about_the_whole() -> None:
    parts = [("NOTICE", "This product includes software by others.\n"), ("LICENSE-THIRD-PARTY", ISC)]
    assert of(*parts, ("LICENSE", MIT_TEXT)) == ("MIT", "text-hash")
    assert of(*parts) == (UNKNOWN, "")


def test_in_a_wheel_the_metadata_folder_speaks_for_what_lies_beside_it() -> None:
    wheel = ("toolz-1.0.dist-info/licenses/LICENSE", MIT_TEXT)
    assert of(wheel, path="toolz/core.py") == ("MIT", "text-hash")
    bundled = ("pkg/_bundled/x-1.0.dist-info/LICENSE", ISC)
    assert of(wheel, bundled, path="pkg/_bundled/x/a.py") == ("ISC", "classifier")
    assert of(wheel, bundled, path="pkg/a.py") == ("MIT", "text-hash")


def test_without_any_text() -> None:
    assert of(stated="mit", declared="ISC") == ("MIT", "metadata")
    assert of(declared="isc") == ("ISC", "declared")
    assert of(stated="see file") == (UNKNOWN, "")
    assert of() == (UNKNOWN, "")


def test_what_the_source_says_of_a_row() -> None:
    row = Document("rows", "1", "text", kind="row", licence="apache-2.0", evidence="metadata")
    assert Licences({}, "MIT").of(row) == ("Apache-2.0", "metadata")
    row.licence = "whatever"
    assert Licences({}, None).of(row) == (UNKNOWN, "metadata")
    assert Licences({}, "MIT").of(row) == ("MIT", "declared")
    row.text = commented(GPL3)
    assert Licences({}, "MIT").of(row) == ("GPL-3.0-or-later", "header")
