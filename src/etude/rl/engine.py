"""Who samples for RL: a process with our engine, or a server that runs already; and how new weights come to them.

    python -m etude.rl.engine JOB.json [HOST PORT TOKEN_FILE]

The process begins with the model's folder, which is version 0, goes straight to the newest version there is, and then answers the
token API (inference/server.py) at a Unix socket, or for other machines at a port that asks for a token. The orchestrator's
`Follower` brings every version that the trainer publishes to whoever samples, by the weight life cycle of that API.

A vLLM server (`[rl] engine = "http://…"`) follows the same store by our plug-in (inference/vllm_plugin.py): it fetches a version while
it samples, pauses and keeps its requests, copies it, drops all keys and values, and goes on. A failed update is a lost engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import UserError
from etude.inference.client import ServerFailed
from etude.inference.weight_sync import BrokenStore, Receiver, Swap, WeightStore
from etude.rl.processes import RlJob, as_child, load_job

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from etude.inference.client import RemotePolicy
    from etude.inference.local import LocalPolicy
    from etude.inference.policy import PolicyInfo

    Say = Callable[[str], None]

POLL = 0.05  # seconds between two looks for new weights
PATIENCE = 600.0  # seconds that one call of vLLM's weight life cycle may take
BEAT = 1.0  # seconds between two questions whether the engine's thread is well
EVENTS = (
    100  # a second, of all rollouts together: rollouts need no token at once, only what came before an engine is lost
)


class Follower:
    """Brings the newest weights of a store to whoever samples."""

    def __init__(self, store: WeightStore, update: Callable[[int], Awaitable[Swap]], say: Say = lambda _: None) -> None:
        self.store, self.update, self.say = store, update, say
        self.version = 0
        self._swaps: list[Swap] = []
        self._unreachable = (
            -1
        )  # a version that could not be had: reading it all again twenty times a second helps nobody

    def swaps(self) -> list[Swap]:
        """Return the changes of weights since this was asked last."""
        swaps, self._swaps = self._swaps, []
        return swaps

    async def run(self) -> None:
        """Follow until cancelled. A version that cannot be had is waited out."""
        while True:
            await self.step()
            await asyncio.sleep(POLL)

    async def step(self) -> None:
        """Bring the newest version, if it is newer than the one in use."""
        newest = await asyncio.to_thread(self.store.newest)
        if newest is None or newest <= max(self.version, self._unreachable):
            return
        try:
            swap = await self.update(newest)
        except BrokenStore as error:
            self.say(str(error))
            self._unreachable = newest
            return
        self._swaps.append(swap)
        self.version = newest


class VllmWeights:
    """Brings versions to a vLLM server with our plug-in (inference/vllm_plugin.py), which must see the model and the store."""

    def __init__(self, policy: RemotePolicy, model: Path, store: WeightStore) -> None:
        self.policy, self.model, self.store = policy, model, store
        self.last = Swap(-1, 0, 0.0, 0.0)

    async def ready(self) -> PolicyInfo:
        """Connect, and have the server take the newest version: what it holds now may be another run's, or nobody's."""
        info = await self.policy.connect()
        where = {"folder": str(self.store.folder.absolute()), "model": str(self.model.absolute())}
        await self._tell("/init_weight_transfer_engine", {"init_info": where})
        try:
            await self.update(self.store.newest() or 0)
        except BrokenStore:  # a later one comes
            await self.update(0)
        return info

    async def update(self, version: int) -> Swap:
        """Have the server fetch a version while it samples, then sample from it. BrokenStore: it cannot be had, nothing changed."""
        if version == self.last.version:
            return self.last
        began = time.perf_counter()
        size = await self._fetch(version)
        stopped = time.perf_counter()
        try:
            await self._tell("/pause?mode=keep")
            await self._tell("/start_weight_update")
            await self._tell("/update_weights", {"update_info": {"version": version}})
            await self._tell("/finish_weight_update", {"weight_version": str(version)})
            await self._tell("/reset_prefix_cache?reset_running_requests=true")
            await self._tell("/resume")
        except UserError as error:  # part of it may be new and part old
            lost = f"the server failed to take version {version} of the weights and must be started again"
            raise ServerFailed(f"{lost}; see its log: {error}") from None
        self.policy.version = version
        ended = time.perf_counter()
        self.last = Swap(version, size, ended - began, ended - stopped)
        return self.last

    async def _fetch(self, version: int) -> int:
        """Wait until a version is in the server's main memory; return the bytes that were read for it."""
        while True:
            reply = await self._tell("/collective_rpc", {"method": "etude_fetch", "args": [str(version)]})
            said = reply["results"]  # of every worker
            if all(each["ready"] for each in said):
                return sum(int(each["bytes"]) for each in said)
            for each in said:
                if why := each.get("why"):
                    raise (BrokenStore if each["wait"] else UserError)(why)
            await asyncio.sleep(POLL)

    async def _tell(self, path: str, body: Any = None) -> Any:
        try:
            async with asyncio.timeout(PATIENCE):
                return await self.policy.tell(path, body)
        except TimeoutError:
            raise ServerFailed(f"the server did not answer {path} in {PATIENCE:g} s; start it again") from None
        except UserError as error:
            raise type(error)(f"{error}; how to start vLLM for this: docs/inference.md, weight sync to vLLM") from None


