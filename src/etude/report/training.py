"""What a training did to the model, for people: the table of before and after, the curve between them, and a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from etude.files import read_json, whole_file, write_json, write_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rich.console import Console

RESULTS = "results.json"
PICTURE = "forgetting.png"
HEADINGS = ("held-out text", "before", "after", "change", "95 %", "tokens scored")
ACCEPTANCE = ("held-out text", "depth", "before", "after")


def write_report(folder: Path, title: str, results: dict[str, Any]) -> None:
    """Write `results` (domains, curve, notes) as a page, as a picture and, last of all, as JSON: with it, all is there."""
    drawn = len(results["curve"]) > 1 and bool(results["domains"])
    if drawn:
        _draw(folder / PICTURE, title, results)
    write_text(folder / "report.md", _page(title, results, drawn=drawn))
    write_json(folder / RESULTS, results)


def show_report(folder: Path, console: Console) -> None:
    """Print the table and where the rest is."""
    results = read_json(folder / RESULTS)
    for title, headings, rows in _tables(results):
        table = Table(title=f"{folder.name}: {title}", title_justify="left")
        for heading in headings:
            table.add_column(heading, justify="left" if heading == headings[0] else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for note in [*results.get("lines", []), *results["notes"]]:
        console.print(f"- {note}", style="dim", highlight=False, markup=False, soft_wrap=True)
    picture = f", picture: {folder / PICTURE}" if (folder / PICTURE).exists() else ""
    console.print(f"report: {folder / 'report.md'}{picture}", highlight=False, soft_wrap=True)


def _tables(results: dict[str, Any]) -> Iterator[tuple[str, tuple[str, ...], list[list[str]]]]:
    """Yield title, headings and cells of each table; the first is always there unless there is only the other."""
    accepted = results.get("acceptance", [])
    if results["domains"] or not accepted:
        yield "bits per byte, lower is better", HEADINGS, [_cells(row) for row in results["domains"]]
    if accepted:
        cells = [[row["domain"], str(row["depth"]), f"{row['before']:.3f}", f"{row['after']:.3f}"] for row in accepted]
        yield "expected acceptance Σ min(p, q) by depth, higher is better", ACCEPTANCE, cells


def _cells(row: dict[str, Any]) -> list[str]:
    margin = "–" if row["margin"] is None else f"±{row['margin']:.4f}"
    return [
        row["domain"],
        f"{row['before']:.4f}",
        f"{row['after']:.4f}",
        f"{row['change']:+.4f}",
        margin,
        f"{row['tokens']:,}",
    ]


def _page(title: str, results: dict[str, Any], *, drawn: bool) -> str:
    lines = [f"# {title}", ""]
    for what, headings, rows in _tables(results):
        lines += [
            f"On held-out text: {what}.",
            "",
            "| " + " | ".join(headings) + " |",
            "|---|" + "---:|" * (len(headings) - 1),
        ]
        lines += ["| " + " | ".join(row) + " |" for row in rows] + [""]
    lines += [
        *(f"- {note}" for note in [*results.get("lines", []), *results["notes"]]),
        "",
        *([f"![the way from before to after]({PICTURE})", ""] if drawn else []),
    ]
    return "\n".join(lines)


def _draw(path: Path, title: str, results: dict[str, Any]) -> None:
    """Draw the change of every domain over the tokens trained on; what rises first and falls later is the stability gap."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    curve = results["curve"]
    for row in results["domains"]:
        changes = [point["bits_per_byte"][row["domain"]] - row["before"] for point in curve]
        axes.plot([point["tokens"] for point in curve], changes, marker="o", markersize=3, label=row["domain"])
    axes.axhline(0, color="grey", linewidth=0.8)
    if curve[-1]["tokens"] > 50 * max(1, curve[1]["tokens"]):
        axes.set_xscale("symlog", linthresh=max(1, curve[1]["tokens"]))
    axes.set_xlim(left=0)
    axes.set(xlabel="tokens trained on", ylabel="change in bits per byte", title=title)
    axes.legend()
    with whole_file(path) as beside:
        figure.savefig(beside, format="png", dpi=120)
    pyplot.close(figure)
