from __future__ import annotations

import dataclasses
import hashlib
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from etude.data.codebase import (
    LARGEST_FILE,
    Codebase,
    SourceFile,
    git_revision,
    read_codebase,
    tracked_files,
)
from etude.data.document import Document, Raw
from etude.data.filters.content import decode
from etude.errors import UserError
from tests import tiny
from tests.lineage.refusals import one_line

NAMES = st.sampled_from(["a", "B", "ä", "a-b", "a_b", "a.b", "z1"])
FOLDERS = st.lists(NAMES, max_size=2).map(lambda parts: "".join(f"{part}/" for part in parts))
FILES = st.tuples(FOLDERS, NAMES, st.sampled_from([".py", ".rs", ".txt", ".PY", ""])).map("".join)
CONTENTS = st.sampled_from([b"", b"x = 1\n", b"\xff\xfe", b"a\0b", "ä = 'ü'\n".encode(), b" \n"]) | st.binary(
    max_size=8
)


def write(root: Path, contents: dict[str, bytes]) -> Path:
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def expected_text(name: str, content: bytes) -> str | None:
    """Return the text a file must be read as, or None if it must be left out."""
    if not name.lower().endswith((".py", ".rs")) or not content or b"\0" in content:
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(FILES, CONTENTS, max_size=8))
def test_every_file_is_read_or_left_out_and_those_read_are_in_path_order(contents: dict[str, bytes]) -> None:
    folders = {"/".join(name.split("/")[:depth]) for name in contents for depth in range(1, name.count("/") + 1)}
    assume(not folders & set(contents))  # a name cannot be both
    expected = {name: text for name, content in contents.items() if (text := expected_text(name, content)) is not None}
    with tempfile.TemporaryDirectory() as folder:
        root = write(Path(folder), contents)
        if not any(text.strip() for text in expected.values()):
            with pytest.raises(UserError, match=one_line(folder, "holds no code to read")):
                read_codebase(root)
            return
        code = read_codebase(root)
    assert [(file.path, file.text) for file in code.files] == sorted(expected.items())
    assert len(code.files) + sum(code.left_out.values()) == len(contents)
    assert code.bytes == sum(len(contents[name]) for name in expected)


def test_every_reason_to_leave_a_file_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {
        "good.py": b"x = 1\n",
        "largest.py": b"#" * LARGEST_FILE,
        "notes.txt": b"text",
        "Makefile": b"all:",
        "large.py": b"#" * (LARGEST_FILE + 1),
        "locked.py": b"x = 1\n",
        "binary.py": b"\0",
        "latin.py": "# ä".encode("latin-1"),
        "empty.py": b"",
    }
    write(tmp_path, contents)
    (tmp_path / "link.py").symlink_to(tmp_path / "good.py")
    (tmp_path / "broken.py").symlink_to(tmp_path / "nowhere.py")
    os.mkfifo(tmp_path / "pipe.py")
    read_bytes = Path.read_bytes

    def refusing(path: Path) -> bytes:
        if path.name == "locked.py":
            raise PermissionError(13, "Permission denied", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refusing)
    code = read_codebase(tmp_path)
    assert [file.path for file in code.files] == ["good.py", "largest.py"]
    assert code.left_out == {
        "a link or special file": 3,
        "binary": 1,
        "empty": 1,
        "not UTF-8": 1,
        "not source code": 2,
        "over 1 MB": 1,
        "unreadable": 1,
    }


def test_outside_of_git_hidden_and_installed_folders_are_passed_over(tmp_path: Path) -> None:
    write(
        tmp_path, {f"{folder}/x.py": b"x\n" for folder in ("src", ".venv", "node_modules", "src/__pycache__", "build")}
    )
    write(tmp_path, {".hidden.py": b"x\n", "builder/x.py": b"x\n"})
    code = read_codebase(tmp_path)
    assert [file.path for file in code.files] == [".hidden.py", "builder/x.py", "src/x.py"]
    assert code.left_out == {}


def test_in_a_checkout_only_what_git_tracks_counts(code_tree: Path) -> None:
    tiny.git(code_tree, "init", "-q")
    tiny.git(code_tree, "add", ".")
    tracked = sorted(tiny.git(code_tree, "ls-files").splitlines())
    write(code_tree, {"untracked.py": b"x = 1\n", "package_0/new.py": b"x = 1\n", "notes-2.txt": b"x"})
    code = read_codebase(code_tree)
    assert [file.path for file in code.files] == [name for name in tracked if name.endswith(".py")]
    assert code.left_out == {"not source code": 1}

    below = read_codebase(code_tree / "package_0")  # a folder inside of a checkout
    assert [f"package_0/{file.path}" for file in below.files] == [
        name for name in tracked if name.startswith("package_0/")
    ]

    (code_tree / "package_0" / "module_0.py").unlink()  # tracked, but gone from the disk
    assert len(read_codebase(code_tree).files) == len(code.files) - 1


