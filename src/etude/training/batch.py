"""What a step is trained on: rows of packed pieces as tensors, with the target and the weight of every position.

Shapes: B rows, T positions. A piece is a document, a part of one, or padding. Position i of a piece predicts its token
i + 1; the last position of a piece predicts nothing, because the next piece has nothing to do with it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from etude.data.loader import Batch
from etude.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    Integers = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class Split:
    """What a rank must know besides its own two chunks of the positions, where several ranks share rows (`context_parallel.py`)."""

    group: str  # of ranks
    ranks: int
    ends: tuple[int, int]  # of the chunks in the whole row
    bounds: torch.Tensor  # int32: where pieces begin in the keys up to each end, row by row, then the end
    live_BT: torch.Tensor  # bool: `Rows.live`, which takes the whole row to know


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows, ready for a model."""

    tokens_BT: torch.Tensor  # int64
    targets_BT: torch.Tensor  # int64: what each position predicts
    weights_BT: torch.Tensor  # float32: how much that counts; 0 at ends of pieces, in padding, where nothing is learnt
    positions_BT: torch.Tensor  # int64: from 0 in each piece
    bounds: torch.Tensor  # int32: where pieces begin in the flattened rows from `whole` on, then the end
    whole: int = 0  # this many rows at the front are known to be one piece each
    split: Split | None = (
        None  # if this is a part of the positions: `bounds` are then of its queries, piece by piece of the keys
    )

    def to(self, device: torch.device) -> Rows:
        """Return the rows on a device; the copy to a GPU does not wait."""
        if device.type == "cpu":
            return self
        moved = self.each(lambda tensor: tensor.pin_memory().to(device, non_blocking=True))
        for bounds in (moved.bounds, *([moved.split.bounds] if moved.split else [])):
            torch._dynamo.maybe_mark_dynamic(bounds, 0)  # noqa: SLF001 - else every number of pieces is compiled anew
        return moved

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Rows:
        tokens, targets, weights, positions, bounds = (change(each) for each in self.tensors())
        split = self.split
        if split:
            split = replace(split, bounds=change(split.bounds), live_BT=change(split.live_BT))
        return Rows(tokens, targets, weights, positions, bounds, self.whole, split)

    def live(self, learnt_BT: torch.Tensor | None = None) -> torch.Tensor:
        """Return which positions are of a piece that something is learnt of, [B, T]: padding is not."""
        if self.split:
            return self.split.live_BT
        piece_N = (self.positions_BT.flatten() == 0).cumsum(0) - 1
        learnt_N = (self.weights_BT != 0 if learnt_BT is None else learnt_BT).flatten().float()
        count = torch.zeros_like(learnt_N).index_add_(0, piece_N, learnt_N)
        return (count > 0)[piece_N].view_as(self.tokens_BT)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.tokens_BT, self.targets_BT, self.weights_BT, self.positions_BT, self.bounds


@dataclass(frozen=True)
class StepRows:
    """What one step learns from."""

    parts: list[Any]  # this rank's micro-batches, as the objective takes them, in main memory
    pieces: Counter[int]  # how many pieces of each length, over all ranks
    divisor: float | None = None  # of the loss; None: the weight of the rows of all ranks
    waited: float = 0.0  # seconds until there was anything to make them of


class Batches(Protocol):
    """An endless series of batches that can be taken up where it was left."""

    def __next__(self) -> Batch: ...
    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: Any) -> None: ...
    def achieved(self) -> dict[str, dict[str, float]]:
        """Return shares of the tokens handed over so far: by source, by domain; and epochs by source."""
        ...


