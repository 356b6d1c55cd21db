"""How a run ends on the terminal: what each stage changed and by how much, RL's reward, the family tree, what to try next.

All of it is read from what the stages wrote down. What a stage did not measure is said not to be measured, and a change counts
as better or worse only where its 95 % interval says so.
"""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path, PurePath
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from etude.agent.tools import ToolSettings
from etude.bench.trials import read_results
from etude.errors import UserError
from etude.files import read_json
from etude.lineage.compute import compute_shares, percent
from etude.lineage.record import Lineage, Record, load_record
from etude.models.bases import ancestors
from etude.report import page
from etude.report.page import human
from etude.report.rl import steps_of
from etude.rl.metrics import ENOUGH, smooth
from etude.rl.view import percent as share
from etude.run.folder import RELEASE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


MOST = 5  # measures of a stage before the rest is left to its report
RESULTS = "results.json"
SHIPPED = {"quick", "train", "bench"}  # sets of tasks in recipes/tasks
PICKED = " *"
WIDE, HIGH = 60, 6  # characters of a curve
BLOCKS = " ▁▂▃▄▅▆▇█"
PLAIN = str.maketrans({**dict.fromkeys("▁▂▃▄", "."), **dict.fromkeys("▅▆▇█", "#"), **dict.fromkeys("┤│", "|"), "└": "`",
                       "─": "-", "–": "-", "→": "->", "±": "+-", "×": "x", "…": "."})  # fmt: skip
STYLES = {"better": "green", "faster": "green", "worse": "red", "slower": "red"}
DID = {
    "data": "built a corpus", "pretrain": "learnt from nothing", "cpt": "learnt a domain",
    "extend": "longer context", "mtp": "added MTP heads", "sft": "learnt to answer", "rl": "learnt by trying",
    "merge": "merged models", "compare": "compared models", "bench": "tried tasks", "release": "signed release",
}  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """A finished stage: its record, its results.json (None: it has none), RL's steps, a benchmark's valid trials of its own model."""

    record: Record
    results: Any = None
    rewards: Sequence[tuple[int, float, float]] = field(default=())  # step, reward, episodes
    trials: Sequence[tuple[str, str, float]] = field(default=())  # package, task, solved


@dataclass(frozen=True)
class Measure:
    """One line of what changed."""

    what: str
    value: str
    change: str = ""
    verdict: str = ""


def verdict(change: float, margin: float | None, *, lower_is_better: bool = False) -> str:
    """Return a word for a change: better, worse or unclear; without an interval only its direction."""
    if margin is None:
        return "level" if not change else "higher" if change > 0 else "lower"
    if abs(change) <= margin:
        return "unclear"
    return "better" if (change < 0) == lower_is_better else "worse"


def measures(stage: Ended, before: Sequence[Ended] = ()) -> list[Measure]:
    """Return what a stage measured; `before`: the stages before it, for what is measured more than once."""
    record, summary = stage.record, stage.record.summary
    match record.kind:
        case "base":
            return [Measure("", "")]
        case "data":
            return [Measure("held out", f"{human(*_floats(record, 'heldout_tokens'))} tokens")]
        case "rl":
            return _marked(record, [_first_to_last("reward", record), _first_to_last("solved", record)])
        case "bench":
            return _marked(record, list(_bench(stage, [each for each in before if each.record.kind == "bench"])))
        case "compare":
            return [Measure("best", str(summary["best"]), f"{summary['bits_per_byte']:.3f} bits/byte")]
        case "release":
            passed, _, left = str(summary["verified"]).partition(" checks")
            return [Measure("audit: from", str(summary["base"])), Measure("checks", passed, left.removeprefix(", "))]
    lines = list(_trained(stage.results)) if isinstance(stage.results, dict) else []
    lines[MOST:] = [Measure(f"{len(lines) - MOST} more", "in its report")] if len(lines) > MOST else []
    return lines or [Measure("not measured", "none held out" if stage.results else "")]


