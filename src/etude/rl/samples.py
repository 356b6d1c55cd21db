"""Episodes worth a look, three a step: the best, the worst, and the one that is least like the others."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from etude.files import link_or_copy, write_json
from etude.rl.exchange import episode_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from etude.rl.events import Finished

ABOUT = "about.json"
FAR = 1.4826  # times the median deviation is the standard deviation, where a bell curve is


class Sample(NamedTuple):
    """An episode, and why it was kept."""

    episode: Finished
    reward: float
    why: str


def choose(episodes: Sequence[tuple[Finished, float]]) -> dict[str, Sample]:
    """Return the best, the worst and the strangest of a step's episodes; the first of equals. None is taken twice."""
    left = sorted(episodes, key=lambda each: -each[1])
    chosen: dict[str, Sample] = {}
    if left:
        chosen["best"] = Sample(*left.pop(0), "the largest reward of the step")
    if left:
        least = min(range(len(left)), key=lambda place: left[place][1])
        chosen["worst"] = Sample(*left.pop(least), "the smallest reward of the step")
    if left:
        far = {id(event): _strangeness(event, [other for other, _ in episodes]) for event, _ in left}
        event, reward = max(left, key=lambda each: far[id(each[0])][0])
        chosen["strangest"] = Sample(event, reward, far[id(event)][1])
    return chosen


def _strangeness(event: Finished, among: Sequence[Finished]) -> tuple[float, str]:
    """Return how far an episode's most unusual behaviour is from the others', in standard deviations, and in words.

    By medians, so that the strange one does not move what it is compared with. Where most are alike, any difference counts as a
    share of the value itself.
    """
    found = [(0.0, "no behaviour differs from the others'")]
    for name, value in _numbers(event).items():
        values = [_numbers(other).get(name, 0.0) for other in among]
        middle = median(values)
        spread = FAR * median(abs(each - middle) for each in values) or max(abs(middle), 1.0)
        found.append((abs(value - middle) / spread, f"{name} is {value:.4g}; the step's median is {middle:.4g}"))
    return max(found, key=lambda each: each[0])


def _numbers(event: Finished) -> Mapping[str, float]:
    return {**event.behaviour, "tokens sampled": event.sampled}


def keep_samples(folder: Path, step: int, episodes: Sequence[tuple[Finished, float]]) -> None:
    """Keep the traces that `choose` finds, and say why; doing it again changes nothing. `folder`: the run's."""
    target = folder / "samples" / f"{step:08d}"
    chosen = choose(episodes)
    for name, sample in chosen.items():
        link_or_copy(folder / episode_file(sample.episode.group, sample.episode.episode), target / f"{name}.json")
    write_json(
        target / ABOUT,
        {name: {"group": sample.episode.group, "episode": sample.episode.episode, "outcome": sample.episode.outcome,
                "reward": sample.reward, "why": sample.why} for name, sample in chosen.items()},
    )  # fmt: skip
