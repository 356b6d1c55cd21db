"""Made-up episodes to learn from: trees of random tokens, as harness and engine would have left them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from etude.agent.trace import Node, Trace, to_json
from etude.rl.exchange import Batch, TrainedEpisode, TrainedGroup, episode_file
from etude.rl.settings import RlSettings
from tests import tiny

if TYPE_CHECKING:
    from pathlib import Path

    from etude.agent.trace import NodeKind
    from etude.rl.trainer import Trainer


def node(rng: random.Random, parent: int | None, kind: NodeKind, version: int = 0) -> Node:
    """Return a node of a few tokens, sampled if it is of a kind that is."""
    # Not 0, which pads: transformers leaves the gradient of its embedding out.
    tokens = [rng.randrange(1, tiny.VOCABULARY) for _ in range(rng.randrange(2, 7))]
    if kind not in {"turn", "summary"}:
        return Node(parent, kind, tokens, "")
    drawn = [rng.uniform(-7, -4) for _ in tokens]  # a tiny model with random weights gives −5.8 to nearly all
    return Node(parent, kind, tokens, "", True, drawn, [each / 2 for each in drawn], [version] * len(tokens))


LINE: tuple[tuple[int | None, NodeKind], ...] = ((None, "opening"), (0, "turn"), (1, "answers"), (2, "turn"))
# Two contexts joined by a summary; then one turn that two paths share, as if an answer had been given twice.
TREE: tuple[tuple[int | None, NodeKind], ...] = (
    (None, "opening"), (0, "turn"), (1, "summary_request"), (2, "summary"), (0, "restart"), (4, "turn"), (5, "answers"),
    (6, "turn"), (5, "answers"), (8, "turn"), (9, "answers"),
)  # fmt: skip


def episode(rng: random.Random, shape: Any, name: str = "made", version: int = 0) -> Trace:
    """Return an episode of this shape."""
    return Trace(name, "task", [node(rng, parent, kind, version) for parent, kind in shape])


def batch(folder: Path, step: int, groups: list[list[tuple[Trace, float]]]) -> Batch:
    """Write the traces of a batch and return it."""
    made = []
    for place, group in enumerate(groups):
        number, episodes = step * 100 + place, []
        for each, (trace, reward) in enumerate(group):
            path = folder / episode_file(number, each)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(to_json(trace))
            episodes.append(TrainedEpisode(episode_file(number, each), reward))
        made.append(TrainedGroup(number, "task", tuple(episodes)))
    return Batch(step, tuple(made))


def usual(rng: random.Random, version: int = 0) -> list[list[tuple[Trace, float]]]:
    """Return two groups of two episodes, one of them a tree."""
    shapes = [[TREE, LINE], [LINE, LINE]]
    return [[(episode(rng, shape, version=version), rng.random()) for shape in group] for group in shapes]


def step(trainer: Trainer, batch: Batch, root: Path) -> dict[str, float]:
    """Let a trainer learn from one batch; return its metrics."""
    return next(trainer.steps([batch], root))


def gradient(trainer: Trainer, batch: Batch, root: Path) -> dict[str, float]:
    """Compute the gradient of a batch and leave it there; return the loss and what was observed."""
    trainer._root = root
    packed = trainer.packed(batch, trainer.session.micro, fixed=False)
    loss, _ = trainer.session.loop.backward(packed.rows(), packed.divisor)
    tokens, places = sum(len(each.tokens) for each in packed.branches), sum(part.tokens.size for part in packed.parts)
    gains = sum(map(abs, packed.gains)) / len(packed.gains)
    metrics = {"loss": float(loss) / packed.divisor, "advantage": gains, "padding": 1 - tokens / places}
    return metrics | trainer.observed(packed.parts, trainer.done)


def settings(**more: Any) -> RlSettings:
    """Return settings for such batches, on a CPU."""
    plain: dict[str, Any] = {"tasks": "none", "groups": 2, "group_size": 2, "normaliser": 10, "device": "cpu"}
    return RlSettings(**plain | {"optimiser": {"lr": 1e-3}} | more)
