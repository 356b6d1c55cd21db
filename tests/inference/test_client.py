"""The client against a server that speaks the token API as vLLM does, well and badly (fake_server.py)."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from etude.errors import UserError
from etude.inference.client import ClientSettings, RemotePolicy, ServerFailed, exact, meaning_of
from etude.inference.policy import Busy, Completion, Policy, Sampling, Token
from tests.inference.fake_server import CONTEXT, VOCABULARY, FakeServer, distributions, logits_after, text_of

QUICK = ClientSettings(backoff=0.001, retries=2)
PROMPT = [3, 1, 4, 1, 5]


def with_policy(
    fake: FakeServer, work: Callable[[RemotePolicy], Awaitable[Any]], settings: ClientSettings = QUICK, **opening: Any
) -> Any:
    """Run `work` with a policy over the fake; what the probes sent is forgotten."""

    async def session() -> Any:
        async with fake:
            faults, fake.faults = fake.faults, []
            policy = await RemotePolicy.open(fake.url, VOCABULARY, settings=settings, **opening)
            fake.faults = faults
            fake.bodies.clear()
            try:
                return await work(policy)
            finally:
                await policy.close()

    return asyncio.run(session())


def ask(fake: FakeServer, sampling: Sampling, settings: ClientSettings = QUICK) -> Completion:
    completion = with_policy(fake, lambda policy: policy.generate(PROMPT, sampling), settings)
    assert isinstance(completion, Completion)
    return completion


def expected(tokens: list[int], sampling: Sampling, meaning: str) -> list[float]:
    """Work out the log-probs of tokens under one of the distributions."""
    numbers = []
    for place, token in enumerate(tokens):
        logits = logits_after([*PROMPT, *tokens[:place]])
        numbers.append(distributions(logits, sampling.temperature, sampling.top_k, sampling.top_p)[meaning][token])
    return numbers


# ---- what comes back


PLAIN = Sampling(12)
WARM = Sampling(12, temperature=0.7)
CUT = Sampling(12, top_k=5)
NUCLEUS = Sampling(12, temperature=0.7, top_p=0.8)


@pytest.mark.parametrize(
    ("meaning", "sampling", "drawn", "raw"),
    [
        *((meaning, PLAIN, True, True) for meaning in ("raw", "processed")),
        ("raw", WARM, False, True),
        ("raw", CUT, False, True),
        ("raw", NUCLEUS, False, True),
        ("processed", WARM, True, False),
        ("processed", CUT, True, False),
        ("processed", NUCLEUS, True, False),
    ],
)
def test_log_probs_are_exact_or_nan(meaning: str, sampling: Sampling, drawn: bool, raw: bool) -> None:
    completion = ask(FakeServer(meaning), sampling)
    for numbers, known, truth in ((completion.logprobs, drawn, "processed"), (completion.raw_logprobs, raw, "raw")):
        if known:
            assert numbers == pytest.approx(expected(completion.token_ids, sampling, truth), abs=1e-9)
        else:
            assert all(math.isnan(number) for number in numbers)
    assert len(completion.tokens) == 12
    assert (completion.finish_reason, completion.stopped_by, completion.cached) == ("length", None, 3)


@pytest.mark.parametrize("meaning", ["raw", "processed"])
def test_greedy_tokens_are_certain(meaning: str) -> None:
    sampling = Sampling(8, temperature=0.0, top_k=3, top_p=0.5)
    completion = ask(FakeServer(meaning), sampling)
    likeliest: list[int] = []
    for _ in range(8):
        logits = logits_after([*PROMPT, *likeliest])
        likeliest.append(logits.index(max(logits)))
    assert completion.token_ids == likeliest
    assert completion.logprobs == [0.0] * 8
    assert completion.raw_logprobs == pytest.approx(expected(likeliest, sampling, "raw"), abs=1e-9)


@given(
    logits=some.lists(some.floats(-5, 5), min_size=2, max_size=6),
    temperature=some.sampled_from([0.3, 1.0, 1.7]),
    top_k=some.integers(0, 4),
    top_p=some.sampled_from([0.4, 0.9, 1.0]),
    meaning=some.sampled_from(["raw", "processed"]),
)
def test_what_is_called_exact_is_the_same_number(
    logits: list[float], temperature: float, top_k: int, top_p: float, meaning: Any
) -> None:
    numbers = distributions(logits, temperature, top_k, top_p)
    drawn, raw = exact(meaning, Sampling(1, temperature, top_p, top_k))
    for token in (token for token, number in enumerate(numbers["processed"]) if number > -math.inf):
        assert not drawn or numbers[meaning][token] == pytest.approx(numbers["processed"][token])
        assert not raw or numbers[meaning][token] == pytest.approx(numbers["raw"][token])


def test_the_meaning_shows_in_two_probes() -> None:
    greedy = [-1.0, -2.5]
    assert meaning_of(greedy, [-1.003, -2.49]) == "raw"  # bf16
    assert meaning_of(greedy, [0.0, 0.0]) == "processed"
    with pytest.raises(UserError, match="after temperature"):
        meaning_of(greedy, [-1.6, -3.1])
    assert meaning_of([-1e-7, -2.0], [0.0, -2.0]) == "raw"


@pytest.mark.parametrize("meaning", ["raw", "processed"])
def test_a_probe_that_came_out_otherwise_is_made_again(meaning: str) -> None:
    """In bf16, beside other requests, or while weights change, the same tokens may not come twice."""

    async def found(fake: FakeServer) -> Any:
        async with fake:
            policy = await RemotePolicy.open(fake.url, VOCABULARY, settings=QUICK)
            await policy.close()
            return policy.info.details["logprobs"]

    assert asyncio.run(found(FakeServer(meaning, faults=["", "off", "off", ""]))) == meaning
    with pytest.raises(UserError, match="after temperature"):
        asyncio.run(found(FakeServer("scaled")))


def test_alternatives_are_the_likeliest_at_temperature_one() -> None:
    completion = ask(FakeServer(), Sampling(6, alternatives=3))
    for place, token in enumerate(completion.tokens):
        raw = distributions(logits_after([*PROMPT, *completion.token_ids[:place]]), 1.0, 0, 1.0)["raw"]
        best = sorted(range(VOCABULARY), key=lambda one: -raw[one])[:3]
        assert [pair[0] for pair in token.alternatives] == best
        assert [pair[1] for pair in token.alternatives] == pytest.approx([raw[one] for one in best])


@pytest.mark.parametrize("piece", [1, 3, 50])
def test_tokens_are_heard_as_they_come(piece: int) -> None:
    heard: list[list[Token]] = []
    fake = FakeServer(piece=piece)
    completion = with_policy(fake, lambda policy: policy.generate(PROMPT, Sampling(10), on_tokens=heard.append))
    assert [len(tokens) for tokens in heard] == [min(piece, 10 - start) for start in range(0, 10, piece)]
    assert [token for tokens in heard for token in tokens] == completion.tokens


def test_a_seed_or_its_absence_is_passed_on() -> None:
    async def work(policy: RemotePolicy) -> None:
        await policy.generate(PROMPT, Sampling(2))
        await policy.generate(PROMPT, Sampling(2, seed=11))

    fake = FakeServer()
    with_policy(fake, work)
    assert [body["sampling_params"]["seed"] for body in fake.bodies] == [None, 11]


def test_it_is_a_policy() -> None:
    async def work(policy: Policy) -> None:
        assert (policy.info.name, policy.info.context, policy.info.vocabulary) == ("toy", CONTEXT, VOCABULARY)
        assert policy.info.details["logprobs"] == "raw"

    with_policy(FakeServer(), work)


# ---- what ends it


def test_a_stop_token_is_part_of_the_completion() -> None:
    plain = ask(FakeServer(), Sampling(20, temperature=0.0)).token_ids
    stop = plain[4]
    completion = ask(FakeServer(), Sampling(20, temperature=0.0, stop_tokens=frozenset({stop})))
    assert completion.token_ids == plain[: plain.index(stop) + 1]
    assert (completion.finish_reason, completion.stopped_by) == ("stop", stop)


def test_a_stop_text_ends_it() -> None:
    plain = ask(FakeServer(), Sampling(20, temperature=0.0)).token_ids
    stop = text_of(plain)[4:6]
    completion = ask(FakeServer(), Sampling(20, temperature=0.0, stop=("?", stop)))
    assert stop in text_of(completion.token_ids)
    assert stop not in text_of(completion.token_ids[:-1])
    assert (completion.finish_reason, completion.stopped_by) == ("stop", stop)


def test_the_end_of_text_does_not_stop_it_unasked() -> None:
    plain = ask(FakeServer(), Sampling(5, temperature=0.0)).token_ids
    assert ask(FakeServer(end_of_text=plain[1]), Sampling(5, temperature=0.0)).token_ids == plain


# ---- versions


def test_versions_are_those_of_the_last_event() -> None:
    spans = [
        {"version": "default", "start": 0, "end": 1},
        {"version": "7", "start": 1, "end": 3},
        {"version": "8", "start": 3, "end": 4},
    ]
    heard: list[int] = []

    async def work(policy: RemotePolicy) -> list[int]:
        policy.version = 6
        listen = lambda tokens: heard.extend(token.version for token in tokens)  # noqa: E731
        return (await policy.generate(PROMPT, Sampling(4), on_tokens=listen)).versions

    assert with_policy(FakeServer(versions=spans), work) == [6, 7, 7, 8]
    assert heard == [6, 6, 6, 8]  # until the last event nobody knows


def test_a_request_goes_on_after_the_tokens_that_came() -> None:
    """Over three connections: two die after two tokens each; the toy's tokens depend on all that came before."""
    sampling = Sampling(6, temperature=0.0)
    fake, heard = FakeServer(faults=["die:2", "status:503", "die:2"]), list[Token]()
    resuming = QUICK.model_copy(update={"resume": True})
    done = with_policy(fake, lambda policy: policy.generate(PROMPT, sampling, on_tokens=heard.extend), resuming)
    assert done.tokens == heard
    assert done.token_ids == ask(FakeServer(), sampling).token_ids
    assert [body["sampling_params"]["max_tokens"] for body in fake.bodies] == [6, 4, 4, 2]


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_request_of_which_all_but_the_end_came_is_not_sent_again(finish: str) -> None:
    last = ask(FakeServer(), Sampling(2, temperature=0.0)).token_ids[-1]
    sampling = (
        Sampling(2, temperature=0.0)
        if finish == "length"
        else Sampling(9, temperature=0.0, stop_tokens=frozenset({last}))
    )
    fake = FakeServer(faults=["die:2"], piece=1)
    done = with_policy(
        fake, lambda policy: policy.generate(PROMPT, sampling), QUICK.model_copy(update={"resume": True})
    )
    assert (len(done.tokens), done.finish_reason, len(fake.bodies)) == (2, finish, 1)


