"""Agents at work from the page: asked, watched, seen, accepted or rejected; in a real browser where one is there."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from etude.agent import feedback
from etude.agent.sessions import Session
from etude.files import write_json
from etude.inference.http import Limits, bind, gate_for, server_of
from etude.progress import Reporter
from etude.web.agents import Agents
from etude.web.app import TOKEN, Pages
from etude.web.export import export_run
from etude.web.reading import Shelf
from tests.agent.chat_server import ChatServer
from tests.conftest import Etude
from tests.web.asgi import Answer, ask
from tests.web.browser import CHROMIUM, MISSING, Browser
from tests.web.made import NASTY
from tests.web.test_safety import OURS, Seen

in_browser = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
EDIT = "I mend it.\n@edit\npath: app.py\nold: return a - b\nnew: return a + b\n@end"
MENDED = "def add(a, b):\n    return a + b\n"
OURS_HERE = OURS | {"textarea", "select", "option"}


@dataclass
class Work:
    """Agents that may work on a repository, with their page."""

    agents: Agents
    pages: Pages
    repository: Path

    def do(self, action: str, *, token: str | None = None, **body: str) -> Answer:
        given: dict[str, Any] = {
            "content_type": "application/json",
            TOKEN: self.pages.token if token is None else token,
        }
        return ask(self.pages.app(), f"/do/{action}", method="POST", body=json.dumps(body).encode(), **given)

    def ask(self, request: str = "mend it") -> Session:
        """Ask for work, and wait until it is done."""
        asked = self.do("work", request=request, repository=str(self.repository), model=self.agents.models[0])
        assert asked.status == 200, asked.text
        self.run()
        return next(iter(self.agents.sessions))

    def run(self) -> None:
        self.agents.sessions.begin_due(self.agents.repositories, self.agents.models)
        for process in self.agents.sessions._begun:
            process.wait()

    @property
    def code(self) -> str:
        return (self.repository / "app.py").read_text()


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Callable[..., Work]]:
    """Make agents whose models are endpoints that say given lines."""
    with ExitStack() as stack:

        def made(*scripts: Any, at_once: int = 2) -> Work:
            repository = tmp_path / "repo"
            repository.mkdir()
            (repository / "app.py").write_text("def add(a, b):\n    return a - b\n")
            urls = [stack.enter_context(ChatServer(lines)).url for lines in scripts]
            agents = Agents(tmp_path / "agents", [str(repository)], urls, at_once, "auto")
            gate = gate_for("127.0.0.1", None, allow_open=False)
            return Work(agents, Pages(Shelf([tmp_path / "runs"]), gate, agents.actions(), agents), repository)

        yield made


@pytest.fixture
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened
        assert opened.complaints == []


@pytest.fixture
def served() -> Iterator[Callable[[Work], str]]:
    """Serve pages on a real port, and let agents begin."""
    with ExitStack() as stack:

        def serve(work: Work) -> str:
            address = stack.enter_context(bind("127.0.0.1", 0))
            address.listen()
            server = server_of(work.pages.app(), Limits(drain=1))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [address]})
            thread.start()
            stack.callback(thread.join)
            stack.callback(setattr, server, "should_exit", True)
            threading.Thread(target=work.agents.keep_beginning, daemon=True).start()
            return f"http://127.0.0.1:{address.getsockname()[1]}/"

        yield serve


def type_request(browser: Browser, words: str, model: str = "") -> None:
    browser.ask(f"document.querySelector('[name=request]').value = {json.dumps(words)}")
    if model:
        browser.ask(f"document.querySelector('[name=model]').value = {json.dumps(model)}")
    browser.ask("document.querySelector('form[data-action=\"/do/work\"] button').click()")


def decide(browser: Browser, decision: str, comment: str = "") -> None:
    browser.ask(f"document.querySelector('[name=comment]').value = {json.dumps(comment)}")
    browser.ask(f"document.querySelector('button[value={decision}]').click()")


@in_browser
def test_typed_watched_seen_accepted(
    work: Callable[..., Work], served: Callable[[Work], str], browser: Browser
) -> None:
    go = threading.Event()

    def lines() -> Iterator[str]:
        yield EDIT
        assert go.wait(60)
        yield "add adds now."

    made = work(lines())
    browser.open(f"{served(made)}")
    browser.click("nav a[href='agents.html']")
    assert "Nothing was asked yet." in browser.text()
    type_request(browser, "add subtracts; mend it")
    browser.wait("document.querySelector('.sessions .state').innerText.includes('at work')", 60)
    browser.click(".sessions a")
    assert browser.text("h1") == "add subtracts; mend it"
    browser.wait("document.querySelectorAll('.node').length === 3", 60)  # opening, the edit, its answer
    assert browser.ask("document.querySelector('button[value=accepted]')") is None
    go.set()
    browser.wait("document.querySelector('.state').innerText.includes('finished')", 60)
    browser.wait("document.querySelector('.diff .added').innerText")
    assert "return a - b" in made.code
    assert "May what you decide be kept for training?" in browser.text(".asks")
    browser.ask("document.querySelector('button[value=yes]').click()")
    browser.wait("document.querySelector('.asks') === null")
    decide(browser, "accepted", "well done")
    browser.wait("document.body.innerText.includes('✓ accepted')")
    assert made.code == MENDED
    assert browser.ask("document.querySelector('button[value=accepted]')") is None
    (kept,) = feedback.feedback(made.agents.sessions)
    assert (kept["decision"], kept["comment"], kept["request"]) == ("accepted", "well done", "add subtracts; mend it")


@in_browser
def test_rejected_and_tried_again_with_a_comment(
    work: Callable[..., Work], served: Callable[[Work], str], browser: Browser
) -> None:
    made = work([EDIT, "Done.", "Nothing more to do."])
    session = made.ask("add subtracts")
    browser.open(f"{served(made)}agents/{session.id}.html")
    decide(browser, "again")
    browser.wait(
        "document.querySelector('[data-action=\"/do/decide\"] output').innerText.includes('the comment is empty')"
    )
    assert "400" in browser.complaints.pop()
    decide(browser, "rejected")
    browser.wait("document.body.innerText.includes('✗ rejected')")
    assert browser.ask("document.querySelector('button[value=rejected]')") is None
    decide(browser, "commented", "name the arguments")
    browser.wait("document.body.innerText.includes('name the arguments')")
    assert len(list(made.agents.sessions)) == 1
    browser.click("button[value=again]")
    assert session.id not in browser.ask("location.pathname")
    browser.wait("document.querySelector('.state')?.innerText.includes('finished')", 60)
    fresh = next(iter(made.agents.sessions))
    assert fresh.request["after"] == session.id
    assert fresh.request["request"].startswith("add subtracts\n\nAn earlier attempt was not taken over.")
    assert fresh.request["request"].endswith("The user's comment on it: name the arguments")
    assert "+    return a + b" in fresh.request["request"]
    assert "No file was changed." in browser.text()
    assert "return a - b" in made.code


def test_two_work_at_once(work: Callable[..., Work]) -> None:
    both = threading.Barrier(2)  # each answers only when both have asked

    def lines() -> Iterator[str]:
        both.wait(60)
        yield "Done."

    made = work(lines(), lines())
    for model in made.agents.models:
        assert made.do("work", request="x", repository=str(made.repository), model=model).status == 200
    made.run()
    assert [each.state for each in made.agents.sessions] == ["finished", "finished"]


def test_what_changed_meanwhile_is_said_and_nothing_is_applied(work: Callable[..., Work]) -> None:
    made = work([EDIT, "Done."])
    session = made.ask()
    (made.repository / "app.py").write_text("mine\n")
    answer = made.do("decide", session=session.id, decision="accepted", comment="")
    assert (answer.status, "has changed since the agent began; nothing was applied" in answer.text) == (400, True)
    assert made.code == "mine\n"


def test_what_it_does_is_shown_as_text_whatever_it_holds(work: Callable[..., Work]) -> None:
    name = '<img src=x onerror="alert(1)">\x1b[31m'
    call = f"@write\npath: {name}.py\ncontent: {NASTY}\n@end"
    made = work([f"{NASTY}\n{call}", NASTY])
    session = made.ask(f"mend {NASTY}")
    made.do("decide", session=session.id, decision="commented", comment=NASTY)
    for path in ("agents.html", f"agents/{session.id}.html"):
        answer = ask(made.pages.app(), f"/{path}")
        seen = Seen(answer.text)
        assert answer.status == 200
        assert seen.tags <= OURS_HERE
        assert not [each for _, each in seen.attributes if each.startswith("on") or each == "style"]
        assert not set(answer.text) & {"\x1b", "\u202e"}
    words = "".join(seen.words)
    assert words.count(NASTY.partition("\x1b")[0]) >= 5  # request, diff, comment, call, last words
    assert '<img src=x onerror="alert(1)">' in words


def test_only_our_page_asks_and_only_for_what_was_named(work: Callable[..., Work], tmp_path: Path) -> None:
    made = work([EDIT, "Done."])
    session = made.ask()
    right = {"request": "x", "repository": str(made.repository), "model": made.agents.models[0]}
    for action, body in (("work", right), ("decide", {"session": session.id, "decision": "accepted"}), ("end", {"session": session.id}),
                         ("consent", {"training": "yes"})):  # fmt: skip
        for token in ("", "guess"):
            assert made.do(action, token=token, **body).status == 403
    for wrong, said in (({"repository": str(tmp_path)}, "may not use"), ({"repository": f"{made.repository}/."}, "may not use"),
                        ({"repository": ""}, "may not use"), ({"model": "/tmp"}, "with --model /tmp"), ({"request": " "}, "is empty")):  # fmt: skip
        answer = made.do("work", **{**right, **wrong})
        assert (answer.status, said in answer.text) == (400, True), answer.text
    for session_id in ("../agents", "20260101-000000-000-ffff", ""):
        assert made.do("decide", session=session_id, decision="accepted", comment="").status == 404
    assert made.do("decide", session=session.id, decision="burn", comment="").status == 400
    made.agents.repositories.clear()  # a server that was started without it
    assert "with --repo" in made.do("decide", session=session.id, decision="accepted").text
    assert "etude web --repo PATH" in ask(made.pages.app(), "/agents.html").text
    assert "return a - b" in made.code
    assert feedback.consent(made.agents.sessions.folder) is None
    assert len(list(made.agents.sessions)) == 1


def test_what_a_user_gets_wrong_is_one_line(etude: Etude, tmp_path: Path) -> None:
    said = etude("web", "--repo", tmp_path / "none", "--agents", tmp_path / "agents")
    assert (said.code, said.err.count("\n"), "is no folder; name a repository with --repo" in said.err) == (2, 1, True)
    assert not (tmp_path / "agents").exists()


def test_addresses_of_sessions_lead_nowhere_else(work: Callable[..., Work]) -> None:
    made = work([])
    for path in ("agents/..%2frepo.html", "agents/20260101-000000-000-ffff.html", "agents/x.html", "agents/"):
        assert ask(made.pages.app(), f"/{path}").status == 404


def test_one_that_was_killed_says_so_and_can_be_tried_again(work: Callable[..., Work]) -> None:
    asked = threading.Event()

    def lines() -> Iterator[str]:
        asked.set()
        threading.Event().wait(60)
        yield ""

    made = work(lines())
    before = made.agents.mark
    body = {"repository": str(made.repository), "model": made.agents.models[0]}
    made.do("work", request="x", **body)
    made.agents.sessions.begin_due(made.agents.repositories, made.agents.models)
    assert asked.wait(60)
    at_work = made.agents.mark
    (session,) = made.agents.sessions
    assert "goes on when this page is closed" in ask(made.pages.app(), f"/agents/{session.id}.html").text
    made.agents.sessions._begun[0].kill()
    made.agents.sessions._begun[0].wait()
    assert len({before, at_work, made.agents.mark}) == 3  # so that open pages learn of it
    text = ask(made.pages.app(), f"/agents/{session.id}.html").text
    assert "ended without a word" in text
    assert "The repository was not touched." in text
    assert 'value="accepted"' not in text
    answer = made.do("decide", session=session.id, decision="again")
    assert answer.status == 200
    assert [each.request["request"] for each in made.agents.sessions] == ["x", "x"]


def test_an_export_leaves_sessions_out(runs: Path, tmp_path: Path) -> None:
    export_run(runs / "friendly", tmp_path / "site", 1, Reporter(quiet=True))
    assert "agents" not in (tmp_path / "site/index.html").read_text().lower()
    assert not (tmp_path / "site/agents.html").exists()


@in_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_on_a_phone_nothing_sticks_out_of_any_state(
    work: Callable[..., Work], served: Callable[[Work], str], browser: Browser, *, dark: bool
) -> None:
    made = work([])
    about = {"repository": str(made.repository), "model": made.agents.models[0], "sandbox": "auto"}
    paths = ["agents.html"]
    for state in ("finished", "failed", "stopped", "killed"):
        session = made.agents.sessions.ask(f"{state} " + "word" * 60, **about)
        (session.folder / "log").write_text("x" * 300)
        if state != "killed":
            write_json(session.folder / "end.json", {"state": state, "why": "why/" * 80})
        paths.append(f"agents/{session.id}.html")
    address = served(made)
    browser.size(390, 844, dark=dark)
    for path in paths:
        browser.open(address + path)
        assert browser.ask("document.documentElement.scrollWidth") <= 390, path
