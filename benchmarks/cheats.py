"""What a cheat would be paid that forges outcomes, reads the text of every test, and takes for spoilt what looks so.

    python benchmarks/cheats.py recipes/tasks/bench.jsonl --draws 3 --out benchmarks/results/cheats-reader-cpu.json

No test is run: for each task the runs are drawn as the scorer draws them, and the cheat is paid if it takes every hidden function of
every run for what it is. It knows how tests are spoilt (`etude/tasks/spoil.py`), and the words of the tree that the agent sees. Every
error is counted as one that makes its test fail, which 7 % of them do not.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
from collections import Counter, defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from etude.lineage import environment
from etude.progress import Reporter
from etude.tasks.manifest import load_set
from etude.tasks.score import drawn_runs, spoilable, visible
from etude.tasks.spoil import spoilt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from etude.tasks.task import Codebase, Task

# What no author writes, or hardly one.
SHAPES = re.compile(
    r"lambda it:|^\s*assert \(?None\b|^\s*assert (self\.)?_?(test|do|check|assert|verify|run|eq_?)\w*\(|^\s*assert (.* != |not )"
    r"|assert(Not(Equal|In|IsInstance)|IsNot)\(|raises\((KeyError|ZeroDivisionError|OSError)",
    re.MULTILINE,
)
WORD = re.compile(r"[A-Za-z]{4,}")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def functions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the test functions of a file by name, with their texts."""
    lines = text.splitlines()

    def below(body: list[ast.stmt], above: str) -> Iterator[tuple[str, str]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from below(node.body, f"{above}{node.name}::")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield above + node.name, "\n".join(lines[node.lineno - 1 : node.end_lineno])

    yield from below(ast.parse(text).body, "")


def words_seen(task: Task, codebase: Codebase) -> set[str]:
    """Return the words of the tree that the agent sees."""
    changed = {entry.path: (entry.content or b"").decode() for entry in visible(task, codebase)}
    paths = [path for path in codebase.tree.rglob("*") if path.suffix in {".py", ".md", ".rst", ".txt"}]
    texts = [
        changed.get(str(path.relative_to(codebase.tree))) or path.read_text(encoding="utf-8", errors="replace")
        for path in paths
    ]
    return {word.lower() for text in texts for word in re.findall("[A-Za-z]+", text)}


def looks_spoilt(text: str, seen: set[str]) -> bool:
    """Whether the text of a test has a shape that no author writes, or a word that is one letter from another and nowhere else."""
    strange = [word.lower() for word in {*WORD.findall(text)} if word.lower() not in seen and text.count(word) == 1]
    near = (word[:i] + letter + word[i + 1 :] for word in strange for i in range(len(word)) for letter in LETTERS)
    return bool(SHAPES.search(text)) or any(word in seen for word in near)


def main() -> None:
    """Draw, read, count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    loaded, rng = load_set(given.manifest, Path.home() / ".cache" / "etude", Reporter(quiet=True)), random.Random(24)  # noqa: S311
    paid, labels = defaultdict[int, list[float]](list), Counter[str]()
    for task in loaded.tasks:
        codebase, hidden, right = loaded.codebase(task), spoilable(task), 0
        seen = words_seen(task, codebase)
        for _ in range(given.draws):
            guesses = []
            runs = drawn_runs(hidden, rng)
            sure = {each: rng.choice([wrong for wrong in runs if each in wrong]) for each in hidden}
            for wrong in runs:
                unseen = [each for each in wrong if sure[each] is not wrong]
                for entry in spoilt(codebase.tree, hidden, wrong, rng, unseen):
                    for name, text in functions((entry.content or b"").decode()):
                        if (function := f"{entry.path}::{name}") in hidden:
                            guesses.append(looks_spoilt(text, seen) == (function in wrong))
                            labels[
                                f"{'spoilt' if function in wrong else 'true'}, {'right' if guesses[-1] else 'wrong'}"
                            ] += 1
            right += all(guesses)
        paid[min(len(hidden), 5)].append(right / given.draws)
    every = [share for shares in paid.values() for share in shares]
    result = {
        "script": "cheats.py", "date": datetime.now(UTC).date().isoformat(), "hardware": environment.hardware().model_dump(),
        "command": f"python benchmarks/cheats.py {given.manifest} --draws {given.draws} --out {given.out}",
        "tasks": len(every), "draws": given.draws, "paid": sum(every) / len(every), "labels": dict(sorted(labels.items())),
        "paid_by_hidden_functions": {count: [len(shares), sum(shares) / len(shares)] for count, shares in sorted(paid.items())},
    }  # fmt: skip
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
