"""The pages of what was learnt: the curves of any training, and reinforcement learning from all steps down to one group."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from etude.report.rl import verdict
from etude.web import episode
from etude.web.actions import weights_form
from etude.web.html import Html, details, element, facts, join, link, note, section, short, table
from etude.web.metrics import charts, metrics_of
from etude.web.overview import page_of, state_of
from etude.web.rollouts import rollouts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.web.metrics import Metrics
    from etude.web.overview import View
    from etude.web.reading import Stage
    from etude.web.rollouts import Group, Rollouts, Taught

ACROSS, BINS = 50, 10  # columns of a histogram by step, and its rows
CELL, BIN = 14, 12  # pixels
LISTED = 200  # groups on a page
FATES = {
    "open": "under way", "ready": "ready: waits to be trained on", "trained": "trained on",
    "flat": "flat: all rewards alike, so nothing to learn", "void": "void: too few valid rollouts",
    "stale": "stale: too old, its task went back",
}  # fmt: skip


def training(stage: Stage) -> View:
    """Show a training: its curves, and what it measured."""
    metrics = metrics_of(stage)
    top = facts({
        "state": state_of(stage), "tokens trained": f"{metrics.tokens:,.0f}", "time of the device": f"{metrics.seconds:,.0f} s",
        **_memory(metrics),
    })  # fmt: skip
    body = join(section("", top, *_reading(metrics), live="facts"), _charts(stage, metrics))
    return page_of(stage, body, reading=not metrics.complete)


def _memory(metrics: Metrics) -> dict[str, str]:
    """Return what the plan said of memory, where there is one; what steps took is a curve."""
    needed, free = (metrics.plan.get(name) for name in ("needed_bytes", "available_bytes"))
    if not isinstance(needed, int) or not isinstance(free, int):
        return {}
    return {"memory planned": f"{needed / 1e9:.2f} of {free / 1e9:.1f} GB"}


def _reading(metrics: Metrics) -> list[Html]:
    said = [] if metrics.complete else [note("Still reading the numbers; more will appear.", "loading")]
    if metrics.trouble:
        said.append(note(metrics.trouble, "warning"))
    if metrics.spoilt:
        said.append(note(f"{metrics.spoilt} lines of metrics.jsonl are no rows and are left out.", "warning"))
    return said


def _charts(stage: Stage, metrics: Metrics) -> Html:
    flags = element("ul", *(element("li", "⚑ ", said) for _, _, said in metrics.flags), cls="flags")
    # Drawing a hundred thousand points as text takes a fifth of a second, and is asked for again by all who look.
    lines, drawn = stage.run.caches.get(f"curves of {stage.path}", (-1, None))
    if drawn is None or lines != len(metrics.lines):
        lines, drawn = len(metrics.lines), charts(metrics, stage.kind)
        stage.run.caches[f"curves of {stage.path}"] = lines, drawn
    return section("Curves", flags if metrics.flags else None, drawn, live="curves")


def learning(stage: Stage) -> View:
    """Show a whole stage of reinforcement learning."""
    metrics, rollouts = metrics_of(stage), rollouts_of(stage)
    fates = Counter(group.fate for group in rollouts.groups)
    top = facts({
        "state": state_of(stage), "steps trained": f"{rollouts.trained:,}", "rollouts scored": f"{rollouts.rollouts:,}",
        "groups": ", ".join(f"{count:,} {fate}" for fate, count in fates.most_common()),
        "algorithm": type(rollouts.algorithm).__name__.lower(), **_memory(metrics),
    })  # fmt: skip
    said = [element("li", line) for line in (verdict(metrics.rows) if metrics.rows else [])]
    warned = [note(text, "warning") for text in (rollouts.damage, rollouts.trouble, rollouts.fallback) if text]
    loading = [] if rollouts.complete else [note("Still reading the ledger; more will appear.", "loading")]
    body = join(
        section("", top, *warned, *loading, *_reading(metrics), element("ul", *said) if said else None, live="facts"),
        section("What taught the model most", *_taught(rollouts, rollouts.taught), live="taught"),
        section("", weights_form(stage, rollouts.weights[-1][1] if rollouts.weights else {})),
        section("Rewards by step", *heat(rollouts, 1, last_step(rollouts)), live="rewards"),
        _charts(stage, metrics),
    )
    more = [address for address, _ in _columns(1, last_step(rollouts))]
    more += [rollout_address(group.number, number) for group, number, _ in rollouts.taught]
    return page_of(stage, body, more=more, reading=not (metrics.complete and rollouts.complete))


def last_step(rollouts: Rollouts) -> int:
    return max((step for step, groups in rollouts.steps.items() if groups), default=0)


def group_address(number: int) -> str:
    return f"group-{number}.html"


def rollout_address(group: int, number: int) -> str:
    return f"rollout-{group}-{number}.html"


def _taught(rollouts: Rollouts, found: Sequence[Taught]) -> list[Html]:
    """Say which rollouts were trained on with the largest advantages, and what each of them was about."""
    if not found:
        none = "No rollout has been trained on yet. A group teaches when its rollouts got different rewards."
        return [note(none, "empty")]
    rows = []
    for group, number, gain in found:
        way = link(rollout_address(group.number, number), f"rollout {group.number}/{number}")
        verb = "do this more" if gain > 0 else "do this less"
        trace = episode.trace_of(rollouts, group.number, number)
        did = element("span", episode.first_words(trace), cls="excerpt") if trace else "not kept"
        rows.append((way, verb, did, signed(gain), short(group.rewards[number]), group.task,
                     link(f"step-{group.step}.html", f"step {group.step}")))  # fmt: skip
    about = "Rollouts of one task are compared: what was better than the group's mean is made likelier, what was worse less likely."
    about += " First the largest advantages up, then the largest down."
    return [note(about), table(("rollout", "it taught", "what it did", ">advantage", ">reward", "task", "in"), rows)]


def signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def _columns(first: int, last: int) -> list[tuple[str, range]]:
    """Return the columns of a histogram over steps: the page behind each, and its steps."""
    size = 1
    while math.ceil((last - first + 1) / size) > ACROSS:
        size *= 10
    parts = [range(at, min(at + size, last + 1)) for at in range(first, last + 1, size)]
    return [(f"step-{part[0]}.html" if size == 1 else f"steps-{part[0]}-{part[-1]}.html", part) for part in parts]


def heat(rollouts: Rollouts, first: int, last: int) -> list[Html]:
    """Return the histogram of rewards by step: a column a step, or several, that leads to them; darker where more rollouts are."""
    rewards = {step: [r for n in rollouts.steps.get(step, ()) for r in rollouts.groups[n].rewards.values()]
               for step in range(first, last + 1)}  # fmt: skip
    every = [reward for each in rewards.values() for reward in each]
    if not every:
        return [note("No group is complete yet.", "empty")]
    low, high = min(every), max(every)
    span = (high - low) or 1.0
    parts, cells, columns = [], [], _columns(first, last)
    for x, (address, steps) in enumerate(columns):
        here = [reward for step in steps for reward in rewards[step]]
        counts = Counter(min(BINS - 1, int((reward - low) / span * BINS)) for reward in here)
        most = max(counts.values(), default=1)
        name = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        mean = sum(here) / len(here) if here else 0.0
        words = f"{name}: {len(here)} rollouts, mean reward {mean:.3f}" if here else f"{name}: none"
        drawn = [element("rect", x=x * CELL, y=(BINS - 1 - at) * BIN, width=CELL - 1, height=BIN - 1, cls="cell",
                         fill_opacity=f"{0.15 + 0.85 * count / most:.2f}") for at, count in counts.items()]  # fmt: skip
        column = element("rect", x=x * CELL, y=0, width=CELL - 1, height=BINS * BIN, cls="column")
        parts.append(element("a", element("title", words), column, *drawn, href=address, aria_label=words))
        cells.append((link(address, name), len(here), short(mean) if here else "–", short(max(here)) if here else "–"))
    size = f"-2 -2 {max(ACROSS // 2, len(columns)) * CELL + 4} {BINS * BIN + 4}"
    scale = element("p", f"from {short(low)} (bottom) to {short(high)} (top)", cls="axis")
    picture = element("svg", *parts, viewBox=size, cls="heat", preserveAspectRatio="xMinYMid", role="group",
                      aria_label="Rewards by step")  # fmt: skip
    heads = ("", ">rollouts", ">mean reward", ">best")
    return [note("Each column leads to its rollouts. Darker: more rollouts got that reward."), picture, scale,
            details("The same as numbers", table(heads, cells))]  # fmt: skip


def steps(stage: Stage, first: int, last: int) -> View:
    """Show some steps of many."""
    rollouts = rollouts_of(stage)
    numbers = [number for step in range(first, last + 1) for number in rollouts.steps.get(step, ())]
    body = join(
        section("Rewards by step", *heat(rollouts, first, last)),
        section("What taught the model most", *_taught(rollouts, rollouts.teaching(numbers))),
    )
    more = [address for address, _ in _columns(first, last)]
    return page_of(stage, body, f"Steps {first} to {last}", more=more)


def step(stage: Stage, number: int) -> View:
    """Show one step: what it learnt from, a group a line, a mark a rollout."""
    rollouts, metrics = rollouts_of(stage), metrics_of(stage)
    numbers = rollouts.steps.get(number, [])
    groups = [rollouts.groups[each] for each in numbers]
    if not groups and not 1 <= number <= rollouts.trained:
        raise KeyError(number)
    rewards = [reward for group in groups for reward in group.rewards.values()]
    span = (min(rewards, default=0.0), max(rewards, default=0.0))
    rows = [(link(group_address(g.number), f"group {g.number}"), g.task, FATES[g.fate], strip(rollouts, g, span),
             f"{g.mean:.3f}, {max(g.rewards.values()):.3f}" if g.rewards else "–")
            for g in groups[:LISTED]]  # fmt: skip
    names = ("loss", "entropy", "kl", "gradient", "masked", "mismatch_mean", "mismatch_p99", "ratio_max")
    values = {name.replace("_", " "): short(value) for name in names if (value := metrics.at(name, number)) is not None}
    ways = [link(f"step-{number + by}.html", words) for by, words in ((-1, "← step before"), (1, "step after →"))
            if 1 <= number + by <= last_step(rollouts)]  # fmt: skip
    weights = ", ".join(f"{part} {weight:g}" for part, weight in rollouts.weights_of(number).items())
    left = note(f"{len(groups) - LISTED} more groups are not listed.", "warning") if len(groups) > LISTED else None
    body = join(
        element("p", *ways, cls="ways"),
        section("What this step taught", *_taught(rollouts, rollouts.teaching(numbers))),
        section("Groups side by side", note("A mark is a rollout: its place is its reward. Filled: its tests passed. Each is a link."),
                table(("group", "task", "what became of it", "rewards", ">mean, best"), rows), left),
        section("The step in numbers", facts(values) if values else note("This step is not trained yet.", "empty"),
                note(f"Weights of the reward's parts: {weights or 'not known'}")),
    )  # fmt: skip
    more = [group_address(each.number) for each in groups[:LISTED]]
    return page_of(stage, body, f"Step {number}", more=more)


def strip(rollouts: Rollouts, group: Group, span: tuple[float, float]) -> Html:
    """Return the rollouts of a group as marks on a line of rewards."""
    low, wide = span[0], (span[1] - span[0]) or 1.0
    gains = rollouts.advantages(group)
    marks = []
    for number, reward in group.rewards.items():
        words = f"rollout {group.number}/{number}: reward {reward:.3f}, advantage {gains.get(number, 0.0):+.3f}"
        mark = element("circle", cx=f"{8 + 184 * (reward - low) / wide:.1f}", cy=10 + (number % 3) * 5, r=4.5,
                       cls="passed" if number in group.passed else "failed")  # fmt: skip
        where = rollout_address(group.number, number)
        marks.append(element("a", element("title", words), mark, href=where, aria_label=words))
    place = f"{8 + 184 * (group.mean - low) / wide:.1f}"
    mean = element("line", x1=place, x2=place, y1=2, y2=28, cls="mean")
    return element("svg", mean if group.rewards else None, *marks, viewBox="0 0 200 30", cls="strip", role="group")


def group(stage: Stage, number: int) -> View:
    """Show the rollouts of one task side by side, the best first."""
    rollouts = rollouts_of(stage)
    own = rollouts.group(number)
    gains = rollouts.advantages(own)
    order = sorted(own.lines, key=lambda each: -own.rewards.get(each, 0.0))
    cards = [_card(rollouts, own, each, gains.get(each)) for each in order]
    lost = "invalid, not scored: "
    cards += [element("article", element("h3", f"rollout {number}/{each}"), note(f"{lost}{cause}", "warning"), cls="card")
              for each, cause in own.failed.items() if each not in own.lines]  # fmt: skip
    prompt = next((trace.task for each in order if (trace := episode.trace_of(rollouts, number, each))), None)
    when = link(f"step-{own.step}.html", f"step {own.step}") if own.step else "not yet"
    mean = f"{own.mean:.3f}" if own.rewards else "–"
    top = facts({"task": own.task, "what became of it": FATES[own.fate], "step": when, "mean reward": mean})
    asked = details("What was asked", element("pre", prompt), open_=len(prompt) < 600) if prompt else None
    side = section("Side by side, the best first", element("div", *cards, cls="cards", tabindex=0))
    way = [(f"Step {own.step}", f"{stage.address}/step-{own.step}.html")] if own.step else []
    more = [rollout_address(number, each) for each in order]
    return page_of(stage, join(section("", top, asked), side), f"Group {number}", way, more)


def _card(rollouts: Rollouts, group: Group, number: int, gain: float | None) -> Html:
    """Return one rollout in short: what it was worth, what it did."""
    reward = group.rewards.get(number)
    passed = "✓ passed" if number in group.passed else "✗ failed"
    trace = episode.trace_of(rollouts, group.number, number)
    finished = rollouts.finished(group, number)
    weights = rollouts.weights_of(group.step)
    values = finished.parts if finished else {}
    parts = {name: f"{weights[name] * value:+.3f}" for name, value in values.items() if weights.get(name)}
    head = element("h3", link(rollout_address(group.number, number), f"rollout {group.number}/{number}"))
    scored = f"{passed} · reward {reward:.3f}" if reward is not None else passed
    taught = episode.lesson(gain, group.fate) if gain is not None else None
    lost = note(
        "Its trace was not kept (keep_traces = false); the best, worst and strangest of each step are.", "empty"
    )
    did = episode.in_short(trace) if trace else lost
    lines = element("p", scored, cls="scored"), element("p", taught) if taught else None
    return element("article", head, *lines, facts(parts), did, cls="card")
