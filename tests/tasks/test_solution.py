"""The calls of a reference solution, carried out by the tools' own functions, give the solved files."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from etude.agent.toolbox import replace as edited
from etude.tasks.demos import solution_calls
from etude.tasks.task import Candidate, Edit
from tests.tasks import small

TEXTS = st.lists(st.sampled_from(["a\n", "b\n", "\n", "  a\n", "a\r\n", "\f", "é"]), max_size=12).map("".join)


@given(broken=st.none() | TEXTS, fixed=st.none() | TEXTS)
def test_calls_give_the_solved_file(broken: str | None, fixed: str | None) -> None:
    task = replace(small.task(), candidate=Candidate("version", (), (Edit("a b.txt", broken, fixed),), ()))
    text = broken
    for call in solution_calls(task):
        values = call.arguments
        if call.name == "shell":
            assert values == {"command": "rm -- 'a b.txt'"}
            text = None
        elif call.name == "write":
            text = values["content"]
        else:
            assert values["old"] != values["new"]
            assert values["old"]
            text, _ = edited(text or "", values["old"], values["new"], "a b.txt")
    assert text == fixed
