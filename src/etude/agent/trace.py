"""The trace of an episode: a tree of what the policy saw and sampled, token for token.

A node holds only the tokens it adds to its parent's context, and all of them were either sampled by the policy or given to it. Most
episodes are one line of nodes. Where the context is restarted from a summary the tree branches: the summary ends one branch, and the
next begins at the task with a node that carries the summary's text. So a training sample is a path from the root to a leaf, and a
node that several paths share is trained once, in the first of them.

On disk a trace is one line of JSON; what is as it is by default is left out.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from etude.errors import UserError
from etude.files import whole_file
from etude.inference.policy import from_npy, to_npy
from etude.jsonl import append_line, read_lines

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

NodeKind = Literal["opening", "turn", "answers", "summary_request", "summary", "restart", "note"]
_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass
class Node:
    """Tokens added to the parent's context.

    Details of turns: `calls` (name, arguments), `thinking`, `said`, `malformed`, `ended`, `cached`; of answers: `answers`, in the
    order of the calls (name, text, failed, seconds, details).
    """

    __pydantic_config__ = _STRICT

    parent: int | None  # its place in Trace.nodes
    kind: NodeKind
    tokens: list[int]
    text: str
    sampled: bool = False
    # Of sampled tokens, under the distribution they were drawn from.
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)  # at temperature 1, nothing cut off
    versions: list[int] = field(default_factory=list)  # of the weights, a token
    began: float = 0.0  # seconds since the episode began
    seconds: float = 0.0
    routes: str = ""  # experts of its tokens, as `to_npy`; not yet of the last one sampled, which nobody has read
    details: dict[str, Any] = field(default_factory=dict)  # calls and answers as JSON, finish reason, cached tokens

    @property
    def trainable(self) -> bool:
        """Whether it was sampled by a policy that reports log-probs; endpoints that take text report none, or NaN."""
        return self.sampled and len(self.logprobs) == len(self.tokens) and not any(map(math.isnan, self.logprobs))


@dataclass(frozen=True)
class Sample:
    """One path, ready for a trainer: `trained` marks sampled tokens that no earlier path holds."""

    tokens: list[int]
    trained: list[bool]
    logprobs: list[float]  # under the distribution they were drawn from; 0 where not sampled
    versions: list[int]  # −1 where not sampled
    routes: list[tuple[int, str]] = field(default_factory=list)  # from which token on, experts


@dataclass
class Trace:
    """One episode."""

    __pydantic_config__ = _STRICT

    id: str
    task: str
    nodes: list[Node] = field(default_factory=list)
    stop: str = ""  # why it ended
    counts: dict[str, int] = field(default_factory=dict)  # tokens by kind, calls by tool, malformed calls, summaries, …
    rewards: dict[str, float] = field(default_factory=dict)  # named parts
    diff: str = ""  # what the episode changed, as a unified diff
    made_by: dict[str, Any] = field(default_factory=dict)  # policy, format, sandbox, harness version, settings, tools

    def path(self, leaf: int) -> list[int]:
        """Return the nodes from the root to a leaf."""
        places = [leaf]
        while (parent := self.nodes[places[-1]].parent) is not None:
            places.append(parent)
        return places[::-1]

    def context(self, leaf: int) -> list[int]:
        """Return all tokens from the root to a leaf: what the policy saw and wrote."""
        return [token for place in self.path(leaf) for token in self.nodes[place].tokens]


def first_unrouted(trace: Trace, leaf: int) -> int:
    """Return the first token up to a leaf whose experts are not known."""
    known = 0
    for node in (trace.nodes[place] for place in trace.path(leaf)):
        rows = len(from_npy(node.routes)) if node.routes else 0
        known += rows
        if rows < len(node.tokens):
            break
    return known


def note_routes(trace: Trace, leaf: int, first: int, experts: Any) -> None:
    """Note the experts of the tokens from the `first` on, [tokens, layers, experts a token], at the nodes up to a leaf."""
    import numpy as np

    end, kind = 0, np.int8 if int(experts.max()) < 128 else np.int16
    for node in (trace.nodes[place] for place in trace.path(leaf)):
        begin, end = max(end, first), end + len(node.tokens)
        if begin < end and (fresh := experts[begin - first : end - first]).shape[0]:
            before = [from_npy(node.routes)] if node.routes else []
            node.routes = to_npy(np.concatenate([*before, np.asarray(fresh).astype(kind)]))


def samples(trace: Trace) -> list[Sample]:
    """Return every path from a root to a leaf, in the order of the leaves; each sampled token is trained in one of them."""
    parents = {node.parent for node in trace.nodes}
    made, seen = [], set[int]()
    for leaf in range(len(trace.nodes)):
        if leaf not in parents:
            path = trace.path(leaf)
            made.append(_sample([trace.nodes[place] for place in path], [place not in seen for place in path]))
            seen.update(path)
    return made


def sampled_nodes(trace: Trace) -> list[int]:
    """Return the nodes whose tokens are trained, in the order in which `samples` comes to them."""
    parents = {node.parent for node in trace.nodes}
    paths = [trace.path(leaf) for leaf in range(len(trace.nodes)) if leaf not in parents]
    return [place for place in dict.fromkeys(itertools.chain(*paths)) if trace.nodes[place].trainable]


def _sample(nodes: list[Node], fresh: list[bool]) -> Sample:
    made = Sample([], [], [], [])
    for node, new in zip(nodes, fresh, strict=True):
        count, known = len(node.tokens), node.trainable
        made.routes.extend([(len(made.tokens), node.routes)] if node.routes else [])
        made.tokens.extend(node.tokens)
        made.trained.extend([known and new] * count)
        made.logprobs.extend(node.logprobs if known else [0.0] * count)
        made.versions.extend(node.versions if known else [-1] * count)
    return made


def check(trace: Trace) -> None:
    """Refuse a trace that no episode can have left."""
    if not all(map(math.isfinite, trace.rewards.values())):
        raise UserError(f"trace {trace.id!r} has a reward that is not finite: {trace.rewards}")
    for place, node in enumerate(trace.nodes):
        if fault := _fault(node, place):
            raise UserError(f"trace {trace.id!r}, node {place}: {fault}")


def _fault(node: Node, place: int) -> str:
    columns, wanted = (node.logprobs, node.raw_logprobs, node.versions), len(node.tokens) * node.sampled
    if node.parent is not None and not 0 <= node.parent < place:
        return f"its parent is {node.parent}, which does not come before it"
    if node.sampled and node.kind not in {"turn", "summary"}:
        return f"it is sampled, but its kind is {node.kind!r}"
    lengths = [len(each) for each in columns]
    if lengths[2] != wanted or not {*lengths[:2]} <= {0, wanted}:
        counts = " / ".join(map(str, lengths))
        return f"it has {counts} log-probs / raw ones / versions, but {wanted} sampled tokens"
    # Of the two, vLLM reports one.
    reported = [number for each in columns[:2] if not all(map(math.isnan, each)) for number in each]
    if not all(map(math.isfinite, [node.began, node.seconds, *reported])):
        return "a log-prob or a time of it is not finite"
    return "" if min(node.tokens, default=0) >= 0 else "it has a token below 0"


@cache
def _adapter() -> TypeAdapter[Trace]:
    return TypeAdapter(Trace)


def to_json(trace: Trace) -> bytes:
    """Return a trace as one line, newline included. Half characters, which UTF-8 cannot hold, become question marks.

    Log-probs that the policy did not report (NaN, which JSON does not know) are left out.
    """
    check(trace)
    nodes = [replace(n, logprobs=_reported(n.logprobs), raw_logprobs=_reported(n.raw_logprobs)) for n in trace.nodes]
    values = _adapter().dump_python(replace(trace, nodes=nodes), exclude_defaults=True)
    line = json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n"
    return line.encode("utf-8", "replace")


def _reported(numbers: list[float]) -> list[float]:
    return [] if any(map(math.isnan, numbers)) else numbers


def from_json(line: bytes, origin: str) -> Trace:
    """Return the trace of a line."""
    try:
        trace = _adapter().validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{origin} is not a trace: {where + ': ' * bool(where)}{first['msg'][:200]}") from None
    try:
        check(trace)
    except UserError as error:
        raise UserError(f"{origin}: {error}") from None
    return trace


def write_traces(path: Path, traces: Iterable[Trace]) -> None:
    """Write a file of traces, whole or not at all."""
    with whole_file(path) as beside, beside.open("wb") as file:
        file.writelines(map(to_json, traces))


def append_trace(path: Path, trace: Trace) -> int:
    """Append a trace. Return how many bytes of a line that a kill had torn were cut off before."""
    return append_line(path, to_json(trace))


def read_traces(path: Path) -> tuple[list[Trace], int]:
    """Return the traces of a file, and how many bytes of a torn last line were left out."""
    try:
        lines, torn = read_lines(path)
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(f"{path} is no file of traces; give the traces.jsonl of a run") from None
    return [from_json(line, f"{path}, line {place}") for place, line in enumerate(lines, 1)], torn
