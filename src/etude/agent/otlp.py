"""Traces as OpenTelemetry spans, by its conventions for generative AI, for whatever shows those: one request of OTLP/JSON an episode.

An episode is a trace: a span `invoke_agent`, and in it `chat` for each sampled turn and `execute_tool` for each call. A context
that is begun anew is a span in between, linked to the summary it begins with; a turn is linked to the one it goes on from. The
parts of the reward are events `gen_ai.evaluation.result`. Ids are digests of the trace's own, so an episode that is sent twice is
the same one. A trace knows seconds since its episode began and no wall clock: `etude.time` says what stands in for it. What was
said stays out unless it is asked for, as the conventions have it.
"""

from __future__ import annotations

import hashlib
import json
import urllib.request
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

import etude
from etude.errors import UserError, one_line

if TYPE_CHECKING:
    from etude.agent.trace import Node, Trace

Json = dict[str, Any]
INTERNAL, CLIENT, FAILED = 1, 3, 2  # kinds of spans, and the status of one
SAMPLED = {"turn", "summary"}
STEP = 0.001  # seconds a node where a trace holds no times
LATEST = 2.0**62  # nanoseconds
TIMEOUT = 30.0  # seconds that a collector has for an episode
LONGEST = 1 << 16  # bytes of its answer


def to_otlp(trace: Trace, ended: float, *, content: bool = False) -> str:
    """Return an ExportTraceServiceRequest. `ended`: seconds since 1970 that are taken for the end of the episode."""
    about = {"name": "etude", "version": etude.__version__}
    resource = {"attributes": _attributes(about, "service.")}
    try:
        scope = {"scope": about, "spans": _Spans(trace, ended, content=content).made}
        return json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}, allow_nan=False)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"trace {trace.id!r} has details that no harness of ours wrote: {one_line(error)}") from None


def _attributes(values: Json, prefix: str = "") -> list[Json]:
    return [{"key": prefix + key, "value": _value(value)} for key, value in values.items() if value is not None]


def _value(value: Any) -> Json:
    """Return a value as OTLP/JSON has it: whole numbers are text."""
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(each) for each in value]}}
    if isinstance(value, (int, float)):
        return {"doubleValue": value} if isinstance(value, float) else {"intValue": str(int(value))}
    return {"stringValue": str(value)}


