"""The report of a corpus: what is in it, where it is from and what was left out, on one page, as Markdown and as HTML.

The page is put together once, as text, tables and excerpts under headings, and written twice. Names and excerpts are the words
of strangers: each is escaped at the one place where it is written, and characters that do not show are spelt out.

A corpus as one picture: tokens by source, licences, where bytes went, how long documents are.
"""

from __future__ import annotations

import base64
import html
import json
import re
import unicodedata
from collections import Counter
from importlib import resources
from itertools import groupby, islice
from operator import itemgetter
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

from etude.data.build import HITS, SAMPLES
from etude.data.document import UNKNOWN
from etude.data.filters.licence import Policy
from etude.data.manifest import MANIFEST, load_manifest
from etude.errors import UserError
from etude.files import read_json, whole_file, write_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from etude.data.manifest import Manifest, SourceEntry


QUESTION = "What is in this corpus, where is it from, and what was left out?"
PICTURED = "Tokens by source; licences by bytes; bytes left out at each step; documents by length"
STEPS = {  # in the order documents meet them
    "read": "it could not be read", "decode": "it is no text", "language": "it is neither code nor prose",
    "selection": "the recipe does not ask for it", "generated": "nobody wrote it there",
    "quality": "there is little to learn from it", "licence": "it may not be used",
    "contamination": "it would give answers of benchmarks away", "duplicates": "it is there already",
}  # fmt: skip
DUTIES: tuple[tuple[Any, str], ...] = (  # by the narrowest policy that lets a licence pass
    (["0BSD", "CC-PDDC", "CC0-1.0", "LicenseRef-public-domain", "MIT-0", "Unlicense", "WTFPL"], "none"),
    ("permissive", "copies keep the notices and the licence text"),
    ("copyleft", "copies, and what is made from it, keep the notices and this licence, with source"),
)
EVIDENCE = {
    "spdx-tag": "a tag in the file", "header": "words at the top of the file", "text-hash": "a licence file, word for word",
    "classifier": "a licence file, recognised", "metadata": "metadata of the package or the row",
    "declared": "the recipe", "none": "nothing",
}  # fmt: skip
LAYOUT = "\n\t"
LISTED, SAMPLED = 20, 3  # lines of a table, samples of a reason; what goes beyond is added up, or counted
MARKDOWN = str.maketrans(
    {sign: f"\\{sign}" for sign in "\\`*_{}[]~$!#"} | {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;"}
)

Row = dict[str, Any]


class Table(NamedTuple):
    """Whole numbers are counts, others are shares; a head that begins with `>` stands over numbers, which go to the right."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str | float]]


class Folded(NamedTuple):
    """Texts as they were found, each with what it is; HTML shows them when asked to."""

    title: str
    texts: Sequence[tuple[str, str]]


Block = str | Table | Folded
Page = dict[str, list[Block]]  # by heading


def write_report(corpus: Path, target: Path) -> None:
    """Write report.md, report.html and report.png; the same corpus gives the same files."""
    manifest = load_manifest(corpus)
    try:
        samples = read_json(corpus / SAMPLES)
        with (corpus / HITS).open(encoding="utf-8") as lines:
            hits = [json.loads(line) for line in islice(lines, LISTED)]
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"{corpus} is not a whole corpus: {error}; build it again") from None
    page = {**_contents(manifest), **_left_out(manifest, samples, hits), **_made(manifest)}
    with whole_file(target / "report.png") as beside:
        draw(manifest, beside)
    write_text(target / "report.md", markdown(page))
    write_text(target / "report.html", html_page(page, (target / "report.png").read_bytes()))


def show_report(folder: Path, console: Console, page: Path) -> None:
    """Print a line for each source of a corpus, and where its page lies."""
    from rich import table
    from rich.text import Text

    manifest = load_manifest(folder)
    drawn = table.Table(box=None, pad_edge=False)
    for head in ("source", ">documents\nin → kept", ">MB", ">tokens train\n+ held-out", ">share", "dropped most"):
        drawn.add_column(head.removeprefix(">"), justify="right" if head[0] == ">" else "left", overflow="fold")
    for source in manifest.sources:
        drops = [f"{count:,} {reason}" for reason, count in list(added([source], "drops").items())[:2]]
        tokens = f"{source.tokens['train']:,}\n+ {source.tokens['heldout']:,}"
        cells = (source.name, f"{source.documents_in:,} → {source.kept:,}", mb(source.kept_bytes), tokens,
                 manifest.shares[source.name], "\n".join(drops) or "nothing")  # fmt: skip
        drawn.add_row(*(Text(visible(cell, "\n")) for cell in cells))
    console.print(drawn)
    console.print(f"report: {page / 'report.html'}", markup=False, highlight=False, soft_wrap=True)


def total(sources: Iterable[SourceEntry], key: str) -> int:
    """Return a number of sources, added up."""
    return sum(getattr(source, key) for source in sources)


def added(sources: Iterable[SourceEntry], key: str) -> Counter[str]:
    """Return counts of sources, added up, the largest first; equal ones by name."""
    found: Counter[str] = Counter()
    for source in sources:
        found.update(getattr(source, key))
    return Counter(dict(sorted(found.items(), key=lambda entry: (-entry[1], entry[0]))))


def largest(counts: Mapping[str, int], most: int = LISTED) -> dict[str, int]:
    """Return the first counts, and all others as one."""
    listed = list(counts.items())
    first, rest = (listed[:most], listed[most:]) if len(listed) > most + 1 else (listed, [])
    return dict(first) | ({f"{len(rest):,} others": sum(count for _, count in rest)} if rest else {})


def dropped(manifest: Manifest, key: str) -> dict[str, Counter[str]]:
    """Return `drops` or `dropped_bytes` by step and reason, the steps in their order."""
    found: dict[str, Counter[str]] = {step: Counter() for step in STEPS}
    for name, count in added(manifest.sources, key).items():
        step, _, reason = name.partition(": ")
        found.setdefault(step, Counter())[reason] += count
    return {step: reasons for step, reasons in found.items() if reasons}


def duty(licence: str) -> str:
    """Return in a few words what a licence asks of whoever passes documents on."""
    for policy, words in DUTIES:
        if Policy(policy, unknown="drop").reason(licence) is None:
            return words
    return "not known, so nobody has allowed its use" if licence == UNKNOWN else "none that we know: read it"


def lengths(manifest: Manifest) -> tuple[range, dict[str, list[int]]]:
    """Return the powers of two that lengths begin with, and for each domain how many documents are from each to the next."""
    longest = max(map(len, manifest.histogram.values()), default=0)
    padded = {domain: counts + [0] * (longest - len(counts)) for domain, counts in manifest.histogram.items()}
    first = next((bit for bit in range(longest) if any(counts[bit] for counts in padded.values())), longest)
    return range(first, longest), {domain: counts[first:] for domain, counts in padded.items()}


def _contents(manifest: Manifest) -> Page:
    """Return what is in the corpus and where it is from."""
    sources, share = manifest.sources, manifest.shares
    tokens, drops, licences, told = (added(sources, key) for key in ("tokens", "drops", "licences", "evidence"))
    domains = {name: [each for each in sources if each.domain == name] for name in (each.domain for each in sources)}
    whole = max(licences.total(), 1)
    bound = sum(size for licence, size in licences.items() if duty(licence) != "none") / whole
    bits, counts = lengths(manifest)
    return {
        "In short": [
            " ".join([f"{tokens['train']:,} tokens to train on and {tokens['heldout']:,} held out to measure with, in "
                      f"{total(sources, 'kept'):,} documents from {len(sources):,} source{'s'[: len(sources) != 1]}.",
                      *(f"{size / whole:.1%} of the bytes are {each}, more than any other." for each, size in licences.most_common(1)),
                      *(f"{drops.total():,} documents were left out, most often for “{each}”." for each, _ in drops.most_common(1))]),
            Table(("", ">came in", ">kept", ">left out"), [
                ("documents", total(sources, "documents_in"), total(sources, "kept"), drops.total()),
                ("MB", mb(total(sources, "bytes_in")), mb(total(sources, "kept_bytes")), mb(added(sources, "dropped_bytes").total())),
                ("tokens", f"about {total(sources, 'tokens_in'):,}", tokens.total(), "")])],
        "Where it is from": [
            Table(("source", "domain", "from", "revision", "digest", "written by"), [
                (each.name, each.domain, short(each.location), (each.revision or "–")[:12], each.digest[:12],
                 f"model {each.generated_by[:12]}" if each.generated_by else "–") for each in sources]),
            Table(("source", ">documents in", ">kept", ">MB", ">tokens to train on", ">held out", ">share of the mix"), [
                (each.name, each.documents_in, each.kept, mb(each.kept_bytes), each.tokens["train"], each.tokens["heldout"],
                 share[each.name]) for each in sources]),
            f"The digest is of the names and contents of all that was read; {MANIFEST} has it at full length. The share is of the "
            "tokens seen in training, as the recipe weighs the sources."],
        "Licences": [
            f"{bound:.1%} of the bytes are under licences with duties, or under none that is known. Whether a model is bound by the "
            "licences of what it learnt from is not settled. Facts for engineering, not legal advice.",
            Table(("licence", ">MB", ">share", "sources", "duties"), [
                (name, mb(size), size / whole, short(", ".join(each.name for each in sources if name in each.licences)),
                 duty(name) if name in licences else "") for name, size in largest(licences).items()]),
            _by_bytes("what told the licence", Counter({EVIDENCE.get(name, name): size for name, size in told.items()}))],
        "Domains and languages": [
            Table(("domain", ">sources", ">documents", ">MB", ">tokens", ">share of the mix"), [
                (domain, len(here), total(here, "kept"), mb(total(here, "kept_bytes")), added(here, "tokens").total(),
                 sum(share[each.name] for each in here)) for domain, here in domains.items()]),
            _by_bytes("language", added(sources, "languages"))],
        "How long the documents are": [
            f"Documents by tokens, the one at the end of each included; a row for training holds {manifest.length:,}.",
            Table((">tokens", *(f">{domain}" for domain in counts)), [
                (f"{1 << bit:,} to {(2 << bit) - 1:,}", *here) for bit, *here in zip(bits, *counts.values(), strict=True)])],
    }  # fmt: skip


def _by_bytes(head: str, sizes: Counter[str]) -> Table:
    whole = max(sizes.total(), 1)
    rows = [(name or "not told", mb(size), size / whole) for name, size in largest(sizes).items()]
    return Table((head, ">MB", ">share"), rows)


def _sum(sources: Sequence[SourceEntry]) -> str:
    """Say that nothing disappeared."""
    gone, kept, came = added(sources, "drops").total(), total(sources, "kept"), total(sources, "documents_in")
    sure = "all that came in" if gone + kept == came else f"but {came:,} came in: THE COUNTS ARE WRONG"
    return f"{kept:,} documents kept + {gone:,} left out = {kept + gone:,}, {sure}."


def _left_out(manifest: Manifest, samples: list[Row], hits: list[Row]) -> Page:
    """Return what is not in the corpus, and why."""
    drops, looked = dropped(manifest, "drops"), manifest.settings.get("contamination", {}).get("tasks")
    why = "; ".join(f"{step}: {STEPS[step]}" for step in drops if step in STEPS)
    excerpts: list[Block] = [
        Folded(f"{step}: {reason}", [(_where(each), each["excerpt"] or "(no text)") for each in islice(group, SAMPLED)])
        for (step, reason), group in groupby(samples, itemgetter("step", "reason"))
        if reason in largest(drops.get(step, {}))
    ]
    return {
        "Where documents went": [
            _sum(manifest.sources), *[f"The steps in their order, and why a document leaves there. {why.capitalize()}."] * bool(why),
            Table(("step", "reason", ">documents", ">MB"), _reasons(manifest)),
            "The MB need not add up to those that came in: line ends and scrubbed texts change the size of what stays."],
        "What was scrubbed": [
            "Secrets and personal data are replaced by placeholders; the document stays. No detector finds everything.",
            Table(("what", ">times replaced"), list(largest(added(manifest.sources, "scrubbed")).items()))],
        "Benchmark tasks": [
            f"Documents that share code with benchmark tasks: {manifest.contamination or 0:,}. {HITS} lists all, this "
            f"table the first {LISTED}." if looked else "The recipe names no tasks, so none were looked for.",
            Table(("document", "tasks", ">shared runs", "such as"), [
                (_where(hit), short(", ".join(hit["tasks"])), hit["runs"], short(" … ".join(hit["words"]))) for hit in hits])],
        "Samples of what was left out": [
            f"Up to {SAMPLED} for each reason named above; {SAMPLES} has more. Excerpts are scrubbed as the "
            "documents are; read them all the same before you publish this page.",
            *(excerpts or ["None."])],
        "Duplicates": [
            "Looked for across all sources. Of documents that are alike, the one whose source comes first in the recipe stays.",
            Table(("source", "kind", ">documents", ">share of those in", ">MB"), [
                (each.name, name.partition(": ")[2], count, count / each.documents_in, mb(each.dropped_bytes.get(name, 0)))
                for each in manifest.sources for name, count in each.drops.items() if name.startswith("duplicates: ")])],
    }  # fmt: skip


def _reasons(manifest: Manifest) -> list[tuple[str, str, int, str]]:
    sizes, rows = dropped(manifest, "dropped_bytes"), []
    for step, reasons in dropped(manifest, "drops").items():
        here = largest({reason: sizes.get(step, Counter())[reason] for reason in reasons})
        rows += [(step, reason, count, mb(here[reason])) for reason, count in largest(reasons).items()]
    return rows


def _where(entry: Row) -> str:
    size = f", {entry['size']:,} bytes" if "size" in entry else ""
    return short(f"{entry['repository']}/{entry['path']}") + size


def _made(manifest: Manifest) -> Page:
    """Return what it takes to make and to use the corpus."""
    rows = sum(shard.rows for shard in manifest.shards)
    agreed = "agreed" if manifest.exact_fast_tokeniser else "did not agree"
    facts = {
        "corpus": f"SHA-256 {manifest.digest}",
        "shards": f"{len(manifest.shards):,}, with {rows:,} rows of {manifest.length:,} tokens as {manifest.dtype}",
        "tokeniser": f"SHA-256 {manifest.tokeniser}, {manifest.vocabulary:,} tokens; the fast one {agreed} with the reference",
        "fill-in-the-middle": f"{total(manifest.sources, 'fim'):,} files",
        "etude": manifest.etude,
    }  # fmt: skip
    return {
        "What is held out": [
            "Whole repositories, so that no neighbour of a held-out file is trained on; one held out is so in all sources.",
            Table(("source", ">repositories", ">tokens held out", ">share", "held out"), [
                (each.name, each.repositories, each.tokens["heldout"], each.tokens["heldout"] / max(sum(each.tokens.values()), 1),
                 _held_names(each)) for each in manifest.sources])],
        "Made with": [Table(("what", "which"), list((facts | manifest.tools).items()))],
        "Settings": [Folded("The table [data] of the recipe", [("Defaults included.", json.dumps(manifest.settings, indent=1))])],
    }  # fmt: skip


def _held_names(source: SourceEntry) -> str:
    names = source.heldout_repositories
    if not names:
        return "single documents, by a hash of their names" if source.tokens["heldout"] else "nothing"
    more = f"{len(names) - LISTED} more, see {MANIFEST}"
    return ", ".join(names[:LISTED]) + (f" and {more}" if len(names) > LISTED else "")


def mb(size: int) -> str:
    """Return bytes as megabytes."""
    return "<0.01" if 0 < size < 5_000 else f"{size / 1e6:,.2f}"


def short(text: str, most: int = 120) -> str:
    """Return the text, cut where it is too long for a table."""
    return text if len(text) <= most else text[: most - 1] + "…"


def visible(cell: str | float, layout: str = "") -> str:
    """Write a cell out. Characters that do not show, or change how others do, are spelt; those in `layout` stay."""
    text = cell if isinstance(cell, str) else f"{cell:,}" if isinstance(cell, int) else f"{cell:.1%}"
    plain = (char in layout or char.isprintable() or unicodedata.category(char) == "Zs" for char in text)
    return "".join(c if shows else c.encode("unicode_escape").decode() for c, shows in zip(text, plain, strict=True))


def in_markdown(cell: str | float) -> str:
    """Return what Markdown shows as this text, in one line, also in a table."""
    return visible(cell).translate(MARKDOWN)


def in_html(cell: str | float, layout: str = "") -> str:
    """Return what HTML shows as this text."""
    return html.escape(visible(cell, layout))


def fenced(text: str) -> str:
    """Return a text as code in Markdown; the fence is longer than any inside."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return "\n".join([fence, visible(text, LAYOUT), fence])


def markdown(page: Page) -> str:
    """Return the page as Markdown."""
    answer, *more = ("\n\n".join([f"## {head}", *map(block_in_markdown, blocks)]) for head, blocks in page.items())
    return "\n\n".join([f"# {QUESTION}", answer, f"![{PICTURED}](report.png)", *more]) + "\n"


def block_in_markdown(block: Block) -> str:
    """Return a paragraph, a table or folded texts as Markdown."""
    if isinstance(block, str):
        return in_markdown(block)
    if isinstance(block, Folded):
        texts = [f"{in_markdown(name)}\n\n{fenced(text)}" for name, text in block.texts]
        return "\n\n".join([f"### {in_markdown(block.title)}", *texts])
    heads = [in_markdown(head.removeprefix(">")) for head in block.heads]
    rule = ["---:" if head.startswith(">") else "---" for head in block.heads]
    rows = [map(in_markdown, row) for row in block.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, rule, *rows]) if rows else "None."


