"""A workshop that makes releases, one release, and copies of it to damage."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from etude.progress import Reporter
from tests.lineage import releases

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lineage.releases import Workshop


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Workshop:
    return releases.workshop(tmp_path_factory.mktemp("shop"), tiny_base, Reporter(quiet=True))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, shop: Workshop) -> Path:
    return shop.release(tmp_path_factory.mktemp("out") / "tiny-scaled")


@pytest.fixture
def folder(tmp_path: Path, whole: Path) -> Path:
    """A copy of the release, a test's own."""
    return shutil.copytree(whole, tmp_path / "received")
