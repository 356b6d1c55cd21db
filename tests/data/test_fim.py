"""Fill-in-the-middle can be undone, keeps its rates, and depends on nothing but the document."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from etude.data.heldout import draw
from etude.data.tokenise import rearrange

PREFIX, MIDDLE, SUFFIX = TOKENS = (3, 4, 5)


def restored(pieces: list[str | int]) -> str:
    """Put the parts back into order, reading nothing but the special tokens."""
    parts: dict[int, str] = {}
    for marker, text in zip(pieces, [*pieces[1:], ""], strict=True):
        if isinstance(marker, int):
            parts[marker] = text if isinstance(text, str) else ""
    return parts[PREFIX] + parts[MIDDLE] + parts[SUFFIX]


@given(text=st.text(max_size=80), seed=st.integers(0, 10**6), spm=st.sampled_from([0.0, 0.5, 1.0]))
def test_it_inverts(text: str, seed: int, spm: float) -> None:
    assert restored(rearrange(text, TOKENS, random.Random(seed), spm)) == text


@given(text=st.text(min_size=1, max_size=80), seed=st.integers(0, 10**6))
def test_the_two_orders(text: str, seed: int) -> None:
    psm = rearrange(text, TOKENS, random.Random(seed), 0.0)
    spm = rearrange(text, TOKENS, random.Random(seed), 1.0)
    assert [piece for piece in psm if isinstance(piece, int)] == [3, 5, 4]
    assert [piece for piece in spm if isinstance(piece, int)] == [3, 5, 4]
    prefix, suffix, middle = psm[1], psm[3], psm[5]
    assert spm == [3, 5, suffix, 4, f"{prefix}{middle}"]


def test_cuts_fall_anywhere() -> None:
    text = "abcdefghij"
    firsts = {len(str(rearrange(text, TOKENS, random.Random(seed), 0.0)[1])) for seed in range(400)}
    assert firsts == set(range(11))


def test_draws_depend_on_the_document_alone() -> None:
    assert draw(1, "fim", "repo", "a.py").random() == draw(1, "fim", "repo", "a.py").random()
    others = {draw(seed, "fim", repo, path).random() for seed in (1, 2) for repo in ("r", "s") for path in ("a", "b")}
    assert len(others) == 8
    assert draw(1, "ab", "c").random() != draw(1, "a", "bc").random()
