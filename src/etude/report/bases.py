"""A comparison of bases as people read it: a table, what its numbers mean, a verdict, and a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from etude.bench.base_comparison import CandidateResult, difference
from etude.report.page import COLOURS, Table, drawing, human, terminal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich import table as rich_table

    from etude.data.codebase import Codebase

Interval = tuple[float, float] | None
ROWS = ("parameters", "bits/byte ↓", "state ↓", "prefill, tokens/s ↑", "decode, tokens/s ↑", "memory ↓", "context",
        "licence")  # fmt: skip


def ranked(results: Sequence[CandidateResult]) -> list[CandidateResult]:
    """Return the candidates by their bits per byte, the best first."""
    return sorted(results, key=lambda result: result.bits.bits_per_byte)


def _rows(results: Sequence[CandidateResult]) -> list[tuple[str, ...]]:
    return list(zip(ROWS, *map(_cells, ranked(results)), strict=True))


def _cells(result: CandidateResult) -> tuple[str, ...]:
    active = f" ({human(result.active_parameters)} active)" if result.active_parameters != result.parameters else ""
    bits, state, speed = result.bits, result.state, result.speed
    tracked = _with_interval(state.distance_per_character, state.interval) if state else "–"
    quality = (_with_interval(bits.bits_per_byte, bits.interval), tracked)
    decode = f"{speed['decode_single']:,.1f} / {speed['decode_batch']:,.1f}"
    speeds = (f"{speed['prefill']:,.0f}", decode, f"{speed['peak_bytes'] / 1e9:.2f} GB")
    return (human(result.parameters) + active, *quality, *speeds, f"{result.context:,}", result.licence)


def _with_interval(value: float, interval: Interval) -> str:
    return f"{value:.3f} [{interval[0]:.2f}–{interval[1]:.2f}]" if interval else f"{value:.3f}"


def table(results: Sequence[CandidateResult]) -> rich_table.Table:
    """Return the table for the terminal: a column a candidate, so that a few fit into eighty characters."""
    heads = ["", *(f">{result.name}" for result in ranked(results))]
    return terminal(Table(heads, _rows(results)), title="Candidates on your code")


def legend(results: Sequence[CandidateResult], code: Codebase, total_files: int) -> list[str]:
    """Return what the numbers mean and on what they were measured."""
    first, lines = results[0], []
    lines.append(
        f"bits/byte: surprise at the code, lower is better; {first.bits.bytes:,} bytes in {first.bits.files} of {total_files} files "
        f"of {code.root}; in brackets a 95% interval over files."
    )
    if first.state:
        copying = first.state.copying_per_character
        better = any(result.state and result.state.distance_per_character < copying for result in results)
        beaten = "" if better else ", and no candidate does better than that"
        lines.append(
            f"state: edit distance per character of a file written out after a chain of edits, {first.state.tasks} tasks "
            f"({first.state.from_git} from git history); copying the unchanged file scores {copying:.3f}{beaten}."
        )
    speed = first.speed
    lines.append(
        f"prefill: a prompt of {speed['prompt']} tokens; decode: one sequence / a batch of {speed['batch']}, plain transformers; "
        f"memory: peak of the {speed['peak_of']}."
    )
    lines += [f"{result.name}: {'; '.join(result.duties)}." for result in ranked(results)]
    for result in results:
        if lossy := result.bits.lossy_files:
            lost = f"its tokeniser does not give back {lossy} of {result.bits.files} files exactly"
            lines.append(f"{result.name}: {lost}; its bits per byte are not comparable.")
    return lines


def verdict(results: Sequence[CandidateResult]) -> str:
    """Return the result in one sentence; a difference within the noise is called that."""
    best, *others = ranked(results)
    if not others:
        return f"{best.name}: {best.bits.bits_per_byte:.3f} bits per byte."
    second = others[0]
    behind, interval = difference(second.bits, best.bits)
    sure = interval is not None and interval[0] > 0
    word = "predicts this code best" if sure else "is ahead, but within the noise of this sample"
    spread = f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""
    following = f"next is {second.name}, {behind:.3f}{spread} behind, file by file"
    return f"{best.name} {word}: {best.bits.bits_per_byte:.3f} bits per byte; {following}."


def markdown(results: Sequence[CandidateResult], code: Codebase, total_files: int) -> str:
    """Return the whole comparison as a Markdown page; `etude compare` prints its list items on the terminal, too."""
    names = [result.name for result in ranked(results)]
    rows = [("", *names), ("---",) * (len(names) + 1), *_rows(results)]
    lines = ["# Which base for this code?", "", verdict(results), "", *(f"| {' | '.join(row)} |" for row in rows)]
    explained = [f"- {line}" for line in legend(results, code, total_files)]
    return "\n".join([*lines, "", *explained, "", "![comparison](comparison.png)", ""])


def draw(results: Sequence[CandidateResult], path: Path) -> None:
    """Write the picture as PNG: bits per byte, state tracking, and decoding speed, a bar a candidate."""
    order = ranked(results)
    bits = [(result.bits.bits_per_byte, result.bits.interval) for result in order]
    states = [(state.distance_per_character, state.interval) for result in order if (state := result.state)]
    speeds = [(result.speed["decode_single"], None) for result in order]
    panels = 3 if states else 2
    with drawing(path, 4.0 * panels, 1.4 + 0.55 * len(order)) as figure:
        axes = figure.subplots(1, panels, sharey=True)
        _bars(axes[0], order, bits, "bits per byte\n(lower is better)")
        if order[0].state:
            _bars(axes[1], order, states, "state: edits per character\n(lower is better; dashed: copying)")
            axes[1].axvline(order[0].state.copying_per_character, color=COLOURS[1], linestyle="--", linewidth=1.5)
        _bars(axes[-1], order, speeds, "decoding one sequence, tokens/s\n(higher is better)")
        axes[0].invert_yaxis()


def _bars(axis: Any, order: Sequence[CandidateResult], measured: Sequence[tuple[float, Interval]], title: str) -> None:
    places = list(range(len(order)))
    axis.barh(places, [value for value, _ in measured], color=COLOURS[0], height=0.6)
    for place, (value, interval) in zip(places, measured, strict=True):
        if interval:
            axis.plot(interval, [place, place], color="black", linewidth=1.2)
        axis.annotate(f" {value:.3g}", (max(value, interval[1] if interval else value), place), va="center")
    axis.set_yticks(places, [f"{result.name}\n{human(result.parameters)}" for result in order])
    axis.set_title(title, fontsize=9, loc="left")
    axis.margins(x=0.18)
    axis.set_xlim(left=0)
