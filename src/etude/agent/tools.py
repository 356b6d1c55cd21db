"""The tools of an agent: what a policy reads of them, what may be set, whether a call fits, and how it is answered.

Few tools, few required arguments, relative paths, lines counted from 1: what small models learn most easily. There is no tool to end
an episode: a turn without calls does. Files are read and changed by a program inside the sandbox (toolbox.py).

What a policy gets wrong is an answer (`failed`, with its kind in the details). What the machine gets wrong is an exception: an episode
that saw one is excluded, never scored.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field

from etude.agent import toolbox
from etude.agent.calls import Answer, Call, Parameter, ToolSpec
from etude.agent.toolbox import Refused
from etude.errors import UserError
from etude.sandbox.box import Result, Sandbox, SandboxError
from etude.work import together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.agent.search import Searcher

ToolName = Literal["read", "grep", "glob", "list", "search", "edit", "write", "shell", "todo", "bash"]
READ_ONLY = frozenset({"read", "grep", "glob", "list", "search"})
ALL_BUT_BASH: list[ToolName] = ["read", "grep", "glob", "list", "search", "edit", "write", "shell", "todo"]
BASH_ONLY: list[ToolName] = ["bash"]  # as mini-swe-agent has it
AT_ONCE = 8  # read-only calls; each is a process in the sandbox
MOST_TODO = 50
TOOLBOX = inspect.getsource(toolbox)  # a program
Outcome = tuple[str, dict[str, Any], bool]  # text for the policy, details for the trace, whether it failed


class ToolSettings(BaseModel, extra="forbid", strict=True, frozen=True):
    """The tools of one environment."""

    tools: list[ToolName] = Field(ALL_BUT_BASH, min_length=1, description="tools offered; ['bash']: mini-swe-agent's")
    strict_arguments: bool = Field(default=False, description="true: unknown or mistyped arguments are refused")
    output_characters: int = Field(10_000, ge=1000, le=30_000, description="limit of an output; the middle is cut")
    read_lines: int = Field(default=400, ge=10, description="limit of lines in one read")
    matches: int = Field(default=100, ge=1, description="match limit of a grep; a glob or list has five times that")
    seconds: float = Field(default=20.0, gt=0, description="time limit of a tool other than shell in seconds")
    shell_seconds: int = Field(default=60, ge=1, description="default timeout of a shell command in seconds")
    shell_most_seconds: int = Field(default=600, ge=1, description="largest timeout of a shell command in seconds")
    shell: str = Field(default="bash", description="shell inside the sandbox: bash, or sh where there is no bash")


_may = partial(Parameter, required=False)
_PATH = Parameter("path", str, "file, relative to the workspace")
_LINES = _may("start", int, "first line, from 1"), _may("end", int, "last line")
_REGEX = Parameter("pattern", str, "Python regular expression, matched line by line")
_WHERE = _may("path", str, "file or folder to look in"), _may("glob", str, "only files whose path fits, such as *.py")
_GLOB = Parameter("pattern", str, "such as *.py (in any folder) or src/**/test_*.py")
_QUERY = Parameter("query", str, "what the code does, in plain words"), _may("k", int, "how many results")
_PIECES = Parameter("old", str, "text to replace"), Parameter("new", str, "text to put there")
_COMMAND = Parameter("command", str, "what to run in the workspace; each command starts afresh")
_TIMEOUT = _may("timeout", int, "seconds")
_GREP = "Find lines by a regular expression; answers path:line:text."
_EDIT = "Replace one piece of a file. old must be in it exactly once, spaces included."
SPECS = {
    name: ToolSpec(name, about, tuple(parameters))
    for name, about, *parameters in (
        ("read", "Show a file with line numbers.", _PATH, *_LINES),
        ("grep", _GREP, _REGEX, *_WHERE, _may("max", int, "most matches to show")),
        ("glob", "Find files by name.", _GLOB),
        ("list", "List a folder.", _may("path", str, "folder; the workspace if not given")),
        ("search", "Find code by meaning.", *_QUERY),
        ("edit", _EDIT, _PATH, *_PIECES),
        ("write", "Write a whole file.", _PATH, Parameter("content", str, "all of its text")),
        ("shell", "Run a command.", _COMMAND, _TIMEOUT),
        ("todo", "Keep the plan: replaces it.", Parameter("items", str, "one a line: [ ] open or [x] done")),
        ("bash", "Run a command.", _COMMAND, _TIMEOUT),
    )
}


def checked(call: Call, settings: ToolSettings) -> tuple[dict[str, Any], list[str]]:
    """Return a call's arguments as its tool takes them, and the names of those passed over; Refused if it does not fit."""
    if call.name not in settings.tools:
        raise Refused(f"Unknown tool. Tools: {', '.join(settings.tools)}.", "unknown tool")
    known = {parameter.name: parameter for parameter in SPECS[call.name].parameters}
    unknown = [name for name in call.arguments if name not in known]
    if unknown and settings.strict_arguments:
        names = ", ".join(name if parameter.required else f"{name}?" for name, parameter in known.items())
        raise Refused(f"{call.name}: unknown argument. Arguments: {names}.", "unknown argument")
    given = {name: value for name, value in call.arguments.items() if name in known}
    if not settings.strict_arguments:
        given = {name: value for name, value in given.items() if value is not None}
    for name, parameter in known.items():
        if parameter.required and name not in given:
            raise Refused(f"{call.name}: argument {name} is missing.", "missing argument")
    return {name: _value(call.name, known[name], value, settings) for name, value in given.items()}, unknown


