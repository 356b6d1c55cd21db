"""From one text to another by replacements that the tool `edit` accepts: each old piece is in the file exactly once."""

from __future__ import annotations

import difflib
import re
import shlex
from dataclasses import dataclass
from functools import lru_cache

from etude.agent.calls import Call
from etude.tasks.generators.parsed import Parsed

SHOWN = 70  # characters of a line that is spoken of


@dataclass(frozen=True)
class Change:
    """One replacement in a file, in which `old` is once when those before it are made; no `old`: the whole file; no `new`: it goes."""

    path: str
    name: str  # of the definition it is in
    old: str | None
    new: str | None

    def call(self, indent: str = "") -> Call:
        """Return the call that makes it; with an indent it will not be found."""
        if self.new is None:
            return Call("shell", {"command": f"rm -- {shlex.quote(self.path)}"})
        if self.old is None:
            return Call("write", {"path": self.path, "content": self.new})
        old, new = (re.sub(r"(?m)^(?=.)", indent, text) for text in (self.old, self.new))
        return Call("edit", {"path": self.path, "old": old, "new": new})

    @property
    def line(self) -> dict[str, str]:
        """The one line that gives way to one other, where that is so and both are short enough to be spoken of."""
        old, new = (self.old or "").splitlines(), (self.new or "").splitlines()
        pairs = [(a.strip(), b.strip()) for a, b in zip(old, new, strict=False) if a != b]
        short = (
            len(old) == len(new)
            and len(pairs) == 1
            and all(0 < len(text) <= SHOWN and "`" not in text for text in pairs[0])
        )
        return dict(zip(("was", "now"), pairs[0], strict=True)) if short else {}


def changes(path: str, before: str, after: str) -> list[Change]:
    """Return the replacements that turn one text into another, front to back, with as many lines around each as make it unique."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    found = []
    for i, j, k, m in _differing(old, new):
        present = "".join([*new[:k], *old[i:]])
        for around in range(len(old) + len(new)):
            head, tail = "".join(new[max(0, k - around) : k]), "".join(old[j : j + around])
            was, now = head + "".join(old[i:j]) + tail, head + "".join(new[k:m]) + tail
            if was.strip() and _times(was, present) == 1:
                break
        if was.endswith("\n") and now.endswith("\n") and now.strip() and _times(was[:-1], present) == 1:
            was, now = was[:-1], now[:-1]
        found.append(Change(path, _name(path, before, after, range(k + 1, m + 1)) or path, was, now))
    return found


def _differing(old: list[str], new: list[str]) -> list[tuple[int, int, int, int]]:
    """Return the runs of lines that differ; equal lines at both ends are passed over first, which is most of a long file."""
    least, head, tail = min(len(old), len(new)), 0, 0
    while head < least and old[head] == new[head]:
        head += 1
    while tail < least - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    matcher = difflib.SequenceMatcher(None, old[head : len(old) - tail], new[head : len(new) - tail], autojunk=False)
    return [(head + i, head + j, head + k, head + m) for tag, i, j, k, m in matcher.get_opcodes() if tag != "equal"]


def _times(part: str, text: str) -> int:
    """Return how often a part is in a text, as the tool that edits counts: also where it overlaps itself."""
    return len(re.findall(f"(?={re.escape(part)})", text))


def _name(path: str, before: str, after: str, lines: range) -> str:
    """Return the definition that lines of the new text bring, or that they are in."""
    if not path.endswith(".py"):
        return ""
    file = _parsed(path, after)
    here = [(name, node) for name, node in file.definitions if node.lineno in lines]
    known = {name for name, _ in Parsed(path, before).definitions} if here else set()
    brought = [name for name, _ in here if name not in known]
    return brought[0] if brought else file.name_at(min(lines.start, len(file.lines)))


@lru_cache(maxsize=16)
def _parsed(path: str, text: str) -> Parsed:
    """Return a file; many tasks break the same one, so that parsing it anew for each would take most of the time."""
    return Parsed(path, text)
