"""Is the tree's claim true? The weights of a model against the bases its lineage names, and against every known one.

A claimed base is compared by its own weights where they are at hand (given, or beside the model in its run), and by its sketch
in the library. What comes out is judged in gate.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from etude.errors import UserError
from etude.lineage.audit.examine import examine, examine_library, open_model
from etude.lineage.audit.library import digest_weights
from etude.lineage.gate import Claim, Match, claims
from etude.lineage.record import LINEAGE_FILE, load_lineage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from etude.lineage.audit.examine import Finding
    from etude.lineage.audit.sketch import Sketch
    from etude.lineage.record import Lineage
    from etude.progress import Reporter


def compare_claims(
    model: Path, name: str, bases: Mapping[Claim, Path], sketches: Sequence[Sketch], reporter: Reporter
) -> list[tuple[Match, dict[str, Any]]]:
    """Compare a model with the bases at hand and with all sketches; each match comes with the audit's whole finding."""
    suspect = open_model(model, name)
    if unread := suspect.weights.unread:  # the audit would read the ones, and whoever loads the model the others
        raise UserError(f"{model} holds {unread[0]}… beside what was compared; which is the model's cannot be told")
    found = []
    for claim, folder in bases.items():
        finding = examine(open_model(folder, claim.name), suspect, reporter, len(bases) + len(sketches))
        found.append(_told(finding, claim.digest))
    facts = {sketch.facts.name: sketch.facts for sketch in sketches}
    library = examine_library(suspect, sketches, reporter, len(bases) + len(sketches))
    known = [(finding, facts[finding.reference]) for finding in library]
    return found + [_told(finding, about.model_digest, about.licence) for finding, about in known]


def _told(finding: Finding, digest: str | None, licence: str | None = None) -> tuple[Match, dict[str, Any]]:
    verdict = finding.verdict
    derived = verdict.word in {"same", "derived"}
    effects: dict[str, float] = {}
    for test in finding.tests:
        effects[test.name] = max(test.effect, effects.get(test.name, 0.0))  # a test is made again for a rotated copy
    # p-values are the same for a parent and a grandparent once every neuron is found again; sizes of effects are not.
    closeness = sum(effects.values()) / max(1, len(effects))
    match = Match(finding.reference, digest, finding.against, derived, closeness, verdict.sentence, licence)
    return match, finding.to_json()


def base_folders(model: Path, lineage: Lineage, given: Sequence[Path], reporter: Reporter) -> dict[Claim, Path]:
    """Return the folders of claimed bases that are at hand, known by the digest of their weights."""
    wanted = {claim.digest: claim for claim in claims(lineage)}
    found = {}
    for folder in given:
        if not any(folder.glob("*.safetensors")):
            raise UserError(f"--base {folder} holds no safetensors; give the folder of the base's weights")
        digest = digest_weights(folder, reporter)
        if digest not in wanted:
            named = ", ".join(f"{claim.name} ({claim.digest[:12]})" for claim in wanted.values()) or "none"
            raise UserError(
                f"--base {folder} is no base of this model: its weights are {digest[:12]}; the tree names {named}"
            )
        found[wanted[digest]] = folder
    run = model.parent.parent
    beside = sorted(run.glob(f"*/{model.name}/{LINEAGE_FILE}")) if (run / "run.json").is_file() else []
    for folder in (path.parent for path in beside):
        known = load_lineage(folder)
        claim = wanted.get(known.records[known.head].model_digest)
        if claim and claim not in found and digest_weights(folder, reporter) == claim.digest:
            found[claim] = folder
    return found
