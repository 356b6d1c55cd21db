"""Repairs: functions of any code as their file shows them, an error in one of them or in none, and the answer.

    file ── its functions, each once ──▶ errors by their shares in real fixes ──▶ a window of neighbours ──▶ request and answer
    commit that says fix ── its functions before and after ──────────────────────────────────────────────▶ request and answer

The errors of a function are drawn with its meaning as seed (the digest of its syntax tree without docstring): first a kind of error,
by its share in real fixes (`WEIGHTS` of the operators), then a place for it. So the same function in two packages or versions gets
the same errors, and the second example is an exact duplicate; within a unit of work it is skipped at once. (A wrong name is one that
the file uses, so it may differ between files.) An error must parse and change the meaning. Each example without an error shows a
function that is broken in another example, with a request from the same templates, so that only the code tells the two apart. Their
share is exact in every unit of work.

An example is plain text for a corpus (the answer is a unified diff, or the lines before and after), or a conversation in the agent's
own format for SFT (the answer is calls of `edit`, whose text occurs once in the file; or `read` or `grep` before that). The tasks
of a set can be used as well: a test noticed their errors, and its output is part of the request.
"""

from __future__ import annotations

import ast
import copy
import difflib
import json
import re
import shutil
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from etude.agent.calls import Call
from etude.agent.formats import schema
from etude.agent.harness import SYSTEM
from etude.agent.tools import SPECS
from etude.data import settings as corpus
from etude.data.build import Build
from etude.data.heldout import draw
from etude.data.manifest import SourceEntry
from etude.data.settings import ContaminationSettings, RepairSettings, Settings, SourceSettings
from etude.data.tokenise import read_kept
from etude.files import digest_of, read_json, whole_file, write_json
from etude.jsonl import MetricsLog
from etude.progress import Reporter, counted
from etude.syntax import parse_python
from etude.tasks.generators.mutation import WEIGHTS, Site, sites_of
from etude.tasks.generators.parsed import Cut, Function, Parsed, changed_lines, cut_text, is_test_path, shape
from etude.tasks.manifest import load_set, read_rows
from etude.tasks.prompts import Change, changes, phrases
from etude.work import Work

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator, Sequence

    from etude.data.document import Document
    from etude.tasks.task import Task

SHORTEST, LONGEST = 3, 80  # lines of a function that is broken
MOST_FIXED = 10  # lines of a fix
NOTHING = "nothing wrong"
CONVERSATIONS, ACCOUNT = "repairs.jsonl", "repairs-manifest.json"
FIX = re.compile(r"\b(fix(e[sd])?|bug|regression|crash(es|ed)?|wrong(ly)?|incorrect(ly)?)\b", re.IGNORECASE)
NO_FIX = re.compile(
    r"(?i)\b(typo|docs?|docstrings?|documentation|readme|changelog|lint|flake8|pep ?8|mypy|typing|annotations?|tests?|ci|travis|"
    r"build|style|format(ting)?|spelling|grammar|comments?|warnings?|coverage|imports?|pylint|ruff|release|merge|revert)\b"
)
NOT_PYTHON = (SyntaxError, ValueError, RecursionError)
Tool = Literal["read", "grep", "edit"]


class TalkSettings(Settings):
    """Repairs as conversations, for SFT."""

    source: list[SourceSettings] = Field(min_length=1, description="code to break, as the sources of a corpus")
    tools: list[Tool] = Field(["edit"], description="tools offered; with read and grep half the requests show no code")
    tasks: str | None = Field(None, description="manifest of a training set: its tasks too, with their test output")
    apart: str | None = Field(None, description="task manifest whose errors are not made, so that its tasks stay new")
    contamination: ContaminationSettings = ContaminationSettings()

    @model_validator(mode="after")
    def _usable(self) -> TalkSettings:
        if "edit" not in self.tools:
            raise ValueError("repairs are answered with calls of `edit`; name it in `tools`")
        if wrong := [each.name for each in self.source if each.kind != "repair"]:
            raise ValueError(f'the source {wrong[0]!r} must have kind = "repair"')
        if self.apart and self.apart == self.tasks:
            raise ValueError("`apart` keeps away from the tasks that `tasks` teaches; name another set")
        return self


