from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from etude.data.settings import DataSettings
from etude.errors import UserError
from etude.recipe.recipe import Recipe, StageEntry, as_toml, load_recipe, parse_change
from etude.toml import merge


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    steps: int = Field(description="how many")
    rate: float = 0.1
    mode: Literal["fast", "slow"] = "fast"
    names: list[str] = []
    maybe: int | None = None


KINDS = {"train": Settings, "check": Settings}


def write(folder: Path, text: str, name: str = "recipe.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


GOOD = 'name = "mine"\nstages = ["train", "again"]\n[train]\nsteps = 3\n[again]\nkind = "train"\nsteps = 4\nrate = 1\n'


def test_a_recipe_with_two_stages_of_one_kind(tmp_path: Path) -> None:
    recipe = load_recipe([write(tmp_path, GOOD)], [], KINDS)
    assert [(stage.name, stage.kind) for stage in recipe.stages] == [("train", "train"), ("again", "train")]
    assert recipe.resolved()["again"] == {
        "kind": "train",
        "steps": 4,
        "rate": 1.0,
        "mode": "fast",
        "names": [],
        "maybe": None,
    }


def test_files_layer_left_to_right_and_set_comes_last(tmp_path: Path) -> None:
    first = write(tmp_path, GOOD)
    second = write(tmp_path, '[train]\nmode = "slow"\nnames = ["a"]\n[again]\nsteps = 5\n', "second.toml")
    recipe = load_recipe(
        [first, second], ["again.steps=6", "train.names=['b', 'c']", "seed=7", "train.mode=fast"], KINDS
    )
    train, again = (stage.settings.model_dump() for stage in recipe.stages)
    assert train == {"steps": 3, "rate": 0.1, "mode": "fast", "names": ["b", "c"], "maybe": None}
    assert again["steps"] == 6
    assert recipe.seed == 7


def test_the_hash_is_of_what_is_meant_not_of_how_it_is_written(tmp_path: Path) -> None:
    plain = load_recipe([write(tmp_path, GOOD)], [], KINDS)
    spelled_out = load_recipe([write(tmp_path, GOOD.replace("[train]", "# remark\n[train]\nmode = 'fast'"))], [], KINDS)
    other = load_recipe([write(tmp_path, GOOD)], ["train.rate=0.2"], KINDS)
    assert plain.hash == spelled_out.hash != other.hash


@pytest.mark.parametrize(
    ("text", "changes", "said"),
    [
        ("name = x\n", [], "recipe.toml is not valid TOML: Invalid value (at line 1, column 8)"),
        (GOOD.replace("rate", "rat"), [], "recipe.toml:8: unknown key 'again.rat'; did you mean 'rate'"),
        (GOOD.replace("steps = 4\n", ""), [], "recipe.toml:5: 'again.steps' is missing: how many; set it in the recipe or with --set again.steps=…"),
        (GOOD.replace("steps = 3", 'steps = "3"'), [], "recipe.toml:4: train.steps: input should be a valid integer, not '3'"),
        (GOOD.replace("steps = 3", "steps = 3.5"), [], "recipe.toml:4: train.steps: input should be a valid integer, not 3.5"),
        (GOOD, ["train.steps=x"], "--set train.steps=x: train.steps: input should be a valid integer, not 'x'"),
        (GOOD, ["train.mode=quick"], "--set train.mode=quick: train.mode: input should be 'fast' or 'slow', not 'quick'"),
        (GOOD, ["train.stepz=1"], "--set train.stepz=1: unknown key 'train.stepz'; did you mean 'steps'"),
        (GOOD, ["train"], "--set 'train' is not of the form stage.key=value"),
        (GOOD, ["=3"], "--set '=3' is not of the form stage.key=value"),
        (GOOD.replace('kind = "train"', 'kind = "trian"'), [], "recipe.toml:6: unknown stage 'trian'; did you mean 'train'"),
        (GOOD.replace('"again"]', '"agin"]'), [], "recipe.toml:2: unknown stage 'agin'; did you mean 'again'"),
        (GOOD.replace('["train", "again"]', '["trian", "again"]'), [], "recipe.toml:2: unknown stage 'trian'; did you mean 'train'"),
        (GOOD.replace("steps = 3", "stps = 3"), [], "recipe.toml:4: unknown key 'train.stps'; did you mean 'steps'"),
        (GOOD.replace('"again"]', '"again", "chek"]'), [], "recipe.toml:2: unknown stage 'chek'; did you mean 'check'"),
        (GOOD.replace('"again"]', '"again", "train"]'), [], "recipe.toml:2: stages: 'train' is listed twice"),
        (GOOD.replace('"again"]', '"base"]'), [], "recipe.toml:2: stages: 'base' cannot name a stage"),
        (GOOD.replace('name = "mine"', 'name = "a/b"'), [], "recipe.toml:1: name: input should be a name of the run: letters, digits, dot, dash, underscore, not 'a/b'"),
        (GOOD.replace('name = "mine"', 'nam = "a"'), [], "recipe.toml:1: unknown key 'nam'; did you mean 'name'"),
        (GOOD.replace('name = "mine"\n', ""), [], "'name' is missing"),
        (GOOD + "[other]\nx = 1\n", [], "recipe.toml:9: section [other] is not in stages = ['train', 'again']; known: again, train (or add it to stages, or leave the section out)"),
        (GOOD.replace("[train]\nsteps = 3\n", "").replace("stages", "train = 3\nstages"), [], "recipe.toml:2: 'train' is a stage: its settings stand in a table, written [train]"),
        (GOOD.replace("[train]", "[[train]]"), [], "recipe.toml:3: 'train' is a stage"),
        (GOOD, ["seed=-1"], "--set seed=-1: seed: input should be greater than or equal to 0, not -1"),
        ("stages = []\nname = 'x'", [], "recipe.toml:1: nothing to do: list stages = [\"…\"], or describe a corpus in [data]"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_place(tmp_path: Path, text: str, changes: list[str], said: str) -> None:
    with pytest.raises(UserError) as raised:
        load_recipe([write(tmp_path, text)], changes, KINDS)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_layer_that_made_the_mistake_is_named(tmp_path: Path) -> None:
    second = write(tmp_path, "[train]\n\nsteps = true\n", "second.toml")
    with pytest.raises(UserError, match=r"second\.toml:3: train\.steps"):
        load_recipe([write(tmp_path, GOOD), second], [], KINDS)


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_recipe([tmp_path / "absent.toml"], [], KINDS)
    with pytest.raises(UserError, match="is a folder"):
        load_recipe([tmp_path], [], KINDS)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        load_recipe([tmp_path / "binary.toml"], [], KINDS)
    assert load_recipe([write(tmp_path, "\ufeff" + GOOD)], [], KINDS).name == "mine"  # as Windows' editor writes it


@pytest.mark.parametrize(
    ("change", "table"),
    [
        ("a.b=1", {"a": {"b": 1}}),
        ("a=x", {"a": "x"}),
        ('a="1"', {"a": "1"}),
        ("a.b.c=[1, 2]", {"a": {"b": {"c": [1, 2]}}}),
        ("a=b=c", {"a": "b=c"}),
        ("a=", {"a": ""}),
        ("a=1e-3", {"a": 0.001}),
        ("a=true", {"a": True}),
    ],
)
def test_changes(change: str, table: dict[str, object]) -> None:
    assert parse_change(change).table == table


LEAF = st.integers() | st.text(max_size=3)
TREE = st.recursive(
    st.dictionaries(st.sampled_from("abc"), LEAF, max_size=3),
    lambda t: st.dictionaries(st.sampled_from("abc"), LEAF | t, max_size=3),
    max_leaves=6,
)


def paths(table: object, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], object]:
    if not isinstance(table, dict) or not table:
        return {prefix: table}
    return {path: leaf for key, value in table.items() for path, leaf in paths(value, (*prefix, key)).items()}


@given(TREE, TREE)
def test_merging_keeps_all_of_the_upper_and_what_it_does_not_touch_of_the_lower(
    lower: dict[str, object], upper: dict[str, object]
) -> None:
    merged = paths(merge(lower, upper))
    for path, leaf in paths(upper).items():
        if leaf != {}:
            assert merged[path] == leaf
    for path, leaf in paths(lower).items():
        if path[:1] and path[0] not in upper:
            assert merged[path] == leaf


@given(
    st.text(max_size=20), st.lists(st.text(max_size=5), max_size=3), st.floats(allow_nan=False, allow_infinity=False)
)
def test_a_resolved_recipe_reads_back_the_same(text: str, names: list[str], rate: float) -> None:
    settings = Settings(steps=1, names=[text, *names], rate=rate)
    recipe = Recipe("mine", text, 0, (StageEntry("train", "train", settings),))
    back = tomllib.loads(as_toml(recipe))
    assert back["base"] == text
    assert Settings.model_validate({key: value for key, value in back["train"].items() if key != "kind"}) == settings


CORPUS = """name = "mine"

[data]
length = 256

[[data.source]]
name = "one"
folder = "src"

[[data.source]]
name = "two"
pypi = ["toolz==1.2.0"]

[data.fim]
rate = 0.5
"""


def corpus(tmp_path: Path, text: str, *changes: str) -> Recipe:
    return load_recipe([write(tmp_path, text)], list(changes), {**KINDS, "data": DataSettings})


def test_a_recipe_may_be_a_corpus_alone(tmp_path: Path) -> None:
    recipe = corpus(tmp_path, CORPUS, "data.fim.spm=0.25", "data.workers=3")
    assert recipe.stages == ()
    assert recipe.data is not None
    settings = recipe.data.settings
    assert isinstance(settings, DataSettings)
    assert [source.name for source in settings.source] == ["one", "two"]
    assert (settings.fim.rate, settings.fim.spm, settings.workers) == (0.5, 0.25, 3)


def test_the_resolved_corpus_can_be_run_again(tmp_path: Path) -> None:
    recipe = corpus(tmp_path, CORPUS)
    again = corpus(tmp_path, as_toml(recipe))
    assert again.resolved() == recipe.resolved()
    assert again.hash == recipe.hash


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            'pypi = ["toolz==1.2.0"]',
            'pypi = ["toolz"]',
            "recipe.toml:10: data.source.1: 'toolz' is no package at a version",
        ),
        ('folder = "src"', 'foldr = "src"', "recipe.toml:8: unknown key 'data.source.0.foldr'; did you mean 'folder'"),
        ('name = "two"', 'name = "one"', "two sources are called 'one'"),
        ('name = "two"', "", "'data.source.1.name' is missing: name in counts"),
        ('folder = "src"', 'folder = "src"\ngit = "."', "must have exactly one of"),
        ('folder = "src"', 'folder = "src"\nhistory = 3', "`history` has no effect on a source with `folder`"),
        ("rate = 0.5", "rat = 0.5", "recipe.toml:15: unknown key 'data.fim.rat'; did you mean 'rate'"),
        ("rate = 0.5", "rate = 2", "recipe.toml:15: data.fim.rate: input should be less than or equal to 1, not 2"),
        (
            "length = 256",
            'replay = { share = 0.1, source = "three" }',
            "replay.source 'three' is neither a source (one, two) nor",
        ),
        ("length = 256", "shares = { prose = 0.1 }", "shares names the domain 'prose', which no source has"),
        ("length = 256", "shares = { code = 1.5 }", "must not add up to more than 1"),
        ("length = 256", "shares = { code = 0.5 }", "add up to less than 1, and no domain is left"),
        ('name = "two"', 'name = "self"', "a source cannot be called 'self'"),
        ('folder = "src"', 'git = "https://token@host/x.git"', "holds a password or a token"),
        ('folder = "src"', 'folder = "src"\nlicence = "my own"', "'my own' is no SPDX licence expression"),
        ("rate = 0.5", 'rate = 0.5\ntokens = ["<a>", "<a>", "<b>"]', "three different tokens"),
        (
            "length = 256",
            'replay = { share = 0.1, source = "self" }\ntokeniser = { source = "train" }',
            "tokeniser.source must be",
        ),
        ("length = 256", "filters = { max_mean_line = inf }", "finite"),
        ("length = 256", "filters = 3", "recipe.toml:4: data.filters: input should be a table of settings, not 3"),
    ],
)
def test_mistakes_in_a_corpus_are_named_with_their_place(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(UserError) as raised:
        corpus(tmp_path, CORPUS.replace(old, new, 1))
    assert said in str(raised.value)
