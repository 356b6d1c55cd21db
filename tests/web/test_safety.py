"""What comes from anybody runs nowhere, and nobody else reads or changes what the page shows."""

from __future__ import annotations

import html.parser
import json
from pathlib import Path
from typing import Any

import pytest

from etude.errors import UserError
from etude.inference.http import gate_for
from etude.web.app import COOKIE, HEADERS, TOKEN, Guard, Pages
from etude.web.reading import Shelf
from tests.web.asgi import ask
from tests.web.made import NASTY, STAGE, Growing, head

PAGES = [
    "index.html", "run/{}/index.html", "run/{}/recipe.html", "run/{}/family.html", "run/{}/rl/index.html", "run/{}/rl/step-3.html",
    "run/{}/rl/steps-1-4.html", "run/{}/rl/group-5.html", "run/{}/rl/rollout-5-1.html", "run/{}/rl/rollout-5-1-1.html",
    "run/{}/rl/rollout-0-1-0.html", "compare.html?run=friendly&run={}",
]  # fmt: skip
OURS = {
    "output",
    "html",
    "head",
    "meta",
    "link",
    "title",
    "script",
    "body",
    "a",
    "header",
    "nav",
    "ol",
    "ul",
    "li",
    "p",
    "main",
    "h1",
    "h2",
    "h3",
    "section",
    "div",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "form",
    "input",
    "button",
    "label",
    "span",
    "strong",
    "small",
    "abbr",
    "dl",
    "dt",
    "dd",
    "details",
    "summary",
    "pre",
    "code",
    "article",
    "figure",
    "figcaption",
    "svg",
    "rect",
    "circle",
    "line",
    "g",
    "progress",
}


