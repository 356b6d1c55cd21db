"""A comparison as people read it: a table for the terminal, and the same as Markdown.

A comparison as one picture: how good, how fast, how large.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from etude.bench.perplexity import difference

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from etude.bench.base_comparison import CandidateResult
    from etude.data.codebase import Codebase

    Interval = tuple[float, float] | None

ROWS = (
    "parameters", "bits/byte ↓", "state ↓", "reads, tokens/s ↑", "writes, tokens/s ↑", "memory ↓", "context", "licence",
)  # fmt: skip


def human(count: float) -> str:
    """Return a count in at most four characters and a unit: 4.7M, 135M, 1.03T."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def ranked(results: Sequence[CandidateResult]) -> list[CandidateResult]:
    """Return the candidates in the order of their bits per byte."""
    return sorted(results, key=lambda result: result.bits.bits_per_byte)


def _cells(result: CandidateResult) -> tuple[str, ...]:
    active = f" ({human(result.active_parameters)} active)" if result.active_parameters != result.parameters else ""
    speed = result.speed
    return (
        human(result.parameters) + active,
        _with_interval(result.bits.bits_per_byte, result.bits.interval),
        _with_interval(result.state.distance_per_character, result.state.interval) if result.state else "–",
        f"{speed['prefill']:,.0f}",
        f"{speed['decode_single']:,.1f} / {speed['decode_batch']:,.1f}",
        f"{speed['peak_bytes'] / 1e9:.2f} GB",
        f"{result.context:,}",
        result.licence,
    )


def _with_interval(value: float, interval: tuple[float, float] | None) -> str:
    return f"{value:.3f} [{interval[0]:.2f}–{interval[1]:.2f}]" if interval else f"{value:.3f}"


def table(results: Sequence[CandidateResult]) -> Table:
    """Return the table for the terminal: a column a candidate, so that a few fit into eighty characters."""
    order = ranked(results)
    drawn = Table("", title="Candidates on your code", title_justify="left")
    for result in order:
        drawn.add_column(result.name, justify="right", overflow="fold")
    for cells in zip(ROWS, *map(_cells, order), strict=True):
        drawn.add_row(*cells)
    return drawn


def legend(results: Sequence[CandidateResult], code: Codebase, total_files: int) -> list[str]:
    """Return what the numbers mean and on what they were measured."""
    first = results[0]
    lines = [
        f"bits/byte: surprise at the code, lower is better; {first.bits.bytes:,} bytes in {first.bits.files} of {total_files} files "
        f"of {code.root}; in brackets a 95% interval over files."
    ]
    if first.state:
        copying = first.state.copying_per_character
        better = [result.name for result in results if result.state and result.state.distance_per_character < copying]
        beaten = "" if better else ", and no candidate does better than that"
        lines.append(
            f"state: edit distance per character of a file written out after a chain of edits, {first.state.tasks} tasks "
            f"({first.state.from_git} from git history); copying the unchanged file scores {copying:.3f}{beaten}."
        )
    speed = first.speed
    lines.append(
        f"read: a prompt of {speed['prompt']} tokens; write: one sequence / {speed['batch']} together, plain transformers; "
        f"memory: peak of the {speed['peak_of']}."
    )
    lines += [f"{result.name}: {'; '.join(result.duties)}." for result in ranked(results)]
    lines += [
        f"{result.name}: its tokeniser does not give back {result.bits.lossy_files} of {result.bits.files} files exactly; "
        "its bits per byte are not comparable."
        for result in results
        if result.bits.lossy_files
    ]
    return lines


def verdict(results: Sequence[CandidateResult]) -> str:
    """Return one sentence on what was found; a difference within the noise is called that."""
    best, *others = ranked(results)
    if not others:
        return f"{best.name}: {best.bits.bits_per_byte:.3f} bits per byte."
    second = others[0]
    behind, interval = difference(second.bits, best.bits, seed=0)
    sure = interval is not None and interval[0] > 0
    word = "predicts this code best" if sure else "is ahead, but within the noise of this sample"
    spread = f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""
    return (
        f"{best.name} {word}: {best.bits.bits_per_byte:.3f} bits per byte; next is {second.name}, "
        f"{behind:.3f}{spread} behind, file by file."
    )


def markdown(results: Sequence[CandidateResult], code: Codebase, total_files: int) -> str:
    """Return the whole comparison as a Markdown page."""
    order = ranked(results)
    lines = ["# Which base for this code?", "", verdict(results), ""]
    lines += ["| | " + " | ".join(result.name for result in order) + " |", "|" + "---|" * (len(order) + 1)]
    lines += ["| " + " | ".join(cells) + " |" for cells in zip(ROWS, *map(_cells, order), strict=True)]
    explained = [f"- {line}" for line in legend(results, code, total_files)]
    return "\n".join([*lines, "", *explained, "", "![comparison](comparison.png)", ""])


COLOUR = "#3b6ea8"


def draw(results: Sequence[CandidateResult], path: Path) -> None:
    """Write the picture as PNG: bits per byte, state tracking, and writing speed, a bar a candidate."""
    order = ranked(results)
    bits = [(result.bits.bits_per_byte, result.bits.interval) for result in order]
    states = [(state.distance_per_character, state.interval) for result in order if (state := result.state)]
    speeds = [(result.speed["decode_single"], None) for result in order]
    panels = 3 if states else 2
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(4.0 * panels, 1.4 + 0.55 * len(order)), layout="constrained")
        axes = figure.subplots(1, panels, sharey=True)
        _bars(axes[0], order, bits, "bits per byte\n(lower is better)")
        if order[0].state:
            _bars(axes[1], order, states, "state: edits per character\n(lower is better; dashed: copying)")
            axes[1].axvline(order[0].state.copying_per_character, color="#d08020", linestyle="--", linewidth=1.5)
        _bars(axes[-1], order, speeds, "writing one sequence, tokens/s\n(higher is better)")
        axes[0].invert_yaxis()
        figure.savefig(path, format="png", dpi=150, metadata={"Software": "etude"})


def _bars(axis: Any, order: Sequence[CandidateResult], measured: Sequence[tuple[float, Interval]], title: str) -> None:
    places = list(range(len(order)))
    axis.barh(places, [value for value, _ in measured], color=COLOUR, height=0.6)
    for place, (value, interval) in zip(places, measured, strict=True):
        if interval:
            axis.plot(interval, [place, place], color="black", linewidth=1.2)
        axis.annotate(f" {value:.3g}", (max(value, interval[1] if interval else value), place), va="center")
    axis.set_yticks(places, [f"{result.name}\n{human(result.parameters)}" for result in order])
    axis.set_title(title, fontsize=9, loc="left")
    axis.margins(x=0.18)
    axis.set_xlim(left=0)