# ---- faults


@pytest.mark.parametrize("faults", [["status:429,0"], ["status:503"], ["drop"], ["status:429", "drop"], ["die:0"]])
def test_it_asks_again_where_nothing_was_lost(faults: list[str]) -> None:
    fake = FakeServer(faults=[*faults])
    assert ask(fake, Sampling(5)).token_ids == ask(FakeServer(), Sampling(5)).token_ids
    assert len(fake.bodies) == len(faults) + 1


@pytest.mark.parametrize(("status", "after", "sent"), [("429", 30, 3), ("503", 30, 3), ("429,3600", 3600, 1)])
def test_a_server_that_stays_busy(status: str, after: float, sent: int) -> None:
    fake = FakeServer(faults=[f"status:{status}"] * 9)
    with pytest.raises(Busy) as busy:
        ask(fake, Sampling(5))
    assert (busy.value.after, len(fake.bodies)) == (after, sent)


FAILURES = {
    "die:2": "hung up after 2 tokens",
    "end:2": "ended after 2 tokens, saying None",
    "abort": "abort",
    "error": "failed: engine core died",
    "rubbish": "sent no reply of",
    "no_ids": "sent no reply of",
    "uneven": "sent no reply of",
    "shapeless": "sent no reply of",
    "number": "sent no reply of",
    "words": "sent no reply of",
    "beyond": "another model",
    "status:500": "failed: says 500",
}


