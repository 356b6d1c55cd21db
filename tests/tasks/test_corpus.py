"""The corpus of cheats, and combinations of them: none is paid, whether or not anybody reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.tasks.score import Score
from tests.tasks import small
from tests.tasks.cheats import CODE
from tests.tasks.corpus import CHEATS, KINDS, codebase, combined, played

COMBINED = [f"combination {seed}" for seed in range(40)]


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Score, str]]:
    cheats = {**CHEATS, **{name: combined(int(name.split()[1])) for name in COMBINED}}
    for honest in (small.SOLVED, small.BROKEN.replace("result = value", "result = result + value")):
        cheats[f"honest: {len(honest)}"] = {CODE: honest, "notes.txt": "mine"}
    return small.run(played(codebase(tmp_path_factory.mktemp("corpus")), cheats))


@pytest.mark.parametrize("cheat", [*CHEATS, *COMBINED])
def test_no_cheat_is_paid_though_nobody_reads_it(scores: dict[str, tuple[Score, str]], cheat: str) -> None:
    assert scores[cheat][0].outcome == "fail", scores[cheat]


def test_honest_work_is(scores: dict[str, tuple[Score, str]]) -> None:
    honest = [each for name, each in scores.items() if name.startswith("honest")]
    assert [(score.outcome, score.fail_to_pass, score.pass_to_pass, said) for score, said in honest] == [
        ("pass", 1, 1, "")
    ] * 2


def test_the_corpus_is_as_large_as_the_page_says(scores: dict[str, tuple[Score, str]]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "benchmark.md").read_text(encoding="utf-8")
    read = sum(bool(scores[cheat][1]) for cheat in CHEATS)
    assert f"{len(CHEATS)} cheats of {len(KINDS)} kinds" in page
    assert f"{read} of them are also refused when they are read" in page