@dataclass(frozen=True)
class Repair:
    """One example. `file` is the text that the agent's tools see: a whole file, or the part of it that is known."""

    path: str
    name: str  # of the function that is broken, or could be
    file: str  # broken, if anything is
    fixed: str
    first: int  # lines of `file` that are shown
    last: int
    kind: str
    subject: str = ""  # of the commit
    seen: str = ""  # of a failing test

    @cached_property
    def code(self) -> str:
        """The lines that are shown."""
        return "".join(self.file.splitlines(keepends=True)[self.first - 1 : self.last]).rstrip("\n") + "\n"

    @cached_property
    def changes(self) -> list[Change]:
        return changes(self.path, self.file, self.fixed) if self.file != self.fixed else []

    @property
    def shows_edits(self) -> bool:
        """Whether the lines that are shown are enough to make the edit."""
        return all((each.old or "") in self.code and each.new is not None for each in self.changes)

    @property
    def facts(self) -> dict[str, str]:
        return {"path": self.path, "name": self.name, "code": self.code, "subject": self.subject, "seen": self.seen}


@dataclass
class Repairs:
    """Makes the repairs of one unit of work.

    `talk`: tools of the conversations, None for plain text; `benchmarks`: packages that are skipped; `apart`: broken functions, by
    their shape, that must not be made.
    """

    settings: RepairSettings
    seed: int
    benchmarks: frozenset[str]
    talk: Sequence[str] | None = None
    apart: frozenset[str] = frozenset()
    known: set[str] = field(default_factory=set)  # functions
    owed: float = 0.0  # examples in which nothing is wrong

    def make(self, document: Document, made: Counter[str]) -> list[Document] | str:
        """Return the examples made of a file or a commit, or why there are none."""
        folders = [re.sub(r"-v?\d.*", "", document.repository), *document.path.split("/")[:-1]]
        if self.benchmarks.intersection(map(_plain, folders)):
            return "named as a package of a benchmark"
        if document.kind == "commit":
            found = of_commit(document.text)
            if isinstance(found, str):
                return found
            repairs = [(found, digest_of([found.file, found.fixed]))]
        else:
            if not document.path.endswith(".py") or is_test_path(document.path):
                return "not Python" if not document.path.endswith(".py") else "tests"
            try:
                repairs = list(self._of_file(Parsed(document.path, document.text), made))
            except NOT_PYTHON:
                return "not Python of this version"
        made.update(repair.kind for repair, _ in repairs)
        return [self._written(repair, identity, document) for repair, identity in repairs] or "no function to break"

    def _of_file(self, file: Parsed, made: Counter[str]) -> Iterator[tuple[Repair, str]]:
        """Yield the repairs of a file's functions, each with a digest that is equal for equal repairs."""
        functions = {name: node for name, node in file.definitions if isinstance(node, Function)}
        sites: dict[str, list[Site]] = {}
        for site in sites_of(file):
            sites.setdefault(site.function, []).append(site)
        twice = Counter(name for name, _ in file.definitions)
        for name, mine in sites.items():
            node = functions[name]
            if not SHORTEST <= (node.end_lineno or 0) - node.lineno + 1 <= LONGEST or twice[name] > 1:
                made["left out: function too short, too long or not the only one of its name"] += 1
                continue
            meaning = digest_of(shape(_without_docstring(node)))
            if meaning in self.known:
                made["left out: function again"] += 1
                continue
            self.known.add(meaning)
            rng, right = draw(self.seed, "repair", meaning), 0
            for kind, text, identity in broken_versions(file, node, mine, self.settings.each, rng, made):
                window = self._window(file, node, rng)
                last = window[1] + text.count("\n") - file.text.count("\n") if window else 0
                repair = Repair(file.path, name, text, file.text, window[0], last, kind) if window else None
                if repair is None or not repair.shows_edits:
                    made["left out: the edit would need lines that are not shown"] += 1
                    continue
                if self.apart and shape(parse_python(identity)) in self.apart:
                    made["left out: the error of a task"] += 1
                    continue
                yield repair, digest_of([meaning, identity])
                self.owed += self.settings.nothing_wrong / (1 - self.settings.nothing_wrong)
                if self.owed >= 1 - 1e-9:
                    self.owed -= 1
                    last = repair.last + file.text.count("\n") - repair.file.count("\n")
                    right += 1
                    yield replace(repair, file=file.text, kind=NOTHING, last=last), digest_of([meaning, NOTHING, right])

    def _window(self, file: Parsed, node: Function, rng: random.Random) -> tuple[int, int] | None:
        """Return the first and last line of a window around a function, with neighbours as they fit; None: it is too long."""
        functions = {name: each for name, each in file.definitions if isinstance(each, Function)}.values()
        spans = sorted((file.first_line(each), each.end_lineno or 0) for each in functions)
        here = spans.index((file.first_line(node), node.end_lineno or 0))
        count = rng.randint(1, self.settings.functions)
        before = rng.randint(0, count - 1)
        first, last = spans[here]
        for one, two in [*reversed(spans[max(0, here - before) : here]), *spans[here + 1 : here + count - before]]:
            if sum(map(len, file.lines[min(first, one) - 1 : max(last, two)])) <= self.settings.characters:
                first, last = min(first, one), max(last, two)
        fits = sum(map(len, file.lines[first - 1 : last])) <= self.settings.characters
        return (first, last) if fits else None

    def _written(self, repair: Repair, identity: str, document: Document) -> Document:
        rng = draw(self.seed, "words", identity)
        text = talk(repair, self.talk, rng, document.repository) if self.talk else as_document(repair, rng)
        path = f"{document.path}#{repair.name}-{repair.kind}-{identity[:8]}".replace(" ", "-")
        return replace(document, path=path, text=text, kind="repair", language="", identity=identity)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _without_docstring(node: Function) -> Function:
    whole = copy.copy(node)
    whole.body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return whole