def test_names_that_git_would_quote_are_read(tmp_path: Path) -> None:
    names = ['qu"ote.py', "spa ce.py", "täb\t.py", "new\nline.py"]
    write(tmp_path, dict.fromkeys(names, b"x = 1\n"))
    tiny.git(tmp_path, "init", "-q")
    tiny.git(tmp_path, "add", ".")
    assert [file.path for file in read_codebase(tmp_path).files] == sorted(names)


def test_a_file_in_conflict_is_one_file(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": b"x = 1\n", "b.py": b"y = 1\n"})
    tiny.git(tmp_path, "init", "-q", "-b", "main")
    tiny.git(tmp_path, "add", ".")
    tiny.git(tmp_path, "commit", "-q", "-m", "base")
    tiny.git(tmp_path, "checkout", "-q", "-b", "side")
    for branch, text in (("side", b"x = 2\n"), ("main", b"x = 3\n")):
        tiny.git(tmp_path, "checkout", "-q", branch)
        write(tmp_path, {"a.py": text})
        tiny.git(tmp_path, "commit", "-q", "-a", "-m", branch)
    with pytest.raises(Exception, match="merge"):
        tiny.git(tmp_path, "merge", "-q", "side")
    assert [file.path for file in read_codebase(tmp_path).files] == ["a.py", "b.py"]


def test_links_cannot_lead_in_circles_or_out(tmp_path: Path) -> None:
    root = write(tmp_path / "root", {"a/x.py": b"x = 1\n"})
    write(tmp_path / "outside", {"secret.py": b"y = 1\n"})
    (root / "a" / "up").symlink_to(root)
    (root / "out").symlink_to(tmp_path / "outside")
    assert [file.path for file in read_codebase(root).files] == ["a/x.py"]
    tiny.git(root, "init", "-q")
    tiny.git(root, "add", ".")
    assert [file.path for file in read_codebase(root).files] == ["a/x.py"]


def test_line_ends_and_marks_are_those_of_the_corpus(tmp_path: Path) -> None:
    """A model is trained on LF without byte order marks; to score it on others would measure the marks."""
    text = "def é():\n    return 1\n"
    files = {"bom": b"\xef\xbb\xbf" + text.encode(), "crlf": text.replace("\n", "\r\n").encode(), "cr": text.replace("\n", "\r").encode(),
             "utf16": text.encode("utf-16"), "latin": b"# coding: latin-1\n" + text.encode("latin-1"), "plain": text.encode()}  # fmt: skip
    for name, content in files.items():
        (tmp_path / f"{name}.py").write_bytes(content)
    texts = {file.path: file.text for file in read_codebase(tmp_path).files}
    trained = {f"{name}.py": decode(Raw("r", f"{name}.py", content)) for name, content in files.items()}
    assert texts == {name: each.text for name, each in trained.items() if isinstance(each, Document)}
    assert {texts[f"{name}.py"] for name in files if name != "latin"} == {text}


def test_one_file_is_a_codebase(code_tree: Path) -> None:
    file = code_tree / "package_0" / "module_0.py"
    code = read_codebase(file)
    assert [(found.path, found.text) for found in code.files] == [("module_0.py", file.read_text("utf-8"))]


def test_a_folder_without_code_is_refused_with_the_reasons(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=one_line(tmp_path, "it is empty")):
        read_codebase(tmp_path)
    write(tmp_path, {"a.txt": b"x", "b.txt": b"x", "c.py": b""})
    with pytest.raises(UserError, match=one_line(tmp_path, "(1 empty, 2 not source code)")):
        read_codebase(tmp_path)
    write(tmp_path, {"d.py": b" \n\t\n"})
    with pytest.raises(UserError, match=one_line(tmp_path, "holds no code")):
        read_codebase(tmp_path)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=one_line(repr(str(tmp_path / "nowhere")), "does not exist", Path.cwd())):
        read_codebase(tmp_path / "nowhere")


