"""The model card: metadata that the Hugging Face hub reads, then what a person wants to know before using the model.

The hub's metadata has one hop and four relations, and takes anybody's word for both. So it also names the record, and the text
below it tells the whole tree. `card_disagreements` is the way back: does a card still say what the lineage says?
"""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from etude.errors import one_line
from etude.lineage import facts
from etude.lineage.facts import NOT_KNOWN, Release
from etude.lineage.tree import describe_compute, render

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from etude.lineage.record import Lineage

WIDTH = 160  # of a line of the tree; the sources of a corpus can fill pages
UNPROVEN = ("Compute", "Evaluation")  # sections that hold what a release's other files do not
LIMITS = (
    "It writes text and code that can be wrong, insecure or a copy of what it learned from; read it before you run it.",
    "What is in no record is in no section above: in particular the data of a base that was trained elsewhere.",
    "Audits of weights show shared initialisation. They cannot show that a model learned from another's outputs.",
)


def model_card(release: Release) -> str:
    """Return the card, `README.md`."""
    sections = {
        "The family tree": _tree(release),
        "How it was made": _stages(release.lineage),
        "Data": _data(release.lineage),
        "Compute": "\n".join(f"- {line}" for line in release.compute_lines) or f"Shares of compute: {NOT_KNOWN}.",
        "Evaluation": _evaluation(release),
        "Licences and attribution": _licences(release),
        "Limits": "\n".join(f"- {line}" for line in LIMITS),
        "How to check this": _checking(release),
    }
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items())
    return f"---\n{_metadata(release).to_yaml()}\n---\n\n{_opening(release)}\n\n{body}\n"


def hub_metadata(lineage: Lineage) -> dict[str, Any]:
    """Return the metadata that follow from the lineage alone."""
    stages = facts.in_order(lineage, "weights")
    merged = any(sum(edge.role == "weights" for edge in record.parents) > 1 for record in stages)
    head, bases = lineage.records[lineage.head], facts.base_names(lineage)
    relation = ("merge" if merged else "finetune") if bases and head.origin is None else None
    sources = [use.source.split() for _, use in facts.trained_on(lineage)]
    datasets = list(dict.fromkeys(words[1] for words in sources if words[:1] == ["dataset"]))
    hub = {"base_model": bases, "base_model_relation": relation, "datasets": datasets}
    ours = {"etude_record": lineage.head, "etude_weights": head.model_digest}
    return {key: value for key, value in (hub | ours).items() if value}


def card_disagreements(text: str, lineage: Lineage) -> list[str]:
    """Return in which metadata a card and a lineage differ, a line each."""
    try:
        said = ModelCard(text, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, TypeError, yaml.YAMLError) as error:
        return [f"its metadata cannot be read: {one_line(error)}"]
    wanted = hub_metadata(lineage)
    keys = dict.fromkeys(["base_model", "base_model_relation", "datasets", *wanted])
    wrong = [key for key in keys if said.get(key) != wanted.get(key)]
    return [f"{key} is {said.get(key)!r}, the lineage says {wanted.get(key)!r}" for key in wrong]


def edited_sections(text: str, release: Release) -> list[str]:
    """Return which sections of a card are not those that the facts of its release make, its own words on scores and compute aside."""
    said, wanted = (_sections(card) for card in (text, model_card(release)))
    known = {title for title in wanted if title not in UNPROVEN}
    changed = [title for title in wanted if title in known and title in said and said[title] != wanted[title]]
    return [
        *(f"its section {title!r} is missing" for title in wanted if title not in said),
        *(f"its section {title!r} is not known here" for title in said if title not in wanted),
        *(f"its section {title!r} is not what the records and files say" for title in changed),
    ]


def _sections(card: str) -> dict[str, str]:
    """Return the body of a card by heading; the name of the model heads the first."""
    body = card.partition("\n---\n")[2]
    parts = re.split(r"^##? ", body, flags=re.MULTILINE)
    return {title: text.strip() for title, _, text in (part.partition("\n") for part in parts if part.strip())}


def counted(amounts: Mapping[str, int], most: int = 5) -> str:
    """Return the largest of some counts in words, and how many more there are."""
    order = sorted(amounts.items(), key=lambda item: (-item[1], item[0]))
    rest = [f"{len(order) - most} more"] if len(order) > most else []
    return ", ".join([*(f"{name} {count:,}" for name, count in order[:most]), *rest])


def _metadata(release: Release) -> Any:
    results = [
        EvalResult(task_type="text-generation", dataset_type=re.sub(r"[^a-z0-9]+", "-", row.task.lower()), dataset_name=row.task,
                   metric_type=row.metric, metric_value=row.value)
        for row in release.evaluation
    ]  # fmt: skip
    return ModelCardData(
        **hub_metadata(release.lineage), **_hub_licence(release), library_name="transformers", pipeline_tag="text-generation",
        tags=["etude"], model_name=release.name if results else None, eval_results=results or None,
    )  # fmt: skip


