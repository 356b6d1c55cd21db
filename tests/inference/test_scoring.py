from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.inference.transformers_reference import Window, rolling_windows, token_nlls
from etude.models.load import load_model
from tests import tiny


@given(st.integers(0, 400), st.integers(2, 60), st.data())
def test_every_token_is_scored_once_with_enough_before_it(tokens: int, window: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, window - 1))
    windows = rolling_windows(tokens, window, stride)
    scored = [position for each in windows for position in range(each.score_from, each.end)]
    assert scored == list(range(1, tokens))
    for each in windows:
        assert 0 <= each.start < each.score_from < each.end <= tokens
        assert each.end - each.start <= window
        assert each.start == 0 or each.score_from - each.start >= window - stride


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_nats_equal_transformers_own_loss(tmp_path: Path, family: str) -> None:
    model = load_model(tiny.save_model(tmp_path / family, family), torch.device("cpu"))
    ids = torch.randint(tiny.VOCABULARY, (1, 90), generator=torch.Generator().manual_seed(1))
    ours = token_nlls(model, ids[0].tolist(), Window(0, 1, 90)).sum()
    with torch.inference_mode():
        theirs = model(ids, labels=ids).loss * 89
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)


def test_a_rolling_sum_equals_token_by_token(tiny_base: Path) -> None:
    model = load_model(tiny_base, torch.device("cpu"))
    ids = torch.randint(tiny.VOCABULARY, (70,), generator=torch.Generator().manual_seed(2)).tolist()
    windows = rolling_windows(len(ids), 24, 10)
    rolled = torch.cat([token_nlls(model, ids, window) for window in windows])
    for window in windows:
        for position in range(window.score_from, window.end):
            with torch.inference_mode():
                logits = model(torch.tensor([ids[window.start : position]])).logits[0, -1]
            alone = -torch.log_softmax(logits, -1)[ids[position]]
            assert rolled[position - 1].item() == pytest.approx(alone.item(), rel=1e-5)