class _Spans:
    """The spans of one episode. A context is called by the node it begins with, and the first one is the episode itself."""

    def __init__(self, trace: Trace, ended: float, *, content: bool) -> None:
        self.trace, self.content, nodes = trace, content, trace.nodes
        self.timed = any(node.began or node.seconds for node in nodes)
        self.times = [(place * STEP, (place + 1) * STEP) for place in range(len(nodes))]
        if self.timed:
            self.times = [(node.began, node.began + max(node.seconds, 0.0)) for node in nodes]
        self.origin = ended - max((end for _, end in self.times), default=0.0)
        self.contexts: list[int] = []
        self.lengths: list[int] = []  # tokens from the root to each node
        self.last: list[int | None] = []  # turn or summary on the way there, the node itself included
        self.child: dict[int | None, int] = {}  # the first one
        for place, node in enumerate(nodes):
            up, anew = node.parent, node.kind == "restart" or node.parent in self.child
            self.child.setdefault(up, place)
            self.contexts.append(place if anew or up is None else self.contexts[up])
            self.lengths.append(len(node.tokens) + (0 if up is None else self.lengths[up]))
            self.last.append(place if node.kind in SAMPLED else None if up is None else self.last[up])
        self.made: list[Json] = []
        self._episode()
        for place, node in enumerate(nodes):
            if place and self.contexts[place] == place:
                before = next((at for at in range(place - 1, -1, -1) if nodes[at].kind in SAMPLED), None)
                self._add(("context", place), f"context from node {place}", self._lasting(place), {}, 0, before)
            if node.kind in SAMPLED:
                self._turn(place, node)

    def _id(self, *what: object) -> str:
        return hashlib.sha256(json.dumps([self.trace.id, self.trace.task, *what]).encode()).hexdigest()

    def _nanoseconds(self, at: float) -> int:
        return int(min(max((self.origin + at) * 1e9, 0.0), LATEST))

    def _lasting(self, context: int) -> tuple[float, float]:
        """Return when a context began and ended; the first one is the whole episode."""
        times = [each for each, own in zip(self.times, self.contexts, strict=True) if own == context or not context]
        return min((began for began, _ in times), default=0.0), max((end for _, end in times), default=0.0)

    def _add(
        self, what: tuple[object, ...], name: str, times: tuple[float, float], attributes: Json,
        context: int | None, link: int | None = None, **more: Any,
    ) -> None:  # fmt: skip
        """Add a span inside of a context, linked to a turn."""
        trace, (began, ended) = self._id()[:32], map(self._nanoseconds, times)
        inside = {} if context is None else {"parentSpanId": self._id("context", context)[:16]}
        links = {} if link is None else {"links": [{"traceId": trace, "spanId": self._id("turn", link)[:16]}]}
        self.made.append({
            "traceId": trace, "spanId": self._id(*what)[:16], "name": name, "kind": INTERNAL, "startTimeUnixNano": str(began),
            "endTimeUnixNano": str(max(began, ended)), "attributes": _attributes(attributes), **inside, **links, **more,
        })  # fmt: skip

    def _common(self, operation: str) -> Json:
        named = {"operation.name": operation, "provider.name": "etude", "conversation.id": self.trace.id}
        return {f"gen_ai.{key}": value for key, value in named.items()}

    def _said(self, value: Any) -> str | None:
        return json.dumps(value, ensure_ascii=False) if self.content else None

    def _episode(self) -> None:
        trace, times = self.trace, self._lasting(0)
        clock = "seconds since the episode began" if self.timed else f"no times are known: {STEP * 1000:.0f} ms a node"
        asked = [{"role": "user", "parts": [{"type": "text", "content": trace.task}]}]
        attributes = {
            **self._common("invoke_agent"), "gen_ai.agent.name": "etude", "gen_ai.agent.version": etude.__version__,
            "gen_ai.input.messages": self._said(asked), "etude.stop": trace.stop,
            "etude.time": f"{clock}; the end is when the file was written",
        }  # fmt: skip
        event = {"timeUnixNano": str(self._nanoseconds(times[1])), "name": "gen_ai.evaluation.result"}
        scores = ({"name": name, "score.value": float(value)} for name, value in trace.rewards.items())
        events = [{**event, "attributes": _attributes(each, "gen_ai.evaluation.")} for each in scores]
        self._add(("context", 0), "invoke_agent etude", times, attributes, None, events=events)

    def _turn(self, place: int, node: Node) -> None:
        made, details, nodes = self.trace.made_by, node.details, self.trace.nodes
        words = {"reasoning": details.get("thinking", ""), "text": details.get("said", "")}
        parts = [{"type": kind, "content": text} for kind, text in words.items()]
        attributes = {
            **self._common("chat"), "gen_ai.request.model": made.get("policy"),
            "gen_ai.request.temperature": made.get("settings", {}).get("temperature"), "etude.kind": node.kind,
            "gen_ai.output.messages": self._said([{"role": "assistant", "parts": parts}]),
        }  # fmt: skip
        if node.sampled:
            attributes |= {
                "gen_ai.usage.input_tokens": self.lengths[place] - len(node.tokens), "gen_ai.usage.output_tokens": len(node.tokens),
                "gen_ai.usage.cache_read.input_tokens": details.get("cached"),
                "gen_ai.response.finish_reasons": ["stop" if details.get("ended") else "length"],
            }  # fmt: skip
        before = None if node.parent is None else self.last[node.parent]
        name = f"chat {made.get('policy') or ''}".strip()
        self._add(("turn", place), name, self.times[place], attributes, self.contexts[place], before, kind=CLIENT)
        answering = self.child.get(place)
        began = self.times[place][1] if answering is None else self.times[answering][0]
        answers = details.get("unread", []) if answering is None else nodes[answering].details.get("answers", [])
        for number, call in enumerate(details.get("calls", [])):
            began += self._call(place, number, call, answers[number] if number < len(answers) else {}, began)

    def _call(self, place: int, number: int, call: Json, answer: Json, began: float) -> float:
        """Add a call, and return the seconds it took: they run one after the other."""
        took = answer.get("seconds", 0.0)
        attributes = {
            **self._common("execute_tool"), "gen_ai.tool.name": call["name"], "gen_ai.tool.call.id": f"call_{place}_{number}",
            "gen_ai.tool.type": "function", "error.type": "tool_error" if answer.get("failed") else None,
            "gen_ai.tool.call.arguments": self._said(call["arguments"]), "gen_ai.tool.call.result": self._said(answer.get("text")),
        }  # fmt: skip
        status, times = {"status": {"code": FAILED}} if answer.get("failed") else {}, (began, began + took)
        what, name = ("call", place, number), f"execute_tool {call['name']}"
        self._add(what, name, times, attributes, self.contexts[place], place, **status)
        return float(took)


def post(request: str, collector: str) -> None:
    """Send a request to a collector; whatever it does not take is an error."""
    url = f"{collector.rstrip('/').removesuffix('/v1/traces')}/v1/traces"
    sent = urllib.request.Request(url, request.encode(), {"Content-Type": "application/json"})  # noqa: S310 - the command has seen that it is http
    try:
        with urllib.request.urlopen(sent, timeout=TIMEOUT) as answer:  # noqa: S310
            partial = json.loads(answer.read(LONGEST) or b"{}").get("partialSuccess") or {}
        rejected = int(partial.get("rejectedSpans") or 0)
    except (OSError, ValueError, AttributeError, TypeError, HTTPException) as error:
        raise UserError(f"{url} took no traces: {one_line(error)}; is it a collector of OTLP over HTTP?") from None
    if rejected:
        why = str(partial.get("errorMessage") or "no reason given")[:200]
        raise UserError(f"{url} rejected {rejected} spans: {why}")
