"""Made-up runs to look at: a stage of reinforcement learning with ledger, metrics and traces, small or huge, friendly or hostile."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

from etude.agent.trace import Node, Trace, to_json
from etude.files import write_json, write_text
from etude.jsonl import MetricsLog
from etude.rl.exchange import Report, episode_file
from etude.rl.ledger import Batched, Closed, Event, Failed, Finished, Opened, Trained, Weighted, to_line
from etude.rl.metrics import StepMetrics

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS = {"outcome": 1.0, "length": 0.1}
STAGE = ".work/rl-0123456789ab"
NASTY = '<script>alert(1)</script>\x1b[31m\u202egnp.exe\' onmouseover="alert(2)" </pre>&amp;'


def head(run: Path, *stages: tuple[str, str], recipe: str = "") -> Path:
    """Write what makes a folder a run."""
    listed = [{"name": name, "kind": kind} for name, kind in stages or [("rl", "rl")]]
    write_json(run / "run.json", {"name": run.name, "stages": listed, "command": "etude run r.toml", "in": "/"})
    write_text(run / "recipe.toml", recipe or f'name = "{run.name}"\n[rl]\nkind = "rl"\ntasks = "quick.jsonl"\n')
    return run


def trace(
    name: str, task: str, words: str = "I will fix it.", version: int = 0, seed: int = 0, turns: int = 1
) -> Trace:
    """Return an episode: what was asked, turns with a call and its answer, and a branch begun again from a summary where there are several."""
    rng = random.Random(f"{name} {seed}")

    def sampled(parent: int, kind: Any, text: str, **details: Any) -> Node:
        drawn = [-rng.expovariate(1.5) for _ in range(8)]
        return Node(
            parent,
            kind,
            [rng.randrange(300) for _ in drawn],
            text,
            True,
            drawn,
            [0.9 * each for each in drawn],
            [version] * 8,
            0.0,
            1.5,
            details=details,
        )

    nodes = [Node(None, "opening", [1, 2, 3], f"You are an agent. {task}")]
    for turn in range(turns):
        calls = [{"name": "edit", "arguments": {"path": "a.py", "old": "x = 1", "new": words}}]
        nodes.append(sampled(len(nodes) - 1, "turn", words, thinking="hm, " + words, said=words, calls=calls))
        answer = {"name": "edit", "text": f"edited a.py {words}", "failed": turn > 0, "seconds": 0.1}
        nodes.append(Node(len(nodes) - 1, "answers", [5, 6], "edited", details={"answers": [answer]}))
    if turns > 1:
        nodes.append(sampled(len(nodes) - 1, "summary", "So far: " + words))
        nodes.append(Node(0, "restart", [7, 8], "So far"))
        nodes.append(sampled(len(nodes) - 1, "turn", "Done. " + words, said="Done. " + words))
    diff = f"--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x = 1\n+x = 2  # {words}\n"
    return Trace(name, task, nodes, "finished", {"turns": turns, "calls": turns}, {"outcome": 1.0, "length": -0.2}, diff,
                 {"sandbox": "namespaces", "score": {"outcome": "pass", "reason": words, "said": {words: f"E assert {words}"}}})  # fmt: skip


class Growing:
    """A stage of RL that goes on, a step at a time."""

    def __init__(
        self, run: Path, *, groups: int = 3, size: int = 4, words: str = "I will fix it.", traces: bool = True
    ) -> None:
        self.folder, self.groups, self.size, self.words, self.traces = run / STAGE, groups, size, words, traces
        self.step, self.group, self.rng = 0, 0, random.Random(7)
        self.metrics = StepMetrics(lambda: 2.0 * self.step)
        self.folder.mkdir(parents=True)
        self._write([Weighted(WEIGHTS, 1)])

    def _write(self, events: list[Event]) -> None:
        with (self.folder / "ledger.jsonl").open("ab") as ledger:
            for event in events:
                self.metrics.apply(event)
                ledger.write(to_line(event))

    def _episode(self, group: int, episode: int, rise: float) -> Finished:
        passed = self.rng.random() < rise
        behaviour = {"calls": 1.0 + episode, "comment_density": 0.1 * self.rng.random()}
        if self.traces:
            made = trace(
                f"{group}/{episode}",
                f"task-{group % 7}: repair it",
                self.words,
                self.step,
                turns=1 + 2 * (episode == 1),
            )
            path = self.folder / episode_file(group, episode)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(to_json(made))
        parts = {"outcome": float(passed), "length": -0.3 * self.rng.random()}
        return Finished(
            group, episode, "pass" if passed else "fail", parts, behaviour, self.step, self.step, 20 + episode, 2, 3.0
        )

    def train(self, steps: int, log: MetricsLog | None = None) -> Growing:
        """Add some steps."""
        if log is None:
            with MetricsLog(self.folder / "metrics.jsonl") as opened:
                return self.train(steps, opened)
        for _ in range(steps):
            rise = 0.15 + 0.75 * (1 - math.exp(-(self.step + 1) / 40))
            events: list[Event] = []
            numbers = range(self.group, self.group + self.groups)
            for group in numbers:
                events.append(Opened(group, f"{self.words[:40]}-{group % 7}", 0, 0))
                done = [self._episode(group, episode, rise) for episode in range(self.size)]
                rewards = {
                    each.episode: sum(WEIGHTS[part] * value for part, value in each.parts.items()) for each in done
                }
                if group % 11 == 5:
                    events.append(Failed(group, 0, f"sandbox: {self.words}", final=True))
                    done, rewards = done[1:], {number: reward for number, reward in rewards.items() if number}
                events += [*done, Closed(group, "ready", rewards)]
            self.group += self.groups
            self.step += 1
            events.append(Batched(self.step, tuple(numbers)))
            self._write(events)
            told = {"tokens": 4000.0, "flops": 1e9, "seconds": 1.0, "entropy": 1 / (1 + self.step / 50), "kl": self.step / 900, "gradient": 0.4,
                    "loss": 0.1, "mismatch_mean": 0.002, "mismatch_p99": 0.01, "masked": 0.003, "staleness_0": 0.75, "staleness_1": 0.25}  # fmt: skip
            self.metrics.trained(Report(self.step, self.step, told))
            row = self.metrics.row(self.step, {"ready": 1})
            flags = {"flags": {"comment_density": f"step 3: {self.words}"}} if self.step == 3 else {}
            log.put(f"train/{self.step:08d}", **row, **flags)
            self._write([Trained(self.step, self.step)])
        return self
