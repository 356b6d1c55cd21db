"""Environments: where episodes run. The RL loop knows groups and weights; an environment knows what a task is.

`CodingEnvironment` runs an agent in a sandbox, then the hidden tests on the changed code. Others are chosen in arenas.py.

Two time limits tell a slow policy from hanging infrastructure. The policy, its commands included, must end by the harness's deadline;
whatever it has done by then is scored. The limits of the whole rollout and of scoring are later, and normal work cannot reach them:
an episode that does is excluded as hung. Waiting for a free core to score on, or for the score of another episode with the same code,
counts for neither.

An unfinished episode continues after a kill: sampled tokens are kept, commands are run again. Every completion and every round of
tool answers is appended to a journal. An episode that starts with an existing journal replays it: the calls run in a fresh sandbox,
which brings it to the same state, and the policy's context gets the same tokens. If a command now answers differently, or a prompt
differs, the journal is discarded and the episode starts over.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

from etude.agent.calls import Answer, Call, ToolSpec
from etude.agent.harness import Harness, Tools
from etude.agent.trace import Trace
from etude.errors import UserError, one_line, storage_error
from etude.files import digest_of
from etude.inference.policy import Completion, Policy, PolicyInfo, Sampling, Token
from etude.jsonl import append_line, read_lines
from etude.rewards.quality import measure
from etude.rewards.reward import Facts, behaviour, parts
from etude.sandbox.box import Entry, SandboxError
from etude.tasks.attempt import Left, judge, searcher_for, work_on
from etude.tasks.prompts import asked
from etude.tasks.score import Score, Scorer, Scores, longest_scoring, one_a_core, score

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    from etude.agent.formats import ChatFormat
    from etude.agent.tools import Toolset
    from etude.rl.settings import RlSettings
    from etude.tasks.manifest import TaskSet
    from etude.tasks.task import Codebase, Task


@dataclass(frozen=True)
class Item:
    """A task as the RL loop sees it. `family`: a name that similar tasks share; the curriculum learns difficulty by family.

    For benchmarks: scores are shown by `topic`; tasks of one `source`, such as a repository or a company, are not independent.
    """

    id: str
    family: str = ""
    topic: str = ""
    source: str = ""


@dataclass(frozen=True)
class Episode:
    """A scored episode: it ended by itself, at a limit, or with malformed calls."""

    trace: Trace  # `rewards` holds the parts, without weights
    outcome: Literal["pass", "fail"]
    behaviour: dict[str, float] = field(default_factory=dict)  # what monitors watch


class InfrastructureError(Exception):
    """A failure that is not the policy's: the episode is excluded and counted, never scored as 0. The text is the cause."""


class Environment(Protocol):
    """An arena: runs episodes, many at once. Stages, trainer, algorithm and monitors know of tasks no more than this."""

    @property
    def items(self) -> Sequence[Item]: ...

    async def run_episode(
        self, item: str, policy: Policy, talk: ChatFormat, *, name: str, seed: int, journal: Path
    ) -> Episode:
        """Run and score one episode. `journal`: a file for what it needs after a kill; the same arguments then go on from it.

        Raise InfrastructureError if the infrastructure fails. Cancelled, nothing it started is left behind.
        """
        ...


class Diverged(Exception):  # noqa: N818 - a state, not a mistake
    """The replayed episode is not the one in the journal."""


class Journal:
    """The file: a line that says which episode it belongs to, then one a completion or a round of answers.

    Lines are not flushed to the disk: a power cut may cost an episode what it has done, a kill does not.
    """

    def __init__(self, path: Path, **owner: Any) -> None:
        self.path, self.replayed = path, 0
        try:
            first, *entries = map(json.loads, read_lines(path, missing_ok=True)[0])
        except ValueError:  # empty, or spoilt by a power cut
            first, entries = None, []
        self.past: list[Any] = entries[::-1] if first == owner else []  # the next one last
        if not self.past:
            path.unlink(missing_ok=True)
            self._append(owner)

    def replay(self, kind: str) -> Any:
        """Return what came next, if that is in the journal."""
        if not self.past:
            return None
        self.replayed += 1
        entry = self.past.pop()
        if kind not in entry:
            raise Diverged(f"no {kind} came next")
        return entry[kind]

    def write(self, kind: str, value: Any) -> None:
        self._append({kind: value})

    def replaying(self, policy: Policy, talk: ChatFormat, tools: Tools) -> tuple[Policy, ChatFormat, Tools]:
        """Return what a harness takes, such that what is in this journal comes first."""
        return ReplayPolicy(policy, self), talk, ReplayTools(tools, self)

    def _append(self, entry: dict[str, Any]) -> None:
        append_line(self.path, json.dumps(entry, separators=(",", ":")).encode() + b"\n")


