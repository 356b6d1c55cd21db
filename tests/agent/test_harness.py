"""The harness, driven by scripts: what the policy sees is exactly the trace, limits hold, summaries branch the tree."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from etude.agent.calls import Answer, Call, Parameter, ToolSpec
from etude.agent.endpoint import message_format
from etude.agent.harness import Harness, HarnessSettings
from etude.agent.policies import ScriptedPolicy
from etude.agent.summary import SummarySettings, kept_from
from etude.agent.trace import Node, Trace, samples
from etude.inference.policy import Busy, Completion, Sampling, Token

TALK = message_format()
ECHO = "@echo\ntext: {}\n@end"


class Echo:
    """Tools of a test: what is said comes back, so many times."""

    specs = (
        ToolSpec(
            "echo",
            "Says it again.",
            (Parameter("text", str, "what"), Parameter("times", int, "how often", required=False)),
        ),
    )

    def __init__(self, plan: str = "", error: Exception | None = None) -> None:
        self.plan_text, self.error, self.seen = plan, error, list[Call]()

    async def run(self, calls: Sequence[Call]) -> list[Answer]:
        """Return what was said."""
        if self.error:
            raise self.error
        self.seen += calls
        return [Answer(call, str(call.arguments["text"]) * int(call.arguments.get("times", 1))) for call in calls]


def play(
    lines: Sequence[str | Callable[[str], str]], tools: Echo | None = None, policy: Any = None, **settings: Any
) -> tuple[Trace, ScriptedPolicy]:
    """Run an episode."""
    policy = policy or ScriptedPolicy(lines, TALK, context=settings.pop("context", 1 << 20))
    harness = Harness(policy, TALK, tools or Echo(), HarnessSettings(**settings), Trace("t", "task"), seed=7)
    return asyncio.run(harness.run("system", "do it")), policy


def test_the_policy_sees_the_trace_and_nothing_else() -> None:
    trace, policy = play(["first\n" + ECHO.format("one"), "second\n" + ECHO.format("two"), "done"])
    assert trace.stop == "finished"
    assert [node.kind for node in trace.nodes] == ["opening", "turn", "answers", "turn", "answers", "turn"]
    seen = [[t for node in trace.nodes[:end] for t in node.tokens] for end in (1, 3, 5)]
    assert policy.prompts == seen
    assert trace.counts["turns"] == 3
    assert trace.counts["calls_echo"] == 2
    sampled = sum(len(node.tokens) for node in trace.nodes if node.sampled)
    assert trace.counts["sampled"] == sampled
    assert sum(trace.counts[f"tokens_{kind}"] for kind in ("thinking", "calls", "said")) == sampled


@pytest.mark.parametrize(
    ("settings", "stop", "turns"),
    [
        ({"turns": 4}, "turns", 4),
        ({"tokens": 60}, "tokens", 4),
        ({"seconds": 1e-9}, "seconds", 0),
        ({"context": 700, "summary": SummarySettings(kind="none")}, "context", None),
    ],
)
def test_each_limit_stops_the_episode(settings: dict[str, Any], stop: str, turns: int | None) -> None:
    trace, _ = play([ECHO.format("x")] * 99, **settings)
    assert trace.stop == stop
    assert turns is None or trace.counts.get("turns", 0) == turns
    assert max(len(trace.context(place)) for place in range(len(trace.nodes))) <= max(1 << 20, 700)


def test_calls_of_the_last_turn_are_run_though_their_answers_are_not_read() -> None:
    tools = Echo()
    trace, _ = play([ECHO.format("one"), ECHO.format("two")], tools, turns=2)
    assert [call.arguments["text"] for call in tools.seen] == ["one", "two"]
    assert trace.nodes[-1].kind == "turn"
    assert [answer["text"] for answer in trace.nodes[-1].details["unread"]] == ["two"]


def test_the_context_is_never_exceeded() -> None:
    trace, policy = play([ECHO.format("x" * 50)] * 99, context=900, summary=SummarySettings(kind="none"))
    assert trace.stop == "context"
    assert all(len(prompt) < 900 for prompt in policy.prompts)


def test_malformed_calls_are_answered_counted_and_end_it() -> None:
    bad = "@echo\ntext<<END\nnever closed"
    trace, policy = play([bad, "fine\n" + ECHO.format("x"), bad, bad, bad, "never said"])
    assert trace.stop == "malformed"
    assert trace.counts["malformed"] == 4
    assert trace.counts["turns"] == 5
    assert "could not be read" in TALK.text(policy.prompts[1])
    assert "Tools: echo" in TALK.text(policy.prompts[1])


def test_a_turn_that_is_cut_off_goes_on() -> None:
    trace, policy = play(["x" * 500, "done"], turn_tokens=100)
    assert trace.stop == "finished"
    assert len(trace.nodes[1].tokens) == 100
    assert "cut off" in TALK.text(policy.prompts[1])


def test_thinking_can_be_bounded() -> None:
    trace, policy = play(["<think>" + "hm " * 500, "so\n" + ECHO.format("x"), "done"], thinking_tokens=50)
    assert [node.kind for node in trace.nodes[:4]] == ["opening", "turn", "note", "turn"]
    assert len(trace.nodes[1].tokens) == 50
    assert not trace.nodes[2].sampled
    assert policy.prompts[1] == trace.context(2)
    assert trace.counts["thinking_ended"] == 1
    assert trace.counts["calls_echo"] == 1


def three_restarts() -> tuple[Trace, ScriptedPolicy]:
    """Return an episode whose context began anew three times."""
    lines = [ECHO.format("x" * 300), "<think>what was it</think>I said x."] * 3 + ["done"]
    summary = SummarySettings(trigger=500, tokens=200)
    return play(lines, Echo(plan="[x] say x\n[ ] stop"), summary=summary)


def test_a_summary_begins_the_context_anew() -> None:
    trace, policy = three_restarts()
    assert trace.stop == "finished"
    assert trace.counts["restarts"] == 3
    kinds = ["opening"] + ["turn", "summary_request", "summary", "restart"] * 3 + ["turn"]
    assert [node.kind for node in trace.nodes] == kinds
    assert all(node.parent == 0 for node in trace.nodes if node.kind == "restart")
    opening, last = trace.nodes[0].tokens, TALK.text(policy.prompts[-1])
    assert policy.prompts[-1][: len(opening)] == opening
    assert "I said x." in last
    assert "what was it" not in last
    assert "[ ] stop" in last
    assert "number 3" in last
    assert "xxx" not in last
    assert policy.prompts[1] == trace.context(2)  # the request extends the context: its keys and values are there


def test_every_sampled_token_of_a_chain_is_trained_once() -> None:
    trace, _ = three_restarts()
    found = samples(trace)
    assert len(found) == 4
    trained = [t for sample in found for t, use in zip(sample.tokens, sample.trained, strict=True) if use]
    assert trained == [t for node in trace.nodes if node.sampled for t in node.tokens]


def test_truncation_keeps_whole_turns_and_the_opening() -> None:
    lines = [ECHO.format(letter * 40) for letter in "abcdef"] + ["done"]
    trace, policy = play(lines, summary=SummarySettings(kind="truncate", trigger=600, keep=0.4))
    assert trace.stop == "finished"
    assert trace.counts["restarts"] >= 1
    assert all(len(prompt) < 900 for prompt in policy.prompts)
    after = next(p for p, prompt in enumerate(policy.prompts) if p and len(prompt) < len(policy.prompts[p - 1]))
    text = TALK.text(policy.prompts[after])
    assert text.startswith("system")
    assert "do it" in text
    assert lines[after - 1] in text
    assert lines[0] not in text


def test_what_is_kept_is_the_most_that_fits() -> None:
    nodes = [Node(None, "opening", [0] * 9, "")]
    for size in (5, 6, 7):
        nodes += [Node(len(nodes) - 1, "turn", [0] * size, ""), Node(len(nodes), "answers", [0] * size, "")]
    path = list(range(len(nodes)))
    assert [kept_from(nodes, path, budget) for budget in (100, 36, 35, 26, 25, 14, 1)] == [1, 1, 3, 3, 5, 5, 5]


def test_too_many_restarts_end_it() -> None:
    trace, _ = play([ECHO.format("x" * 300), "sum"] * 9, summary=SummarySettings(trigger=500, tokens=100, most=2))
    assert trace.stop == "summaries"
    assert trace.counts["restarts"] == 2


def test_a_drawn_trigger_stays_in_its_range_and_depends_on_the_seed() -> None:
    own = SummarySettings(trigger=100, trigger_to=200)
    drawn = {seed: Harness(ScriptedPolicy([], TALK), TALK, Echo(), HarnessSettings(summary=own), Trace("t", ""), seed=seed).trigger for seed in range(40)}  # fmt: skip
    assert all(100 <= each <= 200 for each in drawn.values())
    assert len(set(drawn.values())) > 20


class Busybody:
    """A policy that is busy first, and then never comes to an end."""

    info = ScriptedPolicy([], TALK).info

    def __init__(self) -> None:
        self.asked = 0

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str | None = None, on_tokens: Any = None
    ) -> Completion:
        """Write three tokens, then nothing for ever."""
        self.asked += 1
        if self.asked == 1:
            raise Busy(0.0)
        on_tokens([Token(token, -1.0, -1.0, 3) for token in b"abc"])
        await asyncio.Event().wait()
        raise AssertionError


def test_what_was_written_when_time_ran_out_is_kept() -> None:
    trace, _ = play([], policy=Busybody(), seconds=0.05)
    assert trace.stop == "seconds"
    assert (trace.nodes[1].text, trace.nodes[1].versions, trace.nodes[1].logprobs) == ("abc", [3] * 3, [-1.0] * 3)
    assert trace.counts["waits"] == 1
    assert trace.counts["turns_cut_by_time"] == 1


def test_trouble_with_the_sandbox_is_not_an_episode() -> None:
    with pytest.raises(RuntimeError, match="gone"):
        play([ECHO.format("x")], Echo(error=RuntimeError("gone")))
