"""A comparison as people read it: a table for the terminal, and the same as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.bench.compare import CandidateResult
    from etude.data.codebase import Codebase

COLUMNS = ("base", "parameters", "bits/byte ↓", "state ↓", "read tok/s", "write tok/s", "memory", "context", "licence")


def human(count: float) -> str:
    """Return a count in at most four characters and a unit: 4.7M, 135M, 1.03T."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def rows(results: Sequence[CandidateResult]) -> list[tuple[str, ...]]:
    """Return the cells of the table, best bits per byte first."""
    return [_row(result) for result in ranked(results)]


def ranked(results: Sequence[CandidateResult]) -> list[CandidateResult]:
    """Return the candidates in the order of their bits per byte."""
    return sorted(results, key=lambda result: result.bits.bits_per_byte)


def _row(result: CandidateResult) -> tuple[str, ...]:
    active = f" ({human(result.active_parameters)} active)" if result.active_parameters != result.parameters else ""
    speed = result.speed
    return (
        result.name,
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
    """Return the table for the terminal."""
    drawn = Table(title="Candidates on your code", title_justify="left")
    for index, column in enumerate(COLUMNS):
        drawn.add_column(column, justify="left" if index in {0, len(COLUMNS) - 1} else "right")
    for cells in rows(results):
        drawn.add_row(*cells)
    return drawn


def legend(results: Sequence[CandidateResult], code: Codebase, total_files: int) -> list[str]:
    """Return what the numbers mean and on what they were measured."""
    first = results[0]
    lines = [
        f"bits/byte: surprise at the code, lower is better; {first.bits.bytes:,} bytes in {first.bits.files} of {total_files} files "
        f"of {code.root}; in brackets a 95% interval over files.",
    ]
    if first.state:
        lines.append(
            f"state: edit distance per character of a file written out after a chain of edits, {first.state.tasks} tasks "
            f"({first.state.from_git} from git history); copying the unchanged file scores {first.state.copying_per_character:.3f}."
        )
    speed = first.speed
    lines.append(
        f"read: a prompt of {speed['prompt']} tokens; write: one sequence / {speed['batch']} together, plain transformers; "
        f"memory: peak of the {speed['peak_of']}."
    )
    lines += [f"{result.name}: {'; '.join(result.duties)}." for result in ranked(results)]
    lossy = [result for result in results if result.bits.lossy_files]
    lines += [
        f"{result.name}: its tokeniser does not give back {result.bits.lossy_files} of {result.bits.files} files exactly; "
        "its bits per byte are not comparable."
        for result in lossy
    ]
    return lines


def verdict(results: Sequence[CandidateResult]) -> str:
    """Return one sentence on what was found; a difference within the noise is called that."""
    order = ranked(results)
    best = order[0]
    if len(order) == 1:
        return f"{best.name}: {best.bits.bits_per_byte:.3f} bits per byte."
    second = order[1]
    sure = best.bits.interval and second.bits.interval and best.bits.interval[1] < second.bits.interval[0]
    word = "predicts this code best" if sure else "is ahead, within the noise of this sample,"
    return (
        f"{best.name} {word} at {best.bits.bits_per_byte:.3f} bits per byte; next is {second.name} "
        f"at {second.bits.bits_per_byte:.3f}."
    )


def markdown(results: Sequence[CandidateResult], code: Codebase, total_files: int) -> str:
    """Return the whole comparison as a Markdown page."""
    lines = ["# Which base for this code?", "", verdict(results), ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows(results)]
    lines += ["", *(f"- {line}" for line in legend(results, code, total_files)), "", "![comparison](comparison.png)", ""]
    return "\n".join(lines)
