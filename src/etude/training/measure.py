"""Bits per byte on held-out text, by domain: what a training is for, and what it must not cost.

The bits are those of every token that has one before it in its piece, the end of a document included. The bytes are those of
the held-out text, in proportion to the tokens that were scored, so that a sample of the rows gives an unbiased figure. Rows are
always the same ones, so two measurements are compared row by row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import stdtrit

from etude.data.manifest import load_manifest
from etude.errors import UserError
from etude.files import whole_file
from etude.training.batch import Rows, cut, micro_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    import numpy.typing as npt
    import torch

    from etude.data.loader import Batch, Corpus

    Nats = Callable[[Rows], torch.Tensor]  # −log p of the targets, [B, T]
    Accepted = Callable[[Rows], torch.Tensor]  # acceptance summed by depth, and the weights, [2, K]


@dataclass(frozen=True, eq=False)
class Bits:
    """One domain's figures, row by row."""

    nats: npt.NDArray[np.float64]  # of each row
    tokens: npt.NDArray[np.float64]  # scored in each row
    bytes_per_token: float

    @property
    def per_byte(self) -> float:
        """Bits per byte."""
        return float(self.nats.sum() / self.tokens.sum()) / math.log(2) / self.bytes_per_token

    def change_since(self, before: Bits) -> tuple[float, float]:
        """Return the change in bits per byte and half the width of its 95 % interval, over rows."""
        changes = (self.nats - before.nats) / math.log(2) / self.bytes_per_token
        mean_tokens, rows = self.tokens.mean(), len(self.tokens)
        change = changes.sum() / self.tokens.sum()
        spread = float(np.std(changes - change * self.tokens, ddof=1)) if rows > 1 else math.nan
        quantile = float(stdtrit(max(rows - 1, 1), 0.975))  # of t: rows are few
        return float(change), quantile * spread / math.sqrt(rows) / float(mean_tokens)


def heldout_domains(corpus: Corpus) -> list[str]:
    """Return the domains of which something is held out."""
    return sorted({corpus.domains[source] for source in corpus.splits.get("heldout", {})})


def bytes_per_token(corpus: Corpus) -> dict[str, float]:
    """Return the bytes of text that stand behind a token, by domain, in what is held out."""
    totals: dict[str, tuple[int, int]] = {}
    for source in load_manifest(corpus.folder).sources:
        size, tokens = totals.get(source.domain, (0, 0))
        totals[source.domain] = size + source.text_bytes["heldout"], tokens + source.tokens["heldout"]
    return {domain: size / tokens for domain, (size, tokens) in totals.items() if tokens}


def bits_by_domain(
    nats: Nats, corpus: Corpus, *, length: int, rows: int, micro: int, device: torch.device
) -> dict[str, Bits]:
    """Measure a model on at most `rows` held-out rows of each domain, evenly spread over it."""
    ratio = bytes_per_token(corpus)
    return {
        domain: bits(nats, batches, ratio[domain], micro, device)
        for domain, batches in _heldout_rows(corpus, length, rows, micro)
    }


def _heldout_rows(corpus: Corpus, length: int, rows: int, micro: int) -> Iterator[tuple[str, Iterator[Batch]]]:
    for domain in heldout_domains(corpus):
        batches = corpus.heldout(domain, batch=max(1, micro * length // corpus.length), rows=rows)
        yield domain, (cut(batch, length) for batch in batches)


def bits(nats: Nats, batches: Iterable[Batch], bytes_a_token: float, micro: int, device: torch.device) -> Bits:
    """Measure a model on some batches, row by row."""
    sums: list[npt.NDArray[Any]] = []
    counts: list[npt.NDArray[Any]] = []
    for batch in batches:
        for part in micro_batches(batch, micro):
            scores = nats(part.to(device)).cpu() * part.weights_BT
            sums.append(scores.sum(1).double().numpy())
            counts.append(part.weights_BT.sum(1).double().numpy())
    tokens = np.concatenate(counts)
    scored = tokens > 0  # not so the padding that fills the last micro-batch
    return Bits(np.concatenate(sums)[scored], tokens[scored], bytes_a_token)


def acceptance(accepted: Accepted, batches: Iterable[Batch], micro: int, device: torch.device) -> list[float]:
    """Return the expected acceptance at each depth of MTP heads, over some batches; none where nothing could be scored."""
    parts = [
        accepted(part.to(device)).double().cpu().numpy() for batch in batches for part in micro_batches(batch, micro)
    ]
    sums, weights = np.sum(parts, axis=0)
    if not np.isfinite(sums).all():
        what = "the acceptance of MTP heads is not a finite number: the model's outputs are not"
        raise UserError(f"{what}; lower the learning rate")
    return [float(total / weight) for total, weight in zip(sums, weights, strict=True) if weight]


def acceptance_by_domain(
    accepted: Accepted, corpus: Corpus, *, length: int, rows: int, micro: int, device: torch.device
) -> dict[str, list[float]]:
    """Measure MTP heads on the same rows that `bits_by_domain` takes."""
    return {domain: acceptance(accepted, batches, micro, device)
            for domain, batches in _heldout_rows(corpus, length, rows, micro)}  # fmt: skip


def table(before: Mapping[str, Bits], after: Mapping[str, Bits]) -> list[dict[str, Any]]:
    """Return one row a domain: before, after, the change and its uncertainty."""
    rows = []
    for domain, first in before.items():
        change, margin = after[domain].change_since(first)
        rows.append({"domain": domain, "before": first.per_byte, "after": after[domain].per_byte, "change": change,
                     "margin": None if math.isnan(margin) else margin, "tokens": int(first.tokens.sum())})  # fmt: skip
    return rows


def save_bits(path: Path, bits: Mapping[str, Bits]) -> None:
    """Write figures, row by row."""
    arrays = {
        f"{domain}/{name}": np.asarray(value) for domain, each in bits.items() for name, value in vars(each).items()
    }
    with whole_file(path) as beside, beside.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def load_bits(path: Path) -> dict[str, Bits]:
    """Read what `save_bits` wrote."""
    with np.load(path) as arrays:
        columns = {domain: [arrays[f"{domain}/{name}"] for name in ("nats", "tokens", "bytes_per_token")]
                   for domain in sorted({name.rpartition("/")[0] for name in arrays})}  # fmt: skip
        return {domain: Bits(nats, tokens, float(ratio)) for domain, (nats, tokens, ratio) in columns.items()}
