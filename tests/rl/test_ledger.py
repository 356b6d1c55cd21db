"""Events on disk: every byte at which a writer may be killed, and every way a line can be wrong."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from etude.errors import UserError
from etude.rl.ledger import (
    Batched,
    Closed,
    Event,
    Failed,
    Finished,
    Ledger,
    Opened,
    Stale,
    Trained,
    Weighted,
    from_line,
    to_line,
)

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
PARTS = st.dictionaries(st.text(), NUMBERS, max_size=3)
COUNTS = st.integers(0, 2**40)
MADE: dict[type[Event], st.SearchStrategy[Event]] = {
    Opened: st.builds(Opened, COUNTS, st.text(), COUNTS, COUNTS),
    Finished: st.builds(
        Finished, outcome=st.sampled_from(["pass", "fail"]), parts=PARTS, behaviour=PARTS, seconds=NUMBERS
    ),
    Failed: st.builds(Failed, COUNTS, COUNTS, st.text(), st.booleans()),
    Closed: st.builds(Closed, COUNTS, st.sampled_from(["ready", "flat", "void"]), st.dictionaries(COUNTS, NUMBERS)),
    Stale: st.builds(Stale, COUNTS),
    Batched: st.builds(Batched, COUNTS, st.lists(COUNTS, max_size=4).map(tuple)),
    Trained: st.builds(Trained, COUNTS, COUNTS),
    Weighted: st.builds(Weighted, PARTS, COUNTS),
}
SOME: list[Event] = [
    Opened(0, "naïve\n\u2028task", 0),
    Failed(0, 1, "disk", final=False),
    Closed(0, "ready", {0: 0.1, 3: 1.0}),
]


@pytest.mark.parametrize("kind", get_args(Event))
@given(data=st.data())
@hypothesis_settings(max_examples=30)
def test_every_event_comes_back_as_it_was(kind: type[Event], data: st.DataObject) -> None:
    event = data.draw(MADE[kind])
    line = to_line(event)
    assert line.count(b"\n") == 1
    assert from_line(line) == event
    assert to_line(from_line(line)) == line


def test_a_cause_in_no_known_letters_is_written_all_the_same() -> None:
    assert from_line(to_line(Failed(0, 0, "no file \udcff", final=True))) == Failed(0, 0, "no file ?", final=True)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "run" / "ledger.jsonl")


def test_nothing_written_is_nothing_read(ledger: Ledger) -> None:
    assert ledger.read() == ([], 0)


def test_killed_at_any_byte_it_goes_on(ledger: Ledger) -> None:
    for event in SOME:
        ledger.append(event)
    content = ledger.path.read_bytes()
    ends = [0, *(place + 1 for place, byte in enumerate(content) if byte == ord("\n"))]
    for cut in range(len(content) + 1):
        ledger.path.write_bytes(content[:cut])
        whole = sum(end <= cut for end in ends) - 1
        assert ledger.read() == (SOME[:whole], cut - ends[whole])
        ledger.append(Stale(cut))
        assert ledger.read() == ([*SOME[:whole], Stale(cut)], 0)


def test_a_killed_writer_loses_nothing_that_was_appended(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    script = (
        "import os, signal, sys; from pathlib import Path; from etude.rl.ledger import Ledger; from etude.rl.ledger import Stale\n"
        "ledger = Ledger(Path(sys.argv[1]))\n"
        "for number in range(5): ledger.append(Stale(number))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script, path], check=False).returncode == -signal.SIGKILL
    assert Ledger(path).read() == ([Stale(number) for number in range(5)], 0)


def test_a_disk_that_is_full_in_the_middle_of_a_line_leaves_none_of_it(ledger: Ledger) -> None:
    ledger.append(SOME[0])
    size = ledger.path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
        with pytest.raises(OSError, match=re.escape(os.strerror(28))):
            ledger.append(SOME[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert ledger.read() == (SOME[:1], 0)
    ledger.append(SOME[1])
    assert ledger.read() == (SOME[:2], 0)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"", "Expecting value"),
        (b"\0\0\0", "Expecting value"),
        (b"\xc3(", "decode"),
        (b"[1]", "None is no known event"),
        (b'{"event":"Exploded"}', "'Exploded' is no known event"),
        (b'{"event":["Stale"],"group":1}', "is no known event"),
        (b'{"event":"Stale"}', "Stale lacks or does not know group"),
        (b'{"event":"Stale","group":1,"when":2}', "Stale lacks or does not know when"),
        (b'{"event":"Stale","group":"1"}', r"Stale\.group: Input should be a valid integer"),
        (b'{"event":"Closed","group":1,"fate":"odd","rewards":{}}', r"Closed\.fate: "),
        (b'{"event":"Closed","group":1,"fate":"flat","rewards":{"a":1}}', r"Closed\.rewards\.a\."),
    ],
)
def test_a_damaged_line_is_named(ledger: Ledger, line: bytes, why: str) -> None:
    ledger.append(SOME[0])
    ledger.path.write_bytes(ledger.path.read_bytes() + line + b"\n" + to_line(SOME[1]))
    with pytest.raises(UserError, match=rf"^line 2 of .*ledger\.jsonl is damaged: .*{why}.*; begin in a new folder$"):
        ledger.read()


def test_a_number_that_is_none_is_never_written(ledger: Ledger) -> None:
    ledger.append(SOME[0])
    with pytest.raises(ValueError, match="JSON"):
        ledger.append(Weighted({"outcome": float("nan")}, 1))
    assert ledger.read() == (SOME[:1], 0)
