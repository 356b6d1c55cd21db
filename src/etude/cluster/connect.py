"""Joining a cluster, and what is looked at before time is spent on it.

`local` starts Ray on this machine, or joins one that runs there. An address of Ray's own (`HOST:PORT`, `ray://HOST:10001`) is joined.
Ray is never stopped here but as the driver leaves it, which ends what this driver started and no more.

Nodes must be alike where it matters: Ray and Python as here, Etude of one version, the run's folder seen by all, clocks together.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from etude.cluster.host import ANSWER, LOOKING, About, Supervisor, about, reason
from etude.cluster.placement import Node, nodes
from etude.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from etude.recipe.cluster import ClusterSettings

    Say = Callable[[str], None]

LOCAL = "local"
REACH = 10.0  # seconds until an address that does not answer is given up
STARTS = 3  # of Ray on a busy machine, whose own patience is short
CLOCKS = 10.0  # seconds that clocks may be apart
QUIET = {"log_to_driver": False, "logging_level": "ERROR"}


@contextlib.contextmanager
def joined(address: str, say: Say) -> Iterator[None]:
    """Be a driver of the cluster at an address."""
    if address == LOCAL:
        _start_or_join(say)
    else:
        _join(address)
    try:
        yield
    finally:
        ray.shutdown()


def _join(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"--cluster {address!r} is no address; write local, HOST:PORT, or ray://HOST:PORT")
    advice = "is it running, and can this machine reach it? `ray status` on its head tells"
    try:
        socket.create_connection((host, int(port)), REACH).close()  # Ray itself would try for minutes
    except OSError as error:
        raise UserError(f"--cluster {address}: no cluster answers ({error}); {advice}") from None
    try:
        _init(address)
    except Exception as error:  # noqa: BLE001 - Ray raises many kinds, and each is for the user
        told = reason(error)
        if "ersion mismatch" in told:
            raise UserError(f"--cluster {address}: {told}; use the same Ray and Python here and there") from None
        raise UserError(
            f"--cluster {address}: no cluster answers ({type(error).__name__}: {told[:300]}); {advice}"
        ) from None


def _init(address: str) -> None:
    """Connect. For ray:// the head starts a process, and on a busy machine Ray's patience with that is short: it is tried again."""
    for attempt in range(1, STARTS + 1):
        try:
            ray.init(address=address, **QUIET)
        except ConnectionAbortedError:
            ray.shutdown()
            if attempt == STARTS:
                raise
        else:
            return


def _start_or_join(say: Say) -> None:
    """Join the cluster of this machine, or start one."""
    try:
        ray.init(address="auto", **QUIET)
    except ConnectionError:
        pass
    except RuntimeError as error:
        raise UserError(f"--cluster local: {reason(error)}; use the same Ray and Python here and there") from None
    else:  # it may be another user's, or one of several
        where = ray.get_runtime_context().gcs_address
        say(f"cluster: joined the Ray that runs here, at {where}; it has {'; '.join(map(str, nodes()))}")
        return
    for attempt in range(1, STARTS + 1):
        try:
            ray.init(include_dashboard=False, **QUIET)
        except Exception as error:  # noqa: BLE001 - as above
            ray.shutdown()
            if attempt == STARTS:
                raise UserError(f"--cluster local: Ray did not start {STARTS} times: {reason(error)[:300]}") from None
            say(f"cluster: Ray did not start in time ({type(error).__name__}); trying again")
        else:
            say("cluster: started Ray on this machine; it ends with this command")
            return


@dataclass(frozen=True)
class Seen:
    """What one node said of itself."""

    node: Node
    about: About | None  # None: it did not answer
    apart: float = 0.0  # seconds between its clock and ours, beyond what asking took
    folder: bool = True  # whether it sees the run's folder
    vllm: dict[str, str] | None = None  # why it cannot be used, by the Python of its environment; empty: it can


async def survey(folder: Path | None, settings: ClusterSettings | None) -> list[Seen]:
    """Ask every node about itself; a file in the run's folder shows whether it sees that."""
    word, mark = secrets.token_hex(8), None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / ".seen-by-nodes"
        mark.write_text(word, encoding="utf-8")
    pythons = sorted({each.python for each in settings.engines if each.kind == "vllm"}) if settings else []
    try:
        return list(await asyncio.gather(*(_look(node, mark, word, pythons) for node in nodes())))
    finally:
        if mark:
            mark.unlink(missing_ok=True)


async def _look(node: Node, mark: Path | None, word: str, pythons: Sequence[str]) -> Seen:
    there = NodeAffinitySchedulingStrategy(node.id, soft=False)
    actor = ray.remote(Supervisor).options(num_cpus=0, scheduling_strategy=there).remote()
    try:
        async with asyncio.timeout(ANSWER + LOOKING * len(pythons)):
            await actor.process.remote()  # a process may take its time to start
            began = time.time()
            told = await actor.about.remote()
            took, between = time.time() - began, (began + time.time()) / 2
            folder = mark is None or await actor.sees.remote(str(mark), word)
            vllm = {python: await actor.refuses_vllm.remote(python) for python in pythons}
    except (TimeoutError, ray.exceptions.RayError):
        return Seen(node, None)
    finally:
        ray.kill(actor)
    return Seen(node, told, max(0.0, abs(told.time - between) - took), folder, vllm)


def problems(seen: Sequence[Seen], here: About, folder: Path | None) -> list[str]:
    """Return what is wrong with nodes, a line each."""
    found = []
    for each in seen:
        where = f"node {each.node.address}"
        if each.about is None:
            found.append(
                f"{where} does not start a process within {ANSWER:.0f} s: look at its memory and at Ray's logs there"
            )
            continue
        for name in ("ray", "python", "etude"):
            theirs, ours = each.about.versions[name], here.versions[name]
            if theirs != ours:
                found.append(f"{where} has {name.capitalize()} {theirs}, and {ours} is here; install the same on both")
        if each.apart > CLOCKS:
            found.append(f"{where}: its clock is {each.apart:.0f} s off this machine's; set both by NTP")
        if not each.folder:
            found.append(f"{where} does not see {folder}; choose with --out a folder that all nodes share")
        found += [
            f"{where}: vLLM's Python {python} cannot be used: {why}" for python, why in (each.vllm or {}).items() if why
        ]
    return found


async def refuse_unlike(folder: Path, settings: ClusterSettings) -> None:
    """Refuse a cluster whose nodes would fail a run half-way."""
    if wrong := problems(await survey(folder, settings), about(), folder):
        more = f" (and {len(wrong) - 1} more: `etude cluster doctor` lists them)" if len(wrong) > 1 else ""
        raise UserError(f"{wrong[0]}{more}")
