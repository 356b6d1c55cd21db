"""The pages above the stages: all runs, one run as a chain of stages, its recipe, several runs beside each other."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from etude.bench.trials import read_results, read_together
from etude.errors import UserError
from etude.progress import amount, duration
from etude.report.benchmark import Scored, points
from etude.report.ending import RESULTS, Ended, Measure, did, measures, read_ended, took
from etude.report.status import STALE, headline
from etude.web.actions import steering
from etude.web.html import Html, curve, element, join, link, note, pre, section, short, table
from etude.web.metrics import charts, metrics_of
from etude.web.rollouts import rollouts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.web.html import Content
    from etude.web.reading import Run, Shelf, Stage

OVER = {"done"}  # states in which nothing more comes
STATES = {
    "done": "✓ done", "running": "▶ running", "stopped": "‖ stopped", "waiting": "○ waiting", "damaged": "✗ damaged",
}  # fmt: skip
COMPARED = 6  # runs side by side


@dataclass(frozen=True)
class View:
    """A page without its frame. `crumbs`: the way to it, addresses from the top."""

    title: str
    body: Html
    crumbs: Sequence[tuple[str, str]] = ()
    run: str = ""  # whose news concern it; empty: all runs'
    live: bool = False  # news may come
    state: str = ""
    more: list[str] = field(default_factory=list)  # pages below it that an export needs


def crumbs_of(run: Run, *stages: Stage) -> list[tuple[str, str]]:
    """Return the way to a page below a run, or below a stage of it."""
    way = [(run.folder.name, f"run/{run.key}/index.html")]
    return way + [(each.name, f"{each.address}/index.html") for each in stages]


def page_of(
    stage: Stage, body: Html, title: str = "", way: Sequence[tuple[str, str]] = (), more: Sequence[str] = (), *, reading: bool = False,
) -> View:  # fmt: skip
    """Return the page of a stage, or with a title one below it. `way`: what lies between. `reading`: files are not all read yet."""
    above = [*crumbs_of(stage.run, stage), *way] if title else crumbs_of(stage.run)
    live = not title and (stage.state not in OVER or reading)
    return View(title or stage.name, body, above, stage.run.key, live, more=list(more))


def state_of(stage: Stage) -> Html:
    return element("span", STATES.get(stage.state, stage.state), cls=f"state {stage.state}")


def ended(stage: Stage) -> Ended | None:
    """Return what a finished stage wrote, RL's steps left out; None while it is not finished, or cannot be read."""
    record = stage.record if stage.state == "done" else None
    if record is None:
        return None
    if record.kind == "bench" and stage.has("trials.jsonl"):
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError, UserError):
            return stage.run.kept(f"{stage.path}/trials.jsonl", "measures", lambda: read_ended(stage.folder))
    return Ended(record, stage.json(RESULTS))


def measured(stage: Stage, before: Sequence[Stage]) -> list[Measure]:
    """Return what a finished stage measured, against the stages before it."""
    own = ended(stage)
    with contextlib.suppress(KeyError, TypeError, ValueError, IndexError, AttributeError):
        if own:
            return measures(own, [each for each in map(ended, before) if each])
    return []


def runs(shelf: Shelf) -> View:
    """Show all runs; several can be picked and compared."""
    found, rows = shelf.runs, []
    for run in found:
        name = link(f"run/{run.key}/index.html", run.folder.name)
        pick = element("input", type="checkbox", name="run", value=run.key, aria_label=f"compare {run.folder.name}")
        try:
            stages = run.stages
        except UserError as error:
            rows.append((pick, name, element("span", "✗ broken", cls="state damaged"), str(error), "", ""))
            continue
        states = {each.state: each for each in stages}
        now = next(
            (states[each] for each in ("running", "stopped", "damaged", "waiting", "done") if each in states), None
        )
        rows.append((pick, name, state_of(now) if now else Html(), _bar(stages), _cost(stages), _best(stages)))
    heads = ("compare", "run", "state", "stages", ">cost", "last measured")
    button = element("button", "Compare those picked")
    form = element("form", table(heads, rows, "runs"), button, action="compare.html", method="get")
    none = note("No run is here yet. Start one with: etude run recipes/quickstart.toml", "empty")
    body = section("", form if rows else none, live="runs")
    return View(
        "Runs",
        body,
        live=True,
        state=f"{len(found)} run{'s' * (len(found) != 1)} in {', '.join(map(str, shelf.folders))}",
    )


def _bar(stages: Sequence[Stage]) -> Html:
    """Return the stages as a row of boxes, each with its name and its state in words."""
    names = [(each.state, element("abbr", each.name[:3], title=f"{each.name}: {each.state}")) for each in stages]
    return element("ol", *(element("li", name, cls=state) for state, name in names), cls="bar")


