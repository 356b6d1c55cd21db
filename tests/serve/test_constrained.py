"""Replies that must be JSON, keep to a schema, or be calls: with a real model, and token by token against the grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from etude.agent.formats import JsonCalls
from etude.inference.http import Limits, parse
from etude.inference.local import LocalPolicy
from etude.models.bases import resolve
from etude.models.load import load_tokeniser
from etude.serve.app import build_app
from etude.serve.constrained import Constraint, Grammars
from etude.serve.openai_schema import ChatRequest
from etude.serve.process import ModelCard
from tests.serve.scripted import Running, Scripted, serving

pytest.importorskip("llguidance")

ASK: Any = [{"role": "user", "content": "Give me one."}]
ITEM = {
    "type": "object", "additionalProperties": False, "required": ["colour", "count", "sure"],
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 3, "maximum": 12}, "sure": {"type": "boolean"}},
}  # fmt: skip


def tool(name: str, *, strict: bool = False) -> Any:
    schema = {
        "type": "object",
        "properties": {"way": {"enum": ["up", "down"]}},
        "required": ["way"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}


@pytest.fixture(scope="module")
def server(tokeniser: Any) -> Iterator[Running]:
    limits = Limits(drain=0)
    policy = LocalPolicy.open(resolve("sprout").folder, device="cpu", context=512)
    running = Running(build_app(policy, tokeniser, ModelCard("tiny"), limits), limits)
    yield running
    running.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_keeps_to_its_schema(server: Running, stream: bool) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "item", "strict": True, "schema": ITEM}}
    for seed in range(4):
        reply: Any = server.client().chat.completions.create(
            model="tiny", messages=ASK, response_format=form, seed=seed, temperature=1.5, max_tokens=100, stream=stream
        )
        if stream:
            chunks = [chunk.choices[0] for chunk in reply]
            text, reason = "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason
        else:
            text, reason = reply.choices[0].message.content, reply.choices[0].finish_reason
        item = json.loads(text)
        assert reason == "stop"
        assert item.keys() == {"colour", "count", "sure"}
        assert item["colour"] in {"red", "green"}
        assert type(item["count"]) is int
        assert 3 <= item["count"] <= 12
        assert type(item["sure"]) is bool


def test_a_reply_is_an_object_and_several_at_once_are_each_their_own(server: Running) -> None:
    reply = server.client().chat.completions.create(
        model="tiny", messages=ASK, response_format={"type": "json_object"}, n=3, seed=1, max_tokens=60
    )
    for choice in reply.choices:
        assert choice.message.content
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
    assert len({choice.message.content for choice in reply.choices}) > 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "turn"}}])
def test_a_call_is_forced(server: Running, choice: Any) -> None:
    tools = [tool("go"), tool("turn")]
    names = set()
    for seed in range(4):
        reply: Any = server.client().chat.completions.create(
            model="tiny", messages=ASK, tools=tools, tool_choice=choice, seed=seed, temperature=1.5, max_tokens=200
        )
        assert reply.choices[0].finish_reason == "tool_calls"
        for call in reply.choices[0].message.tool_calls:
            assert json.loads(call.function.arguments) in [{"way": "up"}, {"way": "down"}]
            names.add(call.function.name)
    assert names <= ({"go", "turn"} if choice == "required" else {"turn"})


def test_who_asks_for_nothing_is_not_limited_by_who_does(server: Running) -> None:
    plain = [
        server.client().chat.completions.create(model="tiny", messages=ASK, seed=5, max_tokens=30) for _ in range(2)
    ]
    assert plain[0].choices[0].message.content == plain[1].choices[0].message.content
    assert not str(plain[0].choices[0].message.content).startswith("{")


# ---- the grammar, token by token


def taken(constraint: Constraint, tokens: list[int]) -> int:
    """Return how many tokens are allowed, one after the other."""
    for place, token in enumerate(tokens):
        word = int.from_bytes(constraint.allowed()[token // 32 * 4 :][:4], "little")
        if not word >> token % 32 & 1:
            return place
        constraint.take(token)
    return len(tokens)


@pytest.fixture(scope="module")
def grammars(tokeniser: Any) -> Grammars:
    return Grammars(tokeniser, 6144, [tokeniser.eos_token_id])


@pytest.fixture(scope="module")
def plainly_marked(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    """Of a tokeniser that has no tokens for the marks: they are ordinary text."""
    folder = tmp_path_factory.mktemp("tokeniser")
    for file in resolve("sprout").folder.glob("*token*.json"):
        (folder / file.name).write_text(file.read_text().replace("tool_call>", "other>"))
    tokeniser = load_tokeniser(folder)
    assert len(tokeniser.encode("<tool_call>", add_special_tokens=False)) > 1
    return Grammars(tokeniser, 6144, [tokeniser.eos_token_id])


def constraint_of(grammars: Grammars, **asked: Any) -> Constraint:
    request = parse(json.dumps({"messages": ASK} | asked).encode(), ChatRequest)
    made = grammars.constraint(request, JsonCalls(), in_thinking=False)
    assert made is not None
    return made()


GOOD = '{"name": "go", "arguments": {"way": "up"}}'


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("Hello there.", True), (f"I go. @@\n{GOOD}\n%%", True), (f"@@\n{GOOD}\n%%\n@@\n{GOOD}\n%%", True), ("", True),
        ('@@\n{"name": "rm", "arguments": {}}\n%%', False), ('@@\n{"name": "go", "arguments": {"way": "left"}}\n%%', False),
        ('a @@\n{"name": "go", "arguments": {}}\n%%', False), ("@@ go up %%", False), (f"@@\n{GOOD}\n", False),
    ],
)  # fmt: skip
def test_strict_tools_allow_text_and_right_calls_only(
    tokeniser: Any, grammars: Grammars, plainly_marked: Grammars, special: bool, text: str, whole: bool
) -> None:
    used = grammars if special else plainly_marked
    text = text.replace("@@", "<tool_call>").replace("%%", "</tool_call>")
    tokens = [*used.tokeniser.encode(text, add_special_tokens=False), tokeniser.eos_token_id]
    constraint = constraint_of(used, tools=[tool("go", strict=True)])
    assert (taken(constraint, tokens) == len(tokens)) == whole


def test_nothing_comes_before_a_forced_call_and_one_named_tool_is_called_once(
    tokeniser: Any, grammars: Grammars
) -> None:
    one = tokeniser.encode(f"<tool_call>\n{GOOD}\n</tool_call>", add_special_tokens=False)
    end, named = [tokeniser.eos_token_id], {"type": "function", "function": {"name": "go"}}
    for choice, twice in (("required", True), (named, False)):
        asked = {"tools": [tool("go")], "tool_choice": choice}
        assert taken(constraint_of(grammars, **asked), end) == 0
        assert taken(constraint_of(grammars, **asked), tokeniser.encode("Well", add_special_tokens=False)) == 0
        assert taken(constraint_of(grammars, **asked), one + end) == len(one) + 1
        assert (taken(constraint_of(grammars, **asked), one + one + end) == 2 * len(one) + 1) == twice


# ---- what cannot be


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}}, "400 - this schema cannot be kept to: Invalid type: nonsense"),
        ({"response_format": {"type": "json_schema"}}, "has no json_schema"),
        ({"response_format": {"type": "json_object"}, "tools": [tool("go")]}, "exclude each other"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "rm"}}, "tools": [tool("go")]}, "'rm', which is not among"),
        ({"tool_choice": "sometimes", "tools": [tool("go")]}, "tool_choice"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(tokeniser: Any, asked: dict[str, Any], says: str) -> None:
    policy = Scripted(tokeniser, "no")
    with serving(policy) as server:
        with pytest.raises(openai.BadRequestError, match="400") as refused:
            server.client().chat.completions.create(model="tiny", messages=ASK, **asked)
        assert says in str(refused.value)
        assert not policy.asked
