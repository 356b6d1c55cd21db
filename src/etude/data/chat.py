"""Conversations for fine-tuning: read or made from a codebase, and turned into the tokens a policy sees and samples.

**Conversations** are in OpenAI's format, checked when they are read: a fault noticed in training would cost the run. From a
codebase they are made of its documented Python functions, asked for in few words. A function gives up to two: it is written from
its signature and what it does, and it is shown after the file was read with a tool. All that is made from one file is held out
together.

**Tokens** of a conversation are not the tokens of the whole text. What a policy samples begins a token of its own: no merge
crosses the border between prompt and answer, and later turns follow the sampled tokens, which are never tokenised again. Learnt
is what the assistant writes, up to its end-of-turn token. Some templates rewrite the past (Qwen3's drops old reasoning): a
conversation then becomes several, each with the past as the policy sees it at that turn, and each answer is still learnt once.

**Rows**: conversations are packed whole into a corpus in memory, so that a `Loader` serves them as it does any other.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import re
import warnings
import zlib
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from itertools import chain
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, Field, Json, ValidationError, model_validator

from etude.data.heldout import choose_heldout
from etude.data.loader import Corpus, Series
from etude.data.packing import Shard, pack
from etude.data.settings import Settings as Strict
from etude.errors import UserError, one_line
from etude.files import canonical_json, digest_of
from etude.syntax import parse_python

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from etude.data.codebase import Codebase

    Function = ast.FunctionDef | ast.AsyncFunctionDef
    from collections.abc import Mapping

    import numpy.typing as npt


class _Function(Strict):
    name: str = Field(min_length=1)
    arguments: Json[dict[str, Any]] | dict[str, Any] = Field(default_factory=dict)  # on the wire it is text


class _Call(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _Function


class _Message(Strict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Line(BaseModel):
    messages: list[_Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    group: str = ""  # what is held out together

    @model_validator(mode="after")
    def _check(self) -> _Line:
        open_calls = 0
        for message in self.messages:
            open_calls = open_calls - 1 if message.role == "tool" else len(message.tool_calls or [])
            if open_calls < 0:
                raise ValueError("a tool message without a call before it")
            if message.role == "assistant" and not (message.content or open_calls):
                raise ValueError("an assistant message with neither content nor tool_calls")
        if all(message.role != "assistant" for message in self.messages):
            raise ValueError("no assistant message, so nothing to learn")
        functions = [tool.get("function") for tool in self.tools or []]
        if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
            raise ValueError('a tool that is not {"type": "function", "function": {"name": …}}')
        canonical_json(self.model_dump())  # raises ValueError for NaN, which JSON does not have
        return self


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates expect them: `content` is always text, the arguments of a call always an object."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    origin: str = ""  # where it is from, for errors
    group: str = ""  # what is held out together, such as all that was made from one file; empty: only itself

    @cached_property
    def digest(self) -> str:
        """Digest of all that a template can see."""
        return digest_of([self.messages, self.tools])


def read_conversations(path: Path) -> list[Conversation]:
    """Read JSONL, plain or .gz: on each line {"messages": […], "tools": […]}, the tools if there are any."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            lines = [(line, f"{path}, line {number}") for number, line in enumerate(file, 1) if line.strip()]
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"conversations cannot be read from {path}: {one_line(error)}") from None
    if not lines:
        raise UserError(f"{path} is empty; write one conversation a line")
    return [_conversation(line, origin) for line, origin in lines]


def _conversation(line: bytes, origin: str) -> Conversation:
    try:
        row = _Line.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        place = [str(part) for part in first["loc"] if "[" not in str(part)]  # without the names of types
        fault = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{origin}: {' '.join(['.'.join(place), fault]).strip()}") from None
    messages = [{**each.model_dump(exclude_none=True), "content": each.content or ""} for each in row.messages]
    return Conversation(messages, row.tools or [], origin, row.group)


def split(every: Sequence[Conversation], share: float, seed: int) -> tuple[list[Conversation], list[Conversation]]:
    """Return those to train on and those held out, about `share` of all, in whole groups and chosen by their content."""
    groups = [each.group or each.digest for each in every]
    held = choose_heldout({"chat": Counter(groups)}, share, seed)
    train = [each for each, group in zip(every, groups, strict=True) if group not in held]
    return train, [each for each, group in zip(every, groups, strict=True) if group in held]


