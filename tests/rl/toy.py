"""A game that is learnt in a minute: go on from a line of code; the reward is the share of tokens of one kind.

    python -m tests.rl.toy MODEL FOLDER [SETTING=JSON …]

plays it as the `rl` stage plays tasks, for tests that kill it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from etude.agent.trace import Node, Trace
from etude.inference.policy import Sampling
from etude.jsonl import MetricsLog
from etude.models.load import load_tokeniser
from etude.progress import Reporter
from etude.rl.environment import Episode, InfrastructureError, Item
from etude.rl.orchestrator import orchestrate
from etude.rl.settings import RlSettings
from etude.sandbox import probe
from etude.sandbox.box import Place
from etude.sandbox.local import open_sandbox
from etude.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from etude.agent.formats import ChatFormat
    from etude.inference.policy import Policy

LINES = (
    "def add(left, right):\n",
    "import os\n",
    "for name in names:\n",
    "class Reader:\n",
    "return self.",
    "if not found:\n",
)


@dataclass
class Toy:
    """The game. `shuffled`: every episode gets the reward of the next one in its group, which says nothing of its own."""

    tokeniser: Any
    tasks: int
    tokens: int = 16
    group_size: int = 0
    shuffled: bool = False
    sandboxed: bool = False
    broken: Callable[[str, str], str] = lambda _item, _name: ""  # the cause for which the machinery fails
    temperature: float = 1.0
    played: list[str] = field(default_factory=list)
    liked: frozenset[int] = frozenset()
    shares: dict[str, dict[str, asyncio.Future[float]]] = field(default_factory=lambda: defaultdict(dict))

    def __post_init__(self) -> None:
        """Say which tokens are liked: those with an e."""
        self.liked = frozenset(token for text, token in self.tokeniser.get_vocab().items() if "e" in text)

    @property
    def items(self) -> Sequence[Item]:
        return [Item(f"toy-{number:03d}", family=str(number % 2)) for number in range(self.tasks)]

    async def run_episode(
        self, item: str, policy: Policy, talk: ChatFormat, *, name: str, seed: int, journal: Path
    ) -> Episode:
        self.played.append(name)
        if cause := self.broken(item, name):
            raise InfrastructureError(cause)
        box = await open_sandbox(Place(()), "namespaces") if self.sandboxed else None
        try:
            return await self._played(item, policy, name, seed)
        finally:
            if box:
                await box.close()

    async def _played(self, item: str, policy: Policy, name: str, seed: int) -> Episode:
        line = LINES[int(item[-3:]) % len(LINES)]
        prompt = self.tokeniser.encode(line)
        done = await policy.generate(
            prompt, Sampling(max_tokens=self.tokens, temperature=self.temperature, seed=seed), session=name
        )
        trace = Trace(name, item)
        trace.nodes.append(Node(None, "opening", prompt, line))
        trace.nodes.append(Node(
            0, "turn", done.token_ids, self.tokeniser.decode(done.token_ids), sampled=True, logprobs=done.logprobs,
            raw_logprobs=done.raw_logprobs, versions=done.versions,
        ))  # fmt: skip
        trace.stop, trace.counts = "finished", {"turns": 1}
        share = sum(token in self.liked for token in done.token_ids) / self.tokens
        trace.rewards = {"outcome": await self._swapped(name, share) if self.shuffled else share}
        return Episode(trace, "pass" if share > 0.5 else "fail", {"share": share, "thinking_tokens": 0.0})

    async def _swapped(self, name: str, share: float) -> float:
        group, episode = name.split("-")
        here = self.shares[group]
        for number in range(self.group_size):
            here.setdefault(f"{number:03d}", asyncio.get_running_loop().create_future())
        here[episode].set_result(share)
        return await here[f"{(int(episode) + 1) % self.group_size:03d}"]


def settings_of(**given: Any) -> RlSettings:
    """Return settings of a small run on a CPU."""
    small = {
        "tasks": "toy",
        "device": "cpu",
        "steps": 3,
        "groups": 2,
        "group_size": 2,
        "compile": "off",
        "processes": False,
    }
    return RlSettings(**{**small, **given})


def play(model: Path, folder: Path, settings: RlSettings, toy: Toy, *, seed: int = 0, quiet: bool = True) -> None:
    """Run to the end, or go on with what is there."""
    folder.mkdir(parents=True, exist_ok=True)
    with MetricsLog(folder / "metrics.jsonl") as metrics:
        work = Work(folder, metrics, Reporter(quiet=quiet), folder / "cache")
        asyncio.run(orchestrate(toy, model, settings, work, seed))


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, out = Path(sys.argv[1]), Path(sys.argv[2])
    wished = {name: json.loads(value) for name, _, value in (word.partition("=") for word in sys.argv[3:])}
    sandboxed = asyncio.run(probe.try_namespaces()).works
    chosen = settings_of(processes=True, **wished)
    toy = Toy(load_tokeniser(where), tasks=40, tokens=24, sandboxed=sandboxed, temperature=chosen.harness.temperature)
    play(where, out, chosen, toy, quiet=False)
