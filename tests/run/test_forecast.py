"""Forecasts: curves whose truth is known, what must be refused, and the command on made-up runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import lsq_linear

from etude.lineage import environment
from etude.lineage.record import Compute, RecipeUse, Record
from etude.run import forecast
from etude.run.forecast import Curve, better, bits_curve, check, doubt, predict, share_curve, worth

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Etude

    Law = Callable[[Any], Any]

TOKENS = np.geomspace(1e5, 4e6, 12)
STEPS = np.arange(1.0, 21.0)


def power(limit: float, above: float, b: float) -> Law:
    """A law that is `above` its limit after the first 100,000 tokens."""
    return lambda n: limit + above * (n / 1e5) ** -b


def saturating(first: float, limit: float, tau: float) -> Law:
    return lambda n: limit - (limit - first) * np.exp(-n / tau)


def bits(law: Law, noise: float = 0.0, seed: int = 0, at: Any = TOKENS) -> Curve:
    error = noise * np.random.default_rng(seed).standard_normal(len(at))
    values: list[float] = (law(at) + error).tolist()
    return bits_curve(list(zip(at, values, strict=True)))


def shares(law: Law, episodes: int, seed: int = 0) -> Curve:
    solved = np.asarray(np.random.default_rng(seed).binomial(episodes, law(STEPS)) / episodes)
    return share_curve([(step, value, episodes) for step, value in zip(STEPS, solved, strict=True)])


def test_the_parameters_of_a_curve_without_noise_are_found() -> None:
    law = power(0.5, 0.2, 0.4)
    curve = bits(law)
    shapes = forecast._shapes(curve, curve.at)[0]
    best, first, limit = forecast._fit(curve, curve.values[None], 0)
    assert forecast.POWERS[best[0]] == pytest.approx(0.4, rel=0.06)  # the grid's step
    assert first[0] == pytest.approx(0.7, abs=1e-3)
    assert limit[0] == pytest.approx(0.5, abs=0.01)
    assert np.abs(shapes[best[0]] * first + (1 - shapes[best[0]]) * limit - curve.values).max() < 1e-3
    risen = saturating(0.2, 0.8, 6.0)
    exact = share_curve([(step, float(risen(step)), 10) for step in STEPS])
    best, first, limit = forecast._fit(exact, exact.values[None], 1)
    assert 19 / forecast.RATES[best[0]] == pytest.approx(6.0, rel=0.07)
    assert (first[0], limit[0]) == (pytest.approx(risen(1), abs=0.01), pytest.approx(0.8, abs=0.01))


@given(st.lists(st.floats(0, 1), min_size=6, max_size=15), st.booleans(), st.sampled_from([0, 1]))
@settings(deadline=None, max_examples=40)
def test_no_bounded_least_squares_is_nearer(values: list[float], of_bits: bool, family: int) -> None:
    """The oracle is scipy's solver, on every shape of the grid."""
    weights = np.linspace(0.5, 1.5, len(values))
    curve = Curve(np.arange(1.0, len(values) + 1), np.array(values), weights, of_bits)
    best, first, limit = forecast._fit(curve, curve.values[None], family)
    root = np.sqrt(weights)
    shapes = forecast._shapes(curve, curve.at)[family]

    def cost(shape: Any, p: float, q: float) -> float:
        return float(0.5 * ((root * (shape * p + (1 - shape) * q - curve.values)) ** 2).sum())

    found = cost(shapes[best[0]], first[0], limit[0])
    most = math.inf if of_bits else 1.0
    solved = [
        lsq_linear(root[:, None] * np.stack([shape, 1 - shape], 1), root * curve.values, (0, most), tol=1e-12).cost
        for shape in shapes[::6]
    ]
    assert found <= min(solved) + 1e-7
    assert 0 <= first[0] <= most
    assert 0 <= limit[0] <= most


def test_intervals_hold_the_truth_about_as_often_as_they_say_and_are_not_endless() -> None:
    rng, held, widths = np.random.default_rng(7), [], []
    for seed in range(40):
        law = power(rng.uniform(0.4, 0.6), rng.uniform(0.1, 0.3), rng.uniform(0.2, 0.8))
        found = predict([bits(law, 0.003, seed)], [1.2e7])
        held.append(found.low[0] <= law(1.2e7) + 0.003 * rng.standard_normal() <= found.high[0])
        widths.append(found.high[0] - found.low[0])
    assert np.mean(held) >= 0.9
    assert np.median(widths) < 0.1  # of curves that fall by 0.2
    held, widths = [], []
    for seed in range(40):
        risen = saturating(rng.uniform(0.1, 0.4), rng.uniform(0.6, 0.95), rng.uniform(3, 12))
        found = predict([shares(risen, 100, seed)], [40.0])
        held.append(found.low[0] <= rng.binomial(400, risen(40.0)) / 400 <= found.high[0])
        widths.append(found.high[0] - found.low[0])
    assert np.mean(held) >= 0.9
    assert np.median(widths) < 0.3


