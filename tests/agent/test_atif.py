"""ATIF: what is written satisfies the rules of harbor 0.25.0 (transcribed below), and comes back token for token."""

from __future__ import annotations

import copy
import json
from functools import reduce
from types import GenericAlias
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from pydantic import ConfigDict, create_model

from etude.agent.atif import from_atif, to_atif
from etude.agent.trace import Trace, samples
from etude.errors import UserError
from tests.agent.traces import episode, traces
from tests.lineage.refusals import one_line


def rules(called: str, /, **fields: Any) -> Any:
    return create_model(called, __config__=ConfigDict(extra="forbid"), **fields)


def many(kind: Any, default: Any = ...) -> Any:
    return GenericAlias(list, (kind,)) if default is ... else GenericAlias(list, (kind,)) | None, default


ANY, IDS, TEXT, COUNT = (dict[str, Any] | None, None), (list[int], ...), (str, ...), (int, ...)
Result = rules("Result", source_call_id=(str | None, None), content=TEXT, extra=ANY)
Metrics = rules("Metrics", prompt_tokens=COUNT, completion_tokens=COUNT, cached_tokens=(int, 0), prompt_token_ids=IDS, completion_token_ids=IDS, logprobs=(list[float], ...))  # fmt: skip
ToolCall = rules("ToolCall", tool_call_id=TEXT, function_name=TEXT, arguments=(dict[str, Any], ...), extra=ANY)
Observation = rules("Observation", results=many(Result))
Step = rules(
    "Step", step_id=COUNT, source=(Literal["system", "user", "agent"], ...), message=TEXT, reasoning_content=(str | None, None), extra=ANY,
    tool_calls=many(ToolCall, None), observation=(Observation | None, None), metrics=(Metrics | None, None),
    is_copied_context=(bool | None, None), llm_call_count=(Literal[1] | None, None),
)  # fmt: skip
Agent = rules("Agent", name=TEXT, version=TEXT, model_name=(str | None, None), extra=ANY)
Totals = rules("Totals", total_prompt_tokens=COUNT, total_completion_tokens=COUNT, total_cached_tokens=COUNT, total_steps=COUNT, extra=ANY)  # fmt: skip
Trajectory = rules(
    "Trajectory", schema_version=(Literal["ATIF-v1.8"], ...), session_id=TEXT, trajectory_id=TEXT, agent=(Agent, ...),
    steps=many(Step), notes=TEXT, final_metrics=(Totals, ...), extra=ANY,
)  # fmt: skip


def validated(text: str) -> Any:
    """Return a trajectory that keeps harbor's rules, those between fields included."""
    read = Trajectory.model_validate_json(text)
    assert [step.step_id for step in read.steps] == [*range(1, len(read.steps) + 1)] != []
    for step in read.steps:
        assert step.source == "agent" or (step.reasoning_content, step.tool_calls, step.metrics) == (None, None, None)
        ids = [call.tool_call_id for call in step.tool_calls or []]
        named = [result.source_call_id for result in (step.observation.results if step.observation else [])]
        assert {each for each in named if each is not None} <= set(ids)
        assert len(set(ids)) == len(ids)
    return read


@settings(max_examples=200)
@given(traces())
def test_a_trace_comes_back_and_the_rules_are_kept(trace: Trace) -> None:
    before = copy.deepcopy(trace)
    text = json.dumps(to_atif(trace), allow_nan=False)
    assert trace == before
    validated(text)
    back = from_atif(json.loads(text), "x")
    assert back == trace
    assert samples(back) == samples(trace)


def test_three_restarts_are_readable_by_others() -> None:
    trace = episode()
    read = validated(json.dumps(to_atif(trace)))
    assert [step.message for step in read.steps if step.is_copied_context] == [
        f"summary {n}\n\nGo on." for n in (1, 2, 3)
    ]
    first = read.steps[1]
    assert (first.message, first.reasoning_content, first.metrics.cached_tokens) == ("I try.", "hm, hm", 7)
    assert [call.function_name for call in first.tool_calls] == ["edit", "shell"]
    assert [result.source_call_id for result in first.observation.results] == [
        call.tool_call_id for call in first.tool_calls
    ]
    assert first.observation.results[1].content == "\n".join(f"line {number}" for number in range(48))
    sampled = [place for place, node in enumerate(trace.nodes) if node.sampled]
    for place, step in zip(sampled, [step for step in read.steps if step.source == "agent"], strict=True):
        assert step.metrics.prompt_token_ids + step.metrics.completion_token_ids == trace.context(place)
        assert step.metrics.logprobs == trace.nodes[place].logprobs
    assert read.final_metrics.total_completion_tokens == sum(sum(sample.trained) for sample in samples(trace))


def test_what_other_programs_wrote_can_be_looked_at_but_is_not_trained() -> None:
    call = {"tool_call_id": "a", "function_name": "bash", "arguments": {"command": "ls"}}
    parts = [{"type": "text", "text": "see"}, {"type": "image", "source": {"media_type": "image/png", "path": "x.png"}}]
    document = {
        "schema_version": "ATIF-v1.6", "agent": {"name": "other", "version": "1", "model_name": "m"}, "subagent_trajectories": [{}, {}],
        "steps": [
            {"step_id": 1, "source": "user", "message": "Mend it.", "metrics": None},
            {"step_id": 2, "source": "agent", "message": parts, "reasoning_content": "why", "tool_calls": [call],
             "observation": {"results": [{"source_call_id": "a", "content": "a.py"}, {"content": None}]},
             "metrics": {"completion_token_ids": [4, 5], "logprobs": [-1.0, -2.0]}},
            {"step_id": 3, "source": "user", "message": "so far", "is_copied_context": True},
        ],
    }  # fmt: skip
    trace = from_atif(document, "x")
    assert [(node.kind, node.text, node.parent) for node in trace.nodes] == [
        ("opening", "Mend it.", None), ("turn", "see\n[image]", 0), ("answers", "a.py\n", 1), ("restart", "so far", 2)
    ]  # fmt: skip
    assert trace.nodes[1].details == {
        "thinking": "why",
        "said": "see\n[image]",
        "calls": [{"name": "bash", "arguments": {"command": "ls"}}],
        "logprobs": [-1.0, -2.0],
    }
    assert trace.nodes[1].tokens == [4, 5]
    assert not any(sum(sample.trained) for sample in samples(trace))
    assert trace.made_by["left_out"] == "2 trajectories of subagents"


@pytest.mark.parametrize("document", [None, [], {}, {"schema_version": "ATIF-v2.0", "agent": {}, "steps": []}, {"schema_version": "ATIF-v1.8", "agent": {}, "steps": [{"source": "robot", "message": ""}]}])  # fmt: skip
def test_what_is_no_trajectory_is_refused(document: Any) -> None:
    with pytest.raises(UserError, match=one_line("f.json is not an ATIF trajectory")):
        from_atif(document, "f.json")


def test_our_own_that_was_changed_is_refused() -> None:
    for path in (["steps", 1], ["steps", 2, "extra"], ["steps", 1, "metrics", "logprobs", 0], ["extra", "etude", "id"]):
        document: Any = json.loads(json.dumps(to_atif(episode())))
        *way, last = path
        del reduce(lambda value, key: value[key], way, document)[last]
        with pytest.raises(UserError, match=one_line("f.json")):
            from_atif(document, "f.json")
    with pytest.raises(UserError, match=one_line("'a' has no nodes")):
        to_atif(Trace("a", ""))
