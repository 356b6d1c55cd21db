"""The report of a benchmark: four axes, never one number; with intervals, and models compared on the same tasks.

Its pictures: score against tokens, scores by group, and how long trials are.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations
from statistics import median
from typing import TYPE_CHECKING, Any

from etude.bench.axes import ANSWERS, EFFICIENCY, INTERACTION, QUALITY, SCORE, TESTS, WRITTEN, Metric, Prices
from etude.bench.statistics import Estimate, average, estimate, pass_all, pass_at
from etude.bench.trials import Results, Trial, read_together
from etude.files import canonical_json
from etude.report.page import COLOURS, SOFT, Page, Picture, Table, abridged, drawing, human, token_scale, write_page

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from etude.bench.statistics import Statistic

    Mean = Estimate | None
    Scores = Mapping[str, Mean]  # by model
    Trials = Sequence[Trial]
    Line = tuple[str | float, ...]

TITLE = "what do these agents do with these tasks?"
MARKERS = "osD^vPX*"
BARS = 30
MOST_NAMED = 12  # tasks in a line
HEAD = 20  # characters of a model's name over a column
CHANCE = 20  # comparisons among which one is expected to look sure and not be
TOKENS = Picture("score_tokens.png", "Score against the median of tokens written; a line joins those no other beats")
CATEGORIES, PACKAGES = Picture("by_category.png", "Score by category"), Picture("by_package.png", "Score by package")
LENGTHS = Picture("histograms.png", "Turns and tokens of trials, passes and fails")
SCORED_BY = {
    "run": "tests were run",
    "known": "the same change was scored before",
    "idle": "the code was left as it was",
}
REUSED = (
    "A change that was scored before is not tested again, and code left as it was is known to fail. So a flaky test may look steadier "
    "here than it is; oracle and noop are tested every time."
)


@dataclass(frozen=True)
class Scored:
    """Results, and the numbers the report takes from them."""

    results: Results

    @cached_property
    def valid(self) -> dict[str, list[Trial]]:
        """The valid trials of each model, best model first."""
        trials: dict[str, list[Trial]] = {name: [] for name in self.results.models}
        for trial in self.results.trials:
            if trial.outcome != "invalid":
                trials[trial.model].append(trial)
        passed = {model: sum(each.outcome == "pass" for each in made) for model, made in trials.items()}
        order = sorted(trials, key=lambda model: (-passed[model] / max(len(trials[model]), 1), model))
        return {model: trials[model] for model in order}

    @cached_property
    def heads(self) -> list[str]:
        """A head for a column a model, short enough for six of them where that leaves names apart."""
        names = [abridged(name, HEAD) for name in self.valid]
        return [f">{name}" for name in (names if len(set(names)) == len(names) else self.valid)]

    @cached_property
    def by(self) -> dict[str, dict[str, dict[str, Mean]]]:
        """The score by field, group and model."""
        return {field: {group: {model: self.of([trial for trial in trials if getattr(trial, field) == group])
                                for model, trials in self.valid.items()}
                        for group in sorted({getattr(trial, field) for trial in self.results.trials})}
                for field in ("category", "generator", "style", "package")}  # fmt: skip

    @cached_property
    def scores(self) -> dict[str, Mean]:
        """avg@k of each model."""
        return {model: self.of(trials) for model, trials in self.valid.items()}

    def of(self, trials: Trials, metric: Metric = SCORE, statistic: Statistic = average, least: int = 1) -> Mean:
        rows = metric.rows(trials)
        return estimate(rows, statistic, rate=metric.rate, signed=metric.signed, least=least)

    def limit(self, name: str, most: float) -> float:
        """Return how far an axis of turns or tokens goes: as far as a trial may, so that pictures under one set of rules compare."""
        return max(most, 2.0, float(self.results.header.sampling.get("harness", {}).get(name, 1)))

    def apart(self, one: str, other: str, metric: Metric = SCORE) -> Estimate | None:
        """Return by how much one model is above another on the tasks of both."""
        rows, against = (metric.rows(self.valid[model]) for model in (one, other))
        return estimate(rows, against=against, rate=metric.rate)


def write_report(folders: Sequence[Path], target: Path, prices: Prices | None = None, stage: str = "") -> list[str]:
    """Write report.md, report.html and pictures on one folder of trials, or on several to be compared; return its first lines."""
    scored = Scored(read_together(folders))
    if not any(scored.valid.values()):
        reasons = Counter(trial.why for trial in scored.results.trials).most_common()
        invalid = f"all {len(scored.results.trials)} trials are invalid, so nothing is known of any model"
        lines = [f"{invalid}; most often: {reasons[0][0]}"]
        write_page(target, TITLE, {"In short": [f"{lines[0]}.", Table(("why", ">trials"), reasons)]}, wide=True)
        return lines
    draw_score_against_tokens(target / TOKENS.file, scored)
    draw_groups(target / CATEGORIES.file, scored.by["category"], CATEGORIES.about)
    draw_groups(target / PACKAGES.file, scored.by["package"], PACKAGES.about)
    draw_lengths(target / LENGTHS.file, scored)
    lines = verdict(scored)
    titled = f"{stage or ', '.join(folder.absolute().name for folder in folders)}: {TITLE}"
    write_page(target, titled, contents(scored, prices, lines), wide=True, in_run=bool(stage))
    return lines


def verdict(scored: Scored) -> list[str]:
    """Return a line a model, whether the first is surely ahead of the second, and what to be wary of."""
    whole = int(scored.results.header.about.get("tasks", 0))
    lines = []
    for model, score in scored.scores.items():
        short = f", of {whole} in the set" if score and score.tasks < whole else ""
        lines.append(f"{model}: " + (f"{percent(score)} of {score.tasks} tasks{short}" if score else "no valid trial"))
    one, other, *_ = [*scored.valid, None]
    if other and (apart := scored.apart(one, other)):
        both = f"on the {apart.tasks} tasks of both"
        lines.append(f"{one} against {other} {both}: {points(apart)} points, {_sure(apart)}")
    if rules := scored.results.differing:
        lines.append(f"not the same for all: {', '.join(rules)}")
    return lines


def contents(scored: Scored, prices: Prices | None, lines: Sequence[str]) -> Page:
    """Return the report on all axes."""
    header, k = scored.results.header, scored.results.attempts
    code = "arena" not in header.integrity
    about = "Of trials that changed something. Arrows say which way is better."
    quality: Page = {"Code quality": [about, _table(scored, QUALITY)]}
    costs = [Metric("cost ↓", lambda trial: prices.cost(trial.tokens))] if prices else []
    return {
        "In short": [*(f"{line}." for line in lines), TOKENS],
        "Correctness": [
            f"avg@k: passes per trial, the mean over tasks. pass@{k}: one of {k} trials passes; pass^{k}: all do; of tasks with {k} "
            "valid trials. In brackets 95% intervals over repositories (docs/benchmark.md). Invalid trials, in which the "
            "machinery failed, are left out of all numbers.", _correctness(scored, k)],
        **_pairs(scored),
        **(quality if code else {}),
        "Efficiency": ["Of all valid trials, means over tasks.", _table(scored, [*EFFICIENCY, *costs]), LENGTHS],
        "Interaction": ["Read from traces by fixed rules with limits: compare models by them.",
                        _table(scored, INTERACTION if code else ANSWERS)],
        "By category": [CATEGORIES, _grouped(scored, "category")],
        "By generator and style of prompt": [_grouped(scored, "generator"), _grouped(scored, "style")],
        **_asked_twice(scored),
        "By package": [PACKAGES, _grouped(scored, "package")],
        "How trials ended": [_endings(scored), REUSED, _scored_by(scored)],
        "The tasks": [
            *(["To compare: the third version of CursorBench has a median of 181 lines changed and of 390 characters of a prompt."]
              if code else []),
            Table(("the set", ">"), [(name, f"{value:,.4g}") for name, value in header.about.items()])],
        "Made with": [Table(("what", "which"), [
            ("task set", header.tasks), ("harness", header.harness), ("sampling", canonical_json(header.sampling)),
            ("integrity", canonical_json(header.integrity))])],
    }  # fmt: skip


def _correctness(scored: Scored, k: int) -> Table:
    rows: list[Line] = []
    for model, trials in scored.valid.items():
        one, every = (scored.of(trials, SCORE, statistic, k) for statistic in (pass_at(k), pass_all(k)))
        cells = map(percent, (scored.scores[model], one, every, scored.of(trials, TESTS)))
        invalid = sum(trial.model == model for trial in scored.results.trials) - len(trials)
        tasks = len({trial.task for trial in trials})
        rows.append((model, *cells, tasks, one.tasks if one else 0, len(trials), invalid))
    heads = f"avg@k pass@{k} pass^{k} tests_passed tasks with_{k}_valid valid_trials invalid".split()
    return Table(("model", *(f">{head.replace('_', ' ')}" for head in heads)), rows)


def _pairs(scored: Scored) -> Page:
    rows: list[Line] = []
    for one, other in combinations(scored.valid, 2):
        score, tokens = scored.apart(one, other), scored.apart(one, other, WRITTEN)
        sure = _sure(score) if score else "no common tasks"
        rows.append((f"{one} − {other}", points(score), number(tokens), score.tasks if score else 0, sure))
    about = "On tasks that both have tried, so that what is hard for both cancels out."
    if 2 * len(rows) > CHANCE:
        about += f" Of {len(rows)} comparisons, about one in {CHANCE} looks sure by chance."
    heads = ("pair", ">avg@k, points", ">tokens written", ">common tasks", "the sign of the score is")
    return {"Two by two": [about, Table(heads, rows)]} if rows else {}


def _asked_twice(scored: Scored) -> Page:
    """Tell hard tasks from underspecified ones, where trials had both a full request and a shorter one."""
    tries: dict[str, dict[bool, list[bool]]] = {}
    for trial in (each for trials in scored.valid.values() for each in trials):
        if trial.style in {"full", "terse", "trace", "vague"}:
            tries.setdefault(trial.task, {True: [], False: []})[trial.style == "full"].append(trial.outcome == "pass")
    both = {task: (any(asked[False]), any(asked[True])) for task, asked in tries.items() if all(asked.values())}
    if not both:
        return {}
    names = {(True, True): "solved by both", (True, False): "solved by the short one only",
             (False, True): "underspecified: by the full one only", (False, False): "hard: by neither"}  # fmt: skip
    rows = [(name, len(some), ", ".join(some[:MOST_NAMED]) + (" …" if len(some) > MOST_NAMED else ""))
            for key, name in names.items() for some in [sorted(task for task, how in both.items() if how == key)]]  # fmt: skip
    about = f"{len(both)} tasks were asked twice, by a short request and by their full one; passed at least once, by any model:"
    return {"Hard, or underspecified?": [about, Table(("request", ">tasks", "which"), rows)]}


def _table(scored: Scored, metrics: Sequence[Metric]) -> Table:
    """Return a table with a line a metric and a column a model."""
    rows: list[Line] = []
    for metric in metrics:
        write = percent if metric.rate else number
        rows.append((metric.name, *(write(scored.of(trials, metric)) for trials in scored.valid.values())))
    return Table(("", *scored.heads), rows)


def _grouped(scored: Scored, field: str) -> Table:
    groups = scored.by[field].items()
    rows: list[Line] = [(group, _tasks(scores), *map(percent, scores.values())) for group, scores in groups]
    return Table((field, ">tasks", *scored.heads), rows)


def _tasks(scores: Scores) -> int:
    return max((score.tasks for score in scores.values() if score), default=0)


def _endings(scored: Scored) -> Table:
    ways = Counter((each.outcome, each.why or each.stop, each.model) for each in scored.results.trials)
    kinds = sorted({way[:2] for way in ways})
    rows: list[Line] = [(*kind, *(ways[*kind, model] for model in scored.valid)) for kind in kinds]
    return Table(("outcome", "how it ended", *scored.heads), rows)


def _scored_by(scored: Scored) -> Table:
    ways = Counter((str(trial.how), model) for model, trials in scored.valid.items() for trial in trials)
    rows: list[Line] = [(words, *(ways[way, model] for model in scored.valid)) for way, words in SCORED_BY.items()]
    return Table(("how the score was found", *scored.heads), rows)


def _sure(apart: Estimate) -> str:
    return "sure" if apart.low > 0 or apart.high < 0 else "within the noise"


def percent(score: Estimate | None) -> str:
    return f"{score.value:.1%} [{score.low * 100:.1f}–{score.high * 100:.1f}]" if score else "–"


def points(gain: Estimate | None) -> str:
    """Return a difference of shares, in points, with its interval."""
    return f"{gain.value * 100:+.1f} [{gain.low * 100:+.1f}, {gain.high * 100:+.1f}]" if gain else "–"


def number(mean: Estimate | None) -> str:
    """Return a number with its interval, as many digits as the interval is worth."""
    if mean is None:
        return "–"
    most = max(abs(mean.low), abs(mean.high))
    digits = max(0, 2 - math.floor(math.log10(most))) if most else 0
    shown = (f"{'-' * (x < 0)}{human(abs(x))}" if most >= 1000 else f"{x:.{digits}f}" for x in mean[:3])
    return "{} [{}, {}]".format(*shown)


def wrapped(name: str, line: int = 26, lines: int = 2) -> str:
    """Return a name in a few lines; what is too long is cut in its middle, since versions stand at the end."""
    return "\n".join(textwrap.wrap(abridged(name, (line - 1) * lines), line))


def draw_score_against_tokens(path: Path, scored: Scored) -> None:
    """Draw what a score takes; the line joins the models that no other beats in both."""
    places = []
    with drawing(path, 10, 4.6) as figure:
        axis: Any = figure.subplots()
        for at, (model, score) in enumerate((model, score) for model, score in scored.scores.items() if score):
            tokens = max(median(trial.tokens.get("written", 0) for trial in scored.valid[model]), 1)
            value, low, high = (100 * each for each in score[:3])
            look = {"color": COLOURS[at % len(COLOURS)], "marker": MARKERS[at % len(MARKERS)], "linestyle": ""}
            spread = [[value - low], [high - value]]
            axis.errorbar(tokens, value, spread, label=wrapped(model), markersize=7, capsize=3, clip_on=False, **look)
            places.append((tokens, value))
        best = frontier(places)
        axis.plot([tokens for tokens, _ in best], [value for _, value in best], color=SOFT, zorder=0)
        axis.set(xlim=(1, scored.limit("tokens", max((tokens for tokens, _ in places), default=1))), ylim=(0, 100))
        token_scale(axis)
        axis.set_title("Score against tokens: up and left is better", loc="left")
        axis.set(xlabel="tokens written in a trial, median", ylabel="avg@k, %")
        axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, labelspacing=0.9)


def frontier(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (tokens, score) that no other one beats with fewer tokens and at least the score, from left to right."""
    best: list[tuple[float, float]] = []
    for tokens, score in sorted(places, key=lambda place: (place[0], -place[1])):
        if not best or score > best[-1][1]:
            best.append((tokens, score))
    return best


