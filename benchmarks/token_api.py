"""What HTTP costs: the same requests to the engine in this process, and through the token API at a Unix socket and over TCP.

    python benchmarks/token_api.py [--model sprout] [--requests 1 16 64] [--tokens 128] [--repeat 3] [--hardware cpu-2]

The server is a process of its own, as in RL. `first ms`: from the request to its first token. `gap ms`: between two events of a
stream, median and 95th percentile; `tokens/event`: how many tokens arrive together. CPU time is in microseconds a token: of the
client (this process) and of the server (in process: of both together). A row is the median of `--repeat` rounds after a warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import psutil

import report
from etude.inference.client import OUTLIVING, RemotePolicy
from etude.inference.http import Limits, Served, bind, server_of
from etude.inference.local import LocalPolicy
from etude.inference.policy import Sampling
from etude.inference.server import build_app
from etude.models.bases import locate
from etude.progress import Reporter

if TYPE_CHECKING:
    from etude.inference.policy import Policy

PROMPT = 64  # tokens


def open_engine(options: argparse.Namespace) -> LocalPolicy:
    """Return the engine that is measured."""
    folder = locate(options.model, None, Reporter(quiet=True))[1]
    return LocalPolicy.open(
        folder, device=options.device, context=PROMPT + options.tokens, speculate=False, rows=options.rows
    )


def serve(options: argparse.Namespace) -> None:
    """Answer at an address until killed."""
    limits = Limits(max_queue=4096, timeout=1e6, drain=0, max_connections=8192)
    app = build_app(Served(open_engine(options), limits), {"id": "measured"}, frozenset())
    if options.serve.startswith("unix:"):
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(options.serve.removeprefix("unix:"))
    else:
        listening = bind("127.0.0.1", int(options.serve.rpartition(":")[2]))
    server_of(app, limits).run(sockets=[listening])


class Stream:
    """When the tokens of one request came."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.times: list[float] = []

    def __call__(self, _tokens: list[Any]) -> None:
        self.times.append(time.perf_counter())


async def round_of(
    policy: Policy, options: argparse.Namespace, requests: int, seed: int, server: psutil.Process | None
) -> dict[str, float]:
    """Send requests at once and return what they took."""
    before = _cpu(server) if server else 0.0
    own, began = time.process_time(), time.perf_counter()
    streams = [Stream() for _ in range(requests)]
    prompts = [[(7 * place + number + seed) % 900 + 20 for place in range(PROMPT)] for number in range(requests)]
    asked = [
        policy.generate(prompt, Sampling(options.tokens, seed=number), on_tokens=stream)
        for number, (prompt, stream) in enumerate(zip(prompts, streams, strict=True))
    ]
    await asyncio.gather(*asked)
    seconds, own = time.perf_counter() - began, time.process_time() - own
    theirs = _cpu(server) - before if server else 0.0
    tokens = requests * options.tokens
    gaps = [late - early for each in streams for early, late in zip(each.times, each.times[1:], strict=False)] or [0.0]
    return {
        "tokens/s": tokens / seconds, "first ms": 1e3 * statistics.median(each.times[0] - each.began for each in streams),
        "gap ms": 1e3 * statistics.median(gaps), "gap p95 ms": 1e3 * sorted(gaps)[int(0.95 * len(gaps))],
        "tokens/event": tokens / sum(len(each.times) for each in streams),
        "client CPU us/token": 1e6 * own / tokens, "server CPU us/token": 1e6 * theirs / tokens,
    }  # fmt: skip


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def rows_of(
    way: str, policy: Policy, options: argparse.Namespace, server: psutil.Process | None
) -> list[dict[str, Any]]:
    """Measure one way with every number of requests."""
    rows = []
    for requests in options.requests:
        rounds = [await round_of(policy, options, requests, seed, server) for seed in range(options.repeat + 1)][1:]
        figures = {name: round(statistics.median(each[name] for each in rounds), 2) for name in rounds[0]}
        rows.append({"way": way, "requests": requests, **figures})
    return rows


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure in process, then through a server at each kind of address."""
    policy = open_engine(options)
    rows = await rows_of("in process", policy, options, None)
    await policy.close()
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        for way, address in (("unix", f"unix:{folder}/s"), ("tcp", f"http://127.0.0.1:{port}")):
            given = [
                "--model",
                options.model,
                "--device",
                options.device,
                "--tokens",
                str(options.tokens),
                "--rows",
                str(options.rows),
            ]
            child = subprocess.Popen([sys.executable, __file__, "--serve", address, *given])
            try:
                remote = await RemotePolicy.open(address, settings=OUTLIVING)
                rows += await rows_of(way, remote, options, psutil.Process(child.pid))
                await remote.close()
            finally:
                child.kill()
                child.wait()
    return rows


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sprout")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=64, help="rows of the engine's batch")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--hardware", default="cpu-2")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    rows = asyncio.run(measure(options))
    direct = {row["requests"]: row["tokens/s"] for row in rows if row["way"] == "in process"}
    for row in rows:
        row["of in process"] = f"{row['tokens/s'] / direct[row['requests']]:.3f}"
    report.finish("token_api", rows, options.hardware, model=options.model, tokens=options.tokens)


if __name__ == "__main__":
    main()
