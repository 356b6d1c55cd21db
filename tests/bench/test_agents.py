"""The benchmark measures itself: a perfect agent, an idle one, a clumsy one, and machinery that fails."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from etude.agent.calls import Call
from etude.agent.trace import read_traces
from etude.bench.agents import BUILT_IN, Agent, BenchSettings, Policies, run_benchmark, scripted
from etude.bench.trials import Results, Trial, read_results
from etude.errors import UserError
from etude.progress import Reporter
from etude.report.benchmark import write_report
from etude.sandbox.box import Entry, SandboxError
from etude.tasks.attempt import premise_of
from etude.tasks.demos import solution_calls
from etude.tasks.manifest import TaskSet
from etude.tasks.score import Score, Scorer, score
from etude.tasks.task import Codebase, Task
from tests.bench import calc_set
from tests.tasks import small

# Mends the sum but for the hidden tests, leaves a print and a scratch file, and says that all is well.
SPECIAL = 'result = 0\n    if len(values) == 2:\n        print("two")\n        return sum(values)\n'
CLUMSY = [
    [Call("edit", {"path": "calc/__init__.py", "old": "result = 0\n", "new": SPECIAL})],
    [
        Call("write", {"path": "try_it.py", "content": "import calc\n"}),
        Call("shell", {"command": "python -m pytest -q; rm LICENSE"}),
    ],
]


@pytest.fixture(scope="module")
def calc(tmp_path_factory: pytest.TempPathFactory) -> tuple[TaskSet, Path]:
    manifest, cache = calc_set.write(tmp_path_factory.mktemp("calc"))
    return calc_set.load(manifest, cache), cache


def bench(
    calc: tuple[TaskSet, Path], folder: Path, *agents: Agent, scorer: Scorer = score, **settings: object
) -> Results:
    own = BenchSettings.model_validate(settings)
    small.run(run_benchmark(calc[0], agents, own, folder, calc[1], Reporter(quiet=True), scorer))
    return read_results(folder)


def by_task(results: Results, model: str) -> dict[str, Trial]:
    return {trial.task: trial for trial in results.trials if trial.model == model}


def test_oracle_noop_and_a_clumsy_agent(calc: tuple[TaskSet, Path], tmp_path: Path) -> None:
    clumsy = scripted("clumsy", lambda _task, talk: [*(talk.write(*calls) for calls in CLUMSY), "All tests pass."])
    found = bench(calc, tmp_path, *BUILT_IN.values(), clumsy, k=1)
    assert len(found.trials) == 6
    for trial in by_task(found, "oracle").values():
        assert (trial.outcome, trial.passed, trial.stop) == ("pass", trial.expected, "finished")
        assert (trial.quality["lines"], trial.quality["unrelated_files"]) == (trial.quality["reference_lines"], 0)
        assert trial.tokens["written"] > 0
    idle = by_task(found, "noop")["calc-1"]
    assert (idle.outcome, idle.passed, idle.expected) == (
        "fail",
        {"fail_to_pass": 0, "pass_to_pass": 2},
        {"fail_to_pass": 4, "pass_to_pass": 2},
    )
    assert (idle.quality, idle.interaction["silent"], idle.calls) == ({}, 1.0, 0)
    trial = by_task(found, "clumsy")["calc-1"]
    assert (trial.outcome, trial.passed["fail_to_pass"], trial.passed["pass_to_pass"]) == ("fail", 2, 2)
    assert (trial.calls, trial.turns, trial.style, trial.generator, trial.category) == (
        3,
        3,
        "terse",
        "mutation",
        "debugging",
    )
    # Two files besides the reference's: the scratch file and the licence. What pytest leaves behind is none.
    assert [trial.quality[name] for name in ("files", "unrelated_files", "scratch_files", "debug_prints")] == [
        3,
        2,
        1,
        1,
    ]
    assert (trial.interaction["claimed"], trial.interaction["unverified"]) == (1.0, 1.0)
    assert found.header.integrity["network"] == "none"
    assert (found.header.about["tasks"], found.header.tasks) == (2, calc[0].digest)


def test_what_is_known_is_not_tested_again_unless_the_benchmark_itself_is_measured(
    calc: tuple[TaskSet, Path], tmp_path: Path
) -> None:
    seen: list[str] = []

    async def counting(task: Task, codebase: Codebase, entries: Sequence[Entry]) -> Score:
        seen.append(f"{task.id} {len(entries)}")
        return await score(task, codebase, entries)

    solver = scripted("solver", lambda task, talk: [talk.write(*solution_calls(task)), "Done."])
    idler = scripted("idler", lambda _task, _talk: ["Done."])
    found = bench(calc, tmp_path, solver, idler, *BUILT_IN.values(), scorer=counting, k=2)
    ways = Counter((trial.model, trial.outcome, trial.how) for trial in found.trials)
    assert ways == {
        ("solver", "pass", "run"): 2, ("solver", "pass", "known"): 2, ("idler", "fail", "idle"): 4,
        ("oracle", "pass", "run"): 4, ("noop", "fail", "run"): 4,
    }  # fmt: skip
    assert len(seen) == 2 + 4 + 4
    write_report([tmp_path], tmp_path)
    told = (tmp_path / "report.md").read_text()
    columns = re.search(r"\| how the score was found \| (.*) \|", told)
    counts = re.search(r"\| the same change was scored before \| (.*) \|", told)
    assert columns
    assert counts
    assert dict(zip(columns[1].split(" | "), counts[1].split(" | "), strict=True))["solver"].strip() == "2"


def test_traces_are_kept_and_seeds_are_the_trial_s_own(calc: tuple[TaskSet, Path], tmp_path: Path) -> None:
    seeds: list[dict[str, int]] = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        found = bench(calc, folder, BUILT_IN["oracle"], k=2, limit=1, concurrency=1 + len(seeds))
        traces, torn = read_traces(folder / "traces.jsonl")
        assert {f"traces.jsonl#{trace.id}" for trace in traces} == {trial.trace for trial in found.trials}
        assert torn == 0
        assert all(trace.rewards == {"pass": 1.0, "fail_to_pass": 1.0, "pass_to_pass": 1.0} for trace in traces)
        assert all("+" in trace.diff and trace.made_by["policy"] == "oracle" for trace in traces)
        seeds.append({trace.id: trace.made_by["seed"] for trace in traces})
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0].values())) == 2


def failing(name: str, when: Callable[[int], bool], error: Exception) -> Agent:
    """A agent that does nothing, and whose machinery fails at some attempts, counted from 1."""
    count = 0

    @asynccontextmanager
    async def opened() -> AsyncIterator[Policies]:
        def play(task: object) -> object:
            nonlocal count
            count += 1
            if when(count):
                raise error
            return player(task)

        async with BUILT_IN["noop"].open() as player:
            yield play  # type: ignore[misc]

    return Agent(name, opened)


def test_what_fails_once_is_tried_again(calc: tuple[TaskSet, Path], tmp_path: Path) -> None:
    found = bench(calc, tmp_path, failing("once", lambda n: n == 1, SandboxError("gone")), k=1)
    assert [trial.outcome for trial in found.trials] == ["fail", "fail"]


def test_what_fails_again_is_invalid_and_never_a_fail(calc: tuple[TaskSet, Path], tmp_path: Path) -> None:
    found = bench(calc, tmp_path, failing("ever", lambda _: True, RuntimeError("the engine\nis over")), k=1)
    assert [(trial.outcome, trial.why, trial.passed) for trial in found.trials] == [
        ("invalid", "RuntimeError: the engine is over", {})
    ] * 2
    assert not (tmp_path / "traces.jsonl").exists()


def test_many_failures_in_a_row_end_it_and_spoil_nothing(calc: tuple[TaskSet, Path], tmp_path: Path) -> None:
    down = failing("down", lambda n: n > 1, UserError("no answer from the server"))
    with pytest.raises(
        UserError, match="last 10 trials of down were invalid: no answer from the server; put that right"
    ):
        bench(calc, tmp_path, down, k=8, concurrency=1)
    assert [trial.outcome for trial in read_results(tmp_path).trials] == ["fail"]


def test_more_attempts_go_on_and_other_rules_are_refused(calc: tuple[TaskSet, Path], tmp_path: Path) -> None:
    bench(calc, tmp_path, BUILT_IN["noop"], k=1, limit=1)
    before = (tmp_path / "trials.jsonl").read_bytes()
    found = bench(calc, tmp_path, BUILT_IN["noop"], k=2)
    assert (tmp_path / "trials.jsonl").read_bytes().startswith(before)
    assert sorted((trial.task, trial.number) for trial in found.trials) == [
        (f"calc-{task}", n) for task in (1, 2) for n in (1, 2)
    ]
    for other in ({"style": "full"}, {"tools": {"tools": ["bash"]}}, {"harness": {"temperature": 0.0}}):
        with pytest.raises(UserError, match="another sampling settings; choose another folder"):
            bench(calc, tmp_path, BUILT_IN["noop"], **other)


def test_the_style_is_asked_for_where_there_is_one(calc: tuple[TaskSet, Path], tmp_path: Path) -> None:
    honest = scripted("honest", lambda _task, _talk: ["The fault is in total; name is fine."])
    found = by_task(bench(calc, tmp_path, honest, k=1, style="premise"), "honest")
    assert {name: trial.style for name, trial in found.items()} == {"calc-1": "premise", "calc-2": "terse"}
    assert {name: trial.interaction["premise_noticed"] for name, trial in found.items()} == {
        "calc-1": 1.0,
        "calc-2": None,
    }
    premise = premise_of(calc[0].tasks[0], "premise", "bug in name: sums are wrong")
    assert premise is not None
    assert (premise.blamed, premise.true) == (("name",), ("total",))


def test_bounds_are_in_a_agent_s_own_tokens() -> None:
    own = BenchSettings().harness
    scaled = Agent("bytes", BUILT_IN["noop"].open, 4).bounded(own)
    assert (scaled.tokens, scaled.turn_tokens, scaled.thinking_tokens, scaled.turns) == (
        4 * own.tokens,
        4 * own.turn_tokens,
        None,
        own.turns,
    )
    assert (scaled.summary.trigger, scaled.summary.trigger_to) == (4 * own.summary.trigger, None)
