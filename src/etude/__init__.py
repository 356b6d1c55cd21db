"""Etude: from an open base model to your own coding agent, every stage measured, the family tree included.

From Python: `open_policy`, `train`, `play` and `benchmark` (docs/api.md). They load torch when first used, not on import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from etude.errors import UserError

if TYPE_CHECKING:
    from etude.cli.api import Episode, Policy, benchmark, open_policy, play, train

__version__ = "0.1.0"
__all__ = ["Episode", "Policy", "UserError", "benchmark", "open_policy", "play", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'etude' has no attribute {name!r}")
    from etude.cli import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
