"""The tools of one episode: calls in, answers out, in the same order.

What a policy gets wrong is an answer (`failed`, with its kind in the details). What the machine gets wrong is an exception: an episode
that saw one is excluded, never scored.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from etude.agent import toolbox, toolbox_edit, toolbox_files
from etude.agent.calls import Answer, Call, ToolSpec
from etude.agent.tool_specs import READ_ONLY, SPECS, BadCall, ToolSettings, checked
from etude.errors import UserError
from etude.sandbox.box import Result, Sandbox, SandboxError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.agent.search.index import Searcher

AT_ONCE = 8  # read-only calls; each is a process in the sandbox
MOST_TODO = 50
# Each source becomes a module under its own name, so that they find each other; the last one has main().
BOOT = """import sys, types
for name, source in zip(sys.argv[1::2], sys.argv[2::2]):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
module.main()"""
SOURCES = [
    word for module in (toolbox_files, toolbox_edit, toolbox) for word in (module.__name__, inspect.getsource(module))
]


@dataclass(frozen=True)
class Todo:
    """One item of the plan."""

    text: str
    done: bool


@dataclass(frozen=True)
class Outcome:
    """What a tool has to say."""

    text: str
    details: dict[str, Any] = field(default_factory=dict)
    failed: bool = False


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
            raise BadCall("bad value", "read: end is before start.")
        return asked
    if name == "grep":
        most = min(given.pop("max", settings.matches), bounds["most"])
        return {"path": ".", "glob": "", **bounds, "most": most, **given}
    if name in {"glob", "list"}:
        return {**({"path": "."} if name == "list" else {}), **bounds, **given}
    if name == "write":
        return {"path": given["path"], "text": given["content"]}
    if not given["old"] or given["old"] == given["new"]:
        raise BadCall("bad value", f"edit: old {'and new are the same' if given['old'] else 'is empty'}.")
    return given


class Toolset:
    """The tools of one episode and what they remember: the plan, and the index that `search` looks into."""

    def __init__(
        self,
        sandbox: Sandbox,
        settings: ToolSettings | None = None,
        searcher: Searcher | None = None,
        python: str = "python3",
    ) -> None:
        self.sandbox = sandbox
        self.settings = settings or ToolSettings()
        self.searcher = searcher
        self.python = python  # inside the sandbox
        self.plan: list[Todo] = []
        self._slots = asyncio.Semaphore(AT_ONCE)
        if "search" in self.settings.tools and searcher is None:
            raise UserError("the tool 'search' needs an index; give one, or leave 'search' out of tools")

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """Return what the policy is told."""
        return tuple(SPECS[name] for name in self.settings.tools)

    @property
    def plan_text(self) -> str:
        """Return the plan as it is written."""
        return "\n".join(f"[{'x' if item.done else ' '}] {item.text}" for item in self.plan)

    async def run(self, calls: Sequence[Call]) -> list[Answer]:
        """Answer calls in their order. Neighbours that only read run at once; a writing one runs alone."""
        answers: list[Answer] = []
        for only_read, group in groupby(calls, key=lambda call: call.name in READ_ONLY):
            if not only_read:
                answers += [await self._answer(call) for call in group]
                continue
            try:
                async with asyncio.TaskGroup() as tasks:
                    running = [tasks.create_task(self._answer(call)) for call in group]
            except* SandboxError as failures:
                failure: BaseException = failures
                while isinstance(failure, BaseExceptionGroup):
                    failure = failure.exceptions[0]
                raise failure from None
            answers += [task.result() for task in running]
        return answers

    async def _answer(self, call: Call) -> Answer:
        began = time.perf_counter()
        try:
            arguments, passed_over = checked(call, self.settings)
            async with self._slots:
                outcome = await self._do(call.name, arguments)
        except BadCall as fault:
            outcome, passed_over = Outcome(str(fault), {"error": fault.kind}, failed=True), []
        text, left_out = cut(outcome.text.encode("utf-8", "replace").decode(), self.settings.output_characters)
        details = {**outcome.details, "cut": outcome.details.get("cut", False) or bool(left_out)}
        if passed_over:
            details["passed_over"] = passed_over
        return Answer(call, text, outcome.failed, time.perf_counter() - began, details)

    async def _do(self, name: str, given: dict[str, Any]) -> Outcome:
        if name == "search":
            assert self.searcher is not None
            return Outcome(*await self.searcher.search(self.ask, given["query"], min(given.get("k", 5), 20)))
        if name == "todo":
            return self._todo(given["items"])
        if name in {"shell", "bash"}:
            return await self._shell(given["command"], given.get("timeout", self.settings.shell_seconds))
        return await self._inside(name, **request(name, given, self.settings))

    async def _inside(self, do: str, **request: Any) -> Outcome:
        answer = await self.ask(do, self.settings.seconds, **request)
        if refused := answer.get("refused"):
            path = {"path": request["path"]} if "path" in request else {}
            return Outcome(answer["text"], {"error": refused, **path}, failed=True)
        return Outcome(answer["text"], answer["details"], failed=bool(answer["details"].get("late")))

    async def ask(self, do: str, seconds: float, **request: Any) -> dict[str, Any]:
        """Return what the toolbox inside the sandbox answers to a request."""
        stdin = json.dumps({"do": do, "seconds": seconds, **request}).encode()
        result = await self.sandbox.exec(
            [self.python, "-I", "-S", "-c", BOOT, *SOURCES], stdin=stdin, timeout=seconds + 10.0
        )
        if result.timed_out or result.oom or result.rc < 0:
            return {"text": _ended(result) or f"ended by signal {-result.rc}", "refused": "killed"}
        try:
            answer = json.loads(result.out)
            assert isinstance(answer["text"], str)
            assert "refused" in answer or isinstance(answer["details"], dict)
        except (ValueError, KeyError, TypeError, AssertionError):
            said = (
                result.err.decode(errors="replace").strip()[-300:] or f"{len(result.out)} bytes, {sum(result.cut)} cut"
            )
            raise SandboxError(
                f"{self.python} in the sandbox did not answer ({do}, exit code {result.rc}): {said}"
            ) from None
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
        return Outcome(f"{head}\n{output or 'no output'}", details, failed=bool(ended))

    def _todo(self, items: str) -> Outcome:
        plan = []
        for line in filter(None, map(str.strip, items.splitlines())):
            match = re.fullmatch(r"(?:[-*] +)?\[([ xX]?)\]\s*(.*)", line)
            if match is None and self.settings.strict_arguments:
                raise BadCall("bad value", "todo: each line must begin with [ ] or [x].")
            plan.append(Todo(match[2] if match else line, done=bool(match and match[1].strip())))
        if len(plan) > MOST_TODO:
            raise BadCall("bad value", f"todo: at most {MOST_TODO} items.")
        self.plan = plan
        done = sum(item.done for item in plan)
        return Outcome(f"{len(plan) - done} open, {done} done", {"open": len(plan) - done, "done": done})


def _ended(result: Result) -> str:
    """Return why something was ended before it was through, if it was."""
    if result.oom:
        return "killed: out of memory"
    return f"timed out after {result.seconds:.0f} s" if result.timed_out else ""
