"""What the pages promise is so."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from etude.data import settings
from etude.models.context import RopeSettings
from etude.questions.demos import QuestionDemoSettings
from etude.recipe.recipe import DATA, Header, load_recipe
from etude.run.runner import stage_settings
from etude.run.stages import STAGES
from etude.run.stages.bench import BenchStage, BenchStageSettings
from etude.run.stages.extend import ExtendSettings
from etude.run.stages.mtp import MtpSettings
from etude.run.stages.pretrain import CptSettings, PretrainSettings, ShapeSettings
from etude.run.stages.release import ReleaseSettings, ReleaseStage
from etude.run.stages.rl import RlStage
from etude.run.stages.sft import SftSettings
from etude.run.stages.training import TrainingStage
from etude.tasks.demos import DemoSettings
from etude.tasks.repairs import TalkSettings
from etude.training.settings import (
    ExpertSettings,
    GuardSettings,
    JointMtpSettings,
    LoraSettings,
    OptimiserSettings,
    ScheduleSettings,
    TrainerSettings,
    TrainSettings,
)

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("recipes/**/*.md")])
HISTORY = {"CHANGELOG.md", "lab-notes.md"}  # they tell of files that have gone
TRAINING: dict[type[BaseModel], str] = {  # where docs/training.md has the table of each
    TrainSettings: "Every stage",
    OptimiserSettings: "`[STAGE.optimiser]`",
    ScheduleSettings: "`[STAGE.schedule]`",
    GuardSettings: "`[STAGE.guard]`",
    ExpertSettings: "`[STAGE.experts]`",
    LoraSettings: "`[STAGE.lora]`",
    PretrainSettings: "`[pretrain]`",
    ShapeSettings: "`[pretrain.model]`",
    CptSettings: "`[cpt]`",
    ExtendSettings: "`[extend]`",
    RopeSettings: "`[extend.rope]`",
    SftSettings: "`[sft]`",
    TalkSettings: "`[sft.repairs]`",
    DemoSettings: "`[sft.demos]`",
    QuestionDemoSettings: "`[sft.questions]`",
    MtpSettings: "`[mtp]`",
    JointMtpSettings: "`[STAGE.mtp]`",
}


def test_every_setting_is_explained() -> None:
    page = (ROOT / "docs/recipes.md").read_text()
    stages = {kind: stage for kind, stage in STAGES.items() if kind not in {"base", DATA}}
    assert [kind for kind in stages if f"`{kind}`" not in page] == []
    elsewhere = (TrainingStage, RlStage, BenchStage, ReleaseStage)  # training.md, rl.md, benchmark.md, lineage.md
    explained_here = [stage for stage in stages.values() if not isinstance(stage, elsewhere)]
    names = [*Header.model_fields, *(name for stage in explained_here for name in stage.settings.model_fields)]
    assert [name for name in names if f"`{name}`" not in page] == []


@pytest.mark.parametrize("model", TRAINING)
def test_the_tables_of_training_have_every_setting_and_its_default(model: type[BaseModel]) -> None:
    shared = TrainerSettings.__annotations__ if model is TrainSettings else {}
    own = {name: field for name, field in model.model_fields.items() if name in model.__annotations__ | shared}
    told = table_under(TRAINING[model])
    assert set(told) == set(own)
    for name, field in own.items():
        if isinstance(field.default, BaseModel):
            assert told[name] == "", f"{name} has a table of its own"
        elif field.is_required() or field.default is None:
            assert told[name] == ("required" if field.is_required() else "none")
        else:
            expected = list(field.default) if isinstance(field.default, tuple) else field.default
            assert tomllib.loads(f"value = {told[name]}") == {"value": expected}, name


@pytest.mark.parametrize(
    ("model", "field"),
    [(PretrainSettings, "optimiser"), (PretrainSettings, "schedule"), (CptSettings, "optimiser"),
     (ExtendSettings, "optimiser"), (SftSettings, "optimiser"), (MtpSettings, "optimiser")],
)  # fmt: skip
def test_what_a_stage_changes_in_a_table_is_told(model: type[BaseModel], field: str) -> None:
    default = model.model_fields[field].default
    row = rows_under(TRAINING[model])[field]
    named = next(value for value in (getattr(default, "name", None), getattr(default, "kind", None)) if value)
    assert named in row.lower()
    numbers = {name: getattr(default, name) for name in default.model_fields_set - {"name", "kind"}}
    assert {name: float(value) for name, value in re.findall(r"`(\w+)` ([\d.e-]+)", row)} == numbers


def test_every_table_of_training_settings_is_on_the_page() -> None:
    pending = [stage.settings for stage in STAGES.values() if isinstance(stage, TrainingStage)]
    found: set[type[BaseModel]] = set()
    while pending:
        model = pending.pop()
        found.add(model)
        kinds = [
            kind for field in model.model_fields.values() for kind in (field.annotation, *get_args(field.annotation))
        ]
        pending += [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    found = {model for model in found if model.__module__ != settings.__name__}  # docs/data.md has those
    assert found | {TrainSettings} == set(TRAINING)


@pytest.mark.parametrize(("model", "page"), [(BenchStageSettings, "benchmark"), (ReleaseSettings, "lineage")])
def test_the_tables_of_reports_have_every_setting_and_its_default(model: type[BaseModel], page: str) -> None:
    told = table_under(f"`[{'bench' if page == 'benchmark' else 'release'}]`", f"docs/{page}.md")
    assert set(told) == set(model.model_fields)
    for name, field in model.model_fields.items():
        if field.is_required() or isinstance(field.default, BaseModel):
            assert told[name] == ("required" if field.is_required() else "")
        else:
            assert tomllib.loads(f"value = {told[name]}") == {"value": field.default}, name


def rows_under(heading: str, file: str = "docs/training.md") -> dict[str, str]:
    """Return the rows of the table under a heading of a page, by key; a row may have several keys."""
    page = (ROOT / file).read_text()
    part = page.partition(f"\n### {heading}\n")[2].partition("\n#")[0]
    rows = [line for line in part.splitlines() if line.startswith("| `")]
    return {key: row for row in rows for key in re.findall(r"`(\w+)`", row.split("|")[1])}


def table_under(heading: str, file: str = "docs/training.md") -> dict[str, str]:
    """Return the default of each key, as the table under a heading has it."""
    return {key: row.split("|")[2].strip(" `") for key, row in rows_under(heading, file).items()}


def examples(page: str) -> list[dict[str, Any]]:
    """Return the recipes that a page shows; a part of one gets what it needs besides."""
    found = []
    for block in re.findall(r"```toml\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        shown = tomllib.loads(block)
        listed = [name for name in shown if isinstance(shown[name], dict) and name != DATA]
        found.append({"name": "shown", "base": "sprout", "stages": listed, **shown})
    return found


@pytest.mark.parametrize(
    "shown", [*examples("docs/training.md"), *examples("docs/recipes.md")], ids=lambda each: each["stages"]
)
def test_recipes_on_the_pages_are_recipes(shown: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "shown.toml"
    file.write_text("\n".join(f"{key} = {toml(value)}" for key, value in shown.items()))
    load_recipe([file], [], stage_settings())


def toml(value: Any) -> str:
    """Return a value as TOML on one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else repr(value)


