"""Random conversations, and what the assistant writes in them by ChatML, worked out without a template."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from transformers import AutoTokenizer

import etude
from etude.data.chat import Conversation
from tests import tiny

SPROUT = Path(etude.__file__).parent / "models" / "sprout"
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}]
TEXTS = st.text(max_size=12) | st.sampled_from(["\n\n  x", " a ", "def f():\n    return 1\n", "漢\U0001f600", "…"])
SOME = TEXTS.filter(bool)
ARGUMENTS = st.dictionaries(st.text("abc", min_size=1, max_size=3), TEXTS | st.integers() | st.none(), max_size=2)


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(arguments: Any, name: str = "read") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@st.composite
def turns(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Return a request, perhaps tool calls with their responses, and an answer."""
    calls = [call(arguments) for arguments in draw(st.lists(ARGUMENTS, max_size=2))]
    responses = [said("tool", draw(TEXTS)) for _ in calls]
    calling = [said("assistant", draw(TEXTS), tool_calls=calls), *responses] if calls else []
    return [said("user", draw(TEXTS)), *calling, said("assistant", draw(SOME))]


CONVERSATIONS = st.builds(
    lambda system, parts, after, tools: Conversation(
        [*system, *(message for part in parts for message in part), *after], tools, "random"
    ),
    st.lists(st.builds(said, st.just("system"), TEXTS), max_size=1),
    st.lists(turns(), min_size=1, max_size=3),
    st.lists(st.builds(said, st.just("user"), TEXTS), max_size=1),
    st.sampled_from([[], TOOLS]),
)


def answers(conversation: Conversation) -> list[str]:
    """Return what the assistant samples, message by message."""
    return [
        message["content"]
        + "".join(
            f"<tool_call>\n{json.dumps(each['function'], ensure_ascii=False)}\n</tool_call>"
            for each in message.get("tool_calls", [])
        )
        + "<|im_end|>"
        for message in conversation.messages
        if message["role"] == "assistant"
    ]


@cache
def tokeniser(name: str) -> Any:
    """Return a tokeniser with ChatML's tokens, and one without them."""
    return AutoTokenizer.from_pretrained(SPROUT) if name == "sprout" else tiny.tokeniser()
