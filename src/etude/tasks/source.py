"""Where a codebase comes from: a package at a version, a folder, a git repository; unpacked once, cleaned, and never changed again.

The readers are those of the corpus (`data/sources`): no code of a package runs here, and members that lead out of an archive, links
and devices are left out. What could give a solution away goes as well: caches, bytecode, build metadata, history.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from etude.data.document import Raw
from etude.data.filters.licence import PERMISSIVE, evaluate, stated_in
from etude.data.settings import SourceSettings
from etude.data.sources import open_source
from etude.errors import UserError
from etude.files import digest_of, read_json, sha256_file, write_json
from etude.sandbox.layers import prepare
from etude.tasks.generators.parsed import is_test_path
from etude.tasks.seal import clean

if TYPE_CHECKING:
    from collections.abc import Iterable

    from etude.data.document import Drop
    from etude.progress import Reporter

LARGEST = 16_000_000  # bytes of a file that is taken
KEPT_APART = re.compile(
    r"(PKG-INFO|pyproject\.toml|setup\.cfg|[^/]+\.egg-info/requires\.txt|src/[^/]+\.egg-info/requires\.txt)"
)
NO_PACKAGE = re.compile(r"(docs?|examples?|benchmarks?|tools?|scripts?|utils?|bin|ci|tasks?|perf|\..*)")
NO_MODULE = {
    "setup.py",
    "conftest.py",
    "noxfile.py",
    "tasks.py",
    "fabfile.py",
    "versioneer.py",
    "conf.py",
    "manage.py",
    "bench.py",
}


class PackageSettings(BaseModel):
    """One codebase of a set: exactly one of pypi, folder and git."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    pypi: str | None = Field(None, description="a package at a version: name==version")
    folder: str | None = Field(None, description="a folder with a package and its tests")
    git: str | None = Field(None, description="a git repository: a folder, or anything git can clone")
    revision: str = Field("HEAD", description="git: the commit, tag or branch")
    sources: list[str] = Field([], description="folders and files with the code; none: they are looked for")
    tests: list[str] = Field([], description="folders and files with the tests; none: they are looked for")
    needs: list[str] = Field([], description="packages its tests need besides those its metadata name")
    drop: list[str] = Field(
        [], description="packages its metadata name that are not installed: they depend on it, or are not needed"
    )
    pytest: list[str] = Field([], description="options for pytest, such as -p asyncio or -o python_files=*.py")
    older: list[str] = Field(
        [], description="pypi: earlier versions, newest first: each is a task with the next one as its solution"
    )
    licence: str = Field("", description="its licence (SPDX), where its metadata do not say")
    share: float = Field(
        1.0, gt=0, le=1, description="of the mutations and deletions wanted of every package: less where tests are slow"
    )

    @model_validator(mode="after")
    def _one_place(self) -> PackageSettings:
        if sum(map(bool, (self.pypi, self.folder, self.git))) != 1:
            raise ValueError("a package must have exactly one of pypi, folder and git")
        if self.older and not self.pypi:
            raise ValueError("`older` is for packages of the index")
        return self

    @property
    def name(self) -> str:
        """Return what the codebase is called."""
        place = (
            self.pypi or Path(self.folder or "").expanduser().resolve().name
            if not self.git
            else re.split("[/:]", self.git)[-1]
        )
        return re.sub(r"[^a-z0-9]+", "-", str(place).partition("==")[0].removesuffix(".git").lower()).strip("-")


@dataclass(frozen=True)
class Unpacked:
    """A codebase without its Python: its clean tree, and what its metadata say."""

    name: str
    version: str
    digest: str
    tree: Path
    sources: tuple[str, ...]
    tests: tuple[str, ...]
    paths: tuple[str, ...]
    licence: str
    metadata: dict[str, str] = field(default_factory=dict)  # PKG-INFO and its like, which may not be in the tree
    left_out: dict[str, int] = field(default_factory=dict)  # files by reason


