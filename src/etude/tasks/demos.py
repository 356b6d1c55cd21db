"""Demonstrations: reference solutions replayed through the harness, its tools and a sandbox, scored, and kept if they pass.

What is learnt from them are the tokens of their traces as they were sampled, never their text tokenised anew. So they belong to one
tokeniser and template, whose digest each trace carries. No demonstration is made from a package that a benchmark has.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from etude.agent.formats import ChatFormat, choose_format
from etude.agent.harness import Harness, HarnessSettings
from etude.agent.policies import ScriptedPolicy
from etude.agent.summary import SummarySettings
from etude.agent.tools import BASH_ONLY, ToolName, ToolSettings
from etude.agent.trace import Trace, read_traces, samples, write_traces
from etude.data.chat import Encoded
from etude.errors import UserError
from etude.files import digest_of, whole_file
from etude.jsonl import MetricsLog
from etude.sandbox.box import SandboxError
from etude.tasks.attempt import searcher_for, work_on
from etude.tasks.make import read_settings
from etude.tasks.manifest import load_set, read_rows
from etude.tasks.prompts import asked
from etude.tasks.score import score
from etude.tasks.strategies import Script, Unfit, changes_of
from etude.tasks.suite import side_by_side
from etude.tasks.task import PointedStyle, StoredStyle, Style, Task, function_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from etude.agent.calls import Call
    from etude.agent.search import Searcher
    from etude.agent.tools import Toolset
    from etude.progress import Reporter
    from etude.tasks.manifest import TaskSet

STORED: tuple[StoredStyle, ...] = get_args(StoredStyle)
ATTEMPTS = 3  # ways that are drawn for a demonstration before it is given up
SETTINGS = HarnessSettings(summary=SummarySettings(kind="none"))
TRACES = "traces.jsonl"
Row = dict[str, Any]
Job = tuple[str, Task, Style]


class DemoSettings(BaseModel):
    """Which demonstrations are made."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    tasks: str = Field(description="task manifest of a training set, as `etude tasks make` writes it")
    only: str = Field(default="", description="prefixes of the ids of tasks to use, separated by spaces; empty: all")
    styles: list[Style] = Field(default=[*STORED], min_length=1, description="request styles (docs/tasks.md)")
    each: int = Field(default=1, ge=1, le=6, description="demonstrations of each task, in different styles")
    most: int = Field(default=0, ge=0, description="limit of demonstrations, spread over the set (0 = none)")
    tools: list[ToolName] = Field(default=ToolSettings().tools, min_length=1, description="tools offered and used")

    @model_validator(mode="after")
    def _can_be_done(self) -> DemoSettings:
        """Scripts find code by grep and read it; where the request points at it, an edit is enough."""
        pointed = set(self.styles) <= {*get_args(PointedStyle)}
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
        if not re.search(r'(?m)^split\s*=\s*"bench"', beside.read_text(encoding="utf-8")):
            continue  # another set's, or no recipe of tasks
        if shared := own & {package.name for package in read_settings(beside).package}:
            where = f"the benchmark {beside.name}"
            raise UserError(f"{manifest} shares {min(shared)} with {where}; take it out of one of them")


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
        """Draw a way to a task's solution, which may know only of tests that the agent can see."""
        failing = tuple(dict.fromkeys(map(function_of, task.fail_to_pass)))
        seen = tuple(test for test in failing if test not in task.hidden)
        suites = tuple(sorted({test.partition("::")[0] for test in seen or failing}))
        rng = random.Random(f"{self.seed}/{name}/{attempt}")  # noqa: S311 - keeps no secret
        options, tools = self.tasks.codebase(task).options, self.tools.tools
        direct = style if style in get_args(PointedStyle) else None
        script = Script(task, asked(task, style)[1], seen, suites, options, rng, tools=tools, direct=direct)
        script.wrong_turn = "none" if attempt else script.wrong_turn  # the first way failed: go straight
        return script

    async def demonstrate(self, task: Task, style: Style, name: str, attempt: int) -> Trace:
        """Return a demonstration that scores as passed. Unfit: why there is none by this way."""
        codebase, script = self.tasks.codebase(task), self.script(task, style, name, attempt)
        about = {"task": task.id, "package": task.package, "licence": codebase.licence, "style": style,
                 "wrong_turn": script.wrong_turn, "attempt": attempt}  # fmt: skip
        made_by = {"tokeniser": self.tokeniser, "set": self.tasks.name, "demonstration": about}
        trace = Trace(name, script.prompt, made_by=made_by)
        talk = self.talk.talk
        policy = ScriptedPolicy(self._lines(script, trace), talk.tokens, talk.text, talk.end_token)

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
        """Yield the turns as the model would write them, each when it is asked for."""
        play = script.play()
        say = next(play)
        while True:
            yield self.talk.write(*say.calls, said=say.said, thinking=say.thinking)
            say = play.send(trace.nodes[-1].details["answers"])

    async def row(self, task: Task, style: Style, name: str, folder: Path) -> Row:
        """Make one demonstration by the first way that goes; return what became of it. A reason that comes twice is no accident."""
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
    """Return the demonstrations to make, by name: every task in `each` of the styles it has, all styles about as often."""
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
    """Build a set and make demonstrations of it; return their file and what became of all.

    The tokeniser has the template that will be trained. No folder: one named after the set.
    """
    manifest = Path(settings.tasks).expanduser()
    refuse_benchmarks(manifest)
    tasks = load_set(manifest, cache, reporter, settings.only)
    tools = ToolSettings(tools=settings.tools)
    talk = choose_format(tokeniser)
    assert isinstance(talk, ChatFormat)
    made_by = Demonstrator(tasks, talk, tokeniser_digest(tokeniser), searcher_for(tools, cache), seed, tools)
    folder = folder or Path("runs", "demos", tasks.name)
    with MetricsLog(folder / "log.jsonl") as log:
        made = asyncio.run(make(made_by, folder, log, reporter, jobs(tasks.tasks, settings)))
    if not made["kept"]:
        raise UserError(f"none of {made['wanted']} demonstrations of {settings.tasks} passed: {made['left out']}")
    reporter.say(f"{made['kept']} of {made['wanted']} demonstrations; left out: {made['left out'] or 'none'}")
    return folder / TRACES, made


async def make(made_by: Demonstrator, folder: Path, log: MetricsLog, reporter: Reporter, wanted: Sequence[Job]) -> Row:
    """Make demonstrations into a folder; what is there is not made again. Return what became of all."""
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
    """Return what tells tokenisers apart that would read tokens differently."""
    return digest_of([tokeniser.get_vocab(), tokeniser.chat_template])


def licences_of(path: Path) -> dict[str, int]:
    """Return the licences of the codebases that a file of traces is about, in bytes of traces; empty if one is not stated."""
    sizes: Counter[str] = Counter()
    for line in path.read_bytes().splitlines():
        about = json.loads(line).get("made_by", {}).get("demonstration", {})
        sizes[about.get("licence") or ""] += len(line)
    return {} if sizes.pop("", 0) else dict(sizes)


def read_samples(path: Path, tokeniser: Any) -> list[tuple[str, Encoded]]:
    """Return what SFT learns from a file of traces, tokens as they were sampled, each with the package that it is held out with."""
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
