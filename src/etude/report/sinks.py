"""Where the numbers of a run can go besides its own files: TensorBoard, Trackio, Weights & Biases, MLflow.

A sink is a coroutine: begun with a folder, names and what it noted of itself (`own`), it takes points in their order, a batch at a
time, and ends with an empty one. One run folder is one run there, and a stage is a group, since every name begins with it. None of
them is trusted to be there or to answer: `run/log.py` keeps them apart from the run.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Callable, Generator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from etude.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


class Point(NamedTuple):
    """The numbers of one step."""

    number: int  # of points before it in this run
    stage: str
    step: int
    time: float  # seconds since 1970
    values: dict[str, float]  # by STAGE/NAME


Sink = Generator[None, list[Point], None]


def tensorboard(folder: Path, project: str, name: str, own: dict[str, Any]) -> Sink:  # noqa: ARG001 - all are called alike
    """Write one event file in the run's folder, which the package `tensorboard` and its readers show.

    TFRecord frames (length, CRC, content, CRC) around protobuf messages `Event` (wall_time 1, step 2, file_version 3, summary 5).
    Writing them takes these lines; torch's SummaryWriter would take the package, and torch in this process, and cannot go on exactly:
    here the file is cut to the size that was noted, so no step is in it twice.
    """
    with (folder / "events.out.tfevents.0.etude").open("ab") as file:
        if not file.truncate(min(own.get("bytes", 0), file.tell())):
            file.write(_event(0.0, _sized(0x1A, b"brain.Event:2")))
        while points := (yield):
            for point in points:
                summary = b"".join(_sized(0x0A, _value(name, value)) for name, value in point.values.items())
                file.write(_event(point.time, b"\x10" + _varint(point.step) + _sized(0x2A, summary)))
            file.flush()
            own["bytes"] = file.tell()


def _value(name: str, value: float) -> bytes:
    return _sized(0x0A, name.encode("utf-8", "replace")) + b"\x15" + array("f", [value]).tobytes()


def _event(at: float, fields: bytes) -> bytes:
    content = b"\x09" + struct.pack("<d", at) + fields
    length = struct.pack("<Q", len(content))
    return length + _masked_crc(length) + content + _masked_crc(content)


def _sized(tag: int, content: bytes) -> bytes:
    return bytes([tag]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    return bytes([number & 0x7F | 0x80]) + _varint(number >> 7) if number > 0x7F else bytes([number])


_TABLE = list(range(256))
for _ in range(8):
    _TABLE = [each >> 1 ^ 0x82F63B78 * (each & 1) for each in _TABLE]


def _masked_crc(content: bytes) -> bytes:
    """Return CRC-32C (Castagnoli) as TFRecord stores it: rotated by 15 bits, and moved."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def trackio(folder: Path, project: str, name: str, own: dict[str, Any]) -> Sink:  # noqa: ARG001
    """Log to a run of Trackio, which keeps it on this machine unless its own settings say otherwise."""
    import trackio as package

    quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    package.init(project=project, name=f"{name}-{own['id']}", resume="allow", **quiet)
    while points := (yield):
        for point in points:
            package.log(point.values, step=point.step)
    package.finish()


def wandb(folder: Path, project: str, name: str, own: dict[str, Any]) -> Sink:
    """Log to a run of Weights & Biases. Its own step is the point's number: what comes twice it drops by itself."""
    import wandb as package

    quiet = package.Settings(console="off", x_disable_stats=True)
    same: dict[str, Any] = {"id": own["id"], "resume": "allow", "reinit": "finish_previous"}
    run = package.init(project=project, name=name, dir=str(folder), settings=quiet, **same)
    while points := (yield):
        for point in points:
            run.define_metric(f"{point.stage}/*", step_metric=f"{point.stage}/step")
            run.log({**point.values, f"{point.stage}/step": point.step}, step=point.number)
    run.finish()


def mlflow(folder: Path, project: str, name: str, own: dict[str, Any]) -> Sink:  # noqa: ARG001
    """Log to a run of MLflow, in an experiment named after the recipe."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    client = MlflowClient()
    if "run" not in own:
        found = client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else client.create_experiment(project)
        own["run"] = client.create_run(experiment, run_name=name).info.run_id
    client.update_run(own["run"], status="RUNNING")
    while points := (yield):
        for point in points:
            values = {re.sub(r"[^\w\-. /]", "_", name): value for name, value in point.values.items()}
            metrics = [Metric(name, value, round(point.time * 1000), point.step) for name, value in values.items()]
            for begin in range(0, len(metrics), 1000):  # the most it takes
                client.log_batch(own["run"], metrics[begin : begin + 1000])
    client.set_terminated(own["run"])


SINKS: dict[str, Callable[..., Sink]] = {
    "tensorboard": tensorboard,
    "trackio": trackio,
    "wandb": wandb,
    "mlflow": mlflow,
}


def refuse_missing(names: Iterable[str]) -> None:
    """Refuse sinks whose package is not there. TensorBoard's is needed to look, not to write."""
    for name in names:
        if name != "tensorboard" and ((spec := find_spec(name)) is None or spec.origin is None):
            raise UserError(f"log.to: {name!r} needs its package; pip install {name}, or take it out of log.to")
