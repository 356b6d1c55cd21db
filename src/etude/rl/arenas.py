"""Arenas: the `Environment` in which episodes run, chosen by the setting `arena` of the stages `rl` and `bench`.

    "code"                  tasks in codebases, scored by hidden tests (environment.py)
    "questions"             a set of questions with verifiable answers (questions/)
    "python:module.Class"   a class of one's own: called with `tasks` and the harness's settings, it is an `Environment`

Episodes of the last kind are checked, and its exceptions are counted as failures of the infrastructure: docs/arenas.md.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from etude.agent.harness import Harness, HarnessSettings
from etude.agent.policies import SCHEMES, find
from etude.agent.trace import Trace
from etude.errors import UserError, nearest, one_line
from etude.files import digest_of, sha256_file
from etude.progress import Reporter
from etude.questions.judge import Judge, JudgeFailed, refuse_without
from etude.questions.play import Library, SearchTools, faults, oracle, verdict_on
from etude.questions.question import by_id, read_set
from etude.questions.settings import PYTHON, QUESTIONS, QuestionSettings
from etude.rewards.reward import PARTS, RewardSettings, length, penalty
from etude.rl.environment import POLICY_SHARE, Environment, Episode, Item, Journal, from_journal, infrastructure
from etude.work import cores

if TYPE_CHECKING:
    from collections.abc import Callable

    from etude.agent.calls import Call
    from etude.agent.formats import ChatFormat
    from etude.inference.policy import Policy

LONGEST = 86_400.0  # seconds of an episode, where nobody says
REFUSED = 0.125  # of a fault: a call that its tool refused, as in code
CHECKED = 2  # programs that are tried before any time is spent on episodes


class Arena(Environment, Protocol):
    """What the stages need from an arena other than `code`, besides episodes."""

    about: dict[str, Any]  # the rules of scoring, for the header of a benchmark
    statistics: dict[str, float]
    digest: str

    async def ready(self, say: Callable[[str], None]) -> None:
        """Check programs and judge before any episode runs; report how well the judge agrees with people."""

    async def close(self, say: Callable[[str], None]) -> None:
        """Close the judge, if one was opened, and report what it cost."""

    def solution(self, item: str) -> list[Call | str]:
        """Return the calls and messages of a perfect policy; UserError if there is no solution."""


@dataclass(frozen=True)
class Choice:
    """Which arena was chosen, and what it is given. `setting`: the stage, for messages."""

    arena: str
    tasks: str
    harness: HarnessSettings
    only: str = ""
    questions: QuestionSettings = field(default_factory=QuestionSettings)
    rewards: RewardSettings = field(default_factory=RewardSettings)
    seconds: float = LONGEST  # of an episode
    cache: Path = Path()
    device: str = "auto"
    setting: str = "rl"

    def open(self) -> Arena:
        """Open an arena that is not `code`."""
        return QuestionArena(self) if self.arena == QUESTIONS else OwnArena(self)


class QuestionArena:
    """Questions, each a task. See `Environment` and `Arena`."""

    def __init__(self, choice: Choice) -> None:
        path, settings, stage = Path(choice.tasks).expanduser(), choice.questions, choice.setting
        if not path.is_file():
            missing = f"{stage}.tasks: {choice.tasks!r} is not a file (looked in {Path.cwd()})"
            raise UserError(f"{missing}; name a JSONL of questions")
        self.set, self.choice, self.settings = read_set(path, choice.only), choice, settings
        self.questions, self.digest, self.statistics = by_id(self.set.questions), self.set.digest, self.set.statistics
        refuse_without(settings.judge, self.set.questions, f"{stage}.questions.judge")
        self.items = tuple(Item(q.id, q.family or q.topic, q.topic, q.source or q.topic) for q in self.set.questions)
        corpus = Path(settings.corpus).expanduser()
        self.library = Library(corpus, f"{stage}.questions.corpus") if settings.corpus else None
        self.tools = SearchTools(self.library, settings.results)
        limit = min(choice.harness.seconds, POLICY_SHARE * choice.seconds)
        self.harness = choice.harness.model_copy(update={"seconds": limit})
        known = digest_of([[each.path, each.text] for each in self.library.chunks]) if self.library else ""
        self.about = {"arena": QUESTIONS, "answers": "one marked line, read strictly", "corpus": known, "judge": settings.judge,
                      "results": settings.results}  # fmt: skip
        self._judge: Judge | None = None
        self._opening, self._checking = asyncio.Lock(), asyncio.Semaphore(cores())

    async def judge(self) -> Judge | None:
        """Return the judge, opened when it is first needed. UserError: there is none at its address."""
        async with self._opening:
            if self.settings.judge and self._judge is None:
                source = await find(self.settings.judge, self.choice.device, self.choice.cache, Reporter(quiet=True))
                self._judge = Judge(source.name, *await source.open(), self.settings.judge_tokens)
        return self._judge

    async def ready(self, say: Callable[[str], None]) -> None:
        if judge := await self.judge():
            labelled = [question for question in self.set.questions if question.labels]
            try:
                say(f"judge {judge.name}: {await judge.measure(labelled)}")
            except JudgeFailed as error:
                raise UserError(str(error)) from None
        if wrong := await faults(self.set.questions, CHECKED):
            raise UserError(wrong[0])

    async def close(self, say: Callable[[str], None]) -> None:
        if self._judge:
            say(self._judge.cost)
            await self._judge.policy.close()
            self._judge = None

    def solution(self, item: str) -> list[Call | str]:
        return oracle(self.questions[item], calls=self.library is not None)

    async def run_episode(
        self, item: str, policy: Policy, talk: ChatFormat, *, name: str, seed: int, journal: Path
    ) -> Episode:
        """See `Environment`."""
        question = self.questions[item]

        async def play(past: Journal) -> Trace:
            trace = Trace(name, question.prompt, made_by={"set": self.set.about.set, "task": item})
            harness = Harness(*past.replaying(policy, talk, self.tools), self.harness, trace, seed=seed)
            return await harness.run(self.set.about.system, question.prompt)

        async with infrastructure("the episode", self.choice.seconds):
            trace = await from_journal(journal, {"name": name, "task": item, "seed": seed}, play)
            async with self._checking if question.kind == "program" else nullcontext():
                judge = await self.judge() if question.kind == "rubric" else None
                verdict = await verdict_on(question, trace, judge, seed)
        trace.made_by["score"] = {"outcome": "pass" if verdict.passed else "fail", "reason": verdict.why}
        faulty = trace.counts.get("malformed", 0) + REFUSED * trace.counts.get("failed_calls", 0)
        trace.rewards = {"outcome": float(verdict.passed), "conduct": penalty(faulty),
                         "length": length(trace.counts, self.choice.rewards.effort, solved=verdict.passed)}  # fmt: skip
        return Episode(trace, "pass" if verdict.passed else "fail", _behaviour(trace, verdict.why))


def _behaviour(trace: Trace, why: str) -> dict[str, float]:
    """Return the metrics that monitors watch: a drift shows a habit such as hedging or pleasing the judge."""
    counts = trace.counts
    values = {"thinking_tokens": counts.get("tokens_thinking", 0), "said_tokens": counts.get("tokens_said", 0),
              **{name: counts.get(name, 0) for name in ("calls", "malformed", "failed_calls")},
              "unmarked": why in {"no marked answer", "no message"}, "several_answers": why == "several marked answers",
              "hedged": why in {"hedged", "not one of the choices"},
              "answer_chars": len(str(trace.made_by.get("answer", "")))}  # fmt: skip
    if "judge_calls" in counts:
        values |= {name: counts[name] for name in ("judge_malformed", "judge_read", "judge_written")}
    return {name: float(value) for name, value in values.items()}


class OwnArena:
    """A user's class; the episodes that it returns are checked. See `Environment` and `Arena`."""

    def __init__(self, choice: Choice) -> None:
        self.choice, arena = choice, choice.arena
        if choice.only:
            raise UserError(f"{choice.setting}.only has no effect with the arena {arena!r}; leave it out")
        cls, file = own_class(arena)
        try:
            self.inner: Any = cls(choice.tasks, choice.harness)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - anybody's code
            what = f"{cls.__name__}(tasks, harness) fails: {type(error).__name__}: {one_line(error)}"
            raise UserError(f"arena {arena!r}: {what}") from None
        if lacking := [each for each in ("items", "run_episode") if not hasattr(self.inner, each)]:
            what = f"{cls.__name__} has no `{lacking[0]}`"
            raise UserError(f"arena {arena!r}: {what}; docs/arenas.md shows what it needs")
        self.items = tuple(self.inner.items)
        if not self.items or not all(isinstance(item, Item) for item in self.items):
            raise UserError(f"arena {arena!r}: `items` must be a list of etude.rl.environment.Item, one or more")
        if not asyncio.iscoroutinefunction(self.inner.run_episode):
            raise UserError(f"arena {arena!r}: `run_episode` must be an `async def`")
        self.digest = digest_of([sha256_file(file), [[i.id, i.family, i.topic, i.source] for i in self.items]])
        self.about, self.statistics = {"arena": arena}, {"tasks": float(len(self.items))}

    async def ready(self, say: Callable[[str], None]) -> None: ...

    async def close(self, say: Callable[[str], None]) -> None: ...

    def solution(self, item: str) -> list[Call | str]:
        if not hasattr(self.inner, "solution"):
            missing = f"arena {self.choice.arena!r} has no `solution`, so there is no oracle"
            raise UserError(f"{missing}; leave the oracle out")
        return list(self.inner.solution(item))

    async def run_episode(
        self, item: str, policy: Policy, talk: ChatFormat, *, name: str, seed: int, journal: Path
    ) -> Episode:
        """See `Environment`."""
        async with infrastructure("the episode", self.choice.seconds):
            played = await self.inner.run_episode(item, policy, talk, name=name, seed=seed, journal=journal)
        if fault := _fault(played):
            raise UserError(f"arena {self.choice.arena!r}: run_episode {fault}")
        return played  # type: ignore[no-any-return]


