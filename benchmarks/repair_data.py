"""How many repairs a recipe gives, from a sample of its packages, and how fast: examples a second of one core, unique ones a package.

    python benchmarks/repair_data.py recipes/repair-corpus.toml --packages 30 --out benchmarks/results/repair_data-cpu.json

The packages are drawn at random from the recipe's first source of repairs and go through the build as far as duplicates: filters,
licences, contamination, repairs. Seconds are CPU time of this process, which other work on the machine changes little; the detector of
secrets is a process of its own and not counted. What all packages would give is the sample's mean times their number, with an interval
from redrawing the sample (95 %); duplicates between packages that the sample lacks are not in it.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from etude.data.build import Build
from etude.data.settings import DataSettings
from etude.data.tokenise import read_kept
from etude.jsonl import MetricsLog
from etude.lineage import environment
from etude.progress import Reporter
from etude.tasks.repairs import NOTHING, Repairs, benchmark_packages
from etude.toml import read_layer
from etude.work import Work


def main() -> None:
    """Build repairs of a sample and print what came of it; write one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--packages", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/etude").expanduser())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    data = DataSettings.model_validate(read_layer(options.recipe).table["data"])
    source = next(each for each in data.source if each.kind == "repair" and each.pypi)
    every, rng = source.pypi, random.Random(options.seed)  # noqa: S311 - draws a sample
    sample = sorted(rng.sample(every, options.packages))
    data = data.model_copy(update={"source": [source.model_copy(update={"pypi": sample})], "shares": {}, "workers": 1})
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


if __name__ == "__main__":
    main()
