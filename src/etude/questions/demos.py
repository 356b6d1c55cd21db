"""Demonstrations from question sets: the solution of each question, replayed through the harness, graded, and kept if it passes.

The tokens are those that the policy would see and sample in RL. Answers to rubrics are kept without a grade, as there may be no judge
when they are made.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from etude.agent.calls import Call
from etude.agent.formats import ChatFormat, choose_format
from etude.agent.harness import Harness, HarnessSettings
from etude.agent.policies import ScriptedPolicy
from etude.agent.summary import SummarySettings
from etude.agent.trace import Trace, write_traces
from etude.errors import UserError
from etude.progress import counted
from etude.questions.play import Library, SearchTools, oracle, verdict_on
from etude.questions.question import Question, QuestionSet, read_set, refuse_benchmark

if TYPE_CHECKING:
    from collections.abc import Callable


SETTINGS = HarnessSettings(summary=SummarySettings(kind="none"))


class QuestionDemoSettings(BaseModel, extra="forbid", strict=True, frozen=True):
    """Which questions are answered in demonstrations."""

    tasks: str = Field(description="JSONL of questions, of a training set")
    only: str = Field(default="", description="prefixes of the ids of questions, separated by spaces; empty: all")
    most: int = Field(default=0, ge=0, description="limit of demonstrations, spread over the set (0 = none)")
    corpus: str = Field(default="", description="JSONL (id, text) or folder that `search` looks in; empty: no tool")
    results: int = Field(default=3, ge=1, le=20, description="passages that a search returns")

    @property
    def path(self) -> Path:
        return Path(self.tasks).expanduser()

    def read(self) -> QuestionSet:
        """Read the set; UserError: it is not there, or a benchmark."""
        if not self.path.is_file():
            raise UserError(f"sft.questions.tasks: {self.tasks!r} is not a file (looked in {Path.cwd()})")
        found = read_set(self.path, self.only)
        refuse_benchmark(self.path, found)
        return found


def demonstrate(
    settings: QuestionDemoSettings, tokeniser: Any, digest: str, out: Path, say: Callable[[str], None]
) -> None:
    """Write the demonstrations of a set to a file of traces. `digest`: of the tokeniser, with the template that will be trained."""
    found, talk = settings.read(), choose_format(tokeniser)
    library = Library(Path(settings.corpus).expanduser(), "sft.questions.corpus") if settings.corpus else None
    most = min(settings.most or len(found.questions), len(found.questions))
    spread = [found.questions[place * len(found.questions) // most] for place in range(most)]
    tools = SearchTools(library, settings.results)

    async def every() -> list[tuple[Trace, str]]:
        return [await _one(question, found, talk, tools, digest) for question in spread]

    made = asyncio.run(every())
    kept, left_out = [trace for trace, why in made if not why], Counter(why for _, why in made if why)
    if not kept:
        raise UserError(f"{settings.path}: none of {most} questions could be answered: {counted(left_out)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_traces(out, kept)
    lost = f"; left out: {counted(left_out)}" if left_out else ""
    say(f"{len(kept)} of {most} questions of {found.about.set} answered{lost}")


async def _one(
    question: Question, found: QuestionSet, talk: ChatFormat, tools: SearchTools, digest: str
) -> tuple[Trace, str]:
    """Return a demonstration, and why it is none."""
    if not question.reference:
        return Trace(question.id, question.prompt), "no answer is known"
    package = question.source or question.topic or question.id
    about = {"task": question.id, "package": package, "licence": found.about.licence}
    made_by = {"tokeniser": digest, "set": found.about.set, "demonstration": about}
    trace = Trace(f"{found.about.set}:{question.id}", question.prompt, made_by=made_by)
    turns = oracle(question, calls=bool(tools.library))
    said = [talk.write(each) if isinstance(each, Call) else each for each in turns]
    harness = Harness(ScriptedPolicy(said, talk), talk, tools, SETTINGS, trace, seed=0)
    await harness.run(found.about.system, question.prompt)
    if trace.stop != "finished":
        return trace, f"the episode ended by {trace.stop}"
    if question.kind != "rubric" and not (verdict := await verdict_on(question, trace, None, 0)).passed:
        return trace, verdict.why
    return trace, ""
