from __future__ import annotations

from pathlib import Path

import pytest

from etude.bench.trials import FILE, Header, TrialLog, read_results, read_together, trial_key, unsolved
from etude.errors import UserError
from tests.bench import fake

MADE = fake.trials({"model": 0.5}, packages=2, tasks=2, k=2)


def test_trials_come_back_as_they_were_written(tmp_path: Path) -> None:
    results = read_results(fake.write(tmp_path, MADE))
    assert (results.header, list(results.trials)) == (fake.HEADER, MADE)
    assert (results.models, results.attempts) == (["model"], 2)


def test_a_torn_line_is_not_there_and_writing_goes_on_after_it(tmp_path: Path) -> None:
    path = fake.write(tmp_path, MADE[:3]) / FILE
    path.write_bytes(path.read_bytes()[:-40])
    assert list(read_results(tmp_path).trials) == MADE[:2]
    with TrialLog(tmp_path, fake.HEADER) as log:
        done = [each for each in MADE if trial_key(each.model, each.task, each.number) in log]
        assert done == MADE[:2]
        for trial in MADE[2:]:
            log.add(trial)
    assert list(read_results(tmp_path).trials) == MADE


@pytest.mark.parametrize(
    ("change", "named", "side_by_side"),
    [
        ({"integrity": {"network": True}}, "integrity policy", False),
        ({"tasks": "other"}, "task set", False),
        ({"harness": "2"}, "harness version", True),
        ({"sampling": {"temperature": 0.0}}, "sampling settings", True),
    ],
)
def test_other_rules_are_refused_in_one_folder_and_some_side_by_side(
    tmp_path: Path, change: dict[str, object], named: str, side_by_side: bool
) -> None:
    one, other = fake.write(tmp_path / "one", MADE), Header(**(fake.HEADER.model_dump() | change))
    with pytest.raises(UserError, match=f"made with another {named}; choose another folder"):
        TrialLog(one, other)
    two = fake.write(tmp_path / "two", MADE, other)
    if side_by_side:
        assert read_together([one, two]).differing == (named,)
    else:
        with pytest.raises(UserError, match=f"one and .*two differ in {named}; they are not shown side by side"):
            read_together([one, two])


def test_a_model_of_two_folders_is_told_apart_by_them(tmp_path: Path) -> None:
    other = [trial.model_copy(update={"model": "another"}) for trial in MADE]
    folders = [fake.write(tmp_path / name, MADE if name != "c" else other) for name in ("a", "b", "c")]
    assert read_together(folders).models == ["model (a)", "model (b)", "another"]
    same_name = fake.write(tmp_path / "below" / "a", MADE)
    assert read_together([folders[0], same_name]).models == [f"model ({folders[0]})", f"model ({same_name})"]
    assert read_together([folders[0], folders[0]]).models == ["model"]


@pytest.mark.parametrize("line", [b"{", b"[1]", b'{"key": "x", "model": "m"}', b"\xff"])
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = fake.write(tmp_path, MADE) / FILE
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:2], line, *lines[3:]]))
    with pytest.raises(UserError, match=r"line 3 of .*trials.jsonl is no trial; the file is damaged"):
        read_results(tmp_path)


def test_folders_without_trials_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no trials.jsonl; give a folder"):
        read_results(tmp_path / "nowhere")
    TrialLog(tmp_path, fake.HEADER).close()
    with pytest.raises(UserError, match="holds no trials yet"):
        read_results(tmp_path)


def test_tasks_that_nobody_solved_though_asked_in_full_are_named(tmp_path: Path) -> None:
    made = fake.trials({"a": 0.5, "b": 0.1}, invalid=0.1)
    folders = [fake.write(tmp_path / name, [each for each in made if each.model == name]) for name in ("a", "b")]
    found = unsolved(folders)
    asked = {trial.task for trial in made if trial.style == "full" and trial.outcome != "invalid"}
    passed = {trial.task for trial in made if trial.outcome == "pass"}
    assert set(found) == asked - passed
    assert found
    assert all("times with its full request" in why for why in found.values())
    assert unsolved([]) == {}
