from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from etude.bench import perplexity
from etude.bench.perplexity import BitsResult, FileBits, difference
from etude.data.codebase import read_codebase
from etude.inference.transformers_reference import rolling_windows, token_nlls
from etude.jsonl import MetricsLog
from etude.lineage.compute import Attention, ComputeShape
from etude.models.load import load_model, load_tokeniser
from etude.progress import Reporter
from etude.work import Work

SHAPE = ComputeShape(100, (Attention(1, 2, 2),))


@pytest.fixture
def work(tmp_path: Path, quiet: Reporter) -> Work:
    return Work(tmp_path, MetricsLog(tmp_path / "work/metrics.jsonl"), quiet, tmp_path)


def measured(base: Path, tree: Path, work: Work, window: int, stride: int) -> BitsResult:
    model, tokeniser = load_model(base, torch.device("cpu")), load_tokeniser(base)
    code = read_codebase(tree)
    tokens = perplexity.tokenise(code, tokeniser)
    units = perplexity.scoring_units("tiny", rolling_windows(len(tokens.ids), window, stride))
    perplexity.score(
        work, "tiny", units, tokens, SHAPE, lambda ids, each: token_nlls(model, ids, each).tolist(), lambda: 0.0
    )
    return perplexity.result(work, "tiny", code, tokens, seed=0)


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
    rows = list(work.metrics.rows("tiny/bits/"))
    assert [row["flops"] for row in rows] == [
        200 * n + 2 * 1 * 4 * n * (n + 1) // 2 for n in (row["tokens"] for row in rows)
    ]


def test_special_tokens_in_a_file_stay_text(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = '<|end|>'\n")
    tokens = perplexity.tokenise(read_codebase(tmp_path), load_tokeniser(tiny_base))
    assert tokens.ids.count(0) == 1  # only the one that stands before the text
    assert tokens.lossy_files == 0


def test_without_a_token_to_stand_first_the_first_is_not_scored(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("zebra = 1\n")
    tokeniser = load_tokeniser(tiny_base)
    tokeniser.bos_token = tokeniser.eos_token = None
    tokens = perplexity.tokenise(read_codebase(tmp_path), tokeniser)
    assert tokens.unscored_bytes == len(tokeniser.decode(tokens.ids[:1]).encode())
    assert len(tokens.file_of) == len(tokens.ids)


def result_of(bits: list[float], sizes: list[int]) -> BitsResult:
    files = [FileBits(f"{index}", size, cost) for index, (size, cost) in enumerate(zip(sizes, bits, strict=True))]
    return BitsResult(sum(bits) / sum(sizes), None, sum(sizes), 1, len(sizes), 0, files)


def test_a_small_but_steady_lead_is_seen_through_files_that_differ_much() -> None:
    sizes = [100, 100, 200, 50, 400, 100]
    costs = [50.0, 150.0, 120.0, 90.0, 300.0, 20.0]
    behind, interval = difference(
        result_of([c + 0.01 * s for c, s in zip(costs, sizes, strict=True)], sizes), result_of(costs, sizes), 0
    )
    assert behind == pytest.approx(0.01)
    assert interval == pytest.approx((0.01, 0.01))
