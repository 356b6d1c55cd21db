"""A release: a model's folder with everything a stranger needs to check it, signed. Made whole, or refused with reasons.

Layout: the model's files as they are; `README.md` (card); `LICENSE` (ours, if given), `LICENSES/` and `NOTICE` (the ancestors');
`lineage.json`; `attestations/` (a signed statement a stage); `bom.cdx.json`, `spdx.json`; `tree.svg`, `tree.png`;
`audit.json` (what the weights showed); `product.toml` (if given); `model.sig` and `model.sig.pub`.
The weights are copied, not linked: what happens to a release must never happen to the run it came from.
"""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from etude.errors import UserError
from etude.files import files_below, publish_folder, sha256_file, write_json, write_text
from etude.lineage import gate
from etude.lineage.bom import bom, spdx
from etude.lineage.card import model_card
from etude.lineage.compute import compute_shares
from etude.lineage.duties import UNKNOWN, evaluate, licence_uses, load_product, notice, released, unmet
from etude.lineage.facts import Release, claims, in_order, read_architecture
from etude.lineage.gate import Refusal
from etude.lineage.licences import LICENCE_NAME, LICENSES, carry, folder_name, held, identify
from etude.lineage.record import LINEAGE_FILE, FileDigest, load_lineage
from etude.lineage.signing import folder_digests, public_pem, seal, sign_folder, statement
from etude.lineage.tree import draw_png, draw_svg, find_model, wrong_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from etude.lineage.audit.sketch import Sketch
    from etude.lineage.compute import Known, Shares
    from etude.lineage.duties import Duty, Product
    from etude.lineage.facts import Measured
    from etude.lineage.record import Lineage, Record
    from etude.progress import Reporter

CARD, NOTICE, LICENSE, PRODUCT, AUDIT = "README.md", "NOTICE", "LICENSE", "product.toml", "audit.json"
BOM, SPDX, ATTESTATIONS = "bom.cdx.json", "spdx.json", "attestations"


class RefusedError(Exception):
    """The gate has reasons against this release."""

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        super().__init__("; ".join(map(str, refusals)))
        self.refusals = refusals


@dataclass(frozen=True)
class Order:
    """What the releasing person decides; everything else comes from records and files."""

    name: str
    key: Path
    product: Path | None = None
    licence: Path | None = None  # our own
    evaluation: Sequence[Measured] = ()
    bases: Sequence[Path] = ()  # folders of claimed bases that are not in the run
    acknowledged: Sequence[str] = ()


def make_release(
    model: Path, out: Path, order: Order, sketches: Sequence[Sketch], known: Mapping[str, Known], reporter: Reporter
) -> None:
    """Make the folder `out`, or raise RefusedError with all reasons against it and leave nothing behind."""
    if out.exists():
        raise UserError(f"{out} exists; a release is never changed: choose another folder, or remove this one")
    if not order.name.strip() or not order.name.isprintable():  # it is a heading, a duty is held against it
        raise UserError(f"{order.name!r} is no name for a model: give printable letters, in one line, with --name")
    public_pem(order.key)  # a key that cannot sign is better known before the work
    product = released(load_product(order.product) if order.product else None, order.name)
    folder = find_model(model)
    lineage = load_lineage(folder)
    digests = folder_digests(folder, reporter)
    _refuse_changes(lineage, digests, reporter)
    bases = gate.base_folders(folder, lineage, order.bases, reporter)
    compared = gate.compare_claims(folder, order.name, bases, sketches, reporter)
    with _work_folder(out) as work:
        _copy_small_files(folder, work, lineage, order)
        audit = next((finding for match, finding in compared if gate.in_tree(match, lineage)), None)
        facts = _facts(folder, work, lineage, order, product, compute_shares(lineage, known), audit)
        documents = _documents(facts, order, [finding for _, finding in compared])
        missing = unmet(facts.duties, product, documents[CARD], documents[NOTICE])
        _refuse(
            [
                *gate.base_refusals(lineage, matches := [match for match, _ in compared]),
                *gate.unchecked_refusals(lineage, matches),
                *gate.unlicensed_refusals(lineage, matches, {each.licence for each in held(folder)}),
                *(Refusal("duty", duty, "`etude licences` lists all duties") for duty in missing),
                *gate.data_refusals(unknown_data(facts.duties), order.acknowledged),
            ]
        )
        _write(facts, documents, folder, work, order, reporter)
        publish_folder(work, out)


def _refuse_changes(lineage: Lineage, digests: Mapping[str, str], reporter: Reporter) -> None:
    """Refuse a model's folder that is not as it was recorded; say what in it will not be released."""
    head, fix = lineage.records[lineage.head], "restore it from a copy, or run the stage again"
    wrong = [Refusal("record", line, fix) for line in wrong_files(released_files(head), digests)]
    _refuse([*wrong, *gate.licence_refusals(lineage, digests)])
    known = {*released_files(head), LINEAGE_FILE, CARD}
    if left := [name for name in digests if name not in known and not is_licence(name)]:
        reporter.say(f"not released, for no record names them: {', '.join(left)}")


