"""kill −9 of any part at any moment: the same command goes on; nothing is trained twice, sampled again, or left behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.errors import storage_error
from etude.inference.weight_sync import WeightStore
from etude.models.load import load_tokeniser
from etude.rl.exchange import Exchange, episode_file
from etude.rl.ledger import Batched, Finished, Ledger, Opened, Trained
from etude.rl.processes import JOB, LEDGER, load_job
from etude.rl.trainer import Trainer
from tests import tiny
from tests.rl import toy
from tests.rl.toy import settings_of
from tests.sandbox.test_launcher import children, left_behind, wait_for_ends

ROOT = Path(__file__).parents[2]
STEPS, GROUPS, SIZE = 6, 2, 2
SETTINGS = {"steps": STEPS, "groups": GROUPS, "group_size": SIZE}
Times = dict[Path, int]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the processes have, so that sums are rounded alike."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Run:
    """The same command, again and again, on one folder."""

    def __init__(self, folder: Path) -> None:
        self.model, self.folder = tiny.save_model(folder / "base"), folder / "run"
        self.checkpoint_every = 2
        self.said, self.times = folder / "said", dict[Path, int]()
        self.host: subprocess.Popen[bytes]

    def start(self) -> None:
        settings = SETTINGS | {"checkpoint_every": self.checkpoint_every}
        words = [f"{name}={value}" for name, value in settings.items()]
        command = [sys.executable, "-m", "tests.rl.toy", str(self.model), str(self.folder), *words]
        with self.said.open("ab") as said:
            alone = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.host = subprocess.Popen(command, cwd=ROOT, env=alone, stdout=said, stderr=said)

    def wait_for(self, kind: type, count: int) -> None:
        """Wait until the ledger tells of so many events of a kind."""
        word = f'"event":"{kind.__name__}"'.encode()
        while not (self.folder / LEDGER).exists() or (self.folder / LEDGER).read_bytes().count(word) < count:
            assert self.host.poll() is None, f"it ended before {count} × {kind.__name__}:\n{self.said.read_text()}"
            time.sleep(0.005)

    def part(self, module: str) -> int:
        """Return the process of a part, as soon as it is there."""
        while True:
            assert self.host.poll() is None, self.said.read_text()
            for pid in children(self.host.pid):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") if Path(f"/proc/{pid}").exists() else []
                if f"etude.rl.{module}".encode() in words and b"-I" not in words:  # not before it is bound to its host
                    return pid
            time.sleep(0.005)

    def kill(self, pid: int) -> None:
        """Kill a process, and see that all it started goes with it."""
        below = children(pid)
        os.kill(pid, signal.SIGKILL)
        if pid == self.host.pid:
            self.host.wait()
        wait_for_ends([pid, *below])
        assert [name for each in below for name in left_behind(each)] == []

    def look(self) -> None:
        """Remember when the traces of finished episodes were written; those seen before must not have been touched."""
        done = [self.folder / episode_file(event.group, event.episode) for event in self.events(Finished)]
        now = {path: path.stat().st_mtime_ns for path in done}
        assert self.times.items() <= now.items()
        self.times = now

    def events(self, kind: type) -> list:  # type: ignore[type-arg]
        return [event for event in Ledger(self.folder / LEDGER).read()[0] if isinstance(event, kind)]

    def finish(self) -> None:
        """Wait for the end, and see that all is as if nobody had been killed."""
        below = children(self.host.pid)
        assert self.host.wait(timeout=600) == 0, self.said.read_text()
        wait_for_ends(below)
        self.look()
        job = load_job(self.folder / JOB)
        assert not job.socket.parent.exists()
        finished = [(event.group, event.episode) for event in self.events(Finished)]
        assert len(finished) == len(set(finished))
        assert [event.step for event in self.events(Trained)] == list(range(1, STEPS + 1))
        task_of = {event.group: event.task for event in self.events(Opened)}
        trained = [task_of[group] for event in self.events(Batched) for group in event.groups]
        assert len(trained) == len(set(trained)) == STEPS * GROUPS
        assert self.trained_alone(job.folder.parent / "alone") == weights(self.folder / "model")

    def trained_alone(self, folder: Path) -> bytes:
        """Return the weights that the same batches make of the same start, each trained on once and in order."""
        trainer, exchange = (
            Trainer(self.model, settings_of(**SETTINGS), folder / "trainer"),
            Exchange(self.folder / "exchange"),
        )
        for step in range(1, STEPS + 1):
            batch = exchange.batch(step)
            assert batch is not None
            next(trainer.steps([batch], self.folder))
        trainer.export(folder / "model")
        trainer.session.close()
        return weights(folder / "model")


def test_a_full_disk_in_the_weight_store_ends_a_run_that_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sampled and trained by then stays; nothing is sampled or trained twice, and the weights are those without the fault."""
    run, publish, full = Run(tmp_path), WeightStore.publish, [3]

    def write(store: WeightStore, weights: Any, version: int, step: int, world: Any = None) -> Any:
        if version in full:
            full.remove(version)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(store.folder))
        return publish(store, weights, version, step, world)

    def play() -> None:
        toy.play(
            run.model, run.folder, settings_of(**SETTINGS), toy.Toy(load_tokeniser(run.model), tasks=40, tokens=24)
        )

    monkeypatch.setattr(WeightStore, "publish", write)
    with pytest.raises(OSError) as raised:
        play()
    said = str(storage_error(raised.value))
    assert str(run.folder / "weights") in said
    assert "no space left" in said
    run.look()
    assert [event.step for event in run.events(Trained)] == [1, 2]
    play()
    run.look()
    assert [event.step for event in run.events(Trained)] == list(range(1, STEPS + 1))
    finished = [(event.group, event.episode) for event in run.events(Finished)]
    assert len(finished) == len(set(finished))
    assert run.trained_alone(tmp_path / "alone") == weights(run.folder / "model")


def weights(model: Path) -> bytes:
    return (model / "model.safetensors").read_bytes()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    if made.host.poll() is None:
        made.host.kill()
        made.host.wait()


def test_a_killed_orchestrator_goes_on_with_the_same_command(run: Run) -> None:
    for kind, count in ((Finished, 2 * SIZE), (Batched, 2), (Trained, 4)):
        run.start()
        run.wait_for(kind, count)
        run.kill(run.host.pid)
        run.look()
    run.start()
    run.finish()


def test_a_killed_engine_or_trainer_is_replaced_and_the_run_does_not_stop(run: Run) -> None:
    run.checkpoint_every = STEPS  # a trainer killed before the end has saved nothing, however fast it is
    run.start()
    for kind, count, module in (
        (Finished, 1, "engine"),
        (Batched, 1, "trainer"),
        (Trained, 1, "engine"),  # later, all rollouts may be there already, and no engine
        (Trained, 3, "trainer"),
    ):
        run.wait_for(kind, count)
        run.kill(run.part(module))
        run.look()
    run.finish()
    said = run.said.read_text()
    assert said.count("the engine was ended by SIGKILL; starting it again") == 2
    assert said.count("the trainer was ended by SIGKILL; starting it again") == 2
    assert Exchange(run.folder / "exchange").spent_again(), "the lost steps were done again"
