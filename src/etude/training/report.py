"""What a training did to the model, for people: the table of before and after, the curve between them, and a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from etude.files import read_json, whole_file, write_json, write_text

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

RESULTS = "results.json"
PICTURE = "forgetting.png"
HEADINGS = ("held-out text", "before", "after", "change", "95 %", "tokens scored")


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
    table = Table(title=f"{folder.name}: bits per byte, lower is better", title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == HEADINGS[0] else "right")
    for row in results["domains"]:
        table.add_row(*_cells(row))
    console.print(table)
    for note in [*results.get("lines", []), *results["notes"]]:
        console.print(f"- {note}", style="dim", highlight=False, markup=False, soft_wrap=True)
    picture = f", picture: {folder / PICTURE}" if (folder / PICTURE).exists() else ""
    console.print(f"report: {folder / 'report.md'}{picture}", highlight=False, soft_wrap=True)


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
    lines = [f"# {title}", "", "Bits per byte on held-out text, lower is better.", "",
             "| " + " | ".join(HEADINGS) + " |", "|---|" + "---:|" * (len(HEADINGS) - 1)]  # fmt: skip
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in results["domains"]]
    lines += [
        "",
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
