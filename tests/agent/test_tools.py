"""The tools of an episode, on a stand-in for a sandbox and on the real one of this machine."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.calls import Answer, Call
from etude.agent.search import Searcher
from etude.agent.toolbox import Refused
from etude.agent.tools import BASH_ONLY, SPECS, Toolset, ToolSettings, checked, cut
from etude.errors import UserError
from etude.sandbox.box import Limits, Missing, Place, Result, Sandbox, SandboxError
from etude.sandbox.local import open_sandbox
from tests.agent.bare import BareSandbox

STRICT = ToolSettings(strict_arguments=True)
FILES = {"a.py": "def one():\n    return 1\n", "src/b.py": "x = 2\ny = 2\n", "notes.txt": "alpha\nbeta\n"}


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(text)
    (tmp_path / "tree").chmod(0o777)
    return tmp_path / "tree"


async def answers(sandbox: Sandbox, *calls: Call, settings: ToolSettings | None = None) -> list[Answer]:
    return await Toolset(sandbox, settings or ToolSettings(), Searcher()).run(calls)


def in_bare(tree: Path, *calls: Call, settings: ToolSettings | None = None) -> list[Answer]:
    answered: list[Answer] = run(answers(BareSandbox(tree), *calls, settings=settings))
    return answered


def call(name: str, **arguments: Any) -> Call:
    return Call(name, arguments)


EPISODE = [
    call("read", path="a.py"),
    call("grep", pattern="= 2", max=1),
    call("list"),
    call("write", path="/tmp/etude-test-tools", content="kept\n"),
    call("edit", path="a.py", old="return 1", new="return (1"),
    call("edit", path="a.py", old="(1", new="one_more"),
    call("shell", command="cat a.py; cat /tmp/etude-test-tools; echo bad >&2; rm /tmp/etude-test-tools; exit 3"),
    call("glob", pattern="*.py"),
    call("search", query="function that gives one more", k=1),
    call("shell", command="true"),
    call("read", path="gone.py"),
]
EXPECTED = [
    "    1\tdef one():\n    2\t    return 1",
    "src/b.py:1:x = 2\n… 1 of 2 matches shown; narrow the pattern, path or glob …",
    "a.py  24 bytes\nnotes.txt  11 bytes\nsrc/",
    "wrote /tmp/etude-test-tools (1 lines)",
    "edited a.py at line 2; syntax error at line 2: return (1 ('(' was never closed)",
    "edited a.py at line 2; syntax ok",
    "[exit code 3]\ndef one():\n    return one_more\nkept\nbad",
    "a.py\nsrc/b.py",
    "a.py:1-2 one\n    1\tdef one():\n    2\t    return one_more",
    "[exit code 0]\nno output",
    "gone.py: No such file or directory",
]


@pytest.mark.parametrize("real", [False, True], ids=["bare", "sandbox"])
def test_an_episode(tree: Path, real: bool) -> None:
    async def episode() -> list[Answer]:
        sandbox: Sandbox = await open_sandbox(Place((tree,))) if real else BareSandbox(tree)
        if real:  # /tmp is the sandbox's own there, and lives as long as it does
            assert not Path("/tmp/etude-test-tools").exists()
        try:
            return await answers(sandbox, *EPISODE)
        finally:
            await sandbox.close()

    answered = run(episode())
    assert [answer.text for answer in answered] == EXPECTED
    assert [answer.failed for answer in answered] == [False] * 10 + [True]
    assert [answer.call for answer in answered] == EPISODE
    assert answered[1].details["matches"] == 2
    assert answered[6].details == {"rc": 3, "timed_out": False, "oom": False, "cut": False}
    assert answered[8].details["ranking"] == "words"
    assert answered[10].details == {"error": "missing", "path": "gone.py", "cut": False}
    if real:
        assert (tree / "a.py").read_text() == FILES["a.py"]


def test_hostile_answers_of_a_real_sandbox(tree: Path) -> None:
    async def episode() -> list[Answer]:
        sandbox = await open_sandbox(Place((tree,), limits=Limits(memory=256 << 20)))
        settings = ToolSettings(seconds=2.0, tools=["shell", "read", "grep", "glob"])
        lots = call(
            "shell",
            command="printf 'a%.0s' $(seq 1 70) > evil; echo '!' >> evil; seq 1 100000; mkfifo fifo",
            timeout=30,
        )
        try:
            return await answers(
                sandbox, lots, call("grep", pattern="^(a+)+$"), call("read", path="fifo"), call("glob", pattern="/proc/**"),
                call("shell", command="sleep 30", timeout=1), call("shell", command="python3 -c 'x = bytearray(1 << 30)'"),
                settings=settings,
            )  # fmt: skip
        finally:
            await sandbox.close()

    lots, evil, fifo, everything, late, large = run(episode())
    assert lots.details["cut"]
    assert "left out" in lots.text
    assert len(lots.text) < 10_100
    assert "stopped at evil:1" in evil.text
    assert evil.failed
    assert fifo.text == "fifo is not a regular file"
    assert len(everything.text) <= 10_100
    assert late.text == "[timed out after 1 s]\nno output"
    assert late.failed
    assert large.details["oom"] or "MemoryError" in large.text


def test_readers_run_at_once_and_writers_alone_in_order(tree: Path) -> None:
    sandbox = BareSandbox(tree)
    reads = [call("read", path="a.py")] * 5
    write = [call("shell", command=f"echo {n} >> log; cat log") for n in range(3)]
    answered = run(answers(sandbox, *reads, *write, *reads))
    assert sandbox.most_running > 1
    assert [answer.text for answer in answered[5:8]] == [
        "[exit code 0]\n0",
        "[exit code 0]\n0\n1",
        "[exit code 0]\n0\n1\n2",
    ]
    alone = BareSandbox(tree)
    run(answers(alone, *write))
    assert alone.most_running == 1
    many = BareSandbox(tree)
    run(answers(many, *[call("list")] * 20))
    assert many.most_running == 8


def test_a_write_between_reads_is_seen_by_the_later_one_only(tree: Path) -> None:
    look = call("grep", pattern="gamma", path="notes.txt")
    before, _, after = in_bare(tree, look, call("write", path="notes.txt", content="gamma\n"), look)
    assert (before.text, after.text) == ("no matches", "notes.txt:1:gamma")


@pytest.mark.parametrize("failure", [SandboxError("gone"), Missing("gone")])
@pytest.mark.parametrize("name", ["read", "shell"])
def test_failures_of_the_machine_are_no_answers(tree: Path, failure: SandboxError, name: str) -> None:
    calls = [Call("read", {"path": "a"})] * 2 if name == "read" else [Call("shell", {"command": "ls"})]
    with pytest.raises(SandboxError) as raised:
        run(answers(BareSandbox(tree, failure=failure), *calls))
    assert raised.value is failure


@pytest.mark.parametrize(
    "result",
    [Result(127, b"", b"no python3"), Result(0, b"{", b""), Result(0, b'{"text": 1}', b""), Result(0, b"[]", b"")],
)
def test_a_sandbox_without_a_working_python_is_a_failure_of_the_machine(tree: Path, result: Result) -> None:
    with pytest.raises(SandboxError, match="did not answer"):
        run(answers(BareSandbox(tree, result), call("list")))


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (Result(-9, b"", b"", timed_out=True, seconds=30), "timed out after 30 s"),
        (Result(-9, b"", b"", oom=True), "killed: out of memory"),
        (Result(-11, b"", b""), "ended by signal 11"),
    ],
)
def test_what_was_ended_inside_is_an_answer(tree: Path, result: Result, text: str) -> None:
    (answer,) = run(answers(BareSandbox(tree, result), call("grep", pattern="x")))
    assert (answer.text, answer.failed, answer.details["error"]) == (text, True, "killed")


BAD = [
    (call("fly"), "unknown tool", "Unknown tool. Tools: read, grep, glob, list, search, edit, write, shell, todo."),
    (
        call("bash", command="ls"),
        "unknown tool",
        "Unknown tool. Tools: read, grep, glob, list, search, edit, write, shell, todo.",
    ),
    (call("read"), "missing argument", "read: argument path is missing."),
    (call("read", path="a", start="x"), "mistyped argument", "read: argument start must be a whole number."),
    (call("read", path="a", start=True), "mistyped argument", "read: argument start must be a whole number."),
    (call("read", path="a", start=0), "bad value", "read: argument start must be 1 or more."),
    (call("read", path="a", start=3, end=2), "bad value", "read: end is before start."),
    (call("write", path="a", content={}), "mistyped argument", "write: argument content must be text."),
    (call("edit", path="a.py", old="", new="x"), "bad value", "edit: old is empty."),
    (call("edit", path="a.py", old="x", new="x"), "bad value", "edit: old and new are the same."),
    (call("todo", items="[ ] x\n" * 51), "bad value", "todo: at most 50 items."),
]


@pytest.mark.parametrize(("wrong", "kind", "text"), BAD)
@pytest.mark.parametrize("settings", [ToolSettings(), STRICT], ids=["lenient", "strict"])
def test_bad_calls_get_short_fixed_answers(
    tree: Path, wrong: Call, kind: str, text: str, settings: ToolSettings
) -> None:
    sandbox = BareSandbox(tree)
    (answer,) = run(answers(sandbox, wrong, settings=settings))
    assert (answer.text, answer.failed, answer.details["error"]) == (text, True, kind)
    assert not sandbox.started


@pytest.mark.parametrize(
    ("loose", "kind", "taken"),
    [
        (call("read", path="a", encoding="x"), "unknown argument", {"path": "a"}),
        (call("read", path=7), "mistyped argument", {"path": "7"}),
        (call("read", path="a", end=2.0), "mistyped argument", {"path": "a", "end": 2}),
        (call("read", path="a", end=None), "mistyped argument", {"path": "a"}),
        (call("todo", items=["[ ] a", "[x] b"]), "mistyped argument", {"items": "[ ] a\n[x] b"}),
        (call("read", path="a", end="12"), None, {"path": "a", "end": 12}),
    ],
)
def test_strictness(loose: Call, kind: str | None, taken: dict[str, Any]) -> None:
    assert checked(loose, ToolSettings())[0] == taken
    if kind is None:
        assert checked(loose, STRICT)[0] == taken
        return
    with pytest.raises(Refused) as fault:
        checked(loose, STRICT)
    assert fault.value.kind == kind


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
)


@given(
    st.sampled_from([*SPECS, "other"]),
    st.dictionaries(
        st.sampled_from(["path", "start", "pattern", "old", "new", "items", "command", "x"]), JSON, max_size=4
    ),
    st.booleans(),
)
def test_any_call_fits_or_is_told_why_not(name: str, arguments: dict[str, Any], strict: bool) -> None:
    settings = ToolSettings(strict_arguments=strict)
    try:
        taken, passed_over = checked(Call(name, arguments), settings)
    except Refused:
        return
    kinds = {parameter.name: parameter.kind for parameter in SPECS[name].parameters}
    assert all(type(value) is kinds[key] for key, value in taken.items())
    assert {parameter.name for parameter in SPECS[name].parameters if parameter.required} <= set(taken)
    assert set(passed_over) == set(arguments) - set(kinds)
    assert not (strict and passed_over)


def test_the_plan_is_kept_outside_of_the_sandbox(tree: Path) -> None:
    sandbox = BareSandbox(tree)
    tools = Toolset(sandbox, ToolSettings(), Searcher())
    (answer,) = run(tools.run([call("todo", items="[ ] look\n- [x] think\n\nact")]))
    assert answer.text == "2 open, 1 done"
    assert tools.plan_text == "[ ] look\n[x] think\n[ ] act"
    strict = Toolset(sandbox, STRICT, Searcher())
    (answer,) = run(strict.run([call("todo", items="act")]))
    assert answer.details["error"] == "bad value"
    assert not sandbox.started


def test_bash_only(tree: Path) -> None:
    tools = Toolset(BareSandbox(tree), ToolSettings(tools=BASH_ONLY))
    assert [spec.name for spec in tools.specs] == ["bash"]
    if shutil.which("bash"):
        (answer,) = run(tools.run([call("bash", command="[[ a == a ]] && echo yes")]))
        assert answer.text == "[exit code 0]\nyes"
    with pytest.raises(UserError, match="needs an index"):
        Toolset(BareSandbox(tree), ToolSettings())


@given(st.text(alphabet="ab\n", max_size=400), st.integers(1, 100))
def test_cutting_keeps_head_and_tail_and_counts_the_rest(text: str, most: int) -> None:
    shown, left_out = cut(text, most)
    if len(text) <= most:
        assert (shown, left_out) == (text, 0)
        return
    head, notice, tail = shown.partition("… ")
    assert notice
    counted, _, tail = tail.partition(" left out …\n")
    assert len(tail) <= most // 2
    assert text.endswith(tail)
    kept = len(text) - left_out - len(tail)
    assert head.removesuffix("\n") == text[:kept].removesuffix("\n")
    assert kept <= most // 2
    middle = text[kept : len(text) - len(tail)]
    assert counted == f"{len(middle.splitlines())} lines ({len(middle)} characters)"
