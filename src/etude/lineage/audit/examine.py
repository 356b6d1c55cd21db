"""The audit: two models, or a model and the sketches of known bases; every test, one verdict each.

A reference is a whole model or a sketch; the suspect is always a whole model. Its rows are carried into the reference's residual
dimensions (as they are; by matched dimensions where the widths differ; turned back where the copy was rotated) and, for a sketch,
projected as the sketch was. From there on there is one path. Only one pair of matrices is in memory at a time.

The verdict "derived" takes an exact test below 1e-9 and a second, independent kind of test below 1e-6, both after Bonferroni over all
models compared and all layers looked at. It means a shared initialisation: the tests are symmetric, so they never say who
is the parent, and two models started from one framework seed share theirs without either knowing of the other. Learning from
another model's outputs leaves no trace in the weights. Effect sizes, tokenisers and shapes support; they never decide: strangers
reuse tokenisers and shapes, and a descendant can have had its tokeniser exchanged, or have been pruned.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from rich.table import Table

from etude.lineage.audit import descent_tests
from etude.lineage.audit.descent_tests import EMBEDDING, NEURONS, ROUTER, Alignment, RowMatch, Test
from etude.lineage.audit.read_weights import Matrix, Rows, Shape, Tokens, Weights, open_weights, read_tokens, shared
from etude.lineage.audit.sketch import KEY_ROWS, Sketch, hashed, middles, project, thinned
from etude.progress import BYTES, Reporter, amount

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    Carry = Callable[[Matrix], Matrix]  # brings rows of the suspect into the reference's residual dimensions
    Vocabularies = tuple[Tokens | None, Tokens | None]

Word = Literal["same", "derived", "related", "none"]

IDENTITY = "identical tensors"  # its effect is the share of the compared tensors that are equal, value for value
EXACT = (NEURONS, ROUTER, EMBEDDING)  # their null follows from how models are trained, not from strangers measured
FIRST, SECOND = -9.0, -6.0  # log₁₀ of what the exact test and the other one must stay below
LAYERS = 6
TOKENS = 8192  # whose embeddings are compared at most
FEWEST_TOKENS = 32

NEARLY_ALL = 0.99  # of the ids both have: new words were appended, or reserved ones were named
MANY = 0.5  # of all words; only a word for people, no verdict hangs on it
# A difference in these is worth a word, but is no other structure: both change in training, or in how a file is written.
INCIDENTAL = {"model_type", "tied", "rope_theta"}
DEPTH = {"layers", "dense_layers"}
EXPERT_FIELDS = {"experts", "expert_ffn", "shared_experts", "dense_layers", "ffn"}
WIDTH = {field.name for field in fields(Shape)} - INCIDENTAL - DEPTH - {"vocab", "attention"}

SHARED = "evidence of shared initialisation: one descends from the other, or both from a common ancestor"
UNCONFIRMED = "one kind of test points to a shared initialisation and no second one confirms it: look closer"
DIRECTION = "which of the two came first cannot be told from the weights: that takes dates or an earlier checkpoint"
SAME_SEED = "two models of one shape started from the same random seed by one framework share an initialisation, too"
DISTILLED = "a model that learnt from the other's outputs, or from the same data, leaves no trace that these tests see"
NO_PROOF = "no evidence is not a proof of independence: very long training or a disguise can hide descent"
DISGUISED = "; found only after undoing a rotation or rescaling of the residual stream, which training does not cause"
# What may be said, the surest first, and what it does not mean.
VERDICTS: dict[Word, tuple[str, tuple[str, ...]]] = {
    "same": ("the weights compared are the same", (DIRECTION,)),
    "derived": (SHARED, (DIRECTION, SAME_SEED)),
    "related": (UNCONFIRMED, (DIRECTION, SAME_SEED, DISTILLED)),
    "none": ("no evidence of shared initialisation", (DISTILLED, NO_PROOF)),
}


@dataclass(frozen=True)
class TokenEvidence:
    """How two vocabularies are related."""

    kind: str  # "identical" | "extended" | "overlapping" | "different"
    jaccard: float  # shared words over all words
    same_id: float  # share of the ids both have whose word is the same
    shared: int
    sizes: tuple[int, int]
    sentence: str


def compare_tokens(a: Tokens, b: Tokens) -> TokenEvidence:
    """Compare two vocabularies."""
    words_a, words_b = ({word for word in tokens.strings if word is not None} for tokens in (a, b))
    both, sizes = len(words_a & words_b), (len(words_a), len(words_b))
    jaccard = both / max(1, len(words_a | words_b))
    pairs = [pair for pair in zip(a.strings, b.strings, strict=False) if pair != (None, None)]
    same_id = sum(one == other for one, other in pairs) / max(1, len(pairs))
    identical = a.strings == b.strings and (list(a.merges) == list(b.merges) or not (a.merges and b.merges))
    kind = "identical" if identical else "overlapping" if jaccard >= MANY else "different"
    kind = "extended" if not identical and same_id >= NEARLY_ALL else kind
    words = f"{both:,} words in both of {sizes[0]:,} and {sizes[1]:,}; {same_id:.1%} of ids mean the same"
    return TokenEvidence(kind, jaccard, same_id, both, sizes, f"{kind} vocabularies: {words}")


@dataclass(frozen=True)
class ShapeEvidence:
    """How two shapes are related. Compatible shapes prove nothing; different ones disprove nothing."""

    kind: str  # "exact" | "extended vocabulary" | "pruned" | "upcycled" | "different"
    differences: dict[str, tuple[Any, Any]]
    sentence: str


def compare_shapes(a: Shape, b: Shape) -> ShapeEvidence:
    """Compare two shapes. Which of the two was first, no shape can tell."""
    pairs = {field.name: (getattr(a, field.name), getattr(b, field.name)) for field in fields(Shape)}
    differences = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    changed = differences.keys() - INCIDENTAL
    kind, sentence = _shape_kind(changed, differences)
    listed = ", ".join(f"{name} {one} and {other}" for name, (one, other) in differences.items())
    return ShapeEvidence(kind, differences, f"{sentence} ({listed})" if listed else sentence)


def _shape_kind(changed: set[str], differences: Mapping[str, tuple[Any, Any]]) -> tuple[str, str]:
    if not changed:
        return "exact", "the same shape"
    if changed == {"vocab"}:
        return "extended vocabulary", "the same shape but for the number of words"
    dense = [side for side in (0, 1) if "experts" in changed and differences["experts"][side] == 0]
    if dense and changed <= EXPERT_FIELDS | {"vocab"}:
        return "upcycled", f"the same shape with experts in place of the FFN of the {('first', 'second')[dense[0]]}"
    structural = changed - {"vocab"}
    smaller = {one < other for one, other in (differences[name] for name in structural)}
    if not dense and len(smaller) == 1 and structural <= DEPTH | WIDTH:
        parts = [word for word, names in (("layers", DEPTH), ("width", WIDTH)) if structural & names]
        less = "first" if smaller == {True} else "second"
        return "pruned", f"the {less} could be the other with less of its {' and '.join(parts)}"
    return "different", "different shapes"


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
    surest: dict[str, tuple[float, Test]] = {}  # a test before and after rotating back is one kind, not two
    for test in tests:
        if test.log10_p is not None:
            tries = sum(other.name == test.name for other in tests)  # before and after rotating back
            log10_p = min(0.0, test.log10_p + math.log10(compared * tries * max(1, len(test.layers))))
            surest[test.name] = min(surest.get(test.name, (1.0, test)), (log10_p, test), key=itemgetter(0))
    same = any(test.name == IDENTITY and test.effect == 1 for test in tests)
    word: Word = "same" if same else _word({name: log10_p for name, (log10_p, _) in surest.items()})
    sentence, limits = VERDICTS[word]
    deciding = [(log10_p, test) for log10_p, test in surest.values() if log10_p < SECOND]
    disguised = word in {"derived", "related"} and all(test.rotated for _, test in deciding)
    reasons = [f"{_named(test)}: p < 1e{math.ceil(log10_p)}" for log10_p, test in deciding]
    reasons += [evidence.sentence for evidence in (tokens, shapes) if evidence is not None]
    log10_p = min((log10_p for log10_p, _ in surest.values()), default=0.0)
    return Verdict(word, sentence + DISGUISED * disguised, tuple(reasons), limits, log10_p)


def _word(log10_ps: Mapping[str, float]) -> Word:
    for name in EXACT:
        others = [log10_p for other, log10_p in log10_ps.items() if other != name]
        if log10_ps.get(name, 0.0) < FIRST and min(others, default=0.0) < SECOND:
            return "derived"
    return "related" if min(log10_ps.values(), default=0.0) < FIRST else "none"


def _named(test: Test) -> str:
    return test.name + ", rotated back" * test.rotated


@dataclass(frozen=True)
class Opened:
    """A whole model, read as far as it is asked."""

    name: str
    weights: Weights
    tokens: Tokens | None

    @property
    def shape(self) -> Shape:
        """Its structure."""
        return self.weights.shape


Reference = Opened | Sketch


@dataclass(frozen=True)
class Finding:
    """The result of an audit of one pair."""

    reference: str
    suspect: str
    against: Literal["weights", "sketch"]
    tests: tuple[Test, ...]
    tokens: TokenEvidence | None
    shapes: ShapeEvidence
    verdict: Verdict
    notes: tuple[str, ...]  # what was not compared, and why
    seconds: float
    bytes_read: int
    bytes_total: int


def open_model(path: Path, name: str = "") -> Opened:
    """Open a folder of safetensors, one .safetensors or a .gguf; nothing but headers and the tokeniser is read."""
    return Opened(name or path.name, open_weights(path), read_tokens(path))


def examine_library(suspect: Opened, known: Sequence[Sketch], reporter: Reporter, compared: int = 0) -> list[Finding]:
    """Compare a model with every sketch; the best match first. `compared`: with how many models in all, if with others, too."""
    findings = [examine(sketch, suspect, reporter, compared or len(known)) for sketch in known]
    return sorted(findings, key=lambda each: (list(VERDICTS).index(each.verdict.word), each.verdict.log10_p))


def examine(a: Reference, b: Opened, reporter: Reporter, compared: int = 1) -> Finding:
    """Compare model `b` with `a`, one of `compared` that it is compared with."""
    opened = [side.weights for side in (a, b) if isinstance(side, Opened)]
    before, started = sum(weights.bytes_read for weights in opened), time.monotonic()
    vocabularies = a.tokens, hashed(b.tokens) if b.tokens and isinstance(a, Sketch) else b.tokens
    tokens = compare_tokens(vocabularies[0], vocabularies[1]) if vocabularies[0] and vocabularies[1] else None
    shapes = compare_shapes(a.shape, b.shape)
    tests, notes = _tests(a, b, vocabularies, reporter)
    unread = [(side.name, start) for side in (a, b) if isinstance(side, Opened) for start in side.weights.unread]
    notes += [f"{start}… of {name}: taken for no part of its language model" for name, start in unread]
    renamed = [side.name for side in (a, b) if isinstance(side, Opened) and side.weights.renamed]
    by_shape = "tensors, which are known by their shapes; up and gate both ways"
    notes += [f"the names of {name}'s {by_shape}" for name in renamed]
    return Finding(
        a.name, b.name, "sketch" if isinstance(a, Sketch) else "weights", tuple(tests), tokens, shapes,
        judge(tests, tokens, shapes, compared), tuple(notes), time.monotonic() - started,
        sum(weights.bytes_read for weights in opened) - before, sum(weights.bytes_total for weights in opened),
    )  # fmt: skip


def _tests(a: Reference, b: Opened, tokens: Vocabularies, reporter: Reporter) -> tuple[list[Test], list[str]]:
    """Run every test that these two allow; say what they do not allow."""
    notes: list[str] = []
    words = _embeddings(a, b, tokens, notes)
    if a.shape.hidden != b.shape.hidden:
        if words is None:
            return [], [*notes, "the widths differ, and without common words their dimensions cannot be matched"]
        aligned = descent_tests.align_dimensions(*words)
        carry = partial(_scatter, aligned, a.shape.hidden)
        return [descent_tests.order_test(aligned), *_compare(a, b, carry, reporter)], notes
    tests = [*([descent_tests.embedding_test(*words)] if words else []), *_compare(a, b, lambda rows: rows, reporter)]
    if judge(tests, None, None, 1).word in {"none", "related"}:
        turn = descent_tests.rotation(*words) if words else np.eye(a.shape.hidden)
        turned = _compare(a, b, lambda rows: descent_tests.rotate_back(rows, turn), reporter, undone=True)
        tests += [replace(test, rotated=True) for test in turned if test.name != IDENTITY]
    return tests, notes


def _embeddings(a: Reference, b: Opened, tokens: Vocabularies, notes: list[str]) -> tuple[Matrix, Matrix] | None:
    """Return the embeddings of words that both have; None if there are too few."""
    ids_a: Rows
    sizes = a.shape.vocab, b.shape.vocab
    if tokens[0] and tokens[1]:
        ids_a, ids_b = shared(tokens[0], tokens[1], rows=sizes)
    else:
        ids_a = ids_b = np.arange(sizes[0] if sizes[0] == sizes[1] else 0)
        notes.append("no tokeniser to compare" + (": equal ids are taken for equal words" if len(ids_a) else ""))
    if isinstance(a, Sketch):
        held = np.isin(ids_a, a.words)
        ids_a, ids_b = ids_a[held], ids_b[held]
    if len(ids_a) < FEWEST_TOKENS:
        few = f"only {len(ids_a)} words in common"
        notes.append(f"{few}: embeddings are not compared, rotated copies are not looked for")
        return None
    reference = a if isinstance(a, Sketch) else a.weights
    return reference.embedding(ids_a[:TOKENS]), b.weights.embedding(ids_b[:TOKENS])


def _scatter(aligned: Alignment, hidden: int, rows: Matrix) -> Matrix:
    """Put a narrower or wider model's columns where the reference has theirs."""
    placed = np.zeros((len(rows), hidden), np.float32)
    placed[:, aligned.a] = rows[:, aligned.b] * aligned.sign
    return placed


