"""A release: a model's folder with everything a stranger needs to check it, signed. Made whole, or refused with reasons.

Layout: the model's files as they are; `README.md` (card); `LICENSE` (ours, if given), `LICENSES/` and `NOTICE` (the ancestors');
`lineage.json`; `attestations/` (a signed statement a stage); `bom.cdx.json`, `spdx.json`; `tree.svg`, `tree.png`;
`audit.json` (what the weights showed); `product.toml` (if given); `model.sig` and `model.sig.pub`.
The weights are copied, not linked: what happens to a release must never happen to the run it came from.

There are five reasons to refuse one, which `etude release` looks for before it writes anything, and `etude verify` in a finished
folder: the weights do not come from the base that is claimed, or come from another known one; a licence file is missing or altered; a
duty of a licence is not met; data of unknown or proprietary licence went in and nobody said so; a record or a digest does not
match. Each says how to put it right. A claimed base is compared by its own weights where they are at hand (given, or beside the
model in its run), and by its sketch in the library.
"""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import etude
from etude.errors import UserError
from etude.files import files_below, publish_folder, read_json, sha256_file, write_json, write_text
from etude.lineage.audit.examine import Finding, examine, examine_library, open_model
from etude.lineage.audit.sketch import Sketch, digest_weights
from etude.lineage.bom import bom, spdx
from etude.lineage.card import model_card
from etude.lineage.compute import Known, compute_shares
from etude.lineage.duties import UNKNOWN, Duty, Product, evaluate, licence_uses, load_product, notice, released, unmet
from etude.lineage.facts import Architecture, Claim, Measured, Release, carried, claims, in_order, read_architecture
from etude.lineage.licences import LICENCE_NAME, LICENSES, carry, folder_name, held, identify, is_proprietary
from etude.lineage.record import LINEAGE_FILE, FileDigest, Lineage, Record, load_lineage
from etude.lineage.signing import folder_digests, public_pem, seal, sign_folder, statement
from etude.lineage.tree import changed_corpora, draw_png, draw_svg, find_model, wrong_files

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from etude.progress import Reporter

CARD, NOTICE, LICENSE, PRODUCT, AUDIT = "README.md", "NOTICE", "LICENSE", "product.toml", "audit.json"
BOM, SPDX, ATTESTATIONS = "bom.cdx.json", "spdx.json", "attestations"
UNKNOWN_DATA, PROPRIETARY_DATA = "unknown-data", "proprietary"  # what may be acknowledged
MARGIN = 1e-5  # of closeness, above what the rounding of two sketches differs by
# Far from both, a model is nearer to its base or to the base's sibling by chance: by up to 0.07 of its distance from the base
# (models 64 wide, drifted to a cosine of 0.45, siblings 0.001 to 0.1 apart).
CHANCE = 0.1


@dataclass(frozen=True)
class Refusal:
    """One reason against a release."""

    reason: Literal["base", "licence", "duty", "data", "record"]
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}; {self.fix}"


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
    _refuse_changes(folder, lineage, digests, reporter)
    bases = base_folders(folder, lineage, order.bases, reporter)
    compared = compare_claims(folder, order.name, bases, sketches, reporter)
    with _work_folder(out) as work:
        _copy_small_files(folder, work, lineage, order)
        measured = (f"against {match.name}: {match.sentence}" for match, _ in compared if in_tree(match, lineage))
        facts = _facts(work, lineage, order.name, product, read_architecture(folder))
        shares = compute_shares(lineage, known)
        facts = replace(facts, compute_lines=shares.lines(), compute=shares.to_json(), evaluation=order.evaluation,
                        audited=next(measured, facts.audited))  # fmt: skip
        documents = _documents(facts, order, [finding for _, finding in compared])
        missing = unmet(facts.duties, product, documents[CARD], documents[NOTICE])
        _refuse(
            [
                *base_refusals(lineage, matches := [match for match, _ in compared]),
                *unchecked_refusals(lineage, matches),
                *unlicensed_refusals(lineage, matches, {each.licence for each in held(folder)}),
                *(Refusal("duty", duty, "`etude licences` lists all duties") for duty in missing),
                *data_refusals(facts.duties, order.acknowledged),
            ]
        )
        _write(facts, documents, folder, work, order, reporter)
        publish_folder(work, out)


def _refuse_changes(folder: Path, lineage: Lineage, digests: Mapping[str, str], reporter: Reporter) -> None:
    """Refuse a model's folder that is not as it was recorded; say what in it will not be released."""
    head, fix = lineage.records[lineage.head], "restore it from a copy, or run the stage again"
    changed = [*wrong_files(released_files(head), digests), *changed_corpora(folder, lineage)]
    wrong = [Refusal("record", line, fix) for line in changed]
    _refuse([*wrong, *licence_refusals(lineage, digests)])
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
    made = [folder for folder in beside.parents if not folder.exists()]
    work.mkdir(parents=True)
    try:
        yield work
    finally:
        shutil.rmtree(beside)
        for folder in made:
            with suppress(OSError):  # not empty: it was made
                folder.rmdir()


