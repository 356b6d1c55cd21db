from __future__ import annotations

import os
import resource
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.data.document import Drop, Raw
from etude.errors import UserError
from tests import tiny
from tests.data.sources.reading import entries, identity, opened, reasons, texts
from tests.data.test_codebase import write
from tests.lineage.refusals import one_line

NOT_ENTERED = "a folder not entered"


def test_a_folder_is_a_repository(tmp_path: Path) -> None:
    root = write(
        tmp_path / "tree", {"LICENSE": b"free", "src/b.py": b"b", "src/a.py": b"\xff", "src/vendor/COPYING": b"v"}
    )
    source = opened(folder=str(root))
    assert (source.location, source.revision) == (f"folder {root}", None)
    assert entries(source.parts) == [
        Raw("tree", "LICENSE", b"free"),
        Raw("tree", "src/a.py", b"\xff"),
        Raw("tree", "src/b.py", b"b"),
        Raw("tree", "src/vendor/COPYING", b"v"),
    ]
    licences = {"LICENSE": b"free", "src/vendor/COPYING": b"v"}
    assert [part.licences() for part in source.parts] == [licences]


def test_every_part_knows_all_licences_and_each_file_is_in_one(tmp_path: Path) -> None:
    names = {f"{at:03}.py": b"%d" % at for at in range(250)}
    write(tmp_path, {"zz/LICENSE": b"free", **names})
    parts = opened(folder=str(tmp_path)).parts
    assert len(parts) == 3
    assert sum(part.size for part in parts) == sum(map(len, names.values())) + len(b"free") + 251 * 1000
    assert [(raw.path, raw.content) for raw in entries(parts)] == [*names.items(), ("zz/LICENSE", b"free")]  # type: ignore[union-attr]
    assert all(part.licences() == {"zz/LICENSE": b"free"} for part in parts)


def test_more_licence_texts_than_anybody_has_do_not_fill_the_memory(tmp_path: Path) -> None:
    write(tmp_path, {f"{at:02}/LICENSE": b"" for at in range(40)} | {"README": b""})
    for path in tmp_path.glob("*/LICENSE"):
        os.truncate(path, 1_000_000)
    [*_, part] = opened(folder=str(tmp_path), most_bytes=1_000_000).parts
    assert len(part.licences()) == 32


def test_links_are_never_followed(tmp_path: Path) -> None:
    root = write(tmp_path / "tree", {"a/x.py": b"x"})
    write(tmp_path / "outside", {"secret.py": b"y"})
    (root / "a" / "up").symlink_to(root)
    (root / "self").symlink_to("self")
    (root / "out").symlink_to(tmp_path / "outside")
    (root / "file.py").symlink_to(tmp_path / "outside" / "secret.py")
    expected = dict.fromkeys(["a/up", "self", "out", "file.py"], "a link")
    assert reasons(opened(folder=str(root)).parts) == expected
    assert texts(opened(folder=str(root)).parts) == {"a/x.py": b"x"}
    tiny.git(root, "init", "-q")
    tiny.git(root, "add", ".")
    assert reasons(opened(folder=str(root)).parts) == expected
    assert texts(opened(folder=str(root)).parts) == {"a/x.py": b"x"}


def test_a_huge_file_costs_nothing(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": b"x" * 1000})
    with (tmp_path / "huge.py").open("wb") as file:
        file.truncate(1 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    source = opened(folder=str(tmp_path))
    assert entries(source.parts)[1] == Drop(tmp_path.name, "huge.py", "read", "over max_bytes", 1 << 30)
    assert sum(part.size for part in source.parts) < 10_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


def test_a_file_that_changes_after_it_was_listed_is_read_in_bounds(tmp_path: Path) -> None:
    write(tmp_path, {"gone.py": b"x", "grown.py": b"y", "same.py": b"z"})
    source = opened(folder=str(tmp_path))
    (tmp_path / "gone.py").unlink()
    write(tmp_path, {"grown.py": b"y" * 5000})
    assert reasons(source.parts) == {"gone.py": "unreadable", "grown.py": "over max_bytes"}
    assert texts(source.parts) == {"same.py": b"z"}


def test_special_files_and_foreign_names_are_dropped(tmp_path: Path) -> None:
    write(tmp_path, {"good.py": b"x"})
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.py")).write_bytes(b"z")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/LICENSE\xe9")).write_bytes(b"z")
    os.mkfifo(tmp_path / "pipe.py")
    source = opened(folder=str(tmp_path))
    foreign = "name not UTF-8"
    assert reasons(source.parts) == {r"caf\xe9.py": foreign, r"LICENSE\xe9": foreign, "pipe.py": "a special file"}
    assert texts(source.parts) == {"good.py": b"x"}
    assert len(identity(folder=str(tmp_path))["folder"]) == 64


