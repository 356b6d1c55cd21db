"""What isolation costs: starting a command, a sandbox, a test run; many at once; and what a thousand leave behind.

    python benchmarks/sandbox.py [--python PYTHON] [--episodes 1000] [--out FILE]

PYTHON has pytest and must be readable to everybody; it runs the tests cold (started anew) and warm (forked from one that has it
imported). Times are in milliseconds, minimum and median; bare and sandboxed calls take turns, so that both meet the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.lineage import environment
from etude.sandbox.box import MIB, Limits, Place
from etude.sandbox.layers import prepare
from etude.sandbox.local import open_sandbox

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PYTHON_PASS = ["/usr/bin/python3", "-I", "-S", "-c", "pass"]
COMMANDS = {"true": ["true"], "python": PYTHON_PASS}
LIMITS = Limits(memory=512 * MIB, disk=64 * MIB)
FILES, TESTS, LIVE = 520, 50, 200


def layer(folder: Path) -> Path:
    """Make a repository of some hundred files with small tests."""
    source = folder / "source"
    for index in range(FILES):
        path = source / f"package/part{index % 20}/module{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def value():\n    return {index}\n" * 100)
    (source / "tests").mkdir()
    cases = "".join(f"def test_{index}():\n    assert {index} + 1 == {index + 1}\n\n\n" for index in range(TESTS))
    (source / "tests/test_all.py").write_text(cases)
    prepare(source, folder / "layer")
    return folder / "layer"


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    """Return how many milliseconds it takes."""
    began = time.perf_counter()
    await work()
    return 1e3 * (time.perf_counter() - began)


def summary(times: list[float]) -> dict[str, float]:
    """Return the least and the median."""
    return {"min": round(min(times), 2), "median": round(statistics.median(times), 2)}


async def _bare(words: list[str]) -> None:
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


async def starts(place: Place, backend: str, count: int) -> dict[str, Any]:
    """Measure a command bare, in a living sandbox, and with a sandbox made and closed for it."""
    box = await open_sandbox(place, backend)

    async def whole(words: list[str]) -> None:
        other = await open_sandbox(place, backend)
        await other.exec(words)
        await other.close()

    found: dict[str, Any] = {}
    for name, words in COMMANDS.items():
        ways = {"bare": lambda words=words: _bare(words), "live": lambda words=words: box.exec(words),
                "whole": lambda words=words: whole(words)}  # fmt: skip
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(count):
            for way, work in ways.items():
                times[way].append(await timed(work))
        found[name] = {way: summary(each) for way, each in times.items()}
        for way in ("live", "whole"):
            over = {key: round(found[name][way][key] - found[name]["bare"][key], 2) for key in ("min", "median")}
            found[name][f"{way}_over_bare"] = over
    await box.close()
    return found


async def tests(place: Place, backend: str, python: Path, count: int) -> dict[str, Any]:
    """Measure a test run cold and warm, taking turns."""
    readonly = (python.parent.parent,)
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    words = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    cold = await open_sandbox(Place(place.layers, readonly, env=env, limits=LIMITS), backend)
    warm = await open_sandbox(
        Place(place.layers, readonly, env=env, limits=LIMITS, warm=(python, ("pytest",))), backend
    )
    times: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(count):
        for name, box in (("cold", cold), ("warm", warm)):
            began = time.perf_counter()
            done = await box.exec(words)
            times[name].append(1e3 * (time.perf_counter() - began))
            if f"{TESTS} passed".encode() not in done.out:
                raise SystemExit(f"pytest did not run ({name}): {done}")
    await cold.close()
    await warm.close()
    found: dict[str, Any] = {name: summary(each) for name, each in times.items()}
    return {**found, "warm_of_cold": round(found["warm"]["median"] / found["cold"]["median"], 2)}


async def many(place: Place, backend: str) -> dict[str, Any]:
    """Open many, run something in all at once, close them."""
    gate = asyncio.Semaphore(16)

    async def opened() -> Any:
        async with gate:
            return await open_sandbox(place, backend)

    before, began = _free(), time.perf_counter()
    boxes = await asyncio.gather(*(opened() for _ in range(LIVE)))
    made, used = time.perf_counter(), before - _free()
    done = await asyncio.gather(*(box.exec("echo $((6 * 7)) > answer; cat answer") for box in boxes))
    ran = time.perf_counter()
    await asyncio.gather(*(box.close() for box in boxes))
    return {
        "sandboxes": LIVE, "opened_per_second": round(LIVE / (made - began), 1), "calls_per_second": round(LIVE / (ran - made), 1),
        "right_answers": sum(each.out == b"42\n" for each in done), "mib_each": round(used / LIVE / MIB, 2),
        "close_seconds": round(time.perf_counter() - ran, 2),
    }  # fmt: skip


def _free() -> int:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def remains() -> dict[str, int]:
    """Count what could be left behind."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    groups = [
        path for path in Path("/sys/fs/cgroup").glob("**/etude-*") if any(f"-{pid}-" in path.name for pid in ours)
    ]
    shared = list(Path("/dev/shm").glob(f"etude-*-{os.getpid()}-*/**/*"))  # noqa: S108
    return {
        "processes": len(ours), "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()), "cgroups": len(groups),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())), "tmpfs_bytes": sum(path.lstat().st_size for path in shared),
    }  # fmt: skip


