"""A benchmark in an arena that is not `code`: the episodes of training, with the same seeds, statistics and report as any benchmark.

The fields of a trial that are about code stay empty: no tests, no quality. Metrics of the arena (unmarked or hedged answers, verdicts
of a judge) are stored with those of interaction.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.agent.calls import Call
from etude.agent.harness import VERSION
from etude.bench.agents import Agent, Attempt, Benchmark, BenchSettings, Policies, scripted
from etude.bench.axes import effort
from etude.bench.trials import Header, Trial, TrialLog
from etude.files import digest_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.agent.formats import ChatFormat
    from etude.agent.trace import Trace
    from etude.progress import Reporter
    from etude.rl.arenas import Arena, Choice
    from etude.rl.environment import Item


@dataclass(frozen=True)
class ArenaAttempt(Attempt):
    """One attempt at an item of an arena."""

    def trial(self, **measured: Any) -> Trial:
        item: Item = self.task
        return Trial(
            model=self.agent.name, task=item.id, package=item.source or item.id, category=item.topic or "all",
            generator=item.family or "all", style=self.style, number=self.number, **measured,
        )  # fmt: skip


@dataclass(frozen=True)
class ArenaBenchmark(Benchmark):
    """One agent at all items of an arena."""

    arena: Arena
    journals: Path

    async def _scored(self, policies: Policies, attempt: Attempt) -> tuple[Trial, Trace]:
        policy, talk = policies(attempt.task)
        name = f"{attempt.agent.name}:{attempt.task.id}:{attempt.number}"
        journal = self.journals / digest_of(name)
        journal.unlink(missing_ok=True)
        play = self.arena.run_episode
        episode = await play(attempt.task.id, policy, talk, name=name, seed=attempt.seed, journal=journal)
        journal.unlink(missing_ok=True)
        measured = effort(episode.trace) | {"interaction": {**episode.behaviour}, "outcome": episode.outcome}
        return attempt.trial(**measured, trace=f"traces.jsonl#{name}"), episode.trace


def known(arena: Arena, agent: Agent) -> Agent:
    """Return the agent for an arena: the oracle gets the arena's solutions; others are returned unchanged."""
    if agent.name != "oracle":
        return agent

    def turns(item: Any, talk: ChatFormat) -> list[str]:
        return [talk.write(each) if isinstance(each, Call) else each for each in arena.solution(item.id)]

    arena.solution(arena.items[0].id)  # says now that there is none
    return scripted("oracle", turns, probe=True)


async def run_arena(
    choice: Choice, agents: Sequence[Agent], settings: BenchSettings, folder: Path, reporter: Reporter
) -> int:
    """Make all attempts that the folder does not hold yet, one agent after another; return how many items there are."""
    arena = choice.open()
    sampling = settings.model_dump(mode="json", include={"harness"})
    rules, about = arena.about, arena.statistics
    header = Header(integrity=rules, harness=VERSION, tasks=arena.digest, sampling=sampling, about=about)
    items = sorted(arena.items, key=lambda item: digest_of(item.id))[: settings.limit or None]
    agents = [known(arena, agent) for agent in agents]
    total = len(items) * settings.k * len(agents)
    with (
        tempfile.TemporaryDirectory(prefix="etude-bench-") as journals, TrialLog(folder, header) as log,
        reporter.task(f"benchmark {Path(choice.tasks).stem or choice.arena}", total, "trials") as progress,
    ):  # fmt: skip
        await arena.ready(reporter.say)
        await arena.close(lambda _: None)
        for agent in agents:
            arena = replace(choice, harness=agent.bounded(settings.harness)).open()
            benchmark = ArenaBenchmark(settings, folder, log, reporter, progress, arena, Path(journals))
            numbers = range(1, settings.k + 1)
            attempts = [ArenaAttempt(agent, item, number, "terse", "") for number in numbers for item in items]
            try:
                await benchmark.measure(agent, attempts)
            finally:
                await arena.close(reporter.say)
    return len(items)
