"""What the orchestrator costs: the real one, its ledger and its files, with an engine, a trainer and sandboxes that only wait.

    python benchmarks/orchestrator_load.py [--before TREE] [--cases plain wait …] [--seconds 60] [--hardware cpu]

Every case is a process of its own. Turns take log-normal times, so that `at once` episodes of a minute end at `at once` / 60 a
second; the first ones are begun in the middle, so that the run is steady from its start. Counted from half of `--seconds` on: CPU
seconds of the process (all threads) for a second and for an episode, the peak of its memory, how late timers of the event loop are
(by its own CPU time: a machine that others use makes all timers late), and the bytes of its ledger. `stand-in ms`: what of an
episode's CPU is the stand-in's own. `start s`: until all episodes are begun. `recall s`: CPU of a restart that reads the ledger back.
Files go to --folder: how long its disk takes to flush decides a lot.
`--before`: another tree (its `src`) that every case is run with, too.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import random
import resource
import subprocess
import sys
import tempfile
import time
from array import array
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.agent.trace import Node, Trace
from etude.inference.policy import Completion, Sampling, Token
from etude.jsonl import MetricsLog
from etude.lineage.compute import ComputeShape
from etude.progress import Reporter
from etude.rl.environment import Episode, Item
from etude.rl.exchange import Exchange, Report
from etude.rl.orchestrator import Orchestrator, Parts
from etude.rl.processes import LEDGER
from etude.rl.settings import RlSettings
from etude.rl.view import View
from etude.work import Work

if TYPE_CHECKING:
    from etude.inference.policy import PolicyInfo

HERE = Path(__file__).parent
SIGMA = 0.7  # of a turn's log-normal time
SHAPE = ComputeShape(1000, ())
BEHAVIOURS = 18  # that CodingEnvironment reports of an episode, about
LOOK = 0.05  # seconds between looks at how late the event loop is
STEPS = 1_000_000  # never reached


@dataclass(frozen=True)
class Case:
    """One load. Turns and tokens of an episode are those of rl-h200.json (5.6 turns, 379 sampled tokens) if not said otherwise."""

    at_once: int
    late: str = "drop"
    groups: int = 64
    tasks: int = 5_000
    seconds: float = 60.0  # of an episode, on average
    turns: int = 6
    tokens: int = 63  # sampled in a turn
    answers: int = 150  # tokens of a turn's answers
    train: float = 1.0  # seconds of a step


CASES = {
    "small": Case(1_000, groups=16),
    "plain": Case(10_000),
    "wait": Case(
        10_000, late="wait", groups=256
    ),  # fewer, and 10,000 are never begun: five steps of groups are what it allows
    "long": Case(1_000, turns=30, tokens=200, answers=500, groups=16),
}


class Ended(Exception):  # noqa: N818 - as a user ends a run
    """The time is over."""


@dataclass
class Standin:
    """Engine, weights, trainer and environment: each waits as long as it is told, then answers at once."""

    case: Case
    exchange: Exchange
    version: int = 0
    begun: int = 0
    ended: int = 0
    ids: array[int] = field(default_factory=lambda: array("i", [random.randrange(300, 30_000) for _ in range(4096)]))  # noqa: S311
    logs: array[float] = field(default_factory=lambda: array("d", [-random.random() for _ in range(4096)]))  # noqa: S311

    @property
    def items(self) -> list[Item]:
        return [
            Item(f"package-{number % 100}/task-{number}", f"kind-{number % 20}") for number in range(self.case.tasks)
        ]

    async def generate(self, _prompt: Any, sampling: Sampling, **_: Any) -> Completion:
        await asyncio.sleep(sampling.temperature)  # seconds that the stand-in was told to take
        ids, logs = self.ids[: sampling.max_tokens].tolist(), self.logs[: sampling.max_tokens].tolist()
        return Completion([Token(each, log, log, self.version) for each, log in zip(ids, logs, strict=True)], "stop")

    async def run_episode(self, item: str, policy: Any, _talk: Any, *, name: str, seed: int, journal: Path) -> Episode:
        drawn, case, trace = random.Random(seed), self.case, Trace(name, item)  # noqa: S311
        assert journal.parent.is_dir()
        self.begun += 1
        share = random.Random(name[:6]).random() if self.begun <= case.at_once else 1.0  # noqa: S311 - one for a whole group
        scale = share * case.seconds / case.turns
        trace.nodes.append(Node(None, "opening", self.ids[:600].tolist(), ""))
        for place in range(case.turns):
            spent = scale * drawn.lognormvariate(-SIGMA * SIGMA / 2, SIGMA)
            done = await policy.generate([1], Sampling(case.tokens, temperature=0.7 * spent))
            logs = done.logprobs
            trace.nodes.append(Node(2 * place, "turn", done.token_ids, "", sampled=True, logprobs=logs, raw_logprobs=done.raw_logprobs,
                                    versions=[token.version for token in done.tokens]))  # fmt: skip
            await asyncio.sleep(0.3 * spent)
            trace.nodes.append(Node(2 * place + 1, "answers", self.ids[: case.answers].tolist(), ""))
        trace.rewards = {"outcome": float(drawn.random() < 0.5), "length": -drawn.random()}
        self.ended += 1
        behaviour = {f"behaviour_{number}": drawn.random() for number in range(BEHAVIOURS)}
        return Episode(trace, "pass" if trace.rewards["outcome"] else "fail", behaviour)

    async def train(self) -> None:
        step = 1
        while True:
            await asyncio.sleep(self.case.train)
            if (self.exchange.folder / "batches" / f"{step:08d}.json").exists():
                self.exchange.put_report(Report(step, step, {"tokens": 10, "flops": 100.0, "seconds": 0.1}))
                self.version, step = step, step + 1

    async def wait(self) -> None:
        await asyncio.Event().wait()

    async def ready(self) -> PolicyInfo:
        raise NotImplementedError

    def swaps(self) -> list[Any]:
        return []

    def parts(self) -> Parts:
        return Parts(self, self, self.wait, self.train, self.ready)  # type: ignore[arg-type]


@dataclass
class Meter:
    """Counts from half of the time on, and ends the session."""

    standin: Standin
    seconds: float
    began: float = field(default_factory=time.monotonic)
    late: list[float] = field(default_factory=list)
    first: tuple[float, float, int] | None = None  # wall, CPU, episodes when counting began
    last: tuple[float, float, int] = (0.0, 0.0, 0)
    full: float = 0.0  # seconds until all were begun

    def look(self) -> None:
        now = time.monotonic()
        if not self.full and self.standin.begun >= self.standin.case.at_once:
            self.full = now - self.began
            self.began = now  # the time counts from here
        if self.first is None and now - self.began > self.seconds / 2 and self.full:
            self.first = now, time.process_time(), self.standin.ended
        self.last = now, time.process_time(), self.standin.ended
        if now - self.began > (self.seconds if self.full else 4 * self.seconds):
            raise Ended

    async def watch(self) -> None:
        while True:
            due, spent = time.monotonic() + LOOK, time.thread_time()
            await asyncio.sleep(LOOK)
            if self.first:
                self.late.append(min(time.monotonic() - due, time.thread_time() - spent))


def settings_of(case: Case) -> RlSettings:
    options: dict[str, Any] = {"late": case.late, "concurrency": case.at_once, "curriculum": {"begin": 0.0}}
    return RlSettings(tasks="none", steps=STEPS, groups=case.groups, group_size=8, epochs=1000, **options)


async def session(folder: Path, metrics: MetricsLog, case: Case, seconds: float) -> Meter:
    """Run the orchestrator until the time is over."""
    reporter, standin = Reporter(quiet=True), Standin(case, Exchange(folder / "exchange"))
    work, meter = Work(folder, metrics, reporter, folder), Meter(standin, seconds)
    with View(reporter, STEPS) as view:
        orchestrator = Orchestrator(standin, standin.parts(), None, settings_of(case), work, 5, SHAPE, view)  # type: ignore[arg-type]
        reporter.check_stop = meter.look
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(standin.train())
                group.create_task(meter.watch())
                await orchestrator.run(group)
        except* Ended:
            pass
    return meter


async def bare(case: Case, folder: Path) -> float:
    """Return the CPU seconds of one episode that the stand-in itself takes."""
    standin, count = Standin(replace(case, seconds=0.0), Exchange(folder)), 200
    began = time.process_time()
    for number in range(count):
        await standin.run_episode("task", standin, None, name=f"{number:06d}-000", seed=number, journal=folder)
    return (time.process_time() - began) / count


def one(case: Case, seconds: float, profile: str, where: str | None) -> dict[str, Any]:
    """Return the figures of one load."""
    with (
        tempfile.TemporaryDirectory(prefix="etude-load-", dir=where) as name,
        MetricsLog(Path(name) / "metrics.jsonl") as metrics,
    ):
        folder = Path(name)
        profiler = cProfile.Profile()
        if profile:
            profiler.enable()
        meter = asyncio.run(session(folder, metrics, case, seconds))
        if profile:
            profiler.disable()
            pstats.Stats(profiler).dump_stats(profile)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        lines = (folder / LEDGER).read_bytes().count(b"\n")
        size, steps = (folder / LEDGER).stat().st_size, len(list((folder / "exchange" / "reports").glob("*.json")))
        began = time.process_time()
        standin, again, talk = Standin(case, Exchange(folder / "exchange")), Reporter(quiet=True), Any
        work, view = Work(folder, metrics, again, folder), View(again, STEPS)
        Orchestrator(standin, standin.parts(), talk, settings_of(case), work, 5, SHAPE, view)  # type: ignore[arg-type]
        recall = time.process_time() - began
        alone = asyncio.run(bare(case, folder / "bare"))
    if meter.first is None:
        return {"start s": "not begun in the time", "recall s": round(recall, 1), "peak MB": round(peak)}
    wall, cpu, ended = (after - before for after, before in zip(meter.last, meter.first, strict=True))
    late = sorted(meter.late) or [float("nan")]
    return {
        "start s": round(meter.full, 1), "episodes/s": round(ended / wall, 1), "steps": steps, "cores": round(cpu / wall, 3),
        "CPU ms/episode": round(1e3 * cpu / max(ended, 1), 2), "stand-in ms": round(1e3 * alone, 2), "peak MB": round(peak),
        "late p50 ms": round(1e3 * late[len(late) // 2], 1),
        "late p99 ms": round(1e3 * late[int(0.99 * len(late))], 1), "late most ms": round(1e3 * late[-1], 1),
        "ledger B/episode": round(size / max(meter.last[2], 1)), "recall s": round(recall, 2),
        "recall us/event": round(1e6 * recall / lines),
    }  # fmt: skip


def main() -> None:
    """Measure every case, each in a process of its own, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="tree to compare with")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--hardware", default="cpu")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--profile", default="", help="file for a profile of the (single) case")
    parser.add_argument("--folder", help="where the run's files go, instead of the system's temporary folder")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(CASES[options.one], options.seconds, options.profile, options.folder)))
        return
    import report

    rows = []
    for name in options.cases:
        for tree, place in (*((("before", options.before),) if options.before else ()), ("now", HERE.parent)):
            words = [
                sys.executable,
                "-P",
                __file__,
                "--one",
                name,
                "--seconds",
                str(options.seconds),
                "--profile",
                options.profile,
            ]
            words += ["--folder", options.folder] if options.folder else []
            tree_first = {**os.environ, "PYTHONPATH": str(place / "src")}
            done = subprocess.run(words, env=tree_first, stdout=subprocess.PIPE, check=True)
            found = json.loads(done.stdout)
            rows.append(
                {
                    "case": name,
                    "tree": tree,
                    "at once": CASES[name].at_once,
                    **found,
                    "load": round(os.getloadavg()[0], 1),
                }
            )
            print(rows[-1], file=sys.stderr)
    rows.sort(key=lambda row: -len(row))  # the table's columns are those of the fullest row
    rows = [{column: row.get(column, "") for column in rows[0]} for row in rows]
    rows.sort(key=lambda row: (options.cases.index(row["case"]), row["tree"]))
    report.finish(
        "orchestrator_load", rows, options.hardware, cases={name: asdict(CASES[name]) for name in options.cases}
    )


if __name__ == "__main__":
    main()
