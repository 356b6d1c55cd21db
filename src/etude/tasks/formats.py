"""Tasks in the formats of other programs: Harbor's folders (those that we wrote are read back too) and SWE-bench's rows.

    instruction.md  task.toml  environment/{Dockerfile, tree/}  solution/{solve.sh, tree/}  tests/{test.sh, verify.py, pristine/, …}

Harbor's verifier is a container that the agent never touched; of the agent's it gets the package's code and nothing else. Our own
fields are in `tests/etude.json`, where the agent cannot see them; with them a folder is read back as the task it was.

Of a SWE-bench row, `patch` is the solution, from the broken tree to the solved one; `test_patch` brings the hidden tests back.
"""

from __future__ import annotations

import difflib
import json
import re
import shutil
from typing import TYPE_CHECKING, Any

from etude.errors import UserError
from etude.files import files_below, read_json, write_json, write_text
from etude.sandbox.box import WORKSPACE
from etude.tasks.codebase import PLUGIN, RUNNER, PackageSettings
from etude.tasks.generators.parsed import is_below, is_test_path
from etude.tasks.locks import APT
from etude.tasks.manifest import TaskSet, built_codebase, codebase_row, task_of, task_row
from etude.tasks.score import visible
from etude.tasks.suite import entries_of, order_of, write_entries

if TYPE_CHECKING:
    from pathlib import Path

    from etude.progress import Reporter
    from etude.tasks.task import Codebase, Task

DOCKERFILE = """FROM python:{python}-slim
RUN pip install --no-cache-dir --no-deps {installed} && pip uninstall -y setuptools wheel pip
ENV PYTHONPATH={paths} PYTHONDONTWRITEBYTECODE=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
COPY tree {workspace}
WORKDIR {workspace}
"""
SOLVE = '#!/bin/sh\nset -e\ncp -R /solution/tree/. "{workspace}"\n{removals}'
NOT_TAKEN = [".pth", ".pyc", ".so", "conftest.py", "sitecustomize.py", "usercustomize.py"]
TEST = "#!/bin/sh\nmkdir -p /logs/verifier\ncp -R /tests/pristine/. {workspace}\npython -I /tests/verify.py\n"
# Runs with the standard library alone, beside the runner that our own scoring uses.
VERIFY = """import json, os, secrets, subprocess, sys
order = json.load(open("/tests/order.json"))
names = tuple(order["not_taken"])
for folder, _, files in os.walk("{workspace}"):
    for name in files:
        if name.endswith(names):
            path = os.path.join(folder, name)
            if not os.path.exists(path.replace("{workspace}", "/tests/pristine", 1)):
                os.remove(path)
nonce = secrets.token_hex(16)
command, line = [sys.executable, "/tests/{runner}.py"], json.dumps(order | dict(nonce=nonce)) + "\\n"
try:
    done = subprocess.run(command, input=line, capture_output=True, text=True, cwd="{workspace}", timeout=order["seconds"])
    lines, code = done.stdout.splitlines(), done.returncode
except subprocess.TimeoutExpired:
    lines, code = [], -1
messages, outcomes = [], {{}}
for line in lines:
    if line.startswith(f"{{nonce}} {{len(messages)}} "):
        messages.append(json.loads(line.split(" ", 2)[2]))
for kind, *rest in messages:
    if kind == "test":
        outcomes[rest[0]] = rest[1]
whole = bool(messages) and messages[-1][0] == "end" and messages[-1][1:] == [code, len(outcomes)]
def share(tests):
    return sum(outcomes.get(test) == "passed" for test in tests) / max(len(tests), 1) if whole else 0.0
fractions = {{name: share(order[name]) for name in ("fail_to_pass", "pass_to_pass")}}
reward = float(all(each == 1.0 for each in fractions.values()))
json.dump({{"reward": reward, **fractions}}, open("/logs/verifier/reward.json", "w"))
"""


