"""The shapes people really use, with random weights: what decodes and trains how fast on one GPU, beside transformers.

    python benchmarks/large_models.py decode qwen3-30b-a3b --requests 1 64 256 --peer    the engine, and transformers' generate
    python benchmarks/large_models.py train qwen3-8b --lora --peer                       Etude's session, and transformers
    … --tiny                                                                             small widths: only to see that it runs

A rate of decoding counts from when the last prompt is read to when the first text ends. Its floor is what must be moved for one step
at the bandwidth measured here: the weights once, of experts only those that were chosen (counted), and the filled part of the cache.
MFU is of the parameters a token passes through, of 990 TFLOP/s; of frozen weights no gradient is counted.
"""

from __future__ import annotations

import argparse
import copy
import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import report
import training
from etude.inference.local import build
from etude.models.shape import shape_of
from etude.training.distributed import World
from etude.training.run import corpus_session
from etude.training.settings import TrainSettings
from inference import Load, bandwidth, clock, texts, theirs
from training import Synthetic, seconds_a_step

PEAK = 990e12
GEMMA = ["sliding_attention"] * 5 + ["full_attention"]
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    },
    "qwen3-1.7b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "max_position_embeddings": 40960,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
        "sliding_window": 128, "max_position_embeddings": 131072,
    },
    "gemma3-12b": {
        "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024, "layer_types": GEMMA * 8,
        "query_pre_attn_scalar": 256, "max_position_embeddings": 131072,
    },
    "moonlight-16b-a3b": {
        "model_type": "deepseek_v3", "vocab_size": 163840, "hidden_size": 2048, "intermediate_size": 11264, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_group": 1,
        "topk_group": 1, "n_shared_experts": 2, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
        "max_position_embeddings": 8192,
    },
}  # fmt: skip
SMALLER = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "moe_intermediate_size": 32, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_hidden_layers": 2, "sliding_window": 16,
}  # fmt: skip


def config_of(options: argparse.Namespace) -> Any:
    """Return the config of a shape, its layers and widths cut down if asked for."""
    own = dict(SHAPES[options.shape])
    if options.layers:
        own["num_hidden_layers"] = options.layers
    if options.tiny:
        own |= {name: value for name, value in SMALLER.items() if name in own}
        if own["model_type"] == "deepseek_v3":
            own |= {"num_key_value_heads": 4, "head_dim": 8}
    if "layer_types" in own:
        own["layer_types"] = own["layer_types"][: own["num_hidden_layers"]]
    return AutoConfig.for_model(**own)


def model_of(config: Any, device: str) -> Any:
    """Return a model with random weights, made on the device in bf16 (float32 on a CPU)."""
    config, dtype = copy.deepcopy(config), torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 and name.endswith("norm.weight"):
                weight.fill_(0.0 if config.model_type == "gemma3_text" else 1.0)
            else:
                weight.normal_(std=0.02)
    with torch.device(device):  # its tables are no weights: they were lost on the way
        model.get_decoder().rotary_emb = type(model.get_decoder().rotary_emb)(config.get_text_config())
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()
        elif name.endswith("embed_scale"):
            buffer.fill_(config.hidden_size**0.5)
    model.tie_weights()
    return model.eval()


def moved_by_a_step(engine: Any, requests: int, context: float) -> float:
    """Return the bytes that a step must read: of experts, those that its tokens chose."""
    model, routes = engine.runner.model, engine.runner.routes
    weights = dict(model.named_parameters())
    expert = sum(each.nbytes for name, each in weights.items() if ".experts." in name)
    others = sum(each.nbytes for name, each in weights.items() if ".experts." not in name)
    embedding = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.nbytes
    share = 1.0
    if routes is not None:
        count = int(routes.max()) + 1
        share = sum(len(layer.unique()) for layer in routes[:requests].unbind(1)) / (routes.shape[1] * max(count, 1))
    cache = sum(
        min(context, layer.window or context) * layer.bytes(engine.runner.dtype) for layer in engine.runner.layers
    )
    return float(others - embedding + expert * share + requests * cache)


