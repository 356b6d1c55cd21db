"""The trainer's process: waits for batches, learns from each, publishes the weights and reports.

    batch → step → checkpoint, every so many → publish version → report

Killed anywhere, it goes on from its last checkpoint. A step that was published before is done again but not published again, so
that the version of weights always is the number of their step.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from etude.inference.weight_sync import WeightStore
from etude.rl.exchange import Exchange, Report
from etude.rl.processes import as_child, load_job
from etude.rl.trainer import Trainer

if TYPE_CHECKING:
    from etude.rl.processes import RlJob

KEPT = 2  # versions that readers may still be on their way to; what they need stays, too
POLL = 0.05  # seconds between looks for a batch


def run_learner(job: RlJob, trainer: Trainer, exchange: Exchange, store: WeightStore, leave: threading.Event) -> bool:
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
    if not run_learner(job, trainer, Exchange(job.exchange), store, leave):
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    as_child(main)
