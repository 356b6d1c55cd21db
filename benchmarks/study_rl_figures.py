"""Experiments 5 to 7 of the study: heads that guess after RL, the cost of length, staleness. Drawn by benchmarks/study_figures.py."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from study_read import BLUE, GOLD, GREEN, GREY, LEAST, RED, Study, ends, mean, over_seeds, percent, solved, table

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
    without = next(arm for arm in ("free", "stale-2", "ladder-none") if study.finished(arm, "after"))
    before = without if study.finished(without, "taught") else "ladder-none"
    arms = {without: ("without cost", BLUE), "length": ("with cost", RED), "price": ("linear, if solved", GREEN)}
    rows = []
    for label, arm, stage in [("before RL", before, "taught"), *((arms[arm][0], arm, "after") for arm in arms)]:
        if trials := study.trials(arm, stage):
            passed = [row for row in trials if row["outcome"] == "pass"]
            written = f"{fmean(row['tokens'].get('written', 0) for row in passed):.0f}" if passed else "–"
            amounts = [f"{mean(passed, name):.2f}" for name in ("calls", "turns")]
            a_turn = f"{mean(trials, 'calls') / mean(trials, 'turns'):.2f}"
            rows.append([label, percent(solved(trials)), str(len(trials)), written, *amounts, a_turn])
    heading = ["tokens written, solved", "calls, solved", "turns, solved", "calls a turn"]
    table(["", "solved, %", "attempts", *heading], rows)
    rows, names = [], ("solved", "episode_tokens", "behaviour_calls", "turns", "behaviour_calls_per_turn")
    for arm, (label, colour) in arms.items():
        for seed in study.seeds(arm, "rl"):
            steps = study.steps(arm, seed)
            if len(steps) >= LEAST:
                said, line = (label, "-") if seed == 0 else (None, ":")
                tokens = [step["episode_tokens"] for step in steps]
                axis.plot(range(1, len(steps) + 1), tokens, line, color=colour, label=said)
                course = (" → ".join(f"{value:.3g}" for value in ends(steps, name)) for name in names)
                rows.append([label, str(seed), *course])
    table(["RL, first → last third", "seed", "solved", "tokens an episode", "calls", "turns", "calls a turn"], rows)
    axis.legend(fontsize=7)
    axis.set_xlabel("step of RL")
    axis.set_ylabel("tokens an episode")
    axis.set_title("6. Cost of length (dotted: other seeds)", loc="left")


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
            ended = [(at, 100 * step["solved"]) for at, step in zip(seconds, steps, strict=True) if step["episodes"]]
            label, line = (f"staleness {versions}", "-") if seed == 0 else (None, ":")
            axis.plot(*zip(*ended, strict=True), line, marker=".", color=colour, label=label, linewidth=1.2)
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
    shares = ["first third of them solved, %", "last third", "solved after RL, %"]
    table(["staleness", "seed", "seconds", "versions behind, mean", "episodes", *shares], rows)
    rows = []
    for arm, _ in arms[1:]:
        pairs = [(after.get((arm, seed)), after.get(("stale-0", seed))) for seed in range(10)]
        change = [this - that for this, that in pairs if this is not None and that is not None]
        if change:
            rows.append([arm, str(len(change)), over_seeds(change, "{:+.1f}")])
    table(["solved after RL, against synchronous", "seeds", "points"], rows)


def _behind(step: dict[str, Any]) -> float:
    """Return how many versions behind the tokens were that a step was trained on."""
    shares = {
        int(name.removeprefix("staleness_")): share for name, share in step.items() if name.startswith("staleness_")
    }
    return float(sum(versions * share for versions, share in shares.items()) / (sum(shares.values()) or 1.0))
