"""A small corpus of repositories in which everything that must be caught is planted, beside clean look-alikes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

MIT = """MIT License

Copyright (c) 2020 Somebody

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated documentation
files (the "Software"), to deal in the Software without restriction, including without limitation the rights to use, copy,
modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit persons to whom the
Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE,
ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""
GPL_HEADER = """# This program is free software: you can redistribute it and/or modify
# it under the terms of the GNU General Public License as published by
# the Free Software Foundation, either version 3 of the License, or
# (at your option) any later version.
"""
TASK = """def merge_intervals(spans):
    merged = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
"""
# In two halves, so that no scanner takes this file for a leak.
GITHUB_TOKEN = "ghp_" + "9mKz3vQ8xR2tY7wL5nB4cF6hJ1dS0aGpUeXo"
EMAIL = "jane.doe" + "@" + "realcompany.io"


def code(name: str, functions: int = 12) -> str:
    """Return Python that nothing else in the corpus resembles."""
    rng = random.Random(name)
    words = ["alpha", "beta", "gamma", "delta", "order", "price", "queue", "graph", "node", "edge", "cache", "frame"]
    lines = [f'"""The module {name}."""', "import math", ""]
    for number in range(functions):
        one, two, three = rng.sample(words, 3)
        lines += [f"def {one}_{two}_{rng.randrange(10**4)}({three}, {two}_{number}):", f"    {one} = {three} * {rng.randrange(999)} + math.sqrt({two}_{number})",
                  f"    return {one} if {one} > {rng.randrange(99)} else {three} - {rng.randrange(999)}", ""]  # fmt: skip
    return "\n".join(lines) + "\n"


@dataclass
class Planted:
    """Where what was planted: path → the step that must drop it; paths that must stay; and what must have gone from them."""

    caught: dict[str, str] = field(default_factory=dict)
    clean: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=lambda: [GITHUB_TOKEN, EMAIL])


def plant(root: Path) -> Planted:
    """Write the corpus below a folder of repositories."""
    planted = Planted()

    def write(path: str, content: str | bytes, step: str | None = None) -> None:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        if step is None:
            planted.clean.append(path)
        else:
            planted.caught[path] = step

    for repository in ("apple", "birch", "cedar", "daisy", "elder", "fern"):
        (root / repository).mkdir(parents=True)
        (root / repository / "LICENSE").write_text(MIT)
        for module in ("core", "tools"):
            write(f"{repository}/{module}.py", code(f"{repository}.{module}"))
    original = code("original", 30)
    write("apple/original.py", original)
    write("birch/copy.py", original, "duplicates")
    write("cedar/nearly.py", original.replace("The module original", "A module copied by hand"), "duplicates")
    write("daisy/related.py", "\n".join(original.splitlines()[:20]) + "\n" + code("related", 25))
    write("birch/gpl.py", GPL_HEADER + code("gpl"), "licence")
    write("birch/tagged.py", "# SPDX-License-Identifier: GPL-3.0-only\n" + code("tagged"), "licence")
    write("birch/checker.py", '"""Tells whether a file is under the GNU General Public License."""\n' + code("checker"))
    (root / "gpl-repository").mkdir()
    (root / "gpl-repository" / "LICENSE").write_text("SPDX-License-Identifier: GPL-2.0-only\n")
    write("gpl-repository/inside.py", code("inside"), "licence")
    write("unlicensed/somewhere.py", code("somewhere"), "licence")
    write("cedar/vendor/library.py", f'TOKEN = "{GITHUB_TOKEN}"\nOWNER = "{EMAIL}"\n' + code("library"), "generated")
    write("cedar/vendors/shop.py", code("shop"))
    write(
        "cedar/schema_pb2.py",
        "# Generated by the protocol buffer compiler.  DO NOT EDIT!\n" + code("schema"),
        "generated",
    )
    write("cedar/generator.py", '"""Writes modules that say they are generated."""\n' + code("generator"))
    write("cedar/uv.lock", "version = 1\n" * 20, "generated")
    write("cedar/lock.py", code("lock"))
    write("daisy/picture.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "decode")
    write("daisy/latin.py", "# caf\xe9\n".encode("latin-1") + code("latin").encode(), "decode")
    write("daisy/table.py", "VALUES = [\n" + "    0.0,\n" * 4000 + "]\n", "quality")
    write("elder/settings.py", f'TOKEN = "{GITHUB_TOKEN}"\nOWNER = "{EMAIL}"\n' + code("settings"))
    write("elder/hashes.py", f'COMMIT = "{"4f3a9c" * 6}beef"\nCONTACT = "someone@example.com"\n' + code("hashes"))
    write("fern/solution.py", code("solution") + TASK, "contamination")
    write("fern/intervals.py", '"""Merges intervals, in a way of its own."""\n' + code("intervals"))
    return planted
