"""Who samples for RL: a process with our engine, or a server that runs already; and how new weights come to them.

    python -m etude.rl.engine JOB.json [HOST PORT TOKEN_FILE]

The process begins with the model's folder, which is version 0, goes straight to the newest version there is, and then answers the
token API (inference/server.py) at a Unix socket, or for other machines at a port that asks for a token. The orchestrator's
`Follower` brings every version that the trainer publishes to whoever samples, by the weight life cycle of that API.

A vLLM server (`[rl] engine = "http://…"`) takes whole checkpoints from disk: a version is written beside the store, the server pauses
and keeps its requests, loads it, drops all keys and values, and goes on. What was seen to go wrong there without an error is refused:
tied embeddings, of which the output layer stays old, and experts.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from etude.errors import UserError
from etude.files import read_json
from etude.inference.weight_sync import BrokenStore, Held, Receiver, Swap, WeightStore
from etude.rl.processes import RlJob, as_child, load_job

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from etude.inference.client import RemotePolicy
    from etude.inference.local import LocalPolicy
    from etude.inference.policy import PolicyInfo

    Say = Callable[[str], None]

POLL = 0.05  # seconds between two looks for new weights
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
    """Brings versions to a vLLM server, which must see the run's folder and have been started with VLLM_SERVER_DEV_MODE=1."""

    def __init__(self, policy: RemotePolicy, job: RlJob, store: WeightStore) -> None:
        self.policy, self.model, self.folder, self.store = policy, job.model, job.folder / "vllm", store
        self._held: Held | None = None
        config = read_json(job.model / "config.json")
        if config.get("tie_word_embeddings"):
            why = "ties its embeddings, and vLLM leaves the output layer old after an update"
            raise UserError(
                f"{job.model} {why}: save the model with tie_word_embeddings = false, or leave `engine` out"
            )
        if any("expert" in name for name in config):
            raise UserError(f"{job.model} has experts, whose weights vLLM does not update right; leave `engine` out")

    async def ready(self) -> PolicyInfo:
        """Connect to the server; at the beginning of a run have it load version 0, as another run may have left others there."""
        info = await self.policy.connect()
        if self.store.newest() is None:
            await self._load(self.model, 0)
        return info

    async def update(self, version: int) -> Swap:
        """Have the server load a version of the store."""
        began, target = time.perf_counter(), self.folder / f"{version:08d}"
        self._held = await asyncio.to_thread(self.store.pull, version, self._held)
        await asyncio.to_thread(_write, target, self._held)
        paused = await self._load(target, version)
        shutil.rmtree(self.folder)
        return Swap(version, self._held.bytes, time.perf_counter() - began, paused)

    async def _load(self, folder: Path, version: int) -> float:
        """Return the seconds that requests had to wait. A failed update is a lost engine: the server must be started again."""
        began, tell = time.perf_counter(), self.policy.tell
        try:
            await tell("/pause?mode=keep")
            await tell("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
            await tell("/reset_prefix_cache?reset_running_requests=true")
            await tell("/update_weight_version", {"new_version": str(version)})
            await tell("/resume")
        except UserError as error:
            why = f"the server failed to load version {version} of the weights and must be started again"
            raise UserError(f"{why}, with VLLM_SERVER_DEV_MODE=1: {error}") from None
        self.policy.version = version
        return time.perf_counter() - began


def _write(folder: Path, held: Held) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in held.tensors.items()}, folder / "model.safetensors"
    )


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
        cache = of_run(job.model, own, own.length or model_shape(job.model).context)[1]
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
