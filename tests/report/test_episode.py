"""Episodes as people see them, and terminals that hostile outputs cannot reach."""

from __future__ import annotations

import io
import unicodedata

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from etude.agent.trace import Trace
from etude.report.episode import show, visible
from tests.agent.traces import episode, traces


def shown(trace: Trace, *, full: bool = False, colour: bool = False) -> str:
    out = io.StringIO()
    show(
        trace,
        Console(
            file=out, width=100, color_system="standard" if colour else None, force_terminal=colour, highlight=False
        ),
        full=full,
    )
    return out.getvalue()


def test_an_episode_reads_as_it_happened() -> None:
    text = shown(episode())
    expected = [
        "episode  fix-1", "policy   sprout", "parts    tests +1, length -0.25 (without weights)", "20 sampled (thinking 4)", "Mend the parser.",
        "turn 1 · 2 tokens · 0.2 s", "hm, hm", "I try.", "▸ edit src/a.py", "-x = 1", "+x = 2", "▸ shell pytest -q  timeout=60", "✗ malformed: a call is not JSON",
        "↳ edit 0.1 s", "✗ shell 2.0 s", "line 7", "… 40 lines", "turn 2", "Sum up.", "summary 1",
        "═ context restarted from the summary ═", "turn 7", "Done.", "what it changed", "+x = 2",
    ]  # fmt: skip
    at = 0
    for words in expected:
        assert words in text[at:], words
        at = text.index(words, at)
    assert "line 8" not in text
    assert "reward  " not in text  # parts without weights add up to nothing
    weighed = episode()
    weighed.made_by["reward_weights"] = {"tests": 1.0, "length": 0.1}
    assert "reward   0.975" in shown(weighed)
    assert "line 47" in shown(episode(), full=True)
    assert "… " not in shown(episode(), full=True)


def test_thinking_is_dim_and_changes_are_coloured() -> None:
    text = shown(episode(), colour=True)
    assert "\x1b[2;3m  hm, hm" in text
    assert "\x1b[31m    -x = 1" in text
    assert "\x1b[32m    +x = 2" in text


@given(st.text(st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp", "Lu", "Zs"])))
def test_nothing_that_moves_a_terminal_is_left(text: str) -> None:
    left = {unicodedata.category(each) for each in visible(text) if each not in "\n\t"}
    assert not left & {"Cc", "Cs", "Zl", "Zp"}
    assert not set(visible(text)) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f")
    assert visible("plain\tü漢\n") == "plain\tü漢\n"


HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\x9b31m[red]x[/red]\u202e\x08"


def test_hostile_outputs_change_nothing_but_text() -> None:
    trace = episode()
    trace.task = trace.id = trace.stop = trace.diff = HOSTILE
    trace.made_by = {"policy": HOSTILE, HOSTILE: HOSTILE}
    trace.rewards = {HOSTILE: 1.0}
    for node in trace.nodes:
        node.text = HOSTILE
        node.details |= {
            "said": HOSTILE,
            "thinking": HOSTILE,
            "malformed": [HOSTILE],
            "calls": [{"name": HOSTILE, "arguments": {HOSTILE: HOSTILE, "x": [HOSTILE]}}],
        }
        node.details |= {"answers": [{"name": HOSTILE, "text": HOSTILE}]} if node.kind == "answers" else {}
    text = shown(trace)
    assert visible(text) == text
    assert "[red]x[/red]" in text


@given(traces())
def test_any_trace_can_be_shown(trace: Trace) -> None:
    text = shown(trace)
    assert visible(text) == text
