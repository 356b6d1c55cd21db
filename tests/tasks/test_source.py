from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from etude.errors import UserError
from etude.files import read_json, sha256_file, write_json
from etude.lineage.licences import identify, obligations
from etude.progress import Reporter
from etude.tasks.codebase import PackageSettings, find_layout, permissive, unpack
from tests import tiny
from tests.tasks import small


def stated_by(text: str) -> str:
    """Return the licence of a text by the other reader of licence texts."""
    return str(next(entry["spdx"] for entry in obligations() if entry["id"] == identify(text)))


def write(tree: Path, *paths: str) -> Path:
    for path in paths:
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text("x = 1\n", encoding="utf-8")
    return tree


@pytest.mark.parametrize(("paths", "found"), [
    (["src/p/__init__.py", "src/p/m.py", "tests/test_a.py", "docs/conf.py", "setup.py"], (("src/p",), ("tests",), ("src",))),
    (["p.py", "tests.py", "setup.py", "noxfile.py"], (("p.py",), ("tests.py",), (".",))),
    (["p/__init__.py", "p/tests/test_a.py", "p/tests/deep/test_b.py", "examples/__init__.py"], (("p",), ("p/tests",), (".",))),
    (["lib/p/__init__.py", "test/test_a.py", "conftest.py"], (("lib/p",), ("test",), ("lib",))),
    (["p/__init__.py", "other/__init__.py", "test_p.py"], (("p",), ("test_p.py",), (".",))),
])  # fmt: skip
def test_layouts(tmp_path: Path, paths: list[str], found: object) -> None:
    assert find_layout(write(tmp_path, *paths), [], [], "p") == found


def test_a_tree_without_tests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="p: no tests found at the usual places"):
        find_layout(write(tmp_path, "p/__init__.py"), [], [], "p")
    with pytest.raises(UserError, match="no code found at absent"):
        find_layout(tmp_path, ["absent"], ["p"], "p")


def test_a_package_is_unpacked_without_what_gives_solutions_away(tmp_path: Path, quiet: Reporter) -> None:
    archive = tmp_path / "cache" / "sdists" / "calc-1.0.tar.gz"
    archive.parent.mkdir(parents=True)
    members = {"calc/__init__.py": small.SOLVED, "test_calc.py": small.TESTS, "PKG-INFO": "Name: calc\nLicense: MIT\nRequires-Dist: six\n",
               "calc.egg-info/SOURCES.txt": "calc", "calc/__pycache__/a.pyc": "x", ".git/HEAD": "x", "calc/a.orig": "x"}  # fmt: skip
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in members.items():
            about = tarfile.TarInfo(f"calc-1.0/{name}")
            about.size = len(text.encode())
            tar.addfile(about, io.BytesIO(text.encode()))
    write_json(archive.with_name("calc==1.0.json"), {"file": archive.name, "sha256": sha256_file(archive)})
    found = unpack(PackageSettings(pypi="calc==1.0"), tmp_path / "cache", quiet)
    assert {path.relative_to(found.tree).as_posix() for path in found.tree.rglob("*") if path.is_file()} == {
        "calc/__init__.py",
        "test_calc.py",
        "PKG-INFO",
    }
    assert (found.digest, found.version, found.licence, found.sources) == (
        sha256_file(archive),
        "1.0",
        "MIT",
        ("calc",),
    )
    assert sum(read_json(found.tree.with_name("about.json"))["left_out"].values()) == 4
    assert unpack(PackageSettings(pypi="calc==1.0"), tmp_path / "cache", quiet) == found


def test_a_folder_and_a_repository_are_the_same_tree(tmp_path: Path, quiet: Reporter) -> None:
    folder = small.write(tmp_path / "calc")
    plain = unpack(PackageSettings(folder=str(folder)), tmp_path / "cache", quiet)
    tiny.git(folder, "init", "-q")
    tiny.git(folder, "add", ".")
    tiny.git(folder, "commit", "-q", "-m", "first")
    (folder / "calc" / "__init__.py").write_text("changed", encoding="utf-8")
    committed = unpack(PackageSettings(git=str(folder)), tmp_path / "cache", quiet)
    assert (committed.tree / "calc" / "__init__.py").read_text(encoding="utf-8") == small.SOLVED
    assert not (committed.tree / ".git").exists()
    assert committed.version == tiny.git(folder, "rev-parse", "HEAD")[:12]
    assert (plain.name, plain.tests) == ("calc", committed.tests)


def test_settings_that_contradict_are_refused() -> None:
    for wrong in ({}, {"pypi": "a==1", "folder": "b"}, {"folder": "b", "older": ["1"]}):
        with pytest.raises(ValueError, match=r"exactly one|older"):
            PackageSettings(**wrong)
    assert PackageSettings(git="https://example.org/a/My_Tool.git").name == "my-tool"


@pytest.mark.parametrize(
    ("licence", "is_so"), [("MIT", True), ("MPL-2.0", False), ("", False), ("BSD-3-Clause OR GPL-3.0-only", True)]
)
def test_only_permissive_packages_are_taken(licence: str, is_so: bool) -> None:
    assert permissive(licence) is is_so


MIT_TEXT = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize(("files", "given", "found"), [
    ({}, "", ""),
    ({}, "ours", "LicenseRef-proprietary"),
    ({"LICENSE": MIT_TEXT}, "", stated_by(MIT_TEXT)),
    ({"LICENSE": MIT_TEXT}, "proprietary", "LicenseRef-proprietary"),
    ({"pyproject.toml": '[project]\nlicense = "ISC"\n'}, "", "ISC"),
    ({"pyproject.toml": '[project]\nlicense = {text = "ISC"}\n'}, "", ""),
    ({"PKG-INFO": "Classifier: License :: Other/Proprietary License\n"}, "", "LicenseRef-proprietary"),
])  # fmt: skip
def test_the_licence_is_what_the_recipe_says_else_what_the_files_say(
    tmp_path: Path, quiet: Reporter, files: dict[str, str], given: str, found: str
) -> None:
    folder = small.write(tmp_path / "calc")
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    assert unpack(PackageSettings(folder=str(folder), licence=given), tmp_path / "cache", quiet).licence == found


def test_a_licence_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="no SPDX licence expression, such as MIT, or proprietary"):
        PackageSettings(folder="x", licence="all mine")
