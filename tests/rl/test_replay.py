"""Episodes that broke off go on: what was sampled comes back token for token, and what cannot be brought back is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.calls import Answer, Call, ToolSpec
from etude.agent.endpoint import message_format
from etude.agent.policies import ScriptedPolicy
from etude.inference.policy import Completion, Sampling, Token
from etude.rl.environment import Diverged, Journal, ReplayPolicy, ReplayTools, without_noise

FLOATS = st.floats(allow_infinity=False, allow_nan=False)
TOKENS = st.lists(
    st.builds(Token, st.integers(0, 1 << 31), FLOATS, FLOATS, st.integers(0, 1 << 40), st.just(())), max_size=4
)
PLAYS = st.lists(
    st.tuples(st.lists(st.integers(0, 1 << 31), max_size=4), TOKENS, st.text(), st.booleans()), min_size=1, max_size=4
)


class Given(ScriptedPolicy):
    """Samples what it is given, then nothing more."""

    def __init__(self, completions: list[Completion]) -> None:
        super().__init__([], message_format())
        self.left = completions

    async def generate(self, prompt: Sequence[int], sampling: Sampling, **_: object) -> Completion:
        return self.left.pop(0)


class Told:
    """Tools that answer every call as they are told."""

    specs: tuple[ToolSpec, ...] = ()
    plan_text = ""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)

    async def run(self, calls: Sequence[Call]) -> list[Answer]:
        text = self.texts.pop(0)
        return [Answer(call, text, details={"rc": 0}) for call in calls]


CALLS = [Call("shell", {"command": "pytest"})]


async def go(
    journal: Journal, plays: list[tuple[list[int], list[Token], str, bool]], done: int
) -> list[tuple[Completion, list[Token], list[Answer]]]:
    """Sample and run all plays, of which the policy itself has only those that were not done before."""
    policy = ReplayPolicy(
        Given([Completion(t, "stop" if stop else "length", 7, 3) for _, t, _, stop in plays[done:]]), journal
    )
    tools = ReplayTools(Told(*(text for _, _, text, _ in plays)), journal)
    found = []
    for prompt, _, _, _ in plays:
        heard: list[Token] = []
        completion = await policy.generate(prompt, Sampling(4), on_tokens=heard.extend)
        found.append((completion, heard, await tools.run(CALLS)))
    return found


@given(plays=PLAYS, data=st.data())
def test_a_torn_journal_gives_back_all_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, plays: list[tuple[list[int], list[Token], str, bool]], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("journal") / "deep" / "000.part"
    journal = Journal(path, seed=1)
    first = asyncio.run(go(journal, plays, 0))
    assert journal.replayed == 0
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    lines = max(0, whole[:cut].count(b"\n") - 1)  # but for the owner's
    journal = Journal(path, seed=1)
    again = asyncio.run(go(journal, plays, (lines + 1) // 2))
    assert journal.replayed == lines
    assert [(c.tokens, c.finish_reason, c.stopped_by, c.cached, a) for c, _, a in again] == [
        (c.tokens, c.finish_reason, c.stopped_by, c.cached, a) for c, _, a in first
    ]
    assert [heard for _, heard, _ in again][: (lines + 1) // 2] == [c.tokens for c, _, _ in again][: (lines + 1) // 2]
    assert path.read_bytes() == whole  # so a second kill finds the same


def written(path: Path, answer: str = "1 passed in 0.03s") -> Path:
    journal = Journal(path, seed=1)
    asyncio.run(go(journal, [([1, 2], [Token(3, -0.5, -0.5, 0)], answer, True)], 0))
    return path


def test_the_journal_of_another_episode_and_a_spoilt_one_are_begun_anew(tmp_path: Path) -> None:
    whole = written(tmp_path / "journal").read_bytes()
    journal = Journal(tmp_path / "journal", seed=2)
    assert journal.past == []
    assert (tmp_path / "journal").read_bytes() == b'{"seed":2}\n'
    (tmp_path / "journal").write_bytes(whole.replace(b'"tokens"', b'"tok\0\0\0'))
    journal = Journal(tmp_path / "journal", seed=1)
    assert journal.past == []


def test_another_prompt_or_another_order_diverges(tmp_path: Path) -> None:
    path = written(tmp_path / "journal")
    journal = Journal(path, seed=1)
    with pytest.raises(Diverged, match="another prompt"):
        asyncio.run(ReplayPolicy(Given([]), journal).generate([1, 3], Sampling(4)))
    journal = Journal(path, seed=1)
    with pytest.raises(Diverged, match="no answers came next"):
        asyncio.run(ReplayTools(Told("x"), journal).run(CALLS))


def test_answers_that_differ_by_chance_are_shown_as_they_were_and_others_diverge(tmp_path: Path) -> None:
    path = written(tmp_path / "journal", "===== 1 passed in 0.03s =====\n<object at 0x7f0012345678>")
    play = ([1, 2], [Token(3, -0.5, -0.5, 0)])
    journal = Journal(path, seed=1)
    ((_, _, answers),) = asyncio.run(
        go(journal, [(*play, "==== 1 passed in 11.20s ====\n<object at 0x55aa12345678>", True)], 1)
    )
    assert [answer.text for answer in answers] == ["===== 1 passed in 0.03s =====\n<object at 0x7f0012345678>"]
    journal = Journal(path, seed=1)
    with pytest.raises(Diverged, match="another answer"):
        asyncio.run(go(journal, [(*play, "===== 1 failed in 0.03s =====\n<object at 0x7f0012345678>", True)], 1))


@given(st.lists(st.sampled_from(["1", "2", "passed", "failed", "a == b", "line 3", "0x1f"])))
def test_what_commands_say_is_not_taken_for_chance(words: list[str]) -> None:
    assert without_noise(" ".join(words)) == " ".join(words)
