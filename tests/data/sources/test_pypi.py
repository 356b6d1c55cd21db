from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from etude.data.settings import SourceSettings
from etude.errors import UserError
from etude.files import sha256_file
from tests.data.sources.reading import entries, identity, opened, texts
from tests.data.sources.test_archive import package
from tests.lineage.refusals import one_line


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page of links as pip knows them, with digests: two versions of one package, and one that has a wheel only."""
    folder = tmp_path / "index"
    folder.mkdir()
    marker = f"open({str(tmp_path / 'ran')!r}, 'w')\n".encode()
    package(
        folder / "toolz-1.1.0.tar.gz", **{"PKG-INFO": b"License: MIT\n", "toolz.py": b"old = 1\n", "setup.py": marker}
    )
    package(
        folder / "toolz-1.2.0.tar.gz", **{"PKG-INFO": b"License: MIT\n", "toolz.py": b"new = 1\n", "setup.py": marker}
    )
    (folder / "wheely-1.0-py3-none-any.whl").write_bytes(b"wheel")
    write_page(folder)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder / "page.html"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def write_page(folder: Path) -> None:
    links = [f'<a href="{file.name}#sha256={sha256_file(file)}" data-requires-python="&gt;=99">{file.name}</a>'
             for file in sorted(folder.iterdir()) if file.suffix != ".html"]  # fmt: skip
    (folder / "page.html").write_text(f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>")


def test_packages_are_fetched_once_and_no_code_of_theirs_runs(index: Path, tmp_path: Path) -> None:
    pins = ["toolz==1.2.0", "toolz==1.1.0", "toolz==1.2.0"]
    source = opened(tmp_path / "cache", pypi=pins)
    assert source.location == "package toolz==1.2.0, toolz==1.1.0"
    assert [texts([part])["toolz.py"] for part in source.parts] == [b"new = 1\n", b"old = 1\n"]
    assert [part.licences() for part in source.parts] == [{"PKG-INFO": b"License: MIT\n"}] * 2
    assert not (tmp_path / "ran").exists()
    assert source.revision
    assert identity(pypi=pins) == {"pypi": ["toolz==1.2.0", "toolz==1.1.0"]}

    for file in index.iterdir():
        file.unlink()
    assert opened(tmp_path / "cache", pypi=pins)[:2] == source[:2]  # without the index


def test_a_damaged_archive_in_the_cache_is_fetched_again(index: Path, tmp_path: Path) -> None:
    source = opened(tmp_path / "cache", pypi=["toolz==1.2.0"])
    kept = tmp_path / "cache" / "sdists" / "toolz-1.2.0.tar.gz"
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-20])
    assert opened(tmp_path / "cache", pypi=["toolz==1.2.0"])[:2] == source[:2]
    assert kept.read_bytes() == whole
    (kept.parent / "toolz==1.2.0.json").write_text("[]")
    assert opened(tmp_path / "cache", pypi=["toolz==1.2.0"])[:2] == source[:2]


def test_an_archive_that_the_index_does_not_promise_is_refused(index: Path, tmp_path: Path) -> None:
    with (index / "toolz-1.2.0.tar.gz").open("ab") as file:
        file.write(b"more")
    with pytest.raises(UserError, match=one_line("toolz==1.2.0", "SHA-256 differs")):
        opened(tmp_path / "cache", pypi=["toolz==1.2.0"])
    assert list((tmp_path / "cache" / "sdists").iterdir()) == []


@pytest.mark.parametrize(
    ("pin", "words"),
    [
        ("toolz==1.3.0", ["has no source archive at version 1.3.0", "'1.2.0'"]),
        ("nothing==1.0", ["has no 'nothing'", "check the name"]),
        ("wheely==1.0", ["wheely has no source archive at version 1.0"]),
        ("toolz==latest", ["'latest'"]),
    ],
)
def test_what_cannot_be_fetched_is_one_line(index: Path, tmp_path: Path, pin: str, words: list[str]) -> None:
    with pytest.raises(UserError, match=one_line(f"cannot fetch {pin}", *words)):
        opened(tmp_path / "cache", pypi=[pin])


@pytest.mark.parametrize("pin", ["../toolz==1", "toolz==../1", "--index==1", "too lz==1", "toolz==1;x"])
def test_what_is_no_pin_is_refused(pin: str) -> None:
    with pytest.raises(ValidationError, match=f"{re.escape(repr(pin))} is no package at a version; .* name==version"):
        SourceSettings(name="some", pypi=[pin])


def test_without_pip_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").write_text("raise ImportError\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(
        UserError, match=one_line("cannot fetch toolz==1.2.0", sys.executable, "has no pip", "ensurepip")
    ):
        opened(tmp_path / "cache", pypi=["toolz==1.2.0"])


def test_processes_that_fetch_at_the_same_time_do_not_collide(index: Path, tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from tests.data.sources.reading import opened, texts;"
        "print(sorted(texts(opened(pathlib.Path(sys.argv[1]), pypi=['toolz==1.2.0']).parts)))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "cache")]
    root = Path(__file__).parents[3]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(3)]
    assert [process.communicate()[0].strip() for process in started] == ["['PKG-INFO', 'setup.py', 'toolz.py']"] * 3
    names = {"toolz-1.2.0.tar.gz", "toolz==1.2.0.json"}
    assert {file.name for file in (tmp_path / "cache" / "sdists").iterdir()} == names


def test_the_repository_is_named_by_the_package(index: Path, tmp_path: Path) -> None:
    assert {entry.repository for entry in entries(opened(tmp_path, pypi=["toolz==1.2.0"]).parts)} == {"toolz-1.2.0"}


def test_nothing_in_the_current_folder_is_run(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for name in ("pip", "packaging", "hashlib", "etude"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(here)
    assert texts(opened(tmp_path / "cache", pypi=["toolz==1.2.0"]).parts)["toolz.py"] == b"new = 1\n"
    assert not (tmp_path / "ran").exists()


def test_two_names_of_one_package_are_one_package(index: Path, tmp_path: Path) -> None:
    [part] = opened(tmp_path / "cache", pypi=["toolz==1.2.0", "Toolz==1.2"]).parts
    assert len(entries([part])) == 3
