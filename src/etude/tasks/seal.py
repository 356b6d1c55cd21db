"""The gate: nothing an agent can read holds the solution, and the hidden tests are not in its tree.

By name: histories, caches, bytecode, build folders, metadata and copies of the package. By content: runs of eight words of code
that the solved files have and the broken package has nowhere. In the tree one such run is a leak. In an environment, where
idioms recur by chance, a leak is a file that holds a good share of them: the standard library alone has millions of runs.

Hidden test functions are cut out of their file, and the rest of it is untouched (`hide`).
"""

from __future__ import annotations

import ast
import io
import re
import shutil
import tokenize
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from etude.data.filters.contamination import ngram_runs
from etude.errors import UserError
from etude.syntax import parse_python
from etude.tasks.generators.parsed import Cut, Definition, Parsed, paths_below

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from etude.data.filters.contamination import Hashes
    from etude.tasks.task import Candidate, Codebase

RUN = 8  # words; signs between words are words
FEWEST, SHARE, MANY = 4, 0.3, 60  # in an environment's file: at least 4 runs and 30% of the solution's, or 60
LARGEST = 4_000_000  # bytes of a file that is read
PROSE = 30  # characters of a string literal that documentation may well repeat

FOLDERS = {
    "__pycache__", ".git", ".hg", ".svn", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox", ".nox", ".eggs",
    "htmlcov", ".ipynb_checkpoints", ".cache", ".pyre", ".pytype",
}  # fmt: skip
SUFFIXES = (".pyc", ".pyo", ".orig", ".rej", ".bak", ".swp", ".whl", ".egg", ".so", ".pyd", "~")
METADATA = (".egg-info", ".dist-info")
BUILT = {"build", "dist", "_build"}  # only where they are no packages
VENDORS = {"site-packages", "dist-packages", "_vendor", "vendor", "vendored", "extern", "third_party", "externals"}


def _unwanted(path: Path, root: Path) -> str | None:
    """Say why a path must not be in a tree that an agent sees."""
    name = path.name
    if path.is_dir() and not path.is_symlink():
        if name in FOLDERS or (path / "pyvenv.cfg").exists():
            return "cache, history or environment folder"
        if name in BUILT and path.parent in {root, root / "docs", root / "doc"} and not (path / "__init__.py").exists():
            return "build folder"
    if name.endswith(METADATA):
        return "package metadata"
    if name.endswith(SUFFIXES) or name in {".coverage", "coverage.xml", "coverage.json"}:
        return "bytecode, binary, report or backup file"
    return "link out of the tree" if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()) else None


def _below(folder: Path, root: Path) -> Iterator[tuple[Path, str]]:
    """Yield what must not be there, the outermost only."""
    for path in sorted(folder.iterdir()):
        if reason := _unwanted(path, root):
            yield path, reason
        elif path.is_dir() and not path.is_symlink():
            yield from _below(path, root)


def clean(tree: Path) -> Counter[str]:
    """Remove what must never be in a tree; return how many of what."""
    unwanted = list(_below(tree, tree))
    for path, _ in unwanted:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return Counter(reason for _, reason in unwanted)


def _runs(text: str) -> Hashes:
    hashes = ngram_runs(text.encode(), RUN, signs=True).hashes
    return np.unique(hashes) if len(hashes) > 1 else hashes[:0]  # a shorter text has one run of all its words


def code_pieces(path: str, text: str) -> Iterator[str]:
    """Yield the stretches of code between comments and long strings, which documentation may repeat without giving code away."""
    if not path.endswith(".py"):
        yield text
        return
    starts = np.cumsum([0, *map(len, io.StringIO(text, newline=""))])  # as the tokeniser counts lines
    at = 0
    for token in tokenize.generate_tokens(io.StringIO(text, newline="").readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and len(token.string) > PROSE):
            yield text[at : starts[token.start[0] - 1] + token.start[1]]
            at = starts[token.end[0] - 1] + token.end[1]
    yield text[at:]


def _read(path: Path) -> str | None:
    if not path.is_file() or path.is_symlink() or path.stat().st_size > LARGEST:
        return None
    content = path.read_bytes()
    return None if b"\0" in content[:4096] else content.decode(errors="replace")


@lru_cache(maxsize=4)
def _pristine(codebase: Codebase) -> dict[str, Hashes]:
    """Return the runs of each file of a package and its tests: code that the agent sees anyway."""
    paths = paths_below(codebase.tree, (*codebase.sources, *codebase.tests))
    return {path: _runs(text) for path in paths if (text := _read(codebase.tree / path)) is not None}


def solution_runs(candidate: Candidate, codebase: Codebase) -> Hashes:
    """Return the runs of code that only the solved tree has."""
    pristine = _pristine(codebase)
    edited = {edit.path for edit in candidate.edits}
    seen = [pristine[path] for path in pristine.keys() - edited]
    seen += [_runs(e.broken) for e in candidate.edits if e.broken]
    solved = [_runs(piece) for e in candidate.edits if e.fixed for piece in code_pieces(e.path, e.fixed)]
    empty = np.zeros(0, np.uint64)
    return np.setdiff1d(np.concatenate([empty, *solved]), np.concatenate([empty, *seen]))


