"""Where episodes are played: the seam between the loop, which knows groups and weights, and whatever a task is.

`TaskArena` (task_arena.py) plays coding tasks in sandboxes. Tests and other domains bring arenas of their own.

The arena of coding tasks: an agent in a sandbox, then the hidden tests on what it left.

Two clocks keep a slow policy apart from machinery that hangs. What the policy does, commands included, ends at the harness's deadline,
and is scored. That lies before the end of the time for playing, and scoring has a time of its own which no test run can exceed: so
whoever reaches one of those ends hangs, and the episode is no episode. Waiting for a free core to score on counts for neither, nor
does waiting for the score of another episode that left the same code.

How a half-finished episode goes on after a kill: what was sampled is kept, what was run is run again.

A policy and tools that remember: every completion and every round of answers is appended to a file. An episode that is begun again
with that file plays itself up to where it broke off. Its calls are run in the fresh sandbox, which so becomes what the old one was,
while the policy is shown the very tokens it saw. If a command now answers otherwise, the sandbox is not what it was; if a prompt does,
neither is the harness. Then the memory is worth nothing.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, cast

from etude.agent.calls import Answer
from etude.agent.harness import Harness
from etude.agent.trace import Trace
from etude.errors import UserError, one_line, storage_error
from etude.files import digest_of
from etude.inference.policy import Completion, Token
from etude.rewards.quality import measure
from etude.rewards.reward import Facts, behaviour, parts
from etude.sandbox.box import SandboxError
from etude.tasks.attempt import judge, searcher_for, work_on
from etude.tasks.prompts import asked
from etude.tasks.score import Scores, longest_scoring, one_a_core, score

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path
    from typing import Literal

    from etude.agent.calls import Call, Format, ToolSpec
    from etude.agent.harness import Tools
    from etude.agent.tools import Toolset
    from etude.inference.policy import Policy, PolicyInfo, Sampling
    from etude.rl.settings import RlSettings
    from etude.sandbox.box import Entry
    from etude.tasks.attempt import Left
    from etude.tasks.manifest import TaskSet
    from etude.tasks.score import Score, Scorer
    from etude.tasks.suite import Ready
    from etude.tasks.task import Task


@dataclass(frozen=True)
class Item:
    """A task as the loop sees it. `kin`: what tasks that are alike have in common; hardness is learnt of those."""

    id: str
    kin: str = ""


@dataclass(frozen=True)
class Played:
    """An episode that ended by itself, at a limit, or malformed: whatever the policy did, it is scored."""

    trace: Trace  # `rewards` holds the parts, without weights
    outcome: Literal["pass", "fail"]
    behaviour: dict[str, float] = field(default_factory=dict)  # what monitors watch


class Infrastructure(Exception):  # noqa: N818 - whose fault it is
    """The machinery failed, not the policy: the episode is excluded and counted, never scored as 0. Its text is the cause."""


class Arena(Protocol):
    """Plays episodes, many at once."""

    @property
    def items(self) -> Sequence[Item]:
        """Return all tasks."""
        ...

    async def play(self, item: str, policy: Policy, talk: Format, *, name: str, seed: int, memory: Path) -> Played:
        """Play one episode. `memory`: a file for what it may need after a kill; the same arguments then go on from it.

        Raise Infrastructure if the machinery fails. Cancelled, nothing it started is left behind.
        """
        ...


# How long something took (and the rules pytest draws around that), and where it lay in memory or under /tmp, is chance.
CHANCE = re.compile(r"\d+(?:\.\d+)?(?=\s?(?:ms|s|seconds?)\b)|={4,}|0x[0-9a-f]{6,}|/tmp/\S+")


class Diverged(Exception):  # noqa: N818 - a state, not a mistake
    """The episode did not go again as it is remembered."""


class Memory:
    """The file: a line that says whose it is, then one a completion or a round of answers.

    A line is written by one write, and not flushed to the disk: a power cut may cost an episode what it has done, a kill does not.
    """

    def __init__(self, path: Path, **owner: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+", buffering=0)
        self._file.seek(0)
        whole, newline, _torn = self._file.read().rpartition(b"\n")
        try:
            first, *lines = map(json.loads, whole.split(b"\n"))
        except ValueError:  # empty, or spoilt by a power cut
            first, lines = None, []
        self.past: list[Any] = lines[::-1] if first == owner else []  # the next one last
        self.replayed = 0
        self._file.truncate(len(whole + newline) if self.past else 0)
        if not self.past:
            self._write(owner)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file, which stays where it is."""
        self._file.close()

    def recall(self, kind: str) -> Any:
        """Return what came next, if that is remembered."""
        if not self.past:
            return None
        self.replayed += 1
        found = self.past.pop()
        if kind not in found:
            raise Diverged(f"no {kind} came next")
        return found[kind]

    def keep(self, kind: str, value: Any) -> None:
        """Remember what came next."""
        self._write({kind: value})

    def _write(self, line: Any) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")


