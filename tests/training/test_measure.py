"""Bits per byte against the plain definition: transformers on each piece alone, bytes counted in the decoded text."""

from __future__ import annotations

import itertools
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.data.build import Build
from etude.data.loader import Batch, Corpus
from etude.data.settings import DataSettings
from etude.jsonl import MetricsLog
from etude.progress import Reporter
from etude.report.training import RESULTS, write_report
from etude.training.attention import isolate
from etude.training.measure import Bits, bits_by_domain, bytes_per_token, heldout_domains, table
from etude.training.objectives.next_token import NextToken
from etude.work import Work
from tests import tiny
from tests.data.planted import code
from tests.training import sessions

CPU = torch.device("cpu")
LENGTH = 64


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A corpus of two domains, built as any other; documents of 20 to 600 tokens."""
    root = tmp_path_factory.mktemp("measured")
    texts = {
        "one": [code(f"one{index}", index % 4 + 1) for index in range(30)],
        "two": [code(f"two{index}", 2) for index in range(20)],
        "notes": [
            f"Note {index}. " + " ".join(f"word{index * 7 + n}" for n in range(index % 9 + 9)) + ".\n"
            for index in range(40)
        ],
    }
    for name, each in texts.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in each))
    source = [
        {
            "name": name,
            "jsonl": str(root / f"{name}.jsonl"),
            "licence": "MIT",
            "domain": "docs" if name == "notes" else "code",
        }
        for name in texts
    ]
    settings = DataSettings.model_validate({"source": source, "length": LENGTH, "heldout": 0.3, "separator": "<|end|>", "workers": 1,
                                            "filters": {"scrub": False}, "duplicates": {"near": False}})  # fmt: skip
    with MetricsLog(root / "corpus" / "metrics.jsonl") as metrics:
        work = Work(root / "corpus", metrics, Reporter(quiet=True), root / "cache")
        Build(settings, work, seed=1, base=tiny.save_model(root / "base")).run()
    return Corpus.open(root / "corpus")


def pieces(batch: Batch, row: int, length: int) -> list[list[int]]:
    """Return the pieces of a row as they are after cutting it, padding left out, one token after another."""
    found: list[list[int]] = []
    for place, (token, document, position) in enumerate(
        zip(batch.tokens[row].tolist(), batch.documents[row], batch.positions[row], strict=True)
    ):
        if document < 0:
            break
        if position == 0 or place % length == 0:
            found.append([])
        found[-1].append(token)
    return found


def heldout_rows(corpus: Corpus, domain: str) -> list[tuple[Batch, int]]:
    return [(batch, row) for batch in corpus.heldout(domain, batch=1) for row in range(len(batch.tokens))]


def plain_score(model: Any, parts: list[list[int]]) -> tuple[float, int]:
    """Return nats and tokens scored, by transformers alone."""
    nats, tokens = 0.0, 0
    for part in parts:
        if len(part) > 1:
            ids = torch.tensor([part])
            with torch.no_grad():
                nats += model(input_ids=ids, labels=ids).loss.item() * (len(part) - 1)
            tokens += len(part) - 1
    return nats, tokens


@pytest.mark.parametrize("length", [64, 32])
@pytest.mark.parametrize("domain", ["code", "docs"])
def test_bits_per_byte_are_what_they_say(corpus: Corpus, domain: str, length: int) -> None:
    model = sessions.fresh_model().eval()
    rows = heldout_rows(corpus, domain)
    scores = [plain_score(model, pieces(batch, row, length)) for batch, row in rows]
    nats, tokens = (sum(column) for column in zip(*scores, strict=True))
    whole = [token for batch, row in rows for part in pieces(batch, row, LENGTH) for token in part]
    text = tiny.tokeniser().decode(whole, skip_special_tokens=True)
    size = len(text.encode())
    isolate(model, "auto")
    assert heldout_domains(corpus) == ["code", "docs"]
    assert bytes_per_token(corpus)[domain] == pytest.approx(size / len(whole))
    found = bits_by_domain(
        partial(NextToken(model).nats, model), corpus, length=length, rows=10_000, micro=3, device=CPU
    )
    ours = found[domain]
    assert ours.tokens.sum() == tokens  # and nothing of the rows that fill up the last three
    assert ours.tokens.all()
    assert ours.per_byte == pytest.approx(nats / tokens * len(whole) / size / math.log(2), rel=1e-6)


@pytest.mark.parametrize("wanted", [1, 3, 7])
def test_so_many_rows_evenly_spread(corpus: Corpus, wanted: int) -> None:
    model = sessions.fresh_model().eval()
    rows = heldout_rows(corpus, "code")
    assert len(rows) > 14
    chosen = [rows[index * len(rows) // wanted] for index in range(wanted)]
    expected = [plain_score(model, pieces(batch, row, LENGTH)) for batch, row in chosen]
    isolate(model, "auto")
    nats = partial(NextToken(model).nats, model)
    found = bits_by_domain(nats, corpus, length=LENGTH, rows=wanted, micro=2, device=CPU)["code"]
    assert found.tokens.tolist() == [tokens for _, tokens in expected]
    assert found.nats.tolist() == pytest.approx([each for each, _ in expected], rel=1e-5)


def bits(nats: list[float], tokens: list[float]) -> Bits:
    return Bits(np.array(nats), np.array(tokens), 2.0)


def test_by_hand() -> None:
    one = math.log(2)
    before, after = bits([40 * one, 20 * one], [10, 10]), bits([30 * one, 14 * one], [10, 10])
    assert before.per_byte == pytest.approx(1.5)  # 60 bits of 20 tokens of 2 bytes
    assert after.per_byte == pytest.approx(1.1)
    change, margin = after.change_since(before)
    assert change == pytest.approx(-0.4)
    # −10 and −6 bits in 20 bytes each: −0.5 and −0.3; deviation √0.02, over √2 rows
    assert margin == pytest.approx(12.7062 * math.sqrt(0.02) / math.sqrt(2), rel=1e-5)
    assert before.change_since(before) == (0.0, 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_the_interval_is_that_of_a_bootstrap_over_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = 300
    tokens = rng.integers(5, 200, rows).astype(float)
    before = tokens * rng.normal(3, 0.5, rows)
    after = before - tokens * rng.normal(0.5, 0.02 + seed / 10, rows) - rng.normal(2, 1, rows)
    change, margin = Bits(after, tokens, 3.0).change_since(Bits(before, tokens, 3.0))
    drawn = rng.integers(0, rows, (4000, rows))
    changes = (after - before)[drawn].sum(1) / tokens[drawn].sum(1) / math.log(2) / 3.0
    assert change == pytest.approx((after.sum() - before.sum()) / tokens.sum() / math.log(2) / 3.0)
    assert margin == pytest.approx(1.96 * changes.std(), rel=0.08)


@pytest.mark.parametrize("rows", [3, 4, 10])
def test_few_rows_hold_the_truth_as_often_as_they_say(rows: int) -> None:
    rng, held = np.random.default_rng(rows), 0
    for _ in range(1000):
        tokens = rng.integers(900, 1024, rows).astype(float)
        before = tokens * rng.normal(3, 0.5, rows)
        after = before + tokens * rng.normal(-0.1, 0.05, rows)
        change, margin = Bits(after, tokens, 3.0).change_since(Bits(before, tokens, 3.0))
        held += abs(change + 0.1 / math.log(2) / 3.0) <= margin
    assert 0.93 <= held / 1000 <= 0.98


def test_a_single_row_has_no_interval_and_is_still_reported(tmp_path: Path) -> None:
    before, after = {"code": bits([9.0], [3])}, {"code": bits([6.0], [3])}
    (row,) = table(before, after)
    assert row["margin"] is None
    assert row["change"] == pytest.approx(-1.0 / 2 / math.log(2))
    write_report(tmp_path, "one row", {"domains": [row], "curve": [], "notes": []})
    assert json.loads((tmp_path / RESULTS).read_text())["domains"][0]["tokens"] == 3
    assert "| – |" in (tmp_path / "report.md").read_text()


def test_the_table_has_a_row_for_every_domain() -> None:
    before = {"code": bits([9.0, 8.0], [3, 3]), "docs": bits([5.0, 4.0], [2, 2])}
    after = {"docs": bits([6.0, 5.0], [2, 2]), "code": bits([6.0, 6.0], [3, 3])}
    for row, domain in itertools.zip_longest(table(before, after), ["code", "docs"]):
        assert row["domain"] == domain
        assert (row["before"], row["after"]) == (before[domain].per_byte, after[domain].per_byte)
        assert row["change"] == pytest.approx(row["after"] - row["before"])
        assert (row["change"] > 0) == (domain == "docs")
