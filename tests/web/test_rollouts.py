from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from etude.agent.trace import from_json
from etude.errors import UserError
from etude.rl.exchange import OBSERVED, episode_file
from etude.rl.ledger import Batched, Closed, Finished, Opened, Trained, Weighted, from_line, to_line
from etude.web import learning as pages
from etude.web import overview
from etude.web.episode import observed, tokens
from etude.web.metrics import charts, metrics_of
from etude.web.reading import Follower, Run
from etude.web.rollouts import Rollouts, rollouts_of
from tests.web.made import STAGE, WEIGHTS, Growing, head


def opened(folder: Path) -> Rollouts:
    return rollouts_of(Run("run", folder, None).stage("rl"))


def test_it_is_what_the_ledger_adds_up_to(tmp_path: Path) -> None:
    growing = Growing(head(tmp_path / "run"), groups=2, size=3).train(9)
    rollouts = opened(tmp_path / "run")
    events = [from_line(line) for line in (growing.folder / "ledger.jsonl").read_bytes().splitlines()]
    finished = [event for event in events if isinstance(event, Finished)]
    closed = {event.group: event for event in events if isinstance(event, Closed)}
    assert rollouts.rollouts == len(finished)
    assert rollouts.trained == 9
    assert {step: tuple(groups) for step, groups in rollouts.steps.items() if groups} == {
        e.step: e.groups for e in events if isinstance(e, Batched)
    }
    for event in finished:
        group = rollouts.group(event.group)
        assert rollouts.finished(group, event.episode) == event
        assert (event.episode in group.passed) == (event.outcome == "pass")
        assert group.rewards == closed[event.group].rewards
    lost = rollouts.group(5)
    assert lost.failed == {0: "sandbox: I will fix it."}
    assert 0 not in lost.rewards
    assert rollouts.finished(lost, 0) is None
    assert rollouts.weights_of(4) == WEIGHTS


def test_what_taught_the_most_was_farthest_from_its_groups_mean(tmp_path: Path) -> None:
    Growing(head(tmp_path / "run")).train(5)
    rollouts = opened(tmp_path / "run")
    away = {(group.number, number): reward - sum(group.rewards.values()) / len(group.rewards)
            for group in rollouts.groups for number, reward in group.rewards.items()}  # fmt: skip
    found = rollouts.teaching(range(len(rollouts.groups)))
    gains = sorted(away.values())
    assert [gain for *_, gain in found] == pytest.approx([*gains[::-1][:4], *gains[:4]])
    assert all(gain == pytest.approx(away[group.number, number]) for group, number, gain in found)
    assert sorted(abs(gain) for *_, gain in rollouts.taught) == pytest.approx(sorted(abs(gain) for *_, gain in found))