@pytest.mark.parametrize("file", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_recipes_are_recipes(file: Path) -> None:
    load_recipe([file], [], stage_settings())
    assert f"(../recipes/{file.name})" in (ROOT / "docs/recipes.md").read_text()


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in HISTORY], ids=lambda path: path.stem)
def test_paths_on_the_pages_exist(page: Path) -> None:
    """Code by its path below src/etude/, everything else by its path in the repository."""
    code = re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text())
    others = re.findall(r"`((?:src|tests|benchmarks|recipes|docs|\.ci)/[a-z\d_./-]+)`", page.read_text())
    places = (ROOT, ROOT / "src/etude")
    named = {path for path in {*code, *others} if not re.search(r"[A-Z]{4}", path)}  # NAME.py stands for any
    assert [path for path in named if not any((place / path).exists() for place in places)] == []


def test_every_setting_of_the_corpus_is_explained() -> None:
    page = (ROOT / "docs/data.md").read_text()
    models = [value for value in vars(settings).values() if isinstance(value, type) and issubclass(value, BaseModel)]
    names = [name for model in models for name in model.model_fields]
    nested = {"filters", "duplicates", "contamination", "fim", "replay", "tokeniser"}
    assert [name for name in names if f"`{name}`" not in page and name not in nested] == []
    assert [name for name in nested if f"`[data.{name}]`" not in page] == []


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_every_dependency_is_pinned_and_reasoned(requirement: str) -> None:
    name = re.split(r"[<>=\[]", requirement)[0]
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


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_a_heading_lead_to_one(page: Path) -> None:
    found = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text())
    links = [(page.parent / target if target else page, anchor) for target, anchor in found]
    assert [anchor for target, anchor in links if anchor not in anchors(target)] == []


def anchors(page: Path) -> set[str]:
    """Return the names that a forge gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("command", ["quickstart", "test"])
def test_the_readme_names_the_two_commands(command: str) -> None:
    assert f"make {command}" in (ROOT / "README.md").read_text()
    assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
