"""On-policy distillation: teachers score what the policy itself has sampled, and each token has an advantage of its own.

    a_t = clip(log T(t) − log π(t), −bound, bound)        constant for the gradient, in front of w_t · log π(t)

Its mean over what π samples at a position is minus the gradient of KL(π ‖ T) there, as far as nothing is clipped. What a token
does to those after it is left out: each is judged at the place that the rollout came to. The formula is Kimi K3's (arXiv 2607.24653).

A teacher is a whole model, frozen, with the policy's tokens. Several have a part of the tasks each, by prefix of their ids.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from etude.lineage.compute import forward_flops
from etude.models.shape import shape_of
from etude.training.objectives.next_token import NextToken

if TYPE_CHECKING:
    import torch

    from etude.rl.settings import RlSettings
    from etude.training.batch import Rows
    from etude.training.session import Session


class Teachers:
    """The models that score, by their folder."""

    def __init__(self, session: Session, settings: RlSettings) -> None:
        self._settings = settings.teacher
        self._roots = {name: session.beside(Path(name)) for name in dict.fromkeys(settings.teacher.models.values())}
        # Of its own: another family may make its logits in another way.
        heat = settings.harness.temperature
        self._objectives = {name: NextToken(root.model, heat) for name, root in self._roots.items()}
        self._shapes = {name: shape_of(root.model.config).compute for name, root in self._roots.items()}

    def of(self, task: str) -> str:
        """Return whose task this is."""
        return self._settings.models[self._settings.prefix(task)]

    def logprobs(self, name: str, rows: Rows) -> torch.Tensor:
        """Return the log-prob that a teacher gives every target, [B, T], at the temperature that is sampled at."""
        return -self._roots[name](self._objectives[name].nats, rows)

    def flops(self, name: str, tokens: int) -> int:
        return forward_flops(self._shapes[name], tokens)