TO_WRITE = ("Write `{signature}`. {about}", "{about} Python, `{signature}`", "implement {name}: {about}\n`{signature}`")
TO_SHOW = ("show {name} in {path}", "What does {name} in {path} look like?", "{path}: print {name}")
PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ_FILE = {"name": "read_file", "description": "Read a file of the repository.", "parameters": PATH}
TOOL = {"type": "function", "function": READ_FILE}
CUT = "\n… (the rest of the file is not shown)"


Made = tuple[list[Conversation], dict[str, int]]


def conversations_from_code(codebase: Codebase, *, seed: int = 0, most_chars: int = 5000) -> Made:
    """Return conversations with at most `most_chars` of messages, shuffled; and how many were made and skipped, and why."""
    made, counts = [], Counter[str]()
    for file in codebase.files:
        for outcome in _of_file(file.path, file.text, seed, most_chars):
            if isinstance(outcome, str):
                counts[f"skipped: {outcome}"] += 1
            else:
                counts["tool traces" if outcome.tools else "plain chats"] += 1
                made.append(outcome)
    if not made:
        raise UserError(f"{codebase.root} has no documented Python function to make conversations of: {dict(counts)}")
    return sorted(made, key=lambda each: digest_of([seed, each.digest])), dict(sorted(counts.items()))


def _of_file(path: str, text: str, seed: int, most_chars: int) -> Iterator[Conversation | str]:
    """Yield the conversations of each function, or why there is none."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes are not our affair
            named = list(_functions(parse_python(text)))
    except (SyntaxError, ValueError, RecursionError):
        yield "file is not Python"
        return
    functions = dict(named)
    yield from ["another of its name follows"] * (len(named) - len(functions))
    for name, node in functions.items():
        first = min(each.lineno for each in [node, *node.decorator_list])
        source = "\n".join(text.split("\n")[first - 1 : node.end_lineno])
        about = " ".join(re.split(r"(?<=[.!?])\s|\n\n", ast.get_docstring(node) or "", maxsplit=1)[0].split())
        if fault := _fault(node, text, source, about):
            yield fault
            continue
        signature = next(line for line in ast.unparse(node).split("\n") if line.startswith(("def ", "async def ")))
        words = {"name": name, "path": path, "about": about, "signature": signature.rstrip(":")}
        choice = int(digest_of([seed, path, name])[:8], 16) % len(TO_WRITE)
        write, show = TO_WRITE[choice].format(**words), TO_SHOW[choice].format(**words)
        answer = f"```python\n{dedent(source)}\n```"
        yield _talk(path, name, write, answer) if len(write + answer) <= most_chars else "too long to be written"
        room = most_chars - len(show + path + answer)
        shown = text if len(text) <= room else text[: max(room - len(CUT), 0)].rpartition("\n")[0] + CUT
        yield _talk(path, name, show, answer, shown) if source in shown else "beyond what read_file shows"


def _talk(path: str, name: str, request: str, answer: str, shown: str = "") -> Conversation:
    call = {"type": "function", "function": {"name": "read_file", "arguments": {"path": path}}}
    calling: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    reading = [calling, {"role": "tool", "content": shown}] if shown else []
    messages = [{"role": "user", "content": request}, *reading, {"role": "assistant", "content": answer}]
    return Conversation(messages, [TOOL] if shown else [], f"{path}: {name}", path)


def _functions(scope: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield functions and methods with their dotted names; what is inside of functions is part of them."""
    for node in scope.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _fault(node: Function, text: str, source: str, about: str) -> str:
    """Return why a function is of no use, if it is not."""
    faults = {
        "file spells a chat token": any(token in text for token in CHATML_TOKENS),
        "no docstring of three words": len(about.split()) < 3,
        "no body": all(isinstance(each, ast.Pass) or ast.unparse(each) == "..." for each in node.body[1:]),
        "holds a code fence": "```" in source,
        "cannot be indented less": dedent(source)[0].isspace(),
    }
    return next((fault for fault, holds in faults.items() if holds), "")


