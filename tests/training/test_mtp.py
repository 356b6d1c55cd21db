"""MTP heads in training: loss, gradient and acceptance against transformers' own layers, one document at a time, all logits at once."""

from __future__ import annotations

import os
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma2Config
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import MtpLayer

from etude.data.loader import Batch
from etude.errors import Interrupted, UserError
from etude.lineage.compute import ComputeShape, forward_flops
from etude.models.mtp_heads import HEADS, MtpHeads
from etude.models.shape import HEADS_FILE, shape_of
from etude.training import cross_entropy
from etude.training.attention import isolate
from etude.training.batch import rows_of
from etude.training.distributed import World, join
from etude.training.objectives.mtp import MultiToken, drafts
from etude.training.objectives.next_token import NextToken, last_hidden
from etude.training.settings import JointMtpSettings
from tests import tiny
from tests.training import sessions
from tests.training.test_loss import SIZES, make_batch

BETA, DEPTH = 0.5, 3


def with_heads(family: str = "llama", *, shared: bool = True, frozen: bool = True) -> Any:
    """Return a model with heads that say something: fresh ones, their norms and projections shaken."""
    model = sessions.fresh_model(family).eval()
    model.requires_grad_(not frozen)
    torch.manual_seed(1)
    model.mtp = MtpHeads.for_model(model, depth=DEPTH, shared=shared)
    with torch.no_grad():
        for weight in model.mtp.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return model


def theirs(model: Any) -> list[Any]:
    """Return the same layers as transformers has them."""
    decoder = model.get_decoder()
    like = model.config.num_hidden_layers - 1
    made = []
    for layer in model.mtp.layers:
        made.append(
            MtpLayer(decoder.config, type(decoder.layers[like]), type(decoder.norm), like).to(
                layer.eh_proj.weight.dtype
            )
        )
        made[-1].load_state_dict(layer.state_dict())
    return made * DEPTH if model.mtp.shared else made


