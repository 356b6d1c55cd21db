"""Small errors and missing bodies in languages other than Python: the same operators for all, by tokens that most languages share.

What does not compile, changes nothing that tests see, or never ends falls out when it is tried; each is counted. There is no
coverage of tests here, so functions are drawn blindly, long ones less often than their sites are many.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from etude.tasks.generators.languages import LANGUAGES, Source, tidied
from etude.tasks.generators.parsed import Cut, is_test_path, overlap, paths_below, read_texts, solution_spans
from etude.tasks.task import Candidate, Edit

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tree_sitter import Node

    from etude.tasks.generators.languages import Definition

    Offer = tuple[str, tuple[Cut, ...]]

WEIGHTS = {
    "compare": 3.0, "boolop": 3.0, "negate": 2.5, "if_negate": 2.0, "del_if": 2.0, "del_else": 2.0, "binop": 1.5, "augmented": 1.5,
    "constant": 2.0, "truth": 2.0, "twin": 3.0, "swap_args": 0.7, "del_statement": 1.5, "loop_exit": 1.5,
}  # fmt: skip
SWAPS = {
    "compare": {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "===": "!==", "!==": "==="},
    "boolop": {"&&": "||", "||": "&&", "and": "or", "or": "and"},
    "binop": {"+": "-", "-": "+", "*": "/", "/": "*", "%": "/", "<<": ">>", ">>": "<<", "&": "|", "|": "&"},
    "augmented": {"+=": "-=", "-=": "+=", "*=": "+=", "|=": "&=", "&=": "|=", "<<=": ">>=", ">>=": "<<="},
}  # fmt: skip
OTHER = {token: (kind, other) for kind, swaps in SWAPS.items() for token, other in swaps.items()}
_TWINS = (
    "min max", "some every", "startsWith endsWith", "push unshift", "pop shift", "indexOf lastIndexOf", "toLowerCase toUpperCase",
    "trimStart trimEnd", "floor ceil", "HasPrefix HasSuffix", "Index LastIndex", "TrimLeft TrimRight", "ToLower ToUpper",
    "TrimPrefix TrimSuffix", "is_some is_none", "starts_with ends_with", "find rfind", "first last", "any all", "trim_start trim_end",
    "is_ok is_err", "any? all?", "select reject", "isalpha isalnum", "tolower toupper", "strcmp strcasecmp", "keys values",
)  # fmt: skip
TWINS = {name: pair.split()[1 - i] for pair in _TWINS for i, name in enumerate(pair.split())}
TRUTHS = {"true": "false", "false": "true"}
ARGUMENTS = {"arguments", "argument_list"}
NUMBERS = {"number", "int_literal", "integer_literal", "number_literal", "decimal_integer_literal", "integer"}
IFS = {"if_statement", "if_expression", "if"}
BLOCKS = {
    "statement_block",
    "statement_list",
    "block",
    "compound_statement",
    "body_statement",
    "then",
    "block_body",
    "program",
}
REMOVED = {
    "expression_statement",
    "assignment_statement",
    "inc_statement",
    "dec_statement",
}  # where its expression acts
EXITS = {"break": "continue", "continue": "break", "next": "break"}
NOT_ENTERED = re.compile(
    r".*comment|.*string.*|char_literal|regex|import.*|use_declaration|attribute_item|throw_statement|preproc_.*"
    r"|.*_annotation|type_annotation|token_tree|assert_statement|raw_text"
)
SHORTEST, LONGEST = 3, 150  # lines of a function
COMBINED = 0.3  # share of candidates with more than one site


class Site(NamedTuple):
    """One way to break one function."""

    file: Source
    function: Definition
    kind: str
    cuts: tuple[Cut, ...]


def _offers(file: Source, node: Node) -> Iterator[Offer]:
    """Yield the ways to break one node."""
    yield from _tokens(file, node)
    if node.type in ARGUMENTS:
        given = [each for each in node.named_children if "comment" not in each.type]
        for one, other in pairwise(given):
            if file.source(one) != file.source(other):
                yield "swap_args", (file.replaced(one, file.source(other)), file.replaced(other, file.source(one)))
    if node.type in IFS:
        yield from _conditions(file, node)
    if node.type in REMOVED and node.parent is not None and node.parent.type in BLOCKS and _acts(file, node):
        yield "del_statement", (file.without(node),)


def _tokens(file: Source, node: Node) -> Iterator[Offer]:
    """Yield other operators, numbers, truths and names."""
    text = file.source(node) if len(node.children) < 2 else ""
    operator = node.child_by_field_name("operator")
    kind, other = OTHER.get(file.source(operator), ("", "")) if len(node.named_children) > 1 else ("", "")
    texts = kind in {"binop", "augmented"} and any("string" in each.type for each in node.named_children)
    if operator is not None and kind and not texts:
        yield kind, (file.replaced(operator, other),)
    if node.type.startswith("unary") and node.children and file.source(node.children[0]) in {"!", "not"}:
        yield "negate", (file.replaced(node.children[0], ""),)
    if node.type in NUMBERS and re.fullmatch(r"0|[1-9]\d{0,2}", text):
        yield "constant", (file.replaced(node, str(int(text) + 1 if text != "1" else 0)),)
    if text in TRUTHS and not node.children:
        yield "truth", (file.replaced(node, TRUTHS[text]),)
    if text in TWINS and "identifier" in node.type:
        yield "twin", (file.replaced(node, TWINS[text]),)
    word = file.source(node).rstrip(";") if node.type.startswith(("break_", "continue_")) else ""
    if word in EXITS:
        yield "loop_exit", (Cut(node.start_byte, node.start_byte + len(word), EXITS[word]),)


def _acts(file: Source, node: Node) -> bool:
    """Whether a statement is a call or an assignment, and no declaration: those leave a name unbound."""
    inner = node.named_children[0] if node.type == "expression_statement" and node.named_children else node
    return bool(re.search("call|assign|invocation|update|inc_|dec_", inner.type)) and not re.match(
        r"\s*(super|log)\b", file.source(node)
    )


def _conditions(file: Source, node: Node) -> Iterator[Offer]:
    condition, branch = node.child_by_field_name("condition"), node.child_by_field_name("alternative")
    if condition is None or condition.type.startswith("let"):
        return
    text = file.source(condition)
    yield "if_negate", (file.replaced(condition, f"(!{text})" if text.startswith("(") else f"!({text})"),)
    alone = node.parent is not None and (node.parent.type in BLOCKS or node.parent.type == "expression_statement")
    if branch is None and alone and file.source(node).startswith("if"):
        yield "del_if", (file.without(node),)
    then = node.child_by_field_name("consequence")
    if branch is not None and then is not None and not re.search(r"^(else )?\s*if\b|elsif", file.source(branch)):
        yield "del_else", (Cut(then.end_byte, branch.end_byte),)


def sites_of(file: Source) -> list[Site]:
    """Return all sites of a file's functions; those inside an inner function are its own."""
    sites: list[Site] = []
    for found in file.definitions:
        waiting = [found.body]
        if not found.node.end_point[0] - found.node.start_point[0] + 1 >= SHORTEST:
            continue
        while waiting:
            node = waiting.pop()
            if NOT_ENTERED.fullmatch(node.type) or file.is_test(node):
                continue
            sites += [Site(file, found, kind, cuts) for kind, cuts in _offers(file, node)]
            waiting += [
                each for each in node.children if not (each.type in file.table.functions and file.definition(each, ""))
            ]
    return sites


