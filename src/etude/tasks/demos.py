"""Demonstrations: reference solutions replayed through the harness, its tools and a sandbox, scored, and kept if they pass.

SFT trains on the tokens of their traces as they were sampled; text is never tokenised again. So demonstrations belong to one
tokeniser and template, whose digest each trace carries. No demonstration is made from a package that is part of a benchmark.

The turns show how a careful engineer could have found the known solution. A script is a generator: it yields turns and receives the
answers of the tools, so it only mentions what it has seen. Code is read only after the request, a search or a failing test has
pointed at it; a wrong first change is corrected only after a test run has shown it to be wrong; the last turn reports only tests
that were run. If that is not possible, there is no demonstration. Changes are replacements that the tool `edit` accepts: each old
piece occurs in the file exactly once. For agents whose only tool is `bash`, calls are written as commands.
"""

from __future__ import annotations

import ast
import asyncio
import json
import random
import re
import shlex
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np
from pydantic import BaseModel, Field, model_validator

from etude.agent.calls import Call
from etude.agent.formats import ChatFormat, choose_format
from etude.agent.harness import Harness, HarnessSettings
from etude.agent.policies import ScriptedPolicy
from etude.agent.summary import SummarySettings
from etude.agent.tools import BASH_ONLY, ToolName, Toolset, ToolSettings
from etude.agent.trace import Trace, read_traces, samples, write_traces
from etude.data.chat import Encoded
from etude.errors import UserError
from etude.files import digest_of, whole_file
from etude.jsonl import MetricsLog
from etude.progress import Reporter, counted
from etude.sandbox.box import SandboxError
from etude.sandbox.images import WHERE, Backend
from etude.tasks.attempt import searcher_for, work_on
from etude.tasks.generators.mutation import OPERATORS
from etude.tasks.generators.parsed import Parsed, changed_line_numbers, changed_lines, parse
from etude.tasks.make import read_settings
from etude.tasks.manifest import TaskSet, load_set, read_rows
from etude.tasks.prompts import Change, asked, changes, changes_of, phrases
from etude.tasks.score import score
from etude.tasks.suite import side_by_side
from etude.tasks.task import Edit, StoredStyle, Style, Task, function_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from etude.agent.search import Searcher

    Turns = Generator["Say", "Answers", None]

STORED: tuple[StoredStyle, ...] = get_args(StoredStyle)
ATTEMPTS = 3  # ways that are drawn for a demonstration before it is given up
SETTINGS = HarnessSettings(summary=SummarySettings(kind="none"))
TRACES = "traces.jsonl"
Row = dict[str, Any]
Job = tuple[str, Task, Style]


class DemoSettings(BaseModel, extra="forbid", strict=True, frozen=True):
    """Which demonstrations are made."""

    tasks: str = Field(description="task manifest of a training set, as `etude tasks make` writes it")
    only: str = Field(default="", description="prefixes of the ids of tasks to use, separated by spaces; empty: all")
    styles: list[Style] = Field(default=[*STORED], min_length=1, description="request styles (docs/tasks.md)")
    each: int = Field(default=1, ge=1, le=6, description="demonstrations of each task, in different styles")
    most: int = Field(default=0, ge=0, description="limit of demonstrations, spread over the set (0 = none)")
    tools: list[ToolName] = Field(default=ToolSettings().tools, min_length=1, description="tools offered and used")
    sandbox: Backend = Field(default="auto", description=WHERE)

    @model_validator(mode="after")
    def _can_be_done(self) -> DemoSettings:
        """Scripts find code by grep and read it; where the request points at it, an edit is enough."""
        pointed = set(self.styles) <= SHOWING
        needed = {"edit"} if pointed else {"grep", "read", "edit", "write", "shell"}
        if self.tools != BASH_ONLY and (missing := sorted(needed - {*self.tools})):
            raise ValueError(f"demonstrations need the tools {', '.join(missing)} as well, or `bash` alone")
        return self


