"""Families with compute in them, to add up and to draw."""

from __future__ import annotations

from typing import Any

from etude.lineage.record import Compute, FileDigest, Lineage, Origin, Parent, Record
from tests.lineage.records import full_record

NOTHING = Compute(tokens=0, model_flops=0.0, method="operations", device_seconds=0.0)


def flops(value: float, **more: Any) -> Compute:
    """Return compute of so many FLOPs, of a tenth as many tokens and one second on a GPU."""
    given = {"tokens": int(value / 10), "method": "operations", "device": "gpu", "device_seconds": 3600.0} | more
    return Compute(model_flops=value, **given)


def edge(parent: Record, role: Any = "weights") -> Parent:
    """Return the edge to a parent that has a record."""
    return Parent(name=parent.stage, role=role, record=parent.id, model_digest=parent.model_digest)


def stranger(name: str, role: Any = "weights") -> Parent:
    """Return the edge to a parent that has none."""
    return Parent(name=name, role=role, record=None, model_digest=name[0] * 64)


def stage(name: str, compute: Compute, *parents: Record | Parent, **more: Any) -> Record:
    """Return the record of a stage; records among the parents are parents by weights."""
    edges = [edge(parent) if isinstance(parent, Record) else parent for parent in parents]
    given = {
        "kind": name, "origin": None, "data": [], "weights": {"model.safetensors": FileDigest(sha256=name.ljust(64, "-"), bytes=1)},
    } | more  # fmt: skip
    return full_record(stage=name, compute=compute, parents=edges, **given)


def base(name: str, pretraining: Compute | None, *parents: Record, continues: str | None = None, **more: Any) -> Record:
    """Return the record of a base."""
    origin = Origin(
        name=name, source=f"hub owner/{name}", revision=None, received={}, conversion=None,
        continues=continues, pretraining=pretraining, sources={},
    )  # fmt: skip
    weights = {"model.safetensors": FileDigest(sha256=name.ljust(64, "-"), bytes=1)}
    return stage("base", NOTHING, *parents, **{"origin": origin, "weights": weights} | more)


def family(head: Record, *others: Record) -> Lineage:
    """Return the lineage of a record, with its ancestors'."""
    return Lineage(head=head.id, records={record.id: record for record in (head, *others)})


def merged() -> tuple[Lineage, dict[str, Record]]:
    """Return a merge of two models of one base and of a stranger; the base judged one of them, and a stranger taught it."""
    root = base("kimi-k2.5", flops(3e24, method="imputed", device=None, device_seconds=None), continues="Kimi-K2-Base")
    cpt = stage("cpt", flops(2e20), root)
    rl = stage(
        "rl",
        flops(5e20, sampling_flops=4e20, sandbox_seconds=7200.0),
        cpt,
        edge(root, "judge"),
        stranger("teacher-9b", "teacher"),
    )
    sft = stage("sft", flops(1e20), root, licences=[])
    merge = stage("merge", NOTHING, rl, sft, stranger("somebody-7b"))
    last = stage("mtp", flops(1e19), merge)
    found = {"base": root, "cpt": cpt, "rl": rl, "sft": sft, "merge": merge, "mtp": last}
    return family(*reversed(found.values())), found
