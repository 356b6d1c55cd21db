"""Which arena a recipe chooses, and what the arena `questions` needs besides its set."""

from __future__ import annotations

from pydantic import BaseModel, Field

from etude.errors import nearest

CODE, QUESTIONS, PYTHON = "code", "questions", "python:"


class QuestionSettings(BaseModel, extra="forbid", strict=True, frozen=True):
    """What the arena `questions` needs besides a set."""

    corpus: str = Field(default="", description="JSONL (id, text) or folder that `search` looks in; empty: no tool")
    results: int = Field(default=3, ge=1, le=20, description="passages that a search returns")
    judge: str = Field(default="", description="model that judges rubrics: an address, run, model folder or base")
    judge_tokens: int = Field(default=256, ge=8, description="limit of sampled tokens of a verdict")


def check_arena(name: str) -> str:
    """Return a name that can be an arena's; ValueError says what is wrong."""
    if name in {CODE, QUESTIONS}:
        return name
    module, _, cls = name.removeprefix(PYTHON).rpartition(".")
    if name.startswith(PYTHON) and module and all(part.isidentifier() for part in [*module.split("."), cls]):
        return name
    close = nearest(name, (CODE, QUESTIONS))
    raise ValueError(f"unknown arena {name!r}{close}; one of your own is python:module.Class")


def idle_in(arena: str) -> set[str]:
    """Return the settings that have no effect in an arena."""
    of_questions = set() if arena == QUESTIONS else {"questions"}
    return of_questions if arena == CODE else {"sandbox", "style", "tools"} | of_questions
