"""Which kinds of errors people mend: small commits whose message says fix, told apart by comparing syntax trees.

    python benchmarks/bug_kinds.py REPOSITORY … --out benchmarks/results/bug_kinds-cpu.json

A commit counts if its subject says fix, bug or regression (a typo, the documentation, the build, tests or types are other matters),
it changes at most ten lines of at most two functions of Python that are no tests, and the functions differ in more than comments,
docstrings and annotations. Its functions are compared node by node. Every difference has the kind of the operator that would make
the broken text of the fixed one; a commit counts as one, shared out among its differences. What no operator of
`etude/tasks/generators/mutation.py` makes is counted as well.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING

from etude.data.sources.repository import _blobs
from etude.git import commit_id, git, repository_of
from etude.lineage import environment
from etude.syntax import parse_python
from etude.tasks.generators.mutation import WEIGHTS
from etude.tasks.generators.parsed import Function, Parsed, differing, is_test_path
from etude.tasks.repairs import FIX, NO_FIX

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_LINES, MOST_FUNCTIONS, MOST_DIFFERENCES = 10, 2, 4
TEXTS = (ast.Constant, ast.JoinedStr)
ADDED = {
    ast.If: "del_if", ast.For: "del_for", ast.While: "del_for", ast.Return: "del_return", ast.Raise: "del_raise",
    ast.Assign: "del_assign", ast.AnnAssign: "del_assign", ast.AugAssign: "del_assign", ast.Expr: "del_expr", ast.Try: "remove_try",
    ast.With: "remove_with", ast.Assert: "del_assert", ast.Delete: "del_expr", ast.Continue: "del_if", ast.Break: "del_if",
}  # fmt: skip


def dump(node: object) -> str:
    return ast.dump(node) if isinstance(node, ast.AST) else repr(node)


def within(part: ast.AST, whole: ast.AST) -> bool:
    """Whether a part is a real part of another tree."""
    text = dump(part)
    return any(dump(each) == text for each in ast.walk(whole) if each is not whole and type(each) is type(part))


def blocks(broken: list[ast.stmt], fixed: list[ast.stmt]) -> Iterator[str]:
    """Compare two blocks: statements that are the same are paired, those between them compared in order."""
    one, two = [dump(each) for each in broken], [dump(each) for each in fixed]
    for tag, i, j, k, m in SequenceMatcher(None, one, two, autojunk=False).get_opcodes():
        gone, new = broken[i:j], fixed[k:m]
        if tag == "equal":
            continue
        if len(new) == 1 and gone and wraps(new[0], gone):
            yield {ast.If: "unwrap_if", ast.Try: "remove_try", ast.With: "remove_with"}.get(type(new[0]), "rewritten")
            continue
        if len(gone) == 1 and new and wraps(gone[0], new):
            yield f"extra {type(gone[0]).__name__.lower()}"
            continue
        while gone and new and len(gone) != len(new):  # the pair that is least alike is not a pair
            longer = gone if len(gone) > len(new) else new
            other = new if longer is gone else gone
            least = min(longer, key=lambda each: max(SequenceMatcher(None, dump(each), dump(o)).ratio() for o in other))
            longer.remove(least)
            yield ADDED.get(type(least), "rewritten") if longer is new else f"extra {type(least).__name__.lower()}"
        for a, b in zip(gone, new, strict=False):
            yield from differences(a, b)
        if not gone or not new:
            yield from (ADDED.get(type(each), "rewritten") for each in new)
            yield from (f"extra {type(each).__name__.lower()}" for each in gone)


def wraps(outer: ast.stmt, inner: list[ast.stmt]) -> bool:
    texts = [dump(each) for each in getattr(outer, "body", [])]
    return [dump(each) for each in inner] == texts


def differences(a: ast.AST, b: ast.AST) -> Iterator[str]:  # noqa: C901, PLR0912 - a table of cases
    """Yield the kinds of what differs between a broken and a fixed node."""
    if dump(a) == dump(b):
        return
    if isinstance(a, ast.expr) and isinstance(b, ast.expr):
        yield from expressions(a, b)
        return
    if type(a) is not type(b):
        both = {type(a), type(b)}
        yield (
            "loop_exit"
            if both == {ast.Break, ast.Continue}
            else "del_return"
            if both == {ast.Expr, ast.Return}
            else "rewritten"
        )
        return
    match a, b:
        case ast.If(), ast.If() if not a.orelse and b.orelse:
            elif_ = len(b.orelse) == 1 and isinstance(b.orelse[0], ast.If)
            yield "del_elif" if elif_ else "del_else"
            a = ast.If(a.test, a.body, b.orelse)
        case ast.ExceptHandler(), ast.ExceptHandler() if dump(a.type) != dump(b.type):
            less = a.type is not None and b.type is not None and within(a.type, b.type)
            yield "except_less" if less else "except_other"
            a = ast.ExceptHandler(b.type, b.name, a.body)
        case ast.Return(value=None), ast.Return():
            yield "ret_none"
            return
        case ast.arguments(), ast.arguments():
            yield from signatures(a, b)
            return
    for name, value in ast.iter_fields(a):
        other = getattr(b, name)
        if name in {"annotation", "returns", "type_comment", "ctx", "decorator_list", "type_params"}:
            if name == "decorator_list" and [*map(dump, value)] != [*map(dump, other)]:
                yield "decorator"
        elif isinstance(value, list) and any(isinstance(each, ast.stmt) for each in [*value, *other]):
            yield from blocks([*value], [*other])
        elif isinstance(value, list) and len(value) == len(other):
            for one, two in zip(value, other, strict=True):
                if isinstance(one, ast.AST):
                    yield from differences(one, two)
                elif one != two:
                    yield "rewritten"
        elif isinstance(value, ast.AST) and isinstance(other, ast.AST):
            yield from differences(value, other)
        elif dump(value) != dump(other) and not isinstance(value, list):
            yield "rewritten"
        elif isinstance(value, list) and [*map(dump, value)] != [*map(dump, other)]:
            yield "except_less" if isinstance(a, ast.Try) and len(other) > len(value) else "rewritten"


def signatures(a: ast.arguments, b: ast.arguments) -> Iterator[str]:
    names = [[arg.arg for arg in ast.walk(each) if isinstance(arg, ast.arg)] for each in (a, b)]
    if names[0] != names[1]:
        yield "parameters"
        return
    for one, two in zip([*a.defaults, *a.kw_defaults], [*b.defaults, *b.kw_defaults], strict=False):
        if dump(one) != dump(two):
            yield "default"


def expressions(a: ast.expr, b: ast.expr) -> Iterator[str]:  # noqa: C901, PLR0912, PLR0915 - a table of cases
    """Yield the kinds of what differs between two expressions."""
    match a, b:
        case ast.Compare(), ast.Compare() if [*map(dump, a.ops)] != [*map(dump, b.ops)] and len(a.ops) == len(b.ops):
            yield "compare"
            for one, two in zip([a.left, *a.comparators], [b.left, *b.comparators], strict=True):
                yield from differences(one, two)
            return
        case _, ast.Compare(ops=[ast.Is() | ast.IsNot()]) if dump(a) in {
            dump(b.left),
            dump(ast.UnaryOp(ast.Not(), b.left)),
        }:
            yield "none_check"
            return
        case ast.BoolOp(), ast.BoolOp():
            more = len(b.values) - len(a.values)
            if [*map(dump, a.values)] == [*map(dump, b.values)]:
                yield "boolop"
            elif not more and type(a.op) is type(b.op):
                for x, y in zip(a.values, b.values, strict=True):
                    yield from differences(x, y)
            else:
                yield "drop_operand" if more > 0 else "extra_operand"
            return
        case _, ast.BoolOp() if dump(a) in map(dump, b.values):
            yield "drop_operand"
            return
        case ast.BoolOp(), _ if dump(b) in map(dump, a.values):
            yield "extra_operand"
            return
        case (_, ast.UnaryOp(ast.Not(), operand)) | (ast.UnaryOp(ast.Not(), operand), _) if dump(operand) in {
            dump(a),
            dump(b),
        }:
            yield "if_negate" if isinstance(b, ast.UnaryOp) is False else "negate"
            return
        case ast.Constant(), ast.Constant():
            texts = isinstance(a.value, (str, bytes)) and isinstance(b.value, (str, bytes))
            yield "text" if texts else "constant"
            return
        case (ast.JoinedStr(), _) | (_, ast.JoinedStr()):
            yield "text"
            return
        case ast.Name(), ast.Name():
            yield "wrong_variable"
            return
        case ast.Attribute(), ast.Attribute() if dump(a.value) == dump(b.value):
            yield "wrong_attribute"
            return
        case ast.Call(), ast.Call() if dump(a.func) == dump(b.func):
            yield from arguments(a, b)
            return
        case ast.Call(), ast.Call() if [*map(dump, [*a.args, *a.keywords])] == [*map(dump, [*b.args, *b.keywords])]:
            yield "wrong_function"
            return
        case _, ast.Call(func=ast.Attribute(value=owner)) if dump(owner) == dump(a):
            yield "drop_method"
            return
        case _, ast.Call(args=[first, *_]) if dump(first) == dump(a):
            yield "unwrap_call"
            return
        case ast.Call(), _ if within(b, a):
            yield "extra call"
            return
        case _, ast.Attribute(value=owner) if dump(owner) == dump(a):
            yield "drop_attribute"
            return
        case ast.Attribute(value=owner), _ if dump(owner) == dump(b):
            yield "extra attribute"
            return
        case _, ast.Subscript(value=owner) if dump(owner) == dump(a):
            yield "drop_subscript"
            return
        case ast.Subscript(), ast.Subscript() if dump(a.value) == dump(b.value):
            yield "slice" if isinstance(a.slice, ast.Slice) or isinstance(b.slice, ast.Slice) else "index"
            return
        case _, ast.IfExp() if dump(a) in {dump(b.body), dump(b.orelse)}:
            yield "drop_choice"
            return
        case ast.BinOp(), ast.BinOp() if type(a.op) is not type(b.op) and dump(a.left) == dump(b.left):
            yield "binop"
            return
        case _, ast.BinOp() if dump(a) in {dump(b.left), dump(b.right)}:
            yield "drop_term"
            return
        case ((ast.Tuple() | ast.List() | ast.Set() | ast.Dict()), _) if type(a) is type(b) and count(a) != count(b):
            yield "drop_element" if count(b) > count(a) else "extra element"
            return
        case _, _ if type(a) is not type(b):
            yield "rewritten expression"
            return
    for (_, one), (_, two) in zip(ast.iter_fields(a), ast.iter_fields(b), strict=True):
        if isinstance(one, list) and len(one) == len(two):
            for x, y in zip(one, two, strict=True):
                yield from differences(x, y) if isinstance(x, ast.AST) and isinstance(y, ast.AST) else ()
        elif isinstance(one, ast.AST) and isinstance(two, ast.AST):
            yield from (
                ["binop"] if isinstance(one, ast.operator) and type(one) is not type(two) else differences(one, two)
            )
        elif dump(one) != dump(two):
            yield "rewritten expression"


def count(node: ast.expr) -> int:
    return len(node.keys if isinstance(node, ast.Dict) else node.elts)  # type: ignore[attr-defined]


def arguments(a: ast.Call, b: ast.Call) -> Iterator[str]:
    one, two = [*map(dump, a.args)], [*map(dump, b.args)]
    keys = [{each.arg: each.value for each in call.keywords} for call in (a, b)]
    if sorted(one) == sorted(two) and one != two:
        yield "swap_args"
    elif len(one) == len(two):
        for x, y in zip(a.args, b.args, strict=True):
            yield from differences(x, y)
    else:
        yield "drop_argument" if len(two) > len(one) else "extra argument"
    yield from ("drop_keyword" for name in keys[1].keys() - keys[0].keys())
    yield from ("extra argument" for name in keys[0].keys() - keys[1].keys())
    for name in keys[0].keys() & keys[1].keys():
        yield from differences(keys[0][name], keys[1][name])


def functions(path: str, text: str) -> dict[str, Function]:
    found = {name: node for name, node in Parsed(path, text).definitions if isinstance(node, Function)}
    for node in found.values():
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return found


def outside(text: str) -> str:
    """Return what a file holds beside functions, imports and docstrings."""
    tree = parse_python(text)
    for node in ast.walk(tree):
        if isinstance(getattr(node, "body", None), list):
            left = (*Function.__args__, ast.Import, ast.ImportFrom, ast.Expr)
            node.body = [each for each in node.body if not isinstance(each, left)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def kinds_of(changed: list[tuple[str, str, str]]) -> list[str] | str:
    """Return the kinds of the differences of a commit's files (path, before, after), or why it does not count."""
    size, found, touched = 0, [], 0
    for _, before, after in changed:
        old, new = before.split("\n"), after.split("\n")
        size += sum(max(j - i, m - k) for i, j, k, m in differing(old, new))
    if size > 3 * MOST_LINES:
        return "more lines"
    for path, before, after in changed:
        try:
            one, two = functions(path, before), functions(path, after)
            if outside(before) != outside(after) or one.keys() != two.keys():
                return "changes more than bodies of functions"
        except (SyntaxError, ValueError, RecursionError):
            return "not Python of this version"
        for name, node in one.items():
            differ = list(differences(node, two[name]))
            touched += bool(differ)
            found += differ
    if not found:
        return "no difference in meaning"
    if touched > MOST_FUNCTIONS or size > MOST_LINES:
        return "more lines"
    return found if len(found) <= MOST_DIFFERENCES else ["rewritten"]


