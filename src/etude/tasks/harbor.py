"""Tasks as Harbor's folders: ours written, anybody's read (Terminal-Bench is one of them).

    instruction.md  task.toml  environment/{Dockerfile, tree/}  solution/{solve.sh, tree/}  tests/{test.sh, verify.py, pristine/, …}

The verifier is a container that the agent never touched; of the agent's it gets the package's code and nothing else. Our own
fields are in `tests/etude.json`, where the agent cannot see them; with them a folder is read back as the task it was.
"""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from etude.errors import UserError
from etude.files import files_below, read_json, write_json
from etude.sandbox.box import WORKSPACE
from etude.tasks.environment import PLUGIN, RUNNER
from etude.tasks.generators.parsed import is_test_path
from etude.tasks.manifest import codebase_row, ready, task_of, task_row
from etude.tasks.score import visible
from etude.tasks.source import PackageSettings
from etude.tasks.suite import entries_of, lay

if TYPE_CHECKING:
    from pathlib import Path

    from etude.progress import Reporter
    from etude.tasks.suite import Ready
    from etude.tasks.task import StoredStyle, Task

DOCKERFILE = """FROM python:{python}-slim
RUN pip install --no-cache-dir --no-deps {installed} && pip uninstall -y setuptools wheel pip
ENV PYTHONPATH={paths} PYTHONDONTWRITEBYTECODE=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
COPY tree {workspace}
WORKDIR {workspace}
"""
SOLVE = '#!/bin/sh\nset -e\ncp -R /solution/tree/. "{workspace}"\n{removals}'
TEST = "#!/bin/sh\nmkdir -p /logs/verifier\ncp -R /tests/pristine/. {workspace}\npython -I /tests/verify.py\n"
# Runs with the standard library alone, beside the runner that our own scoring uses.
VERIFY = """import json, os, secrets, subprocess, sys
order = json.load(open("/tests/order.json"))
names = (*order.pop("not_source"), *order.pop("starts_by_itself"))
for folder, _, files in os.walk("{workspace}"):
    for name in files:
        if name.endswith(names):
            path = os.path.join(folder, name)
            if not os.path.exists(path.replace("{workspace}", "/tests/pristine", 1)):
                os.remove(path)
nonce = secrets.token_hex(16)
wanted = [*order["fail_to_pass"], *order["pass_to_pass"]]
order |= dict(nonce=nonce, ids=wanted, traces=False, cover=[], limit=60)
command = [sys.executable, "/tests/{runner}.py"]
try:
    line, seconds = json.dumps(order) + "\\n", order["seconds"]
    done = subprocess.run(command, input=line, capture_output=True, text=True, cwd="{workspace}", timeout=seconds)
    lines, code = done.stdout.splitlines(), done.returncode
except subprocess.TimeoutExpired:
    lines, code = [], -1
said, outcomes = [], {{}}
for line in lines:
    if line.startswith(f"{{nonce}} {{len(said)}} "):
        said.append(json.loads(line.split(" ", 2)[2]))
for kind, *rest in said:
    if kind == "test":
        outcomes[rest[0]] = rest[1]
whole = bool(said) and said[-1][0] == "end" and said[-1][1:] == [code, len(outcomes)]
def share(tests):
    return sum(outcomes.get(test) == "passed" for test in tests) / max(len(tests), 1) if whole else 0.0
fractions = {{name: share(order[name]) for name in ("fail_to_pass", "pass_to_pass")}}
reward = float(all(each == 1.0 for each in fractions.values()))
json.dump({{"reward": reward, **fractions}}, open("/logs/verifier/reward.json", "w"))
"""


def write_harbor(task: Task, codebase: Ready, folder: Path, style: StoredStyle = "terse") -> None:
    """Write a task as a folder that Harbor runs."""
    if folder.exists():
        raise UserError(f"{folder} is there already; choose another folder, or remove it")
    prompt = task.prompts.get(style) or next(iter(task.prompts.values()))
    removals = "".join(f'rm -f "{WORKSPACE}/{edit.path}"\n' for edit in task.candidate.edits if edit.fixed is None)
    written = {"instruction.md": prompt + "\n", "task.toml": _config(task, codebase), "environment/Dockerfile": _dockerfile(codebase),
               "tests/test.sh": TEST.format(workspace=WORKSPACE), "tests/verify.py": VERIFY.format(workspace=WORKSPACE, runner=RUNNER),
               "solution/solve.sh": SOLVE.format(workspace=WORKSPACE, removals=removals)}  # fmt: skip
    for name, text in written.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    shutil.copytree(codebase.tree, folder / "environment" / "tree", symlinks=True)
    lay(folder / "environment" / "tree", visible(task, codebase))
    lay(folder / "solution" / "tree", entries_of(task.candidate.edits, "fixed"))
    for path in files_below(codebase.tree):
        place = path.relative_to(codebase.tree).as_posix()
        if is_test_path(place) or any(place == each or place.startswith(f"{each}/") for each in codebase.tests):
            target = folder / "tests" / "pristine" / place
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    shutil.copyfile(PLUGIN, folder / "tests" / f"{RUNNER}.py")
    write_json(folder / "tests" / "order.json", _order(task, codebase))
    write_json(folder / "tests" / "etude.json", {"task": task_row(task, codebase), "codebase": _row(codebase)})


