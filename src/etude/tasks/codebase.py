"""A codebase: a package at a version, a folder or a git repository, unpacked once and cleaned, and the Python that its tests run with.

The readers are those of the corpus (`data/sources`): no code of a package runs here, and members that lead out of an archive, links
and devices are left out. Whatever could give a solution away is removed: caches, bytecode, build metadata, history.

The Python environment has pytest and the dependencies that the metadata and the recipe name, in the versions of the lock file
(`locks.py`), but never the package itself or a copy of it. Its folder is named by a digest of the request; the installed packages are
recorded, and a manifest pins exactly these. pip is not installed in it (pip carries copies of other packages), and the system's
package folders are hidden.
"""

from __future__ import annotations

import ast
import fcntl
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from configparser import ConfigParser
from configparser import Error as ConfigError
from contextlib import suppress
from dataclasses import replace
from email.parser import HeaderParser
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from pydantic import BaseModel, Field, field_validator, model_validator

from etude.data.document import UNKNOWN, Document, Drop, Raw
from etude.data.filters.licence import PERMISSIVE, Licences, canonical, evaluate, spdx_of, stated_in
from etude.data.settings import SourceSettings
from etude.data.sources import open_source
from etude.data.sources.debian import PIN, open_debian
from etude.errors import UserError
from etude.files import digest_of, read_json, sha256_file, write_json, write_text
from etude.sandbox.layers import prepare
from etude.syntax import PARSING, parse_python
from etude.tasks.generators.languages import LANGUAGES
from etude.tasks.generators.parsed import TEST_FOLDERS, is_test_path, paths_below
from etude.tasks.locks import APT, Lock, find_lock, unpack_system_packages, wrong_hashes
from etude.tasks.readers import ReaderName
from etude.tasks.seal import clean
from etude.tasks.services import ServiceSettings
from etude.tasks.task import Codebase, Command

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from etude.progress import Reporter

LARGEST = 16_000_000  # bytes of a file that is taken
KEPT_APART = re.compile(r"PKG-INFO|pyproject\.toml|setup\.cfg|(src/)?[^/]+\.egg-info/requires\.txt")
NO_PACKAGE = re.compile(r"(docs?|examples?|benchmarks?|tools?|scripts?|utils?|bin|ci|tasks?|perf|\..*)")
NO_MODULE = re.compile(r"setup|conftest|noxfile|tasks|fabfile|versioneer|conf|manage|bench")
ALWAYS = ("pytest", "coverage")
TEST_EXTRAS = ("", "test", "tests", "testing")
TOOLS = re.compile(  # what projects list among their test needs and no test needs
    r"(pytest-(cov|xdist|black|flake8|mypy|ruff|checkdocs|enabler|perf|sugar|timeout|randomly|benchmark|codspeed|pep8|runner)"
    r"|tox.*|nox|mypy|types-.*|ruff|flake8.*|black|isort|pylint|pre-commit|sphinx.*|furo|twine|build|wheel|codecov|coveralls"
    r"|jaraco-test|pyroma|flit-core|check-manifest|pyright|pycodestyle|bandit|setuptools.*|pip|rst-linker|zest-releaser.*)"
)
PYTHON_ONLY = {"needs", "drop", "pytest", "older", "pypi", "extras", "apt", "services", "lock"}  # settings
OTHERS_ONLY = {"test", "reader", "report", "fails", "build"}
RUNNER = "etude_report"  # the module in the environment that runs tests: report_plugin.py
PLUGIN = Path(__file__).with_name("report_plugin.py")


