"""What continued pretraining gains and costs, at sprout's scale: replay, re-warming, early mixing, loss against tokens.

    python benchmarks/continued_pretraining.py MODEL CORPUS --out FILE

MODEL is sprout, pretrained on Python and its documentation; CORPUS is recipes/sprout.toml's, whose Rust it has never seen.
Every figure is the mean of three seeds (order of the data; for early mixing also the initial weights) with a 95% interval by
Student's t. All runs share one session: weights, optimiser, guard and data are set anew for each, compiled kernels are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from etude.data.loader import Corpus, Loader
from etude.models.load import load_model
from etude.run.train import shares_by_source
from etude.training.batch import CorpusRows
from etude.training.cuda_graphs import Replay
from etude.training.distributed import World
from etude.training.loop import Guard
from etude.training.measure import bits_by_domain
from etude.training.optimiser import Optimiser, factor
from etude.training.run import corpus_session
from etude.training.settings import GuardSettings, OptimiserSettings, ScheduleSettings, TrainSettings

TARGET, OTHERS = "rust", {"code": 0.88, "docs": 0.12}
PEAK = 8e-3  # sprout's pretraining: Muon; embeddings and vectors at half of it
BATCH, LENGTH, ROWS = 32, 2048, 96
MILLION = 10**6
SEEDS = (1, 2, 3)
T95 = 4.303  # Student's t for three values, two-sided 95%


class Lab:
    """One compiled model for all runs."""

    def __init__(self, model: Path, corpus: Path) -> None:
        self.corpus = Corpus.open(corpus)
        self.folder = tempfile.TemporaryDirectory()
        loaded = load_model(model, torch.device("cpu"), torch.float32)
        settings = TrainSettings(tokens=1, batch=BATCH, micro=BATCH, evaluations=0)
        batches = Loader(self.corpus, batch=BATCH)
        self.session = corpus_session(loaded, settings, batches, LENGTH, World(), Path(self.folder.name))
        self.start = {name: weight.clone() for name, weight in self.session.weights.masters.items()}
        self.seen = 0

    def train(self, start: dict[str, torch.Tensor], shares: dict[str, float], tokens: int, peak: float, seed: int,
              *, kind: str = "cosine", optimiser: str = "muon") -> dict[str, torch.Tensor]:  # fmt: skip
        """Train from some weights and return those it ends with."""
        session, loop = self.session, self.session.loop
        steps = -(-tokens // (BATCH * LENGTH))
        with torch.no_grad():
            for name, weight in session.weights.masters.items():
                weight.copy_(start[name])
        session.weights.publish()
        chosen = (
            OptimiserSettings(name="muon", lr=peak, other_lr=peak / 2)
            if optimiser == "muon"
            else OptimiserSettings(lr=peak)
        )
        schedule = ScheduleSettings(kind="cosine") if kind == "cosine" else ScheduleSettings(kind="wsd", decay=0.6)
        loop.optimiser = Optimiser(session.weights.masters, chosen, replayed=loop.graphs is not None)
        if loop.graphs:
            loop.graphs = Replay(loop.learn, loop.optimiser.update)
        loop.guard = Guard(GuardSettings())
        loop.factor = lambda step: factor(schedule, step, steps)
        batches = Loader(self.corpus, seed=seed, batch=BATCH, shares=shares_by_source(self.corpus, shares), workers=2)
        loop.source = CorpusRows(batches, LENGTH, ranks=1)
        loop.done, loop._ahead = 0, None  # noqa: SLF001 - a new run on the same loop
        for _ in loop.steps(steps):
            self.seen += BATCH * LENGTH
        batches.close()
        return {name: weight.clone() for name, weight in session.weights.masters.items()}

    def bits(self, weights: dict[str, torch.Tensor]) -> dict[str, float]:
        """Measure some weights on what is held out."""
        with torch.no_grad():
            for name, weight in self.session.weights.masters.items():
                weight.copy_(weights[name])
        self.session.weights.publish()
        found = bits_by_domain(
            self.session.nats,
            self.corpus,
            length=LENGTH,
            rows=ROWS,
            micro=BATCH,
            device=self.session.device,
        )
        return {domain: each.per_byte for domain, each in found.items()}

    def random(self, seed: int) -> dict[str, torch.Tensor]:
        """Return new weights of the same shape."""
        torch.manual_seed(seed)
        made = AutoModelForCausalLM.from_config(self.session.model.config, dtype=torch.float32)
        return {name: weight.detach().to(self.session.device) for name, weight in made.named_parameters()}


def mix(target: float) -> dict[str, float]:
    """Return shares with so much of the target; the rest as in pretraining."""
    rest = {domain: share * (1 - target) for domain, share in OTHERS.items()} if target < 1 else {}
    return {TARGET: target, **rest} if target else rest


def summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Return mean and half the 95% interval of each domain."""
    result = {}
    for domain in runs[0]:
        values = [run[domain] for run in runs]
        result[domain] = {"mean": statistics.fmean(values), "margin": T95 * statistics.stdev(values) / math.sqrt(len(values)),
                          "values": values}  # fmt: skip
    return result


