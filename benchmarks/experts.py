"""Balancing and router replay on a small mixture of experts of our own: sprout, its feed-forward parts copied into experts.

    python benchmarks/experts.py [--steps 150] [--seeds 3] [--device cpu] [--jobs 2]     compare, then measure the mismatch
    python benchmarks/experts.py --save FOLDER [--base FOLDER] [--kind mixtral]          only save the mixture, for recipes

Every way to balance trains the same mixture (8 experts, 2 a token, each a copy of the dense one with noise; a random router) on the
same rows of Python's standard library, a seed at a time, with the session that all stages use. Told are the loss on held-out files, as
the model is exported and with its bias taken away, and the load over the last tenth of the steps. `glm4_moe` has a place for a bias,
`mixtral` has none: there it fades.

The mismatch is that between a sampler in bf16, our engine, and the trainer in float32, on the same bf16 weights: the log-probs of
what was sampled, with the trainer's own routes and with the engine's. The dense sprout is the reference: rounding alone.

RL curves with and without replay: `benchmarks/study-experts.toml`.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import shutil
import statistics
import sysconfig
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, Glm4MoeConfig, MixtralConfig

import etude.models
import report
from etude.data.loader import Batch
from etude.inference.local import LocalPolicy
from etude.inference.policy import Sampling
from etude.models.load import load_model
from etude.training.batch import Rows, rows_of
from etude.training.distributed import World
from etude.training.experts import BIASED
from etude.training.objectives.policy_gradient import SampledRows
from etude.training.run import corpus_session
from etude.training.settings import TrainSettings

SPROUT = Path(etude.models.__file__).parent / "sprout"
LENGTH, ROWS, HELD_OUT = 64, 8, 64
MIXTURES = {
    "as upcycled": 0.01,
    "experts apart": 0.5,
}  # noise of the mixtures whose log-probs are compared with a sampler's
WAYS = (
    ("glm4_moe", "none"), ("glm4_moe", "aux_loss"), ("glm4_moe", "aux_free"), ("glm4_moe", "quantile"),
    ("mixtral", "none"), ("mixtral", "aux_free"),
)  # fmt: skip


def upcycle(dense: Any, kind: str, experts: int = 8, chosen: int = 2, noise: float = 0.01, seed: int = 0) -> Any:
    """Return a mixture of a Llama: every expert its feed-forward part plus `noise` times its standard deviation, routers at random.

    The weights of the chosen experts add up to 1, so without noise the mixture computes what the dense model does.
    """
    own = dense.config
    common = {
        name: getattr(own, name)
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
                     "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "bos_token_id", "eos_token_id",
                     "pad_token_id")
    } | {"num_experts_per_tok": chosen}  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": own.rope_parameters["rope_theta"]}
    if kind == "mixtral":
        config: Any = MixtralConfig(
            **common, intermediate_size=own.intermediate_size, num_local_experts=experts, sliding_window=None, rope_parameters=rope
        )  # fmt: skip
    else:
        config = Glm4MoeConfig(
            **common, moe_intermediate_size=own.intermediate_size, n_routed_experts=experts, n_shared_experts=0, n_group=1,
            topk_group=1, first_k_dense_replace=0, routed_scaling_factor=1.0, norm_topk_prob=True, attention_bias=False,
            use_qk_norm=False, rope_parameters=rope | {"partial_rotary_factor": 1.0},
        )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(dense.dtype).eval()
    state = model.state_dict()
    state |= {name: value for name, value in dense.state_dict().items() if name in state}
    for layer, part in enumerate(dense.model.layers):
        mlp, prefix = part.mlp, f"model.layers.{layer}.mlp"
        both = {
            "gate_up_proj": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            "down_proj": mlp.down_proj.weight,
        }
        for name, weight in both.items():
            copies = weight.detach().repeat(experts, 1, 1)
            state[f"{prefix}.experts.{name}"] = copies + noise * weight.std().item() * torch.randn_like(copies)
        router = state[f"{prefix}.gate.weight"]
        state[f"{prefix}.gate.weight"] = torch.randn_like(router) * router.shape[1] ** -0.5
    model.load_state_dict(state)
    return model


def save(model: Any, base: Path, folder: Path) -> Path:
    """Save a mixture with what its dense parent has besides weights."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE"):
        if (base / name).exists():
            shutil.copyfile(base / name, folder / name)
    return folder