def html_page(page: Page, picture: bytes) -> str:
    """Return the page as HTML that needs no other file."""
    answer, *more = ("\n".join([f"<h2>{head}</h2>", *map(block_in_html, blocks)]) for head, blocks in page.items())
    template = resources.files("etude.report").joinpath("page.html").read_text(encoding="utf-8")
    told = {"title": QUESTION, "pictured": PICTURED, "picture": base64.b64encode(picture).decode()}
    return Template(template).substitute(told, answer=answer, more="\n".join(more))


def block_in_html(block: Block) -> str:
    """Return the same as HTML."""
    if isinstance(block, str):
        return f"<p>{in_html(block)}</p>"
    if isinstance(block, Folded):
        texts = [f"<p>{in_html(name)}</p>\n<pre>\n{in_html(text, LAYOUT)}</pre>" for name, text in block.texts]
        return "\n".join([f"<details><summary>{in_html(block.title)}</summary>", *texts, "</details>"])
    kinds = [' class="number"' if head.startswith(">") else "" for head in block.heads]

    def row(tag: str, cells: Iterable[str | float]) -> str:
        drawn = (f"<{tag}{kind}>{in_html(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(drawn)}</tr>"

    heads = row("th", (head.removeprefix(">") for head in block.heads))
    rows = "\n".join(row("td", cells) for cells in block.rows)
    drawn = f"<table><thead>{heads}</thead><tbody>\n{rows}\n</tbody></table>"
    return f'<div class="wide" tabindex="0">{drawn}</div>' if rows else "<p>None.</p>"


COLOURS = ("#3b6ea8", "#d08020", "#4f9d69", "#a8557f", "#7d7d7d", "#5cb3cc", "#c4b13c", "#6a51a3")
SOURCES, LICENCES = 15, 8  # bars; the rest is added up
NAME = 26  # characters
TOKENS = ((1e9, "billion tokens"), (1e6, "million tokens"), (1e3, "thousand tokens"), (1, "tokens"))
BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10,
         "axes.titleweight": "bold", "text.parse_math": False,
         "figure.constrained_layout.w_pad": 0.12, "figure.constrained_layout.h_pad": 0.12}  # fmt: skip


