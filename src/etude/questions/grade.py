"""Grades answers strictly: an ambiguous answer is wrong.

The last line of the final message is `Answer: …`, and there is no other such line. What stands there must be the answer alone. So
these are wrong, each tested in tests/questions/test_cheats.py: two answers ("A or B", "12/13", ranges, "about"), all the choices, a
letter beside the text of another choice, several marked answers, an answer in the thinking or with text behind it, an unmarked one,
a number without the unit that was asked for or with another kind of unit, infinity, digits of other scripts, sums left to the reader.
"""

from __future__ import annotations

import math
import re
import unicodedata
from typing import TYPE_CHECKING, Literal, NamedTuple

from etude.questions.units import unit_of

if TYPE_CHECKING:
    from etude.questions.question import Question

Why = Literal[
    "", "no message", "no marked answer", "several marked answers", "text behind the answer", "not one of the choices",
    "not a number", "no unit", "another unit", "hedged", "wrong", "the program refuses it", "the judge refuses it",
    "no verdict of the judge",
]  # fmt: skip
MARK = re.compile(r"answer:[ \t]*(.*)", re.IGNORECASE)
# Read widely, so that none is smuggled in.
LIKE_A_MARK = re.compile(r"(?i)\W*(?:(?:my|the|final|correct|right)\s+)*answer(?:\s+is)?\W*?[:=]")
NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3})?|[+-]?\.\d+", re.ASCII)
MONEY = re.compile(r"us\$|\$|€|usd\b|eur\b", re.IGNORECASE)
LETTERED = re.compile(r"\(?([A-Za-z])(?:[).:]+\s*|\s+|$)(.*)", re.DOTALL)
ROUNDING = 1e-9  # of units, relative
LONGEST = 10_000  # characters of an answer that are looked at


class Verdict(NamedTuple):
    """Whether an answer passed, and why not."""

    passed: bool
    why: Why = ""


def marked(said: str, *, many_lines: bool = False) -> tuple[str, Why]:
    """Return the answer that a message marks, or why there is none. With `many_lines` it goes on to the end of the message."""
    lines = said.strip()[-LONGEST:].splitlines()
    places = [number for number, line in enumerate(lines) if LIKE_A_MARK.match(line) or MARK.match(line.strip())]
    if not places:
        return "", "no marked answer" if lines else "no message"
    if len(places) > 1:
        return "", "several marked answers"
    match = MARK.fullmatch(lines[places[0]].strip())
    after = lines[places[0] + 1 :]
    if match is None or (after and not many_lines):
        return "", "text behind the answer" if match else "no marked answer"
    text = "\n".join([match[1], *after]).strip()
    return text, "" if text else "no marked answer"


def normal(text: str) -> str:
    """Return a text without what does not matter: case, width, invisible characters, space, quotes around it, a full stop."""
    text = "".join(each for each in unicodedata.normalize("NFKC", text) if unicodedata.category(each) != "Cf")
    return " ".join(text.casefold().split()).strip("\"'`*").rstrip(".").strip("\"'`* ")


def grade(question: Question, answer: str) -> Verdict:
    """Grade a marked answer to a question of the kinds that need nobody else."""
    if question.kind == "choice":
        return _chosen(question, answer)
    if question.kind == "number":
        return _counted(question, answer)
    known = [normal(str(each)) for each in question.answers]
    if normal(answer) in known:
        return Verdict(passed=True)
    hedged = any(re.search(rf"(?<!\w){re.escape(each)}(?!\w)", normal(answer)) for each in known if each)
    return Verdict(passed=False, why="hedged" if hedged else "wrong")


def chosen(choices: list[str], answer: str) -> int | None:
    """Return the place of the one choice that an answer names: by its letter, its text, or both if they agree.

    Where choices are letters themselves, such as blood groups, only the text counts.
    """
    plain = [normal(each) for each in choices]
    text = normal(answer)
    if text in plain:
        return plain.index(text)
    match = LETTERED.fullmatch(answer.strip().strip("*`"))
    place = ord(match[1].upper()) - ord("A") if match else len(plain)
    if not match or place >= len(plain) or any(re.fullmatch("[a-z]", each) for each in plain):
        return None
    rest = normal(match[2])
    return place if not rest or rest == plain[place] else None


def _chosen(question: Question, answer: str) -> Verdict:
    place = chosen(question.choices, answer)
    if place is None:
        return Verdict(passed=False, why="not one of the choices")
    right = place == chosen(question.choices, str(question.answers[0]))
    return Verdict(right, "" if right else "wrong")


def number_in(text: str) -> tuple[float, str] | None:
    """Return the number that a text is, and the unit behind it (or the sign of money before it); None: it is something else."""
    text = text.strip().strip("*`").rstrip(".").strip()
    sign, text = ("-", text[1:]) if text[:1] in {"-", "\u2212"} else ("", text)
    money = MONEY.match(text)
    text = text[money.end() :].strip() if money else text
    match = NUMBER.match(sign + text)
    if not match:
        return None
    value = float(match[0].replace(",", ""))
    rest = (sign + text)[match.end() :]
    unit = f"{money[0] if money else ''} {rest}".strip()
    joined = bool(rest) and rest[0].isascii() and (rest[0].isdigit() or rest[0] in ".,^")
    return (value, unit) if math.isfinite(value) and not joined else None


def _counted(question: Question, answer: str) -> Verdict:
    found = number_in(answer)
    if found is None:
        return Verdict(passed=False, why="not a number" if number_free(answer) else "hedged")
    value, written = found
    wanted = float(question.answers[0])
    if question.unit:
        asked, given = unit_of(question.unit), unit_of(written)
        if not given:
            return Verdict(passed=False, why="hedged" if written else "no unit")
        assert asked is not None  # questions without a unit that can be read are refused
        if given.powers != asked.powers:
            return Verdict(passed=False, why="another unit")
        value *= given.factor / asked.factor
    elif written:
        return Verdict(passed=False, why="another unit" if unit_of(written) else "hedged")
    allowed = max(question.tolerance, question.relative * abs(wanted), ROUNDING * abs(wanted))
    right = abs(value - wanted) <= allowed
    return Verdict(right, "" if right else "wrong")


def number_free(text: str) -> bool:
    return not re.search(r"\d", text, re.ASCII)