def _fault(played: object) -> str:
    """Return why the result of a user's arena cannot be used for training, or nothing."""
    if not isinstance(played, Episode):
        return f"returned {type(played).__name__}, not an etude.rl.environment.Episode"
    if played.outcome not in {"pass", "fail"}:
        return f'has the outcome {played.outcome!r}; it is "pass" or "fail"'
    values = played.trace.rewards
    if "outcome" not in values or not {*values} <= {*PARTS}:
        return f"has the rewards {sorted(values)}; `outcome` is needed, and possible besides are {', '.join(PARTS[1:])}"
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in values.values()):
        return f"has a reward that is no finite number: {values}"
    if not any(node.sampled for node in played.trace.nodes):
        return "has a trace without a sampled node; let etude.agent.harness.Harness write it"
    return ""


def own_class(arena: str) -> tuple[Callable[..., Any], Path]:
    """Return the class that an arena's name means, and the file it is in.

    A module is one that is installed, or else the file MODULE.py in the working directory. The directory itself does not become a
    place to import from: it may be anybody's repository.
    """
    module, _, name = arena.removeprefix(PYTHON).rpartition(".")
    beside = Path(f"{module.replace('.', '/')}.py").absolute()
    try:
        loaded = sys.modules.get(module) or _imported(module, beside)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - anybody's code
        why = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"arena {arena!r}: {module} cannot be imported: {why}") from None
    if not isinstance(cls := getattr(loaded, name, None), type):
        known = [each for each, value in vars(loaded).items() if isinstance(value, type) and value.__module__ == module]
        raise UserError(f"arena {arena!r}: {module} has no class {name!r}{nearest(name, known)}")
    return cls, Path(loaded.__file__ or beside)


def _imported(module: str, beside: Path) -> Any:
    if importlib.util.find_spec(module.partition(".")[0]) and importlib.util.find_spec(module):
        return importlib.import_module(module)
    if not beside.is_file():
        raise UserError(f"arena: there is no module {module!r}: neither installed nor a file {beside}")
    spec = importlib.util.spec_from_file_location(module, beside)
    assert spec
    assert spec.loader
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[module]
        raise
    return loaded


def check_judge(address: str, cache: Path) -> None:
    """Refuse a judge that cannot be reached or is not known, before anything runs."""
    from etude.models.bases import resolve

    if address.startswith(SCHEMES):
        asyncio.run(find(address, "cpu", cache, Reporter(quiet=True)))
    elif address:
        resolve(address)