@given(st.floats(0.2, 1.0), st.floats(0.05, 0.5), st.floats(0.1, 1.5), st.integers(0, 99), st.integers(1, 4))
@settings(deadline=None, max_examples=25)
def test_farther_away_is_never_known_better(limit: float, above: float, b: float, seed: int, runs: int) -> None:
    curves = [bits(power(limit, above, b), 0.004, seed + run) for run in range(runs)]
    found = predict(curves, [4e6, 8e6, 16e6])
    assert all(np.diff(found.high - found.values) >= -1e-12)
    assert all((np.diff(found.values - found.low) >= -1e-12) | (found.low[1:] == 0))
    assert all(found.low <= found.values)
    assert all(found.values <= found.high)


def test_shares_stay_shares() -> None:
    found = predict([shares(saturating(0.1, 0.99, 8), 30)], [40.0, 80.0])
    assert found.low.min() >= 0
    assert found.high.max() <= 1
    assert 0 <= found.draws.min() <= found.draws.max() <= 1


def test_three_runs_that_differ_are_trusted_less_than_three_that_agree() -> None:
    alike = predict([bits(power(0.5, 0.2, 0.5), 0.001, seed) for seed in range(3)], [8e6])
    apart = predict([bits(power(limit, 0.2, 0.5), 0.001, 3) for limit in (0.45, 0.5, 0.55)], [8e6])
    assert apart.high[0] - apart.low[0] > 2 * (alike.high[0] - alike.low[0])
    assert apart.values[0] == pytest.approx(0.515, abs=0.02)


def test_runs_that_ended_early_are_left_out() -> None:
    long, short = bits(power(0.5, 0.2, 0.5)), bits(power(0.9, 0.2, 0.5), at=TOKENS / 4)
    assert predict([long, short], [8e6]).values == predict([long], [8e6]).values


def test_the_stability_gap_and_the_start_are_no_part_of_the_curve() -> None:
    points = [(0, 0.6), (1, 0.62), (2, 0.68), (4, 0.6), (8, 0.55), (16, 0.52), (32, 0.5), (32, 0.501)]
    curve = bits_curve(points)
    assert list(curve.at) == [2, 4, 8, 16, 32]
    assert curve.values[-1] == 0.501  # the weights as saved were measured last
    assert list(bits_curve([(1, 0.5), (2, 0.6), (4, 0.7)]).at) == [1, 2, 4]  # this one just rises


def test_what_cannot_be_told_is_refused() -> None:
    good = bits(power(0.5, 0.3, 0.5), 0.001)
    assert doubt([good], 8e6) == ""
    assert doubt([good.part(0.4)], 8e6) == "5 points are too few; 6 are needed"
    assert doubt([good], 17e6).endswith("is more than 4 times the 4,000,000 that was seen")
    assert "flat" in doubt([bits(lambda n: 0.5 + 0 * n, 0.01)], 8e6)
    assert "rises" in doubt([bits(lambda n: 0.5 + 0.1 * (n / 4e6), 0.002)], 8e6)
    assert "falls" in doubt([share_curve([(step, 0.9 - 0.03 * step, 50) for step in STEPS])], 30)
    bent = share_curve([(step, 0.2 if step < 14 else 0.8, 50) for step in STEPS])
    assert "was predicted from the first 60% of these curves where 0.800 came" in doubt([bent], 30)
    assert check([bent]).came == pytest.approx(0.8)


def test_what_a_bit_per_byte_was_worth() -> None:
    pairs = [(0.6, 0.3), (0.55, 0.4), (0.5, 0.5), (0.52, 0.46), (0.58, 0.34)]
    draws = worth(pairs)
    assert draws is not None
    assert np.median(draws) == pytest.approx(2.0, abs=0.01)
    assert worth(pairs[:3]) is None
    assert worth([(0.5, 0.1), (0.5, 0.2), (0.5, 0.3), (0.5, 0.4)]) is None


def test_better_only_where_the_draws_say_so() -> None:
    draws = np.random.default_rng(0).standard_normal(forecast.DRAWS)
    assert better({"cpt": draws, "rl": draws + 10}) == "rl"
    assert better({"cpt": draws, "rl": draws + 1}) == ""
    assert better({"cpt": draws}) == ""


RECIPE = """
name = "mine"
base = "sprout"
stages = ["cpt", "sft", "rl"]
[data]
length = 1024
[[data.source]]
name = "mine"
folder = "code"
[cpt]
tokens = 6_000_000
length = 1024
batch = 8
[sft]
code = "code"
length = 1024
[rl]
tasks = "tasks.jsonl"
length = 1024
steps = 30
"""


