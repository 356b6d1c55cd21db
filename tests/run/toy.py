"""A stage that is quick but real: it makes a model out of its parent's, in units, with the work counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict
from safetensors.numpy import load_file, save_file

from etude.recipe.recipe import check
from etude.run.folder import MODEL
from etude.run.runner import Runner
from etude.run.stage import Job, Outcome, Stage
from etude.run.stages import STAGES
from etude.toml import Layer
from etude.work import Unit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from etude.progress import Reporter
    from etude.recipe.recipe import Recipe


class ScaleSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    by: float = 1.5
    steps: int = 4


class ScaleStage(Stage):
    """Multiplies every weight, one step at a time; `log` hears of every step done, `on_step` may interfere."""

    settings = ScaleSettings
    makes_model = True

    def __init__(self) -> None:
        self.log: list[str] = []
        self.on_step: Callable[[int], None] = lambda step: None

    def inputs(self, settings: ScaleSettings, parent_digest: str | None, seed: int) -> dict[str, Any]:
        return {"settings": settings.model_dump(), "seed": seed}

    def run(self, settings: ScaleSettings, job: Job) -> Outcome:
        units = [Unit(f"step/{index}", index) for index in range(settings.steps)]
        for unit in job.work.pending("scaling", units, "steps"):
            self.on_step(unit.item)
            self.log.append(f"{job.name}/{unit.item}")
            job.work.metrics.put(unit.key, tokens=10, flops=100, device_seconds=0.5)
        model = job.work.folder / MODEL
        model.mkdir(exist_ok=True)
        for file in job.model.folder.iterdir():
            if file.suffix == ".safetensors":
                factor = np.float32(settings.by**settings.steps)
                save_file({name: values * factor for name, values in load_file(file).items()}, model / file.name)
            elif file.name in {"config.json", "tokenizer.json", "tokenizer_config.json"}:
                (model / file.name).write_bytes(file.read_bytes())
        edges, lineages = [job.model.as_parent()], [job.model.lineage]
        return Outcome(parents=edges, lineages=lineages, device="toy", summary={"by": settings.by})

    def show(self, folder: Path) -> list[str]:
        return [str(folder)]


def recipe_of(base: Path, stages: dict[str, dict[str, Any]], name: str = "toy") -> Recipe:
    """Return a recipe of scaling stages."""
    table = {"name": name, "base": str(base), "stages": list(stages)}
    tables = {stage: {"kind": "scale", **settings} for stage, settings in stages.items()}
    return check([Layer("test", {**table, **tables})], {"scale": ScaleSettings})


def runner(
    folder: Path, cache: Path, stage: ScaleStage, reporter: Reporter, check_stop: Callable[[], None] = lambda: None
) -> Runner:
    """Return a runner that knows the scaling stage and the real base stage."""
    stages: dict[str, Stage] = {"base": STAGES["base"], "scale": stage}
    reporter.check_stop = check_stop
    return Runner(folder, cache, reporter, stages)
