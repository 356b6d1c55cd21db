"""The trainer's process: killed anywhere it goes on, to the same weights bit for bit; told to leave it leaves."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from etude.files import read_json
from etude.inference.weight_sync import Published, WeightStore
from etude.rl.exchange import OBSERVED, Batch, Exchange, Report
from etude.rl.processes import RlJob
from etude.rl.trainer import Trainer, run_trainer
from etude.training.distributed import World
from tests import tiny
from tests.rl import made
from tests.training import sessions

STEPS, EVERY = 5, 2
KL = {"coefficient": 0.01, "reference": "average", "decay": 0.9}


def prepared(base: Path, folder: Path, **more: Any) -> RlJob:
    """Return a job all of whose batches are there."""
    job = RlJob(
        base, folder, folder / "socket", made.settings(checkpoint_every=EVERY, kl=KL, keep_traces=True, **more), seed=0
    )
    exchange = Exchange(job.exchange)
    for step in range(1, STEPS + 1):
        exchange.put_batch(made.batch(folder, step, made.usual(random.Random(step), version=step - 1)))
    return job


class DyingStore(WeightStore):
    """Dies at a version: before or after it is published; with the checkpoint of its step written, or being written."""

    def __init__(self, job: RlJob, trainer: Trainer, when: str, version: int) -> None:
        super().__init__(job.weights, job.settings.anchor_every)
        self.trainer, self.when, self.at = trainer, when, version

    def publish(self, weights: Any, version: int, step: int, world: World | None = None) -> Published:
        if (version, self.when) == (self.at, "checkpoint written, not published"):
            self.trainer.session._checkpoints.wait()
        if version == self.at and "not published" in self.when:
            sessions.kill_oneself()
        done = super().publish(weights, version, step, world)
        if version == self.at and self.when == "published, not reported":
            self.trainer.session._checkpoints.wait()
            sessions.kill_oneself()
        return done


class DyingExchange(Exchange):
    """Dies when a step is reported and the last checkpoint is written, or its batch is read."""

    def __init__(self, job: RlJob, trainer: Trainer, when: str, step: int) -> None:
        super().__init__(job.exchange)
        self.trainer, self.when, self.at = trainer, when, step

    def put_report(self, report: Report) -> None:
        super().put_report(report)
        if (report.step, self.when) == (self.at, "reported"):
            self.trainer.session._checkpoints.wait()
            sessions.kill_oneself()

    def batch(self, step: int) -> Batch | None:
        if (step, self.when) == (self.at, "batch read"):
            sessions.kill_oneself()
        return super().batch(step)


def learn(base: Path, folder: Path, when: str = "never", at: int = 0) -> None:
    """Learn to the end, unless killed."""
    job = prepared(base, folder)
    trainer = Trainer(job.model, job.settings, job.trainer)
    exchange = DyingExchange(job, trainer, when, at)
    exchange.stop()
    assert run_trainer(job, trainer, exchange, DyingStore(job, trainer, when, at), threading.Event())


def metrics(job: RlJob) -> list[dict[str, float]]:
    """Return what was reported of every step, without what differs between runs of the same."""
    found = [Exchange(job.exchange).report(step) for step in range(1, STEPS + 1)]
    assert [(each.step, each.version) for each in found if each] == [(step, step) for step in range(1, STEPS + 1)]
    return [{name: value for name, value in each.metrics.items() if "seconds" not in name and "publish" not in name}
            for each in found if each]  # fmt: skip


@pytest.fixture(scope="module")
def straight(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training left alone."""
    folder = tmp_path_factory.mktemp("straight")
    assert sessions.processes(learn, (tiny_base, folder)) == [0]
    return folder


def same(one: Path, other: Path) -> bool:
    return (one / "model/model.safetensors").read_bytes() == (other / "model/model.safetensors").read_bytes()


DEATHS = [
    ("batch read", 1), ("not published, checkpoint being written", 2), ("checkpoint written, not published", 2),
    ("published, not reported", 4), ("reported", 4), ("batch read", 4), ("published, not reported", 5), ("reported", 5),
]  # fmt: skip


