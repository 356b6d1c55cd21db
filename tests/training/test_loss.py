"""The loss against transformers' own, and whatever must not change it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Gemma2Config, RecurrentGemmaConfig

from etude.data.loader import Batch
from etude.errors import UserError
from etude.training import cross_entropy
from etude.training.attention import isolate, packed
from etude.training.batch import cut, micro_batches, piece_bounds, rows_of, target_weights
from etude.training.objectives.next_token import NextToken
from tests import tiny
from tests.training import sessions

SIZES = [[10, 1, 20, 33], [64], [2, 62], [30, 30]]  # the last row ends with padding


def make_batch(sizes: list[list[int]], length: int, seed: int = 0, learnt: bool = False) -> Batch:
    """Return rows of random pieces, padded as the loader does."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, tiny.VOCABULARY, (len(sizes), length))
    documents, positions = np.full((len(sizes), length), -1, np.int32), np.zeros((len(sizes), length), np.int32)
    for row, pieces in enumerate(sizes):
        begin = 0
        for number, size in enumerate([*pieces, length - sum(pieces)]):
            documents[row, begin : begin + size] = number if number < len(pieces) else -1
            positions[row, begin : begin + size] = np.arange(size)
            begin += size
        tokens[row, sum(pieces) :] = 0
    mask = rng.random(tokens.shape) < 0.5 if learnt else None
    return Batch(tokens, documents, positions, ["a"] * len(sizes), mask)


def alone(model: Any, batch: Batch, sizes: list[list[int]]) -> tuple[torch.Tensor, int]:
    """Return transformers' own loss over the pieces one by one, as a sum, and how many tokens it predicted."""
    total, count = torch.zeros(()), 0
    for row, pieces in enumerate(sizes):
        begin = 0
        for size in pieces:
            ids = torch.from_numpy(batch.tokens[row : row + 1, begin : begin + size])
            labels = ids.clone()
            if batch.learnt is not None:
                labels[0][torch.from_numpy(~batch.learnt[row, begin : begin + size])] = -100
            predicted = int((labels[:, 1:] != -100).sum())
            if predicted:
                total = total + model(input_ids=ids, labels=labels, use_cache=False).loss * predicted
            begin, count = begin + size, count + predicted
    return total, count


@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_packed_loss_and_gradients_are_those_of_transformers_unpacked(family: str, learnt: bool) -> None:
    batch = make_batch(SIZES, 64, learnt=learnt)
    model = sessions.fresh_model(family).eval()
    isolate(model, "auto")
    objective, rows = NextToken(model), rows_of(batch)
    loss = objective.loss(model, rows)
    (loss.sum / objective.weight(rows)).backward()
    ours = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    model.set_attn_implementation("sdpa")
    total, count = alone(model, batch, SIZES)
    (total / count).backward()
    assert objective.weight(rows) == count
    assert loss.sum.item() / count == pytest.approx(total.item() / count, rel=1e-6)
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            assert torch.allclose(ours[name], weight.grad, atol=1e-6), name


WINDOWED = {
    "vocab_size": tiny.VOCABULARY, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0,
}  # fmt: skip


def with_sinks() -> Any:
    from transformers import AutoModelForCausalLM, GptOssConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GptOssConfig(**WINDOWED, num_local_experts=4, num_experts_per_tok=2))
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, std=1.0 if name.endswith("sinks") else 0.1)
    return model.eval()


def test_sinks_and_windows_are_learnt_as_by_transformers_unpacked() -> None:
    batch, model = make_batch(SIZES, 64), with_sinks()
    assert isolate(model, "auto") == "documents"
    objective, rows = NextToken(model), rows_of(batch)
    loss = objective.loss(model, rows)
    (loss.sum / objective.weight(rows)).backward()
    ours = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    assert any(name.endswith("sinks") and gradient.abs().max() > 1e-4 for name, gradient in ours.items())
    model.zero_grad()
    model.set_attn_implementation("eager")
    total, count = alone(model, batch, SIZES)
    (total / count).backward()
    assert loss.sum.item() == pytest.approx(total.item(), rel=1e-6)
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            assert torch.allclose(ours[name], weight.grad, atol=1e-6), name


@pytest.mark.parametrize("way", ["documents", "sdpa"])
def test_documents_in_a_row_do_not_see_each_other(way: Any) -> None:
    model = sessions.fresh_model().eval()
    isolate(model, way)
    batch = make_batch(SIZES, 64)
    before = model(**packed(rows_of(batch))).logits.detach()
    batch.tokens[0, 3] = 300  # in the first document of the first row
    after = model(**packed(rows_of(batch))).logits.detach()
    assert not torch.equal(before[0, 3:10], after[0, 3:10])  # the document itself has changed
    assert torch.equal(before[0, :3], after[0, :3])  # not what is before
    assert torch.equal(before[0, 10:], after[0, 10:])  # nor any other document
    assert torch.equal(before[1:], after[1:])


