"""Traces to and from ATIF 1.8, the trajectory format of Harbor: its own models (harbor 0.25.0) accept what is written here.

One episode is one trajectory: the steps are our nodes in their order, and answers that follow their turn are that step's observation.
ATIF has no branches, so each step says in `extra.etude` which node it is and which one it continues; a context that begins anew is
`is_copied_context`, so that nobody trains on what was carried over. What ATIF has no field for is in `extra.etude` too: a trace comes
back as it was. A trajectory that other programs wrote becomes a line of nodes to look at; without our fields nothing of it is trained.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, ValidationError

import etude
from etude.agent.trace import Node, Trace, from_json, told
from etude.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSION = "ATIF-v1.8"
_SOURCES = {"opening": "user", "turn": "agent", "summary": "agent", "answers": "system", "note": "system"}
_COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens")
_NOTES = "Steps are the nodes of a tree: extra.etude.parent of a step is the node whose context it continues."


def to_atif(trace: Trace) -> dict[str, Any]:
    """Return a trajectory. Prompts are there as token ids, all of the context each time, as ATIF wants them."""
    trace = told(trace)
    if not trace.nodes:
        raise UserError(f"trace {trace.id!r} has no nodes; ATIF wants one step at least")
    steps = list(_steps(trace))
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    totals = {f"total_{name}": sum(each.get(name, 0) for each in metrics) for name in _COUNTS}
    whole = {
        "task": trace.task,
        "stop": trace.stop,
        "counts": trace.counts,
        "rewards": trace.rewards,
        "diff": trace.diff,
    }
    agent = {"name": "etude", "version": etude.__version__, "extra": {"made_by": trace.made_by}}
    if isinstance(model := trace.made_by.get("policy"), str):
        agent["model_name"] = model
    return {
        "schema_version": VERSION, "session_id": trace.id, "trajectory_id": trace.id, "agent": agent, "steps": steps, "notes": _NOTES,
        "final_metrics": {**totals, "total_steps": len(steps), "extra": {"rewards": trace.rewards}}, "extra": {"etude": whole},
    }  # fmt: skip


def _steps(trace: Trace) -> Iterator[dict[str, Any]]:
    number = 0
    for place, node in enumerate(trace.nodes):
        if _follows_its_turn(trace, place):
            continue  # it went out with its turn
        number += 1
        step: dict[str, Any] = {"step_id": number, "source": _SOURCES.get(node.kind, "user"), "message": node.text}
        extra: dict[str, Any] = {"node": place, **_rest(node)}
        if step["source"] == "agent":
            step |= _agent_fields(trace, place, extra)
        if node.kind == "restart":
            step["is_copied_context"] = True
        if place + 1 < len(trace.nodes) and _follows_its_turn(trace, place + 1):
            step["observation"], extra["answers"] = _observation(
                trace.nodes[place + 1], place, len(step.get("tool_calls", []))
            )
        yield {**step, "extra": {"etude": extra}}


def _follows_its_turn(trace: Trace, place: int) -> bool:
    node = trace.nodes[place]
    return node.kind == "answers" and node.parent == place - 1 and trace.nodes[place - 1].kind == "turn"


def _rest(node: Node) -> dict[str, Any]:
    """Return what of a node no field of ATIF holds."""
    held = {"text", "logprobs", *(["tokens"] if _SOURCES.get(node.kind) == "agent" else [])}
    return {key: value for key, value in vars(node).items() if key not in held}


def _agent_fields(trace: Trace, place: int, extra: dict[str, Any]) -> dict[str, Any]:
    node = trace.nodes[place]
    details = dict(node.details)
    prompt = trace.context(node.parent) if node.parent is not None else []
    metrics: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": len(node.tokens)}
    metrics |= {"prompt_token_ids": prompt, "completion_token_ids": node.tokens, "logprobs": node.logprobs}
    if isinstance(details.get("cached"), int):
        metrics["cached_tokens"] = details.pop("cached")
    fields: dict[str, Any] = {"metrics": metrics, "llm_call_count": 1}
    if isinstance(details.get("thinking"), str):
        fields["reasoning_content"] = details.pop("thinking")
    if "calls" in details:
        fields["tool_calls"] = [
            {"tool_call_id": _call_id(place, index), "function_name": call["name"], "arguments": call["arguments"]}
            for index, call in enumerate(details.pop("calls"))
        ]
    if "said" in details:
        fields["message"], extra["text"] = details.pop("said"), node.text
    extra["details"] = details
    return fields


def _observation(node: Node, turn: int, calls: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the answers to a turn say, and the rest of their node."""
    answers, rest = node.details.get("answers", []), {"text": node.text, **_rest(node)}
    if answers:
        bare = [{key: value for key, value in answer.items() if key != "text"} for answer in answers]
        rest["details"] = {**node.details, "answers": bare}
    ids = [{"source_call_id": _call_id(turn, index)} if index < calls else {} for index in range(len(answers))]
    results = [{**found, "content": answer["text"]} for found, answer in zip(ids, answers, strict=True)]
    return {"results": results or [{"content": node.text}]}, rest


