"""What fits, and what is said when it does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from etude.errors import UserError
from etude.training import memory
from etude.training.memory import Estimate, choose_micro, estimate
from etude.training.session import add_lora
from etude.training.settings import LoraSettings
from tests.training import sessions

CPU = torch.device("cpu")
GIGABYTE = 10**9
ROOM_FOR_FIVE = Estimate(fixed=GIGABYTE, row=GIGABYTE, available=round(6.5 * GIGABYTE / memory.SHARE))


def test_as_many_rows_as_divide_the_batch_and_fit() -> None:
    assert ROOM_FOR_FIVE.rows() == 5
    assert choose_micro(0, 8, ROOM_FOR_FIVE, recompute=False) == 4
    assert choose_micro(0, 5, ROOM_FOR_FIVE, recompute=False) == 5
    assert choose_micro(0, 7, ROOM_FOR_FIVE, recompute=False) == 1
    assert choose_micro(3, 8, ROOM_FOR_FIVE, recompute=False) == 3  # a wish is a wish
    assert choose_micro(64, 4, ROOM_FOR_FIVE, recompute=False) == 4  # more would be padding


def test_what_does_not_fit_is_refused_with_a_setting_that_does() -> None:
    with pytest.raises(UserError) as caught:
        choose_micro(8, 16, ROOM_FOR_FIVE, recompute=False)
    assert str(caught.value) == (
        "micro = 8 rows will not fit: about 9.0 GB are needed and 6.5 GB may be used, 85% of what is free; set micro = 5, or recompute = true"
    )
    with pytest.raises(UserError, match=r"set micro = 5$"):
        choose_micro(8, 16, ROOM_FOR_FIVE, recompute=True)
    none = Estimate(fixed=8 * GIGABYTE, row=GIGABYTE, available=8 * GIGABYTE)
    with pytest.raises(
        UserError,
        match=r"^not even one row fits: about 9\.0 GB are needed and 6\.8 GB may be used, 85% of what is free; set a shorter `length`, or recompute",
    ):
        choose_micro(0, 16, none, recompute=False)


@given(st.integers(0, 10**12), st.integers(1, 10**11), st.integers(1, 10**12), st.integers(1, 64), st.integers(0, 80))
def test_the_advice_is_good(fixed: int, row: int, available: int, rows: int, wish: int) -> None:
    found = Estimate(fixed, row, available)
    assume(found.rows() >= 1)
    try:
        chosen = choose_micro(wish, rows, found, recompute=False)
    except UserError as error:
        advised = re.search(r"set micro = (\d+)", str(error))
        assert advised
        chosen = choose_micro(int(advised[1]), rows, found, recompute=False)
    assert 1 <= chosen <= rows
    assert fixed + chosen * row <= available
    if not wish:
        assert rows % chosen == 0
        assert not any(rows % more == 0 and more <= found.rows() for more in range(chosen + 1, rows + 1))


def test_the_fixed_part_is_counted() -> None:
    model = sessions.fresh_model()
    weights = sum(weight.numel() for weight in model.parameters())
    logits = 64 * 32 * model.config.vocab_size
    on_cpu = estimate(model, 32, CPU, recompute=False)
    assert on_cpu.fixed >= weights * 16 + logits * 8  # weight, gradient and two moments, in float32
    assert on_cpu.fixed <= weights * 20 + logits * 16
    assert on_cpu.row * 8 == estimate(model, 256, CPU, recompute=False).row
    assert estimate(model, 32, CPU, recompute=True).row < on_cpu.row / 3
    add_lora(model, LoraSettings(rank=2), seed=0)
    assert estimate(model, 32, CPU, recompute=False).fixed < on_cpu.fixed - weights * 12


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="says what Linux says")
def test_files_in_the_cache_do_not_count_as_used() -> None:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    said = 1024 * int(lines["MemAvailable"].split()[0])
    assert estimate(sessions.fresh_model(), 32, CPU, recompute=False).available == pytest.approx(said, rel=0.2)


def test_a_training_that_does_not_fit_is_refused_before_it_starts(tmp_path: Path) -> None:
    corpus = sessions.write_corpus(tmp_path / "corpus")
    free = estimate(sessions.fresh_model(), sessions.LENGTH, CPU, recompute=False)
    batch = 4 * free.available // free.row
    changes = {"batch": batch, "micro": batch, "tokens": batch * sessions.LENGTH}
    with (
        pytest.raises(UserError, match="rows will not fit"),
        sessions.session(corpus, tmp_path / "run", sessions.settings(**changes)),
    ):
        pass