def refuse_benchmarks(manifest: Path) -> None:
    """Refuse a set that is a benchmark, or that shares a package with a benchmark whose recipe lies beside it."""
    header, codebases, _ = read_rows(manifest)
    if header["split"] != "train":
        raise UserError(f"{manifest} is a benchmark, whose tasks must not be trained on; name a training set")
    own = {row["codebase"].partition("==")[0] for row in codebases}
    for beside in sorted(manifest.absolute().parent.glob("*.toml")):
        if not beside.is_file() or not re.search(rb'(?m)^split\s*=\s*"bench"', beside.read_bytes()):
            continue  # another set's, or no recipe of tasks
        if shared := own & {package.name for package in read_settings(beside).package}:
            where = f"the benchmark {beside.name}"
            raise UserError(f"{manifest} shares {min(shared)} with {where}; take it out of one of them")


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
SHOWING = {"shown", "told"}  # styles whose requests hold the code, so that nothing need be read first
DIRECT_CHECKS = 0.5  # how often a change that was pointed at is tested
WRONG_TURNS = {"none": 5.0, "slip": 1.5, "wrong": 2.0, "partial": 2.0}  # how often, where they can be taken


class Unfit(Exception):  # noqa: N818 - a reason
    """No demonstration can be made with this script; the text is the reason."""


class Say(NamedTuple):
    """One turn."""

    calls: tuple[Call, ...] = ()
    said: str = ""
    thinking: str = ""


def wrong_versions(edit: Edit) -> list[str]:
    """Return wrong versions of the solved file: mutants of the lines that the solution changes."""
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


class Script:
    """One way to a task's solution, drawn at random once. `failing`: visible failing tests; `suites`: test files to run.

    If `tools` is bash alone, all calls are bash commands and there is no to-do list; without a shell nothing is tested. `direct`: the
    style of a request that points at the code, so it is edited at once.
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

    def turns(self) -> Turns:
        """Yield all turns of the demonstration."""
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
        """Search for a name that the request or an answer mentions, if there is one; names of exception classes are skipped."""
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
        """Run tests; return the exit code and the number passed. If pytest rejects the project's options, run without them."""
        self.command = " ".join(["python -m pytest -q", *self.options, *targets])
        answers = yield from self._do(self._words(why), Call("shell", {"command": self.command}), *more)
        if "unrecognized arguments" in answers[0]["text"]:
            self.command += " -o addopts="
            answers = yield from self._do(self._words("addopts"), Call("shell", {"command": self.command}))
        passed = re.findall(r"(\d+) passed", answers[0]["text"])
        return int(answers[0]["details"]["rc"]), int(passed[-1]) if passed else 0

    def _read(self) -> Turns:
        """Read the code to be changed; before that, the innocent function that the request blames, if it does."""
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
        """Make the changes; before that the mistake that was drawn: a failed edit, a wrong or an incomplete change."""
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


