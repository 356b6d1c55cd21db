from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from etude.errors import UserError
from etude.files import files_below, write_json
from etude.report.rl import PICTURES, Panel, changes, curves, pictures, steps_of, verdict, write_report
from etude.rl.metrics import added
from tests.rl.runs import rows, write

VERDICT = [
    "8 steps, 32 episodes, 16 s",
    "reward: change not measured, as that takes 30 episodes at the beginning and as many in other steps at the end",
    "solved: change not measured, as that takes 30 episodes at the beginning and as many in other steps at the end",
    "best of group: change not measured, as that takes 30 episodes at the beginning and as many in other steps at the end",
    "12% of the groups were flat: all rewards alike, nothing to learn from",
    "1 invalid episode, most often sandbox did not start: excluded, not scored",
    "step 3: calls is 4.5, for 3 steps above 4 (usual in this run: 1)",
]


def test_one_page_with_its_pictures_inside(tmp_path: Path) -> None:
    run = write(tmp_path / "run", 8)
    why = "calls is <script>; the step's median is 1"
    about = {"best": {"group": 1, "episode": 2, "outcome": "pass", "reward": 0.5, "why": why}}
    write_json(run / "samples/00000003/about.json", about)
    assert write_report(run, tmp_path / "page") == VERDICT
    page = (tmp_path / "page/report.html").read_text()
    assert len(re.findall("data:image/png;base64,", page)) == 5 == len(list((tmp_path / "page").glob("*.png")))
    assert all(line in page for line in VERDICT)
    assert "samples/00000003/best.json" in page
    assert "<script>" not in page
    assert "http" not in page
    text = (tmp_path / "page/report.md").read_text()
    assert re.search(r"\| reward outcome \|  \|  \| 0.25 \| 0.5 \|", text)
    assert re.search(r"\| 5 \| 1 \| 1 \|", text)  # the weights from step 5 on


def test_a_run_that_goes_on_is_read_and_left_alone(tmp_path: Path) -> None:
    log = write(tmp_path, 3) / "metrics.jsonl"
    with log.open("ab") as file:
        file.write(b'{"key": "train/00000004", "ste')  # being written
    before = log.read_bytes()
    assert [row["step"] for row in steps_of(tmp_path)] == [1, 2, 3]
    assert log.read_bytes() == before
    assert files_below(tmp_path) == [log]


@pytest.mark.parametrize(("lines", "said"), [
    (None, "no metrics.jsonl"), ([], "no step is trained yet"), ([{"key": "step/x/001"}], "no step is trained yet"),
    ([{"key": "train/00000001", "step": 1, "loss": 2.0}], "not those of an rl stage"),
])  # fmt: skip
def test_what_is_no_run_is_refused(tmp_path: Path, lines: list[dict[str, object]] | None, said: str) -> None:
    if lines is not None:
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=said) as told:
        write_report(tmp_path, tmp_path / "page")
    assert str(tmp_path) in str(told.value)
    assert not (tmp_path / "page").exists()


def test_one_step_is_enough(tmp_path: Path) -> None:
    assert write_report(write(tmp_path, 1), tmp_path)[0] == "1 step, 4 episodes, 2 s"


def test_counts_and_the_verdict_on_thirty_steps() -> None:
    made = [{"step": step, "reward": float(step), "episodes": 10} for step in range(1, 31)]
    assert added(rows(3), "groups_") == {"ready": 2, "flat": 1}
    assert verdict(made)[:2] == [
        "30 steps, 300 episodes, 0 s",
        "reward: from 2 in the first tenth of the episodes (30 at least) to 29 in the last",
    ]


def test_what_the_bound_on_age_cost_is_said_and_whether_slow_tasks_paid() -> None:
    def step(number: int, **more: float) -> dict[str, Any]:
        return {"step": number, "reward": 0.5, "episodes": 10, "groups_ready": 5, "seconds_trained": 10.0, **more}

    late = [step(1, groups_stale=1, seconds_stale=40.0), step(2, groups_stale=3, seconds_stale=20.0), step(3), step(4)]
    said = '20% of the ready groups came too late for a step; their episodes took 2.5 times as long; late = "wait" holds sampling back instead'
    assert verdict(late)[-1] == said
    assert "wait" not in verdict([step(1, groups_stale=1, seconds_stale=12.0)])[-1]
    assert [panel.title for panel in pictures(late)["staleness.png"]] == [
        "Groups that closed",
        "How long episodes took",
    ]
    held = [step(1, held_back=0.5), step(2, held_back=0.1)]
    assert verdict(held)[-1] == "sampling was held back for 30% of the time, so that no group came too late"
    assert [panel.title for panel in pictures(held)["speed.png"]] == ["Idle"]


def test_a_count_that_a_step_does_not_have_is_0_and_a_number_is_unknown() -> None:
    made: list[dict[str, Any]] = [
        {"step": 1, "invalid_a": 2, "kl": 0.1},
        {"step": 2},
        {"step": 3, "invalid_b": 1, "kl": 0.3},
    ]
    counted = Panel("", ("invalid_",), "counts")
    assert curves(counted, made) == {"a": [(1, 2), (2, 0), (3, 0)], "b": [(1, 0), (2, 0), (3, 1)]}
    assert curves(Panel("", ("kl",)), made) == {"kl": [(1, 0.1), (3, 0.3)]}


def test_only_what_is_known_is_drawn_and_behaviours_are_all() -> None:
    drawn = pictures(rows(2))
    assert [panel.title for panel in drawn["health.png"]] == ["Entropy of sampled tokens"]
    assert [panel.names for panel in drawn["behaviour.png"]] == [("behaviour_calls",)]
    assert drawn["reward.png"] == list(PICTURES["reward.png"])


def test_changes_of_weights_are_found() -> None:
    assert [row["step"] for row in changes(rows(8))] == [5]
