"""The recipes that are shipped: they are read, planned without a network, and hold against the architectures they name."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel
from transformers import AutoConfig, AutoModelForCausalLM
from typer.core import TyperGroup
from typer.main import get_command

from etude.cli.main import app
from etude.errors import UserError
from etude.models.bases import known_bases
from etude.models.context import RopeSettings, stretch
from etude.models.mtp_heads import MtpHeads
from etude.models.shape import model_shape
from etude.recipe.recipe import as_toml, load_recipe
from etude.run.runner import stage_settings
from etude.training.session import add_lora
from etude.training.settings import TrainSettings
from tests import tiny

if TYPE_CHECKING:
    from etude.recipe.recipe import Recipe
    from tests.conftest import Etude

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/your-own-agent.md"
RECIPES = sorted(ROOT.glob("recipes/*.toml"))
EXAMPLES = sorted(ROOT.glob("recipes/examples/*.toml"))
QWEN, MOE, LEGAL = (
    ROOT / f"recipes/examples/{name}.toml" for name in ("qwen3-8b-node", "deepseek-v3-class-moe", "legal")
)
LACKING = {
    QWEN: ["data", "compare", "sft", "rl", "bench"],
    MOE: ["base", "data", "compare", "sft"],
    LEGAL: ["data", "sft", "compare"],
}
CHAT = {"messages": [{"role": "user", "content": "May I?"}, {"role": "assistant", "content": "You may."}]}


def with_context(model: Path, tokens: int) -> Path:
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": tokens}))
    return model


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory and a home with all that the recipes name; nothing of it is large."""
    home, desk = tmp_path / "home", tmp_path / "desk"
    for name in ("code/main", "code/other", "my-project"):
        tiny.write_tree(home / name)
    for name in ("code/main", "my-project"):
        for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all of it"]):
            tiny.git(home / name, *words)
    (home / "code/conversations.jsonl").write_text(json.dumps(CHAT))
    for kind in ("heldout", "train"):
        for number in range(8):
            path = home / "documents" / kind / f"{kind}-{number}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"The {kind} court finds, in matter {number}.{line}, for the plaintiff and against {number * line}.\n"
                                    for line in range(30)))  # fmt: skip
    subprocess.run([sys.executable, "-P", ROOT / "recipes/examples/finance.py", desk / "build/finance"], check=True)
    shutil.copytree(desk / "build/finance", desk / "build/medicine")
    shutil.copyfile(desk / "build/finance/filings.jsonl", desk / "build/medicine/icd.jsonl")
    (home / "documents/questions.jsonl").write_text(json.dumps(CHAT) + "\n" + json.dumps(CHAT))
    for traces in ("quick", "train"):
        (desk / "runs/demos" / traces).mkdir(parents=True)
        (desk / "runs/demos" / traces / "traces.jsonl").touch()
    for name in ("recipes", "src", "tests", "docs", "LICENSE"):
        (desk / name).symlink_to(ROOT / name)
    for name in ("ours", "tasks"):
        shutil.copyfile(ROOT / "recipes/tasks/quick.jsonl", desk / f"{name}.jsonl")
    with_context(tiny.save_model(desk / "models/moonlight-16b-a3b", "deepseek_v3"), 8192)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(desk)
    return desk


@pytest.mark.parametrize("path", [*RECIPES, *EXAMPLES], ids=lambda path: path.stem)
def test_every_recipe_can_be_planned_without_a_network(etude: Etude, desk: Path, path: Path) -> None:
    said = etude("run", path, "--dry-run", "--cache", desk / "cache", "--out", desk / "run")
    assert (said.code, said.err) == (0, "")
    recipe = read(path)
    assert as_toml(recipe) in said.out
    assert [line for line in said.out.splitlines() if line.endswith(": would run")][-1].startswith(last(recipe))
    assert not (desk / "run").exists()