@dataclass(frozen=True)
class Demonstrator:
    """Makes demonstrations of one set for one model."""

    tasks: TaskSet
    talk: ChatFormat
    tokeniser: str  # digest
    searcher: Searcher | None
    seed: int = 0
    tools: ToolSettings = field(default_factory=ToolSettings)

    def script(self, task: Task, style: Style, name: str, attempt: int) -> Script:
        """Draw a script for a task; it may only mention tests that the agent can see."""
        failing = tuple(dict.fromkeys(map(function_of, task.fail_to_pass)))
        seen = tuple(test for test in failing if test not in task.hidden)
        suites = tuple(sorted({test.partition("::")[0] for test in seen or failing}))
        rng = random.Random(f"{self.seed}/{name}/{attempt}")  # noqa: S311 - keeps no secret
        options, tools = self.tasks.codebase(task).options, self.tools.tools
        direct = style if style in SHOWING else None
        script = Script(task, asked(task, style)[1], seen, suites, options, rng, tools=tools, direct=direct)
        script.wrong_turn = "none" if attempt else script.wrong_turn  # the first way failed: go straight
        return script

    async def demonstrate(self, task: Task, style: Style, name: str, attempt: int) -> Trace:
        """Return a demonstration that passes. Unfit: the script did not work, and why."""
        codebase, script = self.tasks.codebase(task), self.script(task, style, name, attempt)
        about = {"task": task.id, "package": task.package, "licence": codebase.licence, "style": style,
                 "wrong_turn": script.wrong_turn, "attempt": attempt}  # fmt: skip
        made_by = {"tokeniser": self.tokeniser, "set": self.tasks.name, "demonstration": about}
        trace = Trace(name, script.prompt, made_by=made_by)
        policy = ScriptedPolicy(self._lines(script, trace), self.talk)

        def begin(tools: Toolset) -> Harness:
            return Harness(policy, self.talk, tools, SETTINGS, trace, seed=self.seed)

        left = await work_on(task, codebase, trace, self.tools, self.searcher, begin)
        if trace.stop != "finished":
            raise Unfit(f"the episode ended by {trace.stop}")
        result = await score(task, codebase, left.entries)
        if result.outcome != "pass":
            raise Unfit(f"scored {result.outcome}: {result.reason}")
        trace.rewards["passed"] = 1.0
        return trace

    def _lines(self, script: Script, trace: Trace) -> Iterator[str]:
        """Yield the turns as the model would write them, one a request."""
        turns = script.turns()
        turn = next(turns)
        while True:
            yield self.talk.write(*turn.calls, said=turn.said, thinking=turn.thinking)
            turn = turns.send(trace.nodes[-1].details["answers"])

    async def row(self, task: Task, style: Style, name: str, folder: Path) -> Row:
        """Make one demonstration with the first script that works; return its log row. The same failure twice ends the attempts."""
        reasons: list[str] = []
        for attempt in range(ATTEMPTS):
            try:
                trace = await self.demonstrate(task, style, name, attempt)
            except (Unfit, SandboxError) as error:
                reasons.append(str(error) if isinstance(error, Unfit) else "the sandbox failed")
                if reasons[-1] in reasons[:-1]:
                    break
                continue
            write_traces(folder / f"{name}.jsonl", [trace])
            tokens = len(trace.context(len(trace.nodes) - 1))
            return {"kept": True, "other_ways": reasons, "tokens": tokens, **trace.made_by["demonstration"]}
        return {"kept": False, "reason": reasons[-1]}


