"""Mixtures of experts in training: which experts a token goes to, how even their load is, and what keeps it even.

In transformers the router of a layer returns logits, weights and the ids of the experts it chose. What all of them do is

    scores = softmax or sigmoid of the logits        weights = the scores at the ids, normalised or not, times a scale

Which of these a router does is found out by trying a copy of it, not from a list of names. A router that does neither is left as it
is: nothing is measured, balanced or replayed there. One that does is computed in float32 from its weights, and chooses by
`scores + bias`; the bias never reaches the weights. Four ways to balance, each on the load of the global batch:

    none        the load is measured only
    aux_loss    Switch Transformer's loss, E · Σ_e share_e · mean probability_e, the mean over layers. `share` is that of the step
                before: so the loss is a sum over tokens, and neither micro-batches nor ranks change it
    aux_free    bias_e += rate · sign(mean load − load_e)                                   (DeepSeek-V3, arXiv 2408.15664)
    quantile    bias_e = −quantile of (score_e − threshold) at 1 − K/E, centred             (Kimi K3, arXiv 2607.24653);
                a token's threshold is the (K + 1)-th largest of its scores + bias. From a histogram, so that ranks can add theirs

A model that has a place for the bias (`e_score_correction_bias`: DeepSeek, GLM, Kimi) keeps it: it is exported, and an engine is sent
it. One that has none (Qwen3, Mixtral, OLMoE, gpt-oss) could not be served with it. There the bias fades: over the last `release` of
the steps it is multiplied by a factor that falls to 0, so that what is exported is what was trained last. An engine would not know of
it before that, so reinforcement learning refuses it.

A pass overwrites what it saw, and `collect` adds that up once a micro-batch: layers that are recomputed in the backward pass, which
see the same again, and measurements in between are not counted. Padding is not counted either.

Router replay (arXiv 2510.11370): where the sampler says which experts a token went to, the trainer takes these and gathers their
scores from all of its own, so that the gradient reaches the router. −1: not known, the router chooses.

Shapes: B rows, T positions, N = B · T; L layers with experts, E experts, K of them a token; Q bins.
"""

from __future__ import annotations

import contextlib
import copy
import math
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import linear

from etude.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from etude.training.distributed import World
    from etude.training.settings import ExpertSettings

BIASED = ("aux_free", "quantile")
PLACE = "e_score_correction_bias"  # where a family keeps its bias
BINS, FINEST, WIDEST = 1024, 1e-5, 4.0  # of the quantiles: half of the bins below 0, each 2.5 % wider than the next


