"""The end of a run on the terminal: cells from records, a curve to the character, the tree, and commands that fit the run."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from etude.bench.statistics import estimate
from etude.lineage.record import FileDigest, Lineage, Parent, Record
from etude.report.ending import (
    BLOCKS,
    Ended,
    Measure,
    curve,
    did,
    footnote,
    measures,
    next_steps,
    screen,
    took,
    tree,
    verdict,
)
from etude.rl.view import percent
from tests import tiny
from tests.conftest import Etude
from tests.lineage.records import child_of, full_record

RUST = {"domain": "rust", "before": 1.3055, "after": 1.2049, "change": -0.1006, "margin": 0.028, "tokens": 4092}
CODE = {"domain": "code", "before": 0.7192, "after": 0.7424, "change": 0.0232, "margin": 0.0034, "tokens": 4092}
HAZY = {"domain": "prose", "before": 0.9, "after": 0.89, "change": -0.01, "margin": 0.02, "tokens": 9}
SHORT = {"domain": "one row", "before": 0.9, "after": 0.8, "change": -0.1, "margin": None, "tokens": 9}
SOLVED = {"solved": 0.25, "solved_low": 0.12, "solved_high": 0.42, "valid_calls": 0.9, "trials": 24}
TRIALS = [(f"package{at % 4}", f"task{at}", float(at < 6)) for at in range(24)]
REWARDS = [(step, step / 10, 8) for step in range(1, 41)]
RL = {"steps": 40, "episodes": 1920, "reward_first": 0.1, "reward_last": 0.9, "solved_first": 0.2, "solved_last": 0.05}
RELEASE = {"base": "sprout", "verified": "11 of 12 checks, 1 open", "licences": "Apache-2.0, MIT"}


def ended(kind: str, summary: dict[str, Any] | None = None, results: Any = None, **changes: Any) -> Ended:
    fields: dict[str, Any] = {"stage": kind, "kind": kind, "parents": [], "origin": None, "summary": summary or {}}
    rewards, trials = changes.pop("rewards", ()), changes.pop("trials", TRIALS * (kind == "bench"))
    return Ended(full_record(**fields | changes), results, rewards, trials)


def test_bits_per_byte_are_better_or_worse_only_beyond_their_interval() -> None:
    found = measures(ended("cpt", results={"domains": [RUST, CODE, HAZY, SHORT]}))
    assert found == [
        Measure("rust", "1.306 → 1.205", "-0.101 ±0.028", "better"),
        Measure("code", "0.719 → 0.742", "+0.023 ±0.003", "worse"),
        Measure("prose", "0.900 → 0.890", "-0.010 ±0.020", "unclear"),
        Measure("one row", "0.900 → 0.800", "-0.100", "lower"),
    ]


def test_many_measures_are_counted_not_dropped() -> None:
    found = measures(ended("sft", results={"domains": [{**RUST, "domain": f"d{n}"} for n in range(7)]}))
    assert [each.what for each in found] == ["d0", "d1", "d2", "d3", "d4", "2 more"]


def test_mtp_heads_are_measured_by_acceptance_rate_and_speed() -> None:
    accepted = [{"domain": "rust", "depth": depth, "before": 0.05, "after": 0.35 / depth} for depth in (1, 2)]
    speed = {"plain": 100.0, "guessing": 80.0, "kept": 0.2, "tokens_a_round": 1.4}
    assert measures(ended("mtp", results={"domains": [], "acceptance": accepted, "speed": speed})) == [
        Measure("accepted, rust", "5% → 35%", "+30 points", "higher"),
        Measure("tokens/step", "1 → 1.40", "0.80× speed", "slower"),
    ]


def test_a_longer_context_is_told_by_what_is_found_in_it() -> None:
    long = {
        "parent": {"retrieval": {"8192": {"exact": 0.1, "interval": [0.02, 0.3]}}},
        "child": {"retrieval": {"8192": {"exact": 0.8, "interval": [0.6, 0.9]}}},
    }
    found = measures(ended("extend", results={"domains": [], "long": long}))
    assert found == [Measure("found at 8.19k", "10% → 80%", "+70 (60–90%)", "better")]


def test_what_was_not_measured_is_said_to_be_so() -> None:
    assert measures(ended("sft", results={"domains": []})) == [Measure("not measured", "none held out")]
    assert measures(ended("merge", {"method": "linear", "models": "a, b"})) == [Measure("not measured", "")]
    none = {"solved": None, "solved_low": None, "solved_high": None, "trials": 0}
    assert measures(ended("bench", none)) == [Measure("not measured", "no valid trial")]


def test_a_drop_in_rl_is_shown_as_a_drop() -> None:
    assert measures(ended("rl", RL)) == [
        Measure("reward", "0.100 → 0.900", "+0.800", "higher"),
        Measure("solved", "20% → 5%", "-15 points", "lower"),
    ]


def test_too_few_episodes_make_no_headline() -> None:
    none = dict.fromkeys(["reward_first", "reward_last", "solved_first", "solved_last"])
    assert measures(ended("rl", RL | none)) == [
        Measure(name, "not measured", "too few episodes") for name in ("reward", "solved")
    ]


def test_shares_of_tasks_that_a_recipe_picked_are_marked() -> None:
    stage = ended("rl", RL)
    stage.record.recipe.stage["only"] = "calc-1 calc-2"
    assert [each.what for each in measures(stage)] == ["reward", "solved *"]
    assert "*: only of the tasks that the recipe picked (`only`), not of the whole set" in footnote([stage])
    assert "picked" not in footnote([ended("rl", RL)])


@pytest.mark.parametrize(("passes", "told"), [(17, "better"), (7, "unclear"), (6, "unclear"), (0, "worse")])
def test_a_benchmark_stands_against_the_one_before_it_task_by_task(passes: int, told: str) -> None:
    first = ended("bench", SOLVED, stage="solve")
    trials = [(package, task, float(at < passes)) for at, (package, task, _) in enumerate(TRIALS)]
    last = ended("bench", SOLVED | {"solved": passes / 24}, trials=trials)
    assert measures(first, [ended("sft")])[0] == Measure("solved", "25%", "(12–42%)")
    found = measures(last, [first, ended("rl", RL)])
    gain = estimate(trials, against=TRIALS)
    assert gain
    change = f"{100 * gain.value:+.0f} [{100 * gain.low:.0f}, {100 * gain.high:.0f}]"
    assert found[0] == Measure("solved", f"25% → {percent(passes / 24)}", change, told)
    assert found[1] == Measure("valid calls", "90% → 90%", "+0 points", "level")


def test_a_gain_on_every_task_is_clear_though_the_rates_intervals_overlap() -> None:
    """Two of ten packages are easy and eight are hard, for both models: in pairs that does not count."""
    before = [(f"package{at % 10}", f"task{at}", float(at % 10 < 2)) for at in range(100)]
    after = [
        (package, task, max(passed, float(at % 10 < 2 or at // 10 < 3)))
        for at, (package, task, passed) in enumerate(before)
    ]
    old, new = estimate(before), estimate(after)
    assert old
    assert new
    assert new.low < old.high
    told = {"solved": new.value, "solved_low": new.low, "solved_high": new.high}
    found = measures(ended("bench", SOLVED | told, trials=after), [ended("bench", SOLVED, trials=before)])
    assert found[0].verdict == "better"


def test_benchmarks_that_ask_otherwise_are_not_held_against_each_other() -> None:
    settings = full_record().recipe
    other = settings.model_copy(update={"stage": {"steps": 11}})
    alone = Measure("solved", "25%", "(12–42%)")
    assert measures(ended("bench", SOLVED, recipe=other), [ended("bench", SOLVED)])[0] == alone
    named = settings.model_copy(update={"stage": settings.stage | {"against": ["noop"], "tasks": "elsewhere.jsonl"}})
    rival = SOLVED | {"invalid": 2, "solved/noop": 0.0, "trials/noop": 24}
    found = measures(ended("bench", rival, recipe=named), [ended("bench", SOLVED)])
    assert found[0].value == "25% → 25%"
    assert found[2:] == [Measure("left out", "2 invalid"), Measure("noop", "0% solved")]


def test_reports_have_a_cell_each() -> None:
    best = {"best": "smollm2-135m", "bits_per_byte": 0.91, "candidates": 3}
    assert measures(ended("compare", best)) == [Measure("best", "smollm2-135m", "0.910 bits/byte")]
    assert measures(ended("release", RELEASE)) == [
        Measure("audit: from", "sprout"), Measure("checks", "11 of 12", "1 open"),
    ]  # fmt: skip
    assert measures(ended("data", {"tokens": 9, "heldout_tokens": 45437})) == [Measure("held out", "45.4k tokens")]


def test_what_was_done_and_for_how_long() -> None:
    assert did(ended("cpt", {"tokens": 120_000}).record) == "learnt a domain\n120k tokens"
    assert did(ended("rl", RL).record) == "learnt by trying\n1,920 episodes"
    assert did(ended("base", {"base": "sprout"}).record) == "from sprout"
    assert did(ended("bench", SOLVED).record) == "tried tasks\n24 trials"
    assert did(ended("release", RELEASE).record) == "signed release\nApache-2.0, MIT"
    assert did(ended("scale").record) == "scale"
    for end, told in {"03:07:39": "99 s", "03:12:00": "6 min", "06:06:00": "3.0 h"}.items():
        assert took(ended("cpt", finished=f"2026-11-15T{end}+00:00").record) == f"\n{told}"
    # Interrupted: what lies between the sessions is nobody's work.
    assert took(ended("cpt", finished="2026-11-16T03:06:00+00:00", sessions=2).record) == "\n61 s"
    assert not took(ended("base").record)


@given(st.floats(-9, 9), st.floats(0, 9), st.booleans())
def test_a_verdict_turns_round_with_the_direction(change: float, margin: float, lower: bool) -> None:
    words = {"better": "worse", "worse": "better", "unclear": "unclear"}
    said = verdict(change, margin, lower_is_better=lower)
    assert verdict(change, margin, lower_is_better=not lower) == words[said]
    assert (said == "unclear") == (-margin <= change <= margin)


def test_a_small_curve_to_the_character() -> None:
    assert curve([0.0, 0.25, 1.0], 1, 3, wide=7, high=2) == [
        "1.000 ┤    ██",
        "0.000 ┤▁▁▅▅██",
        "      └──────",
        "       1    3",
    ]
    assert curve([1.0, 0.25, 0.0, -1.0], 7, 10, wide=4, high=3) == [
        " 1.000 ┤█",
        "       │█▇▅",
        "-1.000 ┤███▁",
        "       └────",
        "        7 10",
    ]


def test_a_curve_that_does_not_move_lies_low_and_has_one_label() -> None:
    assert curve([0.5, 0.5], 1, 2, wide=2, high=2) == ["      │", "0.500 ┤▁▁", "      └──", "       12"]
    assert curve([0.5], 4, 4, wide=2, high=2)[-1] == "       4"


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=200), st.integers(8, 70), st.integers(2, 9))
def test_heights_of_columns_follow_the_means_of_what_they_stand_for(values: list[float], wide: int, high: int) -> None:
    *drawn, axis, _ = curve(values, 1, len(values), wide, high)
    start, columns = axis.index("└") + 1, axis.count("─")
    assert wide / 2 < columns <= wide
    assert len(drawn) == high
    heights = [sum(BLOCKS.index(line[start + x : start + x + 1] or " ") for line in drawn) for x in range(columns)]
    size = len(values)
    means = [fmean(values[x * size // columns : max(x * size // columns + 1, (x + 1) * size // columns)])
             for x in range(columns)]  # fmt: skip
    low, top = min(means), max(means)
    for height, mean in zip(heights, means, strict=True):
        exact = 1 + (mean - low) / (top - low) * (8 * high - 1) if top > low else 1
        assert abs(height - exact) <= 0.5 + 1e-6


def family() -> tuple[Lineage, list[Record]]:
    """Return base, cpt with a teacher, and a merge of it with a model that carries no record."""
    base = child_of(None, "base")
    teacher = Parent(name="teacher-9b", role="teacher", record=None, model_digest="e" * 64)
    cpt = child_of(base, "cpt", teacher)
    other = Parent(name="other", role="weights", record=None, model_digest="a" * 64)
    merge = child_of(cpt, "merge", other)
    return Lineage.of(merge, [Lineage.of(cpt, [Lineage.of(base, [])])]), [base, cpt, merge]


def test_the_tree_begins_with_the_oldest_and_leaves_no_parent_out() -> None:
    assert tree(family()[0]) == [
        "tiny (base), MIT",
        "└─ cpt: 1.23M tokens from code + teacher-9b (teacher)",
        "   └─ merge: 1.23M tokens from code + other (weights)",
    ]


def chain(*kinds: str) -> list[Ended]:
    """Return stages of a quickstart with what each measures."""
    told: dict[str, tuple[Any, Any]] = {
        "base": ({"base": "sprout"}, None), "data": ({"tokens": 238_743, "heldout_tokens": 45_437}, None),
        "cpt": ({"tokens": 120_000}, {"domains": [CODE, RUST]}),
        "sft": ({"tokens": 80_000}, {"domains": [{**RUST, "domain": "chat answers"}, CODE, HAZY]}),
        "bench": (SOLVED, {"lines": []}), "rl": (RL, {"tasks": 24}), "release": (RELEASE, {"summary": RELEASE}),
    }  # fmt: skip
    heavy = {"model.safetensors": FileDigest(sha256="4" * 64, bytes=10)}
    return [
        ended(kind, *told[kind], stage=stage or kind, rewards=REWARDS * (kind == "rl"),
              weights=heavy if kind in {"base", "cpt", "sft", "rl"} else {})
        for kind, _, stage in (word.partition(":") for word in kinds)
    ]  # fmt: skip


QUICKSTART = ("base", "data", "cpt", "sft", "bench:solve", "rl", "bench", "release")


def rendered(stages: list[Ended], wide: int, encoding: str = "utf-8") -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    console = Console(file=file, width=wide)
    console.print(screen(stages, family()[0], wide=wide, plain=console.options.ascii_only))
    return [line.rstrip() for line in file.buffer.getvalue().decode(encoding).splitlines()]


def test_eighty_columns_are_enough_for_every_cell() -> None:
    lines = rendered(chain(*QUICKSTART), 80)
    assert max(map(len, lines)) <= 80
    assert len(lines) < 42  # with what to try next, a screen of fifty
    for row in (
        "base     from sprout",
        "cpt      learnt a domain   code          0.719 → 0.742   +0.023 ±0.003  worse",
        "6 min    120k tokens       rust          1.306 → 1.205   -0.101 ±0.028  better",
        "solve    tried tasks       solved        25%             (12–42%)",
        "rl       learnt by trying  reward        0.100 → 0.900   +0.800         higher",
        "bench    tried tasks       solved        25% → 25%       +0 [-14, 14]   unclear",
        "release  signed release    audit: from   sprout",
    ):
        assert row in lines
    assert "reward of rl by step, moving mean of 5 steps" in lines
    assert lines[-2:] == tree(family()[0])[-2:]


def test_rewards_that_never_moved_are_told_in_a_line() -> None:
    stages = [*chain("base"), ended("rl", RL, rewards=[(1, -0.25, 8), (2, -0.25, 8)])]
    assert "reward of rl: -0.250 at every step there was (2), so there is no curve" in rendered(stages, 80)


def test_a_terminal_without_unicode_gets_ascii() -> None:
    text = "\n".join(rendered(chain(*QUICKSTART), 80, "ascii"))
    assert "0.719 -> 0.742" in text
    assert "`- cpt" in text
    assert "#" in text


def test_footnotes_tell_only_of_what_is_in_the_table() -> None:
    assert "bits per byte" not in footnote(chain("base", "rl", "bench"))
    assert footnote(chain("base", "cpt", "sft")).startswith("code, rust, chat answers, prose: bits per byte")
    assert "tenth" not in footnote(chain("base", "cpt", "sft"))
    (bench,) = chain("bench")
    two, four = ([(f"package{at % number}", f"task{at}", 1.0) for at in range(8)] for number in (2, 4))
    notes = [footnote([replace(bench, trials=trials)]) for trials in (two, four)]
    assert ["two packages prove next to nothing" in note for note in notes] == [True, False]


def commands(*kinds: str, run: str = "runs/quickstart") -> list[str]:
    return [command for _, command in next_steps(Path(run), chain(*kinds))]


def test_what_to_try_next_fits_what_the_run_has_made() -> None:
    agent = 'etude agent "the tests fail; find out why" --model runs/quickstart/'
    assert commands(*QUICKSTART) == [
        f"{agent}rl", "etude verify runs/quickstart/release/release", "etude tasks make tasks.toml",
    ]  # fmt: skip
    assert commands("base", "sft", "rl")[1:] == [
        "etude tasks make tasks.toml", "etude lineage show runs/quickstart/rl --verify",
    ]  # fmt: skip
    assert commands("base", "data", "cpt", "cpt:more", run="my runs/a") == [
        "etude serve 'my runs/a/more'", "etude lineage show 'my runs/a/more' --verify",
        "etude compare sprout 'my runs/a/more'/model --on .",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tasks", "told"), [("recipes/tasks/quick.jsonl", True), ("…/bench.jsonl", True), ("tasks.jsonl", False)]
)
def test_who_has_tasks_of_their_own_is_not_told_to_make_some(tasks: str, told: bool) -> None:
    recipe = full_record().recipe.model_copy(update={"stage": {"tasks": tasks}})
    steps = next_steps(Path("run"), [*chain("base", "sft"), ended("bench", recipe=recipe)])
    assert ("etude tasks make tasks.toml" in [command for _, command in steps]) is told


@pytest.mark.parametrize("settings", [{"tools": {"tools": ["bash"]}}, {"demos": {"tools": ["bash"]}}])
def test_an_agent_that_learnt_bash_alone_is_asked_with_bash_alone(settings: dict[str, Any]) -> None:
    recipe = full_record().recipe.model_copy(update={"stage": settings})
    steps = next_steps(Path("run"), [*chain("base"), ended("sft", {}, recipe=recipe)])
    assert steps[0][1].endswith("--model run/sft --tools bash")


def test_a_run_of_two_stages_ends_with_the_screen_and_one_of_one_stage_does_not(
    etude: Etude, tmp_path: Path, tiny_base: Path
) -> None:
    others = [tiny.save_model(tmp_path / f"other{seed}", seed=seed) for seed in (1, 2)]
    recipe, run = tmp_path / "r.toml", tmp_path / "rené"
    merges = "".join(
        f'[{name}]\nkind = "merge"\nmethod = "linear"\nothers = ["{other}"]\n'
        for name, other in zip(("one", "two"), others, strict=True)
    )
    recipe.write_text(f'name = "r"\nbase = "{tiny_base}"\nstages = ["one", "two"]\n{merges}')
    words = ["run", recipe, "--out", run, "--cache", tmp_path / "cache"]
    short = etude(*words, "--until", "one")
    assert short.code == 0, short.err
    assert "next steps" not in short.out
    said = etude(*words).out
    assert "linear of base, other1" in said  # what a stage itself shows stays above
    ending = said[said.index("results of rené") :].splitlines()
    assert [line.split() for line in ending if line.startswith("two")] == [
        ["two", "merged", "models", "not", "measured"]
    ]
    assert f"   etude serve {shlex.quote(str(run / 'two'))}" in ending
    assert ending[-1] == f"done: {run}; record: {run}/two/record.json"
    assert sorted(json.loads(etude(*words, "--json").out)) == ["folder", "records", "steps"]
    plain = subprocess.run([sys.executable, "-m", "etude", *map(str, words)], env={**os.environ, "PYTHONIOENCODING": "ascii"},
                           capture_output=True, check=True)  # fmt: skip
    shown = plain.stdout.decode("ascii")
    assert "\n   `- two + other2 (weights)\n" in shown
    assert f"done: {run}".replace("é", "?") in shown
