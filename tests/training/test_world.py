"""Two ranks over gloo are one rank, within float error: losses, weights, what is saved and what is taken up again."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from etude.errors import Interrupted, UserError
from etude.files import read_json, write_json
from etude.jsonl import MetricsLog
from etude.progress import Reporter
from etude.training.distributed import World, join
from etude.training.settings import LoraSettings
from tests.training import sessions

STOPPED = 3


def train(corpus: Path, folder: Path, changes: dict[str, Any], stop_after: int) -> int:
    """Train in this process, which may be one of several; return how it ended."""
    world = join()
    reporter = Reporter(quiet=True)
    model, lora = sessions.fresh_model(changes.pop("family", "llama")), changes.pop("lora", None)
    if not world.leads:  # another rank than the first needs no weights
        with torch.device("meta"):
            model = type(model)(model.config)
            model.tie_weights()
    chosen, lora = sessions.settings(micro=2, **changes), lora and LoraSettings(**lora)
    with sessions.session(corpus, folder, chosen, world, reporter=reporter, model=model, lora=lora) as training:

        def check() -> None:
            if training.session.loop.done == stop_after:
                raise Interrupted(signal.SIGTERM)

        if stop_after:
            reporter.check_stop = check  # of rank 0: the others have no work, and a reporter of their own
        try:
            bits = training.run()
        except Interrupted:
            return STOPPED
        training.session.export(folder / "model")
        per_byte = {when: each["code"].per_byte for when, each in bits.items()}
        write_json(folder / f"bits-{world.rank}.json", per_byte)
    return 0


def take_part(rank: int, size: int, port: int, work: Callable[..., int], *what: Any) -> None:
    """Be one rank of several, as torchrun would start it."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    code = work(*what)
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()
    os._exit(code)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(size: int, corpus: Path, folder: Path, stop_after: int = 0, **changes: Any) -> None:
    port, work = free_port(), changes.pop("work", train)
    codes = sessions.processes(
        take_part, *((rank, size, port, work, corpus, folder, changes, stop_after) for rank in range(size))
    )
    assert codes == [STOPPED if stop_after and work is train else 0] * size


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sessions.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training on one rank."""
    folder = tmp_path_factory.mktemp("alone")
    run(1, corpus, folder)
    return folder


def assert_close(folder: Path, alone: Path, steps: int = 12) -> None:
    """Compare losses of all steps, and how far the weights went."""
    expected = sessions.losses(alone)
    assert len(expected) == steps
    assert sessions.losses(folder) == pytest.approx(expected, rel=1e-5)
    ours, theirs = (load_file(each / "model" / "model.safetensors") for each in (folder, alone))
    assert ours.keys() == theirs.keys()
    start = sessions.tiny_model().state_dict()
    for name, weight in theirs.items():
        moved = (weight - start[name]).norm()
        assert moved > 1e-3
        assert (ours[name] - weight).norm() < 1e-3 * moved, name


def test_two_ranks_are_one(corpus: Path, alone: Path, tmp_path: Path) -> None:
    run(2, corpus, tmp_path)
    assert_close(tmp_path, alone)
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    bits = [read_json(tmp_path / f"bits-{rank}.json") for rank in range(2)]
    assert bits[0] == bits[1]  # every rank knows the measurements
    assert bits[0] == pytest.approx(read_json(alone / "bits-0.json"), rel=1e-5)
    with MetricsLog(tmp_path / "metrics.jsonl") as two, MetricsLog(alone / "metrics.jsonl") as one:
        assert two.total("tokens") == one.total("tokens") == 12 * 8 * sessions.LENGTH
        assert two.total("learnt") == one.total("learnt")


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2), (2, 4), (4, 1), (4, 2)])
def test_ranks_may_come_and_go_at_a_checkpoint(
    corpus: Path, alone: Path, tmp_path: Path, first: int, then: int
) -> None:
    run(first, corpus, tmp_path, stop_after=6)
    assert (tmp_path / "checkpoints" / "00000006").is_dir()
    (tmp_path / "checkpoints" / "00000009.part" / "left").mkdir(parents=True)  # by a kill; every rank comes to clear it
    run(then, corpus, tmp_path)
    assert_close(tmp_path, alone)
    with MetricsLog(tmp_path / "metrics.jsonl") as metrics:
        assert not list(metrics.rows("again/"))


def test_what_one_rank_finds_damaged_all_pass_over(corpus: Path, alone: Path, tmp_path: Path) -> None:
    run(2, corpus, tmp_path, stop_after=6)
    for name in ("__0_0.distcp", "__1_0.distcp"):
        assert (tmp_path / "checkpoints" / "00000006" / name).stat().st_size > 10_000  # each rank wrote its half
    file = tmp_path / "checkpoints" / "00000006" / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    run(2, corpus, tmp_path)
    assert_close(tmp_path, alone)
    with MetricsLog(tmp_path / "metrics.jsonl") as metrics:
        assert [row["key"].rpartition("/")[2] for row in metrics.rows("again/")] == ["00000005", "00000006"]


def test_two_ranks_without_masters_and_with_8_bits_learn_as_one_with_all(
    corpus: Path, alone: Path, tmp_path: Path
) -> None:
    optimiser = {"lr": 3e-3, "masters": "none", "states": "8bit"}
    run(2, corpus, tmp_path, stop_after=6, optimiser=optimiser)
    held = sessions.held(tmp_path / "checkpoints" / "00000006")
    weight = held["weights/model.embed_tokens.weight"]
    assert weight.dtype == torch.bfloat16
    assert held["optimiser/model.embed_tokens.weight:first"].shape == weight.shape
    run(1, corpus, tmp_path, optimiser=optimiser)
    assert sessions.losses(tmp_path) == pytest.approx(sessions.losses(alone), rel=0.02)


def compare_parts(corpus: Path, folder: Path, changes: dict[str, Any], step: int) -> int:
    """Take up a checkpoint and compare this rank's part of the optimiser's state with the rows it should have of it."""
    world, held = join(), sessions.held(folder / "checkpoints" / f"{step:08d}")
    with sessions.session(corpus, folder, sessions.settings(micro=2, **changes), world) as training:
        DTensor.full_tensor = None  # nobody may have a whole one
        training.session.resume()
        found = training.session.optimiser.tensors()
        training.session.loop.done += 1
        training.session.save()
        training.session.close()
    again = sessions.held(folder / "checkpoints" / f"{step + 1:08d}")
    assert again.keys() == held.keys()
    assert all(torch.equal(again[name], value) for name, value in held.items())
    expected = {name.removeprefix("optimiser/"): value for name, value in held.items() if "optimiser/" in name}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        rows = value.tensor_split(world.size)[world.rank] if value.ndim else value
        assert torch.equal(found[name], rows), name
    assert {value.dtype for value in found.values()} == {torch.float32, torch.uint8}
    assert any(value.any() for name, value in found.items() if name.endswith("first_scale"))
    return 0


@pytest.mark.parametrize(("first", "then"), [(2, 4), (4, 1), (1, 2)])
def test_states_of_8_bits_are_resharded_with_their_scales(corpus: Path, tmp_path: Path, first: int, then: int) -> None:
    optimiser = {"lr": 3e-3, "states": "8bit"}
    run(first, corpus, tmp_path, stop_after=2, optimiser=optimiser)
    run(then, corpus, tmp_path, 2, work=compare_parts, optimiser=optimiser)


LORA = {"rank": 3, "alpha": 6.0}  # not to be shared evenly, and by four not at all


@pytest.mark.parametrize(("sizes", "dtype"), [((2,), "bfloat16"), ((2, 4), "float32"), ((4, 1), "float32")])
def test_lora_on_several_ranks_is_lora_on_one(corpus: Path, tmp_path: Path, sizes: tuple[int, ...], dtype: str) -> None:
    several, one = tmp_path / "several", tmp_path / "one"
    for folder in (several, one):
        folder.mkdir()
    for place, size in enumerate(sizes, 1):
        run(
            size,
            corpus,
            several,
            stop_after=6 if place < len(sizes) else 0,
            lora=LORA,
            dtype=dtype,
            optimiser={"lr": 2e-2},
        )
    run(1, corpus, one, lora=LORA, dtype=dtype, optimiser={"lr": 2e-2})
    assert sessions.losses(several) == pytest.approx(sessions.losses(one), rel=1e-5)
    assert sessions.losses(one)[-1] < sessions.losses(one)[0] - 0.05
    assert read_json(several / "bits-0.json") == pytest.approx(read_json(one / "bits-0.json"), rel=1e-4)
    ours, theirs = (load_file(each / "model" / "model.safetensors") for each in (several, one))
    start = sessions.tiny_model().state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert ours[name].dtype == getattr(torch, dtype)
        moved = (weight - start[name].to(weight.dtype)).float().norm()
        assert (moved > 1e-2) == ("_proj" in name), name
        assert (ours[name] - weight).float().norm() <= (1e-3 if dtype == "float32" else 0.2) * moved, name


def test_what_several_ranks_cannot_do_is_refused(corpus: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="a batch of 8 rows cannot be shared by 3 ranks"),
        sessions.session(corpus, tmp_path, sessions.settings(), World(0, 3)),
    ):
        pass


def test_one_process_alone_needs_nobody() -> None:
    world = World()
    assert world.leads
    assert world.sum(2.5) == 2.5
    assert world.tell({"a": 1}) == {"a": 1}