def test_killed_anywhere_it_comes_out_the_same_bit_for_bit(tiny_base: Path, tmp_path: Path, straight: Path) -> None:
    """One training for each death."""
    folders = [(tiny_base, tmp_path / str(number)) for number in range(len(DEATHS))]
    deaths = [(*folder, *death) for folder, death in zip(folders, DEATHS, strict=True)]
    assert sessions.processes(learn, *deaths) == [-signal.SIGKILL] * len(DEATHS)
    assert sessions.processes(learn, *folders) == [0] * len(DEATHS)
    for place in range(len(DEATHS)):
        folder = tmp_path / str(place)
        assert same(folder, straight), DEATHS[place]
        job, other = prepared(tiny_base, folder), prepared(tiny_base, straight)
        assert metrics(job) == metrics(other)
        stores = [WeightStore(each.weights, 20) for each in (job, other)]
        for version in range(1, STEPS + 1):  # no version was published with other weights than it has without a kill
            one, two = (store.pull(version).tensors for store in stores)
            assert one.keys() == two.keys()
            assert all(torch.equal(one[name], two[name]) for name in one)
    # Died after the report of step 5, it had the checkpoint of 4: step 5 was spent again, and is counted so.
    assert [each.step for each in Exchange(tmp_path / "7/exchange").spent_again()] == [5]
    # Died after publishing step 5, it trained it again and reported it once.
    assert Exchange(tmp_path / "6/exchange").spent_again() == []


def test_a_step_that_two_kills_made_it_do_again_was_spent_twice_more(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path)
    for seconds in (1.0, 2.0, 3.0):
        exchange.put_report(Report(7, 7, {"seconds": seconds}))
    assert exchange.report(7) == Report(7, 7, {"seconds": 1.0})
    assert exchange.spent_again() == [Report(7, 7, {"seconds": 2.0}), Report(7, 7, {"seconds": 3.0})]


