"""Ctrl-C and SIGTERM, as a terminal and a scheduler send them: a real process of `etude run` ends in order and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny

RECIPE = """
name = "mine"
base = "{base}"
stages = ["compare"]
[compare]
on = "{code}"
max_bytes = 10000000
state_tasks = 0
"""


@pytest.mark.parametrize(("by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_in_one_line(tmp_path: Path, tiny_base: Path, by: signal.Signals, code: int) -> None:
    run, recipe = tmp_path / "run", tmp_path / "mine.toml"
    recipe.write_text(RECIPE.format(base=tiny_base, code=tiny.write_tree(tmp_path / "code", files=400)))
    words = ["run", str(recipe), "--out", str(run), "--cache", str(tmp_path / "cache")]
    program = "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nfrom etude.cli.main import main\nmain()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not any(run.glob(".work/compare-*/progress.json")):  # it is at work, in the middle of the stage
        assert process.poll() is None, process.communicate()
    process.send_signal(by)
    _, err = process.communicate()
    assert process.returncode == code
    last = [line for line in err.splitlines() if line.startswith("stop")]
    assert len(last) == 2, err
    assert last[1].startswith(f"stopped; all finished steps are kept in {run}; resume with: ")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nobody of its session is left
    assert not list(tmp_path.rglob("*.part"))
    assert (run / "lock").read_bytes() == b""
