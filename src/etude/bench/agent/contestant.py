"""Who is measured: models, and two scripts that measure the benchmark itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from etude.agent.calls import Format
from etude.agent.endpoint import message_format
from etude.agent.scripted import ScriptedPolicy
from etude.inference.policy import Policy, PolicyInfo
from etude.tasks.solution import solution_calls
from etude.tasks.task import Task

if TYPE_CHECKING:
    from etude.agent.harness import HarnessSettings

Player = Callable[[Task], tuple[Policy, Format]]  # who plays a task, and how they talk
UNBOUNDED, CONTEXT = 1 << 12, 1 << 30


@dataclass(frozen=True)
class Contestant:
    """A model to be opened when its turn comes: two may not fit into memory at once."""

    name: str
    open: Callable[[], AbstractAsyncContextManager[Player]]
    bounds: int = 1  # times those of the harness that count tokens
    probe: bool = False  # measures the benchmark itself: its work is tested every time, also where the result is known

    def bounded(self, own: HarnessSettings) -> HarnessSettings:
        """Return the harness's settings in this contestant's tokens."""
        own_bounds = {name: getattr(own, name) for name in ("tokens", "turn_tokens", "thinking_tokens")}
        summary = {name: getattr(own.summary, name) for name in ("trigger", "trigger_to", "tokens")}
        times = [{name: n and n * self.bounds for name, n in each.items()} for each in (own_bounds, summary)]
        return own.model_copy(update={**times[0], "summary": own.summary.model_copy(update=times[1])})


def scripted(name: str, turns: Callable[[Task, Format], list[str]], *, probe: bool = False) -> Contestant:
    """Return a contestant that says the same at every attempt."""
    talk = message_format()

    def play(task: Task) -> tuple[Policy, Format]:
        policy = ScriptedPolicy(turns(task, talk), talk.encode, talk.text, talk.talk.end_token, context=CONTEXT)
        policy.info = PolicyInfo(name, CONTEXT, policy.info.vocabulary)
        return policy, talk

    @asynccontextmanager
    async def opened() -> AsyncIterator[Player]:
        yield play

    return Contestant(name, opened, UNBOUNDED, probe)


BUILT_IN = {
    "oracle": scripted(
        "oracle", lambda task, talk: [talk.write(*solution_calls(task)), "The reference is in place."], probe=True
    ),
    "noop": scripted("noop", lambda _task, _talk: [], probe=True),
}