class RememberedPolicy:
    """A policy whose completions are remembered."""

    def __init__(self, policy: Policy, memory: Memory) -> None:
        self._policy, self._memory = policy, memory

    @property
    def info(self) -> PolicyInfo:
        """Return what the policy tells of itself."""
        return self._policy.info

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        on_tokens: Callable[[list[Token]], None] | None = None,
    ) -> Completion:
        """Return the remembered completion of this prompt, or a new one."""
        asked = digest_of(list(prompt))
        if past := self._memory.recall("completion"):
            if past["prompt"] != asked:
                raise Diverged("another prompt")
            tokens = [Token(*each) for each in past["tokens"]]
            if on_tokens:
                on_tokens(tokens)
            return Completion(tokens, past["finish_reason"], past["stopped_by"], past["cached"])
        done = await self._policy.generate(prompt, sampling, session=session, on_tokens=on_tokens)
        self._memory.keep("completion", {
            "prompt": asked, "tokens": [token[:4] for token in done.tokens], "finish_reason": done.finish_reason,
            "stopped_by": done.stopped_by, "cached": done.cached,
        })  # fmt: skip
        return done

    async def close(self) -> None:
        """Leave the policy to whoever opened it."""


class RememberedTools:
    """Tools whose answers are remembered."""

    def __init__(self, tools: Tools, memory: Memory) -> None:
        self._tools, self._memory = tools, memory

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """Return what the policy is told of them."""
        return self._tools.specs

    @property
    def plan_text(self) -> str:
        """Return the to-do list."""
        return self._tools.plan_text

    async def run(self, calls: Sequence[Call]) -> list[Answer]:
        """Run calls. Where their answers are remembered these are returned, if the new ones are the same but for chance."""
        past = self._memory.recall("answers")
        answers = await self._tools.run(calls)
        if past is None:
            self._memory.keep("answers", [[a.text, a.failed, a.seconds, dict(a.details)] for a in answers])
            return answers
        if [alike(text) for text, *_ in past] != [alike(answer.text) for answer in answers]:
            raise Diverged("another answer")
        return [Answer(call, *each) for call, each in zip(calls, past, strict=True)]


def alike(text: str) -> str:
    """Return what two runs of the same command on the same files have in common."""
    return CHANCE.sub("#", text)


POLICY_SHARE = (
    0.9  # of the time for playing; the rest is for the sandbox to open and end, and the last call to be ended
)
LEAST = 5.0  # seconds for playing


@dataclass(frozen=True)
class Clocks:
    """Seconds of an episode: of the policy, of playing as a whole, and of scoring; the last two add up to the setting."""

    deadline: float
    playing: float
    scoring: float


