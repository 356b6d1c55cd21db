"""A model that runs on our cache: passes over the new tokens of many requests, and its heads' drafts.

Any causal language model of transformers whose attention goes through transformers' registry can be run. Whether it gives the same
logits as by itself is tried on a few tokens before it is used: layers with another kind of memory or capped scores would not.

Of a model of several experts it is noted which experts each token went to: a trainer that replays the choice computes the gradient of
the model that sampled. The lean decoder notes them always; of others, transformers hands the choice to a layer's experts as their
second argument, and that is where it is read.

Shapes: N tokens of a pass, D width of the model, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from etude.errors import UserError, one_line
from etude.inference.attention import NAME, Pass, Probe, during
from etude.inference.kv_cache import Cache, plan, send
from etude.inference.lean import Lean, fits, latent_shapes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from etude.inference.kv_cache import LayerShape, Plan


class Routers:
    """The layers of a model that choose experts."""

    def __init__(self, model: torch.nn.Module) -> None:
        decoder = model.get_decoder()
        self.watched = False  # whether to note what they choose
        self.chosen: list[Tensor] = []  # in the last pass, for each layer [N, experts a token]
        self.layers = [part for name, part in decoder.named_modules() if name.rpartition(".")[2] == "experts"]
        for layer in self.layers:
            layer.register_forward_pre_hook(self._note)

    def _note(self, _: Any, given: tuple[Any, ...]) -> None:
        if self.watched:
            self.chosen.append(given[1].reshape(-1, given[1].shape[-1]).to(torch.int16))


TRIED = 12  # tokens


LORA = (".lora_A", ".lora_B")  # after a weight's name: it becomes what it was at first plus B · A


class Staged(dict[str, Tensor]):
    """New weights that were checked and lie on the model's device: all that is left is to copy them over the old ones."""