class Index:
    """The runs of all text files below a folder, sorted, each with the file it is in: made once, asked for every task."""

    def __init__(self, root: Path) -> None:
        texts = ((path, _read(path)) for path in sorted(root.rglob("*")))
        read = [(path, _runs(text)) for path, text in texts if text is not None]
        self.root, self.files = root, [path for path, _ in read]
        holders = {*VENDORS, "__pycache__"}
        self.entries = [path for path in root.rglob("*") if path.parent == root or path.parent.name in holders]
        hashes = np.concatenate([np.zeros(0, np.uint64), *(runs for _, runs in read)])
        owners = np.repeat(np.arange(len(read), dtype=np.int32), [len(runs) for _, runs in read])
        order = np.argsort(hashes)
        self.hashes, self.owners = hashes[order], owners[order]

    def hits(self, wanted: Hashes) -> Counter[Path]:
        """Return how many of some runs each file holds."""
        first, last = np.searchsorted(self.hashes, wanted), np.searchsorted(self.hashes, wanted, side="right")
        counts: Counter[Path] = Counter()
        for start, end in zip(first[last > first], last[last > first], strict=True):
            counts.update(self.files[owner] for owner in self.owners[start:end])
        return counts


_environment = lru_cache(maxsize=8)(Index)


def _copies(index: Index, codebase: Codebase) -> Iterator[str]:
    """Yield what in an environment bears the package's name: an installed or vendored copy, its metadata, an archive of it."""
    plain = re.escape(re.sub(r"[-_.]+", "_", codebase.name).lower())
    names = {Path(source).name.removesuffix(".py").lower() for source in codebase.sources}
    archive = re.compile(rf"{plain}_(\d.*_(whl|tar_gz|zip|dist_info|egg_info|egg)|egg_(info|link))")
    for path in index.entries:
        if path.name.split(".")[0].lower() in names or archive.fullmatch(re.sub(r"[-_.+]+", "_", path.name).lower()):
            yield f"{path.relative_to(index.root)}: bears the name of the package under repair"


def gate(root: Path, candidate: Candidate, codebase: Codebase, *, environment: bool = False) -> list[str]:
    """Return every leak in a finished tree, or in a folder of the environment that the sandbox shows; none is good."""
    wanted = solution_runs(candidate, codebase)
    if environment:
        index = _environment(root)
        enough = min(max(FEWEST, SHARE * len(wanted)), MANY, len(wanted))
        hits = [(path.relative_to(root), n) for path, n in index.hits(wanted).items() if n >= enough]
        return sorted([*_copies(index, codebase), *(f"{path}: holds {n} runs of the solution" for path, n in hits)])
    leaks = [f"{path.relative_to(root)}: {why}" for path, why in _below(root, root)]
    for path in paths_below(root, ["."]):
        text = _read(root / path)
        if text is not None and (n := np.isin(_runs(text), wanted).sum()):
            leaks.append(f"{path}: holds {n} runs of the solution")
    return leaks


def hide(text: str, functions: Iterable[str]) -> str:
    """Return a test file without some functions (`test_a`, `Class.test_b`; `::` will do for the dot, before it a path).

    Decorators and the comments directly above go with them, and a class goes that has no test left; helpers stay.
    """
    file = _parsed(text)
    wanted = {name.rpartition(".py::")[2].replace("::", ".") for name in functions}
    if unknown := sorted(wanted - {name for name, _ in file.definitions}):
        raise UserError(f"test file has no {unknown[0]}; hide functions that are written in it, not inherited ones")
    hidden = file.cut(_cuts(file, file.tree.body, "", wanted))
    parse_python(hidden)
    return hidden


@lru_cache(maxsize=8)
def _parsed(text: str) -> Parsed:
    """Return a file; many tasks hide parts of the same one, and parsing is most of the time it takes to load a set."""
    return Parsed("", text)


def _cuts(file: Parsed, block: Sequence[ast.stmt], prefix: str, wanted: set[str]) -> Iterator[Cut]:
    """Yield the cuts of what goes from a block and from those inside it. A block of which nothing stays is a `pass`."""
    going = [node for node in block if isinstance(node, Definition) and _goes(node, prefix, wanted)]
    for node in going:
        cut = file.without(node, [node] if len(going) == len(block) and node is going[0] else block)
        assert cut is not None, "a definition shares its lines with no other statement"
        yield cut
    for other in block:
        if other not in going and isinstance(other, (ast.ClassDef, ast.If, ast.Try)):
            inside = f"{prefix}{other.name}." if isinstance(other, ast.ClassDef) else prefix
            for inner in (other.body, getattr(other, "orelse", [])):
                yield from _cuts(file, inner, inside, wanted)


def _goes(node: Definition, prefix: str, wanted: set[str]) -> bool:
    """Whether a definition is wanted out, or is a class whose tests all are."""
    if prefix + node.name in wanted or not isinstance(node, ast.ClassDef):
        return prefix + node.name in wanted
    tests = [each for each in node.body if isinstance(each, Definition) and each.name.lower().startswith("test")]
    return bool(tests) and all(_goes(each, f"{prefix}{node.name}.", wanted) for each in tests)