def released_files(record: Record) -> dict[str, FileDigest]:
    """Return the files of a model that a release holds as they were recorded. Licences move to LICENSES/, the card is new."""
    names = {name.removeprefix("model/"): file for name, file in record.outputs.items() if name.startswith("model/")}
    return record.weights | {name: file for name, file in names.items() if name != CARD and not is_licence(name)}


def is_licence(name: str) -> bool:
    """Say whether a file of a model's folder, given by its path there, is a licence, a notice or a policy."""
    return name.startswith(f"{LICENSES}/") or LICENCE_NAME.fullmatch(name) is not None


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


def _facts(work: Path, lineage: Lineage, name: str, product: Product, architecture: Architecture) -> Release:
    """Return what the records and the small files of a release say."""
    own = work / LICENSE
    digests = [(file, FileDigest(sha256=sha256_file(file), bytes=file.stat().st_size)) for file in files_below(work)]
    small = {file.relative_to(work).as_posix(): digest for file, digest in digests}
    return Release(
        name=name,
        version=lineage.head[:12],
        lineage=lineage,
        files=dict(sorted((small | lineage.records[lineage.head].weights).items())),
        architecture=architecture,
        product=product,
        licence=identify(own.read_text(encoding="utf-8", errors="replace")) if own.exists() else None,
        duties=evaluate(licence_uses(work), product),
    )


def as_released(folder: Path, lineage: Lineage) -> Release:
    """Return the facts of a finished release, as its files have them; scores and shares of compute are only in its documents."""
    audit = read_json(folder / AUDIT)
    product = released(load_product(folder / PRODUCT) if (folder / PRODUCT).exists() else None, str(audit["release"]))
    facts = _facts(folder, lineage, product.model_name or "", product, read_architecture(folder))
    return replace(facts, audited=str(audit["measured"]))


