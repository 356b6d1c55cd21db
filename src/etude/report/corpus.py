"""The report of a corpus: what is in it, where it is from and what was left out; a page with one picture, and a short form."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.data.build import HITS, SAMPLES
from etude.data.document import UNKNOWN
from etude.data.filters.licence import refusal
from etude.data.manifest import MANIFEST, Manifest, SourceEntry, load_manifest
from etude.errors import UserError
from etude.files import read_json
from etude.report import page
from etude.report.page import COLOURS, Block, Folded, Page, Picture, Table, abridged, human, terminal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rich.console import RenderableType

    Row = dict[str, Any]

TITLE = "What is in this corpus, where is it from, and what was left out?"
PICTURE = Picture("report.png", "Tokens by source; licences by bytes; bytes left out at each step; documents by length")
WORDS = tomllib.loads(Path(__file__).with_name("corpus.toml").read_text(encoding="utf-8"))
STEPS, EVIDENCE = WORDS["steps"], WORDS["evidence"]
LISTED, SAMPLED = 20, 3  # lines of a table, samples of a reason; what goes beyond is added up, or counted
SOURCES, LICENCES = 15, 8  # bars; the rest is added up
NAME = 26  # characters beside a bar


def write_report(corpus: Path, target: Path, *, in_run: bool = False) -> None:
    """Write report.md, report.html and report.png; the same corpus gives the same files."""
    blocks = contents(corpus)
    draw(load_manifest(corpus), target / PICTURE.file)
    page.write_page(target, TITLE, blocks, in_run=in_run)


def contents(corpus: Path) -> Page:
    """Return the report of a corpus: what is in it, what is not, how it was made."""
    manifest = load_manifest(corpus)
    try:
        samples = read_json(corpus / SAMPLES)
        with (corpus / HITS).open(encoding="utf-8") as lines:
            hits = [json.loads(line) for line in islice(lines, LISTED)]
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"{corpus} is not a whole corpus: {error}; build it again") from None
    return {**_contents(manifest), **_left_out(manifest, samples, hits), **_made(manifest)}


def shown(folder: Path, target: Path) -> list[RenderableType]:
    """Return a line for each source of a corpus, and where its page lies."""
    manifest = load_manifest(folder)
    rows = []
    for source in manifest.sources:
        drops = [f"{count:,} {reason}" for reason, count in list(added([source], "drops").items())[:2]]
        documents, tokens = f"{source.documents_in:,} → {source.kept:,}", source.tokens
        rows.append((source.name, documents, mb(source.kept_bytes), f"{tokens['train']:,}\n+ {tokens['heldout']:,}",
                     manifest.shares[source.name], "\n".join(drops) or "nothing"))  # fmt: skip
    heads = ("source", ">documents\nin → kept", ">MB", ">tokens train\n+ held-out", ">share", "dropped most")
    return [terminal(Table(heads, rows)), f"report: {target / 'report.html'}"]


def mb(size: int) -> str:
    return "<0.01" if 0 < size < 5_000 else f"{size / 1e6:,.2f}"


def shortened(text: str, most: int = 120) -> str:
    """Return a text of at most so many characters, cut at its end."""
    return text if len(text) <= most else text[: most - 1] + "…"


def total(sources: Iterable[SourceEntry], key: str) -> int:
    return sum(getattr(source, key) for source in sources)


def added(sources: Iterable[SourceEntry], key: str) -> Counter[str]:
    """Return counts of sources, added up, the largest first; equal ones by name."""
    sums: Counter[str] = Counter()
    for source in sources:
        sums.update(getattr(source, key))
    return Counter(dict(sorted(sums.items(), key=lambda entry: (-entry[1], entry[0]))))


def largest(counts: Mapping[str, int], most: int = LISTED) -> dict[str, int]:
    """Return the first counts, and all others as one."""
    listed = list(counts.items())
    first, rest = (listed[:most], listed[most:]) if len(listed) > most + 1 else (listed, [])
    return dict(first) | ({f"{len(rest):,} others": sum(count for _, count in rest)} if rest else {})


def dropped(manifest: Manifest, key: str) -> dict[str, Counter[str]]:
    """Return `drops` or `dropped_bytes` by step and reason, the steps in their order."""
    by_step: dict[str, Counter[str]] = {step: Counter() for step in STEPS}
    for name, count in added(manifest.sources, key).items():
        step, _, reason = name.partition(": ")
        by_step.setdefault(step, Counter())[reason] += count
    return {step: reasons for step, reasons in by_step.items() if reasons}


def duty(licence: str) -> str:
    """Return in a few words what a licence asks of whoever passes documents on."""
    for each in WORDS["duty"]:
        if refusal(licence, each["policy"]) is None:
            return str(each["words"])
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
    tokens, drops, licences, evidence = (added(sources, key) for key in ("tokens", "drops", "licences", "evidence"))
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
                ("tokens", f"about {total(sources, 'tokens_in'):,}", tokens.total(), "")]),
            PICTURE],
        "Where it is from": [
            Table(("source", "domain", "from", "revision", "digest", "written by"), [
                (each.name, each.domain, shortened(each.location), (each.revision or "–")[:12], each.digest[:12],
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
                (name, mb(size), size / whole, shortened(", ".join(each.name for each in sources if name in each.licences)),
                 duty(name) if name in licences else "") for name, size in largest(licences).items()]),
            _by_bytes("evidence of the licence", Counter({EVIDENCE.get(name, name): size for name, size in evidence.items()}))],
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
    rows = [(name or "unknown", mb(size), size / whole) for name, size in largest(sizes).items()]
    return Table((head, ">MB", ">share"), rows)


def _sum(sources: Sequence[SourceEntry]) -> str:
    """Return a line that compares the documents kept and left out with those that came in."""
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
                (_where(hit), shortened(", ".join(hit["tasks"])), hit["runs"], shortened(" … ".join(hit["words"]))) for hit in hits])],
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
    return shortened(f"{entry['repository']}/{entry['path']}") + size


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


def draw(manifest: Manifest, path: Path) -> None:
    """Draw the corpus as one picture: 1800 pixels wide, as high as its bars need."""
    sources = sorted(manifest.sources, key=lambda source: -sum(source.tokens.values()))
    parts = {"to train on": "train", "held out": "heldout"}
    by_part = {name: {each.name: each.tokens[part] for each in sources} for name, part in parts.items()}
    tokens = {name: largest(counts, SOURCES) for name, counts in by_part.items()}
    licences = largest(added(manifest.sources, "licences"), LICENCES)
    left, gone = _funnel(manifest)
    heights = [1.2 + 0.26 * max(bars, 6) for bars in (max(len(tokens["held out"]), len(licences)), len(left))]
    with page.drawing(path, 12, sum(heights)) as figure:
        (by_source, by_licence), (by_step, by_length) = figure.subplots(2, 2, height_ratios=heights)
        _bars(by_source, "Tokens by source", tokens, "tokens")
        _bars(by_licence, "Licences of what was kept", {"": licences}, "bytes")
        _bars(by_step, "Where bytes went", {"still in": left, "left out here": gone}, "bytes")
        _histogram(by_length, manifest)


def _funnel(manifest: Manifest) -> tuple[dict[str, int], dict[str, int]]:
    """Return for each step the bytes that are left after it and those it dropped."""
    gone = {step: reasons.total() for step, reasons in dropped(manifest, "dropped_bytes").items()}
    left, still = {}, total(manifest.sources, "bytes_in")
    for step, size in gone.items():
        still -= size
        left[step] = still
    return left | {"kept": total(manifest.sources, "kept_bytes")}, gone | {"kept": 0}


def stacked(several: Sequence[Sequence[float]]) -> Iterator[tuple[Sequence[float], Sequence[float]]]:
    """Yield each series with where it begins, on top of those before it."""
    base = [0.0] * len(several[0]) if several else []
    for series in several:
        yield series, base
        base = [under + more for under, more in zip(base, series, strict=True)]


def _bars(axis: Any, title: str, parts: Mapping[str, Mapping[str, int]], unit: str) -> None:
    """Draw a bar for each name, its parts one after another, with their numbers behind it."""
    names = list(next(iter(parts.values())))
    sums = [sum(part[name] for part in parts.values()) for name in names]
    widths = [[part[name] for name in names] for part in parts.values()]
    for (series, left), name, colour in zip(stacked(widths), parts, COLOURS, strict=False):
        axis.barh(range(len(names)), series, left=left, color=colour, height=0.65, label=name)
    for place, name in enumerate(names):
        numbers = " + ".join(human(part[name]) for part in parts.values() if part[name]) or "0"
        axis.annotate(numbers, (sums[place], place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    page.label(axis, title, unit, grid="x")
    axis.xaxis.set_major_formatter(lambda value, _: human(value))
    axis.set_yticks(range(len(names)), [_name(name) for name in names])
    axis.set_ylim(max(len(names), 4) - 0.4, -0.6)
    axis.set_xlim(0, max(*sums, 1) * 1.45)
    if len(parts) > 1:
        axis.set_title(title, loc="left", pad=22)
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, borderaxespad=0.1, borderpad=0.2)


def _histogram(axis: Any, manifest: Manifest) -> None:
    bits, counts = lengths(manifest)
    ordered = sorted(counts, key=lambda domain: -sum(counts[domain]))
    first, rest = ordered[: len(COLOURS) - 1], ordered[len(COLOURS) - 1 :]
    names, series = [_name(domain) for domain in first], [counts[domain] for domain in first]
    if rest:
        names.append(f"{len(rest)} more")
        series.append([sum(here) for here in zip(*(counts[each] for each in rest), strict=True)])
    for (here, below), name, colour in zip(stacked(series), names, COLOURS, strict=False):
        axis.bar(bits, here, bottom=below, width=0.85, align="edge", color=colour, label=name)
    page.label(axis, "Lengths of documents", "tokens", "documents")
    shown = bits[:: 1 + len(bits) // 9]
    axis.set_xticks(shown, [f"{1 << bit % 10}{'_kMGT'[bit // 10]}".replace("_", "") for bit in shown])
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _name(name: str) -> str:
    """Return a name that fits beside a bar, in letters that the font has."""
    fitting = abridged(name, NAME)
    return "".join(char if char.isprintable() and (char < "\u0250" or char == "…") else "·" for char in fitting)
