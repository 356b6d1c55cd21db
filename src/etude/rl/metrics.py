"""The metrics of a run: events and reports in, one flat row a step out, and means over rows.

A row is about what happened since the step before was trained. In an asynchronous run the episodes that ended in that time are not
those the step learnt from: rewards are of the newest episodes, so that a curve shows the policy as it is.

Episodes end in bursts: one step sees two hundred of them and the next a handful. A mean over steps would let that handful, which are
often the last and the slowest, say what the policy can do: a run that rose was once said to have fallen. So in means over rows every
episode counts once.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from statistics import fmean
from typing import TYPE_CHECKING, Any

from etude.lineage.compute import ComputeShape, forward_flops
from etude.rewards.reward import total
from etude.rl.ledger import Batched, Closed, Event, Failed, Finished, Stale, Trained, Weighted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from etude.agent.trace import Trace
    from etude.rl.exchange import Report

    Row = Mapping[str, Any]
    Counted = tuple[float, float]  # a number of a step, and how much it counts

PARTS = ("sampling", "scoring", "training")  # whose idle time is reported
SPENT = ("tokens", "flops", "seconds")  # of reports; they add up, all else is of the step alone
SAMPLING = ("flops", "sampling_flops", "sandbox_seconds")
CAUSE = 40  # characters
ENOUGH = 30  # episodes: of fewer, a share is known within 18 points at best
OF_EPISODES = ("reward", "solved", "best_of_group", "part_", "behaviour_", "episode_", "turns")


class StepMetrics:
    """Adds everything up, and begins anew with each step. `row` may be asked for at any time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._weights: dict[str, float] = {}
        self._passes: defaultdict[int, list[bool]] = defaultdict(list)  # of groups that are not closed
        self._slow: defaultdict[int, list[float]] = defaultdict(list)  # seconds of episodes, by group
        self._depth: Counter[str] = Counter()  # how many are at work now, by part
        self._clear()

    def _clear(self) -> None:
        self._episodes: list[tuple[Finished, dict[str, float]]] = []  # with the weighted parts
        self._best: list[bool] = []  # of closed groups: whether one episode passed
        self._counts: Counter[str] = Counter()
        self._fates: defaultdict[str, list[float]] = defaultdict(list)  # the same, by what became of it
        self._last: dict[str, float] = {}  # what the trainer reported of its last step
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._swaps: list[Mapping[str, float]] = []
        self.resumed()

    def resumed(self) -> None:
        """Begin to count time: what was added so far is an earlier session's, and no part of this one's speed."""
        self._began = self._changed = self._clock()
        self._sampled = 0
        self._busy: defaultdict[str, float] = defaultdict(float)  # seconds in which at least one was at work
        self._many: defaultdict[str, float] = defaultdict(float)  # seconds, times how many were

    def apply(self, event: Event) -> None:
        """Add an event of the ledger, an old one or a new one. `Trained` ends a row: ask for it before."""
        match event:
            case Weighted(weights):
                self._weights = dict(weights)
            case Finished():
                weighted = {name: total({name: value}, self._weights) for name, value in event.parts.items()}
                self._episodes.append((event, weighted))
                self._passes[event.group].append(event.outcome == "pass")
                self._slow[event.group].append(event.seconds)
                self._sampled += event.sampled
            case Failed():
                self._counts["lost"] += event.final
                self._counts[f"invalid_{slug(event.cause)}"] += 1
            case Closed(group, fate):
                self._counts[f"groups_{fate}"] += 1
                self._best.append(any(self._passes.pop(group, ())))
                if fate != "ready":
                    self._slow.pop(group, None)
            case Batched(groups=groups):
                for group in groups:
                    self._fates["trained"] += self._slow.pop(group, ())
            case Stale(group):
                self._counts["groups_stale"] += 1
                self._fates["stale"] += self._slow.pop(group, ())
            case Trained():
                self._clear()

    def trained(self, report: Report) -> None:
        """Add a report of the trainer."""
        for name in SPENT:
            self._spent[name] += report.metrics.get(name, 0)
        self._last = {name: value for name, value in report.metrics.items() if name not in SPENT}

    def swapped(self, swap: Mapping[str, float]) -> None:
        """Add what a change of weights in the engine took: bytes, seconds in all, seconds paused."""
        self._swaps.append(swap)

    def sampled(self, trace: Trace, shape: ComputeShape, seconds: float) -> None:
        """Add what an episode took, trained on or not; its sandbox, if it had one, was held all the while."""
        flops = sampling_flops(trace, shape)
        for name, spent in zip(SAMPLING, (flops, flops, seconds * ("sandbox" in trace.made_by)), strict=True):
            self._spent[name] += spent

    def unwritten(self) -> dict[str, float]:
        """Return what was sampled since the last row."""
        return {name: round(self._spent[name], 3) for name in SAMPLING}

    @contextmanager
    def busy(self, part: str, *waiting: str) -> Iterator[None]:
        """Count a part as at work while the body runs, and one less of those that wait for it; bodies may overlap."""
        change = {part: 1, **dict.fromkeys(waiting, -1)}
        self._settle()
        self._depth.update(change)
        try:
            yield
        finally:
            self._settle()
            self._depth.subtract(change)

    def pace(self, *, held_back: bool) -> None:
        """Count the time in which sampling waits only so that no group grows too old (`late = "wait"`)."""
        self._settle()
        self._depth["pace"] = int(held_back)

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
        values: dict[str, Any] = {
            "step": step, "tokens": round(self._spent["tokens"]), "flops": round(self._spent["flops"]), "device_seconds": seconds,
            "sampling_flops": round(self._spent["sampling_flops"]), "sandbox_seconds": self._spent["sandbox_seconds"],
            **self._of_episodes(), **self._last, **self._counts,
            "sampled_per_second": self._sampled / seconds, "trained_per_second": self._spent["tokens"] / seconds,
            **{f"idle_{part}": self._idle(part, seconds) for part in PARTS},
            **{f"at_once_{part}": busy / seconds for part, busy in self._many.items() if part in PARTS},
            **({"held_back": self._busy["pace"] / seconds} if "pace" in self._depth else {}),
            **{f"seconds_{fate}": fmean(seconds) for fate, seconds in self._fates.items() if seconds},
            **{f"queue_{name}": length for name, length in queues.items()},
            **{f"weight_{part}": weight for part, weight in self._weights.items()},
            **self._of_swaps(),
        }  # fmt: skip
        return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in values.items()}

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


