"""Sessions of the agent: processes that are waited for, killed and stopped; changes that are kept, checked and applied later."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.agent import feedback
from etude.agent.sessions import MOST_REQUEST, Session, Sessions
from etude.agent.trace import read_traces
from etude.errors import UserError
from etude.files import sha256_file
from tests.agent.chat_server import ChatServer

EDIT = "I mend it.\n@edit\npath: app.py\nold: return a - b\nnew: return a + b\n@end"
DEAF = "import fcntl, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); fcntl.flock(0, fcntl.LOCK_EX); print('deaf', flush=True); signal.pause()"
CHANGES = r"""
rm -r gone && rm was_folder/a && rmdir was_folder && printf file > was_folder
rm was_file && mkdir was_file && printf inside > was_file/x
rm link && ln -s app.py link && chmod +x app.py && printf '\000\377' > binary
mkdir -p new/deep && printf new > new/deep/file && printf odd > "$(printf 'a\tb\377')" && rm "$(printf 'old\377')"
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with files, folders, links and a name that is no text."""
    folder = tmp_path / "repo"
    for name in ("gone/a", "gone/sub/b", "was_folder/a", "was_file", "kept/c"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "app.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / "link").symlink_to("kept/c")
    (folder / os.fsdecode(b"old\xff")).write_text("old")
    return folder


def tree(folder: Path) -> dict[str, tuple[bool, bytes]]:
    """Return all files and links below a folder: executable or not, and content."""
    return {
        str(path.relative_to(folder)): (bool(path.lstat().st_mode & 0o100), os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes())
        for path in folder.rglob("*") if path.is_symlink() or path.is_file()
    }  # fmt: skip


def ask(sessions: Sessions, repository: Path, server: ChatServer, request: str = "mend it") -> Session:
    return sessions.ask(request, repository=str(repository), model=server.url, sandbox="auto")


def run(sessions: Sessions, repository: Path, server: ChatServer) -> None:
    """Begin what waits, and wait until it has ended."""
    sessions.begin_due([str(repository)], [server.url])
    for process in sessions._begun:
        process.wait()


def worked(tmp_path: Path, repository: Path, *lines: str) -> Session:
    """Return a session that has ended."""
    sessions = Sessions(tmp_path / "agents", 1)
    with ChatServer([*lines, "Done."]) as server:
        session = ask(sessions, repository, server)
        run(sessions, repository, server)
    assert session.state == "finished", (session.end, session.log)
    return session


def test_what_is_applied_later_is_what_the_same_commands_make_of_a_copy(tmp_path: Path, repository: Path) -> None:
    before = tree(repository)
    shutil.copytree(repository, tmp_path / "copy", symlinks=True)
    subprocess.run(["sh", "-c", CHANGES], cwd=tmp_path / "copy", check=True)
    (repository / ".script").write_text(CHANGES)
    session = worked(tmp_path, repository, "@shell\ncommand: sh .script\n@end")
    (repository / ".script").unlink()
    assert tree(repository) == before  # nothing is applied by itself
    feedback.decide(session, "accepted")
    assert tree(repository) == tree(tmp_path / "copy")


@pytest.mark.parametrize("meanwhile", [
    "echo mine >> app.py", "rm app.py", "rm app.py; mkdir app.py", "rm app.py; ln -s /etc/passwd app.py", "echo mine > new.py",
    "echo mine > gone/mine", "echo mine > gone/sub/b",
])  # fmt: skip
def test_a_repository_that_changed_meanwhile_keeps_what_it_has(
    tmp_path: Path, repository: Path, meanwhile: str, ended: Session
) -> None:
    subprocess.run(["sh", "-c", meanwhile], cwd=repository, check=True)
    before = tree(repository)
    if meanwhile == "echo mine > gone/mine":  # a new file in a folder that goes: the file stays, and the folder with it
        feedback.decide(ended, "accepted")
        assert tree(repository)["gone/mine"] == before["gone/mine"]
        return
    with pytest.raises(UserError, match=r"has changed since the agent began.*nothing was applied"):
        feedback.decide(ended, "accepted")
    assert tree(repository) == before
    assert feedback.decisions(ended) == []


@pytest.fixture
def ended(tmp_path: Path, repository: Path) -> Session:
    return worked(tmp_path, repository, EDIT, "@shell\ncommand: rm -r gone; echo new > new.py\n@end")


class Held:
    """An endpoint that tells when it is asked, and answers when it is let go on."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()

    def lines(self) -> Iterator[str]:
        self.asked.set()
        assert self.go.wait(60)
        yield EDIT
        yield "Done."


def test_one_that_is_killed_is_told_from_one_that_works_and_the_next_begins(tmp_path: Path, repository: Path) -> None:
    sessions, held, before = Sessions(tmp_path / "agents", 1), Held(), tree(repository)
    with ChatServer(held.lines()) as server:
        first, second = ask(sessions, repository, server), ask(sessions, repository, server)
        sessions.begin_due([str(repository)], [server.url])
        assert held.asked.wait(60)
        running, other = first, second
        assert (running.state, other.state) == ("running", "waiting")
        assert running.begin() is None  # by another server
        sessions.begin_due([str(repository)], [server.url])
        assert other.state == "waiting"
        with pytest.raises(UserError, match="has not ended"):
            feedback.decide(running, "rejected")
        sessions._begun[0].kill()
        sessions._begun[0].wait()
        assert running.state == "killed"
        assert running.begin() is None
        held.go.set()
        run(sessions, repository, server)
        assert other.state == "finished"
    assert tree(repository) == before
    with pytest.raises(UserError, match="changed nothing that could be applied"):
        feedback.decide(running, "accepted")


