"""The pages of the agent at work: what it was asked, what it does, what it changed, and what the user says to it.

Repositories and models are those that `etude web` was started with. Whoever reaches the page can so neither have another folder read
or written, nor a model of their own loaded; a repository comes from the page only as a choice among those.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from etude.agent import feedback
from etude.agent.sessions import LOOK, MOST_REQUEST, Sessions
from etude.errors import UserError
from etude.progress import duration
from etude.report.episode import ending
from etude.web.episode import nodes
from etude.web.html import Html, act, details, diff, element, facts, join, link, note, pre, section, table
from etude.web.overview import View

if TYPE_CHECKING:
    from pathlib import Path

    from etude.agent.sessions import Session
    from etude.web.app import Action

AGENTS = "agents/"  # whose news concern these pages; no key of a run is like it
LISTED = 200  # sessions on a page
TITLE = 80  # characters of a request
RETOLD = 6_000  # characters of a diff in the request of another attempt
STATES = {
    "waiting": "○ waiting", "running": "▶ at work", "finished": "✓ finished", "failed": "✗ failed", "stopped": "‖ stopped",
    "killed": "✗ ended without a word",
}  # fmt: skip
LOOKS = {"finished": "done", "failed": "damaged", "killed": "damaged"}  # as runs have them
ABOUT = {
    "waiting": "It begins as soon as another session has ended.",
    "running": "It works on a copy of the repository in a sandbox, and goes on when this page is closed.",
    "stopped": "It was stopped. What it did until then is kept; nothing of it can be applied.",
    "killed": "Its process was killed, or the machine went down. The repository was not touched.",
}
NOTHING = {"waiting": "It has not begun.", "running": "The model is being loaded and the repository copied."}
VERDICTS = {"accepted": "✓ accepted", "rejected": "✗ rejected", "commented": "commented"}
BUTTONS = {
    "accepted": "Accept and apply", "rejected": "Reject", "commented": "Keep the comment", "again": "Try again with the comment",
}  # fmt: skip
ANSWERS = {"yes": ("Keep it for training", True), "no": ("Do not keep it", False)}
CONSENT = """May what you decide be kept for training? Kept are, in the session's folder on this machine: the request, the trace \
(tokens of the model, and of your repository what it read), the diff, what you decided and your comments. \
Nothing is sent anywhere. Deciding works without it, and you can change it on the page of all sessions."""


