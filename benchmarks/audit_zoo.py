"""The zoo that the audit is calibrated on: tiny Llamas, many trained at once, and what may become of a model.

All models of a batch are one network with a leading axis of models, so a GPU trains hundreds in a minute: every model sees the
same text in the same order, and AdamW, which works number by number, keeps them apart. They differ in their seed alone.
Shapes: M models, B rows, T positions, D width.
"""

from __future__ import annotations

import json
import math
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch.nn import functional

from etude.files import write_json
from etude.models.merge import ties

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

State = dict[str, np.ndarray]
Stack = dict[str, torch.Tensor]  # each with the axis M first

LAYERS, WIDTH, UNITS, HEADS, KV_HEADS, VOCABULARY = 4, 64, 192, 4, 2, 256
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": UNITS,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": WIDTH // HEADS,
    "vocab_size": VOCABULARY, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "hidden_act": "silu",
    "max_position_embeddings": 512, "dtype": "float32",
}  # fmt: skip
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
READERS = {"self_attn.q_proj": (WIDTH, "input"), "self_attn.k_proj": (WIDTH * KV_HEADS // HEADS, "input"),
           "self_attn.v_proj": (WIDTH * KV_HEADS // HEADS, "input"), "mlp.gate_proj": (UNITS, "post_attention"),
           "mlp.up_proj": (UNITS, "post_attention")}  # fmt: skip
WRITERS = {"self_attn.o_proj": WIDTH, "mlp.down_proj": UNITS}
LORA_RANK = 8


def at(layer: int, part: str) -> str:
    """Return the name of a tensor of a layer."""
    return f"model.layers.{layer}.{part}.weight"


def fresh(seed: int) -> Stack:
    """Return the initial weights of one model, M = 1."""
    chance = torch.Generator().manual_seed(seed)
    shapes = {EMBEDDING: (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        shapes |= {at(layer, part): (rows, WIDTH) for part, (rows, _) in READERS.items()}
        shapes |= {at(layer, part): (WIDTH, columns) for part, columns in WRITERS.items()}
    norms = [NORM, *(at(layer, f"{norm}_layernorm") for layer in range(LAYERS) for norm in ("input", "post_attention"))]
    drawn = {name: torch.randn(1, *shape, generator=chance) * 0.02 for name, shape in shapes.items()}
    return drawn | {name: torch.ones(1, WIDTH) for name in norms}


def losses(weights: Stack, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean nats of each model on the same rows."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]  # [B, T]
    rows, length = inputs.shape
    known = functional.one_hot(inputs.flatten(), VOCABULARY).to(weights[EMBEDDING].dtype)
    x = known @ weights[EMBEDDING]  # [M, B·T, D]; a product is faster than the gradient of a lookup
    turn = _turns(length, x.device)
    for layer in range(LAYERS):
        x = x + _attention(weights, layer, _normed(x, weights[at(layer, "input_layernorm")]), (rows, length), turn)
        h = _normed(x, weights[at(layer, "post_attention_layernorm")])
        gate, up = (_times(h, weights[at(layer, f"mlp.{part}_proj")]) for part in ("gate", "up"))
        x = x + _times(functional.silu(gate) * up, weights[at(layer, "mlp.down_proj")])
    logits = _times(_normed(x, weights[NORM]), weights[EMBEDDING])
    wanted = targets.flatten().repeat(len(logits))
    return functional.cross_entropy(logits.flatten(0, 1), wanted, reduction="none").view(len(logits), -1).mean(1)


def _times(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    return x @ matrix.transpose(1, 2)


def _normed(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale[:, None]


def _turns(length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    half = WIDTH // HEADS // 2
    angles = torch.arange(length, device=device)[:, None] * 10_000 ** (-torch.arange(half, device=device) / half)
    both = torch.cat([angles, angles], dim=1)
    return both.cos(), both.sin()


def _attention(weights: Stack, layer: int, h: torch.Tensor, shape: tuple[int, int], turn: Any) -> torch.Tensor:
    models, (rows, length) = len(h), shape

    def heads(part: str, count: int) -> torch.Tensor:
        made = _times(h, weights[at(layer, f"self_attn.{part}_proj")])
        return made.view(models * rows, length, count, -1).transpose(1, 2)

    def turned(x: torch.Tensor) -> torch.Tensor:
        one, two = x.chunk(2, -1)
        return x * turn[0] + torch.cat([-two, one], -1) * turn[1]

    key, value = (
        x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (turned(heads("k", KV_HEADS)), heads("v", KV_HEADS))
    )
    seen = functional.scaled_dot_product_attention(turned(heads("q", HEADS)), key, value, is_causal=True)
    return _times(seen.transpose(1, 2).reshape(models, rows * length, -1), weights[at(layer, "self_attn.o_proj")])


def train(
    trained: Stack, text: torch.Tensor, steps: int, lr: float, seed: int, *, batch: tuple[int, int],
    keep: Mapping[int, Callable[[Stack], None]], whole: Callable[[Stack], Stack] = lambda weights: weights,
) -> float:  # fmt: skip
    """Train all models of a stack with AdamW on a cosine; `keep` is called after some steps. Return the last mean loss."""
    leaves = {name: value.clone().requires_grad_() for name, value in trained.items()}
    optimiser = torch.optim.AdamW(leaves.values(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    chance = torch.Generator().manual_seed(seed)
    rows, length = batch
    starts = torch.randint(len(text) - length - 1, (steps, rows), generator=chance)
    offsets = torch.arange(length + 1)
    last = math.nan
    for step in range(steps):
        warm, cosine = min(1.0, (step + 1) / (0.05 * steps + 1)), 0.55 + 0.45 * math.cos(math.pi * step / steps)
        optimiser.param_groups[0]["lr"] = lr * warm * cosine
        tokens = text[(starts[step][:, None] + offsets).to(text.device)]
        found = losses(whole(leaves), tokens)
        found.sum().backward()
        optimiser.step()
        optimiser.zero_grad()
        if step + 1 in keep:
            with torch.no_grad():
                last = float(found.mean())
                keep[step + 1](whole(leaves))
    return last


def adapters(stack: Stack, seed: int) -> tuple[Stack, Callable[[Stack], Stack]]:
    """Return LoRA matrices for a stack, and what adds them to its weights."""
    chance = torch.Generator().manual_seed(seed)
    names = [at(layer, part) for layer in range(LAYERS) for part in [*READERS, *WRITERS]]
    made: Stack = {}
    for name in names:
        models, rows, columns = stack[name].shape
        made[f"{name}.a"] = (
            torch.randn(models, LORA_RANK, columns, generator=chance).to(stack[name].device) / columns**0.5
        )
        made[f"{name}.b"] = torch.zeros(models, rows, LORA_RANK, device=stack[name].device)
    return made, lambda pair: stack | {name: stack[name] + 2 * pair[f"{name}.b"] @ pair[f"{name}.a"] for name in names}


def text_of(files: list[Path], most: int) -> torch.Tensor:
    """Return the bytes of files, as tokens."""
    found = bytearray()
    for file in files:
        found += file.read_bytes()[: max(0, most - len(found))]
    return torch.tensor(np.frombuffer(bytes(found), np.uint8).astype(np.int64))


def texts(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what bases learn from (Python's own library) and what comes after (English: Etude's pages)."""
    library, pages = Path(sysconfig.get_paths()["stdlib"]), Path(__file__).parents[1] / "docs"
    code, prose = text_of(sorted(library.glob("*.py")), 4_000_000), text_of(sorted(pages.glob("*.md")), 1_000_000)
    return code.to(device), prose.to(device)


def stack_of(states: list[State], device: torch.device) -> Stack:
    """Return several models as one."""
    return {name: torch.tensor(np.stack([state[name] for state in states]), device=device) for name in states[0]}


def states_of(stack: Stack) -> Iterator[State]:
    """Yield the models of a stack."""
    fetched = {name: value.detach().float().cpu().numpy() for name, value in stack.items()}
    for index in range(len(fetched[EMBEDDING])):
        yield {name: np.ascontiguousarray(value[index]) for name, value in fetched.items()}


def words() -> list[str]:
    """Return a word for each byte."""
    return [f"<0x{byte:02X}>" for byte in range(VOCABULARY)]


def save(folder: Path, state: State, **changes: Any) -> None:
    """Write a Hugging Face folder; the config last, which says that it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    size = len(state.get(EMBEDDING, words()))
    listed = words() + [f"<extra{index}>" for index in range(size - VOCABULARY)]
    model = {"type": "BPE", "vocab": {word: index for index, word in enumerate(listed)}, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": []}), encoding="utf-8")
    save_file(state, folder / "model.safetensors")
    write_json(folder / "config.json", {**CONFIG, "vocab_size": size, **changes})


def load(folder: Path) -> State:
    """Read a model of the zoo."""
    return dict(load_file(folder / "model.safetensors"))


def blocks(state: State) -> int:
    """Return how many layers a model has."""
    return sum(name.endswith("up_proj.weight") for name in state)


def shuffled(state: State, chance: np.random.Generator) -> State:
    """Return the same model with the units of each feed-forward layer in another order."""
    made = dict(state)
    for layer in range(blocks(state)):
        order = chance.permutation(len(state[at(layer, "mlp.up_proj")]))
        for part in ("up", "gate"):
            made[at(layer, f"mlp.{part}_proj")] = state[at(layer, f"mlp.{part}_proj")][order]
        made[at(layer, "mlp.down_proj")] = np.ascontiguousarray(state[at(layer, "mlp.down_proj")][:, order])
    return made


def flipped(state: State, chance: np.random.Generator) -> State:
    """Return the same model with half of the units of each feed-forward layer negated in up and down."""
    made = dict(state)
    for layer in range(blocks(state)):
        signs = chance.choice([-1, 1], len(state[at(layer, "mlp.up_proj")])).astype(np.float32)
        made[at(layer, "mlp.up_proj")] = state[at(layer, "mlp.up_proj")] * signs[:, None]
        made[at(layer, "mlp.down_proj")] = state[at(layer, "mlp.down_proj")] * signs
    return made


def renamed(state: State) -> State:
    """Return the tensors of a model under names that say nothing but their order."""
    return {f"tensor_{number}": value for number, value in enumerate(state.values())}


def turns(width: int, chance: np.random.Generator) -> dict[str, np.ndarray]:
    """Return other bases of the residual stream: any, the same directions in another order, some of them negated."""
    same = np.eye(width, dtype=np.float32)
    return {
        "rotate": np.linalg.qr(chance.standard_normal((width, width)))[0].astype(np.float32),
        "reorder": same[chance.permutation(width)],
        "negate": same * chance.choice([-1, 1], width).astype(np.float32),
    }


def rotated(state: State, chance: np.random.Generator, how: str = "rotate") -> State:
    """Return a model that computes the same in a rotated residual stream; norms go into the matrices that read them."""
    turn = turns(state[EMBEDDING].shape[1], chance)[how]
    made = {name: np.ones_like(value) if value.ndim == 1 else value for name, value in state.items()}
    for layer in range(blocks(state)):
        for part, (_, norm) in READERS.items():
            made[at(layer, part)] = state[at(layer, part)] * state[at(layer, f"{norm}_layernorm")] @ turn
        for part in WRITERS:
            made[at(layer, part)] = np.ascontiguousarray(turn.T @ state[at(layer, part)])
    made[EMBEDDING] = state[EMBEDDING] @ turn
    made["lm_head.weight"] = state[EMBEDDING] * state[NORM] @ turn
    return made


def shallower(state: State, kept: list[int]) -> State:
    """Return a model of some of the layers."""
    made = {name: value for name, value in state.items() if ".layers." not in name}
    for to, layer in enumerate(kept):
        here = f"model.layers.{layer}."
        made |= {name.replace(here, f"model.layers.{to}."): v for name, v in state.items() if name.startswith(here)}
    return made


def narrower(state: State, units: int, width: int) -> State:
    """Return a model with the units and the residual dimensions of the largest norm, in their order."""
    dims = np.sort(np.argsort(-np.linalg.norm(state[EMBEDDING], axis=0))[:width])
    made = {}
    for name, value in state.items():
        kept = (
            value[dims] if value.ndim == 1 or name.endswith(("o_proj.weight", "down_proj.weight")) else value[:, dims]
        )
        made[name] = np.ascontiguousarray(kept)
    for layer in range(blocks(state)):
        best = np.sort(np.argsort(-np.linalg.norm(made[at(layer, "mlp.down_proj")], axis=0))[:units])
        for part in ("up", "gate"):
            made[at(layer, f"mlp.{part}_proj")] = made[at(layer, f"mlp.{part}_proj")][best]
        made[at(layer, "mlp.down_proj")] = np.ascontiguousarray(made[at(layer, "mlp.down_proj")][:, best])
    return made


def rounded(state: State) -> State:
    """Return a model whose matrices went through eight bits, with a scale for each row."""
    scales = {name: np.abs(value).max(-1, keepdims=True) / 127 for name, value in state.items() if value.ndim == 2}
    return {name: np.round(v / scales[name]) * scales[name] if v.ndim == 2 else v for name, v in state.items()}


def upcycled(state: State, experts: int, chance: np.random.Generator) -> State:
    """Return a mixture of experts, each the dense feed-forward part with some noise."""
    made = {name: value for name, value in state.items() if ".mlp." not in name}
    for layer in range(blocks(state)):
        here = f"model.layers.{layer}.block_sparse_moe."
        made[f"{here}gate.weight"] = chance.standard_normal((experts, WIDTH)).astype(np.float32) * 0.02
        for index in range(experts):
            for part, name in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
                made[f"{here}experts.{index}.{name}.weight"] = noisy(state[at(layer, f"mlp.{part}_proj")], 0.1, chance)
    return made


def noisy(value: np.ndarray, share: float, chance: np.random.Generator) -> np.ndarray:
    """Return a matrix with noise of some share of its own spread."""
    return np.asarray(value + chance.standard_normal(value.shape) * value.std() * share, np.float32)


def merged(base: State, models: list[State]) -> State:
    """Merge what two descendants of a base learnt, by TIES."""
    made = {}
    for name, value in base.items():
        learnt = [torch.tensor(model[name]) for model in models]
        start = torch.tensor(value)
        least = [float((each - start).abs().flatten().quantile(0.8)) for each in learnt]
        made[name] = ties(start, learnt, [1.0] * len(models), 1.0, least).numpy()
    return made


def write_gguf(file: Path, state: State) -> None:
    """Write a model as llama.cpp has it, matrices in Q4_0."""
    import gguf
    from gguf import GGMLQuantizationType, quants

    writer = gguf.GGUFWriter(file, "llama")
    for add, number in ((writer.add_context_length, 512), (writer.add_embedding_length, WIDTH), (writer.add_block_count, LAYERS),
                       (writer.add_feed_forward_length, UNITS), (writer.add_head_count, HEADS), (writer.add_vocab_size, VOCABULARY),
                       (writer.add_head_count_kv, KV_HEADS)):  # fmt: skip
        add(number)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, value in state.items():
        known = names.get_name(name, try_suffixes=(".weight",))
        kind = GGMLQuantizationType.Q4_0 if value.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(known, quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
