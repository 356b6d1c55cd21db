"""What two tokenisers and two shapes say about kinship: that two models are compatible.

Never proof, for tokenisers and shapes are reused by strangers; never disproof, for tokenisers can be exchanged and models pruned.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from etude.errors import UserError, one_line
from etude.files import read_json
from etude.lineage.audit.read_weights import UNREADABLE, Shape, read_headers, weight_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

CONTROL_TOKEN = 3  # GGUF's token type for special tokens
NEARLY_ALL = 0.99  # of the ids both have: new words were appended, or reserved ones were named
MOST_IDS = 1 << 24  # far more than any vocabulary has; a list is made of them
MANY = 0.5  # of all words; only a word for people, no verdict hangs on it
# A difference in these is worth a word, but is no other structure: both change in training, or in how a file is written.
INCIDENTAL = {"model_type", "tied", "rope_theta"}
DEPTH = {"layers", "dense_layers"}
EXPERT_FIELDS = {"experts", "expert_ffn", "shared_experts", "dense_layers", "ffn"}
WIDTH = {field.name for field in fields(Shape)} - INCIDENTAL - DEPTH - {"vocab", "attention"}


@dataclass(frozen=True)
class Tokens:
    """A vocabulary by id, its words as the tokeniser writes them (byte-level, or with ▁); None where an id has no word."""

    strings: list[str | None]
    merges: Sequence[str] = ()  # "left right", first learned first; none in other kinds of tokeniser
    special: frozenset[str] = frozenset()

    def ids(self) -> dict[str, int]:
        """Return the id of each word; the first of those that are there twice."""
        return {word: index for index, word in reversed(list(enumerate(self.strings))) if word is not None}


@dataclass(frozen=True)
class TokenEvidence:
    """How two vocabularies are related."""

    kind: str  # "identical" | "extended" | "overlapping" | "different"
    jaccard: float  # shared words over all words
    same_id: float  # share of the ids both have whose word is the same
    shared: int
    sizes: tuple[int, int]
    sentence: str


def read_tokens(path: Path) -> Tokens | None:
    """Read the vocabulary of a model folder, of the folder of a .safetensors, or of a GGUF; None where there is none.

    SentencePiece's own tokenizer.model is not read: whoever has it nearly always has a tokenizer.json as well.
    """
    if path.suffix == ".gguf":
        return _from_gguf(weight_files(path)[0])
    folder = path if path.is_dir() else path.parent
    for name, reader in (("tokenizer.json", _from_tokenizer_json), ("tiktoken.model", _from_tiktoken)):
        if (file := folder / name).is_file():
            try:
                return reader(file)
            except UNREADABLE as error:
                raise UserError(f"{file} is damaged ({one_line(error)}); fetch it again") from None
    return None


def _from_tokenizer_json(file: Path) -> Tokens:
    whole = read_json(file)
    model, added = whole["model"], whole.get("added_tokens") or []
    words = model["vocab"]
    if isinstance(words, list):  # unigram: [word, score] by id
        words = {word: index for index, (word, _) in enumerate(words)}
    by_id = [(index, word) for word, index in words.items()] + [(token["id"], token["content"]) for token in added]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges") or []]
    special = frozenset(token["content"] for token in added if token.get("special"))
    return Tokens(_strings(by_id), merges, special)


def _from_tiktoken(file: Path) -> Tokens:
    """Read `base64 rank` lines (Kimi), written as byte-level words so that they compare with other files."""
    letters = _byte_letters()
    pairs = (line.split() for line in file.read_text(encoding="utf-8").splitlines() if line)
    by_id = [(int(rank), "".join(letters[byte] for byte in base64.b64decode(word))) for word, rank in pairs]
    config = file.with_name("tokenizer_config.json")
    added = (read_json(config) if config.is_file() else {}).get("added_tokens_decoder", {})
    by_id += [(int(index), token["content"]) for index, token in added.items()]
    special = frozenset(token["content"] for token in added.values() if token.get("special"))
    return Tokens(_strings(by_id), special=special)


def _from_gguf(file: Path) -> Tokens | None:
    _, meta = read_headers([file])
    words, kinds = meta.get("tokenizer.ggml.tokens"), meta.get("tokenizer.ggml.token_type", [])
    if not words:
        return None
    special = frozenset(word for word, kind in zip(words, kinds, strict=False) if kind == CONTROL_TOKEN)
    return Tokens(words, meta.get("tokenizer.ggml.merges", []), special)


def _strings(by_id: Iterable[tuple[int, str]]) -> list[str | None]:
    words = dict(by_id)
    if any(not 0 <= index < MOST_IDS for index in words):
        raise ValueError("an id of a word is out of range")
    return [words.get(index) for index in range(max(words, default=-1) + 1)]


def _byte_letters() -> list[str]:
    """Return GPT-2's letter for each byte: itself if printable, else the next unused one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


