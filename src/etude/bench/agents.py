"""Runs a benchmark: every agent at every task k times, each attempt in its own sandbox and recorded as soon as it ends.

An agent is a model behind the harness, loaded when its turn comes, or one of two scripts that measure the benchmark itself.
An attempt that fails by a fault of the infrastructure says nothing about the model. It is repeated once after all others; if it fails
again it is recorded as invalid. Many such failures in a row end the benchmark, because a server that is down would spoil the rest.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, field_validator, model_validator

from etude.agent.endpoint import BYTES, message_format
from etude.agent.formats import ChatFormat
from etude.agent.harness import VERSION, Harness, HarnessSettings
from etude.agent.policies import ModelSource, ScriptedPolicy
from etude.agent.tools import Toolset, ToolSettings
from etude.agent.trace import Trace, append_trace
from etude.bench.axes import effort, set_statistics, vector
from etude.bench.trials import Header, Trial, TrialLog, trial_key
from etude.errors import UserError, one_line
from etude.files import digest_of, files_below
from etude.inference.policy import Policy, PolicyInfo
from etude.lineage.record import LINEAGE_FILE
from etude.questions.settings import QuestionSettings, check_arena, idle_in
from etude.rewards.quality import measure
from etude.sandbox.images import WHERE, Backend, settled
from etude.sandbox.probe import strongest
from etude.tasks.attempt import judge, searcher_for, work_on
from etude.tasks.demos import solution_calls
from etude.tasks.prompts import asked
from etude.tasks.score import Scorer, Scores, one_a_core, score
from etude.tasks.task import Style, Task  # noqa: TC001 - pydantic reads it
from etude.training.settings import Settings
from etude.work import cores, together

if TYPE_CHECKING:
    from pathlib import Path

    from etude.agent.search import Searcher
    from etude.progress import Reporter
    from etude.progress import Task as Progress
    from etude.tasks.manifest import TaskSet

TRACES = "traces.jsonl"
GIVE_UP = 10  # invalid attempts in a row
INTEGRITY = {
    "policy": 2,  # raise it when any of these comes to mean something else
    "network": "none",
    "history": "none",
    "hidden tests": "at least half of the failing test functions are not in the tree the agent sees",
    "scoring": "changes to code only, all tests restored, in a fresh sandbox; passes are run again with some hidden tests spoilt; a "
    "change to a task is scored once for all who make it, and no change is a fail",
}


class BenchSettings(Settings, frozen=True):
    """How a benchmark is run."""

    harness: HarnessSettings = HarnessSettings()
    tools: ToolSettings = ToolSettings()
    arena: str = Field(default="code", description="arena of the tasks: code, questions, or python:module.Class")
    questions: QuestionSettings = QuestionSettings()
    style: Style = Field(default="terse", description="style of the requests, where a task has it")
    sandbox: Backend = Field(default="auto", description=WHERE)
    k: int = Field(default=5, ge=1, description="attempts of every agent at every task")
    limit: int = Field(default=0, ge=0, description="number of tasks (0 = all); a larger number includes a smaller")
    concurrency: int = Field(default=0, ge=0, description="concurrent attempts (0 = two a core)")

    @field_validator("arena")
    @classmethod
    def _is_an_arena(cls, name: str) -> str:
        return check_arena(name)

    @model_validator(mode="after")
    def _nothing_idle(self) -> BenchSettings:
        self.refuse_idle(idle_in(self.arena), f"the arena {self.arena!r}")
        return self


Policies = Callable[[Any], tuple[Policy, ChatFormat]]  # who works on a task (of an arena: an Item), and its chat format


@dataclass(frozen=True)
class Agent:
    """Who is measured; opened when its turn comes: two models may not fit into memory at once."""

    name: str
    open: Callable[[], AbstractAsyncContextManager[Policies]]
    bounds: int = 1  # factor on the harness's token bounds, for agents that do not count in tokens
    probe: bool = False  # measures the benchmark itself: its work is tested every time, also where the result is known

    def bounded(self, own: HarnessSettings) -> HarnessSettings:
        """Return the harness's settings in this agent's tokens."""

        def scaled(settings: BaseModel, *names: str) -> dict[str, Any]:
            return {name: getattr(settings, name) and self.bounds * getattr(settings, name) for name in names}

        summary = own.summary.model_copy(update=scaled(own.summary, "trigger", "trigger_to", "tokens"))
        return own.model_copy(update={**scaled(own, "tokens", "turn_tokens", "thinking_tokens"), "summary": summary})


@dataclass(frozen=True)
class Attempt:
    """One attempt at one task."""

    agent: Agent
    task: Any  # a Task; in another arena than code, an Item
    number: int
    style: Style
    prompt: str

    @property
    def seed(self) -> int:
        return int(digest_of(self.key)[:12], 16)

    @property
    def key(self) -> str:
        """What tells it from all others; its seed is made of it, and so the same in every run."""
        return trial_key(self.agent.name, self.task.id, self.number)

    def trial(self, **measured: Any) -> Trial:
        """Return what is written down of it."""
        task = self.task
        return Trial(
            model=self.agent.name, task=task.id, package=task.package, category=task.category,
            generator=task.candidate.generator, style=self.style, number=self.number, **measured,
        )  # fmt: skip


async def run_benchmark(
    task_set: TaskSet, agents: Sequence[Agent], settings: BenchSettings, folder: Path, cache: Path, reporter: Reporter,
    scorer: Scorer = score, kind: type[CodeBenchmark] | None = None,
) -> None:  # fmt: skip
    """Make all attempts that the folder does not hold yet, one agent after another. `kind`: of benchmark; none: of our own."""
    kind = kind or CodeBenchmark
    measure({}, {})  # says now, not after the first attempt, that ruff is missing
    asks = {task.id: asked(task, settings.style) for task in task_set.tasks}
    if others := sum(style != settings.style for style, _ in asks.values()):
        reporter.say(f"{others} tasks have no {settings.style} request: asked in another style, see the report")
    sampling = settings.model_dump(mode="json", include={"harness", "tools", "style"})
    about = kind.about(task_set.tasks, {name: prompt for name, (_, prompt) in asks.items()})
    rules = await kind.rules(settings)
    header = Header(integrity=rules, harness=VERSION, tasks=task_set.digest, sampling=sampling, about=about)
    tasks = sorted(task_set.tasks, key=lambda task: digest_of(task.id))[: settings.limit or None]
    numbered = [(task, number) for number in range(1, settings.k + 1) for task in tasks]
    total, tested = len(numbered) * len(agents), one_a_core(scorer)
    searcher, known = searcher_for(settings.tools, cache), Scores(tested).of
    with TrialLog(folder, header) as log, reporter.task(f"benchmark {task_set.name}", total, "trials") as progress:
        for agent in agents:
            scores = tested if agent.probe else known
            benchmark = kind(settings, folder, log, reporter, progress, task_set, searcher, scores)
            await benchmark.measure(agent, [Attempt(agent, task, number, *asks[task.id]) for task, number in numbered])


@dataclass(frozen=True)
class Benchmark:
    """One agent at all tasks."""

    settings: BenchSettings
    folder: Path
    log: TrialLog
    reporter: Reporter
    progress: Progress

    async def measure(self, agent: Agent, attempts: Sequence[Attempt]) -> None:
        """Make the attempts that are missing."""
        left = [attempt for attempt in attempts if attempt.key not in self.log]
        self.progress.skip(len(attempts) - len(left))
        if left:
            async with agent.open() as policies:
                again = await self.run(policies, left, last=False)
                await self.run(policies, again, last=True)

    async def run(self, policies: Policies, attempts: Sequence[Attempt], *, last: bool) -> list[Attempt]:
        """Make attempts, several at once; return those that were invalid, unless it is the last round."""
        again: list[Attempt] = []
        waiting, in_a_row = iter(attempts), 0

        async def work() -> None:
            nonlocal in_a_row
            for attempt in waiting:
                trial, trace = await self._made(policies, attempt)
                in_a_row = in_a_row + 1 if trial.outcome == "invalid" else 0
                if trial.outcome == "invalid" and not last:
                    again.append(attempt)
                    self.reporter.say(f"{trial.model} at {trial.task}: invalid, to be tried again: {trial.why}")
                    if in_a_row >= GIVE_UP:
                        why = f"the last {GIVE_UP} trials of {trial.model} were invalid: {trial.why}"
                        raise UserError(f"{why}; put that right and run the same command to go on")
                    continue
                if trace:  # a kill between these two leaves a trace that will be there twice
                    append_trace(self.folder / TRACES, trace)
                self.log.add(trial)
                self.progress.advance()

        await together(work() for _ in range(min(self.settings.concurrency or 2 * cores(), len(attempts))))
        return again

    async def _made(self, policies: Policies, attempt: Attempt) -> tuple[Trial, Trace | None]:
        """Make one attempt. Whatever is raised is no doing of the model's: what it gets wrong comes as answers."""
        try:
            return await self._scored(policies, attempt)
        except Exception as error:  # noqa: BLE001 - as above
            why = one_line(error) if isinstance(error, UserError) else f"{type(error).__name__}: {one_line(error)}"
            return attempt.trial(outcome="invalid", why=why), None

    async def _scored(self, policies: Policies, attempt: Attempt) -> tuple[Trial, Trace]:
        raise NotImplementedError


