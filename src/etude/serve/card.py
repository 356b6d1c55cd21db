"""What `/v1/models` tells of the model: where it comes from, and what its licences want to be shown."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from etude.files import read_json
from etude.lineage.duties import evaluate, licence_uses
from etude.lineage.product import Product
from etude.lineage.record import LINEAGE_FILE, load_lineage
from etude.lineage.tree import render

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from etude.lineage.duties import Duty
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
    duties = evaluate(licence_uses(folder), Product(hosted=True))
    return ModelCard(name, _told(name, lineage, origin), to_display(duties), stop_tokens_of(folder))


def _told(name: str, lineage: Lineage | None, origin: Origin | None) -> dict[str, Any]:
    if lineage is None:
        known = origin.model_dump(mode="json") if origin else None
        return {"record": None, "told": "it was not made by Etude and carries no record", "origin": known}
    records = lineage.model_dump(mode="json")["records"]
    return {"record": lineage.head, "tree": render(lineage, name), "records": records}


def to_display(duties: Iterable[Duty]) -> list[dict[str, Any]]:
    """Return the texts that licences want shown. `always`: by whoever serves it; else it depends on the product."""
    return [
        {"licence": duty.licence, "always": duty.outcome == "fires", "any_of": list(duty.words), "where": duty.where,
         "duty": duty.text}
        for duty in duties if duty.kind == "display" and duty.outcome != "not"
    ]  # fmt: skip


def stop_tokens_of(folder: Path) -> frozenset[int]:
    """Return the tokens a model ends with, as its own files say."""
    files = [folder / name for name in ("generation_config.json", "config.json") if (folder / name).is_file()]
    told = [read_json(file).get("eos_token_id") for file in files]
    return frozenset(end for each in told for end in (each if isinstance(each, list) else [each]) if end is not None)