def _compare(a: Reference, b: Opened, carry: Carry, reporter: Reporter, *, undone: bool = False) -> list[Test]:
    """Compare some layers. Only indices are kept of each: the matrices themselves are gone.

    `undone`: as if nobody had reordered the layers, or moved factors between the gain of a norm and what reads it.
    """
    matched = _Matched(undone=undone)
    pairs = _layer_pairs(a, b, carry, undone=undone)
    with reporter.task(f"{b.name} against {a.name}", len(pairs), "layers") as task:
        for at_a, at_b in pairs:
            matched.add_layer(a, b, at_a, at_b, carry)
            task.advance()
    return matched.tests()


def _layer_pairs(a: Reference, b: Opened, carry: Carry, *, undone: bool) -> list[tuple[int, int]]:
    """Return which layers to compare: the same ones, or where they may be others those whose keys are most alike."""
    layers = a.layers if isinstance(a, Sketch) else list(range(a.shape.layers))
    if a.shape.layers == b.shape.layers and not undone:
        return [(layer, layer) for layer in middles(LAYERS, layers)]

    def keys(side: Reference, layers: Sequence[int]) -> dict[int, Matrix]:
        read = ((layer, _part(side, layer, "key", folded=undone)) for layer in layers)
        return {layer: rows for layer, rows in read if rows is not None}

    keys_a = keys(a, layers)
    keys_b = {layer: carry(rows) for layer, rows in keys(b, range(b.shape.layers)).items()}
    if not keys_a or not keys_b:  # no attention to know them by: layers at the same relative depth
        return [(layer, layer * b.shape.layers // a.shape.layers) for layer in middles(LAYERS, layers)]
    pairs = descent_tests.pair_layers(descent_tests.layer_similarity(list(keys_a.values()), list(keys_b.values())))
    return [(list(keys_a)[mine], list(keys_b)[other]) for mine, other in pairs[:LAYERS]]


def _part(side: Reference, layer: int, part: str, expert: int = 0, *, folded: bool = False) -> Matrix | None:
    if isinstance(side, Sketch):
        return side.part(layer, part)
    rows = side.weights.part(layer, part, expert)
    rows = rows if rows is None or not folded else side.weights.folded(layer, rows)[0]
    return thinned(rows, KEY_ROWS) if rows is not None and part in {"key", "query"} else rows


class _Matched:
    """Who was matched with whom, layer by layer."""

    def __init__(self, *, undone: bool) -> None:
        self.undone = undone
        self.ups: list[tuple[int, RowMatch]] = []
        self.units: list[tuple[int, RowMatch, RowMatch]] = []
        self.routers: list[tuple[int, RowMatch]] = []
        self.attention: list[tuple[int, float]] = []
        self.equal: list[bool] = []

    def add_layer(self, a: Reference, b: Opened, at_a: int, at_b: int, carry: Carry) -> None:
        """Match the rows of two layers, part by part."""

        def both(part_a: str, part_b: str, expert: int = 0) -> list[tuple[Matrix, Matrix]]:
            rows_a = _part(a, at_a, part_a, folded=self.undone)
            rows_b = _part(b, at_b, part_b, expert) if rows_a is not None else None
            if rows_a is None or rows_b is None:
                return []
            self.equal.append(np.array_equal(rows_a, rows_b))
            ways = b.weights.folded(at_b, rows_b) if self.undone else [rows_b]
            return [(rows_a, carry(rows)) for rows in ways]

        def match(part_a: str, part_b: str, expert: int = 0, signs: Sequence[bool] = (True,)) -> list[RowMatch]:
            pairs = both(part_a, part_b, expert)
            ways = [(rows, project(other) if isinstance(a, Sketch) else other) for rows, other in pairs]
            return [descent_tests.match_rows(*rows, signed=signed) for rows in ways for signed in signs]

        for part in ("key", "query"):
            similar = [descent_tests.unbiased_cka(*rows) for rows in both(part, part)]
            self.attention += [(at_a, max(similar))] if similar else []
        experts = match("router", "router")
        self.routers += [(at_a, match) for match in experts]
        twins = {row: twin for match in experts[:1] for row, twin in zip(match.rows, match.partners, strict=True)}
        both_ways = any(isinstance(side, Opened) and side.weights.renamed for side in (a, b))
        ways = [("up", "gate"), ("gate", "up")][: 1 + both_ways]
        for (block_a, block_b), (like_up, like_gate) in itertools.product(_blocks(a.shape, b.shape), ways):
            twin = int(twins.get(0, 0))
            ups = match(f"{block_a}up", block_b + like_up, twin, signs=(True, False))
            self.ups += [(at_a, up) for up in ups]
            gates = match(f"{block_a}gate", block_b + like_gate, twin)
            self.units += [(at_a, up, gate) for up, gate in itertools.product(ups, gates)]

    def tests(self) -> list[Test]:
        tests = [descent_tests.neuron_test(self.ups)] if self.ups else []
        tests += [descent_tests.matching_test(self.units)] if self.units else []
        tests += [descent_tests.neuron_test(self.routers, name=ROUTER)] if self.routers else []
        tests += [descent_tests.attention_effect(self.attention)] if self.attention else []
        if any(self.equal):
            note = f"{sum(self.equal)} of {len(self.equal)} compared tensors are equal, value for value"
            tests.append(Test(IDENTITY, None, sum(self.equal) / len(self.equal), note=note))
        return tests


def _blocks(a: Shape, b: Shape) -> list[tuple[str, str]]:
    """Return which blocks to compare: like with like, and the experts of one with the FFN they may be copies of."""
    if a.experts and b.experts:
        return [("", ""), ("expert ", "expert ")]
    return [("", ""), *([("", "expert ")] if b.experts else []), *([("expert ", "")] if a.experts else [])]


def show(finding: Finding, console: Console) -> None:
    """Print one finding. `console` must take text as it is, without markup."""
    title = f"{finding.suspect} against {finding.reference} ({finding.against})"
    table = table_of(title, "test", "p", "effect", "layers", "note")
    for test in finding.tests:
        chance, layers = "–" if test.log10_p is None else power(test.log10_p), ",".join(map(str, test.layers)) or "–"
        table.add_row(_named(test), chance, f"{test.effect:.3f}", layers, test.note)
    console.print(table)
    evidence = [each.sentence for each in (finding.tokens, finding.shapes) if each is not None]
    for line in [*evidence, *(f"not compared: {note}" for note in finding.notes)]:
        console.print(line, soft_wrap=True)
    console.print(f"{finding.verdict.word}: {finding.verdict.sentence}", style="bold", soft_wrap=True)
    for line in [*(f"  {limit}" for limit in finding.verdict.limits), effort([finding])]:
        console.print(line, style="dim", soft_wrap=True)


def show_library(findings: Sequence[Finding], console: Console) -> None:
    """Print how a model stands to every base of the library, then the best match in full."""
    title = f"{findings[0].suspect} against {len(findings)} known bases, best match first"
    table = table_of(title, "base", "verdict", "p, corrected", "shape", "vocabulary")
    for finding in findings:
        verdict, words = finding.verdict, finding.tokens.kind if finding.tokens else "–"
        table.add_row(finding.reference, verdict.word, power(verdict.log10_p), finding.shapes.kind, words)
    console.print(table, "")
    show(findings[0], console)
    console.print(f"in all {effort(findings)}", style="dim", soft_wrap=True)


def table_of(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        justify: Any = "right" if column in {"p", "p, corrected", "effect"} else "left"
        table.add_column(column, justify=justify, overflow="fold")
    return table


def power(log10_p: float) -> str:
    """Return a p-value from its logarithm."""
    return f"{10**log10_p:.2g}" if log10_p > -4 else f"1e{log10_p:.0f}"


def effort(findings: Sequence[Finding]) -> str:
    """Return the time and the bytes that audits took."""
    seconds, read = sum(each.seconds for each in findings), sum(each.bytes_read for each in findings)
    return f"{seconds:.1f} s; {amount(read, BYTES)} read of {amount(findings[0].bytes_total, BYTES)}"
