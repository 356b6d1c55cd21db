"""RL on a real Ray cluster: as one process does it, and whatever is killed, nothing is lost or done twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from etude.models.load import load_tokeniser
from etude.rl.exchange import Exchange, episode_file
from etude.rl.ledger import Batched, Finished, Opened, Trained
from tests.cluster.conftest import ROOT, add_node, started
from tests.rl import test_killed, toy
from tests.rl.test_killed import GROUPS, STEPS

PARTS = {"engine": "etude.rl.engine", "trainer": "etude.rl.trainer", "pool": "ray::Pool"}


class Run(test_killed.Run):
    """The same command, again and again, on one folder, with its parts on a cluster."""

    def __init__(self, folder: Path, address: str, **settings: str) -> None:
        super().__init__(folder)
        self.address = address
        self.settings = {
            "steps": str(STEPS),
            "groups": str(GROUPS),
            "group_size": "2",
            "checkpoint_every": "2",
            **settings,
        }

    def start(self) -> None:
        words = [f"{name}={value}" for name, value in self.settings.items()]
        command = [sys.executable, "-m", "tests.cluster.toy", str(self.model), str(self.folder), self.address, *words]
        with self.said.open("ab") as said:
            self.host = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said)

    def parts(self, part: str) -> list[psutil.Process]:
        """Return the processes of a part of this run, in the order in which they began."""
        own = PARTS[part]
        found = []
        for each in psutil.process_iter(["cmdline", "create_time", "status"]):
            words = " ".join(each.info["cmdline"] or [])
            ours = part == "pool" or str(self.folder) in words
            if own in words and ours and "-I" not in (each.info["cmdline"] or []):
                found.append(each)
        return sorted(found, key=lambda each: each.info["create_time"])

    def wait_for_part(self, part: str, count: int) -> list[psutil.Process]:
        while len(found := self.parts(part)) < count:
            assert self.host.poll() is None, self.said.read_text()
            time.sleep(0.05)
        return found

    def wait_until_said(self, words: str) -> None:
        while words not in self.said.read_text():
            assert self.host.poll() is None, self.said.read_text()
            time.sleep(0.05)

    def finish(self) -> None:
        """Wait for the end, and see that all is as if nobody had been killed."""
        assert self.host.wait(timeout=600) == 0, self.said.read_text()
        self.look()
        finished = [(event.group, event.episode) for event in self.events(Finished)]
        assert len(finished) == len(set(finished))
        assert [event.step for event in self.events(Trained)] == list(range(1, STEPS + 1))
        task_of = {event.group: event.task for event in self.events(Opened)}
        trained = [task_of[group] for event in self.events(Batched) for group in event.groups]
        assert len(trained) == len(set(trained)) == STEPS * GROUPS
        alone = load_file(self.alone(self.folder.parent / "alone"))
        together = load_file(self.folder / "model/model.safetensors")
        for name, tensor in alone.items():  # gradients of two ranks are added in another order
            torch.testing.assert_close(together[name], tensor, atol=2e-6, rtol=1e-4)

    def alone(self, folder: Path) -> Path:
        """Return the weights that one process makes of the same batches."""
        self.trained_alone(folder)
        return folder / "model/model.safetensors"


@pytest.fixture
def ended() -> Iterator[list[Run]]:
    """End what a test has left running."""
    runs: list[Run] = []
    yield runs
    for each in runs:
        if each.host.poll() is None:
            each.host.kill()
            each.host.wait()


def losses(folder: Path) -> list[float]:
    reports = [Exchange(folder / "exchange").report(step) for step in range(1, STEPS + 1)]
    return [each.metrics["loss"] for each in reports if each]


def tokens(folder: Path, run: Run) -> dict[str, Any]:
    """Return what was sampled, by the file of its episode."""
    from etude.agent.trace import from_json

    files = [episode_file(event.group, event.episode) for event in run.events(Finished)]
    traces = {name: from_json((folder / name).read_bytes(), name) for name in files}
    return {name: [(node.tokens, node.versions) for node in trace.nodes] for name, trace in traces.items()}


def test_in_step_it_is_what_one_process_does(cluster: Any, tmp_path: Path, ended: list[Run]) -> None:
    """Two ranks, two engines, two pools; the same seeds give the same batches, and losses but for the order of sums.

    The driver is none of the cluster's processes: it comes over ray://, and says nothing of Ray's own.
    """
    run = Run(tmp_path, cluster.client, mode='"sync"')
    ended.append(run)
    run.start()
    single = tmp_path / "single"
    settings = toy.settings_of(mode="sync", steps=STEPS, groups=GROUPS, group_size=2)
    toy.play(run.model, single, settings, toy.Toy(load_tokeniser(run.model), tasks=40, tokens=24))
    run.finish()
    assert tokens(run.folder, run) == tokens(single, run)
    assert losses(run.folder) == pytest.approx(losses(single), rel=1e-4, abs=1e-6)
    assert len(losses(single)) == STEPS
    batches = [
        [Exchange(each / "exchange").batch(step) for step in range(1, STEPS + 1)] for each in (run.folder, single)
    ]
    assert batches[0] == batches[1]
    assert "Traceback" not in run.said.read_text()


@pytest.mark.slow
def test_killed_or_hung_parts_are_replaced_and_the_run_does_not_stop(tmp_path: Path, ended: list[Run]) -> None:
    """An engine, a rank, a pool, an engine that hangs, a whole node; each while the run is in the middle of it."""
    own = started(nodes=3, cores=3)
    try:
        run = Run(tmp_path, own.address)
        ended.append(run)
        run.start()
        run.wait_for(Finished, 1)
        for engine in run.wait_for_part("engine", 2):  # while there is much to sample: the run cannot end without them
            engine.suspend()
        run.wait_until_said("it did not answer for")
        run.wait_for(Batched, 1)
        run.wait_for_part("engine", 2)[0].kill()
        run.wait_for_part("trainer", 2)[1].kill()
        run.look()
        run.wait_for(Trained, 1)
        run.wait_for_part("pool", 2)[0].kill()
        run.look()
        run.wait_for(Trained, 2)
        own.remove_node(next(iter(own.worker_nodes)), allow_graceful=False)
        add_node(own, num_cpus=3)
        run.look()
        run.finish()
        said = run.said.read_text()
        assert "was ended by SIGKILL" in said
        assert "another pool is started in its place" in said
        assert "go on from the last checkpoint" in said
    finally:
        own.shutdown()


@pytest.mark.slow
def test_a_killed_driver_goes_on_with_the_same_command(cluster: Any, tmp_path: Path, ended: list[Run]) -> None:
    run = Run(tmp_path, cluster.address)
    ended.append(run)
    run.start()
    run.wait_for(Trained, 2)
    below = [each for part in PARTS for each in run.parts(part)]
    assert below
    os.kill(run.host.pid, signal.SIGKILL)
    run.host.wait()
    psutil.wait_procs(below, timeout=60)
    assert not [each for each in below if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    run.look()
    run.start()
    run.finish()
