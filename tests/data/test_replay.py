"""Text sampled from the base follows the base's own distribution, ends included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from etude.data.replay import check_length, sample
from etude.data.settings import ReplaySettings
from etude.errors import UserError
from etude.models.load import load_model
from tests import tiny

SEPARATOR = 0


def test_the_first_token_is_drawn_from_the_models_distribution(tiny_base: Path) -> None:
    model = load_model(tiny_base, torch.device("cpu"))
    model.generation_config = GenerationConfig(
        eos_token_id=SEPARATOR, repetition_penalty=50.0, top_k=1
    )  # not to be heeded
    settings = ReplaySettings(share=0.1, source="self", length=8, batch=4000)
    vocabulary = len(tiny.tokeniser())
    with torch.inference_mode():
        logits = model(torch.tensor([[SEPARATOR]])).logits[0, -1, :vocabulary]
    expected = torch.softmax(logits, -1).numpy()
    steps: list[int] = []
    rows = sample(model, (SEPARATOR, vocabulary), settings, 4000, 1, lambda: steps.append(1))
    found = np.bincount(rows[:, 0], minlength=vocabulary) / len(rows)
    assert rows.max() < vocabulary
    # Each share has a standard error of at most √(p/4000); five of them for some three hundred tokens.
    assert (np.abs(found - expected) < 5 * np.sqrt(expected / 4000)).all()
    assert 0 < (rows == SEPARATOR).any(axis=1).sum() < len(rows)  # some texts ended
    assert len(steps) == rows.shape[1]


def test_a_text_longer_than_the_context_is_refused(tiny_base: Path) -> None:
    fits, does_not = (ReplaySettings(share=0.1, source="self", length=tiny.CONTEXT + more) for more in (-1, 0))
    check_length(tiny_base, fits)
    with pytest.raises(UserError, match=rf"does not fit the base's context of {tiny.CONTEXT}"):
        check_length(tiny_base, does_not)
