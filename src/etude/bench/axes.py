"""The four axes: which numbers of a trial each is made of. A number that does not apply to a trial is None, and is not averaged."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, Field

from etude.rewards.quality import size
from etude.tasks.attempt import reference_change

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from etude.agent.trace import Trace
    from etude.bench.statistics import Row
    from etude.bench.trials import Trial
    from etude.tasks.task import Task


class Prices(BaseModel, extra="forbid", strict=True, frozen=True):
    """Prices of a million tokens, in any one currency."""

    read: float = Field(default=0.0, ge=0, description="price of a million prompt tokens, uncached")
    cached: float = Field(default=0.0, ge=0, description="price of a million prompt tokens, cached")
    written: float = Field(default=0.0, ge=0, description="price of a million sampled tokens")

    def cost(self, tokens: Mapping[str, int]) -> float:
        """Return what an episode costs."""
        read, cached, written = (tokens.get(kind, 0) for kind in ("read", "cached", "written"))
        return ((read - cached) * self.read + cached * self.cached + written * self.written) / 1e6


class Metric(NamedTuple):
    """One number. `rate`: its values lie between 0 and 1, and are shown in per cent; `signed`: they may lie below 0."""

    name: str
    value: Callable[[Trial], float | None]
    rate: bool = False
    signed: bool = False

    def rows(self, trials: Iterable[Trial]) -> list[Row]:
        """Return the values of the trials to which it applies, for the bootstrap."""
        values = ((trial, self.value(trial)) for trial in trials)
        return [(trial.package, trial.task, float(value)) for trial, value in values if value is not None]


def _tests_passed(trial: Trial) -> float | None:
    return _share(sum(trial.passed.values()), sum(trial.expected.values()))


def _quality(name: str, formula: Callable[[Any], float | None], *, rate: bool = False, signed: bool = False) -> Metric:
    """Return a metric of the trials that changed something."""
    return Metric(name, lambda trial: formula(trial.quality) if trial.quality else None, rate, signed)


def _leaves(name: str, key: str) -> Metric:
    return _quality(name, lambda quality: quality[key] > 0, rate=True)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _seen(name: str, key: str, among: str = "") -> Metric:
    """Return how often something was seen, among those trials where something else was."""

    def value(trial: Trial) -> float | None:
        times = trial.interaction.get(key)
        return None if times is None or (among and not trial.interaction.get(among)) else float(times > 0)

    return Metric(name, value, rate=True)


def _tokens(name: str, kind: str) -> Metric:
    return Metric(name, lambda trial: trial.tokens.get(kind, 0))


def _added_complexity(quality: Mapping[str, float]) -> float:
    return quality["complexity"] - quality["reference_complexity"]


SCORE = Metric("avg@k", lambda trial: {"pass": 1.0, "fail": 0.0}[trial.outcome], rate=True)  # invalid: our own mistake
TESTS = Metric("tests passed", _tests_passed, rate=True)
WRITTEN = _tokens("tokens written ↓", "written")
QUALITY = (
    _quality("new lint findings ↓", lambda q: q["lint"]),
    _quality("lines changed, × reference", lambda q: _share(q["lines"], q["reference_lines"])),
    _quality("decision points above the reference ↓", _added_complexity, signed=True),
    _leaves("changes unrelated files ↓", "unrelated_files"),
    _leaves("changes unrelated functions ↓", "unrelated_functions"),
    _leaves("leaves scratch files ↓", "scratch_files"),
    _leaves("leaves debug prints ↓", "debug_prints"),
    _leaves("leaves commented-out code ↓", "commented_code"),
    _quality("added lines with comments", lambda q: q["comment_density"], rate=True),
    _quality("– in the reference", lambda q: q["reference_comment_density"], rate=True),
    _quality("changed lines that only look different ↓", lambda q: _share(q["churn"], q["lines"]), rate=True),
    _leaves("leaves a file that is not Python ↓", "unparsable"),
)
EFFICIENCY = (
    WRITTEN, _tokens("– thinking", "thinking"), _tokens("– calls", "calls"), _tokens("– said", "said"),
    _tokens("– summaries", "summary"), _tokens("tokens of tool answers ↓", "answers"),
    _tokens("tokens read, all turns ↓", "read"), _tokens("– cached", "cached"),
    Metric("calls ↓", lambda trial: trial.calls), Metric("turns ↓", lambda trial: trial.turns),
    Metric("seconds ↓", lambda trial: trial.seconds),
)  # fmt: skip
INTERACTION = (
    _seen("says that it works", "claimed"),
    _seen("– without a passing test run since the last edit ↓", "unverified", among="claimed"),
    _seen("ends without a message ↓", "silent"),
    _seen("leaves to-dos open ↓", "open_todos"),
    _seen("notices a wrong premise ↑", "premise_noticed"),
    Metric("malformed calls ↓", lambda trial: trial.interaction.get("malformed")),
)

ANSWERS = (
    _seen("ends without a marked answer ↓", "unmarked"), _seen("marks several answers ↓", "several_answers"),
    _seen("hedges, or names none of the choices ↓", "hedged"),
    Metric("characters of the answer", lambda trial: trial.interaction.get("answer_chars")),
    Metric("malformed calls ↓", lambda trial: trial.interaction.get("malformed")),
    _seen("malformed verdicts of the judge ↓", "judge_malformed"),
    Metric("tokens the judge read ↓", lambda trial: trial.interaction.get("judge_read")),
    Metric("tokens the judge wrote ↓", lambda trial: trial.interaction.get("judge_written")),
)  # fmt: skip


def vector(measured: Any) -> dict[str, float | None]:
    """Return a Quality or an Interaction as a trial stores it."""
    return {name: None if value is None else float(value) for name, value in asdict(measured).items()}


def effort(trace: Trace) -> dict[str, Any]:
    """Return the fields of a Trial that say what it took, and why it ended.

    Tokens, besides the harness's kinds: `written` is all that was sampled; `read` what the policy was given, summed over its turns,
    and `cached` the part of it that was not computed anew.
    """
    lengths: list[int] = []  # of the context up to each node
    read = cached = 0
    for node in trace.nodes:
        before = 0 if node.parent is None else lengths[node.parent]
        lengths.append(before + len(node.tokens))
        if node.sampled:
            read, cached = read + before, cached + min(before, int(node.details.get("cached", 0)))
    counts = trace.counts
    tokens = {kind: counts.get(f"tokens_{kind}", 0) for kind in ("thinking", "calls", "said", "summary", "answers")}
    tokens |= {"written": counts.get("sampled", 0), "read": read, "cached": cached}
    seconds = max((node.began + node.seconds for node in trace.nodes), default=0.0)
    made = {name: counts.get(name, 0) for name in ("calls", "turns")}
    return {"tokens": tokens, **made, "seconds": seconds, "stop": trace.stop}


def set_statistics(tasks: Sequence[Task], prompts: Mapping[str, str]) -> dict[str, float]:
    """Return what a set is like, in the numbers CursorBench is described by; `prompts`: what is asked, by a task's id."""
    changes = [reference_change(task) for task in tasks]
    return {
        "tasks": len(tasks),
        "packages": len({task.package for task in tasks}),
        "median lines changed": median(map(size, changes)),
        "median files touched": median(map(len, changes)),
        "median characters of a prompt": median(len(prompts[task.id]) for task in tasks),
    }