class Seen(html.parser.HTMLParser):
    """What a browser would make of a page: tags, attributes, and scripts without a file."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {(tag, name) for name, _ in attrs}
        given = dict(attrs)
        if tag == "script":
            assert given.get("type") == "application/json" or (given.get("src") or "").startswith(("static/", "../")), (
                given
            )
        assert not (given.get("href") or "").lower().startswith(("javascript:", "http", "//"))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.mark.parametrize("path", PAGES)
def test_what_a_hostile_run_holds_is_shown_and_runs_nowhere(app: Guard, path: str) -> None:
    answer = ask(app, f"/{path.format('hostile')}")
    assert answer.status == 200
    seen = Seen(answer.text)
    assert seen.tags <= OURS
    assert not [name for _, name in seen.attributes if name.startswith("on") or name == "style"]
    assert "<script>" not in answer.text
    assert not set(answer.text) & {"\x1b", "\u202e"}
    if "rollout-5-1.html" in path:
        words = "".join(seen.words)
        assert NASTY.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e") in words


@pytest.mark.parametrize("path", [*PAGES, "nothing.html", "static/web.css", "static/nothing", "run/none/index.html"])
def test_every_answer_carries_the_policy(app: Guard, path: str) -> None:
    answer = ask(app, f"/{path.format('hostile')}")
    for name, value in HEADERS.items():
        assert answer.headers[name] == value or name == "cache-control"
    assert "'unsafe" not in answer.headers["content-security-policy"]


@pytest.mark.parametrize("given", [
    {"host": "evil.example"}, {"host": "127.0.0.1.evil.example:7777"}, {"origin": "http://evil.example"}, {"origin": "null"},
    {"origin": "http://127.0.0.1:8888"}, {"origin": "https://localhost:7777"},
])  # fmt: skip
@pytest.mark.parametrize("path", ["/index.html", "/events?run=friendly", "/static/web.js", "/login"])
def test_a_page_from_elsewhere_gets_nothing(app: Guard, given: dict[str, Any], path: str) -> None:
    answer = ask(app, path, **given)
    assert answer.status == 403
    assert "friendly" not in answer.text


@pytest.mark.parametrize("path", [
    "/run/friendly/../../secret", "/run/friendly/%2e%2e/index.html", "/run/..%2f..%2fetc/index.html", "/run/friendly/rl/../../../secret.html",
    "/run/friendly/rl/rollout-0-1-99999.html", "/run/friendly/rl/rollout-0-99.html", "/run/friendly/rl/group-999999999.html",
    "/run/friendly/rl/step-0.html", "/run/friendly/rl/step-999999999.html", "/run/friendly/rl/step--1.html", "/run/friendly/rl/passwd",
    "/static/../app.py", "/static/%2e%2e/app.py", "/run/friendly/.work/index.html", "/run//rl/index.html", "/run/friendly/rl/trial-0.html\x00",
])  # fmt: skip
def test_addresses_that_lead_elsewhere_lead_nowhere(app: Guard, path: str) -> None:
    assert ask(app, path).status == 404


def test_a_run_that_links_outside_shows_nothing_of_it(tmp_path: Path) -> None:
    secret = "treasure-4711"
    folder = tmp_path / "runs" / "evil"
    growing = Growing(head(folder, ("rl", "rl"), ("after", "bench"), ("data", "data"))).train(2)
    (tmp_path / "secret.json").write_text(json.dumps({"treasure": secret}))
    (tmp_path / "lines").write_text(secret + "\n")
    for name in ("ledger.jsonl", "metrics.jsonl", "episodes/000000/001.json"):
        (growing.folder / name).unlink()
        (growing.folder / name).symlink_to(tmp_path / "lines")
    for name in ("manifest.json", "samples.json", "contamination.jsonl", "trials.jsonl"):
        (folder / ".work/data-0123456789ab").mkdir(exist_ok=True)
        (folder / ".work/data-0123456789ab" / name).symlink_to(tmp_path / "secret.json")
    (folder / "recipe.toml").unlink()
    (folder / "recipe.toml").symlink_to(tmp_path / "secret.json")
    app = Pages(Shelf([tmp_path / "runs"]), gate_for("127.0.0.1", None, allow_open=False)).app()
    for path in (
        "index.html",
        "run/evil/index.html",
        "run/evil/recipe.html",
        "run/evil/rl/index.html",
        "run/evil/rl/rollout-0-1.html",
        "run/evil/data/index.html",
    ):
        answer = ask(app, f"/{path}")
        assert answer.status in {200, 404}
        assert secret not in answer.text


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"stages": 7}', '{"stages": [{"name": "../x", "kind": "rl"}]}', '{"stages": [3]}']
)
def test_a_broken_run_is_shown_as_broken_beside_the_others(tmp_path: Path, content: str) -> None:
    (head(tmp_path / "broken") / "run.json").write_text(content)
    Growing(head(tmp_path / "fine")).train(1)
    app = Pages(Shelf([tmp_path]), gate_for("127.0.0.1", None, allow_open=False)).app()
    text = ask(app, "/").text
    assert "✗ broken" in text
    assert "run/fine/index.html" in text
    assert "This run cannot be shown" in ask(app, "/run/broken/index.html").text


def test_without_a_token_it_listens_to_this_machine_alone() -> None:
    with pytest.raises(UserError, match="can be reached by others; give --token-file"):
        gate_for("0.0.0.0", None, allow_open=False)


def test_with_a_token_nothing_is_shown_before_it_is_given(runs: Path) -> None:
    app = Pages(Shelf([runs]), gate_for("0.0.0.0", "0123456789abcdef", allow_open=False)).app()
    asked = ask(app, "/run/friendly/index.html", host="here.example")
    assert asked.status == 401
    assert "friendly" not in asked.text
    assert ask(app, "/login", method="POST", body=b"wrong", host="here.example").status == 401
    welcome = ask(
        app, "/login", method="POST", body=b"0123456789abcdef\n", host="here.example", origin="http://here.example"
    )
    cookie = welcome.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict"} <= {part.strip() for part in cookie.split(";")}
    shown = ask(app, "/run/friendly/index.html", host="here.example", cookie=cookie.partition(";")[0])
    assert shown.status == 200
    assert ask(app, "/", host="here.example", cookie=f"{COOKIE}=0123456789abcdeg").status == 401
    assert ask(app, "/", host="here.example", authorization="Bearer 0123456789abcdef").status == 200


def test_what_changes_something_needs_the_token_of_our_own_pages(runs: Path) -> None:
    done: list[object] = []

    def act(body: dict[str, str]) -> dict[str, str]:
        done.append(body)
        return {"said": "done"}

    pages = Pages(Shelf([runs]), gate_for("127.0.0.1", None, allow_open=False), {"note": act})
    app, token = pages.app(), {TOKEN: pages.token}
    right: dict[str, Any] = {"method": "POST", "body": b'{"a": "1"}', "content_type": "application/json"}
    ours: dict[str, Any] = right | token
    assert ask(app, "/do/note", **right).status == 403
    assert ask(app, "/do/note", **{**right, TOKEN: "guess"}).status == 403
    assert ask(app, "/do/note", **ours, origin="http://evil.example").status == 403
    assert ask(app, "/do/note", **ours, sec_fetch_site="cross-site").status == 403
    assert ask(app, "/do/note", **{**ours, "content_type": "text/plain"}).status == 415
    for body in (b"no json", b"[]", b'{"a": 1}', b'{"a": {"b": "c"}}'):
        assert ask(app, "/do/note", **{**ours, "body": body}).status == 400
    assert ask(app, "/do/other", **ours).status == 404
    assert ask(app, "/do/note", x_etude_token=pages.token).status == 404
    assert done == []
    assert ask(app, "/do/note", **ours).status == 200
    assert done == [{"a": "1"}]


def test_the_page_carries_its_token_and_the_export_none(runs: Path) -> None:
    pages = Pages(Shelf([runs]), gate_for("127.0.0.1", None, allow_open=False))
    assert pages.token in ask(pages.app(), "/").text
    exported = pages.site.page("run/friendly/index.html", served=False)
    assert "etude-token" not in exported
    assert "data-events" not in exported
    assert (runs / "friendly" / STAGE).is_dir()
