"""A server that takes messages: how much fits is known in tokens, what is sent is counted in bytes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from etude.agent.endpoint import BYTES, SHRINK, EndpointPolicy
from etude.errors import UserError
from etude.inference.policy import Sampling

PROMPT = [257, *b"x" * 98, 259]
TOO_LONG = UserError("the context is 100 tokens; the prompt has 90 and 50 are to be written (status 400)")


def answers(*replies: Any) -> tuple[EndpointPolicy, list[dict[str, Any]]]:
    """A policy whose server answers so, and the requests it gets."""
    policy, asked, left = EndpointPolicy("http://127.0.0.1:9/v1"), list[dict[str, Any]](), iter(replies)

    async def tell(path: str, body: Any = None) -> Any:
        assert path == "/v1/chat/completions"
        asked.append(dict(body))
        reply = next(left)
        if isinstance(reply, UserError):
            raise reply
        return {"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}], **reply}

    policy.tell = tell  # type: ignore[method-assign]
    policy.set_context(100)
    return policy, asked


def test_the_answer_is_bounded_in_tokens_and_the_size_of_tokens_is_learnt() -> None:
    policy, asked = answers({"usage": {"prompt_tokens": 50}}, {"usage": {"prompt_tokens": 10}})
    assert policy.info.context == BYTES * 100
    asyncio.run(policy.generate(PROMPT, Sampling(40)))
    assert (asked[0]["max_tokens"], policy.info.context) == (10, 200)
    done = asyncio.run(policy.generate(PROMPT, Sampling(40)))
    assert (asked[1]["max_tokens"], policy.info.context) == (20, 200)  # it only ever shrinks
    assert bytes(token.id for token in done.tokens[:-1]) == b"yes"


def test_where_both_do_not_fit_it_asks_for_what_fits() -> None:
    policy, asked = answers(TOO_LONG, {})
    assert asyncio.run(policy.generate(PROMPT, Sampling(40))).finish_reason == "stop"
    assert ["max_tokens" in body for body in asked] == [True, False]


def test_a_prompt_that_does_not_fit_is_a_full_context() -> None:
    policy, _ = answers(TOO_LONG, TOO_LONG)
    done = asyncio.run(policy.generate(PROMPT, Sampling(40)))
    assert (done.tokens, done.finish_reason, policy.info.context) == ([], "length", int(BYTES * SHRINK * 100))


def test_any_other_refusal_is_the_users_to_read() -> None:
    policy, _ = answers(UserError("no such model (status 404)"))
    with pytest.raises(UserError, match="no such model"):
        asyncio.run(policy.generate(PROMPT, Sampling(40)))


@pytest.mark.parametrize(
    ("url", "api"),
    [("http://h:1", "/v1"), ("http://h:1/v1/", "/v1"), ("https://h/api/v1", "/v1"), ("https://h/v1beta/openai", "")],
)
def test_where_the_routes_are(url: str, api: str) -> None:
    assert EndpointPolicy(url).api == api