def _spent(stages: Sequence[Stage]) -> tuple[float, float]:
    """Return the seconds of devices and the FLOPs that records count, and what a stage under way has written so far."""
    seconds = flops = 0.0
    for each in stages:
        if record := each.record:
            seconds, flops = seconds + (record.compute.device_seconds or 0), flops + record.compute.model_flops
        elif each.state in {"running", "stopped"}:
            seconds += metrics_of(each).seconds
    return seconds, flops


def _cost(stages: Sequence[Stage]) -> str:
    seconds, flops = _spent(stages)
    return f"{duration(seconds)}, {flops:.1e} FLOP" if seconds or flops else "–"


def _best(stages: Sequence[Stage]) -> str:
    for at, stage in reversed(list(enumerate(stages))):
        if stage.kind not in {"base", "release"} and (lines := measured(stage, stages[:at])):
            return f"{stage.name}: {in_words(lines[0])}"
    return "nothing measured yet"


def in_words(measure: Measure) -> str:
    return " ".join(part for part in (measure.what, measure.value, measure.change, measure.verdict) if part)


def run(run: Run) -> View:
    """Show one run: its chain of stages with state, cost and numbers, then the curves of what is under way or was last."""
    crumbs: list[tuple[str, str]] = []
    try:
        stages, status = run.stages, run.status
    except UserError as error:
        return View(run.folder.name, note(f"✗ This run cannot be shown: {error}", "warning"), crumbs, run.key)
    chain = element("ol", *(_link_of_chain(each, stages[:at]) for at, each in enumerate(stages)), cls="chain")
    pages = join(link("recipe.html", "Recipe"), " · ", link("family.html", "Family tree and licences"))
    parts = [section("", chain, element("p", pages), steering(run), live="chain")]
    parts += [_taught(each) for each in stages if each.kind == "rl" and each.state != "waiting"]
    parts += [_now(each) for each in stages if each.state in {"running", "stopped"} and each.kind != "rl"]
    more = [f"{quote(each.name)}/index.html" for each in stages if each.state != "waiting"]
    more += ["recipe.html", "family.html"]
    live = any(each.state not in OVER for each in stages)
    return View(run.folder.name, join(*parts), crumbs, run.key, live, headline(status), more)


def _link_of_chain(stage: Stage, before: Sequence[Stage]) -> Html:
    """Return one stage of the chain."""
    name: Content = link(f"{quote(stage.name)}/index.html", stage.name) if stage.state != "waiting" else stage.name
    lines = [element("li", words) for each in measured(stage, before)[:4] if (words := in_words(each))]
    record = stage.record if stage.state == "done" else None
    said = [element("p", line, cls="did") for line in f"{did(record)}{took(record)}".split("\n")] if record else None
    return element("li", element("h2", name), state_of(stage), said, _progress(stage), element("ul", *lines) if lines else None,
                   cls=f"link {stage.state}", id=f"stage-{stage.name}")  # fmt: skip


def _progress(stage: Stage) -> Html | None:
    """Return how far a stage under way has come."""
    now = stage.status.progress
    if stage.state not in {"running", "stopped"} or not now:
        return None
    with contextlib.suppress(KeyError, TypeError, ValueError):
        words = f"{now['label']}: {amount(now['done'], now['unit'])} of {amount(now['total'], now['unit'])}"
        left = f", {duration(now['seconds_left'])} left" if now.get("seconds_left") is not None else ""
        left = f", no news for {duration(now['age'])}" if now["age"] > STALE else left * (stage.state == "running")
        done, total = (short(now[name]).replace(",", "") for name in ("done", "total"))
        bar = element("progress", value=done, max=total, aria_label=words)
        return element("div", bar, element("p", words + left), cls="progress")
    return None


def _taught(stage: Stage) -> Html:
    """Return in a few lines what reinforcement learning did, and the way to it."""
    where = quote(stage.name)
    try:
        rollouts = rollouts_of(stage)
    except UserError as error:
        return section(f"{stage.name}: what taught the model", note(str(error), "empty"), live=f"taught-{where}")
    metrics = metrics_of(stage)
    lines = {panel: metrics.points(panel) for panel in ("reward", "solved", "best_of_group") if metrics.points(panel)}
    named = {name.replace("_", " "): each for name, each in lines.items()}
    drawn = curve("Reward and share solved", named) if named else None
    lead = f"{rollouts.trained} step{'s' * (rollouts.trained != 1)} trained, {rollouts.rollouts:,} rollouts scored. "
    way = link(f"{where}/index.html", f"{stage.name}: every step, group, rollout and token")
    return section(f"{stage.name}: what taught the model", note(join(lead, way)), drawn, live=f"taught-{where}")


def _now(stage: Stage) -> Html:
    """Return the first curves of what is under way."""
    curves = charts(metrics_of(stage), stage.kind, 3)
    return section(f"{stage.name}, as it goes", curves, live=f"now-{quote(stage.name)}")


