"""One training on a corpus from start to end: resumed where it was, measured before, on the way and after, saved as it goes.

A row a step goes into the metrics (`train/…`), one a measurement (`eval/…`). After a kill, steps since the last checkpoint are done
again. Their rows are there already; what they cost a second time is written as `again/…`, because it was spent.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from etude.errors import Interrupted, UserError
from etude.progress import Reporter, Task
from etude.training.batch import Batches, CorpusRows
from etude.training.context_parallel import context_of
from etude.training.loop import Guard, Step
from etude.training.measure import Bits, load_bits, save_bits
from etude.training.memory import gigabytes
from etude.training.optimiser import factor
from etude.training.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from etude.training.distributed import World
    from etude.training.settings import TrainSettings
    from etude.work import Work

    Evaluate = Callable[[Session], dict[str, Bits]]

CHECKPOINTS = "checkpoints"
BEFORE = "before.npz"


def corpus_session(
    model: Any, settings: TrainSettings, batches: Batches, length: int, world: World, folder: Path,
    say: Callable[[str], object] = lambda _: None, **more: Any,
) -> Session:  # fmt: skip
    """Return a session that trains on the rows of a corpus, cut to `length` tokens."""
    steps, context = settings.steps(length), context_of(world, settings.context_ranks, length)
    apart = world.size // context.size  # ranks with other rows
    source = CorpusRows(batches, length, apart, context.part if context.size > 1 else None)
    return Session(
        model, settings, source, length, settings.batch // apart, world, folder / CHECKPOINTS,
        lambda step: factor(settings.schedule, step, steps), Guard(settings.guard), say, total=steps, context=context, **more,
    )  # fmt: skip


@dataclass
class TrainingRun:
    """A session on a corpus, and how it is measured. `work` is rank 0's; the other ranks have none and write nothing."""

    session: Session
    settings: TrainSettings
    batches: Batches
    evaluate: Evaluate
    work: Work | None
    folder: Path
    also: Callable[[Session], dict[str, Any]] = lambda _: {}  # what else is measured, for the metrics

    def __post_init__(self) -> None:
        self.steps = self.settings.steps(self.session.length)
        self._number = sum(1 for _ in self.work.metrics.rows("etude/session/")) if self.work else 0
        if self.work:
            planned, micro = self.session.plan, self.session.micro
            sizes = {"needed_bytes": planned.needed(micro), "available_bytes": planned.available}
            chosen = {"masters": planned.way.masters, "states": planned.way.states}
            self.work.metrics.put(f"plan/{self._number:04d}", micro=micro, **chosen, **sizes)

    def run(self) -> dict[str, dict[str, Bits]]:
        """Train to the end; return the measurements before and after."""
        session = self.session
        try:
            if session.resume()[0]:
                session.say(f"going on from the checkpoint of step {session.loop.done} of {self.steps}")
            try:
                before = self._before()
                self._train()
            except Interrupted:
                if session.loop.done:
                    session.save()
                raise
        finally:
            session.close()
        session.settle()
        return {"before": before, "after": self._measured(self.steps, "after")}

    def _train(self) -> None:
        session, settings = self.session, self.settings
        wanted = measuring_steps(self.steps, settings.evaluations)
        each = settings.batch * session.length
        reporter = self.work.reporter if self.work else Reporter(quiet=True)
        with contextlib.ExitStack() as stack:
            task: Task = self._or_stop(stack.enter_context, reporter.task("training", self.steps * each, "tokens"))
            self._or_stop(task.skip, session.loop.done * each)
            if session.world.size == 1:  # of several, all must stop after the same step
                session.loop.on_part = lambda share: task.advance(share * each)
            for step in session.steps(self.steps):
                self._write(step)
                self._write_compile(step)
                if step.number in wanted:
                    self._measured(step.number, "during")
                if session.checkpoint_due() or step.number == self.steps:
                    session.save()
                self._or_stop(task.advance, step.number * each - task.done)

    def _or_stop(self, show: Callable[[Any], Any], what: Any) -> Any:
        """Show progress, which is where rank 0 notices a user's wish to stop; then all ranks stop, after the same step."""
        shown, asked = None, None
        try:
            shown = show(what)
        except Interrupted as wish:
            asked = wish.signal_number
        if (signal := self.session.world.tell(asked)) is not None:
            raise Interrupted(signal)
        return shown

    def _write(self, step: Step) -> None:
        if step.skipped:
            self.session.say(f"step {step.number} was skipped: {step.skipped}")
        values = {"loss": step.loss, "gradient": step.norm, **step.metrics}
        finite = {name: value if np.isfinite(value) else None for name, value in values.items()}
        self._put(
            f"train/{step.number:08d}", **finite, lr=self.settings.optimiser.lr * step.factor, tokens=step.tokens,
            learnt=step.learnt, flops=self.session.flops(step), device_seconds=round(step.seconds * self.session.world.size, 4),
            **({"skipped": step.skipped} if step.skipped else {}),
        )  # fmt: skip

    def _write_compile(self, step: Step) -> None:
        """Write what compiling cost, after the first step of a session on compiled layers."""
        key = f"compile/{self._number:04d}"
        if self.work and self.session.compiled and key not in self.work.metrics:
            counters = torch._dynamo.utils.counters  # noqa: SLF001 - torch has no public way to ask
            hits, misses = (counters["inductor"][f"fxgraph_cache_{what}"] for what in ("hit", "miss"))
            breaks = sum(counters["graph_break"].values())
            self.work.metrics.put(
                key, first_step_seconds=round(step.seconds, 2), graph_breaks=breaks, cache_hits=hits, cache_misses=misses
            )  # fmt: skip

    def _put(self, key: str, **values: Any) -> None:
        """Write a row; what was done before and is done again was spent again."""
        if self.work is not None:
            metrics = self.work.metrics
            metrics.put(f"again/{self._number:04d}/{key}" if key in metrics else key, **values)

    def _measured(self, step: int, when: str) -> dict[str, Bits]:
        began = time.perf_counter()
        bits, more = self.evaluate(self.session), self.also(self.session)
        key = f"eval/{step:08d}" if when != "after" else "eval/after"
        seconds = round((time.perf_counter() - began) * self.session.world.size, 4)
        values = {domain: each.per_byte for domain, each in bits.items()}
        if broken := [domain for domain, value in values.items() if not np.isfinite(value)]:
            raise UserError(f"measured after step {step}, {broken[0]!r} has no finite bits per byte: the model's outputs are not"
                            " numbers; take another base, or lower the learning rate")  # fmt: skip
        self._put(key, step=step, bits_per_byte=values, device_seconds=seconds, **more)
        return bits

    def _before(self) -> dict[str, Bits]:
        """Return the measurement of the parent, from disk if this training was begun before."""
        path = self.folder / BEFORE
        if path.exists():
            return load_bits(path)
        assert self.session.loop.done == 0, f"{path} is missing"
        bits = self._measured(0, "before")
        if self.session.world.leads:
            save_bits(path, bits)
        return bits

    def notes(self) -> list[str]:
        """Return what a reader of the report should know."""
        assert self.work is not None
        rows = list(self.work.metrics.rows("train/"))
        tokens, seconds = (sum(row[key] for row in rows) for key in ("tokens", "device_seconds"))
        achieved = self.batches.achieved()
        domains = ", ".join(f"{domain} {share:.1%}" for domain, share in achieved["domains"].items())
        epochs = ", ".join(f"{source} {count:.2f}" for source, count in achieved["epochs"].items())
        again = sum(1 for row in self.work.metrics.rows("again/") if "tokens" in row)
        skipped = sum(1 for row in rows if row.get("skipped"))
        compiled = "; ".join(
            f"compiled: first step {row['first_step_seconds']} s, {row['graph_breaks']} graph breaks, kernels from cache"
            f" {row['cache_hits']} of {row['cache_hits'] + row['cache_misses']}"
            for row in self.work.metrics.rows("compile/")
        )
        session = self.session
        way = f"attention by {session.attention}, {session.micro} rows of {session.length} tokens at once"
        if session.context.size > 1:
            way += f", each shared by {session.context.size} ranks"
        if peaks := [row["peak_bytes"] for row in rows if "peak_bytes" in row]:
            planned = session.plan.needed(session.micro)
            way += f", {gigabytes(max(peaks))} of memory at the peak of a step (planned: {gigabytes(planned)})"
        if (session.masters, session.states) != ("float32", "float32"):
            way += f", masters {session.masters}, AdamW's states {session.states}"
        return [
            f"{len(rows):,} steps, {tokens:,} tokens, {tokens / seconds:,.0f} tokens a device-second; {way}",
            f"seen: {domains}; epochs: {epochs}",
            f"steps skipped: {skipped}; steps done again after an interruption: {again}",
            *([compiled] if compiled else []),
            *([_loads(rows, session.settings.experts.balance)] if session.experts else []),
        ]


def _loads(rows: list[dict[str, Any]], balance: str) -> str:
    """Say how even the load of experts was at the first and at the last step."""
    first, last = rows[0], rows[-1]
    kinds = {"entropy": "entropy {:.4f} → {:.4f} of an even load's", "busiest": "busiest {:.2f} → {:.2f} times the mean",
             "idle": "without a token {:.1%} → {:.1%}"}  # fmt: skip
    told = [text.format(first[f"experts_{kind}"], last[f"experts_{kind}"]) for kind, text in kinds.items()]
    return f"experts (balance: {balance}), first to last step: {', '.join(told)}"


def measuring_steps(steps: int, count: int) -> set[int]:
    """Return the steps after which to measure: half of them evenly spread, half closer and closer to the start.

    What happens at the start, when a model first gets worse (the stability gap), is over in a few steps.
    """
    even = {round(steps * index / (count // 2 + 1)) for index in range(1, count // 2 + 1)}
    early = {round(steps * 2.0**-index) for index in range(2, 2 + count - count // 2)}
    return {step for step in even | early if 0 < step < steps}