def test_a_page_begun_while_files_are_read_hears_when_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that nobody works on, nothing else would tell it: it said that it was reading until somebody loaded it again."""
    Growing(head(tmp_path / "run")).train(2)
    stage = Run("run", tmp_path / "run", None).stage("rl")
    monkeypatch.setattr(overview, "OVER", {stage.state})
    read = Follower._read
    monkeypatch.setattr(Follower, "_read", lambda self: self._busy.release())  # nothing yet
    early, mark = pages.learning(stage), stage.run.mark
    assert (early.live, "Still reading" in str(early.body)) == (True, True)
    assert stage.run.mark == mark
    monkeypatch.setattr(Follower, "_read", read)
    late = pages.learning(stage)
    assert (late.live, "Still reading" in str(late.body)) == (False, False)
    assert stage.run.mark != mark
    mark = stage.run.mark
    pages.learning(stage)
    assert stage.run.mark == mark  # or pages would fetch themselves for ever


def test_the_advantages_are_those_of_the_runs_algorithm(tmp_path: Path) -> None:
    recipe = '[rl]\nkind = "rl"\ntasks = "x"\nalgorithm = "rloo"\n'
    Growing(head(tmp_path / "run", recipe=recipe), groups=1).train(1)
    rollouts = opened(tmp_path / "run")
    group = rollouts.group(0)
    others = [sum(r for o, r in group.rewards.items() if o != number) / 3 for number in group.rewards]
    assert list(rollouts.advantages(group).values()) == pytest.approx(
        [r - o for r, o in zip(group.rewards.values(), others, strict=True)]
    )
    recipe = '[rl]\nkind = "rl"\ntasks = "x"\nalgorithm = "of tomorrow"\n'
    Growing(head(tmp_path / "other", recipe=recipe), groups=1).train(1)
    assert "are not those of this Etude" in opened(tmp_path / "other").fallback


def test_a_ledger_that_grows_is_the_same_as_one_read_at_once(tmp_path: Path) -> None:
    growing = Growing(head(tmp_path / "run")).train(2)
    run = Run("run", tmp_path / "run", None)
    assert rollouts_of(run.stage("rl")).trained == 2
    with (growing.folder / "ledger.jsonl").open("ab") as ledger:
        ledger.write(b'{"event":"Opened","group":')  # being written
    assert rollouts_of(run.stage("rl")).trained == 2
    ledger_file = growing.folder / "ledger.jsonl"
    ledger_file.write_bytes(ledger_file.read_bytes().rpartition(b"\n")[0] + b"\n")
    growing.train(3)
    followed = rollouts_of(run.stage("rl"))
    assert followed.groups == opened(tmp_path / "run").groups
    assert followed.trained == 5


@pytest.mark.parametrize("line", [
    b"no json", b"[]", b'{"event": "Opened"}', to_line(Opened(7, "t", 0)), to_line(Trained(9, 9)), to_line(Batched(10**12, (0,))),
    to_line(Finished(99, 0, "pass", {}, {}, 0, 0, 1, 1, 1.0)), to_line(Closed(44, "ready")),
    b'{"event":"Closed","fate":"ready","group":0,"rewards":{"0":NaN}}\n',
])  # fmt: skip
def test_a_line_that_makes_no_sense_is_named_and_what_was_before_is_shown(tmp_path: Path, line: bytes) -> None:
    growing = Growing(head(tmp_path / "run")).train(2)
    with (growing.folder / "ledger.jsonl").open("ab") as ledger:
        ledger.write(line.rstrip(b"\n") + b"\n" + to_line(Weighted({"outcome": 9.0}, 1)))
    rollouts = opened(tmp_path / "run")
    number = len((growing.folder / "ledger.jsonl").read_bytes().splitlines()) - 1
    assert rollouts.damage.startswith(f"line {number} of ledger.jsonl makes no sense")
    assert rollouts.trained == 2
    assert len(rollouts.weights) == 1


def test_a_stage_that_has_not_begun_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rl has no ledger\.jsonl: no rollout has begun"):
        opened(head(tmp_path / "run"))


def test_numbers_become_columns_and_what_is_no_number_is_left_out(tmp_path: Path) -> None:
    run = head(tmp_path / "run", ("cpt", "cpt"))
    log = run / ".work/cpt-0123456789ab/metrics.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text(
        '{"key": "plan/0001", "needed_bytes": 5, "available_bytes": 9}\n'
        '{"key": "eval/00000000", "step": 0, "bits_per_byte": {"code": 0.5, "evil": "<b>"}}\n'
        '{"key": "train/00000001", "loss": 2.5, "tokens": 100, "device_seconds": 4.0}\nnot json\n[1]\n{"no": "key"}\n'
        '{"key": "train/00000002", "step": 2, "peak_bytes": 3000000000, "loss": NaN, "gradient": 1e999, "lr": true, "tokens": 100, "device_seconds": 1.0}\n'
        '{"key": "eval/00000002", "step": 2, "bits_per_byte": {"code": 0.75}}\n'
    )
    metrics = metrics_of(Run("run", run, None).stage("cpt"))
    assert metrics.points("loss") == [(1.0, 2.5)]
    assert metrics.points("gradient") == metrics.points("lr") == []
    assert metrics.points("eval/bits_per_byte/code") == [(0.0, 0.5), (2.0, 0.75)]
    assert metrics.points("change/code") == [(0.0, 0.0), (2.0, 0.25)]
    assert metrics.points("tokens_per_second") == [(1.0, 25.0), (2.0, 100.0)]
    assert metrics.points("peak_gb") == [(2.0, 3.0)]
    assert "GB of the GPU" in charts(metrics, "cpt")
    assert (metrics.tokens, metrics.seconds, metrics.spoilt) == (200, 5.0, 3)


def test_flags_of_monitors_are_kept_with_their_step(tmp_path: Path) -> None:
    Growing(head(tmp_path / "run")).train(4)
    assert metrics_of(Run("run", tmp_path / "run", None).stage("rl")).flags == [
        (3.0, "comment_density", "step 3: I will fix it.")
    ]
    assert (tmp_path / "run" / STAGE).exists()


def test_what_the_trainer_computed_is_shown_at_its_own_token(tmp_path: Path) -> None:
    """Of the second rollout, whose trace branches: its nodes 1, 3 and 5, a summary and a turn after it were sampled."""
    growing = Growing(head(tmp_path / "run")).train(1)
    stage = Run("run", tmp_path / "run", None).stage("rl")
    file = growing.folder / episode_file(0, 1)
    trace = from_json(file.read_bytes(), "a trace")
    sampled = [place for place, node in enumerate(trace.nodes) if node.sampled]
    values = {place: [place + at / 10 for at in range(8)] for place in sampled}
    own: dict[str, Any] = {
        "logprobs": [each for some in values.values() for each in some],
        "masked": [0] * (8 * len(sampled) - 1) + [1],
    }
    kept = file.with_name(OBSERVED)
    kept.write_text(json.dumps({"000.json": {}, "001.json": own}))
    for place in sampled:
        assert observed(stage, 0, 1, trace, place) == {
            "trainer": values[place],
            "masked": [0] * 7 + [int(place == sampled[-1])],
        }
    assert observed(stage, 0, 1, trace, 0) == {}  # was given
    page = tokens(stage, 0, 1, sampled[-1]).body
    assert f'"trainer":{json.dumps(values[sampled[-1]], separators=(",", ":"))}' in str(page)
    assert "log-probs are not here" not in str(page)
    for spoilt in ("{", "[]", '{"001.json": 3}', json.dumps({"001.json": {**own, "masked": [0]}}),
                   json.dumps({"001.json": {**own, "logprobs": ["x"] * len(own["logprobs"])}}),
                   json.dumps({"001.json": {**own, "logprobs": [float("nan")] * len(own["logprobs"])}}),
                   json.dumps({"001.json": {**own, "logprobs": [10**400] * len(own["logprobs"])}})):  # fmt: skip
        kept.write_text(spoilt)
        assert observed(stage, 0, 1, trace, sampled[0]) == {}
        assert "log-probs are not here" in str(tokens(stage, 0, 1, sampled[0]).body)
        assert "mean 0.002, p99 0.01, masked 0.003" in str(tokens(stage, 0, 1, sampled[0]).body)
