"""A longer context for a model with rotary positions: the config changes, the weights are then trained to it.

RoPE turns dimension pair i by θ^(−2i/d) radians a token. A pair that completes a turn within the context has seen every
angle; a slower one reaches angles that are new to the model when the context is exceeded. Two remedies:

- `theta` raises the base θ, which slows every pair, the slow ones most. By rule θ' = θ^(ln(L'/2π) / ln(L/2π)) for a
  context of L' tokens instead of L: the pair that turned once in L turns once in L', so no pair meets a new angle. The
  NTK-aware rule, θ · (L'/L)^(d/(d−2)), raises less and promises that of the slowest pair only; published extensions lie
  on both sides (Code Llama, 4 times as long: 1e6, ours 7e4). Raising costs, until trained: 0.07 nats by rule, 0.95 at 1e6.
- `yarn` (arXiv 2309.00071) divides the slow pairs by L'/L, keeps those that turn more than 32 times in L, blends between
  the two, and sharpens attention by 0.1 ln(L'/L) + 1. Short distances look as before, so the base suffers less at first.

A base whose positions are scaled already (Llama 3.1, Qwen with YaRN, DeepSeek) has a factor f by which its slow pairs, or all of them,
are divided. `scale` multiplies f by L'/L and leaves the rest of the base's own rule; on a base with YaRN, `yarn` is the same. `theta`
raises θ beside it: there the pair that turns once in L is that of L/f tokens. Where only some layers see far (Gemma 3), theirs alone
are stretched.
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

    method: Literal["theta", "yarn", "scale"] = Field(
        default="theta", description="raise RoPE's base, interpolate by YaRN, or scale on as the base does"
    )
    theta: float | None = Field(default=None, gt=1, description="theta: the new base; none: by rule")
    factor: float | None = Field(
        default=None, gt=1, description="yarn, scale: scaling factor; none: by the new context"
    )

    @model_validator(mode="after")
    def _each_number_has_its_method(self) -> RopeSettings:
        other = "factor" if self.method == "theta" else "theta"
        if getattr(self, other) is not None:
            raise ValueError(f"{other} has no effect with method = {self.method!r}; leave it out or change the method")
        return self


SCALED = {"linear", "llama3", "yarn"}  # by a factor; the others turn a text by how long it is
FAR = "full_attention"


def stretch(config: Any, length: int, settings: RopeSettings) -> Any:
    """Return a copy of a transformers config whose context is `length` tokens."""
    stretched = deepcopy(config)
    text = stretched.get_text_config()
    rope = _rope(text)
    old, context = rope.get(FAR, rope), trained_context(text)
    if length <= context:
        raise UserError(f"the model already has a context of {context} tokens; {length} is no extension of it")
    if settings.theta is not None and settings.theta <= old["rope_theta"]:
        raise UserError(f"rope.theta = {settings.theta:g} does not exceed the model's {old['rope_theta']:g}; raise it")
    new = {**old, **_longer(text, old, context, length, settings)}
    text.rope_parameters = {**rope, FAR: new} if FAR in rope else new
    if new.get("rope_type") == "yarn" and getattr(text, "head_dim", 0) is None:
        text.head_dim = (
            text.hidden_size // text.num_attention_heads
        )  # Mixtral; transformers' YaRN has no default for it
    text.max_position_embeddings = length
    try:
        getattr(text, "validate_rope", dict)()  # some families allow only methods of their own
    except (ValueError, KeyError) as error:
        raise UserError(f"{text.model_type} models do not take {settings.method!r}: {one_line(error)}") from None
    return stretched


def _longer(text: Any, old: dict[str, Any], context: int, length: int, settings: RopeSettings) -> dict[str, Any]:
    """Return what changes in the rope parameters."""
    kind, scaled = old.get("rope_type", "default"), old.get("factor") or 1.0
    if settings.method == "theta":
        by_rule = old["rope_theta"] ** (math.log(length / scaled / math.tau) / math.log(context / scaled / math.tau))
        return {"rope_theta": settings.theta or by_rule}
    if settings.method == "yarn" and kind == "default":
        return _yarn(text, context, _factor(length / context, settings))
    if settings.method == "yarn" and kind != "yarn":
        raise UserError(
            f'the model\'s positions are scaled already (rope_type {kind!r}); set rope.method = "scale" or "theta"'
        )
    if kind == "default":
        raise UserError('the model\'s positions are not scaled yet; set rope.method = "yarn" or "theta"')
    return {"factor": _factor(scaled * length / context, settings)}


def _factor(least: float, settings: RopeSettings) -> float:
    if settings.factor is not None and settings.factor < least:
        raise UserError(f"rope.factor = {settings.factor:g} is too small for that context; it takes {least:g}")
    return settings.factor or least


def trained_context(text: Any) -> int:
    """Return how many tokens a model was made for: its config's, or more where it is scaled by more (Qwen with YaRN)."""
    rope = getattr(text, "rope_parameters", None) or {}
    far = rope.get(FAR, rope)
    scaled = (far.get("factor") or 1.0) * (far.get("original_max_position_embeddings") or 0)
    return max(int(text.max_position_embeddings), int(scaled))


def _rope(text: Any) -> dict[str, Any]:
    """Return the rope parameters of a config that can be stretched; refuse the others."""
    rope, family = getattr(text, "rope_parameters", None), text.model_type
    if not rope or getattr(text, "alibi", False):
        raise UserError(f"{family} models have no rotary positions in their config; their context cannot be extended")
    nested = {name: value for name, value in rope.items() if value is None or isinstance(value, dict)}
    if nested and (set(nested) != set(rope) or not nested.get(FAR) or not getattr(text, "sliding_window", None)):
        raise UserError(f"{family} models turn each kind of layer in its own way; extending them is not supported")
    kind = rope.get(FAR, rope).get("rope_type", "default")
    if kind not in SCALED | {"default"}:
        raise UserError(
            f"rope_type {kind!r} turns a text by how long it is; such models cannot be extended, take another base"
        )
    return dict(rope)


def _yarn(text: Any, context: int, factor: float) -> dict[str, Any]:
    """Return what YaRN adds to the rope parameters; the keys are those that other engines read too."""
    added = {"rope_type": "yarn", "factor": factor, "beta_fast": 32.0, "beta_slow": 1.0,
             "original_max_position_embeddings": context}  # fmt: skip
    if getattr(text, "kv_lora_rank", None):
        # Latent attention turns only a part of each key: as in DeepSeek-V3, the whole score is sharpened, not that part.
        added |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    return added
