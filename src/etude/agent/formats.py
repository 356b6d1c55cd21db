"""The chat format of a policy: the base's own template if it can express tool calls, otherwise calls as raw text.

`native`: the template renders a probe with a tool, a call and an answer; the style that can read the rendered call is the base's own.
`plain`: the system text explains calls, and answers are messages of the user. Without a template there is a fixed layout.

A sampled turn is split into thinking, calls and other text. A call inside thinking is not a call. There are three styles of calls:

- JSON, as Qwen's templates and sprout's teach it: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
- Tags, values as raw text, as Qwen3-Coder's template teaches them: `<function=…><parameter=…>` between the same marks. A newline
  behind an opening and before a closing tag is the tag's. A value ends at a `</parameter>` that another parameter or the end of the
  function follows, so it may spell one itself.
- Raw text, for models that were taught none: nothing is escaped, so code is written as it is.

      @edit
      path: src/a.py
      old<<END
      any text
      END
      @end

  A value without a newline stands behind `name: `, exactly as it is; any other between `name<<MARK` and the line `MARK`, the first of
  END, END1, END2 … that is no line of the value. So writing and reading are inverses for every string. A line such as `@property`
  in quoted code is no call: arguments or `@end` must follow.
"""

from __future__ import annotations

import bisect
import copy
import functools
import itertools
import json
import operator
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from etude.agent.calls import Call, ToolSpec, Turn
from etude.agent.summary import PROMPTS
from etude.data.chat import ChatTemplate
from etude.errors import UserError, nearest, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from etude.agent.endpoint import MessageTalk

THINK, THOUGHT = "<think>", "</think>"


@dataclass(frozen=True)
class CallMatch:
    """A call in a text, or what is wrong with it in one line."""

    start: int
    end: int
    made: Call | str


def read_turn(text: str, style: Style, tokens_up_to: Callable[[int], int], *, in_thinking: bool) -> Turn:
    """Split a turn. `tokens_up_to`: number of tokens that end up to a place; a token across a border counts to the next part."""
    parts: dict[str, list[str]] = {"thinking": [], "said": []}
    calls, malformed, tokens, counted = [], [], Counter(thinking=0, calls=0, said=0), 0
    for start, end, what in sections(text, style, in_thinking=in_thinking):
        before, counted = counted, tokens_up_to(end)
        if isinstance(what, str):
            parts[what].append(text[start:end])
        elif isinstance(what.made, Call):
            calls.append(what.made)
        else:
            malformed.append(what.made)
        tokens[what if isinstance(what, str) else "calls"] += counted - before
    thoughts = [part.removeprefix(THINK).removesuffix(THOUGHT).strip() for part in parts["thinking"]]
    return Turn("\n".join(thoughts), "".join(parts["said"]).strip(), tuple(calls), tuple(malformed), tokens)


def sections(text: str, style: Style, *, in_thinking: bool) -> Iterator[tuple[int, int, str | CallMatch]]:
    """Yield where each section begins and ends, and what it is; together they are the text."""
    at, match = 0, style.find(text, 0)
    while at < len(text):
        if match and match.start < at:
            match = style.find(text, at)
        think = at if in_thinking else text.find(THINK, at)
        what: str | CallMatch = "said"
        start = end = len(text)
        if think >= 0 and (match is None or think <= match.start):
            closed = text.find(THOUGHT, think)
            start, what = think, "thinking"
            end = closed + len(THOUGHT) if closed >= 0 else len(text)
        elif match:
            start, end, what = match.start, match.end, match
        if start > at:
            yield at, start, "said"
        if end > start:
            yield start, end, what
        at, in_thinking = end, False


OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SPACE, _CLOSING = re.compile(r"\s*"), re.compile(rf"\s*{CLOSE}")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


class JsonCalls:
    """Calls as JSON. The value is parsed before its closing tag is looked for, as a string in it may contain that tag."""

    name = "json"

    def find(self, text: str, start: int) -> CallMatch | None:
        """Return the first call."""
        begin = text.find(OPEN, start)
        if begin < 0:
            return None
        try:
            value, end = _DECODER.raw_decode(text, _SPACE.match(text, begin + len(OPEN)).end())  # type: ignore[union-attr]
            closing = _CLOSING.match(text, end)
            if closing is None:
                return CallMatch(begin, behind_fault(text, begin), f"a call has no {CLOSE} behind its JSON")
            return CallMatch(begin, closing.end(), _call(value))
        except RecursionError:
            fault = "a call is nested too deeply"
        except ValueError as error:
            fault = f"a call is not JSON: {str(error)[:80]}"
        return CallMatch(begin, behind_fault(text, begin), fault)

    def render(self, call: Call) -> str:
        """Return a call as JSON."""
        written = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
        return f"{OPEN}\n{written}\n{CLOSE}"


