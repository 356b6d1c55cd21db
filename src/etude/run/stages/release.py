"""The `release` stage: the model so far with its whole family tree, signed, and verified as a user would. A report, not a model.

What signs is imported where it runs: `etude run` works where `cryptography` is not installed.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field

from etude.errors import UserError
from etude.files import files_below, read_json, sha256_file, write_json
from etude.lineage.audit.sketch import FOLDER, known_sketches
from etude.lineage.duties import evaluate, licence_uses, load_product, released
from etude.lineage.facts import base_names
from etude.models.bases import ancestors
from etude.run.folder import RELEASE
from etude.run.stage import Ahead, Job, Outcome, Stage
from etude.run.stages.bench import scores_of

if TYPE_CHECKING:
    from etude.lineage.verify import Verification

RESULTS = "results.json"
NAME = re.compile(r"\w[\w. -]*")  # no path


class ReleaseSettings(BaseModel, extra="forbid", strict=True):
    """What only the releasing person can say."""

    name: str = Field(default="", description="name of the model; default: as `product` says, else BASE-STAGE")
    product: str = Field(default="", description="product.toml to check licences against; becomes part of the release")
    licence: str = Field(default="", description="your own licence file for what you added; released as LICENSE")
    bases: list[str] = Field(default=[], description="folders of claimed bases that are not in the run")
    acknowledge: list[Literal["unknown-data", "proprietary"]] = Field(
        default=[], description="kinds of data to release weights of"
    )
    key: str = Field(default="", description="private key (PEM, P-256); default: your own, created if needed")


class ReleaseStage(Stage):
    """Releases the model that the stages before have made."""

    settings = ReleaseSettings
    version = 2  # 2: the card carries the scores of the run's benchmarks
    needs_model = True
    reads_benchmarks = True

    def check(self, settings: ReleaseSettings) -> None:
        """Refuse files that are not there, or not what they should be: stages before this one may take days."""
        if settings.name and not NAME.fullmatch(settings.name):
            raise UserError(
                f"release.name {settings.name!r} cannot name a model: use letters, digits, space, dot, dash, underscore"
            )
        for field in ("product", "licence", "key"):
            path = _path(getattr(settings, field))
            if path and not path.is_file():
                raise UserError(f"release.{field}: {str(path)!r} is not a file (looked in {Path.cwd()})")
        for folder in settings.bases:
            if not Path(folder).expanduser().is_dir():
                raise UserError(f"release.bases: {folder!r} is not a folder (looked in {Path.cwd()})")
        if product := _path(settings.product):
            load_product(product)
        _key_identity(settings)

    def check_order(self, settings: ReleaseSettings, ahead: Ahead) -> None:  # noqa: ARG002 - as its parent's
        if len(ahead.made_by) == 1 and ahead.changed_by:
            advice = f"put it after {ahead.changed_by[-1]}"
            raise UserError(
                f"release comes before {ahead.changed_by[0]}: it would release the base unchanged; {advice}"
            )

    def inputs(self, settings: ReleaseSettings, parent_digest: str | None, seed: int) -> dict[str, Any]:  # noqa: ARG002
        """Return settings, and the files they name by content; a key by its public half."""
        files = {name: sha256_file(path) for name in ("product", "licence") if (path := _path(getattr(settings, name)))}
        own = settings.model_dump(include={"name", "bases", "acknowledge"})
        return {**own, **files, "key": _key_identity(settings)}

    def run(self, settings: ReleaseSettings, job: Job) -> Outcome:
        """Make the release, unless that was done before the session was interrupted, and verify it."""
        from etude.lineage.release import AUDIT, PRODUCT
        from etude.lineage.verify import verify_release

        out, sketches = job.work.folder / RELEASE, known_sketches(job.work.cache / FOLDER, job.work.reporter)
        if not out.exists():
            _make(settings, job, out, sketches)
        verification = verify_release(out, None, sketches, job.work.reporter)
        if verification.failed:
            failures = "; ".join(f"{check.name}: {line}" for check in verification.failed for line in check.lines)
            raise UserError(f"the release in {out} does not verify: {failures}")
        audit, product = read_json(out / AUDIT), load_product(out / PRODUCT) if (out / PRODUCT).exists() else None
        summary = _summary(verification, audit)
        # Duties that fire are met, else the release were refused; of some, nobody can tell whether they fire.
        duties = evaluate(licence_uses(out), released(product, audit["release"]))
        counts = Counter(duty.outcome for duty in duties if duty.kind != "data")
        write_json(job.work.folder / RESULTS, {"summary": summary, "duties": dict(counts)})
        return Outcome(parents=[job.model.as_parent()], summary=summary)

    def show(self, folder: Path) -> list[str]:
        results = read_json(folder / RESULTS)
        summary, duties, out = results["summary"], results["duties"], folder / RELEASE
        asked = f"; {duties['asks']} depend on facts that product.toml does not state" if duties.get("asks") else ""
        return [
            f"release: {summary['name']} in {out}, {summary['bytes'] / 1e6:,.1f} MB in {summary['files']} files, signed",
            f"derived from: {summary['base']}, measured from the weights; verified: {summary['verified']}",
            f"licences: {summary['licences']}; {duties.get('fires', 0)} duties are met{asked}: etude licences {out}",
            f"to check it: etude verify {out}",
        ]


def _path(word: str) -> Path | None:
    return Path(word).expanduser() if word else None


def _key_identity(settings: ReleaseSettings) -> str:
    from etude.lineage.signing import fingerprint, public_pem

    return fingerprint(public_pem(path)) if (path := _path(settings.key)) else "own"


def _make(settings: ReleaseSettings, job: Job, out: Path, sketches: Any) -> None:
    from etude.lineage.release import Order, RefusedError, make_release
    from etude.lineage.signing import default_key

    product = _path(settings.product)
    base = next(iter(base_names(job.model.lineage)), "etude").rpartition("/")[2]
    name = settings.name or (load_product(product).model_name if product else None)
    order = Order(
        name or f"{base}-{job.model.record.stage}",
        _path(settings.key) or default_key(),
        product,
        _path(settings.licence),
        [score for folder in job.benchmarks for score in scores_of(folder, job.model.folder)],
        bases=[Path(folder).expanduser() for folder in settings.bases],
        acknowledged=settings.acknowledge,
    )
    try:
        make_release(job.model.folder, out, order, sketches, ancestors(), job.work.reporter)
    except RefusedError as refused:
        hint = "options of `etude release` are settings of this stage"
        raise UserError(f"{job.name} is refused: {refused} ({hint})") from None


def _summary(verification: Verification, audit: dict[str, Any]) -> dict[str, float | int | str | None]:
    """Return what the checks said, which licences are included, and which bases the audit found in the weights."""
    checks, files = verification.checks, files_below(verification.folder)
    uses = [use for use in licence_uses(verification.folder) if use.role != "data"]
    claimed = {claim["name"] for claim in audit["claims"]}
    matches = [each["reference"] for each in audit["findings"] if each["verdict"]["word"] in {"same", "derived"}]
    bases = dict.fromkeys(name for name in matches if name in claimed)
    left = sum(check.outcome == "open" for check in checks)
    return {
        "name": audit["release"],
        "verified": f"{len(checks) - left} of {len(checks)} checks" + f", {left} open" * bool(left),
        "base": ", ".join(bases) or "no base",
        "licences": ", ".join(sorted({use.licence or "unknown text" for use in uses})) or "none",
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
    }