def test_one_that_waits_or_works_is_stopped_and_leaves_nothing(tmp_path: Path, repository: Path) -> None:
    sessions, held = Sessions(tmp_path / "agents", 1), Held()
    with ChatServer(held.lines()) as server:
        session = ask(sessions, repository, server)
        sessions.begin_due([str(repository)], [server.url])
        assert held.asked.wait(60)
        waiting = ask(sessions, repository, server)
        waiting.stop()
        assert (waiting.state, waiting.begin()) == ("stopped", None)
        session.stop()
        assert sessions._begun[0].wait() == 0
        assert session.state == "stopped"
        with pytest.raises(UserError, match="has ended already"):
            session.stop()
        held.go.set()
    own = f"-{sessions._begun[0].pid}-"
    assert not [path for path in Path(tempfile.gettempdir()).glob("etude-agent-*") if own in path.name]
    assert [node.kind for node in read_traces(session.folder / "traces.jsonl")[0][0].nodes] == ["opening"]


def test_what_hears_no_signal_is_killed_when_it_is_stopped_again(tmp_path: Path, repository: Path) -> None:
    sessions = Sessions(tmp_path / "agents", 1)
    session = sessions.ask("x", repository=str(repository), model="sprout", sandbox="auto")
    (session.folder / "log").touch()
    with (session.folder / "lock").open("a+") as lock, subprocess.Popen(
        [sys.executable, "-P", "-c", DEAF], stdin=lock, stdout=subprocess.PIPE
    ) as deaf:  # fmt: skip
        assert deaf.stdout is not None
        assert deaf.stdout.readline() == b"deaf\n"
        session.stop()
        assert session.state == "running"
        session.stop()
        assert deaf.wait() == -signal.SIGKILL


def test_only_named_repositories_and_models_begin(tmp_path: Path, repository: Path) -> None:
    sessions = Sessions(tmp_path / "agents", 1)
    with ChatServer(["Done."]) as server:
        session = ask(sessions, repository, server)
        sessions.begin_due([str(tmp_path)], [server.url])
        sessions.begin_due([str(repository)], ["sprout"])
        assert (session.state, sessions._begun) == ("waiting", [])


def test_what_goes_wrong_is_one_line(tmp_path: Path, repository: Path) -> None:
    sessions = Sessions(tmp_path / "agents", 1)
    for model, why in (("http://127.0.0.1:9/v1", "no server at"), ("/no/such/model", "/no/such/model")):
        session = sessions.ask("x", repository=str(repository), model=model, sandbox="auto")
        sessions.begin_due([str(repository)], [model])
        sessions._begun[0].wait()
        assert session.end["state"] == "failed"
        assert why in session.end["why"]
        assert "Traceback" not in session.log
    session = sessions.ask("x", repository=str(repository), model="sprout", sandbox="auto")
    session.request["in"] = str(tmp_path / "nowhere")
    assert session.begin() is None
    assert (session.state, "No such file" in session.end["why"]) == ("failed", True)
    for request, why in (("  ", "is empty"), ("x" * (MOST_REQUEST + 1), "is the most")):
        with pytest.raises(UserError, match=why):
            sessions.ask(request, repository=str(repository), model="sprout", sandbox="auto")
    with pytest.raises(KeyError):
        sessions.get("../agents")


def test_a_decision_is_kept_for_training_only_after_a_yes(tmp_path: Path, repository: Path, ended: Session) -> None:
    agents = Sessions(tmp_path / "agents", 1)
    assert feedback.consent(agents.folder) is None
    feedback.decide(ended, "commented", "hm")
    assert feedback.consent(agents.folder) is False  # asked once, and no by default
    assert list(feedback.feedback(agents)) == []
    assert set(feedback.decisions(ended)[0]) == {"session", "decision", "comment", "time", "consent"}
    assert feedback.decisions(ended)[0]["consent"] is False
    feedback.agree(agents.folder, training=True)
    feedback.decide(ended, "accepted", "good")
    (line,) = feedback.feedback(agents)
    assert line == json.loads((ended.folder / "decisions.jsonl").read_text().splitlines()[1])
    assert (line["decision"], line["comment"], line["request"], line["files"]) == ("accepted", "good", "mend it", 3)
    assert line["model"]["name"] == "scripted"
    assert line["sha256"] == sha256_file(agents.folder / line["trace"])
    (trace,), _ = read_traces(agents.folder / line["trace"])
    assert (trace.id, trace.task, bool(trace.nodes[1].tokens)) == (ended.id, "mend it", True)
    with pytest.raises(UserError, match="was accepted and applied already"):
        feedback.decide(ended, "rejected")
