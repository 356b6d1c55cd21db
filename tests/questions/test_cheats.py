"""The ways to be right without knowing: each is wrong. The list is docs/arenas.md#what-is-wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.questions.grade import Verdict, grade, marked
from etude.questions.question import Question

CITY = Question(id="c", question="Capital of France?", kind="exact", answer=["Paris", "Paris, France"])
WHICH = Question(
    id="w", question="Which?", kind="choice", choices=["iron", "retinol", "zinc", "copper"], answer="retinol"
)
BLOOD = Question(
    id="b", question="Whose cells have both antigens?", kind="choice", choices=["O", "A", "B", "AB"], answer="AB"
)
SUM = Question(id="s", question="7 + 5?", kind="number", answer=12)
PI = Question(id="p", question="Pi?", kind="number", answer=3.14, tolerance=0.01)
DOSE = Question(id="d", question="Dose?", kind="number", answer=5, unit="mg/kg/day")
MONEY = Question(id="m", question="Revenue?", kind="number", answer=4321, unit="thousand USD")
SHARE = Question(id="%", question="Margin?", kind="number", answer=12.5, unit="%", tolerance=0.5)


def graded(question: Question, said: str) -> Verdict:
    """Grade a final message as an episode's is."""
    answer, why = marked(said, many_lines=question.kind in {"program", "rubric"})
    return Verdict(passed=False, why=why) if why else grade(question, answer)


RIGHT = [
    (CITY, "It is on the Seine.\nAnswer: Paris"), (CITY, 'answer:  "PARIS".'), (CITY, "Answer: Paris, France"), (CITY, "Answer: P\u200baris"),
    (WHICH, "Answer: retinol"), (WHICH, "Answer: B. retinol"), (WHICH, "Answer: (b) Retinol"), (WHICH, "Answer: **retinol**"), (BLOOD, "Answer: AB"),
    (SUM, "Answer: 12"), (SUM, "Answer: 12.0"), (SUM, "Answer: 1.2e1"), (PI, "Answer: 3.149"), (PI, "Answer: +3.14."),
    (DOSE, "Answer: 5 mg/kg/day"), (DOSE, "Answer: 0.005 g per kg per d"), (DOSE, "Answer: 5000 µg/kg/day"),
    (MONEY, "Answer: 4321 thousand USD"), (MONEY, "Answer: $4,321,000"), (MONEY, "Answer: 4.321 million dollars"),
    (MONEY, "Answer: USD 4.321 million"), (SHARE, "Answer: 12.3%"), (SHARE, "Answer: 12.5 percent"), (SHARE, "Answer: 1250 bp"),
]  # fmt: skip
CHEATS = [
    # two answers, or all of them
    (CITY, "Answer: Paris or London", "hedged"), (CITY, "Answer: Paris / London / Rome", "hedged"), (CITY, "Answer: London (or Paris)", "hedged"),
    (WHICH, "Answer: retinol or iron", "not one of the choices"), (WHICH, "Answer: iron, retinol, zinc", "not one of the choices"),
    (WHICH, "Answer: A, B, C, D", "not one of the choices"), (WHICH, "Answer: A B", "not one of the choices"),
    (WHICH, "Answer: A. retinol", "not one of the choices"), (WHICH, "Answer: one of the above", "not one of the choices"),
    (SUM, "Answer: 11 or 12", "hedged"), (SUM, "Answer: 11, 12, 13", "hedged"), (SUM, "Answer: 11-13", "hedged"), (SUM, "Answer: 12 13", "hedged"),
    (SUM, "Answer: about 12", "hedged"), (SUM, "Answer: 12 ± 100", "hedged"), (SUM, "Answer: 12/13", "hedged"), (SUM, "Answer: ≥ 0 and 12", "hedged"),
    (SHARE, "Answer: 0 to 100 %", "hedged"), (DOSE, "Answer: 5 mg/kg/day or 6 mg/kg/day", "hedged"),
    # several marked answers, however they are marked
    (CITY, "Answer: London\nAnswer: Paris", "several marked answers"), (CITY, "**Answer:** London\nAnswer: Paris", "several marked answers"),
    (CITY, "The answer is: London\nAnswer: Paris", "several marked answers"), (CITY, "Final answer = Rome\nAnswer: Paris", "several marked answers"),
    # where it does not count
    (CITY, "Paris", "no marked answer"), (CITY, "I think the answer: Paris", "no marked answer"), (CITY, "Answer:", "no marked answer"),
    (CITY, "The answer is: Paris", "no marked answer"), (CITY, "Answer: Paris\nOr perhaps London.", "text behind the answer"), (CITY, "", "no message"),
    # numbers that are none, and other units
    (SUM, "Answer: 7 + 5", "hedged"), (SUM, "Answer: twelve", "not a number"), (SUM, "Answer: inf", "not a number"), (SUM, "Answer: nan", "not a number"),
    (SUM, "Answer: 1e999", "hedged"), (SUM, "Answer: १२", "not a number"), (SUM, "Answer: 0x0c", "hedged"), (SUM, "Answer: 12 %", "another unit"),
    (SUM, "Answer: 1,2", "hedged"), (SUM, "Answer: 12.0.0", "hedged"),
    (DOSE, "Answer: 5", "no unit"), (DOSE, "Answer: 5 mg", "another unit"), (DOSE, "Answer: 5 mg/kg", "another unit"),
    (MONEY, "Answer: 4321", "no unit"), (MONEY, "Answer: 4321 USD", "wrong"), (MONEY, "Answer: 4321 thousand EUR", "another unit"),
    (SHARE, "Answer: 0.125", "no unit"),
    # plainly wrong
    (CITY, "Answer: London", "wrong"), (WHICH, "Answer: iron", "wrong"), (WHICH, "Answer: C", "wrong"), (BLOOD, "Answer: D", "not one of the choices"), (BLOOD, "Answer: A", "wrong"), (SUM, "Answer: 13", "wrong"), (PI, "Answer: 3.16", "wrong"),
]  # fmt: skip