def draw(manifest: Manifest, path: Path) -> None:
    """Write the picture as PNG, 1800 pixels wide."""
    with mpl.rc_context(STYLE):
        panels(manifest).savefig(path, format="png", dpi=150, metadata={"Software": None})


def panels(manifest: Manifest) -> Figure:
    """Return the picture, as high as its bars need."""
    sources = sorted(manifest.sources, key=lambda source: -sum(source.tokens.values()))
    train = largest({source.name: source.tokens["train"] for source in sources}, SOURCES)
    held = largest({source.name: source.tokens["heldout"] for source in sources}, SOURCES)
    licences = largest(added(manifest.sources, "licences"), LICENCES)
    left, gone = _funnel(manifest)
    heights = [1.2 + 0.26 * max(len(bars), 6) for bars in (max(train, licences, key=len), left)]
    figure = Figure(figsize=(12, sum(heights)), layout="constrained")
    (by_source, by_licence), (by_step, by_length) = figure.subplots(2, 2, height_ratios=heights)
    _bars(by_source, "Tokens by source", {"to train on": train, "held out": held}, TOKENS)
    _bars(by_licence, "Licences of what was kept", {"": licences}, BYTES)
    _bars(by_step, "Where bytes went", {"still in": left, "left out here": gone}, BYTES)
    _histogram(by_length, manifest)
    return figure


