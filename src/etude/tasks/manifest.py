"""A set of tasks as one small file of JSON lines: packages pinned by digest, tasks as byte spans of their files.

The first line is the set, then every codebase with its test ids, grouped by file, then the tasks; a task names its tests by ranges
of their numbers. With the file alone, everything else is built again, and checked to be what it was.
"""

from __future__ import annotations

import json
import platform
from collections import Counter, defaultdict
from dataclasses import astuple, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import UserError
from etude.files import digest_of, write_text
from etude.sandbox.images import settled
from etude.tasks.codebase import PackageSettings, unpack, with_environment
from etude.tasks.generators.parsed import Cut, cut_text, differing
from etude.tasks.score import visible
from etude.tasks.task import Candidate, Codebase, Edit, Span, Task

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from etude.progress import Reporter

FORMATS = (1, 2)  # in the second, a file of tests that is as in a codebase above is the name of that codebase
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
    codebases: dict[str, Codebase]  # by name==version

    def codebase(self, task: Task) -> Codebase:
        return self.codebases[f"{task.package}=={task.version}"]


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers in increasing order as `0-4,7`."""
    pairs: list[list[int]] = []
    for number in sorted(numbers):
        if pairs and number == pairs[-1][1] + 1:
            pairs[-1][1] = number
        else:
            pairs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in pairs)


def numbers(text: str) -> list[int]:
    """Return what `ranges` wrote."""
    pairs = [part.partition("-") for part in text.split(",") if part]
    return [number for first, _, last in pairs for number in range(int(first), int(last or first) + 1)]


def cuts(fixed: str, broken: str) -> list[Cut]:
    """Return the byte spans of the solved file that give way to other text in the broken one, from the front."""
    old, new = fixed.splitlines(keepends=True), broken.splitlines(keepends=True)
    starts = [0, *accumulate(len(line.encode()) for line in old)]
    return [Cut(starts[i], starts[j], "".join(new[k:m])) for i, j, k, m in differing(old, new)]


def _edit_row(edit: Edit) -> Row:
    if edit.fixed is None:
        return {"path": edit.path, "text": edit.broken}
    return {"path": edit.path} | ({} if edit.broken is None else {"cuts": cuts(edit.fixed, edit.broken)})


def _edit(row: Row, tree: Path) -> Edit:
    if "text" in row:
        return Edit(row["path"], row["text"], None)
    fixed = (tree / row["path"]).read_bytes().decode()
    return Edit(row["path"], cut_text(fixed, (Cut(*each) for each in row["cuts"])) if "cuts" in row else None, fixed)


def _ranges_of(tests: Iterable[str], codebase: Codebase) -> str:
    at = {test: i for i, test in enumerate(codebase.ids)}
    return ranges(map(at.__getitem__, tests))


def codebase_row(codebase: Codebase, settings: PackageSettings) -> Row:
    """Return the line of a codebase."""
    files: dict[str, list[str]] = defaultdict(list)
    for path, _, name in (test.partition("::") for test in codebase.ids):
        files[path].append(name)
    return {"codebase": codebase.key, "digest": codebase.digest, "licence": codebase.licence,
            "settings": settings.model_dump(exclude_defaults=True), "installed": list(codebase.installed), "tests": files,
            **({"lock": codebase.lock} if codebase.lock else {}),
            "unspoilable": _ranges_of(codebase.unspoilable, codebase),
            "seconds": [round(codebase.seconds[test], 2) for test in codebase.ids]}  # fmt: skip


def task_row(task: Task, codebase: Codebase) -> Row:
    """Return the line of a task."""
    candidate = task.candidate
    return {"task": task.id, "codebase": codebase.key, "generator": candidate.generator, "kinds": candidate.kinds,
            "edits": [_edit_row(edit) for edit in candidate.edits], "spans": [astuple(span) for span in candidate.spans],
            "fail_to_pass": _ranges_of(task.fail_to_pass, codebase), "pass_to_pass": _ranges_of(task.pass_to_pass, codebase),
            "hidden": task.hidden, "prompts": task.prompts, "category": task.category, "difficulty": task.difficulty,
            "seconds": round(task.seconds, 2), "digest": tree_digest(task, codebase)}  # fmt: skip


def tree_digest(task: Task, codebase: Codebase) -> str:
    """Return a digest of what the agent sees."""
    contents = {each.path: each.content for each in visible(task, codebase)}
    changed = {path: None if content is None else content.decode() for path, content in contents.items()}
    return digest_of([codebase.digest, changed])[:16]


def task_of(row: Row, codebase: Codebase) -> Task:
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
    known: dict[tuple[str, ...], str] = {}
    short, shared = [], False
    for row in codebases:  # of a history there are many that differ little
        key, tests = row["codebase"], row.get("tests", {})
        first_with = {path: known.setdefault((path, *names), key) for path, names in tests.items()}
        again = {path: other for path, other in first_with.items() if other != key}
        short.append({**row, "tests": {**row["tests"], **again}} if again else row)
        shared = shared or bool(again)
    first = {"format": FORMATS[shared]} | {key: value for key, value in header.items() if key != "format"}
    rows = [first, *short, *tasks]
    write_text(path, "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows))


def find_manifest(named: str, setting: str) -> Path:
    """Return the manifest that a recipe's setting names."""
    path = Path(named).expanduser()
    if not path.is_file():
        here = f"(looked in {Path.cwd()})"
        raise UserError(f"{setting}: {named!r} is not a file {here}; make one with `etude tasks make`")
    return path


