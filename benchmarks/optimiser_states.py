"""What less memory for AdamW costs in loss: sprout, trained on with each way to keep masters and moments, three seeds.

    python benchmarks/optimiser_states.py [--steps 30]

All ways but the first compute in bf16, as on a GPU, and see the same rows in the same order for a seed. `nearest` is the control: bf16
weights under torch's own AdamW, rounded to the nearest. The loss is that of held-out rows of the same files, in nats a token, after
the last step. Sprout has seen Python before, so there is little left to learn, and differences are those of the optimiser alone.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch

from etude.models.bases import resolve
from etude.models.load import load_model, load_tokeniser
from etude.training.attention import isolate
from etude.training.batch import Rows
from etude.training.objectives.next_token import NextToken
from etude.training.optimiser import MixedWeights, Optimiser, Weights, factor
from etude.training.settings import OptimiserSettings, ScheduleSettings
from report import finish

WAYS = {
    "float32 everywhere": ("float32", "float32"),
    "bf16, float32 masters and states": ("float32", "float32"),
    "bf16, float32 masters, 8-bit states": ("float32", "8bit"),
    "bf16, no masters, float32 states": ("none", "float32"),
    "bf16, no masters, 8-bit states": ("none", "8bit"),
    "nearest": ("float32", "float32"),
}
ROWS, LENGTH, HELD = 4, 256, 32
SEEDS = (0, 1, 2)


def rows_of(tokens: torch.Tensor) -> Rows:
    count, length = tokens.shape
    places = torch.arange(length).repeat(count, 1)
    bounds = torch.arange(0, count * length + 1, length, dtype=torch.int32)
    return Rows(tokens, tokens.roll(-1, 1), (places < length - 1).float(), places, bounds)


def corpus(folder: Path) -> torch.Tensor:
    """Return the package's own source in rows of tokens, in an order that seeds change."""
    tokeniser = load_tokeniser(folder)
    text = "\n\n".join(file.read_text() for file in sorted(Path("src/etude").rglob("*.py")))
    tokens = torch.tensor(tokeniser(text, verbose=False).input_ids)
    return tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)


def trained(folder: Path, way: str, lines: torch.Tensor, steps: int, seed: int, lr: float) -> float:
    masters, states = WAYS[way]
    model = load_model(folder, torch.device("cpu"), torch.float32)
    isolate(model, "auto")
    objective = NextToken(model)
    if way.startswith("bf16, float32"):
        weights: Any = MixedWeights(model)
    else:
        if way != "float32 everywhere":
            for weight in model.parameters():
                weight.data = weight.data.bfloat16()
        weights = Weights(model)
    torch.manual_seed(seed)
    order = torch.randperm(len(lines) - HELD)
    settings = OptimiserSettings(lr=lr, masters=masters, states=states)  # type: ignore[arg-type]
    optimiser = Optimiser(weights.masters, settings)
    for step in range(steps):
        rows = rows_of(lines[order[step * ROWS : (step + 1) * ROWS]])
        (objective.loss(model, rows).sum / objective.weight(rows)).backward()
        weights.collect()
        torch.nn.utils.clip_grad_norm_(list(weights.masters.values()), settings.clip)
        optimiser.set_rate(factor(ScheduleSettings(warmup=0.1), step, steps))
        optimiser.update()
        weights.publish()
    held = rows_of(lines[-HELD:])
    with torch.no_grad():
        return float((objective.nats(model, held).double() * held.weights_BT).sum() / objective.weight(held))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=3e-4)
    given = parser.parse_args()
    folder = resolve("sprout").folder
    lines = corpus(folder)
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        losses = [trained(folder, way, lines, given.steps, seed, given.lr) for seed in SEEDS]
        rows.append(
            {"way": way, "losses": losses, "mean": statistics.fmean(losses), "deviation": statistics.stdev(losses)}
        )
        print(rows[-1], flush=True)
    base = next(row["losses"] for row in rows if row["way"] == "bf16, float32 masters and states")
    for row in rows:
        row["difference"] = [loss - other for loss, other in zip(row["losses"], base, strict=True)]
    before = trained(folder, "float32 everywhere", lines, 0, 0, given.lr)
    what = {
        "base": "sprout",
        "steps": given.steps,
        "tokens_a_step": ROWS * LENGTH,
        "lr": given.lr,
        "heldout_tokens": HELD * LENGTH,
    }
    finish("optimiser_states", rows, "cpu", **what, loss_before=before)


if __name__ == "__main__":
    main()