def draw_groups(path: Path, groups: Mapping[str, Scores], title: str) -> None:
    """Draw the scores of each group with their intervals as a table of colours, the easiest group first: there may be many."""
    models = list(next(iter(groups.values())))
    order = sorted(groups.items(), key=lambda group: -sum(score.value for score in group[1].values() if score))
    with drawing(path, max(10, 2.8 + 1.3 * len(models)), 1.5 + 0.29 * len(groups)) as figure:
        axis: Any = figure.subplots()
        values = [[score.value if score else 0 for score in scores.values()] for _, scores in order]
        axis.imshow(values, "YlGnBu", vmin=0, vmax=1, aspect="auto")
        for down, (_, scores) in enumerate(order):
            for across, score in enumerate(scores.values()):
                text = f"{100 * score.value:.0f}  [{100 * score.low:.0f}–{100 * score.high:.0f}]" if score else "–"
                colour = "white" if score and score.value > 0.55 else "black"
                axis.text(across, down, text, ha="center", va="center", color=colour, fontsize=8.5)
        names = [f"{wrapped(name, 30, 1)}  ({_tasks(scores)})" for name, scores in order]
        axis.set_yticks(range(len(order)), names)
        axis.set_xticks(range(len(models)), [wrapped(model, 18, 3) for model in models], fontsize=8.5)
        axis.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
        axis.spines[:].set_visible(False)
        title = f"{title}: avg@k in % [95% interval]  (tasks)"
        figure.suptitle(title, fontsize=10, fontweight="bold", x=0.02, ha="left")


