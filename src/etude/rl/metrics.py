"""What a run is measured by: events and reports in, one flat row a step out.

A row speaks of what happened since the step before was trained. In an asynchronous run the episodes that ended in that time are not
those the step learnt from: rewards are of the newest episodes, so that a curve shows the policy as it is.

Episodes worth a look, three a step: the best, the worst, and the one that is least like the others.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from etude.files import link_or_copy, write_json
from etude.lineage.compute import forward_flops
from etude.rewards.reward import total
from etude.rl.exchange import episode_file
from etude.rl.ledger import Closed, Event, Failed, Finished, Stale, Trained, Weighted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from etude.agent.trace import Trace
    from etude.lineage.compute import ComputeShape
    from etude.rl.exchange import Report

PARTS = ("sampling", "scoring", "training")  # whose idle time is told
SPENT = ("tokens", "flops", "seconds")  # of reports; they add up, all else is of the step alone
SAMPLING = ("flops", "sampling_flops", "sandbox_seconds")
CAUSE = 40  # characters


class StepMetrics:
    """Hears everything, forgets it when the next step begins. `row` may be asked at any time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._weights: dict[str, float] = {}
        self._passes: defaultdict[int, list[bool]] = defaultdict(list)  # of groups that are not closed
        self._depth: Counter[str] = Counter()  # how many are at it now, by part
        self._clear()

    def _clear(self) -> None:
        self._episodes: list[tuple[Finished, dict[str, float]]] = []  # with the weighted parts
        self._best: list[bool] = []  # of closed groups: whether one episode passed
        self._counts: Counter[str] = Counter()
        self._last: dict[str, float] = {}  # what the trainer told of its last step
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._swaps: list[Mapping[str, float]] = []
        self.resumed()

    def resumed(self) -> None:
        """Begin to count time: what was heard so far is an earlier session's, and no part of this one's speed."""
        self._began = self._changed = self._clock()
        self._sampled = 0
        self._busy: defaultdict[str, float] = defaultdict(float)  # seconds in which at least one was at it
        self._many: defaultdict[str, float] = defaultdict(float)  # seconds, times how many were

    def hear(self, event: Event) -> None:
        """Take an event of the ledger, an old one or a new one. `Trained` ends a row: ask for it before."""
        if isinstance(event, Weighted):
            self._weights = dict(event.weights)
        elif isinstance(event, Finished):
            weighted = {name: total({name: value}, self._weights) for name, value in event.parts.items()}
            self._episodes.append((event, weighted))
            self._passes[event.group].append(event.outcome == "pass")
            self._sampled += event.sampled
        elif isinstance(event, Failed):
            self._counts["lost"] += event.final
            self._counts[f"invalid_{slug(event.cause)}"] += 1
        elif isinstance(event, Closed):
            self._counts[f"groups_{event.fate}"] += 1
            self._best.append(any(self._passes.pop(event.group, ())))
        elif isinstance(event, Stale):
            self._counts["groups_stale"] += 1
        elif isinstance(event, Trained):
            self._clear()

    def trained(self, report: Report) -> None:
        """Take a report of the trainer."""
        for name in SPENT:
            self._spent[name] += report.metrics.get(name, 0)
        self._last = {name: value for name, value in report.metrics.items() if name not in SPENT}

    def swapped(self, swap: Mapping[str, float]) -> None:
        """Take what a change of weights in the engine took: bytes, seconds in all, seconds paused."""
        self._swaps.append(swap)

    def sampled(self, trace: Trace, shape: ComputeShape, seconds: float) -> None:
        """Count what an episode took, trained on or not; its sandbox, if it had one, was held all the while."""
        flops = sampling_flops(trace, shape)
        for name, spent in zip(SAMPLING, (flops, flops, seconds * ("sandbox" in trace.made_by)), strict=True):
            self._spent[name] += spent

    def unwritten(self) -> dict[str, float]:
        """Return what was sampled since the last row."""
        return {name: round(self._spent[name], 3) for name in SAMPLING}

    @contextmanager
    def busy(self, part: str) -> Iterator[None]:
        """Say that a part is at work while the body runs; bodies may overlap."""
        self._turn(part, 1)
        try:
            yield
        finally:
            self._turn(part, -1)

    def _turn(self, part: str, by: int) -> None:
        self._settle()
        self._depth[part] += by

    def _settle(self) -> None:
        """Add the time since the last change to every part that was at work in it."""
        now = self._clock()
        for part, depth in self._depth.items():
            self._busy[part] += (now - self._changed) * (depth > 0)
            self._many[part] += (now - self._changed) * depth
        self._changed = now

    def row(self, step: int, queues: Mapping[str, int]) -> dict[str, Any]:
        """Return the row of a step; what is not known is left out."""
        self._settle()
        seconds = max(self._changed - self._began, 1e-9)
        found: dict[str, Any] = {
            "step": step, "tokens": round(self._spent["tokens"]), "flops": round(self._spent["flops"]), "device_seconds": seconds,
            "sampling_flops": round(self._spent["sampling_flops"]), "sandbox_seconds": self._spent["sandbox_seconds"],
            **self._of_episodes(), **self._last, **self._counts,
            "sampled_per_second": self._sampled / seconds, "trained_per_second": self._spent["tokens"] / seconds,
            **{f"idle_{part}": self._idle(part, seconds) for part in PARTS},
            **{f"at_once_{part}": busy / seconds for part, busy in self._many.items()},
            **{f"queue_{name}": length for name, length in queues.items()},
            **{f"weight_{part}": weight for part, weight in self._weights.items()},
            **self._of_swaps(),
        }  # fmt: skip
        return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in found.items()}

    def _idle(self, part: str, seconds: float) -> float:
        busy = self._busy[part] or (self._spent["seconds"] if part == "training" else 0.0)
        return min(max(1 - busy / seconds, 0.0), 1.0)

    def _of_episodes(self) -> dict[str, Any]:
        episodes = [event for event, _ in self._episodes]
        if not episodes:
            return {"episodes": 0}
        weighted = _means(parts for _, parts in self._episodes)
        sums = {
            "reward": sum(weighted.values()), "solved": fmean(each.outcome == "pass" for each in episodes),
            "sampled_tokens": sum(each.sampled for each in episodes),
            "episode_tokens": fmean(each.sampled for each in episodes), "turns": fmean(each.turns for each in episodes),
            "episode_seconds": fmean(each.seconds for each in episodes),
        }  # fmt: skip
        return {
            "episodes": len(episodes), **sums, **({"best_of_group": fmean(self._best)} if self._best else {}),
            **{f"reward_{part}": mean for part, mean in weighted.items()},
            **{f"part_{part}": mean for part, mean in _means(each.parts for each in episodes).items()},
            **{f"behaviour_{name}": mean for name, mean in _means(each.behaviour for each in episodes).items()},
        }  # fmt: skip

    def _of_swaps(self) -> dict[str, float]:
        if not self._swaps:
            return {"swaps": 0}
        means = {f"swap_{name}": fmean(swap[name] for swap in self._swaps) for name in ("bytes", "seconds", "paused")}
        return {"swaps": len(self._swaps), **means}


def behaviours(row: Mapping[str, Any]) -> dict[str, float]:
    """Return what monitors watch, from a row."""
    return {name.removeprefix("behaviour_"): value for name, value in row.items() if name.startswith("behaviour_")}


def sampling_flops(trace: Trace, shape: ComputeShape) -> int:
    """Return the FLOPs of an episode's sampling, each token read once: the engine keeps what it has read."""
    ends: list[int] = []
    found = 0
    for node in trace.nodes:
        start = 0 if node.parent is None else ends[node.parent]
        ends.append(start + len(node.tokens))
        found += forward_flops(shape, len(node.tokens), start)
    return found


def slug(cause: str) -> str:
    """Return a cause as a name: what stands before a colon, since details differ each time."""
    return re.sub(r"[^a-z0-9]+", "_", cause.partition(":")[0].lower()).strip("_")[:CAUSE] or "unknown"


def _means(found: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each name over those that have it."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for each in found:
        for name, value in each.items():
            values[name].append(value)
    return {name: fmean(each) for name, each in values.items()}


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
