"""How fast the engine writes, next to transformers and vLLM on the same machine.

    python benchmarks/inference.py gpu [--mtp MODEL] [--out FILE]      one H200: a 135M Llama shape; heads of MODEL if given
    python benchmarks/inference.py cpu [--vllm PYTHON] [--out FILE]    sprout and SmolLM2-135M; PYTHON of an environment with vLLM

Every request has a text of its own; ends are ignored, so that all write as much. Rates count tokens from when the last prompt is read
to when the first text ends: all write then. Each load is run once before it is measured, so that all graphs are recorded. The floor is
what has to be moved for one step, weights once and the filled part of the cache, at the bandwidth measured here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from etude.inference.local import build
from etude.inference.policy import Sampling
from etude.models.load import load_model
from etude.models.mtp_heads import load_heads

if TYPE_CHECKING:
    from etude.inference.engine import Engine

SHAPE = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
PROMPT, NEW = 1024, 256


def clock() -> float:
    """Return the time once the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def texts(count: int, length: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Return random tokens, all different from the start."""
    made = torch.Generator().manual_seed(seed)
    found: list[list[int]] = torch.randint(10, vocabulary, (count, length), generator=made).tolist()
    return found


class Load:
    """Requests on an engine, driven here without a thread."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def add(self, prompt: list[int], new: int, temperature: float = 1.0) -> dict[str, Any]:
        """Submit one; return the box its completion will be in."""
        box: dict[str, Any] = {}
        sampling = Sampling(new, temperature=temperature, seed=1)
        self.engine.submit(prompt, sampling, None, lambda done: box.update(done=done))
        return box

    def decode_rate(self, prompts: list[list[int]], new: int, temperature: float = 1.0) -> dict[str, float]:
        """Return tokens a second while all of them write: from the last prompt read to the first text ended."""
        engine, counts = self.engine, self.engine.counts
        began = clock()
        for prompt in prompts:
            self.add(prompt, new, temperature)
        while engine.waiting or engine.prefilling:
            engine.step()
        read, written, steps, finished = clock(), counts.written_tokens, counts.steps, counts.finished
        lengths = lengths_then = int(engine.rows.computed.sum())
        while engine.busy() and counts.finished == finished:
            lengths_then = int(engine.rows.computed.sum())
            engine.step()
        seconds = clock() - read
        tokens, steps = counts.written_tokens - written, counts.steps - steps
        while engine.busy():
            engine.step()
        return {
            "tokens_per_second": tokens / seconds, "ms_per_step": 1e3 * seconds / max(1, steps),
            "prompt_tokens_per_second": sum(map(len, prompts)) / (read - began),
            "mean_context": (lengths + lengths_then) / 2 / len(prompts),
        }  # fmt: skip


def bandwidth() -> float:
    """Return bytes a second that this device reads and writes in a plain copy."""
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    began = clock()
    for _ in range(10):
        target.copy_(source)
    return float(10 * 2 * source.nbytes / (clock() - began))


def gpu_decoding(speed: float) -> list[dict[str, Any]]:
    """Measure 64, 256 and 512 requests at once."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(device="cuda", dtype=torch.bfloat16)
    weights = sum(each.nbytes for each in model.parameters())
    began = clock()
    engine = build(model, None, str, context=4096, rows=512, compiled=True)
    load, rows = Load(engine), []
    load.decode_rate(texts(8, 32, 49152, 9), 8)
    print(f"engine ready after {clock() - began:.0f} s", flush=True)
    for count in (64, 256, 512):
        load.decode_rate(texts(count, PROMPT, 49152, count), NEW)  # records the graphs
        found = load.decode_rate(texts(count, PROMPT, 49152, count + 1), NEW)
        moved = weights + count * found["mean_context"] * engine.runner.bytes_of_position()
        floor = count / (moved / speed)
        rows.append(
            {
                "requests": count,
                **found,
                "floor_tokens_per_second": floor,
                "of_floor": found["tokens_per_second"] / floor,
            }
        )
        print(rows[-1], flush=True)
    agents(load, seed=770)
    rows.append({"agents": agents(load, seed=77)})
    print(rows[-1], flush=True)
    return rows


def agents(load: Load, seed: int, episodes: int = 64, turns: int = 6) -> dict[str, float]:
    """Measure episodes of several turns, with a tool's output between two of them."""
    engine = load.engine
    written = 100
    talks = texts(episodes, 500, 49152, seed)
    outputs = texts(episodes * turns, 300, 49152, seed + 1)
    cached, prompts, before = engine.counts.cached_tokens, engine.counts.prompt_tokens, engine.counts.written_tokens
    began = clock()
    boxes = [(index, 0, load.add(talk, written)) for index, talk in enumerate(talks)]
    while boxes:
        engine.step()
        for entry in [each for each in boxes if each[2]]:
            boxes.remove(entry)
            index, turn, box = entry
            talks[index] += box["done"].token_ids
            if turn + 1 < turns:
                talks[index] += outputs.pop()
                boxes.append((index, turn + 1, load.add(talks[index], written)))
    seconds = clock() - began
    counts = engine.counts
    return {
        "episodes": episodes, "turns": turns, "tokens_per_second": (counts.written_tokens - before) / seconds,
        "cached_share_of_prompt_tokens": (counts.cached_tokens - cached) / (counts.prompt_tokens - prompts), "seconds": seconds,
    }  # fmt: skip


def theirs(model: Any, batch: int, prompt: int, new: int) -> dict[str, float]:
    """Measure transformers' generate, less the time of reading the prompt."""
    ids = torch.tensor(texts(batch, prompt, model.config.vocab_size, 5), device=model.device)

    def seconds(count: int) -> float:
        settings = GenerationConfig(
            max_new_tokens=count, min_new_tokens=count, do_sample=True, eos_token_id=None, pad_token_id=0
        )
        began = clock()
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        return clock() - began

    seconds(2)
    return {"requests": batch, "tokens_per_second": batch * (new - 1) / (seconds(new) - seconds(1))}


def their_batching(model: Any, requests: int, prompt: int, new: int) -> dict[str, float]:
    """Measure transformers' generate_batch, prompts included: it has no way to tell."""
    settings = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = texts(requests, prompt, model.config.vocab_size, 6)
    began = clock()
    model.generate_batch(inputs=prompts, generation_config=settings, progress_bar=False)
    return {"requests": requests, "tokens_per_second": requests * new / (clock() - began)}


def gpu_transformers() -> dict[str, Any]:
    """Measure transformers on the same shape."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(device="cuda", dtype=torch.bfloat16).eval()
    found: dict[str, Any] = {"generate": [theirs(model, batch, PROMPT, 32) for batch in (64, 256, 512)]}
    print(found, flush=True)
    try:
        found["generate_batch"] = [their_batching(model, 256, PROMPT, 32)]
    except Exception as error:  # noqa: BLE001 - a peer that fails is reported as that
        found["generate_batch"] = f"failed: {type(error).__name__}: {error}"[:300]
    print(found["generate_batch"], flush=True)
    return found


def with_heads(folder: Path, rows: int, lookup: int = 0) -> Engine:
    """Return an engine for a model with heads that draft, or, with `lookup`, one that looks so many up instead."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    model = load_model(folder, device, torch.bfloat16 if gpu else torch.float32)
    heads = None if lookup else load_heads(folder, model)
    return build(model, heads, str, context=2048, rows=rows, compiled=gpu, lookup=lookup)


def guessing(
    engine: Engine, sizes: tuple[int, ...], prompts: list[list[int]], new: int, temperature: float
) -> list[dict[str, Any]]:
    """Measure an engine with heads, with and without guessing, on the beginnings of real text."""
    load, rows = Load(engine), []
    for size in sizes:
        row: dict[str, Any] = {"requests": size}
        for name, wish in (("plain", False), ("guessing", True)):
            engine.speculation.wish = wish
            chosen = [prompts[index % len(prompts)][index // len(prompts) :] for index in range(size)]
            load.decode_rate(chosen, new, temperature)
            before = (engine.counts.accepted, engine.counts.drafts)
            row[name] = load.decode_rate(chosen, new, temperature)
            if wish:
                kept, drafted = engine.counts.accepted - before[0], engine.counts.drafts - before[1]
                row["kept_of_guessed"], row["tokens_a_round"] = kept / drafted, 1 + kept / drafted * engine.drafts
        row["ratio"] = row["guessing"]["tokens_per_second"] / row["plain"]["tokens_per_second"]
        rows.append(row)
        print(row, flush=True)
    return rows


def cpu(vllm: str | None) -> list[dict[str, Any]]:
    """Measure sprout and SmolLM2-135M at batch 1 and 16, fp32, two cores."""
    from etude.models.bases import resolve
    from etude.models.fetch import default_cache, fetch
    from etude.progress import Reporter

    rows = []
    for name, new in (("sprout", 128), ("smollm2-135m", 48)):
        folder = fetch(resolve(name), default_cache(), Reporter(quiet=True)).folder
        model = load_model(folder, torch.device("cpu"), torch.float32)
        peers = {batch: theirs(model, batch, 128, new)["tokens_per_second"] for batch in (1, 16)}
        engine = build(model, None, str, context=512, rows=16)
        load = Load(engine)
        load.decode_rate(texts(16, 8, model.config.vocab_size, 3), 4)
        served = _vllm(vllm, folder, new) if vllm else {}
        for batch in (1, 16):
            ours = load.decode_rate(texts(batch, 128, model.config.vocab_size, batch), new)["tokens_per_second"]
            row = {
                "model": name,
                "requests": batch,
                "etude": ours,
                "transformers": peers[batch],
                "vllm": served.get(str(batch)),
            }
            rows.append({**row, "over_transformers": ours / peers[batch]})
            print(rows[-1], flush=True)
    return rows


def _vllm(python: str, folder: Path, new: int) -> dict[str, float]:
    """Return tokens a second by requests at once, of a vLLM server in an environment of its own."""
    script = str(Path(__file__).parent / "peers/vllm_server.py")
    command = [python, script, str(folder), "--prompt", "128", "--new", str(new), "--batch", "1", "16", "--eager"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {batch: float(found[f"batch_{batch}"]["decode"]) for batch in ("1", "16")}


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("where", choices=["gpu", "cpu"])
    parser.add_argument("--mtp", type=Path)
    parser.add_argument("--texts", type=Path, help="prompts for --mtp: a JSON list of lists of tokens")
    parser.add_argument("--vllm")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {
        "script": "inference.py", "command": "python benchmarks/inference.py " + " ".join(sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"), "hardware": torch.cuda.get_device_name() if args.where == "gpu" else "2 CPU cores",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }  # fmt: skip

    def keep(**more: Any) -> None:
        found.update(more)
        if args.out:
            args.out.write_text(json.dumps(found, indent=1) + "\n")

    if args.where == "cpu":
        keep(rows=cpu(args.vllm))
    else:
        keep(bytes_per_second=bandwidth())
        keep(decoding=gpu_decoding(found["bytes_per_second"]))
    if args.mtp:
        prompts = json.loads(args.texts.read_text())
        sizes, new = ((1, 8, 32, 128), 256) if args.where == "gpu" else ((1, 4), 128)
        kinds = (("greedy", 0.0), ("temperature 1", 1.0))
        engine = with_heads(args.mtp, max(sizes))
        keep(guessing={kind: guessing(engine, sizes, prompts, new, temperature) for kind, temperature in kinds})
    if args.where == "gpu":
        keep(transformers=gpu_transformers())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
