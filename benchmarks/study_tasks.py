"""The study's tasks: those of a set whose change can be dictated (style `told`), and whose tests are quick; a few of each package.

    python benchmarks/study_tasks.py recipes/tasks/train.jsonl runs/study-tasks/train.jsonl --each 10 --seconds 0.5
    python benchmarks/study_tasks.py recipes/tasks/bench.jsonl runs/study-tasks/bench.jsonl

A model of 135 million parameters solves no other kind, so that the others would only cost time. Which tasks are drawn depends on the
set and the numbers above, and on nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter
from pathlib import Path

from etude.models.fetch import default_cache
from etude.progress import Reporter
from etude.tasks.manifest import load_set, write_without
from etude.tasks.prompts import pointed_request


def main() -> None:
    """Write the smaller set."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("manifest", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--each", type=int, default=1000, help="at most this many of a package")
    parser.add_argument("--seconds", type=float, default=1000.0, help="at most this long for the tests of a task")
    parser.add_argument("--cache", type=Path, default=default_cache())
    arguments = parser.parse_args()
    found = load_set(arguments.manifest, arguments.cache, Reporter())
    used: Counter[str] = Counter()
    wrong = {}
    for task in sorted(found.tasks, key=lambda task: hashlib.sha256(task.id.encode()).hexdigest()):
        if not pointed_request(task, "told"):
            wrong[task.id] = "its change is too long to be dictated"
        elif task.seconds > arguments.seconds:
            wrong[task.id] = "its tests take long"
        elif used[task.package] >= arguments.each:
            wrong[task.id] = "enough of its package"
        else:
            used[task.package] += 1
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_without(arguments.manifest, wrong, arguments.out)
    print(
        f"{arguments.out}: {sum(used.values())} tasks of {len(used)} packages; left out: {dict(Counter(wrong.values()))}"
    )


if __name__ == "__main__":
    main()
