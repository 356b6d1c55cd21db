"""docs/rl.md has every setting with its default."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel

from etude.questions.settings import QuestionSettings
from etude.rewards.reward import LengthSettings, RewardSettings
from etude.rl.settings import CorrectionSettings, CurriculumSettings, KlSettings, RlSettings, TeacherSettings

PAGE, ARENAS = (Path(__file__).parents[2] / "docs" / name for name in ("rl.md", "arenas.md"))
TABLES: dict[str, type[BaseModel]] = {
    "[rl]": RlSettings, "[rl.rewards]": RewardSettings, "[rl.rewards.effort]": LengthSettings, "[rl.kl]": KlSettings,
    "[rl.teacher]": TeacherSettings,
    "[rl.correction]": CorrectionSettings, "[rl.curriculum]": CurriculumSettings, "[rl.questions]": QuestionSettings,
}  # fmt: skip


@pytest.mark.parametrize("heading", TABLES)
def test_every_setting_is_explained_with_its_default(heading: str) -> None:
    page = ARENAS if heading == "[rl.questions]" else PAGE
    part = page.read_text().partition(f"\n### `{heading}`")[2].partition("\n#")[0]
    cells = [line.split("|") for line in part.splitlines() if line.startswith("| `")]
    told = {re.findall(r"`(\w+)`", key)[0]: default.strip(" `") for _, key, default, *_ in cells}
    fields = TABLES[heading].model_fields
    assert set(told) == set(fields)
    for name, field in fields.items():
        if field.is_required() or isinstance(field.default, BaseModel):
            assert told[name] == ("required" if field.is_required() else "")
        elif field.default is None:
            assert told[name] == "none"
        else:
            assert tomllib.loads(f"value = {told[name]}") == {"value": field.default}, name