def broken_by(file: Source, cuts: Sequence[Cut]) -> tuple[Edit, ...] | None:
    """Return the edits of some cuts of one file; None if the result does not parse or means the same."""
    text = tidied(file.cut(cuts), file.language)
    after = Source(file.path, text, file.language)
    worse = after.root.has_error and not file.root.has_error
    return None if worse or after.words() == file.words() else (Edit(file.path, text, file.text),)


def read_sources(tree: Path, sources: Sequence[str], language: str, left_out: Counter[str]) -> list[Source]:
    """Return the files of a language that are not tests; what cannot be read, or is in a function with errors, is counted."""
    suffixes = LANGUAGES[language].suffixes
    paths = [path for path in paths_below(tree, sources) if path.endswith(suffixes) and not is_test_path(path)]
    files = [Source(path, text, language) for path, text in read_texts(tree, paths, left_out).items()]
    left_out["function does not parse"] += sum(each.node.has_error for file in files for each in file.definitions)
    return files  # macros of C make errors outside of functions


def _candidate(
    generator: str, kinds: Sequence[str], edits: tuple[Edit, ...], file: Source, functions: Sequence[Definition]
) -> Candidate:
    names = list(dict.fromkeys(each.name for each in functions))
    where = {each.name: file.lines(each.node) for each in functions}
    spans = tuple(
        replace(span, name=next((name for name, (a, b) in where.items() if a <= span.first <= b), ""))
        for span in solution_spans(edits)
    )
    about = {**file.about(functions[0]), "names": names}
    return Candidate(generator, tuple(kinds), edits, spans, about)  # type: ignore[arg-type]


