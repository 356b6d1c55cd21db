"""Experiments 5 to 7 of the study: heads that guess after RL, the cost of length, staleness. Drawn by benchmarks/study_figures.py."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from etude.bench.statistics import estimate
from study_read import (
    BLUE,
    GOLD,
    GREEN,
    GREY,
    LEAST,
    RED,
    Study,
    Trials,
    binned,
    ends,
    mean,
    over_seeds,
    percent,
    solved,
    table,
)

if TYPE_CHECKING:
    from collections.abc import Callable

NO_COST = ("ladder-none", "stale-0", "stale-1", "stale-4", "stale-8", "stale-2")  # the last is drawn
MOMENTS = {
    "trained": ("mtp", "after"),
    "after SFT": ("heads", "before"),
    "refreshed": ("heads", "after"),
    "after RL": ("heads-after", "before"),
    "refreshed again": ("heads-after", "after"),
}


def heads(study: Study, axis: Any) -> None:
    """5. How well heads guess: when trained, after SFT, after RL, and after a little training of them alone. Means over seeds."""
    rows = []
    for (label, (stage, moment)), colour in zip(MOMENTS.items(), (GREY, GOLD, BLUE, RED, GREEN), strict=True):
        by_seed = [study.stage("heads", seed, stage).get("acceptance", []) for seed in study.seeds("heads", stage)]
        for domain in sorted({row["domain"] for found in by_seed for row in found}):
            depths = zip(
                *([100 * row[moment] for row in found if row["domain"] == domain] for found in by_seed if found),
                strict=True,
            )
            each_depth = list(depths)
            rows.append([label, domain, str(len(each_depth[0])), *(over_seeds(values) for values in each_depth)])
            if domain == "code":
                means = [fmean(values) for values in each_depth]
                axis.plot(range(1, len(means) + 1), means, marker="o", color=colour, label=label)
    if not rows:
        return
    axis.legend(fontsize=7)
    axis.set_xticks([1, 2, 3])
    axis.set_xlabel("depth of the guess")
    axis.set_ylabel("expected acceptance, %")
    axis.set_title("5. Heads that guess, held-out code", loc="left")
    table(["moment", "held-out", "seeds", "depth 1, %", "depth 2, %", "depth 3, %"], rows)


def effort(study: Study, axis: Any) -> None:
    """6. With a cost of length and without."""
    if not study.finished("length", "after"):
        return
    without = ("free",) if study.finished("free", "after") else NO_COST
    shown = without[-1]
    before = shown if study.finished(shown, "taught") else "ladder-none"
    arms = {shown: ("without cost", BLUE), "length": ("with cost", RED), "price": ("linear, if solved", GREEN)}
    free = [row for arm in without for row in study.trials(arm, "after")]
    rows = []
    for label, trials in [
        ("before RL", study.trials(before, "taught")),
        (f"without cost ({', '.join(without)})", free),
        *((arms[arm][0], study.trials(arm, "after")) for arm in ("length", "price")),
    ]:
        if trials:
            passed = [row for row in trials if row["outcome"] == "pass"]
            amounts = [f"{mean(passed, name):.2f}" for name in ("calls", "turns")]
            a_turn = f"{mean(trials, 'calls') / mean(trials, 'turns'):.2f}"
            change = ["", "", ""]
            if trials is not free and label != "before RL":
                change = [percent(solved(trials, free), signed=True), *(_more(trials, free, of) for of in AMOUNTS)]
            written = f"{fmean(map(_written, passed)):.0f}" if passed else "–"
            rows.append([label, percent(solved(trials)), str(len(trials)), written, *amounts, a_turn, *change])
    heading = ["tokens written, solved", "calls, solved", "turns, solved", "calls a turn"]
    against = ["against without: points", "tokens an attempt", "calls an attempt"]
    table(["", "solved, %", "attempts", *heading, *against], rows)
    rows, names = [], ("solved", "episode_tokens", "behaviour_calls", "turns", "behaviour_calls_per_turn")
    for arm, (label, colour) in arms.items():
        for seed in study.seeds(arm, "rl"):
            steps = study.steps(arm, seed)
            if len(steps) >= LEAST:
                said, line = (label, "-") if seed == 0 else (None, ":")
                places = zip(*binned(steps, "episode_tokens"), strict=True)
                axis.plot(*places, line, marker=".", color=colour, label=said)
                course = (" → ".join(f"{value:.3g}" for value in ends(steps, name)) for name in names)
                rows.append([label, str(seed), *course])
    table(["RL, first → last third", "seed", "solved", "tokens an episode", "calls", "turns", "calls a turn"], rows)
    axis.legend(fontsize=7)
    axis.set_xlabel("episodes of RL")
    axis.set_ylabel("tokens an episode")
    axis.set_title("6. Cost of length (dotted: other seeds)", loc="left")


def _written(row: dict[str, Any]) -> float:
    return float(row["tokens"].get("written", 0))


def _calls(row: dict[str, Any]) -> float:
    return float(row["calls"])


AMOUNTS = (_written, _calls)


def _more(trials: Trials, others: Trials, amount: Callable[[dict[str, Any]], float]) -> str:
    """Return by how much the mean of an amount is above that of other attempts at the same tasks."""
    found, other = ([(row["package"], row["task"], amount(row)) for row in rows] for rows in (trials, others))
    more = estimate(found, against=other, rate=False)
    return f"{more.value:+.2f} [{more.low:+.2f}, {more.high:+.2f}]" if more else "–"


def staleness(study: Study, axis: Any) -> None:
    """7. What is solved over wall-clock, synchronous and asynchronous; and by the benchmark afterwards.

    Old episodes end long before they are trained on: what is solved in the last steps is then no news of the last weights.
    """
    rows, after = [], {}
    arms = [("stale-0", GREY), ("stale-1", GOLD), ("stale-2", GREEN), ("stale-4", BLUE), ("stale-8", RED)]
    for arm, colour in arms if study.seeds("stale-0", "rl") else []:
        versions = arm.removeprefix("stale-")
        for seed in study.seeds(arm, "rl"):
            steps = study.steps(arm, seed)
            if len(steps) < LEAST:
                continue
            seconds = [sum(step["device_seconds"] for step in steps[: i + 1]) for i in range(len(steps))]
            places, shares = zip(*binned(steps, "solved", at=seconds), strict=True)
            label, line = (f"staleness {versions}", "-") if seed == 0 else (None, ":")
            axis.plot(
                places, [100 * each for each in shares], line, marker=".", color=colour, label=label, linewidth=1.2
            )
            trials = study.trials(arm, "after", seed)
            passed = [100.0 * (row["outcome"] == "pass") for row in trials]
            after[arm, seed] = fmean(passed) if passed else None
            first, final = (f"{100 * each:.0f}" for each in ends(steps, "solved"))
            amounts = [
                f"{seconds[-1]:.0f}",
                f"{fmean(map(_behind, steps)):.1f}",
                f"{sum(step['episodes'] for step in steps)}",
            ]
            rows.append([versions, str(seed), *amounts, first, final, percent(solved(trials)) if trials else "–"])
    if not rows:
        return
    axis.legend(fontsize=7)
    axis.set_xlabel("seconds of RL")
    axis.set_ylabel("solved, %")
    axis.set_title("7. Staleness (dotted: other seeds)", loc="left")
    told = ["first third of them solved, %", "last third", "solved after RL, %"]
    table(["staleness", "seed", "seconds", "versions behind, mean", "episodes", *told], rows)
    rows = []
    for arm, _ in arms[1:]:
        pairs = [(after.get((arm, seed)), after.get(("stale-0", seed))) for seed in range(10)]
        change = [this - that for this, that in pairs if this is not None and that is not None]
        if change:
            same = percent(solved(study.trials(arm, "after"), study.trials("stale-0", "after")), signed=True)
            rows.append([arm, str(len(change)), over_seeds(change, "{:+.1f}"), same])
    table(["solved after RL, against synchronous", "seeds", "points, over seeds", "over tasks"], rows)


def _behind(step: dict[str, Any]) -> float:
    """Return how many versions behind the tokens were that a step was trained on."""
    shares = {
        int(name.removeprefix("staleness_")): share for name, share in step.items() if name.startswith("staleness_")
    }
    return float(sum(versions * share for versions, share in shares.items()) / (sum(shares.values()) or 1.0))