def _funnel(manifest: Manifest) -> tuple[dict[str, int], dict[str, int]]:
    """Return for each step the bytes that are left after it and those it dropped."""
    gone = {step: reasons.total() for step, reasons in dropped(manifest, "dropped_bytes").items()}
    left, still = {}, total(manifest.sources, "bytes_in")
    for step, size in gone.items():
        still -= size
        left[step] = still
    return left | {"kept": total(manifest.sources, "kept_bytes")}, gone | {"kept": 0}


def _bars(axis: Any, title: str, parts: Mapping[str, Mapping[str, int]], units: Sequence[tuple[float, str]]) -> None:
    """Draw a bar for each name, its parts one after another, with their numbers behind it."""
    names = list(next(iter(parts.values())))
    ends = [0.0] * len(names)
    longest = max((sum(part[name] for part in parts.values()) for name in names), default=0)
    size, unit = next((each for each in units if longest >= each[0]), units[-1])
    for (label, part), colour in zip(parts.items(), COLOURS, strict=False):
        widths = [part[name] / size for name in names]
        axis.barh(range(len(names)), widths, left=ends, color=colour, height=0.65, label=label)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for place, name in enumerate(names):
        numbers = " + ".join(_number(part[name] / size) for part in parts.values() if part[name]) or "0"
        axis.annotate(numbers, (ends[place], place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    _label(axis, title, unit)
    axis.set_yticks(range(len(names)), [_name(name) for name in names])
    axis.set_ylim(max(len(names), 4) - 0.4, -0.6)
    axis.set_xlim(0, max(longest / size, 1e-9) * 1.45)
    if len(parts) > 1:
        axis.set_title(title, loc="left", pad=22)
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, borderaxespad=0.1, borderpad=0.2)


def _histogram(axis: Any, manifest: Manifest) -> None:
    bits, counts = lengths(manifest)
    ordered = sorted(counts, key=lambda domain: -sum(counts[domain]))
    first, rest = ordered[: len(COLOURS) - 1], ordered[len(COLOURS) - 1 :]
    stacked = [(_name(domain), counts[domain]) for domain in first]
    if rest:
        others = [sum(here) for here in zip(*(counts[each] for each in rest), strict=True)]
        stacked.append((f"{len(rest)} more", others))
    below = [0] * len(bits)
    for (name, here), colour in zip(stacked, COLOURS, strict=False):
        axis.bar(bits, here, bottom=below, width=0.85, align="edge", color=colour, label=name)
        below = [under + more for under, more in zip(below, here, strict=True)]
    _label(axis, "Lengths of documents", "tokens", "documents")
    shown = bits[:: 1 + len(bits) // 9]
    axis.set_xticks(shown, [f"{1 << bit % 10}{'_kMGT'[bit // 10]}".replace("_", "") for bit in shown])
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _label(axis: Any, title: str, across: str, up: str = "") -> None:
    axis.set_title(title, loc="left")
    axis.set_xlabel(across)
    axis.set_ylabel(up)
    axis.grid(axis="y" if up else "x", color="#e3e6e9", linewidth=0.6)
    axis.set_axisbelow(True)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.001 else "<0.001"


def _name(name: str) -> str:
    """Return a name that fits beside a bar, in letters that the font has; names differ at both ends."""
    fitting = name if len(name) <= NAME else f"{name[: NAME // 2]}…{name[1 - NAME // 2 :]}"
    return "".join(char if char.isprintable() and (char < "\u0250" or char == "…") else "·" for char in fitting)
