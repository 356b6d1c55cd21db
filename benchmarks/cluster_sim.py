"""What becomes of a run on a cluster: a discrete-event simulation around the real state machine, from 8 to 4,096 GPUs.

    python benchmarks/cluster_sim.py [--gpus 8 64 512 4096] [--seed 0] [--groups 2500] [--hardware cpu]

What decides is `etude.rl.state.State`, every event applied as in a run. What takes time is drawn: episodes are log-normal, and what
they are drawn from was measured (`measured`; each number with its file in the result). Nothing else of the repository runs.

engine   requests on an engine share it: all advance alike, at the measured milliseconds a decoding step for so many at once.
         A session stays with its engine, the emptier of two drawn ones. Prompts cost nothing (78 % of their tokens are cached).
sandbox  held by an episode from its begin to its end; commands and scoring are delays, as if each had a core.
trainer  a step takes its tokens / (ranks · measured tokens/s), as if ranks scaled without loss; then publishing, by one rank (as one
         GPU does) or by one a node of eight ("sharded"; the code has every rank publish a share), at the measured seconds a byte.
weights  every engine fetches each delta over its own link from one store, loads it at the measured seconds a byte, then pauses.
faults   by rate: an engine loses what it was writing and comes back by an anchor; a rank's loss restarts the trainer from its last
         checkpoint; a pool's loss fails its episodes, which are tried again.

Hard tasks, a tenth, take four times as long. `hard` is their share of the trained groups in per cent of their share of the tasks: 100
is fair. State's CPU time is measured on this machine; everything else follows from the seed.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
import sys
import time
from bisect import bisect
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from etude.rl.environment import Item
from etude.rl.ledger import Batched, Failed, Finished, Trained, Weighted, to_line
from etude.rl.orchestrator import TRIES
from etude.rl.settings import RlSettings
from etude.rl.state import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from etude.rl.ledger import Event

RESULTS = Path(__file__).parent / "results"
SIZE = 8  # episodes of a group
STEPS = 10**6  # of the settings: never reached
NODE = 8  # GPUs of a node
POOL = 64  # sandboxes of a pool


@dataclass(frozen=True)
class Work:
    """What episodes are like. `blocks`: parts they are simulated in, of several turns each, so that long ones cost no more."""

    name: str
    turns: float
    tokens: float  # sampled in a turn
    trained: float  # tokens of the rows of an episode
    tool: float  # seconds of a turn's commands
    score: float  # seconds
    sigma: float  # of the logarithm of an episode's time
    blocks: int = 2
    hard: float = 0.1  # share of the tasks
    slow: float = 4.0  # times as long
    solved: float = 0.5


@dataclass(frozen=True)
class Cluster:
    """What there is, and what it takes."""

    trainer: int  # GPUs
    engines: int  # of one GPU each
    sandboxes: int
    groups: int  # a step
    late: str = "drop"
    mode: str = "async"
    staleness: int = 4
    decode: tuple[tuple[float, float], ...] = ((1.0, 1.0),)  # (requests, seconds a decoding step), ascending
    rate: float = 1.0  # tokens/s that a rank trains
    publish: float = 0.0  # seconds, by all publishers together
    fetch: float = 0.0  # seconds until an engine has fetched and loaded a version
    pause: float = 0.0  # seconds that it stands still for that
    restart: float = 60.0  # seconds until a lost engine or trainer is back
    checkpoint: int = 10  # steps between checkpoints
    faults: dict[str, float] = field(default_factory=dict)  # a second, of all together: engine, rank, pool


@dataclass(eq=False)
class Episode:
    """One that is under way."""

    place: tuple[int, int]
    slow: float
    engine: int
    pool: int
    tokens: float = 0.0  # sampled
    done: int = 0  # blocks
    oldest: int = -1
    lost: bool = False


class Engine:
    """Requests that share one engine. `clock`: tokens that each of them has got since it began; a request ends at a reading of it."""

    def __init__(self, decode: tuple[tuple[float, float], ...]) -> None:
        self.decode, self.known = decode, [count for count, _ in decode]
        self.requests: list[tuple[float, int, Episode]] = []
        self.clock = self.at = self.busy = 0.0
        self.stamp, self.version, self.up = 0, 0, True
        self.until = 0.0  # standing still until then

    def seconds(self) -> float:
        """Return the seconds of a decoding step with the requests of now: measured, in between by a line, beyond by the last one."""
        count, known = len(self.requests), self.known
        if len(known) == 1:
            return self.decode[0][1]
        upper = min(max(bisect(known, count), 1), len(known) - 1)
        (low, fast), (high, slow) = self.decode[upper - 1], self.decode[upper]
        return fast + (slow - fast) * (max(count, low) - low) / (high - low)

    def advance(self, now: float) -> None:
        start = max(self.at, min(self.until, now))
        if self.requests and now > start:
            self.clock += (now - start) / self.seconds()
            self.busy += now - start
        self.at = now

    def add(self, tokens: float, number: int, episode: Episode) -> None:
        heapq.heappush(self.requests, (self.clock + tokens, number, episode))

    def next_end(self) -> float:
        return max(self.at, self.until) + max(0.0, self.requests[0][0] - self.clock) * self.seconds()


class Simulation:
    """One run. Time is in seconds from its start."""

    def __init__(self, cluster: Cluster, work: Work, tasks: int, seed: int) -> None:
        self.cluster, self.work, self.chance = cluster, work, random.Random(seed)  # noqa: S311 - reproducible
        hard = round(tasks * work.hard)
        self.items = [Item(f"{'hard' if number < hard else 'easy'}-{number}", "") for number in range(tasks)]
        options: dict[str, Any] = {
            "mode": cluster.mode,
            "late": cluster.late,
            "curriculum": {"hard": 0.0, "solved": 0.0},
        }
        self.settings = RlSettings(tasks="none", steps=STEPS, groups=cluster.groups, group_size=SIZE, epochs=1000,
                                   staleness=cluster.staleness, concurrency=cluster.sandboxes, **options)  # fmt: skip
        self.state = State(self.items, self.settings, seed)
        self.now, self.number, self.cpu = 0.0, 0, 0.0
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.engines = [Engine(cluster.decode) for _ in range(cluster.engines)]
        self.pools: defaultdict[int, set[Episode]] = defaultdict(set)
        self.playing: dict[tuple[int, int], Episode] = {}
        self.idle: list[tuple[int, int]] = []
        self.synced = self.loading = 0  # version that the engines have, and that they are loading
        self.training, self.training_until, self.step_seconds = False, 0.0, 0.0
        self.sums: defaultdict[str, float] = defaultdict(float)  # episodes, tokens, seconds of many a thing
        self.bytes, self.seen = (
            Counter[str](),
            Counter[str](),
        )  # ledger bytes by kind of the first of each, events by kind
        self.behind: Counter[int] = Counter()  # groups by staleness
        self.hard: Counter[str] = Counter()
        self.held_since: float | None = None
        self.apply(Weighted({"outcome": 1.0}, 1))
        for kind, rate in cluster.faults.items():
            if rate:
                self.after(self.chance.expovariate(rate), self.fault, kind, rate)

    def after(self, seconds: float, what: Callable[..., None], *given: Any) -> None:
        self.number += 1
        heapq.heappush(self.events, (self.now + seconds, self.number, what, given))

    def apply(self, event: Event) -> None:
        kind = type(event).__name__
        self.seen[kind] += 1
        if self.seen[kind] <= 100:  # a line takes longer to write than all else here
            self.bytes[kind] += len(to_line(event))
        began = time.perf_counter()
        self.state.apply(event)
        self.cpu += time.perf_counter() - began

    def ask(self, question: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        answer = question()
        self.cpu += time.perf_counter() - began
        return answer

    def run(self, warm: int, steps: int) -> dict[str, Any]:
        """Return what was seen from the end of step `warm` to that of step `steps`."""
        self.settle()
        while self.state.trained < warm:
            self.happen()
        start = self.snapshot()
        while self.state.trained < steps:
            self.happen()
        return {name: value - start[name] for name, value in self.snapshot().items()}

    def happen(self) -> None:
        until, _, what, given = heapq.heappop(self.events)
        self.sums["sandbox_seconds"] += len(self.playing) * (until - self.now)
        self.now = until
        what(*given)

    def snapshot(self) -> dict[str, float]:
        """Return all sums so far."""
        for engine in self.engines:
            if engine.up:
                engine.advance(self.now)
        lines = sum(self.bytes[kind] / min(count, 100) * count for kind, count in self.seen.items())
        groups = {f"groups_{kind}": self.state.counts[kind] for kind in ("opened", "batched", "stale", "flat")}
        return {
            "seconds": self.now, "cpu": self.cpu, "ledger": lines, "engine_seconds": sum(each.busy for each in self.engines),
            "steps": self.state.trained, **{f"behind_{each}": self.behind[each] for each in range(self.cluster.staleness + 1)},
            **{f"hard_{kind}": self.hard[kind] for kind in ("opened", "batched")}, **groups,
            "failed": self.state.counts["failed"], "lost": self.state.counts["lost"],
            **{name: self.sums[name] for name in ("episodes", "tokens", "sandbox_seconds", "training", "publishing", "held", "again",
                                                  "faults", "requests", "waiting")},
        }  # fmt: skip

    # Deciding, as the orchestrator does.

    def settle(self) -> None:
        for closed in self.ask(self.state.closing):
            self.apply(closed)
        for stale in self.ask(self.state.stale):
            self.apply(stale)
        while batch := self.ask(self.state.batch):
            self.batch(batch)
        self.watch_held()
        if not self.training and self.state.batched > self.state.trained:
            self.train()
        patient = self.cluster.mode == "sync" or self.cluster.late == "wait"
        if not patient or self.synced >= self.state.version:
            self.begin()

    def batch(self, batch: Batched) -> None:
        for number in batch.groups:
            group = self.state.group(number)
            self.behind[batch.step - 1 - group.oldest] += 1
            self.hard["batched"] += group.task.startswith("hard")
        self.apply(batch)

    def watch_held(self) -> None:
        """Count the time in which a batch is held back, though there are groups for it and the trainer would take it."""
        near = self.state.batched < self.state.trained + (1 if self.cluster.mode == "sync" else 2)
        held = near and self.state.queues["ready"] >= self.cluster.groups
        if self.held_since is not None:
            self.sums["held"] += self.now - self.held_since
        self.held_since = self.now if held else None

    def begin(self) -> None:
        if self.state.unplayed < self.settings.at_once:
            while opened := self.ask(self.state.next_group):
                self.apply(opened)
                self.hard["opened"] += opened.task.startswith("hard")
                for number in range(SIZE):
                    heapq.heappush(self.idle, (opened.group, number))
        while self.idle and len(self.playing) < self.cluster.sandboxes:
            place = heapq.heappop(self.idle)
            slow = self.work.slow if self.state.group(place[0]).task.startswith("hard") else 1.0
            pool = self.chance.randrange(-(-self.cluster.sandboxes // POOL))
            episode = self.playing[place] = Episode(place, slow * self.drawn(), self.choose(), pool)
            self.pools[pool].add(episode)
            self.ask_tokens(episode)

    # Playing.

    def choose(self) -> int:
        one, other = self.chance.randrange(len(self.engines)), self.chance.randrange(len(self.engines))
        first, second = self.engines[one], self.engines[other]
        return one if first.up and (not second.up or len(first.requests) <= len(second.requests)) else other

    def drawn(self) -> float:
        """Return how many times the mean an episode takes; the mean of these is 1."""
        sigma = self.work.sigma
        return math.exp(self.chance.gauss(-sigma * sigma / 2, sigma)) if sigma else 1.0

    def ask_tokens(self, episode: Episode) -> None:
        tokens = self.work.tokens * self.work.turns / self.work.blocks * episode.slow
        episode.tokens += tokens
        self.send(episode, tokens)

    def send(self, episode: Episode, tokens: float) -> None:
        if not self.engines[episode.engine].up:
            episode.engine = self.choose()
        engine = self.engines[episode.engine]
        if not engine.up:  # both that were drawn are gone: a client tries again
            self.after(1.0, self.send, episode, tokens)
            return
        engine.advance(self.now)
        if episode.oldest < 0:
            episode.oldest = engine.version
        self.sums["requests"] += self.work.turns / self.work.blocks
        self.number += 1
        engine.add(tokens, self.number, episode)
        self.schedule(episode.engine)

    def schedule(self, place: int) -> None:
        engine = self.engines[place]
        engine.stamp += 1
        if engine.requests and engine.up:
            self.number += 1
            heapq.heappush(self.events, (engine.next_end(), self.number, self.written, (place, engine.stamp)))

    def written(self, place: int, stamp: int) -> None:
        """End the request of an engine that is done first, unless something has changed since that was foreseen."""
        engine = self.engines[place]
        if stamp != engine.stamp:
            return
        engine.advance(self.now)
        episode = heapq.heappop(engine.requests)[2]
        self.schedule(place)
        if episode.lost:
            return
        episode.done += 1
        seconds = self.work.tool * self.work.turns / self.work.blocks * episode.slow
        if episode.done == self.work.blocks:
            self.after(seconds + self.work.score * episode.slow, self.end, episode)
        else:
            self.after(seconds, self.go_on, episode)

    def go_on(self, episode: Episode) -> None:
        if not episode.lost:
            self.ask_tokens(episode)

    def end(self, episode: Episode) -> None:
        if episode.lost:
            return
        self.leave(episode)
        passed = self.chance.random() < self.work.solved
        newest = max(self.engines[episode.engine].version, episode.oldest)
        self.sums["episodes"] += 1
        self.sums["tokens"] += episode.tokens
        group, number = episode.place
        sampled, turns = round(episode.tokens), round(self.work.turns)
        outcome: Literal["pass", "fail"] = "pass" if passed else "fail"
        parts = {"outcome": float(passed)}
        self.apply(Finished(group, number, outcome, parts, {}, episode.oldest, newest, sampled, turns, 1.0))
        self.settle()

    def leave(self, episode: Episode) -> None:
        del self.playing[episode.place]
        self.pools[episode.pool].discard(episode)

    # Training, and new weights.

    def train(self) -> None:
        own = self.cluster
        step = self.state.trained + 1
        numbers = self.state.groups_of(step)
        episodes = sum(len(self.state.group(number).rewards) for number in numbers)
        seconds = episodes * self.work.trained / (own.trainer * own.rate)
        self.training, self.step_seconds = True, seconds
        self.training_until = self.now + seconds + own.publish
        self.after(seconds + own.publish, self.trained, step, seconds)

    def trained(self, step: int, seconds: float) -> None:
        if self.now < self.training_until:  # a rank was lost meanwhile
            self.after(self.training_until - self.now, self.trained, step, seconds)
            return
        self.training = False
        self.sums["training"] += seconds
        self.sums["publishing"] += self.cluster.publish
        self.apply(Trained(step, step))
        if not self.loading:
            self.load()
        self.settle()

    def load(self) -> None:
        self.loading = self.state.version
        self.after(self.cluster.fetch, self.swap, self.loading)

    def swap(self, version: int) -> None:
        """Let all engines take over a version that they have fetched."""
        for place, engine in enumerate(self.engines):
            if engine.up:
                engine.advance(self.now)
                engine.version, engine.until = version, self.now + self.cluster.pause
                self.schedule(place)
        self.synced, self.loading = version, 0
        if version < self.state.version:
            self.load()
        self.settle()

    # Faults.

    def fault(self, kind: str, rate: float) -> None:
        self.after(self.chance.expovariate(rate), self.fault, kind, rate)
        self.sums["faults"] += 1
        if kind == "engine":
            self.lose_engine(self.chance.randrange(len(self.engines)))
        elif kind == "rank" and self.training:
            done = self.state.trained % self.cluster.checkpoint  # and the one that was under way
            until = self.now + self.cluster.restart + (done + 1) * self.step_seconds + self.cluster.publish
            self.sums["waiting"] += until - self.training_until
            self.training_until = until
        elif kind == "pool":
            self.lose_pool(self.chance.randrange(-(-self.cluster.sandboxes // POOL)))

    def lose_engine(self, place: int) -> None:
        engine = self.engines[place]
        if not engine.up or sum(each.up for each in self.engines) == 1:
            return
        engine.advance(self.now)
        lost, engine.requests, engine.up = engine.requests, [], False
        engine.stamp += 1
        for end, _, episode in lost:
            self.sums["again"] += 1
            self.send(episode, max(0.0, end - engine.clock))  # at another one, from what the client has
        self.after(self.cluster.restart + self.cluster.fetch, self.return_engine, place)

    def return_engine(self, place: int) -> None:
        engine = self.engines[place]
        engine.up, engine.at, engine.version = True, self.now, self.synced

    def lose_pool(self, pool: int) -> None:
        for episode in sorted(self.pools.pop(pool, ()), key=lambda each: each.place):
            episode.lost = True
            del self.playing[episode.place]
            final = self.state.attempts(*episode.place) + 1 >= TRIES
            self.apply(Failed(*episode.place, "pool", final))
            if not final:
                heapq.heappush(self.idle, episode.place)
        self.settle()


# What was measured, and what is assumed.

RUN, DECODE, TRAIN = (
    "rl-h200.json",
    "large_models-decode-qwen3-30b-a3b-h200.json",
    "large_models-train-qwen3-30b-a3b-lora-h200.json",
)
SANDBOX, CLIENT, OWN = "sandbox-cpu.json", "token_api-cpu.json", "orchestrator_load-cpu.json"


def _a_byte(name: str) -> Callable[[Any], Any]:
    return lambda run: run["modes"]["sync"]["update"][name] / run["modes"]["sync"]["update"]["full_bytes"]


def _of_run(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda run: read(run["modes"]["async"])


def _of_sandbox(start: str, tests: str) -> Callable[[Any], Any]:
    def read(found: Any) -> Any:
        own = found["backends"]["namespaces"]
        return (own["starts"]["python"][start]["median"] + own["tests"][tests]["median"]) / 1e3

    return read


def _spread(study: Any) -> float:
    trials = [trial for run in study["runs"].values() for trial in run.get("after", {}).get("trials", ())]
    return statistics.stdev(math.log(trial["seconds"]) for trial in trials if trial.get("seconds"))


def _client(found: Any) -> Any:
    return next(row["client CPU us/token"] for row in found["rows"] if (row["way"], row["requests"]) == ("tcp", 64))


def _own(found: Any) -> dict[str, float]:
    of = {row["case"]: row["CPU ms/episode"] - row["stand-in ms"] for row in found["rows"] if row["tree"] == "now"}
    return {"short": of["plain"], "long": of["long"]}


FROM: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "decode": (DECODE, "requests, ms/step", lambda all_: tuple((row["requests"], row["ms/step"] / 1e3) for row in all_["rows"])),
    "rate": (TRAIN, "tokens/s of one H200, LoRA, recomputing", lambda all_: all_["rows"][0]["tokens/s"]),
    "restart": (TRAIN, "ready_s + first_step_s", lambda all_: all_["rows"][0]["ready_s"] + all_["rows"][0]["first_step_s"]),
    "weights": (TRAIN, "2 bytes a parameter", lambda all_: 2 * all_["rows"][0]["parameters"]),
    "delta share": (RUN, "sync (nothing else was running then), delta_bytes / full_bytes", _a_byte("delta_bytes")),
    "publish s/B": (RUN, "sync, publish_seconds / full_bytes", _a_byte("publish_seconds")),
    "load s/B": (RUN, "sync, update seconds / full_bytes", _a_byte("seconds")),
    "pause ms/B": (RUN, "sync, paused_ms / full_bytes", _a_byte("paused_ms")),
    "turns": (RUN, "async, turns", _of_run(lambda own: own["means"]["turns"])),
    "tokens": (RUN, "async, sampled in an episode", _of_run(lambda own: own["sampled_a_second"] * own["seconds"] / own["episodes"])),
    "trained": (RUN, "async, trained for one sampled", _of_run(lambda own: own["trained_a_second"] / own["sampled_a_second"])),
    "sigma": ("study-h200.json", "deviation of log(seconds) of 1,620 attempts", _spread),
    "tool": (SANDBOX, "namespaces, live start of Python + a warm test run, medians", _of_sandbox("live", "warm")),
    "score": (SANDBOX, "namespaces, whole start of Python + a cold test run, medians", _of_sandbox("whole", "cold")),
    "client us/token": (CLIENT, "client CPU, 64 requests over TCP", _client),
    "orchestrator ms": (OWN, "cases plain and long, now: CPU ms/episode without the stand-in", _own),
}  # fmt: skip


ASSUMED: dict[str, tuple[Any, str]] = {
    "link": (1.25e9, "bytes/s of an engine's link to the store"),
    "store": (12.5e9, "bytes/s that the store gives to all together"),
    "long": (
        "40 turns of 250 tokens, 5 s of commands a turn, 60 s of scoring, 20,000 trained tokens",
        "episodes of a large agent",
    ),
    "gpu hours": (50_000.0, "GPU-hours a fault: 419 in 54 days on 16,384 GPUs (Llama 3, arXiv 2407.21783)"),
    "haste": (500.0, "times as many faults in the rows with faults, or none would be seen"),
    "a request": (0.5e-3, "CPU seconds of a router a request: our client's (docs/lab-notes.md, HTTP against frames)"),
}
LIMITS = {  # what one process or machine can do: the column, and how much of it
    "orchestrator cores": 1.0, "router requests/s": 1 / ASSUMED["a request"][0], "ledger kB/s": 100_000.0,
    "store reads GB/s": ASSUMED["store"][0] / 1e9, "publishing %": 25.0,
}  # fmt: skip


def workloads(known: dict[str, Any]) -> dict[str, Work]:
    turns, tokens = known["turns"], known["tokens"]
    short = Work(
        "short", turns, tokens / turns, tokens * known["trained"], known["tool"], known["score"], known["sigma"]
    )
    return {"short": short, "long": Work("long", 40, 250, 20_000, 5.0, 60.0, known["sigma"])}


@dataclass(frozen=True)
class Row:
    """One scenario."""

    gpus: int
    work: str
    late: str
    publish: str = "one"  # or sharded
    groups: int = 0  # 0: a third of the sandboxes' groups
    faults: bool = False
    staleness: int = 4


LARGEST = 4_096
SANDBOXES = {8: 128, 64: 1_024, 512: 10_240, LARGEST: 102_400}  # 10² to 10⁵


def planned(row: Row, work: Work, known: dict[str, Any]) -> Cluster:
    """Return the cluster of a scenario: as many GPUs for the trainer, in eighths, as let most episodes through."""
    sandboxes = SANDBOXES[row.gpus]
    groups = row.groups or max(2, sandboxes // SIZE // 3)

    def with_trainer(trainer: int) -> tuple[float, Cluster]:
        publishers = 1 if row.publish == "one" else max(1, trainer // NODE)
        publish, engines = known["publish s/B"] * known["weights"] / publishers, row.gpus - trainer
        delta = known["delta share"] * known["weights"]
        fetch = (
            max(delta / ASSUMED["link"][0], engines * delta / ASSUMED["store"][0])
            + known["load s/B"] * known["weights"]
        )
        rates = dict.fromkeys(("engine", "rank", "pool"), 0.0)
        if row.faults:
            a_second = ASSUMED["haste"][0] / (ASSUMED["gpu hours"][0] * 3600)
            rates = {"engine": engines * a_second, "rank": trainer * a_second, "pool": sandboxes / POOL * a_second}
        pause = known["pause ms/B"] * known["weights"] / 1e3
        own = Cluster(trainer, engines, sandboxes, groups, row.late, decode=known["decode"], rate=known["rate"], publish=publish,
                      fetch=fetch, pause=pause, restart=known["restart"], faults=rates, staleness=row.staleness)  # fmt: skip
        engine = Engine(known["decode"])
        engine.requests = [(0.0, 0, None)] * -(-sandboxes // engines)  # type: ignore[list-item]
        mean = 1 + work.hard * (work.slow - 1)
        episode = mean * (work.turns * (work.tokens * engine.seconds() + work.tool) + work.score)
        step = groups * SIZE * work.trained / (trainer * known["rate"]) + publish
        return min(sandboxes / episode, groups * SIZE / step), own

    return max((with_trainer(row.gpus * eighth // 8) for eighth in range(1, 8)), key=lambda each: each[0])[1]


def simulated(row: Row, known: dict[str, Any], least: int, seed: int) -> dict[str, Any]:
    """Return the figures of a scenario: `least` groups, or so many steps that slow groups come and go; half as many to warm up.

    The largest size is simulated for three steps: enough for what it uses, too short for what becomes of slow tasks.
    """
    work = workloads(known)[row.work]
    own = planned(row, work, known)
    began = time.process_time()
    sim = Simulation(own, work, tasks=max(200, own.sandboxes // SIZE * 2), seed=seed)
    steady = row.gpus < LARGEST
    steps = max(3 if not steady else 30 if row.work == "long" else 5, least // own.groups)
    seen = sim.run(steps // 2 + 1, steps // 2 + 1 + steps)
    spent, seconds = time.process_time() - began, seen["seconds"]
    episodes, tokens = seen["episodes"] / seconds, seen["tokens"] / seconds
    trained = max(seen["groups_batched"], 1)
    full, own_cpu, (requests, step_s) = known["weights"], 1e-3 * known["orchestrator ms"][row.work], known["decode"][-1]
    return {
        "GPUs": row.gpus, "work": row.work, "late": row.late, "publish": row.publish, "faults": "yes" if row.faults else "no",
        "trainer": own.trainer, "engines": own.engines, "sandboxes": own.sandboxes, "groups": own.groups,
        "staleness": own.staleness,
        "step s": round(seconds / steps, 1), "episodes/s": round(episodes, 1), "tokens/s": round(tokens),
        "training %": round(100 * seen["training"] / seconds, 1), "publishing %": round(100 * seen["publishing"] / seconds, 1),
        "engines %": round(100 * seen["engine_seconds"] / seconds / own.engines, 1),
        "of rated %": round(100 * tokens / (own.engines * requests / step_s), 1),
        "sandboxes %": round(100 * seen["sandbox_seconds"] / seconds / own.sandboxes, 1),
        "behind": round(sum(each * seen[f"behind_{each}"] for each in range(own.staleness + 1)) / trained, 2),
        "dropped %": round(100 * seen["groups_stale"] / max(seen["groups_opened"], 1), 1),
        "held %": round(100 * seen["held"] / seconds, 1),
        "hard %": round(100 * seen["hard_batched"] / trained / work.hard) if steady else "",
        "hard tries": round(seen["hard_opened"] / max(seen["hard_batched"], 1), 2) if steady else "",
        "retried": int(seen["failed"] + seen["again"]), "lost": int(seen["lost"]),
        "orchestrator cores": round(own_cpu * episodes + 1e-6 * known["client us/token"] * tokens, 2),
        "router requests/s": round(seen["requests"] / seconds), "ledger kB/s": round(seen["ledger"] / seconds / 1e3, 1),
        "store writes MB/s": round((known["delta share"] + 1 / 20) * full * steps / seconds / 1e6, 1),
        "store reads GB/s": round(known["delta share"] * full * own.engines * steps / seconds / 1e9, 2),
        "State us/episode": round(1e6 * seen["cpu"] / max(seen["episodes"], 1), 1), "CPU s": round(spent, 1),
    }  # fmt: skip


def scenarios(sizes: list[int]) -> list[Row]:
    """Return what is simulated; the largest size, which takes longest, only where it says something new."""
    ways = [
        (publish, work, late)
        for publish in ("one", "sharded")
        for work in ("short", "long")
        for late in ("drop", "wait")
    ]
    rows = [
        Row(gpus, work, late, publish)
        for gpus in sizes if gpus < LARGEST for publish, work, late in ways if gpus > NODE or publish == "one"
    ]  # fmt: skip
    if 512 in sizes:
        rows += [Row(512, "long", late, "sharded", staleness=bound) for bound in (8, 16) for late in ("drop", "wait")]
        rows.append(Row(512, "long", "drop", "sharded", faults=True))
    if LARGEST in sizes:
        rows += [Row(LARGEST, "long", "drop", publish) for publish in ("one", "sharded")]
        rows += [Row(LARGEST, "long", late, "sharded", groups=512) for late in ("drop", "wait")]
    return sorted(rows, key=lambda row: row.gpus)


def breaks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each limit and workload the GPUs at which it is reached, by a line through the origin and the largest size."""
    found = []
    plain = [
        row
        for row in rows
        if (row["faults"], row["late"], row["staleness"]) == ("no", "drop", 4) and row["groups"] != 512
    ]
    for column, limit in LIMITS.items():
        for way in (("one", "short"), ("one", "long"), ("sharded", "short"), ("sharded", "long")):
            those = [row for row in plain if (row["publish"], row["work"]) == way]
            over, last = [row["GPUs"] for row in those if row[column] > limit], max(those, key=lambda row: row["GPUs"])
            line = round(last["GPUs"] * limit / last[column]) if last[column] and column != "publishing %" else None
            found.append({
                "limit": column, "of": limit, "publish": way[0], "work": way[1], "first size over": min(over, default=None),
                "GPUs by a line": line,
            })  # fmt: skip
    return found


def main() -> None:
    """Simulate every scenario and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=list(SANDBOXES), choices=list(SANDBOXES))
    parser.add_argument("--groups", type=int, default=2500, help="groups that are trained in a scenario, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hardware", default="cpu")
    options = parser.parse_args()
    import report

    known = {name: read(json.loads((RESULTS / file).read_text())) for name, (file, _, read) in FROM.items()}
    rows = []
    for row in scenarios(options.gpus):
        rows.append(simulated(row, known, options.groups, options.seed))
        print(rows[-1], file=sys.stderr)
    limits = breaks(rows)
    for each in limits:
        print(each)
    report.finish("cluster_sim", rows, options.hardware, breaks=limits, workloads={k: asdict(v) for k, v in workloads(known).items()},
                  measured={name: {"value": known[name], "from": f"{file}: {what}"} for name, (file, what, _) in FROM.items()},
                  assumed={name: {"value": value, "what": what} for name, (value, what) in ASSUMED.items()})  # fmt: skip


if __name__ == "__main__":
    main()
