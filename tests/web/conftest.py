"""Made-up runs that several test files look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from etude.inference.http import gate_for
from etude.web.app import Guard, Pages
from etude.web.reading import Shelf
from tests.web.made import NASTY, Growing, head

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a friendly run and a hostile one; read-only for tests."""
    folder = tmp_path_factory.mktemp("runs")
    Growing(head(folder / "friendly")).train(12)
    Growing(head(folder / "hostile"), words=NASTY).train(4)
    return folder


@pytest.fixture
def app(runs: Path) -> Guard:
    return Pages(Shelf([runs]), gate_for("127.0.0.1", None, allow_open=False)).app()