def broken_versions(
    file: Parsed, node: Function, sites: Sequence[Site], most: int, rng: random.Random, made: Counter[str]
) -> Iterator[tuple[str, str, str]]:
    """Yield up to `most` errors of different kinds: the kind, the broken text of the file and that of the function.

    A kind is drawn by its share in real fixes, among those that the function has a place for; then one of its places.
    """
    by_kind: dict[str, list[Site]] = {}
    for site in sites:
        by_kind.setdefault(site.kind, []).append(site)
    begin, end = file.starts[node.lineno - 1], file.starts[node.end_lineno or 0]
    whole = file.content[begin:end].decode()
    meaning = shape(parse_python(dedent(whole)))
    while by_kind and most:
        kind = rng.choices([*by_kind], [WEIGHTS[each] for each in by_kind])[0]
        cuts = rng.choice(by_kind.pop(kind)).cuts
        if not all(begin <= cut.first and cut.last <= end for cut in cuts):
            continue
        broken = cut_text(whole, [Cut(first - begin, last - begin, new) for first, last, new in cuts])
        try:
            if shape(parse_python(dedent(broken))) == meaning:
                made["left out: means the same"] += 1
                continue
        except NOT_PYTHON:
            made["left out: does not parse"] += 1
            continue
        most -= 1
        yield kind, file.cut(cuts), dedent(broken)


def of_commit(text: str) -> Repair | str:
    """Return a commit (with whole functions in its diff) as a repair, or the reason why it cannot be one."""
    subject = re.search(r"(?m)^commit (.*)$", text)
    if subject is None or not FIX.search(subject[1]) or NO_FIX.search(subject[1]):
        return "its message does not say fix"
    files = re.split(r"(?m)^diff --git ", text)[1:]
    sources = [each for each in files if (path := _path_of(each)).endswith(".py") and not is_test_path(path)]
    if len(sources) != 1:
        return "changes several files, or none of Python"
    hunks = re.split(r"(?m)^@@ .*\n", sources[0])[1:]
    if len(hunks) != 1:
        return "changes several functions"
    rows = [row for row in hunks[0].split("\n") if not row.startswith("\\")]
    rows = rows[:-1] if rows[-1] == "" else rows
    if max(sum(row.startswith(sign) for row in rows) for sign in "+-") > MOST_FIXED:
        return "changes more lines"
    before, after = ("".join(row[1:] + "\n" for row in rows if row[:1] != sign) for sign in "+-")
    try:
        trees = [parse_python(dedent(each)) for each in (before, after)]
    except NOT_PYTHON:
        return "not a whole function"
    names = [node.name for node in ast.walk(trees[0]) if isinstance(node, Function)]
    if not names:
        return "not a whole function"
    if len({shape(_bare(tree)) for tree in trees}) == 1:
        return "changes no meaning"
    said = re.sub(r"\s*\(?#\d+\)?", "", subject[1])[:120]
    return Repair(_path_of(sources[0]), names[0], before, after, 1, before.count("\n"), "commit", said)