def test_as_a_process_of_its_own(tiny_base: Path, tmp_path: Path, straight: Path) -> None:
    job = prepared(tiny_base, tmp_path)
    Exchange(job.exchange).stop()
    command = [sys.executable, "-m", "etude.rl.trainer", str(job.save())]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env={"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert same(tmp_path, straight)
    # Once it is exported there is nothing left to do, also if the command was killed before anybody saw that.
    for batch in (job.exchange / "batches").iterdir():
        batch.unlink()
    assert run_trainer(job, Trainer(job.model, job.settings, job.trainer), Exchange(job.exchange), WeightStore(job.weights, 20), threading.Event())  # fmt: skip


def on_two_ranks(job: RlJob) -> None:
    Exchange(job.exchange).stop()
    done = subprocess.run(
        [sys.executable, "-m", "etude.rl.trainer", str(job.save())],
        capture_output=True, text=True, check=False, timeout=300, env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def assert_close(one: RlJob, two: RlJob) -> None:
    for ours, theirs in zip(metrics(two), metrics(one), strict=True):
        assert ours.keys() == theirs.keys()
        same = ours.keys() - {"padding"}  # rows are filled up to a multiple of the ranks
        assert {name: ours[name] for name in same} == pytest.approx(
            {name: theirs[name] for name in same}, rel=1e-4, abs=1e-6
        )


def test_two_ranks_are_one(tiny_base: Path, tmp_path: Path, straight: Path) -> None:
    job = prepared(tiny_base, tmp_path, ranks=2)
    on_two_ranks(job)
    assert_close(prepared(tiny_base, straight), job)
    start, one, two = (
        load_file(each / "model.safetensors") for each in (tiny_base, straight / "model", tmp_path / "model")
    )
    for name, weight in one.items():
        assert (two[name] - weight).norm() < 1e-3 * (weight - start[name]).norm(), name
    stores = [WeightStore(each / "weights", 20).pull(STEPS).tensors for each in (tmp_path, straight)]
    assert stores[0].keys() == stores[1].keys()
    kept = sorted(straight.glob(f"episodes/*/{OBSERVED}"))
    assert len(kept) == 2 * STEPS
    for path in kept:  # whichever rank had which branch of a trace
        ours, theirs = (read_json(root / path.relative_to(straight)) for root in (tmp_path, straight))
        assert ours.keys() == theirs.keys()
        for name, own in ours.items():
            assert own["masked"] == theirs[name]["masked"]
            assert own["logprobs"] == pytest.approx(theirs[name]["logprobs"], abs=1e-3)


def test_two_ranks_with_lora_are_one(tiny_base: Path, tmp_path: Path) -> None:
    one, two = (prepared(tiny_base, tmp_path / str(ranks), ranks=ranks, lora={"rank": 3}) for ranks in (1, 2))
    Exchange(one.exchange).stop()
    trainer = Trainer(one.model, one.settings, one.trainer)
    store = WeightStore(one.weights, 20)
    assert run_trainer(one, trainer, Exchange(one.exchange), store, threading.Event())
    on_two_ranks(two)
    assert_close(one, two)
    published = [WeightStore(job.weights, 20).pull(STEPS).tensors for job in (one, two)]
    assert published[0].keys() == published[1].keys()
    assert all(name.endswith((".lora_A", ".lora_B")) for name in published[0])
    for name, value in published[0].items():
        assert value.any(), name
        assert torch.allclose(published[1][name], value, rtol=1e-3, atol=1e-5), name
    start, alone, together = (load_file(each / "model.safetensors") for each in (tiny_base, one.result, two.result))
    for name, weight in alone.items():
        moved = (weight - start[name]).norm()
        assert (moved > 0) == ("_proj" in name), name
        assert (together[name] - weight).norm() <= 1e-2 * moved, name


def test_two_ranks_with_a_teacher_are_one(tiny_base: Path, tmp_path: Path) -> None:
    teacher = {"models": {"": str(tiny.save_model(tmp_path / "teacher", seed=4))}, "outcome": 0.5}
    one, two = (prepared(tiny_base, tmp_path / str(ranks), ranks=ranks, teacher=teacher) for ranks in (1, 2))
    Exchange(one.exchange).stop()
    trainer, store = Trainer(one.model, one.settings, one.trainer), WeightStore(one.weights, 20)
    assert run_trainer(one, trainer, Exchange(one.exchange), store, threading.Event())
    on_two_ranks(two)
    assert_close(one, two)
    assert all(report["teacher_gap"] for report in metrics(two))


def test_what_fails_on_one_rank_ends_all_of_them(tiny_base: Path, tmp_path: Path) -> None:
    job = prepared(tiny_base, tmp_path, ranks=2, optimiser={"name": "muon", "lr": 1e-3})
    command = [sys.executable, "-m", "etude.rl.trainer", str(job.save())]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env={"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 2
    assert "cannot be used on several ranks" in done.stderr


def test_it_waits_for_batches_and_leaves_when_told(tiny_base: Path, tmp_path: Path) -> None:
    job = RlJob(tiny_base, tmp_path, tmp_path / "socket", made.settings(checkpoint_every=100), seed=0)
    exchange, store, leave = Exchange(job.exchange), WeightStore(job.weights, 20), threading.Event()
    trainer, result = Trainer(job.model, job.settings, job.trainer), []
    thread = threading.Thread(target=lambda: result.append(run_trainer(job, trainer, exchange, store, leave)))
    thread.start()
    exchange.put_batch(made.batch(tmp_path, 1, made.usual(random.Random(1))))
    while exchange.report(1) is None:
        assert thread.is_alive()
    leave.set()
    thread.join()
    assert result == [False]
    assert not job.result.exists()
    said: list[str] = []
    again = Trainer(job.model, job.settings, job.trainer, say=said.append)
    exchange.stop()
    assert run_trainer(job, again, exchange, store, threading.Event())
    assert said == ["going on from the checkpoint of step 1"]
    assert job.result.exists()
    assert exchange.spent_again() == []
