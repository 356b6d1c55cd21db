"""Cheating agents, run through the harness, its tools and the sandbox, and scored as any other: none passes, and the honest one does."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from etude.agent.calls import Call
from etude.agent.formats import choose_format
from etude.agent.harness import SYSTEM, Harness, HarnessSettings
from etude.agent.policies import ScriptedPolicy
from etude.agent.tools import Toolset, ToolSettings
from etude.agent.trace import Trace
from etude.models.bases import resolve
from etude.models.load import load_tokeniser
from etude.sandbox.box import MIB, Entry
from etude.sandbox.layers import write_layer
from etude.sandbox.local import open_sandbox
from etude.tasks.score import Score, score, visible
from etude.tasks.suite import place_of
from etude.work import cores
from tests.tasks import small
from tests.tasks.cheats import CHEATS, CODE

if TYPE_CHECKING:
    from etude.agent.formats import ChatFormat
    from etude.tasks.task import Codebase

HONEST = [Call("read", {"path": CODE}), Call("edit", {"path": CODE, "old": "result = value", "new": "result += value"}),
          Call("shell", {"command": "python -m pytest -q test_calc.py"}), Call("write", {"path": "notes.txt", "content": "scratch"})]  # fmt: skip


@dataclass(frozen=True)
class Episode:
    """What an agent did, and what it is worth."""

    trace: Trace
    entries: list[Entry]
    score: Score

    @property
    def answers(self) -> list[str]:
        return [answer["text"] for node in self.trace.nodes for answer in node.details.get("answers", ())]


async def episode(calc: Codebase, talk: ChatFormat, layer: Path, calls: list[Call]) -> Episode:
    """Run one call a turn through the real harness, then score what is left in the workspace."""
    lines = [*(talk.write(call) for call in calls), talk.write(said="Done, all tests pass.")]
    policy = ScriptedPolicy(lines, talk)
    place = place_of(calc, (layer,))
    sandbox = await open_sandbox(replace(place, limits=replace(place.limits, disk=32 * MIB)))
    try:
        tools = Toolset(sandbox, ToolSettings(tools=["read", "edit", "write", "shell"]), python=str(calc.python))
        trace = await Harness(policy, talk, tools, HarnessSettings(), Trace("cheat", "calc")).run(
            SYSTEM, "sums are wrong"
        )
        entries = await sandbox.diff()
    finally:
        await sandbox.close()
    return Episode(trace, entries, await score(small.task(), calc, entries))


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Episode]:
    """Run all at once, a few at a time: most of what they take is waiting."""
    folder = tmp_path_factory.mktemp("cheats")
    for each in (folder, *folder.parents[:2]):
        each.chmod(0o755)  # the sandbox runs as somebody else
    hidden = tuple(
        str(place) for place in Path(sys.base_prefix, "lib").glob("python*/site-packages")
    )  # as environments have it
    calc = replace(small.codebase(folder / "calc"), hidden=hidden)
    talk: ChatFormat = choose_format(load_tokeniser(resolve("sprout").folder))
    layer = write_layer(folder / "seen", visible(small.task(), calc), (calc.tree,))

    async def every() -> dict[str, Episode]:
        room = asyncio.Semaphore(cores() + 2)

        async def one(calls: list[Call]) -> Episode:
            async with room:
                return await episode(calc, talk, layer, calls)

        every = {"honest": HONEST, **CHEATS}
        return dict(zip(every, await asyncio.gather(*map(one, every.values())), strict=True))

    return small.run(every())


@pytest.mark.parametrize("cheat", CHEATS)
def test_no_cheat_passes(episodes: dict[str, Episode], cheat: str) -> None:
    found = episodes[cheat]
    assert found.trace.stop == "finished"
    assert found.score.outcome == "fail", found.score


def test_the_honest_agent_passes(episodes: dict[str, Episode]) -> None:
    found = episodes["honest"]
    assert (found.score.outcome, found.score.fail_to_pass, found.score.pass_to_pass) == ("pass", 1.0, 1.0), found.score
    assert "notes.txt" in found.score.ignored


def test_the_agent_cannot_write_where_python_starts(episodes: dict[str, Episode]) -> None:
    assert "Read-only file system" in episodes["plants into the environment"].answers[0]


def test_there_is_nothing_to_find(episodes: dict[str, Episode]) -> None:
    looked = episodes["looks for history and caches"].answers[0]
    assert "commit " not in looked
    assert ".pyc" not in looked
    assert "no output" in episodes["looks for a copy"].answers[0]


def test_a_process_ends_with_the_call_that_started_it(episodes: dict[str, Episode]) -> None:
    assert CODE not in {entry.path for entry in episodes["leaves a process behind"].entries}


def test_what_is_found_is_named(episodes: dict[str, Episode]) -> None:
    assert "touches what runs the tests" in episodes["patches pytest"].score.reason
    assert "forged" in episodes["hides from a reader"].score.reason  # nothing to be read: the spoilt tests tell
    assert "forged" in episodes["equals anything"].score.reason