def _refuse(refusals: Sequence[Refusal]) -> None:
    if refusals:
        raise RefusedError(refusals)


@contextmanager
def _work_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to work in, of the same name as `out`: the signature names what was signed."""
    beside = out.absolute().parent / f".{out.name}.part"
    shutil.rmtree(beside, ignore_errors=True)  # of a release that was killed
    work = beside / out.name
    work.mkdir(parents=True)
    try:
        yield work
    finally:
        shutil.rmtree(beside)


def released_files(record: Record) -> dict[str, FileDigest]:
    """Return the files of a model that a release holds as they were recorded. Licences move to LICENSES/, the card is new."""
    names = {name.removeprefix("model/"): file for name, file in record.outputs.items() if name.startswith("model/")}
    return record.weights | {name: file for name, file in names.items() if name != CARD and not is_licence(name)}


def is_licence(name: str) -> bool:
    """Say whether a file of a model's folder, given by its path there, is a licence, a notice or a policy."""
    return name.startswith(f"{LICENSES}/") or LICENCE_NAME.fullmatch(name) is not None


def unknown_data(duties: Sequence[Duty]) -> list[str]:
    """Return the data whose licence nobody recorded."""
    asked = [duty for duty in duties if duty.kind == "data" and duty.outcome == "asks"]
    return [duty.ancestor for duty in asked if duty.licence == UNKNOWN]


def _copy_small_files(folder: Path, work: Path, lineage: Lineage, order: Order) -> None:
    """Copy everything but the weights, which follow when nothing speaks against the release."""
    if order.licence and not order.licence.is_file():
        raise UserError(f"{order.licence} is not a file; give the path of your own licence, or leave --licence out")
    record = lineage.records[lineage.head]
    for name in [*(released_files(record).keys() - record.weights.keys()), LINEAGE_FILE]:
        _copy(folder / name, work / name)
    carry(folder, work, next((base.name for base in claims(lineage)), order.name))
    for name, file in ((PRODUCT, order.product), (LICENSE, order.licence or folder / LICENSE)):
        if file and file.is_file():
            _copy(file, work / name)
    write_text(work / "tree.svg", draw_svg(lineage, order.name))
    draw_png(lineage, order.name, work / "tree.png")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _facts(
    folder: Path, work: Path, lineage: Lineage, order: Order, product: Product, shares: Shares, audit: dict[str, Any] | None
) -> Release:  # fmt: skip
    own = work / LICENSE
    digests = [(file, FileDigest(sha256=sha256_file(file), bytes=file.stat().st_size)) for file in files_below(work)]
    small = {file.relative_to(work).as_posix(): digest for file, digest in digests}
    return Release(
        name=order.name,
        version=lineage.head[:12],
        lineage=lineage,
        files=dict(sorted((small | lineage.records[lineage.head].weights).items())),
        architecture=read_architecture(folder),
        product=product,
        licence=identify(own.read_text(encoding="utf-8", errors="replace")) if own.exists() else None,
        duties=evaluate(licence_uses(work), product),
        compute_lines=shares.lines(),
        compute=shares.to_json(),
        evaluation=order.evaluation,
        audit=audit,
    )


def _documents(facts: Release, order: Order, findings: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the texts of a release by path."""
    bases = [{"name": claim.name, "digest": claim.digest} for claim in claims(facts.lineage)]
    audit = {"release": facts.name, "claims": bases, "findings": findings, "acknowledged": sorted(order.acknowledged)}
    return {
        CARD: model_card(facts),
        NOTICE: notice(facts.duties, facts.name),
        BOM: _json(bom(facts)),
        SPDX: spdx(facts),
        AUDIT: _json(audit),
    }


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def attestation_name(number: int, record: Record) -> str:
    """Return what the statement of a stage is called."""
    return f"{ATTESTATIONS}/{number:02d}-{folder_name(record.stage)}.dsse.json"  # a record may come from anybody


def _write(
    facts: Release, documents: Mapping[str, str], folder: Path, work: Path, order: Order, reporter: Reporter
) -> None:
    for name, text in documents.items():
        write_text(work / name, text)
    for number, record in enumerate(in_order(facts.lineage), 1):
        write_json(work / attestation_name(number, record), seal(statement(record, facts.lineage), order.key))
    weights = facts.head.weights
    with reporter.task("copying weights", sum(file.bytes for file in weights.values()), "B") as task:
        for name, file in weights.items():
            _copy(folder / name, work / name)
            task.advance(file.bytes)
    reporter.say("signing")
    sign_folder(work, order.key)
