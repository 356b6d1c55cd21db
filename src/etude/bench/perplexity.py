"""Codebase perplexity: how well a base predicts the user's own code, in bits per byte.

The files of the tree are put one after the other in path order and scored with a rolling window (inference/scoring.py).
Tokenisers cut differently, so a mean over tokens would not compare; the summed surprise over the same bytes does:

    bits per byte = Σ nats / ln 2 / bytes
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from etude.bench.statistics import ratio_interval
from etude.errors import UserError
from etude.lineage.compute import ComputeShape, forward_flops
from etude.work import Unit, Work

if TYPE_CHECKING:
    from collections.abc import Callable

    from etude.data.codebase import Codebase
    from etude.inference.transformers_reference import Window


@dataclass(frozen=True)
class TokenisedCode:
    """The tokens of a tree, with the file each belongs to."""

    ids: list[int]  # one token that stands before the text, then the text
    file_of: list[int]  # index into the tree's files; −1 for the token before the text
    lossy_files: int  # files whose tokens do not decode to the same text
    unscored_bytes: int  # bytes of the first token, where the tokeniser has no token to stand before it


@dataclass(frozen=True)
class FileBits:
    """What one file cost: where a model is at a loss, and what two models can be compared on, file by file."""

    path: str
    bytes: int
    bits: float


@dataclass(frozen=True)
class BitsResult:
    """Bits per byte of one model on one tree."""

    bits_per_byte: float
    interval: tuple[float, float] | None  # 95%, drawing files
    bytes: int
    tokens: int
    files: int
    lossy_files: int
    by_file: list[FileBits]


def tokenise(code: Codebase, tokeniser: Any) -> TokenisedCode:
    """Cut each file on its own and join the tokens; special tokens written out in a file stay text."""
    first = next((t for t in (tokeniser.bos_token_id, tokeniser.eos_token_id) if t is not None), None)
    ids: list[int] = [] if first is None else [first]
    file_of = [-1] * len(ids)
    lossy = 0
    for index, file in enumerate(code.files):
        cut = tokeniser(file.text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        lossy += tokeniser.decode(cut, clean_up_tokenization_spaces=False) != file.text
        ids += cut
        file_of += [index] * len(cut)
    unscored = 0 if first is not None else len(tokeniser.decode(ids[:1]).encode())
    return TokenisedCode(ids, file_of, lossy, unscored)


def scoring_units(label: str, windows: list[Window]) -> list[Unit]:
    """Return one unit of work per window."""
    numbered = enumerate(windows)
    return [Unit(f"{label}/bits/{index:06d}", window, window.end - window.start) for index, window in numbered]


def score(
    work: Work, label: str, units: list[Unit], tokens: TokenisedCode, shape: ComputeShape,
    nlls_of: Callable[[list[int], Window], list[float]], clock: Callable[[], float],
) -> None:  # fmt: skip
    """Score the windows that are not yet scored; one metrics row each, with the nats by file."""
    for unit in work.pending(f"{label}: scoring code", units, "tokens"):
        window: Window = unit.item
        begun = clock()
        nlls = nlls_of(tokens.ids, window)
        seconds = clock() - begun
        if not all(map(math.isfinite, nlls)):
            raise UserError(f"{label}: its probabilities are not finite numbers; its weights are damaged or diverged")
        nats: dict[str, float] = defaultdict(float)
        for file, nll in zip(tokens.file_of[window.score_from : window.end], nlls, strict=True):
            nats[str(file)] += nll
        length = window.end - window.start
        spent = {"tokens": length, "flops": forward_flops(shape, length), "device_seconds": round(seconds, 4)}
        work.metrics.put(unit.key, nats=nats, scored=len(nlls), **spent)


def result(work: Work, label: str, code: Codebase, tokens: TokenisedCode, seed: int) -> BitsResult:
    """Add the windows up."""
    bits = [0.0] * len(code.files)
    scored = 0
    for row in work.metrics.rows(f"{label}/bits/"):
        scored += row["scored"]
        for index, nats in row["nats"].items():
            bits[int(index)] += nats / math.log(2)
    by_file = [FileBits(file.path, file.bytes, cost) for file, cost in zip(code.files, bits, strict=True)]
    scored_bytes = code.bytes - tokens.unscored_bytes
    return BitsResult(
        bits_per_byte=sum(bits) / scored_bytes,
        interval=ratio_interval(bits, [file.bytes for file in by_file], seed),
        bytes=scored_bytes,
        tokens=scored,
        files=len(code.files),
        lossy_files=tokens.lossy_files,
        by_file=by_file,
    )


def difference(worse: BitsResult, better: BitsResult, seed: int) -> tuple[float, tuple[float, float] | None]:
    """Return by how many bits per byte one model is behind, and the 95% interval, drawing files seen by both.

    Pairing by file takes out what both find hard, so it tells models apart that their own intervals do not.
    """
    gaps = [a.bits - b.bits for a, b in zip(worse.by_file, better.by_file, strict=True)]
    sizes = [file.bytes for file in better.by_file]
    return sum(gaps) / sum(sizes), ratio_interval(gaps, sizes, seed)
