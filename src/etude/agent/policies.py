"""Finds the model that a word names: the folder of a run or a model, a base, or the address of a server.

A server with the token API (our own, or vLLM with `--enable-scale-out`) is called with token ids and returns the sampled ones; its
tokeniser comes from a folder, which the user or the server names. Any other server is called with messages (agent/endpoint.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.agent.endpoint import EndpointPolicy, message_format
from etude.agent.formats import ChatFormat, choose_format
from etude.errors import UserError
from etude.inference.client import RemotePolicy
from etude.inference.policy import Completion, OnTokens, Policy, PolicyInfo, Sampling, Token
from etude.models.bases import known_bases, locate

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from etude.progress import Reporter

SCHEMES = ("http://", "https://", "unix:")  # of a server's address


@dataclass(frozen=True)
class ModelSource:
    """A model that is there, not yet loaded."""

    name: str
    open: Callable[[], Awaitable[tuple[Policy, ChatFormat]]]
    folder: Path | None = None  # of its weights; none: a server has them
    text: bool = False  # a service without token ids: its tokens are bytes of text


async def find(
    word: str, device: str, cache: Path, reporter: Reporter,
    *, name: str = "", token: str = "", context: int | None = None, tokeniser: str = "",
) -> ModelSource:  # fmt: skip
    """Find a model; `name`, or what follows # in an address, says which of a server's models.

    `tokeniser`: the folder or base whose tokeniser a server's model has; without it, the server's own word for its model is tried.
    """
    if not word.startswith(SCHEMES):
        called, folder, _ = locate(word, cache, reporter)
        return in_folder(called, folder, device, reporter, context)
    url, _, chosen = word.partition("#")
    probe = RemotePolicy(url, 0, token)
    try:
        if await probe.speaks_tokens():
            card = await probe.ask_card(name or chosen)
            if its_folder := _tokeniser_of(card, tokeniser, cache, reporter):
                return _at_address(url, card, token, its_folder)
            here = f"the tokeniser of {card['id']!r} is not on this machine; --tokeniser names a folder or base that has it"
            reporter.say(f"{here}. Without it {url} is asked in messages, not in token ids")
    finally:
        await probe.close()
    if tokeniser:
        raise UserError(f"{url} returns no token ids, so --tokeniser is of no use; vLLM does with --enable-scale-out")
    policy = await EndpointPolicy.open(url, model=name or chosen, token=token)
    if context:
        policy.set_context(context)

    async def opened() -> tuple[Policy, ChatFormat]:
        return policy, message_format()

    return ModelSource(policy.info.name, opened, text=True)


def _tokeniser_of(card: dict[str, Any], given: str, cache: Path, reporter: Reporter) -> Path | None:
    """Return the folder with the tokeniser of a server's model; None: it is not here."""
    for word in [given] if given else [card.get("root") or "", card["id"]]:
        if word and Path(word, "tokenizer_config.json").is_file():
            return Path(word)
        if given or word in known_bases():
            return locate(word, cache, reporter)[1]
    return None


def _at_address(url: str, card: dict[str, Any], token: str, folder: Path) -> ModelSource:
    async def connected() -> tuple[Policy, ChatFormat]:
        from etude.models.load import load_tokeniser

        tokeniser = load_tokeniser(folder)
        return await RemotePolicy.open(url, len(tokeniser), card["id"], token), choose_format(tokeniser)

    return ModelSource(card["id"], connected)


def in_folder(
    name: str, folder: Path, device: str, reporter: Reporter, context: int | None = None, memory: int | None = None
) -> ModelSource:  # fmt: skip
    """Return the model of a folder; `memory`: bytes for the engine's cache, where others work on the same GPU."""

    async def load() -> tuple[Policy, ChatFormat]:
        from etude.inference.local import LocalPolicy
        from etude.models.load import load_tokeniser

        made = LocalPolicy.open(folder, name=name, device=device, context=context, memory=memory, say=reporter.say)
        return made, choose_format(load_tokeniser(folder))

    return ModelSource(name, load, folder)


class ScriptedPolicy:
    """Returns one scripted line a request, then empty turns: for tests, demonstrations and attacks on the scoring.

    A line is a text, or a function of the context's text. It is encoded as a model would have to sample it, end of turn included.
    """

    def __init__(
        self, lines: Iterable[str | Callable[[str], str]], talk: ChatFormat, *, context: int = 1 << 20
    ) -> None:
        self._lines, self._talk = iter(lines), talk
        self.prompts: list[list[int]] = []  # what was asked, for tests
        self.info = PolicyInfo("scripted", context, 1 << 31)

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str | None = None, on_tokens: OnTokens = None
    ) -> Completion:
        """Return the next line."""
        del session  # nothing is kept
        self.prompts.append(list(prompt))
        line = next(self._lines, "")
        said = line if isinstance(line, str) else line(self._talk.text(prompt))
        ids = [*self._talk.talk.tokens(said), end := self._talk.talk.end_token]
        cut = len(ids) > sampling.max_tokens
        tokens = [Token(each, 0.0, 0.0, 0) for each in ids[: sampling.max_tokens]]
        if on_tokens is not None:
            on_tokens(tokens)
        return Completion(tokens, "length" if cut else "stop", None if cut else end)

    async def close(self) -> None:
        """There is nothing to let go of."""