def texts(tokeniser: Tokenizer) -> tuple[Any, Any]:
    """Return the tokens of the standard library's files: of nineteen in twenty, and of the others."""
    parts: tuple[list[int], list[int]] = ([], [])
    for place, file in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
        parts[place % 20 == 0].extend([0, *tokeniser.encode(file.read_text(errors="replace")).ids])
    return np.array(parts[0]), np.array(parts[1])


class Text:
    """Random rows of a long text, as a corpus gives them."""

    def __init__(self, tokens: Any, seed: int) -> None:
        self._tokens, self._random = tokens, np.random.default_rng(seed)

    def __next__(self) -> Batch:
        begins = self._random.integers(0, len(self._tokens) - LENGTH, ROWS)
        return rows(self._tokens, begins)

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Any) -> None: ...

    def achieved(self) -> dict[str, dict[str, float]]:
        return {}


def rows(tokens: Any, begins: Any) -> Batch:
    taken = np.stack([tokens[begin : begin + LENGTH] for begin in begins]).astype(np.int64)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (len(taken), 1))
    return Batch(taken, np.zeros(taken.shape, np.int32), positions, [])


def held_out_loss(session: Any, tokens: Any) -> float:
    """Return nats a token."""
    total, count = 0.0, 0.0
    for begin in range(0, HELD_OUT, ROWS):
        part = rows_of(rows(tokens, range(begin * LENGTH, (begin + ROWS) * LENGTH, LENGTH))).to(session.device)
        total += float((session.nats(part) * part.weights_BT).sum())
        count += float(part.weights_BT.sum())
    return total / count


