"""The pages of what came out: a benchmark down to one attempt, a corpus and what was dropped, the family tree and its evidence."""

from __future__ import annotations

import contextlib
import io
import json
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

from etude.bench.trials import FILE, Results, Trial, read_results
from etude.data.build import HITS, SAMPLES
from etude.data.manifest import MANIFEST
from etude.errors import UserError
from etude.lineage.compute import compute_shares
from etude.lineage.duties import evaluate, licence_uses
from etude.lineage.record import LINEAGE_FILE, load_lineage
from etude.lineage.release import AUDIT, BOM, CARD, NOTICE
from etude.lineage.signing import PUBLIC_KEY, SIGNATURE
from etude.lineage.tree import describe, describe_compute, render
from etude.models.bases import ancestors
from etude.report import benchmark, corpus
from etude.report.page import human
from etude.run.folder import MODEL, RELEASE
from etude.web import episode
from etude.web.html import Html, blocks, details, element, facts, join, link, note, pre, section, short, table
from etude.web.overview import View, crumbs_of, page_of, state_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.agent.trace import Trace
    from etude.lineage.record import Lineage, Record
    from etude.web.reading import Lines, Run, Stage

MARKS = {"pass": "✓", "fail": "✗", "invalid": "–"}
ATTEMPTS = "Each mark is an attempt: ✓ passed, ✗ failed, – invalid. A task leads to its attempts."
OUTCOMES = {"fires": "holds", "not": "does not apply", "asks": "depends on you"}  # of a duty
FOUND = 50  # lines of a search
ABRIDGED = 40  # parents and files named of a record


# ---- a benchmark


def bench(stage: Stage) -> View:
    """Show a benchmark: its four axes with intervals, and the grid of tasks and models."""
    try:
        results = trials_of(stage)
    except UserError as error:
        return page_of(stage, note(str(error), "empty"))
    scored = benchmark.Scored(results)
    grid, more = _grid(results)
    report = benchmark.contents(scored, None, benchmark.verdict(scored)) if any(scored.valid.values()) else {}
    invalid = note("All trials are invalid, so nothing is known of any model.", "warning")
    axes = blocks(report, stage.folder) if report else invalid
    body = join(section("", facts({"state": state_of(stage), "trials": len(results.trials)}), live="facts"),
                section("Tasks and models", note(ATTEMPTS), grid, live="grid"),
                axes)  # fmt: skip
    return page_of(stage, body, more=more)


def trials_of(stage: Stage) -> Results:
    """Return the trials of a stage. UserError: there are none."""
    if not stage.has(FILE):
        raise UserError(f"{stage.name} has no {FILE}: no trial has ended")
    return stage.run.kept(f"{stage.path}/{FILE}", "trials", lambda: read_results(stage.folder))


def _grid(results: Results) -> tuple[Html, list[str]]:
    models, tasks = results.models, list(dict.fromkeys(trial.task for trial in results.trials))
    marks: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for trial in results.trials:
        marks[trial.task, trial.model].append(MARKS[trial.outcome])
    packages = {trial.task: trial.package for trial in results.trials}
    addresses = {task: f"task-{number}.html" for number, task in enumerate(tasks)}
    tried = {task: [" ".join(marks[task, model]) or "not tried" for model in models] for task in tasks}
    rows = [(link(addresses[task], task), packages[task], *tried[task]) for task in tasks]
    return table(("task", "package", *models), rows, "grid"), list(addresses.values())


def task(stage: Stage, number: int) -> View:
    """Show the attempts at one task, all models beside each other: tests, tokens, diffs, and the way to each trace."""
    results = trials_of(stage)
    names = list(dict.fromkeys(trial.task for trial in results.trials))
    if not 0 <= number < len(names):
        raise KeyError(number)
    chosen = [(place, trial) for place, trial in enumerate(results.trials) if trial.task == names[number]]
    places = _traces(stage)
    cards = [_attempt(stage, place, trial, places) for place, trial in chosen]
    more = [f"trial-{place}.html" for place, trial in chosen if trial.trace]
    first = chosen[0][1]
    top = facts({"task": first.task, "package": first.package, "category": first.category, "made by": first.generator,
                 "style of the request": first.style})  # fmt: skip
    body = join(section("", top), section("Attempts side by side", element("div", *cards, cls="cards", tabindex=0)))
    return page_of(stage, body, f"Task {first.task}", more=more)


