"""Rows of tokens that were never learnt: planted ones are found, and after a redraw the model can tell them apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from etude.models.bases import locate
from etude.models.load import alike, load_model, load_tokeniser, tell_apart
from etude.progress import Reporter

SPECIAL = {0, 1, 2, 3, 4}


def planted(spread: float) -> torch.Tensor:
    """Five special rows: 1 and 3 are nearly the same, 4 is nothing."""
    rows = torch.randn(40, 16, generator=torch.Generator().manual_seed(1)) + 0.5
    rows[3] = 1.3 * rows[1] + spread * torch.randn(16, generator=torch.Generator().manual_seed(2))
    rows[4] = 0
    return rows


def test_planted_rows_are_found() -> None:
    assert alike(planted(0.01), SPECIAL) == [1, 3, 4]
    assert alike(planted(3.0), SPECIAL) == [4]
    learnt = planted(0.15)  # as near as SmolLM2's markers of turns, which it tells apart
    assert 0.985 < torch.cosine_similarity(learnt[1], learnt[3], dim=0) < 0.995
    assert alike(learnt, SPECIAL) == [4]
    assert alike(planted(0.01), {0, 1, 2}) == []  # the other is no special token


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Embedding(40, 16), torch.nn.Linear(16, 40, bias=False)
        self.first.weight.data = planted(0.01)
        self.last.weight = self.first.weight if tied else torch.nn.Parameter(planted(3.0))

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.first

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.last


@pytest.mark.parametrize("tied", [True, False])
def test_only_rows_that_are_wanted_and_alike_change(tied: bool) -> None:
    model = Model(tied=tied)
    before = [each.weight.clone() for each in (model.first, model.last)]
    assert tell_apart(model, SPECIAL, {0, 3, 4, 20}, seed=0) == [3, 4]
    changed = [
        (each.weight != old).any(dim=1).nonzero().flatten().tolist()
        for each, old in zip((model.first, model.last), before, strict=True)
    ]
    assert changed == [[3, 4], [3, 4] if tied else [4]]
    assert alike(model.first.weight, SPECIAL) == alike(model.last.weight, SPECIAL) == []
    assert tell_apart(model, SPECIAL, {0, 3, 4, 20}, seed=0) == []


def test_without_a_draw_they_are_named_and_nothing_changes() -> None:
    model = Model(tied=False)
    assert tell_apart(model, SPECIAL, {0, 3, 4, 20}, seed=0, draw=False) == [3, 4]
    assert torch.equal(model.first.weight, planted(0.01))
    assert torch.equal(model.last.weight, planted(3.0))


def test_rows_are_drawn_as_others_are_spread() -> None:
    rows = torch.randn(4000, 16) * torch.linspace(0.1, 3, 16) + torch.linspace(-5, 5, 16)
    rows[:1000] = 1.0
    model = Model(tied=True)
    model.first.weight = model.last.weight = torch.nn.Parameter(rows)
    tell_apart(model, range(1000), range(1000), seed=3)
    drawn, others = rows[:1000], rows[1000:]
    torch.testing.assert_close(drawn.mean(dim=0), others.mean(dim=0), rtol=0, atol=0.4)
    torch.testing.assert_close(drawn.std(dim=0), others.std(dim=0), rtol=0.1, atol=0)


def test_sprout_cannot_tell_its_markers_apart(tmp_path: Path) -> None:
    folder = locate("sprout", tmp_path, Reporter(quiet=True))[1]
    tokeniser, model = load_tokeniser(folder), load_model(folder, torch.device("cpu"), torch.float32)
    special = set(tokeniser.added_tokens_decoder)
    markers = tokeniser.convert_tokens_to_ids(["<tool_call>", "</tool_call>", "<|im_end|>", "<|endoftext|>"])
    assert set(alike(model.get_input_embeddings().weight, special)) == special - {tokeniser.eos_token_id}
    assert tell_apart(model, special, markers, seed=0) == sorted(markers[:3])
