"""What fits, and what is said when it does not."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from etude.errors import UserError
from etude.models.mtp_heads import MtpHeads
from etude.training import memory, optimiser
from etude.training.batch import Rows, StepRows
from etude.training.distributed import World
from etude.training.loop import Guard
from etude.training.memory import Counts, Plan, Way, choose_micro, count, plan, remedy, settle
from etude.training.objectives.mtp import MultiToken
from etude.training.objectives.next_token import NextToken
from etude.training.session import Session, add_lora
from etude.training.settings import LoraSettings, OptimiserSettings, TrainSettings
from tests.training import sessions

CPU = torch.device("cpu")
GIGABYTE = 10**9
ON_CPU = Way(32, gpu=False)
ROOM_FOR_FIVE = Plan(ON_CPU, {"weights": GIGABYTE}, row=GIGABYTE, available=round(6.5 * GIGABYTE / memory.SHARE))


def test_as_many_rows_as_divide_the_batch_and_fit() -> None:
    assert ROOM_FOR_FIVE.rows() == 5
    assert choose_micro(0, 8, ROOM_FOR_FIVE) == 4
    assert choose_micro(0, 5, ROOM_FOR_FIVE) == 5
    assert choose_micro(0, 7, ROOM_FOR_FIVE) == 1
    assert choose_micro(3, 8, ROOM_FOR_FIVE) == 3  # a wish is a wish
    assert choose_micro(64, 4, ROOM_FOR_FIVE) == 4  # more would be padding


def test_what_does_not_fit_is_refused_with_a_setting_that_does() -> None:
    with pytest.raises(UserError) as caught:
        choose_micro(8, 16, ROOM_FOR_FIVE)
    assert str(caught.value) == (
        "micro = 8 rows will not fit: about 9.0 GB are needed and 6.5 GB may be used, 85% of what is there; set micro = 5, or recompute = true"
    )
    with pytest.raises(UserError, match=r"set micro = 5$"):
        choose_micro(8, 16, replace(ROOM_FOR_FIVE, way=replace(ON_CPU, recompute=True)))
    none = Plan(ON_CPU, {"weights": 8 * GIGABYTE}, row=GIGABYTE, available=8 * GIGABYTE)
    said = "not even one row of 32 tokens fits: about 9.0 GB are needed and 6.8 GB may be used, 85% of what is there; "
    with pytest.raises(UserError, match="^" + re.escape(f"{said}recompute = true would do (see `etude plan`)") + "$"):
        choose_micro(0, 16, none, "recompute = true")
    with pytest.raises(UserError, match="^" + re.escape(f"{said}take a smaller base")):
        choose_micro(0, 16, none)


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
    found = Plan(ON_CPU, {"weights": fixed}, row, available, logits, most)
    assume(found.rows() >= 1)
    try:
        chosen = choose_micro(wish, rows, found)
    except UserError as error:
        advised = re.search(r"set micro = (\d+)", str(error))
        assert advised
        chosen = choose_micro(int(advised[1]), rows, found)
    assert 1 <= chosen <= rows
    assert fixed + chosen * row + min(chosen * logits, most) <= available
    if not wish:
        assert rows % chosen == 0
        assert not any(rows % more == 0 and more <= found.rows() for more in range(chosen + 1, rows + 1))


def test_the_fixed_part_is_counted() -> None:
    model = sessions.fresh_model()
    weights = sum(weight.numel() for weight in model.parameters())
    on_cpu, longer = (plan(count(model), Way(length, gpu=False), GIGABYTE) for length in (32, 256))
    assert on_cpu.parts == {
        "weights": 4 * weights, "masters": 0, "gradients": 4 * weights, "optimiser states": 8 * weights
    }  # fmt: skip
    assert (on_cpu.row * 8, on_cpu.logits * 8) == (longer.row, longer.logits)
    assert plan(count(model), Way(32, gpu=False, recompute=True), GIGABYTE).row < on_cpu.row
    imagined = plan(count(model).with_lora(2), Way(32), GIGABYTE)
    add_lora(model, LoraSettings(rank=2), seed=0)
    adapters = sum(weight.numel() for name, weight in model.named_parameters() if "lora_" in name)
    assert imagined.parts == plan(count(model), Way(32), GIGABYTE).parts  # tried out without adding them
    assert imagined.parts == {
        "weights": 2 * (weights + adapters), "masters": 4 * adapters, "gradients": 6 * adapters, "optimiser states": 8 * adapters
    }  # fmt: skip


def test_of_several_ranks_each_has_a_shard_of_what_is_frozen() -> None:
    model = sessions.fresh_model()
    weights, bare = sum(weight.numel() for weight in model.parameters()), count(model)
    imagined = plan(bare.with_lora(2), Way(32, ranks=4), GIGABYTE)
    add_lora(model, LoraSettings(rank=2), seed=0)
    adapters, counted = 2 * bare.linear, count(model)
    assert imagined.parts == plan(counted, Way(32, ranks=4), GIGABYTE).parts
    assert counted.layer == bare.layer + adapters // 2  # of two layers
    assert imagined.parts == {
        "weights": 2 * (bare.outside + 2 * counted.layer), "masters": 4 * (adapters // 4) + 2 * (weights // 4),
        "gradients": 4 * (adapters // 4) + 6 * adapters, "optimiser states": 8 * (adapters // 4)
    }  # fmt: skip
    full = plan(bare, Way(32, ranks=4), GIGABYTE).parts
    assert full["masters"] == 4 * (weights // 4)
    assert full["gradients"] == 4 * (weights // 4) + 6 * (bare.outside + bare.layer)


def train_and_measure(heads: bool, recompute: bool, rows: int) -> tuple[int, int]:
    """Do two steps; return the most bytes that torch held at once, and what was estimated.

    What torch holds, not the process: that depends on how busy the machine is, by a third of it.
    """
    length, vocabulary = 512, 8192
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=256, num_hidden_layers=6, intermediate_size=704, vocab_size=vocabulary, num_attention_heads=4, tie_word_embeddings=True
    ))  # fmt: skip
    if heads:
        model.mtp = MtpHeads.for_model(model.requires_grad_(False), depth=2)
    tokens = torch.randint(1, vocabulary, (rows, length))
    places = torch.arange(length).repeat(rows, 1)
    bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
    batch = Rows(tokens, tokens.roll(-1, 1), (places < length - 1).float(), places, bounds)
    source = SimpleNamespace(ahead=False, take=lambda *_: StepRows([batch], Counter({length: rows})), state=dict)
    settings = TrainSettings(tokens=1, micro=rows, recompute=recompute, device="cpu")
    training = Session(
        model, settings, source, length, rows, World(), Path("none"), lambda _: 1.0, Guard(settings.guard), print,
        partial(MultiToken, beta=0.6) if heads else NextToken,
    )  # fmt: skip
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        list(training.steps(2))
    training.close()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [size for _, size in sorted((event.start_ns(), event.nbytes()) for event in events)]
    held = 4 * sum(weight.numel() for weight in model.parameters())
    return held + max(accumulate(changes)), training.plan.needed(rows)


@pytest.mark.parametrize(("heads", "recompute", "rows"), [(False, False, 6), (False, True, 6), (True, False, 4)])
def test_the_estimate_covers_what_a_step_holds_on_a_cpu_and_not_twice_that(
    heads: bool, recompute: bool, rows: int
) -> None:
    held, estimated = train_and_measure(heads, recompute, rows)
    assert held <= estimated <= 2 * held


def test_heads_of_a_small_model_fit_where_a_few_hundred_megabytes_are_free() -> None:
    """It was refused: about 3.3 GB would be needed for a row of 1,024 tokens."""
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=256, num_hidden_layers=4, intermediate_size=704, vocab_size=3072, num_attention_heads=4
    ))  # fmt: skip
    model.mtp = MtpHeads.for_model(model.requires_grad_(False), depth=2)
    assert plan(count(model), Way(1024, gpu=False), 10**12).needed(1) < 400e6


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="says what Linux says")
def test_files_in_the_cache_do_not_count_as_used() -> None:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    said = 1024 * int(lines["MemAvailable"].split()[0])
    assert memory.available_on(CPU, sessions.fresh_model()) == pytest.approx(said, rel=0.2)


def test_a_training_that_does_not_fit_is_refused_before_it_starts(tmp_path: Path) -> None:
    corpus = sessions.write_corpus(tmp_path / "corpus")
    model = sessions.fresh_model()
    free = plan(count(model), Way(sessions.LENGTH, gpu=False), memory.available_on(CPU, model))
    batch = 4 * free.available // free.row
    changes = {"batch": batch, "micro": batch, "tokens": batch * sessions.LENGTH}
    with (
        pytest.raises(UserError, match="rows will not fit"),
        sessions.session(corpus, tmp_path / "run", sessions.settings(**changes)),
    ):
        pass


BIG = Counts(
    weights=8 * 10**9, trained=8 * 10**9, layer=2 * 10**8, outside=10**9, layers=35, kept_layers=35, heads=0, hidden=4096,
    attention=5120, feed_forward=12288, experts=0, vocabulary=150_000, linear=3 * 10**6, cached=70_000,
)  # fmt: skip


def test_bytes_on_a_gpu_by_hand() -> None:
    parts = plan(BIG, Way(4096), 10**12).parts
    assert parts == {"weights": 16e9, "masters": 32e9, "gradients": 48e9, "optimiser states": 64e9}
    compact = plan(BIG, Way(4096, masters="none", states="8bit", reference="average"), 10**12).parts
    update = 4 * memory.UPDATE * optimiser.CHUNK
    assert compact == {
        "weights": 16e9, "masters": 0, "gradients": 16e9, "optimiser states": 16e9 + 0.25e9 + update, "frozen reference": 48e9
    }  # fmt: skip
    few = replace(BIG, trained=10**7)  # LoRA: other adapters, those exchanged for them, and the average
    assert plan(few, Way(4096, reference="average"), 10**12).parts["frozen reference"] == 4e7 + 4e7
    eight = plan(BIG, Way(4096, ranks=8), 10**12).parts
    assert eight == {
        "weights": 2 * (1e9 + 2 * 2e8), "masters": 4e9, "gradients": 4e9 + 6 * (1e9 + 2e8), "optimiser states": 8e9
    }  # fmt: skip


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        (300, ("float32", "float32")),
        (180, ("float32", "8bit")),
        (100, ("none", "8bit")),
        (50, ("none", "cpu")),
        (9, ("none", "cpu")),
    ],
)
def test_auto_takes_the_first_that_fits(there: int, chosen: tuple[str, str]) -> None:
    planned = settle(BIG, Way(4096, recompute=True), OptimiserSettings(), there * GIGABYTE)
    assert (planned.way.masters, planned.way.states) == chosen
    assert bool(planned.rows()) == (there > 9)
    asked = settle(BIG, Way(4096), OptimiserSettings(states="8bit", masters="float32"), 9 * GIGABYTE).way
    assert (asked.masters, asked.states) == ("float32", "8bit")
    plain = settle(BIG, Way(4096, gpu=False), OptimiserSettings(), 9 * GIGABYTE).way
    assert (plain.masters, plain.states) == ("float32", "float32")


@given(st.integers(1, 400), st.booleans(), st.sampled_from([1024, 4096, 32768]))
def test_what_would_make_it_fit_does(there: int, recompute: bool, length: int) -> None:
    way, available = Way(length, recompute=recompute), there * GIGABYTE
    words = remedy(BIG, way, available)
    if plan(BIG, way, available).rows() or not words:
        return
    changed = replace(way, recompute=recompute or "recompute" in words)
    if match := re.search(r'states = "(\w+)"', words):
        changed = replace(changed, states=match[1])
    if match := re.search(r'masters = "(\w+)"', words):
        changed = replace(changed, masters=match[1])
    if match := re.search(r"(\d+) ranks", words):
        changed = replace(changed, ranks=int(match[1]))
    if match := re.search(r"length = (\d+)", words):
        changed = replace(changed, length=int(match[1]))
    assert plan(BIG.with_lora(16) if "LoRA" in words else BIG, changed, available).rows() >= 1


def test_the_nearest_remedy_comes_first() -> None:
    assert remedy(BIG, Way(4096), 172 * GIGABYTE) == 'optimiser.states = "8bit"'
    assert remedy(BIG, Way(16384), 230 * GIGABYTE) == "recompute = true"
    assert remedy(BIG, Way(4096), 40 * GIGABYTE) == "recompute = true and LoRA ([….lora])"
    assert "ranks" in remedy(BIG, Way(4096), 40 * GIGABYTE, lora=False)
    assert remedy(BIG, Way(4096, ranks=2), 32 * GIGABYTE) == "recompute = true and LoRA ([….lora])"
    assert remedy(BIG, Way(4096), GIGABYTE) == ""
