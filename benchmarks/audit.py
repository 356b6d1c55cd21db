"""How far can the audit be trusted? False alarms and finds, counted on models whose descent is known.

    python benchmarks/audit.py            # on a GPU 256 bases; without one 64, which take half an hour on two cores
    python benchmarks/audit.py --quick    # a few small models, to see that it works

It trains tiny Llamas (audit_zoo.py): bases that differ in their seed alone, with the same text in the same order, and descendants
of some of them. Every descendant is audited against its base, and against other bases; bases against each other; each time by
whole weights and by a sketch, as `--library` does. Intervals are Clopper and Pearson's, 95%. No two pairs of strangers are of the
same two bases; where two have one in common their p-values are independent all the same (given that model, each is uniform).
“Same seed” is no descent: two trainings on other data from one initialisation, which the tests cannot and do not tell apart from it.
Run it again to go on where it stopped: models and audits are kept in `--out`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from etude.jsonl import MetricsLog
from etude.lineage.audit.examine import examine, open_model
from etude.lineage.audit.sketch import Facts, make_sketch
from etude.progress import Reporter
from etude.work import Unit, Work, cores
from report import finish

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

LEARNING_RATE = 3e-3
CPT = (0.1, 0.5, 1.0, 3.0, 8.0)  # tokens, in those of the base
FOR_SURE = {"same", "derived"}
LEVELS = (0.05, 0.01, 0.001)


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    bases: int
    parents: int  # bases that have descendants
    steps: int  # of a base
    batch: tuple[int, int]  # rows, tokens in each
    strangers: int  # other bases that each descendant is compared with
    null_pairs: int  # of bases


FULL = Size(bases=256, parents=64, steps=800, batch=(8, 128), strangers=2, null_pairs=2048)
CPU = Size(bases=64, parents=16, steps=150, batch=(4, 64), strangers=2, null_pairs=600)
QUICK = Size(bases=8, parents=3, steps=30, batch=(2, 64), strangers=2, null_pairs=28)


def make_zoo(zoo: Path, size: Size) -> dict[str, float]:
    """Train and write all models that are not there yet; return the last loss of each kind of training."""
    import torch

    import audit_zoo

    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    code, prose = audit_zoo.texts(device)
    drawn = [{name: value[0].numpy() for name, value in audit_zoo.fresh(seed).items()} for seed in range(size.bases)]
    found: dict[str, float] = {}

    def kept(kind: str) -> Callable[[Any], None]:
        def write(stack: Any) -> None:
            for index, state in enumerate(audit_zoo.states_of(stack)):
                audit_zoo.save(zoo / kind / f"{index:03d}", state)

        return write

    def trained(
        kinds: dict[float, str], start: Any, text: Any, lr: float, whole: Any = lambda weights: weights
    ) -> None:
        steps = {max(1, round(times * size.steps)): kind for times, kind in kinds.items()}
        last = list(kinds.values())[-1]
        if not list((zoo / last).glob("*/config.json")):
            keep = {step: kept(kind) for step, kind in steps.items()}
            found[last] = audit_zoo.train(
                start, text, max(steps), lr, len(last), batch=size.batch, keep=keep, whole=whole
            )

    trained({1.0: "base"}, audit_zoo.stack_of(drawn, device), code, LEARNING_RATE)
    bases = audit_zoo.stack_of([audit_zoo.load(zoo / "base" / f"{index:03d}") for index in range(size.parents)], device)
    trained({0.1: "sft"}, bases, prose, LEARNING_RATE / 10)
    pair, added = audit_zoo.adapters(bases, seed=1)
    trained({0.1: "lora"}, pair, prose, LEARNING_RATE / 3, added)
    trained({times: f"cpt {times:g}×" for times in CPT}, bases, prose, LEARNING_RATE)
    trained({1.0: "same seed"}, audit_zoo.stack_of(drawn[: size.parents], device), prose, LEARNING_RATE)
    for index in range(size.parents):
        if not (zoo / "rename, flip, rotate" / f"{index:03d}" / "config.json").exists():
            disguise(zoo, index)
    return found


def disguise(zoo: Path, index: int) -> None:
    """Write what else may become of a base: what needs no training."""
    import numpy as np

    import audit_zoo as made

    chance = np.random.default_rng(index)
    name = f"{index:03d}"
    base, sft, cpt = (made.load(zoo / kind / name) for kind in ("base", "sft", "cpt 1×"))
    mixture = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    more = {made.EMBEDDING: np.concatenate([sft[made.EMBEDDING], made.noisy(sft[made.EMBEDDING][:32], 1.0, chance)])}
    apart = {"tie_word_embeddings": False}
    (zoo / "gguf q4_0").mkdir(exist_ok=True)
    made.write_gguf(zoo / "gguf q4_0" / f"{name}.gguf", base)
    descendants: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # the last one says that all are there
        ("rl", {key: made.noisy(value, 0.01, chance) for key, value in base.items()}, {}),
        ("merge", made.merged(base, [sft, cpt]), {}),
        ("int8", made.rounded(base), {}),
        ("more words", sft | more, {}),
        ("upcycle", made.upcycled(base, 4, chance), mixture),
        ("permute", made.shuffled(sft, chance), {}),
        ("rotate", made.rotated(sft, chance), apart),
        ("rotate, permute", made.shuffled(made.rotated(sft, chance), chance), apart),
        ("prune units", made.narrower(base, 96, 64), {"intermediate_size": 96}),
        ("prune width", made.narrower(base, 96, 48), {"intermediate_size": 96, "hidden_size": 48}),
        ("prune depth", made.shallower(base, [0, 3]), {"num_hidden_layers": 2}),
        ("flip", made.flipped(sft, chance), {}),
        *(
            (f"flip, {how}", made.rotated(made.flipped(sft, chance), chance, how), apart)
            for how in ("rotate", "reorder", "negate")
        ),
        ("rename", made.renamed(sft), {}),
        ("rename, flip, rotate", made.renamed(made.rotated(made.flipped(sft, chance), chance)), apart),
    ]
    for kind, state, config in descendants:
        made.save(zoo / kind / name, {key: np.asarray(value, np.float32) for key, value in state.items()}, **config)


def pairs(zoo: Path, size: Size) -> Iterator[Unit]:
    """Yield what is to be audited: (reference, suspect, by sketch or by weights)."""
    kinds = sorted(folder.name for folder in zoo.iterdir() if folder.is_dir() and folder.name != "base")
    listed = list(itertools.combinations(range(size.bases), 2))
    named = [("null", "other seed", one, zoo / f"base/{two:03d}")
             for one, two in random.Random(0).sample(listed, min(size.null_pairs, len(listed)))]  # noqa: S311 - no secret  # fmt: skip
    for kind, index in itertools.product(kinds, range(size.parents)):
        suspect = zoo / kind / (f"{index:03d}.gguf" if kind.startswith("gguf") else f"{index:03d}")
        named.append(("descent", kind, index, suspect))
        # Bases without descendants, others for each kind: what became of one base is alike, and would be counted again and again.
        first = index + kinds.index(kind) * size.strangers
        strangers = [size.parents + (first + far) % (size.bases - size.parents) for far in range(size.strangers)]
        named += [("null", kind, stranger, suspect) for stranger in strangers]
    for (relation, kind, reference, suspect), by in itertools.product(named, ("weights", "sketch")):
        key = f"{relation}/{kind}/{by}/{reference:03d}-{suspect.stem}"
        yield Unit(key, (str(zoo / f"base/{reference:03d}"), str(suspect), by))


def audited(item: tuple[str, str, str]) -> dict[str, Any]:
    """Audit one pair, in a process of its own."""
    reference, suspect = open_model(Path(item[0])), open_model(Path(item[1]))
    facts = Facts(name="base", source="zoo", licence=None, model_digest="", made="")
    known = make_sketch(reference.weights, reference.tokens, facts) if item[2] == "sketch" else reference
    found = examine(known, suspect, Reporter(quiet=True))
    tests = {test.name + " (turned back)" * test.rotated: [test.log10_p, round(test.effect, 4)] for test in found.tests}
    return {"word": found.verdict.word, "tests": tests, "seconds": round(found.seconds, 4)}


def rate(hits: int, count: int) -> str:
    """Return a share with its exact 95% interval."""
    from scipy.stats import beta

    low = beta.ppf(0.025, hits, count - hits + 1) if hits else 0.0
    high = beta.ppf(0.975, hits + 1, count - hits) if hits < count else 1.0
    return f"{hits}/{count} = {hits / count:.4f} [{low:.4f}, {high:.4f}]"


def grouped(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """Return the rows by relation, kind and reference."""
    found = defaultdict(list)
    for row in rows:
        relation, kind, by, _ = row["key"].split("/")
        found[relation, kind, by].append(row)
    return found


def verdicts(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one line a kind: what was said, and how sure each test was."""
    lines = []
    for (relation, kind, by), group in sorted(grouped(rows).items()):
        said = [row["word"] for row in group]
        tests = {name.partition(" (")[0] for row in group for name in row["tests"]}
        surest = {test: [_surest(row, test) for row in group] for test in sorted(tests)}
        shown = {test: f"{median(values):.1f}" for test, values in surest.items() if not any(map(math.isnan, values))}
        sizes = [row["tests"]["query/key similarity"][1] for row in group if "query/key similarity" in row["tests"]]
        lines.append({
            "pair": relation, "suspect": kind, "by": by, "derived or same": rate(sum(word in FOR_SURE for word in said), len(said)),
            "related": said.count("related"), "log10 p: neurons": shown.get("aligned neurons", "–"),
            "gate/up": shown.get("gate/up matching", "–"), "embedding": shown.get("embedding basis", "–"),
            "uCKA": f"{median(sizes):.2f}" if sizes else "–", "seconds": round(median(row["seconds"] for row in group), 3),
        })  # fmt: skip
    return lines


