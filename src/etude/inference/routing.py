"""Which experts each token went to, read off a model of several experts while it runs.

transformers hands the choice to a layer's experts as their second argument; that is where it is read. A trainer that replays the
choice computes the gradient of the model that sampled.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Routers:
    """The layers of a model that choose experts."""

    def __init__(self, model: torch.nn.Module) -> None:
        decoder = model.get_decoder()
        self._found: list[torch.Tensor] | None = None
        self.layers = [part for name, part in decoder.named_modules() if name.rpartition(".")[2] == "experts"]
        for layer in self.layers:
            layer.register_forward_pre_hook(self._note)

    def _note(self, _: Any, given: tuple[Any, ...]) -> None:
        if self._found is not None:
            self._found.append(given[1].reshape(-1, given[1].shape[-1]).to(torch.int16))

    @contextlib.contextmanager
    def recording(self, *, wanted: bool) -> Iterator[Routes]:
        """Run a pass inside this; what was chosen is there afterwards."""
        routes = Routes([])
        self._found = routes.layers if wanted else None
        try:
            yield routes
        finally:
            self._found = None


class Routes:
    """What a pass chose: for each layer [N tokens, experts a token]."""

    def __init__(self, layers: list[torch.Tensor]) -> None:
        self.layers = layers

    def split(self, counts: Sequence[int]) -> list[torch.Tensor | None]:
        """Return [tokens, layers, experts a token] for each request of a pass, on the CPU; None if nothing was recorded."""
        if not self.layers:
            return [None] * len(counts)
        return list(torch.stack(self.layers, 1).cpu().split(list(counts)))
