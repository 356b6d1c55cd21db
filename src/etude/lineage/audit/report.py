"""An audit for people: one table of tests, the verdict, what it does not mean. Consoles must take text as it is, without markup."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from etude.progress import BYTES, amount

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from etude.lineage.audit.examine import Finding
    from etude.lineage.audit.sketch import Sketch


def show(finding: Finding, console: Console) -> None:
    """Print one finding."""
    table = _table(
        f"{finding.suspect} against {finding.reference} ({finding.against})", "test", "p", "effect", "layers", "note"
    )
    for test in finding.tests:
        name, layers = test.name + " (rotated back)" * test.rotated, ",".join(map(str, test.layers)) or "–"
        chance = "–" if test.log10_p is None else power(test.log10_p)
        table.add_row(name, chance, f"{test.effect:.3f}", layers, test.note)
    console.print(table)
    evidence = [each.sentence for each in (finding.tokens, finding.shapes) if each is not None]
    for line in [*evidence, *(f"not compared: {note}" for note in finding.notes)]:
        console.print(line, soft_wrap=True)
    console.print(f"{finding.verdict.word}: {finding.verdict.sentence}", style="bold", soft_wrap=True)
    for line in [*(f"  {limit}" for limit in finding.verdict.limits), effort([finding])]:
        console.print(line, style="dim", soft_wrap=True)


def show_library(findings: Sequence[Finding], console: Console) -> None:
    """Print how a model stands to every base of the library, then the best match in full."""
    title = f"{findings[0].suspect} against {len(findings)} known bases, best match first"
    table = _table(title, "base", "verdict", "p, corrected", "shape", "vocabulary")
    for finding in findings:
        verdict, words = finding.verdict, finding.tokens.kind if finding.tokens else "–"
        table.add_row(finding.reference, verdict.word, power(verdict.log10_p), finding.shapes.kind, words)
    console.print(table, "")
    show(findings[0], console)
    console.print(f"in all {effort(findings)}", style="dim", soft_wrap=True)


def show_sketches(sketches: Sequence[Sketch], console: Console) -> None:
    """Print what is in the library."""
    table = _table("Sketches of known bases", "name", "weights", "licence", "made", "from")
    for facts in (sketch.facts for sketch in sketches):
        table.add_row(facts.name, facts.model_digest[:12], facts.licence or "unknown text", facts.made, facts.source)
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(
            column, justify="right" if column in {"p", "p, corrected", "effect"} else "left", overflow="fold"
        )
    return table


def power(log10_p: float) -> str:
    """Return a p-value from its logarithm."""
    return f"{10**log10_p:.2g}" if log10_p > -4 else f"1e{log10_p:.0f}"


def effort(findings: Sequence[Finding]) -> str:
    """Return what the audit took."""
    seconds, read = sum(each.seconds for each in findings), sum(each.bytes_read for each in findings)
    share = f"{amount(read, BYTES)} read of {amount(findings[0].bytes_total, BYTES)}"
    peak = amount(max(each.peak_bytes for each in findings), BYTES)
    return f"{seconds:.1f} s; {share}, {1e9 * seconds / max(read, 1):.0f} s/GB; {peak} of memory at most"