def _documents(facts: Release, order: Order, findings: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the texts of a release by path."""
    bases = [{"name": claim.name, "digest": claim.digest} for claim in claims(facts.lineage)]
    audit = {"release": facts.name, "claims": bases, "measured": facts.audited, "findings": findings,
             "acknowledged": sorted(order.acknowledged), "etude": etude.__version__}  # fmt: skip
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


@dataclass(frozen=True)
class Match:
    """How the weights compare with those of one known model."""

    name: str
    digest: str | None  # of the known model's weights
    against: Literal["weights", "sketch"]
    derived: bool  # the audit says that both grew from one initialisation
    closeness: float  # from 0 to 1, orders models that all match
    sentence: str  # the verdict, as the audit words it
    licence: str | None = None  # of the known model, as the library has it

    def is_of(self, claim: Claim) -> bool:
        """Say whether this is about a claimed base."""
        return self.name == claim.name or self.digest == claim.digest


def in_tree(match: Match, lineage: Lineage) -> bool:
    """Say whether a known model is an ancestor: by its name, by its weights, or as what a base continues."""
    records = in_order(lineage, "weights")
    names = {word for record in records if record.origin for word in (record.origin.name, record.origin.continues)}
    digests = {record.model_digest for record in records}
    return match.name in names or match.digest in digests or any(map(match.is_of, claims(lineage)))


def unchecked(lineage: Lineage, matches: Sequence[Match]) -> list[str]:
    """Return the claimed bases that the weights were not compared with."""
    return [claim.name for claim in claims(lineage) if not any(match.is_of(claim) for match in matches)]


def unchecked_refusals(lineage: Lineage, matches: Sequence[Match]) -> list[Refusal]:
    """Refuse a claim that could not be checked."""
    what = "the claimed base {} could not be compared with these weights"
    fix = "give its folder with --base, or add it with `etude library add FOLDER {}`"
    return [Refusal("base", what.format(name), fix.format(name)) for name in unchecked(lineage, matches)]


def base_refusals(lineage: Lineage, matches: Sequence[Match]) -> list[Refusal]:
    """Refuse a claimed base that is not found in the weights, and another known one that fits better.

    A relative of the base (its instruction-tuned sibling, what it continues) matches, too; only a clearly better match speaks against
    the tree. Sketches are ranked among themselves: whole weights always match a little better than a sketch of them.
    """
    about = {claim.name: [match for match in matches if match.is_of(claim)] for claim in claims(lineage)}
    fix = "release what was made from it, or name the true base in the recipe"
    refusals = [
        Refusal("base", f"the claimed base {name} was not found in these weights: {compared[0].sentence}", fix)
        for name, compared in about.items()
        if compared and not any(match.derived for match in compared)
    ]
    derived = [match for match in matches if match.derived]
    known = [match for match in derived if in_tree(match, lineage)]
    ranked = [match for match in known if match.against == "sketch"] or known
    best = max((match.closeness for match in ranked), default=-1.0)
    clearly = best + MARGIN + CHANCE * (1 - best)
    what = "is not in the tree, but these weights match it better than any base that is"
    return refusals + [
        Refusal("base", f"{match.name} {what}: {match.sentence}", "name it as the base, and meet its licence")
        for match in derived
        if match not in known and match.closeness > clearly
    ]


def licence_refusals(lineage: Lineage, present: Mapping[str, str]) -> list[Refusal]:
    """Refuse a licence file of any ancestor that is not among `present` (digests by path) with the bytes it came with."""
    fix = "put it back as it was received: it must travel with the weights"
    return [
        Refusal("licence", f"{each.file} ({each.licence or 'unknown text'}, from {each.inherited_from}) {how}", fix)
        for each in carried(lineage)
        if each.sha256 not in present.values()
        for how in ["was altered" if each.file in present else "is missing"]
    ]


def unlicensed_refusals(lineage: Lineage, matches: Iterable[Match], held: Collection[str | None]) -> list[Refusal]:
    """Refuse a base whose licence the library knows while no text of it travels along: records can be emptied, weights cannot."""
    fix = "put the base's licence file back as it was received"
    return [
        Refusal("licence", f"{match.name} is under {match.licence}, and no text of that licence is here", fix)
        for match in matches
        if match.derived and match.licence and match.licence not in held and in_tree(match, lineage)
    ]


def data_refusals(duties: Iterable[Duty], acknowledged: Iterable[str]) -> list[Refusal]:
    """Refuse data of unknown licence, and what its owner keeps, unless whoever releases says that they know."""
    asked = [duty for duty in duties if duty.kind == "data" and duty.outcome == "asks"]
    unknown = [duty.ancestor for duty in asked if duty.licence == UNKNOWN]
    kept = [duty.ancestor for duty in asked if is_proprietary(duty.licence)]
    fixes = {UNKNOWN_DATA: ("data of unknown licence went in", "find out and record its licence, or release", unknown),
             PROPRIETARY_DATA: ("proprietary data went in", "if its owner agrees, release", kept)}  # fmt: skip
    return [
        Refusal("data", f"{what}: {'; '.join(names)}", f"{fix} with --acknowledge {word}")
        for word, (what, fix, names) in fixes.items()
        if names and word not in set(acknowledged)
    ]


def compare_claims(
    model: Path, name: str, bases: Mapping[Claim, Path], sketches: Sequence[Sketch], reporter: Reporter
) -> list[tuple[Match, dict[str, Any]]]:
    """Compare a model with the bases at hand and with all sketches; each match comes with the audit's whole finding."""
    suspect, compared = open_model(model, name), len(bases) + len(sketches)
    if unread := suspect.weights.unread:  # the audit would read the ones, and whoever loads the model the others
        raise UserError(f"{model} holds {unread[0]}… beside what was compared; which is the model's cannot be told")
    matches = []
    for claim, folder in bases.items():
        finding = examine(open_model(folder, claim.name), suspect, reporter, compared)
        matches.append(_match(finding, claim.digest, None))
    facts = {sketch.name: sketch.facts for sketch in sketches}
    library = [(each, facts[each.reference]) for each in examine_library(suspect, sketches, reporter, compared)]
    return matches + [_match(finding, about.model_digest, about.licence) for finding, about in library]


def _match(finding: Finding, digest: str, licence: str | None) -> tuple[Match, dict[str, Any]]:
    verdict = finding.verdict
    effects: dict[str, float] = {}
    for test in finding.tests:
        effects[test.name] = max(test.effect, effects.get(test.name, 0.0))  # a test is made again for a rotated copy
    # p-values are the same for a parent and a grandparent once every neuron is found again; sizes of effects are not.
    closeness = sum(effects.values()) / max(1, len(effects))
    derived = verdict.word in {"same", "derived"}
    match = Match(finding.reference, digest, finding.against, derived, closeness, verdict.sentence, licence)
    return match, asdict(finding)


def base_folders(model: Path, lineage: Lineage, given: Sequence[Path], reporter: Reporter) -> dict[Claim, Path]:
    """Return the folders of claimed bases that are at hand, known by the digest of their weights."""
    wanted = {claim.digest: claim for claim in claims(lineage)}
    folders = {}
    for folder in given:
        if not any(folder.glob("*.safetensors")):
            raise UserError(f"--base {folder} holds no safetensors; give the folder of the base's weights")
        digest = digest_weights(folder, reporter)
        if digest not in wanted:
            named = ", ".join(f"{claim.name} ({claim.digest[:12]})" for claim in wanted.values()) or "none"
            raise UserError(f"--base {folder} (weights {digest[:12]}) is no base of this model; the tree names {named}")
        folders[wanted[digest]] = folder
    run = model.parent.parent
    beside = sorted(run.glob(f"*/{model.name}/{LINEAGE_FILE}")) if (run / "run.json").is_file() else []
    for folder in (path.parent for path in beside):
        known = load_lineage(folder)
        claim = wanted.get(known.records[known.head].model_digest)
        if claim and claim not in folders and digest_weights(folder, reporter) == claim.digest:
            folders[claim] = folder
    return folders
