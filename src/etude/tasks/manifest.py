"""A set of tasks as one small file of JSON lines: packages pinned by digest, tasks as byte spans of their files.

The first line is the set, then every codebase with its test ids, grouped by file, then the tasks; a task names its tests by ranges
of their numbers. With the file alone, everything else is built again, and checked to be what it was.
"""

from __future__ import annotations

import difflib
import json
import platform
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import UserError
from etude.files import digest_of, write_text
from etude.tasks.environment import environment
from etude.tasks.score import visible
from etude.tasks.source import PackageSettings, unpack
from etude.tasks.suite import Ready
from etude.tasks.task import Candidate, Edit, Span, Task

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from etude.progress import Reporter

FORMAT = 1
Row = dict[str, Any]
CODEBASE_KEYS = frozenset({"codebase", "digest", "licence", "settings", "installed", "tests", "unspoilable", "seconds"})
TASK_KEYS = frozenset({"task", "codebase", "generator", "kinds", "edits", "spans", "fail_to_pass", "pass_to_pass", "hidden", "prompts",
                       "category", "difficulty", "seconds", "digest"})  # fmt: skip


@dataclass(frozen=True)
class TaskSet:
    """A set that is ready for use."""

    name: str
    digest: str  # of all that is in the manifest
    tasks: tuple[Task, ...]
    codebases: dict[str, Ready]  # by name==version

    def codebase(self, task: Task) -> Ready:
        """Return the codebase of a task."""
        return self.codebases[f"{task.package}=={task.version}"]


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers in increasing order as `0-4,7`."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def numbers(text: str) -> list[int]:
    """Return what `ranges` wrote."""
    pairs = [part.partition("-") for part in text.split(",") if part]
    return [number for first, dash, last in pairs for number in range(int(first), int(last if dash else first) + 1)]


def cuts(fixed: str, broken: str) -> list[tuple[int, int, str]]:
    """Return the byte spans of the solved file that give way to other text in the broken one, from the front."""
    old, new = fixed.splitlines(keepends=True), broken.splitlines(keepends=True)
    starts = [0, *accumulate(len(line.encode()) for line in old)]
    codes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [(starts[i], starts[j], "".join(new[k:m])) for tag, i, j, k, m in codes if tag != "equal"]


def cut(fixed: str, spans: Iterable[Sequence[Any]]) -> str:
    """Return the broken file."""
    content = fixed.encode()
    for first, last, text in sorted(map(tuple, spans), reverse=True):
        content = content[:first] + text.encode() + content[last:]
    return content.decode()


def _edit_row(edit: Edit) -> Row:
    if edit.fixed is None:
        return {"path": edit.path, "text": edit.broken}
    return (
        {"path": edit.path, "cuts": cuts(edit.fixed, edit.broken)} if edit.broken is not None else {"path": edit.path}
    )


def _edit(row: Row, tree: Path) -> Edit:
    if "text" in row:
        return Edit(row["path"], row["text"], None)
    fixed = (tree / row["path"]).read_bytes().decode()
    return Edit(row["path"], cut(fixed, row["cuts"]) if "cuts" in row else None, fixed)


def codebase_row(codebase: Ready, settings: PackageSettings, installed: Sequence[str]) -> Row:
    """Return the line of a codebase."""
    files: dict[str, list[str]] = defaultdict(list)
    for test in codebase.ids:
        path, _, name = test.partition("::")
        files[path].append(name)
    at = {test: i for i, test in enumerate(codebase.ids)}
    unspoilable = {form: ranges(map(at.__getitem__, tests)) for form, tests in codebase.unspoilable.items()}
    return {"codebase": f"{codebase.name}=={codebase.version}", "digest": codebase.digest, "licence": codebase.licence,
            "settings": settings.model_dump(exclude_defaults=True), "installed": list(installed), "tests": files,
            "unspoilable": unspoilable, "seconds": [round(codebase.seconds[test], 2) for test in codebase.ids]}  # fmt: skip


def task_row(task: Task, codebase: Ready) -> Row:
    """Return the line of a task."""
    at = {test: i for i, test in enumerate(codebase.ids)}
    candidate = task.candidate
    return {"task": task.id, "codebase": f"{task.package}=={task.version}", "generator": candidate.generator, "kinds": candidate.kinds,
            "edits": [_edit_row(edit) for edit in candidate.edits], "spans": [list(asdict(span).values()) for span in candidate.spans],
            "fail_to_pass": ranges(map(at.__getitem__, task.fail_to_pass)),
            "pass_to_pass": ranges(map(at.__getitem__, task.pass_to_pass)),
            "hidden": task.hidden, "prompts": task.prompts, "category": task.category, "difficulty": task.difficulty,
            "seconds": round(task.seconds, 2), "digest": tree_digest(task, codebase)}  # fmt: skip


def tree_digest(task: Task, codebase: Ready) -> str:
    """Return a digest of what the agent sees."""
    changed = {
        entry.path: entry.content.decode() if entry.content is not None else None for entry in visible(task, codebase)
    }
    return digest_of([codebase.digest, changed])[:16]


def task_of(row: Row, codebase: Ready) -> Task:
    """Return the task of a line."""
    failing, passing = (tuple(codebase.ids[i] for i in numbers(row[name])) for name in ("fail_to_pass", "pass_to_pass"))
    edits = tuple(_edit(each, codebase.tree) for each in row["edits"])
    spans = tuple(Span(*each) for each in row["spans"])
    candidate = Candidate(row["generator"], tuple(row["kinds"]), edits, spans)
    task = Task(row["task"], codebase.name, codebase.version, candidate, row["prompts"], failing, passing,
                tuple(row["hidden"]), category=row["category"], difficulty=row["difficulty"], seconds=row["seconds"])  # fmt: skip
    if tree_digest(task, codebase) != row["digest"]:
        raise UserError(f"task {task.id}: its tree is not what it was when it was made; make the set anew")
    return task


