"""Which tests run which lines of the pristine tree: measured once a codebase, so that a candidate is tried on few tests.

A test that runs none of the changed lines cannot tell the trees apart, unless a line is changed that runs on import.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from etude.tasks.generators.parsed import changed_lines

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from etude.tasks.task import Edit

ON_IMPORT = ""


@dataclass(frozen=True)
class Coverage:
    """The lines of each file that each test runs; those that run on import are under no name."""

    files: Mapping[str, Mapping[str, Collection[int]]]

    def run_by_tests(self) -> dict[str, set[int]]:
        """Return the lines of each file that any test runs."""
        return {
            path: {line for test, lines in tests.items() if test != ON_IMPORT for line in lines}
            for path, tests in self.files.items()
        }

    def tests_of_file(self, path: str) -> set[str]:
        """Return the tests that run any line of a file."""
        return set(self.files.get(path, {})) - {ON_IMPORT}

    def tests_of(self, edits: Iterable[Edit]) -> set[str] | None:
        """Return the tests that can see edits; None: any of them may."""
        found: set[str] = set()
        for edit in edits:
            if edit.broken is None or edit.fixed is None or not edit.path.endswith(".py"):
                return None
            changed = {
                line for first, last in changed_lines(edit.broken, edit.fixed) for line in range(first, last + 1)
            }
            tests = self.files.get(edit.path, {})
            if changed & set(tests.get(ON_IMPORT, ())):
                return None
            found |= {test for test, lines in tests.items() if not changed.isdisjoint(lines)}
        return found
