"""What a longer context is worth: loss by position inside the document, and retrieval of planted constants from code.

Loss by position shows whether the model goes on working beyond its old context, but most tokens are predicted from what is
near. Retrieval needs what is far: several constants, `RETRY_LIMIT_QX7 = 48213`, are planted on lines of their own among real
code, and the end asks for one of them. A model that only knows that a planted number is wanted is right once in `keys` times.
The answer is scored under teacher forcing, which costs one pass an item: every token of it must be the model's first choice.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from etude.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Encode = Callable[[str], list[int]]

FIRST_WORDS, SECOND_WORDS = ("RETRY", "CACHE", "UPLOAD", "PARSER"), ("LIMIT", "WINDOW", "OFFSET", "PERIOD")
MOST_CHARS_PER_TOKEN = 16  # of code; more are not looked at when filling a context
SLACK = 64  # an item may fall short of the length wanted by one token in so many


def bucket_bounds(length: int) -> list[int]:
    """Return the bounds of the buckets of documents up to `length` tokens: 0, 256, 512, 1024, … and `length`."""
    return [0, *(256 << power for power in range((length - 1).bit_length() - 8)), length]


def by_position(
    nats: Array, sizes: Array | float, documents: Array, positions: Array, bounds: Sequence[int], least: int = 0
) -> list[dict[str, Any]]:
    """Return the loss, a token's mean nats and bits per byte, by bucket of positions. Every array is [N, T].

    As in `Rows`, nats and sizes (bytes; or those of any token) at t are of the token that position t predicts, the next.
    Where that is in another document or in padding (−1), nothing is predicted and the entry not looked at. Documents of fewer
    than `least` tokens are left out: with none but long ones, all buckets are of the same documents and can be compared.
    """
    assert positions.max() < bounds[-1], "a position beyond the last bucket"
    numbers = documents + np.arange(len(documents))[:, None] * (int(documents.max()) + 2)
    _, pieces, lengths = np.unique(numbers, return_inverse=True, return_counts=True)
    predicted = (documents >= 0) & (np.diff(pieces, axis=1, append=-1) == 0) & (lengths[pieces] >= least)
    buckets = []
    for begin, end in pairwise(bounds):
        here = predicted & (positions >= begin) & (positions < end)
        total, tokens = float(nats[here].sum(dtype=np.float64)), int(here.sum())
        size = float(np.broadcast_to(sizes, nats.shape)[here].sum())
        counts = {"documents": len(np.unique(pieces[here])), "tokens": tokens, "bytes": size}
        means = {"nats": total / tokens, "bits_per_byte": total / math.log(2) / size} if size else {}
        buckets.append({"first": begin, "last": end - 1, **counts, **means})
    return buckets


@dataclass(frozen=True)
class Retrieval:
    """Code with planted constants and a question, its answer included."""

    tokens: list[int]
    answer_start: int  # index of the answer's first token; the answer is the rest
    name: str  # of the constant asked for
    value: str
    depth: float  # where it is planted: 0 at the beginning, 1 just before the question


def make_retrieval(
    encode: Encode, texts: Sequence[str], length: int, keys: int, count: int, seed: int
) -> list[Retrieval]:
    """Return items of at most `length` tokens, and few less, from random stretches of the texts.

    An item is encoded as a whole, so that its tokens are those the model knows: many tokenisers merge a line break with
    the indentation after it, which they could not if lines were encoded alone.
    """
    code = "".join(text if text.endswith("\n") else text + "\n" for text in texts if text)
    return [_item(encode, code, length, keys, random.Random(f"{seed}/{index}")) for index in range(count)]  # noqa: S311


def _item(encode: Encode, texts: str, length: int, keys: int, rng: random.Random) -> Retrieval:
    begin = texts.rfind("\n", 0, int(rng.random() * len(texts))) + 1
    code = (texts[begin:] + texts[:begin])[: length * MOST_CHARS_PER_TOKEN]
    names, values = _constants(code, keys, rng)
    depths, asked = sorted(rng.random() for _ in names), rng.randrange(keys)
    name, value = names[asked], values[asked]

    def written(characters: int, answer: str = value) -> str:
        planted = _plant(code[:characters], names, values, depths)
        return f"{planted}\n\n# constants used above\nassert {name} == {answer}"

    characters = _fit(lambda characters: len(encode(written(characters))), len(code), length)
    tokens, other = encode(written(characters)), encode(written(characters, f"{int(value[0]) % 9 + 1}{value[1:]}"))
    # The answer begins at the first token that another first digit changes: digits may share a token with the space.
    start = next(index for index, (one, two) in enumerate(zip(tokens, other, strict=False)) if one != two)
    return Retrieval(tokens, start, name, value, depths[asked])


def _constants(code: str, keys: int, rng: random.Random) -> tuple[list[str], list[str]]:
    """Return names and values that are nowhere in the code. The names' ends differ, so none is a part of another."""
    endings = [f"{one}{two}{digit}" for one in "BDFHJKQX" for two in "GLMPRTWZ" for digit in range(2, 10)]
    ends = rng.sample(endings, keys)
    names = [f"{rng.choice(FIRST_WORDS)}_{rng.choice(SECOND_WORDS)}_{end}" for end in ends]
    values = [value for value in map(str, rng.sample(range(10_000, 100_000), 16 * keys)) if value not in code][:keys]
    if len(values) < keys or any(name in code for name in names):
        full = "the held-out code is so full of constants that planted ones would not stand out"
        raise UserError(f"{full}; use other code")
    return names, values


