"""`echo` with log-probs on /v1/completions, as lm-eval asks for them, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import httpx2
import openai
import pytest
import torch

from etude.inference.http import Limits
from etude.inference.local import LocalPolicy
from etude.models.bases import resolve
from etude.models.load import load_model
from etude.serve.app import build_app
from etude.serve.process import ModelCard
from tests.serve.scripted import PATIENCE, Running

TEXTS = ["def add(a, b):\n    return a + b\n", "import os\n", "x"]


@pytest.fixture(scope="module")
def server(tokeniser: Any) -> Iterator[Running]:
    limits = Limits(drain=0)
    policy = LocalPolicy.open(resolve("sprout").folder, device="cpu", context=256)
    running = Running(build_app(policy, tokeniser, ModelCard("tiny"), limits), limits)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(resolve("sprout").folder, torch.device("cpu"), torch.float32).eval()


def log_probs(model: Any, ids: list[int]) -> torch.Tensor:
    """Return [T - 1, V]: what comes after each token but the last."""
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(-1)


def ask_as_lm_eval(server: Running, prompts: list[list[int]] | list[str]) -> Any:
    """As LocalCompletionsAPI._create_payload of lm-eval 0.4.13 does for log-likelihoods."""
    payload = {
        "model": "tiny",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    reply = httpx2.post(f"{server.url}/v1/completions", json=payload, timeout=PATIENCE)
    assert reply.status_code == 200, reply.text
    return reply.json()


def parsed_as_lm_eval(reply: Any, context_lengths: list[int]) -> list[tuple[float, bool]]:
    """As its parse_logprobs does."""
    parsed = []
    for choice, length in zip(sorted(reply["choices"], key=itemgetter("index")), context_lengths, strict=True):
        values = choice["logprobs"]["token_logprobs"][length:-1]
        tops = choice["logprobs"]["top_logprobs"][length:-1]
        greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        parsed.append((sum(values), greedy))
    return parsed


@pytest.mark.parametrize("as_text", [False, True])
def test_log_likelihoods_are_transformers_own(server: Running, model: Any, tokeniser: Any, as_text: bool) -> None:
    ids = [tokeniser.encode(text, add_special_tokens=False) for text in TEXTS]
    greedy = [*ids[0], *greedy_after(model, ids[0], 4)]
    prompts, lengths = [*ids, greedy], [3, 1, 1, len(ids[0])]
    asked = [tokeniser.decode(each) for each in prompts] if as_text else prompts
    got = parsed_as_lm_eval(ask_as_lm_eval(server, asked), lengths)
    for prompt, length, (value, is_greedy) in zip(prompts, lengths, got, strict=True):
        chances = log_probs(model, prompt)[length - 1 :]
        own = chances.gather(1, torch.tensor(prompt[length:], dtype=torch.long)[:, None])
        assert value == pytest.approx(float(own.sum()), abs=1e-3)
        assert is_greedy == (chances.argmax(-1).tolist() == prompt[length:])
    assert got[3][1]


def greedy_after(model: Any, ids: list[int], count: int) -> list[int]:
    written: list[int] = []
    with torch.inference_mode():
        for _ in range(count):
            written.append(int(model(torch.tensor([ids + written]), use_cache=False).logits[0, -1].argmax()))
    return written


def test_multiple_choice_ranks_as_transformers_does(server: Running, model: Any, tokeniser: Any) -> None:
    begin = tokeniser.encode("for i in range(10):\n    ", add_special_tokens=False)
    options = [
        tokeniser.encode(text, add_special_tokens=False) for text in ("print(i)", "banana!", "pass", "return None")
    ]
    got = parsed_as_lm_eval(ask_as_lm_eval(server, [begin + each for each in options]), [len(begin)] * 4)
    own = []
    for each in options:
        chances = log_probs(model, begin + each)[len(begin) - 1 :]
        own.append(float(chances.gather(1, torch.tensor(each)[:, None]).sum()))
    assert [value for value, _ in got] == pytest.approx(own, abs=1e-3)


def test_echo_through_openais_client(server: Running, tokeniser: Any) -> None:
    client = server.client()
    done: Any = client.completions.create(
        model="tiny", prompt=TEXTS[0], echo=True, max_tokens=4, temperature=0, logprobs=2
    )
    plain: Any = client.completions.create(model="tiny", prompt=TEXTS[0], max_tokens=4, temperature=0, logprobs=2)
    told, after = done.choices[0].logprobs, plain.choices[0].logprobs
    assert done.choices[0].text == TEXTS[0] + plain.choices[0].text
    prompt = len(tokeniser.encode(TEXTS[0], add_special_tokens=False))
    assert "".join(told.tokens).startswith(TEXTS[0])
    assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
    assert told.token_logprobs[prompt:][: len(after.token_logprobs)] == pytest.approx(after.token_logprobs, abs=1e-4)
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs)
    assert len(told.tokens) == prompt + done.usage.completion_tokens
    text_only = client.completions.create(model="tiny", prompt=TEXTS[1], echo=True, max_tokens=1)
    assert text_only.choices[0].text.startswith(TEXTS[1])
    assert text_only.choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError, match="echo is for whole replies"):
        client.completions.create(model="tiny", prompt="a", echo=True, stream=True)
    with pytest.raises(openai.BadRequestError, match="'echo' is not supported"):
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "a"}], extra_body={"echo": True}
        )


def test_the_end_token_is_among_the_log_probs(server: Running, model: Any, tokeniser: Any) -> None:
    """lm-eval drops the last entry as the sampled one: an end token that was sampled must be there to be dropped."""
    for text in (*TEXTS, "print('hello')\n" * 3):
        ids = tokeniser.encode(text, add_special_tokens=False)
        assert len(ask_as_lm_eval(server, [ids])["choices"][0]["logprobs"]["token_logprobs"]) == len(ids) + 1
    assert greedy_after(model, tokeniser.encode(TEXTS[0], add_special_tokens=False), 1) == [tokeniser.eos_token_id]
