"""Which model a word means, for everything that lets one work: a run's or a model's folder, a base, an endpoint.

A policy that says what it was told to: for tests, demonstrations and attacks on the scoring.

Each turn is a text, or a function of the trace's text so far. It is encoded as a model would have to sample it, end of turn included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from etude.inference.policy import Completion, PolicyInfo, Token
from etude.models.bases import locate

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from pathlib import Path

    from etude.agent.calls import Format
    from etude.inference.policy import Policy, Sampling
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


class ScriptedPolicy:
    """Says one line a request; an empty turn when there are no more."""

    def __init__(
        self,
        lines: Iterable[str | Callable[[str], str]],
        encode: Callable[[str], list[int]],
        text: Callable[[Sequence[int]], str],
        end: int,
        *,
        context: int = 1 << 20,
    ) -> None:
        self._lines, self._encode, self._text, self._end = iter(lines), encode, text, end
        self.prompts: list[list[int]] = []  # what was asked, for tests
        self.info = PolicyInfo("scripted", context, 1 << 31)

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,  # noqa: ARG002 - nothing is kept
        on_tokens: Callable[[list[Token]], None] | None = None,
    ) -> Completion:
        """Return the next line."""
        self.prompts.append(list(prompt))
        line = next(self._lines, "")
        said = line if isinstance(line, str) else line(self._text(prompt))
        ids = [*self._encode(said), self._end]
        cut = len(ids) > sampling.max_tokens
        tokens = [Token(each, 0.0, 0.0, 0) for each in ids[: sampling.max_tokens]]
        if on_tokens is not None:
            on_tokens(tokens)
        return Completion(tokens, "length" if cut else "stop", None if cut else self._end)

    async def close(self) -> None:
        """There is nothing to let go of."""