@pytest.mark.parametrize("fault", FAILURES)
def test_a_failure_is_told_at_once_and_harms_no_other_request(fault: str) -> None:
    async def work(policy: RemotePolicy) -> None:
        with pytest.raises(ServerFailed, match=FAILURES[fault]) as failed:
            await policy.generate(PROMPT, Sampling(5))
        assert "\n" not in str(failed.value)
        assert len((await policy.generate(PROMPT, Sampling(5))).tokens) == 5

    fake = FakeServer(faults=[fault])
    with_policy(fake, work)
    assert len(fake.bodies) == 2  # so it was not asked again


@pytest.mark.parametrize(
    ("fault", "limits", "match"),
    [
        ("hang:0", {"first_token": 0.05}, r"sent nothing in 0\.05 s"),
        ("hang:2", {"between_tokens": 0.05}, r"nothing for 0\.05 s after 2 tokens"),
        ("hang:2", {"total": 0.05}, r"longer than 0\.05 s in all; 2 tokens came"),
    ],
)
def test_a_server_that_hangs(fault: str, limits: dict[str, float], match: str) -> None:
    async def work(policy: RemotePolicy) -> None:
        policy._settings = QUICK.model_copy(update=limits)  # the probes had all the time they needed
        with pytest.raises(ServerFailed, match=match):
            await policy.generate(PROMPT, Sampling(5))
        await fake.left.wait()

    fake = FakeServer(faults=[fault])
    with_policy(fake, work)
    assert len(fake.bodies) == 1


