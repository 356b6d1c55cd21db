"""How many repairs a recipe gives, from a sample of its packages, and how fast: examples a second of one core, unique ones a package.

    python benchmarks/repair_data.py recipes/repair-corpus.toml --packages 30 --out benchmarks/results/repair_data-cpu.json

The packages are drawn at random from the recipe's first source of repairs and go through the build as far as duplicates: filters,
licences, contamination, repairs. Seconds are CPU time of this process, which other work on the machine changes little; the detector of
secrets is a process of its own and not counted. With `--every 20` functions are counted only (unique by meaning, of Python files that
are no tests), and repairs are made of each twentieth file: no filter, no licence and no contamination is then looked at. What all
packages would give is the sample's mean times their number, with an interval from redrawing the sample (95 %); duplicates between
packages that the sample lacks are not in it.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from etude.data.build import Build
from etude.data.document import Document, Drop
from etude.data.settings import DataSettings, RepairSettings
from etude.data.sources.package import Archive
from etude.data.tokenise import read_kept
from etude.files import digest_of
from etude.jsonl import MetricsLog
from etude.lineage import environment
from etude.progress import Reporter
from etude.tasks.generators.parsed import Parsed, is_test_path, shape
from etude.tasks.repairs import LONGEST, NOTHING, SHORTEST, Repairs, _without_docstring, benchmark_packages
from etude.toml import read_layer
from etude.work import Work


def main() -> None:
    """Build repairs of a sample and print what came of it; write one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--packages", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/etude").expanduser())
    parser.add_argument("--every", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    data = DataSettings.model_validate(read_layer(options.recipe).table["data"])
    source = next(each for each in data.source if each.kind == "repair" and each.pypi)
    every, rng = source.pypi, random.Random(options.seed)  # noqa: S311 - draws a sample
    sample = sorted(rng.sample(every, options.packages))
    data = data.model_copy(update={"source": [source.model_copy(update={"pypi": sample})], "shares": {}, "workers": 1})
    if options.every:
        estimate(sample, len(every), options, rng)
        return
    named = benchmark_packages([Path(name) for name in data.contamination.tasks])
    with tempfile.TemporaryDirectory() as place, MetricsLog(Path(place, "metrics.jsonl")) as log:
        work = Work(Path(place), log, Reporter(), options.cache)
        build = Build(data, work, 0, None, lambda each: Repairs(each.repair, 0, named))
        began = time.process_time()
        units, _ = build.compared()
        seconds = time.process_time() - began
        kept = [each for unit in units for some in read_kept(unit.folder) for each in some]
    entry = build.entries[source.name]
    found = Counter(each.repository for each in kept)
    counts = [*found.values()] + [0] * (options.packages - len(found))  # not one of some is kept
    draws = sorted(sum(rng.choices(counts, k=len(counts))) * len(every) / len(counts) for _ in range(2000))
    made = sum(count for kind, count in entry.made.items() if not kind.startswith("left out"))
    row = {
        "script": "repair_data.py", "date": datetime.now(UTC).date().isoformat(), "hardware": environment.hardware().model_dump(),
        "recipe": options.recipe.name, "packages": len(every), "sample": len(sample), "cpu_seconds": round(seconds, 1), "made": made,
        "made_a_cpu_second": round(made / seconds, 1), "unique": len(kept), "files": entry.made_of,
        "nothing_wrong": round(sum(f"-{NOTHING.replace(' ', '-')}-" in each.path for each in kept) / max(len(kept), 1), 4),
        "mean_characters": round(sum(len(each.text) for each in kept) / max(len(kept), 1)),
        "all_packages": {"unique": round(len(kept) * len(every) / len(sample)), "from": round(draws[50]), "to": round(draws[1949])},
        "by_package": dict(found.most_common()), "drops": dict(entry.drops.most_common()), "kinds": dict(entry.made.most_common()),
    }  # fmt: skip
    print(json.dumps(row, indent=1))
    if options.out:
        options.out.write_text(json.dumps(row) + "\n", encoding="utf-8")


def estimate(sample: list[str], packages: int, options: argparse.Namespace, rng: random.Random) -> None:
    """Count functions of the sampled archives, make repairs of some files, and print what that would come to."""
    known: set[str] = set()
    found, made, files, began = (
        Counter[str](),
        [0, 0, 0.0],
        0,
        time.process_time(),
    )  # examples, functions and seconds of some files
    for pin in sample:
        note = json.loads((options.cache / "sdists" / f"{pin}.json").read_text())
        for raw in Archive(str(options.cache / "sdists" / note["file"]), 1_000_000).read():
            if isinstance(raw, Drop) or not raw.path.endswith(".py") or is_test_path(raw.path):
                continue
            try:
                parsed = Parsed(raw.path, raw.content.decode())
                functions = [
                    node for _, node in parsed.definitions if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                ]
            except (SyntaxError, ValueError, RecursionError):
                continue
            fit = [node for node in functions if SHORTEST <= (node.end_lineno or 0) - node.lineno + 1 <= LONGEST]
            new = {digest_of(shape(_without_docstring(node))) for node in fit} - known
            known |= new
            found[pin] += len(new)
            files += 1
            if files % options.every == 0:
                start = time.process_time()
                result = Repairs(RepairSettings(), 0, frozenset()).make(Document(pin, raw.path, parsed.text), Counter())
                made = [
                    made[0] + len(result) * isinstance(result, list),
                    made[1] + len(fit),
                    made[2] + time.process_time() - start,
                ]
    ratio = made[0] / max(made[1], 1)
    counts = [found[pin] for pin in sample]
    draws = sorted(sum(rng.choices(counts, k=len(counts))) * packages / len(counts) for _ in range(2000))
    row = {
        "script": "repair_data.py", "every": options.every, "date": datetime.now(UTC).date().isoformat(),
        "hardware": environment.hardware().model_dump(), "recipe": options.recipe.name,
        "packages": packages, "sample": len(sample), "files": files, "functions": len(known),
        "made": made[0], "made_of_functions": made[1], "examples_a_function": round(ratio, 3),
        "made_a_cpu_second": round(made[0] / max(made[2], 1e-9), 1), "cpu_seconds": round(time.process_time() - began, 1),
        "all_packages": {"examples": round(sum(counts) * ratio * packages / len(sample)), "from": round(draws[50] * ratio),
                         "to": round(draws[1949] * ratio)}, "functions_by_package": dict(found.most_common()),
    }  # fmt: skip
    print(json.dumps(row, indent=1))
    if options.out:
        options.out.write_text(json.dumps(row) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