class Agents:
    """The sessions, and what may be asked of the page."""

    def __init__(self, folder: Path, repositories: list[str], models: list[str], at_once: int, sandbox: str) -> None:
        self.sessions = Sessions(folder, at_once)
        self.repositories, self.models, self.sandbox = repositories, models, sandbox

    def keep_beginning(self) -> None:
        """Begin those that wait whenever there is room, for as long as the server lives."""
        while True:
            with contextlib.suppress(FileNotFoundError):  # a session that was removed between two looks
                self.sessions.begin_due(self.repositories, self.models)
            time.sleep(LOOK)

    @property
    def mark(self) -> str:
        """What changes whenever a session does: writing a file anew changes its folder's time."""
        marks: list[Any] = [feedback.consent(self.sessions.folder)]
        for each in self.sessions:
            marks += [each.id, each.state, each.folder.stat().st_mtime_ns, len(feedback.decisions(each))]
        return f"{hash(str(marks)) & 0xFFFFFFFFFFFF:x}"

    # ---- what the page may ask for

    def actions(self) -> dict[str, Action]:
        return {"work": self.ask, "decide": self.decide, "end": self.stop, "consent": self.agree}

    def ask(self, body: dict[str, str]) -> dict[str, str]:
        asked = {name: body.get(name, "") for name in ("repository", "model")}
        self._refuse_unnamed(**asked)
        self.sessions.ask(body.get("request", ""), sandbox=self.sandbox, **asked)
        return {"said": "it is in the list below"}

    def _refuse_unnamed(self, repository: str, model: str) -> None:
        for option, word, allowed in (("--repo", repository, self.repositories), ("--model", model, self.models)):
            if word not in allowed:
                raise UserError(f"this page may not use {word!r}; start etude web with {option} {word}")

    def stop(self, body: dict[str, str]) -> dict[str, str]:
        self.sessions.get(body.get("session", "")).stop()
        return {"said": "it stops"}

    def agree(self, body: dict[str, str]) -> dict[str, str]:
        feedback.agree(self.sessions.folder, training=body.get("training") == "yes")
        return {"said": "noted"}

    def decide(self, body: dict[str, str]) -> dict[str, str]:
        """Accept, reject, comment on, or try again: after what was finished only with a comment, now or before."""
        session, comment = self.sessions.get(body.get("session", "")), body.get("comment", "").strip()
        named = {name: session.request[name] for name in ("repository", "model")}
        self._refuse_unnamed(**named)
        if (decision := body.get("decision", "")) != "again":
            feedback.decide(session, decision, comment)
            return {"said": "kept"}
        kept = [each["comment"] for each in feedback.decisions(session) if each["comment"]]
        if comment or (not kept and session.state == "finished"):
            kept.append(feedback.decide(session, "commented", comment)["comment"])
        fresh = self.sessions.ask(
            _once_more(session, "".join(kept[-1:])), sandbox=self.sandbox, after=session.id, **named
        )
        return {"said": "", "to": f"/agents/{fresh.id}.html"}

    # ---- all sessions

    def all(self) -> View:
        sessions = list(self.sessions)
        rows = [(_state(each), link(f"agents/{each.id}.html", _title(each)), each.request["repository"], each.request["model"],
                 _when(each.request["time"]), ", ".join(VERDICTS[one["decision"]] for one in feedback.decisions(each)) or "–")
                for each in sessions[:LISTED]]  # fmt: skip
        heads = ("state", "request", "repository", "model", ">asked", "decision")
        left = note(f"{len(sessions) - LISTED} older ones are not listed.") if len(sessions) > LISTED else None
        drawn = table(heads, rows, "sessions") if rows else note("Nothing was asked yet.", "empty")
        states = [each.state for each in sessions]
        state = f"{states.count('running')} at work, {states.count('waiting')} waiting; at most {self.sessions.at_once} at once"
        body = join(section("Ask for work", self._form()), section("Sessions", drawn, left, live="sessions"),
                    section("Training", self._consent(), live="consent"))  # fmt: skip
        return View("Agents", body, (), AGENTS, live=True, state=state)

    def _form(self) -> Html:
        if not self.repositories:
            return note("Name the repositories it may work on when you start the page: etude web --repo PATH", "empty")
        words = element("textarea", name="request", required=True, rows=4, maxlength=MOST_REQUEST, aria_label="request",
                        placeholder="What is to be done, in plain words")  # fmt: skip
        picks = [element("label", f"{name} ", element("select", *(element("option", each) for each in several), name=name))
                 for name, several in (("repository", self.repositories), ("model", self.models))]  # fmt: skip
        about = "It works on a copy, in a sandbox. Nothing of it reaches the repository before you accept it."
        return act("work", words, element("p", *picks, cls="ways"), element("button", "Begin"), note(about))

    def _consent(self) -> Html:
        agreed = feedback.consent(self.sessions.folder)
        now = {None: "Until you answer, nothing is kept.", True: "You agreed: what you decide is kept for training.",
               False: "What you decide is not kept for training."}[agreed]  # fmt: skip
        answers = [element("button", words, name="training", value=value) for value, (words, here) in ANSWERS.items()
                   if agreed is not here]  # fmt: skip
        form = act("consent", element("p", *answers, cls="ways"))
        return element("div", note(CONSENT), note(element("strong", now)), form, cls="asks")

    # ---- one session

    def one(self, name: str) -> View:
        session = self.sessions.get(name)
        state = session.state  # first: what is read later is at least as new
        words, trace, over = session.request["request"], session.trace, state not in {"waiting", "running"}
        asked = [pre(words)]
        if before := session.request.get("after"):
            asked.append(element("p", "Another attempt after ", link(f"{before}.html", "this one"), "."))
        changed = self._changed(session, state) if over else []
        work = nodes(trace) if trace else note(NOTHING.get(state, "It did nothing."), "empty")
        body = join(
            section("", *_about(session, state), live="about"),
            section("", details("What was asked", *asked, open_=TITLE < len(words) < 1_000)),
            section("What it changed" if over else "", *changed, live="changed"),
            section("What it did", work, live="did"),
        )
        return View(_title(session), body, [("Agents", "agents.html")], AGENTS, live=True)

    def _changed(self, session: Session, state: str) -> list[Html | None]:
        """Return the diff, what was decided, and what can be."""
        trace, decided = session.trace, feedback.decisions(session)
        said = [element("li", element("strong", VERDICTS[each["decision"]]), f" · {_when(each['time'])}",
                        f" · files written: {each['files']}" if "files" in each else "",
                        pre(each["comment"]) if each["comment"] else None) for each in decided]  # fmt: skip
        verdicts = {each["decision"] for each in decided}
        can = {"accepted": session.has_changes, "rejected": state == "finished" and "rejected" not in verdicts}
        offered = [each for each in BUTTONS if each not in can or (can[each] and "accepted" not in verdicts)]
        box = element("textarea", name="comment", rows=3, maxlength=feedback.MOST_COMMENT, aria_label="comment",
                      placeholder="Comment: what is good, what should be different")  # fmt: skip
        buttons = [element("button", BUTTONS[each], name="decision", value=each) for each in offered]
        return [
            diff(trace.diff) if trace and trace.diff else note("No file was changed.", "empty"),
            element("ul", *said) if said else None,
            self._consent() if feedback.consent(self.sessions.folder) is None else None,
            act("decide", box, element("p", *buttons, cls="ways"), session=session.id),
        ]


