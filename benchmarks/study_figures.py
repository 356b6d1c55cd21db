"""Draw what benchmarks/study.py measured, and print its tables as docs/results.md has them.

    python benchmarks/study_figures.py benchmarks/results/study-h200.json docs/results

Solve rates are means over tasks, attempts of all seeds taken together; in brackets are 95 % intervals, for which packages, tasks and
attempts are drawn anew (etude.bench.agent.statistics). Seeds are too few for an interval of their own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from etude.bench.agent.statistics import Estimate, estimate

BUDGETS = ("none", "1m", "4m", "16m")
BLUE, RED, GREEN, GREY, GOLD = "#3b6ea8", "#b5532a", "#6a9a3b", "#777777", "#c29b2b"
MODES = {
    "free": "no limit",
    "truncated": "oldest turns dropped",
    "prompted": "long prompt",
    "own": "own summary, untrained",
    "own-after": "own summary, after RL with it",
    "free-after": "no limit, after that RL",
}
LEAST = 6  # steps of rl that are worth telling of
Trials = list[dict[str, Any]]


class Study:
    """Runs by arm and seed."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.runs = found["runs"]

    def seeds(self, arm: str, stage: str) -> list[int]:
        """Return the seeds of an arm whose stage is there."""
        return [seed for seed in range(10) if stage in self.runs.get(f"{arm}-{seed}", {})]

    def stage(self, arm: str, seed: int, stage: str) -> dict[str, Any]:
        """Return what is known of a stage."""
        found: dict[str, Any] = self.runs[f"{arm}-{seed}"][stage]
        return found

    def trials(self, arm: str, stage: str, seed: int | None = None) -> Trials:
        """Return the valid attempts of an arm's benchmark, of all seeds or of one."""
        seeds = self.seeds(arm, stage) if seed is None else [seed]
        rows = [row for each in seeds for row in self.stage(arm, each, stage).get("trials", [])]
        return [row for row in rows if row["outcome"] != "invalid"]

    def finished(self, arm: str, stage: str) -> bool:
        """Return whether there is anything to tell."""
        return bool(self.trials(arm, stage))


def solved(trials: Trials, against: Trials | None = None) -> Estimate | None:
    """Return the solve rate, or by how much it is above another's."""
    found, other = (
        [(row["package"], row["task"], float(row["outcome"] == "pass")) for row in rows]
        for rows in (trials, against or [])
    )
    return estimate(found, against=other if against is not None else None)


def percent(found: Estimate | None, *, signed: bool = False) -> str:
    """Return an estimate in words."""
    if found is None:
        return "–"
    form = "{:+.1f}" if signed else "{:.1f}"
    return f"{form.format(100 * found.value)} [{form.format(100 * found.low)}, {form.format(100 * found.high)}]"