def stage(folder: Path, kind: str, rows: list[dict[str, Any]]) -> None:
    """Write a finished stage."""
    folder.mkdir(parents=True)
    Record(
        stage=kind, kind=kind, kind_version=1, fingerprint="0" * 64, parents=[], code=environment.code(), seeds={}, packages={},
        recipe=RecipeUse(hash="0", stage={}), hardware=environment.hardware(), started="", finished="", sessions=1,
        compute=Compute(tokens=0, model_flops=0, method="operations"),
    ).save(folder)  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_folder(folder: Path, seed: int = 0, tokens: float = 1.0) -> Path:
    """Write a run of cpt and rl whose curves are known."""
    at = tokens * TOKENS
    curve, solved = bits(power(0.5, 0.2, 0.5), 0.0005, seed, at), shares(saturating(0.2, 0.9, 8), 100, seed)
    rows: list[dict[str, Any]] = [{"key": "eval/00000000", "step": 0, "bits_per_byte": {"code": 0.8}}]
    for number, size in enumerate(np.diff(at, prepend=0), 1):
        rows.append({"key": f"train/{number:08d}", "loss": 1.0, "tokens": float(size)})
        value = float(curve.values[number - 1])
        rows.append({"key": f"eval/{number:08d}", "step": number, "bits_per_byte": {"code": value}})
        rows.append({"key": f"again/0002/train/{number:08d}", "loss": 1.0, "tokens": float(size)})
    stage(folder / "cpt", "cpt", rows)
    steps = [{"key": f"train/{int(step):08d}", "step": int(step), "solved": float(value), "reward": 0.5, "episodes": 100}
             for step, value in zip(solved.at, solved.values, strict=True)]  # fmt: skip
    stage(folder / "rl", "rl", steps)
    return folder


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("mine.toml").write_text(RECIPE)
    return Path("mine.toml")


def test_the_command_tells_what_comes_and_what_it_cannot_tell(etude: Etude, recipe: Path) -> None:
    runs = [word for seed in range(3) for word in ("--from", run_folder(Path(f"run{seed}"), seed))]
    said = etude("plan", recipe, *runs)
    assert (said.code, said.err) == (0, "")
    table = said.out.partition("gain an hour")[2].splitlines()
    assert [line.split()[0] for line in table[1:3]] == ["cpt", "rl"]
    assert "sft: no curve of it in these runs" in said.out
    assert "which stage gives more for the next hour cannot be told" in said.out
    told = json.loads(etude("plan", recipe, *runs, "--json").out)
    cpt, rl = told["forecasts"]
    value, low, high = cpt["at_budget"]
    assert low <= power(0.5, 0.2, 0.5)(6e6) <= high  # `again/` rows are steps done twice, which taught nothing
    assert value == pytest.approx(power(0.5, 0.2, 0.5)(6e6), abs=0.01)
    assert cpt["last"] == pytest.approx(power(0.5, 0.2, 0.5)(4e6), abs=0.002)
    assert (cpt["runs"], cpt["unit"], rl["unit"]) == (3, "bits per byte", "share of tasks")
    assert rl["at_budget"][1] <= saturating(0.2, 0.9, 8)(30) <= rl["at_budget"][2]
    assert (cpt["hours"] > 0, len(cpt["gain_an_hour"]), cpt["at_twice"][0] < value) == (True, 3, True)


def test_a_budget_too_far_away_is_said_in_its_place(etude: Etude, recipe: Path) -> None:
    run = run_folder(Path("run"))
    said = etude("plan", recipe, "--from", run, "--set", "cpt.tokens=9_000_000")
    assert "cpt, code: no forecast for 18M: 18,000,000 is more than 4 times the 4,000,000 that was seen" in said.out
    assert "no forecast for 9M" not in said.out


def test_runs_of_different_length_say_what_cpt_was_worth(etude: Etude, recipe: Path) -> None:
    runs = [
        word
        for seed, size in enumerate((1.0, 0.8, 0.6, 0.55))
        for word in ("--from", run_folder(Path(f"run{seed}"), seed, size))
    ]
    said = etude("plan", recipe, *runs)
    assert "for the next hour, by solved: cpt by code and rl cannot be told apart" in said.out


def test_rubbish_is_one_line(etude: Etude, recipe: Path) -> None:
    def refused(*parts: str) -> None:
        said = etude("plan", recipe, "--from", "run")
        assert (said.code, said.out, len(said.err.splitlines())) == (2, "", 1), said.err
        assert all(part in said.err for part in parts), said.err

    refused("run is no run with a finished stage")
    metrics = run_folder(Path("run")) / "cpt" / "metrics.jsonl"
    whole = metrics.read_text()
    for rubbish in (
        '{"key": "train/1", "to\n',
        "[1]\n",
        '{"key": 3}\n',
        '{"key": "train/x", "solved": 1, "episodes": 2}\n',
        '{"key"',
    ):
        metrics.write_text(whole + rubbish)
        refused("run/cpt/metrics.jsonl, line 38: no row as stages write it")
    metrics.unlink()
    refused("run/cpt/metrics.jsonl does not exist")
    (Path("run") / "cpt" / "record.json").write_text("{}")
    refused("record.json")
