"""A longer context for a model with rotary positions: the config changes, the weights are then trained to it.

RoPE turns dimension pair i by θ^(−2i/d) radians a token. A pair that completes a turn within the context has seen every
angle; a slower one reaches angles that are new to the model when the context is exceeded. Two remedies:

- `theta` raises the base θ, which slows every pair, the slow ones most. By rule θ' = θ^(ln(L'/2π) / ln(L/2π)) for a
  context of L' tokens instead of L: the pair that turned once in L turns once in L', so no pair meets a new angle. The
  NTK-aware rule, θ · (L'/L)^(d/(d−2)), raises less and promises that of the slowest pair only; published extensions lie
  on both sides (Code Llama, 4 times as long: 1e6, ours 7e4). Raising costs, until trained: 0.07 nats by rule, 0.95 at 1e6.
- `yarn` (arXiv 2309.00071) divides the slow pairs by L'/L, keeps those that turn more than 32 times in L, blends between
  the two, and sharpens attention by 0.1 ln(L'/L) + 1. Short distances look as before, so the base suffers less at first.
"""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from etude.errors import UserError, one_line


class RopeSettings(BaseModel):
    """How positions are stretched."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    method: Literal["theta", "yarn"] = Field(default="theta", description="raise RoPE's base, or interpolate by YaRN")
    theta: float | None = Field(default=None, gt=1, description="theta: the new base; none: by rule")
    factor: float | None = Field(default=None, gt=1, description="yarn: scaling factor; none: new / old context")

    @model_validator(mode="after")
    def _each_number_has_its_method(self) -> RopeSettings:
        other = "factor" if self.method == "theta" else "theta"
        if getattr(self, other) is not None:
            raise ValueError(f"{other} has no effect with method = {self.method!r}; leave it out or change the method")
        return self


def stretch(config: Any, length: int, settings: RopeSettings) -> Any:
    """Return a copy of a transformers config whose context is `length` tokens."""
    stretched = deepcopy(config)
    text = stretched.get_text_config()
    old, context = _plain_rope(text), int(text.max_position_embeddings)
    if length <= context:
        raise UserError(f"the model already has a context of {context} tokens; {length} is no extension of it")
    if settings.theta is not None and settings.theta <= old["rope_theta"]:
        raise UserError(f"rope.theta = {settings.theta:g} does not exceed the model's {old['rope_theta']:g}; raise it")
    if settings.method == "theta":
        by_rule = old["rope_theta"] ** (math.log(length / math.tau) / math.log(context / math.tau))
        text.rope_parameters = {**old, "rope_theta": settings.theta or by_rule}
    else:
        text.rope_parameters = {**old, **_yarn(text, context, length / context, settings.factor)}
        if getattr(text, "head_dim", 0) is None:  # Mixtral; transformers' YaRN reads it without the usual default
            text.head_dim = text.hidden_size // text.num_attention_heads
    text.max_position_embeddings = length
    try:
        text.validate_rope()  # some families allow only methods of their own
    except (ValueError, KeyError) as error:
        raise UserError(f"{text.model_type} models do not take {settings.method!r}: {one_line(error)}") from None
    return stretched


def _plain_rope(text: Any) -> dict[str, Any]:
    """Return the rope parameters of a config that can be stretched; refuse the others."""
    rope, family = getattr(text, "rope_parameters", None), text.model_type
    if not rope or getattr(text, "alibi", False):
        raise UserError(f"{family} models have no rotary positions in their config; their context cannot be extended")
    if any(value is None or isinstance(value, dict) for value in rope.values()):
        raise UserError(f"{family} models turn each kind of layer in its own way; extending them is not supported")
    if (kind := rope.get("rope_type", "default")) != "default":
        raise UserError(f"the model's positions are already scaled (rope_type {kind!r}, to {text.max_position_embeddings}"
                        " tokens) and a second scaling would compound; start from the base before that")  # fmt: skip
    return dict(rope)


def _yarn(text: Any, context: int, ratio: float, factor: float | None) -> dict[str, Any]:
    """Return what YaRN adds to the rope parameters; the keys are those that other engines read too."""
    if factor is not None and factor < ratio:
        raise UserError(f"rope.factor = {factor:g} is too small for a context {ratio:g} times as long")
    added = {"rope_type": "yarn", "factor": factor or ratio, "beta_fast": 32.0, "beta_slow": 1.0,
             "original_max_position_embeddings": context}  # fmt: skip
    if getattr(text, "kv_lora_rank", None):
        # Latent attention turns only a part of each key: as in DeepSeek-V3, the whole score is sharpened, not that part.
        added |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    return added