def test_cancelling_closes_the_connection() -> None:
    async def work(policy: RemotePolicy) -> None:
        began = asyncio.Event()
        asking = asyncio.create_task(policy.generate(PROMPT, Sampling(9), on_tokens=lambda _: began.set()))
        await began.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await fake.left.wait()

    fake = FakeServer(faults=["hang:1"])
    with_policy(fake, work)


def test_closing_ends_requests_under_way_and_later_ones() -> None:
    async def work(policy: RemotePolicy) -> None:
        began = asyncio.Event()
        asking = asyncio.create_task(policy.generate(PROMPT, Sampling(9), on_tokens=lambda _: began.set()))
        await began.wait()
        await policy.close()
        with pytest.raises(ServerFailed, match="closed after 1 token"):
            await asking
        with pytest.raises(ServerFailed, match="is closed"):
            await policy.generate(PROMPT, Sampling(9))

    with_policy(FakeServer(faults=["hang:1"]), work)


def test_many_at_once_do_not_mix() -> None:
    async def work(policy: RemotePolicy) -> list[Completion]:
        prompts = [[token] for token in range(VOCABULARY)]
        return await asyncio.gather(*(policy.generate(prompt, Sampling(6, temperature=0.0)) for prompt in prompts * 3))

    completions = with_policy(FakeServer(), work)
    for place, completion in enumerate(completions):
        logits = logits_after([place % VOCABULARY])
        assert completion.token_ids[0] == logits.index(max(logits))
    assert len({tuple(completion.token_ids) for completion in completions}) > VOCABULARY // 2


# ---- requests that are refused here


