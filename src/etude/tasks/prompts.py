"""Requests in the words of people: short, incomplete, sometimes wrong about the cause, and silent about the fix.

Templates are in prompts.toml; `full` is an opening, all facts and a closing. What a user saw is read from the output of a failing
test: give the output of one that the agent may see, where there is one.

Requests that point at the code, for models that are too small to find it: made from a task when they are asked for, not stored.

`shown` names the file and shows the broken code; what is wrong with it is for the agent to see. `told` dictates the change, as
users do for small things: what is left is to call the tools and to copy exactly. Neither is what the benchmark is about, and a
result says by which style it was made. They are there because nothing is learnt from tasks that are never solved.
"""

from __future__ import annotations

import random
import re
import string
import tokenize
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, cast, get_args

from etude.tasks.generators.parsed import Parsed, changed_lines
from etude.tasks.seal import code_pieces
from etude.tasks.strategies import changes
from etude.tasks.task import Edit, PointedStyle, Split, StoredStyle, Style

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.tasks.task import Candidate, Task

MOST = 400  # characters of a prompt, `full` excepted
MOST_TRACE, MOST_LINE, MOST_VALUE = 300, 110, 60
TRIES = 40
NO_NEWS = re.compile(r"[_=\-~][_=\-~ ]{2,}.*|\s*[\^~]+\s*|[.FEsxX]+(\s+\[.*\])?")  # rulers, carets, dots
RAISED = re.compile(r"\s*((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Warning|Exit|Interrupt|Invalid\w*|Failed))(?:: (.*))?$")
GRAM = 4  # tokens of code in a row that a prompt must not share with the solution


@dataclass(frozen=True)
class Failure:
    """What a failing test shows."""

    test: str
    error: str = "AssertionError"
    message: str = ""
    call: str = ""
    got: str = ""
    expected: str = ""
    trace: str = ""

    @property
    def seen(self) -> str:
        """What a person would say of it, a clause."""
        if self.got and self.expected:
            return f"{self.call or 'I'} {'gives' if self.call else 'get'} {self.got}, should be {self.expected}"
        told = f"{self.error}: {self.message}" if self.message and self.error != "AssertionError" else self.error
        return f"I get {told[:160]}" if told != "AssertionError" else ""


def failure_of(test: str, output: str) -> Failure:
    """Read what pytest printed of a failure, in any of its traceback styles."""
    lines = [line for line in map(str.rstrip, output.splitlines()) if line and not NO_NEWS.fullmatch(line)]
    said = [line[1:] for line in lines if line.startswith("E ")] or lines
    raised = [found for line in said if (found := RAISED.match(line))]
    error, message = (
        (raised[-1].group(1).split(".")[-1], raised[-1].group(2) or "") if raised else ("AssertionError", "")
    )
    text = "\n".join(said)
    pair = re.search(r"^\s*(?:AssertionError: )?assert (.+?) == (.+)$", text, re.MULTILINE)
    pair = pair or re.search(r"^\s*AssertionError: (.+?) != (.+?)(?: : .*)?$", text, re.MULTILINE)
    got, expected = pair.groups() if pair and error == "AssertionError" else ("", "")
    if max(len(got), len(expected)) > MOST_VALUE or "..." in got + expected:
        got = expected = ""
    calls = dict(re.findall(r"^\s*\+\s+where (.+?) = (\S.*\))$", text, re.MULTILINE))
    if expected in calls and got not in calls:
        got, expected = expected, got
    call = re.sub(r"<[^<>]* at 0x\w+>\.?", "", calls.get(got, ""))
    return Failure(test, error, message[:120], call if len(call) <= MOST_VALUE else "", got, expected, _tail(lines))


def _tail(said: Sequence[str]) -> str:
    """Return the last lines that fit, less indented."""
    lines = [re.sub(r"^E  |^>", "", line) for line in said]
    kept: list[str] = []
    for line in reversed(lines):
        if sum(map(len, kept)) + len(kept) + min(len(line), MOST_LINE) > MOST_TRACE:
            break
        kept.insert(0, line[:MOST_LINE])
    indent = min((len(line) - len(line.lstrip()) for line in kept), default=0)
    return "\n".join(line[indent:] for line in kept)


@lru_cache(maxsize=1)
def templates() -> dict[Split, dict[str, list[str]]]:
    """Return all templates by split and kind."""
    return tomllib.loads(resources.files("etude.tasks").joinpath("prompts.toml").read_text(encoding="utf-8"))  # type: ignore[return-value]