class PackageSettings(BaseModel, extra="forbid", strict=True, frozen=True):
    """One codebase of a set: exactly one of pypi, debian, folder and git."""

    pypi: str | None = Field(None, description="a package at a version: name==version")
    debian: str | None = Field(None, description="a source package of Debian or Ubuntu at a version: name=version")
    folder: str | None = Field(None, description="a folder with a package and its tests")
    git: str | None = Field(None, description="a git repository: a folder, or anything git can clone")
    revision: str = Field("HEAD", description="git: the commit, tag or branch")
    sources: list[str] = Field([], description="folders and files with the code; none: detected")
    tests: list[str] = Field([], description="folders and files with the tests; none: detected")
    needs: list[str] = Field([], description="packages its tests need besides those its metadata name")
    drop: list[str] = Field([], description="packages its metadata name that are not installed")
    pytest: list[str] = Field([], description="options for pytest, such as -p asyncio or -o python_files=*.py")
    older: list[str] = Field([], description="pypi: earlier versions, newest first, for `version` tasks")
    licence: str = Field("", description="SPDX licence where its files state none; proprietary: code of your own")
    lock: str = Field("auto", description="lock file that decides versions; auto: the first found; none: the newest")
    extras: list[str] = Field([], description="extras and groups needed besides test, tests, testing (else dev)")
    apt: list[str] = Field([], description="packages of Debian or Ubuntu its tests need, unpacked without installing")
    services: list[ServiceSettings] = Field([], description="programs that are started before tests: a database")
    language: str = Field("", description="javascript, typescript, go, rust, c, java or ruby; empty: Python, by pytest")
    build: str | None = Field(None, description="other languages: command that builds tests; none: the usual one")
    test: str = Field("", description="command that runs them; empty: the language's usual")
    reader: str = Field("", description="what reads their output; empty: the language's usual")
    report: str = Field("", description="file that they write their outcome to; empty: standard output")
    fails: str = Field("", description="statement that fails a test; empty: the language's usual")
    share: float = Field(1.0, gt=0, le=1, description="share of mutations and deletions; lower where tests are slow")

    @model_validator(mode="after")
    def _one_place(self) -> PackageSettings:
        if sum(map(bool, (self.pypi, self.debian, self.folder, self.git))) != 1:
            raise ValueError("a package must have exactly one of pypi, debian, folder and git")
        if self.debian and not PIN.fullmatch(self.debian):
            raise ValueError(f"{self.debian!r} is no source package at a version; write it as name=version")
        if self.older and not self.pypi:
            raise ValueError("`older` is for packages of the index")
        if self.language and self.language not in LANGUAGES:
            raise ValueError(f"language {self.language!r} is none of {', '.join(LANGUAGES)}")
        if self.reader not in {"", *get_args(ReaderName)}:
            raise ValueError(f"reader {self.reader!r} is none of {', '.join(get_args(ReaderName))}")
        given = {name for name, value in self if value != type(self).model_fields[name].default}
        if self.language and (wrong := given & PYTHON_ONLY):
            raise ValueError(f"`{min(wrong)}` is for Python alone")
        if not self.language and (wrong := given & OTHERS_ONLY):
            raise ValueError(f"`{min(wrong)}` is for other languages: set `language`")
        return self

    @field_validator("licence")
    @classmethod
    def _is_licence(cls, licence: str) -> str:
        if licence and canonical(licence) is None:
            possible = "such as MIT, or proprietary for code of your own"
            raise ValueError(f"{licence!r} is no SPDX licence expression, {possible}")
        return canonical(licence) or ""

    @property
    def command(self) -> Command | None:
        """How tests in another language are run."""
        if not self.language:
            return None
        usual = LANGUAGES[self.language]
        reader = cast("ReaderName", self.reader or usual.reader)
        build, test = usual.build if self.build is None else self.build, self.test or usual.test
        if not test:
            raise UserError(f"{self.name}: set `test`, the command that runs its tests, and `reader`")
        return Command(self.language, build, test, reader, self.report, self.fails)

    @property
    def name(self) -> str:
        """What the codebase is called."""
        place = self.pypi or self.debian or Path(self.folder or "").expanduser().resolve().name
        place = re.split("[/:]", self.git)[-1] if self.git else place
        return re.sub(
            r"[^a-z0-9]+", "-", place.partition("=" if self.debian else "==")[0].removesuffix(".git").lower()
        ).strip("-")