def jobs(tasks: Sequence[Task], settings: DemoSettings) -> list[Job]:
    """Return the demonstrations to make: each task in up to `each` of its request styles, all styles about equally often."""
    wanted: list[Job] = []
    for number, task in enumerate(tasks):
        styles = sorted(style for style in settings.styles if asked(task, style)[0] == style)
        drawn = [styles[(number + i) % len(styles)] for i in range(min(settings.each, len(styles)))]
        wanted += [(f"{task.id}-{style}", task, style) for style in drawn]
    most = min(settings.most or len(wanted), len(wanted))
    return [wanted[place * len(wanted) // most] for place in range(most)]


def make_demos(
    settings: DemoSettings, tokeniser: Any, folder: Path | None, cache: Path, reporter: Reporter, seed: int = 0
) -> tuple[Path, Row]:
    """Build a set and make demonstrations of it; return their file and the counts.

    The tokeniser has the template that will be trained. No folder: one named after the set.
    """
    manifest = Path(settings.tasks).expanduser()
    refuse_benchmarks(manifest)
    tasks = load_set(manifest, cache, reporter, settings.only, settings.sandbox)
    tools = ToolSettings(tools=settings.tools)
    talk = choose_format(tokeniser)
    assert isinstance(talk, ChatFormat)
    made_by = Demonstrator(tasks, talk, tokeniser_digest(tokeniser), searcher_for(tools, cache), seed, tools)
    folder = folder or Path("runs", "demos", tasks.name)
    with MetricsLog(folder / "log.jsonl") as log:
        made = asyncio.run(make(made_by, folder, log, reporter, jobs(tasks.tasks, settings)))
    if not made["kept"]:
        raise UserError(f"no demonstration of {settings.tasks} passed ({made['wanted']}): {counted(made['left out'])}")
    reporter.say(f"{made['kept']} of {made['wanted']} demonstrations; left out: {counted(made['left out'])}")
    return folder / TRACES, made


async def make(made_by: Demonstrator, folder: Path, log: MetricsLog, reporter: Reporter, wanted: Sequence[Job]) -> Row:
    """Make the demonstrations that a folder does not hold yet; return the counts of all."""
    tasks = made_by.tasks
    about = {"set": tasks.digest, "tokeniser": made_by.tokeniser, "seed": made_by.seed, "tools": made_by.tools.tools}
    before = log.get("about") or log.put("about", **about)
    if about != {name: before.get(name) for name in about}:
        raise UserError(f"{folder} has demonstrations of another set, model, seed or tools; choose another --out")
    with reporter.task(f"demonstrating {tasks.name}", len(wanted), "demonstrations") as progress:

        async def one(job: Job) -> None:
            name, task, style = job
            if name not in log:
                log.put(name, **await made_by.row(task, style, name, folder / "parts"))
            progress.advance()

        await side_by_side(one, wanted)
    rows = [row for name, *_ in wanted if (row := log.get(name))]
    kept = [row for row in rows if row["kept"]]
    with whole_file(folder / TRACES) as beside, beside.open("wb") as file:
        file.writelines((folder / "parts" / f"{row['key']}.jsonl").read_bytes() for row in kept)
    lengths = sorted(row["tokens"] for row in kept) or [0]
    return {"wanted": len(rows), "kept": len(kept), "left out": dict(Counter(row["reason"] for row in rows if not row["kept"])),
            "other ways": dict(Counter(reason for row in kept for reason in row["other_ways"])),
            "styles": dict(Counter(row["style"] for row in kept)), "wrong turns": dict(Counter(row["wrong_turn"] for row in kept)),
            "tokens": {"median": lengths[len(lengths) // 2], "most": lengths[-1], "all": sum(lengths)}}  # fmt: skip


def tokeniser_digest(tokeniser: Any) -> str:
    """Return a digest of the vocabulary and the chat template."""
    return digest_of([tokeniser.get_vocab(), tokeniser.chat_template])


def licences_of(path: Path) -> dict[str, int]:
    """Return the licences of the codebases that a file of traces is about, in bytes of traces; empty if one is not stated."""
    sizes: Counter[str] = Counter()
    for line in path.read_bytes().splitlines():
        about = json.loads(line).get("made_by", {}).get("demonstration", {})
        sizes[about.get("licence") or ""] += len(line)
    return {} if sizes.pop("", 0) else dict(sizes)


def read_samples(path: Path, tokeniser: Any) -> list[tuple[str, Encoded]]:
    """Return the samples of a file of traces for SFT, with the sampled tokens, each with its package (held out as a whole)."""
    traces, torn = read_traces(path)
    if torn:
        raise UserError(f"{path}: its last line is torn; run the command that made it again")
    digest, rows = tokeniser_digest(tokeniser), []
    for trace in traces:
        if trace.made_by.get("tokeniser") != digest:
            other = f"{trace.id} is of another tokeniser or template; run `etude tasks demos` with this --model"
            raise UserError(f"{path}: {other}")
        for each in samples(trace):
            encoded = Encoded(np.array(each.tokens, np.int64), np.array(each.trained, np.bool_))
            rows.append((str(trace.made_by["demonstration"]["package"]), encoded))
    return rows


def solution_calls(task: Task) -> list[Call]:
    """Return the calls that turn the tree an agent sees into the solved one, hidden tests excepted, each sure to be accepted."""
    return [change.call() for edit in task.candidate.edits for change in changes_of(edit)]