def _row(codebase: Ready) -> dict[str, Any]:
    settings = PackageSettings(pypi=f"{codebase.name}=={codebase.version}", sources=list(codebase.sources), tests=list(codebase.tests),
                               pytest=list(codebase.options), licence=codebase.licence)  # fmt: skip
    return codebase_row(codebase, settings, read_json(codebase.python.parent.parent / "etude.json")["installed"])


def _order(task: Task, codebase: Ready) -> dict[str, Any]:
    tests = [*task.fail_to_pass, *task.pass_to_pass]
    files = sorted({test.partition("::")[0] for test in tests})
    return {"fail_to_pass": task.fail_to_pass, "pass_to_pass": task.pass_to_pass, "files": files, "options": codebase.options,
            "paths": [f"{WORKSPACE}/{path}".removesuffix("/.") for path in codebase.paths], "seconds": 120 + 10 * task.seconds,
            "not_source": [".pth", ".pyc", ".so"],
            "starts_by_itself": ["conftest.py", "sitecustomize.py", "usercustomize.py"]}  # fmt: skip


def _dockerfile(codebase: Ready) -> str:
    note = read_json(codebase.python.parent.parent / "etude.json")
    python = re.findall(r"python(\d+\.\d+)", note["site"])[-1]
    paths = ":".join(f"{WORKSPACE}/{path}".removesuffix("/.") for path in codebase.paths)
    return DOCKERFILE.format(python=python, installed=" ".join(note["installed"]), paths=paths, workspace=WORKSPACE)


def _config(task: Task, codebase: Ready) -> str:
    """Return task.toml; a JSON string, number or list of them is TOML as well."""
    artefacts = [f"{WORKSPACE}/{place}" for place in codebase.sources]
    tags = [task.candidate.generator, *task.candidate.kinds]
    metadata = {"author_name": "etude", "category": task.category, "tags": tags, "package": task.package, "version": task.version,
                "licence": codebase.licence, **{f"difficulty_{key}": value for key, value in task.difficulty.items()}}  # fmt: skip
    lines = [
        'schema_version = "1.4"',
        f"artifacts = {json.dumps(artefacts)}",
        "[task]",
        f"name = {json.dumps(f'etude/{task.id}')}",
    ]
    lines += [f"description = {json.dumps(f'{task.category} in {task.package} {task.version}')}", "[metadata]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in metadata.items()]
    lines += [
        "[agent]",
        "timeout_sec = 1800.0",
        "[verifier]",
        f"timeout_sec = {300 + 10 * task.seconds:.1f}",
        'environment_mode = "separate"',
    ]
    lines += [
        "[environment]",
        "cpus = 1",
        "memory_mb = 2048",
        "storage_mb = 4096",
        'network_mode = "no-network"',
        f'workdir = "{WORKSPACE}"',
    ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class HarborTask:
    """A task folder of anybody's, in today's terms."""

    name: str
    folder: Path
    instruction: str
    image: str | None  # to be pulled; None: built from environment/
    agent_seconds: float
    verifier_seconds: float
    network: bool
    metadata: dict[str, Any]


def read_harbor(folder: Path) -> HarborTask:
    """Read a task folder, of today's form or the one of Terminal-Bench 2."""
    try:
        config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        instruction = (folder / "instruction.md").read_text(encoding="utf-8")
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{folder} is no Harbor task: {error}") from None
    place = config.get("environment", {})
    mode = place.get("network_mode", "public" if place.get("allow_internet", True) else "no-network")
    needed = ["tests", *([] if place.get("docker_image") else ["environment"])]
    missing = [name for name in needed if not (folder / name).is_dir()]
    if missing:
        raise UserError(f"{folder} is no Harbor task: it has no folder {missing[0]!r}")
    agent, verifier = (float(config.get(phase, {}).get("timeout_sec", 600.0)) for phase in ("agent", "verifier"))
    name = config.get("task", {}).get("name", folder.name)
    image, metadata = place.get("docker_image"), config.get("metadata", {})
    return HarborTask(name, folder, instruction, image, agent, verifier, mode != "no-network", metadata)


def read_task(folder: Path, cache: Path, reporter: Reporter) -> tuple[Task, Ready]:
    """Read a folder that we wrote as the task it was, with its codebase built."""
    note = folder / "tests" / "etude.json"
    if not note.exists():
        raise UserError(
            f"{folder} was not written by Etude: it has no tests/etude.json; run it in its container instead"
        )
    rows = read_json(note)
    codebase = ready(rows["codebase"], cache, reporter)
    return task_of(rows["task"], codebase), codebase
