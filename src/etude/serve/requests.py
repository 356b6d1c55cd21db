"""From a request to what a policy is asked for: token ids and how to sample. No network and no waiting in here.

Completions under way: started together, cancelled together, read as they come, never more unread than agreed.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from etude.data.chat import ChatTemplate
from etude.errors import UserError, one_line
from etude.inference.policy import Sampling
from etude.serve.openai_schema import ApiError, ChatRequest, CompletionRequest
from etude.serve.replies import OPEN

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from etude.inference.policy import Completion, Policy, PolicyInfo, Token
    from etude.serve.openai_schema import Limits

COMPLETION = (
    16  # tokens that OpenAI writes after a plain prompt if nobody says how many; a chat may take what room there is
)
AnyRequest = ChatRequest | CompletionRequest


@dataclass(frozen=True)
class Order:
    """One completion."""

    prompt: list[int]
    sampling: Sampling


@dataclass(frozen=True)
class Job:
    """All completions of one request, those of the same prompt side by side."""

    request: AnyRequest
    orders: list[Order]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once however many completions it gets."""
        return sum(len(order.prompt) for order in self.orders[:: self.request.n])

    @property
    def session(self) -> str | None:
        """The conversation this belongs to, if it goes on in one line."""
        return self.request.prompt_cache_key if len(self.orders) == 1 else None

    @property
    def reads_calls(self) -> bool:
        """Whether the model was told of tools."""
        return isinstance(self.request, ChatRequest) and bool(self.request.offered)


class Preparer:
    """Turns requests into jobs for one model."""

    def __init__(self, tokeniser: Any, info: PolicyInfo, stop_tokens: frozenset[int], limits: Limits) -> None:
        self.tokeniser, self.info, self.limits, self.stop_tokens = tokeniser, info, limits, stop_tokens
        self.context = min(info.context, limits.context or info.context)
        self.turn_ends = frozenset[int]()
        with contextlib.suppress(UserError):  # a template without a token for it: the model's own end has to do
            if tokeniser.chat_template:
                self.turn_ends = frozenset({ChatTemplate(tokeniser, "base").end_token})

    def job(self, request: AnyRequest) -> Job:
        """Return what to ask of the policy."""
        asked, usual, stops = request.max_tokens, COMPLETION, self.stop_tokens
        if isinstance(request, ChatRequest):
            prompts = [self._encode(self._render(request))]
            asked, usual = request.max_completion_tokens or asked, self.context
            stops |= self.turn_ends
        else:
            prompts = [self._encode(each) if isinstance(each, str) else each for each in request.prompt]
        most, wanted = self.limits.max_choices, len(prompts) * request.n
        if wanted > most:
            raise ApiError(400, f"{wanted} completions in one request; at most {most} here", param="n")
        sampling = Sampling(
            max_tokens=1, temperature=request.temperature, top_p=request.top_p, top_k=request.top_k,
            stop_tokens=stops, stop=tuple(request.stop), alternatives=request.alternatives or 0,
        )  # fmt: skip
        orders = []
        for prompt in prompts:
            room = self._room(prompt, asked, usual)
            for index in range(request.n):  # with the same seed they would all be the same
                seed = None if request.seed is None else (request.seed + index) % 2**63
                orders.append(Order(prompt, replace(sampling, max_tokens=room, seed=seed)))
        return Job(request, orders)

    def _room(self, prompt: list[int], asked: int | None, usual: int) -> int:
        """Return how many tokens may be sampled after a prompt."""
        if not prompt:
            raise ApiError(400, "the prompt is empty; give at least one token", param="prompt")
        unknown = next((token for token in prompt if not 0 <= token < self.info.vocabulary), None)
        if unknown is not None:
            raise ApiError(400, f"token {unknown} is not in the vocabulary of {self.info.vocabulary}", param="prompt")
        room = self.context - len(prompt)
        if room < (asked or 1):
            wanted = f" and {asked} are to be written" if asked else ""
            told = f"the context is {self.context} tokens; the prompt has {len(prompt)}{wanted}; shorten one of them"
            raise ApiError(400, told, code="context_length_exceeded")
        return asked or min(usual, room)

    def _render(self, request: ChatRequest) -> str:
        template = self.tokeniser.chat_template
        if not template:
            raise ApiError(400, "this model has no chat template; use /v1/completions")
        if request.offered and OPEN not in str(template):
            raise ApiError(400, f"this model's chat template has no {OPEN}, so it cannot call tools", param="tools")
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        tools = [tool.model_dump(exclude_unset=True) for tool in request.offered] or None
        try:
            render = self.tokeniser.apply_chat_template
            return str(render(messages, tools=tools, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # noqa: BLE001 - templates are programs and fail in many ways
            told = f"the chat template refuses these messages: {one_line(error)}"
            raise ApiError(400, told, param="messages") from None

    def _encode(self, text: str) -> list[int]:
        return list(self.tokeniser.encode(text, add_special_tokens=False, verbose=False))


Tasks = list["asyncio.Task[Completion]"]


class Inbox:
    """Tokens that came and were not yet taken, by completion. What waits is handed over in one piece."""

    def __init__(self, most: int, on_overflow: Callable[[], object]) -> None:
        self.most, self.on_overflow = most, on_overflow
        self.news = asyncio.Event()
        self.waiting: dict[int, list[Token]] = {}
        self.unread = 0

    def put(self, index: int, tokens: list[Token]) -> None:
        """Keep tokens; if that is too many, nobody is reading."""
        self.unread += len(tokens)
        if self.unread > self.most:
            self.waiting.clear()
            self.on_overflow()
            return
        self.waiting.setdefault(index, []).extend(tokens)
        self.news.set()

    def take(self, index: int) -> list[Token]:
        """Return the tokens of one completion that came since the last time."""
        tokens = self.waiting.pop(index, [])
        self.unread -= len(tokens)
        return tokens


@contextlib.asynccontextmanager
async def under_way(policy: Policy, job: Job, inbox: Inbox | None = None) -> AsyncIterator[Tasks]:
    """Start all completions of a job. Leaving cancels what still runs, and waits until the policy has let go of it."""
    tasks: Tasks = []
    for index, order in enumerate(job.orders):
        listen = (lambda tokens, index=index: inbox.put(index, tokens)) if inbox else None
        asked = policy.generate(order.prompt, order.sampling, session=job.session, on_tokens=listen)
        tasks.append(asyncio.create_task(asked))
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def as_they_come(tasks: Tasks, inbox: Inbox) -> AsyncIterator[tuple[int, list[Token], Completion | None]]:
    """Yield which completion goes on, its new tokens, and all of it once it is done."""
    for task in tasks:
        task.add_done_callback(lambda _: inbox.news.set())
    left = dict(enumerate(tasks))
    while left:
        await inbox.news.wait()
        inbox.news.clear()
        for index, task in list(left.items()):
            done, tokens = task.done(), inbox.take(index)
            if done:
                del left[index]
            if done or tokens:
                yield index, tokens, task.result() if done else None
