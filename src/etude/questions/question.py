"""A set of questions as JSON lines: one question a line, and before them, if there is one, a line about the set.

    {"set": "dosing", "split": "train", "licence": "CC0-1.0"}
    {"id": "d1", "question": "A tablet has 250 mg. How much are 4?", "kind": "number", "answer": 1000, "unit": "mg"}
    {"id": "d2", "question": "Which is a vitamin?", "kind": "choice", "choices": ["retinol", "iron"], "answer": "retinol"}

What is wrong with a line is said with its number. The answers of a set are graded when it is read: one that would not pass is a
mistake in the set, found before anything is learnt from it.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from etude.data.filters.licence import canonical
from etude.errors import UserError
from etude.files import digest_of
from etude.questions.grade import chosen, grade, normal
from etude.questions.units import unit_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Kind = Literal["exact", "number", "choice", "program", "rubric"]
SYSTEM = "Answer the question. End with one line that has the answer alone: `Answer: ` and the answer."
USES: dict[Kind, set[str]] = {  # fields that mean something for some kinds only
    "exact": {"answer"}, "number": {"answer", "unit", "tolerance", "relative"}, "choice": {"answer", "choices"},
    "program": {"answer", "program"}, "rubric": {"answer", "rubric", "labels"},
}  # fmt: skip
Answer = str | int | float
Kept = TypeVar("Kept", bound=BaseModel)


class Label(BaseModel, extra="forbid", strict=True, frozen=True):
    """An answer that a person has judged, to measure a judge by."""

    answer: str = Field(min_length=1)
    passed: bool


class Question(BaseModel, extra="forbid", strict=True, frozen=True, allow_inf_nan=False):
    """One question. `answer`: the right one, or several texts that are all right."""

    id: str = Field(min_length=1, max_length=100)
    question: str = Field(min_length=1)
    kind: Kind
    answer: Answer | list[str] = ""
    choices: list[str] = []
    unit: str = ""
    tolerance: float = Field(default=0.0, ge=0)  # in the unit
    relative: float = Field(default=0.0, ge=0, lt=1)  # share of the answer
    program: str = ""  # Python: reads the answer from stdin, exits with 0 if it is right
    rubric: str = ""  # what a judge is told
    labels: list[Label] = []
    solution: str = ""  # what a demonstration says before its answer
    search: list[str] = []  # what it looks for before that
    topic: str = ""  # scores are shown by topic
    family: str = ""  # of questions made alike; the order of training learns of these
    source: str = ""  # what several questions are about, such as a company: no independent questions; default the topic

    @property
    def answers(self) -> list[Answer]:
        return [*self.answer] if isinstance(self.answer, list) else [self.answer]

    @property
    def prompt(self) -> str:
        """Return what is asked, choices included."""
        letters = [f"{chr(ord('A') + place)}. {text}" for place, text in enumerate(self.choices)]
        return "\n".join([self.question, *letters])

    @property
    def reference(self) -> str:
        """Return an answer that is right, as it is to be written; empty where none is known."""
        if self.kind == "rubric":
            return str(self.answers[0]) or next((label.answer for label in self.labels if label.passed), "")
        shown = str(self.answers[0])
        return f"{shown}{'' if self.unit == '%' else ' '}{self.unit}" if self.unit else shown

    @model_validator(mode="after")
    def _can_be_graded(self) -> Question:
        for name in sorted(set().union(*USES.values()) - USES[self.kind]):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"`{name}` has no effect on a question of the kind {self.kind!r}")
        if self.kind == "number" and isinstance(self.answer, (str, list, bool)):
            raise ValueError("the answer of a number is a JSON number")
        if self.unit and unit_of(self.unit) is None:
            raise ValueError(f"the unit {self.unit!r} cannot be read")
        if self.kind == "choice":
            self._check_choices()
        if missing := [name for name in ("program", "rubric") if name == self.kind and not getattr(self, name)]:
            raise ValueError(f"it has no `{missing[0]}`")
        if self.kind != "rubric" and not all(normal(str(each)) for each in self.answers):
            raise ValueError("it has no `answer`")
        known = [self.reference] if self.kind == "number" else map(str, self.answers)
        if self.kind in {"exact", "number", "choice"} and not all(grade(self, each).passed for each in known):
            raise ValueError(f"its own answer {self.answer!r} would not pass")
        return self

    def _check_choices(self) -> None:
        if not 2 <= len(self.choices) <= 26 or len({normal(each) for each in self.choices} - {""}) < len(self.choices):
            raise ValueError("choices are 2 to 26 different texts")
        if isinstance(self.answer, list) or chosen(self.choices, str(self.answer)) is None:
            raise ValueError("its answer is none of the choices: give the letter, or the text, of one")


class About(BaseModel, extra="forbid", strict=True, frozen=True):
    """The line before the questions."""

    set: str = Field(min_length=1)
    split: Literal["train", "bench"] = "train"
    licence: str = ""
    system: str = SYSTEM

    @model_validator(mode="after")
    def _has_a_licence(self) -> About:
        if self.licence and canonical(self.licence) is None:
            raise ValueError(f"licence {self.licence!r} is no SPDX expression, such as MIT or LicenseRef-Ours")
        return self


@dataclass(frozen=True)
class QuestionSet:
    """A set that was read."""

    about: About
    questions: tuple[Question, ...]
    digest: str

    @property
    def statistics(self) -> dict[str, float]:
        """Return what the set is like. A policy that always says the same is right as often as the last number says."""
        said = Counter(
            f"choice {chosen(q.choices, str(q.answer))}" if q.kind == "choice" else normal(str(q.answers[0]))
            for q in self.questions if q.kind != "rubric"
        )  # fmt: skip
        kinds = Counter(question.kind for question in self.questions)
        count = len(self.questions)
        plurals = {"topic": "topics", "family": "families", "source": "sources"}
        several = {words: len({getattr(q, name) for q in self.questions}) for name, words in plurals.items()}
        return {"questions": count, **several,
                **{f"of kind {kind}": kinds[kind] for kind in sorted(kinds)},
                "share of the commonest answer": round(max(said.values(), default=0) / count, 4)}  # fmt: skip


def read_set(path: Path, only: str = "") -> QuestionSet:
    """Read a set, or those of its questions whose ids begin with a word of `only`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: no JSON lines of questions: {error}") from None
    about, questions, seen = About(set=path.stem), list[Question](), dict[str, int]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        row = _row(line, where)
        if "set" in row and number == 1:
            about = _read(About, row, where)
            continue
        question = _read(Question, row, where)
        if (first := seen.setdefault(question.id, number)) != number:
            raise UserError(f"{where}: the id {question.id!r} is also that of line {first}; ids tell questions apart")
        questions.append(question)
    words = only.split() or [""]
    for word in words:
        if not any(question.id.startswith(word) for question in questions):
            like = f" whose id begins with {word!r}" if word else "; docs/arenas.md says what one looks like"
            raise UserError(f"{path} has no question{like}")
    chosen_ones = tuple(q for q in questions if q.id.startswith(tuple(words)))
    return QuestionSet(about, chosen_ones, digest_of([about.model_dump(), [q.model_dump() for q in chosen_ones]]))