class CorpusRows:
    """A packed corpus as a source of rows of `length` tokens (`loop.Source`)."""

    ahead = True

    def __init__(self, batches: Batches, length: int, ranks: int, part: Callable[[Rows], Rows] | None = None) -> None:
        """`ranks`: that have other rows each; `part`: this rank's positions of rows that it shares with others."""
        self.batches, self.length, self._ranks, self._part = batches, length, ranks, part
        self.state, self.load_state = batches.state, batches.load_state

    def take(self, micro: int, device: torch.device) -> StepRows:
        batch = cut(next(self.batches), self.length)
        parts = list(micro_batches(batch, micro, whole_first=device.type == "cuda" and not self._part))
        parts = [self._part(rows) for rows in parts] if self._part else parts
        sizes = Counter(np.diff(piece_bounds(batch.positions)).tolist())
        pieces = Counter({size: count * self._ranks for size, count in sizes.items()})
        return StepRows(parts, pieces)


def cut(batch: Batch, length: int) -> Batch:
    """Return a batch with rows of `length`: each row becomes several, and a piece that a cut goes through becomes two."""
    long = batch.tokens.shape[1]
    if length == long:
        return batch
    if long % length:
        raise UserError(f"rows of {long} tokens cannot be cut into rows of {length}; `length` must divide data.length")
    columns = np.arange(length, dtype=np.int32)
    reshaped = _changed(batch, lambda values, _: values.reshape(-1, length))
    since = columns - np.maximum.accumulate(np.where(reshaped.positions == 0, columns, 0), axis=1)
    return replace(reshaped, positions=since)


def _changed(batch: Batch, change: Callable[[Any, Any], Any]) -> Batch:
    """Return a batch whose arrays are changed alike, given what fills each up; its sources, which nobody asks for, are left out."""
    learnt = None if batch.learnt is None else change(batch.learnt, False)  # noqa: FBT003
    positions = change(batch.positions, np.arange(batch.positions.shape[1]))
    return Batch(change(batch.tokens, 0), change(batch.documents, -1), positions, [], learnt)


def target_weights(batch: Batch) -> npt.NDArray[np.float32]:
    """Return [B, T]: 1 where the next token belongs to the same piece and is to be learnt, else 0."""
    follows = (batch.positions[:, 1:] > 0) & (batch.documents[:, 1:] >= 0)
    if batch.learnt is not None:
        follows &= batch.learnt[:, 1:]
    return np.pad(follows, ((0, 0), (0, 1))).astype(np.float32)


def piece_bounds(positions: Integers) -> npt.NDArray[np.int32]:
    """Return where pieces begin, in the flattened rows, and the end."""
    return np.append(np.flatnonzero(positions.ravel() == 0), positions.size).astype(np.int32)


def rows_of(batch: Batch, whole: int = 0) -> Rows:
    """Return a batch as tensors, on the CPU; its first `whole` rows are one piece each."""
    tokens = torch.from_numpy(batch.tokens)
    positions, bounds = batch.positions.astype(np.int64), piece_bounds(batch.positions[whole:])
    weights, positions, bounds = map(torch.from_numpy, (target_weights(batch), positions, bounds))
    return Rows(tokens, tokens.roll(-1, 1), weights, positions, bounds, whole)


def micro_batches(batch: Batch, rows: int, *, whole_first: bool = False) -> Iterator[Rows]:
    """Yield a batch in parts of `rows` rows; the last is filled up with padding, so that a model meets one shape only.

    With `whole_first`, rows that are one piece each come first in their part, and are counted in quarters of it: for these a
    faster attention may be used, and a compiled model meets five cases only.
    """
    lacking = -len(batch.tokens) % rows

    def padded(values: Any, padding: Any) -> Any:
        more = np.broadcast_to(np.asarray(padding, values.dtype), (lacking, values.shape[1]))
        return np.concatenate([values, more])

    batch = _changed(batch, padded) if lacking else batch
    for here in np.arange(len(batch.tokens)).reshape(-1, rows):
        whole, order = 0, here
        if whole_first:
            pieces, quarter = (batch.positions[here] == 0).sum(1), max(1, rows // 4)
            order = here[np.argsort(pieces > 1, kind="stable")]
            whole = int((pieces == 1).sum()) // quarter * quarter
        yield rows_of(_at(batch, order), whole)


def _at(batch: Batch, places: Integers) -> Batch:
    return _changed(batch, lambda values, _: values[places])