def write_harbor(task: Task, codebase: Codebase, folder: Path) -> None:
    """Write a task as a folder that Harbor runs."""
    if folder.exists():
        raise UserError(f"{folder} is there already; choose another folder, or remove it")
    if codebase.services or any(pin.startswith(f"{APT}:") for pin in codebase.installed):
        lacking = "has services or packages of the system, which its Harbor folder would lack"
        raise UserError(f"{codebase.key} {lacking}; leave --harbor out")
    removals = "".join(f'rm -f "{WORKSPACE}/{edit.path}"\n' for edit in task.candidate.edits if edit.fixed is None)
    texts = {"instruction.md": _request(task) + "\n", "task.toml": _config(task, codebase),
             "environment/Dockerfile": _dockerfile(codebase), "tests/test.sh": TEST.format(workspace=WORKSPACE),
             "tests/verify.py": VERIFY.format(workspace=WORKSPACE, runner=RUNNER), "solution/solve.sh":
             SOLVE.format(workspace=WORKSPACE, removals=removals)}  # fmt: skip
    for name, text in texts.items():
        write_text(folder / name, text)
    shutil.copytree(codebase.tree, folder / "environment" / "tree", symlinks=True)
    write_entries(folder / "environment" / "tree", visible(task, codebase))
    write_entries(folder / "solution" / "tree", entries_of(task.candidate.edits, "fixed"))
    for path in files_below(codebase.tree):
        place = path.relative_to(codebase.tree).as_posix()
        if is_test_path(place) or is_below(place, codebase.tests):
            target = folder / "tests" / "pristine" / place
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    shutil.copyfile(PLUGIN, folder / "tests" / f"{RUNNER}.py")
    lists = {"fail_to_pass": task.fail_to_pass, "pass_to_pass": task.pass_to_pass, "not_taken": NOT_TAKEN}
    limits = {"limit": 60, "effort": 24, "seconds": 120 + 10 * task.seconds}
    write_json(folder / "tests" / "order.json", order_of(codebase, task.tests) | limits | lists)
    settings = PackageSettings(pypi=codebase.key, sources=list(codebase.sources), tests=list(codebase.tests),
                               pytest=list(codebase.options), licence=codebase.licence)  # fmt: skip
    rows = {"task": task_row(task, codebase), "codebase": codebase_row(codebase, settings)}
    write_json(folder / "tests" / "etude.json", rows)


def _request(task: Task) -> str:
    return task.prompts.get("terse") or next(iter(task.prompts.values()), "")


def _dockerfile(codebase: Codebase) -> str:
    site = read_json(codebase.python.parent.parent / "etude.json")["site"]
    python, paths = re.findall(r"python(\d+\.\d+)", site)[-1], ":".join(codebase.python_path)
    return DOCKERFILE.format(python=python, installed=" ".join(codebase.installed), paths=paths, workspace=WORKSPACE)


def _config(task: Task, codebase: Codebase) -> str:
    """Return task.toml; a JSON string, number or list of them is TOML as well."""
    difficulty = {f"difficulty_{key}": value for key, value in task.difficulty.items()}
    tags = [task.candidate.generator, *task.candidate.kinds]
    tables: dict[str, dict[str, Any]] = {
        "": {"schema_version": "1.4", "artifacts": [f"{WORKSPACE}/{place}" for place in codebase.sources]},
        "[task]": {"name": f"etude/{task.id}", "description": f"{task.category} in {task.package} {task.version}"},
        "[metadata]": {"author_name": "etude", "category": task.category, "tags": tags, "package": task.package,
                       "version": task.version, "licence": codebase.licence, **difficulty},
        "[agent]": {"timeout_sec": 1800.0},
        "[verifier]": {"timeout_sec": round(300 + 10 * task.seconds, 1), "environment_mode": "separate"},
        "[environment]": {"cpus": 1, "memory_mb": 2048, "storage_mb": 4096, "network_mode": "no-network", "workdir": WORKSPACE},
    }  # fmt: skip
    lines = []
    for name, table in tables.items():
        lines += [*filter(None, [name]), *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def read_task(folder: Path, cache: Path, reporter: Reporter) -> tuple[Task, Codebase]:
    """Read a folder that we wrote as the task it was, with its codebase built."""
    note = folder / "tests" / "etude.json"
    if not note.exists():
        raise UserError(f"{folder} was not written by Etude (no tests/etude.json); run it in its container instead")
    rows = read_json(note)
    codebase = built_codebase(rows["codebase"], cache, reporter)
    return task_of(rows["task"], codebase), codebase


def diff(path: str, before: str | None, after: str | None) -> str:
    """Return a unified diff of one file, as git writes it. Lines end at newlines only: a form feed in a line is no end of it."""
    one, other = "/dev/null" if before is None else f"a/{path}", "/dev/null" if after is None else f"b/{path}"
    old, new = (re.findall(r"[^\n]*\n|[^\n]+", text or "") for text in (before, after))
    lines = difflib.unified_diff(old, new, one, other)
    body = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return f"diff --git a/{path} b/{path}\n{body}" if body else ""


def swebench_row(task: Task, codebase: Codebase) -> dict[str, Any]:
    """Return a task as a row."""
    patch = "".join(diff(edit.path, edit.broken, edit.fixed) for edit in task.candidate.edits)
    solution = {edit.path for edit in task.candidate.edits}
    tests = ""
    for entry in visible(task, codebase):
        if entry.path not in solution:
            pristine = (codebase.tree / entry.path).read_bytes().decode()
            tests += diff(entry.path, (entry.content or b"").decode(), pristine)
    return {"repo": f"pypi/{task.package}", "instance_id": task.id, "base_commit": codebase.digest, "patch": patch,
            "test_patch": tests, "problem_statement": _request(task), "hints_text": "", "created_at": "", "version": task.version,
            "FAIL_TO_PASS": json.dumps(task.fail_to_pass), "PASS_TO_PASS": json.dumps(task.pass_to_pass),
            "environment_setup_commit": codebase.digest}  # fmt: skip


def write_swebench(tasks: TaskSet, path: Path) -> None:
    """Write a set as rows."""
    rows = [swebench_row(task, tasks.codebase(task)) for task in tasks.tasks]
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