def _marked(record: Record, lines: list[Measure]) -> list[Measure]:
    """Mark shares of tasks that a recipe has picked: they say nothing of the others of the set."""
    picked = PICKED * bool(record.recipe.stage.get("only"))
    return [replace(line, what=f"{line.what}{picked}") if line.what == "solved" else line for line in lines]


def _first_to_last(name: str, record: Record) -> Measure:
    if record.summary[f"{name}_last"] is None:
        return Measure(name, "not measured", "too few episodes")
    first, last = _floats(record, f"{name}_first", f"{name}_last")
    if name == "solved":
        return _points(name, first, last)
    return Measure(name, f"{first:.3f} → {last:.3f}", f"{last - first:+.3f}", verdict(last - first, None))


def _points(what: str, before: float, after: float) -> Measure:
    """Return the change of a share whose interval is not known."""
    change = after - before
    return Measure(what, f"{share(before)} → {share(after)}", f"{100 * change:+.3g} points", verdict(change, None))


def _trained(results: dict[str, Any]) -> Iterator[Measure]:
    """Yield what a training measured: bits per byte by domain, retrieval, acceptance rate and speed of MTP heads."""
    for row in results.get("domains", []):
        margin = "" if row["margin"] is None else f" ±{row['margin']:.3f}"
        said = verdict(row["change"], row["margin"], lower_is_better=True)
        yield Measure(row["domain"], f"{row['before']:.3f} → {row['after']:.3f}", f"{row['change']:+.3f}{margin}", said)
    for length, after in results.get("long", {}).get("child", {}).get("retrieval", {}).items():
        first = results["long"]["parent"]["retrieval"][length]
        what = f"found at {human(int(length))}"
        yield _rate(what, after["exact"], after["interval"], first["exact"], first["interval"])
    if results.get("domains"):
        return  # of MTP heads trained jointly the report tells
    for row in results.get("acceptance", []):
        if row["depth"] == 1:
            yield _points(f"accepted, {row['domain']}", row["before"], row["after"])
    if speed := results.get("speed"):
        gain = speed["guessing"] / speed["plain"]
        said = "faster" if gain > 1 else "slower"
        yield Measure("tokens/step", f"1 → {speed['tokens_a_round']:.2f}", f"{gain:.2f}× speed", said)


def _rate(
    what: str, value: float, interval: Sequence[float], old: float | None = None, old_interval: Sequence[float] = (0, 1)
) -> Measure:
    """Return a rate with its interval; against an older one, if there is one: a change only where intervals lie apart."""
    span = f"({100 * interval[0]:.0f}–{100 * interval[1]:.0f}%)"
    if old is None:
        return Measure(what, share(value), span)
    apart = interval[0] > old_interval[1] or interval[1] < old_interval[0]
    said = verdict(value - old, 0.0) if apart else "unclear"
    return Measure(what, f"{share(old)} → {share(value)}", f"{100 * (value - old):+.0f} {span}", said)


def _bench(stage: Ended, earlier: Sequence[Ended]) -> Iterator[Measure]:
    """Yield solve rate and valid calls, against the last benchmark before it that asked the same: its tasks, in pairs."""
    summary, asked = stage.record.summary, _asked(stage.record)
    if summary.get("solved") is None:
        yield Measure("not measured", "no valid trial")
        return
    solved, low, high, calls = _floats(stage.record, "solved", "solved_low", "solved_high", "valid_calls")
    old = next((each for each in reversed(earlier) if _asked(each.record) == asked and each.trials), None)
    gain = None
    if old:
        from etude.bench.statistics import estimate  # scipy: `etude status` must not wait for it

        gain = estimate(stage.trials, against=old.trials)
    if old is None or gain is None:
        yield from (_rate("solved", solved, (low, high)), Measure("valid calls", share(calls)))
    else:
        clear = "unclear" if gain.low <= 0 <= gain.high else verdict(gain.value, 0.0)
        change = f"{100 * gain.value:+.0f} [{100 * gain.low:.0f}, {100 * gain.high:.0f}]"
        before, called = _floats(old.record, "solved", "valid_calls")
        yield Measure("solved", f"{share(before)} → {share(solved)}", change, clear)
        yield _points("valid calls", called, calls)
    if summary.get("invalid"):
        yield Measure("left out", f"{summary['invalid']} invalid")
    for key, value in summary.items():
        if key.startswith("solved/") and value is not None:
            yield Measure(key.removeprefix("solved/"), f"{share(float(value))} solved")


