"""How weights change: the optimiser, the weights it changes, and its learning rate.

The optimiser is AdamW, or Muon for the matrices inside the model and AdamW for the rest. Bases that can be had are nearly all trained
with AdamW, and changing the optimiser costs quality (arXiv 2605.10468), so AdamW is the default; Muon is for models trained from
scratch. Weight decay is for matrices; embeddings and vectors have none. Muon is our own because torch's goes through matrices one by
one: a small model then waits for kernel launches. Ours stacks those of one shape. The update is the same, and a test compares.

The weights it changes are those the model computes with on a CPU, and under FSDP. On one GPU the model computes in bf16 and the
optimiser keeps float32 masters: a bf16 weight has eight bits of precision and would not move under a small update. Gradients are
added up in float32. Without masters (`masters = "none"`) the bf16 weights themselves are updated, and rounded at random so that they
move by the update on average; their gradients are added up in bf16.

AdamW's moments can be kept in 8 bits or in main memory (`CompactAdamW`). That is our own, in place of torchao's: torchao compiles
every step, on a CPU too, rounds moments to the nearest code, where a slow average stands still, keeps states in tensors
of its own kinds, and offloads only from CUDA, by hooks on gradients that are not our masters'.

The learning rate is its peak times a factor, a pure function of the step:

    linear     warm-up, then a line to `floor`. For annealing a model that still has its optimiser state, or a short run
    cosine     warm-up, then half a cosine to `floor`. Re-warm and re-decay of a finished base (Ibrahim et al., 2024)
    wsd        warm-up, constant, then a line to `floor` over the last `decay` of the run
    infinite   warm-up, half a cosine down to `constant` over `cool` of the run, constant, then a line to `floor` over the last
               `decay`. A run can be prolonged from its constant part without warming up again

Steps count from 0. Warm-up reaches the peak at its last step; the last step of a run is the first at `floor`. A run of one
step has it at the peak.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from etude.errors import UserError
from etude.training.distributed import local, sharded_as
from etude.training.memory import UPDATED_AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from etude.training.settings import OptimiserSettings, ScheduleSettings

    Named = Mapping[str, torch.Tensor]
    Tensors = dict[str, torch.Tensor]

CHUNK = UPDATED_AT_ONCE


class Muon(torch.optim.Optimizer):
    """Momentum, then the nearest semi-orthogonal matrix, by five Newton–Schulz steps (Jordan et al., 2024).

    The update is scaled so that its root mean square is 0.2 lr, as AdamW's is about (torch's `match_rms_adamw`).
    """

    def __init__(self, matrices: Sequence[torch.Tensor], lr: float, weight_decay: float, momentum: float) -> None:
        shapes = sorted({tuple(matrix.shape) for matrix in matrices})
        groups = [{"params": [matrix for matrix in matrices if tuple(matrix.shape) == shape]} for shape in shapes]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: None = None) -> None:  # noqa: ARG002 - torch's signature
        """Update all matrices, those of one shape together."""
        for group in self.param_groups:
            matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
            if not matrices:
                continue
            for matrix in matrices:
                self.state[matrix].setdefault("velocity", torch.zeros_like(matrix))
            gradients = [matrix.grad for matrix in matrices]
            velocities = [self.state[matrix]["velocity"] for matrix in matrices]
            torch._foreach_lerp_(velocities, gradients, 1 - group["momentum"])
            ahead = torch._foreach_lerp(gradients, velocities, group["momentum"])  # noqa: SLF001 - Nesterov's look ahead
            direction = orthogonalise(torch.stack(list(ahead))).to(gradients[0].dtype)
            direction.mul_(group["lr"] * -0.2 * math.sqrt(max(direction.shape[-2:])))
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(matrices, list(direction.unbind()))


def orthogonalise(stack: torch.Tensor) -> torch.Tensor:
    """Return nearly the nearest semi-orthogonal matrices to a stack of them [..., rows, columns], in bf16."""
    tall = stack.shape[-2] > stack.shape[-1]
    x = (stack.mT if tall else stack).bfloat16().flatten(0, -3)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):  # x ← 3.4445 x + (−4.775 xxᵀ + 2.0315 (xxᵀ)²) x, rounded as seldom as can be
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    x = x.unflatten(0, stack.shape[:-2])
    return x.mT if tall else x


BLOCKS = (256, 128, 64, 32)  # numbers that share a scale, as many as divide a row
SMALLEST = 4096  # numbers; moments of fewer are kept in float32, as bitsandbytes does


class CompactAdamW(torch.optim.Optimizer):
    """AdamW with moments in float32, in 8 bits or in main memory, and with bf16 weights that are rounded at random.

    8 bits: each block is scaled to 1 and written in the codes of Dettmers et al. (2022), which are dense near 0. Of the second moment
    the root is kept, whose range is that of the first: one that became 0 under a first moment that did not would be divided by.
    Both are rounded at random, or an average that moves by less than half a code each step would never move.
    On a GPU the update is compiled into one kernel: operation by operation it moves twenty times the bytes.
    """

    def __init__(
        self, groups: Any, lr: float, betas: tuple[float, float], eps: float, states: str, *, compiled: bool = False
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self._states = states
        self._move = torch.compile(move, dynamic=True) if compiled else move

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: None = None) -> None:  # noqa: ARG002 - torch's signature
        """Update the weights, a number of rows at a time."""
        for group in self.param_groups:
            for weight in (each for each in group["params"] if each.grad is not None):
                state = self.state[weight]
                if not state:
                    state |= {"step": torch.zeros(()), **self._zeros(weight)}
                state["step"] += 1
                moments = {key: _rows(value) for key, value in state.items() if key != "step"}
                own, gradient = _rows(local(weight)), _rows(local(weight.grad))
                many = max(1, CHUNK // own.shape[-1])
                for some in (slice(begin, begin + many) for begin in range(0, len(own), many)):
                    part = {key: value[some] for key, value in moments.items()}
                    self._update(own[some], gradient[some], part, float(state["step"]), group)

    def _zeros(self, weight: torch.Tensor) -> Tensors:
        own, size = local(weight), weight.shape[-1] if weight.ndim > 1 else 0
        block = next((each for each in BLOCKS if size and size % each == 0), 0)
        if self._states != "8bit" or not block or weight.numel() < SMALLEST:
            return {key: self.placed(torch.zeros_like(own, dtype=torch.float32)) for key in ("first", "second")}
        scales = own.new_zeros((*own.shape[:-1], size // block), dtype=torch.float32)
        nothing = torch.zeros_like(own, dtype=torch.uint8)
        zero = int((code_book(signed=True, device=own.device) == 0).nonzero())
        return {"first": nothing + zero, "second": nothing, "first_scale": scales, "second_scale": scales.clone()}

    def placed(self, moment: torch.Tensor) -> torch.Tensor:
        """Return a moment where it is kept."""
        if self._states != "cpu":
            return moment
        return moment.cpu().pin_memory() if moment.is_cuda else moment

    def _update(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: Tensors, step: float, group: dict[str, Any]
    ) -> None:
        (slow, slower), rate = group["betas"], group["lr"]
        given = [1 - rate * group["weight_decay"], rate / (1 - slow**step), math.sqrt(1 - slower**step), group["eps"]]
        numbers = torch.tensor(given, dtype=torch.float32).to(weight.device, non_blocking=True)
        if "first_scale" in state:
            books = [code_book(signed=signed, device=weight.device) for signed in (True, False)]
            scales = [state["first_scale"], state["second_scale"]]
            self._move(weight, gradient, state["first"], state["second"], numbers, slow, slower, scales, books)
        else:
            first, second = (state[key].to(weight.device) for key in ("first", "second"))
            self._move(weight, gradient, first, second, numbers, slow, slower, [], [])
            if self._states == "cpu":
                state["first"].copy_(first)
                state["second"].copy_(second)


def move(  # noqa: PLR0913, PLR0917
    weight: torch.Tensor, gradient: torch.Tensor, first: torch.Tensor, second: torch.Tensor, numbers: torch.Tensor, slow: float,
    slower: float, scales: list[torch.Tensor], books: list[torch.Tensor],
) -> None:  # fmt: skip
    """Take AdamW's step in place. With `scales`, [rows, blocks], the moments are codes of `books`, the second one that of its root.

    `numbers`, which change from step to step and so are a tensor: what decay leaves, the rate by the first moment's correction, the
    root of the second one's, and epsilon.
    """
    left, rate, correction, epsilon = numbers.unbind()
    gradient = gradient.float()
    if scales:
        average = _decode(first, scales[0], books[0])
        squares = _decode(second, scales[1], books[1]).square()
    else:
        average, squares = first, second
    average = average.lerp(gradient, 1 - slow)
    squares = squares * slower + gradient.square() * (1 - slower)
    root = squares.sqrt()
    new = weight.float() * left - rate * average / (root / correction + epsilon)
    weight.copy_(round_at_random(new) if weight.dtype == torch.bfloat16 else new)
    if scales:
        first.copy_(_encode(average, scales[0], books[0]))
        second.copy_(_encode(root, scales[1], books[1]))
    else:
        first.copy_(average)
        second.copy_(squares)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1, tensor.shape[-1] if tensor.ndim else 1)


def round_at_random(numbers: torch.Tensor) -> torch.Tensor:
    """Round float32 to one of the two bf16 numbers beside each, so that the mean is right: the bits that fall away carry by chance."""
    bits = numbers.view(torch.int32)
    chance = torch.randint_like(bits, 1 << 16)
    return ((bits + chance) & -(1 << 16)).view(torch.float32).bfloat16()


@cache
def code_book(*, signed: bool, device: torch.device) -> torch.Tensor:
    """Return the 256 numbers in [−1, 1] or [0, 1] that codes stand for: seven decades, the higher the finer."""
    steps = [
        torch.linspace(0.1, 1, 2 ** (decade + (0 if signed else 1)) + 1, dtype=torch.float64) for decade in range(7)
    ]
    sizes = torch.cat([10.0 ** (decade - 6) * (each[1:] + each[:-1]) / 2 for decade, each in enumerate(steps)])
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    book = torch.cat([-sizes, sizes, ends] if signed else [sizes, ends]).sort().values.float()
    if signed:
        book[0] = -1.0  # not the last step before it: what lies beyond the ends would be cut off
    return book.to(device)


def _encode(numbers: torch.Tensor, scales: torch.Tensor, book: torch.Tensor) -> torch.Tensor:
    """Return the codes of numbers [..., columns], and write each block's largest size into `scales` [..., blocks]."""
    blocks = numbers.unflatten(-1, (scales.shape[-1], -1))
    scales.copy_(blocks.abs().amax(-1))
    inside = (blocks / scales.clamp_min(1e-38)[..., None]).flatten(-2)
    below = (torch.bucketize(inside, book, right=True) - 1).clamp_(0, len(book) - 2)
    low, high = book[below], book[below + 1]
    return (below + (torch.rand_like(inside) < (inside - low) / (high - low))).to(torch.uint8)


