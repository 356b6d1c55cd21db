"""Results as a benchmark might leave them, made up from a seed: repositories differ, tasks in them more, models most."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from etude.bench.trials import Header, Outcome, Trial, TrialLog

CATEGORIES = ("debugging", "new feature", "iterate on a feature", "migration")
GENERATORS = ("mutation", "deletion", "version", "history")
STYLES = ("terse", "trace", "premise", "full")
HEADER = Header(
    integrity={"network": False, "git history": "one commit", "tests": "restored"}, harness="1", tasks="c0ffee" * 10,
    sampling={"temperature": 1.0, "top_p": 1.0}, about={"tasks": 60, "packages": 6, "median lines changed": 14.0},
)  # fmt: skip


def trials(
    skills: Mapping[str, float], *, packages: int = 6, tasks: int = 10, k: int = 5, seed: int = 0, invalid: float = 0.02
) -> list[Trial]:
    """Return k trials a task of each model; a skill from 0 to 1 is about the share it passes."""
    world = Random(seed)
    found = []
    for number in range(packages * tasks):
        package = f"package-{number % packages}-with-a-name"[: 9 + 5 * (number % packages)]
        ease = world.gauss(0, 0.25) + 0.1 * (number % packages - packages / 2)
        shape = {"task": f"{package}-{number:03}", "package": package, "category": world.choice(CATEGORIES),
                 "generator": world.choice(GENERATORS), "style": world.choice(STYLES)}  # fmt: skip
        for model, skill in skills.items():
            found += [
                _trial(Random(f"{seed} {model} {number} {each}"), model, skill, ease, each, shape, invalid)
                for each in range(k)
            ]
    return found


def _trial(
    dice: Random, model: str, skill: float, ease: float, number: int, shape: Mapping[str, Any], invalid: float
) -> Trial:
    outcome: Outcome = (
        "invalid" if dice.random() < invalid else "pass" if dice.random() < (skill + ease if skill else 0) else "fail"
    )
    if outcome == "invalid":
        return Trial(model=model, number=number, outcome=outcome, why="the sandbox did not start", **shape)
    turns = 1 + int(dice.lognormvariate(2.2, 0.5))
    written = int(turns * dice.lognormvariate(5 + 2 * skill, 0.4))
    parts = {"thinking": written // 2, "calls": written // 3, "said": written - written // 2 - written // 3}
    some: dict[str, Any] = {
        "tokens": parts | {"written": written, "read": 90 * written, "cached": 80 * written, "answers": 4 * written}
    }
    passed = {"fail_to_pass": 3 if outcome == "pass" else dice.randint(0, 2), "pass_to_pass": 40}
    quality: dict[str, float | None] = {name: float(max(0, int(dice.gauss(1 - skill, 1)))) for name in QUALITY_COUNTS}
    quality |= {"lines": float(dice.randint(2, 60)), "reference_lines": 14.0, "comment_density": dice.random() / 3}
    premise = float(dice.random() < skill) if shape["style"] == "premise" else None
    seen = {"claimed": float(dice.random() < 0.7), "unverified": float(dice.random() < 0.5), "silent": 0.0, "open_todos": 0.0,
            "premise_noticed": premise, "malformed": float(dice.random() < 0.2)}  # fmt: skip
    return Trial(
        model=model, number=number, outcome=outcome, passed=passed, expected={"fail_to_pass": 3, "pass_to_pass": 40}, calls=turns + 2,
        turns=turns, seconds=9.5 * turns, stop=dice.choice(["finished"] * 4 + ["turns"]), quality=quality if dice.random() < 0.9 else {},
        interaction=seen, trace=f"traces/{model}-{number}.json", **shape, **some,
    )  # fmt: skip


QUALITY_COUNTS = (
    "files", "lint", "complexity", "reference_complexity", "unrelated_files", "unrelated_functions", "churn", "scratch_files",
    "debug_prints", "commented_code", "unparsable", "reference_comment_density",
)  # fmt: skip


def write(folder: Path, made: list[Trial], header: Header = HEADER) -> Path:
    with TrialLog(folder, header) as log:
        for trial in made:
            log.add(trial)
    return folder
