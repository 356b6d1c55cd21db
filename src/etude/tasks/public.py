"""Tasks of public benchmarks, read from their own folders: SWE-bench's (task.yaml, eval.sh, …) and Harbor's (task.toml, tests/, …).

They have their own image, and their own verifier decides; this module only reads them. Features of a task that are not supported here
(several containers, other users, healthchecks, GPUs) are refused by name, because a partial run would give another result.

SWE-bench's verifier is `eval.sh`, whose output says how each test ended, in a way that depends on the repository; `outcomes` reads
those named in READERS as the benchmark's own package does, odd corners included, since it is on its reading that tests were chosen.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import yaml

from etude.errors import UserError, one_line
from etude.tasks.task import Candidate, StoredStyle, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Outcomes = dict[str, str]

Suite = Literal["swebench", "harbor"]
BEGIN, END = ">>>>> Start Test Output", ">>>>> End Test Output"
STATES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL")
NOT_DONE = {  # settings of task.toml, by table, that are not carried out
    "environment": ("gpus", "gpu_types", "tpu", "mcp_servers", "skills_dir", "healthcheck", "allowed_hosts"),
    "agent": ("user", "network_mode", "allowed_hosts"),
    "verifier": ("user", "environment", "collect", "network_mode", "allowed_hosts"),
    "": ("steps",),
}  # fmt: skip


@dataclass(frozen=True)
class PublicTask:
    """One task, as its folder has it."""

    suite: Suite
    folder: Path
    id: str
    package: str  # repository, or the set it comes from: results of one are alike
    request: str
    image: str  # to be there, or pulled; none: built
    build: Path | None = None  # the folder of its Dockerfile
    root: str = ""  # where the agent works; none: the image's own
    about: Mapping[str, Any] = field(default_factory=dict)  # task.yaml or task.toml
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()

    def text(self, name: str) -> str:
        """Return one of its files."""
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{self.folder}: cannot read {name}: {one_line(error)}") from None

    def table(self, name: str) -> dict[str, Any]:
        """Return a table of task.toml."""
        return dict(self.about.get(name, {}))

    def task(self) -> Task:
        """Return it as what a benchmark counts."""
        category, version = str(self.table("metadata").get("category", "debugging")), str(self.about.get("version", ""))
        lists, nothing = (self.fail_to_pass, self.pass_to_pass, ()), Candidate(self.suite, (), (), ())
        prompts: dict[StoredStyle, str] = {"full": self.request}
        return Task(self.id, self.package, version, nothing, prompts, *lists, category, split="bench")


def is_public(folder: Path) -> bool:
    """Whether a folder is a task of a public benchmark, and not one that we wrote."""
    ours = (folder / "tests/etude.json").exists()
    return (folder / "task.yaml").is_file() or ((folder / "task.toml").is_file() and not ours)


def read_public(path: Path, only: str = "") -> list[PublicTask]:
    """Return the tasks of a folder: itself one, or full of them; with `only`, those whose names begin with one of its words."""
    folders = [path] if is_public(path) else sorted(each for each in path.iterdir() if is_public(each))
    words = tuple(only.split()) or ("",)
    for word in words:
        if not any(folder.name.startswith(word) for folder in folders):
            like = f" whose name begins with {word!r}" if word else ""
            raise UserError(f"{path} has no task of a public benchmark{like}")
    chosen = [folder for folder in folders if folder.name.startswith(words)]
    return [read_swebench(each) if (each / "task.yaml").is_file() else read_harbor(each) for each in chosen]


def read_swebench(folder: Path) -> PublicTask:
    """Read a folder of SWE-bench's repositories of tasks."""
    try:
        about = yaml.safe_load((folder / "task.yaml").read_text(encoding="utf-8"))
        tests = json.loads((folder / "tests.json").read_text(encoding="utf-8"))
        needed = ("instance_id", "repo", "base_commit", "log_parser", "eval_type", "image")
        facts = {name: str(about[name]) for name in needed}
        lists = {name: tuple(map(str, tests[name.upper()])) for name in ("fail_to_pass", "pass_to_pass")}
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"{folder} is no task of SWE-bench: {type(error).__name__}: {one_line(error)}") from None
    if facts["log_parser"] not in READERS or facts["eval_type"] != "pass_and_fail":
        known = ", ".join(name.removeprefix("parse_log_") for name in READERS)
        wanted = f"{facts['log_parser']} with {facts['eval_type']}, which is not read here ({known})"
        raise UserError(f"{folder.name}: its log is for {wanted}; leave it out with --only")
    image = facts["image"] if "." in facts["image"].split("/")[0] else f"docker.io/{facts['image']}"
    name, repository = facts["instance_id"], facts["repo"]
    task = PublicTask("swebench", folder, name, repository, "", image, folder, "/testbed", about, **lists)
    return replace(task, request=task.text("problem_statement.md").strip())


