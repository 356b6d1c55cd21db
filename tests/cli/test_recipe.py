"""`etude init` and `etude schema`."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from etude.cli.recipe import recipe_for
from etude.lineage.licences import PROPRIETARY
from etude.tasks.make import read_settings
from tests import tiny

if TYPE_CHECKING:
    from tests.conftest import Etude

ROOT = Path(__file__).parents[2]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tiny.write_tree(tmp_path / "My Project")
    tiny.git(folder, "init", "-q")
    tiny.git(folder, "add", ".")
    tiny.git(folder, "commit", "-qm", "all of it")
    monkeypatch.chdir(tmp_path)
    return folder


def test_what_init_writes_can_be_planned_as_it_is_and_with_all_its_stages(etude: Etude, repository: Path) -> None:
    said = etude("init", repository)
    assert said.code == 0, said.err
    assert "etude tasks make mine-tasks.toml" in said.out
    planned = etude("run", "mine.toml", "--dry-run", "--cache", "cache")
    assert (planned.code, "cpt: would run" in planned.out) == (0, True), planned.err
    later = Path("mine.toml").read_text().partition("# What follows needs tasks: ")[2]
    assert later, "the first comment of what is commented out is one comment"
    assert all(line.startswith("# ") and "# #" not in line for line in later.splitlines()[1:] if line)
    assert read_settings(Path("mine-tasks.toml")).package[0].git == str(repository)
    assert read_settings(Path("mine-tasks.toml")).package[0].licence == PROPRIETARY

    Path("mine-tasks.jsonl").write_bytes((ROOT / "recipes/tasks/quick.jsonl").read_bytes())
    first, later = Path("mine.toml").read_text().split("# What follows needs tasks")
    stages = said.out.rpartition("with ")[2].strip()
    whole = "\n".join(
        line.removeprefix("# ") for line in later.splitlines() if not line.startswith(("# A", "# D", "# T"))
    )
    Path("whole.toml").write_text(first.replace('stages = ["cpt"]', stages) + "# " + whole)
    planned = etude("run", "whole.toml", "--dry-run", "--cache", "cache", "--out", "whole")
    assert (planned.code, planned.err) == (0, "")
    assert planned.out.count("would run") == 9

    again = etude("init", repository)
    assert (again.code, "mine.toml exists already" in again.err) == (2, True)


def test_init_takes_the_licence_that_is_stated_and_wants_a_checkout(etude: Etude, repository: Path) -> None:
    (repository / "pyproject.toml").write_text('[project]\nname = "x"\nlicense = "mit"\n')
    assert etude("init", repository, "--out", "other.toml").code == 0
    assert read_settings(Path("other-tasks.toml")).package[0].licence == "MIT"
    nowhere = etude("init", "nowhere")
    assert (nowhere.code, "is not the top of a git checkout" in nowhere.err) == (2, True)


def test_init_writes_through_no_link_and_waits_for_no_file(etude: Etude, repository: Path, tmp_path: Path) -> None:
    (tmp_path / "mine-tasks.toml").symlink_to(tmp_path / "elsewhere")
    said = etude("init", repository)
    assert (said.code, "mine-tasks.toml exists already" in said.err) == (2, True)
    assert not (tmp_path / "elsewhere").exists()
    os.mkfifo(repository / "pyproject.toml")
    assert etude("init", repository, "--out", "fifo.toml").code == 0
    for number, text in enumerate(("[" * 5000, "project = 3", "project = [1]", "[project]\nlicense = {file = 'x'}")):
        (repository / "pyproject.toml").unlink()
        (repository / "pyproject.toml").write_text(text)
        assert etude("init", repository, "--out", f"{number}.toml").code == 0
        assert read_settings(Path(f"{number}-tasks.toml")).package[0].licence == PROPRIETARY
    odd = repository.rename(repository.with_name('x"\nname = "y'))
    said = etude("init", odd, "--out", "odd.toml")
    assert (said.code, "rename it" in said.err) == (2, True)


def test_the_shipped_recipe_is_the_template() -> None:
    words = {"NAME": "mine", "REPOSITORY": "~/my-project", "LICENCE": "LicenseRef-Mine", "TASKS": "tasks"}
    assert (ROOT / "recipes/mine-sprout.toml").read_text() == recipe_for(words)


def faults(value: Any, schema: Any, defs: Any, place: str = "") -> list[str]:
    """Check a value by the words of JSON schema that matter here: tables, their keys, lists, choices."""
    if "$ref" in schema:
        besides = {"type": "object", "required": schema.get("required", [])}
        named = defs[schema["$ref"].rpartition("/")[2]]
        return faults(value, named, defs, place) + (
            faults(value, besides, defs, place) if isinstance(value, dict) else []
        )
    if "anyOf" in schema:
        each = [faults(value, option, defs, place) for option in schema["anyOf"]]
        return [] if [] in each else [f"{place}: fits nothing"]
    wrong = [f"{place}: not {schema['const']}"] if "const" in schema and value != schema["const"] else []
    if isinstance(value, dict) and schema.get("type") == "object":
        known, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
        wrong += [f"{place}.{key}: missing" for key in schema.get("required", []) if key not in value]
        for key, inner in value.items():
            part = known.get(key, rest)
            wrong += [f"{place}.{key}: unknown"] if part is False else []
            wrong += faults(inner, part, defs, f"{place}.{key}") if isinstance(part, dict) else []
    elif isinstance(value, list):
        wrong += [each for item in value for each in faults(item, schema.get("items", {}), defs, place)]
    elif schema.get("type") in {"integer", "string", "boolean", "object", "array", "null"}:
        kinds = {"integer": int, "string": str, "boolean": bool, "object": dict, "array": list, "null": type(None)}
        wrong += [] if isinstance(value, kinds[schema["type"]]) else [f"{place}: no {schema['type']}"]
    return wrong


def test_the_schema_takes_every_shipped_recipe_and_no_misspelt_key(etude: Etude) -> None:
    schema = json.loads(etude("schema").out)
    for path in [*ROOT.glob("recipes/*.toml"), *ROOT.glob("recipes/examples/*.toml")]:
        assert faults(tomllib.loads(path.read_text()), schema, schema["$defs"]) == [], path
    good = tomllib.loads((ROOT / "recipes/quickstart.toml").read_text())
    for wrong in (
        {"cpt": {**good["cpt"], "tokns": 3}},
        {"cpt": {"tokens": "many"}},
        {"before": {"kind": "bench"}},
        {"before": {"tasks": "x"}},
        {"basee": "sprout"},
    ):
        assert faults(good | wrong, schema, schema["$defs"]) != [], wrong


def test_the_schema_of_task_recipes(etude: Etude) -> None:
    schema = json.loads(etude("schema", "tasks").out)
    for path in ROOT.glob("recipes/tasks/*.toml"):
        assert faults(tomllib.loads(path.read_text()), schema, schema["$defs"]) == [], path
    assert faults({"name": "x", "mutaton": 3, "package": [{"folder": "x"}]}, schema, schema["$defs"]) == [
        ".mutaton: unknown"
    ]
