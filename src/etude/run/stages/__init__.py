"""All kinds of stages, one file each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.recipe.recipe import DATA, StageEntry
from etude.run.stages.base import BaseSettings, BaseStage
from etude.run.stages.compare import CompareStage
from etude.run.stages.data import DataStage

if TYPE_CHECKING:
    from etude.run.stage import Stage

BASE = "base"
STAGES: dict[str, Stage] = {BASE: BaseStage(), "compare": CompareStage(), DATA: DataStage()}


def base_entry(word: str) -> StageEntry:
    """Return the stage that fetches a recipe's base."""
    return StageEntry(BASE, BASE, BaseSettings(base=word))
