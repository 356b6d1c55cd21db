"""The turns of a demonstration: how a careful engineer could have come to a solution that is known.

A script is a generator. It yields turns and is sent what the tools answered, so it speaks only of what it has seen: the request, a
search or a failing test must have pointed at the code before it is read, a test run must have shown a wrong first change to be wrong
before it is mended, and the last turn counts only tests that were run. Where that cannot be had, there is no demonstration.

Changes are replacements that the tool `edit` accepts: each old piece is in the file exactly once. For agents whose only tool is
`bash`, calls are written as commands.
"""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from etude.agent.calls import Call
from etude.agent.tools import BASH_ONLY
from etude.tasks.generators.mutation import OPERATORS
from etude.tasks.generators.parsed import Parsed, changed_line_numbers, changed_lines, differing, parse

if TYPE_CHECKING:
    import random
    from collections.abc import Generator, Sequence

    from etude.tasks.task import Edit, Style, Task

    Turns = Generator["Say", "Answers", None]

SHOWN = 70  # characters of a line that is spoken of


@dataclass(frozen=True)
class Change:
    """One replacement in a file, in which `old` is once when those before it are made; no `old`: the whole file; no `new`: it goes."""

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


REPLACE = """python - <<'PYTHON'
from pathlib import Path
file = Path({path!r})
text = file.read_text()
old = {old!r}
assert text.count(old) == 1
file.write_text(text.replace(old, {new!r}))
PYTHON"""
WRITE = """python - <<'PYTHON'
from pathlib import Path
Path({path!r}).write_text({content!r})
PYTHON"""


def in_terminal(call: Call) -> Call:
    """Return the call of `bash` that does what a call of `grep`, `read`, `edit`, `write` or `shell` does."""
    given = call.arguments
    quoted = {name: shlex.quote(str(value)) for name, value in given.items()}
    if call.name == "grep":
        where = quoted["path"] if "path" in given else f"--include={quoted['glob']} ."
        command = f"grep -rnE {quoted['pattern']} {where}"
    elif call.name == "read":
        command = f"sed -n {given['start']},{given['end']}p {quoted['path']}"
    elif call.name in {"edit", "write"}:
        command = (REPLACE if call.name == "edit" else WRITE).format(**given)
    else:
        assert call.name == "shell", call.name
        command = str(given["command"])
    return Call("bash", {"command": command})


Answers = list[dict[str, Any]]  # as a trace keeps them: name, text, failed, details
MOST_EDITS = 12
DIRECT_CHECKS = 0.5  # how often a change that was pointed at is tested
WRONG_TURNS = {"none": 5.0, "slip": 1.5, "wrong": 2.0, "partial": 2.0}  # how often, where they can be taken


class Unfit(Exception):  # noqa: N818 - a reason
    """No demonstration can be made this way; the text is why."""


class Say(NamedTuple):
    """One turn."""

    calls: tuple[Call, ...] = ()
    said: str = ""
    thinking: str = ""


def wrong_versions(edit: Edit) -> list[str]:
    """Return texts that change what the solution changes, but not rightly."""
    if not (edit.broken and edit.fixed and edit.path.endswith(".py")):
        return []
    file, versions = Parsed(edit.path, edit.fixed), []
    lines = changed_line_numbers(edit.broken, edit.fixed)
    nodes = [node for node in ast.walk(file.tree) if getattr(node, "lineno", 0) in lines and type(node) in OPERATORS]
    for text in (file.cut(cuts) for node in nodes for _, cuts in OPERATORS[type(node)](file, node)):
        with suppress(SyntaxError):
            parse(text)
            versions += [text] if text not in {edit.broken, edit.fixed} else []
    return versions


@lru_cache(maxsize=2)
def phrases(file: str = "strategies.toml") -> dict[str, dict[str, list[str]]]:
    """Return the texts of a file beside this one, of a kind each, by what they are for."""
    return tomllib.loads(Path(__file__).with_name(file).read_text(encoding="utf-8"))


