"""The page in a real browser: each view, from a run down to a token; news; a hostile run; the export from disk; keys alone."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.inference.http import Limits, bind, gate_for, server_of
from etude.progress import Reporter
from etude.web.app import Pages
from etude.web.export import export_run
from etude.web.reading import Shelf
from tests.web.browser import CHROMIUM, MISSING, Browser
from tests.web.made import NASTY, Growing, head

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
DRAWN = "document.querySelectorAll('figure.chart canvas').length > 0"


@pytest.fixture(scope="module")
def served(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a server, and a folder of runs of its own that may grow."""
    folder = tmp_path_factory.mktemp("growing")
    pages = Pages(Shelf([runs, folder]), gate_for("127.0.0.1", None, allow_open=False))
    with bind("127.0.0.1", 0) as address:
        address.listen()  # so that a tab that is faster than the server waits
        server = server_of(pages.app(), Limits(drain=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [address]})
        thread.start()
        yield f"http://127.0.0.1:{address.getsockname()[1]}/", folder
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(tab: Browser) -> Iterator[Browser]:
    tab.complaints.clear()
    tab.size(1280, 900)
    yield tab
    assert tab.complaints == []


def test_from_all_runs_down_to_one_token(browser: Browser, served: tuple[str, Path]) -> None:
    browser.open(served[0])
    browser.click('a[href="run/friendly/index.html"]')
    browser.click('a[href="rl/index.html"]')
    browser.wait(DRAWN)
    assert "What taught the model most" in browser.text()
    browser.click("svg.heat a:nth-of-type(3)")
    assert browser.text("h1") == "Step 3"
    browser.click("td a[href^=group-]")
    assert browser.text("h1").startswith("Group ")
    best = float(browser.text(".card .scored").rpartition(" ")[2])
    browser.click(".card a")
    assert f"{best:.3f}" in browser.text(".facts")
    assert "its tokens were made more likely" in browser.text(".lesson")
    browser.click(".node.sampled a.tokens-link")
    assert browser.ask("document.querySelectorAll('.token').length") == 8
    browser.ask("document.querySelector('.token').focus()")
    browser.press("ArrowRight")
    assert browser.ask("document.activeElement.dataset.at") == "1"
    about = browser.text(".about")
    assert {"token", "id", "log-prob as sampled", "loss mask", "advantage"} <= set(about.split("\n"))
    numbers = browser.ask("[...document.querySelectorAll('.token small')].map(each => each.textContent)")
    browser.ask("document.querySelector('input[value=logprob]').click()")
    assert browser.ask("[...document.querySelectorAll('.token small')].map(each => each.textContent)") != numbers


def test_news_come_by_themselves(browser: Browser, served: tuple[str, Path]) -> None:
    growing = Growing(head(served[1] / "live")).train(2)
    browser.open(f"{served[0]}run/live/rl/index.html")
    browser.wait("document.body.innerText.includes('2 steps, ')")
    browser.wait("document.querySelectorAll('svg.heat a').length === 2")
    browser.ask("document.querySelector('details').open = true")
    growing.train(3)
    browser.wait("document.querySelectorAll('svg.heat a').length === 5", 60)
    browser.ask("document.querySelector('figure.chart').scrollIntoView()")  # what is not in sight is not drawn
    browser.wait(DRAWN)
    assert browser.ask("document.querySelector('details').open")


@pytest.mark.parametrize(
    "path",
    [
        "index.html",
        "rl/index.html",
        "rl/step-3.html",
        "rl/group-5.html",
        "rl/rollout-5-1.html",
        "rl/rollout-5-1-1.html",
        "family.html",
    ],
)
def test_a_hostile_run_runs_nothing(browser: Browser, served: tuple[str, Path], path: str) -> None:
    browser.open(f"{served[0]}run/hostile/{path}")
    assert (
        browser.ask(
            "document.querySelectorAll('script:not([src]):not([type])').length + document.querySelectorAll('[onmouseover],[style*=url]').length"
        )
        == 0
    )
    assert browser.ask(
        "[...document.scripts].every(each => each.type === 'application/json' || each.src.startsWith(location.origin))"
    )
    if path == "rl/rollout-5-1.html":
        assert NASTY.partition("\x1b")[0] in browser.text()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(
    "path",
    [
        "",
        "run/friendly/index.html",
        "run/friendly/rl/index.html",
        "run/friendly/rl/step-3.html",
        "run/friendly/rl/rollout-5-1.html",
    ],
)
def test_on_a_phone_nothing_sticks_out(browser: Browser, served: tuple[str, Path], path: str, *, dark: bool) -> None:
    browser.size(390, 844, dark=dark)
    browser.open(served[0] + path)
    assert browser.ask("document.documentElement.scrollWidth") <= 390
    ground = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(19, 23, 27)" if dark else "rgb(255, 255, 255)")


def test_everything_is_reached_by_keys(browser: Browser, served: tuple[str, Path]) -> None:
    browser.open(f"{served[0]}run/friendly/rl/step-3.html")
    links = browser.ask("document.querySelectorAll('a[href]').length")
    reached = set()
    for _ in range(links + 20):
        browser.press("Tab")
        reached.add(browser.ask("document.activeElement.getAttribute('href') ?? ''"))
    wanted = set(browser.ask("[...document.querySelectorAll('a[href]')].map(each => each.getAttribute('href'))"))
    assert wanted <= reached


def test_the_export_opens_from_disk(browser: Browser, runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "friendly", tmp_path / "friendly")
    export_run(tmp_path / "friendly", tmp_path / "site", 300, Reporter(quiet=True))
    browser.open((tmp_path / "site/index.html").as_uri())
    browser.click("tbody a")
    browser.wait(DRAWN)
    browser.click('a[href="rl/index.html"]')
    browser.click("td a[href^=rollout-]")
    browser.click(".node.sampled a.tokens-link")
    assert browser.ask("document.querySelectorAll('.token').length") == 8
    assert browser.ask(
        "document.querySelectorAll('form').length === 0 || getComputedStyle(document.querySelector('form')).display === 'none'"
    )
