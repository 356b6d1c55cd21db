"""Packages of Debian: fetched by an apt that is a script here, read by the real tools."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from io import BytesIO
from typing import TYPE_CHECKING

import pytest

from etude.data.document import Drop, Raw
from etude.data.sources.debian import licence_of, open_debian
from etude.errors import UserError
from etude.tasks.codebase import PackageSettings

if TYPE_CHECKING:
    from pathlib import Path

COPYRIGHT = """Format: x

Files: *
Copyright: 2020 Somebody
License: Expat

Files: debian/*
Copyright: 2021 Somebody else
License: GPL-2+
"""
APT = """#!/bin/sh
# What it is asked for lies in $POOL; what does not is not there.
case "$1 $*" in
  indextargets*) echo "Packages|http://archive/ stable main"; echo "Sources|no" ;;
  source*--tar-only*) cp $POOL/calc_1.2.orig*.tar.gz . 2>/dev/null || { echo "E: no such package" >&2; exit 100; } ;;
  source*--diff-only*) cp $POOL/*.debian.tar.xz . ;;
  download*) cp $POOL/*.deb . 2>/dev/null || exit 100 ;;
  madison*) echo "calc | 1.2-1 | http://archive stable/main Sources" ;;
esac
"""


def archive(path: Path, files: dict[str, str]) -> None:
    with tarfile.open(path, "w:xz" if path.suffix == ".xz" else "w:gz") as tar:
        for name, text in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(text)
            tar.addfile(about, BytesIO(text.encode()))


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that packages come from."""
    for folder in ("bin", "pool"):
        (tmp_path / folder).mkdir()
    for name in ("apt-get", "apt-cache"):
        program = tmp_path / "bin" / name
        program.write_text(APT)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("POOL", str(tmp_path / "pool"))
    return tmp_path / "pool"


def test_a_source_package_is_its_main_archive_under_the_licence_that_debian_found(pool: Path, tmp_path: Path) -> None:
    archive(pool / "calc_1.2.orig.tar.gz", {"calc-1.2/calc.c": "int x;\n"})
    archive(pool / "calc_1.2.orig-types.tar.gz", {"types/other.c": "int y;\n"})
    archive(pool / "calc_1.2-1.debian.tar.xz", {"debian/copyright": COPYRIGHT})
    source, licence = open_debian("calc=1.2-1", 1000, tmp_path / "cache")
    assert licence == "MIT"
    assert [(each.path, each.content) for each in source.parts[0].read() if isinstance(each, Raw)] == [
        ("calc.c", b"int x;\n")
    ]
    shutil.rmtree(pool)  # it is kept
    assert open_debian("calc=1.2-1", 1000, tmp_path / "cache")[0].revision == source.revision


def test_without_debians_part_the_licence_is_left_to_the_archives_own_files(pool: Path, tmp_path: Path) -> None:
    archive(pool / "calc_1.2.orig.tar.gz", {"calc-1.2/calc.c": "int x;\n"})
    assert open_debian("calc=1.2-1", 1000, tmp_path / "cache")[1] == ""


@pytest.mark.parametrize("name", ["calc", "librust-calc-dev"])
def test_a_version_that_is_no_longer_there_is_said_with_those_that_are(name: str, pool: Path, tmp_path: Path) -> None:
    assert not any(pool.iterdir())
    with pytest.raises(UserError, match=rf"cannot fetch {name}=1\.1-1: .* have 1\.2-1 of it") as caught:
        open_debian(f"{name}=1.1-1", 1000, tmp_path / "cache")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="needs dpkg-deb")
def test_a_crate_is_what_its_package_has_below_the_registry(pool: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    texts = {"usr/share/cargo/registry/calc-1.2/src/lib.rs": "// code\n", "usr/share/doc/librust-calc-dev/copyright": COPYRIGHT,
             "DEBIAN/control": "Package: librust-calc-dev\nVersion: 1.2-1\nArchitecture: all\nMaintainer: x <x@x>\nDescription: x\n",
             "usr/share/doc/librust-calc-dev/other": "x"}  # fmt: skip
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "usr/share/cargo/registry/calc-1.2/link").symlink_to("/etc/passwd")
    subprocess.run(
        ["dpkg-deb", "--build", str(root), str(pool / "librust-calc-dev_1.2-1_all.deb")],
        check=True,
        capture_output=True,
    )
    source, licence = open_debian("librust-calc-dev=1.2-1", 1000, tmp_path / "cache")
    documents = list(source.parts[0].read())
    assert licence == "MIT"
    assert {each.path: each.content for each in documents if isinstance(each, Raw)} == {"src/lib.rs": b"// code\n"}
    assert [(each.path, each.reason) for each in documents if isinstance(each, Drop)] == [("link", "a link")]


@pytest.mark.parametrize(("names", "licence"), [
    (["Expat"], "MIT"), (["BSD-3-clause", "Apache-2.0"], "BSD-3-Clause AND Apache-2.0"), (["Expat or Apache-2.0"], "(MIT OR Apache-2.0)"),
    (["Expat", "of-its-own"], ""), (["Expat, and GPL-2+ or ISC"], ""), ([], ""),
])  # fmt: skip
def test_licences_of_all_files_hold_and_one_that_is_not_known_leaves_it_open(names: list[str], licence: str) -> None:
    paragraphs = "\n".join(f"Files: {i}*\nCopyright: x\nLicense: {name}\n text\n" for i, name in enumerate(names))
    assert licence_of(f"Format: x\n\n{paragraphs}\nFiles: debian/*\nLicense: GPL-3\n") == licence


def test_a_package_is_pinned_to_a_version() -> None:
    settings = PackageSettings(debian="calc=1:1.2~rc1-1+b1", language="c")
    assert settings.name == "calc"
    for wrong in ("calc", "calc==1.2", "-o=1", "../calc=1"):
        with pytest.raises(ValueError, match="write it as name=version"):
            PackageSettings(debian=wrong, language="c")
