"""What a refusal must look like: one line that names what the user needs to put it right."""

from __future__ import annotations

import re


def one_line(*words: object) -> str:
    """Return a pattern for `pytest.raises(match=…)`: a single line that holds every word, in any order."""
    return r"\A" + "".join(f"(?=.*{re.escape(str(word))})" for word in words) + r".+\Z"