def test_without_git_a_checkout_is_read_as_a_folder(code_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.git(code_tree, "init", "-q")
    write(code_tree, {"untracked.py": b"x = 1\n"})
    tiny.git(code_tree, "add", "package_0")
    monkeypatch.setenv("PATH", str(code_tree))
    assert tracked_files(code_tree) == []
    assert git_revision(code_tree) is None
    assert "untracked.py" in [file.path for file in read_codebase(code_tree).files]


def test_the_revision_is_the_commit_git_stands_at(code_tree: Path) -> None:
    assert git_revision(code_tree) is None
    tiny.git(code_tree, "init", "-q")
    assert git_revision(code_tree) is None  # no commit yet
    tiny.git(code_tree, "add", "-A")
    tiny.git(code_tree, "commit", "-q", "-m", "first")
    head = tiny.git(code_tree, "rev-parse", "HEAD").strip()
    assert git_revision(code_tree) == git_revision(code_tree / "package_0") == head
    assert git_revision(code_tree / "notes.txt") == head
    (code_tree / "package_1" / "module_1.py").write_text("changed = True\n")
    assert git_revision(code_tree) == f"{head}+changes"
    assert git_revision(code_tree / "package_0") == head


def test_a_name_that_is_not_utf8_does_not_stop_the_reading(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": b"x = 1\n", "b.py": b"y = 1\n"})
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.py")).write_bytes(b"z = 1\n")
    code = read_codebase(tmp_path)
    assert len(code.files) + sum(code.left_out.values()) == 3
    assert len(code.digest) == 64
    assert 1 <= len(code.sample(1).files) <= 2


PATHS = st.lists(st.text("abc/.ä", min_size=1, max_size=6), unique=True, min_size=1, max_size=12)


@st.composite
def codebases(draw: st.DrawFn) -> Codebase:
    texts = st.text("xü\n", min_size=1, max_size=20)
    files = tuple(SourceFile(path, draw(texts)) for path in sorted(draw(PATHS)))
    return Codebase(Path("root"), files, {"empty": 2})


@settings(deadline=None)
@given(codebases(), st.integers(1, 200), st.randoms(use_true_random=False))
def test_a_sample_is_whole_files_within_the_budget_chosen_by_path(code: Codebase, budget: int, rng: object) -> None:
    sample = code.sample(budget)
    assert set(sample.files) <= set(code.files)
    assert list(sample.files) == sorted(sample.files, key=lambda file: file.path)
    assert sample.bytes <= budget or len(sample.files) == 1
    assert len(sample.files) + sum(sample.left_out.values()) == len(code.files) + 2

    by_hash = sorted(code.files, key=lambda file: hashlib.sha256(file.path.encode()).digest())
    first = next((file for file in by_hash if file.bytes <= budget), None)
    assert (first in sample.files) if first else (sample.bytes == min(file.bytes for file in code.files))
    if sample.bytes <= budget:  # nothing that was left out would have fitted
        assert all(sample.bytes + file.bytes > budget for file in code.files if file not in sample.files)

    other = tuple(SourceFile(file.path, "y" * file.bytes) for file in code.files)  # same sizes, other contents
    assert [file.path for file in dataclasses.replace(code, files=other).sample(budget).files] == [
        file.path for file in sample.files
    ]
    shuffled = list(code.files)
    assert hasattr(rng, "shuffle")
    rng.shuffle(shuffled)
    assert dataclasses.replace(code, files=tuple(shuffled)).sample(budget).files in (sample.files, tuple(shuffled))
    assert code.sample(budget) == sample


@settings(deadline=None)
@given(codebases())
def test_a_budget_of_nothing_or_of_enough_takes_everything(code: Codebase) -> None:
    assert code.sample(0) is code
    assert code.sample(code.bytes) is code
    assert len(code.sample(code.bytes - 1).files) < len(code.files) or len(code.files) == 1


def test_a_sample_is_the_same_on_every_machine() -> None:
    """The order is that of the SHA-256 of the paths: 5bdbc663… of z.py, da866fb7… of b/c.py, f0de093a… of a.py."""
    code = Codebase(Path("root"), tuple(SourceFile(path, "12345678") for path in ("a.py", "b/c.py", "z.py")), {})
    assert [file.path for file in code.sample(8).files] == ["z.py"]
    assert [file.path for file in code.sample(23).files] == ["b/c.py", "z.py"]
    assert code.sample(23).left_out == {"over the size budget": 1}


@settings(deadline=None)
@given(codebases(), st.data())
def test_the_digest_changes_with_every_path_and_every_text(code: Codebase, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(code.files) - 1))
    file = code.files[at]
    changed = [
        SourceFile(file.path + "x", file.text),
        SourceFile(file.path, file.text + "x"),
        SourceFile(file.path, file.text[:-1]),
    ]
    digests = {
        dataclasses.replace(code, files=(*code.files[:at], new, *code.files[at + 1 :])).digest for new in changed
    }
    digests |= {code.digest, dataclasses.replace(code, files=(*code.files[:at], *code.files[at + 1 :])).digest}
    assert len(digests) == 5
    assert dataclasses.replace(code, root=Path("elsewhere"), left_out={}).digest == code.digest


def test_the_digest_tells_where_a_path_ends_and_a_text_begins() -> None:
    left = Codebase(Path(), (SourceFile("a", "bc"), SourceFile("d", "e")), {})
    right = Codebase(Path(), (SourceFile("ab", "c"), SourceFile("d", "e")), {})
    assert left.digest != right.digest


def test_files_that_git_does_not_track_have_no_revision(tmp_path: Path) -> None:
    tree = tiny.write_tree(tmp_path / "tree")
    assert git_revision(tree) is None
    tiny.git(tree, "init", "-q")
    (tree / ".gitignore").write_text("package_1\n", encoding="utf-8")
    tiny.git(tree, "add", "-A")
    tiny.git(tree, "commit", "-qm", "first")
    assert git_revision(tree) == tiny.git(tree, "rev-parse", "HEAD").strip()
    assert git_revision(tree / "package_1") is None
