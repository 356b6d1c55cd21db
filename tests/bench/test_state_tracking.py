from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from etude.bench import state_tracking
from etude.data.codebase import FENCE, EditChain, read_codebase
from etude.errors import UserError
from etude.jsonl import MetricsLog
from etude.lineage.compute import ComputeShape
from etude.models.load import load_tokeniser
from etude.progress import Reporter
from etude.work import Work
from tests import tiny

CHAINS = [
    EditChain("a.py", ("one\n", "one\ntwo\n", "one\n2\n"), "made"),
    EditChain("b.py", ("x\n", "y\n"), "git"),
]


def distance_by_hand(left: str, right: str) -> int:
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, start=1):
        previous, row[0] = row[0], i
        for j, b in enumerate(right, start=1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (a != b))
    return row[-1]


@given(st.text("ab\n", max_size=12), st.text("ab\n", max_size=12))
def test_the_distance_is_levenshtein(left: str, right: str) -> None:
    assert Levenshtein.distance(left, right) == distance_by_hand(left, right)


def test_the_prompt_shows_the_start_and_each_change_and_ends_open() -> None:
    assert state_tracking.prompt(CHAINS[0]) == (
        "The file a.py at the start:\n```\none\n```\n\n"
        "Change 1:\n```diff\n@@ -1 +1,2 @@\n one\n+two\n```\n\n"
        "Change 2:\n```diff\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n```\n\n"
        "The file a.py after all 2 changes:\n```\n"
    )


def test_what_is_written_ends_at_the_fence() -> None:
    assert state_tracking.written_file(f"x = 1\n{FENCE}\nand more") == "x = 1\n"
    assert state_tracking.written_file("x = 1\n") == "x = 1\n"


def test_a_perfect_and_a_copying_writer_score_as_they_must(tiny_base: Path, tmp_path: Path, quiet: Reporter) -> None:
    tokeniser = load_tokeniser(tiny_base)
    for number, (name, version) in enumerate((("perfect", -1), ("copying", 0))):
        work = Work(tmp_path, MetricsLog(tmp_path / f"{number}.jsonl"), quiet, tmp_path)
        texts = iter([chain.versions[version] + FENCE for chain in CHAINS])

        def write(prompts: list[list[int]], budget: int, texts: object = texts) -> list[list[int]]:
            assert budget > 0
            return [tokeniser(next(texts))["input_ids"] for _ in prompts]  # type: ignore[call-overload]

        units = state_tracking.tracking_units(name, CHAINS, tokeniser, tiny.CONTEXT)
        state_tracking.track(work, name, units, tokeniser, ComputeShape(1, ()), write, lambda: 0.0)
        found = state_tracking.result(work, name, CHAINS, seed=0)
        assert (found.tasks, found.from_git) == (2, 1)
        assert found.copying_per_character == (2 + 1) / (6 + 2)
        if name == "perfect":
            assert (found.distance, found.exact) == (0, 2)
        else:
            assert found.distance_per_character == found.copying_per_character
            assert found.distance == 1.5


def test_a_task_that_does_not_fit_the_context_is_refused(tiny_base: Path) -> None:
    with pytest.raises(UserError, match=r"needs \d+ tokens, but small has a context of 20; lower compare.state_chars"):
        state_tracking.tracking_units("small", CHAINS, load_tokeniser(tiny_base), 20)


def test_git_history_comes_first_and_made_chains_fill_up(tmp_path: Path) -> None:
    tree = tiny.write_tree(tmp_path / "tree")
    tiny.git(tree, "init", "-q")
    for text in ("a = 1\nb = 2\n", "a = 1\nb = 3\n", "a = 1\nb = 3\nc = 4\n"):
        (tree / "early.py").write_text(text)
        tiny.git(tree, "add", "-A")
        tiny.git(tree, "commit", "-qm", "change")
    chains = state_tracking.make_chains(read_codebase(tree), 4, 2, 200, seed=0)
    assert [chain.origin for chain in chains] == ["git", "made", "made", "made"]
    assert chains[0].versions == ("a = 1\nb = 2\n", "a = 1\nb = 3\n", "a = 1\nb = 3\nc = 4\n")
    assert len({chain.path for chain in chains}) == 4
