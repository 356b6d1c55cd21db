"""Episodes on a small codebase, with every fault that must not be taken for the policy's, and every one that must."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from etude.agent.calls import Call
from etude.agent.endpoint import message_format
from etude.agent.policies import ScriptedPolicy
from etude.agent.trace import Node, from_json, to_json
from etude.errors import UserError
from etude.inference.policy import Policy
from etude.rewards.reward import PARTS
from etude.rl.environment import SHORTEST_ROLLOUT, CodingEnvironment, Episode, InfrastructureError
from etude.rl.settings import RlSettings
from etude.sandbox import local
from etude.sandbox.box import Entry
from etude.tasks.demos import solution_calls
from etude.tasks.manifest import TaskSet
from etude.tasks.score import Score, longest_scoring, score
from etude.tasks.task import Codebase, Task
from tests.bench import calc_set
from tests.tasks import small

TALK = message_format()
GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
Line = str | Callable[[str], str]


@pytest.fixture(scope="module")
def calc(tmp_path_factory: pytest.TempPathFactory) -> tuple[TaskSet, Path]:
    """The set of two tasks; its codebase comes with a history that holds the solution."""
    folder = tmp_path_factory.mktemp("calc")
    (folder / "calc").mkdir()
    (folder / "calc" / "solution").write_text(small.SOLVED)
    for words in ("init -q", "add solution", "commit -q -m solved", "rm -q solution"):
        subprocess.run([*GIT, *words.split()], cwd=folder / "calc", check=True)
    manifest, cache = calc_set.write(folder)
    return calc_set.load(manifest, cache), cache


def environment(calc: tuple[TaskSet, Path], **settings: object) -> CodingEnvironment:
    return CodingEnvironment(calc[0], RlSettings.model_validate({"tasks": "calc.jsonl", **settings}), calc[1])


def shell(command: str) -> str:
    return TALK.write(Call("shell", {"command": command}))


def scripted(*lines: Line) -> ScriptedPolicy:
    return ScriptedPolicy(lines, TALK)


def play(environment: CodingEnvironment, policy: Policy, journal: Path, item: str = "calc-1") -> Episode:
    return small.run(environment.run_episode(item, policy, TALK, name="000000-000", seed=5, journal=journal))


def answers(nodes: list[Node]) -> list[str]:
    return [answer["text"] for node in nodes for answer in node.details.get("answers", ())]


def keepers() -> list[int]:
    """Return the processes that keep this process's sandboxes."""
    launchers = [process.pid for process, _ in local._launchers.values() if process.poll() is None]
    return [int(word) for pid in launchers for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def left_behind() -> list[str]:
    return [path.name for path in Path("/dev/shm").glob("etude-*") if f"-{os.getpid()}-" in path.name]


def test_a_solution_passes_and_nothing_done_fails(calc: tuple[TaskSet, Path], tmp_path: Path) -> None:
    ground = environment(calc)
    assert [(item.id, item.family) for item in ground.items] == [
        ("calc-1", "calc mutation"),
        ("calc-2", "calc deletion"),
    ]
    solving = scripted(TALK.write(*solution_calls(calc[0].tasks[0])), "The sum is mended.")
    solved, idle = play(ground, solving, tmp_path / "a"), play(ground, scripted("Done."), tmp_path / "b")
    assert (solved.outcome, idle.outcome) == ("pass", "fail")
    for played in (solved, idle):
        assert set(played.trace.rewards) == set(PARTS)
        assert played.trace.id == "000000-000"
        assert from_json(to_json(played.trace), "here").nodes == played.trace.nodes
    assert solved.trace.rewards["outcome"] == 1.0
    assert idle.trace.rewards["outcome"] == 0.0
    assert (solved.behaviour["files_changed"], idle.behaviour["files_changed"]) == (1.0, 0.0)
    assert "+        result += value" in solved.trace.diff
    assert (keepers(), left_behind()) == ([], [])


def test_the_same_change_is_scored_once_and_its_trace_says_so(calc: tuple[TaskSet, Path], tmp_path: Path) -> None:
    count = 0

    async def counting(task: Task, codebase: Codebase, entries: Sequence[Entry]) -> Score:
        nonlocal count
        count += 1
        return await score(task, codebase, entries)

    ground = CodingEnvironment(calc[0], RlSettings(tasks="calc.jsonl"), calc[1], counting)
    solving = TALK.write(*solution_calls(calc[0].tasks[0]))
    played = [play(ground, scripted(solving, word), tmp_path / word) for word in ("Mended.", "Done.")]
    assert count == 1
    assert [each.trace.made_by["score"]["known"] for each in played] == [False, True]
    assert played[0].outcome == played[1].outcome == "pass"
    assert [each.trace.rewards["outcome"] for each in played] == [1.0, 1.0]
    assert play(ground, scripted("Done."), tmp_path / "idle").outcome == "fail"
    assert count == 1


def test_scoring_that_hangs_is_no_failure_of_the_policy_and_is_not_remembered(
    calc: tuple[TaskSet, Path], tmp_path: Path
) -> None:
    async def hanging(task: Task, *_: object) -> Score:
        async with asyncio.timeout(0):  # as if its time were over
            await asyncio.Event().wait()
        raise AssertionError

    ground = CodingEnvironment(calc[0], RlSettings(tasks="calc.jsonl"), calc[1], hanging)
    solving = TALK.write(*solution_calls(calc[0].tasks[0]))
    for name in ("a", "b"):
        with pytest.raises(InfrastructureError, match=r"^hung: scoring took more than 211 s"):
            play(ground, scripted(solving, "Done."), tmp_path / name)


def test_history_is_not_there_and_nothing_gets_out(calc: tuple[TaskSet, Path], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        where = server.getsockname()
        reach = f"python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", {where[1]}), 3)'"
        commands = ["ls -a", "git log", "find / -name .git -not -path '/proc/*' 2>/dev/null", reach]
        lines = [shell(each) for each in commands]
        played = play(environment(calc), scripted(*lines, "Done."), tmp_path / "journal")
        with pytest.raises(BlockingIOError):
            server.accept()
    files, history, repositories, egress = answers(played.trace.nodes)
    assert files.split()[3:] == [".", "..", "LICENSE", "calc", "test_calc.py"]
    assert "not a git repository" in history or "not found" in history
    assert repositories.endswith("no output")
    assert "OSError" in egress or "refused" in egress or "unreachable" in egress