CHATML_TOKENS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TOO_LONG = "too long, dropped"
PROBE = Conversation([{"role": "user", "content": "ask"}, {"role": "assistant", "content": "reply"}], origin="a probe")
ADVICE = 'use template = "chatml" or another .jinja file'


class Encoded(NamedTuple):
    """What the policy sees and samples in one conversation."""

    tokens: npt.NDArray[np.int64]  # [T]
    learnt: npt.NDArray[np.bool_]  # [T]: sampled by the assistant


class ChatTemplate:
    """A tokeniser and its chat template. `added` tokens are new to it: the model may need as many embeddings more."""

    def __init__(self, tokeniser: Any, name: str, added: int = 0) -> None:
        self.tokeniser, self.name, self.added = tokeniser, name, added
        closing = self._render(PROBE, 2).rpartition("reply")[2]
        special = {number for number, token in tokeniser.added_tokens_decoder.items() if token.special}
        self.end_token = next((number for number in self._tokens(closing) if number in special), -1)
        if self.end_token < 0:
            raise UserError(f"chat template {name!r} puts no special token after an assistant's message; {ADVICE}")
        self.end: str = tokeniser.convert_ids_to_tokens(self.end_token)  # generation stops at it

    def encode(self, conversation: Conversation) -> list[Encoded]:
        """Return all up to the last answer: one sequence, or several if the template rewrites the past."""
        sequences: list[list[str]] = []  # each: prompt, answer, prompt, answer, …, what follows the last answer
        written = ""  # in the last sequence, up to the end of its last answer
        for index, message in enumerate(conversation.messages):
            if message["role"] == "assistant":
                prompt = self._render(conversation, index, add_generation_prompt=True)
                answer, rest = self._answer(conversation, index, prompt)
                if sequences and prompt.startswith(written):
                    sequences[-1][-1:] = [prompt[len(written) :], answer, rest]
                else:
                    sequences.append([prompt, answer, rest])
                written = prompt + answer
        return [self._encoded(pieces) for pieces in sequences]

    def _answer(self, conversation: Conversation, index: int, prompt: str) -> tuple[str, str]:
        """Return what the assistant writes after a prompt, and what the template puts behind that."""
        message, whole = conversation.messages[index], self._render(conversation, index + 1)
        answer, end, rest = whole[len(prompt) :].rpartition(self.end)
        fault = f"{conversation.origin}: chat template {self.name!r}"
        if not (whole.startswith(prompt) and end):
            raise UserError(f"{fault} does not show an answer as its prompt begins it, up to {self.end}; {ADVICE}")
        if self.end in answer:
            raise UserError(f"{conversation.origin}: an assistant's message spells {self.end}, which ends it; mend it")
        texts = [message["content"].strip(), message.get("reasoning_content", "").strip()]
        texts += [call["function"]["name"] for call in message.get("tool_calls", [])]
        lost = [text for text in texts if text not in answer]
        lost += [name for tool in conversation.tools if (name := tool["function"]["name"]) not in prompt]
        if lost:
            raise UserError(f"{fault} leaves out {lost[0][:40]!r}, a tool, a call or text of an answer; {ADVICE}")
        return answer + end, rest

    def _render(self, conversation: Conversation, count: int, **options: bool) -> str:
        messages, tools = conversation.messages[:count], conversation.tools or None
        try:
            return str(self.tokeniser.apply_chat_template(messages, tools=tools, tokenize=False, **options))
        except Exception as error:  # noqa: BLE001 - templates are programs and fail in many ways
            raise UserError(f"{conversation.origin}: chat template {self.name!r} fails: {one_line(error)}") from None

    def _encoded(self, pieces: list[str]) -> Encoded:
        # All but the first behind an end token, as some tokenisers put a space before the first word of a text.
        parts = [self._tokens(pieces[0]), *(self._tokens(self.end + piece)[1:] for piece in pieces[1:])]
        learnt = np.repeat(np.arange(len(parts)) % 2 == 1, [len(part) for part in parts])
        return Encoded(np.array([token for part in parts for token in part], np.int64), learnt)

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokeniser.encode(text, add_special_tokens=False, verbose=False))