def suspects(candidate: Candidate) -> list[str]:
    """Return definitions of the edited files that the solution does not touch: plausible, and not at fault."""
    touched = {span.name for span in candidate.spans} | {
        *candidate.about.get("names", []),
        candidate.about.get("name", ""),
    }
    files = [Parsed(e.path, e.broken) for e in candidate.edits if e.broken and e.fixed and e.path.endswith(".py")]
    names = {name for file in files for name, _ in file.definitions if not name.rpartition(".")[2].startswith("__")}
    return sorted(
        name
        for name in names
        if not any(f"{t}.".startswith(f"{name}.") or f"{name}.".startswith(f"{t}.") for t in touched if t)
    )


def _facts(candidate: Candidate, package: str, failures: Sequence[Failure]) -> dict[str, str]:
    about = candidate.about
    failure = failures[0] if failures else Failure("")
    entry = next(iter([*about.get("changelog", []), about.get("subject", "")]), "")
    name = about.get("name") or next(iter(about.get("names", [])), "")
    facts = {
        "name": name.removesuffix(".__init__"),
        "path": about.get("path", ""),
        "doc": about.get("docstring", "")[:150],
        "entry": entry[:280],
        "seen": failure.seen,
        "trace": failure.trace,
        "package": package,
    }
    return {key: value for key, value in facts.items() if value}


def _all_facts(candidate: Candidate, facts: dict[str, str], failures: Sequence[Failure]) -> str:
    about = candidate.about
    said = {
        "Where": facts.get("path"),
        "What": about.get("signature") or facts.get("name"),
        "It should": facts.get("doc"),
    }
    said |= {"Wanted": facts.get("entry"), "Observed": facts.get("seen"), "Output": facts.get("trace")}
    said["Failing tests"] = ", ".join(failure.test for failure in failures[:8])
    return "\n".join(f"{key}: {value}" for key, value in said.items() if value)


def _kinds(candidate: Candidate, style: StoredStyle) -> tuple[str, ...]:
    if style != "terse":
        return (style,)
    if candidate.generator == "deletion":
        return ("missing",)
    return ("change", "wrong") if candidate.generator in {"version", "history"} else ("wrong",)


def _drawn(
    candidate: Candidate, facts: dict[str, str], style: StoredStyle, rng: random.Random, split: Split
) -> str | None:
    kinds = templates()[split]
    if style == "full":
        return f"{rng.choice(kinds['full_open'])}\n{{facts}}\n{rng.choice(kinds['full_close'])}".format(**facts)
    for kind in _kinds(candidate, style):
        usable = [
            text
            for text in kinds[kind]
            if {field for _, field, _, _ in string.Formatter().parse(text) if field} <= facts.keys()
        ]
        if usable:
            return rng.choice(usable).format(**facts)
    return None


def prompts(
    candidate: Candidate,
    package: str,
    failures: Sequence[Failure],
    rng: random.Random,
    split: Split,
    others: Sequence[str] = (),
) -> dict[StoredStyle, str]:
    """Return a prompt of each style that there are facts for and that does not leak; `others` are suspects from elsewhere."""
    facts = _facts(candidate, package, failures)
    blamed = suspects(candidate) or sorted(others)
    made: dict[StoredStyle, str] = {}
    for style in get_args(StoredStyle):
        for _ in range(TRIES):
            drawn = facts | ({"other": rng.choice(blamed).rpartition(".")[2]} if blamed else {})
            text = _drawn(candidate, drawn | {"facts": _all_facts(candidate, facts, failures)}, style, rng, split)
            if text is None:
                break
            if (len(text) <= MOST or style == "full") and not leaks(text, candidate):
                made[style] = text
                break
    return made


def _tokens(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def _grams(text: str) -> set[tuple[str, ...]]:
    tokens = _tokens(text)
    grams = {tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)}
    return {gram for gram in grams if sum(word[0].isalnum() or word[0] == "_" for word in gram) >= 2}


def _code(path: str, text: str | None) -> list[str]:
    try:
        return list(code_pieces(path, text or ""))
    except (tokenize.TokenError, SyntaxError):  # a file that is no Python is all code
        return [text or ""]


