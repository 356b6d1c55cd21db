"""State tracking: write a file out after reading it and a chain of changes to it.

A coding agent must know what a file looks like after its own edits without reading it again. The model sees the file,
then the differences one by one, and writes the result greedily. The score is the character edit distance to the true
result: one slip costs one, where exact match would cost all. As a measure of what the changes were worth, the distance
of the unchanged file is shown beside it: a model that merely copies reaches that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rapidfuzz.distance import Levenshtein

from etude.bench.statistics import ratio_interval
from etude.data.codebase import FENCE, EditChain, git_chains, made_chains
from etude.errors import UserError
from etude.lineage.compute import ComputeShape, forward_flops
from etude.work import Unit, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from etude.data.codebase import Codebase

BATCH = 4  # tasks written together
ROOM = 1.25  # tokens allowed, as a multiple of the true file's


@dataclass(frozen=True)
class StateResult:
    """How far a model's files are from the true ones."""

    tasks: int
    from_git: int
    distance: float  # mean characters
    distance_per_character: float  # summed distance / summed length of the true files
    interval: tuple[float, float] | None  # 95% of the above, drawing tasks
    copying_per_character: float  # the same for the unchanged file
    exact: int


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


def written_file(text: str) -> str:
    """Return the file in what a model wrote: everything before the closing fence."""
    return text.partition(FENCE)[0]


@dataclass(frozen=True)
class Batch:
    """Tasks that are written together, as tokens."""

    chains: Sequence[EditChain]
    prompts: list[list[int]]
    budget: int  # tokens each may write


def tracking_units(label: str, chains: Sequence[EditChain], tokeniser: Any, context: int) -> list[Unit]:
    """Return one unit of work per batch of tasks, sized by the tokens it may write."""
    units = []
    for start in range(0, len(chains), BATCH):
        some = chains[start : start + BATCH]
        prompts = [_ids(tokeniser, prompt(chain)) for chain in some]
        budget = int(ROOM * max(len(_ids(tokeniser, chain.versions[-1])) for chain in some)) + 8
        needed = max(map(len, prompts)) + budget
        if needed > context:
            raise UserError(
                f"a state-tracking task needs {needed} tokens, but {label} has a context of {context}; "
                "lower compare.state_chars or compare.state_diffs"
            )
        units.append(Unit(f"{label}/state/{start:04d}", Batch(some, prompts, budget), budget * len(some)))
    return units


def track(
    work: Work, label: str, units: list[Unit], tokeniser: Any, shape: ComputeShape,
    write: Callable[[list[list[int]], int], list[list[int]]], clock: Callable[[], float],
) -> None:  # fmt: skip
    """Let the model write the files that are not yet written; one metrics row a batch, what it wrote included."""
    for unit in work.pending(f"{label}: tracking state", units, "tokens"):
        batch: Batch = unit.item
        begun = clock()
        written = write(batch.prompts, batch.budget)
        seconds = clock() - begun
        files = [written_file(tokeniser.decode(ids)) for ids in written]
        truth = [chain.versions[-1] for chain in batch.chains]
        distances = [Levenshtein.distance(file, true) for file, true in zip(files, truth, strict=True)]
        lengths = [len(read) + len(wrote) for read, wrote in zip(batch.prompts, written, strict=True)]
        flops = sum(forward_flops(shape, length) for length in lengths)
        spent = {"tokens": sum(lengths), "flops": flops, "device_seconds": round(seconds, 4)}
        work.metrics.put(unit.key, written=files, distances=distances, **spent)


def result(work: Work, label: str, chains: Sequence[EditChain], seed: int) -> StateResult:
    """Add the batches up."""
    distances = [distance for row in work.metrics.rows(f"{label}/state/") for distance in row["distances"]]
    lengths = [float(len(chain.versions[-1])) for chain in chains]
    copying = sum(Levenshtein.distance(chain.versions[0], chain.versions[-1]) for chain in chains)
    return StateResult(
        tasks=len(chains),
        from_git=sum(chain.origin == "git" for chain in chains),
        distance=sum(distances) / len(distances),
        distance_per_character=sum(distances) / sum(lengths),
        interval=ratio_interval(distances, lengths, seed),
        copying_per_character=copying / sum(lengths),
        exact=sum(distance == 0 for distance in distances),
    )


def _ids(tokeniser: Any, text: str) -> list[int]:
    return list(tokeniser(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
