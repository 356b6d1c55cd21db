"""The remote policy against a server that speaks as vLLM or SGLang does, well and badly (fake_server.py)."""

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
from etude.inference.client import RemotePolicy, RemoteSettings, ServerFailed, meaning_of, told
from etude.inference.policy import Busy, Completion, Policy, Sampling, Token
from tests.inference.fake_server import CONTEXT, VOCABULARY, FakeServer, distributions, logits_after, text_of

QUICK = RemoteSettings(backoff=0.001, retries=2)
PROMPT = [3, 1, 4, 1, 5]
KINDS = pytest.mark.parametrize("kind", ["vllm", "sglang"])


def with_policy(
    fake: FakeServer, work: Callable[[RemotePolicy], Awaitable[Any]], settings: RemoteSettings = QUICK, **opening: Any
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


def ask(fake: FakeServer, sampling: Sampling, settings: RemoteSettings = QUICK) -> Completion:
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


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("meaning", "sampling", "drawn", "raw"),
    [
        *((meaning, PLAIN, True, True) for meaning in ("raw", "scaled", "processed")),
        ("raw", WARM, False, True),
        ("raw", CUT, False, True),
        ("raw", NUCLEUS, False, True),
        ("scaled", WARM, True, False),
        ("scaled", CUT, False, True),
        ("scaled", NUCLEUS, False, False),
        ("processed", WARM, True, False),
        ("processed", CUT, True, False),
        ("processed", NUCLEUS, True, False),
    ],
)
def test_log_probs_are_exact_or_nan(kind: str, meaning: str, sampling: Sampling, drawn: bool, raw: bool) -> None:
    completion = ask(FakeServer(kind, meaning), sampling)
    for numbers, known, truth in ((completion.logprobs, drawn, "processed"), (completion.raw_logprobs, raw, "raw")):
        if known:
            assert numbers == pytest.approx(expected(completion.token_ids, sampling, truth), abs=1e-9)
        else:
            assert all(math.isnan(number) for number in numbers)
    assert len(completion.tokens) == 12
    assert (completion.finish_reason, completion.stopped_by, completion.cached) == ("length", None, 3)


@KINDS
@pytest.mark.parametrize("meaning", ["raw", "scaled", "processed"])
def test_greedy_tokens_are_certain(kind: str, meaning: str) -> None:
    sampling = Sampling(8, temperature=0.0, top_k=3, top_p=0.5)
    completion = ask(FakeServer(kind, meaning), sampling)
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
    meaning=some.sampled_from(["raw", "scaled", "processed"]),
)
def test_what_is_called_told_is_the_same_number(
    logits: list[float], temperature: float, top_k: int, top_p: float, meaning: Any
) -> None:
    numbers = distributions(logits, temperature, top_k, top_p)
    drawn, raw = told(meaning, Sampling(1, temperature, top_p, top_k))
    for token in (token for token, number in enumerate(numbers["processed"]) if number > -math.inf):
        assert not drawn or numbers[meaning][token] == pytest.approx(numbers["processed"][token])
        assert not raw or numbers[meaning][token] == pytest.approx(numbers["raw"][token])


def test_the_meaning_shows_in_two_probes() -> None:
    greedy = [-1.0, -2.5]
    assert meaning_of(greedy, [-1.003, -2.49]) == "raw"  # bf16
    assert meaning_of(greedy, [0.0, 0.0]) == "processed"
    assert meaning_of(greedy, [-1.6, -3.1]) == "scaled"
    assert meaning_of([-1e-7, -2.0], [0.0, -2.0]) == "raw"


@KINDS
def test_alternatives_are_the_likeliest_at_temperature_one(kind: str) -> None:
    completion = ask(FakeServer(kind), Sampling(6, alternatives=3))
    for place, token in enumerate(completion.tokens):
        raw = distributions(logits_after([*PROMPT, *completion.token_ids[:place]]), 1.0, 0, 1.0)["raw"]
        best = sorted(range(VOCABULARY), key=lambda one: -raw[one])[:3]
        assert [pair[0] for pair in token.alternatives] == best
        assert [pair[1] for pair in token.alternatives] == pytest.approx([raw[one] for one in best])


