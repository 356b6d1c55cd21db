"""What turns episodes into better weights: one batch, one update (Composer 2's objective).

    loss = − Σ_episodes Σ_learnt tokens  A_i · w_t · log π(t)  /  (groups · group size · normaliser)

    R_i   reward of an episode, less β times its divergence from the reference, summed over its sampled tokens
    A_i   R_i less the mean of its group                                                (advantage.py)
    w_t   correction for how the token was sampled, a constant for the gradient           (correction.py)

All that the loss is divided by is constant: neither the length of an episode nor the number of its branches changes what a token
weighs. Nothing is random. So after a kill, steps since the last checkpoint are done again from the same batches: on a CPU with the
same result, bit for bit. The version of weights is the number of steps they have had.

The trainer's process waits for batches, learns from each, publishes the weights and reports:

    batch → step → checkpoint, every so many → publish version → report

Killed anywhere, it goes on from its last checkpoint. A step that was published before is done again but not published again, so
that the version of weights always is the number of their step.
"""

from __future__ import annotations

import copy
import math
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from etude.agent.trace import from_json
from etude.errors import UserError
from etude.files import publish_folder
from etude.inference.weight_sync import WeightStore
from etude.lineage.compute import forward_flops
from etude.models.load import choose_device, load_model, saved_dtype
from etude.models.shape import shape_of
from etude.rl import algorithm
from etude.rl.algorithm import Reference, advantages, divergence
from etude.rl.exchange import Exchange, Report
from etude.rl.packing import branches, pack, row_length
from etude.rl.processes import as_child, load_job
from etude.training import memory
from etude.training.attention import isolate
from etude.training.checkpoint import Checkpoints, export
from etude.training.loop import Guard, GuardSettings
from etude.training.memory import keep_freed_memory
from etude.training.objectives.policy_gradient import PolicyGradient
from etude.training.optimiser import MixedWeights, Optimiser, Weights
from etude.training.session import refuse_damaged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from etude.rl.exchange import Batch
    from etude.rl.packing import Branch, Part
    from etude.rl.processes import RlJob
    from etude.rl.settings import RlSettings

    Array = npt.NDArray[Any]

AT_ONCE = {
    "cpu": 8192,
    "cuda": 32_768,
}  # tokens; more would not be faster, and the last rows of a batch are padding on a GPU
KEPT = 2  # checkpoints; and versions that readers may still be on their way to
POLL = 0.05  # seconds between looks for a batch


