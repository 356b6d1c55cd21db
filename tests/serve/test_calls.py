"""Tool calls in sampled text."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from etude.serve.replies import Call, CallReader, parse_call

GOOD = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
PARTS = st.sampled_from([GOOD, "<tool_call>", "</tool_call>", "<tool", "hello", " ", "\n", '{"name": "x"}', "<", "}"])


def read(pieces: list[str]) -> tuple[str, list[Call]]:
    reader, text = CallReader(), ""
    calls: list[Call] = []
    for piece in pieces:
        said, found = reader.feed(piece)
        text, calls = text + said, calls + found
    return text + reader.flush(), calls


@given(st.lists(PARTS, max_size=8).map("".join), st.lists(st.integers(0, 200), max_size=8))
def test_how_it_is_cut_makes_no_difference(text: str, places: list[int]) -> None:
    cuts = sorted({0, len(text), *(place for place in places if place <= len(text))})
    assert read([text[start:end] for start, end in pairwise(cuts)]) == read([text])


@given(st.lists(PARTS.filter(lambda part: part not in {GOOD, '{"name": "x"}'}), max_size=8).map("".join))
def test_text_without_a_call_is_left_as_it_is(text: str) -> None:
    assert read(list(text)) == (text, [])


@given(st.text("ab", min_size=1), st.text("ab"), st.dictionaries(st.text(), st.integers() | st.text(), max_size=3))
def test_calls_are_taken_out_of_the_text(before: str, name: str, arguments: dict[str, int | str]) -> None:
    made = json.dumps({"name": name, "arguments": arguments}).replace("<", "\\u003c")
    text, calls = read([f"{before}\n<tool_call>\n{made}\n</tool_call>\n<tool_call>{made}</tool_call>\n"])
    assert text == before
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [(name, arguments)] * 2
    assert len({call.id for call in calls}) == 2


def test_malformed_calls_stay_text() -> None:
    for wrong in ('{"name": "bash", "arguments": {', "{}", "[]", '{"name": 3}', '{"name": "a", "arguments": "ls"}',
                  '{"name": "a", "other": 1}', '{"name": "a", "arguments": {"x": NaN}}', ""):  # fmt: skip
        assert parse_call(wrong) is None
        assert read([f"so: <tool_call>{wrong}</tool_call> "]) == (f"so: <tool_call>{wrong}</tool_call> ", [])


def test_a_call_that_is_not_closed_stays_text() -> None:
    assert read([GOOD.removesuffix("</tool_call>")]) == (GOOD.removesuffix("</tool_call>"), [])


def test_a_good_call_after_one_that_was_never_closed() -> None:
    text, calls = read([f"<tool_call>oh {GOOD}"])
    assert text == "<tool_call>oh"
    assert calls == [Call("bash", '{"command": "ls"}')]
