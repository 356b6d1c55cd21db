"""What users decide about the agent's work, and what of it may be used for training.

A decision is a line of `decisions.jsonl` in its session's folder. If the user has agreed (`consent.json` beside the sessions; without
an answer nobody has) the line also names what training needs: the request, the model and its digest, and the trace with its exact
tokens, by SHA-256. Else it holds no more than the page shows, and `feedback` leaves it out. A later no does not change earlier
lines: who wants them gone removes the session's folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from typing import TYPE_CHECKING, Any

from etude.errors import UserError
from etude.files import read_json, sha256_file, write_json
from etude.jsonl import append_line, read_lines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from etude.agent.sessions import Session, Sessions

DECISIONS = "decisions.jsonl"
DECIDED = ("accepted", "rejected", "commented")
MOST_COMMENT = 10_000  # characters


def consent(agents: Path) -> bool | None:
    """Return whether decisions may be kept for training; None: nobody was asked yet."""
    with contextlib.suppress(FileNotFoundError):
        return read_json(agents / "consent.json")["training"] is True
    return None


def agree(agents: Path, *, training: bool) -> None:
    write_json(agents / "consent.json", {"training": training, "time": time.time()})


def decisions(session: Session) -> list[dict[str, Any]]:
    """Return what was decided about a session, oldest first."""
    return [json.loads(line) for line in read_lines(session.folder / DECISIONS, missing_ok=True)[0]]


def decide(session: Session, decision: str, comment: str = "") -> dict[str, Any]:
    """Accept (and so apply), reject, or comment on a session that has ended; return the line that is kept."""
    if len(comment) > MOST_COMMENT:
        raise UserError(f"the comment has {len(comment):,} characters; {MOST_COMMENT:,} is the most")
    if decision not in DECIDED:
        raise UserError(f"a decision is one of {', '.join(DECIDED)}")
    if decision == "commented" and not comment:
        raise UserError("the comment is empty; say what should be different")
    if session.state in {"waiting", "running"}:
        raise UserError("this session has not ended, so there is nothing to decide yet")
    with session.locked(fcntl.LOCK_EX):  # one decision at a time
        if decision != "commented" and any(each["decision"] == "accepted" for each in decisions(session)):
            raise UserError("this was accepted and applied already")
        if decision == "accepted" and not session.has_changes:
            raise UserError("this session has changed nothing that could be applied")
        agents = session.folder.parent
        if (agreed := consent(agents)) is None:  # asked once: who decides without an answer has not agreed
            agree(agents, training=False)
        line: dict[str, Any] = {"session": session.id, "decision": decision, "comment": comment, "time": time.time(),
                                "consent": bool(agreed)}  # fmt: skip
        if decision == "accepted":
            line["files"] = session.apply()
        trace = session.trace if agreed else None
        if trace is not None:
            line |= {"request": trace.task, "model": trace.made_by.get("model"), "trace": f"{session.id}/traces.jsonl",
                     "sha256": sha256_file(session.folder / "traces.jsonl")}  # fmt: skip
        append_line(session.folder / DECISIONS, json.dumps(line).encode() + b"\n", durable=True)
        return line


def feedback(sessions: Sessions) -> Iterator[dict[str, Any]]:
    """Yield the decisions that may be used for training, newest sessions first."""
    for session in sessions:
        yield from (each for each in decisions(session) if each["consent"] and "trace" in each)