def alone(model: Any, layers: list[Any], ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the log-probs of one document's trunk, and of each depth for as many positions as have a token so far ahead."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    trunk = last = decoder(input_ids=ids, use_cache=False).last_hidden_state
    found = []
    for ahead, layer in enumerate(layers, 1):
        last = last[:, : ids.shape[1] - ahead]
        if last.shape[1] == 0:
            break
        places = torch.arange(ahead, ids.shape[1])[None]  # they count from the token that goes in: RoPE does not mind
        mask = create_causal_mask(model.config, last, None, None, position_ids=places - ahead)
        rotary = decoder.rotary_emb(last, places)
        last = layer(model.get_input_embeddings()(ids[:, ahead:]), last, rotary, mask, places, None)
        found.append(head(last).log_softmax(-1)[0])
    return head(trunk).log_softmax(-1)[0].detach(), found


def naive(
    model: Any, layers: list[Any], batch: Batch, sizes: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return by depth: Σ KL, Σ Σ min(p, q) and how many positions count, over all documents."""
    divergence, accepted, count = (list(torch.zeros(DEPTH, dtype=torch.float64)) for _ in range(3))
    for row, pieces in enumerate(sizes):
        begin = 0
        for size in pieces:
            here = slice(begin, begin + size)
            log_p, guesses = alone(model, layers, torch.from_numpy(batch.tokens[row : row + 1, here]))
            for depth, log_q in enumerate(guesses, 1):
                for place in range(size - depth - 1):
                    if batch.learnt is not None and not batch.learnt[row, begin + place + depth + 1]:
                        continue
                    p, q = log_p[place + depth], log_q[place]
                    divergence[depth - 1] = divergence[depth - 1] + (p.exp() * (p - q)).sum()
                    accepted[depth - 1] = accepted[depth - 1] + torch.minimum(p.exp(), q.exp()).sum()
                    count[depth - 1] += 1
            begin += size
    return torch.stack(divergence), torch.stack(accepted), torch.stack(count)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_loss_gradient_and_acceptance_are_those_of_transformers_layers(family: str, learnt: bool, shared: bool) -> None:
    batch, model = make_batch(SIZES, 64, learnt=learnt), with_heads(family, shared=shared)
    isolate(model, "auto")
    objective = MultiToken(model, beta=BETA)
    loss, accepted = objective.loss(model, rows_of(batch)), objective.accepted(model, rows_of(batch))
    loss.sum.backward()
    model.set_attn_implementation("sdpa")
    wide = (
        model if "moe" in family or "deepseek" in family else model.double()
    )  # experts are multiplied in float32 at most
    layers = theirs(wide)
    divergence, minimum, count = naive(wide, layers, batch, SIZES)
    shares = torch.tensor([BETA**index for index in range(DEPTH)], dtype=torch.float64)
    shares /= shares.sum()
    expected = (divergence * shares).sum()
    expected.backward()
    assert accepted[1].tolist() == count.tolist()
    assert accepted[0].tolist() == pytest.approx(minimum.tolist(), rel=1e-5)
    assert objective.weight(rows_of(batch)) == pytest.approx(float((count * shares).sum()), rel=1e-6)
    assert loss.sum.item() == pytest.approx(expected.item(), rel=1e-5)
    for layer, other in zip(model.mtp.layers, layers[: len(model.mtp.layers)], strict=True):
        for (name, weight), reference in zip(layer.named_parameters(), other.parameters(), strict=True):
            if reference.grad is not None:
                largest = float(reference.grad.abs().max())
                assert torch.allclose(
                    weight.grad.double(), reference.grad.double(), rtol=1e-3, atol=3e-4 * largest + 1e-7
                ), name
    assert all(weight.grad is None for name, weight in model.named_parameters() if not name.startswith(HEADS))


def test_chunks_do_not_change_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    guesses, target, head = torch.randn(2, 50, 8), torch.randn(50, 8), torch.randn(30, 8, requires_grad=True)
    weights = torch.rand(2, 50)
    seen = []
    for chunk in (1 << 29, 30 * 7):  # all at once, and seven positions at a time
        monkeypatch.setattr(cross_entropy, "CHUNK", chunk)
        learning = guesses.clone().requires_grad_()
        total = cross_entropy.distilled_sum(learning, target, head, weights)
        slopes = torch.autograd.grad(total * 3, [learning, head])
        seen.append([total, *slopes, cross_entropy.accepted(guesses, target, head)])
    for one, other in zip(*seen, strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    log_p, log_q = (target @ head.T).log_softmax(-1).detach(), (guesses @ head.T).log_softmax(-1)
    plain = ((log_p.exp() * (log_p - log_q)).sum(-1) * weights).sum()
    assert seen[0][0].item() == pytest.approx(plain.item(), rel=1e-5)
    assert torch.allclose(seen[0][2], torch.autograd.grad(plain * 3, head)[0], atol=1e-4)


@settings(max_examples=15)
@given(cut=st.integers(1, 31), family=st.sampled_from(["llama", "deepseek_v3"]), seed=st.integers(0, 99))
def test_a_document_never_changes_anothers_drafts(cut: int, family: str, seed: int) -> None:
    sizes = [[cut, 32 - cut]]
    batch, other = make_batch(sizes, 32, seed), make_batch(sizes, 32, seed + 1)
    model = with_heads(family)
    isolate(model, "auto")

    def drafted(rows: Any) -> torch.Tensor:
        with torch.no_grad():
            return drafts(model, rows, last_hidden(model, rows), detached=True)

    plain = drafted(rows_of(batch))
    for kept, changed in ((slice(0, cut), slice(cut, 32)), (slice(cut, 32), slice(0, cut))):
        tokens = batch.tokens.copy()
        tokens[0, changed] = other.tokens[0, changed]
        found = drafted(rows_of(Batch(tokens, batch.documents, batch.positions, ["a"])))
        for depth in range(1, DEPTH + 1):  # a draft stands at its target; the first ones of a piece have none
            own = slice(kept.start + depth, kept.stop)
            assert torch.allclose(plain[depth - 1, 0, own], found[depth - 1, 0, own], atol=1e-5)


def joint_gradients(detach: bool, weight: float = 0.5) -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what is learnt jointly and the gradients of the trunk: joint, and of the next token alone."""
    rows, model = rows_of(make_batch(SIZES, 64, learnt=True)), with_heads(frozen=False)
    isolate(model, "auto")
    plain = NextToken(model).loss(model, rows)
    found = []
    for objective in (
        MultiToken(model, beta=BETA, joint=JointMtpSettings(weight=weight, detach=detach)),
        NextToken(model),
    ):
        model.zero_grad()
        loss = objective.loss(model, rows)
        loss.sum.backward()
        assert objective.weight(rows) == float(rows.weights_BT.sum())
        found.append(
            ({name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}, loss)
        )
    alone_loss = MultiToken(model, beta=BETA).loss(model, rows)
    both = found[0][1]
    assert both.sum.item() == pytest.approx(plain.sum.item() + weight * alone_loss.sum.item(), rel=1e-5)
    assert both.metrics["next_token"].item() == pytest.approx(plain.sum.item(), rel=1e-6)
    return both, found[0][0], found[1][0]


def test_a_detached_trunk_learns_the_next_token_only() -> None:
    _, joint, plain = joint_gradients(detach=True)
    assert {name for name in joint if not name.startswith(HEADS)} == set(plain)
    assert any(name.startswith(HEADS) for name in joint)
    for name, slope in plain.items():
        assert torch.allclose(joint[name], slope, atol=1e-6), name


def test_a_trunk_that_is_not_detached_learns_from_the_heads() -> None:
    _, joint, plain = joint_gradients(detach=False)
    changed = [name for name, slope in plain.items() if not torch.allclose(joint[name], slope, atol=1e-6)]
    assert set(changed) == set(plain)  # the embedding, the layers, the norm, and the head, which is tied


@pytest.mark.parametrize("detach", [True, False])
def test_flops_are_counted(detach: bool) -> None:
    model = with_heads()
    shape = shape_of(model.config).compute
    width, vocabulary, length = 32, tiny.VOCABULARY, 50
    layer = (
        32 * 2 * 32 + 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 5 * width
    )  # projection, q and o, k and v, the rest, norms
    once = forward_flops(ComputeShape(layer, shape.attention[:1]), length)
    head = 2 * width * vocabulary * length
    trunk = forward_flops(shape, length)
    assert MultiToken(model, beta=BETA).flops(shape, length) == trunk + DEPTH * (3 * once + 2 * head)
    joint = MultiToken(model, beta=BETA, joint=JointMtpSettings(detach=detach))
    assert joint.flops(shape, length) == 3 * trunk + DEPTH * (3 * once + (2 if detach else 3) * head)


def test_a_model_with_capped_logits_is_refused() -> None:
    config = Gemma2Config(vocab_size=tiny.VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                          num_key_value_heads=2, head_dim=8, max_position_embeddings=64, final_logit_softcapping=0.1)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    model.mtp = MtpHeads.for_model(model, depth=1)
    isolate(model, "auto")
    with pytest.raises(UserError, match="scales or caps"):
        MultiToken(model, beta=BETA)


def heads_session(corpus: Path, folder: Path, world: World | None = None, **more: Any) -> Any:
    """Return a training of heads on a frozen trunk."""
    model = sessions.fresh_model().requires_grad_(False)
    torch.manual_seed(0)
    model.mtp = MtpHeads.for_model(model, depth=2)
    objective = partial(MultiToken, beta=BETA)
    return sessions.session(corpus, folder, sessions.settings(micro=2), world, model=model, objective=objective, **more)


def train(rank: int, size: int, port: int, corpus: Path, folder: Path) -> None:
    """Train heads in this process, one of several, as torchrun would start it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}  # fmt: skip
    with heads_session(corpus, folder, join()) as training:
        training.run()
        training.session.export(folder / "model")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A corpus, and heads trained on it in one go."""
    folder = tmp_path_factory.mktemp("heads")
    corpus = sessions.write_corpus(folder / "corpus")
    with heads_session(corpus, folder / "work") as training:
        trunk = {
            name: weight
            for name, weight in sessions.weights(training.session.model).items()
            if not name.startswith(HEADS)
        }
        assert training.session.heads_only
        training.run()
        training.session.export(folder / "work" / "model")
        assert all(torch.equal(training.session.model.get_parameter(name), weight) for name, weight in trunk.items())
    return corpus, folder / "work"


def test_only_heads_are_trained_and_saved(straight: tuple[Path, Path]) -> None:
    _, folder = straight
    assert [path.name for path in (folder / "model").iterdir()] == [HEADS_FILE]
    losses = sessions.losses(folder)
    assert losses[-1] < losses[0]


def test_interrupted_heads_come_out_the_same_bit_for_bit(straight: tuple[Path, Path], tmp_path: Path) -> None:
    corpus, folder = straight
    with (
        heads_session(corpus, tmp_path, reporter=sessions.acting_reporter(5, sessions.interrupt)) as training,
        pytest.raises(Interrupted),
    ):
        training.run()
    with heads_session(corpus, tmp_path) as training:
        training.run()
        assert training.session.loop.done == 12
        training.session.export(tmp_path / "model")
    assert sessions.losses(tmp_path) == sessions.losses(folder)
    assert (tmp_path / "model" / HEADS_FILE).read_bytes() == (folder / "model" / HEADS_FILE).read_bytes()


def test_two_ranks_are_one(straight: tuple[Path, Path], tmp_path: Path) -> None:
    corpus, folder = straight
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert sessions.processes(train, *((rank, 2, port, corpus, tmp_path) for rank in range(2))) == [0, 0]
    assert sessions.losses(tmp_path) == pytest.approx(sessions.losses(folder), rel=1e-4)
    ours, theirs = (load_file(each / "model" / HEADS_FILE) for each in (tmp_path, folder))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.allclose(ours[name], weight, atol=2e-3), name
