"""How far the engine's log-probs are from the trainer's on the same tokens, and how often greedy texts depend on the batch.

    python benchmarks/logprob_mismatch.py MODEL [--out FILE]

The engine samples at temperature 1 in batches, on its paged cache, a token at a time; the trainer reads the finished text in one pass,
with its own attention. In exact arithmetic both would be equal. On a CPU both compute in float32, on a GPU in bf16.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from etude.inference.local import build
from etude.inference.policy import Sampling
from etude.models.load import load_model
from etude.training.attention import isolate
from etude.training.batch import Rows
from etude.training.objectives.next_token import NextToken

REQUESTS, PROMPT, NEW = 64, 64, 192


def completions(engine: Any, prompts: list[list[int]], temperature: float) -> list[Any]:
    """Return what the engine writes after each prompt, all at once."""
    found: dict[int, Any] = {}
    for index, prompt in enumerate(prompts):
        sampling = Sampling(NEW, temperature=temperature, seed=index)
        engine.submit(prompt, sampling, None, None, lambda done, index=index: found.update({index: done}))
    while engine.busy():
        engine.step()
    return [found[index] for index in range(len(prompts))]


def trainers(model: Any, texts: list[list[int]]) -> list[list[float]]:
    """Return the trainer's log-probs of all tokens of each text but the first."""
    objective, found = NextToken(model), []
    for text in texts:
        tokens = torch.tensor([text], device=model.device)
        places = torch.arange(len(text), device=model.device)[None]
        bounds = torch.tensor([0, len(text)], dtype=torch.int32, device=model.device)
        rows = Rows(tokens, tokens.roll(-1, 1), torch.ones_like(tokens), places, bounds)
        found.append((-objective.nats(model, rows)[0, :-1]).tolist())
    return found


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    random = torch.Generator().manual_seed(0)
    model = load_model(args.model, device, dtype)
    prompts = torch.randint(10, model.config.vocab_size, (REQUESTS, PROMPT), generator=random).tolist()
    engine = build(model, None, str, context=PROMPT + NEW, rows=REQUESTS, compiled=device.type == "cuda")
    sampled = completions(engine, prompts, 1.0)
    greedy = completions(engine, prompts, 0.0)
    alone = [completions(engine, [prompt], 0.0)[0] for prompt in prompts[:16]]
    same = [one.token_ids == many.token_ids for one, many in zip(alone, greedy, strict=False)]
    agree = [
        np.mean(np.array(one.token_ids) == np.array(many.token_ids)) for one, many in zip(alone, greedy, strict=False)
    ]
    other = load_model(args.model, torch.device("cpu"), torch.float32)
    isolate(other, "auto")
    theirs = trainers(
        other.to(device=device, dtype=dtype), [p + done.token_ids for p, done in zip(prompts, sampled, strict=True)]
    )
    pairs = zip(sampled, theirs, strict=True)
    gap = np.abs(np.concatenate([np.array(done.raw_logprobs) - np.array(each[PROMPT - 1 :]) for done, each in pairs]))
    found = {
        "script": "logprob_mismatch.py", "command": f"python benchmarks/logprob_mismatch.py {args.model.name}",
        "date": time.strftime("%Y-%m-%d"), "hardware": torch.cuda.get_device_name() if device.type == "cuda" else "2 CPU cores",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__}, "dtype": str(dtype),
        "model": args.model.name, "tokens": len(gap), "mean": float(gap.mean()), "p99": float(np.quantile(gap, 0.99)),
        "max": float(gap.max()), "greedy_texts_alone_as_in_batch": float(np.mean(same)), "greedy_tokens": float(np.mean(agree)),
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