def sampling_flops(trace: Trace, shape: ComputeShape) -> int:
    """Return the FLOPs of an episode's sampling, each token read once: the engine keeps what it has read."""
    ends: list[int] = []
    flops = 0
    for node in trace.nodes:
        start = 0 if node.parent is None else ends[node.parent]
        ends.append(start + len(node.tokens))
        flops += forward_flops(shape, len(node.tokens), start)
    return flops


def slug(cause: str) -> str:
    """Return a cause as a name: what stands before a colon, since details differ each time."""
    return re.sub(r"[^a-z0-9]+", "_", cause.partition(":")[0].lower()).strip("_")[:CAUSE] or "unknown"


def _means(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each name over those that have it."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            values[name].append(value)
    return {name: fmean(each) for name, each in values.items()}


def starting(row: Row, prefix: str) -> dict[str, Any]:
    """Return the numbers whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}


def added(rows: Iterable[Row], prefix: str) -> Counter[str]:
    """Return counts whose names begin with `prefix`, added up over the steps, the largest first."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(starting(row, prefix))
    return Counter(dict(counts.most_common()))


def count(row: Row, name: str) -> float:
    """Return how much a step counts: as often as there were episodes, if the number is a mean over them."""
    return float(row.get("episodes", 1)) if name.startswith(OF_EPISODES) else 1.0


def weighted(rows: Iterable[Row], name: str) -> list[Counted]:
    """Return a number of the steps that have it, and how much each counts."""
    return [(row[name], count(row, name)) for row in rows if name in row]


def mean(values: Sequence[Counted]) -> float:
    return sum(value * times for value, times in values) / sum(times for _, times in values)


def ends(rows: Iterable[Row], name: str) -> tuple[float, float] | None:
    """Return the mean of a number in the first and in the last tenth of a run; a step across the border counts in part.

    Of episodes, at least `ENOUGH` on either side, and no step on both: fewer say nothing of a change, and None is returned.
    """
    values = weighted(rows, name)
    least = ENOUGH if name.startswith(OF_EPISODES) else 0
    part = max(sum(times for _, times in values) / 10, least)
    first, last = _until(values, part), _until(values[::-1], part)
    if not values or (least and (len(first) + len(last) > len(values) or sum(times for _, times in last) < least)):
        return None
    return mean(first), mean(last)


def _until(values: Sequence[Counted], left: float) -> list[Counted]:
    """Return the first numbers, until they count so much in all."""
    taken = []
    for value, times in values:
        taken.append((value, min(times, left)))
        left -= times
        if left <= 0:
            break
    return taken


def smooth(values: Sequence[Counted], reach: int) -> list[float]:
    """Return the mean of each number and those around it, `reach` to each side: centred, so that nothing seems late."""
    return [mean(values[max(0, place - reach) : place + reach + 1]) for place in range(len(values))]