def killed_keeper(_: str) -> str:
    (keeper,) = keepers()
    os.kill(keeper, signal.SIGKILL)
    return shell("ls")


def test_a_sandbox_that_dies_is_no_failure_of_the_policy(calc: tuple[TaskSet, Path], tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match=r"^sandbox: "):
        play(environment(calc), scripted(killed_keeper, "Done."), tmp_path / "journal")
    assert (keepers(), left_behind()) == ([], [])


def test_scoring_that_cannot_be_done_is_no_failure_of_the_policy(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    manifest, cache = calc_set.write(tmp_path_factory.mktemp("own"))
    own = calc_set.load(manifest, cache), cache
    tree = own[0].codebase(own[0].tasks[0]).tree

    def last_words(_: str) -> str:
        shutil.rmtree(tree)
        return "Done."

    with pytest.raises(InfrastructureError, match=r"^files: "):
        play(environment(own), scripted(last_words), tmp_path / "journal")
    assert (keepers(), left_behind()) == ([], [])


def test_a_sandbox_that_hangs_is_no_failure_of_the_policy(calc: tuple[TaskSet, Path], tmp_path: Path) -> None:
    """Its keeper stands still: no call is answered, no call times out, and it does not even end."""
    ground = environment(
        calc, seconds=longest_scoring(calc[0].tasks[0], calc[0].codebase(calc[0].tasks[0])) + SHORTEST_ROLLOUT
    )
    still: list[int] = []

    def stop(_: str) -> str:
        still.extend(keepers())
        os.kill(still[0], signal.SIGSTOP)
        return shell("ls")

    try:
        with pytest.raises(InfrastructureError, match=r"^hung: the rollout took more than 5 s"):
            play(ground, scripted(stop, "Done."), tmp_path / "journal")
    finally:
        for pid in still:
            os.kill(pid, signal.SIGCONT)
    assert left_behind() == []


def test_a_policy_that_wastes_its_time_is_scored(calc: tuple[TaskSet, Path], tmp_path: Path) -> None:
    ground = environment(calc, harness={"seconds": 2.0})
    slow = TALK.write(*[Call("shell", {"command": "sleep 500; echo woken", "timeout": 500})] * 3)
    played = play(ground, scripted(slow, "Done."), tmp_path / "journal")
    assert (played.outcome, played.trace.stop) == ("fail", "seconds")
    assert [text.partition("after")[0].strip("[ ") for text in answers(played.trace.nodes)] == [
        "timed out",
        "Not run: the time of this episode is over.",
        "Not run: the time of this episode is over.",
    ]


def test_a_sandbox_lives_longer_than_the_policy_and_its_scoring(calc: tuple[TaskSet, Path]) -> None:
    for seconds in (230.0, 900.0):
        ground = environment(calc, seconds=seconds, harness={"seconds": 600.0})
        for task in calc[0].tasks:
            clocks = ground.clocks(task)
            assert clocks.rollout + clocks.scoring == pytest.approx(seconds)
            assert clocks.policy == min(600.0, 0.9 * clocks.rollout)
    # 0.01 s a test: two runs of the failing tests, one of all six.
    assert environment(calc).clocks(calc[0].tasks[0]).scoring == pytest.approx(2 * (60 + 0.32) + 60 + 0.48 + 30)
    with pytest.raises(UserError, match="seconds = 200: scoring alone may take 211; set at least 216"):
        environment(calc, seconds=200.0)


def test_a_killed_episode_goes_on_where_it_was(calc: tuple[TaskSet, Path], tmp_path: Path) -> None:
    first = [
        TALK.write(*solution_calls(calc[0].tasks[0]), Call("todo", {"items": "[ ] test"})),
        shell("python -m pytest -q test_calc.py; date +%s%N > moment; ls"),
    ]

    def kill(_: str) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(environment(calc), scripted(*first, kill), tmp_path / "journal")
    rest = scripted("All tests pass.")
    resumed = play(environment(calc), rest, tmp_path / "journal")
    assert resumed.outcome == "pass"
    assert resumed.trace.counts["replayed"] == 4
    assert [TALK.text(node.tokens[:-1]) for node in resumed.trace.nodes if node.sampled] == [*first, "All tests pass."]
    assert rest.prompts == [resumed.trace.context(len(resumed.trace.nodes) - 2)]  # it was asked once: for the rest
    assert "+        result += value" in resumed.trace.diff  # what was done before the kill is done
    again = play(
        environment(calc), scripted(), tmp_path / "journal"
    )  # killed after its end, before it was written down
    assert [node.tokens for node in again.trace.nodes] == [node.tokens for node in resumed.trace.nodes]


def test_what_cannot_be_brought_back_begins_anew(calc: tuple[TaskSet, Path], tmp_path: Path) -> None:
    def kill(_: str) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(environment(calc), scripted(shell("date +%N"), kill), tmp_path / "journal")
    played = play(environment(calc), scripted("I give up."), tmp_path / "journal")
    assert (played.outcome, played.trace.counts["restarted"]) == ("fail", 1)
    assert [node.kind for node in played.trace.nodes] == ["opening", "turn"]
    assert "replayed" not in played.trace.counts


def test_cancelled_it_leaves_nothing(calc: tuple[TaskSet, Path], tmp_path: Path) -> None:
    asked = asyncio.Event()

    class Waiting(ScriptedPolicy):
        async def generate(self, *_: object, **__: object) -> None:  # type: ignore[override]
            asked.set()
            await asyncio.Event().wait()

    async def cancelled() -> None:
        policy = Waiting([], TALK)
        task = asyncio.create_task(
            environment(calc).run_episode("calc-1", policy, TALK, name="x", seed=0, journal=tmp_path / "journal")  # type: ignore[arg-type]
        )
        await asked.wait()
        assert len(keepers()) == 1
        assert left_behind()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    small.run(cancelled())
    assert (keepers(), left_behind()) == ([], [])


def test_a_policy_that_cannot_be_asked_ends_the_run(calc: tuple[TaskSet, Path], tmp_path: Path) -> None:
    def gone(_: str) -> str:
        raise UserError("the engine is gone")

    with pytest.raises(UserError, match="the engine is gone"):
        play(environment(calc), scripted(gone), tmp_path / "journal")
