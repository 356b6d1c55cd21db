"""What a task is: a real codebase, a terse request, a hidden check. The seam between those who make tasks and those who use them.

    pristine tree ── edits, backwards ──▶ broken tree ── what the agent does ──▶ its tree ── tests restored ──▶ score

The solution is a set of edits; the broken tree is the solved one with the edits undone. Tests that fail on the broken tree and pass
on the solved one (`fail_to_pass`) must pass, and those that pass on both (`pass_to_pass`) must still. Some of the failing test
functions are not in the tree the agent sees, so that writing code for the tests one sees is not enough.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from etude.sandbox.box import WORKSPACE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from etude.tasks.readers import ReaderName
    from etude.tasks.services import ServiceSettings

Generator = Literal["mutation", "deletion", "version", "history"]
Source = Literal[Generator, "swebench", "harbor"]  # the last two: of public benchmarks, which are read and not made
# How a task is asked. Stored in a manifest: a short report; a stack trace and "fix"; a wrong premise; everything; hardly anything.
StoredStyle = Literal["terse", "trace", "premise", "full", "vague"]
# Made when asked for, easier: the request names the files (`located`), shows the wrong code (`shown`) or dictates the change (`told`).
PointedStyle = Literal["located", "shown", "told"]
Style = Literal[StoredStyle, PointedStyle]
Split = Literal["train", "bench"]
GO_TEST = re.compile(r"((?:Test|Example|Fuzz)\w*)(/.*)?")  # and its subtests


@dataclass(frozen=True)
class Edit:
    """One file of a solution, whole. None: there is no such file."""

    path: str  # relative to the tree
    broken: str | None
    fixed: str | None


@dataclass(frozen=True)
class Span:
    """Lines of the solution in the solved tree, 1-based, both ends included: what a retrieval agent should find."""

    path: str
    first: int
    last: int
    name: str = ""  # qualified name of the function or class, if it is in one


@dataclass(frozen=True)
class Candidate:
    """A way to break a tree, not yet known to be a task."""

    generator: Source
    kinds: tuple[str, ...]  # which operators or removals
    edits: tuple[Edit, ...]
    spans: tuple[Span, ...]
    about: Mapping[str, Any] = field(default_factory=dict)  # for prompts: names, signature, docstring, changelog lines


@dataclass(frozen=True)
class Command:
    """How a codebase that is not Python's is built and tested, and what reads the outcome."""

    language: str
    build: str
    test: str
    reader: ReaderName
    report: str = ""  # a file that the tests' runner writes; none: standard output
    fails: str = ""  # a statement that fails a test, where the language's usual one does not


@dataclass(frozen=True)
class Codebase:
    """A package at a version: first unpacked and cleaned, then with a Python for its tests, then with its tests known."""

    name: str
    version: str
    digest: str  # of what it was unpacked from
    tree: Path
    sources: tuple[str, ...]  # folders and files with the code, relative to the tree
    tests: tuple[str, ...]  # folders and files with the tests
    python: Path = Path()  # has its dependencies and never the package itself
    paths: tuple[str, ...] = (".",)  # on PYTHONPATH, relative to the tree: "src" or "."
    licence: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict, compare=False)  # PKG-INFO and its like, not in the tree
    installed: tuple[str, ...] = ()  # beside its Python: name==version
    options: tuple[str, ...] = ()  # for pytest
    hidden: tuple[str, ...] = ()  # folders of the system that must not be seen
    services: tuple[ServiceSettings, ...] = ()  # started before its tests
    lock: Mapping[str, str] = field(default_factory=dict, compare=False)  # the file that decided versions: file, sha256
    ids: tuple[str, ...] = ()  # tests that pass whenever they run
    sandbox: str = field(default="auto", compare=False)  # the backend that its tests and agents run in
    # Tests that pass even when spoilt (`spoil.py`).
    unspoilable: frozenset[str] = field(default=frozenset(), compare=False)
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)  # of each test
    command: Command | None = None  # None: Python, tested by pytest

    @property
    def key(self) -> str:
        return f"{self.name}=={self.version}"

    @property
    def python_path(self) -> list[str]:
        """What belongs on PYTHONPATH in a sandbox."""
        return [f"{WORKSPACE}/{path}".removesuffix("/.") for path in self.paths]


@dataclass(frozen=True)
class Task:
    """A validated task."""

    id: str
    package: str
    version: str
    candidate: Candidate
    prompts: Mapping[StoredStyle, str]
    fail_to_pass: tuple[str, ...]  # test ids
    pass_to_pass: tuple[str, ...]
    hidden: tuple[str, ...]  # test functions (path::name) that are not in the tree the agent sees
    category: str  # debugging, new feature, …
    difficulty: Mapping[str, float] = field(default_factory=dict)  # signals: lines, files, failing tests, sites
    seconds: float = 0.0  # of its tests
    split: Split = "train"  # which templates its requests are made from

    @property
    def tests(self) -> list[str]:
        """All tests that decide its score."""
        return [*self.fail_to_pass, *self.pass_to_pass]


def function_of(test: str) -> str:
    """Return the test function of a test id: its path and names without the parameters; of other languages its group and title."""
    path, separator, names = test.partition("::")
    if not path.endswith(".py"):
        of_go = GO_TEST.fullmatch(names)
        return path + separator + (of_go[1] if of_go else re.split(" > |::", names)[-1])
    return path + separator + names.partition("[")[0]