def draw_lengths(path: Path, scored: Scored) -> None:
    """Draw how many turns and tokens trials take, a line a model, fails upon passes."""
    import numpy as np

    valid, attempts = scored.valid, max(Counter(trial.model for trial in scored.results.trials).values(), default=1)
    turns = {model: [trial.turns for trial in trials] for model, trials in valid.items()}
    written = {model: [max(trial.tokens.get("written", 0), 1) for trial in trials] for model, trials in valid.items()}
    most = scored.limit("turns", max(chain.from_iterable(turns.values()), default=1))
    longest = scored.limit("tokens", max(chain.from_iterable(written.values()), default=1))
    step = math.ceil(most / BARS)
    steps, powers = np.arange(0.5, most + 1 + step, step), np.geomspace(0.95, longest * 1.05, 2 * BARS)
    with drawing(path, 10, 1.3 + 1.15 * len(valid)) as figure:
        axes = figure.subplots(len(valid), 2, sharex="col", squeeze=False)
        for (model, trials), (left, right) in zip(valid.items(), axes, strict=True):
            _histogram(left, turns[model], trials, steps, attempts)
            _histogram(right, written[model], trials, powers, attempts)
            token_scale(right)
            left.set_ylabel(wrapped(model), rotation=0, ha="right", va="center")
        axes[0, 0].set_title("Turns of a trial", loc="left")
        axes[0, 1].set_title("Tokens written in a trial", loc="left")
        axes[0, 1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.05), frameon=False)


def _histogram(axis: Any, counts: Sequence[int], trials: Sequence[Trial], edges: Any, attempts: int) -> None:
    from matplotlib.ticker import MaxNLocator

    parts = [[n for n, trial in zip(counts, trials, strict=True) if trial.outcome == kind] for kind in ("pass", "fail")]
    bars, *_ = axis.hist(parts, edges, stacked=True, color=[COLOURS[2], SOFT], label=["pass", "fail"])
    axis.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    steps = (attempts * share for share in (0.25, 0.5, 1))  # so that most pictures have the same axis
    axis.set_ylim(0, next(most for most in steps if most >= max(map(max, bars))))
    if counts:
        axis.axvline(median(counts), color="black", linewidth=1.2, label="median")
