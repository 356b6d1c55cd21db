"""kill −9 anywhere, run the same command again: the same result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("killed")
    bases = [tiny.save_model(folder / name, seed=seed) for seed, name in enumerate(("first", "second"))]
    tree = tiny.write_tree(folder / "code")
    recipe = folder / "recipe.toml"
    recipe.write_text(
        f'name = "kill"\nbase = "{bases[0]}"\nstages = ["cpt", "compare"]\n[compare]\non = "{tree}"\nbases = ["{bases[1]}"]\n'
        'device = "cpu"\nwindow = 64\nstride = 32\nstate_tasks = 2\nstate_diffs = 1\nstate_chars = 120\nspeed_prompt = 8\nspeed_steps = 2\nspeed_batch = 2\n'
        '[cpt]\ntokens = 1024\nbatch = 2\ncheckpoint_every = 2\nevaluations = 2\ndevice = "cpu"\n'
        '[data]\nlength = 64\nheldout = 0.0\nseparator = "<|end|>"\nworkers = 1\nfilters = { scrub = false }\nrepositories = "path"\n'
        f'replay = {{ share = 0.1, source = "self", tokens = 64, length = 16, batch = 2 }}\n[[data.source]]\nname = "tree"\nlicence = "MIT"\nfolder = "{tree}"\n'
    )
    (folder / "runs").mkdir()
    command = [sys.executable, "-m", "tests.run.killed", str(recipe), str(folder / "runs"), "20261115"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # two threads that wait for each other cost more than they bring
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, env=alone)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_kills_in_random_places_change_nothing(outcome: Any) -> None:
    assert len(outcome["kills"]) == 6
    assert len({kill["at"] for kill in outcome["kills"]}) > 3
    for kill in outcome["kills"]:
        assert kill["ended"] == -9
        assert kill["again"] == 0, kill["said again"]
        assert kill["digests"] == outcome["digests"]


def test_the_same_command_goes_on_and_says_so(outcome: Any) -> None:
    assert any("ended without finishing" in kill["said again"] for kill in outcome["kills"])
    assert any("continuing (1 earlier session(s))" in kill["said again"] for kill in outcome["kills"])
    assert any("going on from the checkpoint of step" in kill["said again"] for kill in outcome["kills"])


def test_a_signal_stops_in_order_and_says_how_to_go_on(outcome: Any) -> None:
    assert [stop["ended"] for stop in outcome["stops"]] == [130, 143]
    for stop in outcome["stops"]:
        assert "stopping at the next safe place" in stop["said"]
        assert "; resume with: etude run " in stop["said"]
        assert "Traceback" not in stop["said"]
        assert stop["again"] == 0, stop["said again"]
        assert "ended without finishing" not in stop["said again"]
        assert stop["digests"] == outcome["digests"]
