from __future__ import annotations

import tempfile
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from etude.errors import UserError
from etude.web.reading import Lines, Run, Shelf
from tests.web.made import STAGE, Growing, head


@hypothesis.settings(max_examples=40)
@hypothesis.given(st.lists(st.binary(max_size=12).map(lambda text: text.replace(b"\n", b" ")), max_size=12), st.data())
def test_lines_that_come_in_any_pieces_are_those_of_the_file(lines: list[bytes], data: st.DataObject) -> None:
    whole, seen, end = b"".join(line + b"\n" for line in lines) + b"torn", list[bytes](), 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lines")
        followed = Lines(lambda: path.open("rb"))
        while end < len(whole):
            begin, end = end, data.draw(st.integers(end + 1, len(whole)))
            with path.open("ab") as file:
                file.write(whole[begin:end])
            seen += followed.news()
        assert seen == lines
        assert [followed.line(number) for number in range(len(followed))] == lines


def test_a_file_that_became_another_one_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"a\nb\n")
    followed = Lines(lambda: path.open("rb"))
    assert list(followed.news()) == [b"a", b"b"]
    path.unlink()
    path.write_bytes(b"c\n")
    assert list(followed.news()) == [b"c"]
    assert list(followed.news()) == []


@pytest.mark.parametrize("path", ["../secret", "a/../../secret", "/etc/hostname", "link", "folder/secret", "pipe", ""])
def test_nothing_outside_the_folder_is_opened(tmp_path: Path, path: str) -> None:
    import os

    (tmp_path / "secret").write_text("treasure")
    run = head(tmp_path / "run")
    (run / "link").symlink_to("../secret")
    (run / "folder").symlink_to("..")
    os.mkfifo(run / "pipe")
    with pytest.raises(FileNotFoundError):
        Run("run", run, None).opened(path)


@pytest.mark.parametrize(("name", "said"), [
    ("../other", "is no name of a folder"), ("a/b", "is no name of a folder"), (".work", "is no name of a folder"),
    ("\u202egnp", "is no name of a folder"), (7, "is no name of a folder"), ("linked", "it is not followed"),
])  # fmt: skip
def test_a_stage_whose_name_leads_elsewhere_is_not_read(tmp_path: Path, name: str, said: str) -> None:
    run = head(tmp_path / "run", (name, "rl"))
    (run / "linked").symlink_to("/")
    with pytest.raises(UserError, match=said):
        _ = Run("run", run, None).status


def test_runs_are_found_by_themselves_and_in_folders_as_they_come(tmp_path: Path) -> None:
    shelf = Shelf([tmp_path, head(tmp_path / "b" / "run x")])
    assert [run.key for run in shelf.runs] == ["run-x"]
    head(tmp_path / "run x")
    (tmp_path / "linked").symlink_to(tmp_path / "run x")
    assert {run.key: run.folder for run in shelf.runs} == {
        "run-x": tmp_path / "b" / "run x",
        "run-x-2": tmp_path / "run x",
    }
    assert shelf.run("run-x-2").folder == tmp_path / "run x"
    with pytest.raises(KeyError):
        shelf.run("../b")


def test_the_mark_of_a_run_changes_with_what_is_written(tmp_path: Path) -> None:
    growing = Growing(head(tmp_path / "run")).train(1)
    run = Run("run", tmp_path / "run", None)
    before = run.mark
    assert run.mark == before
    growing.train(1)
    assert run.mark != before
    assert run.stage("rl").path == STAGE
