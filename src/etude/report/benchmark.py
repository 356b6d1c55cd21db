"""The report of a benchmark: four axes, never one number; with intervals, and models compared on the same tasks.

The report's pictures: score against tokens, scores by group, and how long trials are.

The report's page: the blocks of etude.report.corpus and pictures, as Markdown and as HTML that needs no other file.
"""

from __future__ import annotations

import base64
import math
import textwrap
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from itertools import combinations
from statistics import median
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from etude.bench.axes import EFFICIENCY, INTERACTION, QUALITY, SCORE, TESTS, WRITTEN, Metric
from etude.bench.statistics import average, estimate, pass_all, pass_at
from etude.bench.trials import read_together
from etude.files import canonical_json, whole_file, write_text
from etude.report.bases import human
from etude.report.corpus import COLOURS, STYLE, Table, block_in_html, block_in_markdown, in_html, in_markdown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from etude.bench.statistics import Estimate
    from etude.bench.trials import Trial

    Scores = Mapping[str, Estimate | None]  # by model
    from collections.abc import Mapping

    from etude.bench.axes import Prices
    from etude.bench.statistics import Estimate, Statistic
    from etude.bench.trials import Results

    Line = tuple[str | float, ...]

MARKERS = "osD^vPX*"
SOFT = "#c3c9d0"
BARS = 30


def save(path: Path, draw: Callable[..., Figure], *data: Any) -> None:
    """Write a picture as PNG."""
    with mpl.rc_context(STYLE):
        draw(*data).savefig(path, format="png", dpi=150, metadata={"Software": None})


def wrapped(name: str, line: int = 26, lines: int = 2) -> str:
    """Return a name in a few lines; what is too long is cut in its middle, since versions stand at the end."""
    most = line * lines - lines
    name = name if len(name) <= most else f"{name[: most // 2]}…{name[-(most // 2) :]}"
    return "\n".join(textwrap.wrap(name, line))


def score_against_tokens(scores: Scores, tokens: Mapping[str, float]) -> Figure:
    """Draw what a score takes; the line joins the models that no other beats in both."""
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axis: Any = figure.subplots()
    known = {model: score for model, score in scores.items() if score}
    points = [(max(tokens[model], 1), 100 * score.value) for model, score in known.items()]
    for place, ((across, up), (model, score)) in enumerate(zip(points, known.items(), strict=True)):
        look = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)], "linestyle": ""}
        spread = [[up - 100 * score.low], [100 * score.high - up]]
        axis.errorbar(across, up, spread, label=wrapped(model), markersize=7, capsize=3, clip_on=False, **look)
    axis.plot(
        [tokens for tokens, _ in frontier(points)], [score for _, score in frontier(points)], color=SOFT, zorder=0
    )
    axis.set_ylim(0, max([5.0, *(108 * score.high for score in known.values())]))
    axis.margins(x=0.15)
    _in_tokens(axis)
    axis.set_title("Score against tokens: up and left is better", loc="left")
    axis.set_xlabel("tokens written in a trial, median")
    axis.set_ylabel("avg@k, %")
    axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, labelspacing=0.9)
    return figure