@pytest.mark.parametrize(("kind", "incremental"), [("vllm", False), ("sglang", False), ("sglang", True)])
@pytest.mark.parametrize("piece", [1, 3, 50])
def test_tokens_are_heard_as_they_come(kind: str, incremental: bool, piece: int) -> None:
    heard: list[list[Token]] = []
    fake = FakeServer(kind, incremental=incremental, piece=piece)
    completion = with_policy(fake, lambda policy: policy.generate(PROMPT, Sampling(10), on_tokens=heard.append))
    assert [len(tokens) for tokens in heard] == [min(piece, 10 - start) for start in range(0, 10, piece)]
    assert [token for tokens in heard for token in tokens] == completion.tokens


@KINDS
def test_a_seed_or_its_absence_is_passed_on(kind: str) -> None:
    async def work(policy: RemotePolicy) -> None:
        await policy.generate(PROMPT, Sampling(2))
        await policy.generate(PROMPT, Sampling(2, seed=11))

    fake = FakeServer(kind)
    if kind == "sglang":
        with pytest.raises(UserError, match="heeds no seed of a single request"):
            with_policy(fake, work)
    else:
        with_policy(fake, work)
        assert [body.get("seed") for body in fake.bodies] == [None, 11]


def test_it_is_a_policy() -> None:
    async def work(policy: Policy) -> None:
        assert (policy.info.name, policy.info.context, policy.info.vocabulary) == ("toy", CONTEXT, VOCABULARY)
        assert policy.info.details["logprobs"] == "raw"

    with_policy(FakeServer(), work)


# ---- what ends it


@KINDS
def test_a_stop_token_is_part_of_the_completion(kind: str) -> None:
    plain = ask(FakeServer(kind), Sampling(20, temperature=0.0)).token_ids
    stop = plain[4]
    completion = ask(FakeServer(kind), Sampling(20, temperature=0.0, stop_tokens=frozenset({stop})))
    assert completion.token_ids == plain[: plain.index(stop) + 1]
    assert (completion.finish_reason, completion.stopped_by) == ("stop", stop)


@KINDS
def test_a_stop_text_ends_it(kind: str) -> None:
    plain = ask(FakeServer(kind), Sampling(20, temperature=0.0)).token_ids
    stop = text_of(plain)[4:6]
    completion = ask(FakeServer(kind), Sampling(20, temperature=0.0, stop=("?", stop)))
    assert stop in text_of(completion.token_ids)
    assert stop not in text_of(completion.token_ids[:-1])
    assert (completion.finish_reason, completion.stopped_by) == ("stop", stop)


@KINDS
def test_the_end_of_text_does_not_stop_it_unasked(kind: str) -> None:
    plain = ask(FakeServer(kind), Sampling(5, temperature=0.0)).token_ids
    assert ask(FakeServer(kind, end_of_text=plain[1]), Sampling(5, temperature=0.0)).token_ids == plain


def test_sglang_stopping_unasked_is_said() -> None:
    plain = ask(FakeServer("sglang"), Sampling(5, temperature=0.0)).token_ids
    other = next(token for token in range(VOCABULARY) if token not in plain)
    with pytest.raises(UserError, match=f"stopped at {plain[1]}, which is not among the stops"):
        ask(FakeServer("sglang", end_of_text=plain[1]), Sampling(5, temperature=0.0, stop_tokens=frozenset({other})))


# ---- versions


def test_the_version_is_the_one_at_arrival() -> None:
    async def work(policy: RemotePolicy) -> list[int]:
        policy.version = 4

        def on_tokens(tokens: list[Token]) -> None:
            policy.version = 5

        return (await policy.generate(PROMPT, Sampling(4), on_tokens=on_tokens)).versions

    assert with_policy(FakeServer(), work) == [4, 5, 5, 5]
    assert with_policy(FakeServer("sglang"), work) == [4, 5, 5, 5]
    assert with_policy(FakeServer("sglang", weight_version="17"), work) == [17] * 4


# ---- faults


