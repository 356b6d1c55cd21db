"""Which model a word means, for every command that lets one work: a run's or a model's folder, a base, an endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from etude.progress import Reporter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from etude.agent.calls import Format
    from etude.inference.policy import Policy


@dataclass(frozen=True)
class Found:
    """A model that is there, not yet loaded."""

    name: str
    open: Callable[[], Awaitable[tuple[Policy, Format]]]
    folder: Path | None  # of its weights; none: an endpoint, whose tokens are bytes of text


async def find(
    model: str, name: str, token_file: Path | None, device: str, cache: Path, context: int | None = None
) -> Found:
    """Find a model; `name`, or what follows # in an endpoint's address, says which of an endpoint's models."""
    if model.startswith(("http://", "https://")):
        from etude.agent.endpoint import CONTEXT, EndpointPolicy, message_format
        from etude.serve.run import read_token

        url, _, chosen = model.partition("#")
        token = read_token(token_file) if token_file else ""
        policy = await EndpointPolicy.open(url, name or chosen, token, context=context or CONTEXT)

        async def opened() -> tuple[Policy, Format]:
            return policy, message_format()

        return Found(policy.info.name, opened, None)
    from etude.cli.serve import locate

    reporter = Reporter()
    called, folder, _ = locate(model, cache, reporter)

    async def load() -> tuple[Policy, Format]:
        from etude.agent.formats import choose_format
        from etude.inference.local import LocalPolicy
        from etude.models.load import load_tokeniser

        made = LocalPolicy.open(folder, name=called, device=device, context=context, say=reporter.say)
        return made, choose_format(load_tokeniser(folder))

    return Found(called, load, folder)