def test_transformers_default_leaks() -> None:
    """The control: the same change, with transformers' own defaults, reaches the other documents."""
    model = sessions.fresh_model().eval()
    model.set_attn_implementation("sdpa")
    batch = make_batch(SIZES, 64)
    positions = torch.from_numpy(batch.positions.astype(np.int64))
    moved = []
    for value in (5, 300):
        batch.tokens[0, 3] = value
        moved.append(model(input_ids=torch.from_numpy(batch.tokens), position_ids=positions).logits.detach())
    assert (moved[0][0, 10:] - moved[1][0, 10:]).abs().max() > 1e-3


def family(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model


def test_a_model_that_carries_memory_from_document_to_document_is_refused() -> None:
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "pad_token_id": 0}
    recurrent = family(RecurrentGemmaConfig(**shape, num_hidden_layers=3))
    with pytest.raises(UserError, match="RecurrentGemmaForCausalLM cannot keep the documents of a row apart"):
        isolate(recurrent, "auto")
    assert isolate(family(Gemma2Config(**shape, num_hidden_layers=2, head_dim=8)), "auto") == "eager"  # it has no sdpa


def test_the_gradient_of_a_bf16_model_is_scaled_exactly() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(6, 8, dtype=torch.bfloat16, requires_grad=True)
    head, targets, weights = torch.randn(5, 8, dtype=torch.bfloat16), torch.tensor([0, 1, 2, 3, 4, 0]), torch.ones(6)
    found = []
    for scale in (1.0, 1 / 1021):  # which bf16 would round
        hidden.grad = None
        (cross_entropy.weighted_sum(hidden, head, targets, weights) * scale).backward()
        assert hidden.grad is not None
        found.append(hidden.grad.float())
    assert torch.equal(found[1], (found[0] / 1021).bfloat16().float())


def test_a_head_that_scales_its_logits_is_noticed() -> None:
    from transformers import AutoModelForCausalLM, GraniteConfig

    common = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    model = AutoModelForCausalLM.from_config(GraniteConfig(**common, logits_scaling=8.0)).eval()
    isolate(model, "auto")
    objective = NextToken(model)
    assert not objective.plain_head
    assert NextToken(sessions.fresh_model()).plain_head
    batch = make_batch(SIZES, 64)
    ours = objective.loss(model, rows_of(batch)).sum.item()
    model.set_attn_implementation("sdpa")
    assert ours == pytest.approx(alone(model, batch, SIZES)[0].item(), rel=1e-6)


@given(st.integers(1, 40), st.integers(2, 50), st.integers(0, 2**31))
@settings(max_examples=25)
def test_chunked_cross_entropy_is_torchs(positions: int, vocabulary: int, seed: int) -> None:
    torch.manual_seed(seed)
    hidden = torch.randn(positions, 8, requires_grad=True)
    head = torch.randn(vocabulary, 8, requires_grad=True)
    targets, weights = torch.randint(vocabulary, (positions,)), torch.rand(positions)
    before, cross_entropy.CHUNK = cross_entropy.CHUNK, 64  # so that there are several chunks
    try:
        ours = cross_entropy.weighted_sum(hidden, head, targets, weights)
        each = cross_entropy.each(hidden, head, targets)
    finally:
        cross_entropy.CHUNK = before
    mine = torch.autograd.grad(ours * 3, (hidden, head))
    expected = torch.nn.functional.cross_entropy(hidden @ head.T, targets, reduction="none")
    theirs = torch.autograd.grad((expected * weights).sum() * 3, (hidden, head))
    assert torch.allclose(each, expected, atol=1e-5)
    assert torch.allclose(ours, (expected * weights).sum(), atol=1e-4)
    for left, right in zip(mine, theirs, strict=True):
        assert torch.allclose(left, right, atol=1e-4)


PIECES = st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=5), min_size=1, max_size=4)


@given(PIECES, st.sampled_from([8, 20, 40]), st.booleans())
def test_targets_are_the_next_tokens_of_the_same_piece(sizes: list[list[int]], length: int, learnt: bool) -> None:
    batch = cut(make_batch(sizes, 40, learnt=learnt), length)
    weights, bounds = target_weights(batch), piece_bounds(batch.positions).tolist()
    flat = {name: getattr(batch, name).ravel() for name in ("tokens", "documents")}
    mask = np.ones(flat["tokens"].size, bool) if batch.learnt is None else batch.learnt.ravel()
    expected = np.zeros(flat["tokens"].size)
    for begin, end in itertools.pairwise(bounds):
        assert begin // length == (end - 1) // length  # a piece lies in one row
        assert len(set(flat["documents"][begin:end])) == 1
        for place in range(begin, end - 1):
            expected[place] = flat["documents"][begin] >= 0 and mask[place + 1]
    assert np.array_equal(weights.ravel(), expected)


