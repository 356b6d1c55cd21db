"""What a table asks for, and whether nodes can have it: worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etude.cluster.connect import Seen, problems
from etude.cluster.host import About
from etude.cluster.placement import Node, bundles, left_over, refuse_impossible
from etude.errors import UserError
from etude.recipe.cluster import ClusterSettings
from etude.recipe.recipe import as_toml, load_recipe
from etude.run.runner import stage_settings

EIGHT = {
    "trainer": {"gpus": 8},
    "engines": [{"count": 3, "gpus": 2, "kind": "vllm", "python": "/opt/vllm/bin/python"}, {"gpus": 1}],
    "sandboxes": {"cpus": 40},
}


def node(name: str, gpus: float, cpus: float) -> Node:
    return Node(name, f"10.0.0.{name}", {"GPU": gpus, "CPU": cpus})


def test_every_part_has_its_places() -> None:
    asked = [(each.part, each.takes) for each in bundles(ClusterSettings.model_validate(EIGHT))]
    assert asked == [("trainer", {"GPU": 1, "CPU": 1})] * 8 + [("engines", {"GPU": 2, "CPU": 1})] * 3 + [
        ("engines", {"GPU": 1, "CPU": 1}), ("sandboxes", {"CPU": 14}), ("sandboxes", {"CPU": 13}), ("sandboxes", {"CPU": 13}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "missing"),
    [
        ([node("1", 8, 64), node("2", 8, 64)], 0),  # 15 of 16 GPUs, sandboxes beside them
        ([node("1", 8, 8), node("2", 8, 8), node("3", 0, 40)], 0),
        ([node("1", 8, 8), node("2", 6, 8), node("3", 0, 40)], 1),  # 14 GPUs for 15
        ([node("1", 8, 8), node("2", 8, 8), node("3", 0, 39)], 1),  # the third pool does not fit
        ([node(str(n), 1, 16) for n in range(15)], 3),  # no node has two GPUs
    ],
)
def test_what_can_never_be_had_is_refused_at_once(nodes: list[Node], missing: int) -> None:
    wanted = bundles(ClusterSettings.model_validate(EIGHT))
    assert len(left_over(wanted, nodes)) == missing
    if missing:
        with pytest.raises(UserError, match=r"asks for 15 GPUs, .*the cluster has 10\.0\.0\."):
            refuse_impossible(wanted, nodes)
    else:
        refuse_impossible(wanted, nodes)


def about(**more: Any) -> About:
    told: dict[str, Any] = {
        "node": "a", "address": "10.0.0.1", "host": "one", "gpus": (), "pid": 1, "time": 0.0, "interface": "eth0",
        "versions": {"python": "3.11.7", "ray": "2.60.0", "etude": "0.1.0"},
    }  # fmt: skip
    return About(**{**told, **more})


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        ({"about": about()}, ""),
        ({"about": None}, "does not start a process"),
        ({"about": about(versions={"python": "3.12.1", "ray": "2.60.0", "etude": "0.1.0"})}, "has Python 3.12.1, and 3.11.7 is here"),
        ({"about": about(versions={"python": "3.11.7", "ray": "2.55.0", "etude": "0.1.0"})}, "has Ray 2.55.0, and 2.60.0 is here"),
        ({"about": about(versions={"python": "3.11.7", "ray": "2.60.0", "etude": "0.0.9"})}, "has Etude 0.0.9"),
        ({"about": about(), "apart": 11.0}, "its clock is 11 s off"),
        ({"about": about(), "apart": 9.0}, ""),
        ({"about": about(), "folder": False}, "does not see /runs/mine; choose with --out"),
        ({"about": about(), "vllm": {"/opt/v/bin/python": ""}}, ""),
        ({"about": about(), "vllm": {"/opt/v/bin/python": "not there"}}, "/opt/v/bin/python cannot be used: not there"),
    ],
)  # fmt: skip
def test_nodes_that_are_unlike_are_named(seen: dict[str, Any], says: str) -> None:
    found = problems([Seen(node("1", 0, 1), **seen)], about(), Path("/runs/mine"))
    assert len(found) == bool(says)
    assert says in "".join(found)


RECIPE = 'name = "x"\nbase = "sprout"\nstages = ["compare"]\n[compare]\non = "src"\n'


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("trainer = { gpus = 2, cpus = 1 }", "recipe.toml:7: cluster.trainer: say how many `gpus`"),
        ("trainer = { gpu = 2 }", "unknown key 'cluster.trainer.gpu'; did you mean 'gpus' or 'cpus'?"),
        ('trainer = { gpus = 1 }\nengines = { gpus = 1, kind = "vllm" }', "needs `python`"),
        ("trainer = { gpus = 1 }\nengines = { gpus = 2 }", "raise `count` instead"),
        ('trainer = { gpus = 1 }\nengines = { gpus = 1, python = "p" }', "`python` has no effect"),
        ("engines = { gpus = 1 }", "'cluster.trainer' is missing"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused_where_it_stands(tmp_path: Path, table: str, says: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f"{RECIPE}[cluster]\n{table}\n")
    with pytest.raises(UserError) as error:
        load_recipe([path], [], stage_settings())
    assert says in str(error.value)


def test_where_it_runs_does_not_change_what_it_is(tmp_path: Path) -> None:
    plain, placed = tmp_path / "plain.toml", tmp_path / "placed.toml"
    plain.write_text(RECIPE)
    placed.write_text(f"{RECIPE}[cluster]\ntrainer = {{ gpus = 8 }}\nengines = {{ count = 4, gpus = 1 }}\n")
    one, two = (load_recipe([each], [], stage_settings()) for each in (plain, placed))
    assert one.hash == two.hash
    assert one.cluster is None
    (tmp_path / "again.toml").write_text(as_toml(two))
    assert load_recipe([tmp_path / "again.toml"], [], stage_settings()) == two