class Trainer:
    """The policy being trained. `folder`: for its checkpoints."""

    def __init__(
        self, model: Path, settings: RlSettings, folder: Path, *, say: Callable[[str], object] = print
    ) -> None:
        self.settings, self.device = settings, choose_device(settings.device)
        self._gpu = self.device.type == "cuda"
        if not self._gpu:
            keep_freed_memory()
        self.model: Any = load_model(model, torch.device("cpu"), torch.float32)
        self.dtype = saved_dtype(model) if settings.dtype == "auto" else getattr(torch, settings.dtype)
        refuse_damaged(self.model)
        isolate(self.model, "auto")
        self.objective = PolicyGradient(self.model, self._correct)
        found = shape_of(self.model.config)
        self._shape, self.length = found.compute, settings.length or found.context
        if self.length > found.context:
            raise UserError(
                f"length = {self.length} is beyond the model's context of {found.context}; set length = 0 or extend it"
            )
        self.model.to(self.device)
        self.reference = Reference(copy.deepcopy(self.model), settings.kl) if settings.kl.coefficient else None
        self.micro = self._fitting_rows()
        self.weights = MixedWeights(self.model) if self._gpu else Weights(self.model)
        self._prepare_layers()
        self.optimiser = Optimiser(self.weights.masters, settings.optimiser)
        self.guard = Guard(GuardSettings())
        self.checkpoints = Checkpoints(folder, KEPT, say)
        self.done, self._say = 0, say

    def _fitting_rows(self) -> int:
        """Return how many rows of `length` tokens to work on at once."""
        settings = self.settings
        found = memory.estimate(self.model, self.length, self.device, recompute=settings.recompute)
        if self.reference:
            weights = sum(weight.numel() for weight in self.model.parameters())
            kept = (2 if self._gpu else 4) + (4 if self.reference.average else 0)
            found = replace(found, fixed=found.fixed + weights * kept)
        rows = max(settings.micro, AT_ONCE[self.device.type] // self.length, 1)
        return memory.choose_micro(settings.micro, rows, found, recompute=settings.recompute)

    def _prepare_layers(self) -> None:
        """Recompute and compile layers as wished; a reference computes in the policy's precision."""
        compiled = self.settings.compile == "on" or (self.settings.compile == "auto" and self._gpu)
        if compiled and not self._gpu:
            raise UserError('compile = "on" is for a GPU; on a CPU set compile = "auto" or "off"')
        if self.settings.recompute:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in _layers(self.model):
                layer.training = True  # of itself only: this is how transformers asks whether to recompute
        if self.reference and self._gpu:
            for weight in self.reference.model.parameters():
                weight.data = weight.data.to(torch.bfloat16)
        if compiled:
            torch._dynamo.config.recompile_limit = 64  # noqa: SLF001 - layers of two models, with and without a gradient
            for model in [self.model, *([self.reference.model] if self.reference else [])]:
                for layer in _layers(model):
                    layer.compile(fullgraph=True)

    def _correct(
        self, change: torch.Tensor, learnt: torch.Tensor, branch: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ratios = algorithm.ratios(change, learnt, branch, self.settings.correction.level)
        return ratios, algorithm.factors(ratios, self.settings.correction)

    def step(self, batch: Batch, root: Path) -> dict[str, float]:
        """Learn from one batch, whose traces lie under `root`; return what there is to say of it."""
        began = time.perf_counter()
        try:
            told = self.gradient(batch, root)
        except torch.OutOfMemoryError:
            raise UserError(
                f"the device ran out of memory with {self.micro} rows of {self.length} tokens; set micro = {max(1, self.micro // 2)},"
                " a shorter `length`, or recompute = true"
            ) from None
        masters = list(self.weights.masters.values())
        norm = float(torch.nn.utils.clip_grad_norm_(masters, self.settings.optimiser.clip))
        rate = min(1.0, (self.done + 1) / max(1, self.settings.warmup))
        values = {"loss": told["loss"], "gradient": norm}
        # Its size says nothing, as advantages change from batch to batch: only what is no number is refused.
        broken = {name: value for name, value in values.items() if not math.isfinite(value)}
        if why := self.guard.objection(self.done + 1, **broken):
            self._say(f"step {self.done + 1} was skipped: {why}")
        else:
            self.optimiser.step(rate)
        self.weights.publish()
        if self.reference:
            self.reference.follow(self.weights.masters)
        self.done += 1
        lr, seconds = self.settings.optimiser.lr * rate, time.perf_counter() - began
        told |= {"gradient": norm, "lr": lr, "skipped": float(bool(why)), "seconds": seconds}
        return {name: value for name, value in told.items() if math.isfinite(value)}

    def gradient(self, batch: Batch, root: Path) -> dict[str, float]:
        """Add the gradient of a batch to that of the masters; return loss and measures."""
        found = self._read(batch, root)
        length = row_length(found, self.length, fixed=self._gpu)
        rows = self.micro if self._gpu or self.settings.micro else max(1, self.micro * self.length // length)
        parts = list(pack(found, length, rows, fixed=self._gpu))
        sizes = [len(group.episodes) for group in batch.groups]
        apart = self._apart(parts, sum(sizes)) if self.reference else np.zeros(sum(sizes))
        rewards = np.array([episode.reward for group in batch.groups for episode in group.episodes])
        rewards = rewards - self.settings.kl.coefficient * apart
        by_group = np.split(rewards, np.cumsum(sizes)[:-1])
        gains = [gain for group in by_group for gain in advantages(group.tolist())]
        divisor = self.settings.groups * self.settings.group_size * self.settings.normaliser
        total, seen = torch.zeros((), device=self.device), []
        for part in parts:
            loss = self.objective.loss(self.model, part.rows(gains).to(self.device))
            (loss.sum / divisor).backward()
            self.weights.collect()
            total += loss.sum.detach() / divisor
            seen.append((part, loss.now_BT, loss.ratios_BT))
        tokens, places = sum(len(branch.tokens) for branch in found), sum(part.tokens.size for part in parts)
        told = {"loss": float(total), "advantage": float(np.abs(gains).mean()), "tokens": tokens, "padding": 1 - tokens / places,
                "flops": sum(self._flops(len(branch.tokens)) for branch in found), **self._measured(seen)}  # fmt: skip
        return told | ({"kl": float(apart.sum()) / told["sampled"]} if self.reference else {})

    def _read(self, batch: Batch, root: Path) -> list[Branch]:
        files = [root / episode.file for group in batch.groups for episode in group.episodes]
        try:
            lines = [file.read_bytes() for file in files]
        except FileNotFoundError as error:
            raise UserError(
                f"step {batch.step} learns from {error.filename}, which is gone; put it back or begin a new run"
            ) from None
        whether = self.settings.train_summaries
        found = [
            branch
            for episode, (line, file) in enumerate(zip(lines, files, strict=True))
            for branch in branches(from_json(line, str(file)), episode, train_summaries=whether)
        ]
        if not any(branch.learnt.any() for branch in found):
            raise UserError(f"step {batch.step}: its episodes hold no token to learn from; look at their traces")
        return found

    def _apart(self, parts: Sequence[Part], episodes: int) -> Array:
        """Return how far each episode's sampled tokens are from the reference, in nats, added up."""
        assert self.reference is not None
        found = np.zeros(episodes)
        for part in parts:
            nats = self.objective.next.nats(self.reference.model, part.rows().rows.to(self.device))
            for branch, values in part.by_branch(nats):
                policy, reference = branch.logprobs[branch.fresh], -values[branch.fresh]
                found[branch.episode] += divergence(policy, reference, self.settings.kl.estimator).sum()
        return found

    def _flops(self, length: int) -> int:
        extra = forward_flops(self._shape, length) if self.reference else 0
        return self.objective.flops(self._shape, length) + extra

    def _measured(self, seen: Sequence[tuple[Part, torch.Tensor, torch.Tensor]]) -> dict[str, float]:
        """Return what log-probs and ratios tell of policy and sampler."""
        found = [pair for part, now, _ in seen for pair in part.by_branch(now)]
        sampled = np.concatenate([branch.logprobs[branch.fresh] for branch, _ in found])
        change = np.concatenate([now[branch.fresh] for branch, now in found]) - sampled
        ages = self.done - np.concatenate([branch.versions[branch.fresh] for branch, _ in found])
        same = np.concatenate([branch.begun_by(self.done) for branch, _ in found])
        ratios = np.concatenate([own[branch.learnt] for part, _, all_ in seen for branch, own in part.by_branch(all_)])
        beyond = algorithm.outside(torch.from_numpy(ratios), self.settings.correction)
        told = {f"staleness_{age}": float((ages == age).mean()) for age in np.unique(ages).tolist()}
        if (mismatch := np.abs(change[same])).size:  # sampled by these very weights: only rounding differs
            told |= {"mismatch_mean": float(mismatch.mean()), "mismatch_p99": float(np.quantile(mismatch, 0.99))}
        return told | {
            "sampled": len(sampled), "trained": len(ratios), "entropy": -float(sampled.mean()), "masked": float(beyond.float().mean()),
            "ratio_mean": float(ratios.mean()), "ratio_min": float(ratios.min()), "ratio_max": float(ratios.max()),
        }  # fmt: skip

    def published(self) -> dict[str, torch.Tensor]:
        """Return what an engine should hold: the weights as the model computes with them, and what a router is balanced with."""
        return dict(self.model.state_dict())

    def save(self, metrics: dict[str, float]) -> None:
        """Begin to write a checkpoint; `metrics`: of the last step, which may not have been reported yet."""
        tensors = {f"weights/{name}": weight for name, weight in self.weights.masters.items()}
        tensors |= {f"optimiser/{name}": value for name, value in self.optimiser.tensors().items()}
        tensors |= {
            f"reference/{name}": value for name, value in (self.reference.average if self.reference else {}).items()
        }
        self.checkpoints.save(
            self.done, tensors, {"micro": self.micro, "guard": self.guard.state(), "metrics": metrics}
        )

    def resume(self) -> dict[str, float]:
        """Go on from the newest checkpoint, if there is one; return the metrics of its step."""
        if (found := self.checkpoints.latest()) is None:
            return {}
        tensors, state = found
        named = {
            kind: {name.removeprefix(kind): value for name, value in tensors.items() if name.startswith(kind)}
            for kind in ("weights/", "optimiser/", "reference/")
        }
        with torch.no_grad():
            for name, weight in self.weights.masters.items():
                weight.copy_(named["weights/"][name])
        self.weights.publish()
        self.optimiser.load(named["optimiser/"])
        if self.reference:
            self.reference.load(named["reference/"])
        self.guard.load_state(state["guard"])
        self.done = state["step"]
        if not self.settings.micro:
            self.micro = state["micro"]  # with another split, sums would be rounded otherwise
        self._say(f"going on from the checkpoint of step {self.done}")
        metrics: dict[str, float] = state["metrics"]
        return metrics

    def export(self, folder: Path) -> None:
        """Save the model, whole or not at all."""
        work = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(work, ignore_errors=True)
        state = {name: weight.detach().to(self.dtype).cpu() for name, weight in self.weights.masters.items()}
        export(self.model, state, self.dtype, work, trunk=True)
        publish_folder(work, folder)

    def close(self) -> None:
        """Wait for the checkpoint being written."""
        self.checkpoints.close()


def _layers(model: Any) -> torch.nn.ModuleList:
    """Return the layers of the decoder."""
    return next(part for part in model.get_decoder().children() if isinstance(part, torch.nn.ModuleList))


def run_trainer(job: RlJob, trainer: Trainer, exchange: Exchange, store: WeightStore, leave: threading.Event) -> bool:
    """Train until no more batches will come, then export; return whether it came to that, or was told to leave."""
    if job.result.exists():
        return True
    metrics = trainer.resume()
    try:
        if trainer.done:
            _tell(trainer, exchange, store, metrics)
        while not leave.is_set():
            over = exchange.stopped  # asked first: a batch may come between the two questions
            batch = exchange.batch(trainer.done + 1)
            if batch:
                metrics = trainer.step(batch, job.folder)
                if trainer.done % job.settings.checkpoint_every == 0:
                    trainer.save(metrics)
                _tell(trainer, exchange, store, metrics, again=True)
            elif over:
                trainer.export(job.result)
                return True
            else:
                leave.wait(POLL)
        if trainer.done:
            trainer.save(metrics)
        return False
    finally:
        trainer.close()


def _tell(
    trainer: Trainer, exchange: Exchange, store: WeightStore, metrics: dict[str, float], *, again: bool = False
) -> None:
    """Publish and report the last step, unless that was done before; what was trained again is reported again, as it was spent."""
    step = trainer.done
    if step > (store.newest() or 0):
        done = store.publish(trainer.published(), step, step)
        store.prune(KEPT)
        metrics = metrics | {
            "publish_bytes": done.bytes,
            "publish_full_bytes": done.full_bytes,
            "publish_seconds": done.seconds,
        }
    if again or exchange.report(step) is None:
        exchange.put_report(Report(step, step, metrics))


def main() -> None:
    """Do the job of a file."""
    job, leave = load_job(Path(sys.argv[1])), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leave.set())
    trainer = Trainer(job.model, job.settings, job.trainer, say=lambda line: print(line, flush=True))  # noqa: T201 - its log
    store = WeightStore(job.weights, job.settings.anchor_every)
    if not run_trainer(job, trainer, Exchange(job.exchange), store, leave):
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    as_child(main)