def _surest(row: dict[str, Any], test: str) -> float:
    """Return the log₁₀ p of a test, before or after turning back; not a number for what has no p."""
    values = [log10_p for name, (log10_p, _) in row["tests"].items() if name.partition(" (")[0] == test]
    return min((value for value in values if value is not None), default=math.nan)


def calibration(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one line a test: how often it was below each level for strangers."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for (relation, kind, by), group in grouped(rows).items():
        seeds = "other seeds" if kind == "other seed" else "modified strangers"
        for name, (log10_p, _) in (pair for row in group for pair in row["tests"].items()):
            if log10_p is not None and relation == "null":
                found[name, by, seeds].append(log10_p)
    return [
        {"test": name, "by": by, "null": null,
         **{f"p < {level}": rate(sum(value < math.log10(level) for value in values), len(values)) for level in LEVELS},
         "least log10 p": round(min(values), 2)}
        for (name, by, null), values in sorted(found.items())
    ]  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows as a table."""
    for row in [{column: column for column in rows[0]}, *rows]:
        print(
            "  ".join(
                str(row[column]).ljust(max(len(str(each[column])) for each in [*rows, {column: column}]))
                for column in row
            )
        )


def main() -> None:
    """Make the zoo, audit all pairs, count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import torch

    size = QUICK if options.quick else FULL if torch.cuda.is_available() else CPU
    out = options.out or Path("runs") / ("audit-quick" if options.quick else "audit")
    begun = time.monotonic()
    losses = make_zoo(out / "zoo", size)
    trained = time.monotonic()
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # there is a process a core
    with MetricsLog(out / "audits.jsonl") as log:
        units = list(pairs(out / "zoo", size))
        Work(out, log, Reporter(), out).parallel("auditing", units, "pairs", audited, cores())
        rows = [row for unit in units if (row := log.get(unit.key))]
    null, lines = calibration(rows), verdicts(rows)
    show(null)
    alarms = {}
    for by in ("weights", "sketch"):
        words = [row["word"] for row in rows if row["key"].startswith("null/") and f"/{by}/" in row["key"]]
        alarms[by] = rate(sum(word != "none" for word in words), len(words))
    told = {"calibration": null, "false alarms": alarms, "losses": losses, "training seconds": round(trained - begun, 1),
            "auditing seconds": round(time.monotonic() - trained, 1)}  # fmt: skip
    print(f"false alarms (any word but none): {alarms}")
    if options.quick:
        show(lines)
        print(json.dumps({"rows": lines, **told}))
    else:
        finish("audit", lines, "h200" if torch.cuda.is_available() else "cpu", **told)


if __name__ == "__main__":
    main()