async def serve(job: RlJob, say: Say, address: socket.socket, token: str = "") -> None:
    """Answer until this process is ended; raise when the engine breaks, for another one to begin."""
    from etude.inference.http import Gate, Limits, Served, server_of
    from etude.inference.server import build_app

    policy = await asyncio.to_thread(open_policy, job, say)
    policy.events = EVENTS
    receiver = Receiver(policy, WeightStore(job.weights, job.settings.anchor_every), say)
    if newest := receiver.store.newest():  # before anybody is answered: old weights would write what is soon too old
        with contextlib.suppress(BrokenStore):
            await receiver.update(newest)
    limits = Limits(
        max_queue=1 << 20, timeout=1e9, max_request_bytes=1 << 30, max_connections=1 << 20, max_unread=1 << 30, drain=0
    )
    served = Served(policy, limits, Gate(token.encode() or None))
    app = build_app(served, {"id": policy.info.name}, frozenset(), receiver)
    server = asyncio.create_task(server_of(app, limits).serve(sockets=[address]))
    while not server.done():
        await policy.beat()
        await asyncio.wait([server], timeout=BEAT)


def own_socket(path: Path) -> socket.socket:
    """Return a Unix socket at a path, for this user alone."""
    made = socket.socket(socket.AF_UNIX)
    path.unlink(missing_ok=True)
    made.bind(str(path))
    path.chmod(0o600)
    return made


def open_policy(job: RlJob, say: Say) -> LocalPolicy:
    """Return the policy at version 0. Heads are left out: they would not be trained, and seeded requests use no draft tokens."""
    import torch

    from etude.inference.local import LocalPolicy
    from etude.models.load import choose_device
    from etude.models.shape import model_shape
    from etude.rl.division import of_run

    own, cache = job.settings, int(job.settings.engine_memory * 1e9)
    if not cache and choose_device(own.device).type == "cuda":
        cache = of_run(job.model, own, own.length or model_shape(job.model).context, apart=int(job.apart))[1]
        if job.apart and not cache:
            raise UserError("the engine does not fit a GPU of its own; `etude plan` says what would")
    return LocalPolicy.open(
        job.model, device=own.device, dtype=None if own.dtype == "auto" else getattr(torch, own.dtype),
        context=own.length or None, memory=cache or None, speculate=False, say=say,
    )  # fmt: skip


def main() -> None:
    """Do the job of a file."""
    from etude.inference.http import bind

    job, (host, port, token) = load_job(Path(sys.argv[1])), sys.argv[2:] or ["", "", ""]
    word = Path(token).read_text(encoding="utf-8").strip() if token else ""
    with bind(host, int(port)) if host else own_socket(job.socket) as address:
        asyncio.run(serve(job, lambda line: print(line, flush=True), address, word))  # noqa: T201 - its log


if __name__ == "__main__":
    from etude.inference import local, server  # noqa: F401 - with all other imports, before garbage is looked for

    as_child(main)
