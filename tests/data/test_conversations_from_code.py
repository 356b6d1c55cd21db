"""Conversations made from code say what the code says."""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import etude
from etude.data.chat import Conversation, conversations_from_code, split
from etude.data.codebase import Codebase, SourceFile, read_codebase
from etude.errors import UserError
from tests.data.test_chat_template import chatml
from tests.lineage.refusals import one_line

CODE = '''"""A module."""
import functools

@functools.cache
def clamp(value: int,
          low: int = 0) -> int:
    """Keep a value
    within limits. More of it.

    Even more.
    """
    return max(value, low)

class Box:
    async def size(self):
        """Return the box's size in metres"""
        return "\\\\d"

    def size_of(self): return 1

    def later(self):
        """Must be written by others."""
        ...

    def later(self):
        """Holds a fence: ``` and more."""
        return 1
'''


def codebase(**files: str) -> Codebase:
    return Codebase(
        Path("somewhere"), tuple(SourceFile(path.replace("_", "."), text) for path, text in files.items()), {}
    )


def code_in(conversation: Conversation) -> str:
    found = re.fullmatch(r"```python\n(.*)\n```", conversation.messages[-1]["content"], re.DOTALL)
    assert found
    return found[1]


def test_a_function_is_written_and_shown() -> None:
    made, counts = conversations_from_code(codebase(a_py=CODE, b_js="function() {}", c_py='X = "<|im_end|>"\n' + CODE))
    assert counts == {
        "plain chats": 2,
        "skipped: another of its name follows": 2,
        "skipped: file is not Python": 1,
        "skipped: file spells a chat token": 4,
        "skipped: holds a code fence": 1,
        "skipped: no docstring of three words": 1,
        "tool traces": 2,
    }
    plain, trace = (
        next(each for each in made if bool(each.tools) == tools and each.origin == "a.py: clamp")
        for tools in (False, True)
    )
    asked = plain.messages[0]["content"]
    assert "def clamp(value: int, low: int=0) -> int" in asked
    assert "Keep a value within limits." in asked
    assert "More of it" not in asked
    assert (
        code_in(plain)
        == code_in(trace)
        == CODE.split("\n\n")[1] + CODE[CODE.index("\n\n    Even") : CODE.index("\n\nclass")]
    )
    assert [message["role"] for message in trace.messages] == ["user", "assistant", "tool", "assistant"]
    assert trace.messages[1]["tool_calls"][0]["function"] == {"name": "read_file", "arguments": {"path": "a.py"}}
    assert trace.messages[2]["content"] == CODE
    assert all(word in trace.messages[0]["content"] for word in ("clamp", "a.py"))
    method = next(code_in(each) for each in made if each.origin == "a.py: Box.size")
    assert method.startswith("async def size(self):\n    ")


def test_no_warning_of_the_code_reaches_the_user() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        conversations_from_code(codebase(a_py='def f():\n    """Has an odd escape."""\n    return "\\d"\n'))


@settings(max_examples=3)
@given(most=st.integers(200, 6000), seed=st.integers(0, 5))
def test_a_whole_package_within_bounds_and_the_same_again(most: int, seed: int) -> None:
    package = read_codebase(Path(etude.__file__).parent / "data")
    made, counts = conversations_from_code(package, seed=seed, most_chars=most)
    assert made == conversations_from_code(package, seed=seed, most_chars=most)[0]
    assert len(made) == counts.get("plain chats", 0) + counts.get("tool traces", 0)
    texts = {file.path: file.text for file in package.files}
    for each in made:
        assert sum(len(message["content"]) for message in each.messages) <= most
        function = ast.parse(code_in(each)).body[0]
        assert isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        assert ast.get_docstring(function)
        for shown in (message["content"] for message in each.messages if message["role"] == "tool"):
            lines = [line.strip() for line in code_in(each).split("\n")]
            assert "\n".join(lines) in "\n".join(line.strip() for line in shown.split("\n"))
            whole = texts[each.group]
            assert shown == whole or (whole.startswith(shown.rpartition("\n")[0]) and "not shown" in shown)


def test_the_seed_changes_words_and_order_but_not_what_is_asked_for() -> None:
    package = read_codebase(Path(etude.__file__).parent / "data")
    (one, counts), (other, same_counts) = (
        conversations_from_code(package, seed=seed, most_chars=10**6) for seed in (0, 1)
    )
    assert counts == same_counts
    assert [each.origin for each in one] != [each.origin for each in other]
    assert {each.digest for each in one} != {each.digest for each in other}
    assert sorted(each.origin for each in one) == sorted(each.origin for each in other)


def test_files_are_held_out_whole_and_all_can_be_encoded() -> None:
    made, _ = conversations_from_code(read_codebase(Path(etude.__file__).parent / "data"))
    train, held = split(made, 0.1, 0)
    assert 0.05 * len(made) < len(held) <= 0.15 * len(made)
    assert not {each.group for each in train} & {each.group for each in held}
    assert all(len(chatml("sprout").encode(each)) == 1 for each in held)


def test_code_without_documented_functions_is_refused() -> None:
    with pytest.raises(
        UserError,
        match=one_line("somewhere", "no documented Python function", "'skipped: no docstring of three words': 1"),
    ):
        conversations_from_code(codebase(a_py="def f():\n    return 1\n"))
