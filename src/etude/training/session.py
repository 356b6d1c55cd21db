"""A model in training: everything that has a gradient goes through here, whatever it learns from.

    load                straight into what is computed in, on the device; of several ranks the first reads, for all
    check the model     refuse damaged weights, add LoRA
    plan memory         how many rows fit at once, with which masters and states
    prepare the model   bring it to the device, isolate documents
    compile and shard   layer by layer
    build the loop      weights, optimiser, CUDA graphs

The rows come from a source (`loop.Source`): a corpus (`run.py`) or episodes (`rl/trainer.py`). After a kill a training goes on from
its last checkpoint: on a CPU with the same result, bit for bit.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from etude.errors import UserError, one_line
from etude.models.load import load_model, saved_dtype
from etude.models.mtp_heads import HEADS
from etude.models.shape import shape_of
from etude.training import memory
from etude.training.attention import NAME, isolate
from etude.training.checkpoint import Checkpoints, export
from etude.training.context_parallel import Context, try_out
from etude.training.cuda_graphs import SMALL, Replay
from etude.training.distributed import World, like, local, shard, whole
from etude.training.experts import routers_of, take_up
from etude.training.loop import Guard, Loop, Root, Source, Step
from etude.training.objectives.next_token import NextToken, has_plain_head
from etude.training.optimiser import MixedWeights, Optimiser, Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from etude.training.batch import Rows
    from etude.training.objectives import Objective
    from etude.training.objectives.mtp import MultiToken
    from etude.training.settings import LoraSettings, TrainerSettings

    Tensors = dict[str, torch.Tensor]


@dataclass
class Session:
    """A model, its source of rows, and all that a step needs."""

    model: Any  # as `load_to_train` returns it, or with float32 weights in main memory
    settings: TrainerSettings
    source: Source
    length: int  # tokens of the longest row
    rows: int  # of one step, on one rank or on those that share them
    world: World
    folder: Path  # of the checkpoints
    factor: Callable[[int], float]  # step from 0 → factor on the peak learning rate
    guard: Guard
    say: Callable[[str], object]
    objective: Callable[[Any], Objective] = NextToken  # made of the model once its attention is set
    parent_dtype: torch.dtype = torch.float32  # of the weights as the parent has them
    lora: LoraSettings | None = None
    seed: int = 0
    keep_start: Literal["", "start", "average"] = (
        ""  # a copy of the model to compute with (`start`); with LoRA none is needed
    )
    clock: Callable[[], float] = time.monotonic
    total: int = 0  # steps of the whole training
    graphs: bool = True  # CUDA graphs for a small model; the source must give rows of few shapes
    available: int = 0  # bytes to plan with; 0: what is free
    teachers: int = 0  # weights of models that will stand beside it, to be asked only
    context: Context = field(default_factory=Context)  # the ranks that share rows

    def __post_init__(self) -> None:
        self.device = self.world.device(self.settings.device)
        self._gpu, self._sharded = self.device.type == "cuda", self.world.size > 1
        wish = self.settings.dtype
        self.saved_dtype: torch.dtype = self.parent_dtype if wish == "auto" else getattr(torch, wish)
        self._saved_at = self.clock()
        self._check_model()
        self._plan_memory()
        objective = self._prepare_model()
        self._build_loop(self._compile_and_shard(), objective)
        self._checkpoints = Checkpoints(self.folder, self.settings.keep, self.say, self.weights.masters, self.world)

    def _check_model(self) -> None:
        if not self._gpu:
            memory.keep_freed_memory()
        refuse_damaged(self.model)
        self.shape = shape_of(self.model.config).compute
        self._adapters: Any = add_lora(self.model, self.lora, self.seed) if self.lora else None

    def _prepare_model(self) -> Objective:
        """Bring the model to its device, in what it computes in, and try it out. Of several ranks the first does, for all."""
        model = self.model.eval()  # dropout stays off
        if not self._sharded:
            self.weights = self._weights(model.to(self.device))
        self.experts = take_up(model, self.settings.experts, self.total)
        self.attention = self._try_out(model)
        if self.context.size > 1 and self.attention != "documents":
            raise UserError(
                f"context_ranks takes attention by documents; this model has {self.attention!r}; set context_ranks = 1"
            )
        objective = self.objective(model)
        kept = self.keep_start and not self.lora  # whose start is the policy without its adapters
        self._frozen = copy.deepcopy(model).requires_grad_(requires_grad=False) if kept else None
        if self.settings.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in layers_of(model):
                layer.training = True  # of itself only: this is how transformers asks whether to recompute
        return objective

    def _try_out(self, model: Any) -> str:
        """Set a model's attention, look at its head, and return the attention that it has got."""
        leads = self.world.leads  # the others have no weights to try anything with
        tried = (isolate(model, self.settings.attention), has_plain_head(model)) if leads else None
        attention: str
        attention, model.plain_head = self.world.tell(tried)
        if not leads:
            model.set_attn_implementation(NAME if attention == "documents" else attention)
        return attention

    def beside(self, folder: Path) -> Root:
        """Return another model, to be asked only: prepared, compiled and sharded as the one that is trained."""
        model = load_to_train(folder, self.settings, self.world, frozen=True).eval()
        refuse_damaged(model, f"the weights in {folder}")
        self._try_out(model.requires_grad_(requires_grad=False))
        return self._spread(model)

    def _weights(self, model: Any) -> Weights:
        """Return the weights that are trained of a model that is on the device of one rank."""
        if self.masters == "none":
            for weight in model.parameters():
                weight.data = weight.data.to(torch.bfloat16)
        return MixedWeights(model) if self._gpu and self.masters == "float32" else Weights(model)

    def _plan_memory(self) -> None:
        """Choose rows at once, masters and states by the plan; rank 0 does: ranks that differed would wait for each other for ever."""
        settings, counts = self.settings, memory.count(self.model)
        way = memory.Way(
            self.length // self.context.size,
            self._gpu,
            recompute=settings.recompute,
            ranks=self.world.size,
            reference=self.keep_start,
            teachers=self.teachers,
        )
        there = self.available or memory.available_on(self.device, self.model)
        planned = memory.settle(counts, way, settings.optimiser, there)
        adamw = settings.optimiser.name == "adamw"
        advice = "" if planned.rows() else memory.remedy(counts, planned.way, there, adamw=adamw, lora=not self.lora)
        micro = memory.choose_micro(settings.micro, self.rows, planned, advice)
        self.micro, self.plan = self.world.tell((micro, planned))
        self.masters, self.states = self.plan.way.masters, self.plan.way.states
        self._computing_dtype = torch.bfloat16 if self._gpu or self.masters == "none" else torch.float32
        if (
            self.world.leads
            and "auto" in {settings.optimiser.masters, settings.optimiser.states}
            and self.states != "float32"
        ):
            self.say(f"to fit, AdamW keeps masters = {self.masters!r} and states = {self.states!r}")

    def _compile_and_shard(self) -> Root:
        self.compiled = self.settings.compile == "on" or (self.settings.compile == "auto" and self._gpu)
        if self.compiled and not self._gpu:
            raise UserError('compile = "on" is for a GPU; on a CPU set compile = "auto" or "off"')
        if self.compiled:
            # Five shares of whole rows, training and measuring, layers with and without a window: 8, torch's limit, is too few.
            torch._dynamo.config.recompile_limit = 64  # noqa: SLF001
        root = self._spread(self.model)
        self.start = self._spread(self._frozen) if self._frozen else None
        if self._sharded:
            self.weights = Weights(self.model)  # the sharded ones
            if self.experts:  # by now this rank has them
                self.experts.bias_LE = torch.stack([router.own_bias().float() for router in self.experts.routers])
        return root

    def _spread(self, model: Any) -> Root:
        """Compile the layers of a model and shard it over the ranks."""
        root, layers = Root(model), layers_of(model)
        if self.compiled:
            for layer in layers:
                # A graph break would raise. Not dynamic: whole rows in a number that varies fail in torch 2.11 (rows of 16,384).
                layer.compile(fullgraph=True, dynamic=False)
        if self._sharded:
            kept = torch.bfloat16 if self.masters == "none" else torch.float32
            shard(root, layers, self.device, kept, self._computing_dtype, trained=model is self.model)
        return root

    def _build_loop(self, root: Root, objective: Objective) -> None:
        small = sum(weight.numel() for weight in self.model.parameters()) <= SMALL
        torch.manual_seed(self.seed)  # weights and moments may be rounded at random; a checkpoint has where that stands
        own = self.settings.optimiser.model_copy(update={"masters": self.masters, "states": self.states})
        plain = isinstance(self.weights, MixedWeights) and self.states == "float32" and not self.settings.recompute
        graphs = self.graphs and self.compiled and small and plain
        graphs = graphs and not self.experts  # which are multiplied in groups, and counted outside of the graph
        self.optimiser = Optimiser(
            self.weights.masters, own, sharded=self._sharded, replayed=graphs, compiled=self.compiled
        )
        self.loop = Loop(
            root, self.weights, self.optimiser, objective, self.source, self.factor, self.guard, own.clip, self.micro, self.device,
            self.world, experts=self.experts,
        )  # fmt: skip
        if graphs:
            self.loop.graphs = Replay(self.loop.learn, self.optimiser.update)
        if self.context.size > 1:
            try_out(self.context, lambda rows: root(objective.nats, rows), self.device)

    def steps(self, until: float = math.inf) -> Iterator[Step]:
        """Train until so many steps are done or the source ends, and yield after every step."""
        try:
            yield from self.loop.steps(until)
        except torch.OutOfMemoryError:
            raise UserError(
                f"the device ran out of memory with micro = {self.micro} rows of {self.length} tokens; set micro ="
                f" {max(1, self.micro // 2)}, a shorter `length`, or recompute = true"
            ) from None

    def flops(self, step: Step) -> int:
        """Return the model FLOPs of a step, over all ranks."""
        return sum(self.loop.objective.flops(self.shape, size) * count for size, count in step.pieces.items())

    def checkpoint_due(self) -> bool:
        """Whether so many steps, or seconds since the last checkpoint, are over; rank 0 decides for all."""
        late = self.clock() - self._saved_at >= self.settings.checkpoint_seconds
        return bool(self.world.tell(late or self.loop.done % self.settings.checkpoint_every == 0))

    def save(self, state: dict[str, Any] | None = None, tensors: Tensors | None = None) -> None:
        """Begin to write a checkpoint, with what else the caller wants to find in it; every rank must take part."""
        held = {f"weights/{name}": weight for name, weight in self.weights.masters.items()}
        held |= {f"optimiser/{name}": value for name, value in self.optimiser.tensors().items()}
        held |= (tensors or {}) | (self.experts.tensors() if self.experts else {})
        held["rng/cpu"] = torch.get_rng_state()
        if self._gpu:
            held["rng/cuda"] = torch.cuda.get_rng_state(self.device)
        own = {"micro": self.micro, "batches": self.loop.position, "guard": self.guard.state()}
        own |= {"masters": self.masters, "states": self.states}
        self._saved_at = self.clock()
        self._checkpoints.save(self.loop.done, held, own | (state or {}))

    def resume(self) -> tuple[dict[str, Any], Tensors]:
        """Go on from the newest checkpoint, if there is one; return its state, and this rank's part of its tensors."""
        latest = self._checkpoints.latest()
        if latest is None:
            return {}, {}
        tensors, state = latest
        if (had := (state["masters"], state["states"])) != (self.masters, self.states):
            raise UserError(
                f"the checkpoint of step {state['step']} has masters {had[0]!r} and states {had[1]!r}, but to fit, masters"
                f" {self.masters!r} and states {self.states!r} are needed here; use as much memory and as many ranks as"
                f" then, or remove {self.folder} to start anew"
            )
        with torch.no_grad():
            for name, weight in self.weights.masters.items():
                local(weight).copy_(tensors[f"weights/{name}"])
        self.weights.publish()
        kept = {name: value for name, value in tensors.items() if name.startswith("optimiser/")}
        self.optimiser.load({name.removeprefix("optimiser/"): value for name, value in kept.items()})
        torch.set_rng_state(tensors["rng/cpu"])
        if "rng/cuda" in tensors and self._gpu:
            torch.cuda.set_rng_state(tensors["rng/cuda"], self.device)
        self.source.load_state(state["batches"])
        self.loop.position = state["batches"]
        self.guard.load_state(state["guard"])
        self.loop.done = state["step"]
        if self.experts:
            self.experts.load(tensors, self.loop.done)
        if not self.settings.micro and self.rows % state["micro"] == 0:
            self.micro = self.loop.micro = state["micro"]  # with another split, sums would be rounded otherwise
        return state, tensors

    def close(self) -> None:
        self._checkpoints.close()

    def nats(self, rows: Rows) -> torch.Tensor:
        """Return −log p of every target, [B, T], as the model is now. Ranks that share rows must ask for the same ones."""
        with torch.no_grad():
            own = rows if self.context.size == 1 else self.context.part(rows.each(torch.Tensor.cpu)).to(self.device)
            return self.context.whole(self.loop.root(self.loop.objective.nats, own))

    def accepted(self, rows: Rows) -> torch.Tensor:
        """Return the acceptance of MTP heads by depth, summed, and the weights, [2, K], as they are now."""
        return self.loop.root(cast("MultiToken", self.loop.objective).accepted, rows)

    @property
    def heads_only(self) -> bool:
        """Whether nothing is trained but MTP heads."""
        return all(name.startswith(HEADS) for name in self.weights.masters)

    def computed_state(self) -> Tensors:
        """Return this rank's share of the state as the model computes with it; all shares are what an engine should hold.

        Every rank must take part. With LoRA it is the adapters alone, on rank 0: engines have the base (`Runner.replace`,
        inference/vllm_plugin.py). What is sharded goes to main memory, tensor by tensor.
        """
        if self._adapters is not None:
            state = adapter_state(self.model)
            return state if self.world.leads else {}
        self._reshard()
        weights, state, size = dict(self.model.named_parameters(remove_duplicate=False)), self.model.state_dict(), 0
        total = sum(weight.numel() for weight in self.model.parameters())
        once = {}  # weights that are tied are one in what is returned too
        for weight in self.model.parameters():
            value = whole(weight.detach().to(self._computing_dtype))
            if min(size * self.world.size // max(1, total), self.world.size - 1) == self.world.rank:
                once[id(weight)] = value.cpu() if self._sharded else value
            size += weight.numel()
        own = {name: value for name, value in state.items() if self.world.leads and name not in weights}
        return own | {
            name: once[id(weight)] for name, weight in weights.items() if name in state and id(weight) in once
        }

    def _reshard(self) -> None:
        """Give back what is still gathered of the last pass: weights are changed and read as shards."""
        if self._sharded:
            cast("Any", self.loop.root).reshard()

    def settle(self) -> None:
        """Make the model what will be saved, so that what is measured last is what is handed over."""
        self._reshard()
        if self._adapters is not None:
            self._merge()
        else:
            self.weights.round_to(self.saved_dtype)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _merge(self) -> None:
        """Add the small matrices in, layer by layer and in float32: there is never a float32 copy of the whole."""
        lost = {}
        for name, part in adapted(self.model).items():
            weight = part.get_base_layer().weight
            saved = merged_weight(self.model, name, self.weights.masters).to(self.saved_dtype)
            weight.copy_(saved)
            if saved.dtype != weight.dtype:
                lost[id(weight)] = saved  # what is saved may have bits that are not computed with
        self._adapters.unload()
        self._adapters = None
        self.weights = Weights(self.model.requires_grad_())
        self.weights.round_to(self.saved_dtype)
        self.weights.masters = {name: lost.get(id(weight), weight) for name, weight in self.weights.masters.items()}

    def export(self, folder: Path) -> None:
        """Save the model, or only the MTP heads if only they were trained; every rank must take part.

        Of several ranks the first gets the weights, one by one into its main memory, and writes.
        """
        exact = {**dict(self.model.named_parameters()), **self.weights.masters}
        state: Tensors = {}
        for name, weight in exact.items():
            if name.startswith(HEADS) or not self.heads_only:
                value = whole(weight.detach().to(self.saved_dtype))
                state |= {name: value.cpu()} if self.world.leads else {}
        if self.world.leads:
            export(self.model, state, self.saved_dtype, folder, trunk=not self.heads_only)


EXPERT_MATRICES = {"gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"}


def load_to_train(
    folder: Path, settings: TrainerSettings, world: World, *, config: Any = None, frozen: bool = False
) -> Any:
    """Return the model to start from: on the device, in bf16 if it computes in that and no bit is lost that training would keep.

    Of several ranks the first has it in main memory, the others only its shape. `frozen`: none of the weights will be trained.
    """
    device, lossless = world.device(settings.device), frozen or saved_dtype(folder) == torch.bfloat16
    half = device.type == "cuda" and (lossless or settings.optimiser.masters == "none")
    if world.size > 1:
        device = torch.device("cpu" if world.leads else "meta")
    try:
        return load_model(folder, device, torch.bfloat16 if half else torch.float32, config)
    except (torch.OutOfMemoryError, MemoryError):
        raise UserError(f"the weights of {folder} alone do not fit {device}; `etude plan` says what would") from None


def refuse_damaged(model: Any, which: str = "the weights to start from") -> None:
    """Refuse weights that are not numbers."""
    for name, weight in model.named_parameters():
        if not weight.is_meta and not torch.isfinite(weight).all():
            damage = f"{name} holds values that are not finite"
            raise UserError(f"{which} are damaged: {damage}; fetch the base again")


def layers_of(model: Any) -> list[torch.nn.Module]:
    """Return the layers of the decoder, and of MTP heads: what is compiled, and sharded, one by one."""
    own = next(part for part in model.get_decoder().children() if isinstance(part, torch.nn.ModuleList))
    return [*own, *(layer.mtp_block for layer in (model.mtp.layers if hasattr(model, "mtp") else []))]


def add_lora(model: Any, settings: LoraSettings, seed: int) -> Any:
    """Give a model its small matrices, and return peft's wrapper; only they are trained from now on.

    Experts are one tensor a layer. peft would put a parametrisation on each, and on the router, where the targets are the names that
    experts had as matrices of their own: it would be undone and made again in every pass, which cannot be compiled. So they are left
    as they are, and what names nothing else is refused.
    """
    from peft import LoraConfig, get_peft_model

    wrong, parts = (
        f"lora.targets {settings.targets!r} does not fit this model",
        [name for name, _ in model.named_modules()],
    )
    named = EXPERT_MATRICES.intersection(settings.targets if isinstance(settings.targets, list) else ())
    if routers_of(model) and (
        missing := [name for name in named if not any(part.endswith(f".{name}") for part in parts)]
    ):
        raise UserError(f"{wrong}: only its experts have {min(missing)!r}, which LoRA leaves as they are; leave it out")
    torch.manual_seed(seed)  # one of each pair starts at random
    own = {"r": settings.rank, "lora_alpha": settings.alpha, "target_modules": settings.targets}
    config = LoraConfig(**own, lora_dropout=0.0, task_type="CAUSAL_LM")
    kind = model.config.model_type
    try:
        model.config.model_type = ""  # by which peft knows what the experts of a family were called
        return get_peft_model(model, config)
    except ValueError as error:
        raise UserError(f"{wrong}: {one_line(error)}") from None
    finally:
        model.config.model_type = kind


def adapted(model: Any) -> dict[str, Any]:
    """Return the layers that have small matrices."""
    return {name: part for name, part in model.named_modules() if hasattr(part, "lora_A")}


def adapter_state(model: Any) -> dict[str, torch.Tensor]:
    """Return the small matrices by the names of the weights they belong to, their scale in the second one."""
    state: dict[str, torch.Tensor] = {}
    for name, part in adapted(model).items():
        down, up = (whole(getattr(part, each)["default"].weight.detach()) for each in ("lora_A", "lora_B"))
        state |= {f"{name}.weight.lora_A": down, f"{name}.weight.lora_B": up * part.scaling["default"]}
    return state


@torch.no_grad()  # type: ignore[untyped-decorator]
def merged_weight(model: Any, name: str, small: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the weight of a layer with its small matrices added in, in float32, sharded as it is; every rank must ask."""
    part = model.get_submodule(name)
    down, up = (whole(small[f"{name}.lora_{each}.default.weight"]).float() for each in "AB")
    weight, delta = part.get_base_layer().weight, up @ down * part.scaling["default"]
    return weight.float() + like(delta.T if part.fan_in_fan_out else delta, weight)