def experiments(lab: Lab) -> dict[str, Any]:
    """Run them all."""
    before = lab.bits(lab.start)
    found: dict[str, Any] = {"before": before}
    budget, usual = 8 * MILLION, 0.3 * PEAK

    def arm(replay: float, peak: float, tokens: int, optimiser: str = "muon") -> dict[str, Any]:
        runs = [
            lab.bits(lab.train(lab.start, mix(1 - replay), tokens, peak, seed, optimiser=optimiser)) for seed in SEEDS
        ]
        changes = summary([{domain: run[domain] - before[domain] for domain in run} for run in runs])
        print(f"replay {replay:.0%} peak {peak:.4g} tokens {tokens / MILLION:g}M {optimiser}",
              {domain: f"{each['mean']:+.4f}±{each['margin']:.4f}" for domain, each in changes.items()}, flush=True)  # fmt: skip
        return changes

    found["replay"] = [{"share": share, **arm(share, usual, budget)} for share in (0.0, 0.05, 0.1, 0.25)]
    middle = found["replay"][1]
    shared = {domain: middle[domain] for domain in before}
    found["rewarm"] = [
        {"of_peak": 0.1, **arm(0.05, 0.1 * PEAK, budget)},
        {"of_peak": 0.3, **shared},
        {"of_peak": 1.0, **arm(0.05, PEAK, budget)},
    ]
    found["tokens"] = [
        {"tokens": tokens * MILLION, **(arm(0.05, usual, tokens * MILLION) if tokens * MILLION != budget else shared)}
        for tokens in (1, 2, 4, 8, 16, 32)
    ]
    found["line"] = line([entry["tokens"] for entry in found["tokens"]], [entry[TARGET] for entry in found["tokens"]])
    found["optimiser"] = {"adamw": arm(0.05, 2e-3, budget, "adamw"), "muon": shared}
    found["mixing"] = mixing(lab, 40 * MILLION)
    return found


def mixing(lab: Lab, total: int) -> dict[str, Any]:
    """Compare the target from the start with the target at the end only: as many tokens of everything, as many steps."""
    early, late = [], []
    for seed in SEEDS:
        weights = lab.train(lab.random(seed), mix(0.05), total, PEAK, seed, kind="wsd")
        early.append(lab.bits(weights))
        weights = lab.train(lab.random(seed), mix(0.0), round(0.9 * total), PEAK, seed, kind="wsd")
        weights = lab.train(weights, mix(0.5), round(0.1 * total), 0.3 * PEAK, seed)
        late.append(lab.bits(weights))
        print("early", early[-1], "late", late[-1], flush=True)
    difference = summary(
        [{domain: two[domain] - one[domain] for domain in one} for one, two in zip(early, late, strict=True)]
    )
    return {"total_tokens": total, "early": summary(early), "late": summary(late), "late_minus_early": difference}


def line(tokens: list[int], changes: list[dict[str, Any]]) -> dict[str, Any]:
    """Fit the target's change by a line and by a parabola in log tokens; is the bend more than noise?"""
    x = np.repeat(np.log2(np.array(tokens) / MILLION), len(SEEDS))
    y = np.concatenate([entry["values"] for entry in changes])
    fits = {degree: np.polyfit(x, y, degree) for degree in (1, 2)}
    left = {degree: float(((y - np.polyval(fit, x)) ** 2).sum()) for degree, fit in fits.items()}
    freedom = len(x) - 3
    return {
        "per_doubling": float(fits[1][0]), "r_squared": 1 - left[1] / float(((y - y.mean()) ** 2).sum()),
        "bend": float(fits[2][0]), "f_of_bend": (left[1] - left[2]) / (left[2] / freedom), "degrees_of_freedom": freedom,
    }  # fmt: skip


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    began = time.perf_counter()
    lab = Lab(args.model, args.corpus)
    found = experiments(lab)
    seconds = time.perf_counter() - began
    import transformers

    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    head = {
        "script": "continued_pretraining.py",
        "command": "python benchmarks/continued_pretraining.py MODEL CORPUS",
        "hardware": hardware,
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "corpus": lab.corpus.digest,
        "tokens_trained": lab.seen,
        "seconds": round(seconds, 1),
    }
    args.out.write_text(json.dumps({**head, **found}, indent=1) + "\n")
    print(json.dumps({**head, "line": found["line"]}))


if __name__ == "__main__":
    main()
