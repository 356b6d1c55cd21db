"""A run's folder with metrics to send, and readers of what sinks have made of them: each package's own, as an oracle."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

Points = dict[str, list[tuple[int, float]]]  # step and value, by name


class Logged:
    """A run whose stages write rows as ours do."""

    def __init__(self, folder: Path, *stages: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        listed = [{"name": name, "kind": name} for name in stages or ("cpt",)]
        (folder / "run.json").write_text(json.dumps({"name": "mine", "stages": listed, "command": "x"}))

    def write(self, stage: str, *rows: dict[str, Any], torn: str = "") -> None:
        path = self.folder / stage / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(json.dumps({"time": 1e9, **row}) + "\n" for row in rows)
            file.write(torn)

    def begin(self, stage: str = "cpt", at: float = 1e9) -> None:
        self.write(stage, {"key": "etude/session/0001", "time": at, "command": "x"})

    def train(self, first: int, last: int, stage: str = "cpt") -> None:
        self.write(stage, *({"key": f"train/{n:08d}", "time": 1e9 + n, "loss": 1 / n, "flops": 10**18, "gradient": None}
                            for n in range(first, last + 1)))  # fmt: skip


def installed(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed; pip install {package}")


def etude_log(run: Path, sink: str, **environment: str) -> str:
    command = [sys.executable, "-P", "-m", "etude", "log", str(run), "--to", sink]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=run, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def of_tensorboard(folder: Path) -> Points:
    installed("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return {tag: [(each.step, each.value) for each in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def of_mlflow(uri: str, name: str) -> Points:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("mine")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == (name, "FINISHED")
    return {
        key: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, key)]
        for key in run.data.metrics
    }


def of_trackio(folder: Path, name: str) -> Points:
    script = ("import json; from trackio.sqlite_storage import SQLiteStorage as s; (run,) = s.get_runs('mine');"
              "print(json.dumps([run, s.get_logs('mine', run)]))")  # fmt: skip
    environment = {**os.environ, "TRACKIO_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    run, rows = json.loads(done.stdout.splitlines()[-1])
    assert run.startswith(f"{name}-")
    found: Points = {}
    for row in rows:
        for key in row.keys() - {"step", "timestamp"}:
            found.setdefault(key, []).append((row["step"], row[key]))
    return found


def of_wandb(folder: Path) -> tuple[dict[int, dict[str, Any]], set[str], dict[str, str]]:
    """Return the rows of all offline files by W&B's own step, the runs they belong to, and the x-axis of each group."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows: dict[int, dict[str, Any]] = {}
    runs, axes = set(), {}
    for path in sorted(folder.glob("wandb/*/*.wandb")):
        for content in _wandb_records(path.read_bytes()):
            record = Record.FromString(content)
            if record.HasField("history"):
                row = {
                    each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in record.history.item
                }
                assert rows.setdefault(row["_step"], row)["_step"] == record.history.step.num
            elif record.HasField("run"):
                runs.add(record.run.run_id)
            elif record.HasField("metric") and record.metric.glob_name:
                axes[record.metric.glob_name] = record.metric.step_metric
    return rows, runs, axes


def _wandb_records(data: bytes) -> list[bytes]:
    """Return the records of LevelDB's log format: blocks of 32 KiB, pieces with a header of 7 bytes, after W&B's own of 7."""
    records, at, block = [b""], 7, 1 << 15
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        records[-1] += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in {1, 4}:  # whole, or the last piece
            records.append(b"")
    return records[:-1]
