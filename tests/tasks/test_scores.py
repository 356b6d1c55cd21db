"""Scores that need no tests: a scorer that counts stands in for running them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from etude.sandbox.box import Entry
from etude.tasks.score import Score, Scores, change_digest, one_a_core, score
from etude.tasks.task import Codebase, Task
from etude.work import cores
from tests.tasks import small

CODE = "calc/__init__.py"
CALC = Codebase("calc", "1", "0" * 64, Path("/nowhere"), ("calc",), ("test_calc.py",), Path("/nowhere"))


def written(text: str, path: str = CODE, mode: int = 0o644) -> Entry:
    return Entry(path, "file", len(text), mode, text.encode())


class Counting:
    """Says what it is told to say, in turn, and counts; `during` is awaited before each."""

    def __init__(self, *answers: Score | Exception, during: Callable[[], Awaitable[object]] | None = None) -> None:
        self.answers, self.during = list(answers), during
        self.count = self.at_once = self.most_at_once = 0

    async def __call__(self, _task: Task, _codebase: Codebase, _entries: Sequence[Entry]) -> Score:
        self.count += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await (self.during() if self.during else asyncio.sleep(0))
        finally:
            self.at_once -= 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def asked(scores: Scores, *changes: Sequence[Entry], task: Task | None = None) -> list[Score]:
    async def work() -> list[Score]:
        return [await scores.of(task or small.task(), CALC, change) for change in changes]

    return asyncio.run(work())


@pytest.mark.parametrize("outcome", ["pass", "fail"])
def test_the_same_change_is_scored_once_whatever_else_was_left(outcome: str) -> None:
    counting = Counting(Score(outcome, 0.5, 1.0, "so it is", seconds=2.0))  # type: ignore[arg-type]
    one, two = written("x = 1\n"), written("y = 2\n", "calc/more.py")
    notes = written("what I did", "notes.txt")
    first, again, other = asked(Scores(counting), [one, two], [notes, two, one], [one])
    assert (first.how, again.how, other.how, counting.count) == ("run", "known", "run", 2)
    assert dataclasses.replace(first, how="known", ignored=("notes.txt",)) == again


def test_what_may_end_otherwise_is_another_change() -> None:
    task, x = small.task(), written("x")
    other = dataclasses.replace(task, id="calc-2")
    digests = [change_digest(task, [x]), change_digest(other, [x]), change_digest(task, [written("y")]), change_digest(task, []),
               change_digest(task, [written("x", mode=0o755)]), change_digest(task, [Entry(CODE, "gone")]),
               change_digest(task, [written("")]), change_digest(task, [written("x", "calc/b.py")])]  # fmt: skip
    assert len(set(digests)) == len(digests)


def test_code_left_as_it_was_fails_as_if_it_were_tested(tmp_path: Path) -> None:
    counting = Counting(Score("pass"))
    (idle,) = asked(Scores(counting), [written("all right", "notes.txt")])
    assert (idle.how, idle.ignored, counting.count) == ("idle", ("notes.txt",), 0)
    run = small.run(score(small.task(), small.codebase(tmp_path), []))
    assert (idle.outcome, idle.fail_to_pass, idle.pass_to_pass) == (run.outcome, run.fail_to_pass, run.pass_to_pass)


def test_who_comes_meanwhile_waits_and_no_invalid_score_is_taken_over() -> None:
    counting = Counting(Score("invalid", reason="no sandbox"), Score("fail"), Score("pass"))
    scores = Scores(counting)

    async def work() -> list[Score]:
        return await asyncio.gather(*(scores.of(small.task(), CALC, [written("x")]) for _ in range(5)))

    found = [(each.outcome, each.how) for each in asyncio.run(work())]
    assert found == [("invalid", "run"), ("fail", "run"), *[("fail", "known")] * 3]
    assert counting.most_at_once == 1


def test_who_waits_takes_the_place_of_one_that_was_cancelled_or_failed() -> None:
    async def work() -> tuple[Score, int]:
        begun, ever = asyncio.Event(), asyncio.Event()

        async def during() -> None:
            if not begun.is_set():
                begun.set()
                await ever.wait()

        counting = Counting(OSError("disk"), Score("pass"), during=during)
        scores = Scores(counting)
        tasks = [asyncio.create_task(scores.of(small.task(), CALC, [written("x")])) for _ in range(3)]
        await begun.wait()
        tasks[0].cancel()
        _, failed, last = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(failed, OSError)
        assert isinstance(last, Score)
        return last, counting.count

    found, count = asyncio.run(work())
    assert (found.outcome, found.how, count) == ("pass", "run", 3)


def test_what_was_asked_for_long_ago_is_forgotten() -> None:
    counting = Counting(Score("fail"))
    a, b, c = ([written(text)] for text in "abc")
    found = asked(Scores(counting, most=2), a, b, a, c, a, b)
    assert [each.how for each in found] == ["run", "run", "known", "run", "known", "run"]


def test_tests_run_on_free_cores_and_waiting_for_a_score_needs_none() -> None:
    """As many different changes as there are cores are scored at once, though more who left the same came first."""

    async def work() -> Counting:
        full = asyncio.Event()

        async def during() -> None:
            if counting.at_once == cores():
                full.set()
            await full.wait()  # for ever, if those who wait for a score held cores

        counting = Counting(Score("fail"), during=during)
        scores = Scores(one_a_core(counting))
        texts = ["same"] * (3 * cores()) + [f"{n}" for n in range(2 * cores())]
        async with asyncio.timeout(60):
            await asyncio.gather(*(scores.of(small.task(), CALC, [written(text)]) for text in texts))
        return counting

    counting = asyncio.run(work())
    assert (counting.count, counting.most_at_once) == (1 + 2 * cores(), cores())