def test_folders_that_are_not_entered_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {f"{folder}/x.py": b"x" for folder in ("src", ".venv", "node_modules", "src/build", "closed")})
    write(tmp_path, {".hidden.py": b"x"})
    scandir = os.scandir

    def closed(path: str) -> object:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    parts = opened(folder=str(tmp_path)).parts
    assert texts(parts) == {".hidden.py": b"x", "src/x.py": b"x"}
    assert reasons(parts) == dict.fromkeys([".venv", "closed", "node_modules", "src/build"], NOT_ENTERED)


def test_in_a_checkout_tracked_files_count_and_the_commit_is_the_revision(tmp_path: Path) -> None:
    inner = write(tmp_path / "inner", {"y.py": b"y"})
    tree = write(tmp_path / "tree", {"a/x.py": b"x", ".github/b.yml": b"b", "build/c.py": b"c"})
    for folder in (inner, tree):
        tiny.git(folder, "init", "-q")
        tiny.git(folder, "add", ".")
        tiny.git(folder, "commit", "-qm", "first")
    tiny.git(tree, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner), "sub")
    write(tree, {"untracked.py": b"u"})
    source = opened(folder=str(tree))
    assert {*texts(source.parts)} == {".github/b.yml", ".gitmodules", "a/x.py", "build/c.py"}
    assert reasons(source.parts) == {"sub": NOT_ENTERED}
    assert source.revision == tiny.git(tree, "rev-parse", "HEAD").strip() + "+changes"  # the submodule is not committed
    assert {entry.repository for entry in entries(opened(folder=str(tree / "a")).parts)} == {"a"}


def test_a_folder_of_folders_is_a_folder_of_repositories(tmp_path: Path) -> None:
    write(
        tmp_path, {"one/LICENSE": b"1", "one/src/x.py": b"x", "two/x.py": b"y", ".cache/z.py": b"z", "empty/.keep": b""}
    )
    (tmp_path / "empty" / ".keep").unlink()
    tiny.git(tmp_path / "two", "init", "-q")
    tiny.git(tmp_path / "two", "add", ".")
    write(tmp_path, {"two/untracked.py": b"u"})
    parts = opened(folder=str(tmp_path)).parts
    assert entries(parts) == [
        Raw("one", "LICENSE", b"1"),
        Raw("one", "src/x.py", b"x"),
        Raw("two", "x.py", b"y"),
        Drop(tmp_path.name, ".cache", "read", NOT_ENTERED, 0),
    ]
    assert [len(part.licences()) for part in parts] == [1, 0, 0]

    write(tmp_path, {"README.md": b"all"})
    assert Raw(tmp_path.name, "README.md", b"all") in entries(opened(folder=str(tmp_path)).parts)
    assert {entry.repository for entry in entries(opened(folder=str(tmp_path)).parts)} == {"one", "two", tmp_path.name}
    shutil.rmtree(tmp_path / "two" / ".git")
    assert {entry.repository for entry in entries(opened(folder=str(tmp_path)).parts)} == {tmp_path.name}


def test_folders_of_one_checkout_are_one_repository(tmp_path: Path) -> None:
    tree = write(tmp_path / "tree", {"src/a.py": b"a", "docs/b.md": b"b"})
    tiny.git(tree, "init", "-q")
    assert {entry.repository for entry in entries(opened(folder=str(tree)).parts)} == {"tree"}
    tiny.git(tree, "add", ".")
    assert {entry.repository for entry in entries(opened(folder=str(tree)).parts)} == {"tree"}