def behind_fault(text: str, begin: int) -> int:
    """Return where reading goes on after a call that cannot be read: behind its closing mark, or at the next call."""
    closed, opened = text.find(CLOSE, begin), text.find(OPEN, begin + len(OPEN))
    ends = [closed + len(CLOSE)] * (closed >= 0) + [opened] * (opened >= 0)
    return min(ends, default=len(text))


def _call(value: Any) -> Call | str:
    if not (isinstance(value, dict) and value.keys() <= {"name", "arguments"} and isinstance(value.get("name"), str)):
        return 'a call is not {"name": …, "arguments": {…}}'
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return f"the arguments of {value['name'][:40]!r} are not an object"
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return f"a call of {value['name'][:40]!r} holds half a character (a lone surrogate)"
    return Call(value["name"], arguments)


_CALL = re.compile(rf"{OPEN}\s*<function=([^<>\s]+)>(.*?)</function>\s*{CLOSE}", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)


class TagCalls:
    """All values are text."""

    name = "tags"

    def find(self, text: str, start: int) -> CallMatch | None:
        """Return the first call."""
        begin = text.find(OPEN, start)
        if begin < 0:
            return None
        call = _CALL.match(text, begin)
        if call is None:
            return CallMatch(begin, behind_fault(text, begin), f"a call is not <function=…>…</function> up to {CLOSE}")
        name, body = call.groups()
        arguments, at = {}, 0
        while parameter := _PARAMETER.match(body, at):
            arguments[parameter[1]], at = parameter[2], parameter.end()
        if body[at:].strip():
            return CallMatch(begin, call.end(), f"a call of {name[:40]!r} holds more than <parameter=…>…</parameter>")
        return CallMatch(begin, call.end(), Call(name, arguments))

    def render(self, call: Call) -> str:
        """Return a call as tags."""
        body = ""
        for name, value in call.arguments.items():
            body += f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        return f"{OPEN}\n<function={call.name}>\n{body}</function>\n{CLOSE}"


