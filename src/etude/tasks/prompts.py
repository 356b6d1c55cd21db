"""Requests as users write them: short, incomplete, sometimes wrong about the cause, and without the fix.

Templates are in prompts.toml. `full` is an opening, all facts and a closing; `vague` names little more than a part of the program, so
the code must be read to know what is meant. What a user observed is taken from the output of a failing test, a visible one if there
is one.

Three more styles are generated on demand, for models that are too small to find the code. `located` names the files that the solution
is in. `shown` names the file and shows the broken code without saying what is wrong. `told` dictates the change, as users do for small
things; the agent only has to call the tools and copy exactly. Benchmarks are not about these styles, and a result states its style.
They exist because a model learns nothing from tasks that it never solves.
"""

from __future__ import annotations

import random
import re
import shlex
import string
import tokenize
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from etude.agent.calls import Call
from etude.tasks.generators.languages import Source, language_of
from etude.tasks.generators.parsed import Parsed, changed_lines, differing
from etude.tasks.seal import code_pieces
from etude.tasks.task import Candidate, Edit, PointedStyle, Split, StoredStyle, Style, Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    Phrases = dict[str, list[str]]  # by what they are for

MOST_DETAILS = 800  # characters of a commit message in a full request
MOST = 400  # characters of a prompt, `full` excepted
MOST_TRACE, MOST_LINE, MOST_VALUE = 300, 110, 60
TRIES = 40
NO_NEWS = re.compile(  # rulers, carets, dots, and the insides of node's runner of tests
    r"[_=\-~][_=\-~ ]{2,}.*|\s*[\^~]+\s*|[.FEsxX]+(\s+\[.*\])?"
    r"|.*\bnode:internal/.*|\s*(new|async) (Safe)?(Promise|Test|Suite)\b.*|\s*(Array|Test|Suite)\.\w+ .*"
)
RAISED = re.compile(r"\s*((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Warning|Exit|Interrupt|Invalid\w*|Failed))(?:: (.*))?$")
FENCES = {
    "py": "python",
    "js": "javascript",
    "mjs": "javascript",
    "ts": "typescript",
    "rs": "rust",
    "rb": "ruby",
    "h": "c",
}
GRAM = 4  # tokens of code in a row that a prompt must not share with the solution
MOST_DICTATED, MOST_PIECES = 1_200, 4  # characters, in how many places
AND_ALSO = "\nand also\n```\n{old}\n```\nby\n```\n{new}\n```"
SHOWN = 70  # characters of a line that is spoken of
MOST_SHOWN = 40  # lines of a function; of a longer one, those around the change


