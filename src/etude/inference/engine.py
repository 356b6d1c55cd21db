"""Continuous batching: requests come and go between two steps, and each gets what it would have got alone.

    submit → waiting → prefilling (its prompt is read, a chunk a step) → a row of the batch → done

Whoever waits is admitted in order while there are rows and pages. When pages run out, what nobody uses is evicted; then the request
that came last is set back to waiting, and reads its own text again later. A request that could not run alone is refused at once, so
the oldest one can always go on: there is no deadlock.

On a GPU a step is launched before the one before is read: the host works while the device does. New weights are copied in place
between two launches.

With hundreds of rows and a step every few milliseconds the host has no time to ask each request: what is asked in every step is in
arrays (`Rows`), and what few requests wish (top-p, alternatives, experts) is counted.
"""

from __future__ import annotations

import heapq
import itertools
import math
import secrets
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from etude.errors import UserError
from etude.inference.decoding import Decoder, Prefill, bucket
from etude.inference.policy import Completion, PolicyInfo, Token
from etude.inference.prefix_cache import Held
from etude.inference.speculation import SpeculationSwitch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from etude.inference.model_runner import Runner
    from etude.inference.policy import FinishReason, OnTokens, Sampling
    from etude.inference.prefix_cache import PrefixCache

    OnEnd = Callable[[Completion | Exception], None]

SCORED = 1024  # tokens of a scored prompt read in one step: each has a row of logits
WORTH_WAITING = 64  # tokens of a prompt that another request is reading just now


