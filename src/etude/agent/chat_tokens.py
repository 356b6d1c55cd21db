"""Talk as tokens by a chat template, only ever appended to.

Templates are asked for the shape only: contents are rendered as marks, and put in afterwards. So no template trims or rewrites
them, and what is not to be trusted is known: where a file spells `<|im_end|>`, the text is cut inside of it, and it stays text.
Everything else is tokenised as a whole, as training data is. What follows a turn is what the template puts behind an assistant's
message; some templates rewrite the past (Qwen3's drops old reasoning), but here what was sampled stays.
"""

from __future__ import annotations

import copy
import functools
import itertools
import re
from typing import TYPE_CHECKING, Any

from etude.agent.calls import Call
from etude.data.chat import ChatTemplate
from etude.errors import UserError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

# Where a model has no template. Each message ends with the end token, which no untrusted text can write, so none can forge a message.
LAYOUT = (
    "{{ bos_token or '' }}{% for m in messages %}{{ m.role | capitalize }}:\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:\n{% endif %}"
)
_MARK = re.compile(r"etude(\d+)mark")
SAID = "etude-said"
PROBE = Call("etude_probe", {"etude_key": SAID})
_TOOL = {"description": "probe", "parameters": {"type": "object", "properties": {"etude_key": {"type": "string"}}}}
PROBE_TOOLS = [{"type": "function", "function": {"name": PROBE.name, **_TOOL}}]


class Talk:
    """One tokeniser and one template. `answers_as` is the role of answers; with "tool", calls are shown the template's way."""

    def __init__(self, tokeniser: Any, answers_as: str = "user") -> None:
        self.own_layout = not tokeniser.chat_template
        if self.own_layout:
            if tokeniser.eos_token is None:
                raise UserError(
                    "the tokeniser has neither a chat template nor an end token, so turns cannot be told apart"
                )
            tokeniser = copy.copy(tokeniser)
            tokeniser.chat_template, answers_as = LAYOUT, "tool"
        self.tokeniser, self.answers_as = tokeniser, answers_as
        template = ChatTemplate(tokeniser, "base")
        self.end, self.end_token = template.end, template.end_token
        self.stop_tokens = frozenset({self.end_token, tokeniser.eos_token_id} - {None})
        added = [token.content for token in tokeniser.added_tokens_decoder.values() if not token.content.isspace()]
        spelled = "|".join(re.escape(text) for text in sorted(added, key=len, reverse=True) if len(text) > 1)
        self._added = re.compile(f"(?=({spelled}))")
        try:
            self._knows_system = _mark(0) in self._render([_message("system", 0), _message("user", 1)])
        except UserError:
            self._knows_system = False
        self.opens_thinking = self._render([_message("user", 0)]).rstrip().endswith("<think>")
        self._shape_after = functools.cache(self._render_after)

    def opening(self, system: str, tools: Sequence[dict[str, Any]], task: str) -> list[int]:
        """Return the tokens up to the first turn."""
        if system and not self._knows_system:
            system, task = "", f"{system}\n\n{task}"
        messages = [_message("system", 0)] if system else []
        shape = self._render([*messages, _message("user", 1)], tools)
        return self._tokens(shape, [system, task], begins=True)

    def after(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Return the tokens between the end token of a turn and the next turn."""
        turns = list(messages)
        if self.answers_as != "tool":
            answers = sum(role == "tool" for role, _ in turns)
            count = itertools.count(1)
            heads = [f"[{next(count)} of {answers}]\n" if role == "tool" and answers > 1 else "" for role, _ in turns]
            turns = [(self.answers_as, head + text) for head, (_, text) in zip(heads, turns, strict=True)]
        if (
            all(role == "user" for role, _ in turns) and len(turns) > 1
        ):  # many templates want users and assistants to alternate
            turns = [("user", "\n\n".join(text for _, text in turns))]
        return self._tokens(self._shape_after(tuple(role for role, _ in turns)), [text for _, text in turns])

    def encode(self, text: str) -> list[int]:
        """Return the tokens of an untrusted text that follows others."""
        return self._tokens(_mark(0), [text])

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a trusted text, read behind an end token, as some tokenisers begin texts with a space."""
        return list(self.tokeniser.encode(self.end + text, add_special_tokens=False, verbose=False))[1:]

    def text(self, tokens: Sequence[int]) -> str:
        """Return tokens as text."""
        return str(self.tokeniser.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def probe(self) -> str:
        """Return what the template writes of a call and its answer: all behind the request."""
        messages = [_message("user", 0), *_called(1, [_message("tool", 1)])]
        shown = self._render(messages, PROBE_TOOLS)
        if _mark(1) not in shown or PROBE.name not in shown.partition(_mark(0))[0]:
            raise UserError("the chat template leaves tools or their answers out")
        return shown.partition(_mark(0))[2]

    def _render_after(self, roles: tuple[str, ...]) -> str:
        calls = 0 if self.own_layout else roles.count("tool")
        messages = _called(calls, [_message(role, place) for place, role in enumerate(roles)])
        shown = self._render([{"role": "user", "content": "ask"}, *messages], PROBE_TOOLS if calls else [])
        # Behind what was said (or behind the last call), up to the end token, the template writes for the policy.
        _, ended, rest = shown.rpartition(SAID)[2].partition(self.end)
        if not ended or any(_mark(place) not in rest for place in range(len(roles))):
            raise UserError(
                f"the chat template leaves out some of the messages {', '.join(roles)}; use another format of calls"
            )
        return rest

    def _render(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
        try:
            made = self.tokeniser.apply_chat_template(
                messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # noqa: BLE001 - templates are programs and fail in many ways
            raise UserError(f"the chat template fails: {one_line(error)}") from None
        return str(made)

    def _tokens(self, shape: str, texts: Sequence[str], *, begins: bool = False) -> list[int]:
        whole, untrusted = "", []
        for place, piece in enumerate(_MARK.split(shape)):  # every second one is the number of a mark
            text = texts[int(piece)].encode("utf-8", "replace").decode() if place % 2 else piece
            if place % 2:
                untrusted.append((len(whole), len(whole) + len(text)))
            whole += text
        spelled = [match.span(1) for match in self._added.finditer(whole)]
        forged = [a for a, b in spelled if any(a < end and b > start for start, end in untrusted)]
        cuts = [0, *(start + 1 for start in forged), len(whole)]
        pieces = [whole[a:b] for a, b in itertools.pairwise(cuts)]
        first = self.tokeniser.encode(pieces[0], add_special_tokens=False, verbose=False) if begins else None
        return [
            *(self.tokens(pieces[0]) if first is None else first),
            *(t for each in pieces[1:] for t in self.tokens(each)),
        ]


def _mark(place: int) -> str:
    return f"etude{place}mark"


def _message(role: str, place: int) -> dict[str, Any]:
    return {"role": role, "content": _mark(place)}


def _called(calls: int, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return an assistant's message, calling if there is something to call, and the answers to it. Ids are as Mistral wants them."""
    made = [
        {
            "id": f"call{place:05}",
            "type": "function",
            "function": {"name": PROBE.name, "arguments": dict(PROBE.arguments)},
        }
        for place in range(calls)
    ]
    if not made:
        return [{"role": "assistant", "content": SAID}, *answers]
    ids = [{"tool_call_id": call["id"], "name": PROBE.name} for call in made]
    turns = [answer | more for answer, more in zip(answers, [*ids, *[{}] * (len(answers) - calls)], strict=True)]
    return [{"role": "assistant", "content": "", "tool_calls": made}, *turns]
