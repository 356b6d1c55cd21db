"""The toolbox as a program on files: asked directly here, through a sandbox in test_tools.py."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from etude.agent import toolbox
from etude.agent.toolbox import Refused, decode, pattern_of, replace, walk
from etude.agent.tools import TOOLBOX

FOLDER_IS_ONE_FOR_ALL_EXAMPLES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def ask(do: str, seconds: float = 20, python: str = sys.executable, **request: Any) -> Any:
    words = [python, "-I", "-S", "-c", TOOLBOX]
    stdin = json.dumps({"do": do, "seconds": seconds, **request})
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    return json.loads(done.stdout)


def read(
    path: str, start: int = 1, end: int = 0, lines: int = 400, characters: int = 10_000
) -> tuple[str, dict[str, Any]]:
    return toolbox.read(path, start, end, lines, characters)


def grep(pattern: str, path: str = ".", glob: str = "", most: int = 100) -> tuple[str, dict[str, Any]]:
    return toolbox.grep(pattern, path, glob, most, 10_000)


def test_runs_on_nothing_but_the_standard_library(workspace: Path) -> None:
    (workspace / "json.py").write_text("raise SystemExit('the workspace was imported')")
    (workspace / "a.py").write_text("x = 1\n")
    system = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    assert ask("read", python=system, path="a.py", start=1, end=0, lines=9, characters=999)["text"] == "    1\tx = 1"
    assert ask("read", path="gone", start=1, end=0, lines=9, characters=999)["refused"] == "missing"
    assert ask("read", path="a\0b", start=1, end=0, lines=9, characters=999)["refused"] == "bad value"


def test_read_shows_numbered_lines_and_how_to_go_on(workspace: Path) -> None:
    Path("f").write_text("".join(f"line {n}\n" for n in range(1, 11)))
    assert read("f", 3, 4)[0] == "    3\tline 3\n    4\tline 4"
    assert read("f", 9)[0] == "    9\tline 9\n   10\tline 10"
    text, details = read("f", lines=2)
    assert text == "    1\tline 1\n    2\tline 2\n… 8 lines left out; read on with start=3 …"
    assert details == {"path": "f", "first": 1, "last": 2, "lines": 10, "cut": True}
    assert read("f", 4, characters=30)[1]["last"] == 5
    with pytest.raises(Refused, match="has 10 lines"):
        read("f", 11)
    Path("empty").touch()
    assert read("empty")[0] == "empty is empty"


@given(st.text(alphabet="a\nb\r\té"), st.integers(1, 5), st.integers(1, 4))
@FOLDER_IS_ONE_FOR_ALL_EXAMPLES
def test_reading_on_as_told_reads_every_line_once(text: str, lines: int, start: int) -> None:
    Path("f").write_bytes(text.encode())
    rows = text.replace("\r\n", "\n").split("\n")
    rows = rows[:-1] if rows[-1] == "" else rows
    assume(len(rows) >= start)
    seen, at = [], start
    while True:
        answer, details = read("f", at, lines=lines)
        seen += [row for row in answer.split("\n") if not row.startswith("…")]
        if not details["cut"]:
            break
        at = int(re.findall(r"start=(\d+)", answer)[-1])
    assert seen == [f"{n:5}\t{row}" for n, row in enumerate(rows, 1)][start - 1 :]


def test_odd_files_are_refused_or_counted_and_never_waited_for(workspace: Path) -> None:
    os.mkfifo("fifo.py")
    Path("bin.py").write_bytes(b"hit\0")
    Path("huge.py").write_bytes(b"hit\n" * 600_000)
    Path("fine.py").write_text("a hit\nmiss\n")
    Path("link.py").symlink_to("fine.py")
    Path(os.fsdecode(b"new\nline\xff.py")).write_text("hit\n")
    text, details = grep("hit")
    assert (
        text == "fine.py:1:a hit\nnew\\nline\\udcff.py:1:hit\n(files not searched: 1 binary, 1 not a file, 1 too large)"
    )
    assert details["skipped"] == {"binary": 1, "not a file": 1, "too large": 1, "link": 1}
    assert details["matches"] == 2
    for name, why in (("fifo.py", "regular"), ("/dev/zero", "regular"), (".", "folder"), ("bin.py", "binary")):
        with pytest.raises(Refused, match=why):
            read(name)
    assert "fifo.py  (not a file)\nfine.py  11 bytes\nhuge.py" in toolbox.list_folder(".", 100, 999)[0]
    assert "link.py -> fine.py" in toolbox.list_folder(".", 100, 999)[0]


def test_grep_says_when_it_is_cut(workspace: Path) -> None:
    Path("sub").mkdir()
    Path("sub/f.txt").write_text("x\n" * 7)
    Path("g.py").write_text("x = 1\n" + "y" * 2000 + "x\n")
    assert grep("x$", most=3)[0].split("\n")[1:] == [
        "sub/f.txt:1:x",
        "sub/f.txt:2:x",
        "… 3 of 8 matches shown; narrow the pattern, path or glob …",
    ]
    assert grep("x", glob="*.py", path="g.py")[0].split("\n")[0] == "g.py:1:x = 1"
    assert "… 1501 characters left out …" in grep("x$", glob="*.py")[0]
    assert grep("nowhere")[0] == "no matches"
    with pytest.raises(Refused, match="cannot be read"):
        grep("(")
    with pytest.raises(FileNotFoundError):
        grep("x", "gone")


def test_a_catastrophic_expression_is_stopped_and_what_was_found_is_told(workspace: Path) -> None:
    Path("a").write_text("aab\n")
    Path("b").write_text("a" * 60 + "c\n")
    answer = ask("grep", seconds=0.5, pattern="^(a+)+b$", path=".", glob="", most=9, characters=999)
    assert answer["text"] == "a:1:aab\n… stopped at b:1: it took too long …"
    assert answer["details"]["late"]


def test_a_tree_deeper_than_the_stack(workspace: Path) -> None:
    top = os.open(".", os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=top)
        top, old = os.open("d", os.O_RDONLY, dir_fd=top), top
        os.close(old)
    os.close(os.open("deep.py", os.O_CREAT | os.O_WRONLY, dir_fd=top))
    os.close(top)
    found = list(walk(".", Counter()))
    subprocess.run(["rm", "-rf", "d"], check=True)  # pytest's own clean-up cannot: it takes a frame a level
    assert found == ["d/" * 1500 + "deep.py"]


GLOBS = {
    "*.py": {"a.py", "src/b.py", "src/pkg/c.py"},
    "./*.txt": {"x.txt"},
    "src/*.py": {"src/b.py"},
    "src/**/*.py": {"src/b.py", "src/pkg/c.py"},
    "**/pkg/*": {"src/pkg/c.py"},
    "*.{txt,md}": {"x.txt", "src/[r].md"},
    "[!a].txt": {"x.txt"},
    "?.py": {"a.py", "src/b.py", "src/pkg/c.py"},
    "src/[[]r].md": {"src/[r].md"},
    "src": set(),
}


@pytest.mark.parametrize("pattern", GLOBS)
def test_patterns_of_paths(workspace: Path, pattern: str) -> None:
    for name in ("a.py", "x.txt", "src/b.py", "src/pkg/c.py", "src/[r].md", "__pycache__/z.py"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    text, details = toolbox.glob(pattern, 100, 9999)
    assert set(text.split("\n")) - {"no files match"} == GLOBS[pattern]
    assert details["matches"] == len(GLOBS[pattern])
    assert toolbox.glob(str(workspace / "src/pkg/*"), 9, 999)[0] == str(workspace / "src/pkg/c.py")


@given(st.text(alphabet="ab*?[]{},/!.\\^-", max_size=12), st.text(alphabet="ab/.", max_size=8))
def test_any_pattern_is_read_or_refused(pattern: str, path: str) -> None:
    with contextlib.suppress(Refused):
        pattern_of(pattern).match(path)


def test_edit_wants_one_place_and_says_what_it_found(workspace: Path) -> None:
    Path("f.py").write_text("def f(a):\n    return a\n\n\ndef g(a):\n    return a\n")
    with pytest.raises(Refused, match=r"old is 2 times in f.py, at lines 2, 6; add lines around it"):
        toolbox.edit("f.py", "    return a\n", "    return 1\n")
    with pytest.raises(Refused) as fault:
        toolbox.edit("f.py", "def g(b):\n        return a\n", "")
    assert str(fault.value) == "old is not in f.py; nearest:\n    5\tdef g(a):\n    6\t    return a"
    with pytest.raises(Refused, match="no line is like it"):
        toolbox.edit("f.py", "ÄÖÜ", "")
    assert toolbox.edit("f.py", "g(a):\n    return a", "g(a):\n    return 1")[0] == "edited f.py at line 5; syntax ok"
    assert Path("f.py").read_text().endswith("def g(a):\n    return 1\n")


@pytest.mark.parametrize(
    ("name", "text", "old", "new", "told"),
    [
        ("a.py", "x = 1\ny = 2\n", "y = 2", "y = (", "; syntax error at line 2: y = ( ('(' was never closed)"),
        ("a.py", "# coding: latin-1\nx = 1\n", "x = 1", "x = 'é'", "; syntax ok"),
        ("a.json", '{"a": 1,\n"b": 2}', "2", "", '; syntax error at line 2: "b": } (Expecting value)'),
        ("a.toml", "a = 1\nb = 2\n", "2", "", "; syntax error at line 2: b = (Invalid value"),
        ("a.txt", "x", "x", "(", ""),
    ],
)
def test_the_syntax_after_an_edit_is_told(name: str, text: str, old: str, new: str, told: str) -> None:
    Path(name).write_text(text)
    answer, details = toolbox.edit(name, old, new)
    line = details["line"]
    assert answer.startswith(f"edited {name} at line {line}{told}")
    assert details["syntax"] is (None if not told else "ok" in told)
    assert Path(name).read_text(
        encoding="latin-1" if "coding" in text and b"\xe9" in Path(name).read_bytes() else "utf-8"
    ) == text.replace(old, new)


PIECES = st.lists(st.sampled_from(["a", "b", "\n", "\r\n", "é"]), max_size=12).map("".join)


@given(PIECES, PIECES, PIECES, st.sampled_from(["a", "b\n", "", "\n\n", "x\ny"]))
@example("a\r\n", "b", "\r\nc\r\n", "x\ny")
def test_an_edit_changes_nothing_but_its_place(before: str, old: str, after: str, new: str) -> None:
    """Oracle: ends of lines taken out, it is Python's own replace; and every line that was not touched keeps its end."""
    text, plain_old = before + old + after, old.replace("\r\n", "\n")
    plain = text.replace("\r\n", "\n")
    assume(plain_old and plain.count(plain_old) == 1 and len(re.findall(f"(?={re.escape(plain_old)})", plain)) == 1)
    assume(plain_old != new)
    changed, line = replace(text, plain_old, new, "f")
    assert changed.replace("\r\n", "\n") == plain.replace(plain_old, new)
    assert changed.startswith(before.removesuffix("\r"))
    assert changed.endswith(after.removeprefix("\n"))
    assert line == plain[: plain.index(plain_old)].count("\n") + 1


