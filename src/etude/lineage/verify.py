"""Check a release folder as a stranger would: offline, with nothing but the folder, the library of known bases and, at best, a key.

Every check stands alone, because each catches what the others cannot. The signature finds whatever was changed by somebody
without the key; the rest finds what somebody with a key made untrue: weights that are not the recorded ones, records that were
edited, licences that were dropped, a base that the weights do not come from.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import etude
from etude.errors import UserError, one_line
from etude.files import read_json
from etude.lineage import release, signing
from etude.lineage.bom import bom_errors, spdx_errors
from etude.lineage.card import card_disagreements, edited_sections
from etude.lineage.duties import evaluate, licence_uses, load_product, released, unmet
from etude.lineage.facts import claims, in_order
from etude.lineage.licences import held
from etude.lineage.record import LINEAGE_FILE, Lineage, Record, load_lineage
from etude.lineage.release import ATTESTATIONS, AUDIT, BOM, CARD, NOTICE, PRODUCT, SPDX
from etude.lineage.signing import PUBLIC_KEY, SIGNATURE, BadSignatureError, fingerprint, statement, statement_errors
from etude.lineage.tree import draw_svg, wrong_files

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from etude.lineage.audit.sketch import Sketch
    from etude.progress import Reporter

UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class Check:
    """One question and its answer. `open`: it cannot be answered here, and `lines` say why."""

    name: str
    outcome: Literal["ok", "failed", "open"]
    lines: tuple[str, ...]


class OpenError(Exception):
    """A check cannot be made, and this is why."""


@dataclass
class Verification:
    """All checks of a folder."""

    folder: Path
    pem: bytes
    trusted: bool  # the key was given by whoever asks, not taken from the folder
    digests: dict[str, str]
    checks: list[Check] = field(default_factory=list)

    @property
    def failed(self) -> list[Check]:
        """The checks that failed."""
        return [check for check in self.checks if check.outcome == "failed"]

    def check(self, name: str, find: Callable[[], Sequence[str]], fine: str) -> None:
        """Note what a check finds wrong, else `fine`; what cannot even be read is wrong, too."""
        try:
            wrong = tuple(find())
            self.checks.append(Check(name, "failed" if wrong else "ok", wrong or (fine,)))
        except OpenError as why:
            self.checks.append(Check(name, "open", (str(why),)))
        except (UserError, *UNREADABLE) as error:
            self.checks.append(Check(name, "failed", (f"cannot be read: {one_line(error)}",)))

    def to_json(self) -> dict[str, Any]:
        """Return it for a script."""
        checks = [{"check": check.name, "outcome": check.outcome, "lines": list(check.lines)} for check in self.checks]
        key = {"fingerprint": fingerprint(self.pem), "given": self.trusted}
        return {"folder": str(self.folder), "verified": not self.failed, "key": key, "checks": checks}


def verify_release(folder: Path, key: Path | None, sketches: Sequence[Sketch], reporter: Reporter) -> Verification:
    """Check a release; `key` is its owner's public key, if known."""
    if not (folder / SIGNATURE).is_file():
        raise UserError(f"{folder} holds no {SIGNATURE}: it is not a release, or its signature was removed")
    source = key or folder / PUBLIC_KEY
    if not source.is_file():
        raise UserError(f"the public key {source} does not exist; give the owner's with --key")
    result = Verification(folder, source.read_bytes(), key is not None, signing.folder_digests(folder, reporter))
    _check_signature(result)
    result.check("records", lambda: _edited_records(folder), "each has the digest by which its children name it")
    if any(check.name == "records" for check in result.failed):
        result.checks.append(Check("the rest", "open", ("not checked: it is about what the records say",)))
        return result
    lineage = load_lineage(folder)
    _check_contents(result, lineage)
    _check_documents(result, lineage)
    names = _bases(lineage, sketches) or "none is claimed, and no other known one matches"
    fine = f"measured from the weights: {names}"
    result.check("base", lambda: _wrong_base(result, lineage, sketches, reporter), fine)
    return result


def _check_signature(result: Verification) -> None:
    mine = fingerprint(result.pem)
    owner = "which you gave" if result.trusted else "found in the folder: compare it with what the owner publishes"
    try:
        signed = signing.signed_files(result.folder, result.pem)
    except BadSignatureError:
        wrong = f"{SIGNATURE} is not a signature by key {mine[:16]}: another key made it, or it was edited"
        result.checks.append(Check("signature", "failed", (wrong,)))
    else:
        result.checks.append(Check("signature", "ok", (f"by key {mine}, {owner}",)))
        fine = f"{len(signed)} files, all as they were signed"
        result.check("files", lambda: _changed(signed, result.digests), fine)


def _changed(signed: dict[str, str], present: dict[str, str]) -> list[str]:
    """Return what happened to files after they were signed, a line each."""
    missing = [f"{_what(name)} {name} was deleted after signing" for name in signed if name not in present]
    extra = [f"{name} was added after signing" for name in present if name not in signed]
    changed = [name for name in signed if name in present and present[name] != signed[name]]
    return [*missing, *extra, *(f"{_what(name)} {name} was changed after signing" for name in changed)]


def _what(name: str) -> str:
    if name.endswith(".safetensors"):
        return "the weight file"
    if release.is_licence(name):
        return "the licence file"
    return "the attestation" if name.startswith(f"{ATTESTATIONS}/") else "the file"