def _call_id(place: int, index: int) -> str:
    return f"call_{place}_{index}"


class _Call(BaseModel):
    function_name: str
    arguments: dict[str, Any]


class _Metrics(BaseModel):
    cached_tokens: int | None = None
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
    extra: dict[str, Any] | None = None


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
        read = _Trajectory.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{origin} is not an ATIF trajectory: {where}: {first['msg'][:200]}") from None
    try:
        made = _ours(read) if "etude" in (read.extra or {}) else _foreign(read)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{origin} was written by etude, but changed since ({error!r}); export it again") from None
    return from_json(json.dumps(made).encode(), origin)


def _ours(read: _Trajectory) -> dict[str, Any]:
    assert read.extra
    nodes: list[dict[str, Any]] = []
    for step in read.steps:
        extra = dict((step.extra or {})["etude"])
        answers, place = extra.pop("answers", None), extra.pop("node")
        if place != len(nodes):
            raise KeyError(f"node {len(nodes)}")
        node = {"text": step.message, **extra}
        if step.source == "agent":
            metrics = step.metrics or _Metrics()
            node |= {"tokens": metrics.completion_token_ids, "logprobs": metrics.logprobs}
            node["details"] = {**node["details"], **_told(step, said="text" in extra)}
        nodes.append(node)
        if answers is not None:
            results = step.observation.results if step.observation else []
            pairs = zip(answers["details"].get("answers", []), results, strict=False)
            texts = [{**answer, "text": result["content"]} for answer, result in pairs]
            nodes.append({**answers, "details": {**answers["details"], **({"answers": texts} if texts else {})}})
    return {"id": read.session_id, **read.extra["etude"], "made_by": read.agent["extra"]["made_by"], "nodes": nodes}


def _told(step: _Step, *, said: bool) -> dict[str, Any]:
    """Return the details of a turn that ATIF has fields for."""
    found: dict[str, Any] = {"thinking": step.reasoning_content, "said": step.message if said else None}
    found["cached"] = step.metrics.cached_tokens if step.metrics else None
    if step.tool_calls is not None:
        found["calls"] = [{"name": call.function_name, "arguments": call.arguments} for call in step.tool_calls]
    return {key: value for key, value in found.items() if value is not None}


def _foreign(read: _Trajectory) -> dict[str, Any]:
    nodes: list[dict[str, Any]] = []

    def add(kind: str, text: str, tokens: list[int], details: dict[str, Any]) -> None:
        parent = len(nodes) - 1 if nodes else None
        nodes.append({"parent": parent, "kind": kind, "tokens": tokens, "text": text, "details": details})

    for step in read.steps:
        metrics, text = step.metrics or _Metrics(), _text(step.message)
        kind = (
            "turn"
            if step.source == "agent"
            else "restart"
            if step.is_copied_context
            else "note"
            if nodes
            else "opening"
        )
        details = {**_told(step, said=False), "said": text} if kind == "turn" else {}
        if metrics.logprobs:
            details["logprobs"] = metrics.logprobs
        add(kind, text, metrics.completion_token_ids or [], details)
        if step.observation:
            answers = [{"text": _text(result.get("content"))} for result in step.observation.results]
            add("answers", "\n".join(answer["text"] for answer in answers), [], {"answers": answers})
    made_by: dict[str, Any] = {"policy": read.agent.get("model_name"), "agent": read.agent}
    if read.subagent_trajectories:
        made_by["left_out"] = f"{len(read.subagent_trajectories)} trajectories of subagents"
    return {"id": read.session_id or "imported", "task": "", "nodes": nodes, "made_by": made_by}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or f"[{part.get('type')}]") for part in content)
    return "" if content is None else str(content)