@dataclass(frozen=True)
class CodeBenchmark(Benchmark):
    """One agent at tasks in codebases."""

    task_set: TaskSet
    searcher: Searcher | None
    score: Scorer

    @classmethod
    async def rules(cls, settings: BenchSettings) -> dict[str, Any]:
        """Return by which rules attempts are made."""
        backend = settled(settings.sandbox)
        return {**INTEGRITY, "sandbox": await strongest() if backend == "auto" else backend}

    @classmethod
    def about(cls, tasks: Sequence[Task], prompts: dict[str, str]) -> dict[str, float]:
        """Return what the tasks are like."""
        return set_statistics(tasks, prompts)

    async def _scored(self, policies: Policies, attempt: Attempt) -> tuple[Trial, Trace]:
        """Let the agent work, and measure what it did along all four axes."""
        task, codebase, (policy, talk) = attempt.task, self.task_set.codebase(attempt.task), policies(attempt.task)
        trace = Trace(f"{attempt.agent.name}:{task.id}:{attempt.number}", attempt.prompt)
        bounded, seed = attempt.agent.bounded(self.settings.harness), attempt.seed

        def begin(tools: Toolset) -> Harness:
            return Harness(policy, talk, tools, bounded, trace, seed=seed)

        left = await work_on(task, codebase, trace, self.settings.tools, self.searcher, begin)
        scored = await self.score(task, codebase, left.entries)
        judged = await judge(task, codebase, trace, left, attempt.style, scored)
        expected = {"fail_to_pass": len(task.fail_to_pass), "pass_to_pass": len(task.pass_to_pass)}
        shares = {name: float(getattr(scored, name)) for name in expected}
        passed = {name: round(share * expected[name]) for name, share in shares.items()}
        trace.rewards = {"pass": float(scored.outcome == "pass"), **shares}
        quality = vector(judged.quality) if judged.quality else {}
        trial = attempt.trial(outcome=scored.outcome, how=scored.how, passed=passed, expected=expected, **effort(trace),
                              quality=quality, interaction=vector(judged.interaction), trace=f"{TRACES}#{trace.id}")  # fmt: skip
        return trial, trace


