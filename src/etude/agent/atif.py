"""Traces to and from ATIF 1.8, the trajectory format of Harbor: its own models (harbor 0.25.0) accept what is written here.

One episode is one trajectory: the steps are our nodes in their order, and answers that follow their turn are that step's observation.
ATIF has no branches, so each step says in `extra.etude` which node it is and which one it continues; a context that begins anew is
`is_copied_context`, so that nobody trains on what was carried over. The trace itself is in `extra.etude` of the trajectory, and comes
back from there. A trajectory that other programs wrote becomes a line of nodes to look at; nothing of it is trained on.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

import etude
from etude.agent.trace import Node, Trace, from_json, to_json
from etude.errors import UserError

VERSION = "ATIF-v1.8"
_SOURCES = {"opening": "user", "turn": "agent", "summary": "agent", "answers": "system", "note": "system"}
_NOTES = "Steps are the nodes of a tree: extra.etude.parent of a step is the node whose context it continues."


def to_atif(trace: Trace) -> dict[str, Any]:
    """Return a trajectory. Prompts are there as token ids, all of the context each time, as ATIF wants them."""
    line = to_json(trace)
    if not trace.nodes:
        raise UserError(f"trace {trace.id!r} has no nodes; ATIF wants one step at least")
    steps = _steps(from_json(line, trace.id))
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    names = ("prompt_tokens", "completion_tokens", "cached_tokens")
    totals = {f"total_{name}": sum(each[name] for each in metrics) for name in names}
    agent = {"name": "etude", "version": etude.__version__, "extra": {"made_by": trace.made_by}}
    if isinstance(model := trace.made_by.get("policy"), str):
        agent["model_name"] = model
    return {
        "schema_version": VERSION, "session_id": trace.id, "trajectory_id": trace.id, "agent": agent, "steps": steps, "notes": _NOTES,
        "final_metrics": {**totals, "total_steps": len(steps), "extra": {"rewards": trace.rewards}},
        "extra": {"etude": json.loads(line)},
    }  # fmt: skip


def _steps(trace: Trace) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    for place, node in enumerate(trace.nodes):
        if node.kind == "answers" and node.parent == place - 1 and trace.nodes[place - 1].kind == "turn":
            steps[-1]["observation"] = {"results": _results(node, steps[-1].get("tool_calls", []))}
            continue
        step = {"step_id": len(steps) + 1, "source": _SOURCES.get(node.kind, "user"), "message": node.text}
        if step["source"] == "agent":
            step |= _agent_fields(trace, place)
        if node.kind == "restart":
            step["is_copied_context"] = True
        steps.append({**step, "extra": {"etude": {"node": place, "kind": node.kind, "parent": node.parent}}})
    return steps


def _agent_fields(trace: Trace, place: int) -> dict[str, Any]:
    node = trace.nodes[place]
    prompt = trace.context(node.parent) if node.parent is not None else []
    fields: dict[str, Any] = {"message": node.details.get("said", node.text), "llm_call_count": 1}
    fields["metrics"] = {
        "prompt_tokens": len(prompt), "completion_tokens": len(node.tokens), "cached_tokens": node.details.get("cached", 0),
        "prompt_token_ids": prompt, "completion_token_ids": node.tokens, "logprobs": node.logprobs,
    }  # fmt: skip
    if "thinking" in node.details:
        fields["reasoning_content"] = node.details["thinking"]
    if "calls" in node.details:
        calls = [(f"call_{place}_{index}", call) for index, call in enumerate(node.details["calls"])]
        fields["tool_calls"] = [{"tool_call_id": key, "function_name": call["name"], "arguments": call["arguments"]}
                                for key, call in calls]  # fmt: skip
    return fields


def _results(node: Node, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers to a turn, those to calls with the call's id."""
    answers = node.details.get("answers", [])
    ids = [{"source_call_id": call["tool_call_id"]} for call in calls] + [{}] * len(answers)
    results = [{"content": answer["text"], **each} for answer, each in zip(answers, ids, strict=False)]
    return results or [{"content": node.text}]


class _Call(BaseModel):
    function_name: str
    arguments: dict[str, Any]


class _Metrics(BaseModel):
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None


class _Observation(BaseModel):
    results: list[dict[str, Any]]


class _Step(BaseModel):
    source: Literal["system", "user", "agent"]
    message: str | list[dict[str, Any]]
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    observation: _Observation | None = None
    metrics: _Metrics | None = None
    is_copied_context: bool | None = None


class _Trajectory(BaseModel):
    schema_version: str = Field(pattern=r"^ATIF-v1\.[0-8]$")
    session_id: str | None = None
    agent: dict[str, Any]
    steps: list[_Step] = Field(min_length=1)
    subagent_trajectories: list[Any] | None = None
    extra: dict[str, Any] | None = None


def from_atif(document: Any, origin: str) -> Trace:
    """Return the trace of a trajectory, ours or another program's."""
    try:
        trajectory = _Trajectory.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{origin} is not an ATIF trajectory: {where}: {first['msg'][:200]}") from None
    ours = (trajectory.extra or {}).get("etude")
    trace = from_json(json.dumps(ours or _foreign(trajectory)).encode(), origin)
    if ours and _steps(trace) != document["steps"]:
        raise UserError(f"{origin} was written by another version of etude, or changed since; export it again")
    return trace


def _foreign(trajectory: _Trajectory) -> dict[str, Any]:
    nodes: list[dict[str, Any]] = []

    def add(kind: str, text: str, tokens: list[int], details: dict[str, Any]) -> None:
        parent = len(nodes) - 1 if nodes else None
        nodes.append({"parent": parent, "kind": kind, "tokens": tokens, "text": text, "details": details})

    for step in trajectory.steps:
        metrics, text = step.metrics or _Metrics(), _text(step.message)
        details: dict[str, Any] = {"logprobs": metrics.logprobs} if metrics.logprobs else {}
        kind = "restart" if step.is_copied_context else "note" if nodes else "opening"
        if step.source == "agent":
            kind, details = "turn", {**details, "said": text}
            if step.reasoning_content is not None:
                details["thinking"] = step.reasoning_content
            if step.tool_calls is not None:
                calls = [(call.function_name, call.arguments) for call in step.tool_calls]
                details["calls"] = [{"name": name, "arguments": arguments} for name, arguments in calls]
        add(kind, text, metrics.completion_token_ids or [], details)
        if step.observation:
            answers = [{"text": _text(result.get("content"))} for result in step.observation.results]
            add("answers", "\n".join(answer["text"] for answer in answers), [], {"answers": answers})
    made_by: dict[str, Any] = {"policy": trajectory.agent.get("model_name"), "agent": trajectory.agent}
    if trajectory.subagent_trajectories:
        made_by["left_out"] = f"{len(trajectory.subagent_trajectories)} trajectories of subagents"
    return {"id": trajectory.session_id or "imported", "task": "", "nodes": nodes, "made_by": made_by}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or f"[{part.get('type')}]") for part in content)
    return "" if content is None else str(content)
