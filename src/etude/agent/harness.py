"""One episode: a policy, tools in a sandbox, limits. The same loop trains the model and serves its user.

    opening → turn → answers → turn → answers → … → turn without calls

A turn is sampled; its calls are run; their answers are appended; nothing that was sampled is ever written anew. When the context
reaches its trigger it begins anew from a summary (summary.py). The trace is the whole memory of an episode: what the policy sees next
is the path from the trace's root to its newest node.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import BaseModel, Field

from etude.agent.summary import PROMPTS, SummarySettings, kept_from, state_text
from etude.agent.trace import Node, NodeKind, Trace, first_unrouted, note_routes
from etude.inference.policy import Busy, Completion, OnTokens, Policy, Sampling, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from etude.agent.calls import Answer, Call, ToolSpec, Turn
    from etude.agent.formats import ChatFormat

VERSION = "2"  # of the harness; raise it when the same policy would see other tokens
Stop = Literal["finished", "turns", "tokens", "seconds", "context", "malformed", "summaries"]


THINKING = "limit of thinking tokens in one turn, after which the thinking block is closed; none: no limit"


class HarnessSettings(BaseModel, extra="forbid", strict=True, frozen=True):
    """What an episode may use."""

    turns: int = Field(default=50, ge=1, description="turn limit of an episode")
    tokens: int = Field(default=65_536, ge=1, description="token limit of an episode: all sampled, summaries too")
    seconds: float = Field(default=1800.0, gt=0, description="time limit of an episode in seconds, waiting included")
    turn_tokens: int = Field(default=4096, ge=1, description="limit of sampled tokens in one turn")
    thinking_tokens: int | None = Field(default=None, ge=1, description=THINKING)
    malformed: int = Field(default=3, ge=1, description="consecutive turns with malformed calls that end the episode")
    temperature: float = Field(default=1.0, ge=0, description="sampling temperature (0 = greedy)")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus sampling: probability mass that is sampled from")
    summary: SummarySettings = SummarySettings()


class Tools(Protocol):
    """What the harness needs of tools."""

    @property
    def specs(self) -> tuple[ToolSpec, ...]: ...

    @property
    def plan_text(self) -> str: ...  # the to-do list, empty if there is none

    async def run(self, calls: Sequence[Call]) -> list[Answer]:
        """Return an answer a call, in their order."""
        ...


SYSTEM = PROMPTS["system"]  # the same words in training and in the product


@dataclass
class Harness:
    """Runs one episode. `watch` sees every node as it is added. With `experts`, the trace tells which of them each token went to."""

    policy: Policy
    talk: ChatFormat
    tools: Tools
    settings: HarnessSettings
    trace: Trace
    seed: int | None = None
    watch: Callable[[Node], None] = lambda _: None
    experts: bool = False

    def __post_init__(self) -> None:
        self.random = Random(f"{self.seed} {self.trace.id}")  # noqa: S311 - draws triggers, keeps no secret
        self.counts: Counter[str] = Counter()
        self.began = time.monotonic()
        self.leaf = -1
        self.trigger = self.settings.summary.draw(self.random)
        self.trace.made_by |= {
            "harness": VERSION, "settings": self.settings.model_dump(), "policy": self.policy.info.name,
            "format": self.talk.name, "tools": [spec.name for spec in self.tools.specs], "seed": self.seed,
        }  # fmt: skip

    async def run(self, system: str, task: str) -> Trace:
        """Return the finished trace. What the sandbox or the inference server raises is no episode, and is raised."""
        self._add(Node(None, "opening", self.talk.opening(system, self.tools.specs, task), f"{system}\n\n{task}"))
        bad = 0
        while not (stop := self._limit()):
            turn = await self._turn()
            bad = bad + 1 if turn.malformed else 0
            if bad >= self.settings.malformed:
                stop = "malformed"
            elif not turn.calls and not turn.malformed:
                stop = "finished" if self.trace.nodes[self.leaf].details["ended"] else None
            if stop:
                break
            if stop := self._limit():
                await self._run_last(turn, stop)
                break
            if stop := await self._answer(turn):
                break
        self.trace.stop = stop
        self.trace.counts = dict(sorted(self.counts.items()))
        return self.trace

    def _limit(self) -> Stop | None:
        """Return which limit is reached."""
        if self.counts["turns"] >= self.settings.turns:
            return "turns"
        if self.counts["sampled"] >= self.settings.tokens:
            return "tokens"
        if time.monotonic() - self.began >= self.settings.seconds:
            return "seconds"
        return None if self._room() > 0 else "context"

    def _room(self) -> int:
        """Return how many tokens can still be sampled after the present context."""
        return self.policy.info.context - len(self.trace.context(self.leaf))

    async def _turn(self) -> Turn:
        """Sample a turn; where thinking is bounded and goes beyond, it is ended and the turn goes on."""
        first = len(self.trace.nodes)
        bound = self.settings.thinking_tokens or self.settings.turn_tokens
        await self._sample("turn", min(bound, self.settings.turn_tokens))
        self.counts["turns"] += 1
        ids = self.trace.nodes[self.leaf].tokens
        left = self.settings.turn_tokens - len(ids)
        if left > 0 and not self.trace.nodes[self.leaf].details["ended"] and not self._limit():
            if closing := self.talk.close_thinking(ids):
                self.counts["thinking_ended"] += 1
                self._add(Node(self.leaf, "note", closing, self.talk.text(closing)))
            if self._room() > 0:
                await self._sample("turn", left)
            ids = [token for node in self.trace.nodes[first:] for token in node.tokens]
        turn = self.talk.read(ids)
        self.counts.update({f"tokens_{kind}": count for kind, count in turn.tokens.items()})
        self.counts.update(f"calls_{call.name}" for call in turn.calls)
        self.counts["calls"] += len(turn.calls)
        self.counts["malformed"] += len(turn.malformed)
        node = self.trace.nodes[self.leaf]
        node.details["calls"] = [{"name": call.name, "arguments": dict(call.arguments)} for call in turn.calls]
        node.details |= {"thinking": turn.thinking, "said": turn.said, "malformed": list(turn.malformed)}
        self.watch(node)
        return turn

    async def _run_last(self, turn: Turn, stop: Stop) -> None:
        """Run the calls of the last turn that was allowed: they were made in time, though nobody reads their answers."""
        answers = await self._run_calls(turn) if stop != "seconds" else []
        self.trace.nodes[self.leaf].details["unread"] = [_as_json(answer) for answer in answers]

    async def _run_calls(self, turn: Turn) -> list[Answer]:
        answers = await self.tools.run(turn.calls) if turn.calls else []
        self.counts["failed_calls"] += sum(answer.failed for answer in answers)
        return answers

    async def _answer(self, turn: Turn) -> Stop | None:
        """Run the calls, append their answers; begin anew where the context has grown too long."""
        began = time.monotonic()
        answers = await self._run_calls(turn)
        seconds = time.monotonic() - began
        names = ", ".join(spec.name for spec in self.tools.specs)
        reminders = [f"That call could not be read: {line}. Tools: {names}." for line in turn.malformed]
        messages = [("tool", text) for text in [*(answer.text for answer in answers), *reminders]]
        if not messages:  # cut off before it said what it wants
            messages = [("user", "Your turn was cut off. Go on, with shorter turns.")]
        last = self.trace.nodes[self.leaf].tokens
        tokens = self.talk.following(last, messages)
        own, length = self.settings.summary, len(self.trace.context(self.leaf)) + len(tokens)
        due = own.due(length, self.trigger, self.policy.info.context)
        ask = due and own.kind != "truncate"
        if due and self.counts["restarts"] >= own.most:
            return "summaries"
        if ask:
            messages.append(("user", own.request))
            tokens = self.talk.following(last, messages)
        self.counts["tokens_answers"] += len(tokens)
        details = {"answers": [_as_json(answer) for answer in answers], "request": own.request if ask else ""}
        text = "\n".join(text for _, text in messages)
        kind: NodeKind = "summary_request" if ask else "answers"
        self._add(Node(self.leaf, kind, tokens, text, seconds=seconds, details=details))
        if ask:
            return await self._sum_up()
        if due:
            self._drop_oldest()
        return None

    async def _sum_up(self) -> Stop | None:
        if self._room() <= 0:
            return "context"
        await self._sample("summary", self.settings.summary.tokens)
        node = self.trace.nodes[self.leaf]
        turn = self.talk.read(node.tokens)
        said = turn.said.strip()
        node.details |= {"thinking": turn.thinking, "said": turn.said}
        self.watch(node)
        self.counts.update(tokens_summary=len(node.tokens), empty_summaries=int(not said), restarts=1)
        summary, state = self.talk.encode(said), state_text(self.tools.plan_text, self.counts["restarts"])
        tokens = [*summary, *self.talk.following(summary, [("user", state)])]
        self._restart(tokens, f"{said}\n\n{state}", copied=len(summary))
        return None

    def _drop_oldest(self) -> None:
        path = self.trace.path(self.leaf)
        first = kept_from(self.trace.nodes, path, int(self.trigger * self.settings.summary.keep))
        kept = [self.trace.nodes[place] for place in path[first:]]
        self.counts["restarts"] += 1
        self.counts["dropped_nodes"] += first - 1
        tokens = [token for node in kept for token in node.tokens]
        self._restart(tokens, "\n".join(node.text for node in kept), copied=len(tokens))

    def _restart(self, tokens: list[int], text: str, copied: int) -> None:
        self._add(Node(0, "restart", tokens, text, details={"copied": copied, "number": self.counts["restarts"]}))
        self.trigger = self.settings.summary.draw(self.random)

    async def _sample(self, kind: NodeKind, most: int) -> None:
        """Append what the policy writes. What was written when time runs out counts as written."""
        own, prompt = self.settings, self.trace.context(self.leaf)
        most = min(most, self._room(), max(1, own.tokens - self.counts["sampled"]))
        seed = None if self.seed is None else (self.seed * 1_000_003 + len(self.trace.nodes)) % 2**63
        first = first_unrouted(self.trace, self.leaf) if self.experts else 0
        sampling = Sampling(
            most, own.temperature, own.top_p, seed=seed, stop_tokens=self.talk.stop_tokens, experts=self.experts, experts_from=first
        )  # fmt: skip
        began, written = time.monotonic(), list["Token"]()
        done: Completion | None = None
        try:
            async with asyncio.timeout(max(0.0, self.began + own.seconds - began)):
                done = await self._patiently(prompt, sampling, written.extend)
        except TimeoutError:
            self.counts["turns_cut_by_time"] += 1
        tokens = done.tokens if done else written
        details = {"ended": bool(done and done.finish_reason == "stop"), "cached": done.cached if done else 0}
        self.counts["sampled"] += len(tokens)
        ids, versions = [token.id for token in tokens], [token.version for token in tokens]
        logprobs, raw = [token.logprob for token in tokens], [token.raw_logprob for token in tokens]
        node = Node(self.leaf, kind, ids, self.talk.text(ids), True, logprobs, raw, versions, details=details)  # noqa: FBT003
        node.seconds = time.monotonic() - began
        self._add(node)
        if done and done.experts is not None:
            note_routes(self.trace, self.leaf, first, done.experts)

    async def _patiently(self, prompt: list[int], sampling: Sampling, on_tokens: OnTokens) -> Completion:
        while True:
            try:
                return await self.policy.generate(prompt, sampling, session=self.trace.id, on_tokens=on_tokens)
            except Busy as busy:
                self.counts["waits"] += 1
                await asyncio.sleep(busy.after)

    def _add(self, node: Node) -> None:
        node.began = time.monotonic() - self.began - node.seconds
        self.trace.nodes.append(node)
        self.leaf = len(self.trace.nodes) - 1
        if not node.sampled:  # those that are sampled are shown once they are read
            self.watch(node)


def _as_json(answer: Answer) -> dict[str, Any]:
    return {
        "name": answer.call.name, "text": answer.text, "failed": answer.failed, "seconds": answer.seconds,
        "details": dict(answer.details),
    }  # fmt: skip
