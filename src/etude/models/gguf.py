"""From a GGUF file to a Hugging Face folder, once.

Why our own: transformers can read GGUF but not save what it read, takes more than three times as long as this conversion
and tens of times as long as loading its result (benchmarks/results/gguf_loading-cpu.json), and builds the tokeniser of the `smollm`
kind without its first step (digits are split singly), so that spaces before numbers are cut differently from how the
model was trained. Values are exact: a dequantised weight is stored as the float32 it is.
Supported: the Llama architecture with a byte-level BPE tokeniser; others are refused by name.
"""

from __future__ import annotations

import errno
import os
import re
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from etude.errors import UserError
from etude.files import write_json, write_text
from etude.lineage.audit.read_weights import CONTROL_TOKEN, decoded, read_headers

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from etude.lineage.audit.read_weights import Tensor
    from etude.progress import Reporter

TENSORS = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
TOP = ("model.", "lm_head")  # what the names of tensors of no layer begin with


def convert(gguf_file: Path, folder: Path, reporter: Reporter) -> None:
    """Write config.json, model.safetensors and the tokeniser of a GGUF file into `folder`."""
    stored, fields = read_headers([gguf_file])
    if (kind := fields["general.architecture"]) != "llama":
        raise UserError(f"{gguf_file.name}: GGUF architecture {kind!r} is not supported, only llama")
    tensors = _tensors(stored, fields, reporter)
    _save(tensors, folder / "model.safetensors")
    write_json(folder / "config.json", _config(fields, tied="lm_head.weight" not in tensors))
    _write_tokeniser(fields, folder)


def _tensors(stored: dict[str, Tensor], fields: dict[str, Any], reporter: Reporter) -> dict[str, NDArray[np.float32]]:
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    converted = {}
    with reporter.task("converting weights", len(stored), "tensors") as task:
        for name, tensor in stored.items():
            values = np.ascontiguousarray(decoded(tensor.kind, tensor.mapped()))
            part = name.split(".")[2] if name.startswith("blk.") else ""
            if part in heads:
                values = unpermute_rotary(values, heads[part])
            converted[hugging_face_name(name)] = values
            task.advance()
    return converted


def _save(tensors: dict[str, NDArray[np.float32]], file: Path) -> None:
    """Write the weights; a full disk is reported as any other writer would report it."""
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        if "os error 28" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file)) from None
        raise
    file.chmod(0o644)  # safetensors makes it private, unlike every other file


def hugging_face_name(name: str) -> str:
    """Return transformers' name for a GGUF tensor of a Llama model."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in TENSORS or TENSORS[match[2]].startswith(TOP) is bool(match[1]):
        raise UserError(f"GGUF tensor {name!r} is not part of a Llama model; this file is not supported")
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{TENSORS[match[2]]}.{match[3]}"


def unpermute_rotary(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder the rows of a query or key projection: GGUF interleaves a head's two rotary halves, transformers does not."""
    rows, *rest = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, *rest)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
        "head_dim": fields.get("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_theta": fields["llama.rope.freq_base"], "rope_type": "default"},
        "tie_word_embeddings": tied,
        "vocab_size": fields["llama.vocab_size"],
    }


def _write_tokeniser(fields: dict[str, Any], folder: Path) -> None:
    kind, pre = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre")
    if (kind, pre) != ("gpt2", "smollm"):
        raise UserError(f"GGUF tokeniser {kind!r} with pre-tokeniser {pre!r} is not supported, only gpt2 with smollm")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    tokeniser = smollm_tokeniser(tokens, fields["tokenizer.ggml.merges"])
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    special = [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == CONTROL_TOKEN]
    tokeniser.add_special_tokens(special)
    tokeniser.save(str(folder / "tokenizer.json"))
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {role: fields.get(f"tokenizer.ggml.{name}_token_id") for role, name in roles.items()}
    config = {f"{role}_token": tokens[token_id] for role, token_id in ids.items() if token_id is not None}
    config |= {
        "add_bos_token": fields.get("tokenizer.ggml.add_bos_token", False),
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "generation_config.json", {f"{role}_token_id": ids[role] for role in ("bos", "eos", "pad")})
    if "tokenizer.chat_template" in fields:
        write_text(folder / "chat_template.jinja", fields["tokenizer.chat_template"])


def smollm_tokeniser(tokens: list[str], merges: list[str]) -> Tokenizer:
    """Return the byte-level BPE of the SmolLM family: digits singly, then the GPT-2 split."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokeniser = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, fuse_unk=False))
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokeniser.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokeniser.decoder = decoders.ByteLevel()
    tokeniser.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokeniser
