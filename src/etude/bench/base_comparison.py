"""Choosing a base: measure each candidate on the user's own code.

What Composer 2's makers measured before they trained anything: how well a base predicts a codebase, whether it can
follow the state of a file through edits, and what it costs to run. Agentic benchmarks are left out on purpose: RL
changes those abilities so much that they say little about which base to start from.

Codebase perplexity. The files of the tree are put one after the other in path order and scored with a rolling window
(inference/transformers_reference.py). Tokenisers cut differently, so a mean over tokens would not compare; the summed surprise over
the same bytes does: bits per byte = Σ nats / ln 2 / bytes.

State tracking. A coding agent must know what a file looks like after its own edits without reading it again. The model sees the file,
then the differences one by one, and writes the result greedily. The score is the character edit distance to the true
result: one slip costs one, where exact match would cost all. As a measure of what the changes were worth, the distance
of the unchanged file is shown beside it: a model that merely copies reaches that.

Speed of prefill and decode is that of plain transformers with a key-value cache, so that every family is measured the same way: the
median of several repeats after one that warms up. Memory is the highest the process (CPU) or the allocator (GPU) reached meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import math
import re
import resource
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, model_validator
from rapidfuzz.distance import Levenshtein

from etude.bench.statistics import ratio_interval
from etude.data.codebase import FENCE, Codebase, EditChain, Keep, git_chains, made_chains
from etude.errors import UserError
from etude.lineage.compute import forward_flops
from etude.lineage.licences import headline_duties, identify, licence_files
from etude.work import Unit, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


BATCH = 4  # state-tracking tasks written together
ROOM = 1.25  # tokens allowed for a file, as a multiple of the true file's


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
class FileBits:
    """What one file cost: where a model is at a loss, and what two models can be compared on, file by file."""

    path: str
    bytes: int
    bits: float


@dataclass(frozen=True)
class BitsResult:
    """Bits per byte of one model on one tree."""

    bits_per_byte: float
    interval: tuple[float, float] | None  # 95%, over files
    bytes: int
    tokens: int
    files: int
    lossy_files: int
    by_file: list[FileBits]


@dataclass(frozen=True)
class StateResult:
    """How far a model's files are from the true ones."""

    tasks: int
    from_git: int
    distance: float  # mean characters
    distance_per_character: float  # summed distance / summed length of the true files
    interval: tuple[float, float] | None  # 95% of the above, over tasks
    copying_per_character: float  # the same for the unchanged file
    exact: int


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

    def ids(self, text: str) -> list[int]:
        """Return a text's tokens; special tokens written out in it stay text."""
        return list(self.tokeniser(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def put(self, work: Work, unit: Unit, begun: float, lengths: Sequence[int], **row: Any) -> None:
        """Write a unit's row down, with what it took: `lengths` in tokens of the texts that went through the model."""
        seconds = round(clock(self.device) - begun, 4)
        flops = sum(forward_flops(self.shape.compute, length) for length in lengths)
        work.metrics.put(unit.key, **row, tokens=sum(lengths), flops=flops, device_seconds=seconds)


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
    tracking_units(candidate, chains)


def measure(
    candidate: Candidate, code: Codebase, chains: list[EditChain], config: CompareConfig, work: Work
) -> CandidateResult:
    """Measure one candidate, taking up where an earlier session stopped."""
    bits = measure_bits(candidate, code, config, work)
    state = measure_state(candidate, chains, work) if chains else None
    speed = _measure_speed(candidate, config, work)
    vars(candidate).pop("model", None)  # free the weights before the next candidate is loaded
    gc.collect()
    shape = candidate.shape
    return CandidateResult(
        candidate.name, shape.family, shape.parameters, shape.active_parameters, shape.context,
        candidate.licence, candidate.duties, bits, state, speed,
    )  # fmt: skip


@dataclass(frozen=True)
class TokenisedCode:
    """The tokens of a tree, with the file each belongs to."""

    ids: list[int]  # one token that stands before the text, then the text
    file_of: list[int]  # index into the tree's files; −1 for the token before the text
    lossy_files: int  # files whose tokens do not decode to the same text
    unscored_bytes: int  # bytes of the first token, where the tokeniser has no token to stand before it


def tokenise(code: Codebase, candidate: Candidate) -> TokenisedCode:
    """Cut each file on its own and join the tokens."""
    tokeniser = candidate.tokeniser
    first = next((t for t in (tokeniser.bos_token_id, tokeniser.eos_token_id) if t is not None), None)
    ids: list[int] = [] if first is None else [first]
    file_of = [-1] * len(ids)
    lossy = 0
    for index, file in enumerate(code.files):
        cut = candidate.ids(file.text)
        lossy += tokeniser.decode(cut, clean_up_tokenization_spaces=False) != file.text
        ids += cut
        file_of += [index] * len(cut)
    unscored = 0 if first is not None else len(tokeniser.decode(ids[:1]).encode())
    return TokenisedCode(ids, file_of, lossy, unscored)


def measure_bits(candidate: Candidate, code: Codebase, config: CompareConfig, work: Work) -> BitsResult:
    """Score the windows that are not yet scored, one metrics row each with the nats by file, and add all up."""
    from etude.inference.transformers_reference import rolling_windows, token_nlls

    tokens = tokenise(code, candidate)
    windows = enumerate(rolling_windows(len(tokens.ids), config.window, config.stride))
    units = [Unit(f"{candidate.rows}/bits/{index:06d}", each, each.end - each.start) for index, each in windows]
    for unit in work.pending(f"{candidate.name}: scoring code", units, "tokens"):
        window, begun = unit.item, clock(candidate.device)
        nlls = token_nlls(candidate.model, tokens.ids, window).tolist()
        if not all(map(math.isfinite, nlls)):
            broken = "its probabilities are not finite numbers; its weights are damaged or diverged"
            raise UserError(f"{candidate.name}: {broken}")
        nats: dict[str, float] = defaultdict(float)
        for file, nll in zip(tokens.file_of[window.score_from : window.end], nlls, strict=True):
            nats[str(file)] += nll
        candidate.put(work, unit, begun, [window.end - window.start], nats=nats, scored=len(nlls))
    bits, scored = [0.0] * len(code.files), 0
    for row in work.metrics.rows(f"{candidate.rows}/bits/"):
        scored += row["scored"]
        for index, cost in row["nats"].items():
            bits[int(index)] += cost / math.log(2)
    by_file = [FileBits(file.path, file.bytes, cost) for file, cost in zip(code.files, bits, strict=True)]
    scored_bytes = code.bytes - tokens.unscored_bytes
    interval = ratio_interval(bits, [file.bytes for file in by_file])
    bits_per_byte, files = sum(bits) / scored_bytes, len(code.files)
    return BitsResult(bits_per_byte, interval, scored_bytes, scored, files, tokens.lossy_files, by_file)


def difference(worse: BitsResult, better: BitsResult) -> tuple[float, tuple[float, float] | None]:
    """Return by how many bits per byte one model is behind, and the 95% interval over files, in pairs.

    Pairing by file takes out what both find hard, so it tells models apart that their own intervals do not.
    """
    gaps = [a.bits - b.bits for a, b in zip(worse.by_file, better.by_file, strict=True)]
    sizes = [file.bytes for file in better.by_file]
    return sum(gaps) / sum(sizes), ratio_interval(gaps, sizes)


def make_chains(code: Codebase, count: int, steps: int, most_chars: int, seed: int) -> list[EditChain]:
    """Return chains from the tree's git history, topped up with made ones."""
    paths = [file.path for file in code.files]
    real = git_chains(code.root, paths, count, steps, most_chars) if code.root.is_dir() else []
    taken = {chain.path for chain in real}
    made = made_chains(code, count + len(real), steps, most_chars, seed)
    return [*real, *(chain for chain in made if chain.path not in taken)][:count]


def prompt(chain: EditChain) -> str:
    """Return the document whose continuation is the file after all changes."""
    parts = [f"The file {chain.path} at the start:\n{FENCE}\n{chain.versions[0]}{FENCE}\n"]
    parts += [f"Change {number}:\n{FENCE}diff\n{diff}\n{FENCE}\n" for number, diff in enumerate(chain.diffs, start=1)]
    return "\n".join([*parts, f"The file {chain.path} after all {len(chain.diffs)} changes:\n{FENCE}\n"])


@dataclass(frozen=True)
class Batch:
    """Tasks that are written together, as tokens."""

    chains: Sequence[EditChain]
    prompts: list[list[int]]
    budget: int  # tokens each may write


def tracking_units(candidate: Candidate, chains: Sequence[EditChain]) -> list[Unit]:
    """Return one unit of work per batch of tasks, sized by the tokens it may write."""
    units = []
    for start in range(0, len(chains), BATCH):
        some = chains[start : start + BATCH]
        prompts = [candidate.ids(prompt(chain)) for chain in some]
        budget = int(ROOM * max(len(candidate.ids(chain.versions[-1])) for chain in some)) + 8
        needed = max(map(len, prompts)) + budget
        if needed > candidate.shape.context:
            context = f"{candidate.name} has a context of {candidate.shape.context}"
            advice = "lower compare.state_chars or compare.state_diffs"
            raise UserError(f"a state-tracking task needs {needed} tokens, but {context}; {advice}")
        units.append(Unit(f"{candidate.rows}/state/{start:04d}", Batch(some, prompts, budget), budget * len(some)))
    return units


def measure_state(candidate: Candidate, chains: Sequence[EditChain], work: Work) -> StateResult:
    """Let the model write the files that are not yet written, one metrics row a batch with what it wrote, and add all up."""
    from etude.inference import transformers_reference

    tokeniser = candidate.tokeniser
    for unit in work.pending(f"{candidate.name}: tracking state", tracking_units(candidate, chains), "tokens"):
        batch, begun, on_step = unit.item, clock(candidate.device), partial(work.tick, len(unit.item.chains))
        write, prompts = transformers_reference.write_greedily, batch.prompts
        written = write(candidate.model, tokeniser, prompts, batch.budget, FENCE, on_step)
        files = [tokeniser.decode(ids).partition(FENCE)[0] for ids in written]
        truth = [chain.versions[-1] for chain in batch.chains]
        distances = [Levenshtein.distance(file, true) for file, true in zip(files, truth, strict=True)]
        lengths = [len(read) + len(wrote) for read, wrote in zip(batch.prompts, written, strict=True)]
        candidate.put(work, unit, begun, lengths, written=files, distances=distances)
    distances = [distance for row in work.metrics.rows(f"{candidate.rows}/state/") for distance in row["distances"]]
    lengths = [len(chain.versions[-1]) for chain in chains]
    copying = sum(Levenshtein.distance(chain.versions[0], chain.versions[-1]) for chain in chains)
    from_git, exact = sum(chain.origin == "git" for chain in chains), sum(distance == 0 for distance in distances)
    distance, per_character = sum(distances) / len(distances), sum(distances) / sum(lengths)
    interval, copying_per_character = ratio_interval(distances, lengths), copying / sum(lengths)
    return StateResult(len(chains), from_git, distance, per_character, interval, copying_per_character, exact)


def _measure_speed(candidate: Candidate, config: CompareConfig, work: Work) -> dict[str, Any]:
    unit = Unit(f"{candidate.rows}/speed", None, ROUNDS)
    prompt, steps, batch = config.speed_prompt, config.speed_steps, config.speed_batch
    for _ in work.pending(f"{candidate.name}: measuring speed", [unit], "rounds"):
        begun = clock(candidate.device)
        speed = measure_speed(candidate.model, prompt, steps, batch, partial(work.tick, 1))
        lengths = (REPEATS + 1) * [prompt, *[prompt + steps] * (1 + batch)]
        candidate.put(work, unit, begun, lengths, speed=speed)
    row = work.metrics.get(unit.key)
    assert row is not None
    return dict(row["speed"])


REPEATS = 3
ROUNDS = 3 * (REPEATS + 1)  # calls of `on_round`: three measurements, each with a round to warm up


def measure_speed(model: Any, prompt: int, steps: int, batch: int, on_round: Callable[[], object]) -> dict[str, Any]:
    """Return tokens a second, and bytes with whose peak they are; `on_round` is called ROUNDS times, for a progress bar."""
    import torch

    _reset_peak(model.device)
    with torch.inference_mode():
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
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _ids(model: Any, batch: int, length: int) -> torch.Tensor:
    """Return tokens to work on; which ones does not matter to a dense model, and spreads evenly over experts."""
    import torch

    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return torch.randint(vocabulary, (batch, length), generator=generator).to(model.device)


def _reset_peak(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # where the kernel does not offer it, the peak is that of the whole process
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # sets the high-water mark back to now


def _peak(device: torch.device) -> tuple[int, str]:
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "GPU allocator"
    status = Path("/proc/self/status")
    match = re.search(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="ascii")) if status.exists() else None
    if match:
        return int(match[1]) * 1024, "process"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process, since its start"