@lru_cache(maxsize=64)
def _secrets(
    edits: tuple[tuple[str, str | None, str | None], ...],
) -> tuple[frozenset[tuple[str, ...]], frozenset[str]]:
    """Return the runs of code and the private names that only the solved files have."""
    solved = [piece for path, _, fixed in edits for piece in _code(path, fixed)]
    broken = "\n".join(text or "" for _, text, _ in edits)
    grams = {gram for piece in solved for gram in _grams(piece)} - _grams(broken)
    names = {word for piece in solved for word in _tokens(piece) if re.match(r"_[a-z]\w*", word)} - set(_tokens(broken))
    return frozenset(grams), frozenset(names)


def leaks(prompt: str, candidate: Candidate) -> list[str]:
    """Return what in a prompt gives the solution away: runs of its code, its private names, its commit."""
    about = candidate.about
    grams, private = _secrets(tuple((edit.path, edit.broken, edit.fixed) for edit in candidate.edits))
    said = prompt.replace(about.get("signature") or "\0", "")
    found = [" ".join(gram) for gram in sorted(_grams(said) & grams)]
    known = {part for name in [about.get("name", ""), *about.get("names", [])] for part in name.split(".")}
    found += sorted((private & set(_tokens(said))) - known)
    if about.get("commit") and re.search(rf"\b{about['commit'][:7]}", prompt):
        found.append("the commit")
    return found


MOST_TOLD, MOST_PIECES = 1_200, 4  # characters that are dictated, in how many places
AND_ALSO = "\nand also\n```\n{old}\n```\nby\n```\n{new}\n```"
MOST_SHOWN = 40  # lines of a function; of a longer one, those around the change


def asked(task: Task, style: Style) -> tuple[Style, str]:
    """Return a task's request in a style, or in the first it has."""
    if style in get_args(PointedStyle):
        if text := pointed(task, cast("PointedStyle", style)):
            return style, text
        style = "terse"
    return min(task.prompts.items(), key=lambda pair: pair[0] != style)


def pointed(task: Task, style: PointedStyle) -> str | None:
    """Return the request that points at the code; None where the solution is in several files, or too long."""
    if len(task.candidate.edits) != 1:
        return None
    facts = _told(task.candidate.edits[0]) if style == "told" else _shown(task.candidate.edits[0])
    if facts is None:
        return None
    observed = re.search(r"(?m)^Observed: (.+)$", task.prompts.get("full", ""))
    said = {"seen": f" {observed[1].rstrip('.')}." if observed else "", **facts}
    rng = random.Random(f"{task.id} {style}")  # noqa: S311 - draws words
    return rng.choice(templates()[task.split][style]).format(**said) + facts.get("more", "")


@lru_cache(maxsize=4096)
def _told(edit: Edit) -> dict[str, str] | None:
    """Return what gives way to what, in pieces that the file has once."""
    if edit.broken is None or edit.fixed is None:
        return None
    made = [(each.old or "", each.new or "") for each in changes(edit.path, edit.broken, edit.fixed)]
    if len(made) > MOST_PIECES or not all(old and new for old, new in made) or len(str(made)) > MOST_TOLD:
        return None
    more = "".join(AND_ALSO.format(old=old, new=new) for old, new in made[1:])
    return {"path": edit.path, "old": made[0][0], "new": made[0][1], "more": more}


@lru_cache(maxsize=4096)
def _shown(edit: Edit) -> dict[str, str] | None:
    """Return the function that is wrong, or the lines around what is."""
    if edit.broken is None or edit.fixed is None or not edit.path.endswith(".py"):
        return None
    file = Parsed(edit.path, edit.broken)
    spans = changed_lines(edit.fixed, edit.broken)
    lines = edit.broken.splitlines(keepends=True)
    first, last = max(1, min(span[0] for span in spans)), max(span[1] for span in spans)
    around = [
        (file.first_line(node), node.end_lineno or 0, name)
        for name, node in file.definitions
        if file.first_line(node) <= first and last <= (node.end_lineno or 0)
    ]
    begin, end, name = min(around, key=lambda each: each[1] - each[0], default=(1, len(lines), edit.path))
    if end - begin >= MOST_SHOWN:
        begin, end = max(begin, first - MOST_SHOWN // 2), min(end, first + MOST_SHOWN // 2)
    if last > end:
        return None
    return {"path": edit.path, "name": name, "code": "".join(lines[begin - 1 : end]).rstrip("\n") + "\n"}
