"""Facts to write documents of: a line of three generations with a teacher, a merge, and a release that knows nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import etude
from etude.files import files_below, sha256_file
from etude.lineage.duties import Duty, Organisation, Product, Question
from etude.lineage.facts import Architecture, Measured, Release, read_architecture
from etude.lineage.record import CarriedLicence, FileDigest, Lineage, Parent, Record, load_lineage
from tests.lineage.records import child_of, full_record, three_generations

SHAPE = Architecture(family="llama", name="LlamaForCausalLM", parameters=1_234, context=64, dtypes=("BF16",))
DISPLAY = Duty("Kimi-K2.5-Modified-MIT", "kimi", "display", "Show the name.", "fires", words=("Kimi K2.5", "K2.5"))
ASKS = Duty(
    "Llama-4", "llama", "agreement", "Ask.", "asks", questions=(Question("product.monthly_users", "How many?"),)
)


def release(lineage: Lineage | None = None, **changes: Any) -> Release:
    """Return a release in which every fact is known."""
    weights, licence = (FileDigest(sha256=digit * 64, bytes=9) for digit in "46")
    facts: dict[str, Any] = {
        "name": "Sprout-Mine",
        "version": "1.0",
        "lineage": lineage or three_generations()[0],
        "files": {"model.safetensors": weights, "LICENSES/a b/LICENSE": licence},
        "architecture": SHAPE,
        "duties": [DISPLAY, ASKS],
        "compute_lines": ["own share 0.1% [0.05%, 0.2%]"],
        "compute": {"own": 0.001},
        "evaluation": [
            Measured("quick | tasks", "avg@5", 0.25, (0.125, 0.5), "12 tasks"),
            Measured("mine", "pass@1", 0.0),
        ],
        "audited": "against tiny: evidence of shared initialisation",
        "product": Product(
            intended_use="writing code",
            release_date="2026-12-01",
            organisation=Organisation(name="Ada Ltd", contact="ada@example.org"),
        ),
    }
    return Release(**(facts | changes))


def bare_release() -> Release:
    """Return a release of a model made from nothing, of which nothing is known that could be unknown."""
    record = full_record(parents=[], origin=None, data=[], licences=[], outputs={})
    shape = Architecture(family=None, name=None, parameters=7, context=None, dtypes=())
    files = {"model.safetensors": FileDigest(sha256="4" * 64, bytes=9)}
    return Release("Bare", "0", Lineage.of(record, []), files, shape, Product())


def sprout_release() -> Release:
    """Return a release of the model that ships with Etude, with the record it really has."""
    folder = Path(etude.__file__).parent / "models" / "sprout"
    lineage = load_lineage(folder)
    files = {path.name: FileDigest(sha256=sha256_file(path), bytes=path.stat().st_size) for path in files_below(folder)}
    return Release("sprout", "1", lineage, files, read_architecture(folder), Product(), licence="Apache-2.0")


def merged() -> tuple[Lineage, list[Record]]:
    """Return a merge of two children of one base and of a folder without a record, and its records in order."""
    base = child_of(None, "base")
    judge = Parent(name="judge 1", role="judge", record=None, model_digest="a" * 64)
    left, right = child_of(base, "c-left", judge), child_of(base, "d-right", judge)
    stranger = Parent(name="stranger", role="weights", record=None, model_digest="7" * 64)
    edge = Parent(name="d-right", role="weights", record=right.id, model_digest=right.model_digest)
    texts = [
        CarriedLicence(file=f"LICENSES/stranger/{name}", sha256=digit * 64, licence=None, inherited_from="stranger")
        for name, digit in (("LICENSE", "8"), ("NOTICE", "9"))
    ]
    top = child_of(left, "e-merge", edge, stranger).model_copy(update={"licences": texts})
    return Lineage.of(top, [Lineage.of(child, [Lineage.of(base, [])]) for child in (left, right)]), [
        base,
        left,
        right,
        top,
    ]