def _edited_records(folder: Path) -> list[str]:
    filed = {key: Record.model_validate(each) for key, each in read_json(folder / LINEAGE_FILE)["records"].items()}
    digests = {key: (record.stage, record.id) for key, record in filed.items() if record.id != key}
    edited = [f"the record of stage {stage} was edited: it is filed as {key[:12]}, but its digest is {own[:12]}"
              for key, (stage, own) in digests.items()]  # fmt: skip
    if edited:
        return edited
    lineage = load_lineage(folder)  # says what else is wrong with it
    strangers = lineage.records.keys() - {record.id for record in in_order(lineage)}
    return [f"the record of stage {filed[key].stage} is of no ancestor of this model" for key in sorted(strangers)]


def _check_contents(result: Verification, lineage: Lineage) -> None:
    """Check that weights, licences and statements are those of the records."""
    head = lineage.records[lineage.head]
    fine = f"the files of record {head.id[:12]} ({head.stage})"
    result.check("weights", lambda: wrong_files(release.released_files(head), result.digests), fine)
    lost = [str(each) for each in release.licence_refusals(lineage, result.digests)]
    result.check("licences", lambda: lost, "the texts of all ancestors are there, as they were received")
    fine = f"{len(lineage.records)} stages, each signed and equal to its record"
    result.check("attestations", lambda: _wrong_attestations(result, lineage), fine)


def _wrong_attestations(result: Verification, lineage: Lineage) -> list[str]:
    wrong = []
    names = {release.attestation_name(number, record): record for number, record in enumerate(in_order(lineage), 1)}
    for name, record in names.items():
        if name not in result.digests:
            wrong.append(f"{name} is missing: stage {record.stage} is not attested")
            continue
        try:
            said = signing.unseal(read_json(result.folder / name), result.pem)
        except (BadSignatureError, ValueError):
            wrong.append(f"{name} is not signed by this key, or was edited")
            continue
        if said != statement(record, lineage) or statement_errors(said):
            wrong.append(f"{name} does not say what record {record.id[:12]} ({record.stage}) says")
    others = [name for name in result.digests if name.startswith(f"{ATTESTATIONS}/") and name not in names]
    return wrong + [f"{name} attests no stage of this tree" for name in others]


def _check_documents(result: Verification, lineage: Lineage) -> None:
    folder = result.folder

    def text(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    def formats() -> list[str]:
        errors = {BOM: bom_errors(read_json(folder / BOM)), SPDX: spdx_errors(text(SPDX))}
        digest = lineage.records[lineage.head].model_digest
        other = [f"{name} is not about these weights" for name in errors if digest not in text(name)]
        return [*(f"{name}: {error}" for name, lines in errors.items() for error in lines), *other]

    def duties() -> list[str]:
        audit = read_json(folder / AUDIT)
        name = str(audit["release"])
        if f"\n# {name}\n" not in text(CARD):
            return [f"{AUDIT} calls the model {name!r}, the card another name: duties about names are not checked"]
        product = released(load_product(folder / PRODUCT) if (folder / PRODUCT).exists() else None, name)
        duties = evaluate(licence_uses(folder), product)
        data = release.data_refusals(duties, audit["acknowledged"])
        return [*unmet(duties, product, text(CARD), text(NOTICE)), *map(str, data)]

    def card() -> list[str]:
        wrong, version = card_disagreements(text(CARD), lineage), read_json(folder / AUDIT).get("etude")
        if version != etude.__version__ and not wrong:
            writer = f"Etude {version}" if version else "an older Etude"
            why = f"written by {writer}, whose words this one does not know"
            raise OpenError(f"its metadata are right; its text was {why}")
        facts = release.as_released(folder, lineage)
        drawn = [_words(text("tree.svg")), _words(draw_svg(lineage, facts.name))]
        other = ["tree.svg draws another tree than the records have"] if drawn[0] != drawn[1] else []
        return [*wrong, *edited_sections(text(CARD), facts), *other]

    result.check("card", card, "says what the records and files say, scores aside; tree.svg draws them")
    result.check("bills of materials", formats, f"{BOM} and {SPDX} are valid and name these weights")
    result.check("duties", duties, "the card and the notice say what the licences ask for, as far as it is known")


def _words(svg: str) -> list[str]:
    """Return the words of a picture, which stay words in it."""
    return [html.unescape(found) for found in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]


def _bases(lineage: Lineage, sketches: Sequence[Sketch]) -> str:
    """Return the claimed bases, with what the library calls the same weights: a tree can call them what it likes."""
    known = {sketch.facts.model_digest: sketch.name for sketch in sketches}
    called = [(claim.name, known.get(claim.digest, claim.name)) for claim in claims(lineage)]
    return ", ".join(name if name == ours else f"{name}, which your library knows as {ours}" for name, ours in called)


def _wrong_base(result: Verification, lineage: Lineage, sketches: Sequence[Sketch], reporter: Reporter) -> list[str]:
    """Compare the weights with the library: the one check that no signature and no rewritten record can satisfy."""
    if any(check.name == "weights" for check in result.failed):
        raise OpenError("not compared: these are not the files of the record")
    compared = release.compare_claims(result.folder, result.folder.name, {}, sketches, reporter)
    matches = [match for match, _ in compared]
    texts = {each.licence for each in held(result.folder)}
    refusals = [*release.base_refusals(lineage, matches), *release.unlicensed_refusals(lineage, matches, texts)]
    unknown = ", ".join(release.unchecked(lineage, matches))
    if unknown and not refusals:
        raise OpenError(f"not compared: {unknown} is not in your library; `etude library add FOLDER NAME` adds it")
    return [refusal.what for refusal in refusals]
