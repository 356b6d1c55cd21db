"""Every command that a page shows: it is parsed as the shell would, and run where that takes seconds and needs no model.

`RUN` is run here, in a folder that has what the pages speak of; `NOT_RUN` says why the others are only parsed. A command on a
page must be in one of the two.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer.main

from etude.cli.main import app
from tests import tiny

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Etude

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
HISTORY = {"lab-notes.md", "results.md"}  # they tell what was run, some of it with earlier versions
RUN = ("bases", "tasks show", "init", "schema")
DRY = ("run", "data build")  # run with --dry-run
NOT_RUN = {
    "agent": "needs a model that answers; tests/cli/test_agent.py runs it with a scripted one",
    "audit": "reads weights for minutes; tests/cli/test_audit.py",
    "bench": "plays tasks in sandboxes; tests/cli/test_bench.py runs oracle and noop",
    "cluster": "needs a cluster; tests/cluster/test_commands.py",
    "compare": "runs two models; tests/cli/test_commands.py",
    "data report": "needs a built corpus; tests/cli/test_data.py",
    "library": "needs a base to read; tests/lineage",
    "licences": "needs a finished run; tests/cli/test_licences.py",
    "lineage": "needs a finished run; tests/cli/test_lineage.py",
    "log": "needs a run; tests/run/test_log.py",
    "mtp": "needs a model with heads; tests/models/test_mtp_export.py",
    "plan": "needs the recipe that a page stands for; tests/run/test_resources.py",
    "release": "needs a finished run; tests/cli/test_release.py",
    "rl": "needs a run of RL; tests/cli/test_rl.py",
    "sandbox": "depends on what this machine can isolate; tests/cli/test_sandbox.py",
    "serve": "serves until it is stopped; tests/serve",
    "status": "needs a run; tests/cli/test_commands.py",
    "summary": "needs a finished run; tests/cli",
    "tasks": "makes and plays tasks for minutes; tests/tasks",
    "trace": "needs traces; tests/cli/test_trace.py",
    "verify": "needs a release; tests/cli/test_release.py",
    "web": "serves until it is stopped, or needs a run; tests/web",
}


def shown(page: Path) -> Iterator[str]:
    """Yield the commands of a page: lines of code, without the explanation after them, and code in a sentence."""
    fenced = False
    for line in page.read_text(encoding="utf-8").splitlines():
        fenced ^= line.startswith("```")
        command = re.match(
            r"\s+(?:\$ )?(?:\.venv/bin/)?(etude .+)" if not fenced else r"\s*(?:\$ )?(?:\.venv/bin/)?(etude .+)", line
        )
        if command and (fenced or line.startswith("    ")):
            yield re.split(r"\s{2,}| # ", command[1])[0]
        elif not fenced and not line.startswith("    "):
            yield from (
                inline for inline in re.findall(r"`(etude [^`]+)`", line) if "…" not in inline or " --" in inline
            )


def names_below(command: Any) -> set[str]:
    inner = getattr(command, "commands", {})
    return {*inner}.union(*map(names_below, inner.values())) if inner else set()


NAMES = names_below(typer.main.get_command(app))  # of commands: alone they are spoken of, not called
COMMANDS = sorted({(page.name, command) for page in PAGES if page.name not in HISTORY for command in shown(page)})


def parsed(words: list[str]) -> str:
    """Parse as the shell would hand it over, short of doing it; return the names of the commands on the way."""
    command: Any = typer.main.get_command(app)
    context: Any = None
    names: list[str] = []
    while True:
        context = command.make_context(
            names[-1] if names else "etude", [*words], parent=context, resilient_parsing=False
        )
        if not hasattr(command, "commands"):
            return " ".join(names)
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
        names.append(name)


def test_there_are_commands_on_the_pages() -> None:
    assert len(COMMANDS) > 60


@pytest.mark.parametrize("page", sorted({page for page, _ in COMMANDS}))
def test_every_command_on_a_page_is_one(page: str) -> None:
    wrong = {}
    for command in [command for name, command in COMMANDS if name == page]:
        words = shlex.split(command.split(" > ")[0].replace("| head", ""))[1:]
        if any(word.isupper() for word in words) or "…" in command or not {*words} - NAMES - {"--help"}:
            continue  # a form, not a command: its options are looked at below
        try:
            name = parsed(words)
        except Exception as error:  # noqa: BLE001 - whatever the parser says
            wrong[command] = str(getattr(error, "message", error))
            continue
        if not name.startswith((*RUN, *DRY, *NOT_RUN)):
            wrong[command] = "neither run here nor listed in NOT_RUN with a reason"
    assert wrong == {}


def options_of(words: list[str]) -> set[str]:
    command: Any = typer.main.get_command(app)
    known: set[str] = set()
    for word in words:
        known |= {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
        if word in getattr(command, "commands", {}):
            command = command.commands[word]
    for default in (
        "run",
        "show",
    ):  # `etude bench MODEL` is `etude bench run MODEL`, `etude web RUN` is `etude web show RUN`
        command = getattr(command, "commands", {}).get(default, command)
    return (
        known
        | {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
        | {"--help", "-h"}
    )


@pytest.mark.parametrize("page", sorted({page for page, _ in COMMANDS}))
def test_every_option_in_a_sentence_exists(page: str) -> None:
    wrong = []
    for command in [command for name, command in COMMANDS if name == page]:
        words = command.split()[1:]
        wrong += [
            command
            for word in words
            if word.startswith("--") and word.split("=")[0].rstrip(",.") not in options_of(words)
        ]
    assert wrong == []


def test_those_that_take_seconds_run(etude: Etude, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    for name in ("my-project", "code/one", "code/two"):
        folder = tiny.write_tree(home / name)
        tiny.git(folder, "init", "-q")
        tiny.git(folder, "add", ".")
        tiny.git(folder, "commit", "-qm", "all of it")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    for name in ("recipes", "docs", "src", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copyfile(ROOT / "recipes/tasks/quick.jsonl", "mine.jsonl")
    failed, run = {}, 0
    wanted = {command for _, command in COMMANDS if command.removeprefix("etude ").startswith((*RUN, *DRY))}
    for command in sorted(wanted, key=lambda each: ("etude init" not in each, each)):
        words = shlex.split(command.split(" > ")[0])[1:]
        dry = not command.removeprefix("etude ").startswith(RUN)
        if (
            any(word.isupper() for word in words)
            or len(words) < 2 - (words == ["bases"])
            or "…" in command
            or "rl.engine" in command
        ):
            continue
        if dry and not any(Path(word).exists() for word in words if word.endswith(".toml")):
            continue  # a name that stands for any recipe of the reader's
        if "examples/" in command or "compare." in command or command.count(".toml") > 1:
            continue  # with paths and settings of the reader's: tests/recipe/test_examples.py
        said = etude(
            *words, *(["--dry-run"] if dry and "--dry-run" not in words else []), *(["--cache", "cache"] if dry else [])
        )
        run += 1
        if said.code:
            failed[command] = said.err
    assert failed == {}
    assert run >= 8