@pytest.mark.parametrize(("question", "said"), RIGHT)
def test_right_answers_pass(question: Question, said: str) -> None:
    assert graded(question, said) == Verdict(passed=True)


@pytest.mark.parametrize(("question", "said", "why"), CHEATS)
def test_cheats_do_not(question: Question, said: str, why: str) -> None:
    assert graded(question, said) == Verdict(passed=False, why=why)  # type: ignore[arg-type]


@given(
    st.lists(st.sampled_from(WHICH.choices), min_size=2, unique=True),
    st.sampled_from([", ", " or ", " ", "/", "; ", " and "]),
)
def test_no_list_of_choices_passes(several: list[str], between: str) -> None:
    assert not graded(WHICH, f"Answer: {between.join(several)}").passed


@given(
    st.integers(-(10**6), 10**6),
    st.integers(-(10**6), 10**6),
    st.sampled_from([" or ", ", ", " ", "-", "..", " to ", "/", "\n"]),
)
def test_no_two_numbers_pass(one: int, other: int, between: str) -> None:
    question = Question(id="n", question="n?", kind="number", answer=one)
    assert (
        not graded(question, f"Answer: {one}{between}{abs(other)}").passed or f"{one}{between}{abs(other)}" == f"{one}"
    )


@given(st.text())
def test_whatever_is_said_is_graded(said: str) -> None:
    for question in (CITY, WHICH, SUM, DOSE):
        for text in (said, f"Answer: {said}"):
            assert graded(question, text).passed == (graded(question, text).why == "")


@given(st.floats(1e-3, 1e6), st.sampled_from(["mg", "g", "kg", "ug"]), st.sampled_from(["mL", "L", "dL"]))
def test_units_are_converted_both_ways(value: float, mass: str, volume: str) -> None:
    grams, litres = {"mg": 1e-3, "g": 1.0, "kg": 1e3, "ug": 1e-6}[mass], {"mL": 1e-3, "L": 1.0, "dL": 0.1}[volume]
    question = Question(
        id="c", question="Concentration?", kind="number", answer=value * grams / litres, unit="g/L", relative=1e-6
    )
    assert graded(question, f"Answer: {value!r} {mass}/{volume}").passed
    assert not graded(question, f"Answer: {value!r} {volume}/{mass}").passed