def table(head: list[str], rows: list[list[str]]) -> None:
    """Print a table in Markdown."""
    print("\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def mean(trials: Trials, name: str) -> float:
    """Return the mean of a number over the attempts that have it."""
    values = [float(row[name]) for row in trials if row.get(name) is not None]
    return fmean(values) if values else float("nan")


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


def binned(steps: list[dict[str, Any]], name: str, bins: int = 6) -> list[tuple[float, float]]:
    """Return (episodes so far, mean of a number) in bins of about as many episodes.

    Where groups wait for the newest weights, episodes end in bursts: one step sees two hundred of them, the next ones none.
    """
    total, seen = sum(step["episodes"] for step in steps), 0
    found: list[tuple[float, float]] = []
    begun: list[dict[str, Any]] = []
    for step in steps:
        begun.append(step)
        seen += step["episodes"]
        if seen >= (len(found) + 1) * total / bins:
            found.append((seen, weighted(begun, name)))
            begun = []
    return found


def weighted(steps: list[dict[str, Any]], name: str) -> float:
    """Return the mean of a number over episodes, not over steps."""
    known = [(step["episodes"], step[name]) for step in steps if step.get(name) is not None and step["episodes"]]
    return float(sum(count * value for count, value in known) / max(1, sum(count for count, _ in known)))


def ends(steps: list[dict[str, Any]], name: str) -> tuple[float, float]:
    """Return a number over the first and the last third of the episodes."""
    found = [value for _, value in binned(steps, name, 3)]
    return found[0], found[-1]


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


def heads(study: Study, axis: Any) -> None:
    """5. How well heads guess: when trained, after SFT, after RL, and after a little training of them alone."""
    if not study.seeds("heads", "mtp"):
        return
    rows = []
    moments = {
        "trained": ("mtp", "after"),
        "after SFT": ("heads", "before"),
        "refreshed": ("heads", "after"),
        "after RL": ("heads-after", "before"),
        "refreshed again": ("heads-after", "after"),
    }
    for (label, (stage, moment)), colour in zip(moments.items(), (GREY, GOLD, BLUE, RED, GREEN), strict=True):
        if not study.seeds("heads", stage):
            continue
        found = study.stage("heads", 0, stage).get("acceptance", [])
        for domain in sorted({row["domain"] for row in found}):
            depths = [row[moment] for row in found if row["domain"] == domain]
            rows.append([label, domain, *(f"{100 * each:.1f}" for each in depths)])
            if domain == "code":
                axis.plot(
                    range(1, len(depths) + 1), [100 * each for each in depths], marker="o", color=colour, label=label
                )
    axis.legend(fontsize=7)
    axis.set_xticks([1, 2, 3])
    axis.set_xlabel("depth of the guess")
    axis.set_ylabel("expected acceptance, %")
    axis.set_title("5. Heads that guess, held-out code", loc="left")
    table(["moment", "held-out", "depth 1, %", "depth 2, %", "depth 3, %"], rows)


def effort(study: Study, axis: Any) -> None:
    """6. With a cost of length and without."""
    if not study.finished("length", "after"):
        return
    rows = []
    for label, arm, stage, colour in (
        ("before RL", "ladder-none", "taught", GREY),
        ("without cost", "ladder-none", "after", BLUE),
        ("with cost", "length", "after", RED),
    ):
        trials = study.trials(arm, stage)
        if not trials:
            continue
        passed = [row for row in trials if row["outcome"] == "pass"]
        written = [float(row["tokens"].get("written", 0)) for row in passed]
        calling = [row for row in trials if row["turns"] > 0]
        rows.append(
            [
                label,
                percent(solved(trials)),
                f"{fmean(written):.0f}" if written else "–",
                f"{mean(passed, 'calls'):.2f}",
                f"{mean(passed, 'turns'):.2f}",
                f"{mean(calling, 'calls') / mean(calling, 'turns'):.2f}",
            ]
        )
        axis.hist(written, bins=range(0, 420, 20), histtype="step", color=colour, label=label, density=True)
    for arm in ("ladder-none", "length"):
        for seed in study.seeds(arm, "rl"):
            steps = study.stage(arm, seed, "rl").get("steps", [])
            if len(steps) < LEAST:
                continue
            tokens, turns = (
                " → ".join(f"{value:.4g}" for value in ends(steps, name)) for name in ("episode_tokens", "turns")
            )
            rows.append([f"RL steps, {arm}, seed {seed}: first → last third", "", tokens, "", turns, ""])
    axis.legend(fontsize=7)
    axis.set_xlabel("tokens written where solved")
    axis.set_yticks([])
    axis.set_title("6. Cost of length", loc="left")
    table(["", "solved, %", "tokens written, solved", "calls, solved", "turns, solved", "calls a turn"], rows)


def staleness(study: Study, axis: Any) -> None:
    """7. Reward over wall-clock, synchronous and asynchronous."""
    if not any(study.seeds(f"stale-{versions}", "rl") for versions in (0, 1, 4, 8)):
        return
    rows = []
    for arm, colour in (
        ("stale-0", GREY),
        ("stale-1", GOLD),
        ("ladder-none", GREEN),
        ("stale-4", BLUE),
        ("stale-8", RED),
    ):
        for seed in study.seeds(arm, "rl"):
            steps = study.stage(arm, seed, "rl").get("steps", [])
            if len(steps) < LEAST:
                continue
            seconds = [sum(step["device_seconds"] for step in steps[: i + 1]) for i in range(len(steps))]
            versions = "2" if arm == "ladder-none" else arm.removeprefix("stale-")
            label = f"staleness {versions}" if seed == 0 else None
            places, values = zip(*binned(steps, "reward"), strict=True)
            axis.plot(places, values, color=colour, label=label, linewidth=1.2)
            rows.append(
                [
                    versions,
                    str(seed),
                    str(len(steps)),
                    f"{seconds[-1]:.0f}",
                    f"{seconds[-1] / len(steps):.1f}",
                    f"{ends(steps, 'reward')[0]:.3f}",
                    f"{ends(steps, 'reward')[1]:.3f}",
                ]
            )
    axis.legend(fontsize=7)
    axis.set_xlabel("seconds (several arms share the GPU)")
    axis.set_ylabel("reward")
    axis.set_title("7. Staleness", loc="left")
    table(["staleness", "seed", "steps", "seconds", "seconds a step", "reward, first third", "last third"], rows)


def cost(study: Study) -> None:
    """8. What a full run takes, by stage."""
    rows = []
    for name, row in sorted(study.runs.get("ladder-16m-0", {}).items(), key=lambda each: each[1].get("started", "~")):
        compute = row.get("compute") or {}
        flops, sampling = compute.get("model_flops") or 0, compute.get("sampling_flops") or 0
        boxes = compute.get("sandbox_seconds") or 0
        minutes = (compute.get("device_seconds") or 0) / 60
        tokens = f"{compute.get('tokens') or 0:,}"
        rows.append([name, tokens, f"{flops + sampling:.1e}", f"{minutes:.1f}", f"{boxes / 60:.1f}" if boxes else ""])
    table(["stage", "tokens", "FLOP", "GPU-minutes (shared)", "sandbox-minutes"], rows)


def main() -> None:
    """Draw all there is, each experiment by itself."""
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    study = Study(json.loads(source.read_text()))
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    pictures = {
        "rates": rates,
        "ladder": ladder,
        "loss": loss_and_reward,
        "curves": curves,
        "memory": memory,
        "heads": heads,
        "length": effort,
        "staleness": staleness,
    }
    for name, draw in pictures.items():
        print(f"\n## {name}")
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axis = figure.subplots()
        draw(study, axis)
        if not axis.has_data():
            print("not measured")
            continue
        figure.savefig(folder / f"{name}.png", dpi=130, metadata={"Software": None})
    print("\n## pairs")
    pairs(study)
    print("\n## cost")
    cost(study)


if __name__ == "__main__":
    main()