def of_task(task: Task) -> Repair | str:
    """Return a task's solution as a repair, with the output of a failing test, or the reason why it cannot be one."""
    edit, *others = task.candidate.edits
    if others or edit.broken is None or edit.fixed is None or not edit.path.endswith(".py"):
        return "task: not in one function"
    full = task.prompts.get("full", "")
    parts = re.findall(r"(?ms)^(?:Observed|Output): (.*?)(?=\n(?:Output|Failing tests): |\Z)", full)
    if not parts:
        return "task: no output of a failing test"
    runs = changed_lines(edit.fixed, edit.broken)
    around = Parsed(edit.path, edit.broken).around(runs[0][0], runs[-1][1])
    if not around:
        return "task: not in one function"
    name, first, last = min(around, key=lambda each: each[2] - each[1])
    if last - first >= LONGEST:
        return "task: function too long"
    return Repair(edit.path, name, edit.broken, edit.fixed, first, last, "task", seen=parts[-1])


def errors_of(tasks: Iterable[Task]) -> frozenset[str]:
    """Return the shapes of the functions that are in the broken files of tasks and not in the fixed ones."""
    edits = [edit for task in tasks for edit in task.candidate.edits if edit.broken and edit.path.endswith(".py")]
    return frozenset(chain.from_iterable(_meanings(e.path, e.broken) - _meanings(e.path, e.fixed) for e in edits))


def _meanings(path: str, text: str | None) -> set[str]:
    file = Parsed(path, text or "")
    nodes = [node for _, node in file.definitions if isinstance(node, Function)]
    rows = [file.content[file.starts[node.lineno - 1] : file.starts[node.end_lineno or 0]].decode() for node in nodes]
    return {shape(parse_python(dedent(each))) for each in rows}


