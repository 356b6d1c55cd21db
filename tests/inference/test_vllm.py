"""The one client against a real vLLM on the CPU, with transformers as the oracle; RL, bench and agent through it. Slow: a server takes
a minute to start.

The Python of vLLM's environment is where VLLM_PYTHON says; without it these tests are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import itertools
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import etude
from etude.agent.policies import find
from etude.agent.trace import read_traces
from etude.bench.agents import BenchSettings, model_agent, run_benchmark
from etude.bench.trials import read_results
from etude.errors import UserError
from etude.inference.client import RemotePolicy, ServerFailed
from etude.inference.local import LocalPolicy
from etude.inference.policy import Completion, Sampling
from etude.inference.weight_sync import BrokenStore, WeightStore
from etude.progress import Reporter
from etude.rl.engine import VllmWeights
from tests import tiny
from tests.bench import calc_set

VLLM = Path(os.environ.get("VLLM_PYTHON", "python-of-vllm"))
SPROUT = Path(etude.__file__).parent / "models" / "sprout"
ROOT = Path(__file__).parents[2]
VOCABULARY = 6144
CONTEXT = 2048
PROMPTS = [[10, 20, 30, 40], [299, 286, 370], list(range(100, 228)), [0]]
PLUG = (
    "--weight-transfer-config",
    '{"backend": "etude"}',
    "--worker-extension-cls",
    "etude.inference.vllm_plugin.Fetching",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not VLLM.is_file(), reason="no vLLM: set VLLM_PYTHON to the Python of an environment that has it"
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sprout with an output layer of its own."""
    made = tmp_path_factory.mktemp("models") / "untied"
    model = AutoModelForCausalLM.from_pretrained(SPROUT, dtype=torch.float32)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    model.save_pretrained(made)
    AutoTokenizer.from_pretrained(SPROUT).save_pretrained(made)
    return made


