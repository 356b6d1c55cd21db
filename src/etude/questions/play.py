"""One attempt at a question: the agent's harness with at most one tool, then the grade.

The tool, where the settings name a corpus, is `search`: passages ranked as the coding agent's search ranks code (BM25, and vectors
where the extra `search` is installed). A program that checks an answer runs in a sandbox and reads the answer from stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from etude.agent.calls import Answer, Call, Parameter, ToolSpec
from etude.agent.search import Chunk, Searcher, chunks, installed_embedder
from etude.errors import UserError
from etude.questions.grade import Verdict, grade, marked
from etude.rewards.interaction import final_message
from etude.sandbox.box import Limits, Place, SandboxError
from etude.sandbox.local import open_sandbox

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.agent.trace import Trace
    from etude.questions.judge import Judge
    from etude.questions.question import Question

CHECKING, WAITING = 20, 120.0  # seconds of a program: of a core, and on a busy machine
SHOWN = 600  # characters of a passage


SEARCH = ToolSpec("search", "Find passages of the library.", (Parameter("query", str, "Words to look for"),))


class Library:
    """A corpus that can be searched; read once."""

    def __init__(self, path: Path, setting: str) -> None:
        self.chunks = [chunk for name, text in _documents(path, setting) for chunk in chunks(name, text)]
        if not self.chunks:
            raise UserError(f"{setting}: {path} holds no text to search in")
        self.searcher = Searcher(None, installed_embedder())

    def search(self, query: str, results: int) -> list[Chunk]:
        return [self.chunks[place] for place in self.searcher.rank(self.chunks, query)[0][:results]]


def _documents(path: Path, setting: str) -> list[tuple[str, str]]:
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.suffix in {".txt", ".md"} and each.is_file())
        return [(str(each.relative_to(path)), each.read_text(encoding="utf-8", errors="replace")) for each in files]
    if not path.is_file():
        raise UserError(f"{setting}: {str(path)!r} is neither a file nor a folder (looked in {Path.cwd()})")
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            row = json.loads(line)
            found.append((str(row["id"]), str(row["text"])))
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}:{number}: no document; a line is a JSON object with `id` and `text`") from None
    return found


@dataclass(frozen=True)
class SearchTools:
    """The harness's tools: search, or none."""

    library: Library | None
    results: int
    plan_text: str = ""

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        return (SEARCH,) if self.library else ()

    async def run(self, calls: Sequence[Call]) -> list[Answer]:
        return [await self._run(call) for call in calls]

    async def _run(self, call: Call) -> Answer:
        query = call.arguments.get("query")
        if self.library is None or call.name != SEARCH.name:
            return Answer(call, f"There is no tool {call.name!r}.", failed=True)
        if not isinstance(query, str) or not query.strip() or len(call.arguments) > 1:
            return Answer(call, "search takes one argument, `query`, a text.", failed=True)
        found = await asyncio.to_thread(self.library.search, query, self.results)
        text = "\n\n".join(f"[{chunk.path}]\n{chunk.text[:SHOWN]}" for chunk in found) or "nothing found"
        return Answer(call, text, details={"found": [chunk.path for chunk in found]})


NO_TOOLS = SearchTools(None, 1)


async def verdict_on(question: Question, trace: Trace, judge: Judge | None, seed: int) -> Verdict:
    """Grade a finished trace; what a judge took goes into its counts. SandboxError: the sandbox failed, not the answer."""
    answer, why = marked(final_message(trace), many_lines=question.kind in {"program", "rubric"})
    trace.made_by["answer"] = answer
    if why:
        return Verdict(passed=False, why=why)
    if question.kind == "program":
        passed = await accepted(question.program, answer)
        return Verdict(passed, "" if passed else "the program refuses it")
    if question.kind != "rubric":
        return grade(question, answer)
    assert judge is not None
    passed_by, spent = await judge.verdict(question, answer, seed)
    trace.counts |= spent
    if passed_by is None:
        return Verdict(passed=False, why="no verdict of the judge")
    return Verdict(passed_by, "" if passed_by else "the judge refuses it")


async def accepted(program: str, answer: str) -> bool:
    """Return whether a program accepts an answer, which it reads from stdin: one that hangs or crashes on it does not."""
    limits = Limits(cpu_seconds=CHECKING)
    sandbox = await open_sandbox(Place((), readonly=(Path(sys.prefix), Path(sys.base_prefix)), limits=limits))
    try:
        await sandbox.write("check.py", program.encode())
        command = [sys.executable, "-I", "check.py"]
        done = await sandbox.exec(command, timeout=WAITING, stdin=answer.encode("utf-8", "replace"))
        if done.rc == 127:
            raise SandboxError(f"Python could not be started: {done.err[-200:].decode(errors='replace')}")
        return done.rc == 0 and not done.timed_out
    finally:
        await sandbox.close()


async def faults(questions: Sequence[Question], most: int) -> list[str]:
    """Return what is wrong with programs, tried with their own answers and with an empty one, of some questions spread over a set."""
    programs = [question for question in questions if question.kind == "program"]
    spread = programs[:: max(1, len(programs) // most)][:most]
    found = []
    for question in spread:
        for answer, wanted in [*((str(each), True) for each in question.answers), ("", False)]:
            if await accepted(question.program, answer) != wanted:
                said = "accepts an empty answer" if not wanted else f"refuses its own answer {answer[:40]!r}"
                found.append(f"question {question.id}: its program {said}")
    return found


def oracle(question: Question, *, calls: bool) -> list[Call | str]:
    """Return what a perfect policy does: its searches, if there is a tool, then the solution and the marked answer."""
    answer = "\n".join(filter(None, [question.solution, f"Answer: {question.reference}"]))
    return [*([Call(SEARCH.name, {"query": query}) for query in question.search] if calls else []), answer]
