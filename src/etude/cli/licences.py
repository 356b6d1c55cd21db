"""`etude licences`: what the licences of all ancestors ask of a product."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etude.cli.options import AsJson, CacheFolder, print_json
from etude.progress import Reporter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from etude.lineage.duties import Duty, LicenceUse

ProductFile = Annotated[Path | None, typer.Option("--product", help="Facts of the product, such as docs/product.toml.")]
ADVICE = "Facts for engineering, not legal advice."
ORDER = ("fires", "asks", "not")


def licences(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run's folder, a model's folder, or a known base.")],
    product: ProductFile = None,
    as_json: AsJson = False,
    cache: CacheFolder = None,
) -> None:
    """Say which duties hold for a product, which do not, and what must be answered to know."""
    from etude.lineage.duties import evaluate, notice, unmet
    from etude.lineage.product import load_product

    facts = load_product(product) if product else None
    uses = _uses(model, cache)
    duties = evaluate(uses, facts)
    missing = unmet(duties, facts, None, notice(duties, model)) if facts else []
    if as_json:
        print_json(
            {"licences": [asdict(use) for use in uses], "duties": [_plain(duty) for duty in duties], "unmet": missing}
        )
        return
    for line in [*_told(uses, duties), *(f"not met yet: {line}" for line in missing), ADVICE]:
        typer.echo(line)


def _uses(word: str, cache: Path | None) -> list[LicenceUse]:
    """Return the licences of a model. Known bases on the hub may be a terabyte: those are as listed, their text is not fetched."""
    from etude.lineage.duties import LicenceUse, licence_uses
    from etude.models.bases import resolve
    from etude.models.locate import locate

    base = resolve(word)
    if base.known and base.place == "hub":
        return [LicenceUse(word, "weights", base.known.licence, seen=False)]
    return licence_uses(locate(word, cache, Reporter())[1])


def _plain(duty: Duty) -> dict[str, object]:
    return asdict(duty) | {"questions": [asked._asdict() for asked in duty.questions]}


def _told(uses: list[LicenceUse], duties: list[Duty]) -> Iterator[str]:
    """Yield the duties ancestor by ancestor, then those of data in a few lines, then what is to be answered."""
    teachers = {use.ancestor for use in uses if use.role == "teacher"}
    of_models = (duty for duty in duties if duty.kind != "data")
    for (ancestor, licence), group in groupby(of_models, lambda duty: (duty.ancestor, duty.licence)):
        yield f"{ancestor} ({'its outputs were trained on' if ancestor in teachers else 'weights'}): {licence}"
        for duty in sorted(group, key=lambda duty: ORDER.index(duty.outcome)):
            because = duty.reason or ", ".join(asked.key for asked in duty.questions)
            yield f"  {duty.outcome:5}  {duty.text}" + (f"  [{because}]" if because else "")
    data = [duty for duty in duties if duty.kind == "data"]
    if data:
        open_ones = sorted({f"{duty.ancestor} ({duty.licence})" for duty in data if duty.outcome == "asks"})
        yield f"data: {len({duty.ancestor for duty in data})} source(s) under {len({duty.licence for duty in data})} licence(s)"
        yield from (f"  asks   {name}  [product.data_acknowledged]" for name in open_ones)
    asked = dict(asked for duty in duties for asked in duty.questions if duty.kind != "data")
    if asked:
        yield "to be answered in product.toml:"
        yield from (f"  {key}: {text}" for key, text in asked.items())