def read_harbor(folder: Path) -> PublicTask:
    """Read a folder in Harbor's format."""
    try:
        about = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is no task of Harbor's: {one_line(error)}") from None
    given = {f"{table}.{name}".strip(".") for table, names in NOT_DONE.items()
             for name in names if (about.get(table, {}) if table else about).get(name)}  # fmt: skip
    if (folder / "environment/docker-compose.yaml").exists():
        given.add("docker-compose.yaml")
    if given:
        names = ", ".join(sorted(given))
        raise UserError(f"{folder.name}: {names} in its task.toml: not done here; leave it out with --only")
    environment = about.get("environment", {})
    image, build = str(environment.get("docker_image") or ""), folder / "environment"
    if not image and not (build / "Dockerfile").is_file():
        raise UserError(f"{folder.name} names no docker_image and has no environment/Dockerfile")
    owner = str(about.get("task", {}).get("name", folder.parent.name)).partition("/")[0]
    root = str(environment.get("workdir") or "")
    task = PublicTask("harbor", folder, folder.name, owner, "", image, build, root, about)
    return replace(task, request=task.text("instruction.md").strip())


def outcomes(log: str, reader: str) -> Outcomes:
    """Return how each test ended, by what eval.sh printed between its marks; nothing if it did not come so far."""
    if BEGIN not in log or END not in log:
        return {}
    read = READERS[reader]
    return read(log.split(BEGIN)[1].split(END, maxsplit=1)[0]) or read(log)


def passing(tests: Mapping[str, str], wanted: tuple[str, ...], *, kept: bool = False) -> list[str]:
    """Return the wanted tests that passed; `kept`: tests that passed before, of which a skipped one counts as passed, too."""
    good = {"PASSED", "XFAIL", *(["SKIPPED"] if kept else [])}

    def state(name: str) -> str:
        if name in tests or name.count("[") <= name.count("]"):
            return tests.get(name, "")
        # The benchmark's lists have names cut short.
        alike = [each for test, each in tests.items() if test.startswith(name)]
        return alike[0] if alike and len({each in {"PASSED", "XFAIL"} for each in alike}) == 1 else ""

    return [name for name in wanted if state(name) in good]


def _pytest(log: str, *, shorten: bool = False) -> Outcomes:
    found: Outcomes = {}
    for line in filter(lambda line: line.startswith(STATES), log.split("\n")):
        words = (line.replace(" - ", " ") if line.startswith("FAILED") else line).split()
        if len(words) > 1 and not (words[0] == "SKIPPED" and re.fullmatch(r"\[\d+\]", words[1])):
            name, option = words[1], re.search(r"(.*?)\[(.*)\]", words[1]) if shorten else None
            if option and re.fullmatch(r"/(?!/)[^*]*", option[2]):
                name = f"{option[1]}[/{option[2].split('/')[-1]}]"
            found[name] = words[0]
    return found


def _pytest_new(log: str) -> Outcomes:
    found: Outcomes = {}
    for raw in log.split("\n"):
        line = re.sub(r"[\x01-\x1f]", "", re.sub(r"\[(\d+)m", "", raw))
        words = (line.split(" - ", 1)[0] if line.startswith("FAILED") else line).split()
        if line.startswith(STATES):
            if len(words) > 1 and not (words[0] == "SKIPPED" and re.fullmatch(r"\[\d+\]", words[1])):
                found[" ".join(words[1:])] = words[0]
        elif line.endswith(STATES) and len(words) > 1:
            found[" ".join(words[:-1])] = words[-1]
    return found