def _hub_licence(release: Release) -> dict[str, str]:
    """Return the hub's licence fields: its own id where one common licence is all there is, else `other` with a name.

    With data under terms of somebody's own it is for the owner to say, by a LICENSE, what the model is under: not for the base's.
    """
    terms = facts.licence_terms(release)
    data = {name for _, use in facts.trained_on(release.lineage) for name in use.licences}
    if own := sorted(name for name in data if name.startswith("LicenseRef-")) * ("LICENSE" not in release.files):
        terms = [f"undecided-for-data-under-{name.removeprefix('LicenseRef-')}" for name in own] + terms
    if not terms:
        return {"license": "unknown"}
    if len(terms) == 1 and not terms[0].startswith("LicenseRef-"):
        return {"license": terms[0].lower()}
    name = "-and-".join(term.removeprefix("LicenseRef-").lower() for term in terms)
    files = ["LICENSE"] if "LICENSE" in release.files else [each.file for each in facts.carried(release.lineage)]
    return {"license": "other", "license_name": name, "license_link": next(iter(files), "README.md")}


def _opening(release: Release) -> str:
    shape, head, product, provider = release.architecture, release.head, release.product, release.product.organisation
    bases = " and ".join(f"`{name}`" for name in facts.base_names(release.lineage))
    fires = [duty for duty in release.duties if duty.kind == "display" and duty.outcome == "fires"]
    shown = [word for duty in fires for word in duty.words[:1]]
    return "\n\n".join([
        f"# {release.name}",
        *(f"**{text}**" for text in dict.fromkeys(shown)),
        f"A {shape.family or 'causal'} language model of {shape.parameters:,} parameters ({', '.join(shape.dtypes)}, context "
        f"{shape.context or NOT_KNOWN}), {f'grown from {bases}' if bases else 'trained from scratch'}. Version {release.version}. "
        f"Last stage: {head.kind}, finished {head.finished} by Etude {head.code.etude}.",
        f"Intended use: {product.intended_use or 'not stated by the provider'}. "
        f"Provider: {provider.name or 'not stated'}. Contact: {provider.contact or 'not stated'}. "
        f"Release date: {product.release_date or 'not stated'}.",
    ])  # fmt: skip


def _tree(release: Release) -> str:
    drawn = f"![The family tree of {release.name}](tree.svg)\n\n" if "tree.svg" in release.files else ""
    lines = render(release.lineage, release.name)
    tree = "\n".join(line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…" for line in lines)
    return f"{drawn}```text\n{tree}\n```\n\nMeasured from the weights: {release.audited}."


def _stages(lineage: Lineage) -> str:
    rows = [[record.stage, record.kind, describe_compute(record.compute), f"`{record.id[:12]}`"]
            for record in facts.in_order(lineage, "weights")]  # fmt: skip
    edges = facts.edges(lineage, "teacher", "judge")
    others = [f"- {record.stage}: {edge.role} `{edge.name}`" for record, edge in edges]
    table = _table(["stage", "kind", "compute", "record"], rows)
    return "\n".join([table, *(["", "Other models took part:", "", *others] if others else [])])


def _data(lineage: Lineage) -> str:
    header = ["stage", "data", "source", "files", "bytes", "tokens", "licences (bytes)", "left out"]
    rows = [
        [record.stage, use.name, textwrap.shorten(facts.shown_source(use.source), 120, placeholder=" … (in full in lineage.json)"),
         use.files, use.bytes, use.tokens, counted(use.licences) or NOT_KNOWN, sum(use.left_out.values())]
        for record, use in facts.trained_on(lineage)
    ]  # fmt: skip
    bases = [each.origin.name for each in facts.in_order(lineage, "weights") if each.origin and not each.parents]
    unknown = [f"What `{name}` learned from before is in no record here: {NOT_KNOWN}." for name in bases]
    return "\n\n".join([*unknown, _table(header, rows) if rows else "No stage read data."])


def _evaluation(release: Release) -> str:
    rows = [[row.task, row.metric, f"{row.value:.4g}", row.interval and "{:.4g} to {:.4g}".format(*row.interval), row.note]
            for row in release.evaluation]  # fmt: skip
    table = _table(["task", "metric", "value", "95% interval", "note"], rows)
    return table if rows else "No evaluation was given to this release."


def _licences(release: Release) -> str:
    carried = facts.carried(release.lineage)
    texts = [[each.licence or "unknown text, read it", each.file, each.inherited_from] for each in carried]
    parts = ["These texts travel with the weights. Facts for engineering, not legal advice.",
             _table(["licence", "file", "from"], texts)]  # fmt: skip
    fires = [
        f"- {duty.text} ({duty.licence or 'unknown licence'}, from {duty.ancestor})"
        + ": " * bool(duty.words) + " or ".join(f"“{word}”" for word in duty.words)
        for duty in release.duties if duty.outcome == "fires"
    ]  # fmt: skip
    asked = [f"- {question.text} (`{question.key}`: {duty.licence}, from {duty.ancestor})"
             for duty in release.duties if duty.outcome == "asks" for question in duty.questions]  # fmt: skip
    parts += ["### Duties", "\n".join(dict.fromkeys(fires))] if fires else []
    parts += ["### Depends on your product", "\n".join(dict.fromkeys(asked))] if asked else []
    return "\n\n".join(parts)


def _checking(release: Release) -> str:
    return (
        "`etude verify FOLDER` checks the signature, every file, the licences, the records and this card, offline. "
        f"Record `{release.lineage.head}`, weights `{release.head.model_digest}`. "
        "`bom.cdx.json` (CycloneDX), `spdx.json` and `attestations/` say the same to other programs."
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; what would break a cell, or be taken for HTML, is escaped."""
    lines = [header, ["---"] * len(header), *([_cell(value) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: object) -> str:
    text = NOT_KNOWN if value is None else f"{value:,}" if isinstance(value, int) else str(value)
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