def _attempt(stage: Stage, place: int, trial: Trial, places: dict[str, int]) -> Html:
    """Return one attempt as a card."""
    passed = {kind: f"{count} of {trial.expected.get(kind, count)}" for kind, count in trial.passed.items()}
    tests = {kind.replace("_", " "): words for kind, words in passed.items()}
    trace = _trace(stage, trial, places)
    name = f"{trial.model}, attempt {trial.number}"
    return element("article", element("h3", link(f"trial-{place}.html", name) if trace else name),
                   element("p", f"{MARKS[trial.outcome]} {trial.outcome}", f": {trial.why}" if trial.why else "", cls="scored"),
                   facts({**tests, "turns": trial.turns, "tokens written": trial.tokens.get("written", 0), "ended": trial.stop}),
                   episode.in_short(trace) if trace else note("No trace was kept.", "empty"), cls="card")  # fmt: skip


def _traces(stage: Stage) -> dict[str, int]:
    """Return the lines of the stage's traces by the id of each; a trace begins with it, so no line is read as a whole."""
    lines: Lines = stage.lines("traces.jsonl")
    known: dict[str, int] = stage.run.caches.setdefault(f"traces of {stage.path}", {})
    if stage.has("traces.jsonl"):
        for line in lines.news():
            with contextlib.suppress(ValueError):
                name, _ = json.JSONDecoder().raw_decode(line[:2000].decode(errors="replace").removeprefix('{"id":'))
                known[name] = len(lines) - 1
    return known


def _trace(stage: Stage, trial: Trial, places: dict[str, int]) -> Trace | None:
    place = places.get(trial.trace.partition("#")[2])
    return None if place is None else episode.read_trace(stage, "traces.jsonl", place)


def _whole(stage: Stage, place: int) -> tuple[Trial, Trace]:
    """Return an attempt and its trace. KeyError: one of them is not there."""
    for own in trials_of(stage).trials[place : place + 1]:
        if trace := _trace(stage, own, _traces(stage)):
            return own, trace
    raise KeyError(place)


def trial(stage: Stage, place: int) -> View:
    """Show one attempt whole."""
    own, trace = _whole(stage, place)
    numbers = [(name.replace("_", " "), value) for name, value in (own.quality | own.interaction).items()]
    known = facts({name: short(value) for name, value in numbers if value is not None})
    judged = details("Quality and interaction", known)
    top = facts({"model": own.model, "task": own.task, "outcome": f"{MARKS[own.outcome]} {own.outcome} {own.why}",
                 "time": f"{own.seconds:.1f} s"})  # fmt: skip
    name = f"trial-{place}"
    body = join(section("", top, judged), episode.tree(trace, name))
    return page_of(stage, body, f"{own.model}, attempt {own.number}", more=episode.turns_of(trace, name))


def trial_tokens(stage: Stage, place: int, node: int) -> View:
    """Show a node of an attempt token by token."""
    _, trace = _whole(stage, place)
    if not 0 <= node < len(trace.nodes):
        raise KeyError(node)
    missing = "Nothing is learnt from a benchmark, so there are no advantages."
    body = episode.token_page(stage, trace, node, None, learnt_summaries=True, missing=missing)
    return page_of(stage, body, f"Tokens of {trace.nodes[node].kind} {node}")


# ---- a corpus


