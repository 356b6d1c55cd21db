"""Fill-in-the-middle (Bavarian et al. 2022): a file is cut at two characters, and its middle is moved to the end.

    PSM  <prefix> P <suffix> S <middle> M
    SPM  <prefix> <suffix> S <middle> P M      (the variant that shares the prefix token, as Code Llama has it)

The cuts fall between characters, not tokens, because an editor's cursor does too. Each part is tokenised for itself. Taking
the tokens away and the parts back into order gives the file again; a test does.
"""

from __future__ import annotations

import hashlib
import random
from typing import NamedTuple

Pieces = list[str | int]  # text to be tokenised, and tokens as they are


class FimTokens(NamedTuple):
    """The ids of the three tokens."""

    prefix: int
    middle: int
    suffix: int


def draw(seed: int, *identity: str) -> random.Random:
    """Return the random numbers of one document: the same in any order, on any machine, in any worker."""
    digest = hashlib.blake2b("\0".join([str(seed), *identity]).encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(digest))  # noqa: S311 - not a secret


def rearrange(text: str, tokens: FimTokens, rng: random.Random, spm_share: float) -> Pieces:
    """Cut a text at two places and move its middle to the end."""
    first, second = sorted(rng.randint(0, len(text)) for _ in range(2))
    prefix, middle, suffix = text[:first], text[first:second], text[second:]
    if rng.random() < spm_share:
        return [tokens.prefix, tokens.suffix, suffix, tokens.middle, prefix + middle]
    return [tokens.prefix, prefix, tokens.suffix, suffix, tokens.middle, middle]
