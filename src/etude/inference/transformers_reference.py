"""Plain transformers as a reference: greedy decoding in a batch, and a long text's negative log-likelihood by a rolling window.

Every token is scored once. The first window scores all its tokens; each later one moves on by `stride` and scores only
the tokens that are new, so they have at least `window − stride` tokens before them. The sum is in nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, StoppingCriteria

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TAIL = 8  # tokens looked at for the stop text


class _WroteStop(StoppingCriteria):  # type: ignore[misc]
    """A row is done once its last few tokens hold the stop text."""

    def __init__(self, tokeniser: Any, stop: str, prompt_length: int, on_step: Callable[[], object]) -> None:
        self.tokeniser, self.stop, self.prompt_length, self.on_step = tokeniser, stop, prompt_length, on_step

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:  # noqa: ARG002 - their signature
        self.on_step()
        written = input_ids[:, max(self.prompt_length, input_ids.shape[1] - TAIL) :]
        texts = self.tokeniser.batch_decode(written)
        return torch.tensor([self.stop in text for text in texts], device=input_ids.device)


@torch.inference_mode()  # type: ignore[untyped-decorator]
def write_greedily(
    model: Any, tokeniser: Any, prompts: Sequence[Sequence[int]], budget: int, stop: str, on_step: Callable[[], object]
) -> list[list[int]]:
    """Return what the model writes after each prompt, as tokens; the stop text may be at its end.

    `on_step` is called after every step, at most `budget` times.
    Prompts are padded on the left to one length, with an attention mask, and go through the model together.
    """
    length = max(len(prompt) for prompt in prompts)
    pad = _pad_token(tokeniser)
    rows = [[pad] * (length - len(prompt)) + list(prompt) for prompt in prompts]
    masks = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    how = GenerationConfig(
        do_sample=False, max_new_tokens=budget, pad_token_id=pad, eos_token_id=tokeniser.eos_token_id, use_cache=True
    )
    ids, mask = torch.tensor(rows, device=model.device), torch.tensor(masks, device=model.device)
    stopping = [_WroteStop(tokeniser, stop, length, on_step)]
    written = model.generate(ids, attention_mask=mask, generation_config=how, stopping_criteria=stopping)
    return [_until_end(row[length:], pad, tokeniser.eos_token_id) for row in written.tolist()]


def _pad_token(tokeniser: Any) -> int:
    """Return a token to pad with; masked out, so any will do where the tokeniser names none."""
    named = (tokeniser.pad_token_id, tokeniser.eos_token_id, 0)
    return int(next(token for token in named if token is not None))


def _until_end(tokens: list[int], pad: int, end: int | None) -> list[int]:
    cut = next((index for index, token in enumerate(tokens) if token in {pad, end}), len(tokens))
    return tokens[:cut]


@dataclass(frozen=True)
class Window:
    """One pass over tokens[start:end] that scores tokens[score_from:end]."""

    start: int
    score_from: int
    end: int


def rolling_windows(tokens: int, window: int, stride: int) -> list[Window]:
    """Return the windows that score the tokens 1 … tokens − 1 once each; token 0 has nothing before it."""
    assert 0 < stride <= window - 1, (stride, window)
    windows = []
    scored = 1
    while scored < tokens:
        end = min(window if scored == 1 else scored + stride, tokens)
        windows.append(Window(max(0, end - window), scored, end))
        scored = end
    return windows


@torch.inference_mode()  # type: ignore[untyped-decorator]
def token_nlls(model: Any, ids: Sequence[int], window: Window) -> torch.Tensor:
    """Return the negative log-likelihoods of a window's scored tokens, in nats, float32 on the CPU."""
    inputs = torch.tensor([ids[window.start : window.end]], device=model.device)
    scored = window.end - window.score_from
    # The logits at position i predict token i + 1: the last `scored` targets need the positions just before them.
    logits = model(inputs, use_cache=False, logits_to_keep=scored + 1).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, inputs[0, -scored:], reduction="none").cpu()
