"""Conversations made from a codebase: its documented Python functions, asked for in few words.

A function gives up to two: it is written from its signature and what it does, and it is shown after the file was read with
a tool. All that is made from one file is held out together.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from textwrap import dedent
from typing import TYPE_CHECKING, Any

from etude.data.chat.conversations import Conversation
from etude.data.chat.template import CHATML_TOKENS
from etude.errors import UserError
from etude.files import digest_of
from etude.syntax import parse_python

if TYPE_CHECKING:
    from collections.abc import Iterator

    from etude.data.codebase import Codebase

    Function = ast.FunctionDef | ast.AsyncFunctionDef

TO_WRITE = ("Write `{signature}`. {about}", "{about} Python, `{signature}`", "implement {name}: {about}\n`{signature}`")
TO_SHOW = ("show {name} in {path}", "What does {name} in {path} look like?", "{path}: print {name}")
PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ_FILE = {"name": "read_file", "description": "Read a file of the repository.", "parameters": PATH}
TOOL = {"type": "function", "function": READ_FILE}
CUT = "\n… (the rest of the file is not shown)"


def conversations_from_code(
    codebase: Codebase, *, seed: int = 0, most_chars: int = 5000
) -> tuple[list[Conversation], dict[str, int]]:
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
            found = list(_functions(parse_python(text)))
    except (SyntaxError, ValueError, RecursionError):
        yield "file is not Python"
        return
    functions = dict(found)
    yield from ["another of its name follows"] * (len(found) - len(functions))
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
