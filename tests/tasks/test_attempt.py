"""What every attempt at a task shares, whoever makes it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from etude.agent.calls import Call
from etude.agent.endpoint import message_format
from etude.agent.harness import Harness, HarnessSettings
from etude.agent.policies import ScriptedPolicy
from etude.agent.search import installed_embedder
from etude.agent.tools import Toolset, ToolSettings
from etude.agent.trace import Trace, read_traces, write_traces
from etude.errors import UserError
from etude.sandbox.box import Entry, SandboxError
from etude.sandbox.launcher import remove_stale_layers
from etude.sandbox.local import LocalSandbox
from etude.tasks import score as score_module
from etude.tasks import suite
from etude.tasks.attempt import Left, change_of, judge, own_changes, searcher_for, work_on
from etude.tasks.score import MOST_BYTES, MOST_LEFT, Score, score, taken
from etude.tasks.task import Codebase
from tests.tasks import small

TALK = message_format()
# Mends the sum, and leaves a file that is too long to be taken.
MENDING = [
    Call("edit", {"path": "calc/__init__.py", "old": "result = value", "new": "result += value"}),
    Call("shell", {"command": "head -c 5000000 /dev/zero > calc/long.py; command -v python3"}),
]
KILLED = """
import asyncio, sys
from pathlib import Path
from etude.sandbox.box import Entry
from etude.tasks.suite import layers_of

async def main():
    async with layers_of(Path(sys.argv[1]), [Entry("a", "file", 1, 0o644, b"a")]) as (layer,):
        print(layer.parent, flush=True)
        sys.stdin.read()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def calc(tmp_path_factory: pytest.TempPathFactory) -> Codebase:
    return small.codebase(tmp_path_factory.mktemp("calc"))


def test_an_attempt_is_played_and_judged_and_long_files_are_named(calc: Codebase) -> None:
    trace, tools = Trace("one", "sums are wrong"), ToolSettings(tools=["edit", "shell"])
    policy = ScriptedPolicy([TALK.write(*MENDING), "Mended."], TALK)

    def begin(toolset: Toolset) -> Harness:
        assert toolset.python == str(calc.python)
        return Harness(policy, TALK, toolset, HarnessSettings(), trace)

    async def attempt() -> None:
        left = await work_on(small.task(), calc, trace, tools, None, begin)
        assert left.change["calc/__init__.py"] == (small.BROKEN, small.SOLVED)
        judged = await judge(small.task(), calc, trace, left, "terse", await score(small.task(), calc, left.entries))
        assert (judged.score.outcome, judged.score.ignored) == ("pass", ("calc/long.py",))
        assert judged.quality is not None
        assert (judged.quality.files, judged.quality.unrelated_files) == (2, 1)
        assert judged.interaction.silent is False

    small.run(attempt())
    assert "+        result += value" in trace.diff
    assert trace.made_by["score"]["ignored"] == ["calc/long.py"]


def attempt(calc: Codebase, *calls: Call) -> tuple[Trace, Left]:
    trace, tools = Trace("one", "sums are wrong"), ToolSettings(tools=["edit", "shell"])
    policy = ScriptedPolicy([TALK.write(*calls), "Done."], TALK)
    work = work_on(
        small.task(), calc, trace, tools, None, lambda given: Harness(policy, TALK, given, HarnessSettings(), trace)
    )
    return trace, small.run(work)