def test_all_that_is_missing_is_said_at_once(etude: Etude, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    monkeypatch.chdir(tmp_path)
    for path, stages in LACKING.items():
        words = ["run", path, "--dry-run", "--cache", tmp_path / "cache"]
        said = etude(*words)
        assert said.code == 2
        assert as_toml(read(path)) in said.out
        told = {line.partition(": ")[0]: line for line in said.out.splitlines() if ": cannot run yet: " in line}
        assert list(told) == stages
        reason = told[stages[0]].partition("cannot run yet: ")[2]
        assert said.err.startswith("error: ")
        assert said.err.endswith(f"{reason} ({len(stages) - 1} more above)\n")
        assert not reason.startswith(f"{stages[0]}: "), "its stage is named once"
        planned = json.loads(etude(*words, "--json").out)["steps"]
        assert [step["stage"] for step in planned if step["lacks"]] == stages
        assert etude(*[word for word in words if word != "--dry-run"]).err.endswith(f"{reason}\n")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_write_only_what_is_not_the_default(path: Path) -> None:
    """So that a reader knows that each line is a choice, and a changed default is not overruled unseen."""
    table = tomllib.loads(path.read_text())
    found = read(path)
    entries = [*found.stages, *([found.data] if found.data else [])]
    idle = [line for entry in entries for line in same(type(entry.settings), table.get(entry.name, {}), entry.name)]
    assert idle == []


def test_a_setting_that_is_the_default_would_be_found() -> None:
    kinds = stage_settings()
    assert same(kinds["compare"], {"window": 1024, "stride": 8}, "compare") == ["compare.window"]
    assert same(kinds["cpt"], {"optimiser": {"lr": 3e-4, "clip": 2.0}}, "cpt") == ["cpt.optimiser.lr"]


@pytest.mark.parametrize(
    ("path", "ranks", "context"), [(QWEN, 8, 32_768), (MOE, 1, 8192), (LEGAL, 1, 4096)], ids=["qwen", "moe", "legal"]
)
def test_rows_come_out_even_and_fit_the_context(path: Path, ranks: int, context: int) -> None:
    """What a stage would refuse when it begins, days after the first one did (run/stages/training.py)."""
    recipe = read(path)
    assert recipe.base is None or recipe.base not in known_bases() or known_bases()[recipe.base].context == context
    assert recipe.data is not None
    row: int = recipe.data.settings.model_dump()["length"]
    for entry in recipe.stages:
        if isinstance(entry.settings, TrainSettings):
            ours = 1 if entry.name == "heads" else ranks  # trained after rl, by one process
            length = entry.settings.length or row
            context = max(context, length if entry.kind == "extend" else 0)
            assert length <= context, entry.name
            assert entry.settings.batch % ours == 0, entry.name
            assert entry.kind == "sft" or (row % length, entry.settings.batch * length % (row * ours)) == (0, 0), (
                entry.name
            )


def test_qwen_is_stretched_by_yarn_and_can_have_the_heads(desk: Path, etude: Etude) -> None:
    recipe = read(QWEN)
    settings = {entry.name: entry.settings.model_dump() for entry in recipe.stages}
    config = tiny.config_of("qwen3")
    config.max_position_embeddings = 32_768
    longer = stretch(config, settings["extend"]["length"], RopeSettings(**settings["extend"]["rope"]))
    assert (longer.rope_parameters["rope_type"], longer.rope_parameters["factor"]) == ("yarn", 2.0)
    model = AutoModelForCausalLM.from_config(longer)
    for stage in ("mtp", "heads"):
        heads = MtpHeads.for_model(model, depth=settings[stage]["depth"], shared=settings[stage]["shared"])
        assert (heads.depth, len(heads.layers)) == (3, 1)
    harness = settings["rl"]["harness"]
    assert harness["seconds"] < settings["rl"]["seconds"]
    assert (
        harness["summary"]["trigger"] + harness["turn_tokens"] + harness["summary"]["tokens"]
        <= settings["rl"]["length"]
    )
    here = with_context(tiny.save_model(desk / "mine", "qwen3"), 32_768)
    said = etude("run", QWEN, "--dry-run", "--set", f"base={here}", "--cache", desk / "cache")
    assert (said.code, f'base = "{here}"' in said.out) == (0, True)


def test_lora_of_the_mixture_leaves_routers_and_experts_alone() -> None:
    recipe = read(MOE)
    assert "rl" not in [entry.kind for entry in recipe.stages]
    for name in ("cpt", "sft"):
        settings = next(entry.settings for entry in recipe.stages if entry.name == name)
        model = AutoModelForCausalLM.from_config(tiny.config_of("deepseek_v3"))
        assert isinstance(settings, BaseModel)
        held = add_lora(model, settings.lora, 0)  # type: ignore[attr-defined]
        trained = {part for part, weight in held.named_parameters() if weight.requires_grad}
        assert {part.partition(".lora_")[0].rpartition(".")[2] for part in trained} == {
            "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}  # fmt: skip
    MtpHeads.for_model(AutoModelForCausalLM.from_config(tiny.config_of("deepseek_v3")), depth=3)


def test_deepseeks_positions_which_are_scaled_already_are_scaled_on() -> None:
    plain = tiny.config_of("deepseek_v3")
    scaled = stretch(plain, 4096, RopeSettings(method="yarn"))
    again = stretch(scaled, 8192, RopeSettings(method="scale"))
    assert again.rope_parameters["factor"] == 2 * scaled.rope_parameters["factor"]


def test_what_the_example_says_of_kimi_is_so(tmp_path: Path) -> None:
    AutoConfig.for_model("kimi_k25").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="is multimodal"):
        model_shape(tmp_path)
    assert AutoConfig.for_model("kimi_k25").get_text_config().model_type == "deepseek_v3"


def test_a_domain_without_code_is_learnt_and_compared(etude: Etude, desk: Path, tiny_base: Path) -> None:
    small = desk / "small.toml"
    small.write_text(f"""
        base = "{tiny_base}"
        [data]
        length = 128
        separator = "<|end|>"
        replay = {{ tokens = 512, length = 32 }}
        [cpt]
        tokens = 512
        batch = 2
        evaluations = 0
        [sft]
        length = 128
        batch = 2
        evaluations = 0
        [compare]
        bases = ["{tiny_base}"]
        window = 64
        stride = 32
        max_bytes = 2000
        speed_prompt = 8
        speed_steps = 2
    """)
    words = ["run", LEGAL, small, "--out", desk / "run", "--cache", desk / "cache"]
    said = etude(*words)
    assert said.code == 0, said.err
    bits = {row["domain"]: row for row in json.loads((desk / "run/cpt/results.json").read_text())["domains"]}
    assert set(bits) == {"legal"}
    measured = json.loads((desk / "run/compare/results.json").read_text())
    assert [row["bits"]["files"] for row in measured] == [1, 1]
    refused = etude(*words, "--set", "compare.keep=code", "--dry-run")
    assert refused.err.startswith(
        f"error: compare: '{desk.parent}/home/documents/heldout' holds no code to read (8 not source code)"
    )


def test_the_tables_of_the_guide_make_one_recipe(tmp_path: Path) -> None:
    blocks = [
        block for block in re.findall(r"```toml\n(.*?)```", GUIDE.read_text(), re.DOTALL) if "[[package]]" not in block
    ]
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(blocks))
    named = re.findall(r"^\[(\w+)\]", path.read_text(), re.MULTILINE)
    stages = [name for name in named if name != "data"]
    recipe = load_recipe([path], [f"stages={stages}".replace("'", '"')], stage_settings())
    assert stages == ["cpt", "mtp", "extend", "sft", "rl", "bench", "release"]
    assert recipe.data is not None
    row = recipe.data.settings.model_dump()["length"]
    for entry in recipe.stages[:3]:
        settings = entry.settings.model_dump()
        assert settings["batch"] * settings["length"] % row == 0