def unpack(settings: PackageSettings, cache: Path, reporter: Reporter) -> Codebase:
    """Fetch and unpack a codebase into the cache, or return what is there; it has no Python yet."""
    place: dict[str, Any] = {"folder": settings.folder}
    if settings.git:
        place = {"git": settings.git, "revision": settings.revision}
    elif settings.pypi:
        place = {"pypi": [settings.pypi]}
    known = ""  # licence
    if settings.debian:
        source, known = open_debian(settings.debian, LARGEST, cache)
    else:
        source = open_source(SourceSettings(name=settings.name, **place), LARGEST, cache, reporter)
    archive = source.parts[0].archive
    documents = [] if archive else [each for part in source.parts for each in part.read()]
    digest = sha256_file(Path(archive)) if archive else digest_of([[each.path, str(each)] for each in documents])
    folder = cache / "codebases" / f"{settings.name}-{digest[:16]}"
    if not (folder / "about.json").exists():
        _write(folder, documents or [each for part in source.parts for each in part.read()])
    metadata = read_json(folder / "about.json")["metadata"]
    version = (settings.pypi or settings.debian or "").rpartition("=")[2] or (source.revision or digest)[:12]
    licence = settings.licence or known or _stated(metadata) or _written(source.parts[0].licences())
    if settings.command:
        sources, tests = find_other_layout(folder / "tree", settings)
        return Codebase(settings.name, version, digest, folder / "tree", sources, tests, Path("python3"), licence=licence,
                        metadata=metadata, command=settings.command)  # fmt: skip
    sources, tests, paths = find_layout(folder / "tree", settings.sources, settings.tests, settings.name)
    return Codebase(settings.name, version, digest, folder / "tree", sources, tests, paths=paths, licence=licence,
                    metadata=metadata, options=tuple(settings.pytest), services=tuple(settings.services))  # fmt: skip


def _stated(metadata: Mapping[str, str]) -> str | None:
    """Return the licence that metadata state."""
    with suppress(tomllib.TOMLDecodeError):
        project = tomllib.loads(metadata.get("pyproject.toml", "")).get("project", {})
        if isinstance(stated := project.get("license"), str):
            return spdx_of(stated)
    return stated_in(metadata.get("PKG-INFO", "").encode())


def _written(texts: Mapping[str, bytes]) -> str:
    """Return the licence of a repository's licence files, or nothing where they do not say one for sure."""
    licence, _ = Licences(texts, None).of(Document("", "code.py", ""))
    return "" if licence == UNKNOWN else licence