class TaskArena:
    """Plays the tasks of a set."""

    def __init__(self, found: TaskSet, settings: RlSettings, cache: Path, scorer: Scorer = score) -> None:
        self.found, self.settings, self._scorer = found, settings, scorer
        self.tasks = {task.id: task for task in found.tasks}
        self.items = tuple(Item(task.id, f"{task.package} {task.candidate.generator}") for task in found.tasks)
        self.searcher = searcher_for(settings.tools, cache)
        self.scores = Scores(one_a_core(self._punctual))
        most = max(map(self._longest_scoring, found.tasks))
        if settings.seconds < most + LEAST:
            raise UserError(
                f"seconds = {settings.seconds:g}: scoring alone may take {most:.0f}; set at least {most + LEAST:.0f}"
            )
        measure([])  # says now, not after the first episode, that ruff is missing

    def _longest_scoring(self, task: Task) -> float:
        return longest_scoring(task, self.found.codebase(task))

    def clocks(self, task: Task) -> Clocks:
        """Return how long each part of an episode may take."""
        scoring = self._longest_scoring(task)
        playing = self.settings.seconds - scoring
        return Clocks(min(self.settings.harness.seconds, POLICY_SHARE * playing), playing, scoring)

    async def play(self, item: str, policy: Policy, talk: Format, *, name: str, seed: int, memory: Path) -> Played:
        """Play one episode and score it; see `Arena`. The memory is left to the caller, who knows when it is no longer needed.

        UserError, as of a policy that cannot be asked, is raised as it is.
        """
        task = self.tasks[item]
        clocks = self.clocks(task)
        async with _excused("playing", clocks.playing):
            trace, left = await self._played(task, policy, talk, name, seed, memory)
        found = await self.scores.of(task, self.found.codebase(task), left.entries)
        async with _excused("judging", clocks.scoring):
            return await self._judged(task, trace, left, found)

    async def _punctual(self, task: Task, codebase: Ready, entries: Sequence[Entry]) -> Score:
        """Score; the clock begins when a core is free."""
        async with _excused("scoring", self.clocks(task).scoring):
            return await self._scorer(task, codebase, entries)

    async def _played(
        self, task: Task, policy: Policy, talk: Format, name: str, seed: int, path: Path
    ) -> tuple[Trace, Left]:
        """Go on from the memory, or begin anew where the sandbox cannot be brought back to where it was."""
        try:
            with Memory(path, name=name, task=task.id, seed=seed) as memory:
                return await self._episode(task, policy, talk, name, seed, memory)
        except Diverged:
            path.unlink()
        with Memory(path, name=name, task=task.id, seed=seed) as memory:
            trace, left = await self._episode(task, policy, talk, name, seed, memory)
        trace.counts["restarted"] = 1
        return trace, left

    async def _episode(
        self, task: Task, policy: Policy, talk: Format, name: str, seed: int, memory: Memory
    ) -> tuple[Trace, Left]:
        style, prompt = asked(task, self.settings.style)
        trace = Trace(name, prompt, made_by={"set": self.found.name, "task": task.id, "style": style})
        own = self.settings.harness.model_copy(update={"seconds": self.clocks(task).deadline})

        def begin(tools: Toolset) -> Harness:
            remembered = RememberedPolicy(policy, memory), talk, RememberedTools(tools, memory)
            return Harness(*remembered, own, trace, seed=seed)

        left = await work_on(task, self.found.codebase(task), trace, self.settings.tools, self.searcher, begin)
        if memory.replayed:
            trace.counts["replayed"] = memory.replayed
        return trace, left

    async def _judged(self, task: Task, trace: Trace, left: Left, found: Score) -> Played:
        style, _ = asked(task, self.settings.style)
        judged = await judge(task, self.found.codebase(task), trace, left, style, found)
        outcome = cast("Literal['pass', 'fail']", judged.score.outcome)
        shares = judged.score.fail_to_pass, judged.score.pass_to_pass
        facts = Facts(trace, outcome, *shares, left.change, judged.quality, judged.interaction)
        trace.rewards = parts(facts, self.settings.rewards)
        return Played(trace, outcome, behaviour(facts))


@asynccontextmanager
async def _excused(doing: str, seconds: float) -> AsyncIterator[None]:
    """Turn what the machinery does wrong into Infrastructure, whose text begins with the kind of it.

    What a policy writes cannot raise, so an unknown error is no doing of its; it is told by its type, and many of them end a run.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except UserError:
        raise
    except TimeoutError:
        raise Infrastructure(f"hung: {doing} took more than {seconds:.0f} s") from None
    except SandboxError as error:
        raise Infrastructure(f"sandbox: {one_line(error)}") from error
    except OSError as error:
        raise Infrastructure(f"files: {storage_error(error) or one_line(error)}") from error
    except Exception as error:
        raise Infrastructure(f"{type(error).__name__}: {one_line(error)}") from error