def choose_template(tokeniser: Any, wish: str) -> ChatTemplate:
    """Give the tokeniser its template: "base", "chatml" (with the tokens it lacks), "auto" (base or chatml), or a file's."""
    size = len(tokeniser)
    if wish == "auto":
        wish = "base" if tokeniser.chat_template else "chatml"
    if wish == "chatml":
        known = {token.content for token in tokeniser.added_tokens_decoder.values()}
        tokeniser.add_tokens([token for token in CHATML_TOKENS if token not in known], special_tokens=True)
        shipped = resources.files("etude.models").joinpath("sprout", "chat_template.jinja")
        tokeniser.chat_template = shipped.read_text(encoding="utf-8")
    elif wish != "base":
        try:
            tokeniser.chat_template = Path(wish).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f'template {wish!r} is not "base", "chatml", "auto" or a file: {one_line(error)}') from None
    elif not tokeniser.chat_template:
        raise UserError(f'template = "base", but the tokeniser of the base has no chat template; {ADVICE}')
    return ChatTemplate(tokeniser, wish, len(tokeniser) - size)


def pack_chat(
    splits: Mapping[str, Sequence[Encoded]], *, length: int, separator: int, vocabulary: int, too_long: Literal["drop", "cut"]
) -> tuple[Corpus, dict[str, dict[str, int]]]:  # fmt: skip
    """Pack each split, "train" and others; return also, by split, what became of its conversations. Empty ones are left out."""
    fitted = {split: _fitted(conversations, length, too_long) for split, conversations in splits.items()}
    counts = {split: counted for split, (_, counted) in fitted.items()}
    if not fitted["train"][0]:
        raise UserError(f'a mask that hides every token: {counts}; use a length over {length}, or too_long = "cut"')
    if 2 * (dropped := counts["train"].get(TOO_LONG, 0)) > counts["train"]["conversations"]:
        median = sorted(len(each.tokens) for each in splits["train"])[len(splits["train"]) // 2]
        most = f"{dropped} of {counts['train']['conversations']} conversations are longer than a row of {length} tokens"
        shorter = "make them shorter (of demonstrations: fewer tools, a shorter style)"
        advice = f'raise length, {shorter}, or set too_long = "cut"'
        raise UserError(f"{most} (the median has {median}), so little would be trained on; {advice}")
    shards = {split: _shard(kept, length) for split, (kept, _) in sorted(fitted.items()) if kept}
    series = {split: {"chat": Series("chat", [shard])} for split, shard in shards.items()}  # the only source and domain
    parts = [(each.tokens, each.pieces, each.rows, each.learnt) for each in shards.values()]
    arrays: list[Any] = list(chain.from_iterable(parts))
    digest = digest_of([length, separator, list(shards), [hashlib.sha256(each).hexdigest() for each in arrays]])
    place = Path("the conversations")
    return Corpus(place, length, separator, vocabulary, {"chat": 1.0}, {"chat": "chat"}, series, digest), counts


def _shard(conversations: Sequence[Encoded], length: int) -> Shard:
    packed = pack([len(each.tokens) for each in conversations], length)
    ends = np.concatenate([[0], np.cumsum(packed.lengths)])
    in_order = [conversations[index] for index in packed.documents]
    tokens, learnt = (np.concatenate(each) for each in zip(*in_order, strict=True))
    return Shard(tokens.astype(np.uint32), ends[packed.offsets], ends, learnt)


def _fitted(conversations: Sequence[Encoded], length: int, too_long: str) -> tuple[list[Encoded], dict[str, int]]:
    """Return those that fit into a row and have something to learn, cut if so wished; and counts of all."""
    kept, counts = [], Counter({"conversations": len(conversations)})
    for tokens, learnt in conversations:
        if len(tokens) > length and too_long == "drop":
            counts[TOO_LONG] += 1
        elif not learnt[1:length].any():  # the first token is predicted from nothing
            counts["nothing to learn within the length, dropped"] += 1
        else:
            counts["cut"] += len(tokens) > length
            kept.append(Encoded(tokens[:length], learnt[:length]))
            counts.update({"tokens": len(kept[-1].tokens), "learnt tokens": int(kept[-1].learnt.sum())})
    return kept, dict(counts)
