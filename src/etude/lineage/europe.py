"""Two European forms, filled as far as the records go: the training-content summary and the model documentation.

The headings follow the Commission's template of July 2025 (AI Act, Article 53(1)(d)) and the form of the Code of Practice. What no
program can know, such as a legal name or why something was decided, is left to the provider in the words of `PERSON`, and never
made up. Not legal advice.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import TYPE_CHECKING

from etude.lineage import facts
from etude.lineage.card import counted
from etude.lineage.facts import NOT_KNOWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.lineage.facts import Release
    from etude.lineage.record import DataUse, Lineage

PERSON = "not recorded; the provider fills this in"
SIZES = ((10**9, "less than 1 billion tokens"), (10**13, "1 billion to 10 trillion tokens"))
# Where data belongs, by the first word of its source; what only lies in a folder could be anything, and is told under "other".
KINDS = {"dataset": "public", "package": "public", "git": "public", "sampled": "synthetic"}
NO_CRAWLER = "no crawler ran in any stage recorded here; how a source listed elsewhere was collected is not recorded"

Row = tuple[str, object]


def training_summary(release: Release) -> str:
    """Return the public summary of training content."""
    lineage, provider = release.lineage, release.provider
    licences, left_out = (Counter[str]() for _ in range(2))
    for use in _uses(lineage).values():
        licences.update(use.licences)
        left_out.update(use.left_out)
    return _form(f"Public summary of training content: {release.name}", {
        "1.1 Provider": [("Name", provider.name), ("Contact", provider.contact), ("Authorised representative", None)],
        "1.2 Model": [
            ("Versioned model name", f"{release.name}, version {release.version}"),
            ("Model dependencies", _dependencies(lineage)),
            ("Date of placement on the Union market", provider.release_date),
        ],
        "1.3 Modalities and size": [
            ("Modality", "text, program code included"), ("Training data size", _size(lineage)),
            ("Latest date of data acquisition", _latest(lineage)), ("Languages", None),
        ],
        "2.1 Publicly available datasets": _listed(lineage, "public"),
        "2.2 Private datasets obtained from third parties": [("Used", None)],
        "2.3 Data crawled and scraped from online sources": [("Used", NO_CRAWLER)],
        "2.4 User data": [("Used", None)],
        "2.5 Synthetic data": [*_listed(lineage, "synthetic"), ("Models that wrote or judged it", _generators(lineage))],
        "2.6 Other sources": _listed(lineage, "other"),
        "3.1 Respect of reservations of rights": [
            ("Licences found in the data, in bytes", counted(licences, 20) or NOT_KNOWN), ("Opt-outs and other measures", None),
        ],
        "3.2 Removal of illegal content": [
            ("Documents left out, by step", counted(left_out, 20) or "none recorded"), ("Other measures", None),
        ],
    })  # fmt: skip


def model_documentation(release: Release) -> str:
    """Return the model documentation form."""
    lineage, provider, shape, head = release.lineage, release.provider, release.architecture, release.head
    stages = facts.in_order(lineage, "weights")
    spent = [record.compute for record in stages if record.compute.device]
    devices = "; ".join(dict.fromkeys(str(compute.device) for compute in spent))
    seconds = sum(compute.device_seconds or 0 for compute in spent)
    policies = ", ".join(path for path in release.files if "_POLICY" in path.upper())
    size = f"text, {shape.context or NOT_KNOWN} tokens, input and output together"
    return _form(f"Model documentation: {release.name}", {
        "General information": [
            ("Legal name of the provider", provider.name), ("Model name", f"{release.name}, version {release.version}"),
            ("Model authenticity", f"weights {head.model_digest}, record {lineage.head}; the folder is signed, see model.sig"),
            ("Release date", provider.release_date), ("Union market release date", None),
            ("Model dependencies", _dependencies(lineage)),
        ],
        "Model properties": [
            ("Architecture", f"{shape.family or NOT_KNOWN}, {shape.name or NOT_KNOWN}"), ("Design specifications", None),
            ("Input modalities, maximum size", size), ("Output modalities, maximum size", size),
            ("Total parameters", f"{shape.parameters:,} ({', '.join(shape.dtypes)})"),
        ],
        "Methods of distribution and licences": [
            ("Distribution channels", None),
            ("Licences, all of which apply", " AND ".join(facts.licence_terms(release)) or NOT_KNOWN),
        ],
        "Use": [
            ("Acceptable use policy", policies or "none came with the weights"), ("Intended uses", provider.intended_use),
            ("Systems it can be integrated in", None), ("Technical means of integration", "safetensors in Hugging Face's layout"),
            ("Required hardware", f"memory for {sum(file.bytes for file in head.weights.values()):,} bytes of weights"),
            ("Required software", ", ".join(f"{name} {version}" for name, version in head.packages.items())),
        ],
        "Training process": [
            *((f"Stage {number}", f"{record.stage} ({record.kind}), record {record.id[:12]}, settings in lineage.json")
              for number, record in enumerate(stages, 1)),
            ("Decision rationale", None),
        ],
        "Data used for training, testing and validation": [
            ("Type, provenance, curation", "see training-content-summary.md"), ("Number of data points", _size(lineage)),
            ("Measures against unsuitable sources and bias", None),
        ],
        "Computational resources": [
            ("Training time", f"{seconds:,.0f} device-seconds recorded on {devices or NOT_KNOWN}"),
            *(("Amount of computation", line) for line in release.compute_lines or [NOT_KNOWN]),
            ("Methodology", "operations counted from the model's shape, see Etude's docs/records.md; intervals beside each"),
        ],
        "Energy": [("Used for training", NOT_KNOWN), ("Used for inference", NOT_KNOWN)],
    })  # fmt: skip


def _form(title: str, sections: dict[str, Sequence[Row]]) -> str:
    parts = [f"# {title}", "Filled by Etude from the model's records. Facts for engineering, not legal advice."]
    for heading, rows in sections.items():
        table = facts.markdown_table(["field", "value"], [(field, value or PERSON) for field, value in rows])
        parts.append(f"## {heading}\n\n{table}")
    return "\n\n".join(parts) + "\n"


def _dependencies(lineage: Lineage) -> str:
    names = ", ".join(facts.base_names(lineage))
    return f"{names}; what is in no record here is told by its provider" if names else "N/A"


def _uses(lineage: Lineage) -> dict[str, DataUse]:
    """Return each source of data once: several stages may read it."""
    return {use.name + use.digest: use for _, use in facts.trained_on(lineage)}


def _size(lineage: Lineage) -> str:
    """Return the range the template wants, and what it was read from. Unknown counts can only raise it."""
    counts = [use.tokens for _, use in facts.trained_on(lineage)]
    known = sum(filter(None, counts))
    word = next((word for limit, word in SIZES if known < limit), "more than 10 trillion tokens")
    unknown = f", and {counts.count(None)} source(s) without a count" if None in counts else ""
    return f"{word}: {known:,} recorded, repeats included{unknown}"


def _latest(lineage: Lineage) -> str:
    starts = [record.started for record, _ in facts.trained_on(lineage)]
    return f"no later than {max(starts)[:7]}, when the last stage that read data began" if starts else NOT_KNOWN


def _listed(lineage: Lineage, kind: str) -> list[Row]:
    uses = [use for use in _uses(lineage).values() if KINDS.get(use.source.split(" ", 1)[0], "other") == kind]
    rows: list[Row] = []
    for use in uses:
        source = textwrap.shorten(use.source, 2000, placeholder=" … (in full in lineage.json)")
        about = f"revision {use.revision or NOT_KNOWN}, digest {use.digest}"
        rows.append((use.name, f"{source}; {use.files:,} files, {use.bytes:,} bytes, {about}"))
    return rows or [("Used", "none recorded")]


def _generators(lineage: Lineage) -> str:
    others = [
        f"{edge.name} ({edge.role} of {record.stage})" for record, edge in facts.edges(lineage, "teacher", "judge")
    ]
    own = [record.stage for record in facts.in_order(lineage, "weights") if record.kind == "rl"]
    return "; ".join([*others, *(f"the model itself, episodes of {stage}" for stage in own)]) or "none recorded"