def _value(tool: str, parameter: Parameter, value: Any, settings: ToolSettings) -> str | int:
    """Return an argument in its type. Decimal digits are a number in any environment: raw-text formats have nothing else."""
    lenient = not settings.strict_arguments
    if parameter.kind is int:
        digits = isinstance(value, str) and value.strip().isdecimal() and len(value) < 10
        whole = isinstance(value, int) or (lenient and isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not (digits or whole):
            raise Refused(f"{tool}: argument {parameter.name} must be a whole number.", "mistyped argument")
        if not 0 < int(value) < 1 << 31:
            raise Refused(f"{tool}: argument {parameter.name} must be 1 or more.", "bad value")
        return int(value)
    if isinstance(value, str):
        return value
    if lenient and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if lenient and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "\n".join(value)
    raise Refused(f"{tool}: argument {parameter.name} must be text.", "mistyped argument")


def cut(text: str, most: int) -> tuple[str, int]:
    """Return head and tail of a text with a notice between them, and how many characters were left out.

    At most `most` characters stay; borders of lines are kept where one is near.
    """
    if len(text) <= most:
        return text, 0
    head, tail = text[: most // 2], text[len(text) - most // 2 :]
    if (at := head.rfind("\n") + 1) > len(head) // 2:
        head = head[:at]
    if 0 < (at := tail.find("\n") + 1) < len(tail) // 2:
        tail = tail[at:]
    left_out = text[len(head) : len(text) - len(tail)]
    lines = left_out.count("\n") + (not left_out.endswith("\n"))
    between = "" if head.endswith("\n") else "\n"
    return f"{head}{between}… {lines} lines ({len(left_out)} characters) left out …\n{tail}", len(left_out)


def request(name: str, given: dict[str, Any], settings: ToolSettings) -> dict[str, Any]:
    """Return what the toolbox is asked for a call."""
    bounds = {"most": 5 * settings.matches, "characters": settings.output_characters - 500}  # room for notices
    if name == "read":
        asked = {"start": 1, "end": 0, "lines": settings.read_lines, "characters": bounds["characters"], **given}
        if 0 < asked["end"] < asked["start"]:
            raise Refused("read: end is before start.", "bad value")
        return asked
    if name == "grep":
        most = min(given.pop("max", settings.matches), bounds["most"])
        return {"path": ".", "glob": "", **bounds, "most": most, **given}
    if name in {"glob", "list"}:
        return {**({"path": "."} if name == "list" else {}), **bounds, **given}
    if name == "write":
        return {"path": given["path"], "text": given["content"]}
    if not given["old"] or given["old"] == given["new"]:
        raise Refused(f"edit: old {'and new are the same' if given['old'] else 'is empty'}.", "bad value")
    return given


@dataclass(eq=False)
class Toolset:
    """The tools of one episode and what they remember: the plan, and the index that `search` looks into."""

    sandbox: Sandbox
    settings: ToolSettings
    searcher: Searcher | None = None
    python: str = "python3"
    plan_text: str = ""  # the to-do list

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(AT_ONCE)
        if "search" in self.settings.tools and self.searcher is None:
            raise UserError("the tool 'search' needs an index; give one, or leave 'search' out of tools")

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        return tuple(SPECS[name] for name in self.settings.tools)

    async def run(self, calls: Sequence[Call]) -> list[Answer]:
        """Answer calls in their order. Neighbours that only read run at once; a writing one runs alone."""
        answers: list[Answer] = []
        for only_read, group in groupby(calls, key=lambda call: call.name in READ_ONLY):
            if only_read:
                answers += await together(map(self._answer, group))
            else:
                answers += [await self._answer(call) for call in group]
        return answers

    async def _answer(self, call: Call) -> Answer:
        began = time.perf_counter()
        try:
            arguments, passed_over = checked(call, self.settings)
            async with self._slots:
                text, details, failed = await self._do(call.name, arguments)
            details |= {"passed_over": passed_over} if passed_over else {}
        except Refused as fault:
            text, details, failed = str(fault), {"error": fault.kind}, True
        text, left_out = cut(text.encode("utf-8", "replace").decode(), self.settings.output_characters)
        details = {**details, "cut": details.get("cut", False) or bool(left_out)}
        return Answer(call, text, failed, time.perf_counter() - began, details)

    async def _do(self, name: str, given: dict[str, Any]) -> Outcome:
        if name == "search":
            assert self.searcher is not None
            return await self.searcher.search(self.ask, given["query"], min(given.get("k", 5), 20))
        if name == "todo":
            return self._todo(given["items"])
        if name in {"shell", "bash"}:
            return await self._shell(given["command"], given.get("timeout", self.settings.shell_seconds))
        return await self._inside(name, **request(name, given, self.settings))

    async def _inside(self, do: str, **request: Any) -> Outcome:
        answer = await self.ask(do, self.settings.seconds, **request)
        if refused := answer.get("refused"):
            path = {"path": request["path"]} if "path" in request else {}
            return answer["text"], {"error": refused, **path}, True
        return answer["text"], answer["details"], bool(answer["details"].get("late"))

    async def ask(self, do: str, seconds: float, **request: Any) -> dict[str, Any]:
        """Return what the toolbox inside the sandbox answers to a request."""
        stdin = json.dumps({"do": do, "seconds": seconds, **request}).encode()
        result = await self.sandbox.exec([self.python, "-I", "-S", "-c", TOOLBOX], stdin=stdin, timeout=seconds + 10.0)
        if result.timed_out or result.oom or result.rc < 0:
            return {"text": _ended(result) or f"ended by signal {-result.rc}", "refused": "killed"}
        try:
            answer = json.loads(result.out)
            assert isinstance(answer["text"], str)
            assert "refused" in answer or isinstance(answer["details"], dict)
        except (ValueError, KeyError, TypeError, AssertionError):
            stderr = result.err.decode(errors="replace").strip()[-300:]
            why = f"({do}, exit code {result.rc}): {stderr or f'{len(result.out)} bytes, {sum(result.cut)} cut'}"
            raise SandboxError(f"{self.python} in the sandbox did not answer {why}") from None
        return answer  # type: ignore[no-any-return]

    async def _shell(self, command: str, seconds: int) -> Outcome:
        """Run a command, both streams as one, in the order that a terminal would show."""
        seconds = min(seconds, self.settings.shell_most_seconds)
        result = await self.sandbox.exec([self.settings.shell, "-c", f"exec 2>&1; {command}"], timeout=seconds)
        output = (result.out + result.err).decode(errors="replace").strip("\n")
        if any(result.cut):
            output = f"(of a longer output, {sum(result.cut)} bytes of its middle are left out)\n{output}"
        ended = _ended(result)
        head = f"[{ended or f'exit code {result.rc}'}]"
        details = {"rc": result.rc, "timed_out": result.timed_out, "oom": result.oom, "cut": any(result.cut)}
        return f"{head}\n{output or 'no output'}", details, bool(ended)

    def _todo(self, items: str) -> Outcome:
        plan = []
        for line in filter(None, map(str.strip, items.splitlines())):
            match = re.fullmatch(r"(?:[-*] +)?\[([ xX]?)\]\s*(.*)", line)
            if match is None and self.settings.strict_arguments:
                raise Refused("todo: each line must begin with [ ] or [x].", "bad value")
            mark = "x" if match and match[1].strip() else " "
            plan.append(f"[{mark}] {match[2] if match else line}")
        if len(plan) > MOST_TODO:
            raise Refused(f"todo: at most {MOST_TODO} items.", "bad value")
        self.plan_text = "\n".join(plan)
        done = sum(item.startswith("[x]") for item in plan)
        return f"{len(plan) - done} open, {done} done", {"open": len(plan) - done, "done": done}, False


def _ended(result: Result) -> str:
    """Return why something was ended before it was through, if it was."""
    if result.oom:
        return "killed: out of memory"
    return f"timed out after {result.seconds:.0f} s" if result.timed_out else ""
