"""The remote policy against a real vLLM on the CPU, with transformers as the oracle. Slow: each server takes a minute to start.

The Python of vLLM's environment is where ETUDE_VLLM_PYTHON says; without it these tests are skipped.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from transformers import AutoModelForCausalLM

import etude
from etude.errors import UserError
from etude.inference.client import RemotePolicy
from etude.inference.policy import Completion, Sampling

VLLM = Path(os.environ.get("ETUDE_VLLM_PYTHON", "python-of-vllm"))
SPROUT = Path(etude.__file__).parent / "models" / "sprout"
VOCABULARY = 6144
CONTEXT = 512
PROMPTS = [[10, 20, 30, 40], [299, 286, 370], list(range(100, 228)), [0]]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not VLLM.is_file(), reason="no vLLM: set ETUDE_VLLM_PYTHON to the Python of an environment that has it"
    ),
]


def start(*flags: str) -> Iterator[str]:
    """Run a server, and yield its address once it says that it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [str(VLLM), "-m", "vllm.entrypoints.openai.api_server", "--model", str(SPROUT), "--served-model-name", "sprout",
               "--host", "127.0.0.1", "--port", port, "--dtype", "float32", "--enforce-eager",
               "--max-model-len", str(CONTEXT), "--enable-prompt-tokens-details", *flags]  # fmt: skip
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | settings
    ) as server:
        assert server.stdout is not None
        said = []
        for line in server.stdout:
            said.append(line)
            if "Application startup complete" in line:
                break
        else:
            pytest.fail(f"vLLM did not start: {''.join(said[-20:])}")
        draining = threading.Thread(
            target=server.stdout.read
        )  # else the server would wait for somebody to read its log
        draining.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            draining.join()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    yield from start()


@pytest.fixture(scope="module")
def processed_server() -> Iterator[str]:
    yield from start("--logprobs-mode", "processed_logprobs")


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(SPROUT, dtype=torch.float32).eval()


def with_policy(url: str, work: Callable[[RemotePolicy], Awaitable[Any]]) -> Any:
    async def session() -> Any:
        policy = await RemotePolicy.open(url, VOCABULARY)
        try:
            return await work(policy)
        finally:
            await policy.close()

    return asyncio.run(session())


def ask(url: str, *sampling: Sampling) -> list[tuple[list[int], Sampling, Completion]]:
    """Ask for every prompt with every sampling, all at once."""
    asked = [(prompt, one) for one in sampling for prompt in PROMPTS]

    async def work(policy: RemotePolicy) -> list[Completion]:
        return await asyncio.gather(*(policy.generate(prompt, one) for prompt, one in asked))

    return [(*pair, completion) for pair, completion in zip(asked, with_policy(url, work), strict=True)]


@torch.inference_mode()  # type: ignore[untyped-decorator]
def logits_of(model: Any, prompt: list[int], completion: Completion) -> torch.Tensor:
    """Return the logits that each token of a completion was sampled from."""
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    return model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()


def picked(logits: torch.Tensor, completion: Completion) -> list[float]:
    chosen = torch.tensor(completion.token_ids)[:, None]
    return [float(number) for number in logits.log_softmax(-1).gather(1, chosen)[:, 0]]


def test_greedy_tokens_are_those_of_transformers(server: str, model: Any) -> None:
    for prompt, _, completion in ask(server, Sampling(32, temperature=0.0)):
        ids = torch.tensor([prompt])
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=32,
            min_new_tokens=32,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert completion.token_ids == written[0, len(prompt) :].tolist()
        assert completion.finish_reason == "length"


def test_log_probs_are_those_of_the_forward_pass(server: str, model: Any) -> None:
    for prompt, sampling, completion in ask(
        server, Sampling(64, seed=1, alternatives=4), Sampling(64, temperature=0.7, top_p=0.9, seed=2)
    ):
        logits = logits_of(model, prompt, completion)
        assert completion.raw_logprobs == pytest.approx(picked(logits, completion), abs=1e-3)
        if sampling.temperature == 1:
            assert completion.logprobs == completion.raw_logprobs
            best = logits.log_softmax(-1).topk(4)
            told = [[number for _, number in token.alternatives] for token in completion.tokens]
            assert torch.allclose(torch.tensor(told), best.values, atol=1e-3)
        else:
            assert all(math.isnan(number) for number in completion.logprobs)


