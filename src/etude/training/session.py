"""One training from start to end: resumed where it was, measured before, on the way and after, saved as it goes.

A row a step goes into the metrics (`train/…`), one a measurement (`eval/…`). After a kill, steps since the last checkpoint are done
again: on a CPU with the same result, bit for bit. Their rows are there already; what they cost a second time is written
as `again/…`, because it was spent.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from etude.errors import Interrupted, UserError
from etude.models.mtp_heads import HEADS
from etude.models.shape import shape_of
from etude.progress import Reporter
from etude.training import lora, memory
from etude.training.attention import isolate
from etude.training.checkpoint import Checkpoints, export
from etude.training.cuda_graphs import SMALL, Replay
from etude.training.distributed import like, shard, whole
from etude.training.loop import Forward, Guard, Loop
from etude.training.measure import load_bits, save_bits
from etude.training.memory import keep_freed_memory
from etude.training.objectives.next_token import NextToken
from etude.training.optimiser import MixedWeights, Optimiser, Weights, factor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from etude.lineage.compute import ComputeShape
    from etude.progress import Task
    from etude.training.distributed import World
    from etude.training.loop import Batches, Step
    from etude.training.measure import Bits, Nats
    from etude.training.objectives import Objective
    from etude.training.settings import LoraSettings, TrainSettings
    from etude.work import Work

    Evaluate = Callable[[Nats], dict[str, Bits]]

CHECKPOINTS = "checkpoints"
BEFORE = "before.npz"


@dataclass
class Session:
    """Everything a training works with. `work` is rank 0's; the other ranks have none and write nothing."""

    model: Any  # with float32 weights
    settings: TrainSettings
    batches: Batches
    length: int
    evaluate: Evaluate
    world: World
    work: Work | None
    folder: Path
    parent_dtype: torch.dtype = torch.float32  # of the weights as the parent has them
    lora: LoraSettings | None = None
    seed: int = 0
    objective: Callable[[Any], Objective] = NextToken  # made of the model once its attention is set
    also: Callable[[], dict[str, Any]] = dict  # what else is measured, for the metrics
    device: torch.device = field(init=False)
    loop: Loop = field(init=False)
    weights: Weights = field(init=False)
    attention: str = field(init=False)

    def __post_init__(self) -> None:
        settings, model = self.settings, self.model
        self.device = self.world.device(settings.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.steps = settings.steps(self.length)
        refuse_damaged(model)
        self._shape: ComputeShape = shape_of(model.config).compute
        sharded = self.world.size > 1
        if self.lora and sharded:
            raise UserError("lora cannot be used on several ranks yet; train on one, or without it")
        self._held = lora.add(model, self.lora, self.seed) if self.lora else None
        layers = _layers(model.eval())  # dropout stays off
        # Both try the model out: in float32 on the CPU, for a GPU's attention takes no float32, and shards cannot be tried.
        self.attention = isolate(model, settings.attention)
        objective = self.objective(model)
        model.to(self.device)
        if settings.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in layers:
                layer.training = True  # of itself only: this is how transformers asks whether to recompute
        found = memory.estimate(
            model, self.length, self.device, recompute=settings.recompute, sharded_over=self.world.size
        )
        micro = memory.choose_micro(settings.micro, self._rows_here, found, recompute=settings.recompute)
        self.micro = self.world.tell(micro)  # ranks that differed would wait for each other for ever
        gpu = self.device.type == "cuda"
        self.weights = MixedWeights(model) if gpu and not sharded else Weights(model)
        forward = Forward(model, objective)
        self.compiled = settings.compile == "on" or (settings.compile == "auto" and gpu)
        if self.compiled and not gpu:
            raise UserError('compile = "on" is for a GPU; on a CPU set compile = "auto" or "off"')
        if self.compiled:
            # Five shares of whole rows, training and measuring, layers with and without a window: 8, torch's limit, is too few.
            torch._dynamo.config.recompile_limit = 64  # noqa: SLF001
            for layer in layers:
                # A graph break would raise. Not dynamic: whole rows in a number that varies fail in torch 2.11 (rows of 16,384).
                layer.compile(fullgraph=True, dynamic=False)
        if sharded:
            shard(forward, layers, torch.bfloat16 if gpu else torch.float32)
            self.weights = Weights(model)  # the sharded ones
        small = sum(weight.numel() for weight in model.parameters()) <= SMALL
        replayed = self.compiled and small and not sharded and not settings.recompute
        self.optimiser = Optimiser(self.weights.masters, settings.optimiser, sharded=sharded, replayed=replayed)
        self.guard = Guard(settings.guard)
        self._number = sum(1 for _ in self.work.metrics.rows("etude/session/")) if self.work else 0
        self.loop = Loop(
            forward, self.weights, self.optimiser, objective, self.batches,
            lambda step: factor(settings.schedule, step, self.steps),
            self.guard, settings.optimiser.clip, self.length, self.micro, self.device, self.world,
        )  # fmt: skip
        if replayed:
            self.loop.replay = Replay(self.loop.learn, self.optimiser.update)

    @property
    def _rows_here(self) -> int:
        return self.settings.batch // self.world.size

    def run(self) -> dict[str, dict[str, Bits]]:
        """Train to the end; return the measurements before and after."""
        checkpoints = Checkpoints(self.folder / CHECKPOINTS, self.settings.keep, self._say)
        try:
            self._resume(checkpoints)
            try:
                before = self._before()
                self._train(checkpoints)
            except Interrupted:
                if self.loop.done:
                    self._save(checkpoints)
                raise
            except torch.OutOfMemoryError:
                raise UserError(self._too_large()) from None
        finally:
            checkpoints.close()
        self._settle()
        return {"before": before, "after": self._measured(self.steps, "after")}

    def _settle(self) -> None:
        """Make the model what will be saved, so that what is measured last is what is handed over."""
        if self._held is not None:
            self._merge()
        else:
            self.weights.round_to(self.saved_dtype)

    def _merge(self) -> None:
        """Add the small matrices in, in float32 and in main memory: a device that holds them may not hold a copy of the rest."""
        mixed, small = isinstance(self.weights, MixedWeights), self.weights.masters
        self.model.cpu().float()
        with torch.no_grad():
            for name, weight in small.items():
                self.model.get_parameter(name).copy_(weight)
        lora.merge(self._held)
        self.weights = Weights(self.model.requires_grad_())
        self.weights.round_to(self.saved_dtype)
        if mixed:
            self.weights.masters = {name: weight.detach().clone() for name, weight in self.weights.masters.items()}
            for weight in self.model.parameters():
                weight.data = weight.data.to(torch.bfloat16)
        self.model.to(self.device)

    def _too_large(self) -> str:
        less = max(1, self.micro // 2)
        rows = f"micro = {self.micro} rows of {self.length} tokens"
        return f"the device ran out of memory with {rows}; set micro = {less}, or recompute = true"

    def _train(self, checkpoints: Checkpoints) -> None:
        wanted = measuring_steps(self.steps, self.settings.evaluations)
        each = self.settings.batch * self.length
        reporter = self.work.reporter if self.work else Reporter(quiet=True)
        with contextlib.ExitStack() as stack:
            task: Task = self._or_stop(stack.enter_context, reporter.task("training", self.steps * each, "tokens"))
            self._or_stop(task.skip, self.loop.done * each)
            for step in self.loop.steps(self.steps):
                self._write(step)
                self._write_compile(step)
                if step.number in wanted:
                    self._measured(step.number, "during")
                if step.number % self.settings.checkpoint_every == 0 or step.number == self.steps:
                    self._save(checkpoints)
                self._or_stop(task.advance, step.tokens)

    def _or_stop(self, show: Callable[[Any], Any], what: Any) -> Any:
        """Show progress, which is where rank 0 notices a user's wish to stop; then all ranks stop, after the same step."""
        shown, asked = None, None
        try:
            shown = show(what)
        except Interrupted as wish:
            asked = wish.signal_number
        if (signal := self.world.tell(asked)) is not None:
            raise Interrupted(signal)
        return shown

    def _write(self, step: Step) -> None:
        if self.work is None:
            return
        each = self.loop.objective.flops
        flops = sum(each(self._shape, size) * count for size, count in step.pieces.items()) * self.world.size
        more = {"skipped": step.skipped} if step.skipped else {}
        if step.skipped:
            self._say(f"step {step.number} was skipped: {step.skipped}")
        values = {"loss": step.loss, "gradient": step.norm, **step.metrics}
        finite = {name: value if np.isfinite(value) else None for name, value in values.items()}
        self._put(
            f"train/{step.number:08d}", **finite, lr=self.settings.optimiser.lr * step.factor, tokens=step.tokens,
            learnt=step.learnt, flops=flops, device_seconds=round(step.seconds * self.world.size, 4), **more,
        )  # fmt: skip

    def _write_compile(self, step: Step) -> None:
        """Write what compiling cost, after the first step of a session on compiled layers."""
        key = f"compile/{self._number:04d}"
        if self.work and self.compiled and key not in self.work.metrics:
            counters = torch._dynamo.utils.counters  # noqa: SLF001 - torch has no public way to ask
            hits, misses = (counters["inductor"][f"fxgraph_cache_{what}"] for what in ("hit", "miss"))
            breaks = sum(counters["graph_break"].values())
            self.work.metrics.put(
                key,
                first_step_seconds=round(step.seconds, 2),
                graph_breaks=breaks,
                cache_hits=hits,
                cache_misses=misses,
            )

    def _put(self, key: str, **values: Any) -> None:
        """Write a row; what was done before and is done again was spent again."""
        if self.work is not None:
            metrics = self.work.metrics
            metrics.put(f"again/{self._number:04d}/{key}" if key in metrics else key, **values)

    def _say(self, line: str) -> None:
        if self.work is not None:
            self.work.reporter.say(line)

    def nats(self, rows: Any) -> torch.Tensor:
        """Return −log p of every target, as the model is now."""
        with torch.no_grad():
            return self.loop.forward(rows, "nats")

    def accepted(self, rows: Any) -> torch.Tensor:
        """Return the acceptance of MTP heads by depth, as they are now."""
        return self.loop.forward(rows, "accepted")

    def _measured(self, step: int, when: str) -> dict[str, Bits]:
        began = time.perf_counter()
        bits, more = self.evaluate(self.nats), self.also()
        key = f"eval/{step:08d}" if when != "after" else "eval/after"
        seconds = round((time.perf_counter() - began) * self.world.size, 4)
        values = {domain: each.per_byte for domain, each in bits.items()}
        if broken := [domain for domain, value in values.items() if not np.isfinite(value)]:
            raise UserError(f"measured after step {step}, {broken[0]!r} has no finite bits per byte: the model's outputs are not"
                            " numbers; take another base, or lower the learning rate")  # fmt: skip
        self._put(key, step=step, bits_per_byte=values, device_seconds=seconds, **more)
        return bits

    def _before(self) -> dict[str, Bits]:
        """Return the measurement of the parent, from disk if this training was begun before."""
        path = self.folder / BEFORE
        if not path.exists():
            assert self.loop.done == 0, f"{path} is missing"
            bits = self._measured(0, "before")
            if self.world.leads:
                save_bits(path, bits)
            return bits
        return load_bits(path)

    def _save(self, checkpoints: Checkpoints) -> None:
        """Save the whole state; every rank must take part, rank 0 writes."""
        tensors = {f"weights/{name}": whole(weight) for name, weight in self.weights.masters.items()}
        tensors |= {f"optimiser/{name}": whole(value) for name, value in self.optimiser.tensors().items()}
        tensors["rng/cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng/cuda"] = torch.cuda.get_rng_state(self.device)
        state = {
            "done": self.loop.done,
            "micro": self.micro,
            "batches": self.loop.position,
            "guard": self.guard.state(),
        }
        if self.world.leads:
            checkpoints.save(self.loop.done, tensors, state)

    def _resume(self, checkpoints: Checkpoints) -> None:
        found = checkpoints.latest()
        if found is None:
            return
        tensors, state = found
        with torch.no_grad():
            for name, weight in self.weights.masters.items():
                weight.copy_(like(tensors[f"weights/{name}"], weight))
        self.weights.publish()
        self.optimiser.load(
            {name.removeprefix("optimiser/"): value for name, value in tensors.items() if name.startswith("optimiser/")}
        )
        torch.set_rng_state(tensors["rng/cpu"])
        if "rng/cuda" in tensors and self.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["rng/cuda"], self.device)
        self.batches.load_state(state["batches"])
        self.loop.position = state["batches"]
        self.guard.load_state(state["guard"])
        self.loop.done = state["done"]
        if not self.settings.micro and self._rows_here % state["micro"] == 0:
            self.micro = self.loop.micro = state["micro"]  # with another split, sums would be rounded otherwise
        self._say(f"going on from the checkpoint of step {self.loop.done} of {self.steps}")

    def notes(self) -> list[str]:
        """Return what a reader of the report should know."""
        assert self.work is not None
        rows = list(self.work.metrics.rows("train/"))
        tokens, seconds = (sum(row[key] for row in rows) for key in ("tokens", "device_seconds"))
        domains = ", ".join(f"{domain} {share:.1%}" for domain, share in self.batches.achieved()["domains"].items())
        epochs = ", ".join(f"{source} {count:.2f}" for source, count in self.batches.achieved()["epochs"].items())
        again = sum(1 for row in self.work.metrics.rows("again/") if "tokens" in row)
        skipped = sum(1 for row in rows if row.get("skipped"))
        compiled = "; ".join(
            f"compiled: first step {row['first_step_seconds']} s, {row['graph_breaks']} graph breaks, kernels from cache"
            f" {row['cache_hits']} of {row['cache_hits'] + row['cache_misses']}"
            for row in self.work.metrics.rows("compile/")
        )
        way = f"attention by {self.attention}, {self.micro} rows of {self.length} tokens at once"
        return [
            f"{len(rows):,} steps, {tokens:,} tokens, {tokens / seconds:,.0f} tokens a device-second; {way}",
            f"seen: {domains}; epochs: {epochs}",
            f"steps skipped: {skipped}; steps done again after an interruption: {again}",
            *([compiled] if compiled else []),
        ]

    @property
    def saved_dtype(self) -> torch.dtype:
        """The dtype of the weights to be saved."""
        return getattr(torch, self.settings.dtype) if self.settings.dtype != "auto" else self.parent_dtype

    @property
    def heads_only(self) -> bool:
        """Whether nothing is trained but MTP heads."""
        return all(name.startswith(HEADS) for name in self.weights.masters)

    def export(self, folder: Path) -> None:
        """Save the model, or only the MTP heads if only they were trained; every rank must take part."""
        exact = {**dict(self.model.named_parameters()), **self.weights.masters}
        state = {name: whole(weight).to(self.saved_dtype).cpu() for name, weight in exact.items()}
        if self.world.leads:
            export(self.model, state, self.saved_dtype, folder, trunk=not self.heads_only)


def refuse_damaged(model: Any) -> None:
    """Refuse weights that are not numbers."""
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise UserError(
                f"the weights to start from are damaged: {name} holds values that are not finite; fetch the base again"
            )


def measuring_steps(steps: int, count: int) -> set[int]:
    """Return the steps after which to measure: half of them evenly spread, half closer and closer to the start.

    What happens at the start, when a model first gets worse (the stability gap), is over in a few steps.
    """
    even = {round(steps * index / (count // 2 + 1)) for index in range(1, count // 2 + 1)}
    early = {round(steps * 2.0**-index) for index in range(2, 2 + count - count // 2)}
    return {step for step in even | early if 0 < step < steps}


def _layers(model: Any) -> list[torch.nn.Module]:
    """Return the layers of the decoder, and of MTP heads: what is compiled, and sharded, one by one."""
    own = next(part for part in model.get_decoder().children() if isinstance(part, torch.nn.ModuleList))
    return [*own, *(layer.mtp_block for layer in (model.mtp.layers if hasattr(model, "mtp") else []))]
