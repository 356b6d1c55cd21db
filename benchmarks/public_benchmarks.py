"""Tasks of public benchmarks through `etude bench oracle noop`: what was run, and whether the suite's own package says the same.

    python benchmarks/public_benchmarks.py FOLDER --tasks TASKS --package SWEBENCH

FOLDER has a results folder of `etude bench` for each task, named after it. TASKS are SWE-bench's folders, whose images are there;
SWEBENCH is an unpacked `swebench` package, of which only the grading of a log is used: each test_output.txt is
graded again by it, and all four lists of tests must agree. Only names and verdicts are kept.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import yaml

from report import finish

LISTS = [(kind, end) for kind in ("FAIL_TO_PASS", "PASS_TO_PASS") for end in ("success", "failure")]
RUN = Path("logs/run_evaluation/etude-1")


def grader(package: Path) -> Any:
    """Return the package's grading of a log, without the container engines that the rest of it imports."""
    for name, place in (("swebench", package / "swebench"), ("swebench.harness", package / "swebench/harness")):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(place)]
    sys.modules.setdefault("unidiff", ModuleType("unidiff")).PatchSet = None  # type: ignore[attr-defined]
    return importlib.import_module("swebench.harness.grading").get_eval_report


def seen(folder: Path, tasks: Path, grade: Any) -> dict[str, Any]:
    """Return what became of one task."""
    task = tasks / folder.name
    about, tests = yaml.safe_load((task / "task.yaml").read_text()), json.loads((task / "tests.json").read_text())
    row: dict[str, Any] = {
        "task": folder.name,
        "repository": about["repo"],
        "oracle": "not run",
        "noop": "not run",
        "same": True,
    }
    trials = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()[1:]]
    for trial in trials:
        agent = trial["model"]
        row[agent] = trial["outcome"] + (f": {trial['why'][:80]}" if trial["why"] else "")
        place = folder / RUN / agent / folder.name
        if not (place / "test_output.txt").exists():
            continue
        spec = SimpleNamespace(**{**about, **tests, "instance_id": folder.name})
        prediction = {"instance_id": folder.name, "model_patch": "x"}
        theirs = grade(spec, prediction, str(place / "test_output.txt"), include_tests_status=True)[folder.name]
        ours = json.loads((place / "report.json").read_text())[folder.name]
        both = [
            [each.get("tests_status", {}).get(kind, {}).get(end, []) for kind, end in LISTS] for each in (ours, theirs)
        ]
        row["same"] &= ours["resolved"] == theirs["resolved"] and [*map(sorted, both[0])] == [*map(sorted, both[1])]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--rest", type=Path, help="JSON: reasons by task or kind of tasks, for those that were not run")
    given = parser.parse_args()
    sys.path.insert(0, str(given.package))
    grade = grader(given.package)
    rows = [
        seen(each, given.tasks, grade) for each in sorted(given.folder.iterdir()) if (each / "trials.jsonl").exists()
    ]
    good = [row for row in rows if (row["oracle"], row["noop"], row["same"]) == ("pass", "fail", True)]
    rest = json.loads(given.rest.read_text()) if given.rest else {}
    counts = {
        "tasks": len(rows),
        "as they should be": len(good),
        "repositories": len({row["repository"] for row in good}),
    }
    finish("public_benchmarks", rows, "cpu", counts=counts, rest=rest)


if __name__ == "__main__":
    main()
