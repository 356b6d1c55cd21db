"""Choosing a base: measure each candidate on the user's own code.

What Composer 2's makers measured before they trained anything: how well a base predicts a codebase, whether it can
follow the state of a file through edits, and what it costs to run. Agentic benchmarks are left out on purpose: RL
changes those abilities so much that they say little about which base to start from.

Speed of prefill and decode is that of plain transformers with a key-value cache, so that every family is measured the same way: the
median of several repeats after one that warms up. Memory is the highest the process (CPU) or the allocator (GPU) reached meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import re
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, Field, model_validator

from etude.bench import perplexity, state_tracking
from etude.bench.perplexity import BitsResult  # noqa: TC001 - read back by pydantic
from etude.bench.state_tracking import StateResult  # noqa: TC001
from etude.data.codebase import Keep
from etude.errors import UserError
from etude.lineage.compute import forward_flops
from etude.lineage.licences import headline_duties, identify, licence_files
from etude.work import Unit, Work

if TYPE_CHECKING:
    from collections.abc import Callable

    from etude.data.codebase import Codebase, EditChain


class CompareConfig(BaseModel, extra="forbid", strict=True):
    """Settings of the `compare` stage."""

    on: str = Field(description="folder with the code to compare on; relative to where the command is run")
    bases: list[str] = Field(default=[], description="bases to compare with the model of the stages before")
    keep: Keep = Field(default="code", description="kind of files: source code, or prose such as .txt and .md")
    window: int = Field(default=1024, ge=16, description="context in tokens while code is scored")
    stride: int = Field(default=512, ge=1, description="tokens between windows; smaller is slower, with more context")
    max_bytes: int = Field(default=100_000, ge=0, description="bytes of code to score, in whole files (0 = all)")
    state_tasks: int = Field(default=8, ge=0, description="state tracking: files to write after a chain of edits")
    state_diffs: int = Field(default=3, ge=1, description="edits in a chain")
    state_chars: int = Field(default=600, ge=80, description="longest file of a chain, in characters")
    speed_prompt: int = Field(default=256, ge=1, description="prompt tokens of the speed measurement")
    speed_steps: int = Field(default=16, ge=1, description="decoded tokens of the speed measurement")
    speed_batch: int = Field(default=8, ge=1, description="batch size of the speed measurement, besides 1")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="device: auto, cpu or cuda")

    @model_validator(mode="after")
    def _stride_moves_within_the_window(self) -> CompareConfig:
        if self.stride >= self.window:
            raise ValueError(f"stride {self.stride} must be smaller than window {self.window}")
        return self


@dataclass(frozen=True)
class CandidateResult:
    """All that is known of one candidate after measuring."""

    name: str
    family: str
    parameters: int
    active_parameters: int
    context: int
    licence: str
    duties: list[str]
    bits: BitsResult
    state: StateResult | None
    speed: dict[str, Any]  # of measure_speed; differs from run to run, unlike everything above

    def quality(self) -> dict[str, Any]:
        """Return what is the same on every run."""
        return {name: value for name, value in asdict(self).items() if name != "speed"}


class Candidate:
    """A base on this machine; the model is loaded only if something is left to measure."""

    def __init__(self, name: str, folder: Path, device: torch.device, listed_licence: str | None) -> None:
        from etude.models.load import load_tokeniser, weight_files
        from etude.models.shape import model_shape

        weight_files(folder)
        self.name, self.folder, self.device = name, folder, device
        # Rows of another device were computed in another precision: a run resumed elsewhere does not mix them.
        self.rows = f"{device.type}/{name}"
        self.shape = model_shape(folder)
        self.tokeniser = load_tokeniser(folder)
        self.licence, self.duties = _licence(folder, listed_licence)

    @cached_property
    def model(self) -> Any:
        """The weights, in memory from the first use on."""
        from etude.models.load import load_model

        return load_model(self.folder, self.device)


def _licence(folder: Path, listed: str | None) -> tuple[str, list[str]]:
    """Return the licence of a model's folder and its duties: by its text, else as our registry lists it."""
    texts = [file for file in licence_files(folder) if not file.name.upper().startswith("NOTICE")]
    licences = [identify(file.read_text(encoding="utf-8", errors="replace")) for file in texts]
    known = sorted({licence for licence in licences if licence})
    if known:
        unread = None in licences  # one text we know beside one we do not: the second may be the one for the weights
        duties = [duty for licence in known for duty in headline_duties(licence)]
        return " + ".join([*known, *["unknown text"] * unread]), duties + headline_duties(None) * unread
    if listed:
        return f"{listed} (as listed, text not seen)", headline_duties(listed)
    return ("unknown text" if licences else "no licence file"), headline_duties(None)


def check_fits(candidate: Candidate, chains: list[EditChain], config: CompareConfig) -> None:
    """Refuse settings that a candidate's context cannot hold, before anything is measured."""
    context = candidate.shape.context
    longer = f"is longer than the context of {candidate.name} ({context})"
    if config.window > context:
        advice = "every candidate must see the same window: lower it"
        raise UserError(f"compare.window = {config.window} {longer}; {advice}")
    if config.speed_prompt + config.speed_steps > context:
        raise UserError(f"compare.speed_prompt + compare.speed_steps {longer}; lower them")
    state_tracking.tracking_units(candidate.name, chains, candidate.tokeniser, context)


def measure(
    candidate: Candidate, code: Codebase, chains: list[EditChain], config: CompareConfig, work: Work, seed: int
) -> CandidateResult:
    """Measure one candidate, taking up where an earlier session stopped."""
    bits = _measure_bits(candidate, code, config, work, seed)
    state = _measure_state(candidate, chains, work, seed) if chains else None
    speed = _measure_speed(candidate, config, work)
    vars(candidate).pop("model", None)  # free the weights before the next candidate is loaded
    gc.collect()
    shape = candidate.shape
    return CandidateResult(
        candidate.name, shape.family, shape.parameters, shape.active_parameters, shape.context,
        candidate.licence, candidate.duties, bits, state, speed,
    )  # fmt: skip