class Runner:
    """A model, and its cache once that is allotted."""

    def __init__(self, model: Any, heads: Any | None, *, compiled: bool) -> None:
        self.model, self.heads = model.eval(), heads
        self.device, self.dtype = model.device, model.dtype
        self.send = functools.partial(send, device=model.device)
        self.vocabulary = model.get_input_embeddings().weight.shape[0]
        self.routers = Routers(model)
        self.cache: Cache
        self.lean: Lean | None = None
        self.slow_because = ""  # why the lean decoder, whose parts it has, does not run it
        self.routes: Tensor | None = (
            None  # experts of the last pass, [N, layers, experts a token], if anybody wants to know
        )
        self.compiled = compiled
        self._bases: dict[str, Tensor] = {}  # in main memory: weights that adapters are added to, as they were at first
        self._hidden: list[Tensor] = []
        keep = functools.partial(_keep, self._hidden)  # not us: a model outlives its cache
        model.get_decoder().register_forward_hook(keep)
        if model.config.get_text_config()._attn_implementation == NAME:  # noqa: SLF001 - it ran on another cache before
            model.set_attn_implementation("sdpa")
        with _trying(model):
            self.routers.watched = True
            with torch.inference_mode():
                self._own = model(self._tried(), use_cache=False).logits[0]
            chosen, self.routers.watched, self.routers.chosen = self.routers.chosen, False, []
            self._own_routes = torch.stack(chosen, 1).long() if chosen else None
            model.set_attn_implementation(NAME)
            self.layers = self._probe()
            self._usual = bool(self.layers) and fits(model)
        if self._usual:
            self.layers = latent_shapes(model, self.layers)
        if not self.layers:
            raise UserError(f"{type(model).__name__} has no attention that our engine could run on its cache")

    @property
    def looked_into(self) -> bool:
        """Whether experts are read off transformers' code, which a graph does not allow."""
        return self.routers.watched and self.lean is None

    def bytes_of_position(self) -> int:
        """Return the bytes that one position takes in the cache, over all layers."""
        return sum(layer.bytes(self.dtype) for layer in self.layers)

    def allot(self, pages: int, size: int, positions: int | None = None) -> None:
        """Make a cache of so many pages of so many positions, for texts up to `positions` long (default: as fit), and try it."""
        self.cache = Cache(self.layers, pages, size, self.device, self.dtype)
        if self._usual:
            self.lean = Lean(self.model, self.heads, self.layers, positions or pages * size, compiled=self.compiled)
            # Of latent attention, transformers' code would need a cache of another shape.
            try:
                self._compare()
            except UserError as error:
                if self.layers[0].latent:
                    raise
                self.lean, self.slow_because = None, str(error)
            else:
                return
        with _trying(self.model):
            self._compare()
        if self.compiled:
            for layer in _layers(self.model):
                layer.compile(dynamic=True)

    def _tried(self) -> Tensor:
        return (torch.arange(TRIED, device=self.device) * 7 + 1)[None] % self.vocabulary

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _probe(self) -> list[LayerShape]:
        ids = self._tried()
        with during(Probe()) as probe:
            self.model(ids, position_ids=torch.arange(TRIED, device=self.device)[None], use_cache=False)
            hidden, self._trunk = self._hidden[0], len(probe.layers)
            for depth in range(self.heads.depth if self.heads else 0):
                hidden = self._draft_step(depth, hidden, ids, torch.arange(TRIED, device=self.device)[None])
        if odd := probe.windows - {layer.window for layer in probe.layers}:
            by = f"{min(odd)} positions by its mask only, which our engine does not make"
            raise UserError(f"{type(self.model).__name__} looks back {by}")
        if self.heads and len(probe.layers) != self._trunk + self.heads.depth:
            raise UserError("the MTP heads do not run on our cache: they were made for another copy of the model")
        return probe.layers

    def _compare(self) -> None:
        """Compare with what the model says by itself: a pass over some tokens, then one token after the other.

        The lean decoder is given the experts that the model took: by routers in bf16, near ties fall otherwise than by ours, and
        what is then said differs although nothing is wrong. transformers' code on our cache chooses anew, so more is let pass there.
        """
        ids, own = self._tried()[0], self._own.float()
        pages = list(range(1, 2 + (TRIED - 1) // self.cache.size))
        steps = [(0, TRIED // 2), *((index, 1) for index in range(TRIED // 2, TRIED))]
        ours = []
        for first, count in steps:
            here = plan([(pages, first, count)], self.cache.size, self.device)
            if self.lean and self._own_routes is not None:
                self.lean.forced = self._own_routes[first : first + count]
            ours.append(self.run(ids[first : first + count], here)[0])
        if self.lean:
            self.lean.forced = None
        differences = (torch.cat(ours).float() - own).abs().amax(-1) / own.abs().max()
        # In bf16 a few tokens may be far off however it is computed: of SmolLM2's second by a quarter, on transformers' own code.
        exact = self.dtype == torch.float32
        rerouted = not exact and self.lean is None and self._own_routes is not None
        difference = differences.max() if exact else differences.quantile(0.5 if rerouted else 0.75)
        if not difference < (1e-3 if exact else 0.25 if rerouted else 0.05):
            raise UserError(
                f"{type(self.model).__name__} says something else on our cache than by itself (by {float(difference):.1%});"
                " its attention does more than ours, so our engine cannot run it"
            )

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def run(self, tokens_N: Tensor, where: Plan, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return logits of the wanted tokens (default: all), and the hidden state of all."""
        if self.lean:
            hidden = self.hidden(tokens_N, where)
            return self.head(hidden if wanted is None else hidden[wanted]), hidden
        self.routers.chosen = []
        with during(Pass(self.cache, where)):
            output = self.model(
                input_ids=tokens_N[None], position_ids=where.position_N[None], use_cache=False,
                logits_to_keep=0 if wanted is None else wanted,
            )  # fmt: skip
        self.routes = torch.stack(self.routers.chosen, 1) if self.routers.chosen else None
        return output.logits[0], self._hidden[0][0]

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def hidden(self, tokens_N: Tensor, where: Plan) -> Tensor:
        """Return the hidden states alone, of a lean model."""
        assert self.lean is not None
        with during(Pass(self.cache, where)):
            hidden = self.lean.trunk(tokens_N, where.position_N)
        self.routes = self.lean.chosen
        return hidden

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def stage(self, weights: Mapping[str, Tensor]) -> Staged:
        """Check new weights and bring them to the device. In any thread, while the model runs: nothing of it is touched."""
        if self.device.type != "cuda":
            self._check(weights)
            return Staged(weights)
        stream = torch.cuda.Stream(self.device)  # or the model's next step would wait for the copies
        with torch.cuda.stream(stream):
            staged = Staged({name: new.to(self.device, non_blocking=True) for name, new in weights.items()})
            self._check(staged)
        stream.synchronize()
        return staged

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def replace(self, weights: Mapping[str, Tensor]) -> None:
        """Copy new weights over the old ones, in place, so that graphs stay good: all of them, or none if one does not fit."""
        if not isinstance(weights, Staged):
            self._check(weights)
        own = self._weights()
        for name, new in weights.items():
            if name.endswith(LORA[1]):
                continue
            if (base := name.removesuffix(LORA[0])) != name:
                own[base].copy_(self._with_adapter(base, own[base], new, weights[base + LORA[1]]))
            else:
                own[name].copy_(new, non_blocking=True)
            if new.is_cuda:
                new.record_stream(torch.cuda.current_stream(self.device))  # its memory is not to be had before that

    def _with_adapter(self, name: str, own: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """Return a weight with an adapter added to what it was at first: adding each change to the last would add up rounding."""
        if name not in self._bases:
            self._bases[name] = own.cpu().pin_memory() if own.is_cuda else own.clone()
        base = self._bases[name].to(self.device, non_blocking=True)
        return torch.addmm(base.float(), up.to(self.device).float(), down.to(self.device).float()).to(own.dtype)

    def _weights(self) -> dict[str, Tensor]:
        own: dict[str, Tensor] = self.model.state_dict()  # parameters, and what a router is balanced with
        if self.heads:
            own |= {f"mtp.{name}": value for name, value in self.heads.state_dict().items()}
        return own

    def _check(self, weights: Mapping[str, Tensor]) -> None:
        own = self._weights()
        for name, new in weights.items():
            base = name.removesuffix(LORA[0]).removesuffix(LORA[1])
            if base not in own or (base != name and not weights.keys() >= {base + part for part in LORA}):
                raise UserError(f"new weights have {name}, which this model does not; they are of another model")
            wanted = tuple(own[base].shape)
            if base != name:
                wanted = (new.shape[0], wanted[1]) if name.endswith(LORA[0]) else (wanted[0], new.shape[1])
            if tuple(new.shape) != wanted:
                shapes = f"{tuple(new.shape)} instead of {wanted}"
                raise UserError(f"new weights are of another shape: {name} is {shapes}; nothing was changed")
            if not torch.isfinite(new).all():
                raise UserError(f"new weights are damaged: {name} holds values that are not finite; nothing changed")

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def draft(self, depth: int, hidden_ND: Tensor, next_N: Tensor, where: Plan) -> Tensor:
        """Return the hidden state of a head, from that of the depth before."""
        with during(Pass(self.cache, where, self._trunk + depth)):
            if self.lean:
                return self.lean.draft(depth, hidden_ND, next_N, where.position_N)
            return self._draft_step(depth, hidden_ND[None], next_N[None], where.position_N[None])[0]

    def _draft_step(self, depth: int, hidden: Any, following: Tensor, position: Tensor) -> Tensor:
        assert self.heads is not None
        model = self.model
        return self.heads.step(
            depth, hidden, following, position, embed=model.get_input_embeddings(), rotary=model.get_decoder().rotary_emb,
            attention_mask=None,
        )  # fmt: skip

    def wipe(self, pages: Sequence[int]) -> None:
        """Make some pages as they were at first."""
        for each in (*self.cache.keys, *self.cache.values):
            each[list(pages)] = 0

    def head(self, hidden_ND: Tensor) -> Tensor:
        """Return the logits of hidden states; in float32, for bf16 numbers of their size lie 0.06 to 0.125 apart."""
        head = self.model.get_output_embeddings()
        if hidden_ND.is_cuda and hidden_ND.dtype != torch.float32 and getattr(head, "bias", None) is None:
            return torch.mm(hidden_ND, head.weight.T, out_dtype=torch.float32)
        return head(hidden_ND)


def _keep(kept: list[Tensor], _: Any, __: Any, output: Any) -> None:
    kept[:] = [output.last_hidden_state]


@contextlib.contextmanager
def _trying(model: Any) -> Iterator[None]:
    """Say in one line that a model is not for us, whatever its own code says."""
    try:
        yield
    except (AssertionError, AttributeError, TypeError, ValueError, IndexError, KeyError) as error:
        why = f"it is not of the usual shape ({one_line(error)})"
        raise UserError(f"{type(model).__name__} cannot be run by our engine: {why}") from error


def _layers(model: Any) -> Any:
    return next(part for part in model.get_decoder().children() if isinstance(part, torch.nn.ModuleList))
