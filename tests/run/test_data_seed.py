"""A corpus with a seed of its own is the same for runs that differ in theirs; without one it is the run's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from etude.data.settings import DataSettings
from etude.run.stages.data import DataStage

if TYPE_CHECKING:
    from pathlib import Path


def inputs(folder: Path, run_seed: int, **more: Any) -> dict[str, Any]:
    source = {"name": "tree", "licence": "MIT", "folder": str(folder)}
    return DataStage().inputs(DataSettings.model_validate({"source": [source], **more}), "parent", run_seed)


def test_its_own_seed_is_what_counts(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    assert inputs(tmp_path, 0) != inputs(tmp_path, 1)
    assert inputs(tmp_path, 0, seed=7) == inputs(tmp_path, 1, seed=7) == inputs(tmp_path, 7)
    assert inputs(tmp_path, 0, seed=0) == inputs(tmp_path, 0)  # 0 is a seed, not the lack of one


def test_settings_that_came_later_do_not_make_finished_corpora_anew(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    later = {"kind", "repair"}
    assert not later & inputs(tmp_path, 0)["settings"]["source"][0].keys()
    repairs = DataSettings.model_validate(
        {"source": [{"name": "tree", "licence": "MIT", "folder": str(tmp_path), "kind": "repair"}]}
    )
    assert later <= DataStage().inputs(repairs, "parent", 0)["settings"]["source"][0].keys()