def begun(text: str, word: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `word`."""
    return next((size for size in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:size])), 0)


class TurnReader:
    """Splits a turn while it is streamed: returned text is final, text that may become a tag or a call is held back.

    A malformed call stays text, so that the client can report it to the model. White space around thinking and before calls belongs
    to them. Without a style calls stay text; a style must write calls between <tool_call> and </tool_call>.
    """

    def __init__(self, style: Style | None, *, in_thinking: bool = False) -> None:
        self.style, self.in_thinking = style, in_thinking
        self.held = ""
        self._bare = in_thinking  # nothing but white space since a mark of thinking
        self._called = False

    def feed(self, text: str, *, final: bool = False) -> tuple[str, str, list[Call]]:
        """Return the text, the thinking and the calls that are certain now; with `final`, all that is left."""
        self.held += text
        parts: dict[bool, str] = {True: "", False: ""}  # of thinking, or not
        calls: list[Call] = []
        while True:
            self.held = self.held.lstrip() if self._bare else self.held
            marks = [THOUGHT] if self.in_thinking else [THINK, *([OPEN] if self.style else [])]
            at, mark = min(((self.held.find(mark), mark) for mark in marks if mark in self.held), default=(-1, ""))
            call = self._call(at, final=final) if mark == OPEN else None
            if at < 0 or (mark == OPEN and call is None):
                parts[self.in_thinking] += self._certain(at, marks, final=final)
                return parts[False], parts[True], calls
            before = parts[self.in_thinking] + self.held[:at]
            parts[self.in_thinking] = before if call and isinstance(call.made, str) else before.rstrip()
            self.held = self.held[call.end if call else at + len(mark) :]
            if call is None:
                self.in_thinking, self._bare = mark == THINK, True
            elif isinstance(call.made, Call):
                calls.append(call.made)
                self._bare, self._called = False, True
            else:  # malformed
                parts[False] += self._text[call.start : call.end]
                self._bare = False

    def _call(self, at: int, *, final: bool) -> CallMatch | None:
        """Return the call that begins at a place, if all of it came."""
        self._text = self.held
        if self.style is None or not (final or CLOSE in self.held[at:]):
            return None
        match = self.style.find(self.held, at)
        return match if match and (final or isinstance(match.made, Call)) else None

    def _certain(self, at: int, marks: list[str], *, final: bool) -> str:
        """Take out the text that belongs to no mark: not what one may begin with, nor the white space before that."""
        if final:
            certain, self.held = "" if self._called and self.held.isspace() else self.held, ""
            return certain.rstrip() if self.in_thinking else certain
        end = at if at >= 0 else len(self.held) - max(begun(self.held, mark) for mark in marks)
        end = len(self.held[:end].rstrip())
        certain, self.held = self.held[:end], self.held[end:]
        self._bare = self._bare and not certain
        return certain


_NAME = r"[A-Za-z_][A-Za-z0-9_-]*"
_HEAD = re.compile(rf"^@({_NAME})[ \t\r]*$", re.MULTILINE)
_ARGUMENT = re.compile(rf"({_NAME})(?::[ ]?([^\n]*)|<<([A-Za-z0-9_]+))(?:\n|\Z)")
_END = re.compile(r"@end[ \t\r]*(?:\n|\Z)")


class PlainCalls:
    """All values are text."""

    name = "plain"

    def find(self, text: str, start: int) -> CallMatch | None:
        """Return the first call."""
        for head in _HEAD.finditer(text, start):
            if head[1] != "end" and (match := _read(text, head)):
                return match
        return None

    def render(self, call: Call) -> str:
        """Return a call as text."""
        arguments = (_written(name, str(value)) for name, value in call.arguments.items())
        return "\n".join([f"@{call.name}", *arguments, "@end"])

    def explain(self, tools: Sequence[ToolSpec]) -> str:
        """Return how calls are written, and what there is to call."""
        lines = [PROMPTS["calls"]]
        for tool in tools:
            lines.append(f"@{tool.name}: {tool.about}")
            for each in tool.parameters:
                kind = ["a number"] * (each.kind is int) + ["optional"] * (not each.required)
                lines.append(f"  {each.name}{' (' * bool(kind)}{', '.join(kind)}{')' * bool(kind)}: {each.about}")
        return "\n".join(lines) if tools else ""


def _written(name: str, value: str) -> str:
    if "\n" not in value:
        return f"{name}: {value}"
    lines = set(value.split("\n"))
    mark = next(mark for number in itertools.count() if (mark := f"END{number or ''}") not in lines)
    return f"{name}<<{mark}\n{value}\n{mark}"


def _read(text: str, head: re.Match[str]) -> CallMatch | None:
    """Return the call that a line `@name` begins, if it does begin one."""
    arguments: dict[str, str] = {}
    begun = at = head.end() + 1
    fault = ""
    while not fault:
        if end := _END.match(text, at):
            return CallMatch(head.start(), end.end(), Call(head[1], arguments))
        if not (argument := _ARGUMENT.match(text, at)):
            line = text[at:].partition("\n")[0]
            fault = f"a call of {head[1][:40]!r} has no " + (f"argument {line[:60]!r}" if line else "@end")
            break
        name, value, mark = argument.groups()
        at = argument.end()
        if mark:
            closing = re.compile(rf"^{mark}$", re.MULTILINE).search(text, at)
            if closing is None:
                fault = f"the value of {name[:40]!r} has no line {mark[:40]} behind it"
                break
            value, at = text[at : max(at, closing.start() - 1)], closing.end() + 1
        if name in arguments:
            fault = f"a call of {head[1][:40]!r} gives {name[:40]!r} twice"
        arguments[name] = value
    after = _HEAD.search(text, at)
    ends = after is not None and after[1] == "end"
    if at == begun < len(text) and not ends:
        return None
    return CallMatch(head.start(), len(text) if after is None else after.end() if ends else after.start(), fault)


Style = JsonCalls | TagCalls | PlainCalls

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
                raise UserError("the tokeniser has neither a chat template nor an end token to tell turns apart")
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
        roles, texts = [role for role, _ in messages], [text for _, text in messages]
        if self.answers_as != "tool":
            answers, count = roles.count("tool"), itertools.count(1)
            heads = [f"[{next(count)} of {answers}]\n" if role == "tool" and answers > 1 else "" for role in roles]
            roles, texts = ["user"] * len(roles), list(map(operator.add, heads, texts))
        if set(roles) == {"user"}:  # many templates want users and assistants to alternate
            roles, texts = ["user"], ["\n\n".join(texts)]
        return self._tokens(self._shape_after(tuple(roles)), texts)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of an untrusted text that follows others."""
        return self._tokens(_mark(0), [text])

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a trusted text, read behind an end token, as some tokenisers begin texts with a space."""
        return self._encode(self.end + text)[1:]

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
            left_out = f"some of the messages {', '.join(roles)}"
            raise UserError(f"the chat template leaves out {left_out}; use another format of calls")
        return rest

    def _render(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
        try:
            render = self.tokeniser.apply_chat_template
            return str(render(messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # noqa: BLE001 - templates are programs and fail in many ways
            raise UserError(f"the chat template fails: {one_line(error)}") from None

    def _tokens(self, shape: str, texts: Sequence[str], *, begins: bool = False) -> list[int]:
        whole, untrusted = "", []
        for place, piece in enumerate(_MARK.split(shape)):  # every second one is the number of a mark
            text = texts[int(piece)].encode("utf-8", "replace").decode() if place % 2 else piece
            if place % 2:
                untrusted.append((len(whole), len(whole) + len(text)))
            whole += text
        spelled = [match.span(1) for match in self._added.finditer(whole)]
        forged = [a for a, b in spelled if any(a < end and b > start for start, end in untrusted)]
        first, *rest = [whole[a:b] for a, b in itertools.pairwise([0, *(start + 1 for start in forged), len(whole)])]
        encoded = self._encode(first) if begins else self.tokens(first)
        return [*encoded, *(token for piece in rest for token in self.tokens(piece))]

    def _encode(self, text: str) -> list[int]:
        return list(self.tokeniser.encode(text, add_special_tokens=False, verbose=False))


def _mark(place: int) -> str:
    return f"etude{place}mark"


def _message(role: str, place: int) -> dict[str, Any]:
    return {"role": role, "content": _mark(place)}


def _called(calls: int, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return an assistant's message, calling if there is something to call, and the answers to it. Ids are as Mistral wants them."""
    if not calls:
        return [{"role": "assistant", "content": SAID}, *answers]
    ids, function = [f"call{place:05}" for place in range(calls)], {"name": PROBE.name, "arguments": PROBE.arguments}
    made = [{"id": each, "type": "function", "function": function} for each in ids]
    turns = [answer | {"tool_call_id": each, "name": PROBE.name} for answer, each in zip(answers, ids, strict=False)]
    return [{"role": "assistant", "content": "", "tool_calls": made}, *turns, *answers[calls:]]


WINDOW = 16
WISHES = ("auto", "native", "plain")


class ChatFormat:
    """The chat format of one model: a layout and a style of calls. Sampled tokens are never encoded again.

    `encode` returns the tokens of a text in an assistant's turn, without its end (special tokens spelt in it stay text); `text` is
    the way back, for people; `stop_tokens` end a turn.
    """

    def __init__(self, talk: Talk | MessageTalk, style: Style) -> None:
        self.talk, self.style = talk, style
        self.name = f"{style.name}-layout" if talk.own_layout else style.name
        self.stop_tokens, self.encode, self.text = talk.stop_tokens, talk.encode, talk.text

    def opening(self, system: str, tools: Sequence[ToolSpec], task: str) -> list[int]:
        """Return the tokens up to where the policy's first turn begins."""
        explained = self.style.explain(tools) if isinstance(self.style, PlainCalls) else ""
        shown = [] if explained else [schema(tool) for tool in tools]
        return self.talk.opening("\n\n".join(part for part in (system, explained) if part), shown, task)

    def following(self, last: Sequence[int], messages: Sequence[tuple[str, str]]) -> list[int]:
        """Return the tokens after a turn up to the next one; a turn that was cut off is ended first.

        Messages are (role, text): role "tool" for answers, "user" for what the harness asks; mixed in one call, in this order.
        """
        ended = bool(last) and last[-1] in self.stop_tokens
        return [*([] if ended else [self.talk.end_token]), *self.talk.after(messages)]

    def close_thinking(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that end the thinking a turn is in the midst of."""
        text = self.text(tokens)
        *_, (_, _, last) = [(0, 0, ""), *sections(text, self.style, in_thinking=self.talk.opens_thinking)]
        open_still = self.talk.opens_thinking if not text else last == "thinking" and not text.endswith(THOUGHT)
        return self.talk.tokens(f"\n{THOUGHT}\n\n") if open_still else []

    def read(self, tokens: Sequence[int]) -> Turn:
        """Take a sampled turn apart; its end token counts as said."""
        body = list(tokens[:-1] if tokens and tokens[-1] in self.stop_tokens else tokens)
        up_to, thinking = functools.partial(bisect.bisect_right, self._ends(body)), self.talk.opens_thinking
        turn = read_turn(self.text(body), self.style, up_to, in_thinking=thinking)
        turn.tokens["said"] += len(tokens) - sum(turn.tokens.values())
        return turn

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


def choose_format(tokeniser: Any, wish: str = "auto") -> ChatFormat:
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
        if (match := style.find(shown, 0)) and match.made == PROBE:
            return ChatFormat(talk, style)
    raise UserError("the chat template shows calls neither as JSON nor as tags between <tool_call> and </tool_call>")


def schema(tool: ToolSpec) -> dict[str, Any]:
    """Return a tool as chat templates are told of it."""
    kinds = {str: "string", int: "integer"}
    properties = {each.name: {"type": kinds[each.kind], "description": each.about} for each in tool.parameters}
    required = [each.name for each in tool.parameters if each.required]
    schema = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": tool.name, "description": tool.about, "parameters": schema}}