def _decode(codes: torch.Tensor, scales: torch.Tensor, book: torch.Tensor) -> torch.Tensor:
    numbers = book[codes.int()]
    return (numbers.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)


class Optimiser:
    """The optimisers of one model, as one, with state by the names of weights."""

    def __init__(
        self, weights: Named, settings: OptimiserSettings, *, sharded: bool = False, replayed: bool = False,
        compiled: bool = False,
    ) -> None:  # fmt: skip
        self._names = {id(weight): name for name, weight in weights.items()}
        inner = {name for name, weight in weights.items() if weight.ndim >= 2 and not _is_embedding(name)}
        matrices = [weights[name] for name in weights if name in inner]
        others = [weights[name] for name in weights if name not in inner]
        self._parts: list[torch.optim.Optimizer]
        if settings.name == "muon":
            if sharded:
                why = "needs whole matrices and cannot be used on several ranks"
                raise UserError(f'optimiser.name = "muon" {why}; use "adamw"')
            if not matrices:
                raise UserError('optimiser.name = "muon": this model has no matrices that it could train; use "adamw"')
            first = Muon(matrices, settings.lr, settings.weight_decay, settings.momentum)
            self._parts = [
                first,
                *([_adamw([(others, 0.0)], settings, settings.other_lr, compiled=compiled)] if others else []),
            ]
        else:
            self._parts = [
                _adamw([(matrices, settings.weight_decay), (others, 0.0)], settings, None, compiled=compiled)
            ]
        self._peaks = [(group, group["lr"]) for part in self._parts for group in part.param_groups]
        if replayed:  # a graph has numbers built in, and reads tensors
            for group, peak in self._peaks:
                group["lr"] = torch.tensor(peak, device=group["params"][0].device)
                group["capturable"] = True

    def set_rate(self, factor: float) -> None:
        """Set the learning rates to a factor of their peaks."""
        for group, peak in self._peaks:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(peak * factor)
            else:
                group["lr"] = peak * factor

    def update(self) -> None:
        """Update the weights."""
        for part in self._parts:
            part.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of the state as tensors, by name of the weight and of the value."""
        return {
            f"{self._names[id(weight)]}:{key}": local(torch.as_tensor(value))
            for part in self._parts
            for weight, state in part.state.items()
            for key, value in state.items()
        }

    def load(self, tensors: Named) -> None:
        """Take over a state that `tensors` returned."""
        holders = {self._names[id(weight)]: (part, weight) for part in self._parts
                   for group in part.param_groups for weight in group["params"]}  # fmt: skip
        for full, value in tensors.items():
            name, _, key = full.rpartition(":")
            part, weight = holders[name]
            if key != "step":
                own = value.to(weight.device)
                part.state[weight][key] = (
                    part.placed(own) if isinstance(part, CompactAdamW) else sharded_as(own, weight)
                )
            else:  # fused kernels count steps on the device, the others on the host
                part.state[weight][key] = value.to(weight.device) if part.defaults.get("fused") else value


def _is_embedding(name: str) -> bool:
    return "embed" in name or "lm_head" in name or "wte" in name or "wpe" in name


def _adamw(
    groups: list[tuple[list[Any], float]], settings: OptimiserSettings, lr: float | None, *, compiled: bool
) -> torch.optim.Optimizer:
    given = [{"params": weights, "weight_decay": decay} for weights, decay in groups if weights]
    if settings.states in {"8bit", "cpu"} or settings.masters == "none":
        return CompactAdamW(given, lr or settings.lr, settings.betas, settings.eps, settings.states, compiled=compiled)
    return torch.optim.AdamW(given, lr=lr or settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


class Weights:
    """Weights in one precision."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.masters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

    def collect(self) -> None:
        """Take the gradients of one backward pass; here they are in place already."""

    def publish(self) -> None:
        """Give the changed weights to the model and forget the gradients."""
        for weight in self.masters.values():
            weight.grad = None

    def round_to(self, dtype: torch.dtype) -> None:
        """Round the weights to what will be saved, so that what is measured last is what is handed over."""
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.copy_(weight.to(dtype))


