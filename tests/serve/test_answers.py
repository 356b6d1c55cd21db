"""Chat and completions through the real `openai` client."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest

from etude.errors import UserError
from etude.inference.http import Limits
from etude.inference.policy import Busy, Sampling
from etude.serve.process import ModelCard
from tests.agent.test_formats import AS_TAGS, QWEN
from tests.serve.scripted import CONTEXT, TOOLS, VOCABULARY, Running, Scripted, serving, sprout_tokeniser

ASK: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls é"}}\n</tool_call>'


@pytest.fixture
def policy(tokeniser: Any) -> Scripted:
    return Scripted(tokeniser, "Hello, 世界 😀!<|im_end|>")


@pytest.fixture
def server(policy: Scripted) -> Iterator[Running]:
    with serving(policy) as running:
        yield running


def test_a_chat(server: Running, policy: Scripted, tokeniser: Any) -> None:
    answer = server.client().chat.completions.create(
        model="tiny", messages=ASK, temperature=0.5, top_p=0.9, seed=3, user="me"
    )
    assert answer.choices[0].message.content == "Hello, 世界 😀!"
    assert answer.choices[0].finish_reason == "stop"
    prompt, sampling, session = policy.asked[0]
    assert (
        tokeniser.decode(prompt)
        == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (sampling.temperature, sampling.top_p, sampling.seed, session) == (0.5, 0.9, 3, None)
    assert sampling.stop_tokens == {tokeniser.convert_tokens_to_ids("<|im_end|>"), tokeniser.eos_token_id}
    assert sampling.max_tokens == CONTEXT - len(prompt)
    usage = answer.usage
    assert usage is not None
    written = len(policy.ids("Hello, 世界 😀!<|im_end|>"))
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), written)
    assert usage.total_tokens == len(prompt) + written
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 2


def test_a_streamed_chat_is_the_same(server: Running) -> None:
    options: Any = {"include_usage": True}
    chunks = list(
        server.client().chat.completions.create(model="tiny", messages=ASK, stream=True, stream_options=options)
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello, 世界 😀!"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > len(chunks) - 4


@pytest.mark.parametrize("stop", ["世", "界 ", [" 😀!", "zzz"], "o, 世界"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_text_is_not_in_the_text_but_in_the_tokens(
    server: Running, tokeniser: Any, stop: Any, stream: bool
) -> None:
    options: Any = {"return_token_ids": True}
    asked = server.client().chat.completions.create(
        model="tiny", messages=ASK, stop=stop, stream=stream, extra_body=options
    )
    chunks: list[Any] = list(asked) if stream else [asked]
    choices = [chunk.choices[0] for chunk in chunks]
    text = "".join((choice.delta if stream else choice.message).content or "" for choice in choices)
    word = stop if isinstance(stop, str) else stop[0]
    assert text == "Hello, 世界 😀!".partition(word)[0]
    assert choices[-1].finish_reason == "stop"
    ids = [number for choice in choices for number in choice.token_ids]
    assert tokeniser.decode(ids).startswith(text + word)


def test_max_tokens_ends_it(server: Running) -> None:
    create = server.client().chat.completions.create
    for options in ({"max_tokens": 2}, {"max_completion_tokens": 2}):
        answer = create(model="tiny", messages=ASK, **options)  # type: ignore[call-overload]
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 2
        assert "Hello, 世界 😀!".startswith(answer.choices[0].message.content)


def test_tool_calls(tokeniser: Any) -> None:
    policy = Scripted(tokeniser, f"I look.\n{CALL}\n{CALL}<|im_end|>")
    with serving(policy) as server:
        create = server.client().chat.completions.create
        answer = create(model="tiny", messages=ASK, tools=TOOLS)
        message: Any = answer.choices[0].message
        assert (message.content, answer.choices[0].finish_reason) == ("I look.", "tool_calls")
        assert [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls] == [
            ("bash", {"command": "ls é"})
        ] * 2
        seen = tokeniser.decode(policy.asked[0][0])
        assert 'Tools:\n{"type": "function", "function": {"name": "bash"' in seen

        chunks = list(create(model="tiny", messages=ASK, tools=TOOLS, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "I look."
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert [(call.index, call.function.arguments if call.function else "") for call in calls] == [
            (0, '{"command": "ls é"}'),
            (1, '{"command": "ls é"}'),
        ]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"

        result: Any = [*ASK, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a.py"}]
        create(model="tiny", messages=result, tools=TOOLS)
        again = tokeniser.decode(policy.asked[-1][0])
        assert '<tool_call>\n{"name": "bash", "arguments": {"command": "ls é"}}\n</tool_call>' in again.replace(
            "\\u00e9", "é"
        )
        assert "<tool_response>\na.py\n</tool_response>" in again

        plain = create(model="tiny", messages=ASK, tools=TOOLS, tool_choice="none").choices[0]
        assert (plain.message.tool_calls, plain.finish_reason) == (None, "stop")
        assert plain.message.content == f"I look.\n{CALL}\n{CALL}"
        assert "Tools:" not in tokeniser.decode(policy.asked[-1][0])


def test_several_answers(tokeniser: Any) -> None:
    def by_seed(_: Sequence[int], sampling: Sampling) -> list[int]:
        return list(tokeniser.encode(f"answer {sampling.seed}", add_special_tokens=False))

    with serving(Scripted(tokeniser, by_seed)) as server:
        create = server.client().chat.completions.create
        whole = [choice.message.content for choice in create(model="tiny", messages=ASK, n=3, seed=41).choices]
        assert whole == ["answer 41", "answer 42", "answer 43"]
        streamed = ["", "", ""]
        for chunk in create(model="tiny", messages=ASK, n=3, seed=41, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert streamed == whole


def test_logprobs(server: Running, policy: Scripted) -> None:
    create = server.client().chat.completions.create
    choice = create(model="tiny", messages=ASK, logprobs=True, top_logprobs=2).choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert (
        b"".join(bytes(token.bytes or []) for token in content).decode() == "Hello, 世界 😀!"
    )  # the stop token is not shown
    assert [token.logprob for token in content] == [-1.0 - place for place in range(len(content))]
    assert [[other.logprob for other in token.top_logprobs] for token in content] == [[-3.0, -4.0]] * len(content)
    assert policy.asked[0][1].alternatives == 2
    streamed = [token for chunk in create(model="tiny", messages=ASK, logprobs=True, top_logprobs=2, stream=True)
                for token in (chunk.choices[0].logprobs.content or [] if chunk.choices[0].logprobs else [])]  # fmt: skip
    assert streamed == content
    assert create(model="tiny", messages=ASK).choices[0].logprobs is None


def test_completions_of_texts_and_tokens(tokeniser: Any) -> None:
    def echo(prompt: Sequence[int], _: Sampling) -> list[int]:
        return [*prompt, tokeniser.eos_token_id]

    policy = Scripted(tokeniser, echo)
    with serving(policy) as server:
        create = server.client().completions.create
        ids = policy.ids("two é")
        for prompt, wanted in (
            ("one", ["one"]),
            (["one", "two é"], ["one", "two é"]),
            (ids, ["two é"]),
            ([ids, ids], ["two é"] * 2),
        ):
            answer = create(model="tiny", prompt=prompt, logprobs=1)
            assert [choice.text for choice in answer.choices] == wanted
            assert policy.asked[-1][1].max_tokens == 16
            told = answer.choices[-1].logprobs
            assert told is not None
            assert "".join(told.tokens or []) == wanted[-1] or "\ufffd" in "".join(told.tokens or [])
            assert told.top_logprobs is not None
            assert [len(each) for each in told.top_logprobs] == [1] * len(told.tokens or [])
        assert policy.asked[0][1].stop_tokens == {tokeniser.eos_token_id}
        chunks = list(create(model="tiny", prompt=["one", "two é"], n=2, stream=True))
        texts = [
            "".join(chunk.choices[0].text for chunk in chunks if chunk.choices[0].index == index) for index in range(4)
        ]
        assert texts == ["one", "one", "two é", "two é"]


def test_a_conversation_is_a_session(server: Running, policy: Scripted) -> None:
    create = server.client().chat.completions.create
    create(model="tiny", messages=ASK, prompt_cache_key="talk-1")
    create(model="tiny", messages=ASK, prompt_cache_key="talk-1", n=2)
    assert [session for _, _, session in policy.asked] == ["talk-1", None, None]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"logit_bias": {"3": 1}}, "'logit_bias' is not supported"),
        ({"frequency_penalty": 0.5}, "'frequency_penalty' is not supported"),
        ({"extra_body": {"temprature": 1}}, "did you mean 'temperature'"),
        ({"temperature": -1}, "temperature = -1"),
        ({"temperature": "hot"}, "temperature: Input should be a valid number"),
        ({"top_p": 0}, "top_p = 0"),
        ({"n": 65}, "65 completions in one request"),
        ({"n": 0}, "n: Input should be greater"),
        ({"stop": [""]}, "stop.0: String should have at least 1"),
        ({"stop": ["a"] * 17}, "stop: List should have at most 16"),
        ({"seed": 2**63}, "seed: Input should be less"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs: Input should be less"),
        ({"max_tokens": CONTEXT}, "the context is 2048 tokens"),
        ({"max_tokens": 1.5}, "max_tokens: Input should be a valid integer"),
        ({"messages": []}, "messages: List should have at least 1"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "400 - messages.0.content: this model reads text only"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]}, "arguments"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(
    server: Running, policy: Scripted, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        server.client().chat.completions.create(**({"model": "tiny", "messages": ASK} | options))
    assert says in str(refused.value)
    assert not policy.asked


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"best_of": 3}, "'best_of' is not supported"),
        ({"prompt": [5, VOCABULARY]}, f"token {VOCABULARY} is not in the vocabulary"),
        ({"prompt": [-1]}, "token -1 is not in the vocabulary"),
        ({"prompt": [1] * CONTEXT}, "the prompt has 2048"),
        ({"prompt": [1] * 2000, "max_tokens": 100}, "100 are to be written"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "give a text, a list of token ids"),
        ({"prompt": [1, "a"]}, "give a text, a list of token ids"),
        ({"prompt": [True]}, "give a text, a list of token ids"),
        ({"prompt": {"text": "a"}}, "give a text, a list of token ids"),
    ],
)
def test_completions_that_cannot_be(server: Running, policy: Scripted, options: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match="400") as refused:
        server.client().completions.create(**({"model": "tiny", "prompt": "a"} | options))
    assert says in str(refused.value)
    assert not policy.asked


def test_what_changes_nothing_is_accepted(server: Running) -> None:
    answer = server.client().chat.completions.create(
        model="tiny", messages=ASK, user="me", metadata={"a": "b"}, store=True, frequency_penalty=0, logit_bias={},
        response_format={"type": "text"}, parallel_tool_calls=True, extra_body={"logprobs": None, "whatever": None},
    )  # fmt: skip
    assert answer.choices[0].message.content


@pytest.mark.parametrize("stream", [True, False])
def test_errors_of_the_policy_have_their_status(server: Running, policy: Scripted, stream: bool) -> None:
    def fail(error: Exception) -> Any:
        def script(_prompt: Sequence[int], _sampling: Sampling) -> list[int]:
            raise error

        policy.script = script
        return server.client().chat.completions.create(model="tiny", messages=ASK, stream=stream)

    with pytest.raises(openai.BadRequestError, match="too many of them"):
        fail(UserError("too many of them"))
    with pytest.raises(openai.RateLimitError) as busy:
        fail(Busy(3.2))
    assert busy.value.response.headers["retry-after"] == "4"
    with pytest.raises(openai.InternalServerError) as failed:
        fail(RuntimeError("secret detail"))
    assert "secret" not in str(failed.value)
    with pytest.raises(openai.InternalServerError) as late:
        fail(TimeoutError())
    assert late.value.status_code == 504


def test_an_error_in_the_midst_of_a_stream_is_told(server: Running, policy: Scripted) -> None:
    policy.hold_at, policy.fails_with = 2, UserError("the weights went away")
    stream = iter(server.client().chat.completions.create(model="tiny", messages=ASK, stream=True))
    next(stream)
    policy.wait_until(lambda: policy.written == 2)
    policy.release()
    with pytest.raises(openai.APIError, match="the weights went away"):
        list(stream)


def test_models(tokeniser: Any) -> None:
    card = ModelCard("tiny", {"record": "abc"}, [{"any_of": ["Built with Llama"]}], created=5)
    with serving(Scripted(tokeniser, "x"), Limits(drain=0, context=100), card=card) as server:
        client = server.client()
        listed: Any = client.models.list().data[0]
        assert (listed.id, listed.created, listed.max_model_len) == ("tiny", 5, 100)
        assert (listed.lineage, listed.display) == ({"record": "abc"}, [{"any_of": ["Built with Llama"]}])
        assert client.models.retrieve("tiny") == listed
        with pytest.raises(openai.NotFoundError, match="only 'tiny'"):
            client.models.retrieve("other")
        with pytest.raises(openai.NotFoundError, match="only 'tiny'"):
            client.chat.completions.create(model="other", messages=ASK)
        with pytest.raises(openai.BadRequestError, match="the context is 100 tokens"):
            client.completions.create(model="tiny", prompt=[1] * 100)


def test_a_model_without_a_chat_template(tiny_base: Any) -> None:
    from etude.models.load import load_tokeniser

    with serving(Scripted(load_tokeniser(tiny_base), "import os")) as server:
        with pytest.raises(openai.BadRequestError, match="no chat template; use /v1/completions"):
            server.client().chat.completions.create(model="tiny", messages=ASK)
        assert server.client().completions.create(model="tiny", prompt="a").choices[0].text == "import os"


def coder() -> Any:
    """Return a tokeniser with a template that teaches calls as tags and opens thinking, unless it is asked not to."""
    made = sprout_tokeniser()
    closed = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    made.chat_template = QWEN.replace("CALL", AS_TAGS).replace("\nPROMPT' }}", "\n' }}" + closed)
    return made


TURN = "Where is it?\n</think>\n\nI look.\n<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"


def test_calls_as_tags_and_reasoning() -> None:
    policy = Scripted(coder(), f"{TURN}<|im_end|>")
    with serving(policy) as server:
        create = server.client().chat.completions.create
        message: Any = create(model="tiny", messages=ASK, tools=TOOLS).choices[0].message
        assert (message.reasoning_content, message.content) == ("Where is it?", "I look.")
        assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
            ("bash", '{"command": "ls"}')
        ]
        deltas: list[Any] = [
            chunk.choices[0].delta for chunk in create(model="tiny", messages=ASK, tools=TOOLS, stream=True)
        ]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Where is it?"
        assert "".join(delta.content or "" for delta in deltas) == "I look."
        assert [call.function.name for delta in deltas for call in delta.tool_calls or []] == ["bash"]


@pytest.mark.parametrize(("effort", "ends"), [("none", "</think>\n\n"), ("high", "<think>\n")])
def test_reasoning_effort_is_the_templates_to_heed(server: Running, effort: Any, ends: str) -> None:
    thinker = Scripted(coder(), "So be it.<|im_end|>")
    with serving(thinker) as thinking:
        answer: Any = thinking.client().chat.completions.create(model="tiny", messages=ASK, reasoning_effort=effort)
        said = answer.choices[0].message
        assert thinker.tokeniser.decode(thinker.asked[0][0]).endswith(ends)
        assert (said.content if effort == "none" else said.reasoning_content) == "So be it."
    with pytest.raises(openai.BadRequestError, match="knows no reasoning effort"):
        server.client().chat.completions.create(model="tiny", messages=ASK, reasoning_effort=effort)
