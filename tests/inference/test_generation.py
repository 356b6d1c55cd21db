from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from etude.inference.transformers_reference import write_greedily
from etude.models.load import load_model, load_tokeniser

BUDGET = 12


@pytest.fixture(scope="module")
def loaded(tiny_base: Path) -> tuple[Any, Any]:
    return load_model(tiny_base, torch.device("cpu")), load_tokeniser(tiny_base)


def greedy_by_hand(model: Any, prompt: list[int], steps: int, end: int) -> list[int]:
    written: list[int] = []
    for _ in range(steps):
        with torch.inference_mode():
            token = int(model(torch.tensor([prompt + written])).logits[0, -1].argmax())
        if token == end:
            break
        written.append(token)
    return written


def test_in_a_batch_of_unequal_prompts_each_is_written_as_if_alone(loaded: tuple[Any, Any]) -> None:
    model, tokeniser = loaded
    prompts = [[5, 6, 7], [9] * 20, [30, 31]]
    steps: list[None] = []
    together = write_greedily(model, tokeniser, prompts, BUDGET, "never written \0", lambda: steps.append(None))
    assert together == [greedy_by_hand(model, prompt, BUDGET, tokeniser.eos_token_id) for prompt in prompts]
    assert 0 < len(steps) <= BUDGET


def test_writing_ends_with_the_stop_text(loaded: tuple[Any, Any]) -> None:
    model, tokeniser = loaded
    prompt = [5, 6, 7]
    free = greedy_by_hand(model, prompt, BUDGET, tokeniser.eos_token_id)
    stop = tokeniser.decode(free[:3])  # three tokens: the stop text may span several
    assert len(free) > 3
    stopped = write_greedily(model, tokeniser, [prompt], BUDGET, stop, lambda: None)
    assert stopped == [free[:3]]