def study(folder: Path) -> tuple[str, Counter[str], Counter[str]]:
    """Return a repository's name, its commits by kind, and what became of all that say fix."""
    name, kinds, became = folder.parent.name.partition("+")[2] or folder.name, Counter[str](), Counter[str]()
    repository = repository_of(folder, above=False, bare=True)
    assert repository is not None
    head = commit_id(repository, "HEAD") or ""
    log = git(
        repository, "log", "--no-merges", "--format=%x00%H%x01%s%x01", "--raw", "--no-abbrev", "--no-renames", head
    )
    wanted = []
    for record in log.stdout.decode(errors="replace").split("\0")[1:]:
        commit, subject, raw = record.split("\x01", 2)
        if not FIX.search(subject) or NO_FIX.search(subject):
            continue
        rows = [line.split(None, 5) for line in raw.strip().splitlines()]
        files = [
            row
            for row in rows
            if len(row) == 6 and row[5].endswith(".py") and not is_test_path(row[5]) and "setup.py" not in row[5]
        ]
        files = [row for row in files if not re.match(r"docs?/|examples?/|tools/|benchmarks?/", row[5])]
        if not files or len(files) > 2 or any(row[4] != "M" for row in files):
            became["no source, or several files" if len(files) != 1 else "file added or removed"] += 1
            continue
        wanted.append((commit, files))
    texts = _blobs(folder, [row[place] for _, files in wanted for row in files for place in (2, 3)])
    for _commit, files in wanted:
        pairs = [(row[5], next(texts), next(texts)) for row in files]
        decoded = [(path, a.decode(errors="replace"), b.decode(errors="replace")) for path, a, b in pairs
                   if isinstance(a, bytes) and isinstance(b, bytes)]  # fmt: skip
        found = kinds_of(decoded) if len(decoded) == len(pairs) else "broken object"
        if isinstance(found, str):
            became[found] += 1
            continue
        became["counted"] += 1
        for kind in found:
            kinds[kind] += 1 / len(found)  # type: ignore[assignment]
    return name, kinds, became


def main() -> None:
    """Study repositories side by side and print a table; write one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repositories", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    kinds, became, each = Counter[str](), Counter[str](), {}
    with ProcessPoolExecutor(options.workers) as pool:
        for name, mine, counts in pool.map(study, options.repositories):
            print(f"{name}: {dict(counts)}", flush=True)
            kinds.update(mine)
            became.update(counts)
            each[name] = counts["counted"]
    total = sum(kinds.values())
    print(f"{'kind':24}{'share, %':>9}  operator")
    for kind, number in kinds.most_common():
        print(f"{kind:24}{100 * number / total:9.2f}  {'yes' if kind in WEIGHTS else '-'}")
    made = sum(number for kind, number in kinds.items() if kind in WEIGHTS) / total
    print(f"{total:.0f} commits of {len(each)} repositories; {made:.0%} are of kinds that operators make")
    row = {"script": "bug_kinds.py", "date": datetime.now(UTC).date().isoformat(), "hardware": environment.hardware().model_dump(),
           "commits": round(total), "repositories": each, "became": dict(became.most_common()), "share_made": round(made, 4),
           "kinds": {kind: round(number / total, 4) for kind, number in kinds.most_common()}}  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(row) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
