"""The command line on a cluster: a stage that trains on ranks, what is told, and what is refused before time is spent."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from etude.cluster.connect import joined
from etude.cluster.placement import Placement, bundles, nodes
from etude.jsonl import read_rows
from etude.recipe.cluster import ClusterSettings
from tests import tiny
from tests.cluster.conftest import ROOT
from tests.conftest import Etude

RECIPE = """
name = "ranks"
base = "{base}"
stages = ["cpt"]
[data]
length = 256
heldout = 0.2
separator = "<|end|>"
workers = 1
filters = {{ scrub = false, min_chars = 1, max_repeated_lines = 1.0, max_compression = 100.0 }}
duplicates = {{ near = false }}
[[data.source]]
name = "rows"
jsonl = "{rows}"
unknown = "keep"
[cpt]
tokens = 4096
batch = 4
evaluations = 0
evaluation_rows = 4
compile = "off"
[cluster]
trainer = {{ cpus = {ranks} }}
"""

LEARNS = """
name = "learns"
base = "{base}"
stages = ["rl"]
[rl]
tasks = "tasks.jsonl"
concurrency = 20000
[cluster]
trainer = {{ cpus = 1 }}
engines = {{ count = 3, cpus = 1 }}
"""


def recipe(folder: Path, ranks: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "rows.jsonl").open("w") as rows:
        for number in range(40):
            lines = "\n".join(
                f"def function_{number}_{line}(value):\n    return value + {line}" for line in range(number)
            )
            rows.write(json.dumps({"text": f"# file {number}\n{lines}\n"}) + "\n")
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(base=tiny.save_model(folder / "base"), rows=folder / "rows.jsonl", ranks=ranks))
    return path


@pytest.mark.slow
def test_continued_pretraining_on_ranks_is_what_one_process_does(cluster: Any, tmp_path: Path, etude: Etude) -> None:
    path, cache = recipe(tmp_path), tmp_path / "cache"
    one = etude("run", path, "--out", tmp_path / "one", "--cache", cache, "--set", "cpt.masters=float32")
    alone = etude("run", path, "--out", tmp_path / "alone", "--cache", tmp_path / "other")
    assert one.code == 2  # no such key: the table is read before anything is run
    assert (alone.code, "[cluster] is not used" in alone.err) == (0, True)
    placed = etude("run", path, "--out", tmp_path / "placed", "--cache", cache, "--cluster", cluster.address)
    assert placed.code == 0, placed.err
    assert "trains on 2 ranks" in placed.err
    rows = [read_rows(tmp_path / run / "cpt/metrics.jsonl", "train/") for run in ("alone", "placed")]
    assert [row["tokens"] for row in rows[0]] == [row["tokens"] for row in rows[1]]
    assert [row["loss"] for row in rows[1]] == pytest.approx([row["loss"] for row in rows[0]], rel=1e-4)
    assert not (tmp_path / "placed/cpt/cluster").exists()
    again = ("--out", tmp_path / "placed", "--cache", cache, "--cluster", cluster.address)
    kept = etude("run", path, *again, "--set", "cluster.trainer.cpus=1")
    assert (kept.code, "cpt: unchanged, kept" in kept.err) == (0, True)  # where it is trained changes nothing of it
    changed = etude("run", path, *again, "--set", "cpt.tokens=2048")
    assert changed.code == 0, changed.err
    assert "cpt: unchanged" not in changed.err
    assert "data: unchanged, kept" in changed.err
    assert sum(row["tokens"] for row in read_rows(tmp_path / "placed/cpt/metrics.jsonl", "train/")) == 2048


def test_status_plan_and_doctor(cluster: Any, tmp_path: Path, etude: Etude) -> None:
    told = json.loads(etude("cluster", "status", "--cluster", cluster.address, "--json").out)
    assert sorted((each["gpus"], each["cpus"]) for each in told["nodes"]) == [(0, 3), (0, 3), (2, 3)]
    fits = etude("cluster", "plan", recipe(tmp_path), "--cluster", cluster.address)
    assert (fits.code, "the cluster has room for all of it" in fits.out) == (0, True)
    assert "rl:" not in fits.out
    eight = tmp_path / "eight"  # the shape of Llama 3 8B: 8,030,261,248 parameters
    LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    ).save_pretrained(eight)  # fmt: skip
    learns = tmp_path / "rl.toml"
    learns.write_text(LEARNS.format(base=eight))
    planned = json.loads(etude("cluster", "plan", learns, "--cluster", cluster.address, "--json").out)
    assert [(each["part"], each["places"]) for each in planned["places"]] == [("trainer", 1), ("engines", 3)]
    weights, many = planned["grows"]
    assert "the model is 16.06 GB; one rank writes it after each step, while none is trained: about 13.2 s" in weights
    assert "3 engines read about 0.18 GB a step" in weights
    four = ("--cluster", cluster.address, "--set", "cluster.trainer.cpus=4")
    assert (
        "4 ranks write a share of it each after each step, while none is trained: about 3.3 s"
        in etude("cluster", "plan", learns, *four).out
    )
    assert "20,000 episodes at once; 10,000 were tried" in many
    never = etude("cluster", "plan", recipe(tmp_path / "b", ranks=10), "--cluster", cluster.address)
    assert (never.code, "asks for 10 CPUs in 10 places, and there is no room for 1 of trainer" in never.err) == (
        2,
        True,
    )
    well = etude("cluster", "doctor", "--cluster", cluster.address, "--out", tmp_path / "run")
    assert (well.code, "all is well" in well.out) == (0, True), well.out
    assert not any((tmp_path / "run").iterdir())


def test_what_cannot_work_is_refused_in_one_line(
    cluster: Any, tmp_path: Path, etude: Etude, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe(tmp_path)
    for words, says in (
        (["--cluster", "127.0.0.1:1"], "--cluster 127.0.0.1:1: no cluster answers"),
        (["--cluster", cluster.address, "--set", "cluster.trainer.cpus=10"], "no room for 1 of trainer"),
        (["--cluster", cluster.address, "--set", "cluster.trainer.cpu=1"], "unknown key 'cluster.trainer.cpu'"),
    ):
        said = etude("run", path, "--out", tmp_path / "run", "--cache", tmp_path / "cache", *words)
        assert (said.code, says in said.err) == (2, True), said.err
    plain = path.with_name("plain.toml")
    plain.write_text(path.read_text().partition("[cluster]")[0])
    said = etude("run", plain, "--cluster", cluster.address)
    assert (said.code, "has no [cluster]" in said.err) == (2, True)
    with monkeypatch.context() as other:
        other.setattr("ray.__version__", "2.55.0")
        said = etude("run", path, "--out", tmp_path / "run", "--cluster", cluster.address)
        assert (said.code, "use the same Ray and Python here and there" in said.err) == (2, True), said.err
    with monkeypatch.context() as without:
        found = importlib.util.find_spec
        without.setattr("etude.cluster.find_spec", lambda name: None if name == "ray" else found(name))
        said = etude("run", path, "--cluster", "local")
        assert (said.code, "pip install 'etude[cluster]'" in said.err) == (2, True)


def test_nothing_imports_ray_unless_a_cluster_is_asked_for() -> None:
    importing = [str(path.relative_to(ROOT)) for path in (ROOT / "src").rglob("*.py")
                 if any(line.strip().startswith(("import ray", "from ray")) for line in path.read_text().splitlines())]  # fmt: skip
    assert importing
    assert {Path(each).parent.name for each in importing} == {"cluster"}
    code = "import sys, etude.cli.main, etude.run.runner, etude.rl.orchestrator, etude.cli.cluster; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


def test_sandboxes_keep_off_nodes_with_gpus(cluster: Any) -> None:
    """The bundles of pools are on the nodes without one, and all others on the node that has them."""
    import ray

    with joined(cluster.address, print):
        table = {"trainer": {"gpus": 1}, "engines": {"gpus": 1}, "sandboxes": {"cpus": 4, "pool": 1}}
        placement = Placement(bundles(ClusterSettings.model_validate(table)))
        assert placement.group.wait(30)
        where = ray.util.placement_group_table(placement.group)["bundles_to_node_id"]
        gpus = {node.id: node.has["GPU"] for node in nodes()}
        assert [gpus[where[number]] for number in range(6)] == [2, 2, 0, 0, 0, 0]
        placement.remove()
