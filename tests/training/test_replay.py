"""CUDA graphs of a training step: what can be tested without a GPU is, the rest where there is one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from etude.data.loader import Batch
from etude.training.attention import isolate
from etude.training.batch import rows_of
from etude.training.cuda_graphs import FEWEST_PIECES, with_empty_pieces
from etude.training.distributed import World
from etude.training.objectives.next_token import NextToken
from etude.training.run import corpus_session
from etude.training.settings import TrainSettings
from tests.tiny import config_of


def batch_of(cuts: list[list[int]], length: int, seed: int = 0) -> Batch:
    """Return rows cut at the given places."""
    positions = np.zeros((len(cuts), length), np.int32)
    documents = np.zeros_like(positions)
    for row, places in enumerate(cuts):
        ends = [0, *sorted(places), length]
        for number, (begin, end) in enumerate(itertools.pairwise(ends)):
            positions[row, begin:end] = np.arange(end - begin)
            documents[row, begin:end] = number
    tokens = np.random.default_rng(seed).integers(1, 50, positions.shape)
    return Batch(tokens, documents, positions, ["x"] * len(cuts))


@given(st.lists(st.sets(st.integers(1, 15), max_size=15).map(list), min_size=1, max_size=12))
def test_empty_pieces_fill_up_to_a_power_of_two(cuts: list[list[int]]) -> None:
    rows = rows_of(batch_of(cuts, 16))
    filled = with_empty_pieces(rows)
    pieces = len(filled.bounds) - 1
    assert pieces >= FEWEST_PIECES
    assert pieces & (pieces - 1) == 0
    assert filled.bounds[: len(rows.bounds)].tolist() == rows.bounds.tolist()
    assert set(filled.bounds[len(rows.bounds) :].tolist()) <= {int(rows.bounds[-1])}
    assert pieces < 2 * max(FEWEST_PIECES, len(rows.bounds) - 1)


def test_empty_pieces_change_nothing() -> None:
    model = LlamaForCausalLM(config_of("llama")).eval()
    isolate(model, "documents")
    rows = rows_of(batch_of([[5], [], [3, 9]], 16))
    objective = NextToken(model)
    assert torch.equal(objective.nats(model, rows), objective.nats(model, with_empty_pieces(rows)))


class Series:
    """A few batches, again and again."""

    def __init__(self) -> None:
        self.batches = [batch_of([[5], [], [3, 9], []], 64, seed) for seed in range(3)]
        self.at = 0

    def __next__(self) -> Batch:
        self.at += 1
        return self.batches[self.at % 3]

    def state(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def achieved(self) -> dict[str, dict[str, float]]:
        return {"domains": {}, "epochs": {}, "sources": {}}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_replayed_steps_are_the_steps(optimiser: str, tmp_path: Path) -> None:
    losses = []
    for graphs in (True, False):
        torch.manual_seed(0)
        settings = TrainSettings.model_validate({
            "tokens": 64 * 4 * 12, "batch": 4, "micro": 4, "evaluations": 0,
            "optimiser": {"name": optimiser, "lr": 1e-2} | ({"other_lr": 1e-2} if optimiser == "muon" else {}),
        })  # fmt: skip
        session = corpus_session(LlamaForCausalLM(config_of("llama")).eval(), settings, Series(), 64, World(), tmp_path)
        assert session.loop.graphs is not None
        session.loop = session.loop if graphs else replace(session.loop, graphs=None)
        losses.append([step.loss for step in session.loop.steps(12)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=5e-3)
    assert losses[0][-1] < losses[0][0]
