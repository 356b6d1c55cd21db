from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import image

from etude.agent.trace import Node, Trace
from etude.bench.axes import EFFICIENCY, INTERACTION, QUALITY, SCORE, Prices, effort, set_statistics, vector
from etude.bench.statistics import Estimate
from etude.bench.trials import Trial, read_results
from etude.report.benchmark import Scored, frontier, number, wrapped, write_report
from etude.rewards.quality import measure
from etude.tasks.task import Candidate, Edit, Task
from tests.bench import fake

LONG = "someone/A-Very-Long-Model-Name-70B-Instruct-2026-09-preview"


def section(folder: Path, head: str) -> str:
    return (folder / "report.md").read_text().split(f"## {head}\n")[1].split("\n## ")[0]


def test_what_an_episode_took_is_read_from_its_trace() -> None:
    nodes = [
        Node(None, "opening", [0] * 10, ""), Node(0, "turn", [0] * 4, "", sampled=True, details={"cached": 0}),
        Node(1, "answers", [0] * 6, "", began=3.0, seconds=1.0), Node(2, "turn", [0] * 5, "", sampled=True, details={"cached": 14}),
        Node(0, "restart", [0] * 3, ""), Node(4, "turn", [0] * 2, "", sampled=True, details={"cached": 99}, began=7.0, seconds=2.5),
    ]  # fmt: skip
    counts = {"sampled": 11, "turns": 3, "calls": 2, "tokens_said": 8, "tokens_calls": 3, "tokens_answers": 6}
    found = effort(Trace("e", "t", nodes, stop="finished", counts=counts))
    tokens = found.pop("tokens")
    assert found == {"calls": 2, "turns": 3, "seconds": 9.5, "stop": "finished"}
    assert tokens == {"thinking": 0, "calls": 3, "said": 8, "summary": 0, "answers": 6, "written": 11, "read": 10 + 20 + 13, "cached": 14 + 13}  # fmt: skip
    assert Prices(read=1e6, cached=1e5, written=2e6).cost(tokens) == pytest.approx((43 - 27) + 2.7 + 22)


def test_a_set_of_tasks_is_described() -> None:
    def task(name: str, package: str, edits: int) -> Task:
        changed = tuple(Edit(f"{n}.py", "a\nb\n", "a\nc\nd\n") for n in range(edits))
        return Task(name, package, "1", Candidate("mutation", (), changed, ()), {}, ("t",), (), (), "debugging")

    found = set_statistics(
        [task("x", "p", 1), task("y", "p", 2), task("z", "q", 5)], {"x": "abc", "y": "a", "z": "abcdef"}
    )
    assert found == {
        "tasks": 3,
        "packages": 2,
        "median lines changed": 6,
        "median files touched": 2,
        "median characters of a prompt": 3,
    }


def test_every_number_of_a_trial_is_reached_by_its_metric() -> None:
    measured = vector(measure({"a.py": (None, "import os\n"), "b.txt": (None, "x")}, {"a.py": ("x = 1\n", "x = 2\n")}))
    trial = fake.trials({"m": 1.0}, packages=1, tasks=1, k=1, invalid=0)[0].model_copy(update={"quality": measured})
    values = {metric.name: metric.value(trial) for metric in (*QUALITY, *EFFICIENCY, *INTERACTION)}
    assert (
        values["new lint findings ↓"],
        values["lines changed, × reference"],
        values["changes unrelated files ↓"],
    ) == (1, 1, True)
    assert values["tokens written ↓"] == sum(values[f"– {kind}"] or 0 for kind in ("thinking", "calls", "said"))
    unchanged = trial.model_copy(update={"quality": {}, "interaction": trial.interaction | {"claimed": 0.0}})
    assert {metric.value(unchanged) for metric in QUALITY} == {None}
    assert INTERACTION[1].value(unchanged) is None  # nothing was claimed


def test_invalid_trials_are_counted_and_change_no_number(tmp_path: Path) -> None:
    made = fake.trials({"m": 0.4}, packages=3, tasks=4, k=3, invalid=0)
    extra = [
        Trial(**(trial.model_dump() | {"number": 9, "outcome": "invalid", "why": "no sandbox"})) for trial in made[::3]
    ]
    plain, mixed = fake.write(tmp_path / "plain", made), fake.write(tmp_path / "mixed", made + extra)
    one, other = Scored(read_results(plain)), Scored(read_results(mixed))
    assert (one.scores, one.by) == (other.scores, other.by)
    write_report([mixed], tmp_path / "out")
    assert re.search(r"\| 36 \| 12 \|$", section(tmp_path / "out", "Correctness"), re.MULTILINE)
    assert "| invalid | no sandbox | 12 |" in section(tmp_path / "out", "How trials ended")
    with pytest.raises(KeyError):
        SCORE.value(extra[0])


def test_a_report_on_nothing_but_invalid_trials_says_so(tmp_path: Path) -> None:
    made = fake.trials({"m": 0.4, "n": 0.1}, packages=2, tasks=2, k=1, invalid=0)
    invalid = [Trial(**(trial.model_dump() | {"outcome": "invalid", "why": "no sandbox"})) for trial in made]
    said = write_report([fake.write(tmp_path / "trials", invalid)], tmp_path / "out")
    assert said == [f"all {len(made)} trials are invalid, so nothing is known of any model; most often: no sandbox"]
    assert f"| no sandbox | {len(made)} |" in section(tmp_path / "out", "In short")


