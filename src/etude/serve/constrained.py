"""Constrained decoding: a grammar says which tokens may come next, so that a reply is JSON, keeps to a schema, or is a call.

llguidance turns a grammar into masks over the vocabulary, a mask a token. It is loaded when somebody first asks for one.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from etude.agent.formats import CLOSE, OPEN, THINK, THOUGHT, JsonCalls
from etude.errors import one_line
from etude.inference.http import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from etude.agent.formats import Style
    from etude.serve.openai_schema import ChatRequest, Tool

# As templates write JSON. Where any space may come, a small model goes on with spaces for ever.
COMPACT = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}


class Constraint:
    """What one completion may write."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> bytes:
        """Return which tokens may come next: a bit each, lowest first, in words of 32."""
        return bytes(self._matcher.compute_bitmask())

    def take(self, token: int) -> None:
        """Go on behind a token."""
        self._matcher.consume_token(token)


class Grammars:
    """Makes constraints for one tokeniser. `ends`: tokens that end a reply, allowed where the grammar is complete."""

    def __init__(self, tokeniser: Any, vocabulary: int, ends: Iterable[int]) -> None:
        self.tokeniser, self.vocabulary, self.ends = tokeniser, vocabulary, sorted(ends)
        self.special: dict[str, int] = {}  # tokens that no text of a grammar can spell
        self._llguidance: Any = None

    def constraint(
        self, request: ChatRequest, style: Style | None, *, in_thinking: bool
    ) -> Callable[[], Constraint] | None:
        """Return what makes the constraint of each completion of a request; None if it asks for none."""
        forced, strict = request.forced, any(tool.function.strict for tool in request.offered)
        wanted = request.response_format.type if request.response_format else "text"
        if not forced and not strict and wanted == "text":
            return None
        param = "response_format" if wanted != "text" else "tool_choice" if forced else "tools"
        if wanted != "text" and (forced or request.offered):
            raise ApiError(400, "response_format and tools exclude each other here; leave one out", param=param)
        if in_thinking and (forced or wanted != "text"):
            raise ApiError(
                400,
                'a reply that begins in thought cannot be constrained; send "reasoning_effort": "none"',
                param=param,
            )
        self._load(param)
        if wanted == "text":
            if not isinstance(style, JsonCalls):
                raise ApiError(
                    400, "this model's calls are not JSON, so they cannot be constrained; leave it out", param=param
                )
            grammar = self._calls(request.offered, forced, one=request.forces_one)
        else:
            schema = request.response_format.schema_of() if request.response_format else {}
            grammar = f"start: %json {json.dumps(COMPACT | schema)}"
        return self._compiled(grammar, param)

    def _calls(self, offered: Sequence[Tool], forced: Sequence[Tool], *, one: bool) -> str:
        """Return the grammar of a reply that is calls; without forced ones it may be text, too."""
        kinds = [_call_of(tool) for tool in forced or offered]
        rules = [
            f"call: %json {json.dumps(COMPACT | {'anyOf': kinds})}",
            f'block: "\\n"? call "\\n"? {self._mark(CLOSE)} "\\n"?',
        ]
        if forced:
            return "\n".join([f"start: ({self._mark(OPEN)} block){'' if one else '+'}", *rules])
        if OPEN in self.special:  # text never holds a special token
            others = [self._mark(mark) for mark in (THINK, THOUGHT) if mark in self.special]
            begin = f"start: ({' | '.join(['TEXT', *others])})* ({self._mark(OPEN)} block)*"
            return "\n".join([begin, "TEXT: /(?s:.)+/", *rules])
        text = f'before[suffix="{OPEN}"]: /(?s:.*)/\nTEXT: /(?s:.*)/ & ~/(?s:.*){OPEN}(?s:.*)/'
        return "\n".join(["start: (before block)* TEXT", text, *rules])

    def _mark(self, mark: str) -> str:
        return f"<[{self.special[mark]}]>" if mark in self.special else json.dumps(mark)

    def _load(self, param: str) -> None:
        if self._llguidance is not None:
            return
        try:
            import llguidance.hf
        except ImportError as error:
            raise ApiError(
                400, f"constrained replies need the package llguidance here: {one_line(error)}", param=param
            ) from None
        ends: dict[str, Any] = {"eos_token": self.ends} if self.ends else {}
        own = llguidance.hf.from_tokenizer(self.tokeniser, n_vocab=self.vocabulary, **ends)
        added = self.tokeniser.added_tokens_decoder.items()
        self.special = {token.content: number for number, token in added if own.is_special_token(number)}
        self._llguidance = own

    def _compiled(self, grammar: str, param: str) -> Callable[[], Constraint]:
        from llguidance import LLMatcher

        if fault := LLMatcher.validate_grammar(grammar, self._llguidance):
            said = re.sub(
                r"^at \S+: (failed to compile JSON schema: )?", "", fault.partition("\n")[0]
            )  # then our grammar
            raise ApiError(400, f"this schema cannot be kept to: {one_line(ValueError(said))}", param=param)
        matcher = LLMatcher(self._llguidance, grammar, log_level=0)
        return lambda: Constraint(matcher.deep_copy())


def _call_of(tool: Tool) -> dict[str, Any]:
    """Return the schema of a call of a tool."""
    parts = {"name": {"const": tool.function.name}, "arguments": {"type": "object"} | tool.function.parameters}
    return {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}
