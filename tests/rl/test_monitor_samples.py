from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from etude.files import files_below, read_json
from etude.rl.exchange import episode_file
from etude.rl.ledger import Finished
from etude.rl.monitor import choose, keep_samples
from tests.rl.runs import finished

STEP = [(finished(1, place, passed=place > 3, calls=5.0 + place % 2), 0.1 * place) for place in range(8)]
ODD = (finished(2, 0, passed=True, calls=400.0), 0.35)


def test_best_worst_and_strangest() -> None:
    chosen = choose([*STEP, ODD])
    assert {name: (sample.episode.group, sample.episode.episode) for name, sample in chosen.items()} == {
        "best": (1, 7), "worst": (1, 0), "strangest": (2, 0)
    }  # fmt: skip
    assert chosen["strangest"].why == "calls is 400; the step's median is 6"


def test_where_all_are_alike_any_difference_is_strange() -> None:
    alike = [(finished(1, place, passed=True, calls=5.0), float(place)) for place in range(6)]
    odd = (finished(1, 9, passed=True, calls=6.0), 2.5)
    assert choose([*alike, odd])["strangest"].episode.episode == 9
    assert choose(alike)["strangest"].why == "no behaviour differs from the others'"


EPISODES = st.builds(
    lambda place, reward, calls: (finished(0, place, passed=True, calls=calls), reward),
    st.integers(0, 99),
    st.floats(-1, 1),
    st.floats(0, 9),
)


@given(st.lists(EPISODES, max_size=9))
def test_none_is_taken_twice_and_the_extremes_are_extremes(episodes: list[tuple[Finished, float]]) -> None:
    chosen = choose(episodes)
    assert list(chosen) == ["best", "worst", "strangest"][: len(episodes)]
    left = list(episodes)
    for sample in chosen.values():
        left.remove((sample.episode, sample.reward))
    if episodes:
        assert chosen["best"].reward == max(reward for _, reward in episodes)
    if len(episodes) > 1:
        assert chosen["worst"].reward == min(reward for _, reward in episodes)


def test_traces_are_kept_when_the_others_go_and_doing_it_again_changes_nothing(tmp_path: Path) -> None:
    for event, _ in STEP:
        path = tmp_path / episode_file(event.group, event.episode)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"trace {event.episode}\n")
    keep_samples(tmp_path, 3, STEP)
    before = {path: path.read_bytes() for path in files_below(tmp_path / "samples")}
    keep_samples(tmp_path, 3, STEP)
    for path in files_below(tmp_path / "episodes"):
        path.unlink()
    kept = tmp_path / "samples/00000003"
    assert {path: path.read_bytes() for path in files_below(tmp_path / "samples")} == before
    assert ((kept / "best.json").read_text(), (kept / "worst.json").read_text()) == ("trace 7\n", "trace 0\n")
    about = read_json(kept / "about.json")
    assert list(about) == ["best", "worst", "strangest"]
    assert about["worst"] == {
        "group": 1, "episode": 0, "outcome": "fail", "reward": 0.0, "why": "the smallest reward of the step"
    }  # fmt: skip
