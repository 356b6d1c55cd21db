"""Does the beginning of a curve tell its end? `etude plan --from` held against the curves of RL and CPT that are kept.

    python benchmarks/forecast.py            # reads benchmarks/results, writes forecast-cpu.json; a few minutes on one core
    python benchmarks/forecast.py --figure docs/results/forecast.png

Each curve is fitted on its first 40 or 60 % and its end predicted: the last bits per byte, the last fifth of RL's steps.
The naive guess is that it stays where the first part ended. `told` are those that `etude plan` would predict. Then across budgets:
runs of fewer tokens predict what runs of more came to.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from etude.run.forecast import FREE, Curve, bits_curve, check, comparable, doubt, predict, share_curve, worth
from report import RESULTS, finish
from study_read import BLUE, GREY, RED, Study

STUDIES = ("study-h200", "study-sprout-cpu", "study-experts-h200")
ALONE = ("sprout-h200", "smollm2-cpt-h200")
LATER = "quickstart"  # read for the first time when the method was as it is
SHARES = (0.4, 0.6)
SHOWN = ("sprout-h200 code", "smollm2-cpt-h200 code", "study-h200 ladder-16m-0 cpt code", "study-sprout-cpu heads-0 rl solved",
         "study-h200 stale-0-0 rl solved", "study-experts-h200 replay-2 rl solved")  # fmt: skip


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def domains(stage: dict[str, Any], name: str) -> dict[str, Curve]:
    """Return the curve of each domain."""
    points = stage.get("curve") or [{"bits_per_byte": {}}]
    return {
        f"{name} {domain}": bits_curve([(each["tokens"], each["bits_per_byte"][domain]) for each in points])
        for domain in points[0]["bits_per_byte"]
    }


def solved(steps: list[dict[str, Any]], what: str = "solved") -> Curve:
    return share_curve([(each["step"], each[what], each["episodes"]) for each in steps if each.get(what) is not None])


def curves() -> dict[str, dict[str, Curve]]:
    """Return every curve that is kept, once, by what it is of."""
    found: dict[str, dict[str, Curve]] = {"bits per byte, CPT": {}, "bits per byte, SFT": {}}
    for name in ALONE:
        found["bits per byte, CPT"] |= domains(read(name), name)
    for study in STUDIES:
        rl = found.setdefault(f"solved, {study}", {})
        for run, stages in read(study)["runs"].items():
            for stage, each in stages.items():
                if stage in {"cpt", "extend", "sft"}:
                    kind = "SFT" if stage == "sft" else "CPT"
                    found[f"bits per byte, {kind}"] |= domains(each, f"{study} {run} {stage}")
                elif "steps" in each:
                    rl[f"{study} {run} {stage} solved"] = solved(each["steps"])
    whole = [stage["steps"] for stage in read("quickstart-whole-cpu")["stages"] if stage.get("steps")]
    runs = [*(run["steps"] for run in read("quickstart-runs-cpu")["runs"]), *whole]
    numbered = [[each | {"step": number} for number, each in enumerate(steps, 1)] for steps in runs]
    found[f"solved, {LATER}"] = {
        f"quickstart {number} rl solved": solved(steps) for number, steps in enumerate(numbered)
    }
    found[f"bits per byte, CPT, {LATER}"] = domains(read("quickstart-cpu")["cpt"]["results"], "quickstart cpt")
    return {kind: _once(several) for kind, several in found.items()}


def _once(several: dict[str, Curve]) -> dict[str, Curve]:
    """Leave out stages that several arms share."""
    return {
        name: several[name]
        for name in {curve.values.tobytes(): name for name, curve in reversed(several.items())}.values()
    }


def trial(kind: str, name: str, curve: Curve, share: float) -> dict[str, Any]:
    """Predict the end of a curve from its first part."""
    part = curve.part(share)
    where, came, _ = curve.end()
    row = {"of": kind, "curve": name, "share": share, "points": len(part.at), "came": round(came, 4)}
    if len(part.at) <= FREE:
        return row | {"refused": "too few points to fit"}
    checked = check([curve], share)
    found = checked.forecast
    value, low, high = (round(float(each[0]), 4) for each in (found.values, found.low, found.high))
    naive = round(checked.naive, 4)
    return row | {
        "value": value,
        "low": low,
        "high": high,
        "naive": naive,
        "refused": doubt([part], where),
    }


def summary(what: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how often the intervals held, and the errors beside those of the naive guess."""
    fitted = [row for row in rows if "value" in row]
    line: dict[str, Any] = {"what": what, "curves": len(rows)}
    for name, several in (("all", fitted), ("told", [row for row in fitted if not row["refused"]])):
        line[name] = len(several)
        if several:
            line[f"{name}: held"] = f"{fmean(row['low'] <= row['came'] <= row['high'] for row in several):.0%}"
            line[f"{name}: width"] = round(fmean(row["high"] - row["low"] for row in several), 3)
            for whose, of in (("error", "value"), ("naive", "naive")):
                line[f"{name}: {whose}"] = round(fmean(abs(row[of] - row["came"]) for row in several), 4)
    return line


def budget(what: str, smaller: list[Curve], where: float, ends: list[float]) -> dict[str, Any]:
    """Predict what runs of more tokens came to, from those of fewer."""
    found, came = predict(smaller, [where]), fmean(ends)
    value, low, high = (round(float(each[0]), 4) for each in (found.values, found.low, found.high))
    naive = round(fmean(each.end()[1] for each in comparable(smaller)), 4)
    return {"what": what, "value": value, "low": low, "high": high, "came": round(came, 4), "naive": naive,
            "held": low <= came <= high, "refused": doubt(smaller, where)}  # fmt: skip