class MixedWeights(Weights):
    """float32 masters of a model that computes in bf16; of frozen weights there are none."""

    def __init__(self, model: Any) -> None:
        masters = {}
        for name, weight in model.named_parameters():  # one by one: there is never a second copy of the whole
            if weight.requires_grad:
                masters[name] = weight.detach().float()
            # Not the buffers: rotary frequencies in bf16 would blur positions.
            weight.data = weight.data.to(torch.bfloat16)
        super().__init__(model)
        self._computed = list(self.masters.values())
        self.masters = masters
        for master in masters.values():
            master.grad = torch.zeros_like(master)
        self._gradients = [master.grad for master in masters.values()]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def collect(self) -> None:
        """Add the gradients of one backward pass to those of the masters."""
        used = [(total, weight) for total, weight in zip(self._gradients, self._computed, strict=True)
                if weight.grad is not None]  # fmt: skip
        torch._foreach_add_([total for total, _ in used], [weight.grad for _, weight in used])
        for _, weight in used:
            weight.grad = None

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def publish(self) -> None:
        """Round the masters into the model and clear their gradients."""
        torch._foreach_copy_(self._computed, list(self.masters.values()))
        torch._foreach_zero_(self._gradients)

    def round_to(self, dtype: torch.dtype) -> None:
        """Round the masters, then the model."""
        with torch.no_grad():
            for master in self.masters.values():
                master.copy_(master.to(dtype))
        self.publish()