def _floats(record: Record, *names: str) -> list[float]:
    return [float(record.summary[name] or 0) for name in names]


def _asked(record: Record) -> tuple[list[str], dict[str, Any]]:
    """Return the tasks and the settings that decide what a benchmark measures."""
    without = {"tasks", "against", "concurrency", "device"}
    return [use.digest for use in record.data], {k: v for k, v in record.recipe.stage.items() if k not in without}


def in_short(stage: Ended, before: Sequence[Ended] = ()) -> str:
    """Return how much a stage did, and the first thing it measured, in one line."""
    try:
        first = measures(stage, before)[0]
    except (KeyError, TypeError, ValueError, IndexError):  # of another version of Etude
        return ""
    measured = " ".join(part for part in (first.what, first.value, first.change, first.verdict) if part)
    return "; ".join(part for part in (did(stage.record).replace("\n", ", "), measured) if part)


def write_overview(run: Path, name: str, stages: Sequence[Ended]) -> None:
    """Write the run's own page: what each stage measured, and the way to its report."""
    rows = []
    for at, stage in enumerate(stages):
        about = (stage.record.stage, did(stage.record).replace("\n", ", "))
        for each in measures(stage, stages[:at]):
            rows.append((*about, each.what, each.value, each.change, each.verdict))
            about = ("", "")
    heads = ("stage", "what it did", "measured", "before → after", "change", "")
    links = []
    for record in (stage.record for stage in stages):
        file = next((file for file in ("report.html", "report.md") if file in record.outputs), None)
        links += [page.Link(record.stage, f"{record.stage}/{file}")] if file else []
    contents: page.Page = {"": [page.Table(heads, rows), footnote(stages)], "Reports": [*links]}
    page.write_page(run, f"{name}: what did each stage change?", contents)


def took(record: Record) -> str:
    """Return how long a stage worked, in a short line of its own; with interruptions, as far as its device did."""
    if record.kind == "base":
        return ""  # fetching it is not what a run is about
    began, ended = map(datetime.fromisoformat, (record.started, record.finished))
    seconds = (ended - began).total_seconds() if record.sessions == 1 else record.compute.device_seconds or 0.0
    if seconds < 100:
        return f"\n{seconds:.0f} s"
    return f"\n{seconds / 60:.0f} min" if seconds < 6000 else f"\n{seconds / 3600:.1f} h"


def did(record: Record) -> str:
    """Return what a stage did and how much of it, a short line each."""
    if record.kind == "base":
        return f"from {record.summary['base']}"
    return "\n".join(part for part in (DID.get(record.kind, record.kind), _amount(record)) if part)


def _amount(record: Record) -> str:
    summary = record.summary
    match record.kind:
        case "rl":
            return f"{summary['episodes']:,} episodes"
        case "bench":
            return f"{summary['trials']} trials"
        case "merge":
            return f"{summary['method']} of {summary['models']}"
        case "release":
            return str(summary["licences"])
    return f"{human(*_floats(record, 'tokens'))} tokens" if summary.get("tokens") else ""


def footnote(stages: Sequence[Ended]) -> str:
    """Return the notes that explain the rows of the table."""
    trained = [stage.results for stage in stages if isinstance(stage.results, dict)]
    domains = list(dict.fromkeys(row["domain"] for results in trained for row in results.get("domains", [])))
    named = ", ".join(domains[:MOST]) + ", …" * (len(domains) > MOST)
    kinds = {stage.record.kind for stage in stages}
    picked = any(stage.record.recipe.stage.get("only") for stage in stages)
    packages = {len({package for package, *_ in each.trials}) for each in stages}
    notes = {
        f"{named}: bits per byte of held-out text, lower is better": bool(domains),
        "accepted: expected acceptance rate of the first draft token": "mtp" in kinds,
        f"{PICKED.strip()}: only of the tasks that the recipe picked (`only`), not of the whole set": picked,
        f"rl: means of the first and the last tenth of the episodes ({ENOUGH} at least)": "rl" in kinds,
        "solved: two packages prove next to nothing": 2 in packages,
        "± and (low–high), [low, high] of a change: 95 % intervals; unclear: within them; higher, lower, level: none is known": True,
    }
    return ". ".join(note for note, there in notes.items() if there) + "."