def _row(line: str, where: str) -> dict[str, object]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: no JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: a question is a JSON object, and this is none")
    return row


def _read(kind: type[Kept], row: dict[str, object], where: str) -> Kept:
    try:
        return kind.model_validate(row)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(each) for each in first["loc"] if each in {*kind.model_fields} or isinstance(each, int))
        unknown = f"unknown key {'.'.join(map(str, first['loc']))!r}" if first["type"] == "extra_forbidden" else ""
        fault = unknown or f"{place + ': ' * bool(place)}{first['msg'].removeprefix('Value error, ')}"
        raise UserError(f"{where}: {fault}") from None


def refuse_benchmark(path: Path, questions: QuestionSet) -> None:
    """Refuse to train on a benchmark, or on a set that has a question of a benchmark beside it."""
    if questions.about.split != "train":
        raise UserError(f"{path} is a benchmark, whose questions must not be trained on; name a training set")
    asked = {normal(question.prompt): question.id for question in questions.questions}
    for beside in sorted(path.absolute().parent.glob("*.jsonl")):
        other = _benchmark(beside) if beside != path.absolute() else None
        if other and (shared := [q for q in other.questions if normal(q.prompt) in asked]):
            same = f"{asked[normal(shared[0].prompt)]} is {shared[0].id} of the benchmark {beside.name}"
            raise UserError(f"{path}: {same}; take it out of one of them")


def _benchmark(path: Path) -> QuestionSet | None:
    """Return a benchmark of questions; None: the file is something else."""
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline()
    try:
        header = json.loads(first)
    except ValueError:
        return None
    marked = isinstance(header, dict) and {"set", "split"} <= {*header} and header["split"] == "bench"
    return read_set(path) if marked else None


def by_id(questions: Sequence[Question]) -> dict[str, Question]:
    return {question.id: question for question in questions}