class Script:
    """One way to a task's solution, drawn once. `failing` and `suites`: the tests that fail and can be seen, and test files to run.

    Where `tools` are nothing but bash, all calls are said as its commands, and no list of to-dos is kept; where there is no shell,
    nothing is tested. `direct`: the request points at the code in this style, so it is mended at once.
    """

    def __init__(
        self, task: Task, prompt: str, failing: tuple[str, ...], suites: tuple[str, ...], options: tuple[str, ...], rng: random.Random,
        *, tools: Sequence[str] = ("shell",), direct: Style | None = None,
    ) -> None:  # fmt: skip
        self.edits, self.spans = task.candidate.edits, task.candidate.spans
        self.deleted = task.candidate.generator == "deletion"
        self.prompt, self.failing, self.suites, self.options, self.rng = prompt, failing, suites, options, rng
        self.seen, self.terminal, self.direct = prompt, list(tools) == BASH_ONLY, direct
        can_check = bool({"shell", "bash"} & {*tools}) and bool(suites)
        self.checks = can_check and (direct is None or rng.random() < DIRECT_CHECKS)
        self.tested = False  # and so seen to fail
        self.command = self.blamed = ""
        plan = [rng.choice(each) for each in phrases()["plan"].values()] if rng.random() < 0.35 else []
        self.plan = [] if self.terminal or direct else plan
        self.whole = [change for edit in self.edits for change in changes_of(edit)]
        if len(self.whole) > MOST_EDITS:
            raise Unfit("the solution has too many parts")
        self.versions = wrong_versions(self.edits[0]) if len(self.edits) == 1 and failing else []
        can = {"slip": self.whole[0].old is not None and not self.terminal, "wrong": bool(self.versions),
               "partial": bool(failing) and 1 < len(self.whole) < 5}  # fmt: skip
        weights = [weight * (turn == "none" or (can[turn] and not direct)) for turn, weight in WRONG_TURNS.items()]
        self.wrong_turn = rng.choices([*WRONG_TURNS], weights)[0]

    def play(self) -> Turns:
        """Yield all turns."""
        if not self.direct:
            yield from self._find()
            yield from self._read()
        yield from self._mend()
        if self.checks:
            yield from self._check()
        else:
            yield Say(said=" ".join([*map(self._described, self.edits), self._words("unchecked", "said")]))

    def _words(self, key: str, section: str = "think", **facts: object) -> str:
        return self.rng.choice(phrases()[section][key]).format(**facts)

    def _do(self, thinking: str, *calls: Call) -> Generator[Say, Answers, Answers]:
        plan = self._todo(0) if self.seen == self.prompt else ()  # with the first call
        answers = yield Say(tuple(map(in_terminal, calls)) if self.terminal else (*calls, *plan), thinking=thinking)
        self.seen += "\n".join(answer["text"] for answer in answers)
        return answers

    def _todo(self, done: int) -> tuple[Call, ...]:
        items = "\n".join(f"[{'x' if place < done else ' '}] {text}" for place, text in enumerate(self.plan))
        return (Call("todo", {"items": items}),) if self.plan else ()

    def _find(self) -> Turns:
        """Find the code by what the request says, by search or by a failing test."""
        places = [edit.path for edit in self.edits if edit.broken is not None]
        ways = [(3.0, self._grep), *([(1.5, self._reproduce)] if self.failing else [])]
        ways += [] if self.terminal else [(0.5, self._search)]
        drawn = [way for _, way in sorted(ways, key=lambda each: -each[0] * self.rng.random())]
        for way in [*drawn, self._grep]:  # at last by what all of it has shown
            if self.seen == self.prompt or any(path not in self.seen for path in places):
                yield from way()
        if any(path not in self.seen for path in places):
            raise Unfit("nothing that was seen leads to the code")

    def _grep(self) -> Turns:
        """Look for a name that the request or an answer gives, if one does; a class of errors is no place to look, but for one."""
        code = "\n".join(edit.broken or "" for edit in self.edits)
        defined = re.compile(r"\b(?:def|class) (\w+)").findall(code)
        seen = dict.fromkeys(re.findall(r"\w+", self.seen))
        words = [word for word in seen if word in defined or re.search(r"_|[a-z][A-Z]", word)]
        errors = [w for w in words if w.endswith(("Error", "Exception", "Warning")) and w != "NotImplementedError"]
        if known := [w for w in words if w not in errors and re.search(rf"\b{w}\b", code)]:
            word = self.rng.choice(known[:3])
            forms = [rf"\b{word}\b", word, f"(def|class) {word}"]
            pattern = self.rng.choice(forms if word in defined else forms[:1])
            yield from self._do(self._words("grep", word=word), Call("grep", {"pattern": pattern, "glob": "*.py"}))

    def _search(self) -> Turns:
        words = " ".join(re.findall(r"[A-Za-z_]\w+", self.prompt)[:14])
        yield from self._do(self._words("search"), Call("search", {"query": words}))

    def _reproduce(self) -> Turns:
        code, _ = yield from self._run(self._targets(), "tests")
        if code != 1:
            raise Unfit("the tests that should fail do not, or do not end")
        self.tested = True

    def _targets(self) -> tuple[str, ...]:
        """Return what to run: the failing tests where they are few, or their files."""
        return self.failing if 0 < len(self.failing) <= 3 and self.rng.random() < 0.6 else self.suites

    def _run(self, targets: tuple[str, ...], why: str, *more: Call) -> Generator[Say, Answers, tuple[int, int]]:
        """Run tests; return the exit code and how many passed. Options that a project sets and that do not work here are left out."""
        self.command = " ".join(["python -m pytest -q", *self.options, *targets])
        answers = yield from self._do(self._words(why), Call("shell", {"command": self.command}), *more)
        if "unrecognized arguments" in answers[0]["text"]:
            self.command += " -o addopts="
            answers = yield from self._do(self._words("addopts"), Call("shell", {"command": self.command}))
        passed = re.findall(r"(\d+) passed", answers[0]["text"])
        return int(answers[0]["details"]["rc"]), int(passed[-1]) if passed else 0

    def _read(self) -> Turns:
        """Read what the request blames, if that is wrong, and what is to be changed."""
        yield from self._read_blamed()
        reads = self._windows()
        thinking = self._words("read", path=self.whole[0].path, name=self.whole[0].name)
        if self.blamed:
            thinking = f"{self._words('not_blamed', other=self.blamed)} {thinking}"
        if self.failing and self.rng.random() < 0.3:
            path, _, name = self.failing[0].rpartition("::")
            reads.append(Call("grep", {"pattern": f"def {name}", "path": path.partition("::")[0]}))
        if reads:
            yield from self._do(thinking, *reads[:6])
        if self.failing and not self.tested and (self.wrong_turn in {"wrong", "partial"} or self.rng.random() < 0.4):
            yield from self._reproduce()

    def _read_blamed(self) -> Turns:
        guilty = {part for span in self.spans for part in span.name.split(".")}
        request = self.prompt.partition("\n")[0]
        files = [Parsed(edit.path, edit.broken) for edit in self.edits if edit.broken and edit.path.endswith(".py")]
        names = [(name.rpartition(".")[2], file, node) for file in files for name, node in file.definitions]
        for name, file, node in names:
            if len(name) > 3 and name not in guilty and re.search(rf"\b{name}\b", request):
                self.blamed = name
                window = {"path": file.path, "start": file.first_line(node), "end": node.end_lineno or 0}
                yield from self._do(self._words("blamed", other=name), Call("read", window))
                return

    def _windows(self) -> list[Call]:
        reads, around = [], self.rng.randrange(8, 40)
        for edit in self.edits:
            last = 0
            for first, end in changed_lines(edit.fixed or "", edit.broken) if edit.broken is not None else ():
                if first > last:
                    last = end + around
                    reads.append(Call("read", {"path": edit.path, "start": max(1, first - around), "end": last}))
        return reads

    def _mend(self) -> Turns:
        """Make the changes; before that, where it was so drawn, take the wrong turn."""
        first, last = self.whole[0], self.whole[-1]
        wanted, why = self.whole, "" if self.direct == "told" else self._cause(first)
        if self.wrong_turn == "slip":
            (answer,) = yield from self._do(why, first.call(indent="    "))
            if not answer["failed"]:
                raise Unfit("an edit that should fail did not")
            why = self._words("slip")
        elif self.wrong_turn in {"wrong", "partial"}:
            edit, version = self.edits[0], self.rng.choice(self.versions) if self.wrong_turn == "wrong" else ""
            tried = changes(edit.path, edit.broken or "", version) if version else self.whole[:-1]
            yield from self._apply(tried, self._words("lines", name=first.name))
            code, _ = yield from self._run(self._targets(), "check")
            if code != 1:
                raise Unfit("a wrong change is not shown to be wrong")
            wanted = changes(edit.path, version, edit.fixed or "") if version else [last]
            why = self._cause(wanted[0], "wrong", "wrong_many") if version else self._words("partial", name=last.name)
        yield from self._apply(wanted, why)

    def _apply(self, wanted: list[Change], thinking: str) -> Turns:
        """Make changes, all in one turn or one after the other."""
        groups = [wanted] if self.direct or self.rng.random() < 0.5 else [[each] for each in wanted]
        for number, group in enumerate(groups):
            why = self._words("more", name=group[0].name) if number else thinking
            answers = yield from self._do(why, *(each.call() for each in group))
            if any(answer["failed"] or answer["details"].get("rc") for answer in answers):
                raise Unfit("an edit failed")

    def _cause(self, change: Change, line: str = "line", lines: str = "lines") -> str:
        if self.deleted and line == "line":
            return self._words("missing", name=change.name)
        return self._words(line if change.line else lines, name=change.name, **change.line)

    def _check(self) -> Turns:
        """Run the tests, and say what was changed and what they said."""
        targets = self._targets()
        code, count = yield from self._run(targets, "check", *self._todo(2))
        result = self._words("checked", "said", command=self.command, count=count)
        if code == 0 and targets == self.failing and len(self.suites) == 1 and self.rng.random() < 0.7:
            code, count = yield from self._run(self.suites, "wider")
            result = self._words("both", "said", file=self.suites[0], count=count)
        if code != 0 or not count:
            raise Unfit("tests that can be seen do not pass at the end")
        if self.plan:
            yield from self._do("", *self._todo(3))
        cleared = [self._words("cleared", "said", other=self.blamed)] if self.blamed else []
        yield Say(said=" ".join([*map(self._described, self.edits), *cleared, result]))

    def _described(self, edit: Edit) -> str:
        own = [each for each in self.whole if each.path == edit.path]
        names = list(dict.fromkeys(f"`{each.name}`" for each in own))
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        line = own[0].line if len(own) == 1 else {}
        kind = "missing" if self.deleted and len(names) == 1 else "line" if line else "lines"
        kind = "added" if edit.broken is None else "removed" if edit.fixed is None else kind
        return self._words(kind, "said", names=shown, path=edit.path, **line)