@KINDS
@pytest.mark.parametrize("faults", [["status:429,0"], ["status:503"], ["drop"], ["status:429", "drop"], ["die:0"]])
def test_it_asks_again_where_nothing_was_lost(kind: str, faults: list[str]) -> None:
    fake = FakeServer(kind, faults=[*faults])
    assert ask(fake, Sampling(5)).token_ids == ask(FakeServer(kind), Sampling(5)).token_ids
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
    "shapeless": "sent no reply of",
    "number": "sent no reply of",
    "words": "sent no reply of",
    "beyond": "another model",
    "status:500": "failed: says 500",
}


@KINDS
@pytest.mark.parametrize("fault", FAILURES)
def test_a_failure_is_told_at_once_and_harms_no_other_request(kind: str, fault: str) -> None:
    async def work(policy: RemotePolicy) -> None:
        with pytest.raises(ServerFailed, match=FAILURES[fault]) as failed:
            await policy.generate(PROMPT, Sampling(5))
        assert "\n" not in str(failed.value)
        assert len((await policy.generate(PROMPT, Sampling(5))).tokens) == 5

    fake = FakeServer(kind, faults=[fault])
    with_policy(fake, work)
    assert len(fake.bodies) == 2  # so it was not asked again


@KINDS
def test_a_server_without_token_ids_is_too_old(kind: str) -> None:
    with pytest.raises(UserError, match=r"returns no token ids.*update it"):
        ask(FakeServer(kind, faults=["no_ids"]), Sampling(5))


def test_ids_and_log_probs_must_be_as_many() -> None:
    with pytest.raises(ServerFailed, match="sent no reply of vLLM"):
        ask(FakeServer(faults=["uneven"]), Sampling(5))


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


@KINDS
def test_cancelling_closes_the_connection(kind: str) -> None:
    async def work(policy: RemotePolicy) -> None:
        began = asyncio.Event()
        asking = asyncio.create_task(policy.generate(PROMPT, Sampling(9), on_tokens=lambda _: began.set()))
        await began.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await fake.left.wait()

    fake = FakeServer(kind, faults=["hang:1"])
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


@KINDS
def test_many_at_once_do_not_mix(kind: str) -> None:
    async def work(policy: RemotePolicy) -> list[Completion]:
        prompts = [[token] for token in range(VOCABULARY)]
        return await asyncio.gather(*(policy.generate(prompt, Sampling(6, temperature=0.0)) for prompt in prompts * 3))

    completions = with_policy(FakeServer(kind), work)
    for place, completion in enumerate(completions):
        logits = logits_after([place % VOCABULARY])
        assert completion.token_ids[0] == logits.index(max(logits))
    assert len({tuple(completion.token_ids) for completion in completions}) > VOCABULARY // 2


# ---- requests that are refused here


@pytest.mark.parametrize(
    ("prompt", "sampling", "match"),
    [
        ([], Sampling(1), "prompt is empty"),
        ([VOCABULARY], Sampling(1), f"token id {VOCABULARY} is outside"),
        ([-1], Sampling(1), "token id -1 is outside"),
        ([1], Sampling(1, stop_tokens=frozenset({VOCABULARY + 3})), f"token id {VOCABULARY + 3} is outside"),
        ([1] * CONTEXT, Sampling(1), f"more than the context of {CONTEXT}"),
        ([1], Sampling(1, experts=True), "routed experts"),
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
        ("processed", WARM, {"require_raw_logprob": True}),
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


@KINDS
def test_a_smaller_vocabulary_shows_at_once(kind: str) -> None:
    with pytest.raises(UserError, match=f"does not know all {VOCABULARY + 1} ids: another model"):
        opened(FakeServer(kind), VOCABULARY + 1)


def test_a_token_is_sent() -> None:
    assert opened(FakeServer(token="sesame"), token="sesame").info.name == "toy"
    with pytest.raises(UserError, match="asks for a token"):
        opened(FakeServer(token="sesame"))


@pytest.mark.parametrize(
    "models", ["<html>", {}, {"data": []}, {"data": [{"id": "x"}]}, {"data": 3}, [], {"data": [{}]}]
)
def test_something_else_answers(models: Any) -> None:
    with pytest.raises(ServerFailed, match="no vLLM or SGLang server"):
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
