"""Engines over tiny models, driven without a thread, and what their answers are compared with."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MistralConfig, MixtralConfig, Qwen2Config

from etude.inference.local import build
from etude.inference.policy import Completion, Sampling, Token
from etude.inference.prefix_cache import PrefixCache
from tests import tiny

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from etude.inference.engine import Engine

WINDOW = 20


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small are many times faster so, on a machine that does other things, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


FAMILIES = (*tiny.FAMILIES, "qwen2", "mistral", "gemma3", "mixtral")
_SHAPE = {
    "vocab_size": tiny.VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": tiny.CONTEXT, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def config_of(family: str, **changes: Any) -> Any:
    """Return a tiny config; of the families with a window, one that the tests' prompts are longer than."""
    if family in tiny.FAMILIES:
        config = tiny.config_of(family)
        for name, value in changes.items():
            setattr(config, name, value)
        return config
    if family == "qwen2":
        return Qwen2Config(**_SHAPE | changes)
    if family == "mistral":
        return MistralConfig(**_SHAPE | {"head_dim": 8, "sliding_window": WINDOW} | changes)
    if family == "mixtral":
        return MixtralConfig(**_SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2} | changes)
    assert family == "gemma3"
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3TextConfig(**_SHAPE | {"head_dim": 8, "sliding_window": WINDOW, "layer_types": kinds} | changes)


def model_of(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """Return a tiny model whose weights are large enough that it has opinions, and no two tokens are nearly as likely."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(family, **changes), dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    return model


def engine_of(  # noqa: PLR0913 - what one may want to vary
    model: Any, heads: Any = None, *, rows: int = 8, page: int | None = None, pages: int | None = None, chunk: int = 512,
    context: int = 256, speculate: bool | None = None, late: int = 0, decode: Any = str, say: Any = print,
    lookup: int = 0,
) -> Engine:  # fmt: skip
    """Return an engine over a copy of a model and its heads. `late` = 1: a step is read after the next is launched, as on a GPU."""
    model, heads = copy.deepcopy((model, heads))  # together: they have one config
    engine = build(model, heads, decode, context=context, rows=rows, page=page, lookup=lookup, say=say)
    if page or pages:
        pages = pages or 2 * rows * engine.decoder.table.shape[1]
        engine.prefix_cache = PrefixCache(pages, engine.prefix_cache.size)
        engine.runner.allot(pages, engine.prefix_cache.size)
    engine.chunk, engine.speculation.wish, engine._late = chunk, speculate, late
    return engine


@dataclass
class Ask:
    """A request, and when it comes and is cancelled: before which step."""

    prompt: Sequence[int]
    sampling: Sampling
    comes: int = 0
    cancelled: int | None = None


@dataclass
class Got:
    """What came back."""

    ends: list[Completion | Exception] = field(default_factory=list)
    streamed: list[Token] = field(default_factory=list)

    @property
    def completion(self) -> Completion:
        (end,) = self.ends
        assert isinstance(end, Completion), end
        return end


def run(engine: Engine, asks: Sequence[Ask], most: int = 5000) -> list[Got]:
    """Drive an engine until all is done; more than so many steps means that it is stuck."""
    got = [Got() for _ in asks]
    requests: dict[int, Any] = {}
    for step in range(most):
        for index, ask in enumerate(asks):
            if ask.comes == step:
                requests[index] = engine.submit(
                    ask.prompt, ask.sampling, got[index].streamed.extend, got[index].ends.append
                )
            if ask.cancelled == step and index in requests:
                engine.cancel(requests[index])
        if engine.busy():
            engine.step()
        elif step >= max(ask.comes for ask in asks):
            return got
    raise AssertionError(f"still busy after {most} steps: {engine.counts}")


def complete(engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, **more: Any) -> list[Completion]:
    """Return the completions of some prompts that come at once."""
    return [each.completion for each in run(engine, [Ask(prompt, sampling, **more) for prompt in prompts])]


def logits_after(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Return the model's own logits at every place of a text, in one plain pass, [T, V] in float64."""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)]), use_cache=False).logits[0].double()


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Return what transformers writes by itself."""
    ids = torch.tensor([list(prompt)])
    wish = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    written: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **wish)[0, len(prompt) :].tolist()
    return written


def assert_greedy(model: Any, prompt: Sequence[int], completion: Completion) -> None:
    """See that each token is the model's likeliest after those before it: one pass instead of a pass a token."""
    best = logits_after(model, [*prompt, *completion.token_ids]).argmax(-1)[len(prompt) - 1 : -1]
    assert completion.token_ids == best.tolist()


def prompts_of(*lengths: int, vocabulary: int = tiny.VOCABULARY, seed: int = 1) -> list[list[int]]:
    """Return random prompts of some lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def assert_all_returned(engine: Engine) -> None:
    """See that nothing is held: every row is free, and every page once the tree of texts is left behind."""
    assert not engine.busy()
    assert sorted(engine.rows._free) == list(range(engine.rows.count))
    engine.prefix_cache.renew()
    assert engine.prefix_cache.free() == engine.prefix_cache.count
    assert sorted(engine.prefix_cache._free) == list(range(1, engine.prefix_cache.count + 1))
