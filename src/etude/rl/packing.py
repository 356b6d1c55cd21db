"""Branches of episodes in rows: several a row, kept apart by their positions, the tokens exactly those that were sampled.

A branch is a path of the trace's tree. What comes after its last sampled token is cut off, since nothing is learnt there; a branch
without any of its own is left out. Rows have one length, so that a compiled model meets one shape.

Values of a branch of n tokens are [n − 1]: those of its second to its last token, each at the position that predicts it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from etude.agent.trace import Trace, samples
from etude.errors import UserError
from etude.training.batch import Rows, piece_bounds
from etude.training.objectives.policy_gradient import SampledRows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    Array = npt.NDArray[Any]

STEP = 64  # lengths that may change from batch to batch are multiples of this


@dataclass(frozen=True, eq=False)
class Branch:
    """One path of an episode's trace."""

    episode: int  # in the batch
    tokens: Array
    logprobs: Array  # at temperature 1, when it was sampled; 0 where not sampled
    versions: Array  # −1 where not sampled
    fresh: Array  # sampled, and in no branch before this one
    learnt: Array  # fresh, and not of a summary if those are masked

    def begun_by(self, version: int) -> Array:
        """Return which fresh tokens are of a completion that a version began: those after a swap read a cache of older weights."""
        begins = np.where(np.diff(self.fresh, prepend=False) & self.fresh, np.arange(len(self.fresh)), 0)
        same: Array = self.versions[np.maximum.accumulate(begins)] == version
        return same[self.fresh]


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows, and where each branch of them lies."""

    tokens: Array
    positions: Array
    places: tuple[tuple[Branch, int, int], ...]  # branch, row, column

    def rows(self, weights: Sequence[float]) -> SampledRows:
        """Return the rows as tensors, each learnt token with the weight of its episode."""
        shape = self.tokens.shape
        learnt_weights, logprobs, learnt = (np.zeros(shape, kind) for kind in (np.float32, np.float32, np.bool_))
        for branch, row, column in self.places:
            here = slice(column, column + len(branch.learnt))
            logprobs[row, here], learnt[row, here] = branch.logprobs, branch.learnt
            learnt_weights[row, here] = branch.learnt * weights[branch.episode]
        return SampledRows(self._plain(learnt_weights), torch.from_numpy(logprobs), torch.from_numpy(learnt))

    def plain_rows(self) -> Rows:
        """Return the rows as tensors to be scored only."""
        return self._plain(np.zeros(self.tokens.shape, np.float32))

    def _plain(self, weights: Array) -> Rows:
        tokens, bounds = torch.from_numpy(self.tokens), torch.from_numpy(piece_bounds(self.positions))
        return Rows(tokens, tokens.roll(-1, 1), torch.from_numpy(weights), torch.from_numpy(self.positions), bounds)

    def by_branch(self, values: torch.Tensor) -> list[tuple[Branch, Array]]:
        array = values.cpu().numpy()
        return [(branch, array[row, column : column + len(branch.fresh)]) for branch, row, column in self.places]


def branches(trace: Trace, episode: int, *, train_summaries: bool) -> list[Branch]:
    """Return the branches of an episode that hold sampled tokens of their own."""
    if not all(node.trainable for node in trace.nodes if node.sampled):
        raise UserError(
            f"trace {trace.id!r} lacks log-probs, without which it cannot be trained on; use a policy that returns them"
        )
    paths = samples(trace)
    masked = paths if train_summaries else samples(_without_summaries(trace))
    made = []
    for sample, other in zip(paths, masked, strict=True):
        if any(sample.trained):
            assert not sample.trained[0], f"trace {trace.id!r} begins with a sampled token, which nothing predicts"
            until = slice(1, len(sample.trained) - sample.trained[::-1].index(True))
            columns = ((sample.raw_logprobs, np.float32), (sample.versions, np.int64), (sample.trained, np.bool_))
            values = [np.array(column[until], kind) for column, kind in (*columns, (other.trained, np.bool_))]
            made.append(Branch(episode, np.array(sample.tokens[: until.stop], np.int64), *values))
    return made


def _without_summaries(trace: Trace) -> Trace:
    """Return a trace whose summaries were given, not sampled."""
    nodes = [replace(node, sampled=False) if node.kind == "summary" else node for node in trace.nodes]
    return replace(trace, nodes=nodes)


def row_length(branches: Sequence[Branch], limit: int, *, fixed: bool) -> int:
    """Return the length of rows: the limit, or if it need not be fixed what the longest branch takes."""
    longest = max(len(branch.tokens) for branch in branches)
    if longest > limit:
        what = f"a branch of {longest} tokens does not fit a training row of {limit}"
        raise UserError(f"{what}; raise `length`, or lower harness.summary.trigger")
    return limit if fixed else min(limit, -(-longest // STEP) * STEP)


def pack(
    branches: Sequence[Branch], length: int, at_once: int, *, fixed: bool, rank: int = 0, ranks: int = 1
) -> Iterator[Part]:
    """Yield a rank's rows in parts of `at_once`, as many on every rank; if shapes must be fixed, padding fills the last up."""
    rows = _first_fit([len(branch.tokens) for branch in branches], length)
    rows += [[] for _ in range(-len(rows) % ranks)]
    own = rows[rank::ranks]
    for begin in range(0, len(own), at_once):
        some = own[begin : begin + at_once]
        yield _part([[branches[place] for place in row] for row in some], length, at_once if fixed else len(some))


def _part(rows: list[list[Branch]], length: int, count: int) -> Part:
    tokens = np.zeros((count, length), np.int64)
    positions = np.tile(np.arange(length), (count, 1))
    places = []
    for row, inside in enumerate(rows):
        column = 0
        for branch in inside:
            end = column + len(branch.tokens)
            tokens[row, column:end] = branch.tokens
            positions[row, end:] = np.arange(length - end)  # the next branch begins here, or the padding
            places.append((branch, row, column))
            column = end
    return Part(tokens, positions, tuple(places))


def _first_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return rows of places: the longest first, each into the first row that has room."""
    rows: list[list[int]] = []
    left: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        row = next((row for row, free in enumerate(left) if free >= lengths[place]), len(rows))
        if row == len(rows):
            rows.append([])
            left.append(room)
        rows[row].append(place)
        left[row] -= lengths[place]
    return rows
