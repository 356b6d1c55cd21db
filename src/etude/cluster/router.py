"""A policy before many engines. It lives in the process of whoever samples: no hop more, and nothing more that can die.

Requests of one session go to one engine, whose prefix cache has what came before. A new session goes to the one with fewer requests
under way of the two that its name draws (rendezvous hashing), so that a slow engine holds its share of them and not, in the end, all.
An engine that fails a request is left alone for a moment and the request goes on elsewhere, after the tokens that came: a seed gives
each position its own random number, so another engine of ours writes what the first would have written. Which engines there are is
told from outside (`set_engines`); one that is taken off the list loses its requests at once, so that nobody waits for an engine that
hangs.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from etude.inference.client import ClientSettings, RemotePolicy, ServerFailed
from etude.inference.policy import Busy, Completion, PolicyInfo, Sampling, Token

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from etude.inference.policy import OnTokens

FAILURES = 12  # of one request: more than any loss of engines explains
ASIDE = 2.0  # seconds that an engine which failed a request is left alone
PATIENCE = 3600.0  # seconds without any engine; they may all be loading a large model
SESSIONS = 100_000  # whose engine is remembered; of one that was forgotten a prefix cache may not be found again
STRICT = ClientSettings(
    require_logprob=True, retries=0, connect=30.0, first_token=1e9, between_tokens=1e9, total=1e9, longest_wait=0.5
)  # who hangs is found by its health, not by its silence: a queue may be long


@dataclass(frozen=True)
class Endpoint:
    """An engine that is ready; a replacement has the number of the one before it, and another address."""

    number: int
    address: str
    vocabulary: int = 0  # of the caller; 0: as the server says, which vLLM does not


@dataclass
class Entry:
    """An engine as a router has it."""

    policy: RemotePolicy
    until: float = 0.0  # when it may be asked again
    requests: int = 0  # under way
    connecting: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def connected(self) -> RemotePolicy:
        async with self.connecting:
            if not self.policy.card:
                await self.policy.connect()
        return self.policy


class Router:
    """See `Policy`."""

    def __init__(self, token: str) -> None:
        self.token = token
        self._entries: dict[Endpoint, Entry] = {}
        self._engine_of: dict[str, Endpoint] = {}  # by session, the last used one last
        self._news = asyncio.Event()
        self._info: PolicyInfo | None = None

    @property
    def info(self) -> PolicyInfo:
        assert self._info is not None, "no engine was ready yet"
        return self._info

    async def set_engines(self, endpoints: Iterable[Endpoint]) -> None:
        """Take over which engines there are; requests to one that is gone go on elsewhere."""
        wanted = set(endpoints)
        gone = [self._entries.pop(each) for each in self._entries.keys() - wanted]
        for new in wanted - self._entries.keys():
            self._entries[new] = Entry(RemotePolicy(new.address, new.vocabulary, self.token, STRICT))
        self._news.set()
        for entry in gone:  # last: another list may come meanwhile
            await entry.policy.close()

    async def ready(self) -> PolicyInfo:
        """Wait for the first engine that answers."""
        while self._info is None:
            endpoint = await self._choose(None)
            try:
                await self._connected(endpoint)
            except (ServerFailed, Busy):
                self._aside(endpoint)
        return self._info

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str | None = None, on_tokens: OnTokens = None
    ) -> Completion:
        """See `Policy`. A request outlives the engine it was sent to."""
        kept: list[Token] = []
        failure: ServerFailed | Busy | None = None
        for _ in range(FAILURES):
            endpoint = await self._choose(session)
            entry = self._entries[endpoint]
            came: list[Token] = []

            def take(fresh: list[Token], came: list[Token] = came) -> None:
                came.extend(fresh)
                if on_tokens:
                    on_tokens(fresh)

            rest = replace(sampling, max_tokens=sampling.max_tokens - len(kept))
            text = [*prompt, *(token.id for token in kept)]
            entry.requests += 1
            try:
                policy = await self._connected(endpoint)
                done = await policy.generate(text, rest, session=session, on_tokens=take)
            except (ServerFailed, Busy) as error:
                failure = error
                self._aside(endpoint)
                # vLLM says only at the end which weights wrote what; a stop text may lie across the border.
                if came and entry.policy.info.details["server"] == "etude" and not sampling.stop:
                    kept += came
                if kept and (ended := _ended(kept, sampling)):
                    return ended
            else:
                return replace(done, tokens=[*kept, *done.tokens])
            finally:
                entry.requests -= 1
        raise ServerFailed(f"a request failed {FAILURES} times, on whatever engine; the last time: {failure}")

    async def close(self) -> None:
        await self.set_engines([])

    async def _choose(self, session: str | None) -> Endpoint:
        """Return the engine of a session among those that are well; wait while there is none."""
        end = time.monotonic() + PATIENCE
        while (now := time.monotonic()) < end:
            self._news.clear()
            well = [endpoint for endpoint, entry in self._entries.items() if entry.until <= now]
            if well:
                return self._engine(session, well)
            try:
                async with asyncio.timeout(ASIDE / 4):
                    await self._news.wait()
            except TimeoutError:
                continue
        raise ServerFailed(f"no engine answered for {PATIENCE:.0f} s; see their logs in the run's folder")

    def _engine(self, session: str | None, well: list[Endpoint]) -> Endpoint:
        """Return the engine of a session: the one it had, or else the less busy of the two that its name draws."""
        if session is None:
            return min(well, key=self._requests)
        known = self._engine_of.pop(session, None)
        if known is None or known not in well:
            drawn = heapq.nlargest(2, well, lambda each: hashlib.sha256(f"{session} {each.number}".encode()).digest())
            known = min(drawn, key=self._requests)
        self._engine_of[session] = known
        if len(self._engine_of) > SESSIONS:
            del self._engine_of[next(iter(self._engine_of))]
        return known

    def _requests(self, endpoint: Endpoint) -> int:
        return self._entries[endpoint].requests

    async def _connected(self, endpoint: Endpoint) -> RemotePolicy:
        """Return the policy of an engine that was chosen just now."""
        policy = await self._entries[endpoint].connected()
        self._info = self._info or policy.info
        return policy

    def _aside(self, endpoint: Endpoint) -> None:
        if entry := self._entries.get(endpoint):
            entry.until = time.monotonic() + ASIDE


def _ended(tokens: list[Token], sampling: Sampling) -> Completion | None:
    """Return the completion if all of it came, though its engine could not say so any more."""
    if tokens[-1].id in sampling.stop_tokens:
        return Completion(tokens, "stop", tokens[-1].id)
    return Completion(tokens, "length") if len(tokens) >= sampling.max_tokens else None
