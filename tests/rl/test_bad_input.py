"""What cannot work is refused in one line before any time is spent. What a recipe alone shows is in tests/run/test_rl_stage.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.errors import UserError
from etude.models.load import load_tokeniser
from etude.rl.processes import JOB, LEDGER, RlJob, load_job
from tests import tiny
from tests.rl.toy import Toy, play, settings_of


def toy(model: Path, tasks: int = 4) -> Toy:
    return Toy(load_tokeniser(model), tasks=tasks)


def test_a_job_is_read_back(tmp_path: Path) -> None:
    job = RlJob(tmp_path / "model", tmp_path, tmp_path / "socket", settings_of(kl={"coefficient": 0.1}), seed=7)
    assert load_job(job.save()) == job
    assert job.save() == tmp_path / JOB


def test_no_tasks(tiny_base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no task to play"):
        play(tiny_base, tmp_path / "run", settings_of(), toy(tiny_base, tasks=0))


def test_a_policy_of_another_tokeniser(tmp_path: Path) -> None:
    model, other = tiny.save_model(tmp_path / "model"), tiny.tokeniser()
    other.add_tokens([f"<|more_{number}|>" for number in range(40)])
    other.save_pretrained(model)
    known = len(load_tokeniser(model))
    with pytest.raises(UserError, match=rf"the policy knows {tiny.VOCABULARY} tokens, its tokeniser {known}"):
        play(model, tmp_path / "run", settings_of(), toy(model))
    assert known > tiny.VOCABULARY
    assert not (tmp_path / "run" / LEDGER).exists()


def test_rows_longer_than_the_context(tiny_base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tiny.CONTEXT}"):
        play(tiny_base, tmp_path / "run", settings_of(length=2 * tiny.CONTEXT), toy(tiny_base))
    assert not (tmp_path / "run" / LEDGER).exists()


def test_weights_that_cannot_be_loaded_end_the_run_with_what_their_process_said(tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(UserError, match="model"):
        play(model, tmp_path / "run", settings_of(processes=True), toy(model))
    assert not load_job(tmp_path / "run" / JOB).socket.parent.exists()
    assert not (tmp_path / "run" / LEDGER).exists()


def test_tasks_from_which_nothing_can_be_learnt(tiny_base: Path, tmp_path: Path) -> None:
    flat = toy(tiny_base)
    flat.liked = frozenset()
    with pytest.raises(UserError, match=r"no group of these tasks gave a training signal: of 4 groups 4 were flat"):
        play(tiny_base, tmp_path / "run", settings_of(), flat)
