from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from etude.bench import base_comparison
from etude.bench.base_comparison import (
    BitsResult,
    Candidate,
    CompareConfig,
    FileBits,
    _licence,
    difference,
    measure_bits,
    measure_state,
    tokenise,
)
from etude.data.codebase import FENCE, EditChain, read_codebase
from etude.errors import UserError
from etude.inference import transformers_reference
from etude.jsonl import MetricsLog
from etude.lineage.compute import forward_flops
from etude.models.load import load_model, load_tokeniser
from etude.progress import Reporter
from etude.work import Work
from tests import tiny

APACHE = (Path(__file__).parents[2] / "LICENSE").read_text()
CPU = torch.device("cpu")


@pytest.fixture
def work(tmp_path: Path, quiet: Reporter) -> Work:
    return Work(tmp_path, MetricsLog(tmp_path / "work/metrics.jsonl"), quiet, tmp_path)


def candidate(folder: Path) -> Candidate:
    return Candidate("tiny", folder, CPU, None)


def measured(base: Path, tree: Path, work: Work, window: int, stride: int) -> BitsResult:
    config = CompareConfig(on=str(tree), window=window, stride=stride)
    return measure_bits(candidate(base), read_codebase(tree), config, work)


@pytest.mark.parametrize(
    ("files", "listed", "licence", "must_read"),
    [
        ({"LICENSE": APACHE}, None, "Apache-2.0", False),
        ({"LICENSE": APACHE, "NOTICE": "by us"}, None, "Apache-2.0", False),
        ({"LICENSE-CODE": APACHE, "LICENSE-MODEL": "not for sale"}, None, "Apache-2.0 + unknown text", True),
        ({"LICENSE": "not for sale"}, None, "unknown text", True),
        ({}, "MIT", "MIT (as listed, text not seen)", False),
        ({}, None, "no licence file", True),
    ],
)
def test_the_licence_is_that_of_all_its_texts(
    tmp_path: Path, files: dict[str, str], listed: str | None, licence: str, must_read: bool
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    found, duties = _licence(tmp_path, listed)
    assert found == licence
    assert ("unknown licence: read it" in duties) == must_read


def test_bits_per_byte_equal_transformers_loss_times_tokens_over_bytes(
    tiny_base: Path, tmp_path: Path, work: Work
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a.py").write_text("def add(left, right):\n    return left + right\n")
    (tree / "b.py").write_text("import os\nprint(os.sep, 'é✓')\n")
    model, tokeniser = load_model(tiny_base, torch.device("cpu")), load_tokeniser(tiny_base)
    texts = [(tree / name).read_text() for name in ("a.py", "b.py")]
    ids = [tokeniser.bos_token_id] + [token for text in texts for token in tokeniser(text)["input_ids"]]
    with torch.inference_mode():
        loss = model(torch.tensor([ids]), labels=torch.tensor([ids])).loss.item()
    total_bytes = sum(len(text.encode()) for text in texts)
    found = measured(tiny_base, tree, work, window=256, stride=128)
    assert found.tokens == len(ids) - 1
    assert found.bytes == total_bytes
    assert found.bits_per_byte == pytest.approx(loss * found.tokens / total_bytes / math.log(2), rel=1e-6)
    assert sum(file.bits for file in found.by_file) == pytest.approx(found.bits_per_byte * total_bytes)
    assert found.lossy_files == 0


def test_scoring_goes_on_where_it_stopped(tiny_base: Path, code_tree: Path, work: Work, tmp_path: Path) -> None:
    whole = measured(tiny_base, code_tree, work, window=64, stride=32)
    lines = (tmp_path / "work/metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) > 4
    (tmp_path / "resumed").mkdir()
    (tmp_path / "resumed/metrics.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:20])
    log = MetricsLog(tmp_path / "resumed/metrics.jsonl")
    assert log.torn_bytes == 20
    resumed = measured(tiny_base, code_tree, Work(tmp_path, log, work.reporter, tmp_path), 64, 32)
    assert resumed == whole


def test_flops_and_tokens_are_counted(tiny_base: Path, code_tree: Path, work: Work) -> None:
    measured(tiny_base, code_tree, work, window=64, stride=32)
    rows, shape = list(work.metrics.rows("cpu/tiny/bits/")), candidate(tiny_base).shape.compute
    assert [row["flops"] for row in rows] == [forward_flops(shape, row["tokens"]) for row in rows]
    assert {row["tokens"] for row in rows[:-1]} == {64}


def test_special_tokens_in_a_file_stay_text(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = '<|end|>'\n")
    tokens = tokenise(read_codebase(tmp_path), candidate(tiny_base))
    assert tokens.ids.count(0) == 1  # only the one that stands before the text
    assert tokens.lossy_files == 0


def test_without_a_token_to_stand_first_the_first_is_not_scored(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("zebra = 1\n")
    nameless = candidate(tiny_base)
    tokeniser = nameless.tokeniser
    tokeniser.bos_token = tokeniser.eos_token = None
    tokens = tokenise(read_codebase(tmp_path), nameless)
    assert tokens.unscored_bytes == len(tokeniser.decode(tokens.ids[:1]).encode())
    assert len(tokens.file_of) == len(tokens.ids)


def result_of(bits: list[float], sizes: list[int]) -> BitsResult:
    files = [FileBits(f"{index}", size, cost) for index, (size, cost) in enumerate(zip(sizes, bits, strict=True))]
    return BitsResult(sum(bits) / sum(sizes), None, sum(sizes), 1, len(sizes), 0, files)


def test_a_small_but_steady_lead_is_seen_through_files_that_differ_much() -> None:
    sizes = [100, 100, 200, 50, 400, 100]
    costs = [50.0, 150.0, 120.0, 90.0, 300.0, 20.0]
    behind, interval = difference(
        result_of([c + 0.01 * s for c, s in zip(costs, sizes, strict=True)], sizes), result_of(costs, sizes)
    )
    assert behind == pytest.approx(0.01)
    assert interval == pytest.approx((0.01, 0.01))


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
    assert base_comparison.prompt(CHAINS[0]) == (
        "The file a.py at the start:\n```\none\n```\n\n"
        "Change 1:\n```diff\n@@ -1 +1,2 @@\n one\n+two\n```\n\n"
        "Change 2:\n```diff\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n```\n\n"
        "The file a.py after all 2 changes:\n```\n"
    )


@pytest.mark.parametrize(("version", "distance", "exact"), [(-1, 0.0, 2), (0, 1.5, 0)])
def test_a_perfect_and_a_copying_writer_score_as_they_must(
    version: int, distance: float, exact: int, tiny_base: Path, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written ends at the fence."""
    texts = iter([f"{chain.versions[version]}{FENCE}\nand more" for chain in CHAINS])

    def write(_: Any, tokeniser: Any, prompts: list[list[int]], budget: int, *_more: Any) -> list[list[int]]:
        assert budget > 0
        return [tokeniser(next(texts))["input_ids"] for _ in prompts]

    monkeypatch.setattr(transformers_reference, "write_greedily", write)
    scores = measure_state(candidate(tiny_base), CHAINS, work)
    assert (scores.tasks, scores.from_git) == (2, 1)
    assert scores.copying_per_character == (2 + 1) / (6 + 2)
    assert (scores.distance, scores.exact) == (distance, exact)
    assert scores.distance_per_character == (0 if exact else scores.copying_per_character)


def test_a_task_that_does_not_fit_the_context_is_refused(tiny_base: Path) -> None:
    large = [EditChain("a.py", ("word " * tiny.CONTEXT, "word\n"), "made")]
    wanted = rf"needs \d+ tokens, but tiny has a context of {tiny.CONTEXT}; lower compare.state_chars"
    with pytest.raises(UserError, match=wanted):
        base_comparison.tracking_units(candidate(tiny_base), large)


def test_git_history_comes_first_and_made_chains_fill_up(tmp_path: Path) -> None:
    tree = tiny.write_tree(tmp_path / "tree")
    tiny.git(tree, "init", "-q")
    for text in ("a = 1\nb = 2\n", "a = 1\nb = 3\n", "a = 1\nb = 3\nc = 4\n"):
        (tree / "early.py").write_text(text)
        tiny.git(tree, "add", "-A")
        tiny.git(tree, "commit", "-qm", "change")
    chains = base_comparison.make_chains(read_codebase(tree), 4, 2, 200, seed=0)
    assert [chain.origin for chain in chains] == ["git", "made", "made", "made"]
    assert chains[0].versions == ("a = 1\nb = 2\n", "a = 1\nb = 3\n", "a = 1\nb = 3\nc = 4\n")
    assert len({chain.path for chain in chains}) == 4
