"""`etude plan`: shapes that people use, counted and added up by hand, from a config alone; and what is said when it does not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from etude.errors import UserError
from etude.models.shape import on_meta
from etude.recipe.recipe import load_recipe
from etude.rl.division import CONTEXTS, ENGINE_WORK, LEAST, divide
from etude.rl.settings import RlSettings
from etude.run.plan import gpus, machine, plan_recipe
from etude.run.runner import stage_settings
from etude.training import memory

if TYPE_CHECKING:
    from tests.conftest import Etude

SHAPES = Path(__file__).parent / "shapes"
PARAMETERS = {  # as their publishers count them; of Gemma 3 the text model
    "qwen3-8b": 8_190_735_360, "qwen3-30b-a3b": 30_532_122_624, "gpt-oss-20b": 20_914_757_184, "gemma-3-12b": 11_766_034_176,
    "smollm2-135m": 134_515_008,
}  # fmt: skip
KV_NUMBERS = {  # keys and values × layers × key-value heads × width of a head
    "qwen3-8b": 2 * 36 * 8 * 128, "qwen3-30b-a3b": 2 * 48 * 4 * 128, "gpt-oss-20b": 2 * 24 * 8 * 64, "gemma-3-12b": 2 * 48 * 8 * 256,
    "smollm2-135m": 2 * 30 * 3 * 64,
}  # fmt: skip


def base(folder: Path, name: str) -> Path:
    """Make a folder that holds a config and nothing else."""
    folder.mkdir(exist_ok=True)
    shutil.copyfile(SHAPES / f"{name}.json", folder / "config.json")
    return folder


def recipe_file(tmp_path: Path, name: str, stages: str) -> Path:
    file = tmp_path / "recipe.toml"
    named = [line[1:-1] for line in stages.splitlines() if line.startswith("[") and "." not in line]
    corpus = '[data]\nlength = 4096\n[[data.source]]\nname = "x"\nfolder = "."\ndomain = "code"\n'
    file.write_text(
        f'name = "big"\nbase = "{base(tmp_path / "base", name)}"\nstages = {json.dumps(named)}\n{corpus}{stages}'
    )
    return file


def planned(tmp_path: Path, name: str, stages: str, on: str = "h200") -> Any:
    return plan_recipe(load_recipe([recipe_file(tmp_path, name, stages)], [], stage_settings()), machine(on))


@pytest.mark.parametrize("name", PARAMETERS)
def test_shapes_are_counted_exactly(tmp_path: Path, name: str) -> None:
    config = AutoConfig.from_pretrained(base(tmp_path, name))
    counts = memory.count(on_meta(config))
    assert counts.weights == counts.trained == PARAMETERS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = model.lm_head.weight.numel() if config.tie_word_embeddings else 0
    assert counts.weights == sum(weight.numel() for _, weight in model.named_parameters(remove_duplicate=False)) - tied
    assert counts.cached == KV_NUMBERS[name]
    assert counts.outside + sum(
        weight.numel() for name, weight in model.named_parameters() if ".layers." in name
    ) == counts.weights  # fmt: skip
    parts = memory.plan(counts, memory.Way(4096), 10**12).parts
    assert sum(parts.values()) == (2 + 4 + 6 + 8) * PARAMETERS[name]  # bf16, masters, both gradients, two moments


CPT = "[cpt]\ntokens = 1_000_000_000\nbatch = 16\n"


def test_qwen3_8b_is_trained_whole_on_one_h200_with_8_bits(tmp_path: Path) -> None:
    """It was refused: a float32 copy was counted that need not exist."""
    (stage,) = planned(tmp_path, "qwen3-8b", f"{CPT}recompute = true\n")
    assert (stage.plan.way.masters, stage.plan.way.states) == ("float32", "8bit")
    assert stage.micro >= 1
    assert stage.plan.needed(stage.micro) <= memory.SHARE * stage.plan.available
    flops = 6 * (8_190_735_360 - 151936 * 4096) + 3 * 36 * 2 * 32 * 256 * 4097 / 2  # of a token; causal attention
    assert stage.rate == pytest.approx(3 / 4 * 0.53 * 989e12 / flops, rel=1e-6)  # activations are computed twice
    assert "by arithmetic with recompute" in stage.source
    assert stage.hours == pytest.approx(1e9 / stage.rate / 3600)


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("file", sorted(RESULTS.glob("large_models-train-*-h200.json")), ids=lambda file: file.stem)
def test_the_plan_is_within_a_twentieth_of_the_peaks_that_were_measured_on_a_gpu(tmp_path: Path, file: Path) -> None:
    said = json.loads(file.read_text())
    for row in said["rows"]:
        counts = memory.count(on_meta(AutoConfig.from_pretrained(base(tmp_path, row["shape"]))))
        counts = counts.with_lora(16) if row["work"] == "lora" else counts
        recompute, ways = "--recompute" in said["command"], {key: row[key] for key in ("masters", "states")}
        planned = memory.plan(counts, memory.Way(row["length"], recompute=recompute, **ways), 10**12).needed(
            row["micro"]
        )
        assert planned / 1e9 == pytest.approx(row["peak_gb"], rel=0.05)


@pytest.mark.parametrize("file", sorted(RESULTS.glob("large_stages-*-h200.json")), ids=lambda file: file.stem)
def test_the_plan_of_rl_is_within_a_twentieth_of_the_peaks_too(tmp_path: Path, file: Path) -> None:
    about, *stages = json.loads(file.read_text())["rows"]
    config = AutoConfig.from_pretrained(base(tmp_path, about["shape"]))
    config.num_hidden_layers = about["layers"]
    way = memory.Way(2048, recompute=True, reference="start")  # as benchmarks/large_stages.py has it, four rows at once
    planned = memory.plan(memory.count(on_meta(config)).with_lora(16), way, 10**12).needed(4)
    (peak,) = [row["peak_gb"] for row in stages if row["stage"] == "rl"]
    assert planned / 1e9 == pytest.approx(peak, rel=0.05)


def test_measured_peaks_are_there() -> None:
    assert len(list(RESULTS.glob("large_models-train-*-h200.json"))) >= 3
    assert len(list(RESULTS.glob("large_stages-*-h200.json"))) >= 2


def test_hours_of_heads_are_those_of_a_frozen_trunk_and_of_what_learns(tmp_path: Path) -> None:
    (stage,) = planned(tmp_path, "smollm2-135m", "[mtp]\ntokens = 16_023_552\nlength = 2048\ndepth = 3\nbatch = 16\n")
    assert stage.hours == pytest.approx(16_023_552 / 240_312 / 3600, rel=0.1)  # measured: mtp-h200.json
    assert stage.hours == pytest.approx(16_023_552 / stage.rate / 3600)


def test_hours_of_rl_are_those_of_rollouts_of_full_length(tmp_path: Path) -> None:
    rl = '[rl]\ntasks = "none.jsonl"\nlength = 8192\nsteps = 10\ngroups = 4\ngroup_size = 4\n[rl.lora]\n'
    (stage,) = planned(tmp_path, "qwen3-8b", rl)
    assert stage.tokens == 10 * 16 * 8192
    weights, cached = 2 * PARAMETERS["qwen3-8b"], 2 * KV_NUMBERS["qwen3-8b"] * 8192 / 2  # bytes; a cache half full
    sampled = 0.65 * 16 * 4.8e12 / (weights + 16 * cached)
    flops = 6 * (PARAMETERS["qwen3-8b"] - 151936 * 4096) + 3 * 36 * 2 * 32 * 256 * 8193 / 2
    trained = 0.76 * 989e12 / flops
    assert 1 / stage.rate == pytest.approx(1 / sampled + 1 / trained, rel=0.01)
    (mixture,) = planned(tmp_path, "qwen3-30b-a3b", rl)
    touched = 1 - (1 - 8 / 128) ** 16
    routed = 48 * 128 * 3 * 2048 * 768
    moved = 2 * (PARAMETERS["qwen3-30b-a3b"] - routed + routed * touched) + 16 * 2 * KV_NUMBERS["qwen3-30b-a3b"] * 4096
    assert 1 / mixture.rate > 1 / (0.48 * 16 * 4.8e12 / moved)
    assert "at most" in mixture.source


def test_what_does_not_fit_is_told_with_what_would(tmp_path: Path) -> None:
    (whole,) = planned(tmp_path, "qwen3-30b-a3b", CPT)
    assert whole.micro == 0
    assert whole.remedy == "recompute = true"
    (kept_elsewhere,) = planned(tmp_path, "qwen3-30b-a3b", f"{CPT}recompute = true\n")
    assert kept_elsewhere.plan.way.states == "cpu"
    assert kept_elsewhere.plan.main_memory == 8 * PARAMETERS["qwen3-30b-a3b"]
    (small,) = planned(tmp_path, "qwen3-30b-a3b", CPT, "h100")
    assert "LoRA" in small.remedy
    (adapters,) = planned(tmp_path, "qwen3-30b-a3b", f"{CPT}recompute = true\n[cpt.lora]\n")
    assert adapters.micro >= 1
    (eight,) = planned(tmp_path, "qwen3-30b-a3b", f"{CPT}recompute = true\n", "8xh200")
    assert eight.micro >= 1
    assert eight.plan.way.ranks == 8
    (two,) = planned(tmp_path, "qwen3-8b", f"{CPT}[cpt.lora]\n", "2xh200")
    assert (two.micro >= 1, two.plan.way.ranks, two.remedy) == (True, 2, "")
    (many,) = planned(tmp_path, "smollm2-135m", CPT + "micro = 16\n", "rtx4090")
    assert many.remedy == f"micro = {many.plan.rows()}"


def test_the_command_needs_no_weights_and_no_gpu(etude: Etude, tmp_path: Path) -> None:
    file = recipe_file(tmp_path, "qwen3-8b", f'{CPT}[rl]\ntasks = "none.jsonl"\nlength = 8192\n[rl.lora]\n')
    out = etude("plan", str(file), "--on", "8xH200", "--set", "cpt.recompute=true").out
    assert "cpt on 8xH200, each of 8 ranks: rows of 4,096 tokens, masters float32, states float32" in out
    assert "several ranks not measured" in out
    assert "KV cache" in out
    tight = etude("plan", str(file), "--on", "rtx5090", "--json")
    told = json.loads(tight.out)
    assert tight.code == 2
    assert f"cpt does not fit on rtx5090: {told['stages'][0]['remedy']} would do" in tight.err
    assert [stage["stage"] for stage in told["stages"]] == ["cpt", "rl"]
    assert not told["stages"][0]["fits"]
    assert told["stages"][0]["remedy"]
    assert told["stages"][1]["parts"]["weights"] == 2 * (PARAMETERS["qwen3-8b"] + 16 * 2_727_936)
    for wrong, why in (
        ("9xH20", "or several as 8xh200; did you mean 'h200'"),
        ("0xh200", "is no machine known here"),
    ):
        refused = etude("plan", str(file), "--on", wrong)
        assert refused.code == 2
        assert why in refused.err


def test_a_base_without_a_config_is_refused(tmp_path: Path) -> None:
    file = recipe_file(tmp_path, "qwen3-8b", CPT)
    (tmp_path / "base" / "config.json").unlink()
    with pytest.raises(UserError, match=r"has no config\.json, which a plan needs"):
        plan_recipe(load_recipe([file], [], stage_settings()), machine("h200"))


def test_every_rate_has_its_source() -> None:
    for name, facts in gpus().items():
        assert {"bf16_tflops", "bandwidth_tbs", "memory_gb"} <= facts.keys()
        assert ("measured" in facts) == (name == "h200")
    assert all(rate["source"] and 0 < rate["mfu"] < 1 for rate in gpus()["h200"]["measured"])
    assert "not measured on b200: as on h200" in machine("b200").share("train", 10**9)[1]


def test_engine_and_trainer_divide_a_gpu(tmp_path: Path) -> None:
    counts = memory.count(on_meta(AutoConfig.from_pretrained(base(tmp_path, "qwen3-8b"))))
    settings = RlSettings(tasks="x", length=8192, lora={"rank": 16}, groups=4, group_size=8)  # type: ignore[arg-type]
    way, total, rollout = memory.Way(8192, recompute=True), int(149.2e9), 2 * counts.cached * 8192
    plan, rows, cache = divide(counts.with_lora(16), way, settings, total)
    beside = cache + 2 * counts.with_lora(16).weights + ENGINE_WORK + CONTEXTS
    assert cache == settings.at_once * rollout  # all of them fit
    assert rows == 4
    assert plan.rows() >= rows
    assert plan.available + beside == pytest.approx(total, abs=2)
    more = settings.model_copy(update={"groups": 64})
    plan, rows, cache = divide(counts.with_lora(16), way, more, total)
    assert LEAST * rollout <= cache < more.at_once * rollout
    assert plan.rows() >= rows >= 1
    given = settings.model_copy(update={"engine_memory": 10.0})
    assert divide(counts.with_lora(16), way, given, total)[2] == 10**10
    for own in (1, 2):  # of an engine of its own: neither gives up anything for the other
        plan, _, cache = divide(
            counts.with_lora(16), way, settings.model_copy(update={"groups": 10_000}), total, apart=own
        )
        assert plan.available == int(total - CONTEXTS)
        assert cache == int(own * (total - CONTEXTS - ENGINE_WORK) - 2 * counts.with_lora(16).weights)
    elsewhere = settings.model_copy(update={"engine": "http://x"})
    plan, _, cache = divide(counts.with_lora(16), way, elsewhere, total)
    assert (plan.available, cache) == (int(total - CONTEXTS), 0)


RL = '[rl]\ntasks = "x.jsonl"\nlength = 8192\nrecompute = true\n[rl.lora]\n'
TABLE = "[cluster]\ntrainer = { gpus = 4 }\nengines = { count = 3, gpus = 1 }\n"


def test_a_cluster_is_planned_as_its_table_places_it(tmp_path: Path) -> None:
    """Four ranks and three engines on GPUs of their own, unless --on says how many GPUs one machine has."""
    file = recipe_file(tmp_path, "qwen3-8b", CPT + RL)
    file.write_text(file.read_text() + TABLE)
    recipe = load_recipe([file], [], stage_settings())
    (cpt, rl), (_, alone), (many, _) = (plan_recipe(recipe, machine(on)) for on in ("h200", "1xh200", "2xh200"))
    assert (cpt.plan.way.ranks, rl.plan.way.ranks, many.plan.way.ranks) == (4, 4, 2)
    assert (rl.apart, alone.apart) == (True, False)
    assert rl.plan.available > alone.plan.available + alone.engine
    assert rl.rate > 2 * alone.rate
    assert rl.micro
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    large = {
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    }  # as Qwen2.5-72B
    (tmp_path / "base" / "config.json").write_text(json.dumps(config | large))
    text = file.read_text()
    for own, fits in ((1, False), (2, True)):
        file.write_text(text.replace("count = 3, gpus = 1", f'count = 3, gpus = {own}, kind = "vllm", python = "x"'))
        _, rl = plan_recipe(load_recipe([file], ["cluster.trainer.gpus=64"], stage_settings()), machine("h200"))
        assert (bool(rl.micro), "an engine of more GPUs" in rl.remedy) == (fits, not fits)


@pytest.mark.parametrize("name", PARAMETERS)
def test_heads_of_every_shape_are_planned(tmp_path: Path, name: str) -> None:
    (stage,) = planned(tmp_path, name, "[mtp]\ntokens = 1_000_000\n")
    assert stage.micro > 0
    assert 0 < stage.plan.parts["optimiser states"] < stage.plan.parts["weights"]