def write_set(path: Path, header: Row, codebases: Iterable[Row], tasks: Iterable[Row]) -> None:
    """Write a manifest."""
    rows = [{"format": FORMAT, **header}, *codebases, *tasks]
    write_text(path, "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows))


def find_manifest(named: str, setting: str) -> Path:
    """Return the manifest that a recipe's setting names."""
    path = Path(named).expanduser()
    if not path.is_file():
        raise UserError(
            f"{setting}: {named!r} is not a file (looked in {Path.cwd()}); make one with `etude tasks make`"
        )
    return path


def read_rows(path: Path) -> tuple[Row, list[Row], list[Row]]:
    """Return the header, the codebases and the tasks of a manifest."""
    try:
        header, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no manifest of tasks: {error}; make one with `etude tasks make`") from None
    if not all(isinstance(row, dict) for row in (header, *rows)) or not header.keys() >= {"format", "name"}:
        raise UserError(f"{path} is no manifest of tasks: its lines are other JSON; make one with `etude tasks make`")
    if header["format"] != FORMAT:
        raise UserError(f"{path} has format {header['format']!r}; this version reads {FORMAT}")
    return header, [row for row in rows if "task" not in row], [row for row in rows if "task" in row]


def write_without(path: Path, wrong: Mapping[str, str], out: Path) -> None:
    """Write a set again without some tasks; its header says which, and why."""
    header, codebases, tasks = read_rows(path)
    right = [row for row in tasks if row["task"] not in wrong]
    kept: dict[str, Counter[str]] = defaultdict(Counter)
    for row in right:
        kept[row["generator"]][row["codebase"]] += 1
    header |= {
        "tasks": len(right),
        "kept": kept,
        "dropped": {**header.get("dropped", {}), **dict(sorted(wrong.items()))},
    }
    used = {row["codebase"] for row in right}
    write_set(out, header, [row for row in codebases if row["codebase"] in used], right)


def ready(row: Row, cache: Path, reporter: Reporter) -> Ready:
    """Build the codebase of a line: its tree from the pinned archive, its Python from the pinned versions."""
    settings = PackageSettings(**row["settings"])
    unpacked = unpack(settings, cache, reporter)
    if unpacked.digest != row["digest"]:
        raise UserError(
            f"{row['codebase']} is not what the manifest pins: digest {unpacked.digest[:16]}, not {row['digest'][:16]}"
        )
    python = environment(unpacked, settings, cache, row["installed"])
    ids = tuple(f"{path}::{name}" for path, names in row["tests"].items() for name in names)
    unspoilable = {form: frozenset(ids[i] for i in numbers(text)) for form, text in row["unspoilable"].items()}
    return Ready(unpacked.name, unpacked.version, unpacked.digest, unpacked.tree, unpacked.sources, unpacked.tests, python.python,
                 unpacked.paths, row["licence"], tuple(settings.pytest), python.hidden, ids, unspoilable,
                 dict(zip(ids, row["seconds"], strict=True)))  # fmt: skip


def _refuse_incomplete(path: Path, rows: Iterable[Row], tasks: Iterable[Row]) -> None:
    """Refuse lines that were cut short by hand: what they lack cannot be guessed."""
    for kind, some, needed in (("codebase", rows, CODEBASE_KEYS), ("task", tasks, TASK_KEYS)):
        for row in some:
            if lacking := sorted(needed - row.keys()):
                name = str(row.get(kind, "without a name"))
                raise UserError(
                    f"{path}: {kind} {name} has no {lacking[0]!r}; make the set anew with `etude tasks make`"
                )


def picked(named: str, tasks: Iterable[Row], only: str) -> list[Row]:
    """Return the tasks whose ids begin with a word of `only`, or all if it has none; refuse a word that finds no task."""
    rows, words = list(tasks), only.split() or [""]
    for word in words:
        if not any(row["task"].startswith(word) for row in rows):
            like = f" whose id begins with {word!r}" if word else ""
            raise UserError(f"{named} has no task{like}; make some with `etude tasks make`")
    return [row for row in rows if row["task"].startswith(tuple(words))]


def load_set(path: Path, cache: Path, reporter: Reporter, only: str = "") -> TaskSet:
    """Build a set from its manifest, or only the tasks whose ids begin with a word of `only`."""
    header, rows, tasks = read_rows(path)
    _refuse_incomplete(path, rows, tasks)
    made, here = (version.split(".")[:2] for version in (str(header.get("python", "")), platform.python_version()))
    if made not in ([""], here):
        told = f"made and validated with Python {'.'.join(made)}, and this is {'.'.join(here)}"
        reporter.say(f"{header['name']} was {told}: some tests may differ; `etude tasks check` tells")
    wanted = picked(str(path), tasks, only)
    named = {row["codebase"] for row in wanted}
    codebases = {}
    with reporter.task(f"building {header['name']}", len(named), "codebases") as progress:
        for row in rows:
            if row["codebase"] in named:
                codebases[row["codebase"]] = ready(row, cache, reporter)
                progress.advance()
    split = header.get("split", "bench")
    built = tuple(replace(task_of(row, codebases[row["codebase"]]), split=split) for row in wanted)
    return TaskSet(header["name"], digest_of([header, rows, tasks]), built, codebases)