def recipe(run: Run) -> View:
    """Show the resolved recipe of the last command."""
    with contextlib.suppress(OSError, UserError):
        text = pre(run.read("recipe.toml").decode(errors="replace"), 200_000)
        shown = section("", note("Resolved: every setting, defaults included."), text)
        return View("Recipe", shown, crumbs_of(run), run.key)
    return View("Recipe", note("This run has no recipe.toml that can be read.", "warning"), crumbs_of(run), run.key)


def flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Return nested settings as one table by dotted name."""
    if not isinstance(value, dict):
        return {prefix: str(value)}
    inner = [flat(each, f"{prefix}.{name}" if prefix else str(name)) for name, each in value.items()]
    return {key: text for each in inner for key, text in each.items()}


def compare(several: Sequence[Run]) -> View:
    """Show several runs beside each other: what differs in their recipes, their curves, their benchmarks."""
    if len(several) < 2:
        return View("Compare", note("Pick at least two runs on the page of all runs.", "empty"))
    chosen = several[:COMPARED]
    names = [each.folder.name if len({r.folder.name for r in chosen}) == len(chosen) else each.key for each in chosen]
    settings = [flat(each.recipe) for each in chosen]
    keys = dict.fromkeys(key for each in settings for key in each)
    rows = [(key, *(each.get(key, "–") for each in settings)) for key in keys]
    unlike = [row for row in rows if len(set(row[1:])) > 1]
    same = note(f"{len(rows) - len(unlike)} settings are the same in all.")
    dropped = note(f"Only the first {COMPARED} are shown.", "warning") if len(several) > COMPARED else None
    body = join(
        dropped, section("Recipes, where they differ", table(("setting", *names), unlike), same),
        section("Curves", element("div", *_overlaid(chosen, names), cls="charts")),
        section("What each measured", _side_by_side(chosen, names)),
        section("Benchmarks, on the same tasks", *_differences(chosen, names)),
    )  # fmt: skip
    return View("Compare " + ", ".join(names), body)


def _stages(run: Run) -> list[Stage]:
    with contextlib.suppress(UserError):
        return run.stages
    return []


def _overlaid(several: Sequence[Run], names: Sequence[str]) -> list[Html]:
    """Return the curves that at least two runs have, of stages of one name, over each other."""
    drawn = []
    wanted = {"loss": "", "reward": "", "solved": "percent", "best_of_group": "percent", "entropy": "", "kl": ""}
    stages = list(dict.fromkeys(stage.name for each in several for stage in _stages(each) if stage.state != "waiting"))
    for stage in stages:
        found = {
            name: own for name, each in zip(names, several, strict=True) for own in _stages(each) if own.name == stage
        }
        for column, look in wanted.items():
            lines = {name: points for name, each in found.items() if (points := metrics_of(each).points(column))}
            if len(lines) > 1:
                drawn.append(curve(f"{stage}: {column.replace('_', ' ')}", lines, look=look))
    return drawn or [note("No stage of the same name has numbers in two of them.", "empty")]


def _side_by_side(several: Sequence[Run], names: Sequence[str]) -> Html:
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for name, each in zip(names, several, strict=True):
        stages = _stages(each)
        for at, stage in enumerate(stages):
            for line in measured(stage, stages[:at]):
                said = " ".join(part for part in (line.value, line.change, line.verdict) if part)
                rows.setdefault((stage.name, line.what), {})[name] = said
    listed = [(*key, *(cells.get(name, "–") for name in names)) for key, cells in rows.items()]
    return table(("stage", "measured", *names), listed)


def _differences(several: Sequence[Run], names: Sequence[str]) -> list[Html]:
    """Return how far the benchmarks of the same name lie apart, in pairs of tasks, with 95 % intervals."""
    rows: list[tuple[str, str, str, Content]] = []
    for (one, run_one), (other, run_other) in combinations(zip(names, several, strict=True), 2):
        here = {each.name: each for each in _stages(run_one) if each.kind == "bench" and each.has("trials.jsonl")}
        for stage in (each for each in _stages(run_other) if each.name in here and each.has("trials.jsonl")):
            try:
                scored = Scored(read_together([here[stage.name].folder, stage.folder]))
            except UserError as error:
                rows.append((stage.name, f"{one} − {other}", str(error), ""))
                continue
            first, second = (_own_model(scored, each) for each in (here[stage.name], stage))
            apart = scored.apart(first, second)
            found = (f"{points(apart)} points", apart.tasks) if apart else ("no common tasks", "")
            rows.append((stage.name, f"{one} − {other}", *found))
    about = "Difference of avg@k in percentage points with its 95 % interval, on the tasks of both."
    return [note(about), table(("benchmark", "pair", "difference", ">tasks"), rows)]


def _own_model(scored: Scored, stage: Stage) -> str:
    """Return what the first model of a benchmark is called where several benchmarks are read together."""
    name = read_results(stage.folder).models[0]
    return name if name in scored.valid else f"{name} ({stage.folder})"