def start(folder: Path, *flags: str, plug: tuple[str, ...] = PLUG) -> Iterator[str]:
    """Run a server, and yield its address once it says that it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [str(VLLM), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "sprout",
               "--host", "127.0.0.1", "--port", port, "--dtype", "float32", "--enforce-eager", "--max-model-len", str(CONTEXT),
               "--enable-prompt-tokens-details", "--enable-scale-out", *plug, *flags]  # fmt: skip
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_SERVER_DEV_MODE": "1"}  # fmt: skip
    with tempfile.TemporaryDirectory() as installed:  # as pip would: the entry point; the code is that of this tree
        about = Path(installed) / "etude-0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: etude\nVersion: 0\n")
        points = "[vllm.general_plugins]\netude = etude.inference.vllm_plugin:register\n"
        (about / "entry_points.txt").write_text(points)
        settings["PYTHONPATH"] = f"{installed}:{Path(etude.__file__).parents[1]}"
        yield from run(command, os.environ | settings, f"http://127.0.0.1:{port}")


def run(command: list[str], environment: dict[str, str], url: str) -> Iterator[str]:
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, **output) as server:
        assert server.stdout is not None
        said = []
        for line in server.stdout:
            said.append(line)
            if "Application startup complete" in line:
                break
        else:
            pytest.fail(f"vLLM did not start: {''.join(said[-20:])}")
        log = server.stdout  # somebody must read it, else the server would wait
        draining = threading.Thread(target=lambda: said.extend(log))
        draining.start()
        try:
            yield url
        finally:
            server.terminate()
            draining.join()
            sys.stdout.writelines(said[-400:])  # seen where a test fails


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    yield from start(folder)


@pytest.fixture(scope="module")
def processed_server(folder: Path) -> Iterator[str]:
    yield from start(folder, "--logprobs-mode", "processed_logprobs")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def with_policy(url: str, work: Callable[[RemotePolicy], Awaitable[Any]], vocabulary: int = VOCABULARY) -> Any:
    async def session() -> Any:
        policy = await RemotePolicy.open(url, vocabulary)
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


def test_greedy_tokens_are_those_of_transformers_and_of_our_engine(server: str, folder: Path, model: Any) -> None:
    async def ours() -> list[Completion]:
        policy = LocalPolicy.open(folder, device="cpu", context=CONTEXT)
        try:
            return await asyncio.gather(*(policy.generate(prompt, Sampling(32, temperature=0.0)) for prompt in PROMPTS))
        finally:
            await policy.close()

    for (prompt, _, completion), own in zip(
        ask(server, Sampling(32, temperature=0.0)), asyncio.run(ours()), strict=True
    ):
        ids = torch.tensor([prompt])
        usual = {
            "do_sample": False,
            "max_new_tokens": 32,
            "min_new_tokens": 32,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        written = model.generate(ids, attention_mask=torch.ones_like(ids), **usual)
        assert completion.token_ids == own.token_ids == written[0, len(prompt) :].tolist()
        expected = picked(logits_of(model, prompt, completion), completion)
        for each in (completion, own):
            assert each.raw_logprobs == pytest.approx(expected, abs=1e-3)
        assert completion.finish_reason == "length"


def test_log_probs_are_those_of_the_forward_pass(server: str, model: Any) -> None:
    plain, warm = Sampling(64, seed=1, alternatives=4), Sampling(64, temperature=0.7, top_p=0.9, seed=2)
    for prompt, sampling, completion in ask(server, plain, warm):
        logits = logits_of(model, prompt, completion)
        assert completion.raw_logprobs == pytest.approx(picked(logits, completion), abs=1e-3)
        if sampling.temperature == 1:
            assert completion.logprobs == completion.raw_logprobs
            best = logits.log_softmax(-1).topk(4)
            likely = [[number for _, number in token.alternatives] for token in completion.tokens]
            assert torch.allclose(torch.tensor(likely), best.values, atol=1e-3)
        else:
            assert all(math.isnan(number) for number in completion.logprobs)


def test_processed_log_probs_are_those_sampled_from(processed_server: str, model: Any) -> None:
    """Those of transformers' own warpers at the same settings, which are what the trainer takes for the sampler's."""
    cut, plain = Sampling(48, temperature=0.7, top_k=12, seed=3), Sampling(48, seed=4)
    nucleus = Sampling(48, temperature=0.7, top_p=0.9, seed=5)
    for prompt, sampling, completion in ask(processed_server, cut, plain, nucleus):
        warpers = [TemperatureLogitsWarper(sampling.temperature), *([TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []),
                   *([TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else [])]  # fmt: skip
        logits = LogitsProcessorList(warpers)(torch.tensor([prompt]), logits_of(model, prompt, completion))
        if sampling is not plain:
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
            began = asyncio.Event()
            asking = asyncio.create_task(policy.generate([1], Sampling(CONTEXT - 1), on_tokens=lambda _: began.set()))
            await began.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            while await metric(client, "vllm:num_requests_running"):  # it ends either way: aborted, or at full length
                pass
            assert await metric(client, "vllm:request_success_total") == finished

    with_policy(server, work)


def test_another_vocabulary_and_a_wrong_name_are_said(server: str) -> None:
    with pytest.raises(UserError, match=r"does not know all 6145 ids: another model; .*out of vocabulary"):
        asyncio.run(RemotePolicy.open(server, VOCABULARY + 1))
    with pytest.raises(UserError, match="serves no model 'sprout2'; did you mean 'sprout'"):
        asyncio.run(RemotePolicy.open(server, VOCABULARY, "sprout2"))


def test_a_bench_and_an_agent_sample_exact_tokens(server: str, tmp_path: Path) -> None:
    manifest, cache = calc_set.write(tmp_path)
    settings = BenchSettings.model_validate({"k": 1, "limit": 1, "harness": {"turns": 2, "turn_tokens": 64}})

    async def bench() -> None:
        contestant = model_agent(
            await find(server, "cpu", cache, Reporter(quiet=True))
        )  # its tokeniser: where the server's card says
        await run_benchmark(
            calc_set.load(manifest, cache), [contestant], settings, tmp_path / "bench", cache, Reporter(quiet=True)
        )

    asyncio.run(bench())
    (trial,) = read_results(tmp_path / "bench").trials
    assert (trial.model, trial.outcome) == ("sprout", "fail")
    (trace,), _ = read_traces(tmp_path / "bench" / "traces.jsonl")
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "a.py").write_text("x = 1\n")
    words = [
        "agent",
        "add a line",
        "--model",
        f"{server}/v1",
        "--tokeniser",
        str(SPROUT),
        "--repo",
        str(tmp_path / "repo"),
    ]
    more = [
        "--turns",
        "1",
        "--temperature",
        "1",
        "--yes",
        "--trace",
        str(tmp_path / "agent.jsonl"),
        "--cache",
        str(cache),
    ]
    subprocess.run([sys.executable, "-m", "etude", *words, *more], check=True, cwd=ROOT, timeout=300)
    (other,), _ = read_traces(tmp_path / "agent.jsonl")
    for each in (trace, other):
        turns = [node for node in each.nodes if node.sampled]
        assert turns
        assert all(0 <= token < VOCABULARY for node in turns for token in node.tokens)
        assert all(math.isfinite(number) and number < 0 for node in turns for number in node.raw_logprobs)


# ---- weights; these leave others on the server, so they come last


class Trained:
    """A model that changes, all of it and by a lot, and its published versions."""

    def __init__(self, folder: Path, store: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.store = WeightStore(store, 100)
        self.versions: dict[int, Any] = {0: self.base}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def publish(self, version: int) -> None:
        torch.manual_seed(version)
        for parameter in self.model.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter) + 0.01)
        self.store.publish(self.model.state_dict(), version, version)
        self.versions[version] = copy.deepcopy(self.model)

    def expected(self, prompt: list[int], done: Completion) -> list[float]:
        """Return the log-probs of each token under the version it says it was sampled with, all before it computed with that too."""
        by_version = {each: picked(logits_of(self.versions[each], prompt, done), done) for each in {*done.versions}}
        return [by_version[version][place] for place, version in enumerate(done.versions)]

    async def check(self, policy: RemotePolicy, version: int, within: float = 1e-3) -> None:
        for prompt in ([10, 20, 30, 40], list(range(100, 228))):
            done = await policy.generate(prompt, Sampling(32, seed=version))
            assert {*done.versions} == {version}
            assert done.raw_logprobs == pytest.approx(self.expected(prompt, done), abs=within)
            if version:  # and the version before would not have passed
                old = picked(
                    logits_of(self.versions[max(each for each in self.versions if each < version)], prompt, done), done
                )
                assert max(abs(one - two) for one, two in zip(done.raw_logprobs, old, strict=True)) > 5 * within


def experts(folder: Path, family: str, *, shared: bool = False) -> Path:
    """Save a small model with experts, of weights large enough to matter."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
        intermediate_size=32, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
        **{"shared_expert_intermediate_size": 32} if shared else {},
        max_position_embeddings=CONTEXT, initializer_range=0.3, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny.tokeniser().save_pretrained(folder)
    return folder


