"""Our engine as a policy: a thread works through the requests, callers await them on their event loop."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from transformers import AutoTokenizer

from etude.errors import UserError, one_line
from etude.inference.engine import Engine
from etude.inference.model_runner import Runner
from etude.inference.policy import Completion, EngineStopped, Sampling
from etude.inference.prefix_cache import PrefixCache
from etude.models.load import choose_device, load_model
from etude.models.mtp_heads import load_heads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from etude.inference.engine import Request
    from etude.inference.model_runner import Staged
    from etude.inference.policy import OnTokens, Token

T = TypeVar("T")
PAGE = 64  # positions, on a GPU; on a CPU a page is as long as the context, so that attention reads it in place
ROWS = {"cpu": 32, "cuda": 512}
CHUNK = {"cpu": 512, "cuda": 8192}  # tokens of prompts read in one step
SHARE = 0.6  # of a GPU's free memory, for the cache; of a CPU's at most, see `_memory`
EVENTS = 400  # times a second that callers hear of new tokens, all together


class LocalPolicy:
    """A model on this machine."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.info = replace(engine.info, name=name)
        self._mail: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._over: EngineStopped | None = None  # why nothing more is done
        self.paused = False
        self.events = EVENTS
        # What callers hear of one step goes to their loop in one piece: to wake it for every request would cost more than the step.
        self._outbox: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()
        atexit.register(self._stop)  # a thread inside torch must not be cut off

    @classmethod
    def open(  # noqa: PLR0913 - what one may want to say of a machine
        cls, folder: Path, *, name: str | None = None, device: str = "auto", dtype: torch.dtype | None = None,
        context: int | None = None, rows: int | None = None, memory: int | None = None, speculate: bool | None = None,
        lookup: int = 0, say: Callable[[str], None] = lambda _: None,
    ) -> Self:  # fmt: skip
        """Load a model's folder, with its heads if it has any. `memory`: bytes for the cache; `lookup`: draft tokens looked up."""
        chosen = choose_device(device)  # type: ignore[arg-type]
        gpu = chosen.type == "cuda"
        model = load_model(folder, chosen, dtype or (torch.bfloat16 if gpu else torch.float32))
        heads = None if speculate is False else load_heads(folder, model)
        if speculate and heads is None:
            advice = "make them with the stage `mtp`, or leave speculation out"
            raise UserError(f"{folder} has no MTP heads to propose draft tokens; {advice}")
        decode = AutoTokenizer.from_pretrained(folder).decode
        engine = build(
            model, heads, decode, context=context, rows=rows, memory=memory, compiled=gpu, lookup=lookup, say=say
        )
        engine.speculation.wish = speculate
        return cls(engine, name or folder.name)

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str | None = None, on_tokens: OnTokens = None
    ) -> Completion:
        """Return a completion; see Policy. What sessions share is found by its tokens."""
        del session
        prompt = list(prompt)  # the caller's may have changed by the time it is read
        self.engine.check(prompt, sampling)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Completion] = loop.create_future()
        box: list[Request] = []
        stream = _Stream(self, loop, on_tokens) if on_tokens else None

        def end(result: Any) -> None:
            if stream:
                stream.flush()
            self.tell(loop, partial(_settle, done, result))

        self._post(lambda: box.append(self.engine.submit(prompt, sampling, stream, end)))
        try:
            return await done
        except asyncio.CancelledError:
            with contextlib.suppress(RuntimeError):  # the engine is, too
                self._post(lambda: self.engine.cancel(box[0]))
            raise

    async def update(self, weights: Mapping[str, torch.Tensor], version: int) -> float:
        """Put new weights in between two steps; requests under way go on with them. Return the seconds they had to wait."""

        def timed() -> float:
            began = time.perf_counter()
            self.engine.update(weights, version)
            return time.perf_counter() - began

        return await self._ask(timed)

    async def pause(self, *, wanted: bool) -> None:
        """Stop after the step that runs, keeping all requests, or go on."""
        await self._ask(lambda: setattr(self, "paused", wanted))

    def stage(self, weights: Mapping[str, torch.Tensor]) -> Staged:
        """Do of an update what can be done while requests run; in any thread."""
        return self.engine.runner.stage(weights)  # type: ignore[no-any-return]

    async def beat(self) -> None:
        """Return when the engine comes to it, between two steps: at once if it is well, never if it hangs."""
        await self._ask(lambda: None)

    def statistics(self) -> dict[str, int]:
        """Return what happened so far, and what is under way."""
        engine = self.engine
        return {
            **asdict(engine.counts), "waiting": len(engine.waiting) + len(self._mail), "running": len(engine.rows),
            "evicted_pages": engine.prefix_cache.evicted, "version": engine.version,
        }  # fmt: skip

    async def close(self) -> None:
        """Stop the thread; requests under way end with an error."""
        await asyncio.to_thread(self._stop)

    async def _ask(self, what: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def doing() -> None:
            try:
                result: T | Exception = what()
            except Exception as error:  # noqa: BLE001 - it is the asker's, whatever it is
                result = error
            self.tell(loop, partial(_settle, done, result))

        self._post(doing)
        return await done

    def _post(self, what: Callable[[], None]) -> None:
        with self._wake:
            if self._over:
                raise EngineStopped(str(self._over)) from self._over.__cause__
            self._mail.append(what)
            self._wake.notify()

    def _end(self, why: EngineStopped) -> None:
        with self._wake:
            self._over = self._over or why
            self._wake.notify()

    def _stop(self) -> None:
        self._end(EngineStopped("the engine is closed"))
        self._thread.join()
        atexit.unregister(self._stop)

    def _work(self) -> None:
        try:
            while not self._over:
                with self._wake:
                    self._wake.wait_for(lambda: self._over or self._mail or (self.engine.busy() and not self.paused))
                self._read_mail()
                if self.engine.busy() and not (self._over or self.paused):
                    self.engine.step()
                self._flush()
        except Exception as error:  # noqa: BLE001 - whoever waits must be told, whatever it is
            stopped = EngineStopped(f"the engine has stopped: {one_line(error)}")
            stopped.__cause__ = error
            self._end(stopped)
        assert self._over is not None
        self._read_mail()  # who wrote last must be told, too; nobody can write now
        self.engine.fail(self._over)
        self._flush()

    def _read_mail(self) -> None:
        while self._mail:
            self._mail.popleft()()

    def tell(self, loop: asyncio.AbstractEventLoop, what: Callable[[], None]) -> None:
        """Have a caller's event loop do something after this step; for the engine's thread."""
        self._outbox.setdefault(loop, []).append(what)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, {}
        for loop, calls in outbox.items():
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody is left to hear of it
                loop.call_soon_threadsafe(_call_each, loop, calls)


class _Stream:
    """Hands the tokens of one request to its caller: one by one while few requests run, many together when many do.

    To wake a caller takes the interpreter from the engine's thread for longer than to write a token takes it.
    """

    def __init__(self, policy: LocalPolicy, loop: asyncio.AbstractEventLoop, on_tokens: OnTokens) -> None:
        self.policy, self.loop, self.on_tokens = policy, loop, on_tokens
        self.buffer: list[Token] = []
        self.due = 0.0

    def __call__(self, new: list[Token]) -> None:
        self.buffer += new
        if (now := time.perf_counter()) >= self.due:
            self.due = now + len(self.policy.engine.rows) / self.policy.events
            self.flush()

    def flush(self) -> None:
        if self.buffer and self.on_tokens:
            self.policy.tell(self.loop, partial(self.on_tokens, self.buffer))
            self.buffer = []


def build(  # noqa: PLR0913
    model: Any, heads: Any, decode: Callable[[list[int]], str], *, context: int | None = None, rows: int | None = None,
    memory: int | None = None, compiled: bool = False, page: int | None = None, contexts: int | None = None,
    lookup: int = 0, say: Callable[[str], None] = lambda _: None,
) -> Engine:  # fmt: skip
    """Return an engine for a loaded model, with a cache that fits; `contexts`: which it is to hold at most.

    `lookup`: how many tokens to look up as drafts, where there are no heads; with heads it is any number, and as many as they are.
    """
    kind = model.device.type
    beyond = 2 * (heads.depth if heads else lookup)  # positions that drafts may need after a text
    longest = _longest(model.config.get_text_config(), beyond)
    if context is not None and not 0 < context <= longest:
        raise UserError(f"context = {context}: this model can be run with 1 to {longest} tokens")
    context = context or longest
    rows = rows or ROWS[kind]
    size = page or (PAGE if kind == "cuda" else context + beyond + 1)
    runner = Runner(model, heads, compiled=compiled)
    each = runner.bytes_of_position() * size
    pages = (memory or _memory(model.device, each, rows)) // each - 1
    pages = min(pages, contexts * -(-(context + beyond + 1) // size)) if contexts else pages
    if pages < 1:
        needed = f"at least {2 * each:,} bytes for {size} positions"
        raise UserError(f"the cache needs {needed}; give it more memory, or a smaller context")
    # In float32 transformers multiplies expert by expert, and asks the device for how many tokens: a graph cannot.
    graphs = kind == "cuda" and not (runner.routers.layers and runner.dtype == torch.float32)
    runner.allot(pages, size, context + beyond + 1)
    cache = PrefixCache(pages, size)
    return Engine(
        runner, cache, decode, context=context, rows=rows, chunk=CHUNK[kind], graphs=graphs, lookup=lookup, say=say
    )


def _longest(config: Any, drafts: int) -> int:
    """Return the longest context to run a model with.

    Some rotate every position of a batch otherwise as soon as one text is longer than they were first made for: they are run up
    to there, or a long text would change what others get.
    """
    longest = int(getattr(config, "max_position_embeddings", 0) or 2048)
    given = getattr(config, "rope_parameters", None) or {}
    for rope in (given, *(each for each in given.values() if isinstance(each, dict))):
        if rope.get("rope_type") in ("longrope", "dynamic"):
            longest = min(longest, int(rope.get("original_max_position_embeddings") or longest) - drafts)
    return longest


def _memory(device: torch.device, page: int, rows: int) -> int:
    """Return how much memory to take for the cache: a share of what is free; on a CPU no more than all rows could use."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * SHARE)
    import psutil

    return min(int(psutil.virtual_memory().available * SHARE / 2), (2 * rows + 1) * page)


def _call_each(loop: asyncio.AbstractEventLoop, calls: list[Callable[[], None]]) -> None:
    for call in calls:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - one that raises does not keep the others from being called
            loop.call_exception_handler({"message": "a listener to tokens failed", "exception": error})


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


@dataclass(frozen=True)
class SpeculationSpeed:
    """Tokens a second of one request without and with speculative decoding; named as files on disk have it."""

    plain: float
    guessing: float  # with draft tokens
    kept: float  # acceptance rate
    tokens_a_round: float

    @property
    def lines(self) -> list[str]:
        """Return what a person wants to know."""
        gain = self.guessing / self.plain
        pays = "" if gain > 1 else "; it does not pay here, so the engine will leave it"
        return [
            f"decoding one request: {self.guessing:,.0f} tokens/s with draft tokens, {self.plain:,.0f} without: {gain:.2f} times"
            f" as fast{pays}",
            f"acceptance rate {self.kept:.0%}, {self.tokens_a_round:.2f} tokens a step",
        ]


def measure_speculation(model: Any, heads: Any, prompts: Sequence[Sequence[int]], new: int) -> SpeculationSpeed:
    """Write after each prompt, one by one and greedily, in turns with and without; the first pair warms up."""
    context, gpu = max(map(len, prompts)) + new, model.device.type == "cuda"
    engine = build(model, heads, str, rows=1, context=context, compiled=gpu, contexts=2)
    seconds = {True: 0.0, False: 0.0}
    drafted = accepted = 0
    for index, prompt in enumerate([prompts[0], *prompts]):
        for ahead in (False, True):
            engine.speculation.wish = ahead
            before = (engine.counts.drafts, engine.counts.accepted)
            took = _write(engine, prompt, new)
            if index:
                seconds[ahead] += took
                drafted += engine.counts.drafts - before[0]
                accepted += engine.counts.accepted - before[1]
    tokens, share = len(prompts) * new, accepted / max(1, drafted)
    return SpeculationSpeed(tokens / seconds[False], tokens / seconds[True], share, 1 + share * heads.depth)


def _write(engine: Engine, prompt: Sequence[int], new: int) -> float:
    """Return the seconds one request takes, its prompt included, which is as long in both ways."""
    engine.submit(prompt, Sampling(new, temperature=0), None, lambda _: None)
    began = time.perf_counter()
    while engine.busy():
        engine.step()
    return time.perf_counter() - began