def curve(values: Sequence[float], first: int, last: int, wide: int = WIDE, high: int = HIGH) -> list[str]:
    """Draw values as columns from the least to the greatest; below them, the numbers of the first and the last."""
    size = len(values)
    columns = wide // size * size or wide  # each value as wide as the others, or several in a column
    starts = [at * size // columns for at in range(columns + 1)]
    means = [fmean(values[a : max(a + 1, b)]) for a, b in pairwise(starts)]
    low, top, steps = min(means), max(means), len(BLOCKS) - 1
    scale = (high * steps - 1) / (top - low) if top > low else 0.0
    levels = [1 + round((mean - low) * scale) for mean in means]
    labels = [f"{top:.3f}" if top > low else "", *[""] * (high - 2), f"{low:.3f}"]
    room = max(map(len, labels))
    lines = []
    for row, label in enumerate(labels):
        floor = steps * (high - 1 - row)
        drawn = "".join(BLOCKS[min(max(level - floor, 0), steps)] for level in levels)
        lines.append(f"{label:>{room}} {'┤' if label else '│'}{drawn}".rstrip())
    ends = f"{first}{last:>{columns - len(str(first))}}" if last != first else str(first)
    return [*lines, f"{'':>{room}} └{'─' * columns}", f"{'':>{room}}  {ends}"]


def tree(lineage: Lineage) -> list[str]:
    """Draw the tree, the oldest ancestor first; what else went into a model stands behind it."""
    record, lines = lineage.records[lineage.head], list[str]()
    while True:
        above = next((edge for edge in record.parents if edge.role == "weights" and edge.record), None)
        others = (edge for edge in record.parents if edge is not above and edge.role != "compared")
        lines.append(" + ".join([_person(record), *(f"{edge.name} ({edge.role})" for edge in others)]))
        if above is None or above.record is None:
            break
        record = lineage.records[above.record]
    return [f"{'   ' * (depth - 1)}{'└─ ' * (depth > 0)}{line}" for depth, line in enumerate(reversed(lines))]


def _person(record: Record) -> str:
    if record.origin:
        licences = sorted({each.licence or "unknown licence" for each in record.licences}) or ["no licence file"]
        return f"{record.origin.name} (base), {', '.join(licences)}"
    made = [f"{human(record.compute.tokens)} tokens"] if record.compute.tokens else []
    named = [use.name for use in record.data]
    read = [", ".join(named[:2]) + ", …" * (len(named) > 2)] if named else []
    return ": ".join([record.stage, *[" from ".join(made + read)][: len(made + read)]])


def own_share(lineage: Lineage) -> str:
    """Return how much compute is the makers' own."""
    compute = compute_shares(lineage, ancestors())
    own = compute.shares[0].own_share if compute.bases else None
    part = "" if own is None else f"at most {percent(own.high)}" if own.unknown else percent(own.value)
    return f"own compute {compute.own.value:.1e} FLOP" + f", {part} of all in it" * bool(part)


def next_steps(run: Path, stages: Sequence[Ended]) -> list[tuple[str, str]]:
    """Return three things to try, each with its command, that fit what the run has made."""
    kinds = {stage.record.kind: stage.record for stage in stages}
    made = next(stage.record for stage in reversed(stages) if stage.record.weights)
    where = shlex.quote(str(run / made.stage))
    steps = [("talk to it: an endpoint like OpenAI's, on port 8000", f"etude serve {where}")]
    if learnt := kinds.get("rl") or kinds.get("sft"):
        settings = learnt.recipe.stage
        tools = (settings.get("tools") or settings.get("demos") or {}).get("tools")
        option = f" --tools {','.join(tools)}" if tools and tools != ToolSettings().tools else ""
        steps = [("let it work on a copy of this folder; nothing changes before your yes",
                  f'etude agent "the tests fail; find out why" --model {where}{option}')]  # fmt: skip
    if released := kinds.get("release"):
        folder = shlex.quote(str(run / released.stage / RELEASE))
        steps.append(("check the release as those who receive it would", f"etude verify {folder}"))
    sets = [str(kinds[kind].recipe.stage.get("tasks", "quick")) for kind in ("rl", "bench") if kind in kinds]
    if sets and all(PurePath(name).stem in SHIPPED for name in sets):  # not who has tasks of their own
        words = "teach it your repository: say in tasks.toml where it is (docs/your-own-agent.md)"
        steps.append((words, "etude tasks make tasks.toml"))
    base = next((stage.record.origin.name for stage in stages if stage.record.origin), "sprout")
    return [
        *steps,
        ("see where it comes from, and that its weights are those recorded", f"etude lineage show {where} --verify"),
        ("hold it against its base on your own code", f"etude compare {shlex.quote(base)} {where}/model --on ."),
    ][:3]


def screen(stages: Sequence[Ended], lineage: Lineage, *, wide: int, plain: bool = False) -> RenderableType:
    """Return table, curve and tree for a terminal of so many columns; `plain`: one that can show no more than ASCII."""

    def say(text: str, style: str = "") -> Text:
        return Text(text.translate(PLAIN) if plain else text, style)

    curves = ["\n".join(["", *_reward(stage, min(WIDE, wide - 10))]) for stage in stages if stage.rewards]
    family = "\n".join(["", f"family tree: {own_share(lineage)}", *tree(lineage)])
    return Group(_table(stages, say), say(footnote(stages), "dim"), *map(say, [*curves, family]))


def _table(stages: Sequence[Ended], say: Callable[..., Text]) -> Table:
    table = Table("stage", "what it did", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("measured", "before → after", "change", ""):
        table.add_column(say(heading), no_wrap=True, overflow="crop")
    for at, stage in enumerate(stages):
        lines = measures(stage, stages[:at])
        cells = [say("\n".join(getattr(each, name) for each in lines)) for name in ("what", "value", "change")]
        said = Text("\n").join(say(each.verdict, STYLES.get(each.verdict, "dim")) for each in lines)
        name = Text.assemble(say(stage.record.stage, "bold"), say(took(stage.record), "dim"))
        table.add_row(name, say(did(stage.record)), *cells, said)
    return table


def _reward(stage: Ended, wide: int) -> list[str]:
    rewards, name = [reward for _, reward, _ in stage.rewards], stage.record.stage
    if min(rewards) == max(rewards):
        return [f"reward of {name}: {rewards[0]:.3f} at every step there was ({len(rewards)}), so there is no curve"]
    reach = len(rewards) // 20
    means = smooth([(reward, episodes) for _, reward, episodes in stage.rewards], reach)
    title = f"reward of {name} by step" + f", moving mean of {2 * reach + 1} steps" * (reach > 0)
    return [title, *curve(means, stage.rewards[0][0], stage.rewards[-1][0], wide)]


def read_all(run: Path, names: Iterable[str]) -> list[Ended]:
    """Read the finished stages of a run; one whose files cannot be read is left out."""
    stages = []
    for name in names:
        with contextlib.suppress(OSError, ValueError, KeyError, UserError):
            stages.append(read_ended(run / name))
    return stages


def read_ended(folder: Path) -> Ended:
    """Read what a finished stage wrote."""
    record, results = load_record(folder), folder / RESULTS
    steps = steps_of(folder) if record.kind == "rl" else []
    rewards = [(row["step"], row["reward"], row["episodes"]) for row in steps if "reward" in row]
    trials = read_results(folder).trials if record.kind == "bench" else ()
    valid = [each for each in trials if each.model == record.parents[0].name and each.outcome != "invalid"]
    own = [(each.package, each.task, float(each.outcome == "pass")) for each in valid]
    return Ended(record, read_json(results) if results.is_file() else None, rewards, own)