def read_rows(path: Path) -> tuple[Row, list[Row], list[Row]]:
    """Return the header, the codebases and the tasks of a manifest."""
    try:
        header, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() or ["null"]]
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no manifest of tasks: {error}; make one with `etude tasks make`") from None
    if not all(isinstance(row, dict) for row in (header, *rows)) or not header.keys() >= {"format", "name"}:
        other = "it is empty, or its lines are other JSON"
        raise UserError(f"{path} is no manifest of tasks: {other}; make one with `etude tasks make`")
    if header["format"] not in FORMATS:
        raise UserError(f"{path} has format {header['format']!r}; this version reads {' and '.join(map(str, FORMATS))}")
    codebases = [row for row in rows if "task" not in row]
    by_key = {row["codebase"]: row for row in codebases if row.keys() >= {"codebase", "tests"}}
    for row in by_key.values():
        for name, names in row["tests"].items():
            if isinstance(names, str):
                row["tests"][name] = by_key.get(names, {"tests": {}})["tests"].get(name)
                if not isinstance(row["tests"][name], list):
                    raise UserError(f"{path}: codebase {row['codebase']} has no tests of {name}; make the set anew")
    return header, codebases, [row for row in rows if "task" in row]


def write_without(path: Path, wrong: Mapping[str, str], out: Path) -> None:
    """Write a set again without some tasks; its header says which, and why."""
    header, codebases, tasks = read_rows(path)
    right = [row for row in tasks if row["task"] not in wrong]
    kept: dict[str, Counter[str]] = defaultdict(Counter)
    for row in right:
        kept[row["generator"]][row["codebase"]] += 1
    dropped = {**header.get("dropped", {}), **dict(sorted(wrong.items()))}
    used = {row["codebase"] for row in right}
    rows = [row for row in codebases if row["codebase"] in used]
    write_set(out, {**header, "tasks": len(right), "kept": kept, "dropped": dropped}, rows, right)


def built_codebase(row: Row, cache: Path, reporter: Reporter) -> Codebase:
    """Build the codebase of a line: its tree from the pinned archive, its Python from the pinned versions."""
    settings = PackageSettings(**row["settings"])
    unpacked = unpack(settings, cache, reporter)
    if unpacked.digest != row["digest"]:
        digests = f"digest {unpacked.digest[:16]}, not {row['digest'][:16]}"
        raise UserError(f"{row['codebase']} is not what the manifest pins: {digests}")
    ids = tuple(f"{path}::{name}" for path, names in row["tests"].items() for name in names)
    # Sets made before November 2026 have ranges for two forms of errors that are no longer put into tests.
    unspoilable = row["unspoilable"] if isinstance(row["unspoilable"], str) else ""
    seconds = dict(zip(ids, row["seconds"], strict=True))
    codebase = with_environment(unpacked, settings, cache, row["installed"])
    return replace(codebase, licence=row["licence"], ids=ids, unspoilable=frozenset(ids[i] for i in numbers(unspoilable)),
                   seconds=seconds)  # fmt: skip


def _refuse_incomplete(path: Path, kind: str, rows: Iterable[Row], needed: frozenset[str]) -> None:
    """Refuse lines that lack a key."""
    for row in rows:
        if lacking := sorted(needed - row.keys()):
            name = row.get(kind, "without a name")
            raise UserError(f"{path}: {kind} {name} has no {lacking[0]!r}; make the set anew with `etude tasks make`")


def picked(named: str, tasks: Iterable[Row], only: str) -> list[Row]:
    """Return the tasks whose ids begin with a word of `only`, or all if it has none; refuse a word that finds no task."""
    rows, words = list(tasks), only.split() or [""]
    for word in words:
        if not any(row["task"].startswith(word) for row in rows):
            like = f" whose id begins with {word!r}" if word else ""
            raise UserError(f"{named} has no task{like}; make some with `etude tasks make`")
    return [row for row in rows if row["task"].startswith(tuple(words))]


def load_set(path: Path, cache: Path, reporter: Reporter, only: str = "", sandbox: str = "auto") -> TaskSet:
    """Build a set from its manifest, or only the tasks whose ids begin with a word of `only`, to be run in a sandbox of a kind."""
    header, rows, tasks = read_rows(path)
    _refuse_incomplete(path, "codebase", rows, CODEBASE_KEYS)
    _refuse_incomplete(path, "task", tasks, TASK_KEYS)
    made, here = (version.split(".")[:2] for version in (str(header.get("python", "")), platform.python_version()))
    if made not in ([""], here):
        versions = f"made and validated with Python {'.'.join(made)}, and this is {'.'.join(here)}"
        reporter.say(f"{header['name']} was {versions}: some tests may differ; `etude tasks check` shows which")
    wanted = picked(str(path), tasks, only)
    named, backend = {row["codebase"] for row in wanted}, settled(sandbox)
    codebases = {}
    with reporter.task(f"building {header['name']}", len(named), "codebases") as progress:
        for row in rows:
            if row["codebase"] in named:
                codebases[row["codebase"]] = replace(built_codebase(row, cache, reporter), sandbox=backend)
                progress.advance()
    split = header.get("split", "bench")
    built = tuple(replace(task_of(row, codebases[row["codebase"]]), split=split) for row in wanted)
    return TaskSet(header["name"], digest_of([header, rows, tasks]), built, codebases)