def _write(folder: Path, documents: Iterable[Raw | Drop]) -> None:
    """Write the clean tree as a layer; `about.json` beside it is written last and marks it as complete."""
    documents = list(documents)
    left_out = Counter(each.reason for each in documents if not isinstance(each, Raw))
    contents = {each.path: each.content for each in documents if isinstance(each, Raw)}
    apart = {path.rsplit("/", 1)[-1]: text for path, text in contents.items() if KEPT_APART.fullmatch(path)}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        for path, content in contents.items():
            target = Path(work, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        left_out.update(clean(Path(work)))
        prepare(Path(work), folder / "tree")
    metadata = {name: text.decode("utf-8", "replace") for name, text in apart.items()}
    write_json(folder / "about.json", {"metadata": metadata, "left_out": dict(left_out)})


def find_layout(tree: Path, sources: Iterable[str], tests: Iterable[str], name: str) -> tuple[tuple[str, ...], ...]:
    """Return the places of code and tests in a tree, and the folders for PYTHONPATH."""
    root = next((top for top in ("src", "lib") if _code_in(tree / top)), ".")
    code = _code_in(tree / root)
    own = [each for each in code if each.stem.lower().replace("_", "-") in {name, name.removeprefix("python-")}]
    chosen = own if root == "." and own else code
    given = tuple(sources) or tuple(each.relative_to(tree).as_posix() for each in chosen)
    checks = tuple(tests) or tuple(_tests_in(tree))
    for what, places in {"code": given, "tests": checks}.items():
        if not places or any(not (tree / place).exists() for place in places):
            where = ", ".join(places) or "the usual places"
            raise UserError(f"{name}: no {what} found at {where}; set `sources` and `tests`")
    roots = tuple(dict.fromkeys(place.rpartition("/")[0] or "." for place in given)) if sources else (root,)
    return given, checks, roots


def find_other_layout(tree: Path, settings: PackageSettings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the places of code and tests in another language: those of the settings, or every file with its suffix."""
    suffixes = LANGUAGES[settings.language].suffixes
    paths = [path for path in paths_below(tree, ["."]) if path.endswith(suffixes)]
    tests = settings.tests or [path for path in paths if is_test_path(path)]
    code = [path for path in paths if not any(map(NO_PACKAGE.fullmatch, path.split("/")[:-1]))]
    named = settings.sources or [path for path in code if not is_test_path(path)]
    for what, places in {"code": named, "tests": tests}.items():
        if not places or any(not (tree / place).exists() for place in places):
            raise UserError(f"{settings.name}: no {what} in {settings.language} found; set `sources` and `tests`")
    return tuple(named), tuple(tests)


def _code_in(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if _is_code(path)] if folder.is_dir() else []


def _is_code(path: Path) -> bool:
    if path.is_dir():
        odd = is_test_path(f"{path.name}/x") or NO_PACKAGE.fullmatch(path.name)
        return (path / "__init__.py").exists() and not odd
    return path.suffix == ".py" and not NO_MODULE.fullmatch(path.stem) and not is_test_path(path.name)


def _tests_in(tree: Path) -> list[str]:
    """Return the outermost folders of tests, and test files that lie elsewhere."""
    places: dict[str, None] = {}
    for path in sorted(tree.rglob("*.py")):
        place = path.relative_to(tree).as_posix()
        if is_test_path(place) and path.name != "conftest.py":
            folders = place.split("/")[:-1]
            depth = next((i for i, each in enumerate(folders) if each in TEST_FOLDERS), None)
            places["/".join(folders[: depth + 1]) if depth is not None else place] = None
    return list(places)


def permissive(licence: str) -> bool:
    """Whether what is under a licence may go into a set that is handed on."""
    return bool(licence) and evaluate(licence, lambda one: one.lower() in PERMISSIVE)


def requirements(codebase: Codebase, settings: PackageSettings, more: Iterable[str] = ()) -> list[str]:
    """Return the requirements of a codebase's tests, from its metadata, the recipe and `more`."""
    texts, extras = {name: _text(codebase, name) for name in READERS}, list(TEST_EXTRAS)
    if not any(True for name, read in READERS.items() for _ in read(texts[name], TEST_EXTRAS[1:])):
        extras.append("dev")
    extras += settings.extras
    stated = [line for name, read in READERS.items() for line in read(texts[name], extras)] + list(more)
    dropped = {canonicalize_name(name) for name in [*settings.drop, codebase.name]}
    wanted: dict[str, str] = {}
    for line in [*settings.needs, *ALWAYS, *stated]:
        try:
            each = Requirement(line)
        except InvalidRequirement:
            continue  # a reference to a file or to another section
        name = canonicalize_name(each.name)
        named = line in settings.needs or not (name in dropped or TOOLS.fullmatch(name))
        # An address may lie in the repository, and pip runs what it builds.
        if each.url and named and line not in settings.needs:
            raise UserError(f"{codebase.name} needs {line!r}, from an address; name it in `needs` or `drop`")
        if named and (each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras)):
            each.marker = None
            wanted.setdefault(name, str(each))
    return sorted(wanted.values())


def _text(codebase: Codebase, name: str) -> str:
    """Return metadata that were kept apart, or a file at the top of the tree; nothing if there is none."""
    path = codebase.tree / name
    if name in codebase.metadata or not path.is_file() or path.is_symlink():
        return codebase.metadata.get(name, "")
    return path.read_text(encoding="utf-8", errors="replace")


def _in_headers(text: str, extras: Sequence[str]) -> Iterator[str]:
    for line in map(str, HeaderParser().parsestr(text).get_all("Requires-Dist", [])):
        if "" in extras or any(re.search(rf"extra *== *.{re.escape(extra)}['\"]", line) for extra in extras):
            yield line  # markers are evaluated later


def _in_egg_info(text: str, extras: Sequence[str]) -> Iterator[str]:
    """Yield the lines of requires.txt; a section is `[extra]`, `[:marker]` or `[extra:marker]`."""
    extra, marker = "", ""
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("["):
            extra, _, marker = line.strip("[]").partition(":")
        elif extra in extras:
            yield f"{line}; {marker}" if marker and ";" not in line else line


def _in_project(text: str, extras: Sequence[str]) -> Iterator[str]:
    with suppress(tomllib.TOMLDecodeError, AttributeError, TypeError):
        file = tomllib.loads(text)
        project = file.get("project", {})
        groups = {"": project.get("dependencies", []), **project.get("optional-dependencies", {})}
        groups = {**groups, **file.get("dependency-groups", {})}
        waiting, read = list(extras), set[str]()
        while waiting:  # a group may include others
            name = waiting.pop(0)
            if name in read:
                continue
            read.add(name)
            lines = groups.get(name, [])
            waiting += [line["include-group"] for line in lines if isinstance(line, dict) and "include-group" in line]
            yield from (line for line in lines if isinstance(line, str))


def _in_setup(text: str, extras: Sequence[str]) -> Iterator[str]:
    file = ConfigParser(interpolation=None)
    with suppress(ConfigError):
        file.read_string(text)
        yield from file.get("options", "install_requires", fallback="").splitlines() if "" in extras else []
        for name in filter(None, extras):
            yield from file.get("options.extras_require", name, fallback="").splitlines()


def _in_setup_py(text: str, extras: Sequence[str]) -> Iterator[str]:
    """Yield the requirements that the call of setup() has as plain lists or as names of such; no code of a package runs."""
    with suppress(SyntaxError):
        tree = parse_python(text)
        plain = {each.targets[0].id: each.value for each in tree.body
                 if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name)}  # fmt: skip
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        arguments = {word.arg: word.value for call in calls for word in call.keywords}
        for name in ("install_requires", "tests_require", "extras_require") if "" in extras else ("extras_require",):
            value = arguments.get(name, ast.List([]))
            value = plain.get(value.id, value) if isinstance(value, ast.Name) else value
            with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                said = ast.literal_eval(value)
                for lines in [said.get(extra, []) for extra in extras] if isinstance(said, dict) else [said]:
                    if isinstance(lines, list | tuple):
                        yield from (line for line in lines if isinstance(line, str))


