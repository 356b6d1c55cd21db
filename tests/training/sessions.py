"""A small real training for tests: a tiny model, a corpus of repeated phrases that can be learnt, the whole session."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM

from etude.data.loader import Corpus, Loader
from etude.data.packing import pack, write_shard
from etude.errors import Interrupted
from etude.jsonl import MetricsLog
from etude.progress import Reporter
from etude.training.batch import rows_of
from etude.training.distributed import World
from etude.training.measure import Bits
from etude.training.run import TrainingRun, corpus_session
from etude.training.settings import TrainSettings
from etude.work import Work
from tests import tiny
from tests.data.corpora import write_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from etude.training.session import Session

LENGTH = 32
HANGS = 100  # seconds after which a process that waits for another is not waited for


def write_corpus(folder: Path, seed: int = 0) -> Path:
    """Write documents made of a few phrases, of 2 to 60 tokens, so that some are cut and some share a row."""
    rng = np.random.default_rng(seed)
    phrases = [rng.integers(1, tiny.VOCABULARY, 5) for _ in range(6)]
    texts = [
        np.concatenate([phrases[index] for index in rng.integers(0, 6, 12)])[: rng.integers(2, 60)] for _ in range(60)
    ]
    packed = pack([len(text) for text in texts], LENGTH)
    said = write_shard(folder / "shards", "a-train-0", packed, texts, range(60), tiny.VOCABULARY)
    shards = [{"name": "a-train-0", "source": "a", "domain": "code", "split": "train", **said}]
    write_manifest(folder, shards, {"a": 1.0}, length=LENGTH, separator=0, vocabulary=tiny.VOCABULARY)
    return folder


@cache
def tiny_model(family: str = "llama") -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny.config_of(family))


def fresh_model(family: str = "llama") -> Any:
    """Return a model with the same weights every time."""
    model = AutoModelForCausalLM.from_config(tiny.config_of(family))
    model.load_state_dict(tiny_model(family).state_dict())
    return model


def settings(**changes: Any) -> TrainSettings:
    base: dict[str, Any] = {
        "tokens": 12 * 8 * LENGTH, "batch": 8, "micro": 8, "evaluations": 0, "checkpoint_every": 4, "loader_workers": 0,
        "optimiser": {"lr": 3e-3}, "device": "cpu",
    }  # fmt: skip
    return TrainSettings.model_validate(base | changes)


@contextlib.contextmanager
def session(
    corpus: Path, folder: Path, chosen: TrainSettings, world: World | None = None, **more: Any
) -> Iterator[TrainingRun]:
    """Open a training in a folder; its metrics are written there."""
    world = world or World()
    model = more.pop("model", None) or fresh_model(more.pop("family", "llama"))
    reporter = more.pop("reporter", None) or Reporter(quiet=True)
    together = chosen.context_ranks
    loader = Loader(Corpus.open(corpus), batch=chosen.batch, rank=world.rank // together, world=world.size // together)
    batches = more.pop("wrap", lambda plain: plain)(loader)
    with contextlib.ExitStack() as stack:
        work = None
        if world.leads:
            metrics = stack.enter_context(MetricsLog(folder / "metrics.jsonl"))
            metrics.put(f"etude/session/{sum(1 for _ in metrics.rows('etude/session/')) + 1:04d}")
            work = Work(folder, metrics, reporter, folder / "cache")
        session = corpus_session(model, chosen, batches, LENGTH, world, folder, reporter.say, **more)
        yield TrainingRun(session, chosen, batches, partial(measured, corpus), work, folder)


def measured(corpus: Path, session: Session) -> dict[str, Bits]:
    return evaluate(corpus, session.nats)


def evaluate(corpus: Path, nats: Callable[[Any], torch.Tensor]) -> dict[str, Bits]:
    """Measure a model on four rows that it is also trained on: here only that something is measured matters."""
    opened = Corpus.open(corpus)
    rows = rows_of(opened.read([opened.splits["train"]["a"][index] for index in range(4)]))
    scores = nats(rows) * rows.weights_BT
    return {"code": Bits(scores.sum(1).double().numpy(), rows.weights_BT.sum(1).double().numpy(), 3.0)}


class Wrapped:
    """Batches with something done to each, or before each."""

    def __init__(self, plain: Loader, change: Callable[[Any], Any]) -> None:
        self._plain, self._change = plain, change
        self.state, self.load_state, self.achieved = plain.state, plain.load_state, plain.achieved

    def __next__(self) -> Any:
        return self._change(next(self._plain))


def losses(folder: Path, prefix: str = "train/") -> list[float]:
    """Return the losses of all steps, exactly as written."""
    with MetricsLog(folder / "metrics.jsonl") as metrics:
        return [row["loss"] for row in metrics.rows(prefix)]


def held(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, as torch's own converter reads them."""
    with tempfile.NamedTemporaryFile() as file:
        dcp_to_torch_save(folder, file.name)
        tensors: dict[str, torch.Tensor] = torch.load(file.name)
    return tensors


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def acting_reporter(at: int, act: Any) -> Reporter:
    """Return a reporter that acts after a step, where a user's wish to stop is noticed."""
    made, calls = Reporter(quiet=True), iter(range(-2, 1000))  # it is asked twice before the first step

    def check() -> None:
        if next(calls) == at - 1 >= 0:
            act()

    made.check_stop = check
    return made


def interrupt() -> None:
    raise Interrupted(signal.SIGTERM)


def same(one: Path, other: Path) -> bool:
    """Return whether two trainings had the same losses and exported the same weights, bit for bit."""
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (one, other)]
    return losses(one) == losses(other) and weights[0] == weights[1]


@cache
def _nursery() -> subprocess.Popen[str]:
    """Return a process that has imported everything and run nothing, and forks: torch cannot go on in a fork of one that has run.

    It is told what to do by a line on its input: children of multiprocessing's forkserver sometimes waited for ever for that.
    """
    words = [sys.executable, "-c", "from tests.training.sessions import fork_on_demand; fork_on_demand()"]
    root = Path(__file__).parents[2]
    return subprocess.Popen(words, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def processes(function: Callable[..., None], *arguments: tuple[Any, ...]) -> list[int]:
    """Run a function in processes of their own, one for each tuple of arguments, all at once; return their exit codes."""
    nursery = _nursery()
    assert nursery.stdin
    assert nursery.stdout
    print(pickle.dumps((function, arguments)).hex(), file=nursery.stdin, flush=True)
    codes: list[int] = json.loads(nursery.stdout.readline())
    return codes


def fork_on_demand() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed by those who are forked is no answer
    for line in sys.stdin:
        function, arguments = pickle.loads(bytes.fromhex(line))
        children = [os.fork() or _in_one_thread(function, *each) for each in arguments]
        print(json.dumps([_ended(child) for child in children]), file=answers, flush=True)


def _ended(child: int) -> int:
    handle = os.pidfd_open(child)
    if not select.select([handle], [], [], HANGS)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _in_one_thread(function: Callable[..., None], *arguments: Any) -> int:
    code = 1
    try:
        torch.set_num_threads(1)
        function(*arguments)
        code = 0
    except BaseException:  # noqa: BLE001 - of a child, which ends here
        traceback.print_exc()
    finally:
        os._exit(code)


def kill_oneself() -> None:
    """Die as by `kill -9`, at once."""
    os.kill(os.getpid(), signal.SIGKILL)