UNBOUNDED, CONTEXT = 1 << 12, 1 << 30


def scripted(name: str, turns: Callable[[Task, ChatFormat], list[str]], *, probe: bool = False) -> Agent:
    """Return an agent that says the same at every attempt."""
    talk = message_format()

    def policy_for(task: Task) -> tuple[Policy, ChatFormat]:
        policy = ScriptedPolicy(turns(task, talk), talk, context=CONTEXT)
        policy.info = PolicyInfo(name, CONTEXT, policy.info.vocabulary)
        return policy, talk

    @asynccontextmanager
    async def opened() -> AsyncIterator[Policies]:
        yield policy_for

    return Agent(name, opened, UNBOUNDED, probe)


def _solution(task: Task, talk: ChatFormat) -> list[str]:
    return [talk.write(*solution_calls(task)), "The reference is in place."]


BUILT_IN = {
    "oracle": scripted("oracle", _solution, probe=True),
    "noop": scripted("noop", lambda _task, _talk: [], probe=True),
}


def model_agent(source: ModelSource, name: str = "") -> Agent:
    """Return a model as an agent; without a name given, one from a folder is called NAME@DIGEST."""
    marked = f"{source.name}@{weights_mark(source.folder)}" if source.folder and not name else source.name

    @asynccontextmanager
    async def opened() -> AsyncIterator[Policies]:
        policy, talk = await source.open()
        try:
            yield lambda _task: (policy, talk)
        finally:
            await policy.close()

    return Agent(name or marked, opened, BYTES if source.text else 1)


def weights_mark(folder: Path) -> str:
    """Return what tells a model from others of its name: trials of one must not pass for the other's.

    It is made of its record, which has the weights' digests, and of its files' sizes: reading all weights would take minutes.
    """
    record = folder / LINEAGE_FILE
    sizes = [[path.name, path.stat().st_size] for path in files_below(folder)]
    return digest_of([record.read_text(encoding="utf-8") if record.is_file() else "", sizes])[:6]