def shared(a: Tokens, b: Tokens, *, rows: tuple[int, int] | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the ids of the ordinary words both have, in a's order; ids at or beyond `rows`, an embedding's end, are left out."""
    ends = rows or (len(a.strings), len(b.strings))
    others, special = b.ids(), a.special | b.special
    pairs = [
        (index, others[word])
        for word, index in sorted(a.ids().items(), key=lambda item: item[1])
        if word in others and word not in special and index < ends[0] and others[word] < ends[1]
    ]
    ids = np.array(pairs, np.int64).reshape(-1, 2)
    return ids[:, 0], ids[:, 1]


def compare_tokens(a: Tokens, b: Tokens) -> TokenEvidence:
    """Compare two vocabularies."""
    words_a, words_b = ({word for word in tokens.strings if word is not None} for tokens in (a, b))
    both, sizes = len(words_a & words_b), (len(words_a), len(words_b))
    jaccard = both / max(1, len(words_a | words_b))
    pairs = [pair for pair in zip(a.strings, b.strings, strict=False) if pair != (None, None)]
    same_id = sum(one == other for one, other in pairs) / max(1, len(pairs))
    identical = a.strings == b.strings and (list(a.merges) == list(b.merges) or not (a.merges and b.merges))
    kind = "identical" if identical else "overlapping" if jaccard >= MANY else "different"
    kind = "extended" if not identical and same_id >= NEARLY_ALL else kind
    words = f"{both:,} words in both of {sizes[0]:,} and {sizes[1]:,}; {same_id:.1%} of ids mean the same"
    return TokenEvidence(kind, jaccard, same_id, both, sizes, f"{kind} vocabularies: {words}")


@dataclass(frozen=True)
class ShapeEvidence:
    """How two shapes are related. Compatible shapes prove nothing; different ones disprove nothing."""

    kind: str  # "exact" | "extended vocabulary" | "pruned" | "upcycled" | "different"
    differences: dict[str, tuple[Any, Any]]
    sentence: str


def compare_shapes(a: Shape, b: Shape) -> ShapeEvidence:
    """Compare two shapes. Which of the two was first, no shape can tell."""
    pairs = {field.name: (getattr(a, field.name), getattr(b, field.name)) for field in fields(Shape)}
    differences = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    changed = differences.keys() - INCIDENTAL
    kind, sentence = _shape_kind(changed, differences)
    listed = ", ".join(f"{name} {one} and {other}" for name, (one, other) in differences.items())
    return ShapeEvidence(kind, differences, f"{sentence} ({listed})" if listed else sentence)


def _shape_kind(changed: set[str], differences: Mapping[str, tuple[Any, Any]]) -> tuple[str, str]:
    if not changed:
        return "exact", "the same shape"
    if changed == {"vocab"}:
        return "extended vocabulary", "the same shape but for the number of words"
    dense = [side for side in (0, 1) if "experts" in changed and differences["experts"][side] == 0]
    if dense and changed <= EXPERT_FIELDS | {"vocab"}:
        return "upcycled", f"the same shape with experts in place of the FFN of the {('first', 'second')[dense[0]]}"
    structural = changed - {"vocab"}
    smaller = {one < other for one, other in (differences[name] for name in structural)}
    if not dense and len(smaller) == 1 and structural <= DEPTH | WIDTH:
        parts = [word for word, names in (("layers", DEPTH), ("width", WIDTH)) if structural & names]
        less = "first" if smaller == {True} else "second"
        return "pruned", f"the {less} could be the other with less of its {' and '.join(parts)}"
    return "different", "different shapes"