def test_the_commands_of_the_guide_exist() -> None:
    lines = re.findall(r"^    (etude .+)$", GUIDE.read_text(), re.MULTILINE)
    assert len(lines) > 15
    assert [line for line in lines if not known(shlex.split(re.split(r"  +", line)[0])[1:])] == []
    assert not known(["tasks", "make", "--nonsense"])
    assert not known(["task"])


def known(words: list[str]) -> bool:
    """Return whether the command line has these commands and options."""
    command = get_command(app)
    for word in words:
        if word.startswith("--"):
            if not any(word in option.opts for option in command.params):
                return False
        elif isinstance(command, TyperGroup):
            inside = command.commands.get(word) or (command.commands.get("run") if command.name == "bench" else None)
            if inside is None:
                return False
            command = inside
    return True


def read(path: Path) -> Recipe:
    return load_recipe([path], [], stage_settings())


def last(recipe: Recipe) -> str:
    return recipe.stages[-1].name if recipe.stages else "data"


def same(model: type[BaseModel], table: dict[str, Any], place: str) -> list[str]:
    """Return the keys of a table whose value is what it would be anyway."""
    found = []
    for key, value in table.items():
        default = model.model_fields[key].default if key != "kind" else None
        if isinstance(value, dict) and isinstance(default, BaseModel):
            own = type(default).model_fields
            found += [f"{place}.{key}.{name}" for name, given in value.items()
                      if name in own and not isinstance(given, dict) and given == getattr(default, name)]  # fmt: skip
        elif value == default:
            found.append(f"{place}.{key}")
    return found
