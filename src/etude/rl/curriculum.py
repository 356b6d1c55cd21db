"""Which task comes next: weights for drawing without replacement, from what was seen of a task and of its family.

    weight = effort^(hard · ramp) · (1 − solved · ramp · (2p − 1)²)

effort: turns and thinking tokens of its episodes, each as a share of the mean of all, averaged; Composer 2 draws harder tasks more
often later, by these two. p: share solved; (2p − 1)² is 0 where half the episodes pass, which teaches most, and 1 where all or none
do, which gives a flat group and teaches nothing. ramp: 0 at first, so that all family are seen before any is judged, then up to 1.
A task seldom seen is taken for what its family is, a family seldom seen for what all are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from etude.rl.environment import Item
    from etude.rl.ledger import Finished
    from etude.rl.settings import CurriculumSettings

PRIOR = 8  # episodes that what is expected of a task or family counts as much as: a group of the usual size


@dataclass
class Tally:
    """Sums over episodes; means, where it is of one episode."""

    episodes: int = 0
    solved: float = 0.0
    turns: float = 0.0
    thinking: float = 0.0

    def add(self, finished: Finished) -> None:
        self.episodes += 1
        self.solved += finished.outcome == "pass"
        self.turns += finished.turns
        self.thinking += finished.behaviour.get("thinking_tokens", 0.0)

    def means(self, expected: Tally, prior: int = PRIOR) -> Tally:
        """Return the means, with `expected` counted as `prior` episodes."""
        count = self.episodes + prior
        return Tally(
            1, (self.solved + prior * expected.solved) / count, (self.turns + prior * expected.turns) / count,
            (self.thinking + prior * expected.thinking) / count,
        )  # fmt: skip


@dataclass
class Experience:
    """What was seen of the tasks so far."""

    all: Tally = field(default_factory=Tally)
    family: dict[str, Tally] = field(default_factory=dict)
    task: dict[str, Tally] = field(default_factory=dict)

    def add(self, item: Item, finished: Finished) -> None:
        for tally in (self.all, self.family.setdefault(item.family, Tally()), self.task.setdefault(item.id, Tally())):
            tally.add(finished)

    def weights(self, items: Iterable[Item], settings: CurriculumSettings, progress: float) -> list[float]:
        """Return the weight of each item. `progress`: share of the steps that is done."""
        items, ramp = list(items), ramp_at(progress, settings.begin)
        if ramp == 0 or not self.all.episodes:
            return [1.0] * len(items)
        mean = self.all.means(Tally(), prior=0)
        family = {name: self.family.get(name, Tally()).means(mean) for name in {item.family for item in items}}
        unseen = {
            name: _weight(expected, mean, settings, ramp) for name, expected in family.items()
        }  # there may be many
        seen = ((self.task.get(each.id), each.family) for each in items)
        return [_weight(own.means(family[of]), mean, settings, ramp) if own else unseen[of] for own, of in seen]


def ramp_at(progress: float, begin: float) -> float:
    """Return how far the curriculum counts: 0 until `begin`, 1 from twice that on."""
    return min(max((progress - begin) / begin, 0.0), 1.0) if begin else 1.0


def _weight(task: Tally, mean: Tally, settings: CurriculumSettings, ramp: float) -> float:
    shares = [each / whole for each, whole in ((task.turns, mean.turns), (task.thinking, mean.thinking)) if whole]
    effort = sum(shares) / len(shares) if shares else 1.0
    certain = (2 * task.solved - 1) ** 2
    return float(effort ** (settings.hard * ramp)) * (1 - settings.solved * ramp * certain)
