"""Random changes inside a real sandbox, compared with a brute-force comparison of whole trees."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.sandbox.box import Entry, Place, Sandbox, SandboxError
from etude.sandbox.layers import checked, differences, lookup, prepare, write_layer
from etude.sandbox.local import open_sandbox

Tree = dict[str, tuple[str, int, bytes]]
NAMES = ["a", "b", "c/a", "c/b", "c/d/a", "c/d/e", "c", "c/d", "x\ny"]
KINDS = ("write", "append", "rm", "mkdir", "link", "chmod", "touch", "mv", "fifo", "remake")
edit = st.tuples(st.sampled_from(KINDS), st.sampled_from(NAMES), st.sampled_from(NAMES))
SHELL = {  # a FIFO is not written to: that waits for a reader until the call's time is over
    "write": '[ -p "$1" ] || echo "$2" > "$1"', "append": '[ -p "$1" ] || echo "$2" >> "$1"', "rm": 'rm -rf "$1"', "mkdir": 'mkdir -p "$1"', "link": 'ln -sfn "$2" "$1"',
    "chmod": 'chmod 750 "$1"', "touch": 'touch "$1"', "mv": 'mv -T "$1" "$2"', "fifo": 'mkfifo "$1"', "remake": 'rm -rf "$1"; mkdir "$1"',
}  # fmt: skip


async def tree_inside(box: Sandbox) -> Tree:
    """Return the same of a workspace, as a program inside sees it."""
    script = "find . -mindepth 1 -printf '%P\\0%y\\0%m\\0%l\\0' \\( -type f -exec cat {} \\; -o -true \\) -printf '\\0'"
    words = os.fsdecode((await box.exec(script)).out).split("\0")[:-1]
    found: Tree = {}
    for path, letter, mode, target, content in zip(*[iter(words)] * 5, strict=True):
        kind = {"f": "file", "l": "link", "d": "folder"}.get(letter, "other")
        found[path] = (kind, int(mode, 8), os.fsencode(target or content))
    return found


def patched(before: Tree, entries: list[Entry]) -> Tree:
    """Return a tree to which differences were applied."""
    after = dict(before)
    for entry in entries:
        if entry.kind != "folder" or before.get(entry.path, ("",))[0] != "folder":
            after = {
                path: value
                for path, value in after.items()
                if path != entry.path and not path.startswith(entry.path + "/")
            }
        if entry.kind != "gone":
            after[entry.path] = (entry.kind, entry.mode, entry.content or b"")
    return after


def changed(before: Tree, after: Tree) -> set[str]:
    """Return the paths at which two trees differ, but of what went with its folder only the uppermost."""
    there = {path for path, value in after.items() if before.get(path) != value}
    gone = {path for path in before if path not in after}
    return there | {
        path
        for path in gone
        if after.get(str(Path(path).parent), ("folder",))[0] == "folder" and str(Path(path).parent) not in gone
    }


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(upper=st.lists(edit, max_size=6), edits=st.lists(edit, min_size=1, max_size=12))
def test_diff_is_the_difference_of_whole_trees(
    tmp_path: Path, upper: list[tuple[str, str, str]], edits: list[tuple[str, str, str]]
) -> None:
    shutil.rmtree(tmp_path)
    for name in ("a", "c/a", "c/d/a", "c/d/e"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(name)
    prepare(tmp_path / "tree", tmp_path / "layer")

    def script(some: list[tuple[str, str, str]]) -> list[str]:
        functions = "".join(f"f_{kind}() {{ {body}; }}\n" for kind, body in SHELL.items())
        lines = [f"f_{kind} {quote(first)} {quote(second)} 2>/dev/null" for kind, first, second in some]
        return ["sh", "-c", functions + "\n".join(lines)]

    async def work() -> None:
        base = await open_sandbox(Place((tmp_path / "layer",)), "namespaces")
        await base.exec(script(upper))
        middle = write_layer(tmp_path / "middle", await base.diff(), (tmp_path / "layer",))
        box = await open_sandbox(Place((middle, tmp_path / "layer")), "namespaces")
        try:
            before = await tree_inside(box)
            assert before == {path: value for path, value in (await tree_inside(base)).items() if value[0] != "other"}
            await box.exec(script(edits))
            after, entries = await tree_inside(box), await box.diff()
        finally:
            await box.close()
            await base.close()
        assert patched(before, entries) == after
        assert {entry.path for entry in entries} == changed(before, after)
        assert [entry.path for entry in entries] == sorted(entry.path for entry in entries)

    asyncio.run(work())


def quote(word: str) -> str:
    return "'" + word + "'"


def test_layers_hide_one_another(tmp_path: Path) -> None:
    low, high = tmp_path / "low", tmp_path / "high"
    (low / "d" / "e").mkdir(parents=True)
    (low / "f").write_text("low")
    write_layer(high, [Entry("d", "file", 1, 0o644, b"x"), Entry("f", "gone")], (low,))
    assert lookup((high, low), "d").file == high / "d"
    assert not lookup((high, low), "d/e").there
    assert not lookup((high, low), "f").there
    assert lookup((high, low), "").names() == {"d"}
    assert lookup((low,), "").names() == {"d", "f"}


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/x", "a//b", "./a"])
def test_a_path_that_leads_out_is_not_believed(tmp_path: Path, path: str) -> None:
    with pytest.raises(SandboxError, match="impossible path"):
        checked(path)
    with pytest.raises(SandboxError, match="impossible path"):
        differences((tmp_path,), [({"path": path, "kind": "file", "mode": 0o644}, b"")])
