"""A policy in another process, over a Unix socket: many requests at once, and none is lost when that process dies.

Tokens are told as they come. When the other side has gone, the link waits for the one that is started in its place, and has it go on
after the tokens that came: since a seed gives each position its own random number, it writes what the first one would have written,
if with newer weights.

A frame is two lengths, a head in JSON and a body of numbers. To the policy: `generate` (body: the prompt), `cancel`, `ping`. From it:
`hello`, `tokens` (body: four numbers a token), `end` (the same), `failed`, `pong`, `swap`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import struct
from array import array
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from etude.errors import UserError, one_line
from etude.inference.policy import Busy, Completion, PolicyInfo, Sampling, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from pathlib import Path

    from etude.inference.local import LocalPolicy

LENGTHS = struct.Struct("<II")
TOLD_EVERY = 0.1  # seconds: a frame a token would keep both sides busier than the model
BEAT = 1.0  # seconds between two questions whether the other side is well
RETRY = 0.05  # seconds between two attempts to connect
PATIENCE = 300.0  # seconds without an answer; the first steps of a large model are compiled for minutes


@dataclass(frozen=True)
class Swap:
    """New weights have come to a policy."""

    version: int
    bytes: int  # read from the store
    seconds: float  # from noticing them to sampling from them
    paused: float  # of these, seconds that requests had to wait


def pack(head: dict[str, Any], body: bytes = b"") -> bytes:
    """Return a frame."""
    words = json.dumps(head).encode()
    return LENGTHS.pack(len(words), len(body)) + words + body


async def read_frame(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes] | None:
    """Return the next frame, or None when the other side has gone."""
    try:
        head, body = LENGTHS.unpack(await reader.readexactly(LENGTHS.size))
        return json.loads(await reader.readexactly(head)), await reader.readexactly(body)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def numbers_of(tokens: Sequence[Token]) -> bytes:
    """Return tokens as four doubles each; ids and versions are far below 2^53, up to which whole numbers are exact."""
    return array("d", itertools.chain.from_iterable(token[:4] for token in tokens)).tobytes()


def tokens_of(body: bytes) -> list[Token]:
    """Return the tokens of such numbers."""
    rows = struct.iter_unpack("4d", body)
    return [Token(int(token), drawn, raw, int(version)) for token, drawn, raw, version in rows]


# ---- the side of the policy


@dataclass(eq=False)
class _Caller:
    writer: asyncio.StreamWriter
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    fresh: dict[int, list[Token]] = field(default_factory=dict)  # tokens not yet told

    def send(self, head: dict[str, Any], body: bytes = b"") -> None:
        if not self.writer.is_closing():
            self.writer.write(pack(head, body))

    def begin(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        self.tasks[number] = task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self.tasks.pop(number, None))

    def tell(self) -> None:
        """Send what all requests have written since the last time."""
        some = {number: tokens for number, tokens in self.fresh.items() if tokens}
        if some:
            counts = [[number, len(tokens)] for number, tokens in some.items()]
            self.send({"tokens": counts}, b"".join(map(numbers_of, some.values())))
        for tokens in some.values():
            tokens.clear()


class Server:
    """Lets other processes ask a policy of this one."""

    def __init__(self, policy: LocalPolicy) -> None:
        self.policy, self.swaps = policy, list[Swap]()
        self._callers = set[_Caller]()
        self._broken: asyncio.Future[None]

    def swapped(self, swap: Swap) -> None:
        """Tell all callers of new weights, those to come included."""
        self.swaps.append(swap)
        for caller in self._callers:
            caller.send({"swap": asdict(swap)})

    async def run(self, socket: Path) -> None:
        """Answer until cancelled; raise what breaks the policy."""
        self._broken = asyncio.get_running_loop().create_future()
        server = await asyncio.start_unix_server(self._attend, socket)
        socket.chmod(0o600)
        telling = asyncio.create_task(self._tell())
        try:
            await self._broken
        finally:
            telling.cancel()
            server.close()
            for caller in self._callers:
                caller.writer.close()

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(TOLD_EVERY)
            for caller in self._callers:
                caller.tell()

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller = _Caller(writer)
        self._callers.add(caller)
        known = {"version": self.policy.statistics()["version"], "swaps": [asdict(swap) for swap in self.swaps]}
        caller.send({"hello": asdict(self.policy.info), **known})
        try:
            while frame := await read_frame(reader):
                self._take(caller, *frame)
        finally:
            self._callers.remove(caller)
            for task in list(caller.tasks.values()):
                task.cancel()
            writer.close()

    def _take(self, caller: _Caller, head: dict[str, Any], body: bytes) -> None:
        match head:
            case {"generate": number, "sampling": told, "session": session}:
                sampling = Sampling(**told | {"stop_tokens": frozenset(told["stop_tokens"])})
                caller.begin(number, self._answer(caller, number, array("q", body).tolist(), sampling, session))
            case {"cancel": number} if number in caller.tasks:
                caller.tasks[number].cancel()
            case {"ping": number}:
                caller.begin(number, self._pong(caller))

    async def _pong(self, caller: _Caller) -> None:
        await self.policy.beat()  # the engine's thread may hang while this one is well
        caller.send({"pong": self.policy.statistics()})

    async def _answer(
        self, caller: _Caller, number: int, prompt: list[int], sampling: Sampling, session: str | None
    ) -> None:
        fresh = caller.fresh[number] = list[Token]()
        try:
            done = await self.policy.generate(prompt, sampling, session=session, on_tokens=fresh.extend)
            ended = {"finish": done.finish_reason, "by": done.stopped_by, "cached": done.cached}
            caller.send({"end": number, **ended}, numbers_of(fresh))
        except Busy as busy:
            caller.send({"failed": number, "busy": busy.after})
        except UserError as error:
            caller.send({"failed": number, "refused": str(error)})
        except RuntimeError as error:
            await self._judge(caller, number, error)
        finally:
            del caller.fresh[number]

    async def _judge(self, caller: _Caller, number: int, error: RuntimeError) -> None:
        """Tell the caller of a request that failed; not if the engine did, for then the next one takes it over."""
        try:
            await self.policy.beat()
        except RuntimeError as broken:
            if not self._broken.done():
                self._broken.set_exception(broken)
        else:
            caller.send({"failed": number, "error": one_line(error)})


# ---- the side of those who ask


@dataclass(eq=False)
class _Ask:
    prompt: list[int]
    sampling: Sampling
    session: str | None
    on_tokens: Callable[[list[Token]], None] | None
    done: asyncio.Future[Completion]
    tokens: list[Token] = field(default_factory=list)  # that came so far

    def add(self, tokens: list[Token]) -> None:
        self.tokens += tokens
        if tokens and self.on_tokens:
            self.on_tokens(tokens)

    def settle(self, result: Completion | Exception) -> None:
        if self.done.done():
            return
        if isinstance(result, Exception):
            self.done.set_exception(result)
        else:
            self.done.set_result(result)

    def ended(self) -> Completion | None:
        """Return the completion if all of it came, though nobody can say so any more."""
        if self.tokens and (last := self.tokens[-1].id) in self.sampling.stop_tokens:
            return Completion(self.tokens, "stop", last)
        return Completion(self.tokens, "length") if len(self.tokens) == self.sampling.max_tokens else None

    def frame(self, number: int) -> bytes:
        """Return the question for what is missing."""
        left = replace(self.sampling, max_tokens=self.sampling.max_tokens - len(self.tokens))
        told = {**vars(left), "stop_tokens": sorted(left.stop_tokens)}
        text = array("q", [*self.prompt, *(token.id for token in self.tokens)])
        return pack({"generate": number, "sampling": told, "session": self.session}, text.tobytes())


class Link:
    """A `Policy` that another process serves at a socket, now or some time."""

    def __init__(self, socket: Path, *, patience: float = PATIENCE, on_hung: Callable[[], None] = lambda: None) -> None:
        """`on_hung` is called when no answer has come for `patience` seconds: it should see to a new process."""
        self.socket, self.patience, self.on_hung = socket, patience, on_hung
        self.version = 0  # of the weights over there
        self._asks: dict[int, _Ask] = {}
        self._count = itertools.count()
        self._swaps: list[Swap] = []
        self._statistics: dict[str, int] = {}
        self._answered = True
        self._writer: asyncio.StreamWriter | None = None
        self._hello: asyncio.Future[PolicyInfo] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def info(self) -> PolicyInfo:
        """Return what a caller may want to know; only after `ready`."""
        assert self._hello is not None, "not ready"
        return self._hello.result()

    def statistics(self) -> dict[str, int]:
        """Return what the policy counted, as it said a second ago; nothing before it spoke."""
        return self._statistics

    def swaps(self) -> list[Swap]:
        """Return the changes of weights since this was asked last."""
        found, self._swaps = self._swaps, []
        return found

    async def ready(self) -> PolicyInfo:
        """Wait until the policy is there."""
        if self._closed:
            raise RuntimeError("the link is closed")
        if self._hello is None:
            self._hello = asyncio.get_running_loop().create_future()
            self._keeping = asyncio.create_task(self._keep())
            self._keeping.add_done_callback(self._end)
        return await asyncio.shield(self._hello)

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str | None = None,
        on_tokens: Callable[[list[Token]], None] | None = None,
    ) -> Completion:  # fmt: skip
        """Return a completion; see Policy. Stop texts are refused: another process could not tell that half of one was written."""
        if sampling.stop or sampling.alternatives or sampling.experts:
            raise UserError(
                "stop texts, alternatives and experts are not told over a link; ask a policy in this process"
            )
        if {*map(type, prompt)} != {int}:
            raise UserError("a prompt is token ids, whole numbers, at least one")
        await self.ready()
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        number, ask = next(self._count), _Ask(list(prompt), sampling, session, on_tokens, done)
        self._asks[number] = ask
        self._send(ask.frame(number))
        try:
            return await done
        finally:
            del self._asks[number]
            if done.cancelled():
                self._send(pack({"cancel": number}))

    async def close(self) -> None:
        """Let go of the connection; requests under way end with an error."""
        self._closed = True
        if self._keeping:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])

    def _send(self, frame: bytes) -> None:
        if self._writer and not self._writer.is_closing():  # else it is sent with the next connection
            self._writer.write(frame)

    async def _keep(self) -> None:
        """Connect, again and again, and take in what comes."""
        while True:
            with contextlib.suppress(OSError):  # nobody is there yet
                reader, self._writer = await asyncio.open_unix_connection(self.socket)
                await self._listen(reader, self._writer)
            await asyncio.sleep(RETRY)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        watching = asyncio.create_task(self._watch(writer))
        try:
            self._go_on()
            while frame := await read_frame(reader):
                self._take(*frame)
        finally:
            watching.cancel()
            writer.close()

    def _go_on(self) -> None:
        """Ask for what the process before did not finish."""
        for number, ask in self._asks.items():
            if done := ask.ended():
                ask.settle(done)
            else:
                self._send(ask.frame(number))

    async def _watch(self, writer: asyncio.StreamWriter) -> None:
        """Ask whether the other side is well. Beats are counted, not seconds: this side may have been held up itself."""
        beat, missed, self._answered = min(BEAT, self.patience / 10), 0, True
        while missed * beat < self.patience:
            if self._answered:
                self._answered = False
                self._send(pack({"ping": next(self._count)}))
            await asyncio.sleep(beat)
            missed = 0 if self._answered else missed + 1
        self.on_hung()
        writer.transport.abort()

    def _take(self, head: dict[str, Any], body: bytes) -> None:
        match head:
            case {"tokens": counts}:
                tokens = iter(tokens_of(body))
                for number, count in counts:
                    self._add(number, list(itertools.islice(tokens, count)))
            case {"end": number, "finish": finish, "by": by, "cached": cached}:
                if ask := self._add(number, tokens_of(body)):
                    ask.settle(Completion(ask.tokens, finish, by, cached))
            case {"failed": number} if number in self._asks:
                self._asks[number].settle(_failure(head))
            case {"pong": statistics}:
                self._answered, self._statistics = True, statistics
            case {"swap": told}:
                self._swaps.append(Swap(**told))
                self.version = told["version"]
            case {"hello": info, "version": version, "swaps": told}:
                self.version = version
                self._swaps += [Swap(**each) for each in told]
                if self._hello and not self._hello.done():
                    self._hello.set_result(PolicyInfo(**info))

    def _add(self, number: int, tokens: list[Token]) -> _Ask | None:
        ask = self._asks.get(number)  # None: cancelled meanwhile
        if ask:
            ask.add(tokens)
        return ask

    def _end(self, keeping: asyncio.Task[None]) -> None:
        """Tell all who wait that nothing will come; a mistake of ours is what it comes from."""
        self._closed = True
        why = RuntimeError("the link is closed")
        why.__cause__ = None if keeping.cancelled() else keeping.exception()
        if self._hello and not self._hello.done():
            self._hello.set_exception(why)
            self._hello.exception()  # nobody may be waiting for it
        for ask in self._asks.values():
            ask.settle(why)


def _failure(head: dict[str, Any]) -> Exception:
    if "busy" in head:
        return Busy(head["busy"])
    return UserError(head["refused"]) if "refused" in head else RuntimeError(head["error"])
