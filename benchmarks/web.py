"""How fast is the page on a large run, and how much memory does its server take?

    python benchmarks/web.py --hardware laptop

A made-up run of reinforcement learning, by default of 10,000 steps and 100,000 rollouts, is served by `etude web` as its users do
and opened in chromium: right after the start, when nothing is indexed, and again when everything is. Time is what the browser itself
reports as first contentful paint, from the request on. Memory is the server's highest resident size. Aims: 0.5 s and 300 MB.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.web.browser import CHROMIUM, MISSING, Browser
from tests.web.made import STAGE, Growing, head

from report import finish

PAGES = {
    "all runs": "index.html", "the run": "run/large/index.html", "rl": "run/large/rl/index.html",
    "a thousand steps": "run/large/rl/steps-1001-2000.html",
    "a step": "run/large/rl/step-{}.html", "a group": "run/large/rl/group-{}.html",
}  # fmt: skip
PAINT = (
    "new Promise(done => new PerformanceObserver(list => done(list.getEntriesByName('first-contentful-paint')[0]?.startTime))"
    ".observe({type: 'paint', buffered: true}))"
)


def megabytes(pid: int, what: str) -> float:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) / 1000


def paints(browser: Browser, base: str, times: int, numbers: dict[str, int]) -> dict[str, float]:
    """Return the median first paint of each page, in milliseconds."""
    found = {}
    for name, path in PAGES.items():
        taken = []
        for _ in range(times):
            browser.open(base + path.format(numbers.get(name)))
            taken.append(float(browser.ask(PAINT)))
        found[name] = median(taken)
    return found


def measure(folder: Path, steps: int, times: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-P", "-m", "etude", "web", str(folder), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server, Browser() as browser:
        assert server.stderr is not None
        try:
            base = re.search(r"http://\S+", server.stderr.readline())
            assert base, "the server did not start"
            numbers = {"a step": steps // 2, "a group": steps}
            browser.open("about:blank")
            cold = paints(browser, base[0], 1, numbers)
            began = time.perf_counter()
            browser.open(f"{base[0]}run/large/rl/index.html")
            browser.wait("!document.querySelector('.loading')", 600)
            indexed = time.perf_counter() - began
            warm = paints(browser, base[0], times, numbers)
            highest = megabytes(server.pid, "VmHWM")
        finally:
            server.terminate()
    return [{"page": name, "first_paint_cold_ms": round(cold[name]), "first_paint_ms": round(warm[name]), "server_mb": round(highest),
             "indexed_s": round(indexed, 1)} for name in PAGES]  # fmt: skip


def calm(seconds: float) -> tuple[float, float, float]:
    """Wait for others to be done, for so long at most; return the load, of one, five and fifteen minutes."""
    until = time.monotonic() + seconds
    while os.getloadavg()[0] > 2.5 and time.monotonic() < until:
        time.sleep(2)
    return os.getloadavg()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="cpu")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--wait", type=float, default=0.0, help="seconds to wait for a load below 2.5")
    given = parser.parse_args()
    if CHROMIUM is None:
        sys.exit(MISSING)
    with tempfile.TemporaryDirectory() as folder:
        growing = Growing(head(Path(folder, "large")), groups=2, size=5, traces=False).train(given.steps)
        sizes = {
            name: (Path(folder, "large", STAGE) / name).stat().st_size for name in ("metrics.jsonl", "ledger.jsonl")
        }
        load = calm(given.wait)
        rows = measure(Path(folder), given.steps, given.times)
    finish(
        "web",
        rows,
        given.hardware,
        steps=given.steps,
        rollouts=growing.group * growing.size,
        bytes=sizes,
        load={"before": load, "after": os.getloadavg()},
    )


if __name__ == "__main__":
    main()
