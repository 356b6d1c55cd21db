"""What fits, and what is said when it does not."""

from __future__ import annotations

import re
import resource
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from etude.errors import UserError
from etude.models.mtp_heads import MtpHeads
from etude.training import memory
from etude.training.batch import Rows, StepRows
from etude.training.distributed import World
from etude.training.loop import Guard
from etude.training.memory import Estimate, choose_micro, estimate
from etude.training.objectives.mtp import MultiToken
from etude.training.objectives.next_token import NextToken
from etude.training.session import Session, add_lora
from etude.training.settings import LoraSettings, TrainSettings
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


@given(
    st.integers(0, 10**12),
    st.integers(1, 10**11),
    st.integers(1, 10**12),
    st.integers(1, 64),
    st.integers(0, 80),
    st.integers(0, 10**11),
    st.integers(0, 10**11),
)
def test_the_advice_is_good(fixed: int, row: int, available: int, rows: int, wish: int, logits: int, most: int) -> None:
    found = Estimate(fixed, row, available, logits, most)
    assume(found.rows() >= 1)
    try:
        chosen = choose_micro(wish, rows, found, recompute=False)
    except UserError as error:
        advised = re.search(r"set micro = (\d+)", str(error))
        assert advised
        chosen = choose_micro(int(advised[1]), rows, found, recompute=False)
    assert 1 <= chosen <= rows
    assert fixed + chosen * row + min(chosen * logits, most) <= available
    if not wish:
        assert rows % chosen == 0
        assert not any(rows % more == 0 and more <= found.rows() for more in range(chosen + 1, rows + 1))


def test_the_fixed_part_is_counted() -> None:
    model = sessions.fresh_model()
    weights = sum(weight.numel() for weight in model.parameters())
    on_cpu = estimate(model, 32, CPU, recompute=False)
    assert weights * 16 <= on_cpu.fixed <= weights * 20  # weight, gradient and two moments, in float32
    assert (on_cpu.row * 8, on_cpu.logits * 8) == (
        (longer := estimate(model, 256, CPU, recompute=False)).row,
        longer.logits,
    )
    assert estimate(model, 32, CPU, recompute=True).row < on_cpu.row
    add_lora(model, LoraSettings(rank=2), seed=0)
    assert estimate(model, 32, CPU, recompute=False).fixed < on_cpu.fixed - weights * 12


def train_and_measure(file: Path, heads: bool, recompute: bool, rows: int) -> None:
    """Do two steps; write by how much memory has grown at most, and what was estimated."""
    length, vocabulary, device = 512, 8192, torch.device("cpu")
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=256, num_hidden_layers=6, intermediate_size=704, vocab_size=vocabulary, num_attention_heads=4, tie_word_embeddings=True
    ))  # fmt: skip
    if heads:
        model.mtp = MtpHeads.for_model(model.requires_grad_(False), depth=2)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 - 4 * sum(
        w.numel() for w in model.parameters()
    )
    tokens = torch.randint(1, vocabulary, (rows, length))
    places = torch.arange(length).repeat(rows, 1)
    bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
    batch = Rows(tokens, tokens.roll(-1, 1), (places < length - 1).float(), places, bounds)
    source = SimpleNamespace(ahead=False, take=lambda *_: StepRows([batch], Counter({length: rows})), state=dict)
    settings = TrainSettings(tokens=1, micro=rows, recompute=recompute, device="cpu")
    training = Session(
        model, settings, source, length, rows, World(), file.parent / "none", lambda _: 1.0, Guard(settings.guard), print,
        partial(MultiToken, beta=0.6) if heads else NextToken,
    )  # fmt: skip
    list(training.steps(2))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    file.write_text(f"{grown} {estimate(model, length, device, recompute=recompute).needed(rows)}")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux")
@pytest.mark.parametrize(("heads", "recompute", "rows"), [(False, False, 6), (False, True, 6), (True, False, 4)])
def test_the_estimate_is_near_the_peak_on_a_cpu(tmp_path: Path, heads: bool, recompute: bool, rows: int) -> None:
    assert sessions.processes(train_and_measure, (tmp_path / "peak", heads, recompute, rows)) == [0]
    peak, estimated = map(int, (tmp_path / "peak").read_text().split())
    assert estimated == pytest.approx(peak, rel=0.3)


def test_heads_of_a_small_model_fit_where_a_few_hundred_megabytes_are_free() -> None:
    """It was refused: about 3.3 GB would be needed for a row of 1,024 tokens."""
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=256, num_hidden_layers=4, intermediate_size=704, vocab_size=3072, num_attention_heads=4
    ))  # fmt: skip
    model.mtp = MtpHeads.for_model(model.requires_grad_(False), depth=2)
    assert estimate(model, 1024, CPU, recompute=False).needed(1) < 400e6


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