def data(stage: Stage, words: str = "") -> View:
    """Show a corpus: what is in it, what was dropped and why, with samples; `words` are looked for in those and in all documents."""
    if not stage.has(MANIFEST) or not stage.has(SAMPLES) or not stage.has(HITS):
        return page_of(stage, note("The corpus is not built yet.", "empty"))
    try:
        report = stage.run.kept(f"{stage.path}/{MANIFEST}", "report", lambda: corpus.contents(stage.folder))
    except UserError as error:
        return page_of(stage, note(str(error), "warning"))
    box = element("input", type="search", name="q", value=words, aria_label="words to look for",
                  placeholder="path, licence, words of a dropped text")  # fmt: skip
    form = element("form", box, element("button", "Search"), action="index.html", method="get", cls="search")
    found = _found(stage, words) if words else None
    return page_of(stage, join(section("Search", form, found), blocks(report, stage.folder)))


def _found(stage: Stage, words: str) -> Html:
    """Return what matches: samples of what was dropped, and documents that were kept, by the words of their rows."""
    wanted = words.casefold().split()

    def fits(*texts: object) -> bool:
        whole = " ".join(map(str, texts)).casefold()
        return all(word in whole for word in wanted)

    samples = [each for each in stage.json(SAMPLES) or [] if isinstance(each, dict) and fits(*each.values())]
    rows = []
    for each in samples[:FOUND]:
        why, where = f"{each.get('step')}: {each.get('reason')}", f"{each.get('repository')}/{each.get('path')}"
        rows.append((why, where, pre(str(each.get("excerpt", "")), 600)))
    kept = [(each["source"], each["where"], each["more"]) for each in _documents(stage) if fits(*each.values())]
    return join(note(f"{len(samples)} of the samples of what was dropped, {len(kept):,} of the documents that were kept"),
                table(("dropped because", "document", "excerpt"), rows),
                table(("source", "document", "about it"), kept[:FOUND]))  # fmt: skip


def _documents(stage: Stage) -> list[dict[str, str]]:
    """Return the documents of a corpus, from its tables."""
    import pyarrow.parquet as pq  # of a search alone

    found = []
    for source in (use.name for use in stage.record.data) if stage.record else ():
        if not stage.has(name := f"documents/{source}.parquet"):
            continue
        with pq.ParquetFile(io.BytesIO(stage.read(name))) as rows:
            for row in (row for batch in rows.iter_batches(4096) for row in batch.to_pylist()):
                paths = row.pop("paths", None) or [""]
                others = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
                where = f"{row.pop('repository', '')}/{paths[0]}{others}"
                rest = ", ".join(f"{name} {value}" for name, value in row.items() if not isinstance(value, list | dict))
                found.append({"source": source, "where": where, "more": rest})
    return found


# ---- the family tree


def family(run: Run) -> View:
    """Show the tree of the run's newest model: records, compute, licences with their duties, and the evidence of its release."""
    found = _newest(run)
    if found is None:
        return View("Family tree", note("This run has made no model yet.", "empty"), crumbs_of(run), run.key, live=True)
    stage, lineage = found
    shares = compute_shares(lineage, ancestors())
    rows = []
    for each in shares.items:
        spent = describe_compute(each.compute) if each.compute else "not known"
        rows.append((each.name, f"{each.generation} before us" if each.generation else "own", spent))
    facts_of_compute = element("ul", *(element("li", line) for line in shares.lines()))
    body = join(
        section("The tree", pre("\n".join(render(lineage, f"{run.folder.name}/{stage.name}")), 200_000)),
        section("Records", *(_record(lineage, key, record) for key, record in lineage.records.items())),
        section("Compute", facts_of_compute, table(("stage", "whose", "compute"), rows)),
        section("Licences and duties", *_duties(stage)),
        section("Signature and audit", *(_evidence(each) for each in run.stages if each.kind == "release"), *_unreleased(run)),
    )  # fmt: skip
    return View("Family tree", body, crumbs_of(run), run.key, live=True)