def test_the_identity_changes_with_names_sizes_and_times(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": b"x", "b/c.py": b"y"})
    seen = {identity(folder=str(tmp_path))["folder"]}
    assert {identity(folder=str(tmp_path))["folder"]} == seen
    write(tmp_path, {"a.py": b"xx"})
    seen.add(identity(folder=str(tmp_path))["folder"])
    os.utime(tmp_path / "a.py", ns=(1, 1))
    seen.add(identity(folder=str(tmp_path))["folder"])
    (tmp_path / "a.py").rename(tmp_path / "d.py")
    seen.add(identity(folder=str(tmp_path))["folder"])
    assert len(seen) == 4


@pytest.mark.parametrize("use", [opened, identity])
def test_a_folder_that_is_none_is_refused(tmp_path: Path, use: object) -> None:
    write(tmp_path, {"file": b""})
    for name in ("nowhere", "file"):
        with pytest.raises(UserError, match=one_line("'some'", repr(str(tmp_path / name)), Path.cwd())):
            use(folder=str(tmp_path / name))  # type: ignore[operator]


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=one_line("source 'some' holds no files", tmp_path)):
        opened(folder=str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=one_line("source 'some' holds no files", tmp_path)):
        opened(folder=str(tmp_path))


NAMES = st.sampled_from(["a", "B", "ä", "a b", ".x"]).map(lambda name: name + ".py")
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)


@settings(max_examples=30)
@given(st.dictionaries(PATHS, st.binary(max_size=3), min_size=1, max_size=6))
def test_everything_below_a_folder_is_listed_once(contents: dict[str, bytes]) -> None:
    contents = {
        name: content
        for name, content in contents.items()
        if not any(other.startswith(f"{name}/") for other in contents)
    }
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), {**contents, "README": b""})
        parts = opened(folder=folder).parts
        hidden = {name for name in contents if any(part.startswith(".") for part in name.split("/")[:-1])}
        assert texts(parts) == {name: content for name, content in contents.items() if name not in hidden} | {
            "README": b""
        }
        assert set(reasons(parts).values()) <= {NOT_ENTERED}
        assert all(any(name.startswith(f"{drop}/") for drop in reasons(parts)) for name in hidden)


def test_names_of_repositories_are_unicode(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9")).mkdir()
    (tmp_path / os.fsdecode(b"caf\xe9") / "x.py").write_bytes(b"x")
    assert entries(opened(folder=str(tmp_path)).parts) == [Raw(r"caf\xe9", "x.py", b"x")]
    (tmp_path / "link").symlink_to(tmp_path / os.fsdecode(b"caf\xe9"))
    assert opened(folder=str(tmp_path / "link")).location == f"folder {tmp_path}/link"  # as written


def test_what_cannot_be_looked_at_is_a_drop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that may be listed and not entered, or a file that is deleted while a folder is listed."""
    write(tmp_path, {"a.py": b"x", "b.py": b"y"})
    lstat = Path.lstat

    def refused(path: Path) -> os.stat_result:
        if path.name == "b.py":
            raise PermissionError(13, "Permission denied", str(path))
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", refused)
    assert len(identity(folder=str(tmp_path))["folder"]) == 64
    assert texts(opened(folder=str(tmp_path)).parts) == {"a.py": b"x"}
    assert reasons(opened(folder=str(tmp_path)).parts) == {"b.py": "unreadable"}


def test_what_happens_in_folders_that_are_not_entered_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": b"x", "__pycache__/a.pyc": b"x"})
    before = identity(folder=str(tmp_path))
    write(tmp_path, {"__pycache__/b.pyc": b"x"})
    os.utime(tmp_path / "__pycache__", ns=(1, 1))
    assert identity(folder=str(tmp_path)) == before


@pytest.mark.parametrize("kind", ["folder", "git", "jsonl"])
def test_the_home_of_nobody_is_a_place_that_is_not_there(kind: str) -> None:
    with pytest.raises(UserError, match=one_line("'some'", "~nobody-here/data")):
        identity(**{kind: "~nobody-here/data"})


def test_home_is_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "tree", {"a.py": b"x"})
    assert texts(opened(folder="~/tree").parts) == {"a.py": b"x"}
    monkeypatch.chdir(tmp_path)
    assert texts(opened(folder="tree").parts) == {"a.py": b"x"}