def test_two_folders_are_compared_on_the_same_tasks(tmp_path: Path) -> None:
    before = fake.write(tmp_path / "before", fake.trials({"m": 0.1}, seed=1))
    after = fake.write(tmp_path / "after", fake.trials({"m": 0.8}, seed=1)[25:])
    said = write_report([before, after], tmp_path / "out")
    assert said[0].startswith("m (after): ")
    assert "of 55 tasks, of 60 in the set" in said[0]
    assert re.fullmatch(r"m \(after\) against m \(before\) on the 55 tasks of both: \+\d.* points, sure", said[2])
    assert "| m (after) − m (before) | +" in section(tmp_path / "out", "Two by two")


@pytest.mark.parametrize("skills", [{"m": 0.0}, {"a<b>|`": 0.3, LONG: 0.9}, {f"model-{n}": n / 6 for n in range(6)}])
def test_a_report_stands_on_its_own(tmp_path: Path, skills: dict[str, float]) -> None:
    folder = fake.write(tmp_path / "trials", fake.trials(skills, packages=2, tasks=3, k=2))
    write_report([folder], tmp_path / "out", Prices(written=1.0))
    page, text = (tmp_path / "out" / "report.html").read_text(), (tmp_path / "out" / "report.md").read_text()
    assert page.count("<img") == text.count("![") == 4
    assert not re.findall(r"(?:src|href)=\"(?!data:image/png;base64,)", page)
    assert "<b>" not in page + text
    assert ("## Two by two" in text) == (len(skills) > 1)
    assert "cost ↓" in text
    for name in ("score_tokens", "by_category", "by_package", "histograms"):
        assert f"]({name}.png)" in text
        assert image.imread(tmp_path / "out" / f"{name}.png").std() > 0.01
    if set(skills.values()) == {0.0}:
        assert "0.0% [0.0–100.0] of 6 tasks" in page


def test_the_same_trials_give_the_same_files(tmp_path: Path) -> None:
    folder = fake.write(tmp_path / "trials", fake.trials({"a": 0.2, "b": 0.6}, packages=3, tasks=2, k=2))
    for name in ("one", "two"):
        write_report([folder], tmp_path / name)
    for path in sorted((tmp_path / "one").iterdir()):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_a_model_without_a_valid_trial_is_said_to_have_none(tmp_path: Path) -> None:
    broken = fake.trials({"bad": 0.5}, packages=2, tasks=2, k=2, invalid=1)
    folder = fake.write(tmp_path / "trials", broken + fake.trials({"good": 0.5}, packages=2, tasks=2, k=2, invalid=0))
    said = write_report([folder], tmp_path / "out")
    assert said[1] == "bad: no valid trial"
    assert "| good − bad | – | – | 0 | no common tasks |" in section(tmp_path / "out", "Two by two")


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=8))
def test_the_frontier_is_what_no_other_beats(points: list[tuple[int, int]]) -> None:
    beaten = {p for p in points for q in points if q != p and q[0] <= p[0] and q[1] >= p[1]}
    assert frontier(points) == sorted(set(points) - beaten)


@pytest.mark.parametrize(
    ("found", "shown"),
    [((0.0896, 0.0823, 0.0973), "0.0896 [0.0823, 0.0973]"), ((-0.007, -0.144, 0.112), "-0.007 [-0.144, 0.112]"),
     ((2.2, 2.08, 2.4), "2.20 [2.08, 2.40]"), ((-1500, -2340, 40), "-1.5k [-2.34k, 40]"), ((0, 0, 0), "0 [0, 0]")],
)  # fmt: skip
def test_numbers_show_the_digits_their_interval_is_worth(found: tuple[float, float, float], shown: str) -> None:
    assert number(Estimate(*found, 3)) == shown


def test_long_names_keep_their_ends() -> None:
    assert max(map(len, wrapped(LONG).split("\n"))) <= 26
    assert wrapped(LONG).startswith("someone/A")
    assert wrapped(LONG).endswith("preview")


def test_hard_tasks_are_told_from_underspecified_ones(tmp_path: Path) -> None:
    (model, *_), outcomes = (
        ["a"],
        {"t1": ("pass", "pass"), "t2": ("fail", "pass"), "t3": ("fail", "fail"), "t4": ("pass", "fail")},
    )
    usual = fake.trials({model: 0.5}, packages=1, tasks=1, k=1, invalid=0)[0]
    folders = []
    for at, style in enumerate(("terse", "full")):
        made = [
            usual.model_copy(update={"task": task, "style": style, "outcome": each[at]})
            for task, each in outcomes.items()
        ]
        folders.append(fake.write(tmp_path / style, made))
    write_report(folders, tmp_path / "out")
    text = section(tmp_path / "out", "Hard, or underspecified?")
    for name, task in (("solved by both", "t1"), ("underspecified", "t2"), ("hard", "t3"), ("short one only", "t4")):
        (line,) = [line for line in text.splitlines() if name in line and line.startswith("|")]
        assert task in line
    write_report(folders[:1], tmp_path / "one")
    assert "underspecified" not in (tmp_path / "one" / "report.md").read_text()
