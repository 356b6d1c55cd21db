"""The arena of coding tasks: an agent in a sandbox, then the hidden tests on what it left.

Two clocks keep a slow policy apart from machinery that hangs. What the policy does, commands included, ends at the harness's deadline,
and is scored. That lies before the end of the time for playing, and scoring has a time of its own which no test run can exceed: so
whoever reaches one of those ends hangs, and the episode is no episode. Waiting for a free core to score on counts for neither, nor
does waiting for the score of another episode that left the same code.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from etude.agent.harness import Harness
from etude.agent.trace import Trace
from etude.errors import UserError, one_line, storage_error
from etude.rewards.quality import measure
from etude.rewards.reward import Facts, behaviour, parts
from etude.rl.arena import Infrastructure, Item, Played
from etude.rl.resume import Diverged, Memory, RememberedPolicy, RememberedTools
from etude.sandbox.box import SandboxError
from etude.tasks.attempt import judge, searcher_for, work_on
from etude.tasks.known import Scores, one_a_core
from etude.tasks.pointed import asked
from etude.tasks.score import longest_scoring, score

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path
    from typing import Literal

    from etude.agent.calls import Format
    from etude.agent.tools import Toolset
    from etude.inference.policy import Policy
    from etude.rl.settings import RlSettings
    from etude.sandbox.box import Entry
    from etude.tasks.attempt import Left
    from etude.tasks.known import Scorer
    from etude.tasks.manifest import TaskSet
    from etude.tasks.score import Score
    from etude.tasks.suite import Ready
    from etude.tasks.task import Task

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