def factor(settings: ScheduleSettings, step: int, steps: int) -> float:
    """Return the factor on the peak learning rate at `step` of `steps`."""
    if steps == 1:
        return 1.0  # at `floor`, which is often 0, it would be no training at all
    rising = min(round(settings.warmup * steps), steps - 1)
    if step < rising:
        return (step + 1) / rising
    rest = steps - rising
    if settings.kind == "linear":
        return _line(1.0, settings.floor, _share(step - rising, rest))
    if settings.kind == "cosine":
        return _cosine(1.0, settings.floor, _share(step - rising, rest))
    falling = max(1, round(settings.decay * steps))
    level = settings.constant if settings.kind == "infinite" else 1.0
    if step >= steps - falling:
        return _line(level, settings.floor, (step - (steps - falling) + 1) / falling)
    cooling = round(settings.cool * steps) if settings.kind == "infinite" else 0
    if step < rising + cooling:
        return _cosine(1.0, level, (step - rising + 1) / cooling)
    return level


def _share(done: int, of: int) -> float:
    """Return how far a fall has come at its step `done`: 0 at the first, 1 at the last."""
    return done / (of - 1) if of > 1 else 1.0


def _line(high: float, low: float, share: float) -> float:
    return high + (low - high) * share


def _cosine(high: float, low: float, share: float) -> float:
    return low + (high - low) * (1 + math.cos(math.pi * share)) / 2