def across() -> list[dict[str, Any]]:
    """Return what smaller budgets predict of larger ones."""
    study, rows = Study(read("study-h200")), []
    cpt = {
        size: [domains(study.stage(f"ladder-{size}", seed, "cpt"), "")[" code"] for seed in (0, 1)]
        for size in ("1m", "4m", "16m")
    }
    for few, many in (("1m", "4m"), ("4m", "16m")):
        ends = [curve.end() for curve in cpt[many]]
        rows.append(
            budget(f"code, curves of CPT {few} → end of {many}", cpt[few], ends[0][0], [end[1] for end in ends])
        )
    sweep = read("continued_pretraining-h200")
    for domain in ("rust", "code", "docs"):
        series = [
            [sweep["before"][domain] + each[domain]["values"][seed] for each in sweep["tokens"]] for seed in range(3)
        ]
        tokens = [each["tokens"] for each in sweep["tokens"]]
        for known, to in ((4, 4), (4, 5), (5, 5)):
            smaller = [
                Curve(np.array(tokens[:known], float), np.array(each[:known]), np.ones(known), bits=True)
                for each in series
            ]
            what = f"{domain}, ends of {tokens[0]:,} … {tokens[known - 1]:,} → of {tokens[to]:,}, three seeds"
            rows.append(budget(what, smaller, tokens[to], [each[to] for each in series]))
    last = {
        size: [solved(study.steps(f"ladder-{size}", seed)).end() for seed in (0, 1)]
        for size in ("none", "1m", "4m", "16m")
    }
    places = {"none": 1.0, "1m": 1_048_576.0, "4m": 4_063_232.0, "16m": 16_121_856.0}
    points = [(places[size], value, weight) for size in ("none", "1m", "4m") for _, value, weight in last[size]]
    what = "solved at the end of RL, after CPT of none, 1m, 4m → after 16m"
    rows.append(budget(what, [share_curve(points)], places["16m"], [end[1] for end in last["16m"]]))
    return rows


def exchange() -> dict[str, Any]:
    """Return what a bit per byte of CPT was worth in tasks solved at the end of RL, over the runs of the ladder."""
    study, pairs = Study(read("study-h200")), []
    base = study.stage("ladder-16m", 0, "cpt")["curve"][0]["bits_per_byte"]["code"]
    for size in ("none", "1m", "4m", "16m"):
        for seed in (0, 1):
            bits = base if size == "none" else domains(study.stage(f"ladder-{size}", seed, "cpt"), "")[" code"].end()[1]
            pairs.append((bits, solved(study.steps(f"ladder-{size}", seed)).end()[1]))
    draws = worth(pairs)
    assert draws is not None
    low, middle, high = (round(float(each), 3) for each in np.quantile(draws, [0.025, 0.5, 0.975]))
    return {
        "pairs": [[round(each, 4) for each in pair] for pair in pairs],
        "solved_per_bit": middle,
        "low": low,
        "high": high,
    }


def draw(path: Path) -> None:
    """Draw some curves: what was fitted, what was predicted from 60 % of it, and what came."""
    from matplotlib.figure import Figure

    known = {name: curve for several in curves().values() for name, curve in several.items()}
    figure = Figure(figsize=(12, 6.4), layout="constrained")
    for axis, name in zip(figure.subplots(2, 3).flatten(), SHOWN, strict=True):
        curve = known[name]
        part = curve.part(0.6)
        last, end = float(part.at[-1]), curve.end()[0]
        near, far = np.linspace(part.at[0], last, 60), np.linspace(last, curve.at[-1], 30)
        found = predict([part], [*near, *far])
        axis.plot(near, found.values[:60], color=BLUE, label="fitted")
        axis.plot(far, found.values[60:], color=RED, linestyle="--", label="predicted")
        axis.fill_between(
            far, found.low[60:], found.high[60:], color=RED, alpha=0.15, linewidth=0, label="95 % interval"
        )
        seen, size = len(part.at), 14 * curve.weights
        axis.scatter(part.at, part.values, s=size[:seen], color=BLUE, zorder=3)
        axis.scatter(
            curve.at[seen:],
            curve.values[seen:],
            s=size[seen:],
            facecolor="white",
            edgecolor=GREY,
            zorder=3,
            label="what came",
        )
        if not curve.bits:
            axis.set_ylim(0, 1.03)
            axis.plot([end], [curve.end()[1]], "D", color="black", markersize=5, label="its mean, last fifth")
        said = doubt([part], end)
        axis.set_title(f"{name}\n{'refused' if said else 'told'}", loc="left", fontsize=9)
        axis.set_xlabel("millions of tokens" if curve.bits else "steps of RL", fontsize=8)
        if curve.bits:
            axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}")
        axis.set_ylabel("bits per byte" if curve.bits else "solved", fontsize=8)
        axis.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figure", type=Path)
    if (figure := parser.parse_args().figure) is not None:
        draw(figure)
        return
    trials = [
        trial(kind, name, curve, share)
        for kind, all_of in curves().items()
        for name, curve in all_of.items()
        for share in SHARES
    ]
    lines = [
        summary(f"{kind}, first {share:.0%}", [row for row in trials if (row["of"], row["share"]) == (kind, share)])
        for kind in dict.fromkeys(row["of"] for row in trials)
        for share in SHARES
    ]
    budgets = across()
    for row in budgets:
        print(json.dumps(row, ensure_ascii=False))
    finish("forecast", lines, "cpu", across=budgets, exchange=exchange(), trials=trials)


if __name__ == "__main__":
    main()
