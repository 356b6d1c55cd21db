"""The reasons to refuse a release, and how to put each right.

`etude release` asks before it writes anything, `etude verify` asks the same of a finished folder.

There are five reasons: the weights do not come from the base that is claimed, or come from another known one; a licence file is
missing or altered; a duty of a licence is not met; data of unknown licence went in and nobody said so; a record or a digest does
not match.

A claimed base is compared by its own weights where they are at hand (given, or beside the model in its run), and by its sketch in
the library. All functions but the last two are pure: matches come in, refusals come out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from etude.errors import UserError
from etude.lineage.audit.examine import examine, examine_library, open_model
from etude.lineage.audit.sketch import digest_weights
from etude.lineage.facts import carried, claims, in_order
from etude.lineage.record import LINEAGE_FILE, load_lineage

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from etude.lineage.audit.examine import Finding
    from etude.lineage.audit.sketch import Sketch
    from etude.lineage.facts import Claim
    from etude.lineage.record import Lineage
    from etude.progress import Reporter

UNKNOWN_DATA = "unknown-data"
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


def data_refusals(unknown: Sequence[str], acknowledged: Iterable[str]) -> list[Refusal]:
    """Refuse data of unknown licence, unless whoever releases says that they know."""
    if not unknown or UNKNOWN_DATA in acknowledged:
        return []
    fix = f"find out and record its licence, or release with --acknowledge {UNKNOWN_DATA}"
    return [Refusal("data", f"data of unknown licence went in: {'; '.join(unknown)}", fix)]


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
    return match, finding.to_json()


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
