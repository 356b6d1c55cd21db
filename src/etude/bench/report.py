"""A comparison as people read it: a table for the terminal, and the same as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from etude.bench.perplexity import difference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.bench.compare import CandidateResult
    from etude.data.codebase import Codebase

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