def unpack(settings: PackageSettings, cache: Path, reporter: Reporter) -> Unpacked:
    """Fetch and unpack a codebase into the cache, or return what is there."""
    place: dict[str, Any] = (
        {"git": settings.git, "revision": settings.revision} if settings.git else {"folder": settings.folder}
    )
    place = {"pypi": [settings.pypi]} if settings.pypi else place
    source = open_source(SourceSettings(name=settings.name, **place), LARGEST, cache, reporter)
    archive = source.parts[0].archive or None
    documents = None if archive else [each for part in source.parts for each in part.read()]
    digest = sha256_file(Path(archive)) if archive else digest_of([[each.path, str(each)] for each in documents or ()])
    folder = cache / "codebases" / f"{settings.name}-{digest[:16]}"
    if not (folder / "about.json").exists():
        _write(folder, documents or [each for part in source.parts for each in part.read()])
    about = read_json(folder / "about.json")
    version = settings.pypi.partition("==")[2] if settings.pypi else (source.revision or digest)[:12]
    layout = find_layout(folder / "tree", settings.sources, settings.tests, settings.name)
    stated = stated_in(about["metadata"].get("PKG-INFO", "").encode()) or ""
    return Unpacked(settings.name, version, digest, folder / "tree", *layout, settings.licence or stated, **about)


def _write(folder: Path, documents: Iterable[Raw | Drop]) -> None:
    """Write the clean tree as a layer; the note beside it comes last and says that all is there."""
    files: dict[str, bytes] = {}
    left_out: Counter[str] = Counter()
    for each in documents:
        if isinstance(each, Raw):
            files[each.path] = each.content if isinstance(each.content, bytes) else each.content.encode()
        else:
            left_out[each.reason] += 1
    metadata = {
        path.rsplit("/", 1)[-1]: text.decode("utf-8", "replace")
        for path, text in files.items()
        if KEPT_APART.fullmatch(path)
    }
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        for path, content in files.items():
            target = Path(work, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        left_out.update(clean(Path(work)))
        prepare(Path(work), folder / "tree")
    write_json(folder / "about.json", {"metadata": metadata, "left_out": dict(left_out)})


def find_layout(
    tree: Path, sources: Iterable[str], tests: Iterable[str], name: str
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return where code and tests of a tree lie, and what belongs on PYTHONPATH."""
    root = next((top for top in ("src", "lib") if any(_is_code(each) for each in _listed(tree / top))), ".")
    found = [each for each in _listed(tree / root) if _is_code(each)]
    own = [each for each in found if each.stem.lower().replace("_", "-") in {name, name.removeprefix("python-")}]
    given = tuple(sources) or tuple(
        each.relative_to(tree).as_posix() for each in (own if root == "." and own else found)
    )
    checks = tuple(tests) or tuple(_tests_in(tree))
    for what, places in {"code": given, "tests": checks}.items():
        if not places or any(not (tree / place).exists() for place in places):
            raise UserError(
                f"{name}: no {what} found at {', '.join(places) or 'the usual places'}; set `sources` and `tests`"
            )
    roots = tuple(dict.fromkeys(place.rpartition("/")[0] or "." for place in given)) if sources else (root,)
    return given, checks, roots


def _listed(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _is_code(path: Path) -> bool:
    if path.is_dir():
        return (
            (path / "__init__.py").exists()
            and not is_test_path(f"{path.name}/x")
            and not NO_PACKAGE.fullmatch(path.name)
        )
    return path.suffix == ".py" and path.name not in NO_MODULE and not is_test_path(path.name)


def _tests_in(tree: Path) -> list[str]:
    """Return the outermost folders of tests, and test files that lie elsewhere."""
    found: list[str] = []
    for path in sorted(tree.rglob("*.py")):
        place = path.relative_to(tree).as_posix()
        folders = place.split("/")[:-1]
        depth = next((i for i, each in enumerate(folders) if each in {"test", "tests", "testing"}), None)
        where = "/".join(folders[: depth + 1]) if depth is not None else place
        if is_test_path(place) and path.name != "conftest.py" and where not in found:
            found.append(where)
    return found


def permissive(licence: str) -> bool:
    """Whether what is under a licence may go into a set that is handed on."""
    return bool(licence) and evaluate(licence, lambda one: one.lower() in PERMISSIVE)