READERS = {"PKG-INFO": _in_headers, "requires.txt": _in_egg_info, "pyproject.toml": _in_project, "setup.cfg": _in_setup,
           "setup.py": _in_setup_py}  # fmt: skip


def with_environment(codebase: Codebase, settings: PackageSettings, cache: Path, pins: Sequence[str] = ()) -> Codebase:
    """Return a codebase with its Python environment, built if it is not there. `pins`: exactly these packages, from a manifest."""
    if codebase.command:
        return codebase
    # Of the system's packages the newest there is is taken.
    pins = [pin for pin in pins if not pin.startswith(f"{APT}:")]
    with PARSING:
        lock = None if pins else find_lock(codebase.tree, settings.lock)
        wanted = pins or requirements(codebase, settings, lock.wanted if lock else ())
    key = digest_of([f"{sys.version_info.major}.{sys.version_info.minor}", bool(pins), wanted,
                     *([lock.constraints] if lock else []), *([settings.apt] if settings.apt else [])])  # fmt: skip
    folder = cache.absolute() / "environments" / key[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("ab") as alone:
        fcntl.flock(alone, fcntl.LOCK_EX)
        if not (folder / "etude.json").exists():
            _build(folder, wanted, lock, settings.apt, exact=bool(pins), what=codebase.name)
        note = read_json(folder / "etude.json")
        runner = Path(note["site"], f"{RUNNER}.py")
        _refuse_copies(codebase.name, runner.parent)
        if not runner.exists() or runner.read_bytes() != PLUGIN.read_bytes():
            shutil.copyfile(PLUGIN, runner)
    hidden, installed, locked = tuple(note["hidden"]), tuple(note["installed"]), note.get("lock")
    return replace(codebase, python=folder / "bin" / "python", installed=installed, hidden=hidden, lock=locked or {})


def _build(
    folder: Path, wanted: Sequence[str], lock: Lock | None, apt: Sequence[str], *, exact: bool, what: str
) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-P", "-m", "venv", "--without-pip", str(folder)], what)
    python = str(folder / "bin" / "python")
    exactly = ["--no-deps"] if exact else []
    if lock:
        write_text(folder / "constraints.txt", lock.constraints)
        exactly = ["--constraint", str(folder / "constraints.txt"), "--report", str(folder / "report.json")]
    # Asked while the environment is empty: once packages are in it, it runs what their .pth files say.
    asked = "import json, site, sys, sysconfig; print(json.dumps([sysconfig.get_path('purelib'), sys.base_prefix]))"
    site, base = json.loads(_run([python, "-I", "-c", asked], what))
    _run([sys.executable, "-P", "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check", "--no-input",
          "--prefer-binary", *exactly, *wanted], what)  # fmt: skip
    if lock and (wrong := wrong_hashes(lock, read_json(folder / "report.json"))):
        raise UserError(f"{what}: {wrong[0]} has none of the hashes in {lock.file}; look at where pip has it from")
    packages = importlib.metadata.distributions(path=[site])
    installed = sorted(f"{canonicalize_name(each.name)}=={each.version}" for each in packages)
    installed += [f"{APT}:{pin}" for pin in unpack_system_packages(apt, folder)] if apt else []
    library = Path(base, "lib", f"python{sys.version_info.major}.{sys.version_info.minor}")
    local = Path("/usr/local/lib", library.name)
    hidden = [library / "site-packages", library / "ensurepip", local / "dist-packages", local / "site-packages",
              Path("/usr/lib/python3/dist-packages"), Path("/usr/share/python-wheels")]  # fmt: skip
    there = [str(each) for each in hidden if each.is_dir()]
    write_json(folder / "etude.json", {"site": site, "installed": installed, "hidden": there,
                                        "lock": {"file": lock.file, "sha256": lock.sha256} if lock else None})  # fmt: skip


def _run(command: Sequence[str], what: str) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    # Run in /: neither Python's modules nor pip's archives come from the current folder, which may be anybody's repository.
    nothing = subprocess.DEVNULL
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=nothing, env=environ, cwd="/")
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise UserError(f"{what}: no environment for its tests: {lines[-1].strip()[:300]}; set `needs` or `drop`")
    return done.stdout


def _refuse_copies(name: str, site: Path) -> None:
    """Refuse an environment that holds the package; copies under other names are for the gate (`seal.py`) to find."""
    installed = {canonicalize_name(each.name): each for each in importlib.metadata.distributions(path=[str(site)])}
    if (own := canonicalize_name(name)) in installed:
        with PARSING:
            needs = {user: [Requirement(line).name for line in each.requires or []] for user, each in installed.items()}
        users = [user for user, names in needs.items() if own in map(canonicalize_name, names)]
        who = f"{name}: its tests would need {', '.join(users)}, which needs it"
        raise UserError(f"{who}; put what brings it into `drop`")