def mutations(
    tree: Path, sources: Sequence[str], language: str, rng: random.Random, left_out: Counter[str]
) -> Iterator[Candidate]:
    """Yield mutations, one lead a site, sometimes with others of its file."""
    by_file = {file.path: sites_of(file) for file in read_sources(tree, sources, language, left_out)}
    every = [site for sites in by_file.values() for site in sites]
    shares = Counter((site.file.path, site.function.name) for site in every)
    kinds = Counter(site.kind for site in every)

    def chance(site: Site) -> float:
        weight = WEIGHTS[site.kind] / kinds[site.kind] / shares[site.file.path, site.function.name] ** 0.7
        return float(math.log(rng.random() or 1e-300) / weight)

    seen = set[tuple[Edit, ...]]()
    for _, lead in sorted(((chance(site), site) for site in every), key=lambda pair: -pair[0]):
        chosen = [lead]
        for site in (
            rng.sample(by_file[lead.file.path], min(2, len(by_file[lead.file.path]))) if rng.random() < COMBINED else []
        ):
            if not any(overlap(one, two) for each in chosen for one in site.cuts for two in each.cuts):
                chosen.append(site)
        edits = broken_by(lead.file, [cut for site in chosen for cut in site.cuts])
        if edits is None or edits in seen:
            left_out["mutant does not parse or changes nothing" if edits is None else "mutant again"] += 1
            continue
        seen.add(edits)
        yield _candidate(
            "mutation", [site.kind for site in chosen], edits, lead.file, [site.function for site in chosen]
        )


def _stub(file: Source, found: Definition) -> Cut:
    """Return the cut that leaves a function's signature."""
    indent = re.match(
        r"[ \t]*", file.content[file.content.rfind(b"\n", 0, found.body.named_children[0].start_byte) + 1 :].decode()
    )
    close = re.match(r"[ \t]*", file.content[file.content.rfind(b"\n", 0, found.node.end_byte) + 1 :].decode())
    inside = f"\n{indent[0] if indent else ''}{file.table.stub}\n{close[0] if close else ''}"
    return Cut(found.body.start_byte, found.body.end_byte, f"{{{inside}}}" if file.table.braces else file.table.stub)


def deletions(
    tree: Path, sources: Sequence[str], language: str, rng: random.Random, left_out: Counter[str]
) -> Iterator[Candidate]:
    """Yield functions without their bodies: one, or all of a class or of a receiver."""
    groups: list[tuple[str, Source, list[Definition]]] = []
    for file in read_sources(tree, sources, language, left_out):
        classes: dict[str, list[Definition]] = defaultdict(list)
        for found in file.definitions:
            lines = found.node.end_point[0] - found.node.start_point[0] + 1
            if SHORTEST <= lines <= LONGEST and not found.node.has_error:
                groups.append(("body", file, [found]))
                classes[found.name.rpartition(".")[0]].append(found)
        groups += [("class_bodies", file, each) for name, each in classes.items() if name and len(each) > 1]
    for level, file, going in rng.sample(groups, len(groups)):
        outer = [
            each for each in going if not any(o.body.start_byte < each.node.start_byte < o.body.end_byte for o in going)
        ]
        edits = broken_by(file, [_stub(file, each) for each in outer])
        if edits is None:
            left_out[f"{level}: what is left does not parse"] += 1
            continue
        yield _candidate("deletion", [level], edits, file, outer)