@lru_cache(maxsize=2)
def phrases(file: str = "demos.toml") -> dict[str, Phrases]:
    """Return the texts of a file beside this one, of a kind each, by what they are for."""
    return tomllib.loads(Path(__file__).with_name(file).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Change:
    """One replacement in a file. `old` occurs once after the replacements before it; None: the whole file. `new` None: removal."""

    path: str
    name: str  # of the definition it is in
    old: str | None
    new: str | None

    def call(self, indent: str = "") -> Call:
        """Return the call that makes it; with an indent it will not be found."""
        if self.new is None:
            return Call("shell", {"command": f"rm -- {shlex.quote(self.path)}"})
        if self.old is None:
            return Call("write", {"path": self.path, "content": self.new})
        old, new = (re.sub(r"(?m)^(?=.)", indent, text) for text in (self.old, self.new))
        return Call("edit", {"path": self.path, "old": old, "new": new})

    @property
    def line(self) -> dict[str, str]:
        """The one line that gives way to one other, where that is so and both are short enough to be spoken of."""
        old, new = (self.old or "").splitlines(), (self.new or "").splitlines()
        pairs = [(a.strip(), b.strip()) for a, b in zip(old, new, strict=False) if a != b]
        if len(old) != len(new) or len(pairs) != 1:
            return {}
        short = all(0 < len(text) <= SHOWN and "`" not in text for text in pairs[0])
        return dict(zip(("was", "now"), pairs[0], strict=True)) if short else {}


def changes(path: str, before: str, after: str) -> list[Change]:
    """Return the replacements that turn one text into another, front to back, with as many lines around each as make it unique."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    made = []
    for i, j, k, m in differing(old, new):
        present = "".join([*new[:k], *old[i:]])
        for around in range(len(old) + len(new)):
            head, tail = "".join(new[max(0, k - around) : k]), "".join(old[j : j + around])
            was, now = head + "".join(old[i:j]) + tail, head + "".join(new[k:m]) + tail
            if was.strip() and _times(was, present) == 1:
                break
        if was.endswith("\n") and now.endswith("\n") and now.strip() and _times(was[:-1], present) == 1:
            was, now = was[:-1], now[:-1]
        made.append(Change(path, _name(path, before, after, range(k + 1, m + 1)) or path, was, now))
    return made


def changes_of(edit: Edit) -> list[Change]:
    """Return the replacements of one file of a solution, or the whole file; `edit` chooses ends of lines itself."""
    plain = (edit.broken or "").strip() and edit.fixed is not None and "\r" not in f"{edit.broken}{edit.fixed}"
    parts = changes(edit.path, str(edit.broken), str(edit.fixed)) if plain else []
    return parts or [Change(edit.path, edit.path, None, edit.fixed)]


def _times(part: str, text: str) -> int:
    """Return how often a part is in a text, as the tool that edits counts: also where it overlaps itself."""
    return len(re.findall(f"(?={re.escape(part)})", text))


def _name(path: str, before: str, after: str, lines: range) -> str:
    """Return the definition that lines of the new text bring, or that they are in."""
    if not path.endswith(".py"):
        return ""
    file = _parsed(path, after)
    here = [(name, node) for name, node in file.definitions if node.lineno in lines]
    known = {name for name, _ in Parsed(path, before).definitions} if here else set()
    brought = [name for name, _ in here if name not in known]
    return brought[0] if brought else file.name_at(min(lines.start, len(file.lines)))


@lru_cache(maxsize=16)
def _parsed(path: str, text: str) -> Parsed:
    """Return a file; many tasks break the same one, so that parsing it anew for each would take most of the time."""
    return Parsed(path, text)


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
        said = f"I get {self.error}: {self.message}" if self.message else f"I get {self.error}"
        return "" if self.error == "AssertionError" else said[:166]


def failure_of(test: str, output: str) -> Failure:
    """Read what pytest printed of a failure, in any of its traceback styles."""
    lines = [line for line in map(str.rstrip, output.splitlines()) if line and not NO_NEWS.fullmatch(line)]
    shown = [line[1:] for line in lines if line.startswith("E ")] or lines
    raised = [match for line in shown if (match := RAISED.match(line))]
    error, message = (raised[-1][1].split(".")[-1], raised[-1][2] or "") if raised else ("AssertionError", "")
    text = "\n".join(shown)
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


def _tail(output: Sequence[str]) -> str:
    """Return the last lines that fit, less indented."""
    lines = [re.sub(r"^E  |^>", "", line) for line in output]
    kept: list[str] = []
    for line in reversed(lines):
        if sum(map(len, kept)) + len(kept) + min(len(line), MOST_LINE) > MOST_TRACE:
            break
        kept.insert(0, line[:MOST_LINE])
    indent = min((len(line) - len(line.lstrip()) for line in kept), default=0)
    return "\n".join(line[indent:] for line in kept)


def not_at_fault(candidate: Candidate) -> list[str]:
    """Return definitions in the edited files that the solution does not touch: a request with a wrong premise blames one."""
    about = candidate.about
    touched = {*(span.name for span in candidate.spans), *about.get("names", []), about.get("name", "")} - {""}
    files = [Parsed(e.path, e.broken) for e in candidate.edits if e.broken and e.fixed and e.path.endswith(".py")]
    names = {name for file in files for name, _ in file.definitions if not name.rpartition(".")[2].startswith("__")}
    others = [Source(e.path, e.broken, kind) for e in candidate.edits if e.broken and (kind := language_of(e.path))]
    names |= {found.name for file in others for found in file.definitions}
    near = {n for n in names for t in touched if f"{t}.".startswith(f"{n}.") or f"{n}.".startswith(f"{t}.")}
    return sorted(names - near)


def _facts(candidate: Candidate, package: str, failures: Sequence[Failure]) -> dict[str, str]:
    """Return what templates may name, as far as it is known; `facts` is all of it, a line each."""
    about = candidate.about
    failure = failures[0] if failures else Failure("")
    entry = next(iter([*about.get("changelog", []), about.get("subject", "")]), "")
    name = (about.get("name") or next(iter(about.get("names", [])), "")).removesuffix(".__init__")
    doc, path = about.get("docstring", "")[:150], about.get("path", "")
    place = Path(path)
    module = (place.parent.name or package) if place.stem in {"__init__", "__main__"} else place.stem
    lines = {"Where": path, "What": about.get("signature") or name, "It should": doc, "Wanted": entry[:280],
             "Details": _details(candidate), "Observed": failure.seen, "Output": failure.trace,
             "Failing tests": ", ".join(failure.test for failure in failures[:8])}  # fmt: skip
    facts = {"name": name, "path": path, "doc": doc, "entry": entry[:280], "seen": failure.seen, "trace": failure.trace,
             "module": module.strip("_") if path else "", "package": package,
             "facts": "\n".join(f"{key}: {value}" for key, value in lines.items() if value)}  # fmt: skip
    return {key: value for key, value in facts.items() if value or key == "facts"}


def _details(candidate: Candidate) -> str:
    """Return the paragraphs of a commit's message that give no code away, as far as there is room."""
    told = ""
    for paragraph in re.split(r"\n\s*\n", candidate.about.get("body", "")):
        plain = " ".join(paragraph.split())
        if plain and not leaks(plain, candidate) and len(told) + len(plain) < MOST_DETAILS:
            told += f" {plain}"
    return told.strip()


def _drawn(generator: str, facts: dict[str, str], style: StoredStyle, rng: random.Random, kinds: Phrases) -> str | None:
    if style == "full":
        return f"{rng.choice(kinds['full_open'])}\n{{facts}}\n{rng.choice(kinds['full_close'])}".format(**facts)
    terse = {"deletion": ["missing"], "mutation": ["wrong"]}.get(generator, ["change", "wrong"])
    for kind in terse if style == "terse" else [style]:
        fields = {text: {field for _, field, _, _ in string.Formatter().parse(text) if field} for text in kinds[kind]}
        if usable := [text for text in kinds[kind] if fields[text] <= facts.keys()]:
            return rng.choice(usable).format(**facts)
    return None


def prompts(
    candidate: Candidate, package: str, failures: Sequence[Failure], rng: random.Random, split: Split
) -> dict[StoredStyle, str]:
    """Return a prompt of each style that there are facts for and that does not leak."""
    facts, blamed = _facts(candidate, package, failures), not_at_fault(candidate)
    made: dict[StoredStyle, str] = {}
    for style in get_args(StoredStyle):
        for _ in range(TRIES):
            other = {"other": rng.choice(blamed).rpartition(".")[2]} if blamed else {}
            text = _drawn(candidate.generator, facts | other, style, rng, phrases("prompts.toml")[split])
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
def _secrets(edits: tuple[Edit, ...]) -> tuple[set[tuple[str, ...]], set[str]]:
    """Return the runs of code and the private names that only the solved files have."""
    solved = [piece for edit in edits for piece in _code(edit.path, edit.fixed)]
    broken = "\n".join(edit.broken or "" for edit in edits)
    grams = {gram for piece in solved for gram in _grams(piece)} - _grams(broken)
    names = {word for piece in solved for word in _tokens(piece) if re.match(r"_[a-z]\w*", word)} - set(_tokens(broken))
    return grams, names


def leaks(prompt: str, candidate: Candidate) -> list[str]:
    """Return what in a prompt gives the solution away: runs of its code, its private names, its commit."""
    about = candidate.about
    grams, private = _secrets(candidate.edits)
    rest = prompt.replace(about.get("signature") or "\0", "")
    known = {part for name in [about.get("name", ""), *about.get("names", [])] for part in name.split(".")}
    shared = [" ".join(gram) for gram in sorted(_grams(rest) & grams)]
    commit = ["the commit"] if about.get("commit") and re.search(rf"\b{about['commit'][:7]}", prompt) else []
    return [*shared, *sorted((private & set(_tokens(rest))) - known), *commit]


def asked(task: Task, style: Style) -> tuple[Style, str]:
    """Return a task's request in a style, or in the first it has."""
    if style in get_args(PointedStyle):
        if text := pointed_request(task, cast("PointedStyle", style)):
            return style, text
        style = "terse"
    return min(task.prompts.items(), key=lambda pair: pair[0] != style)


def pointed_request(task: Task, style: PointedStyle) -> str | None:
    """Return the request that points at the code; None where it cannot: a solution in several files, or a long one."""
    edit, *others = task.candidate.edits
    if style == "located":
        paths = [each.path for each in task.candidate.edits]
        facts: dict[str, str] | None = {"path": " and ".join(paths)} if len(paths) <= MOST_PIECES else None
    else:
        facts = None if others else _dictation(edit) if style == "told" else _broken_code(edit)
    if facts is None:
        return None
    wanted = (
        re.search(r"(?m)^(?:Wanted|It should): (.+)$", task.prompts.get("full", "")) if style == "located" else None
    )
    observed = re.search(r"(?m)^Observed: (.+)$", task.prompts.get("full", ""))
    seen = "".join(f" {said[1].rstrip('.')}." for said in (wanted, observed) if said)
    rng = random.Random(f"{task.id} {style}")  # noqa: S311 - draws words
    return rng.choice(phrases("prompts.toml")[task.split][style]).format(seen=seen, **facts) + facts.get("more", "")


@lru_cache(maxsize=4096)
def _dictation(edit: Edit) -> dict[str, str] | None:
    """Return what gives way to what, in pieces that the file has once."""
    if edit.broken is None or edit.fixed is None:
        return None
    pieces = [(each.old or "", each.new or "") for each in changes(edit.path, edit.broken, edit.fixed)]
    if len(pieces) > MOST_PIECES or not all(old and new for old, new in pieces) or len(str(pieces)) > MOST_DICTATED:
        return None
    more = "".join(AND_ALSO.format(old=old, new=new) for old, new in pieces[1:])
    return {"path": edit.path, "old": pieces[0][0], "new": pieces[0][1], "more": more}


@lru_cache(maxsize=4096)
def _broken_code(edit: Edit) -> dict[str, str] | None:
    """Return the function that is wrong, or the lines around what is."""
    if edit.broken is None or edit.fixed is None:
        return None
    file, spans = Parsed(edit.path, edit.broken), changed_lines(edit.fixed, edit.broken)
    lines = edit.broken.splitlines(keepends=True)
    first, last = max(1, min(span[0] for span in spans)), max(span[1] for span in spans)
    whole = (edit.path, 1, len(lines))
    around = file.around(first, last) if edit.path.endswith(".py") else []
    name, begin, end = min(around, key=lambda each: each[2] - each[1], default=whole)
    if end - begin >= MOST_SHOWN:
        begin, end = max(begin, first - MOST_SHOWN // 2), min(end, first + MOST_SHOWN // 2)
    if last > end:
        return None
    suffix = edit.path.rpartition(".")[2]
    code = "".join(lines[begin - 1 : end]).rstrip("\n") + "\n"
    return {"path": edit.path, "name": name, "code": code, "fence": FENCES.get(suffix, suffix)}
