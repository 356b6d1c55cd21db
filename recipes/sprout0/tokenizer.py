"""Train sprout's byte-level BPE on documents.jsonl and pack the corpus to token streams.

    python tokenizer.py         writes tokenizer/, train.bin.xz, heldout.bin.xz and packing.json

A stream is `<|endoftext|> file <|endoftext|> file ... <|endoftext|>` as little-endian uint16: packages in a shuffled
order, the files of a package side by side. Text that spells a special token is packed as ordinary text, so only the
separators carry its id.
"""
import json
import lzma
import random
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
VOCABULARY_SIZE = 6144
END_OF_TEXT = "<|endoftext|>"
NAMED_TOKENS = [
    END_OF_TEXT, "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
SPECIAL_TOKENS = NAMED_TOKENS + [f"<|reserved_{i}|>" for i in range(16)]
# A word with at most one sign before it, one digit, a run of signs with its line end, blank lines, indentation.
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SEED = 0
BATCH_FILES = 512
# uint16 tokens: align the literal and position models to two bytes, and let the dictionary span the whole stream.
XZ_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 28, "lc": 3, "lp": 1, "pb": 1}]
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
{{- 'Tools:\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{{- '<tool_call>\\n' + {'name': function.name, 'arguments': function.arguments} | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


def read_documents(split):
    """Texts of a split: packages shuffled, the files of one package side by side."""
    by_package = {}
    with open(HERE / "documents.jsonl") as lines:
        for line in lines:
            document = json.loads(line)
            if document["split"] == split:
                by_package.setdefault(document["package"], []).append(document["text"])
    packages = sorted(by_package)
    random.Random(SEED).shuffle(packages)
    return [text for package in packages for text in by_package[package]]


def train_tokenizer(texts):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PIECES), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE, special_tokens=SPECIAL_TOKENS, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    return tokenizer


def save_tokenizer(tokenizer, folder):
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT,
        additional_special_tokens=SPECIAL_TOKENS[1:], model_max_length=2048, clean_up_tokenization_spaces=False)
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


def check_round_trip(folder, texts):
    """Every sampled file, and every single byte value, must come back exactly from the saved folder."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if len(tokenizer) != VOCABULARY_SIZE:
        raise ValueError(f"vocabulary has {len(tokenizer)} tokens, not {VOCABULARY_SIZE}")
    missing_bytes = set(pre_tokenizers.ByteLevel.alphabet()) - set(tokenizer.get_vocab())
    if missing_bytes:
        raise ValueError(f"bytes without a token: {sorted(missing_bytes)}")
    for text in texts:
        if tokenizer.decode(tokenizer.encode(text)) != text:
            raise ValueError(f"does not round-trip: {text[:80]!r}")


def pack(tokenizer, texts):
    """uint16 array of the whole stream, `<|endoftext|>` before the first, between and after the last file."""
    end = np.array([tokenizer.token_to_id(END_OF_TEXT)], dtype="<u2")
    tokenizer.encode_special_tokens = True  # text that spells a special token stays text
    parts = [end]
    for start in range(0, len(texts), BATCH_FILES):
        for encoding in tokenizer.encode_batch_fast(texts[start:start + BATCH_FILES]):
            parts += [np.array(encoding.ids, dtype="<u2"), end]
    tokenizer.encode_special_tokens = False
    return np.concatenate(parts)


def write_stream(name, tokenizer, texts):
    tokens = pack(tokenizer, texts)
    compressed = lzma.compress(tokens.tobytes(), format=lzma.FORMAT_XZ, filters=XZ_FILTERS)
    (HERE / f"{name}.bin.xz").write_bytes(compressed)
    text_bytes = sum(len(text.encode()) for text in texts)
    return {"files": len(texts), "bytes": text_bytes, "tokens": len(tokens),
            "bytes_per_token": round(text_bytes / len(tokens), 4), "compressed_bytes": len(compressed)}


def main():
    train, heldout = read_documents("train"), read_documents("heldout")
    tokenizer = train_tokenizer(train)
    save_tokenizer(tokenizer, HERE / "tokenizer")
    check_round_trip(HERE / "tokenizer", random.Random(SEED).sample(train, 400) + random.Random(SEED).sample(heldout, 100))
    packing = {"heldout": write_stream("heldout", tokenizer, heldout), "train": write_stream("train", tokenizer, train)}
    (HERE / "packing.json").write_text(json.dumps(packing, indent=1))
    print(json.dumps(packing, indent=1))


if __name__ == "__main__":
    main()