def test_every_kind_of_update_is_that_of_transformers(
    server: str, processed_server: str, folder: Path, tmp_path: Path
) -> None:
    """An anchor, a delta, several deltas at once, a server that joins late, a damaged file, adapters, and the model itself again."""
    trained = Trained(folder, tmp_path / "weights")

    async def work(policy: RemotePolicy) -> None:
        weights = VllmWeights(policy, folder, trained.store)
        await weights.ready()
        await trained.check(policy, 0)
        for version in (7, 8, 9, 10, 11):
            trained.publish(version)
            if version in {7, 8, 11}:
                assert (await weights.update(version)).version == version
                await trained.check(policy, version)
        late = await RemotePolicy.open(processed_server, VOCABULARY)
        await VllmWeights(late, folder, trained.store).ready()
        await trained.check(late, 11)
        await late.close()
        trained.publish(12)
        broken = trained.store.folder / "00000012-00000011.delta"
        broken.write_bytes(broken.read_bytes()[:-1])
        with pytest.raises(BrokenStore, match="no way to version 12"):
            await weights.update(12)
        del trained.versions[12]
        await trained.check(policy, 11)
        with pytest.raises(ServerFailed, match="version 13 of the weights was not fetched"):
            await policy.tell("/start_weight_update")
            await policy.tell("/update_weights", {"update_info": {"version": 13}})
        trained.publish(13)
        await weights.update(13)
        await trained.check(policy, 13)
        await weights.update(0)  # as another run would begin
        await trained.check(policy, 0)

    with_policy(server, work)


def test_adapters_alone_are_added_to_the_base(server: str, folder: Path, tmp_path: Path) -> None:
    trained = Trained(folder, tmp_path / "weights")
    own = trained.model.state_dict()
    names = [name for name in own if name.endswith(("q_proj.weight", "down_proj.weight"))]

    async def work(policy: RemotePolicy) -> None:
        weights = VllmWeights(policy, folder, trained.store)
        await weights.ready()
        for version in (1, 2):
            torch.manual_seed(version)
            adapters: dict[str, torch.Tensor] = {}
            for name in names:
                down, up = 0.1 * torch.randn(4, own[name].shape[1]), 0.1 * torch.randn(own[name].shape[0], 4)
                adapters |= {f"{name}.lora_A": down, f"{name}.lora_B": up}
                own[name].copy_(trained.base.state_dict()[name] + up @ down)
            trained.store.publish(adapters, version, version)
            trained.versions[version] = copy.deepcopy(trained.model)
            await weights.update(version)
            await trained.check(policy, version)

    with_policy(server, work)


def mark(began: asyncio.Event, _: object) -> None:
    began.set()


def test_updates_back_to_back_while_requests_run(server: str, folder: Path, tmp_path: Path) -> None:
    """Every token's log-prob is that of the version its span names, and nothing of another one is left in the cache."""
    trained = Trained(folder, tmp_path / "weights")

    async def work(policy: RemotePolicy) -> None:
        weights = VllmWeights(policy, folder, trained.store)
        await weights.ready()
        for version in (1, 2, 3, 4):
            trained.publish(version)
        begun = [asyncio.Event() for _ in PROMPTS]
        asking = [
            asyncio.create_task(policy.generate(prompt, Sampling(1800, seed=7), on_tokens=functools.partial(mark, own)))
            for prompt, own in zip(PROMPTS, begun, strict=True)
        ]
        for own in begun:
            await own.wait()
        for version in (1, 2, 3, 4):
            await weights.update(version)
        for prompt, done in zip(PROMPTS, await asyncio.gather(*asking), strict=True):
            assert done.versions == sorted(done.versions)
            assert {0, 4} <= {*done.versions}
            assert done.raw_logprobs == pytest.approx(trained.expected(prompt, done), abs=2e-3)

    with_policy(server, work)