def _in_tokens(axis: Any) -> None:
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda count, _: human(count)))


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other one beats with fewer tokens and at least the score, from left to right."""
    best: list[tuple[float, float]] = []
    for tokens, score in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or score > best[-1][1]:
            best.append((tokens, score))
    return best


def by_group(groups: Mapping[str, Scores], title: str) -> Figure:
    """Draw the scores of each group with their intervals as a table of colours, the easiest group first: there may be many."""
    models = list(next(iter(groups.values())))
    order = sorted(groups.items(), key=lambda group: -sum(score.value for score in group[1].values() if score))
    figure = Figure(figsize=(max(10, 2.8 + 1.3 * len(models)), 1.5 + 0.29 * len(groups)), layout="constrained")
    axis: Any = figure.subplots()
    axis.imshow(
        [[score.value if score else 0 for score in row.values()] for _, row in order],
        "YlGnBu",
        vmin=0,
        vmax=1,
        aspect="auto",
    )
    for down, (_, row) in enumerate(order):
        for across, score in enumerate(row.values()):
            text = f"{100 * score.value:.0f}  [{100 * score.low:.0f}–{100 * score.high:.0f}]" if score else "–"
            colour = "white" if score and score.value > 0.55 else "black"
            axis.text(across, down, text, ha="center", va="center", color=colour, fontsize=8.5)
    tasks = [max((score.tasks for score in row.values() if score), default=0) for _, row in order]
    axis.set_yticks(
        range(len(order)), [f"{wrapped(name, 30, 1)}  ({count})" for (name, _), count in zip(order, tasks, strict=True)]
    )
    axis.set_xticks(range(len(models)), [wrapped(model, 18, 3) for model in models], fontsize=8.5)
    axis.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axis.spines[:].set_visible(False)
    figure.suptitle(f"{title}: avg@k in % [95% interval]  (tasks)", fontsize=10, fontweight="bold", x=0.02, ha="left")
    return figure


def histograms(valid: Mapping[str, Sequence[Trial]]) -> Figure:
    """Draw how many turns and tokens trials take, a line a model, fails upon passes."""
    figure = Figure(figsize=(10, 1.3 + 1.15 * len(valid)), layout="constrained")
    axes = figure.subplots(len(valid), 2, sharex="col", squeeze=False)
    most = max((trial.turns for trials in valid.values() for trial in trials), default=1)
    tokens = [max(trial.tokens.get("written", 0), 1) for trials in valid.values() for trial in trials] or [1]
    steps = np.arange(0.5, most + 1 + -(-most // BARS), -(-most // BARS))
    for (model, trials), (left, right) in zip(valid.items(), axes, strict=True):
        _histogram(left, [trial.turns for trial in trials], trials, steps)
        written = [max(trial.tokens.get("written", 0), 1) for trial in trials]
        _histogram(right, written, trials, np.geomspace(min(tokens) * 0.95, max(tokens) * 1.05, BARS))
        _in_tokens(right)
        left.set_ylabel(wrapped(model), rotation=0, ha="right", va="center")
    axes[0, 0].set_title("Turns of a trial", loc="left")
    axes[0, 1].set_title("Tokens written in a trial", loc="left")
    axes[0, 1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.05), frameon=False)
    return figure


def _histogram(axis: Any, counts: Sequence[int], trials: Sequence[Trial], edges: Any) -> None:
    parts = [[n for n, trial in zip(counts, trials, strict=True) if trial.outcome == kind] for kind in ("pass", "fail")]
    axis.hist(parts, edges, stacked=True, color=[COLOURS[2], SOFT], label=["pass", "fail"])
    axis.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    if counts:
        axis.axvline(median(counts), color="black", linewidth=1.2, label="median")


class Picture(NamedTuple):
    """A PNG beside the page, and what it shows."""

    file: str
    about: str


WIDE = "body { max-width: 92rem; } td:first-child { min-width: 12rem; }"  # a column a model
Page = dict[str, list[str | Table | Picture]]  # by heading


def markdown(title: str, page: Page) -> str:
    """Return the page as Markdown; pictures lie beside it."""
    parts = [f"# {title}"]
    for head, blocks in page.items():
        shown = (
            f"![{in_markdown(each.about)}]({each.file})" if isinstance(each, Picture) else block_in_markdown(each)
            for each in blocks
        )
        parts += [f"## {head}", *shown]
    return "\n\n".join(parts) + "\n"


def html_page(title: str, page: Page, lead: Picture, pictures: Mapping[str, bytes]) -> str:
    """Return the page as HTML; the template shows the `lead` picture after the first section."""
    template = resources.files("etude.report").joinpath("page.html").read_text(encoding="utf-8")
    template = template.replace("</style>", f"{WIDE}\n</style>")
    encoded = {file: base64.b64encode(content).decode() for file, content in pictures.items()}
    sections = []
    for head, blocks in page.items():
        shown = (
            f'<figure class="wide"><img alt="{in_html(each.about)}" src="data:image/png;base64,{encoded[each.file]}"></figure>'
            if isinstance(each, Picture) else block_in_html(each)
            for each in blocks if each != lead
        )  # fmt: skip
        sections.append("\n".join([f"<h2>{head}</h2>", *shown]))
    told = {"title": title, "pictured": in_html(lead.about), "picture": encoded[lead.file]}
    return Template(template).substitute(told, answer=sections[0], more="\n".join(sections[1:]))


TITLE = "What do these agents do with these tasks?"
LEAD = Picture(
    "score_tokens.png", "Score against the median of tokens written; the line joins those that no other beats"
)
HEAD = 20  # characters of a model's name over a column
FOUND = {"run": "tests were run", "known": "the same change was scored before", "idle": "the code was left as it was"}
TAKEN_OVER = (
    "A change that was scored before is not tested again, and code left as it was is known to fail. So a test that ends now this way, "
    "now that, may look steadier here than it is; oracle and noop are tested every time."
)
CHANCE = 20  # comparisons among which one is expected to look sure and not be


@dataclass(frozen=True)
class Scored:
    """Results, and the numbers the report takes from them."""

    results: Results
    seed: int

    @cached_property
    def valid(self) -> dict[str, list[Trial]]:
        """Return the trials that say something of a model, best model first."""
        found: dict[str, list[Trial]] = {name: [] for name in self.results.models}
        for trial in self.results.trials:
            if trial.outcome != "invalid":
                found[trial.model].append(trial)
        share = {model: sum(map(_passes, trials)) / max(len(trials), 1) for model, trials in found.items()}
        return {model: found[model] for model in sorted(found, key=lambda model: (-share[model], model))}

    @cached_property
    def heads(self) -> list[str]:
        """Return a head for a column a model, short enough for six of them where that leaves names apart."""
        names = [name if len(name) <= HEAD else f"{name[: HEAD // 2]}…{name[-HEAD // 2 :]}" for name in self.valid]
        return [f">{name}" for name in (names if len(set(names)) == len(names) else self.valid)]

    @cached_property
    def by(self) -> dict[str, dict[str, dict[str, Estimate | None]]]:
        """Return the score by field, group and model."""
        return {field: {group: {model: self.of([trial for trial in trials if getattr(trial, field) == group])
                                for model, trials in self.valid.items()}
                        for group in sorted({getattr(trial, field) for trial in self.results.trials})}
                for field in ("category", "generator", "style", "package")}  # fmt: skip

    @cached_property
    def scores(self) -> dict[str, Estimate | None]:
        """Return avg@k of each model."""
        return {model: self.of(trials) for model, trials in self.valid.items()}

    def of(
        self, trials: Sequence[Trial], metric: Metric = SCORE, statistic: Statistic = average, least: int = 1
    ) -> Estimate | None:
        """Return a metric of some trials."""
        found = metric.rows(trials)
        return estimate(found, statistic, rate=metric.rate, signed=metric.signed, least=least, seed=self.seed)

    def apart(self, one: str, other: str, metric: Metric = SCORE) -> Estimate | None:
        """Return by how much one model is above another on the tasks of both."""
        rows, against = (metric.rows(self.valid[model]) for model in (one, other))
        return estimate(rows, against=against, rate=metric.rate, seed=self.seed)


def write_report(folders: Sequence[Path], target: Path, prices: Prices | None = None, seed: int = 0) -> list[str]:
    """Write report.md, report.html and pictures on one folder of trials, or on several to be compared; return its first lines."""
    scored = Scored(read_together(folders), seed)
    tokens = {
        model: median([trial.tokens.get("written", 0) for trial in trials] or [0])
        for model, trials in scored.valid.items()
    }
    drawn: dict[str, tuple[Any, ...]] = {
        LEAD.file: (score_against_tokens, scored.scores, tokens),
        "by_category.png": (by_group, scored.by["category"], "Score by category"),
        "by_package.png": (by_group, scored.by["package"], "Score by package"),
        "histograms.png": (histograms, scored.valid),
    }
    for name, parts in drawn.items():
        with whole_file(target / name) as beside:
            save(beside, *parts)
    said = verdict(scored)
    page = _page(scored, prices, said)
    write_text(target / "report.md", markdown(TITLE, page))
    pictures = {name: (target / name).read_bytes() for name in drawn}
    write_text(target / "report.html", html_page(TITLE, page, LEAD, pictures))
    return said


def verdict(scored: Scored) -> list[str]:
    """Return what was found, a line a model; whether the first is surely ahead of the second; and what to be wary of."""
    whole = int(scored.results.header.about.get("tasks", 0))
    lines = []
    for model, score in scored.scores.items():
        short = f", of {whole} in the set" * (score.tasks < whole) if score else ""
        lines.append(
            f"{model}: {percent(score)} of {score.tasks} tasks{short}" if score else f"{model}: no valid trial"
        )
    one, other, *_ = [*scored.valid, None]
    if other and (apart := scored.apart(one, other)):
        told = f"{points(apart)} points, {_sure(apart)}"
        lines.append(f"{one} against {other} on the {apart.tasks} tasks of both: {told}")
    if rules := scored.results.differing:
        lines.append(f"not the same for all: {', '.join(rules)}")
    return lines


def _page(scored: Scored, prices: Prices | None, said: Sequence[str]) -> Page:
    header, k = scored.results.header, scored.results.attempts
    costs = [Metric("cost ↓", lambda trial: prices.cost(trial.tokens))] if prices else []
    return {
        "In short": [*(f"{line}." for line in said), LEAD],
        "Correctness": [
            f"avg@k: passes per trial, the mean over tasks. pass@{k}: one of {k} trials passes; pass^{k}: all do; of tasks with {k} "
            "valid trials. In brackets 95% intervals, by drawing repositories, tasks and trials anew. Invalid trials, in which the "
            "machinery failed, are left out of all numbers.", _correctness(scored, k)],
        **_pairs(scored),
        "Code quality": ["Of trials that changed something. Arrows say which way is better.", _table(scored, QUALITY)],
        "Efficiency": ["Of all valid trials, means over tasks.", _table(scored, [*EFFICIENCY, *costs]),
                       Picture("histograms.png", "Turns and tokens of trials, passes and fails")],
        "Interaction": ["Read from traces by fixed rules with limits: compare models by them.", _table(scored, INTERACTION)],
        "By category": [Picture("by_category.png", "Score by category"), _grouped(scored, "category")],
        "By generator and style of prompt": [_grouped(scored, "generator"), _grouped(scored, "style")],
        "By package": [Picture("by_package.png", "Score by package"), _grouped(scored, "package")],
        "How trials ended": [_endings(scored), TAKEN_OVER, _found(scored)],
        "The tasks": [
            "To compare: the third version of CursorBench has a median of 181 lines changed and of 390 characters of a prompt.",
            Table(("the set", ">"), [(name, f"{value:,.4g}") for name, value in header.about.items()])],
        "Made with": [Table(("what", "which"), [
            ("task set", header.tasks), ("harness", header.harness), ("sampling", canonical_json(header.sampling)),
            ("integrity", canonical_json(header.integrity)), ("seed of the bootstrap", str(scored.seed))])],
    }  # fmt: skip


def _correctness(scored: Scored, k: int) -> Table:
    listed: list[Line] = []
    for model, trials in scored.valid.items():
        one, every = (scored.of(trials, SCORE, statistic, k) for statistic in (pass_at(k), pass_all(k)))
        cells = [percent(each) for each in (scored.scores[model], one, every, scored.of(trials, TESTS))]
        invalid = sum(trial.model == model for trial in scored.results.trials) - len(trials)
        listed.append(
            (model, *cells, len({trial.task for trial in trials}), one.tasks if one else 0, len(trials), invalid)
        )
    heads = (
        ">avg@k",
        f">pass@{k}",
        f">pass^{k}",
        ">tests passed",
        ">tasks",
        f">with {k} valid",
        ">valid trials",
        ">invalid",
    )
    return Table(("model", *heads), listed)


def _pairs(scored: Scored) -> Page:
    listed: list[Line] = []
    for one, other in combinations(scored.valid, 2):
        score, tokens = scored.apart(one, other), scored.apart(one, other, WRITTEN)
        sure = _sure(score) if score else "no common tasks"
        listed.append((f"{one} − {other}", points(score), number(tokens), score.tasks if score else 0, sure))
    told = "On tasks that both have tried, so that what is hard for both cancels out."
    if 2 * len(listed) > CHANCE:
        told += f" Of {len(listed)} comparisons, about one in {CHANCE} looks sure by chance."
    heads = ("pair", ">avg@k, points", ">tokens written", ">common tasks", "the sign of the score is")
    return {"Two by two": [told, Table(heads, listed)]} if listed else {}


def _table(scored: Scored, metrics: Sequence[Metric]) -> Table:
    """Return a table with a line a metric and a column a model."""
    listed: list[Line] = []
    for metric in metrics:
        found = [scored.of(trials, metric) for trials in scored.valid.values()]
        listed.append((metric.name, *(percent(each) if metric.rate else number(each) for each in found)))
    return Table(("", *scored.heads), listed)


def _grouped(scored: Scored, field: str) -> Table:
    listed: list[Line] = [
        (group, max((each.tasks for each in found.values() if each), default=0), *map(percent, found.values()))
        for group, found in scored.by[field].items()
    ]
    return Table((field, ">tasks", *scored.heads), listed)


def _endings(scored: Scored) -> Table:
    ways = Counter((each.outcome, each.why or each.stop, each.model) for each in scored.results.trials)
    kinds = sorted({way[:2] for way in ways})
    listed: list[Line] = [(*kind, *(ways[*kind, model] for model in scored.valid)) for kind in kinds]
    return Table(("outcome", "how it ended", *scored.heads), listed)


def _found(scored: Scored) -> Table:
    ways: Counter[tuple[str, str]] = Counter(
        (trial.how, model) for model, trials in scored.valid.items() for trial in trials
    )
    listed: list[Line] = [(said, *(ways[way, model] for model in scored.valid)) for way, said in FOUND.items()]
    return Table(("how the score was found", *scored.heads), listed)


def _passes(trial: Trial) -> bool:
    return trial.outcome == "pass"


def _sure(apart: Estimate) -> str:
    return "sure" if apart.low > 0 or apart.high < 0 else "within the noise"


def percent(found: Estimate | None) -> str:
    """Return a share with its interval."""
    return f"{found.value:.1%} [{found.low * 100:.1f}–{found.high * 100:.1f}]" if found else "–"


def points(found: Estimate | None) -> str:
    """Return a difference of shares, in points, with its interval."""
    return f"{found.value * 100:+.1f} [{found.low * 100:+.1f}, {found.high * 100:+.1f}]" if found else "–"


def number(found: Estimate | None) -> str:
    """Return a number with its interval, as many digits as the interval is worth."""
    if found is None:
        return "–"
    most = max(abs(found.low), abs(found.high))
    digits = max(0, 2 - math.floor(math.log10(most))) if most else 0
    shown = (f"{'-' * (x < 0)}{human(abs(x))}" if most >= 1000 else f"{x:.{digits}f}" for x in found[:3])
    return "{} [{}, {}]".format(*shown)
