"""The family tree of a model, from the records it carries.

A model is found by any of: its folder, its stage's folder, or a run's folder (then its last stage with a model).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.errors import UserError
from etude.files import read_json, sha256_file
from etude.lineage.record import LINEAGE_FILE, Lineage, Record

if TYPE_CHECKING:
    from pathlib import Path

    from etude.lineage.record import Compute, Origin
    from etude.progress import Reporter


def find_model(path: Path) -> Path:
    """Return the model folder that `path` means."""
    if not path.exists():
        raise UserError(f"{path} does not exist; give a model's folder, such as runs/NAME/STAGE/model")
    stages = _stages_of_run(path)
    for candidate in (path, path / "model", *(path / stage / "model" for stage in reversed(stages))):
        if (candidate / LINEAGE_FILE).is_file():
            return candidate
    if stages:
        raise UserError(f"{path} is a run that has made no model yet, or only reports; give the folder of a model")
    raise UserError(f"{path} holds no {LINEAGE_FILE}: it was not written by Etude, so its lineage is unknown")


def _stages_of_run(path: Path) -> list[str]:
    """Return the stages a run's folder lists, in order; none if it is not a run's folder."""
    try:
        return [str(stage["name"]) for stage in read_json(path / "run.json")["stages"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def changed_weights(model_folder: Path, record: Record, reporter: Reporter) -> list[str]:
    """Hash the weights again and return what does not agree with the record, a line each."""
    wrong = [f"{name} is missing" for name in record.weights if not (model_folder / name).is_file()]
    present = {name: digest for name, digest in record.weights.items() if (model_folder / name).is_file()}
    with reporter.task("checking weights", sum(digest.bytes for digest in present.values()), "B") as task:
        for name, digest in present.items():
            if sha256_file(model_folder / name, task.advance) != digest.sha256:
                wrong.append(f"{name} is not the file that was recorded")
    unknown = {path.name for path in model_folder.glob("*.safetensors")} - set(record.weights)
    return wrong + [f"{name} is in no record" for name in sorted(unknown)]


def render(lineage: Lineage, title: str) -> list[str]:
    """Draw the tree as lines, the model first, its ancestors below it."""
    return [title, *_branch(lineage, lineage.head, "weights", "")]


def _branch(lineage: Lineage, record_id: str, role: str, indent: str) -> list[str]:
    """Return the lines of one record and of its parents, which stand below and further in."""
    record = lineage.records[record_id]
    first, *rest = describe(record, role)
    inside = f"{indent}   "
    lines = [f"{indent}└─ {first}", *(f"{inside}{line}" for line in rest)]
    for parent in record.parents:
        if parent.record in lineage.records:
            lines += _branch(lineage, parent.record, parent.role, inside)
        else:
            told = f"weights {parent.model_digest[:12]}, it carries no record"
            lines.append(f"{inside}└─ {parent.name} ({parent.role}): {told}")
    return lines


def describe(record: Record, role: str) -> list[str]:
    """Return what a person wants to know of a record, a line each."""
    revision = record.code.revision
    changes = " with uncommitted changes" if record.code.dirty else ""
    kept = f"revision {revision[:12]}{changes}" if revision else "revision not recorded"
    lines = [
        f"{record.stage} ({record.kind}, {role})  record {record.id[:12]}, {record.finished}",
        f"weights {record.model_digest[:12]} in {len(record.weights)} file(s), "
        f"{sum(file.bytes for file in record.weights.values()) / 1e6:,.1f} MB",
        f"made by Etude {record.code.etude} ({kept}), recipe {record.recipe.hash[:12]}",
        f"compute here: {describe_compute(record.compute)}",
    ]
    lines += _describe_origin(record.origin, told=bool(record.parents)) if record.origin else []
    lines += [f"data: {use.name}, {use.files} files, {use.bytes:,} bytes, {use.digest[:12]}" for use in record.data]
    for carried in record.licences:
        known = carried.licence or "unknown text, read it"
        lines.append(f"licence: {known} ({carried.file}, from {carried.inherited_from})")
    if not record.licences:
        lines.append("licence: no licence file came with it; find out before you share it")
    return lines


def describe_compute(compute: Compute) -> str:
    """Return compute in one line."""
    if not compute.tokens and not compute.model_flops:
        return "none (no tokens processed)"
    where = f" in {compute.device_seconds:,.0f} s on {compute.device}" if compute.device_seconds is not None else ""
    return f"{compute.tokens:,} tokens, {compute.model_flops:.2e} FLOP ({compute.method}){where}"


def _describe_origin(origin: Origin, *, told: bool) -> list[str]:
    revision = f" at {origin.revision}" if origin.revision else ""
    on_top = f", on top of {origin.continues}" if origin.continues else ""
    unknown = "told below" if told else "not known"
    before = describe_compute(origin.pretraining) + on_top if origin.pretraining else unknown
    conversion = [f"conversion: {origin.conversion}"] if origin.conversion else []
    return [f"origin: {origin.name}, {origin.source}{revision}", *conversion, f"compute before us: {before}"]