def _django(log: str) -> Outcomes:
    found: Outcomes = {}
    before = ""
    for line in map(str.strip, log.split("\n")):
        if "--version is equivalent to version" in line:
            found["--version is equivalent to version"] = "PASSED"
        before = line.split(" ... ")[0] if " ... " in line else before
        if ends := next((end for end in (" ... ok", " ... OK", " ...  OK") if line.endswith(end)), ""):
            odd = line.startswith("Applying sites.0002_alter_domain_unique...test_no_migrations")
            found[(line.split("...", 1)[-1].strip() if odd else line).rsplit(ends, 1)[0]] = "PASSED"
        for mark, state in ((" ... skipped", "SKIPPED"), (" ... FAIL", "FAILED"), (" ... ERROR", "ERROR")):
            if (mark in line) if state == "SKIPPED" else line.endswith(mark):
                found[line.split(mark)[0]] = state
        for mark, state in (("FAIL:", "FAILED"), ("ERROR:", "ERROR")):
            if line.startswith(mark) and len(line.split()) > 1:
                found[line.split()[1]] = state
        if line.startswith("ok") and before:
            found[before] = "PASSED"
    said = r"Testing\ against\ Django\ installed\ in\ (?s:.*?)\ silenced\)\.", r"Internal\ Server\ Error:\ \/.*\/"
    for middle in (*said, r"System check identified no issues \(0 silenced\)"):
        named = re.finditer(rf"^(.*?)\s\.\.\.\s{middle}\nok$", log, re.MULTILINE)
        found |= dict.fromkeys((each[1] for each in named), "PASSED")
    return found


def _sympy(log: str) -> Outcomes:
    found = {f"{each[1]}.py:{each[2]}": "FAILED" for each in re.findall(r"(_*) (.*)\.py:(.*) (_*)", log)}
    for line in map(str.strip, log.split("\n")):
        for end, state in ((" E", "ERROR"), (" F", "FAILED"), (" ok", "PASSED")):
            if line.startswith("test_") and line.endswith(end):
                found[line.split()[0]] = state
    return found


def _lines(pattern: str, states: Mapping[str, str], cut: str = "") -> Callable[[str], Outcomes]:
    """Return a reader of lines that have a mark and a name. `cut`: what does not belong to the name of a test that failed."""

    def read(log: str) -> Outcomes:
        found = [match for line in log.split("\n") if (match := re.match(pattern, line.strip()))]
        named = [(states[each[1]], each[2]) for each in found]
        return {re.sub(cut, "", name) if cut and state == "FAILED" else name: state for state, name in named}

    return read


REDIS = {"ok": "PASSED", "err": "FAILED", "skip": "SKIPPED", "ignore": "SKIPPED"}
READERS: dict[str, Callable[[str], Outcomes]] = {
    **dict.fromkeys(("parse_log_pytest", "parse_log_astroid", "parse_log_flask", "parse_log_marshmallow", "parse_log_pvlib",
                     "parse_log_pyvista", "parse_log_sqlfluff", "parse_log_xarray"), _pytest),
    **dict.fromkeys(("parse_log_pydicom", "parse_log_requests", "parse_log_pylint"), lambda log: _pytest(log, shorten=True)),
    **dict.fromkeys(("parse_log_astropy", "parse_log_scikit", "parse_log_sphinx"), _pytest_new),
    "parse_log_django": _django, "parse_log_sympy": _sympy,
    "parse_log_jq": _lines(r"^\s*(PASS|FAIL):\s(.+)$", {"PASS": "PASSED", "FAIL": "FAILED"}),
    "parse_log_redis": _lines(r"^\[(ok|err|skip|ignore)\]:\s(.+?)(?:\s\((\d+\s*m?s)\))?$", REDIS, r"\s+in\s+\S+$"),
    "parse_log_micropython_test": _lines(r"^(pass|FAIL|skip)\s+(.+)$", {"pass": "PASSED", "FAIL": "FAILED", "skip": "SKIPPED"}),
    "parse_log_googletest": _lines(r"^.*\[\s*(OK|FAILED)\s*\]\s(.*)\s\(.*\)$", {"OK": "PASSED", "FAILED": "FAILED"}),
}  # fmt: skip
