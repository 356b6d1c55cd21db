"""Which model a word means, for everything that lets one work: a run's or a model's folder, a base, an endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from etude.models.locate import locate

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from etude.agent.calls import Format
    from etude.inference.policy import Policy
    from etude.progress import Reporter


@dataclass(frozen=True)
class Found:
    """A model that is there, not yet loaded."""

    name: str
    open: Callable[[], Awaitable[tuple[Policy, Format]]]
    folder: Path | None  # of its weights; none: an endpoint, whose tokens are bytes of text


async def find(
    word: str, device: str, cache: Path, reporter: Reporter, *, name: str = "", token: str = "", context: int | None = None
) -> Found:  # fmt: skip
    """Find a model; `name`, or what follows # in an endpoint's address, says which of an endpoint's models."""
    if not word.startswith(("http://", "https://")):
        called, folder, _ = locate(word, cache, reporter)
        return in_folder(called, folder, device, reporter, context)
    from etude.agent.endpoint import CONTEXT, EndpointPolicy, message_format

    url, _, chosen = word.partition("#")
    policy = await EndpointPolicy.open(url, name or chosen, token, context=context or CONTEXT)

    async def opened() -> tuple[Policy, Format]:
        return policy, message_format()

    return Found(policy.info.name, opened, None)


def in_folder(
    name: str, folder: Path, device: str, reporter: Reporter, context: int | None = None, memory: int | None = None
) -> Found:  # fmt: skip
    """Return the model of a folder; `memory`: bytes for the engine's cache, where others work on the same GPU."""

    async def load() -> tuple[Policy, Format]:
        from etude.agent.formats import choose_format
        from etude.inference.local import LocalPolicy
        from etude.models.load import load_tokeniser

        made = LocalPolicy.open(folder, name=name, device=device, context=context, memory=memory, say=reporter.say)
        return made, choose_format(load_tokeniser(folder))

    return Found(name, load, folder)
