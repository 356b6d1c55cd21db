"""A turn taken apart while it comes: text, thinking and calls, whatever the pieces."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.calls import Call
from etude.agent.formats import JsonCalls, Style, TagCalls, TurnReader, read_turn

GOOD = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
TAGS = "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
WORDS = ["<tool_call>", "</tool_call>", "<tool", "hello", " ", "\n", '{"name": "x"}', "<", "}", "<think>", "</think>"]
PARTS = st.sampled_from([GOOD, *WORDS])
STYLES = pytest.mark.parametrize(("style", "call"), [(JsonCalls(), GOOD), (TagCalls(), TAGS)], ids=["json", "tags"])
LS = Call("bash", {"command": "ls"})


def read(pieces: list[str], style: Style | None = None, *, in_thinking: bool = False) -> tuple[str, str, list[Call]]:
    reader, said, thinking = TurnReader(style or JsonCalls(), in_thinking=in_thinking), "", ""
    calls: list[Call] = []
    for place, piece in enumerate(pieces, 1):
        text, thought, found = reader.feed(piece, final=place == len(pieces))
        said, thinking, calls = said + text, thinking + thought, calls + found
    return said, thinking, calls


@given(st.lists(PARTS, max_size=8).map("".join), st.lists(st.integers(0, 200), max_size=8), st.booleans())
def test_how_it_is_cut_makes_no_difference(text: str, places: list[int], in_thinking: bool) -> None:
    cuts = sorted({0, len(text), *(place for place in places if place <= len(text))})
    pieces = [text[start:end] for start, end in pairwise(cuts)] or [""]
    assert read(pieces, in_thinking=in_thinking) == read([text], in_thinking=in_thinking)


@given(st.lists(PARTS, max_size=8).map("".join), st.booleans())
def test_calls_are_those_that_the_harness_reads(text: str, in_thinking: bool) -> None:
    turn = read_turn(text, JsonCalls(), lambda at: at, in_thinking=in_thinking)
    assert tuple(read(list(text) or [""], in_thinking=in_thinking)[2]) == turn.calls


@given(st.lists(PARTS.filter(lambda part: part not in {GOOD, "<think>", '{"name": "x"}'}), max_size=8).map("".join))
def test_text_without_a_call_is_left_as_it_is(text: str) -> None:
    assert read(list(text) or [""]) == (text, "", [])


@given(st.text("ab", min_size=1), st.text("ab"), st.dictionaries(st.text(), st.integers() | st.text(), max_size=3))
def test_calls_are_taken_out_of_the_text(before: str, name: str, arguments: dict[str, int | str]) -> None:
    made = json.dumps({"name": name, "arguments": arguments}).replace("<", "\\u003c")
    text, _, calls = read([f"{before}\n<tool_call>\n{made}\n</tool_call>\n<tool_call>{made}</tool_call>\n"])
    assert text == before
    assert calls == [Call(name, arguments)] * 2


@STYLES
@pytest.mark.parametrize("opened", [True, False], ids=["prompt opens thinking", "model does"])
def test_thinking_said_and_called(style: Style, call: str, opened: bool) -> None:
    text = f"{'' if opened else '<think>'}\nhm, {call}?\n</think>\n\nI look.\n\n{call}\n{call}"
    for pieces in ([text], list(text)):
        assert read(pieces, style, in_thinking=opened) == ("I look.", f"hm, {call}?", [LS, LS])


@STYLES
def test_without_tools_calls_stay_text(style: Style, call: str) -> None:
    assert TurnReader(None).feed(f"a {call}", final=True) == (f"a {call}", "", [])


def test_malformed_calls_stay_text() -> None:
    for wrong in ('{"name": "bash", "arguments": {', "{}", "[]", '{"name": 3}', '{"name": "a", "arguments": "ls"}',
                  '{"name": "a", "other": 1}', '{"name": "a", "arguments": {"x": NaN}}', ""):  # fmt: skip
        assert read([f"so: <tool_call>{wrong}</tool_call> "]) == (f"so: <tool_call>{wrong}</tool_call> ", "", [])


def test_a_call_that_is_not_closed_stays_text() -> None:
    assert read([GOOD.removesuffix("</tool_call>")]) == (GOOD.removesuffix("</tool_call>"), "", [])


def test_a_good_call_after_one_that_was_never_closed() -> None:
    assert read([f"<tool_call>oh {GOOD}"]) == ("<tool_call>oh", "", [LS])


def test_a_value_may_spell_the_closing_mark() -> None:
    call = '<tool_call>{"name": "bash", "arguments": {"command": "echo </tool_call>"}}</tool_call>'
    assert read(list(call)) == ("", "", [Call("bash", {"command": "echo </tool_call>"})])