def test_processed_log_probs_are_those_sampled_from(processed_server: str, model: Any) -> None:
    for prompt, sampling, completion in ask(
        processed_server, Sampling(48, temperature=0.7, top_k=12, seed=3), Sampling(48, seed=4)
    ):
        logits = logits_of(model, prompt, completion) / sampling.temperature
        if sampling.top_k:
            logits[logits < logits.topk(sampling.top_k).values[:, -1:]] = -math.inf
            assert all(math.isnan(number) for number in completion.raw_logprobs)
        else:
            assert completion.raw_logprobs == completion.logprobs
        assert completion.logprobs == pytest.approx(picked(logits, completion), abs=1e-3)


def test_stops_are_heeded_and_no_others(server: str) -> None:
    (_, _, plain), *_ = ask(server, Sampling(40, temperature=0.0))
    stop = plain.token_ids[3]
    (_, _, stopped), *_ = ask(server, Sampling(40, temperature=0.0, stop_tokens=frozenset({stop})))
    assert stopped.token_ids == plain.token_ids[: plain.token_ids.index(stop) + 1]
    assert (stopped.finish_reason, stopped.stopped_by) == ("stop", stop)
    for *_, completion in ask(server, Sampling(200, seed=5, stop=("\n\n",))):
        if completion.finish_reason == "stop":
            assert completion.stopped_by == "\n\n"
        else:
            assert len(completion.tokens) == 200


def test_the_same_seed_gives_the_same_tokens_in_any_company(server: str) -> None:
    alone = with_policy(server, lambda policy: policy.generate(PROMPTS[0], Sampling(24, seed=7)))
    among = [
        completion
        for prompt, sampling, completion in ask(server, *(Sampling(24, seed=seed) for seed in range(6, 10)))
        if prompt == PROMPTS[0]
    ]
    assert among[1].token_ids == alone.token_ids
    assert len({tuple(completion.token_ids) for completion in among}) == 4


def test_a_prompt_seen_before_is_cached(server: str) -> None:
    async def work(policy: RemotePolicy) -> Completion:
        prompt = list(range(1000, 1300))
        await policy.generate(prompt, Sampling(1))
        return await policy.generate(prompt, Sampling(1))

    assert with_policy(server, work).cached >= 128


def test_cancelling_ends_the_request_on_the_server(server: str) -> None:
    async def metric(client: httpx2.AsyncClient, name: str) -> float:
        lines = (await client.get("/metrics")).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    async def work(policy: RemotePolicy) -> None:
        async with httpx2.AsyncClient(base_url=server, trust_env=False) as client:
            finished = await metric(client, "vllm:request_success_total")  # vLLM does not count aborted ones
            written = await metric(client, "vllm:generation_tokens_total")
            began = asyncio.Event()
            asking = asyncio.create_task(policy.generate([1], Sampling(CONTEXT - 1), on_tokens=lambda _: began.set()))
            await began.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            while await metric(client, "vllm:num_requests_running"):  # it ends either way: aborted, or at full length
                pass
            assert await metric(client, "vllm:request_success_total") == finished
            assert 0 < await metric(client, "vllm:generation_tokens_total") - written < CONTEXT - 1

    with_policy(server, work)


def test_another_vocabulary_and_a_wrong_name_are_told(server: str) -> None:
    with pytest.raises(UserError, match=r"does not know all 6145 ids: another model; .*out of vocabulary"):
        asyncio.run(RemotePolicy.open(server, VOCABULARY + 1))
    with pytest.raises(UserError, match="serves no model 'sprout2'; did you mean 'sprout'"):
        asyncio.run(RemotePolicy.open(server, VOCABULARY, "sprout2"))
