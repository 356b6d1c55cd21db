from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from etude.errors import UserError
from etude.tasks.codebase import RUNNER, PackageSettings, requirements, with_environment
from etude.tasks.task import Codebase
from tests.tasks import small

HEADERS = "Name: p\nRequires-Dist: six\nRequires-Dist: attrs>=20; extra == 'test'\nRequires-Dist: sphinx; extra == 'docs'\nRequires-Dist: p[x]\n"
EGG = "six\n\n[:python_version < '3']\nenum34\n\n[test]\nmock\n\n[docs]\nsphinx\n"
PROJECT = "[project]\ndependencies = ['six']\n[dependency-groups]\ntest = ['mock', {include-group = 'x'}]\n[project.optional-dependencies]\ntests = ['attrs']\n"
SETUP = (
    "[options]\ninstall_requires =\n  six\n[options.extras_require]\ntest =\n  mock; python_version > '3'\n  flake8\n"
)


def unpacked(folder: Path, **metadata: str) -> Codebase:
    return Codebase("p", "1", "", folder, ("p",), ("tests",), licence="MIT", metadata=metadata)


@pytest.mark.parametrize(("name", "text", "wanted"), [
    ("PKG-INFO", HEADERS, ["attrs>=20", "six"]), ("requires.txt", EGG, ["mock", "six"]),
    ("pyproject.toml", PROJECT, ["attrs", "mock", "six"]), ("setup.cfg", SETUP, ["mock", "six"]), ("pyproject.toml", "not [ toml", []),
])  # fmt: skip
def test_requirements_are_read_from_metadata(tmp_path: Path, name: str, text: str, wanted: list[str]) -> None:
    found = requirements(unpacked(tmp_path, **{name: text}), PackageSettings(folder="p"))
    assert found == sorted([*wanted, "coverage", "pytest"])


def test_the_recipe_has_the_last_word(tmp_path: Path) -> None:
    settings = PackageSettings(folder="p", needs=["flake8", "attrs==1"], drop=["six"])
    assert requirements(unpacked(tmp_path, **{"PKG-INFO": HEADERS}), settings) == [
        "attrs==1",
        "coverage",
        "flake8",
        "pytest",
    ]


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in small.offline().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PIP_FIND_LINKS", f"{small.wheels()} {tmp_path}")
    return tmp_path


def wheel(folder: Path, name: str, needs: str = "") -> None:
    needed = f"Requires-Dist: {needs}\n" if needs else ""
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", "")
        file.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needed}")
        file.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{name}-1.0.dist-info/RECORD", "")


def test_an_environment_has_what_is_needed_and_no_pip(links: Path) -> None:
    wheel(links, "helper")
    settings = PackageSettings(folder="p", needs=["helper"])
    found = with_environment(unpacked(links), settings, links / "cache")
    assert "helper==1.0" in found.installed
    asked = [
        str(found.python),
        "-c",
        f"import helper, pytest, coverage, {RUNNER}\ntry:\n import pip\nexcept ImportError: print('none')",
    ]
    assert subprocess.run(asked, capture_output=True, text=True, check=True, cwd=links).stdout == "none\n"
    assert with_environment(unpacked(links), settings, links / "cache") == found
    pinned = with_environment(unpacked(links), settings, links / "cache", found.installed)
    assert pinned.installed == found.installed
    assert pinned.python != found.python


def test_what_brings_the_package_itself_is_refused(links: Path) -> None:
    wheel(links, "p")
    wheel(links, "friend", needs="p")
    with pytest.raises(UserError, match="its tests would need friend, which needs it"):
        with_environment(unpacked(links), PackageSettings(folder="p", needs=["friend"]), links / "cache")


def test_what_cannot_be_installed_is_told_in_one_line(links: Path) -> None:
    with pytest.raises(UserError, match=r"p: no environment for its tests: .*no-such-thing") as caught:
        with_environment(unpacked(links), PackageSettings(folder="p", needs=["no-such-thing"]), links / "cache")
    assert "\n" not in str(caught.value)


def test_nothing_of_the_repository_is_installed_or_imported(links: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = links / "here"  # the current folder: somebody's repository
    here.mkdir()
    monkeypatch.chdir(here)
    for name in ("venv", "pip", "json"):
        (here / f"{name}.py").write_text(f"open({str(links / 'mark')!r}, 'w')\n")
    with zipfile.ZipFile(here / "helper.zip", "w") as file:  # pip would take it for what `helper.zip` names
        file.writestr("helper/setup.py", f"open({str(links / 'mark')!r}, 'w')\n")
    project = "[project]\ndependencies = ['{}']\n"
    with pytest.raises(UserError, match=r"no environment for its tests: .*helper.zip"):
        stated = unpacked(links, **{"pyproject.toml": project.format("helper.zip")})
        with_environment(stated, PackageSettings(folder="p"), links / "cache")
    stated = unpacked(links, **{"pyproject.toml": project.format(f"helper @ file://{here}/helper.zip")})
    with pytest.raises(UserError, match="from an address; name it in `needs` or `drop`"):
        requirements(stated, PackageSettings(folder="p"))
    assert requirements(stated, PackageSettings(folder="p", drop=["helper"])) == ["coverage", "pytest"]
    assert not (links / "mark").exists()


def test_what_a_package_would_run_when_python_starts_does_not_run_here(links: Path) -> None:
    wheel(links, "helper")
    with zipfile.ZipFile(links / "helper-1.0-py3-none-any.whl", "a") as file:
        file.writestr("helper.pth", f"import sys; open({str(links / 'mark')!r}, 'w')\n")
    with_environment(unpacked(links), PackageSettings(folder="p", needs=["helper"]), links / "cache")
    assert not (links / "mark").exists()