class ReplayPolicy:
    """A policy that returns the completions of a journal, then samples new ones into it."""

    def __init__(self, policy: Policy, journal: Journal) -> None:
        self._policy, self._journal = policy, journal

    @property
    def info(self) -> PolicyInfo:
        return self._policy.info

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str | None = None,
        on_tokens: Callable[[list[Token]], None] | None = None,
    ) -> Completion:  # fmt: skip
        digest = digest_of(list(prompt))
        if past := self._journal.replay("completion"):
            if past["prompt"] != digest:
                raise Diverged("another prompt")
            tokens = [Token(*each) for each in past["tokens"]]
            if on_tokens:
                on_tokens(tokens)
            return Completion(tokens, past["finish_reason"], past["stopped_by"], past["cached"])
        done = await self._policy.generate(prompt, sampling, session=session, on_tokens=on_tokens)
        self._journal.write("completion", {
            "prompt": digest, "tokens": [token[:4] for token in done.tokens], "finish_reason": done.finish_reason,
            "stopped_by": done.stopped_by, "cached": done.cached,
        })  # fmt: skip
        return done

    async def close(self) -> None:
        """Leave the policy to whoever opened it."""


class ReplayTools:
    """Tools that run again what is in a journal, and must answer as they did."""

    def __init__(self, tools: Tools, journal: Journal) -> None:
        self._tools, self._journal = tools, journal

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        return self._tools.specs

    @property
    def plan_text(self) -> str:
        return self._tools.plan_text

    async def run(self, calls: Sequence[Call]) -> list[Answer]:
        """Run calls. Where their answers are in the journal those are returned, if the new ones are the same but for noise."""
        past = self._journal.replay("answers")
        answers = await self._tools.run(calls)
        if past is None:
            self._journal.write("answers", [[a.text, a.failed, a.seconds, dict(a.details)] for a in answers])
            return answers
        if [without_noise(text) for text, *_ in past] != [without_noise(answer.text) for answer in answers]:
            raise Diverged("another answer")
        return [Answer(call, *each) for call, each in zip(calls, past, strict=True)]


# How long something took (and the rules pytest draws around that), and where it lay in memory or under /tmp, is noise.
NOISE = re.compile(r"\d+(?:\.\d+)?(?=\s?(?:ms|s|seconds?)\b)|={4,}|0x[0-9a-f]{6,}|/tmp/\S+")


def without_noise(text: str) -> str:
    """Return a text without times, addresses and temporary paths, which differ between two runs of the same command."""
    return NOISE.sub("#", text)


async def from_journal(path: Path, owner: dict[str, Any], play: Callable[[Journal], Awaitable[Trace]]) -> Trace:
    """Continue an episode from its journal; if the replay differs from the journal, discard it and start over."""
    journal, restarted = Journal(path, **owner), False
    try:
        trace = await play(journal)
    except Diverged:
        path.unlink()
        journal, restarted = Journal(path, **owner), True
        trace = await play(journal)
    trace.counts |= {"replayed": journal.replayed} if journal.replayed else {}
    trace.counts |= {"restarted": 1} if restarted else {}
    return trace


# Of the rollout's time; the rest is for opening and closing the sandbox, and for ending the last call.
POLICY_SHARE = 0.9
SHORTEST_ROLLOUT = 5.0  # seconds


class Clocks(NamedTuple):
    """Seconds of an episode: of the policy, of the rollout as a whole, and of scoring; the last two add up to the setting."""

    policy: float
    rollout: float
    scoring: float