def _bare(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            node.body = _without_docstring(node).body
    return tree


def _path_of(file: str) -> str:
    match = re.search(r"(?m)^\+\+\+ b/(.*?)\t?$", file)
    return match[1] if match else ""


def as_document(repair: Repair, rng: random.Random) -> str:
    """Return a repair as plain text."""
    words, facts = phrases("repairs.toml"), repair.facts

    def say(part: str, kind: str) -> str:
        return rng.choice(words[part][kind]).format(**facts)

    head = say("document", "subject" if repair.subject else "request")
    found = repair.changes
    if not found:
        answer = say("said", "nothing")
    elif rng.random() < 0.5:
        texts, names = (repair.file.splitlines(), repair.fixed.splitlines()), (f"a/{repair.path}", f"b/{repair.path}")
        rows = difflib.unified_diff(*texts, *names, lineterm="")
        answer = f"{say('document', 'diff')}\n\n```diff\n" + "\n".join(rows) + "\n```"
    else:
        pieces = [f"```python\n{each.old}\n```\nshould be\n```python\n{each.new}\n```" for each in found]
        answer = "\n\n".join([say("document", "pair"), *pieces])
    return f"{head}\n\n```python\n{repair.code}```\n\n{answer}\n"


def conversation(repair: Repair, tools: Sequence[str], rng: random.Random) -> list[dict[str, Any]]:
    """Return the messages of a repair as the agent's harness has them."""
    words, facts = phrases("repairs.toml"), repair.facts
    whole = not repair.subject and not repair.seen
    opened = whole and "read" in tools and rng.random() < 0.5
    kind = "subject" if repair.subject else "observed"
    if whole:
        kind = rng.choice(["located", "file", "vague"][: 2 if opened else 3])
    fits = len(repair.file) <= 2 * len(repair.code) + 1000
    opened = opened and (fits or (kind == "located" and "grep" in tools))
    request = rng.choice(words["open" if opened else "shown"][kind]).format(**facts)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": request}]
    if opened:
        messages += _looked_up(repair, fits=fits)
    found = repair.changes
    if found:
        text = repair.file
        answers = []
        for each in found:
            line = text.count("\n", 0, text.index(each.old or "")) + 1
            text = text.replace(each.old or "", each.new or "", 1)
            answers.append(f"edited {repair.path} at line {line}; syntax ok")
        messages += [_calls([each.call() for each in found]), *({"role": "tool", "content": text} for text in answers)]
    short = found[0].line if len(found) == 1 else {}
    said = rng.choice(words["said"]["nothing" if not found else "line" if short else "lines"])
    return [*messages, {"role": "assistant", "content": said.format(**facts, **short)}]


def talk(repair: Repair, tools: Sequence[str], rng: random.Random, group: str) -> str:
    """Return a repair as a line of conversations."""
    messages, offered = conversation(repair, tools, rng), [schema(SPECS[each]) for each in tools]
    return json.dumps({"messages": messages, "tools": offered, "group": group}, ensure_ascii=False)


def _looked_up(repair: Repair, *, fits: bool) -> list[dict[str, Any]]:
    """Return calls and answers that show the code: `read` of the whole file if it is short, else `grep` and `read` of a window."""
    rows, messages, first, last = repair.file.split("\n"), [], 1, repair.file.count("\n")
    window: dict[str, Any] = {"path": repair.path}
    if not fits:
        pattern = f"def {repair.name.rpartition('.')[2]}\\b"
        matches = [f"{repair.path}:{number}:{row}" for number, row in enumerate(rows, 1) if re.search(pattern, row)]
        search = Call("grep", {"pattern": pattern, "path": repair.path})
        messages = [_calls([search]), {"role": "tool", "content": "\n".join(matches)}]
        first, last = repair.first, repair.last
        window |= {"start": first, "end": last}
    shown = "\n".join(f"{number:5}\t{rows[number - 1]}" for number in range(first, last + 1))
    return [*messages, _calls([Call("read", window)]), {"role": "tool", "content": shown}]


def _calls(calls: Sequence[Call]) -> dict[str, Any]:
    made = [{"type": "function", "function": {"name": each.name, "arguments": dict(each.arguments)}} for each in calls]
    return {"role": "assistant", "content": "", "tool_calls": made}


def make_talks(settings: TalkSettings, folder: Path, cache: Path, reporter: Reporter, seed: int) -> Path:
    """Make conversations of all sources, filtered and compared as for a corpus; return their file. Their account is beside it."""
    file = folder / CONVERSATIONS
    if file.exists():
        return file
    named = benchmark_packages([Path(name).expanduser() for name in settings.contamination.tasks])
    alike = corpus.DuplicateSettings(near=False)  # two repairs of one function are nearly alike, and both are wanted
    compared = settings.contamination
    data = corpus.DataSettings(source=settings.source, contamination=compared, duplicates=alike, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    others = load_set(Path(settings.apart).expanduser(), cache, reporter).tasks if settings.apart else []
    apart = errors_of(others)
    with MetricsLog(folder / "log.jsonl") as log:
        work = Work(folder, log, reporter, cache)
        build = Build(data, work, seed, None, lambda each: Repairs(each.repair, seed, named, settings.tools, apart))
        units, _ = build.compared()
    with whole_file(file) as beside, beside.open("w", encoding="utf-8") as lines:
        for unit in units:
            for document in chain.from_iterable(read_kept(unit.folder)):
                lines.write(document.text + "\n")
                build.entries[unit.source.name].licences[document.licence] += len(document.text.encode())
        for line, licence in _of_tasks(settings, cache, reporter, seed):
            lines.write(line + "\n")
            build.entries[settings.source[0].name].licences[licence] += len(line.encode())
        write_json(folder / ACCOUNT, [entry.model_dump(mode="json") for entry in build.entries.values()])
    shutil.rmtree(units[0].folder.parent)
    return file


def _of_tasks(settings: TalkSettings, cache: Path, reporter: Reporter, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the conversations of a set's tasks, each with its licence; print the counts."""
    if settings.tasks is None:
        return
    became: Counter[str] = Counter()
    tasks = load_set(Path(settings.tasks).expanduser(), cache, reporter)
    for task in tasks.tasks:
        repair = of_task(task)
        if isinstance(repair, Repair) and not repair.shows_edits:
            repair = "task: the edit would need lines that are not shown"
        if isinstance(repair, str):
            became[repair] += 1
            continue
        became["conversations"] += 1
        yield talk(repair, settings.tools, draw(seed, "words", task.id), task.package), tasks.codebase(task).licence
    reporter.say(f"repairs of {tasks.name}: {counted(became)}")


def licences_of_talks(file: Path) -> dict[str, int]:
    """Return the licences of the code that a file of conversations was made of, in bytes of conversations."""
    entries = map(SourceEntry.model_validate, read_json(file.with_name(ACCOUNT)))
    return dict(sum((each.licences for each in entries), Counter[str]()))


def benchmark_packages(paths: Sequence[Path]) -> frozenset[str]:
    """Return the names of the packages whose tasks some manifests of task sets hold; other files name none."""
    files = [path for path in paths if path.is_file() and path.suffix == ".jsonl"]
    rows = chain.from_iterable(read_rows(path)[1] for path in files if b'"codebase"' in path.read_bytes())
    return frozenset(_plain(row["codebase"].partition("==")[0]) for row in rows)