@given(PIECES, st.integers(1, 5), st.booleans())
def test_micro_batches_hold_every_row_once(sizes: list[list[int]], rows: int, whole_first: bool) -> None:
    batch = make_batch(sizes, 40)
    parts = list(micro_batches(batch, rows, whole_first=whole_first))
    assert all(part.tokens_BT.shape == (rows, 40) for part in parts)
    assert sum(float(part.weights_BT.sum()) for part in parts) == target_weights(batch).sum()
    found = sorted(row.tobytes() for part in parts for row in part.tokens_BT.numpy() if row.any())
    assert found == sorted(row.tobytes() for row in batch.tokens)
    for part in parts:
        assert bool((part.positions_BT[: part.whole] == torch.arange(40)).all())
        assert part.bounds[-1] == (rows - part.whole) * 40


@pytest.mark.parametrize("change", [{"micro": 1}, {"micro": 3}, {"recompute": True}])
def test_the_split_into_micro_batches_does_not_change_the_loss(tmp_path: Path, change: dict[str, int]) -> None:
    corpus = sessions.write_corpus(tmp_path / "corpus")
    found = []
    for name, chosen in (("plain", {}), ("changed", change)):
        with sessions.session(corpus, tmp_path / name, sessions.settings(tokens=4 * 8 * 32, **chosen)) as training:
            training.run()
        found.append(sessions.losses(tmp_path / name))
    assert found[0] == pytest.approx(found[1], abs=1e-6)


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; run on one by hand")


@gpu
@pytest.mark.parametrize("whole_first", [False, True])
def test_on_a_gpu_documents_do_not_see_each_other(whole_first: bool) -> None:
    """Variable-length flash attention, and cuDNN for rows that are one piece."""
    model = sessions.fresh_model("qwen3").eval().to("cuda", torch.bfloat16)
    isolate(model, "documents")
    batch = make_batch([[10, 1, 20, 33], [64], [2, 62], [64]], 64)

    def logits() -> torch.Tensor:
        (rows,) = micro_batches(batch, 4, whole_first=whole_first)
        assert rows.whole == (2 if whole_first else 0)
        out = model(**packed(rows.to(torch.device("cuda")))).logits.detach().float()
        return out[[2, 0, 3, 1]] if whole_first else out  # rows 1 and 3 came first

    before = logits()
    batch.tokens[0, 3] = 300
    after = logits()
    assert not torch.equal(before[0, 3:10], after[0, 3:10])
    assert torch.equal(before[0, :3], after[0, :3])
    assert torch.equal(before[0, 10:], after[0, 10:])
    assert torch.equal(before[1:], after[1:])


@gpu
@pytest.mark.parametrize("left", [-1, 6])
def test_on_a_gpu_attention_with_sinks_and_its_gradients_are_those_in_float64(left: int) -> None:
    from etude.training.attention import _causal, _with_sinks

    torch.manual_seed(0)
    pieces, device = [40, 7, 81], torch.device("cuda")
    exact = [torch.randn(sum(pieces), heads, 64, device=device, dtype=torch.float64) for heads in (4, 2, 2)]
    exact.append(torch.randn(4, device=device, dtype=torch.float64))
    given = [[each.to(dtype).requires_grad_() for each in exact] for dtype in (torch.float64, torch.bfloat16)]
    query, key, value = (each[None].transpose(1, 2).split(pieces, 2) for each in given[0][:3])
    window = None if left < 0 else left + 1
    parts = zip(query, key, value, strict=True)
    expected = torch.cat([_causal(q, k, v, 0.125, window, given[0][3]) for q, k, v in parts], 2)[0].transpose(0, 1)
    bounds = torch.tensor([0, 40, 47, 128], device=device, dtype=torch.int32)
    got = _with_sinks(*given[1], bounds, bounds, max(pieces), max(pieces), 0.125, left)[0]
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (got * weights.to(got.dtype)).sum().backward()
    assert (got - expected).abs().max() < 0.03
    for one, other in zip(*given, strict=True):
        assert (one.grad - other.grad).abs().max() < 0.03 * one.grad.abs().max()


@gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_on_a_gpu_loss_and_gradients_are_those_of_the_cpu(family: str) -> None:
    batch = make_batch([[10, 1, 20, 33], [64], [2, 62], [64]], 64)
    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        model = sessions.fresh_model(family).eval().to(device, dtype)
        isolate(model, "documents")
        (rows,) = micro_batches(batch, 4, whole_first=True)
        if device == "cpu":
            (rows,) = micro_batches(batch, 4)
        loss = NextToken(model).loss(model, rows.to(torch.device(device)))
        (loss.sum / rows.weights_BT.sum()).backward()
        found.append(
            (loss.sum.item(), {n: w.grad.float().cpu() for n, w in model.named_parameters() if w.grad is not None})
        )
    (cpu, exact), (cuda, rough) = found
    assert cuda == pytest.approx(cpu, rel=2e-3)
    for name, gradient in exact.items():
        if ".experts." not in name:  # which expert is chosen may hang on the last bit
            assert (rough[name] - gradient).norm() < 0.05 * gradient.norm() + 1e-4, name
