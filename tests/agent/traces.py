"""Traces to test with: any tree that an episode could leave, and one episode with three restarts, as the harness writes it."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from etude.agent.trace import Node, Trace

FLOATS = st.floats(-50, 0)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
CALL = st.fixed_dictionaries({"name": TEXTS, "arguments": st.dictionaries(TEXTS, TEXTS, max_size=2)})
ANSWER = st.fixed_dictionaries({"name": TEXTS, "text": TEXTS, "failed": st.booleans()})
TURN = {"thinking": TEXTS, "said": TEXTS, "calls": st.lists(CALL, max_size=2), "cached": st.integers(0, 9), "ended": st.booleans()}  # fmt: skip
GIVEN = {"answers": st.lists(ANSWER, max_size=3), "request": TEXTS}


@st.composite
def nodes(draw: st.DrawFn, parents: int) -> Node:
    """Return a node that may follow `parents` others."""
    parent = draw(st.none() | st.integers(0, parents - 1)) if parents else None
    tokens, sampled = draw(st.lists(st.integers(0, 9), max_size=3)), draw(st.booleans())
    kinds = ["turn", "summary"] if sampled else ["opening", "answers", "summary_request", "restart", "note"]
    node = Node(parent, draw(st.sampled_from(kinds)), tokens, draw(TEXTS), sampled, began=draw(FLOATS), seconds=1.5)
    if sampled:
        node.logprobs, node.raw_logprobs = [draw(FLOATS) for _ in tokens], [draw(FLOATS) for _ in tokens]
        node.versions = [draw(st.integers(0, 3)) for _ in tokens]
    node.details = dict(draw(st.fixed_dictionaries({}, optional=TURN if sampled else GIVEN)))
    return node


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Return any tree, or several."""
    made: list[Node] = []
    for _ in range(draw(st.integers(1, 8))):
        made.append(draw(nodes(len(made))))
    texts = [draw(TEXTS) for _ in range(5)]
    rewards = draw(st.dictionaries(TEXTS, FLOATS, max_size=2))
    return Trace(texts[0], texts[1], made, texts[2], {"turns": 1}, rewards, texts[3], {"policy": texts[4]})


def episode() -> Trace:
    """Return an episode of four contexts: each restart carries the summary before it."""
    trace = Trace("fix-1", "Mend the parser.", stop="finished", rewards={"tests": 1.0, "length": -0.25})
    trace.diff, trace.counts = "--- a/src/a.py\n+++ b/src/a.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n", {"tokens_thinking": 4}
    trace.made_by = {"policy": "sprout", "format": "json", "sandbox": "bwrap"}

    def add(parent: int | None, kind: Any, text: str, **details: Any) -> int:
        place = len(trace.nodes)
        node = Node(parent, kind, [place, place + 1], text, kind in {"turn", "summary"}, began=place / 2, seconds=0.25)
        if node.sampled:
            node.logprobs, node.raw_logprobs, node.versions = [-0.1 * place] * 2, [-0.2 * place] * 2, [place] * 2
        node.details = details
        trace.nodes.append(node)
        return place

    last = add(None, "opening", "Be good.\n\nMend the parser.")
    edit = {"name": "edit", "arguments": {"path": "src/a.py", "old": "x = 1\ny", "new": "x = 2\ny"}}
    shell = {"name": "shell", "arguments": {"command": "pytest -q", "timeout": 60}}
    output = "\n".join(f"line {number}" for number in range(48))
    done = {"name": "edit", "text": "done", "failed": False, "seconds": 0.1, "details": {"line": 3}}
    failed = {"name": "shell", "text": output, "failed": True, "seconds": 2.0, "details": {}}
    more = {"malformed": ["a call is not JSON"], "cached": 7, "ended": True}
    for number in range(1, 4):
        last = add(last, "turn", "raw", calls=[edit, shell], thinking="hm, hm", said="I try.", **more)
        last = add(last, "answers", "done…", answers=[done, failed], request="")
        last = add(last, "turn", "again", calls=[], thinking="", said="again", malformed=[], cached=9, ended=False)
        last = add(last, "summary_request", "Sum up.", answers=[], request="Sum up.")
        add(last, "summary", "so far", thinking="", said=f"summary {number}")
        last = add(0, "restart", f"summary {number}\n\nGo on.", copied=1, number=number)
    add(last, "turn", "Done.", calls=[], thinking="", said="Done.", malformed=[], cached=0, ended=True)
    return trace
