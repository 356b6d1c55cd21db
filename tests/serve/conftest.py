from __future__ import annotations

from typing import Any

import pytest

from tests.serve.scripted import sprout_tokeniser


@pytest.fixture(scope="session")
def tokeniser() -> Any:
    """The tokeniser of sprout: byte-level, with a chat template that has tools."""
    return sprout_tokeniser()