def test_what_an_agent_breaks_is_its_own_fault(calc: Codebase, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox that has ended is ours (tests/rl/test_environment.py kills one); one that goes on, and whose files cannot be read, is not."""

    async def unreadable(*_: object) -> list[Entry]:
        raise SandboxError("file work ended with 1")

    monkeypatch.setattr(LocalSandbox, "diff", unreadable)
    trace, left = attempt(calc, *MENDING)
    assert (left.entries, trace.made_by["lost"]) == ([], "file work ended with 1")
    assert small.run(score(small.task(), calc, left.entries)).outcome == "fail"


def test_code_that_ends_the_sandbox_has_failed(calc: Codebase, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = suite.run_tests

    async def fails_with_changes(
        codebase: Codebase, layers: tuple[Path, ...] = (), *given: Any, **more: Any
    ) -> suite.Run:
        if layers:
            raise SandboxError("the sandbox has ended")
        return await kept(codebase, layers, *given, **more)

    monkeypatch.setattr(score_module, "run_tests", fails_with_changes)
    worth = small.run(score(small.task(), calc, [Entry("calc/a.py", "file", 1, 0o644, b"a")]))
    assert (worth.outcome, worth.reason) == ("fail", "its code ends the sandbox: the sandbox has ended")


FILLS = {  # what an agent may leave behind; all of it is read in seconds
    "folders": "python3 -c 'import os\nfor n in range(11000): os.mkdir(f\"d{n}\")'",
    "nested": "python3 -c 'import os\nfor n in range(2000): os.mkdir(\"d\"); os.chdir(\"d\")'",
    "a gigabyte": "head -c 1050000000 /dev/zero > calc/big.py",
    "gaps": "truncate -s 900G calc/big.py; truncate -s 1000000000 calc/big2.py",
    "odd names": "python3 -c 'import os; open(b\"calc/\\xff\\x1b[31m\\n.py\", \"w\").write(\"x\"); os.mkfifo(\"calc/f.py\")'",
    "long names": "python3 -c 'import os; os.chdir(\"calc\")\nfor n in range(18): os.mkdir(\"d\" * 220); os.chdir(\"d\" * 220)\nopen(\"x.py\", \"w\").write(\"x\")'",
    "locked": "chmod 000 calc", "killed": "kill -9 -1; kill -9 1",
    "not Python": "printf 'x=(((((' > calc/__init__.py; printf '# coding: zork\nx' > calc/b.py",
}  # fmt: skip


@pytest.mark.parametrize("fill", FILLS)
def test_whatever_an_agent_leaves_is_a_fail(calc: Codebase, fill: str, tmp_path: Path) -> None:
    trace, left = attempt(calc, Call("shell", {"command": FILLS[fill], "timeout": 60}))
    assert sum(len(entry.content or b"") for entry in left.entries) <= MOST_LEFT
    worth = small.run(score(small.task(), calc, left.entries))
    judged = asyncio.run(judge(small.task(), calc, trace, left, "terse", worth))
    assert judged.score.outcome == "fail"
    write_traces(tmp_path / "traces.jsonl", [trace])
    assert read_traces(tmp_path / "traces.jsonl")[0][0].diff == trace.diff


def test_what_ruff_cannot_read_is_not_measured(calc: Codebase, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise UserError("ruff failed")

    monkeypatch.setattr("etude.tasks.attempt.measure", refused)
    left = Left([], {"calc/__init__.py": (small.BROKEN, "x")})
    assert asyncio.run(judge(small.task(), calc, Trace("one", ""), left, "terse", Score("fail"))).quality is None


def test_no_more_is_taken_than_runs_can_be_given(calc: Codebase) -> None:
    block = b" " * MOST_BYTES
    large = [Entry(f"calc/{n:04d}.py", "file", len(block), 0o644, block) for n in range(MOST_LEFT // MOST_BYTES + 3)]
    many = [Entry(f"calc/{n}.py", "file", 1, 0o644, b"x") for n in range(6000)]
    deep = Entry("calc/" + "d/" * 600 + "x.py", "file", 1, 0o644, b"x")
    assert [len(each) for each in taken(small.task(), calc, large)] == [MOST_LEFT // MOST_BYTES, 3]
    assert [len(each) for each in taken(small.task(), calc, many)] == [5000, 1000]
    assert taken(small.task(), calc, [deep]) == ([], (deep.path,))


def test_only_files_that_are_too_long_are_not_taken(calc: Codebase) -> None:
    most, more = (Entry(f"calc/{n}.py", "file", n, 0o644, b" " * n) for n in (MOST_BYTES, MOST_BYTES + 1))
    assert taken(small.task(), calc, [most, more]) == ([most], (more.path,))


def test_scoring_that_fails_is_no_score(calc: Codebase, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/bin/false")
    broken = dataclasses.replace(calc, python=tmp_path / "bin" / "python")
    found = small.run(score(small.task(), broken, []))
    with pytest.raises(SandboxError):
        asyncio.run(judge(small.task(), broken, Trace("one", ""), Left([], {}), "terse", found))


def test_a_trace_says_whether_its_score_was_known(calc: Codebase) -> None:
    for found, known in (Score("pass", how="known"), True), (Score("fail", how="idle"), False), (Score("fail"), False):
        trace = Trace("one", "")
        asyncio.run(judge(small.task(), calc, trace, Left([], {}), "terse", found))
        assert trace.made_by["score"]["known"] is known


def test_search_is_the_product_s(tmp_path: Path) -> None:
    searcher = searcher_for(ToolSettings(), tmp_path)
    assert searcher is not None
    assert (searcher.embedder is None) == (installed_embedder() is None)
    assert searcher_for(ToolSettings(tools=["shell"]), tmp_path) is None


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="layers lie elsewhere")
def test_layers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    words = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        remove_stale_layers()
        assert (folder / "0" / "a").exists()  # it lives
        process.kill()
    assert folder.exists()
    remove_stale_layers()
    assert not folder.exists()


def test_changes_leave_out_caches_and_unfold_folders(tmp_path: Path) -> None:
    for name in ("upper/pkg/a.py", "lower/pkg/a.py", "lower/pkg/b.py", "lower/keep.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    layers = (tmp_path / "upper", tmp_path / "lower")
    long = b"x" * (3 << 20)
    entries = [Entry("pkg", "gone"), Entry("pkg/__pycache__/a.pyc", "file", 1, 0o644, b"a"), Entry(".pytest_cache", "folder"),
               Entry("keep.py", "file", 13, 0o644, b"lower/keep.py"), Entry("long.txt", "file", len(long), 0o644, long)]  # fmt: skip
    change = change_of(own_changes(entries, layers), layers)
    assert change == {
        "pkg/a.py": ("upper/pkg/a.py", None),
        "pkg/b.py": ("lower/pkg/b.py", None),
        "long.txt": (None, "x" * ((1 << 20) - len("lower/keep.py"))),
    }
