"""Traces: what is trained, what is refused, and what a file gives back."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from etude.agent.atif import from_atif, to_atif
from etude.agent.trace import Trace, append_trace, check, from_json, read_traces, samples, to_json, write_traces
from etude.errors import UserError
from tests.agent.traces import episode, traces
from tests.lineage.refusals import one_line


def paths(trace: Trace) -> list[list[int]]:
    """Return every path from a root to a leaf, by going down from the roots; in the order of the leaves."""
    children: dict[int | None, list[int]] = {}
    for place, node in enumerate(trace.nodes):
        children.setdefault(node.parent, []).append(place)

    def below(path: list[int]) -> list[list[int]]:
        return (
            [found for child in children[path[-1]] for found in below([*path, child])]
            if path[-1] in children
            else [path]
        )

    return sorted((path for root in children.get(None, []) for path in below([root])), key=lambda path: path[-1])


@given(traces())
def test_every_sampled_token_is_trained_once_and_every_context_is_whole(trace: Trace) -> None:
    made = samples(trace)
    assert len(made) == len(paths(trace))
    trained: Counter[tuple[int, int]] = Counter()
    for sample, path in zip(made, paths(trace), strict=True):
        where = [(place, index) for place in path for index in range(len(trace.nodes[place].tokens))]
        assert sample.tokens == [trace.nodes[place].tokens[index] for place, index in where] == trace.context(path[-1])
        trained.update(each for each, wanted in zip(where, sample.trained, strict=True) if wanted)
        for at, (place, index) in enumerate(where):
            node = trace.nodes[place]
            expected = (node.logprobs[index], node.versions[index]) if node.sampled else (0.0, -1)
            assert (sample.logprobs[at], sample.versions[at]) == expected
    sampled = [
        (place, index) for place, node in enumerate(trace.nodes) if node.sampled for index in range(len(node.tokens))
    ]
    assert trained == Counter(sampled)


def test_three_restarts_are_four_samples_and_a_shared_turn_is_trained_in_the_first() -> None:
    trace = episode()
    made = samples(trace)
    assert [sum(sample.trained) for sample in made] == [6, 6, 6, 2]
    trace.nodes[6].parent = 1  # the next context goes on from the first turn
    assert [sum(sample.trained) for sample in samples(trace)] == [6, 6, 6, 2]
    assert samples(trace)[1].tokens[:4] == [0, 1, 1, 2]
    assert samples(trace)[1].trained[:4] == [False] * 4


@given(traces())
def test_a_line_gives_the_trace_back(trace: Trace) -> None:
    line = to_json(trace)
    assert line.count(b"\n") == 1
    assert from_json(line, "x") == trace


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parent": 2}, ["node 2", "does not come before"]),
        ({"parent": -1}, ["node 2", "does not come before"]),
        ({"logprobs": [-1.0]}, ["1 / 0 / 0", "0 sampled tokens"]),
        ({"sampled": True}, ["sampled, but its kind is 'answers'"]),
        ({"sampled": True, "kind": "turn", "logprobs": [-1.0, -1.0]}, ["2 / 0 / 0", "2 sampled tokens"]),
        ({"seconds": math.nan}, ["not finite"]),
        ({"sampled": True, "kind": "turn", "logprobs": [-1.0, math.inf], "raw_logprobs": [-1.0, -1.0], "versions": [1, 1]}, ["not finite"]),
        ({"tokens": [1, -2]}, ["a token below 0"]),
    ],
)  # fmt: skip
def test_what_no_episode_leaves_is_refused(change: dict[str, Any], words: list[str]) -> None:
    trace = episode()
    check(trace)
    trace.nodes[2] = dataclasses.replace(trace.nodes[2], **change)
    with pytest.raises(UserError, match=one_line("'fix-1'", *words)):
        check(trace)
    with pytest.raises(UserError):
        to_json(trace)


NODE = b'{"id": "a", "task": "", "nodes": [{"parent": %s, "kind": "%s", "tokens": [%s], "text": ""}]}'


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"\x89PNG", ["Invalid JSON"]),
        (b"[]", ["an object"]),
        (b'{"id": "a"}', ["task", "required"]),
        (b'{"id": "a", "task": "", "colour": 1}', ["colour", "nexpected"]),
        (NODE % (b"null", b"dance", b""), ["nodes.0.kind"]),
        (NODE % (b"null", b"turn", b'"1"'), ["nodes.0.tokens.0"]),
        (NODE % (b"0", b"turn", b""), ["node 0", "parent"]),
        (b'{"id": "\\ud800", "task": ""}', ["JSON"]),
    ],
)
def test_a_line_that_is_no_trace_is_named(tmp_path: Path, line: bytes, words: list[str]) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(to_json(episode()) + line + b"\n")
    with pytest.raises(UserError, match=one_line("t.jsonl, line 2", *words)):
        read_traces(path)


def test_a_torn_last_line_is_told_and_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    path, trace = tmp_path / "new" / "t.jsonl", episode()
    other = dataclasses.replace(trace, id="two \u2028\r")
    assert append_trace(path, trace) == append_trace(path, other) == 0
    whole = path.read_bytes()
    assert read_traces(path) == ([trace, other], 0)
    for cut in (1, 100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        found, torn = read_traces(path)
        assert (len(found), torn) == (whole[:cut].count(b"\n"), cut - (whole[:cut].rfind(b"\n") + 1))
        assert append_trace(path, other) == torn > 0
        assert read_traces(path) == ([*found, other], 0)
    write_traces(path, [other])
    assert read_traces(path) == ([other], 0)


def test_what_was_drawn_is_trained_on_where_the_server_tells_nothing_else() -> None:
    """A vLLM with processed_logprobs at another temperature than 1."""
    trace = episode()
    for node in trace.nodes:
        node.raw_logprobs = [math.nan] * len(node.raw_logprobs)
    back = from_json(to_json(trace), "x")
    assert back.nodes[1].raw_logprobs == []
    assert samples(back) == samples(trace) == samples(episode())


def test_what_an_endpoint_wrote_without_log_probs_is_kept_but_not_trained() -> None:
    trace = episode()
    for node in trace.nodes[:4]:
        node.logprobs = node.raw_logprobs = [math.nan] * len(node.logprobs)
    back = from_json(to_json(trace), "x")
    assert (back.nodes[1].tokens, back.nodes[1].logprobs, back.nodes[1].sampled) == ([1, 2], [], True)
    passed_on = from_atif(json.loads(json.dumps(to_atif(trace), allow_nan=False)), "x")
    assert samples(back) == samples(trace) == samples(passed_on)
    assert [sum(sample.trained) for sample in samples(trace)] == [2, 6, 6, 2]
    trace.rewards["tests"] = math.nan
    with pytest.raises(UserError, match=one_line("'fix-1'", "reward", "not finite")):
        to_json(trace)


def test_half_a_character_does_not_cost_the_trace_and_defaults_take_no_room(tmp_path: Path) -> None:
    trace = episode()
    trace.nodes[0].text = "a\ud800b"
    assert from_json(to_json(trace), "x").nodes[0].text == "a?b"
    assert json.loads(to_json(Trace("a", "b"))) == {"id": "a", "task": "b"}
    with pytest.raises(UserError, match=one_line(tmp_path / "none", "no file of traces")):
        read_traces(tmp_path / "none")
