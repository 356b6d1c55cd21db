"""Arenas besides code: questions and one's own, trained on, measured, and refused in one line where they cannot work."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.agent.calls import Call
from etude.agent.endpoint import message_format
from etude.agent.harness import HarnessSettings
from etude.agent.policies import ScriptedPolicy
from etude.agent.trace import read_traces
from etude.bench.trials import read_results
from etude.errors import UserError
from etude.inference.client import ServerFailed
from etude.lineage.record import load_record
from etude.questions.settings import QuestionSettings
from etude.rl.arenas import Choice, QuestionArena
from etude.rl.environment import Episode, InfrastructureError
from tests import tiny
from tests.conftest import Etude
from tests.questions.test_question import CITY, HEADER, WHICH, write

pytestmark = pytest.mark.usefixtures("one_thread")
TALK = message_format()
PAGE = Path(__file__).parents[2] / "docs/arenas.md"
GAME = """
from etude.agent.harness import Harness
from etude.agent.trace import Trace
from etude.questions.play import NO_TOOLS
from etude.rl.environment import Episode, Item
class Game:
    def __init__(self, tasks, harness):
        self.harness, self.items = harness, [Item(f"{tasks}-{n}") for n in range(8)]
    async def run_episode(self, item, policy, talk, *, name, seed, journal):
        trace = Trace(name, item)
        await Harness(policy, talk, NO_TOOLS, self.harness, trace, seed=seed).run("", item)
        even = sum(token % 2 == 0 for node in trace.nodes if node.sampled for token in node.tokens)
        trace.rewards = {"outcome": even / 16}
        return Episode(trace, "pass" if even > 8 else "fail", {"even": float(even)})
"""
RECIPE = """
name = "plays"
base = "{base}"
stages = ["rl"]
[rl]
arena = "{arena}"
tasks = "{tasks}"
steps = 2
groups = 1
group_size = 3
epochs = 20
processes = false
device = "cpu"
optimiser = {{ lr = 1e-3 }}
harness = {{ turns = 1, turn_tokens = 16, tokens = 16, summary = {{ kind = "none" }} }}
"""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory; modules that a test imports from it are forgotten."""
    before = {*sys.modules}
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in {*sys.modules} - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def play(arena: QuestionArena, item: str, *lines: str, journal: str = "j") -> Episode:
    policy = ScriptedPolicy(lines, TALK)
    return asyncio.run(arena.run_episode(item, policy, TALK, name=item, seed=1, journal=Path(journal)))


def opened(*rows: object, corpus: str = "", judge: str = "", **harness: object) -> QuestionArena:
    path = write(Path("set.jsonl"), *rows)
    settings = QuestionSettings(corpus=corpus, judge=judge)
    made = Choice("questions", str(path), HarnessSettings.model_validate(harness), questions=settings).open()
    assert isinstance(made, QuestionArena)
    return made


def test_an_episode_is_graded_and_watched(desk: Path) -> None:
    arena = opened(CITY, WHICH)
    right, wrong = play(arena, "a", "On the Seine.\nAnswer: Paris"), play(arena, "b", "Answer: A or B", journal="k")
    assert (right.outcome, right.trace.rewards["outcome"], right.trace.rewards["conduct"]) == ("pass", 1.0, 0.0)
    assert (wrong.outcome, wrong.behaviour["hedged"], wrong.trace.made_by["score"]["reason"]) == (
        "fail",
        1.0,
        "not one of the choices",
    )
    thought = play(arena, "a", "<think>Answer: Paris</think>I know.", journal="l")
    assert (thought.outcome, thought.behaviour["unmarked"]) == ("fail", 1.0)
    assert [item.topic for item in arena.items] == ["", "metals"]


def test_a_killed_episode_goes_on_from_its_journal(desk: Path) -> None:
    write(desk / "corpus.jsonl", {"id": "france", "text": "Paris is the capital of France."})
    arena = opened(CITY, corpus="corpus.jsonl")
    search = TALK.write(Call("search", {"query": "France"}))
    whole = play(arena, "a", search, "Answer: Paris")
    journal = Path("j").read_bytes().splitlines(keepends=True)
    Path("j").write_bytes(b"".join(journal[:3]))  # the owner, the first turn, its answer
    again = play(arena, "a", "Answer: Paris")
    assert again.trace.counts["replayed"] == 2
    assert [node.tokens for node in again.trace.nodes] == [node.tokens for node in whole.trace.nodes]
    Path("corpus.jsonl").write_text('{"id": "france", "text": "France has another capital now."}\n')
    other = play(opened(CITY, corpus="corpus.jsonl"), "a", search, "Answer: Paris")
    assert other.trace.counts["restarted"] == 1


