"""What `/v1/models` says of the model: where it comes from, and what its licences want to be shown; and the token of a server."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from etude.errors import UserError, one_line
from etude.files import read_json
from etude.lineage.duties import Product, evaluate, licence_uses
from etude.lineage.record import LINEAGE_FILE, load_lineage
from etude.lineage.tree import render

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from etude.lineage.duties import Duty
    from etude.lineage.record import Lineage, Origin


def read_token(path: Path) -> str:
    """Return the token in a file, which is nowhere else shown."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"--token-file {path} cannot be read: {one_line(error)}") from None
    if len(token) < 16 or not (token.isascii() and token.isprintable()) or " " in token:
        raise UserError(f"--token-file {path}: a token is one word of at least 16 ASCII characters")
    return token


@dataclass(frozen=True)
class ModelCard:
    """The model that is served."""

    id: str
    lineage: dict[str, Any] = field(default_factory=dict)
    display: list[dict[str, Any]] = field(default_factory=list)
    stop_tokens: frozenset[int] = frozenset()
    created: int = field(default_factory=lambda: int(time.time()))
    root: str = ""  # the model's folder, where clients on this machine find the tokeniser

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "stop_tokens"}


def card_of(name: str, folder: Path, origin: Origin | None) -> ModelCard:
    """Return the card of a model's folder."""
    lineage = load_lineage(folder) if (folder / LINEAGE_FILE).is_file() else None
    duties = evaluate(licence_uses(folder), Product(hosted=True))
    about = _lineage(name, lineage, origin)
    return ModelCard(name, about, to_display(duties), stop_tokens_of(folder), root=str(folder.absolute()))


def _lineage(name: str, lineage: Lineage | None, origin: Origin | None) -> dict[str, Any]:
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
    ends = [read_json(file).get("eos_token_id") for file in files]
    return frozenset(end for each in ends for end in (each if isinstance(each, list) else [each]) if end is not None)