def decode(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the engine, then transformers."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prompt, new = (24, 8) if options.tiny else (512, 128)
    config, rows = config_of(options), []
    speed = bandwidth() if device == "cuda" else 1e10
    began = clock()
    model = model_of(config, device)
    print(f"{sum(each.numel() for each in model.parameters()) / 1e9:.2f}B made in {clock() - began:.0f} s", flush=True)
    peers: dict[int, Any] = {}
    for count in options.requests if options.peer else []:
        try:
            peers[count] = theirs(model, count, prompt, min(new, 32))["tokens_per_second"]
        except Exception as error:  # noqa: BLE001 - a peer that fails is reported as that
            peers[count] = f"failed: {type(error).__name__}"
        print("transformers", count, peers[count], flush=True)
    engine = build(
        model, None, str, context=prompt + new + 8, rows=max(options.requests), compiled=device == "cuda",
        page=16 if options.tiny else None,
    )  # fmt: skip
    load = Load(engine)
    for count in options.requests:
        load.decode_rate(texts(count, prompt, config.vocab_size, count), new)  # records the graphs
        rates = load.decode_rate(texts(count, prompt, config.vocab_size, count + 1), new)
        floor = count / (moved_by_a_step(engine, count, rates["mean_context"]) / speed)
        peer = peers.get(count)
        rows.append({
            "shape": options.shape, "work": "decode", "requests": count, "tokens/s": round(rates["tokens_per_second"], 1),
            "ms/step": round(rates["ms_per_step"], 3), "of the floor": round(rates["tokens_per_second"] / floor, 3),
            "transformers": round(peer, 1) if isinstance(peer, float) else peer,
            "lean": engine.runner.lean is not None or engine.runner.slow_because,
            "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1) if device == "cuda" else 0.0,
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def settings_of(options: argparse.Namespace) -> TrainSettings:
    """Return the settings of a training, with what a recipe would say of LoRA and recomputation."""
    rows = 2 if options.tiny else options.rows
    given: dict[str, Any] = {
        "tokens": 10**12, "batch": rows, "micro": options.micro, "evaluations": 0, "recompute": options.recompute,
    }  # fmt: skip
    return TrainSettings(**given)


def train(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure Etude's session, then transformers with peft or AdamW."""
    from etude.training.settings import LoraSettings

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    length = 64 if options.tiny else options.length
    config, settings = config_of(options), settings_of(options)
    shape = shape_of(config)
    began = clock()
    model = model_of(config, device)
    with tempfile.TemporaryDirectory() as folder:
        batches = Synthetic(settings.batch, length, whole=options.whole, vocabulary=config.vocab_size)
        lora = LoraSettings() if options.lora else None
        more = {"parent_dtype": model.dtype}
        session = corpus_session(model, settings, batches, length, World(), Path(folder), print, lora=lora, **more)
        ready = clock() - began
        steps = session.loop.steps(10**9)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if options.steps:
            training.STEPS, training.WARM = options.steps, 1
        seconds, first = seconds_a_step(lambda: next(steps))
        peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
    tokens = settings.batch * length
    passes = 4 if options.lora else 6  # of frozen weights no gradient is computed
    flops = (
        passes * shape.active_parameters * tokens
    )  # without attention's, which are most of those of one long document
    row = {
        "shape": options.shape, "work": "lora" if options.lora else "full", "length": length, "rows": settings.batch,
        "documents": "whole rows" if options.whole else "of usual lengths", "recompute": options.recompute,
        "micro": session.micro, "tokens/s": round(tokens / seconds, 1), "mfu": round(flops / seconds / PEAK, 4),
        "first_step_s": round(first, 1), "ready_s": round(ready, 1), "peak_gb": round(peak, 1),
        "planned_gb": round(session.plan.needed(session.micro) / 1e9, 1), "masters": session.masters, "states": session.states,
        "parameters": shape.parameters, "active": shape.active_parameters,
    }  # fmt: skip
    print(row, flush=True)
    if options.peer:
        del session, steps, model
        gc.collect()
        torch.cuda.empty_cache()
        row["transformers"] = peer_of(options, config, settings, length)
        print(row, flush=True)
    return [row]


def peer_of(options: argparse.Namespace, config: Any, settings: TrainSettings, length: int) -> Any:
    """Return tokens a second of compiled transformers, with peft's adapters or torch's AdamW, in bf16; or how it fails."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = model_of(config, device)
        if options.lora:
            from peft import LoraConfig, get_peft_model

            get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
        if options.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        for layer in model.get_decoder().layers if device == "cuda" else []:
            layer.compile()
        trained = [each for each in model.parameters() if each.requires_grad]
        optimiser = torch.optim.AdamW(trained, lr=3e-4, fused=device == "cuda")
        batches = Synthetic(max(1, settings.batch), length, whole=True, vocabulary=config.vocab_size)

        def step() -> None:
            for row in torch.from_numpy(next(batches).tokens).to(device).split(max(1, options.peer_rows)):
                loss = model(input_ids=row, labels=row, use_cache=False).loss
                loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimiser.step()
            optimiser.zero_grad()

        seconds, _ = seconds_a_step(step)
        return round(settings.batch * length / seconds, 1)
    except torch.OutOfMemoryError:
        return "out of memory"
    except Exception as error:  # noqa: BLE001 - a peer that fails is reported as that
        return f"failed: {type(error).__name__}: {str(error)[:80]}"


def main() -> None:
    """Measure what was asked for and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=["decode", "train"])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=8, help="rows of a step")
    parser.add_argument("--micro", type=int, default=0, help="rows at once; 0: as the plan says")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the shape has")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument(
        "--whole", action="store_true", help="rows that are one document, not documents of usual lengths"
    )
    parser.add_argument("--peer", action="store_true", help="transformers in the same process, too")
    parser.add_argument("--peer-rows", type=int, default=1, help="rows at once of the peer")
    parser.add_argument(
        "--steps", type=int, default=0, help="timed steps, after one that compiles; 0: the usual number"
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--hardware", default="", help="keep the result as large_models-WORK-SHAPE-HARDWARE.json")
    options = parser.parse_args()
    began = time.perf_counter()
    rows = (decode if options.work == "decode" else train)(options)
    kept = f"{options.shape}{'-lora' if options.lora else ''}{'' if options.length == 4096 else f'-{options.length}'}"
    if options.hardware:
        report.finish(
            f"large_models-{options.work}-{kept}", rows, options.hardware, seconds=time.perf_counter() - began
        )


if __name__ == "__main__":
    main()