class CodingEnvironment:
    """Runs the coding tasks of a set."""

    def __init__(self, tasks: TaskSet, settings: RlSettings, cache: Path, scorer: Scorer = score) -> None:
        self.set, self.settings, self._scorer = tasks, settings, scorer
        self.tasks = {task.id: task for task in tasks.tasks}
        self.items = tuple(Item(task.id, f"{task.package} {task.candidate.generator}") for task in tasks.tasks)
        self.searcher = searcher_for(settings.tools, cache)
        self.scores = Scores(one_a_core(self._score))
        longest = max(self._longest_scoring(task) for task in tasks.tasks)
        least = longest + SHORTEST_ROLLOUT
        if settings.seconds < least:
            alone = f"scoring alone may take {longest:.0f}"
            raise UserError(f"seconds = {settings.seconds:g}: {alone}; set at least {least:.0f}")
        measure({}, {})  # says now, not after the first episode, that ruff is missing

    def _longest_scoring(self, task: Task) -> float:
        return longest_scoring(task, self.set.codebase(task))

    def clocks(self, task: Task) -> Clocks:
        scoring = self._longest_scoring(task)
        rollout = self.settings.seconds - scoring
        return Clocks(min(self.settings.harness.seconds, POLICY_SHARE * rollout), rollout, scoring)

    async def run_episode(
        self, item: str, policy: Policy, talk: ChatFormat, *, name: str, seed: int, journal: Path
    ) -> Episode:
        """See `Environment`. The journal is left to the caller, who knows when it is no longer needed.

        UserError, as of a policy that cannot be reached, is raised as it is.
        """
        task = self.tasks[item]
        clocks = self.clocks(task)
        async with infrastructure("the rollout", clocks.rollout):
            trace, left = await self._rollout(task, policy, talk, name, seed, journal)
        result = await self.scores.of(task, self.set.codebase(task), left.entries)
        async with infrastructure("judging", clocks.scoring):
            return await self._judge(task, trace, left, result)

    async def _score(self, task: Task, codebase: Codebase, entries: Sequence[Entry]) -> Score:
        """Score; the clock begins when a core is free."""
        async with infrastructure("scoring", self.clocks(task).scoring):
            return await self._scorer(task, codebase, entries)

    async def _rollout(
        self, task: Task, policy: Policy, talk: ChatFormat, name: str, seed: int, path: Path
    ) -> tuple[Trace, Left]:
        style, prompt = asked(task, self.settings.style)
        own, codebase, left = self.settings, self.set.codebase(task), list[Left]()
        settings = own.harness.model_copy(update={"seconds": self.clocks(task).policy})

        async def play(journal: Journal) -> Trace:
            trace = Trace(name, prompt, made_by={"set": self.set.name, "task": task.id, "style": style})

            def begin(tools: Toolset) -> Harness:
                replaying = journal.replaying(policy, talk, tools)
                return Harness(*replaying, settings, trace, seed=seed, experts=bool(own.router_replay))

            left.append(await work_on(task, codebase, trace, own.tools, self.searcher, begin))
            return trace

        trace = await from_journal(path, {"name": name, "task": task.id, "seed": seed}, play)
        return trace, left[-1]

    async def _judge(self, task: Task, trace: Trace, left: Left, result: Score) -> Episode:
        judged = await judge(task, self.set.codebase(task), trace, left, trace.made_by["style"], result)
        outcome = cast("Literal['pass', 'fail']", judged.score.outcome)
        shares = judged.score.fail_to_pass, judged.score.pass_to_pass
        facts = Facts(trace, outcome, *shares, left.change, judged.quality, judged.interaction)
        trace.rewards = parts(facts, self.settings.rewards)
        return Episode(trace, outcome, behaviour(facts))


@asynccontextmanager
async def infrastructure(doing: str, seconds: float) -> AsyncIterator[None]:
    """Turn exceptions into InfrastructureError, whose text begins with the kind of failure.

    Nothing that a policy writes raises an exception here, so an unknown one is a fault of the infrastructure; many of them end a run.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except UserError:
        raise
    except TimeoutError:
        raise InfrastructureError(f"hung: {doing} took more than {seconds:.0f} s") from None
    except SandboxError as error:
        raise InfrastructureError(f"sandbox: {one_line(error)}") from error
    except OSError as error:
        raise InfrastructureError(f"files: {storage_error(error) or one_line(error)}") from error
    except Exception as error:
        raise InfrastructureError(f"{type(error).__name__}: {one_line(error)}") from error