@pytest.mark.parametrize(
    ("kind", "ranks"), [("tied", 1), ("tied", 2), ("qwen3_moe", 1), ("qwen3_moe", 2), ("qwen2_moe", 1), ("olmoe", 1)]
)
def test_models_that_vllm_alone_updates_wrongly(kind: str, ranks: int, tmp_path: Path) -> None:
    """On a CPU it leaves a tied output layer old, and experts unpacked, without an error."""
    made = SPROUT if kind == "tied" else experts(tmp_path / "model", kind, shared=kind == "qwen2_moe")
    trained = Trained(made, tmp_path / "weights")

    async def work(policy: RemotePolicy) -> None:
        weights = VllmWeights(policy, made, trained.store)
        await weights.ready()
        await trained.check(policy, 0)
        for version in (1, 2):
            trained.publish(version)
            await weights.update(version)
            await trained.check(policy, version)

    for url in start(made, "--tensor-parallel-size", str(ranks)):
        with_policy(url, work, trained.model.config.vocab_size)


def test_an_update_that_breaks_half_way_ends_the_server(tmp_path: Path) -> None:
    """A model that vLLM gives a part which no checkpoint has: it would keep random weights there."""
    made = experts(tmp_path / "model", "qwen3_moe", shared=True)

    async def work(policy: RemotePolicy) -> None:
        with pytest.raises(ServerFailed, match="failed to take version 0 of the weights and must be started again"):
            await VllmWeights(policy, made, WeightStore(tmp_path / "weights", 1)).ready()
        with contextlib.suppress(ServerFailed):
            await policy.tell("/resume")
        with pytest.raises(ServerFailed):
            await policy.generate([1, 2, 3], Sampling(4))

    for url in start(made):
        with_policy(url, work, 320)


def test_weights_in_bf16(tmp_path: Path) -> None:
    """Other kernels pack them. Rounding differs by hundredths, a version by more."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2", vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=128,
        max_position_embeddings=CONTEXT, initializer_range=0.1, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path / "model")
    tiny.tokeniser().save_pretrained(tmp_path / "model")
    trained = Trained(tmp_path / "model", tmp_path / "weights", torch.bfloat16)

    async def work(policy: RemotePolicy) -> None:
        weights = VllmWeights(policy, tmp_path / "model", trained.store)
        await weights.ready()
        await trained.check(policy, 0, 0.05)
        for version in (1, 2):
            trained.publish(version)
            await weights.update(version)
            await trained.check(policy, version, 0.05)

    for url in start(tmp_path / "model", "--dtype", "bfloat16"):
        with_policy(url, work, 320)


def test_a_server_without_the_plug_in_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    async def work(policy: RemotePolicy) -> None:
        with pytest.raises(UserError, match=r"^[^\n]*Weight transfer not configured[^\n]*docs/inference.md[^\n]*$"):
            await VllmWeights(policy, folder, WeightStore(tmp_path / "weights", 1)).ready()

    for url in start(folder, plug=()):
        with_policy(url, work)


@pytest.mark.parametrize(
    ("mode", "temperature", "more"),
    [("server", 1.0, ()), ("processed_server", 0.7, ()), ("server", 1.0, ('lora={"rank": 4}',))],
)
def test_rl_trains_on_what_vllm_samples(
    request: pytest.FixtureRequest, mode: str, temperature: float, more: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    """One step after the other, so that each samples from the weights of the step before: engine and trainer agree on every log-prob."""
    settings = ["steps=3", "groups=2", "group_size=2", 'mode="sync"', 'optimiser={"lr": 0.001}',
                f'engine="{request.getfixturevalue(mode)}"', f'harness={{"temperature": {temperature}}}', *more]  # fmt: skip
    words = [sys.executable, "-m", "tests.rl.toy", str(folder), str(tmp_path / "run"), *settings]
    subprocess.run(words, check=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=500)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["key"].startswith("train/")]
    assert len(steps) == 3
    for number, swaps in enumerate(itertools.accumulate(row["swaps"] for row in steps)):
        assert swaps in {number, number + 1}  # those before it, and perhaps already its own
    assert all(row["mismatch_p99"] < 1e-3 for row in steps)
    assert (tmp_path / "run" / "model").is_dir()