@given(st.binary(max_size=40))
@example("\ufeffé\r\n".encode())
@example("é\n".encode("utf-16"))
@example(b"# coding: cp1252\n\x93")
@example(b"# coding: zlib_codec\n\x93")
def test_decoding_loses_nothing(data: bytes) -> None:
    try:
        text, encoding = decode(data, "f")
    except Refused:
        assert b"\0" in data
        return
    assert text.encode(encoding, "surrogatepass" if "16" in encoding else "strict") == data


def test_encodings_links_and_permissions_stay(workspace: Path) -> None:
    Path("utf16").write_bytes("one\r\ntwo\r\n".encode("utf-16"))
    toolbox.edit("utf16", "two", "2\n3")
    assert Path("utf16").read_bytes().decode("utf-16") == "one\r\n2\r\n3\r\n"
    Path("latin").write_bytes(b"caf\xe9\n")
    Path("latin").chmod(0o755)
    Path("link").symlink_to("latin")
    toolbox.edit("link", "caf", "the caf")
    assert Path("latin").read_bytes() == b"the caf\xe9\n"
    assert Path("link").is_symlink()
    assert Path("latin").stat().st_mode & 0o777 == 0o755
    with pytest.raises(Refused, match="cannot hold"):
        toolbox.edit("latin", "the", "→")
    assert sorted(path.name for path in workspace.iterdir()) == ["latin", "link", "utf16"]


def test_writing(workspace: Path) -> None:
    assert toolbox.write("new/folder/a.py", "x = 1\n")[0] == "wrote new/folder/a.py (1 lines); syntax ok"
    assert toolbox.write("new/folder/a.py", "x = ")[0].startswith(
        "replaced new/folder/a.py (1 lines); syntax error at line 1"
    )
    os.mkfifo("fifo")
    with pytest.raises(Refused, match="not a regular file"):
        toolbox.write("fifo", "x")
    assert ask("write", path="new", text="x")["refused"] == "not a file"


def test_a_full_disk_costs_nothing(workspace: Path) -> None:
    import resource

    Path("f").write_text("old content")
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, limits[1]))
    try:
        with pytest.raises(OSError):
            toolbox.put("f", b"more than five bytes")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert Path("f").read_text() == "old content"
    assert [path.name for path in workspace.iterdir()] == ["f"]