class Engine:
    """Runs requests on one device. Not safe for several threads: see LocalPolicy."""

    def __init__(  # noqa: PLR0913
        self, runner: Runner, prefix_cache: PrefixCache, decode: Callable[[list[int]], str], *,
        context: int, rows: int, chunk: int, graphs: bool, lookup: int = 0, say: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.runner, self.prefix_cache, self.context = runner, prefix_cache, context
        self.chunk, self.decode = chunk, decode
        self.depth = runner.heads.depth if runner.heads else 0
        self.drafts = self.depth or lookup  # draft tokens a step
        self.info = PolicyInfo("", context, runner.vocabulary, {"draft_tokens": self.drafts})
        self.beyond = 2 * self.drafts  # a round may begin before it is known that the last one ended a text
        most = -(-(context + self.beyond + 1) // prefix_cache.size)
        self.decoder = Decoder(runner, rows, most, graphs=graphs, lookup=lookup)
        self.prefill = Prefill(runner, chunk, rows, most, graphs=graphs)
        self.speculation = SpeculationSwitch(say, able=self.drafts > 0)
        self.version = 0  # of the weights
        self.counts = Counts()
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.rows = Rows(rows)
        self._flying: deque[Launched] = deque()
        self._numbers = itertools.count()
        self._late = 1 if runner.device.type == "cuda" else 0

    # ---- what a caller does

    def submit(self, prompt: Sequence[int], sampling: Sampling, on_tokens: OnTokens, on_end: OnEnd) -> Request:
        """Take a request, or refuse it."""
        self.check(prompt, sampling)
        seed = secrets.randbits(62) if sampling.seed is None else sampling.seed % (1 << 62)
        stop = Stop(sampling, self.decode)
        request = Request(next(self._numbers), sampling, seed, list(prompt), stop, on_tokens, on_end)
        request.constraint = sampling.constraint() if sampling.constraint else None
        self.waiting.append(request)
        self.counts.submitted += 1
        return request

    def check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Refuse what cannot be done."""
        self.info.check(prompt, sampling)
        needed = len(prompt) + sampling.max_tokens + self.beyond
        if needed > (room := self.prefix_cache.count * self.prefix_cache.size):
            asked = f"the cache holds {room} positions, this request needs {needed}"
            raise UserError(f"{asked}; give the engine more memory or ask for fewer tokens")
        if sampling.experts and not self.runner.routers.layers:
            raise UserError("experts were asked for, but this model has no routers")

    def cancel(self, request: Request) -> None:
        """Forget a request."""
        if not request.over:
            self.counts.cancelled += 1
            self._leave(request)

    def busy(self) -> bool:
        """Return whether there is anything to do."""
        return bool(self.waiting or self.prefilling or self._flying or len(self.rows))

    def update(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Copy new weights in place: all of them fit, or nothing is changed. What runs goes on with them."""
        if version <= self.version:
            raise UserError(f"new weights are version {version}, those in use {self.version}; versions must rise")
        self.runner.replace(weights)
        self.version = version
        self.prefix_cache.renew()

    def step(self) -> None:
        """Do the next thing: admit, read a chunk of prompts, write a token of every running request."""
        self._admit()
        self._fill()
        self._decode()
        self._read_what_is_due()

    def fail(self, error: Exception) -> None:
        """End everything with an error. The device is in an unknown state, so nothing is asked of it."""
        flying = [request for done in self._flying for request in done.of if request]  # maybe without a row already
        for request in dict.fromkeys([*self.waiting, *self.prefilling, *self.rows.requests(), *flying]):
            if not request.over:
                request.over = True
                request.on_end(error)

    # ---- waiting → prefilling

    def _admit(self) -> None:
        passed: list[Request] = []
        while self.waiting and len(passed) < self.rows.count and (row := self.rows.reserve()) is not None:
            request = self.waiting.popleft()
            if self._read_by_another(request):
                passed.append(request)
                self.rows.give_back(row)
            elif not self._begin(request, row):
                self.waiting.appendleft(request)
                self.rows.give_back(row)
                break
        self.waiting.extendleft(reversed(passed))

    def _read_by_another(self, request: Request) -> bool:
        """Return whether somebody is reading the beginning of this prompt just now: then it need not be read twice."""
        more = max(WORTH_WAITING, self.prefix_cache.size)  # only full pages are shared with those that run
        return (
            request.first > 0
            and len(request.tokens) > more
            and any(
                request.tokens[: other.prefix + more] == other.tokens[: other.prefix + more]
                for other in self.prefilling
                if len(request.tokens) > other.prefix + more
            )
        )

    def _begin(self, request: Request, row: int) -> bool:
        # Heads need the hidden states of the last positions, which are not in the cache; nor are the experts of any.
        sure = request.tokens[: max(1, len(request.tokens) + 1 - max(1, self.decoder.window))]
        known = sure[: request.first + 1]
        held, done, copy = self.prefix_cache.begin(known)
        if not self.prefix_cache.grow(held, len(request.tokens) + self.drafts + 1):
            self.prefix_cache.end(held, request.tokens, done - (copy[2] if copy else 0))
            return False
        if copy:
            self.runner.cache.copy(*copy)
        first, request.held, request.row = request.prefix < 0, held, row
        request.computed = request.prefix = done
        if first:
            request.cached = done
            self.counts.prompt_tokens += len(request.tokens)
            self.counts.cached_tokens += done
        self.prefilling.append(request)
        return True

    # ---- prefilling → a row

    def _fill(self) -> None:
        parts, left = list[tuple[Request, int]](), self.chunk
        for request in self.prefilling:
            if left > 0:
                most = min(left, SCORED) if request.sampling.score else left
                parts.append((request, min(most, len(request.tokens) - request.computed)))
                left -= parts[-1][1]
        if not parts:
            return
        counts = [count for _, count in parts]
        places = [(request.held.pages, request.computed, count) for request, count in parts]
        tokens = [_following(parts, depth) for depth in range(self.depth + 1)]
        done = [request.computed + count == len(request.tokens) for request, count in parts]
        ends = list(itertools.accumulate(counts))
        last = [end - 1 for end, finished in zip(ends, done, strict=True) if finished] or [0]
        scored = [
            (part, range(end - part[1], end)) for part, end in zip(parts, ends, strict=True) if part[0].sampling.score
        ]
        wanted = [*last, *(place for _, places in scored for place in places)]
        self.runner.routers.watched = watched = any(request.sampling.experts for request, _ in parts)
        logits, hidden, routes = self.prefill.read(tokens, places, wanted)
        sizes = [len(last), *(count for (_, count), _ in scored)]
        logits, *of_prompts = logits.split(sizes)
        for ((request, _), _), own in zip(scored, of_prompts, strict=True):
            self._score(request, own)
        chosen = routes.cpu().split(counts) if watched and routes is not None else [None] * len(counts)
        for (request, count), states, routed in zip(parts, hidden.split(counts), chosen, strict=True):
            request.computed += count
            if request.sampling.experts:
                request.routed.append(routed)
            if self.depth:
                before = [] if request.trail is None else [request.trail]
                request.trail = torch.cat([*before, states])[-self.decoder.window :].clone()
            self.prefix_cache.publish(request.held, request.tokens, request.computed)
        if ready := [request for (request, _), finished in zip(parts, done, strict=True) if finished]:
            self._start(ready, logits)
            self.prefilling = [request for request in self.prefilling if request not in ready]  # not before: see `fail`

    def _score(self, request: Request, logits: torch.Tensor) -> None:
        """Note how likely the tokens of a prompt are that follow those just read."""
        prompt = request.tokens[: len(request.tokens) - len(request.written)]
        following = prompt[request.computed + 1 :][: len(logits)]
        values = logits[: len(following)].float().log_softmax(-1)
        own = values.gather(1, self.runner.send(following).long()[:, None])[:, 0].tolist()
        best = values.topk(min(request.sampling.alternatives, values.shape[1]))
        likely = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        for token, value, (others, chances) in zip(following, own, likely, strict=True):
            request.scored.append(Token(token, value, value, self.version, tuple(zip(others, chances, strict=True))))

    def _start(self, ready: list[Request], logits: torch.Tensor) -> None:
        """Draw the first token of requests whose prompt is read, and make their rows active."""
        bits = self._bits(ready) if any(request.constraint for request in ready) else None
        packed = self.decoder.begin(ready, logits, cut=any(request.cut for request in ready), bits=bits)
        for request in ready:
            request.trail = None
            self.rows.start(request.row, request, len(request.held.pages) * self.prefix_cache.size)
            self.rows.left[request.row] -= 1
        self._show_pages([request.row for request in ready])
        self._launch(list(ready), packed[..., None], logits)

    def _bits(self, requests: Sequence[Request | None]) -> torch.Tensor:
        """Return which tokens each may draw next: all, unless its constraint says otherwise."""
        bits = np.full((len(requests), -(-self.runner.vocabulary // 32)), -1, np.int32)
        for row, request in zip(bits, requests, strict=True):
            if request and request.constraint:
                row[:] = np.frombuffer(request.constraint.allowed(), np.int32)[: len(row)]
        return self.runner.send(bits)

    # ---- rows

    def _decode(self) -> None:
        for row in self.rows.done():
            self._free_row(row)  # what it wrote may still be on its way
        # Rounds draw otherwise than steps do: with a seed, the clock must not decide which of them it is.
        single = self.rows.alone or (self.rows.seeded and self.speculation.wish is None)
        ahead = not single and self.speculation.ahead(len(self.rows))
        if self.rows.alone:
            self._catch_up()
        # How far a round went is not known before it is read: each that is not may have gone as far as it could.
        self._give_pages(self.drafts * (ahead + sum(done.result.shape[2] > 1 for done in self._flying)))
        if not len(self.rows):
            return
        most = self.rows.last() + 1
        size = most if self.runner.device.type == "cpu" else bucket(most, self.rows.count)
        self.runner.routers.watched = watched = self.rows.watched > 0
        with self.speculation.timed(len(self.rows), ahead=ahead, written=lambda: self.counts.written_tokens):
            bits = self._bits(self.rows.of[:size]) if self.rows.limited else None
            result, logits, routes = self.decoder.step(size, cut=self.rows.cut > 0, ahead=ahead, bits=bits)
            self.rows.launched()
            self._launch(self.rows.of[:size], result, logits, routes if watched else None)
            self.counts.steps += 1
            self.counts.rounds += ahead
            self._read_what_is_due()  # inside the timing: to launch a step takes no time

    def _free_row(self, row: int) -> None:
        self.rows.stop(row)
        self.decoder.set_pages([row], [[]])

    def _give_pages(self, more: int) -> None:
        """See that every row has pages for the next step, the oldest first; set the last back for that if need be."""
        changed = []
        for row in self.rows.short_of_pages(more):
            # It may end or be set back itself meanwhile.
            while request := self.rows.of[row]:
                if self.prefix_cache.grow(request.held, int(self.rows.computed[row]) + 1 + more):
                    self.rows.room[row] = len(request.held.pages) * self.prefix_cache.size
                    changed.append(row)
                    break
                self._make_room()
        self._show_pages([row for row in changed if self.rows.of[row]])

    def _show_pages(self, rows: list[int]) -> None:
        if rows:
            self.decoder.set_pages(rows, [request.held.pages for row in rows if (request := self.rows.of[row])])

    def _make_room(self) -> None:
        """See who has ended; if all is known, send the request that came last back to waiting."""
        if self._flying:
            self._catch_up()
            return
        last = max([*self.prefilling, *self.rows.requests()], key=lambda each: each.number)
        self._withdraw(last)
        last.row, last.trail, last.computed, last.routed, last.scored = -1, None, 0, [], []
        self.waiting = deque(sorted([*self.waiting, last], key=lambda each: each.number))
        self.counts.preempted += 1

    # ---- what the device wrote

    def _launch(
        self, of: list[Request | None], result: torch.Tensor, logits: torch.Tensor, routes: torch.Tensor | None = None
    ) -> None:
        alternatives: list[torch.Tensor] = []
        if self.rows.alone and (most := max(request.sampling.alternatives if request else 0 for request in of)):
            alternatives = [each.cpu() for each in logits.float().log_softmax(-1).topk(min(most, logits.shape[-1]))]
        event = None
        if result.is_cuda:
            result = result.to("cpu", non_blocking=True)  # into pinned memory, before the next step overwrites it
            routes = None if routes is None else routes.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._flying.append(Launched(of, result, event, self.version, alternatives, routes))

    def _read_what_is_due(self) -> None:
        self._catch_up(self._late if len(self.rows) else 0)

    def _catch_up(self, but: int = 0) -> None:
        while len(self._flying) > but:
            self._read(self._flying.popleft())

    def _read(self, done: Launched) -> None:
        if done.event is not None:
            done.event.synchronize()
        version, unclear = done.version, bool(done.result[2].isnan().any())
        for index, (request, *written) in enumerate(zip(done.of, *done.result.tolist(), strict=True)):
            if request is None or request.over:
                continue
            if unclear and math.isnan(sum(written[2])):
                self._end_damaged(request)
                continue
            new = [Token(int(token), one, raw, version) for token, one, raw in zip(*written, strict=True) if token >= 0]
            if in_round := len(written[0]) > 1:
                self._advance(request, len(new) - 1)
            if done.alternatives and (most := request.sampling.alternatives):
                values, places = (each[index, :most].tolist() for each in done.alternatives)
                new = [new[0]._replace(alternatives=tuple(zip(places, values, strict=True)))]
            if done.routes is not None and request.sampling.experts:
                request.routed.append(done.routes[index, : len(new)].clone())
            handed_out = self._take(request, new)
            if in_round:  # drafts accepted beyond the text's end are nobody's
                self.counts.drafts += self.drafts
                self.counts.accepted += handed_out - 1

    def _end_damaged(self, request: Request) -> None:
        """End a request whose output is no number. Keys and values it left go: nought times them is no number either."""
        pages = request.held.pages
        self.prefix_cache.renew()
        self._leave(request)
        used = {page for other in [*self.prefilling, *self.rows.requests()] for page in other.held.pages}
        self.runner.wipe([0, *(page for page in pages if page not in used)])
        request.on_end(RuntimeError("the model's output is not a number; its weights may be damaged"))

    def _advance(self, request: Request, accepted: int) -> None:
        if self.rows.of[row := request.row] is not request:
            request.computed += accepted  # it was asked for all it may write before this was read
            return
        self.rows.computed[row] += accepted
        self.rows.left[row] -= accepted

    def _take(self, request: Request, new: list[Token]) -> int:
        """Hand out tokens up to the text's end; return how many."""
        ended: FinishReason | None = None
        for index, token in enumerate(new):
            request.written.append(token)
            request.tokens.append(token.id)
            if request.stop.feed(token.id):
                ended = "stop"
            elif request.constraint:
                request.constraint.take(token.id)
            if not ended and len(request.written) == request.sampling.max_tokens:
                ended = "length"
            if ended:
                new = new[: index + 1]
                break
        self.counts.written_tokens += len(new)
        if request.on_tokens:
            request.on_tokens(new)
        if ended:
            self.counts.finished += 1
            # Of a round, drafts accepted beyond the end were read too.
            part = slice(request.first - request.prefix, len(request.tokens) - 1 - request.prefix)
            routed = torch.cat(request.routed)[part] if request.sampling.experts else None
            first = [Token(request.tokens[0], math.nan, math.nan, self.version)] if request.sampling.score else []
            prompt = [*first, *request.scored]
            completion = Completion(request.written, ended, request.stop.by, request.cached, routed, prompt)
            self._leave(request)
            request.on_end(completion)
        return len(new)

    def _leave(self, request: Request) -> None:
        request.over = True
        if request in self.waiting:
            self.waiting.remove(request)
        self._withdraw(request)

    def _withdraw(self, request: Request) -> None:
        """Take row and pages back; what was computed stays in the cache as long as there is room."""
        if request in self.prefilling:
            self.prefilling.remove(request)
            self.rows.give_back(request.row)
        elif self.rows.of[request.row] is request:
            self._free_row(request.row)
        # The last token was written but not read; of what was launched after the end nothing is kept.
        self.prefix_cache.end(request.held, request.tokens, min(request.computed, len(request.tokens) - 1))


def _following(parts: list[tuple[Request, int]], depth: int) -> list[int]:
    """Return the tokens to read, or those that follow them at a depth; the last one known stands for those that are not."""
    tokens = list[int]()
    for request, count in parts:
        here = request.tokens[request.computed + depth :][:count]
        tokens += here + request.tokens[-1:] * (count - len(here))
    return tokens


# ---- requests and rows


@dataclass(eq=False)
class Request:
    """One request on its way."""

    number: int
    sampling: Sampling
    seed: int
    tokens: list[int]  # prompt and completion, as far as the host knows
    stop: Stop
    on_tokens: OnTokens
    on_end: OnEnd
    held: Held = field(default_factory=Held)
    row: int = -1
    computed: int = 0  # positions in the cache, as of what was launched; while it runs, its row knows
    prefix: int = -1  # positions that were in the cache when it began, this time; −1: it has not begun yet
    cached: int = 0  # the same, the first time
    written: list[Token] = field(default_factory=list)
    trail: torch.Tensor | None = None  # hidden states of the last positions read, for heads
    routed: list[Any] = field(default_factory=list)  # experts, pass by pass
    scored: list[Token] = field(default_factory=list)  # tokens of the prompt after the first, as far as read
    constraint: Any = None
    over: bool = False

    @property
    def first(self) -> int:
        """The first position that must be read: what is asked of it is not in the cache."""
        return 0 if self.sampling.score else self.sampling.experts_from if self.sampling.experts else len(self.tokens)

    @property
    def cut(self) -> bool:
        """Whether it asks for top-k or top-p."""
        return self.sampling.temperature > 0 and (self.sampling.top_p < 1 or self.sampling.top_k > 0)

    @property
    def seeded(self) -> bool:
        """Whether it asks for tokens that can be had again: those of a round are drawn otherwise than those of a step."""
        return self.sampling.seed is not None and self.sampling.temperature > 0

    @property
    def alone(self) -> bool:
        """Whether it asks for what only single steps give."""
        return self.sampling.alternatives > 0 or self.constraint is not None


@dataclass(frozen=True)
class Launched:
    """A step that the device has been given."""

    of: list[Request | None]  # by index in the result
    result: torch.Tensor  # [3, R, written], on its way to the host
    event: Any
    version: int
    alternatives: list[torch.Tensor]  # log-probs and tokens, likeliest first, where anybody asked
    routes: torch.Tensor | None  # experts of what was read, [R, read, layers, experts a token], where anybody asked


@dataclass
class Counts:
    """What happened so far."""

    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: int = 0
    steps: int = 0
    rounds: int = 0
    drafts: int = 0  # draft tokens proposed; `accepted`: tokens handed out beyond the one of each round
    accepted: int = 0


NEVER = np.iinfo(np.int64).max


class Rows:
    """Places in the batch. A row is reserved when its request is admitted, and active once its prompt is read."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.of: list[Request | None] = [None] * count
        self.computed = np.zeros(count, np.int64)  # positions in the cache, as of what was launched
        self.left = np.full(count, NEVER)  # tokens it may still be asked for
        self.room = np.full(count, NEVER)  # positions its pages have
        self.active = np.zeros(count, bool)
        # How many ask for top-k or top-p; for single steps; to be looked into; for the same tokens again; for some tokens only.
        self.cut = self.alone = self.watched = self.seeded = self.limited = 0
        self._free = list(range(count))

    def __len__(self) -> int:
        return int(self.active.sum())

    def reserve(self) -> int | None:
        """Return a free row, the lowest, or None."""
        return heapq.heappop(self._free) if self._free else None

    def give_back(self, row: int) -> None:
        """Take back a row that was reserved."""
        heapq.heappush(self._free, row)

    def start(self, row: int, request: Request, room: int) -> None:
        """Make a row active."""
        self.of[row] = request
        self.computed[row], self.room[row] = request.computed, room
        self.left[row] = request.sampling.max_tokens - len(request.written)
        self.active[row] = True
        self._count(request, 1)

    def stop(self, row: int) -> None:
        """Make a row idle and free."""
        request = self.of[row]
        assert request is not None
        request.computed = int(self.computed[row])
        self.of[row] = None
        self.active[row], self.left[row], self.room[row], self.computed[row] = False, NEVER, NEVER, 0
        self._count(request, -1)
        self.give_back(row)

    def _count(self, request: Request, by: int) -> None:
        self.cut += by * request.cut
        self.alone += by * request.alone
        self.seeded += by * request.seeded
        self.watched += by * request.sampling.experts
        self.limited += by * (request.constraint is not None)

    def requests(self) -> list[Request]:
        """Return those of active rows."""
        return [request for request in self.of if request is not None]

    def last(self) -> int:
        """Return the highest active row."""
        return int(np.flatnonzero(self.active)[-1])

    def launched(self) -> None:
        """Note that every active row was asked for a token."""
        self.computed[self.active] += 1
        self.left[self.active] -= 1

    def done(self) -> list[int]:
        """Return rows that have been asked for all they may write."""
        return np.flatnonzero(self.left <= 0).tolist()

    def short_of_pages(self, more: int) -> list[int]:
        """Return rows whose pages have no room for the next token and `more` after it, the oldest request first."""
        rows = np.flatnonzero(self.computed + 1 + more > self.room).tolist()
        return sorted(rows, key=lambda row: self.of[row].number)  # type: ignore[union-attr]


class Stop:
    """Watches one request. A stop text may begin or end anywhere in a token, so the last tokens are read as text together."""

    def __init__(self, sampling: Sampling, decode: Callable[[list[int]], str]) -> None:
        self._tokens, self._texts, self._decode = sampling.stop_tokens, sampling.stop, decode
        # A token may be part of a character only, and the text's first token too: some more than the longest has bytes.
        self._tail = max((len(text.encode()) for text in self._texts), default=0) + 8
        self._last: list[int] = []
        self.by: int | str | None = None

    def feed(self, token: int) -> bool:
        """Take the next token; return whether this is the end."""
        if token in self._tokens:
            self.by = token
        elif self._texts:
            self._last = [*self._last[1 - self._tail :], token]
            written = self._decode(self._last)
            self.by = min((text for text in self._texts if text in written), key=written.find, default=None)
        return self.by is not None
