"""From a request to what a policy is asked for: token ids and how to sample. No network and no waiting in here."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from etude.agent.formats import THINK, TurnReader, choose_format
from etude.data.chat import ChatTemplate
from etude.errors import UserError, one_line
from etude.inference.http import ApiError
from etude.inference.policy import Sampling
from etude.serve.constrained import Grammars
from etude.serve.openai_schema import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from etude.agent.formats import Style
    from etude.inference.http import Limits, Order
    from etude.inference.policy import PolicyInfo

COMPLETION = 16  # tokens after a plain prompt if nobody says how many, as OpenAI has it; a chat may take all that fits
LIKELY = 8  # characters that the tokens of a text have on average at most; if it has more, it is longer than is likely to fit
PIECE = 1 << 14  # characters
AnyRequest = ChatRequest | CompletionRequest


@dataclass(frozen=True)
class Job:
    """All completions of one request, those of the same prompt side by side."""

    request: AnyRequest
    orders: list[Order]
    style: Style | None = None  # how the model writes calls, if it was offered tools
    in_thinking: bool = False  # the prompt ends in the midst of it

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once however many completions it gets."""
        return sum(len(prompt) for prompt, _ in self.orders[:: self.request.n])

    @property
    def session(self) -> str | None:
        """The conversation this belongs to, if it goes on in one line."""
        return self.request.prompt_cache_key if len(self.orders) == 1 else None

    def reader(self) -> TurnReader | None:
        """Return what takes thinking and calls out of a completion; a plain completion stays as it is."""
        return TurnReader(self.style, in_thinking=self.in_thinking) if isinstance(self.request, ChatRequest) else None


class Preparer:
    """Turns requests into jobs for one model."""

    def __init__(self, tokeniser: Any, info: PolicyInfo, stop_tokens: frozenset[int], limits: Limits) -> None:
        self.tokeniser, self.info, self.limits, self.stop_tokens = tokeniser, info, limits, stop_tokens
        self.context = min(info.context, limits.context or info.context)
        self.longest_token = max(len(word.encode()) for word in tokeniser.get_vocab())  # bytes, or more
        self.turn_ends = frozenset[int]()
        self._style: Style | str = "this model has no chat template"
        with contextlib.suppress(UserError):  # a template without a token for it: the model's own end has to do
            if tokeniser.chat_template:
                self.turn_ends = frozenset({ChatTemplate(tokeniser, "base").end_token})
        self.grammars = Grammars(tokeniser, info.vocabulary, stop_tokens | self.turn_ends)
        try:
            self._style = choose_format(tokeniser, "native").style
        except UserError as error:
            self._style = str(error)

    def job(self, request: AnyRequest) -> Job:
        """Return what to ask of the policy."""
        most, wanted = self.limits.max_choices, request.prompts * request.n
        if wanted > most:  # before the work
            raise ApiError(400, f"{wanted} completions in one request; at most {most} here", param="n")
        asked, usual, stops = request.max_tokens, COMPLETION, self.stop_tokens
        style, in_thinking, echo, constraint = None, False, False, None
        if isinstance(request, ChatRequest):
            style, text = self._tool_style(request), self._render(request)
            prompts, in_thinking = [self._encode(text)], text.rstrip().endswith(THINK)
            constraint = self.grammars.constraint(request, style, in_thinking=in_thinking)
            asked, usual = request.max_completion_tokens or asked, self.context
            stops |= self.turn_ends
        else:
            echo = request.echo and request.alternatives is not None
            if request.echo and request.stream:
                raise ApiError(400, "echo is for whole replies; leave out stream", param="echo")
            prompts = [self._encode(each) if isinstance(each, str) else each for each in request.prompt]
        sampling = Sampling(
            max_tokens=1, temperature=request.temperature, top_p=request.top_p, top_k=request.top_k,
            stop_tokens=stops, stop=tuple(request.stop), alternatives=request.alternatives or 0, score=echo,
            constraint=constraint,
        )  # fmt: skip
        orders = []
        for prompt in prompts:
            room = self._room(prompt, asked, usual)
            for index in range(request.n):  # with the same seed they would all be the same
                seed = None if request.seed is None else (request.seed + index) % 2**63
                orders.append((prompt, replace(sampling, max_tokens=room, seed=seed)))
        return Job(request, orders, style, in_thinking)

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
            message = f"the context is {self.context} tokens; the prompt has {len(prompt)}{wanted}; shorten one of them"
            raise ApiError(400, message, code="context_length_exceeded")
        return asked or min(usual, room)

    def _tool_style(self, request: ChatRequest) -> Style | None:
        if request.offered and isinstance(self._style, str):
            raise ApiError(400, f"this model cannot call tools here: {self._style}", param="tools")
        return self._style if request.offered and not isinstance(self._style, str) else None

    def _render(self, request: ChatRequest) -> str:
        template = self.tokeniser.chat_template
        if not template:
            raise ApiError(400, "this model has no chat template; use /v1/completions")
        effort: dict[str, Any] = {}
        if request.reasoning_effort:
            asked = request.reasoning_effort
            effort = {"reasoning_effort": asked, "enable_thinking": asked != "none"}
            if not any(name in str(template) for name in effort):
                raise ApiError(400, "this model's chat template knows no reasoning effort", param="reasoning_effort")
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        tools = [tool.model_dump(exclude_unset=True) for tool in request.offered] or None
        try:
            render = self.tokeniser.apply_chat_template
            return str(render(messages, tools=tools, add_generation_prompt=True, tokenize=False, **effort))
        except Exception as error:  # noqa: BLE001 - templates are programs and fail in many ways
            message = f"the chat template refuses these messages: {one_line(error)}"
            raise ApiError(400, message, param="messages") from None

    def _encode(self, text: str) -> list[int]:
        """Return the tokens of a text. One that is surely too long is refused after about a context of it, not read to its end."""
        if len(text.encode()) > self.context * self.longest_token:
            raise self._too_long(len(text) // self.longest_token)
        least = 0
        for begin in range(0, len(text) if len(text) > LIKELY * self.context else 0, PIECE):
            least += (
                len(self._tokens(text[begin : begin + PIECE])) // 2
            )  # a text has fewer tokens than its pieces, not half as many
            if least > self.context:
                raise self._too_long(least)
        return self._tokens(text)

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokeniser.encode(text, add_special_tokens=False, verbose=False))

    def _too_long(self, tokens: int) -> ApiError:
        message = f"the context is {self.context} tokens; the prompt has more than {tokens}; shorten it"
        return ApiError(400, message, code="context_length_exceeded")