class Rule(NamedTuple):
    """How a router makes weights of logits."""

    sigmoid: bool
    normalised: bool
    scale: float

    def scores(self, logits_NE: torch.Tensor) -> torch.Tensor:
        return logits_NE.sigmoid() if self.sigmoid else logits_NE.softmax(-1)

    def weights(self, scores_NE: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
        chosen_NK = scores_NE.gather(1, ids_NK)
        return (chosen_NK / chosen_NK.sum(-1, keepdim=True) if self.normalised else chosen_NK) * self.scale


class Pull(torch.autograd.Function):
    """Adds a gradient to probabilities on the way back; on the way there it does nothing."""

    @staticmethod
    def forward(ctx: Any, weights_NK: torch.Tensor, _: torch.Tensor, gradient_NE: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient_NE)
        return weights_NK.view_as(weights_NK)

    @staticmethod
    def backward(ctx: Any, gradient_NK: torch.Tensor) -> Any:
        return gradient_NK, ctx.saved_tensors[0], None


class Routing(torch.nn.Module):
    """What a router is besides its own class, once it is taken up."""

    rule: Rule
    choice_bias: torch.Tensor  # [E], float32, of a family that has no place for one
    live_N: torch.Tensor | None = None  # bool: not padding
    routes_NK: torch.Tensor | None = None  # −1: not known
    pull_E: torch.Tensor | None = None  # gradient of the auxiliary loss by the probabilities of a token
    quantiles = False
    seen: tuple[torch.Tensor, ...] = ()  # load [E] and, for quantiles, the histogram [E, Q] of the last pass

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if hasattr(self, PLACE):  # these compute in float32 by themselves, and may choose among groups
            logits_NE, _, ids_NK = super().forward(hidden)
            scores_NE = self.rule.scores(logits_NE)
        else:
            bias = self.bias.float() if hasattr(self, "bias") else None
            logits_NE = linear(hidden.reshape(-1, hidden.shape[-1]).float(), self.weight.float(), bias)
            scores_NE = self.rule.scores(logits_NE)
            ids_NK = (scores_NE.detach() + self.own_bias()).topk(self.top_k).indices
        if self.routes_NK is not None:
            ids_NK = torch.where(self.routes_NK >= 0, self.routes_NK, ids_NK)
        weights_NK = self.rule.weights(scores_NE, ids_NK)
        if self.pull_E is not None and torch.is_grad_enabled():
            probabilities_NE = scores_NE / scores_NE.sum(-1, keepdim=True)
            weights_NK = Pull.apply(weights_NK, probabilities_NE, self._live(scores_NE)[:, None] * self.pull_E)
        self.seen = self._see(scores_NE.detach(), ids_NK)
        return logits_NE, weights_NK, ids_NK

    def own_bias(self) -> torch.Tensor:
        return getattr(self, PLACE) if hasattr(self, PLACE) else self.choice_bias

    def _live(self, scores_NE: torch.Tensor) -> torch.Tensor:
        return scores_NE.new_ones(len(scores_NE)) if self.live_N is None else self.live_N.to(scores_NE.dtype)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _see(self, scores_NE: torch.Tensor, ids_NK: torch.Tensor) -> tuple[torch.Tensor, ...]:
        live_N, experts = self._live(scores_NE), scores_NE.shape[1]

        def count(places: torch.Tensor, bins: int) -> torch.Tensor:
            counts = scores_NE.new_zeros(bins)  # sums of ones: exact in any order
            return counts.scatter_add_(0, places.flatten(), live_N[:, None].expand_as(places).flatten())

        if not self.quantiles:
            return (count(ids_NK, experts),)
        threshold_N1 = (scores_NE + self.own_bias()).topk(min(ids_NK.shape[1] + 1, experts)).values[:, -1:]
        place_NE = (squeeze(scores_NE - threshold_N1) * BINS).long().clamp(0, BINS - 1)
        of_all = count(place_NE + BINS * torch.arange(experts, device=place_NE.device), experts * BINS)
        return count(ids_NK, experts), of_all.view(experts, BINS)


@cache
def _routing(router: type) -> type:
    """Return a kind of router as it is taken up: one class for all layers, or a compiler would compile each layer by itself."""
    return type(router.__name__, (Routing, router), {})


def squeeze(difference: torch.Tensor) -> torch.Tensor:
    """Return where differences of scores lie between 0 and 1: finely around 0, for a softmax over many experts is small."""
    return 0.5 + 0.5 * difference.sign() * (difference.abs() / FINEST).log1p() / math.log1p(WIDEST / FINEST)


def stretch(place: torch.Tensor) -> torch.Tensor:
    """Undo `squeeze`."""
    side = 2 * place - 1
    return side.sign() * FINEST * (side.abs() * math.log1p(WIDEST / FINEST)).expm1()


def quantile_bias(histograms: torch.Tensor, chosen: int) -> torch.Tensor:
    """Return the bias with which each expert is chosen by K/E of the tokens whose differences were counted, [..., E, Q] → [..., E]."""
    experts = histograms.shape[-2]
    below = histograms.cumsum(-1)
    wanted = below[..., -1:] * (1 - chosen / experts)
    place = (below < wanted).sum(-1, keepdim=True).clamp(max=BINS - 1)
    inside = histograms.gather(-1, place)
    share = (wanted - (below.gather(-1, place) - inside)) / inside.clamp(min=1)
    bias = -stretch((place + share) / BINS).squeeze(-1)
    return bias - bias.mean(-1, keepdim=True)


def routers_of(model: Any) -> dict[str, Any]:
    """Return the routers beside a model's experts by name, in the order of the layers."""
    blocks = [name.rpartition(".")[0] for name, _ in model.named_modules() if name.rpartition(".")[2] == "experts"]
    beside = [
        (f"{block}.{name}", part) for block in blocks for name, part in model.get_submodule(block).named_children()
    ]
    found = {name: part for name, part in beside if hasattr(part, "top_k") and hasattr(part, "weight")}
    return found if len(found) == len(blocks) else {}


def rule_of(router: Any) -> Rule | None:
    """Return how a router makes weights of logits, tried on a copy with weights of its own; None: in no way that is known here."""
    held = {name for name, _ in [*router.named_parameters(), *router.named_buffers()]}
    if not (held <= {"weight", "bias"} or held == {"weight", PLACE}):
        return None
    copied, random = copy.deepcopy(router).to_empty(device="cpu").float(), torch.Generator()
    for weight in (*copied.requires_grad_(requires_grad=False).parameters(), *copied.buffers()):
        weight.zero_()
    torch.nn.init.normal_(copied.weight, std=copied.weight.shape[1] ** -0.5, generator=random.manual_seed(0))
    try:
        logits, weights, ids = copied(torch.randn(64, copied.weight.shape[1], generator=random))
        ways = [(sigmoid, normalised) for sigmoid in (False, True) for normalised in (True, False)]
        rules = [Rule(*way, float(getattr(router, "routed_scaling_factor", 1.0))) for way in ways]
        fits = [torch.allclose(rule.weights(rule.scores(logits), ids), weights, rtol=1e-4, atol=1e-6) for rule in rules]
        own = PLACE in held or torch.equal(logits.topk(router.top_k).indices.sort().values, ids.sort().values)
    except (TypeError, ValueError, AttributeError, RuntimeError):  # another signature, or another answer
        return None
    return rules[fits.index(True)] if any(fits) and own else None


class Experts:
    """The routers of a model in training. `steps`: of the whole training, for the bias to fade."""

    def __init__(
        self, model: Any, routers: Mapping[str, Any], rules: Sequence[Rule], settings: ExpertSettings, steps: int
    ) -> None:
        self.settings, self._steps = settings, steps
        self.routers: list[Any] = list(routers.values())
        self.fading = not hasattr(self.routers[0], PLACE)
        inner = {id(part) for part in model.get_decoder().modules()}
        self.replayed = [router for router in self.routers if id(router) in inner]  # MTP heads route by themselves
        self.trained = [place for place, router in enumerate(self.routers) if router.weight.requires_grad]
        for router, rule in zip(self.routers, rules, strict=True):
            if not isinstance(router, Routing):
                router.__class__ = _routing(type(router))  # type: ignore[arg-type]  # a class is hashable
            router.rule, router.quantiles = rule, settings.balance == "quantile"
            if self.fading:
                bias = torch.zeros(router.weight.shape[0], device=router.weight.device)
                router.register_buffer("choice_bias", bias, persistent=False)
        self.bias_LE = torch.stack([router.own_bias().float() for router in self.routers])  # before it fades
        self._share_LE: torch.Tensor | None = None  # of the load of the step before
        self._sums: list[torch.Tensor] = []

    def knows(self, routes: Any) -> bool:
        """Return whether routes, [tokens, layers, experts a token], can be of this model."""
        router = self.routers[0]
        fits = routes is None or routes.shape[1:] == (len(self.replayed), router.top_k)
        return fits and (routes is None or -1 <= int(routes.min()) <= int(routes.max()) < len(router.weight))

    def begin(self, parts: Sequence[Any], world: World) -> None:
        """Begin a step on these micro-batches."""
        self._sums = []
        if self.settings.balance == "aux_loss" and self._share_LE is not None:
            tokens = world.sum(float(sum(part.live().sum() for part in parts)))
            # FSDP takes the mean over ranks; the sum is meant.
            factor = self.settings.coefficient * world.size / len(self.trained) / max(1.0, tokens)
            for place in self.trained:
                self.routers[place].pull_E = factor * self._share_LE.shape[1] * self._share_LE[place]

    @contextlib.contextmanager
    def working_on(self, part: Any) -> Iterator[None]:
        """Do the forward and backward pass of a micro-batch inside this; what its routers saw is counted at the end."""
        live_N, routes_BTLK = part.live().flatten(), getattr(part, "routes_BTLK", None)
        for router in self.routers:
            router.live_N = live_N
        if routes_BTLK is not None:
            for layer, router in enumerate(self.replayed):
                router.routes_NK = routes_BTLK[:, :, layer].flatten(0, 1).long()
        try:
            yield
        finally:
            for router in self.routers:
                router.live_N = router.routes_NK = None
        seen = [torch.stack(each) for each in zip(*(router.seen for router in self.routers), strict=True)]
        self._sums = [old + new for old, new in zip(self._sums, seen, strict=True)] if self._sums else seen

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def end(self, done: int, world: World, *, skipped: bool) -> dict[str, float]:
        """End a step, the `done`-th: balance, and return the metrics of its load. A skipped step changes nothing."""
        for total in self._sums if world.size > 1 else []:
            dist.all_reduce(total)
        load_LE, *histogram = self._sums
        if not skipped and float(load_LE.sum()) > 0:
            self._balance(load_LE, *histogram)
        self._apply(done)
        return load_metrics(load_LE)

    def _balance(self, load_LE: torch.Tensor, histogram_LEQ: torch.Tensor | None = None) -> None:
        own, self.bias_LE = self.settings, self.bias_LE.to(load_LE.device)
        if own.balance == "aux_loss":
            self._share_LE = load_LE / load_LE.sum(-1, keepdim=True)
        if own.balance == "aux_free":
            step_LE = own.rate * (load_LE.mean(-1, keepdim=True) - load_LE).sign()
            self.bias_LE[self.trained] += step_LE[self.trained]
        if histogram_LEQ is not None:
            self.bias_LE[self.trained] = quantile_bias(histogram_LEQ, self.routers[0].top_k)[self.trained]

    def _apply(self, done: int) -> None:
        """Give routers their bias; where it fades, so much of it as is left after `done` steps."""
        left = (self._steps - done) / max(1.0, self._steps * self.settings.release) if self.fading else 1.0
        for router, bias_E in zip(self.routers, self.bias_LE, strict=True):
            router.pull_E = None
            if self.settings.balance in BIASED:
                router.own_bias().copy_(bias_E * min(1.0, left))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint must hold; the same on every rank."""
        share = {} if self._share_LE is None else {"experts/share": self._share_LE}
        return share | ({"experts/bias": self.bias_LE} if self.settings.balance in BIASED else {})

    def load(self, tensors: Mapping[str, torch.Tensor], done: int) -> None:
        own = {
            name: value.to(self.routers[0].own_bias().device)
            for name, value in tensors.items()
            if name.startswith("experts/")
        }
        self.bias_LE, self._share_LE = own.get("experts/bias", self.bias_LE), own.get("experts/share")
        self._apply(done)


def load_metrics(load_LE: torch.Tensor) -> dict[str, float]:
    """Return how even a load is: its entropy over that of an even one, the mean over layers; and the worst layer's busiest expert."""
    load_LE = load_LE.double()
    share_LE = load_LE / load_LE.sum(-1, keepdim=True).clamp(min=1)
    entropy_L = torch.special.entr(share_LE).sum(-1) / math.log(load_LE.shape[1])
    return {
        "experts_entropy": float(entropy_L.mean()), "experts_busiest": float(share_LE.max()) * load_LE.shape[1],
        "experts_idle": float((load_LE == 0).double().mean()),
    }  # fmt: skip


def take_up(model: Any, settings: ExpertSettings, steps: int) -> Experts | None:
    """Return the experts of a model, its routers ready to be trained; None if it has none, or some that are not known here."""
    routers, what = routers_of(model), f'experts.balance = "{settings.balance}"'
    known = [rule for router in routers.values() if (rule := getattr(router, "rule", None) or rule_of(router))]
    if not routers or len(known) < len(routers):
        if settings.balance != "none":
            lacks = "routers of a kind that is not known here" if routers else "no experts that could be balanced"
            raise UserError(f'{what}: {type(model).__name__} has {lacks}; set "none"')
        return None
    model.set_experts_implementation("grouped_mm")
    experts = Experts(model, routers, known, settings, steps)
    if settings.balance != "none" and not experts.trained:
        raise UserError(f'{what}: no router is trained here (LoRA and MTP heads leave them as they are); set "none"')
    if settings.balance == "quantile" and getattr(experts.routers[0], "num_group", 1) > 1:
        raise UserError(f'{what} is for routers that choose among all experts, not among groups; set "aux_free"')
    return experts
