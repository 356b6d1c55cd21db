from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.rewards.quality import measure
from etude.rewards.reward import crowding, faults, style
from tests.rewards.episodes import BEFORE, CHANGE, CLEAN

if TYPE_CHECKING:
    from etude.rewards.quality import Change

FIX = BEFORE.replace(" + c", " - c")
THOUGHTS = "".join(f"        # wait, maybe number {n} is the one\n" for n in range(12))


def judged(after: str, more: Change | None = None) -> float:
    """The faults that are found in what a file has become, by the real measure."""
    return faults(measure({"src/boxes.py": (BEFORE, after), **(more or {})}, CHANGE))


def test_the_reference_itself_is_without_fault() -> None:
    assert judged(FIX) == 0
    assert style(CLEAN) == 0


@pytest.mark.parametrize(
    ("after", "blame"),
    [
        (FIX.replace("a = 1", "a = 1\n        unused = [x for x in [1]]"), 0.5),  # two findings
        (FIX.replace("a = 1", "print(1)\n        a = 1"), 0.5),
        (FIX.replace("a = 1", "# b = a + 1\n        a = 1"), 0.5 + 4 * 0.3 / 0.8 * 3 / 20),
        (FIX.replace("return", "retrun"), 4.0),
    ],
)
def test_what_a_reviewer_would_send_back(after: str, blame: float) -> None:
    assert judged(after) == pytest.approx(blame)


def test_a_scratch_file_is_one_fault() -> None:
    assert judged(FIX, {"debug_it.py": (None, "x = 1\n")}) == 1.0


def test_thinking_in_comments_costs_and_one_comment_on_a_small_fix_hardly() -> None:
    hidden = judged(FIX.replace("        return", f"{THOUGHTS}        return"))
    usual = judged(FIX.replace("- c", "- c  # the lid"))
    assert hidden > 2
    assert usual < 0.5


def test_comments_are_measured_by_the_reference_if_it_has_many_and_by_the_usual_share_if_not() -> None:
    changed = replace(CLEAN, lines=30, comment_density=0.6)
    assert crowding(changed) == pytest.approx(0.4 / 0.8)
    assert crowding(replace(changed, reference_comment_density=0.5)) == pytest.approx(0.1 / 0.5)
    assert crowding(replace(changed, reference_comment_density=None)) == pytest.approx(0.4 / 0.8)
    assert crowding(replace(changed, comment_density=1.0, reference_comment_density=1.0)) == 0
    assert crowding(replace(changed, comment_density=0.2)) == 0
    assert crowding(replace(changed, comment_density=None)) == 0
    assert crowding(replace(changed, lines=5)) == pytest.approx(0.1 / 0.8)


def test_nothing_changed_is_no_better_than_a_scratch_file_left() -> None:
    assert style(None) == style(replace(CLEAN, lines=0)) == style(replace(CLEAN, scratch_files=1)) == -0.5


COUNTS = st.integers(0, 50)
FOUND = st.fixed_dictionaries({
    "lines": st.integers(1, 100), "lint": COUNTS, "debug_prints": COUNTS, "commented_code": COUNTS, "scratch_files": COUNTS, "unparsable": COUNTS,
    "comment_density": st.none() | st.floats(0, 1), "reference_comment_density": st.none() | st.floats(0, 1),
})  # fmt: skip


@given(FOUND, st.sampled_from(["lint", "debug_prints", "commented_code", "scratch_files", "unparsable"]))
def test_it_is_bounded_and_each_fault_more_costs_more(found: dict[str, Any], more: str) -> None:
    before = style(replace(CLEAN, **found))
    after = style(replace(CLEAN, **found | {more: found[more] + 1}))
    assert -1 < after < before <= 0
