"""What the pages promise is so."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel

from etude.data import settings
from etude.recipe.recipe import Header
from etude.run.stages import STAGES

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("recipes/**/*.md")])


def test_every_setting_is_explained() -> None:
    page = (ROOT / "docs/recipes.md").read_text()
    names = [
        *Header.model_fields,
        *(
            name
            for kind, stage in STAGES.items()
            if kind not in {"base", "data"}
            for name in stage.settings.model_fields
        ),
    ]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_every_setting_of_the_corpus_is_explained() -> None:
    page = (ROOT / "docs/data.md").read_text()
    models = [value for value in vars(settings).values() if isinstance(value, type) and issubclass(value, BaseModel)]
    names = [name for model in models for name in model.model_fields]
    nested = {"filters", "duplicates", "contamination", "fim", "replay", "tokeniser"}
    assert [name for name in names if f"`{name}`" not in page and name not in nested] == []
    assert [name for name in nested if f"`[data.{name}]`" not in page] == []


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_every_dependency_is_pinned_and_reasoned(requirement: str) -> None:
    name = re.split(r"[<>=]", requirement)[0]
    pins = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    assert name in pins
    assert f"`{name}`" in (ROOT / "docs/dependencies.md").read_text()


def test_torch_is_pinned_to_the_build_the_machines_have() -> None:
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    local = [target for target in targets if "://" not in target and not target.startswith("mailto:")]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("command", ["quickstart", "test"])
def test_the_readme_names_the_two_commands(command: str) -> None:
    assert f"make {command}" in (ROOT / "README.md").read_text()
    assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
