"""The kernels for experts against transformers' own code, expert by expert. Run as a module: in Triton's interpreter, as attending.py."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

FAMILIES: dict[str, tuple[Any, dict[str, int]]] = {
    "qwen3_moe": (Qwen3MoeSparseMoeBlock, {"num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 40}),
    "mixtral": (MixtralSparseMoeBlock, {"num_local_experts": 3, "num_experts_per_tok": 1, "intermediate_size": 33}),
    "gpt_oss": (GptOssMLP, {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40}),
}
CASES = {f"{family}, {tokens}": (family, tokens) for family in FAMILIES for tokens in (1, 5, 40, 150)}


def experts_differ_by(family: str, tokens: int, device: torch.device, dtype: torch.dtype) -> float:
    """Return how far the kernels are from the model's code, of the largest number; some experts have no token, one has many."""
    from etude.inference.expert_kernels import few_tokens, known

    torch.manual_seed(tokens)
    made, sizes = FAMILIES[family]
    config = AutoConfig.for_model(family, hidden_size=48, **sizes)
    config._experts_implementation = "eager"
    block = made(config).to(device, dtype)
    for weight in block.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    assert known(block.experts)
    x = torch.randn(tokens, 48, device=device, dtype=dtype)
    with torch.no_grad():
        _, shares, chosen = (block.gate if hasattr(block, "gate") else block.router)(x)
        chosen[: tokens // 2] = chosen[0]
        expected = block.double().experts(x.double(), chosen, shares.double())
        got = few_tokens(x, chosen, shares, block.to(dtype).experts)
    assert got.dtype == dtype
    return float((got - expected).abs().max() / expected.abs().max())


def main() -> None:
    """Try all cases on the CPU."""
    cpu = torch.device("cpu")
    found = {name: experts_differ_by(*case, cpu, torch.float32) for name, case in CASES.items()}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
