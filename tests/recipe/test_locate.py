from __future__ import annotations

import tomllib

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from etude.toml import key_line

TEXT = """\
# a comment = with an equals sign
name = "mine"   # trailing
stages = [
  "compare", # key = "not a key"
  "sft",
]

[compare]
on = "src"
"window" = 12
nested.deep.key = 1
text = '''
[fake]
window = 3
'''

[sft.more]
x = { y = 1, z = [1, 2] }

[[data.source]]
name = "a"
[[data.source]]
name = "b"
[data.source.options]
depth = 1
"""


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (["name"], 2),
        (["stages"], 3),
        (["stages", "1"], 3),
        (["compare"], 8),
        (["compare", "on"], 9),
        (["compare", "window"], 10),
        (["compare", "nested", "deep", "key"], 11),
        (["compare", "absent"], 8),
        (["sft", "more", "x", "z"], 18),
        (["data", "source", "0", "name"], 21),
        (["data", "source", "1", "name"], 23),
        (["data", "source", "1", "options", "depth"], 25),
        (["nothing"], None),
    ],
)
def test_lines(path: list[str], line: int | None) -> None:
    tomllib.loads(TEXT)
    assert key_line(TEXT, path) == line


KEYS = st.text("abcxyz_", min_size=1, max_size=5)
SCALARS = st.integers() | st.booleans() | st.text("ab\"'\\[]#= \n", max_size=8)
TABLES = st.dictionaries(
    KEYS, SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(KEYS, SCALARS, max_size=3), max_size=5
)


@given(TABLES)
def test_every_key_of_a_written_file_is_found_on_the_line_that_holds_it(table: dict[str, object]) -> None:
    text = tomli_w.dumps(table)
    lines = text.splitlines()
    for key, value in table.items():
        line = key_line(text, [key])
        assert line is not None
        assert lines[line - 1].strip().startswith((f"{key} =", f"[{key}]"))
        if isinstance(value, dict):
            for inner in value:
                inner_line = key_line(text, [key, inner])
                assert inner_line is not None
                assert lines[inner_line - 1].startswith(f"{inner} =")
                assert inner_line > line
