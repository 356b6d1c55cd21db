"""The trainer's process: episodes in, better weights out. One batch of groups, one update.

    batch → rows with advantages → step → checkpoint, every so many → publish version → report

It is a source of rows for the one training session (`training/session.py`): sharding, LoRA, recomputation, compilation, checkpoints
and the guard come from there. What is here is what only reinforcement learning has: reading episodes and packing their branches,
the reference that the divergence is taken from, the metrics of a step.

A branch is a path of a trace's tree. Several share a row, kept apart by their positions, the tokens exactly those that were sampled.
What comes after its last sampled token is cut off, since nothing is learnt there; a branch without any of its own is left out. Rows
have one length, so that a compiled model meets one shape. Values of a branch of n tokens are [n − 1]: those of its second to its last
token, each at the position that predicts it.

Nothing is random. Killed anywhere, it goes on from its last checkpoint and does the steps since then again from the same batches: on
a CPU with the same result, bit for bit. The version of weights is the number of steps they have had; a step that was published
before is done again but not published again.

    python -m etude.rl.trainer JOB.json        starts `ranks` processes; the first is this one
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from etude.agent.trace import Sample, Trace, from_json, samples
from etude.errors import UserError
from etude.files import publish_folder, write_text
from etude.inference.policy import from_npy
from etude.inference.weight_sync import WeightStore
from etude.lineage.compute import forward_flops
from etude.models.load import saved_dtype
from etude.models.shape import model_shape, read_config
from etude.rl.algorithm import ALGORITHMS, divergence
from etude.rl.division import AT_ONCE, beside, of_run
from etude.rl.exchange import OBSERVED, Batch, Exchange, Report
from etude.rl.processes import BIND, RlJob, as_child, load_job
from etude.rl.state import FLAT
from etude.rl.teachers import Teachers
from etude.training.batch import Rows, StepRows, piece_bounds
from etude.training.distributed import World, join, local
from etude.training.experts import BIASED
from etude.training.loop import Guard, Root, Step
from etude.training.objectives.policy_gradient import PolicyGradient, SampledRows, Taught
from etude.training.session import Session, load_to_train
from etude.training.settings import GuardSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from etude.rl.settings import KlSettings, RlSettings

    Array = npt.NDArray[Any]

KEPT = 2  # versions that readers may still be on their way to
POLL = 0.05  # seconds between looks for a batch
STEP = 64  # lengths that may change from batch to batch are multiples of this


class Trainer:
    """The policy in training, and the source of its session's rows.

    `folder`: for its checkpoints. `apart`: no engine shares its GPU.
    """

    ahead = False  # a batch is waited for, and the reference moves after every step

    def __init__(
        self, model: Path, settings: RlSettings, folder: Path, *, world: World | None = None, say: Callable[[str], object] = print,
        apart: bool = False,
    ) -> None:  # fmt: skip
        self.settings, self.world = settings, world or World()
        self.algorithm = ALGORITHMS[settings.algorithm](settings)
        context = model_shape(model).context
        self.length = settings.length or context
        if self.length > context:
            beyond = f"length = {self.length} is beyond the model's context of {context}"
            raise UserError(f"{beyond}; set length = 0 or extend it")
        device = self.world.device(settings.device).type
        available = of_run(model, settings, self.length, apart=int(apart))[0] if device == "cuda" else 0

        def objective(prepared: Any) -> PolicyGradient:
            bound = settings.teacher.bound
            return PolicyGradient(prepared, self.algorithm.weigh, settings.harness.temperature, bound)

        self.session = Session(
            load_to_train(model, settings, self.world, frozen=settings.lora is not None), settings, self, self.length,
            max(settings.micro, AT_ONCE[device] // self.length, 1), self.world, folder,
            lambda step: min(1.0, (step + 1) / max(1, settings.warmup)),
            # The size of a loss says nothing, as advantages change from batch to batch: only what is no number is refused.
            Guard(GuardSettings(), outliers=False), say, objective,
            saved_dtype(model), settings.lora, keep_start=settings.kl.reference if settings.kl.coefficient else "",
            total=settings.steps, graphs=False, available=available,
            teachers=beside(settings, lambda folder: read_config(Path(folder)))["teachers"],
        )  # fmt: skip
        self.teachers = Teachers(self.session, settings) if settings.teacher.models else None
        experts = self.session.experts
        if settings.router_replay and experts is None:
            raise UserError(
                f"router_replay: the routers of {model.name} are of a kind that is not known here; set it to false"
            )
        if experts and experts.fading and settings.experts.balance in BIASED:
            place = f'{model.name} has no place for the bias of "{settings.experts.balance}", and would be sampled from without it'
            raise UserError(f'experts.balance: {place}; set "aux_loss" or "none"')
        self.reference = (
            Reference(self.session.loop.root, self.session.start, settings.kl, self.session.weights.masters)
            if settings.kl.coefficient
            else None
        )
        self._batches: Iterator[Batch] = iter(())
        self._root = folder
        self._batch: Packed | None = None

    @property
    def objective(self) -> PolicyGradient:
        objective = self.session.loop.objective
        assert isinstance(objective, PolicyGradient)
        return objective

    @property
    def done(self) -> int:
        return self.session.loop.done

    def steps(self, batches: Iterable[Batch], root: Path) -> Iterator[dict[str, float]]:
        """Learn from each batch, whose traces lie under `root`, and yield the metrics of each step."""
        self._batches, self._root = iter(batches), root
        for step in self.session.steps():
            if step.skipped:
                self.session.say(f"step {step.number} was skipped: {step.skipped}")
            if self.reference:
                self.reference.follow(self.session.weights.masters)
            yield {name: value for name, value in self._metrics(step).items() if math.isfinite(value)}

    def take(self, micro: int, device: torch.device) -> StepRows | None:
        """Wait for the next batch and return its rows."""
        began = time.perf_counter()
        batch = next(self._batches, None)
        waited = time.perf_counter() - began
        if batch is None:
            return None
        self._batch = packed = self.packed(batch, micro, fixed=device.type == "cuda")
        sizes = Counter(len(branch.tokens) for branch in packed.branches)
        return StepRows(packed.rows(), sizes, packed.divisor, waited)

    def state(self) -> dict[str, Any]:
        return {}  # which batch is next is told by the number of steps

    def load_state(self, state: Any) -> None: ...

    def packed(self, batch: Batch, micro: int, *, fixed: bool) -> Packed:
        """Read the episodes of a batch, pack their branches into this rank's rows, and weigh them by their advantages."""
        read = self._read(batch)
        sizes = [len(group.episodes) for group in batch.groups]
        tasks = [group.task for group in batch.groups for _ in group.episodes]
        teachers = [self.teachers.of(task) for task in tasks] if self.teachers else []
        parts = self._parts(read, teachers, micro, fixed=fixed)
        apart = self._divergences(parts, sum(sizes)) if self.reference else np.zeros(sum(sizes))
        rewards = np.array([episode.reward for group in batch.groups for episode in group.episodes])
        rewards = rewards - self.settings.kl.coefficient * apart
        by_group = np.split(rewards, np.cumsum(sizes)[:-1])
        outcome = self.settings.teacher.outcome if self.teachers else 1.0
        gains = [outcome * gain for group in by_group for gain in self._advantages(group.tolist())]
        tokens = Counter[int]()
        for branch in read:
            tokens[branch.episode] += int(branch.learnt.sum())
        shares = [self.algorithm.share(tokens[episode]) for episode in range(len(gains))]
        weights = [gain * share for gain, share in zip(gains, shares, strict=True)]
        divisor = self.algorithm.divisor([tokens[episode] for episode in range(len(gains))])
        files = tuple(episode.file for group in batch.groups for episode in group.episodes)
        return Packed(read, parts, gains, weights, shares, divisor, float(apart.sum()), files, teachers)

    def _parts(self, read: Sequence[Branch], teachers: Sequence[str], micro: int, *, fixed: bool) -> list[Part]:
        """Pack branches into this rank's rows; with teachers those of each one apart, scored by it."""
        length = row_length(read, self.length, fixed=fixed)
        rows = micro if fixed or self.settings.micro else max(1, micro * self.length // length)
        packing = partial(pack, length=length, at_once=rows, fixed=fixed, rank=self.world.rank, ranks=self.world.size)
        if not self.teachers:
            return list(packing(read))
        return [
            replace(part, taught=self.teachers.logprobs(name, part.plain_rows().to(self.session.device)).cpu())
            for name in dict.fromkeys(teachers)
            for part in packing([branch for branch in read if teachers[branch.episode] == name])
        ]

    def _advantages(self, rewards: list[float]) -> list[float]:
        """Return the advantages of a group; 0 where rewards are alike, now that the penalty is in them."""
        return self.algorithm.advantages(rewards) if max(rewards) - min(rewards) >= FLAT else [0.0] * len(rewards)

    def _read(self, batch: Batch) -> list[Branch]:
        files = [self._root / episode.file for group in batch.groups for episode in group.episodes]
        try:
            lines = [file.read_bytes() for file in files]
        except FileNotFoundError as error:
            gone = f"step {batch.step} learns from {error.filename}, which is gone"
            raise UserError(f"{gone}; put it back or begin a new run") from None
        traces = [from_json(line, str(file)) for line, file in zip(lines, files, strict=True)]
        chosen = {"train_summaries": self.settings.train_summaries, "routes": bool(self.settings.router_replay)}
        read = [branch for place, trace in enumerate(traces) for branch in branches(trace, place, **chosen)]
        if self.session.experts and any(not self.session.experts.knows(branch.routes) for branch in read):
            raise UserError(f"step {batch.step}: a trace names experts that this model does not have; begin a new run")
        if not any(branch.learnt.any() for branch in read):
            raise UserError(f"step {batch.step}: its rollouts hold no token to train on; look at their traces")
        return read

    def _divergences(self, parts: Sequence[Part], episodes: int) -> Array:
        """Return how far each episode's sampled tokens are from the reference, in nats, added up over all ranks."""
        assert self.reference is not None
        sums = np.zeros(episodes)
        for part in parts:
            nats = self.reference.ask(self.objective.nats, part.plain_rows().to(self.session.device))
            for branch, values in part.by_branch(nats):
                policy, reference = branch.logprobs[branch.fresh], -values[branch.fresh]
                sums[branch.episode] += divergence(policy, reference, self.settings.kl.estimator).sum()
        return np.asarray(np.sum(self.world.gather(sums), axis=0))

    def _metrics(self, step: Step) -> dict[str, float]:
        assert self._batch is not None
        packed, session, shape = self._batch, self.session, self.session.shape
        flops = session.flops(step)
        if self.reference:
            flops += sum(forward_flops(shape, size) * count for size, count in step.pieces.items())
        if self.teachers:
            own = [(packed.teachers[branch.episode], len(branch.tokens)) for branch in packed.branches]
            flops += sum(self.teachers.flops(name, tokens) for name, tokens in own)
        places = self.world.sum(sum(part.tokens.size for part in packed.parts))
        metrics = {
            "loss": step.loss, "advantage": float(np.abs(packed.gains).mean()), "tokens": step.tokens,
            "padding": 1 - step.tokens / places, "flops": flops, **self.observed(packed.parts, step.number - 1), "gradient": step.norm,
            **step.metrics,
            "lr": self.settings.optimiser.lr * step.factor, "skipped": float(bool(step.skipped)), "seconds": step.seconds,
        }  # fmt: skip
        if "peak_bytes" in metrics:
            metrics["needed_bytes"] = session.plan.needed(session.micro)
        return metrics | ({"kl": packed.apart / metrics["sampled"]} if self.reference else {})

    def observed(self, parts: Sequence[Part], version: int) -> dict[str, float]:
        """Return what log-probs and ratios tell of policy and sampler; `version`: of the weights that they are of."""
        observed, self.objective.observed = self.objective.observed, []
        own = [
            (branch, now, ratio, masked, gap)
            for part, each in zip(parts, observed, strict=True)
            for (branch, now), (_, ratio), (_, masked), (_, gap) in zip(
                *(part.by_branch(values) for values in each), strict=True
            )
        ]
        columns = (
            [branch.logprobs[branch.fresh] for branch, *_ in own],
            [now[branch.fresh] for branch, now, *_ in own],
            [version - branch.versions[branch.fresh] for branch, *_ in own],
            [branch.begun_by(version) for branch, *_ in own],
            [ratio[branch.learnt] for branch, _, ratio, *_ in own],
            [masked[branch.learnt] for branch, *_, masked, _ in own],
            [gap[branch.learnt] for branch, *_, gap in own],
        )
        if self.settings.keep_traces:
            # In other modes what is beyond the bounds is learnt from all the same.
            masks = self.settings.correction.mode == "mask"
            self._keep_observed([(branch, now, masked & branch.learnt & masks) for branch, now, _, masked, _ in own])
        ranks = self.world.gather([np.concatenate(column) if column else np.zeros(0) for column in columns])
        sampled, now, ages, same, ratios, masked, gaps = (np.concatenate(column) for column in zip(*ranks, strict=True))
        metrics = {f"staleness_{int(age)}": float((ages == age).mean()) for age in np.unique(ages).tolist()}
        mismatch = np.abs(now - sampled)[same.astype(bool)]  # sampled by these very weights: only rounding differs
        if mismatch.size:
            metrics |= {"mismatch_mean": float(mismatch.mean()), "mismatch_p99": float(np.quantile(mismatch, 0.99))}
        if self.teachers:  # how far the policy is from its teachers: an estimate of KL(policy ‖ teacher), clipped
            clipped = np.abs(gaps) >= self.settings.teacher.bound
            metrics |= {"teacher_gap": -float(gaps.mean()), "teacher_clipped": float(clipped.mean())}
        return metrics | {
            "sampled": len(sampled), "trained": len(ratios), "entropy": -float(sampled.mean()), "masked": float(masked.mean()),
            "ratio_mean": float(ratios.mean()), "ratio_min": float(ratios.min()), "ratio_max": float(ratios.max()),
        }  # fmt: skip

    def _keep_observed(self, own: Sequence[tuple[Branch, Array, Array]]) -> None:
        """Write beside the traces of each group what the trainer computed of their sampled tokens, in the order of `sampled_nodes`."""
        assert self._batch is not None
        places = {branch: place for place, branch in enumerate(self._batch.branches)}
        ranks = self.world.gather(
            [(places[branch], now[branch.fresh], masked[branch.fresh]) for branch, now, masked in own]
        )
        if not self.world.leads:
            return
        groups: dict[Path, dict[str, dict[str, list[Any]]]] = {}
        for place, now, masked in sorted(itertools.chain(*ranks), key=lambda row: row[0]):
            file = self._root / self._batch.files[self._batch.branches[place].episode]
            kept = groups.setdefault(file.parent, {}).setdefault(file.name, {"logprobs": [], "masked": []})
            kept["logprobs"] += [
                each if math.isfinite(each) else None for each in np.round(now.astype(float), 7).tolist()
            ]
            kept["masked"] += masked.astype(int).tolist()
        for folder, episodes in groups.items():
            write_text(folder / OBSERVED, json.dumps(episodes, separators=(",", ":"), allow_nan=False))

    def save(self, metrics: dict[str, float]) -> None:
        """Begin to write a checkpoint; `metrics`: of the last step, which may not have been reported yet."""
        average = self.reference.average if self.reference else {}
        self.session.save({"metrics": metrics}, {f"reference/{name}": value for name, value in average.items()})

    def resume(self) -> dict[str, float]:
        """Go on from the newest checkpoint, if there is one; return the metrics of its step."""
        state, tensors = self.session.resume()
        if not state:
            return {}
        if self.reference:
            self.reference.load({name.removeprefix("reference/"): value for name, value in tensors.items()})
        self.session.say(f"going on from the checkpoint of step {self.done}")
        metrics: dict[str, float] = state["metrics"]
        return metrics

    def export(self, folder: Path) -> None:
        """Save the model, whole or not at all; every rank must take part."""
        work = folder.with_name(f"{folder.name}.part")
        if self.world.leads:
            shutil.rmtree(work, ignore_errors=True)
        self.session.settle()
        self.session.export(work)
        if self.world.leads:
            publish_folder(work, folder)


@dataclass(frozen=True)
class Packed:
    """A batch in this rank's rows; all but `parts` is of all ranks."""

    branches: list[Branch]
    parts: list[Part]
    gains: list[float]  # advantage of each episode
    weights: list[float]  # of each learnt token of an episode
    shares: list[float]  # the same for a gain of 1
    divisor: float  # of the loss
    apart: float  # nats between policy and reference, in all
    files: tuple[str, ...]  # of the episodes' traces
    teachers: list[str]  # of each episode, if there are any

    def rows(self) -> list[SampledRows]:
        return [part.rows(self.weights, self.shares) for part in self.parts]


class Reference:
    """What the policy is held near: the weights it started from, or the exponential average of those it had, kept in float32.

    A model of its own, `apart`; with LoRA the policy itself, whose adapters are exchanged while it is asked: the rest is the same.
    """

    def __init__(
        self, policy: Root, apart: Root | None, settings: KlSettings, weights: Mapping[str, torch.Tensor]
    ) -> None:
        self._policy, self._apart, self._decay = policy, apart, settings.decay
        self.average = _copies(weights, torch.float32) if settings.reference == "average" else {}
        self._adapters = {} if apart else self.average or _copies(weights)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def ask(self, question: Callable[[Any, Any], torch.Tensor], rows: Any) -> torch.Tensor:
        """Return what a function of model and rows returns of the reference."""
        if self._apart:
            return self._apart(question, rows)
        own = {name: self._policy.model.get_parameter(name) for name in self._adapters}
        kept = _copies(own)
        try:
            for name, weight in own.items():
                weight.copy_(self._adapters[name])
            return self._policy(question, rows)
        finally:
            for name, weight in own.items():
                weight.copy_(kept[name])

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def follow(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Move a step towards the policy's weights."""
        for name, kept in self.average.items():
            kept.lerp_(weights[name], 1 - self._decay)
            self._hand_over(name, kept)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def load(self, average: Mapping[str, torch.Tensor]) -> None:
        for name, kept in self.average.items():
            local(kept).copy_(average[name])
            self._hand_over(name, kept)

    def _hand_over(self, name: str, weight: torch.Tensor) -> None:
        if self._apart:
            self._apart.model.get_parameter(name).copy_(weight)


def _copies(weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    return {name: weight.detach().to(dtype or weight.dtype, copy=True) for name, weight in weights.items()}


@dataclass(frozen=True, eq=False)
class Branch:
    """One path of an episode's trace."""

    episode: int  # in the batch
    tokens: Array
    logprobs: Array  # under the distribution it was drawn from; 0 where not sampled
    versions: Array  # −1 where not sampled
    fresh: Array  # sampled, and in no branch before this one
    learnt: Array  # fresh, and not of a summary if those are masked
    routes: Array | None = None  # experts by token and layer, −1 where not known: of all tokens

    def begun_by(self, version: int) -> Array:
        """Return which fresh tokens are of a completion that a version began: those after a swap read a cache of older weights."""
        begins = np.where(np.diff(self.fresh, prepend=False) & self.fresh, np.arange(len(self.fresh)), 0)
        same: Array = self.versions[np.maximum.accumulate(begins)] == version
        return same[self.fresh]


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows, and where each branch of them lies."""

    tokens: Array
    positions: Array
    places: tuple[tuple[Branch, int, int], ...]  # branch, row, column
    taught: torch.Tensor | None = None  # log-probs of their teacher, [B, T]

    def rows(self, weights: Sequence[float], shares: Sequence[float]) -> SampledRows:
        """Return the rows as tensors, each learnt token with the weight of its episode."""
        shape = self.tokens.shape
        learnt_weights, logprobs, learnt = (np.zeros(shape, kind) for kind in (np.float32, np.float32, np.bool_))
        shared = np.zeros(shape, np.float32)
        for branch, row, column in self.places:
            here = slice(column, column + len(branch.learnt))
            logprobs[row, here], learnt[row, here] = branch.logprobs, branch.learnt
            learnt_weights[row, here] = branch.learnt * weights[branch.episode]
            shared[row, here] = branch.learnt * shares[branch.episode]
        arrays = torch.from_numpy(logprobs), torch.from_numpy(learnt)
        taught = None if self.taught is None else Taught(self.taught, torch.from_numpy(shared))
        return SampledRows(self._plain(learnt_weights), *arrays, self._routes(), taught)

    def _routes(self) -> torch.Tensor | None:
        known = [(branch.routes, row, column) for branch, row, column in self.places if branch.routes is not None]
        if not known:
            return None
        routes = np.full((*self.tokens.shape, *known[0][0].shape[1:]), -1, np.int16)
        for own, row, column in known:
            routes[row, column : column + len(own)] = own
        return torch.from_numpy(routes)

    def plain_rows(self) -> Rows:
        """Return the rows as tensors to be scored only."""
        return self._plain(np.zeros(self.tokens.shape, np.float32))

    def _plain(self, weights: Array) -> Rows:
        tokens, bounds = torch.from_numpy(self.tokens), torch.from_numpy(piece_bounds(self.positions))
        return Rows(tokens, tokens.roll(-1, 1), torch.from_numpy(weights), torch.from_numpy(self.positions), bounds)

    def by_branch(self, values: torch.Tensor) -> list[tuple[Branch, Array]]:
        array = values.cpu().numpy()
        return [(branch, array[row, column : column + len(branch.fresh)]) for branch, row, column in self.places]


def branches(trace: Trace, episode: int, *, train_summaries: bool, routes: bool = False) -> list[Branch]:
    """Return the branches of an episode that hold sampled tokens of their own."""
    if not all(node.trainable for node in trace.nodes if node.sampled):
        raise UserError(
            f"trace {trace.id!r} lacks log-probs, without which it cannot be trained on; use a policy that returns them"
        )
    paths = samples(trace)
    masked = paths if train_summaries else samples(_without_summaries(trace))
    made = []
    for sample, other in zip(paths, masked, strict=True):
        if any(sample.trained):
            assert not sample.trained[0], f"trace {trace.id!r} begins with a sampled token, which nothing predicts"
            until = slice(1, len(sample.trained) - sample.trained[::-1].index(True))
            columns = ((sample.logprobs, np.float32), (sample.versions, np.int64), (sample.trained, np.bool_))
            values = [np.array(column[until], kind) for column, kind in (*columns, (other.trained, np.bool_))]
            tokens, routed = (
                np.array(sample.tokens[: until.stop], np.int64),
                _routed(sample, until.stop) if routes else None,
            )
            made.append(replace(Branch(episode, tokens, *values), routes=routed))
    return made


def _routed(sample: Sample, length: int) -> Array | None:
    """Return the experts of the first `length` tokens of a path, [length, layers, experts a token]; −1 where they are not known."""
    known = [(begin, from_npy(text)) for begin, text in sample.routes if begin < length]
    if not known:
        return None
    routes = np.full((length, *known[0][1].shape[1:]), -1, np.int16)
    for begin, own in known:
        routes[begin : begin + len(own)] = own[: length - begin]
    return routes


def _without_summaries(trace: Trace) -> Trace:
    """Return a trace whose summaries were given, not sampled."""
    nodes = [replace(node, sampled=False) if node.kind == "summary" else node for node in trace.nodes]
    return replace(trace, nodes=nodes)


def row_length(branches: Sequence[Branch], limit: int, *, fixed: bool) -> int:
    """Return the length of rows: the limit, or if it need not be fixed what the longest branch takes."""
    longest = max(len(branch.tokens) for branch in branches)
    if longest > limit:
        what = f"a branch of {longest} tokens does not fit a training row of {limit}"
        raise UserError(f"{what}; raise `length`, or lower harness.summary.trigger")
    return limit if fixed else min(limit, -(-longest // STEP) * STEP)


def pack(
    branches: Sequence[Branch], length: int, at_once: int, *, fixed: bool, rank: int = 0, ranks: int = 1
) -> Iterator[Part]:
    """Yield a rank's rows in parts of `at_once`, as many on every rank; if shapes must be fixed, padding fills the last up."""
    rows = _first_fit([len(branch.tokens) for branch in branches], length)
    rows += [[] for _ in range(-len(rows) % ranks)]
    own = rows[rank::ranks]
    for begin in range(0, len(own), at_once):
        some = own[begin : begin + at_once]
        yield _part([[branches[place] for place in row] for row in some], length, at_once if fixed else len(some))


def _part(rows: list[list[Branch]], length: int, count: int) -> Part:
    tokens = np.zeros((count, length), np.int64)
    positions = np.tile(np.arange(length), (count, 1))
    places = []
    for row, inside in enumerate(rows):
        column = 0
        for branch in inside:
            end = column + len(branch.tokens)
            tokens[row, column:end] = branch.tokens
            positions[row, end:] = np.arange(length - end)  # the next branch begins here, or the padding
            places.append((branch, row, column))
            column = end
    return Part(tokens, positions, tuple(places))


def _first_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return rows of places: the longest first, each into the first row that has room."""
    rows: list[list[int]] = []
    left: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        row = next((row for row, free in enumerate(left) if free >= lengths[place]), len(rows))
        if row == len(rows):
            rows.append([])
            left.append(room)
        rows[row].append(place)
        left[row] -= lengths[place]
    return rows


def run_trainer(job: RlJob, trainer: Trainer, exchange: Exchange, store: WeightStore, leave: threading.Event) -> bool:
    """Train until no more batches will come, then export; return whether it came to that, or was told to leave."""
    if job.result.exists():
        return True
    metrics = trainer.resume()
    try:
        if trainer.done:
            _publish(trainer, exchange, store, metrics)
        for metrics in trainer.steps(arriving(exchange, trainer.done + 1, leave, trainer.world), job.folder):
            if trainer.session.checkpoint_due():
                trainer.save(metrics)
            _publish(trainer, exchange, store, metrics, again=True)
        if trainer.world.tell(leave.is_set()):
            if trainer.done:
                trainer.save(metrics)
            return False
        trainer.export(job.result)
        return True
    finally:
        trainer.session.close()


def arriving(exchange: Exchange, step: int, leave: threading.Event, world: World) -> Iterator[Batch]:
    """Yield batches as they come, on every rank, until no more will or this process is told to leave."""
    while batch := world.tell(_wait(exchange, step, leave) if world.leads else None):
        yield batch
        step += 1


def _wait(exchange: Exchange, step: int, leave: threading.Event) -> Batch | None:
    while not leave.is_set():
        over = exchange.stopped  # asked first: a batch may come between the two questions
        if (batch := exchange.batch(step)) or over:
            return batch
        leave.wait(POLL)
    return None


def _publish(
    trainer: Trainer, exchange: Exchange, store: WeightStore, metrics: dict[str, float], *, again: bool = False
) -> None:
    """Publish and report the last step, unless that was done before; what was trained again is reported again, as it was spent."""
    step, leads = trainer.done, trainer.world.leads
    if trainer.world.tell(step > (store.newest() or 0)):
        done = store.publish(trainer.session.computed_state(), step, step, trainer.world)
        if leads:
            store.prune(KEPT)
            metrics = metrics | {
                "publish_bytes": done.bytes, "publish_full_bytes": done.full_bytes, "publish_seconds": done.seconds
            }  # fmt: skip
    if leads and (again or exchange.report(step) is None):
        exchange.put_report(Report(step, step, metrics))


def start_ranks(size: int) -> None:
    """Be the first of `size` ranks and start the others: they end with this process, and this one if one of them fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {**place, "RANK": "0", "LOCAL_RANK": "0"}
    bound = [sys.executable, "-I", "-S", "-c", BIND, str(os.getpid()), sys.executable, "-P", "-m", "etude.rl.trainer"]
    for rank in range(1, size):
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = subprocess.Popen([*bound, sys.argv[1], "joining"], env=environment)
        threading.Thread(target=_watch, args=(process,), daemon=True).start()


def _watch(process: subprocess.Popen[bytes]) -> None:
    """End this process with one that fails: it would wait for it for ever."""
    if status := process.wait():
        os._exit(status if status > 0 else 1)


def main() -> None:
    """Do the job of a file."""
    job, leave = load_job(Path(sys.argv[1])), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leave.set())
    if sys.argv[2:] != ["joining"]:
        start_ranks(job.settings.ranks)
    world = join()
    say = (lambda line: print(line, flush=True)) if world.leads else (lambda _: None)  # noqa: T201 - its log
    trainer = Trainer(job.model, job.settings, job.trainer, world=world, say=say, apart=job.apart)
    store = WeightStore(job.weights, job.settings.anchor_every)
    if not run_trainer(job, trainer, Exchange(job.exchange), store, leave):
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    as_child(main)
