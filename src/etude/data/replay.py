"""Replay for bases whose own data is not public: text sampled from the base itself.

What the base writes when nothing is asked of it, at temperature 1, follows the distribution it learnt; training on a share of
it works against forgetting. The sampled tokens are kept as they are, never decoded and encoded again, and the manifest and
the record name the base as the writer: it is generated data with a teacher.
"""

from __future__ import annotations

import hashlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from etude.data.document import Document
from etude.data.heldout import draw, is_heldout
from etude.data.manifest import SourceEntry
from etude.data.packing import save_array
from etude.data.settings import SELF, DataSettings, ReplaySettings
from etude.data.tokenise import unit_writer
from etude.errors import UserError
from etude.files import digest_of, sha256_file
from etude.models.load import weight_files
from etude.work import Unit, Work

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def sample_base(
    base: Any, data: DataSettings, separator: int, vocabulary: int, folder: Path, work: Work, seed: int
) -> SourceEntry:
    """Sample texts from the model in the folder `base` into a unit's folder; return their entry in the manifest."""
    settings: Any = data.replay
    texts = _sampled(base, settings, (separator, vocabulary), folder, work, seed)
    entry = SourceEntry(
        name=SELF, domain="replay", location=f"sampled from the base, temperature {settings.temperature}",
        generated_by=digest_of({file.name: sha256_file(file) for file in weight_files(base)}), documents_in=len(texts),
    )  # fmt: skip
    digest = hashlib.sha256()
    with unit_writer(folder) as write:
        for text in texts:
            if not len(text):
                entry.drops["replay: the base wrote nothing"] += 1
                continue
            name = f"{SELF}#{entry.kept}"
            held = is_heldout(name, data.heldout, seed)
            write(text, [Document(name, name, "", "generated", licence="")], held)
            entry.tokens["heldout" if held else "train"] += len(text)
            entry.add({"kept": 1, "repositories": 1, "tokens_in": len(text)})
            digest.update(text.data)
    entry.digest = digest.hexdigest()
    return entry


def check_length(base: Any, settings: Any) -> None:
    """Refuse texts longer than the base can write."""
    from etude.models.shape import model_shape

    context = model_shape(base).context
    if settings.length >= context:
        raise UserError(f"data.replay.length {settings.length} does not fit the base's context of {context}; lower it")


def _sampled(
    base: Path, settings: ReplaySettings, tokens: tuple[int, int], folder: Path, work: Work, seed: int
) -> list[Any]:
    """Return the texts; those that the base ended have the separator at their end. Batches that are done are read again."""
    from etude.lineage.compute import forward_flops
    from etude.models.load import choose_device, load_model
    from etude.models.shape import shape_of

    separator = tokens[0]
    count = -(-settings.tokens // settings.length)  # texts
    sizes = [min(settings.batch, count - start) for start in range(0, count, settings.batch)]
    units = [Unit(f"replay/{number:05d}", number, settings.length * size) for number, size in enumerate(sizes)]
    folder.mkdir(parents=True, exist_ok=True)
    model: Any = None
    for unit in work.pending("data: sampling replay from the base", units, "tokens"):
        model = model or load_model(base, choose_device("auto"))
        began = time.perf_counter()
        texts, chance = sizes[unit.item], draw(seed, "replay", unit.key).getrandbits(32)
        rows = sample(model, tokens, settings, texts, chance, partial(work.tick, texts))
        save_array(folder / f"{unit.item:05d}.npy", rows)
        flops = texts * forward_flops(shape_of(model.config).compute, rows.shape[1])
        spent = {"flops": flops, "sampling_flops": flops, "device_seconds": time.perf_counter() - began}
        work.metrics.put(unit.key, tokens=rows.size, **spent)
    texts_of_rows = []
    for row in (row for number in range(len(sizes)) for row in np.load(folder / f"{number:05d}.npy")):
        ends = np.flatnonzero(row == separator)
        text = row[: ends[0] + 1] if len(ends) else row
        texts_of_rows.append(text if len(text) > 1 else text[:0])
    return texts_of_rows


def sample(
    model: Any, tokens: tuple[int, int], settings: ReplaySettings, texts: int, chance: int, on_step: Callable[[], Any]
) -> Any:
    """Return [texts, ≤ length] tokens sampled after the separator; after the end of a text come separators."""
    import torch
    from transformers import GenerationConfig, StoppingCriteria

    class Stepping(StoppingCriteria):  # type: ignore[misc]
        """Stops nothing; tells of every step, which is also where the user may stop it."""

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:  # noqa: ARG002 - their signature
            on_step()
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    separator, vocabulary = tokens
    torch.manual_seed(chance)
    start = torch.full((texts, 1), separator, device=model.device)
    # Not as the base's generation_config.json would have it: penalties and cut-offs are not its distribution.
    model.generation_config = GenerationConfig()
    how = GenerationConfig(
        do_sample=True, temperature=settings.temperature, top_k=0, top_p=1.0, max_new_tokens=settings.length,
        pad_token_id=separator, eos_token_id=separator, use_cache=True,
        # Embeddings are often padded: nobody can say what those tokens would mean.
        suppress_tokens=list(range(vocabulary, model.config.vocab_size)) or None,
    )  # fmt: skip
    with torch.inference_mode():
        mask = torch.ones_like(start)
        written = model.generate(start, attention_mask=mask, generation_config=how, stopping_criteria=[Stepping()])
    return written[:, 1:].cpu().numpy().astype(np.uint32)
