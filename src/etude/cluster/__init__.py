"""The same parts on many machines: Ray places and restarts them, and nothing else in Etude imports it."""

from __future__ import annotations

from importlib.util import find_spec

from etude.errors import UserError


def require_ray() -> None:
    """Refuse to go on without Ray, which only a cluster needs."""
    if find_spec("ray") is None:
        raise UserError(
            "--cluster needs Ray, which is not installed here; install it with: pip install 'etude[cluster]'"
        )