def _about(session: Session, state: str) -> list[Html]:
    """Return how a session stands, and what ends it."""
    asked, trace = session.request, session.trace
    sampled = [node for node in trace.nodes if node.sampled] if trace else []
    took = max((node.began + node.seconds for node in trace.nodes), default=0.0) if trace else 0.0
    known = facts({
        "state": _state(session), "repository": asked["repository"], "model": asked["model"], "asked": _when(asked["time"]),
        "turns": sum(node.kind == "turn" for node in sampled) or None, "time": duration(took) if took else None,
        "tokens written": f"{sum(len(node.tokens) for node in sampled):,}" if sampled else None,
    })  # fmt: skip
    words, bad = ABOUT.get(state) or session.end.get("why", ""), state in {"failed", "killed"}
    if trace and state == "finished":
        bad = trace.stop != "finished" or not trace.diff
        done = (
            "It ended by itself. Whether it is right, the diff and its checks tell."
            if trace.diff
            else "It ended by itself and changed no file."
        )
        words = done if trace.stop == "finished" else f"It ended before it was done: {ending(trace)}."
    parts = [known, note(words, "warning" if bad else "note")]
    if state in {"waiting", "running"}:
        again = "Stop at once" if session.stopping else "Stop"
        parts.append(act("end", element("button", again), session=session.id))
    elif (log := session.log) and state != "finished":
        parts.append(details("What its process said last", pre(log[-4_000:])))
    return parts


def _state(session: Session) -> Html:
    state = session.state
    words = "▶ stopping" if state == "running" and session.stopping else STATES[state]
    return element("span", words, cls=f"state {LOOKS.get(state, state)}")


def _title(session: Session) -> str:
    words = " ".join(session.request["request"].split())
    return words[:TITLE] + "…" * (len(words) > TITLE)


def _when(seconds: float) -> str:
    return time.strftime("%d %b %H:%M", time.localtime(seconds))


def _once_more(session: Session, comment: str) -> str:
    """Return the request of another attempt: the old one, what came of it, and what the user says to that."""
    trace = session.trace
    if not comment:  # one that failed or was stopped
        return str(session.request["request"])
    made = f"\n\nIt changed this:\n\n{trace.diff[:RETOLD]}" if trace and trace.diff else " It changed no file."
    taken = any(each["decision"] == "accepted" for each in feedback.decisions(session))
    fate = "is in the repository already" if taken else "was not taken over"
    return f"{session.request['request']}\n\nAn earlier attempt {fate}.{made}\n\nThe user's comment on it: {comment}"
