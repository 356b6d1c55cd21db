"""What may be said after the tests, and in which words.

"derived" takes an exact test below 1e-9 and a second, independent kind of test below 1e-6, both after Bonferroni over all
models compared and all layers looked at. It means a shared initialisation: the tests are symmetric, so they never say who
is the parent, and two models started from one framework seed share theirs without either knowing of the other. Learning from
another model's outputs leaves no trace in the weights. Effect sizes, tokenisers and shapes support; they never decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Literal

from etude.lineage.audit.neurons import NEURONS, ROUTER
from etude.lineage.audit.procrustes import EMBEDDING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from etude.lineage.audit.pvalues import Test
    from etude.lineage.audit.shapes import ShapeEvidence
    from etude.lineage.audit.tokens import TokenEvidence

Word = Literal["same", "derived", "related", "none"]

IDENTITY = "identical tensors"  # its effect is the share of the compared tensors that are equal, value for value

EXACT = (NEURONS, ROUTER, EMBEDDING)  # their null follows from how models are trained, not from strangers measured
FIRST, SECOND = -9.0, -6.0  # log₁₀ of what the exact test and the other one must stay below

SENTENCES: dict[Word, str] = {
    "same": "the weights compared are the same",
    "derived": "evidence of shared initialisation: one descends from the other, or both from a common ancestor",
    "related": "one kind of test points to a shared initialisation and no second one confirms it: look closer",
    "none": "no evidence of shared initialisation",
}
DISGUISED = "; found only after undoing a rotation of the residual stream, which training does not cause"

DIRECTION = "which of the two came first cannot be told from the weights: that takes dates or an earlier checkpoint"
SAME_SEED = (
    "two models of one shape started from the same random seed by the same framework also share an initialisation"
)
DISTILLED = "a model that learnt from the other's outputs, or from the same data, leaves no trace that these tests see"
LIMITS: dict[Word, tuple[str, ...]] = {
    "same": (DIRECTION,),
    "derived": (DIRECTION, SAME_SEED),
    "related": (DIRECTION, SAME_SEED, DISTILLED),
    "none": (
        DISTILLED,
        "no evidence is not a proof of independence: very long training or a disguise can hide descent",
    ),
}


@dataclass(frozen=True)
class Verdict:
    """One word for programs, one sentence for people, why, and what it does not mean."""

    word: Word
    sentence: str
    reasons: tuple[str, ...]
    limits: tuple[str, ...]
    log10_p: float  # of the surest test, after Bonferroni


def judge(tests: Sequence[Test], tokens: TokenEvidence | None, shapes: ShapeEvidence | None, compared: int) -> Verdict:
    """Weigh the tests of one pair of models, one of `compared` pairs looked at."""
    surest: dict[
        str, tuple[float, Test]
    ] = {}  # of a test before and after rotating back only one: they are no two kinds
    for test in tests:
        if test.log10_p is not None:
            log10_p = min(0.0, test.log10_p + math.log10(compared * max(1, len(test.layers))))
            surest[test.name] = min(surest.get(test.name, (1.0, test)), (log10_p, test), key=itemgetter(0))
    same = any(test.name == IDENTITY and test.effect == 1 for test in tests)
    word: Word = "same" if same else _word({name: log10_p for name, (log10_p, _) in surest.items()})
    deciding = [(log10_p, test) for log10_p, test in surest.values() if log10_p < SECOND]
    disguised = word in {"derived", "related"} and all(test.rotated for _, test in deciding)
    reasons = [
        f"{test.name}{', rotated back' * test.rotated}: p < 1e{math.ceil(log10_p)}" for log10_p, test in deciding
    ]
    reasons += [evidence.sentence for evidence in (tokens, shapes) if evidence is not None]
    log10_p = min((log10_p for log10_p, _ in surest.values()), default=0.0)
    return Verdict(word, SENTENCES[word] + DISGUISED * disguised, tuple(reasons), LIMITS[word], log10_p)


def _word(log10_ps: Mapping[str, float]) -> Word:
    for name in EXACT:
        others = [log10_p for other, log10_p in log10_ps.items() if other != name]
        if log10_ps.get(name, 0.0) < FIRST and min(others, default=0.0) < SECOND:
            return "derived"
    return "related" if min(log10_ps.values(), default=0.0) < FIRST else "none"