@pytest.mark.parametrize(
    ("prompt", "sampling", "match"),
    [
        ([], Sampling(1), "at least one"),
        ([1.5], Sampling(1), "whole numbers"),
        ([VOCABULARY], Sampling(1), f"token id {VOCABULARY} is outside"),
        ([-1], Sampling(1), "token id -1 is outside"),
        ([1], Sampling(1, stop_tokens=frozenset({VOCABULARY + 3})), f"token id {VOCABULARY + 3} is outside"),
        ([1] * CONTEXT, Sampling(1), f"more than the context of {CONTEXT}"),
        ([1], Sampling(1, score=True), "log-probs of the prompt's tokens cannot be had of http"),
        ([1], Sampling(1, constraint=object), "constrained decoding cannot be had of http"),
    ],
)
def test_a_wrong_request_is_not_sent(prompt: list[int], sampling: Sampling, match: str) -> None:
    fake = FakeServer()
    with pytest.raises(UserError, match=match):
        with_policy(fake, lambda policy: policy.generate(prompt, sampling))
    assert not fake.bodies


@pytest.mark.parametrize(
    ("meaning", "sampling", "required"),
    [
        ("raw", WARM, {"require_logprob": True}),
        ("processed", Sampling(1, temperature=0.7, alternatives=2), {}),
    ],
)
def test_unknown_log_probs_are_refused_where_required(
    meaning: str, sampling: Sampling, required: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=f"reports {meaning} log-probs"):
        ask(FakeServer(meaning=meaning), sampling, QUICK.model_copy(update=required))
    assert len(ask(FakeServer(meaning=meaning), PLAIN, QUICK.model_copy(update=required)).tokens) == 12


# ---- opening


def opened(fake: FakeServer, vocabulary: int = VOCABULARY, **opening: Any) -> RemotePolicy:
    async def session() -> RemotePolicy:
        async with fake:
            policy = await RemotePolicy.open(fake.url, vocabulary, settings=QUICK, **opening)
            await policy.close()
            return policy

    return asyncio.run(session())


def test_opening_waits_for_a_server_that_is_busy() -> None:
    assert opened(FakeServer(faults=["status:503", "drop"])).info.name == "toy"


def test_a_model_is_chosen_by_name() -> None:
    chosen = opened(FakeServer(), model="toy-lora").info
    assert (chosen.name, chosen.context) == ("toy-lora", CONTEXT)
    with pytest.raises(UserError, match=r"serves no model 'toi'; did you mean 'toy'\?"):
        opened(FakeServer(), model="toi")


def test_a_smaller_vocabulary_shows_at_once() -> None:
    with pytest.raises(UserError, match=f"does not know all {VOCABULARY + 1} ids: another model"):
        opened(FakeServer(), VOCABULARY + 1)


def test_a_token_is_sent() -> None:
    assert opened(FakeServer(token="sesame"), token="sesame").info.name == "toy"
    with pytest.raises(UserError, match="asks for a token"):
        opened(FakeServer(token="sesame"))


@pytest.mark.parametrize(
    "models", ["<html>", {}, {"data": []}, {"data": [{"id": "x"}]}, {"data": 3}, [], {"data": [{}]}]
)
def test_something_else_answers(models: Any) -> None:
    with pytest.raises(ServerFailed, match="neither vLLM nor etude"):
        opened(FakeServer(models=models))


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "", "ftp://host", "file:///etc", "http://", "http://[", "http://host:port"]
)
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(UserError, match="is not the address of a server"):
        asyncio.run(RemotePolicy.open(url, VOCABULARY))


def test_no_server() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets the port, and connecting is refused
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ServerFailed, match=f"no server at {url}.*start it, or check the address"):
            asyncio.run(RemotePolicy.open(url, VOCABULARY, settings=QUICK))


def test_an_address_with_v1_will_do() -> None:
    async def session(fake: FakeServer) -> str:
        async with fake:
            policy = await RemotePolicy.open(f"{fake.url}/v1/", VOCABULARY, settings=QUICK)
            await policy.close()
            return policy.info.name

    assert asyncio.run(session(FakeServer())) == "toy"
