"""How a policy talks: the base's own template where it teaches calls, else calls as raw text.

`native`: the template is shown a probe with a tool, a call and an answer; the style whose reader reads what the template wrote is the
base's own. `plain`: the system text explains calls, and answers are messages of the user. Without a template there is a fixed layout.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Any, Protocol

from etude.agent.calls import Call, ToolSpec, Turn
from etude.agent.formats.json_calls import JsonCalls
from etude.agent.formats.plain import PlainCalls
from etude.agent.formats.reading import THINK, THOUGHT, Style, read_turn, sections
from etude.agent.formats.tag_calls import TagCalls
from etude.agent.formats.talk import PROBE, Talk
from etude.errors import UserError, nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.agent.calls import Format

WINDOW = 16
WISHES = ("auto", "native", "plain")


class Layout(Protocol):
    """What lays messages out as tokens: a `Talk` over a tokeniser, or bytes for an endpoint."""

    own_layout: bool
    opens_thinking: bool
    end_token: int
    stop_tokens: frozenset[int]

    def opening(self, system: str, tools: Sequence[dict[str, Any]], task: str) -> list[int]:
        """Return the tokens up to the first turn."""
        ...

    def after(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Return the tokens between the end token of a turn and the next turn."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the tokens of an untrusted text that follows others."""
        ...

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a trusted text that follows others."""
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """Return tokens as text."""
        ...


class ChatFormat:
    """A layout and a style of calls. Implements `Format`."""

    def __init__(self, talk: Layout, style: Style) -> None:
        self.talk, self.style = talk, style
        self.name = f"{style.name}-layout" if talk.own_layout else style.name
        self.stop_tokens = talk.stop_tokens

    def opening(self, system: str, tools: Sequence[ToolSpec], task: str) -> list[int]:
        """Return the tokens up to where the policy's first turn begins."""
        explained = self.style.explain(tools) if isinstance(self.style, PlainCalls) else ""
        shown = [] if explained else [_schema(tool) for tool in tools]
        return self.talk.opening("\n\n".join(part for part in (system, explained) if part), shown, task)

    def following(self, last: Sequence[int], messages: Sequence[tuple[str, str]]) -> list[int]:
        """Return the tokens after a turn up to the next one; a turn that was cut off is ended first."""
        ended = bool(last) and last[-1] in self.stop_tokens
        return [*([] if ended else [self.talk.end_token]), *self.talk.after(messages)]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text in an assistant's turn; special tokens spelt in it stay text."""
        return self.talk.encode(text)

    def close_thinking(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that end the thinking a turn is in the midst of."""
        text = self.text(tokens)
        *_, (_, _, last) = [(0, 0, ""), *sections(text, self.style, in_thinking=self.talk.opens_thinking)]
        open_still = self.talk.opens_thinking if not text else last == "thinking" and not text.endswith(THOUGHT)
        return self.talk.tokens(f"\n{THOUGHT}\n\n") if open_still else []

    def read(self, tokens: Sequence[int]) -> Turn:
        """Take a sampled turn apart; its end token counts as said."""
        body = list(tokens[:-1] if tokens and tokens[-1] in self.stop_tokens else tokens)
        ends = self._ends(body)
        turn = read_turn(
            self.text(body), self.style, lambda at: bisect.bisect_right(ends, at), in_thinking=self.talk.opens_thinking
        )
        rest = len(tokens) - sum(turn.tokens.values())
        return Turn(
            turn.thinking, turn.said, turn.calls, turn.malformed, {**turn.tokens, "said": turn.tokens["said"] + rest}
        )

    def _ends(self, body: list[int]) -> list[int]:
        """Return where in the text each token ends, read in windows of some tokens: a whole prefix each time would take minutes."""
        ends: list[int] = []
        start = base = skip = 0  # a window is read behind the token before it, as some tokenisers drop a first space
        for count in range(1, len(body) + 1):
            window = self.text(body[max(0, start - 1) : count])
            ends.append(base + len(window) - skip)
            if count - start >= WINDOW and not window.endswith("\ufffd"):  # no character is cut
                start, base, skip = count, ends[-1], len(self.text(body[count - 1 : count]))
        return ends

    def write(self, *calls: Call, said: str = "", thinking: str = "") -> str:
        """Return a turn's text without its end."""
        opening = "" if self.talk.opens_thinking else THINK
        thought = [f"{opening}\n{thinking}\n{THOUGHT}\n"] if thinking or not opening else []
        return "\n".join([*thought, *([said] if said else []), *map(self.style.render, calls)])

    def text(self, tokens: Sequence[int]) -> str:
        """Return tokens as text."""
        return self.talk.text(tokens)


def choose_format(tokeniser: Any, wish: str = "auto") -> Format:
    """Return how a model talks: "native", "plain", or "auto", which is native where the template teaches calls."""
    if wish not in WISHES:
        raise UserError(f"format {wish!r} is not known{nearest(wish, WISHES)}")
    if wish != "plain" and tokeniser.chat_template:
        try:
            return _native(tokeniser)
        except UserError as error:
            if wish == "native":
                raise UserError(f'{error}; use format = "plain" or "auto"') from None
    elif wish == "native":
        raise UserError('format = "native", but the tokeniser has no chat template; use format = "plain" or "auto"')
    return ChatFormat(Talk(tokeniser), PlainCalls())


def _native(tokeniser: Any) -> ChatFormat:
    talk = Talk(tokeniser, answers_as="tool")
    shown = talk.probe()
    for style in (JsonCalls(), TagCalls()):
        if (found := style.find(shown, 0)) and found.made == PROBE:
            return ChatFormat(talk, style)
    raise UserError("the chat template shows calls neither as JSON nor as tags between <tool_call> and </tool_call>")


def _schema(tool: ToolSpec) -> dict[str, Any]:
    kinds = {str: "string", int: "integer"}
    properties = {each.name: {"type": kinds[each.kind], "description": each.about} for each in tool.parameters}
    required = [each.name for each in tool.parameters if each.required]
    schema = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": tool.name, "description": tool.about, "parameters": schema}}
