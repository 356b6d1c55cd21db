"""Vocabularies read as the tokeniser itself has them, and compared by hand-worked numbers."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from etude.errors import UserError
from etude.lineage.audit.examine import compare_tokens
from etude.lineage.audit.read_weights import Tokens, read_tokens, shared
from tests import tiny

BASE = Tokens(
    ["<s>", *(f"w{index}" for index in range(199))], [f"a b{index}" for index in range(50)], frozenset({"<s>"})
)


def test_a_folder_is_read_as_its_tokeniser_has_it(tmp_path: Path) -> None:
    tokeniser = tiny.tokeniser()
    tokeniser.add_tokens(["extra"])
    tokeniser.save_pretrained(tmp_path)
    tokens = read_tokens(tmp_path)
    assert tokens is not None
    assert tokens.strings == tokeniser.convert_ids_to_tokens(range(len(tokeniser)))
    assert tokens.special == {"<|end|>"}
    written = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"]
    assert tokens.merges == [f"{left} {right}" for left, right in written]
    assert read_tokens(tmp_path / "model.safetensors") == tokens
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}, "merges": ["x y"]}}))
    old = read_tokens(tmp_path)  # merges as the older files write them
    assert old is not None
    assert (old.strings, old.merges) == (["a"], ["x y"])


def test_unigram_gaps_and_no_tokeniser(tmp_path: Path) -> None:
    assert read_tokens(tmp_path) is None
    model = models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("b", -2.0)], unk_id=0)
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    tokens = read_tokens(tmp_path)
    assert tokens is not None
    assert (tokens.strings, list(tokens.merges)) == (["<unk>", "▁a", "b"], [])
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "c": 3}}}))
    assert read_tokens(tmp_path) == Tokens(["a", None, None, "c"], [])
    for damaged in ('{"model": []}', '{"model": {"vocab": {"a": 99999999}}}', '{"model": {"vocab": {"a": -1}}}'):
        (tmp_path / "tokenizer.json").write_text(damaged)
        with pytest.raises(UserError, match=r"tokenizer\.json is damaged"):
            read_tokens(tmp_path)


def test_tiktoken_words_are_written_as_byte_level_ones(tmp_path: Path) -> None:
    texts = [" the", "naïve", "\n\t", "中"]
    words = [bytes([byte]) for byte in range(256)] + [text.encode() for text in texts]
    lines = [f"{base64.b64encode(word).decode()} {rank}" for rank, word in enumerate(words)]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines) + "\n")
    decoder = {"261": {"content": "[BOS]", "special": True}, "262": {"content": "<tool>", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    tokens = read_tokens(tmp_path)
    assert tokens is not None
    assert set(tokens.strings[:256]) == set(pre_tokenizers.ByteLevel.alphabet())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert tokens.strings[256:] == [
        *(byte_level.pre_tokenize_str(text)[0][0] for text in texts),
        None,
        "[BOS]",
        "<tool>",
    ]
    assert tokens.special == frozenset({"[BOS]"})


def test_identical_extended_overlapping_different() -> None:
    same = compare_tokens(BASE, BASE)
    assert (same.kind, same.jaccard, same.same_id, same.shared) == ("identical", 1, 1, 200)
    more = Tokens([*BASE.strings, *(f"x{index}" for index in range(50))], BASE.merges, BASE.special | {"<t>"})
    extended = compare_tokens(BASE, more)
    assert (extended.kind, extended.jaccard, extended.same_id, extended.sizes) == ("extended", 0.8, 1.0, (200, 250))
    assert "200 words in both of 200 and 250; 100.0% of ids" in extended.sentence
    renamed = compare_tokens(BASE, replace(BASE, strings=[*BASE.strings[:-1], "named"]))
    assert (renamed.kind, renamed.same_id) == ("extended", 0.995)
    moved = compare_tokens(BASE, replace(BASE, strings=BASE.strings[::-1]))
    assert (moved.kind, moved.jaccard, moved.same_id) == ("overlapping", 1.0, 0.0)
    strange = compare_tokens(BASE, Tokens([f"y{index}" for index in range(200)]))
    assert (strange.kind, strange.shared) == ("different", 0)
    other_merges = compare_tokens(BASE, replace(BASE, merges=[*BASE.merges[:20], "c d", *BASE.merges[20:]]))
    assert other_merges.kind == "extended"


WORDS = st.lists(st.none() | st.sampled_from("abcdefghijklmnop"), max_size=20)


@given(WORDS, WORDS, st.integers(0, 20), st.integers(0, 20))
def test_shared_ids_by_brute_force(a: list[str | None], b: list[str | None], end_a: int, end_b: int) -> None:
    special = frozenset("ab")
    ids_a, ids_b = shared(Tokens(a), Tokens(b, special=special), rows=(end_a, end_b))
    pairs = [
        (a.index(word), b.index(word)) for place, word in enumerate(a)
        if word is not None and a.index(word) == place and word in b and word not in special and place < end_a and b.index(word) < end_b
    ]  # fmt: skip
    assert list(zip(ids_a.tolist(), ids_b.tolist(), strict=True)) == pairs
    assert ids_a.dtype == ids_b.dtype == np.int64


@given(WORDS, WORDS)
def test_shares_by_brute_force(a: list[str | None], b: list[str | None]) -> None:
    evidence, back = compare_tokens(Tokens(a), Tokens(b)), compare_tokens(Tokens(b), Tokens(a))
    words_a, words_b = {*a} - {None}, {*b} - {None}
    assert evidence.shared == len([word for word in words_a if word in words_b])
    if words_a or words_b:
        assert evidence.jaccard == evidence.shared / (len(words_a) + len(words_b) - evidence.shared)
    assert (back.kind, back.jaccard, back.same_id) == (evidence.kind, evidence.jaccard, evidence.same_id)
    used = [place for place in range(min(len(a), len(b))) if a[place] is not None or b[place] is not None]
    assert evidence.same_id == sum(a[place] == b[place] for place in used) / max(1, len(used))
