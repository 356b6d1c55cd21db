"""Draw what benchmarks/study.py measured, and print its tables as docs/results.md has them.

    python benchmarks/study_figures.py benchmarks/results/study-h200.json docs/results
    python benchmarks/study_figures.py benchmarks/results/study-sprout-cpu.json docs/results/sprout

Solve rates are means over tasks, attempts of all seeds taken together; in brackets are 95 % intervals over packages
(etude.bench.statistics). Seeds are too few for an interval of their own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from scipy.stats import ttest_ind

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
from study_rl_figures import NO_COST, effort, heads, staleness

BUDGETS = ("none", "1m", "4m", "16m")
MODES = {
    "free": "no limit",
    "truncated": "oldest turns dropped",
    "prompted": "long prompt",
    "own": "own summary, untrained",
    "own-after": "own summary, after RL with it",
    "free-after": "no limit, after that RL",
}


def rungs(study: Study) -> list[tuple[str, Trials]]:
    """Return the ladder from below."""
    ladder = [("base", "ladder-base", "told"), ("SFT", "ladder-none", "taught")]
    ladder += [(f"CPT {name.upper()} + SFT", f"ladder-{name}", "taught") for name in BUDGETS[1:]]
    ladder += [("SFT + RL", "ladder-none", "after")]
    ladder += [(f"CPT {name.upper()} + SFT + RL", f"ladder-{name}", "after") for name in BUDGETS[1:]]
    return [(label, trials) for label, arm, stage in ladder if (trials := study.trials(arm, stage))]


def ladder(study: Study, axis: Any) -> None:
    """1. Correctness with intervals, and the other three axes."""
    found = rungs(study)
    below = dict(found).get("SFT")
    rows = []
    for place, (label, trials) in enumerate(found):
        rate = solved(trials)
        assert rate is not None
        colour = RED if label.endswith("RL") else BLUE if "SFT" in label else GREY
        axis.errorbar(
            [100 * rate.value],
            [place],
            xerr=[[100 * (rate.value - rate.low)], [100 * (rate.high - rate.value)]],
            fmt="o",
            color=colour,
            capsize=3,
        )
        changed = [row for row in trials if "lines" in row]
        passed = [row for row in trials if row["outcome"] == "pass"]
        written = sum(sum(count for kind, count in row["tokens"].items() if kind == "written") for row in trials)
        rows.append(
            [
                label,
                str(len(trials)),
                percent(rate),
                percent(solved(trials, below), signed=True) if below and label not in {"SFT", "base"} else "",
                f"{mean(changed, 'lint'):.2f}",
                f"{mean(changed, 'unparsable'):.2f}",
                f"{mean(passed, 'lines'):.1f}",
                f"{written / len(trials):.0f}",
                f"{mean(trials, 'calls'):.2f}",
                f"{100 * mean(trials, 'silent'):.0f} %",
                f"{mean(trials, 'malformed'):.2f}",
            ]
        )
    axis.set_yticks(range(len(found)), [label for label, _ in found])
    axis.invert_yaxis()
    axis.set_xlabel("tasks solved, %")
    axis.set_title("1. The ladder", loc="left")
    table(
        [
            "model",
            "attempts",
            "solved, %",
            "above SFT, points",
            "lint",
            "broken files",
            "lines where solved",
            "tokens written",
            "calls",
            "silent",
            "malformed",
        ],
        rows,
    )


def pairs(study: Study) -> None:
    """1. Rungs against each other, on the same tasks."""
    found = dict(rungs(study))
    named = [(f"CPT {name.upper()} + SFT + RL", "SFT + RL") for name in BUDGETS[1:]]
    named += [(f"{start} + RL", start) for start in ("SFT", *(f"CPT {name.upper()} + SFT" for name in BUDGETS[1:]))]
    rows = [[a, b, percent(solved(found[a], found[b]), signed=True)] for a, b in named if a in found and b in found]
    table(["this", "above this", "points"], rows)


def loss_and_reward(study: Study, axis: Any) -> None:
    """2. Held-out loss of code after continued pretraining, against what is solved after SFT and after RL."""
    rows = []
    for name in BUDGETS:
        arm = f"ladder-{name}"
        for seed in study.seeds(arm, "taught"):
            loss = held_out(study, name, seed)
            taught, after = (
                solved(study.trials(arm, stage, seed)) if seed in study.seeds(arm, stage) else None
                for stage in ("taught", "after")
            )
            steps = study.stage(arm, seed, "rl").get("steps", []) if seed in study.seeds(arm, "rl") else []
            reward = ends(steps, "reward")[1] if steps else None
            rows.append(
                [
                    name,
                    str(seed),
                    f"{loss:.4f}" if loss else "–",
                    percent(taught),
                    f"{reward:.3f}" if reward is not None else "–",
                    percent(after),
                ]
            )
            for rate, colour, marker in ((taught, BLUE, "o"), (after, RED, "s")):
                if rate and loss:
                    axis.plot([loss], [100 * rate.value], marker, color=colour)
                    axis.annotate(name, (loss, 100 * rate.value), textcoords="offset points", xytext=(4, 3), fontsize=7)
    axis.plot([], [], "o", color=BLUE, label="after SFT")
    axis.plot([], [], "s", color=RED, label="after RL")
    axis.legend(fontsize=7)
    axis.set_xlabel("held-out code after CPT, bits per byte")
    axis.set_ylabel("solved, %")
    axis.set_title("2. Does the loss predict it?", loc="left")
    table(
        [
            "CPT tokens",
            "seed",
            "held-out code, bits/byte",
            "solved after SFT, %",
            "RL reward, last third",
            "solved after RL, %",
        ],
        rows,
    )


def held_out(study: Study, name: str, seed: int) -> float | None:
    """Return bits per byte of held-out code that SFT begins with; of the base: what continued pretraining began with."""
    arm = f"ladder-{name}" if name != "none" else "ladder-16m"
    if seed not in study.seeds(arm, "cpt"):
        return None
    domains = study.stage(arm, seed, "cpt").get("domains", [])
    return next((row["before" if name == "none" else "after"] for row in domains if row["domain"] == "code"), None)


def curves(study: Study, axis: Any) -> None:
    """3. Mean and best of eight over the episodes of RL."""
    rows = []
    for name, colour in zip(BUDGETS, (GREY, GOLD, GREEN, BLUE), strict=True):
        for seed in study.seeds(f"ladder-{name}", "rl"):
            steps = study.stage(f"ladder-{name}", seed, "rl").get("steps", [])
            if len(steps) < LEAST:
                continue
            row = [name, str(seed), str(sum(step["episodes"] for step in steps))]
            for key, line in (("solved", "-"), ("best_of_group", ":")):
                places, values = zip(*binned(steps, key), strict=True)
                label = f"CPT {name}" if seed == 0 and line == "-" else None
                axis.plot(places, [100 * value for value in values], line, color=colour, linewidth=1.2, label=label)
                first, last = (100 * value for value in ends(steps, key))
                row += [f"{first:.1f}", f"{last:.1f}", f"{last - first:+.1f}"]
            rows.append(row)
    axis.legend(fontsize=7)
    axis.set_xlabel("episodes of RL (dotted: best of eight)")
    axis.set_ylabel("solved, %")
    axis.set_title("3. Mean and best of eight", loc="left")
    table(
        [
            "CPT tokens",
            "seed",
            "episodes",
            "mean, first third, %",
            "last third",
            "change",
            "best of 8, first third, %",
            "last third",
            "change",
        ],
        rows,
    )


def rates(study: Study, axis: Any) -> None:
    """0. Which learning rate for RL."""
    rows = []
    for arm, colour in (("lr-1e-5", BLUE), ("lr-3e-5", GREEN), ("lr-1e-4", RED)):
        for seed in study.seeds(arm, "rl"):
            steps = study.stage(arm, seed, "rl")["steps"]
            places, values = zip(*binned(steps, "solved"), strict=True)
            axis.plot(
                places, [100 * value for value in values], color=colour, marker="o", label=arm.removeprefix("lr-")
            )
            rows.append(
                [
                    arm.removeprefix("lr-"),
                    str(len(steps)),
                    str(places[-1]),
                    ", ".join(f"{100 * value:.0f}" for value in values),
                ]
            )
    axis.legend(fontsize=7)
    axis.set_xlabel("episodes of RL")
    axis.set_ylabel("solved, %")
    axis.set_title("0. Learning rate", loc="left")
    table(["learning rate", "steps", "episodes", "solved in sixths of the episodes, %"], rows)


def memory(study: Study, axis: Any) -> None:
    """4. What a tight context costs."""
    rows = []
    free, free_after = study.trials("memory", "free"), study.trials("memory", "free-after")
    for place, (stage, label) in enumerate(MODES.items()):
        trials = study.trials("memory", stage)
        if not trials:
            continue
        rate, other = solved(trials), free_after if stage.endswith("after") else free
        assert rate is not None
        axis.errorbar(
            [100 * rate.value],
            [place],
            xerr=[[100 * (rate.value - rate.low)], [100 * (rate.high - rate.value)]],
            fmt="o",
            color=RED if stage.endswith("after") else BLUE,
            capsize=3,
        )
        summaries = sum(row["tokens"].get("summary", 0) for row in trials) / len(trials)
        lost = "" if stage.startswith("free") else percent(solved(trials, other), signed=True)
        rows.append([label, str(len(trials)), percent(rate), lost, f"{summaries:.0f}", f"{mean(trials, 'turns'):.2f}"])
    axis.set_yticks(range(len(MODES)), list(MODES.values()), fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("tasks solved, %")
    axis.set_title("4. Memory at a tight context", loc="left")
    table(["context", "attempts", "solved, %", "against no limit, points", "summary tokens an attempt", "turns"], rows)


def runs_apart(study: Study) -> None:
    """1. and 3. How runs of RL differ from each other. Each run is one number: seeds, machines and staleness count, tasks do not."""
    without = [(arm, seed) for arm in (*NO_COST, "heads") for seed in study.seeds(arm, "after")]
    with_cpt = [(f"ladder-{name}", seed) for name in BUDGETS[1:] for seed in study.seeds(f"ladder-{name}", "after")]
    if len(without) < 2 or len(with_cpt) < 2:
        return
    ended = [
        [100 * mean([{"solved": row["outcome"] == "pass"} for row in study.trials(arm, "after", seed)], "solved")
         for arm, seed in runs] for runs in (with_cpt, without)
    ]  # fmt: skip
    both = with_cpt + without
    changes = {
        name: [100 * (last - first) for first, last in (ends(study.steps(*run), name) for run in both)]
        for name in ("solved", "best_of_group")
    }
    low, high = ttest_ind(*ended, equal_var=False).confidence_interval(0.95)
    table(
        ["over runs", "runs", "from – to", "mean, 95 %"],
        [
            ["solved after RL, with CPT, %", *_spread(ended[0])],
            ["without", *_spread(ended[1])],
            ["with less without, points", "", "", f"[{low:+.1f}, {high:+.1f}]"],
            ["change in RL of the mean, points", *_spread(changes["solved"])],
            ["of the best of 8", *_spread(changes["best_of_group"])],
        ],
    )


def _spread(values: list[float]) -> list[str]:
    return [str(len(values)), f"{min(values):.1f} – {max(values):.1f}", over_seeds(values)]


def cost(study: Study) -> None:
    """8. What a full run takes, by stage."""
    for run in ("ladder-16m-0", "recipe-0"):
        rows = []
        for name, row in sorted(study.runs.get(run, {}).items(), key=lambda each: each[1].get("started", "~")):
            compute = row.get("compute") or {}
            flops, sampling = compute.get("model_flops") or 0, compute.get("sampling_flops") or 0
            boxes = compute.get("sandbox_seconds") or 0
            minutes = (compute.get("device_seconds") or 0) / 60
            tokens = f"{compute.get('tokens') or 0:,}"
            rows.append(
                [run, name, tokens, f"{flops + sampling:.1e}", f"{minutes:.1f}", f"{boxes / 60:.1f}" if boxes else ""]
            )
        if rows:
            table(["run", "stage", "tokens", "FLOP", "GPU-minutes (shared)", "sandbox-minutes"], rows)


def main() -> None:
    """Draw all there is, each experiment by itself."""
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    study = Study(json.loads(source.read_text()))
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    pictures = {
        "rates": (rates, "lr-"),
        "ladder": (ladder, "ladder-"),
        "loss": (loss_and_reward, "ladder-"),
        "curves": (curves, "ladder-"),
        "memory": (memory, "memory-"),
        "heads": (heads, "heads-"),
        "length": (effort, "length-"),
        "staleness": (staleness, "stale-"),
    }
    for name, (draw, arms) in pictures.items():
        print(f"\n## {name}")
        if not any(run.startswith(arms) for run in study.runs):
            print("not measured")
            continue
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        draw(study, figure.subplots())
        figure.savefig(folder / f"{name}.png", dpi=130, metadata={"Software": None})
    print("\n## pairs")
    pairs(study)
    print("\n## runs")
    runs_apart(study)
    print("\n## cost")
    cost(study)


if __name__ == "__main__":
    main()