def train(model: Any, way: str, seed: int, steps: int, device: str, text: tuple[Any, Any]) -> dict[str, Any]:
    """Train a mixture; return its loss and its load."""
    settings = TrainSettings.model_validate({
        "tokens": steps * ROWS * LENGTH, "batch": ROWS, "micro": ROWS, "device": device, "optimiser": {"lr": 1e-3},
        "experts": {"balance": way} | ({"rate": 0.005} if way == "aux_free" else {}),
    })  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        session = corpus_session(model, settings, Text(text[0], seed), LENGTH, World(), Path(folder))
        began = time.perf_counter()
        taken = list(session.steps(steps))
        seconds = time.perf_counter() - began
        loss = held_out_loss(session, text[1])
        bare = loss
        if way in BIASED and session.experts:
            for router in session.experts.routers:
                router.own_bias().zero_()
            bare = held_out_loss(session, text[1])
        session.close()
    ending = taken[-max(1, steps // 10) :]
    load = {
        name: statistics.fmean(step.metrics[f"experts_{name}"] for step in ending)
        for name in ("entropy", "busiest", "idle")
    }
    return {"loss": loss, "loss_without_bias": bare, **load, "tokens_s": steps * ROWS * LENGTH / seconds}


def trained(base: Path, kind: str, way: str, seed: int, steps: int, device: str) -> dict[str, Any]:
    """Do one training in a process of its own."""
    torch.set_num_threads(1)  # on busy cores a second thread costs more than it does
    model = upcycle(load_model(base, torch.device("cpu"), torch.float32), kind, seed=seed)
    done = train(model, way, seed, steps, device, texts(Tokenizer.from_file(str(base / "tokenizer.json"))))
    print(f"{kind} {way} seed {seed}: {done}", flush=True)
    return done


def summary(kind: str, way: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row a way to balance: means and standard deviations over seeds."""
    row: dict[str, Any] = {"shape": kind, "balance": way}
    for name in runs[0]:
        values = [run[name] for run in runs]
        row[name] = round(statistics.fmean(values), 0 if name == "tokens_s" else 4)
        if name in {"loss", "entropy"} and len(values) > 1:
            row[f"{name}_sd"] = round(statistics.stdev(values), 4)
    return row


def mismatch(folder: Path, prompts: list[list[int]], new: int = 64) -> list[dict[str, Any]]:
    """Return how far the trainer's log-probs are from those of a sampler in bf16, with its own routes and with the sampler's."""
    trained = load_model(folder, torch.device("cpu"), torch.float32)
    with tempfile.TemporaryDirectory() as work:
        settings = TrainSettings.model_validate({"tokens": 1, "batch": 1, "micro": 1, "device": "cpu"})
        session = corpus_session(trained, settings, Text(np.zeros(LENGTH * 2), 0), LENGTH, World(), Path(work))
        experts = session.experts

        async def sample() -> list[Any]:
            policy = LocalPolicy.open(folder, device="cpu", dtype=torch.bfloat16)
            asked = (
                policy.generate(prompt, Sampling(new, seed=at, experts=bool(experts)))
                for at, prompt in enumerate(prompts)
            )
            done = await asyncio.gather(*asked)
            await policy.close()
            return done

        found: dict[str, list[float]] = {}
        rerouted = []
        for prompt, done in zip(prompts, asyncio.run(sample()), strict=True):
            tokens = torch.tensor([prompt + done.token_ids])
            places = torch.arange(tokens.shape[1])[None]
            bounds = torch.tensor([0, tokens.shape[1]], dtype=torch.int32)
            plain = Rows(tokens, tokens.roll(-1, 1), torch.ones(tokens.shape), places, bounds)
            for way in ("own", *(["replayed"] if experts else [])):
                routes = None
                if way == "replayed":
                    routes = torch.full((1, tokens.shape[1], *done.experts.shape[1:]), -1, dtype=torch.int16)
                    routes[0, :-1] = done.experts
                if experts:
                    with experts.working_on(SampledRows(plain, plain.weights_BT, plain.weights_BT, routes)):
                        own = given(experts, lambda: session.nats(plain))  # noqa: B023 - called at once
                    nats, ids = own
                    if way == "own":
                        rerouted.append(
                            ((ids[:-1].sort().values != done.experts.long().sort().values).any(-1))
                            .float()
                            .mean()
                            .item()
                        )
                else:
                    nats = session.nats(plain)
                now = -nats[0, len(prompt) - 1 : -1]
                found.setdefault(way, []).extend((now - torch.tensor(done.raw_logprobs)).abs().tolist())
        session.close()
    told = []
    for way, values in found.items():
        told.append({"routes": way if experts else "dense", "mean": round(statistics.fmean(values), 5)})
        told[-1] |= {"p99": round(float(np.quantile(values, 0.99)), 4), "max": round(max(values), 3)}
        told[-1] |= {"above_0.1": round(float(np.mean(np.array(values) > 0.1)), 4), "tokens": len(values)}
        told[-1] |= {"layers_rerouted": round(statistics.fmean(rerouted), 4) if experts else 0.0}
    return told


def mismatches(base: Path) -> list[dict[str, Any]]:
    """Measure the dense model and mixtures of it, in a process of its own."""
    torch.set_num_threads(1)
    dense, found = load_model(base, torch.device("cpu"), torch.float32), []
    held_out = texts(Tokenizer.from_file(str(base / "tokenizer.json")))[1]
    prompts = [held_out[at * 500 : at * 500 + 32].tolist() for at in range(12)]
    models = {("mixtral", name): upcycle(dense, "mixtral", noise=noise) for name, noise in MIXTURES.items()}
    with tempfile.TemporaryDirectory() as folder:
        for (kind, name), model in {("llama", "dense"): dense, **models}.items():
            place = save(model.to(torch.bfloat16), base, Path(folder) / f"{kind}-{name}")
            found += [{"shape": kind, "model": name, **row} for row in mismatch(place, prompts)]
            print(*found[-2:], flush=True)
    return found


def given(experts: Any, compute: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what is computed and the ids that routers chose meanwhile, [N, L, K]."""
    ids: list[torch.Tensor] = []
    hooks = [router.register_forward_hook(lambda _, __, out: ids.append(out[2])) for router in experts.replayed]
    value = compute()
    for hook in hooks:
        hook.remove()
    return value, torch.stack(ids, 1)


def main() -> None:
    """Run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at once")
    parser.add_argument("--base", type=Path, default=SPROUT)
    parser.add_argument("--kind", choices=["mixtral", "glm4_moe"], default="mixtral")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--noise", type=float, default=0.01, help="of the mixture that --save saves")
    arguments = parser.parse_args()
    if arguments.save:
        dense = load_model(arguments.base, torch.device("cpu"), torch.float32)
        print(
            save(
                upcycle(dense, arguments.kind, noise=arguments.noise).to(torch.bfloat16), arguments.base, arguments.save
            )
        )
        return
    with ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        apart = pool.submit(mismatches, arguments.base)
        own = arguments.steps, arguments.device
        calls = [
            [pool.submit(trained, arguments.base, *way, seed, *own) for way in WAYS] for seed in range(arguments.seeds)
        ]
        found = [summary(*way, [runs[at].result() for runs in calls]) for at, way in enumerate(WAYS)]
    hardware = "cpu" if arguments.device == "cpu" else "gpu"
    report.finish("experts", found, hardware, mismatch=apart.result(), steps=arguments.steps, seeds=arguments.seeds)


if __name__ == "__main__":
    main()