def test_a_rubric_is_judged_and_its_cost_counted(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    why = {
        "id": "w",
        "question": "Why?",
        "kind": "rubric",
        "rubric": "Says because.",
        "labels": [{"answer": "x", "passed": False}],
    }
    arena = opened(why, judge="anybody")
    policy = ScriptedPolicy(["Verdict: fail", "Verdict: pass", "No idea."], TALK)

    class Source:
        name = "scripted judge"

        async def open(self) -> object:
            return policy, TALK

    async def find(*_: object) -> Source:
        return Source()

    monkeypatch.setattr("etude.rl.arenas.find", find)
    said: list[str] = []

    async def session() -> list[Episode]:
        await arena.ready(said.append)
        episodes = []
        for number in range(2):
            play = ScriptedPolicy(["Answer: because\nit is"], TALK)
            episodes.append(
                await arena.run_episode("w", play, TALK, name=str(number), seed=number, journal=Path(f"j{number}"))
            )
        await arena.close(said.append)
        return episodes

    passed, malformed = asyncio.run(session())
    assert (passed.outcome, malformed.outcome, malformed.behaviour["judge_malformed"]) == ("pass", "fail", 1.0)
    assert malformed.trace.made_by["score"]["reason"] == "no verdict of the judge"
    assert passed.trace.counts["judge_written"] == len("Verdict: pass") + 1
    assert said[0].startswith("judge scripted judge: agreement with labels 100%, 1 of 1;")
    assert said[1].startswith("judge scripted judge: 3 verdicts, 1 of them malformed; ")


def test_a_judge_that_is_gone_excludes_episodes_and_ends_a_run_that_begins(
    desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = {
        "id": "w",
        "question": "Why?",
        "kind": "rubric",
        "rubric": "Any.",
        "labels": [{"answer": "x", "passed": False}],
    }
    arena = opened(why, judge="anybody")

    class Gone(ScriptedPolicy):
        async def generate(self, *_: object, **__: object) -> Any:
            raise ServerFailed("http://judge does not answer")

    class Source:
        name = "gone"

        async def open(self) -> object:
            return Gone([], TALK), TALK

    async def find(*_: object) -> Source:
        return Source()

    monkeypatch.setattr("etude.rl.arenas.find", find)
    with pytest.raises(InfrastructureError, match="JudgeFailed: judge gone: http://judge does not answer"):
        play(arena, "w", "Answer: because")
    with pytest.raises(UserError, match="judge gone: http://judge does not answer"):
        asyncio.run(opened(why, judge="anybody").ready(lambda _: None))


def test_the_example_of_the_page_runs(etude: Etude, desk: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.splitlines()) <= 32
    (desk / "my_arena.py").write_text(code)
    words = re.search(r"etude (bench oracle noop --arena python:\S+ .*)", PAGE.read_text(encoding="utf-8"))
    assert words
    done = etude(*words[1].split(), "--out", "out", "--cache", "cache")
    assert done.code == 0, done.err
    found = read_results(desk / "out")
    assert {trial.outcome for trial in found.trials if trial.model == "oracle"} == {"pass"}
    assert {trial.outcome for trial in found.trials if trial.model == "noop"} == {"fail"}
    assert found.header.integrity == {"arena": "python:my_arena.Sums"}
    assert "Code quality" not in (desk / "out" / "report.md").read_text()


def test_an_arena_of_ones_own_is_trained_in(etude: Etude, desk: Path) -> None:
    (desk / "game.py").write_text(GAME)
    base = tiny.save_model(desk / "base")
    Path("r.toml").write_text(RECIPE.format(base=base, arena="python:game.Game", tasks="even"))
    done = etude("run", "r.toml", "--out", "run", "--cache", "cache")
    assert done.code == 0, done.err
    record = load_record(desk / "run" / "rl")
    assert record.summary["steps"] == 2
    (desk / "game.py").write_text(GAME + "# changed\n")  # other code may reward otherwise: it is trained again
    for name in [name for name in sys.modules if name == "game"]:
        del sys.modules[name]
    assert "rl: would run" in etude("run", "r.toml", "--out", "run", "--cache", "cache", "--dry-run").out


def test_questions_are_benchmarked(etude: Etude, desk: Path) -> None:
    path = write(desk / "set.jsonl", HEADER, {**CITY, "source": "maps"}, WHICH)
    base = tiny.save_model(desk / "base")
    recipe = 'name = "q"\nbase = "{}"\nstages = ["bench"]\n[bench]\narena = "questions"\ntasks = "{}"\nk = 1\nagainst = ["oracle", "noop"]\n'
    Path("r.toml").write_text(recipe.format(base, path) + 'device = "cpu"\nharness = { turns = 1, turn_tokens = 4 }\n')
    done = etude("run", "r.toml", "--out", "run", "--cache", "cache")
    assert done.code == 0, done.err
    summary = load_record(desk / "run" / "bench").summary
    assert (summary["solved/oracle"], summary["solved/noop"], summary["tasks"]) == (1.0, 0.0, 2)
    trials = {(trial.model, trial.task): trial for trial in read_results(desk / "run" / "bench").trials}
    assert (trials["oracle", "a"].package, trials["oracle", "b"].category) == ("maps", "metals")
    assert trials["base", "a"].interaction["unmarked"] == 1.0
    traces, _ = read_traces(desk / "run" / "bench" / "traces.jsonl")
    assert all(node.logprobs for trace in traces if trace.id.startswith("base") for node in trace.nodes if node.sampled)
    report = (desk / "run" / "bench" / "report.md").read_text()
    assert "ends without a marked answer" in report
    assert "share of the commonest answer" in report


REFUSED = [
    ('arena = "question"', "unknown arena 'question'; did you mean 'questions'?"), ('arena = "python:nothing"', "unknown arena 'python:nothing'"),
    ('arena = "python:no_such_module.Class"', "there is no module 'no_such_module': neither installed nor a file"),
    ('arena = "python:game.Other"', "game has no class 'Other'"), ('arena = "python:broken.Game"', "broken cannot be imported: ZeroDivisionError"),
    ('arena = "python:odd.Bare"', "Bare(tasks, harness) fails: TypeError"), ('arena = "python:odd.NoItems"', "NoItems has no `items`"),
    ('arena = "python:odd.Words"', "`items` must be a list of etude.rl.environment.Item"), ('arena = "python:odd.Plain"', "must be an `async def`"),
    ('arena = "questions"\nstyle = "told"', "`style` has no effect with the arena 'questions'"),
    ('arena = "python:game.Game"\nonly = "a"', "rl.only has no effect with the arena"),
    ('arena = "questions"', "rl.tasks: 'x.jsonl' is not a file"), ('arena = "questions"\ntasks = "bench.jsonl"', "is a benchmark"),
    ('arena = "questions"\ntasks = "empty.jsonl"', "empty.jsonl has no question"), ('arena = "questions"\ntasks = "bad.jsonl"', "bad.jsonl:2: unknown key 'anwser'"),
    ('arena = "questions"\ntasks = "rubric.jsonl"', "1 questions have a rubric, and nobody judges"),
    ('arena = "questions"\ntasks = "rubric.jsonl"\nquestions = { judge = "http://127.0.0.1:9" }', "http://127.0.0.1:9"),
    ('arena = "questions"\ntasks = "rubric.jsonl"\nquestions = { judge = "sproot" }', "sproot"),
    ('questions = { judge = "sprout" }', "`questions` has no effect with the arena 'code'"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "said"), REFUSED)
def test_what_cannot_work_is_refused_in_one_line(etude: Etude, desk: Path, lines: str, said: str) -> None:
    (desk / "game.py").write_text(GAME)
    (desk / "broken.py").write_text("1 / 0\n")
    (desk / "odd.py").write_text(
        "from etude.rl.environment import Item\nclass Bare: ...\nclass NoItems:\n    def __init__(self, tasks, harness): ...\n"
        "class Words(NoItems):\n    items = ['a']\n    async def run_episode(self): ...\n"
        "class Plain(NoItems):\n    items = [Item('a')]\n    def run_episode(self): ...\n"
    )
    write(desk / "bench.jsonl", HEADER, CITY)
    write(desk / "empty.jsonl", {"set": "empty"})
    write(desk / "bad.jsonl", {"set": "bad"}, {**CITY, "anwser": 1})
    write(desk / "rubric.jsonl", {"id": "r", "question": "Why?", "kind": "rubric", "rubric": "Any."})
    base = tiny.save_model(desk / "base")
    tasks = "" if "tasks =" in lines else 'tasks = "x.jsonl"\n'
    Path("r.toml").write_text(f'name = "r"\nbase = "{base}"\nstages = ["rl"]\n[rl]\n{tasks}{lines}\n')
    done = etude("run", "r.toml", "--out", "run", "--cache", "cache", "--dry-run")
    assert done.code == 2
    assert said in done.err
    assert done.err.count("\n") == 1, done.err


@pytest.mark.parametrize(("ending", "said"), [
    ("return 3", "returned int, not an etude.rl.environment.Episode"), ("return Episode(trace, 'won')", "has the outcome 'won'"),
    ("return Episode(trace, 'pass')", "`outcome` is needed"), ("trace.rewards = {'outcome': 1, 'fun': 1}; return Episode(trace, 'pass')", "has the rewards"),
    ("trace.rewards = {'outcome': float('nan')}; return Episode(trace, 'pass')", "no finite number"),
    ("trace.nodes.clear(); trace.rewards = {'outcome': 1.0}; return Episode(trace, 'pass')", "without a sampled node"),
    ("raise RuntimeError('the simulator is gone')", "RuntimeError: the simulator is gone"),
])  # fmt: skip
def test_what_an_arena_returns_is_checked(etude: Etude, desk: Path, ending: str, said: str) -> None:
    head, _ = GAME.split("        even = ")
    (desk / "mine.py").write_text(f"{head}        {ending}\n")
    base = tiny.save_model(desk / "base")
    Path("r.toml").write_text(RECIPE.format(base=base, arena="python:mine.Game", tasks="t"))
    done = etude("run", "r.toml", "--out", "run", "--cache", "cache")
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err


def test_a_set_is_described_in_the_record(desk: Path) -> None:
    arena = opened(HEADER, CITY, WHICH)
    assert arena.statistics == json.loads(json.dumps(arena.statistics))
    assert arena.about["arena"] == "questions"
