"""The Python that a codebase's tests run with: its dependencies and pytest, never the package itself, nor a copy of it.

An environment is a folder named by what was asked for; what was installed is written down, and a manifest pins exactly that.
No pip is left inside (pip carries copies of other packages), and the folders of the system that may hold packages are hidden.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from configparser import Error as ConfigError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from etude.errors import UserError
from etude.files import digest_of, read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from etude.tasks.source import PackageSettings, Unpacked

ALWAYS = ("pytest", "coverage")
TEST_EXTRAS = ("", "test", "tests", "testing")
TOOLS = re.compile(  # what projects list among their test needs and no test needs
    r"(pytest-(cov|xdist|black|flake8|mypy|ruff|checkdocs|enabler|perf|sugar|timeout|randomly|benchmark|codspeed|pep8|runner)"
    r"|tox.*|nox|mypy|types-.*|ruff|flake8.*|black|isort|pylint|pre-commit|sphinx.*|furo|twine|build|wheel|codecov|coveralls"
    r"|jaraco-test|pyroma|flit-core|check-manifest|pyright|pycodestyle|bandit|setuptools.*|pip|rst-linker|zest-releaser.*)"
)
RUNNER = "etude_report"  # the module in the environment that runs tests: report_plugin.py
PLUGIN = Path(__file__).with_name("report_plugin.py")


@dataclass(frozen=True)
class Environment:
    """A Python, what is installed beside it, and what of the system must not be seen."""

    python: Path
    installed: tuple[str, ...]  # name==version
    hidden: tuple[str, ...]


def requirements(unpacked: Unpacked, settings: PackageSettings) -> list[str]:
    """Return what the tests of a codebase need, as far as its metadata and the recipe say."""
    said = unpacked.metadata
    stated = [*_in_headers(said.get("PKG-INFO", "")), *_in_egg_info(said.get("requires.txt", "")),
              *_in_project(said.get("pyproject.toml", "")), *_in_setup(said.get("setup.cfg", ""))]  # fmt: skip
    dropped = {canonicalize_name(name) for name in [*settings.drop, unpacked.name]}
    wanted: dict[str, str] = {}
    for line in [*settings.needs, *ALWAYS, *stated]:
        try:
            each = Requirement(line)
        except InvalidRequirement:
            continue  # a reference to a file or to another section
        name = canonicalize_name(each.name)
        named = line in settings.needs or not (name in dropped or TOOLS.fullmatch(name))
        if named and (each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in TEST_EXTRAS)):
            each.marker = None
            wanted.setdefault(name, str(each))
    return sorted(wanted.values())


def _in_headers(text: str) -> list[str]:
    return [str(line) for line in HeaderParser().parsestr(text).get_all("Requires-Dist", [])]


def _in_egg_info(text: str) -> Iterator[str]:
    """Yield the lines of requires.txt; a section is `[extra]`, `[:marker]` or `[extra:marker]`."""
    extra, marker = "", ""
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("["):
            extra, _, marker = line.strip("[]").partition(":")
        elif extra in TEST_EXTRAS:
            yield f"{line}; {marker}" if marker and ";" not in line else line


def _in_project(text: str) -> list[str]:
    with suppress(tomllib.TOMLDecodeError):
        said = tomllib.loads(text)
        project = said.get("project", {})
        extras = {**project.get("optional-dependencies", {}), **said.get("dependency-groups", {})}
        tests = [line for name in TEST_EXTRAS for line in extras.get(name, [])]
        return [line for line in [*project.get("dependencies", []), *tests] if isinstance(line, str)]
    return []


def _in_setup(text: str) -> list[str]:
    said = ConfigParser(interpolation=None)
    with suppress(ConfigError):
        said.read_string(text)
        tests = [said.get("options.extras_require", name, fallback="") for name in TEST_EXTRAS if name]
        return "\n".join([said.get("options", "install_requires", fallback=""), *tests]).splitlines()
    return []


def environment(unpacked: Unpacked, settings: PackageSettings, cache: Path, pins: Sequence[str] = ()) -> Environment:
    """Build the environment of a codebase, or return the one that is there. `pins`: exactly these, from a manifest."""
    wanted = list(pins) or requirements(unpacked, settings)
    key = digest_of([f"{sys.version_info.major}.{sys.version_info.minor}", bool(pins), wanted])
    folder = cache / "environments" / key[:16]
    with _locked(folder):
        if not (folder / "etude.json").exists():
            _build(folder, wanted, exact=bool(pins), what=unpacked.name)
        note = read_json(folder / "etude.json")
        site = Path(note["site"])
        _refuse_copies(unpacked, site)
        if not (site / f"{RUNNER}.py").exists() or (site / f"{RUNNER}.py").read_bytes() != PLUGIN.read_bytes():
            shutil.copyfile(PLUGIN, site / f"{RUNNER}.py")
    return Environment(folder / "bin" / "python", tuple(note["installed"]), tuple(note["hidden"]))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(folder: Path, wanted: Sequence[str], *, exact: bool, what: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], what)
    python = str(folder / "bin" / "python")
    exactly = ["--no-deps"] if exact else []
    _run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check", "--no-input",
          "--prefer-binary", *exactly, *wanted], what)  # fmt: skip
    asked = "import json, site, sys, sysconfig; print(json.dumps([sysconfig.get_path('purelib'), sys.base_prefix]))"
    site, base = json.loads(_run([python, "-I", "-c", asked], what))
    found = importlib.metadata.distributions(path=[site])
    installed = sorted(f"{canonicalize_name(each.name)}=={each.version}" for each in found)
    library = Path(base, "lib", f"python{sys.version_info.major}.{sys.version_info.minor}")
    local = Path("/usr/local/lib", library.name)
    hidden = [library / "site-packages", library / "ensurepip", local / "dist-packages", local / "site-packages",
              Path("/usr/lib/python3/dist-packages"), Path("/usr/share/python-wheels")]  # fmt: skip
    write_json(
        folder / "etude.json",
        {"site": site, "installed": installed, "hidden": [str(each) for each in hidden if each.is_dir()]},
    )


def _run(command: Sequence[str], what: str) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=environ)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise UserError(f"{what}: no environment for its tests: {said[-1].strip()[:300]}; set `needs` or `drop`")
    return done.stdout


def _refuse_copies(unpacked: Unpacked, site: Path) -> None:
    """Refuse an environment that holds the package; copies under other names are for the gate (`seal.py`) to find."""
    installed = {canonicalize_name(each.name): each for each in importlib.metadata.distributions(path=[str(site)])}
    if canonicalize_name(unpacked.name) in installed:
        users = [name for name, each in installed.items() if _needs(each.requires or [], unpacked.name)]
        raise UserError(
            f"{unpacked.name}: its tests would need {', '.join(users)}, which needs it; name what brings it in `drop`"
        )


def _needs(lines: Iterable[str], name: str) -> bool:
    return any(canonicalize_name(Requirement(line).name) == canonicalize_name(name) for line in lines)