def _measure_bits(candidate: Candidate, code: Codebase, config: CompareConfig, work: Work, seed: int) -> BitsResult:
    from etude.inference.transformers_reference import Window, rolling_windows, token_nlls

    def nlls_of(ids: list[int], window: Window) -> list[float]:
        return [float(nll) for nll in token_nlls(candidate.model, ids, window)]

    shape, timer = candidate.shape.compute, partial(clock, candidate.device)
    tokens = perplexity.tokenise(code, candidate.tokeniser)
    units = perplexity.scoring_units(candidate.rows, rolling_windows(len(tokens.ids), config.window, config.stride))
    perplexity.score(work, candidate.name, units, tokens, shape, nlls_of, timer)
    return perplexity.result(work, candidate.rows, code, tokens, seed)


def _measure_state(candidate: Candidate, chains: list[EditChain], work: Work, seed: int) -> StateResult:
    from etude.data.codebase import FENCE
    from etude.inference.transformers_reference import write_greedily

    def write(prompts: list[list[int]], budget: int) -> list[list[int]]:
        on_step = partial(work.tick, len(prompts))
        return list(write_greedily(candidate.model, tokeniser, prompts, budget, FENCE, on_step))

    tokeniser, timer = candidate.tokeniser, partial(clock, candidate.device)
    units = state_tracking.tracking_units(candidate.rows, chains, tokeniser, candidate.shape.context)
    state_tracking.track(work, candidate.name, units, tokeniser, candidate.shape.compute, write, timer)
    return state_tracking.result(work, candidate.rows, chains, seed)


def _measure_speed(candidate: Candidate, config: CompareConfig, work: Work) -> dict[str, Any]:
    unit = Unit(f"{candidate.rows}/speed", None, ROUNDS)
    prompt, steps, batch, rounds = config.speed_prompt, config.speed_steps, config.speed_batch, REPEATS + 1
    for _ in work.pending(f"{candidate.name}: measuring speed", [unit], "rounds"):
        begun = clock(candidate.device)
        speed = measure_speed(candidate.model, prompt, steps, batch, partial(work.tick, 1))
        seconds = clock(candidate.device) - begun
        tokens = rounds * (prompt + (1 + batch) * (prompt + steps))
        read, written = (forward_flops(candidate.shape.compute, length) for length in (prompt, prompt + steps))
        flops = rounds * (read + (1 + batch) * written)
        work.metrics.put(unit.key, speed=speed, tokens=tokens, flops=flops, device_seconds=round(seconds, 4))
    row = work.metrics.get(unit.key)
    assert row is not None
    return dict(row["speed"])


REPEATS = 3
ROUNDS = 3 * (REPEATS + 1)  # calls of `on_round`: three measurements, each with a round to warm up


@torch.inference_mode()  # type: ignore[untyped-decorator]
def measure_speed(model: Any, prompt: int, steps: int, batch: int, on_round: Callable[[], object]) -> dict[str, Any]:
    """Return tokens a second, and bytes with whose peak they are; `on_round` is called ROUNDS times, for a progress bar."""
    _reset_peak(model.device)
    prefill = prompt / _median(lambda: _prefill_seconds(model, prompt), on_round)
    single = steps / _median(lambda: _decode_seconds(model, prompt, steps, 1), on_round)
    several = batch * steps / _median(lambda: _decode_seconds(model, prompt, steps, batch), on_round)
    weights, (peak, peak_of) = sum(parameter.nbytes for parameter in model.parameters()), _peak(model.device)
    return {"prefill": prefill, "decode_single": single, "decode_batch": several, "batch": batch, "prompt": prompt,
            "weight_bytes": weights, "peak_bytes": peak, "peak_of": peak_of}  # fmt: skip


def _prefill_seconds(model: Any, prompt: int) -> float:
    ids = _ids(model, 1, prompt)
    begun = clock(model.device)
    model(ids, use_cache=False, logits_to_keep=1)
    return clock(model.device) - begun


def _decode_seconds(model: Any, prompt: int, steps: int, batch: int) -> float:
    """Return the time of `steps` greedy steps after a prompt that is already in the cache."""
    output = model(_ids(model, batch, prompt), use_cache=True, logits_to_keep=1)
    begun = clock(model.device)
    for _ in range(steps):
        following = output.logits[:, -1].argmax(-1, keepdim=True)
        output = model(following, past_key_values=output.past_key_values, use_cache=True, logits_to_keep=1)
    return clock(model.device) - begun


def _median(measurement: Callable[[], float], on_round: Callable[[], object]) -> float:
    samples = []
    for _ in range(REPEATS + 1):
        samples.append(measurement())
        on_round()
    return statistics.median(samples[1:])  # the first warms up


def clock(device: torch.device) -> float:
    """Return the time in seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _ids(model: Any, batch: int, length: int) -> torch.Tensor:
    """Return tokens to work on; which ones does not matter to a dense model, and spreads evenly over experts."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return torch.randint(vocabulary, (batch, length), generator=generator).to(model.device)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # where the kernel does not offer it, the peak is that of the whole process
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # sets the high-water mark back to now


def _peak(device: torch.device) -> tuple[int, str]:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "GPU allocator"
    status = Path("/proc/self/status")
    match = re.search(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="ascii")) if status.exists() else None
    if match:
        return int(match[1]) * 1024, "process"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process, since its start"
