"""What `/v1/models` tells of the model: where it comes from, and what its licences want to be shown."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from etude.files import read_json
from etude.lineage.licences import headline_duties, identify, licence_files, obligations
from etude.lineage.record import LINEAGE_FILE, load_lineage
from etude.lineage.tree import render

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from etude.lineage.record import Lineage, Origin


@dataclass(frozen=True)
class ModelCard:
    """The model that is served."""

    id: str
    lineage: dict[str, Any] = field(default_factory=dict)
    display: list[dict[str, Any]] = field(default_factory=list)
    stop_tokens: frozenset[int] = frozenset()
    created: int = field(default_factory=lambda: int(time.time()))

    def told(self, context: int) -> dict[str, Any]:
        """Return the model as a client sees it in a list of models."""
        return {"id": self.id, "object": "model", "created": self.created, "owned_by": "etude", "max_model_len": context,
                "lineage": self.lineage, "display": self.display}  # fmt: skip


def card_of(name: str, folder: Path, origin: Origin | None) -> ModelCard:
    """Return the card of a model's folder."""
    lineage = load_lineage(folder) if (folder / LINEAGE_FILE).is_file() else None
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in licence_files(folder)]
    records = lineage.records.values() if lineage else ()
    licences = {identify(text) for text in texts} | {each.licence for record in records for each in record.licences}
    return ModelCard(name, _told(name, lineage, origin), to_display(licences), stop_tokens_of(folder))


def _told(name: str, lineage: Lineage | None, origin: Origin | None) -> dict[str, Any]:
    if lineage is None:
        known = origin.model_dump(mode="json") if origin else None
        return {"record": None, "told": "it was not made by Etude and carries no record", "origin": known}
    records = lineage.model_dump(mode="json")["records"]
    return {"record": lineage.head, "tree": render(lineage, name), "records": records}


def to_display(licences: Iterable[str | None]) -> list[dict[str, Any]]:
    """Return the texts that licences want shown. `always`: whoever serves it; else the duty says on which condition."""
    clauses = [
        (licence["id"], when == "unconditional", clause)
        for licence in obligations() if licence["id"] in licences
        for when in ("unconditional", "conditional")
        for clause in licence.get(when, []) if clause["duty"] == "display"
    ]  # fmt: skip
    return [{"licence": name, "always": always, "any_of": clause["text"].split("|"), "where": clause.get("where"),
             "duty": next(duty for duty in headline_duties(name) if duty.startswith(f"display “{clause['text']}”"))}
            for name, always, clause in clauses]  # fmt: skip


def stop_tokens_of(folder: Path) -> frozenset[int]:
    """Return the tokens a model ends with, as its own files say."""
    files = [folder / name for name in ("generation_config.json", "config.json") if (folder / name).is_file()]
    told = [read_json(file).get("eos_token_id") for file in files]
    return frozenset(end for each in told for end in (each if isinstance(each, list) else [each]) if end is not None)
