from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.data.document import UNKNOWN
from etude.data.filters.licence import COPYLEFT, PERMISSIVE, canonical, evaluate, ids, refusal

IDS = ("MIT", "ISC", "Apache-2.0", "Zlib")


@dataclass(frozen=True)
class Node:
    """An expression with its meaning: what evaluates and prints it shares nothing with the code under test."""

    operator: str
    parts: tuple[Node, ...] = ()
    name: str = ""

    def value(self, allowed: frozenset[str]) -> bool:
        if self.operator == "ID":
            return self.name.split(" WITH ")[0] in allowed
        return (any if self.operator == "OR" else all)(part.value(allowed) for part in self.parts)

    def written(self, above: str = "", brackets: bool = False) -> str:
        if self.operator == "ID":
            return self.name
        inner = f" {self.operator} ".join(part.written(self.operator, brackets) for part in self.parts)
        return f"({inner})" if brackets or (above == "AND" and self.operator == "OR") else inner


LEAVES = st.sampled_from([*IDS, "Apache-2.0 WITH LLVM-exception"]).map(lambda name: Node("ID", name=name))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.tuples(st.sampled_from(["AND", "OR"]), st.lists(inner, min_size=2, max_size=3).map(tuple)).map(
        lambda pair: Node(*pair)
    ),
    max_leaves=12,
)


@given(TREES, st.booleans(), st.booleans())
def test_every_allowance_of_every_expression(tree: Node, brackets: bool, lower: bool) -> None:
    written = tree.written(brackets=brackets)
    expression = canonical(written.lower() if lower else written)
    assert expression is not None
    for size in range(len(IDS) + 1):
        for allowed in map(frozenset, itertools.combinations(IDS, size)):
            assert evaluate(expression, allowed.__contains__) == tree.value(allowed)
            assert (refusal(written, [name.lower() for name in allowed]) is None) == tree.value(allowed)


@given(TREES)
def test_ids_in_order(tree: Node) -> None:
    def leaves(node: Node) -> list[str]:
        return [node.name.split(" WITH ")[0]] if node.operator == "ID" else [*itertools.chain(*map(leaves, node.parts))]

    assert ids(str(canonical(tree.written()))) == leaves(tree)


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "MIT AND",
        "OR MIT",
        "MIT Apache-2.0",
        "(MIT",
        "MIT)",
        "No-Such-Licence",
        "MIT WITH",
        "see LICENSE",
        "(" * 5000,
        "a/b",
    ],
)
def test_what_is_no_expression_is_unknown(bad: str) -> None:
    assert canonical(bad) is None
    assert refusal(bad, "any", "drop") == "licence unknown"
    assert refusal(bad, "permissive", "keep") is None


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ("mit", "MIT"),
        ("GPL-3.0", "GPL-3.0-only"),
        ("gpl-2.0+ or lgpl-2.1", "GPL-2.0-or-later OR LGPL-2.1-only"),
        ("GPL-2.0-or-later", "GPL-2.0-or-later"),
        ("agpl-3.0-only", "AGPL-3.0-only"),
        ("licenseref-Ours", "LicenseRef-Ours"),
    ],
)
def test_canonical(stated: str, expected: str) -> None:
    assert canonical(stated) == expected


@pytest.mark.parametrize(
    ("policy", "allowed", "refused"),
    [
        ("permissive", ["MIT", "bsd-3-clause", "0BSD", "Apache-2.0+", "Apache-2.0 WITH LLVM-exception", "GPL-3.0-only OR MIT"],
         ["GPL-3.0-only", "MPL-2.0", "MIT AND LGPL-2.1-or-later", "CC-BY-NC-4.0", "BSD-Protection", "LicenseRef-proprietary"]),
        ("copyleft", ["MIT", "AGPL-3.0-or-later", "MPL-2.0 AND MIT", "EPL-2.0", "CDDL-1.0", "CC-BY-SA-4.0", "EUPL-1.2"],
         ["CC-BY-NC-4.0", "LicenseRef-proprietary", "BUSL-1.1 AND MIT"]),
        ("any", ["MIT", "GPL-3.0-only", "LicenseRef-proprietary", "CC-BY-NC-4.0"], []),
        (["MIT", "gpl-2.0"], ["mit", "GPL-2.0-only", "GPL-2.0-or-later", "GPL-2.0+", "GPL-2.0", "MIT OR Zlib"],
         ["Zlib", "GPL-3.0-only", "LGPL-2.0-only", "MIT AND Zlib"]),
        (["GPL-2.0-or-later"], ["GPL-2.0+"], ["GPL-2.0-only", "GPL-3.0-or-later"]),
        ([], [], ["MIT"]),
    ],
)  # fmt: skip
def test_policies(policy: str | list[str], allowed: list[str], refused: list[str]) -> None:
    assert [refusal(licence, policy) for licence in allowed] == [None] * len(allowed)
    assert [refusal(licence, policy) for licence in refused] == [
        f"licence not allowed: {licence}" for licence in refused
    ]


def test_the_unknown() -> None:
    assert refusal(UNKNOWN, "any", "drop") == "licence unknown"
    assert refusal(UNKNOWN, "permissive", "keep") is None


def test_the_lists_hold_ids_of_spdx_and_do_not_overlap() -> None:
    assert [name for name in sorted(PERMISSIVE) if canonical(name) is None] == []
    assert [name for name in sorted(PERMISSIVE) if name.startswith(COPYLEFT)] == []
