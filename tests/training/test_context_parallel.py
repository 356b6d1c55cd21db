"""Ranks that share rows compute what one rank computes of whole ones: losses, gradients, measurements."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from etude.data.loader import Batch
from etude.errors import UserError
from etude.jsonl import MetricsLog
from etude.training.attention import isolate
from etude.training.batch import Rows, rows_of
from etude.training.context_parallel import Context, context_of, try_out
from etude.training.distributed import World, join
from etude.training.objectives.next_token import NextToken
from tests import tiny
from tests.training import sessions
from tests.training.test_world import assert_close, free_port, run

LENGTH = 32
SHAPES: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
        "query_pre_attn_scalar": 16,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
}
SMALL = {"vocab_size": tiny.VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}  # fmt: skip
FAMILIES = [*tiny.FAMILIES, *SHAPES]


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SMALL, **SHAPES[family]) if family in SHAPES else tiny.config_of(family)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.normal_()
    assert isolate(model, "auto") == "documents"
    return model


def rows(seed: int) -> Rows:
    """Return three rows: of one document, of several that every cut goes through, and of two and padding; some is not learnt."""
    random = np.random.default_rng(seed)
    sizes = [[LENGTH], [3, 7, 11, 6, 5], [13, 9, 10]]
    positions = np.stack([np.concatenate([np.arange(size) for size in row]) for row in sizes]).astype(np.int32)
    documents = np.stack([np.repeat(np.arange(len(row)), row) for row in sizes]).astype(np.int32)
    documents[2, 22:] = -1
    tokens = random.integers(1, tiny.VOCABULARY, positions.shape)
    return rows_of(Batch(tokens, documents, positions, [], random.random(positions.shape) < 0.7))


def gradients_of(family: str, context: Context) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """Return loss and gradients, added up over ranks, and the nats of every position."""
    model, part = model_of(family), context.part(rows(1))
    objective = NextToken(model)
    loss = objective.loss(model, part).sum
    loss.backward()
    nats = context.whole(objective.nats(model, part))
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    total = loss.detach()
    for value in (total, *gradients.values()) if context.size > 1 else ():
        dist.all_reduce(value)
    return total, gradients, nats


def compare(rank: int, size: int, port: int, folder: Path) -> None:
    """Be one rank of several; the first one writes what came out."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    context = context_of(join(), size, LENGTH)
    found = {family: gradients_of(family, context) for family in FAMILIES}
    if rank == 0:
        torch.save(found, folder / "found.pt")
    model = model_of("llama")
    objective = NextToken(model)
    try_out(context, lambda given: objective.nats(model, given), torch.device("cpu"))
    with pytest.raises(UserError, match="computes something else of a part of a row"):
        try_out(context, lambda given: objective.nats(model, given).cumsum(1), torch.device("cpu"))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 4])
def test_loss_and_gradients_of_shared_rows_are_those_of_whole_ones(tmp_path: Path, size: int) -> None:
    port = free_port()
    assert sessions.processes(compare, *((rank, size, port, tmp_path) for rank in range(size))) == [0] * size
    found = torch.load(tmp_path / "found.pt")
    for family in FAMILIES:
        loss, gradients, nats = gradients_of(family, Context())
        got_loss, got, got_nats = found[family]
        assert float(got_loss) == pytest.approx(float(loss), rel=1e-5), family
        assert torch.allclose(got_nats, nats, atol=1e-4), family
        assert got.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert (got[name] - gradient).abs().max() <= 1e-4 * gradient.abs().max() + 1e-7, (family, name)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_have_every_position_once_and_equal_parts_of_the_triangle(ranks: int) -> None:
    given = rows(2)
    parts = [Context(ranks, rank).part(given) for rank in range(ranks)]
    order = torch.cat(
        [
            torch.cat([torch.arange(LENGTH)[each] for each in Context(ranks, rank).chunks(LENGTH)])
            for rank in range(ranks)
        ]
    )
    whole = slice(None) if ranks == 1 else order.argsort()
    for name in ("tokens_BT", "targets_BT", "weights_BT", "positions_BT"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts], 1)[:, whole], getattr(given, name))
    assert torch.equal(torch.cat([part.live() for part in parts], 1)[:, whole], given.live())
    areas = {int(order.view(ranks, -1)[rank].sum()) for rank in range(ranks)}
    assert len(areas) == 1


@pytest.mark.parametrize(
    "changes",
    [{}, {"recompute": True}, {"family": "qwen3_moe", "experts": {"balance": "aux_loss"}}],
    ids=["llama", "recompute", "experts"],
)
@pytest.mark.parametrize(("size", "together"), [(2, 2), (4, 2)])
def test_a_training_with_shared_rows_is_that_of_one_rank(
    tmp_path: Path, changes: dict[str, Any], size: int, together: int
) -> None:
    corpus = sessions.write_corpus(tmp_path / "corpus")
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    for folder, count, more in ((alone, 1, {}), (shared, size, {"context_ranks": together})):
        folder.mkdir()
        run(count, corpus, folder, **{"tokens": 6 * 8 * sessions.LENGTH, **changes}, **more)
    if "family" not in changes:
        assert_close(shared, alone, steps=6)
        return
    with MetricsLog(shared / "metrics.jsonl") as ours, MetricsLog(alone / "metrics.jsonl") as theirs:
        counted = ["flops"] if size == together else []  # of several groups, one counts for all
        for name in ["loss", "tokens", "learnt", "experts_entropy", "experts_busiest", *counted]:
            got, expected = ([row[name] for row in log.rows("train/")] for log in (ours, theirs))
            assert got == pytest.approx(expected, rel=1e-5), name


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(UserError, match="context_ranks = 2 must divide the number of ranks, 1 here"):
        context_of(World(), 2, 32)
    with pytest.raises(UserError, match="context_ranks = 4 must divide the number of ranks, 6 here"):
        context_of(World(0, 6), 4, 32)
    with pytest.raises(
        UserError, match="rows of 36 tokens cannot be shared by 4 ranks; their length must be a multiple of 8"
    ):
        context_of(World(0, 8), 4, 36)