async def episodes(place: Place, backend: str, count: int) -> dict[str, Any]:
    """Run episodes, eight at a time: write, run, look at the difference, close. Return what is left of them."""
    await (await open_sandbox(place, backend)).close()  # a launcher stays; it is not of an episode
    before, began = remains(), time.perf_counter()
    gate = asyncio.Semaphore(8)

    async def episode(index: int) -> bool:
        async with gate:
            box = await open_sandbox(place, backend)
            await box.write("note.txt", str(index).encode())
            await box.exec("sleep 600 & cat note.txt > copy.txt; rm package/part0/module0.py")
            changed = {entry.path: entry.kind for entry in await box.diff()}
            await box.close()
            return changed == {"copy.txt": "file", "note.txt": "file", "package/part0/module0.py": "gone"}

    right = await asyncio.gather(*(episode(index) for index in range(count)))
    seconds = time.perf_counter() - began
    left = {kind: now - before[kind] for kind, now in remains().items()}
    return {"episodes": count, "right": sum(right), "per_second": round(count / seconds, 1), "left_behind": left}


async def measure(backend: str, python: Path | None, count: int, episode_count: int) -> dict[str, Any]:
    """Measure one backend."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        place = Place((layer(Path(name)),), limits=LIMITS)
        found: dict[str, Any] = {"starts": await starts(place, backend, count)}
        if python:
            found["tests"] = await tests(place, backend, python, max(3, count // 5))
        found["many"] = await many(place, backend)
        found["episodes"] = await episodes(place, backend, episode_count)
    return found


def table(backend: str, found: dict[str, Any]) -> None:
    """Print one backend's figures."""
    print(f"\n{backend:<30}{'min ms':>10}{'median ms':>12}")
    for name, ways in found["starts"].items():
        for way, times in ways.items():
            print(f"  {name + ', ' + way:<28}{times['min']:>10}{times['median']:>12}")
    for way, times in found.get("tests", {}).items():
        print(f"  {'pytest, ' + way:<28}{times['min']:>10}{times['median']:>12}")
    print(f"  {found['many']}\n  {found['episodes']}")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, help="a Python that has pytest, for the test runs")
    parser.add_argument("--count", type=int, default=50, help="repetitions of each time")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "script": "sandbox.py", "command": shlex.join(["python", "benchmarks/sandbox.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "hardware": environment.hardware().model_dump(),
        "kernel": platform.release(), "user": "root" if os.getuid() == 0 else "unprivileged", "python": platform.python_version(),
        "load": os.getloadavg()[0], "backends": {},
    }  # fmt: skip
    found = asyncio.run(measure("namespaces", args.python, args.count, args.episodes))
    result["backends"]["namespaces"] = found
    table("namespaces", found)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
