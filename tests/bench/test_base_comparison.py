from __future__ import annotations

from pathlib import Path

import pytest

from etude.bench.base_comparison import _licence

APACHE = (Path(__file__).parents[2] / "LICENSE").read_text()


@pytest.mark.parametrize(
    ("files", "listed", "licence", "must_read"),
    [
        ({"LICENSE": APACHE}, None, "Apache-2.0", False),
        ({"LICENSE": APACHE, "NOTICE": "by us"}, None, "Apache-2.0", False),
        ({"LICENSE-CODE": APACHE, "LICENSE-MODEL": "not for sale"}, None, "Apache-2.0 + unknown text", True),
        ({"LICENSE": "not for sale"}, None, "unknown text", True),
        ({}, "MIT", "MIT (as listed, text not seen)", False),
        ({}, None, "no licence file", True),
    ],
)
def test_the_licence_is_that_of_all_its_texts(
    tmp_path: Path, files: dict[str, str], listed: str | None, licence: str, must_read: bool
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    found, duties = _licence(tmp_path, listed)
    assert found == licence
    assert ("unknown licence: read it" in duties) == must_read
