"""What a training did to the model: the table of before and after, the curve between them, and a picture of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from etude.files import read_json, write_json, write_text
from etude.report.page import COLOURS, Block, Picture, Table, drawing, label, markdown, terminal, token_scale

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType


RESULTS = "results.json"
PICTURE = Picture("forgetting.png", "change of bits per byte from before to after")
BITS = ("held-out text", ">before", ">after", ">change", ">95 %", ">tokens scored")
ACCEPTANCE = ("held-out text", ">depth", ">before", ">after")


def write_report(folder: Path, title: str, results: dict[str, Any]) -> None:
    """Write `results` (domains, curve, notes) as a page, as a picture and, last of all, as JSON: with it, all is there."""
    blocks: list[Block] = []
    for what, table in _tables(results).items():
        blocks += [f"On held-out text: {what}.", table]
    blocks += _notes(results)
    if len(results["curve"]) > 1 and results["domains"]:
        _draw(folder / PICTURE.file, title, results)
        blocks.append(PICTURE)
    write_text(folder / "report.md", markdown(title, {"": blocks}))
    write_json(folder / RESULTS, results)


def shown(folder: Path) -> list[RenderableType]:
    """Return the tables, the notes and where the rest is."""
    results, picture = read_json(folder / RESULTS), folder / PICTURE.file
    tables = [terminal(table, title=f"{folder.name}: {what}") for what, table in _tables(results).items()]
    also = f", picture: {picture}" if picture.exists() else ""
    return [*tables, *(Text(f"- {note}", "dim") for note in _notes(results)), f"report: {folder / 'report.md'}{also}"]


def _notes(results: dict[str, Any]) -> list[str]:
    return [*results.get("lines", []), *results["notes"]]


def _tables(results: dict[str, Any]) -> dict[str, Table]:
    """Return each table by what it shows; that of bits is left out only where there is nothing but acceptance rates."""
    tables, accepted = {}, results.get("acceptance", [])
    if results["domains"] or not accepted:
        tables["bits per byte, lower is better"] = Table(BITS, [_cells(row) for row in results["domains"]])
    if accepted:
        rows = [(row["domain"], row["depth"], f"{row['before']:.3f}", f"{row['after']:.3f}") for row in accepted]
        tables["expected acceptance rate Σ min(p, q) by depth, higher is better"] = Table(ACCEPTANCE, rows)
    return tables


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    margin = "–" if row["margin"] is None else f"±{row['margin']:.4f}"
    before, after, change = f"{row['before']:.4f}", f"{row['after']:.4f}", f"{row['change']:+.4f}"
    return (row["domain"], before, after, change, margin, f"{row['tokens']:,}")


def _draw(path: Path, title: str, results: dict[str, Any]) -> None:
    """Draw the change of every domain over the tokens trained on; what rises first and falls later is the stability gap."""
    curve = results["curve"]
    tokens = [point["tokens"] for point in curve]
    with drawing(path, 7, 4, dpi=120) as figure:
        axis: Any = figure.subplots()
        for at, row in enumerate(results["domains"]):
            changes = [point["bits_per_byte"][row["domain"]] - row["before"] for point in curve]
            look = {"color": COLOURS[at % len(COLOURS)], "marker": "o", "markersize": 3}
            axis.plot(tokens, changes, label=row["domain"], **look)
        axis.axhline(0, color="grey", linewidth=0.8)
        if tokens[-1] > 50 * max(1, tokens[1]):
            token_scale(axis, linear_to=max(1, tokens[1]))
        axis.set_xlim(left=0)
        label(axis, title, "tokens trained on", "change in bits per byte")
        axis.legend(frameon=False)
