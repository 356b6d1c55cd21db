"""`etude agent` from the outside: an endpoint on a real port, a repository, a sandbox; the yes decides."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.agent.repository import files_of
from etude.agent.trace import read_traces
from tests.agent.chat_server import ChatServer
from tests.conftest import Etude

EDIT = "I mend it.\n@edit\npath: app.py\nold: return a - b\nnew: return a + b\n@end"
RUN = "@shell\ncommand: python3 -c 'import app; print(app.add(1, 2))'; mkdir .pytest_cache && echo x > .pytest_cache/x; cat secret.env; ls -a\n@end"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository with a bug, an ignored secret, and a change that is not committed."""
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "app.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / ".gitignore").write_text("secret.env\n")
    (folder / "secret.env").write_text("TOKEN=hunter2\n")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    (folder / "new.txt").write_text("not added yet\n")
    return folder


def ask(etude: Etude, server: ChatServer, repository: Path, *words: object) -> tuple[int, str, str]:
    said = etude("agent", "add subtracts", "--model", server.url, "--repo", repository, *words)
    return said.code, said.out, said.err


def test_after_a_yes_the_change_is_there(etude: Etude, repository: Path, tmp_path: Path) -> None:
    with ChatServer([EDIT, RUN, "add adds now; I ran it."]) as server:
        code, out, err = ask(etude, server, repository, "--yes", "--trace", tmp_path / "t.jsonl")
    assert code == 0, err
    assert (repository / "app.py").read_text() == "def add(a, b):\n    return a + b\n"
    assert "+    return a + b" in out
    assert "2 files and folders of caches are left out" in out
    assert not (repository / ".pytest_cache").exists()
    (trace,), torn = read_traces(tmp_path / "t.jsonl")
    assert (trace.stop, torn, trace.made_by["policy"]) == ("finished", 0, "scripted")
    answer = trace.nodes[4].details["answers"][0]["text"]
    assert answer.startswith("[exit code 0]\n3\n")
    assert "new.txt" in answer
    assert "hunter2" not in answer  # what git ignores is not in the copy
    assert ".git\n" not in answer
    assert [message["role"] for message in server.asked[1]] == ["system", "user", "assistant", "user"]


def test_without_a_yes_nothing_is_changed(etude: Etude, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    with ChatServer([EDIT, "done"]) as server:
        code, out, _ = ask(etude, server, repository)
    assert (code, "Nothing was applied." in out) == (0, True)
    assert "return a - b" in (repository / "app.py").read_text()


def test_a_file_changed_meanwhile_is_not_overwritten(etude: Etude, repository: Path) -> None:
    def meddling() -> Iterator[str]:
        yield EDIT
        (repository / "app.py").write_text("the user's own\n")
        yield "done"

    with ChatServer(meddling()) as server:
        code, _, err = ask(etude, server, repository, "--yes")
    assert (code, "has changed since the agent began" in err) == (2, True)
    assert (repository / "app.py").read_text() == "the user's own\n"


def test_only_bash_offers_one_tool(etude: Etude, repository: Path) -> None:
    with ChatServer(["@bash\ncommand: sed -i s/-/+/ app.py\n@end", "done"]) as server:
        code, _, err = ask(etude, server, repository, "--yes", "--tools", "bash")
    assert code == 0, err
    assert "return a + b" in (repository / "app.py").read_text()
    assert "@bash" in server.asked[0][0]["content"]
    assert "@edit" not in server.asked[0][0]["content"].partition("Tools:")[2]


def test_an_endpoint_that_is_busy_is_asked_again(etude: Etude, repository: Path) -> None:
    with ChatServer([503, "Nothing to do."]) as server:
        code, out, err = ask(etude, server, repository)
    assert (code, "No file was changed." in out) == (0, True), err
    assert len(server.asked) == 2


def test_what_a_user_gets_wrong_is_one_line(etude: Etude, repository: Path, tmp_path: Path) -> None:
    with ChatServer([400]) as server:
        wrong = {
            "not now (status 400)": ("x", "--model", server.url, "--repo", repository),
            "the request is empty": (" ", "--model", server.url, "--repo", repository),
            "is no folder": ("x", "--model", server.url, "--repo", tmp_path / "none"),
            "serves no model": ("x", "--model", server.url, "--name", "other", "--repo", repository),
            "--tokeniser is for models of a server": ("x", "--model", "sprout", "--tokeniser", "sprout"),
            "no server at": ("x", "--model", "http://127.0.0.1:9/v1", "--repo", repository),
            "nosuch": ("x", "--model", server.url, "--repo", repository, "--sandbox", "nosuch"),
        }
        for part, words in wrong.items():
            said = etude("agent", *words)
            assert (said.code, part in said.err, len(said.err.strip().splitlines())) == (2, True, 1), (part, said)


def test_without_git_environments_and_caches_stay_out(tmp_path: Path) -> None:
    for name in ("a.py", "sub/b.py", ".venv/lib/x.py", "__pycache__/c.pyc", "node_modules/m.js"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "link").symlink_to("a.py")
    assert files_of(tmp_path) == ["a.py", "link", "sub/b.py"]
