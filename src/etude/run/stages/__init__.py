"""All kinds of stages, one file each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.recipe.recipe import DATA, StageEntry
from etude.run.stages.base import BaseSettings, BaseStage
from etude.run.stages.bench import BenchStage
from etude.run.stages.compare import CompareStage
from etude.run.stages.data import DataStage
from etude.run.stages.extend import ExtendStage
from etude.run.stages.merge import MergeStage
from etude.run.stages.mtp import MtpStage
from etude.run.stages.pretrain import CptStage, PretrainStage
from etude.run.stages.release import ReleaseStage
from etude.run.stages.rl import RlStage
from etude.run.stages.sft import SftStage

if TYPE_CHECKING:
    from etude.run.stage import Stage

BASE = "base"
STAGES: dict[str, Stage] = {
    BASE: BaseStage(),
    DATA: DataStage(),
    "pretrain": PretrainStage(),
    "cpt": CptStage(),
    "extend": ExtendStage(),
    "sft": SftStage(),
    "mtp": MtpStage(),
    "rl": RlStage(),
    "merge": MergeStage(),
    "compare": CompareStage(),
    "bench": BenchStage(),
    "release": ReleaseStage(),
}


def base_entry(word: str) -> StageEntry:
    """Return the stage that fetches a recipe's base."""
    return StageEntry(BASE, BASE, BaseSettings(base=word))