def _plant(code: str, names: Sequence[str], values: Sequence[str], depths: Sequence[float]) -> str:
    """Return the code with each assignment at the beginning of the line that its depth falls into."""
    parts, done = [], 0
    for name, value, depth in zip(names, values, depths, strict=True):
        place = max(done, code.rfind("\n", 0, int(depth * len(code))) + 1)
        parts += [code[done:place], f"{name} = {value}\n"]
        done = place
    return "".join([*parts, code[done:]])


def _fit(size_of: Callable[[int], int], most: int, length: int) -> int:
    """Return how many characters of code fill `length` tokens: guess by the rate so far, bisect where that misleads."""
    low, high = -1, most + 1  # so many fit; so many do not
    characters = min(most, 3 * length)
    while high - low > 1:
        size = size_of(characters)
        low, high = (characters, high) if size <= length else (low, characters)
        if length - length // SLACK <= size <= length:
            return characters
        guess = int(characters * (length - length / SLACK / 2) / size)
        characters = guess if low < guess < high else (low + high) // 2
    if low < 0:
        raise UserError(f"the planted constants and their question alone exceed {length} tokens; plant fewer")
    if low == most:
        raise UserError(f"the held-out code does not fill {length} tokens; hold out more, or measure shorter contexts")
    return low


@torch.inference_mode()  # type: ignore[untyped-decorator]
def answer_nats(model: Any, item: Retrieval) -> tuple[list[float], bool]:
    """Return the nats of the answer's tokens, and whether each of them is the model's first choice."""
    tokens = torch.tensor([item.tokens], device=model.device)
    answer = tokens[0, item.answer_start :]
    # The logits at position i predict token i + 1, so those of the last token are of no use.
    logits = model(tokens, use_cache=False, logits_to_keep=len(answer) + 1).logits[0, :-1].float()
    right = bool((logits.argmax(-1) == answer).all())
    return cross_entropy(logits, answer, reduction="none").tolist(), right


def score_retrieval(model: Any, items: Iterable[Retrieval]) -> dict[str, Any]:
    """Return the share of items answered exactly with Wilson's 95% interval, and the mean nats of the answers' tokens."""
    from scipy.stats import binomtest  # takes a third of a second, for which every recipe would wait

    scored = [answer_nats(model, item) for item in items]
    nats = [each for answer, _ in scored for each in answer]
    right = sum(exact for _, exact in scored)
    low, high = binomtest(right, len(scored)).proportion_ci(method="wilson")
    return {"exact": right / len(scored), "interval": (float(low), float(high)), "nats": sum(nats) / len(nats)}
