"""What is read is normalised; what cannot be learnt from is refused with its file and line."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.data.chat import Conversation, read_conversations, split
from etude.errors import UserError
from tests.data.talks import CONVERSATIONS, TOOLS, call, said
from tests.lineage.refusals import one_line

GOOD = {"messages": [said("user", "q"), said("assistant", "a")]}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


@pytest.mark.parametrize("wire", [json.dumps, dict])
def test_the_wire_and_the_object_are_the_same_conversation(tmp_path: Path, wire: Any) -> None:
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", **call(wire({"b": 1, "a": [2]}))}], "name": None},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
    ]  # fmt: skip
    (read,) = read_conversations(write(tmp_path / "c.jsonl", {"messages": messages, "tools": TOOLS, "id": 7}))
    expected: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", **call({"b": 1, "a": [2]})}]},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
    ]
    assert (read.messages, read.tools) == (expected, TOOLS)
    assert list(read.messages[0]["tool_calls"][0]["function"]["arguments"]) == ["b", "a"]  # templates keep the order
    assert read.digest == Conversation(expected, TOOLS, "elsewhere").digest


@given(conversation=CONVERSATIONS)
def test_what_was_written_is_read_and_only_content_makes_the_digest(
    tmp_path_factory: Any, conversation: Conversation
) -> None:
    row = {"messages": conversation.messages, "tools": conversation.tools}
    path = write(tmp_path_factory.mktemp("chat") / "c.jsonl", row, "", row | {"messages": conversation.messages * 2})
    packed = path.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for read in (read_conversations(path), read_conversations(packed)):
        assert read[0].messages == conversation.messages
        assert [each.origin.endswith(end) for each, end in zip(read, ["line 1", "line 3"], strict=True)] == [True, True]
        assert read[0].digest == conversation.digest != read[1].digest


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", ["Invalid JSON"]),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', ["Invalid JSON"]),
        ("[]", ["object"]),
        ({}, ["messages", "required"]),
        ({"messages": []}, ["messages", "at least 1"]),
        ({"messages": ["hi"]}, ["messages.0"]),
        ({"messages": [said("human", "q")]}, ["messages.0.role", "'assistant'"]),
        ({"messages": [said("assistant", "")]}, ["neither content nor tool_calls"]),
        ({"messages": [said("user", "q")]}, ["no assistant message"]),
        ({"messages": [said("assistant", "a"), said("tool", "r")]}, ["tool message without a call"]),
        ({"messages": [said("assistant", "", tool_calls=[call({})]), said("tool", "r"), said("tool", "r")]}, ["without a call"]),
        ({"messages": [said("assistant", "", tool_calls=[call("{'a': 1}")])]}, ["tool_calls.0.function.arguments", "Invalid JSON"]),
        ({"messages": [said("assistant", "", tool_calls=[call("[1]")])]}, ["tool_calls.0.function.arguments", "object"]),
        ({"messages": [said("assistant", "", tool_calls=[call({}, "")])]}, ["tool_calls.0.function.name"]),
        ({"messages": [said("assistant", "a", weight=0)]}, ["messages.0.weight", "not permitted"]),
        ({"messages": [{"role": "assistant", "content": [{"type": "image_url"}]}]}, ["messages.0.content", "string"]),
        ({"messages": [said("assistant", "", tool_calls=[call({"a": float("nan")})])]}, ["not JSON compliant"]),
        (GOOD | {"tools": [{"name": "read"}]}, ["a tool that is not"]),
    ],
)  # fmt: skip
def test_faults_are_named_with_file_and_line(tmp_path: Path, row: Any, words: list[str]) -> None:
    path = write(tmp_path / "c.jsonl", GOOD, "", row)
    with pytest.raises(UserError, match=one_line(f"{path}, line 3: ", *words)):
        read_conversations(path)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    torn = tmp_path / "torn.jsonl.gz"
    torn.write_bytes(gzip.compress(json.dumps(GOOD).encode() * 100)[:-9])
    for path, words in [
        (tmp_path / "no.jsonl", "No such file"),
        (torn, "ended"),
        (write(tmp_path / "e.jsonl", ""), "is empty"),
    ]:
        with pytest.raises(UserError, match=one_line(path, words)):
            read_conversations(path)


@given(sizes=st.lists(st.integers(1, 4), min_size=20, max_size=60), seed=st.integers(0, 9), data=st.data())
def test_a_split_keeps_groups_whole_and_does_not_depend_on_the_order(
    sizes: list[int], seed: int, data: st.DataObject
) -> None:
    every = [
        Conversation([said("assistant", f"{group} {index}")], group=f"file{group}" if group % 2 else "")
        for group, size in enumerate(sizes)
        for index in range(size)
    ]
    train, held = split(every, 0.2, seed)
    assert Counter(each.digest for each in train + held) == Counter(each.digest for each in every)
    assert not {each.group for each in train} & {each.group for each in held} - {""}
    assert 0 < len(held) <= 0.3 * len(every)
    again = split(data.draw(st.permutations(every)), 0.2, seed)
    assert {each.digest for each in again[1]} == {each.digest for each in held}
    assert split(every, 0.0, seed) == (every, [])