def _newest(run: Run) -> tuple[Stage, Lineage] | None:
    """Return the last stage that made a model, and its lineage."""
    for stage in reversed(run.stages):
        name = f"{MODEL}/{LINEAGE_FILE}"
        if stage.state == "done" and stage.has(name):
            try:
                read = partial(load_lineage, stage.folder / MODEL)
                return stage, run.kept(f"{stage.path}/{name}", "lineage", read)
            except UserError:
                continue
    return None


def _record(lineage: Lineage, key: str, record: Record) -> Html:
    """Return one record: what it says of itself, and its files by digest."""
    lines = describe(record, "corpus" if key in lineage.corpora else "weights")
    every = [*record.weights.items(), *record.outputs.items()][:ABRIDGED]
    files = [(name, f"{file.bytes:,}", element("code", file.sha256)) for name, file in every]
    parents = [(edge.name, edge.role, element("code", edge.model_digest)) for edge in record.parents[:ABRIDGED]]
    uses = record.data[:ABRIDGED]
    data_rows = [(use.name, use.source, human(use.bytes), ", ".join(use.licences) or "unknown") for use in uses]
    inner = [element("ul", *(element("li", line) for line in lines[1:]))]
    inner += [table(("parent", "role", "weights"), parents)] if parents else []
    inner += [table(("data", "from", ">bytes", "licences"), data_rows)] if data_rows else []
    inner += [table(("file", ">bytes", "SHA-256"), files)] if files else []
    return details(lines[0], *inner)


def _duties(stage: Stage) -> list[Html]:
    """Return the licences of all that went into a model, and what each asks."""
    duties = evaluate(licence_uses(stage.folder / MODEL), None)
    rows = [(each.licence, each.ancestor, each.kind, each.text, OUTCOMES[each.outcome]) for each in duties]
    about = "Facts for engineering, not legal advice. Which hold depends on what you plan: etude licences RUN --product product.toml."
    return [note(about), table(("licence", "of", "kind", "what it asks", "here"), rows)]


def _evidence(stage: Stage) -> Html:
    """Return what a release carries: signature, key, statements, and what the audit of its weights found."""
    if stage.state != "done":
        return note(f"{stage.name}: not released yet.", "empty")
    rows = [
        (name, "there" if stage.has(f"{RELEASE}/{name}") else "missing")
        for name in (SIGNATURE, PUBLIC_KEY, CARD, NOTICE, BOM, AUDIT)
    ]
    audit = stage.json(f"{RELEASE}/{AUDIT}")
    found = (
        details("What the audit of the weights found", pre(json.dumps(audit, indent=1, ensure_ascii=False), 100_000))
        if audit
        else None
    )
    summary = stage.record.summary if stage.record else {}
    how = note(f"Check it yourself: etude verify {stage.run.folder / stage.path / RELEASE}")
    return join(
        facts({key: str(value) for key, value in summary.items()}), table(("file of the release", ""), rows), found, how
    )


def _unreleased(run: Run) -> Sequence[Html]:
    if any(each.kind == "release" for each in run.stages):
        return ()
    return (note("This run has no release stage: nothing is signed, and the tree is what the records say.", "empty"),)


def release(stage: Stage) -> View:
    """Show a release."""
    body = join(
        section("", facts({"state": state_of(stage)}), live="facts"),
        _evidence(stage),
        element("p", link("../family.html", "Family tree and licences")),
    )
    return page_of(stage, body)


def plain(stage: Stage) -> View:
    """Show a stage of another kind: its record and its report."""
    record = stage.record
    summary = facts({key: str(value) for key, value in record.summary.items()}) if record else None
    said = summary or note("It has no record yet.", "empty")
    body = join(section("", facts({"state": state_of(stage), "kind": stage.kind}), said, live="facts"),
                _record_of(record) if record else None)  # fmt: skip
    return page_of(stage, body)


def _record_of(record: Record) -> Html:
    return section("Record", element("ul", *(element("li", line) for line in describe(record, record.kind))))
