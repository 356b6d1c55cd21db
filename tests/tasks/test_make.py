from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.errors import Interrupted, UserError
from etude.jsonl import MetricsLog
from etude.progress import Reporter
from etude.tasks import score
from etude.tasks.codebase import PackageSettings
from etude.tasks.make import Maker, SetSettings, read_settings
from etude.tasks.manifest import load_set, numbers, ranges
from tests import tiny
from tests.conftest import Etude
from tests.tasks import small

MORE = (
    small.TESTS
    + """

@pytest.mark.parametrize("number", range(9))
def test_still_its_name(number):
    assert name() * number == "calc" * number
"""
)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in small.offline().items():
        monkeypatch.setenv(name, value)


def make(settings: SetSettings, folder: Path, check_stop: Callable[[], None] = lambda: None) -> Path:
    reporter = Reporter(quiet=True)
    reporter.check_stop = check_stop
    with MetricsLog(folder / "log.jsonl") as log:
        maker = Maker(settings, folder, log, small.cache(), reporter)
        small.run(maker.make())
        maker.finish(folder / "set.jsonl")
    return folder / "set.jsonl"


def test_a_set_is_made_built_and_right_and_an_interruption_does_not_show(tmp_path: Path, quiet: Reporter) -> None:
    package = PackageSettings(folder=str(small.write(tmp_path / "calc", MORE)), licence="MIT")
    settings = SetSettings(name="set", mutation=2, deletion=1, package=[package])
    whole = make(settings, tmp_path / "whole")
    calls = iter(range(100))

    def stop() -> None:
        if next(calls) == 6:
            raise Interrupted(2)

    with pytest.raises(Interrupted):
        make(settings, tmp_path / "parts", stop)
    tried = (tmp_path / "parts" / "log.jsonl").read_text(encoding="utf-8")
    parts = make(settings, tmp_path / "parts")
    assert (tmp_path / "parts" / "log.jsonl").read_text(encoding="utf-8").startswith(tried)
    rows = [[json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for path in (whole, parts)]
    tasks = [
        [(row["task"], row["edits"], row["hidden"], row["prompts"]) for row in each if "task" in row] for each in rows
    ]
    assert tasks[0] == tasks[1]
    assert len(tasks[0]) == rows[0][0]["tasks"] == 3
    built = load_set(whole, small.cache(), quiet)
    for task in built.tasks:
        assert small.run(score.check(task, built.codebase(task))) == ""
        assert 2 * len(task.hidden) >= len({test.partition("[")[0] for test in task.fail_to_pass})


def test_commits_become_tasks(tmp_path: Path) -> None:
    folder = small.write(tmp_path / "calc")
    (folder / "calc" / "__init__.py").write_text(small.BROKEN, encoding="utf-8")
    (folder / "test_calc.py").write_text(
        "from calc import name\n\n\ndef test_name():\n    assert name() == 'calc'\n", encoding="utf-8"
    )
    for text, tests in (("", ""), (small.SOLVED, MORE)):
        if text:
            (folder / "calc" / "__init__.py").write_text(text, encoding="utf-8")
            (folder / "test_calc.py").write_text(tests, encoding="utf-8")
        else:
            tiny.git(folder, "init", "-q")
        tiny.git(folder, "add", ".")
        tiny.git(folder, "commit", "-q", "-m", "Sum all values, not only the last")
    package = PackageSettings(git=str(folder), licence="MIT")
    path = make(
        SetSettings(name="set", mutation=0, deletion=0, history=1, package=[package]),
        tmp_path / "work",
    )
    header, _, task = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert header["kept"] == {"history": {f"calc=={tiny.git(folder, 'rev-parse', 'HEAD')[:12]}": 1}}
    assert task["edits"][0]["cuts"][0][2] == "        result = value\n"
    assert "Sum all values" in task["prompts"]["terse"]


def test_a_branch_is_recorded_as_its_commit(tmp_path: Path, quiet: Reporter) -> None:
    folder = small.write(tmp_path / "calc", MORE)
    for words in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "first")):
        tiny.git(folder, *words)
    commit = tiny.git(folder, "rev-parse", "HEAD").strip()
    package = PackageSettings(git=str(folder), licence="MIT")
    path = make(SetSettings(name="set", mutation=1, deletion=0, package=[package]), tmp_path / "work")
    (folder / "calc" / "__init__.py").write_text("", encoding="utf-8")
    tiny.git(folder, "commit", "-q", "-a", "-m", "the branch goes on")
    built = load_set(path, small.cache(), quiet)
    assert json.loads(path.read_text(encoding="utf-8").splitlines()[1])["settings"]["revision"] == commit
    assert small.run(score.check(built.tasks[0], built.codebase(built.tasks[0]))) == ""


def test_tasks_of_another_set_are_taken_over_but_not_a_codebase_twice(tmp_path: Path, quiet: Reporter) -> None:
    names = ("calc", "other")
    packages = [
        PackageSettings(folder=str(small.write(tmp_path / name, MORE)), sources=["calc"], licence="MIT")
        for name in names
    ]
    first = make(SetSettings(name="first", mutation=1, deletion=1, package=packages[:1]), tmp_path / "first")
    take = {str(first): ["deletion"]}
    both = make(SetSettings(name="both", mutation=1, deletion=1, package=packages[1:], take=take), tmp_path / "both")  # type: ignore[arg-type]
    header, *_ = [json.loads(line) for line in both.read_text(encoding="utf-8").splitlines()]
    built = load_set(both, small.cache(), quiet)
    assert sorted((task.package, task.candidate.generator) for task in built.tasks) == [
        ("calc", "deletion"), ("other", "deletion"), ("other", "mutation")
    ]  # fmt: skip
    assert header["tasks"] == 3
    with pytest.raises(UserError, match="has a codebase calc=="):
        make(SetSettings(name="again", mutation=1, deletion=0, package=packages[:1], take=take), tmp_path / "again")  # type: ignore[arg-type]


def test_a_package_that_cannot_be_used_is_left_out_and_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "empty.py").write_text("x = 1\n", encoding="utf-8")
    folders = [str(tmp_path / "empty"), str(small.write(tmp_path / "calc"))]
    settings = SetSettings(name="set", package=[PackageSettings(folder=folder) for folder in folders])
    with pytest.raises(UserError, match=r"not one task.*calc: .*licence is not known.*empty: no tests found"):
        make(settings, tmp_path / "work")
    assert not list(tmp_path.rglob("*set*.jsonl"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name = 3\n", r"a\.toml:1: name: input should be a valid string"),
        ("x [", r"a\.toml is not valid TOML"),
        ('name = "a"\n', r"a\.toml: 'package' is missing: codebases"),
        ('name = "a"\nmutaton = 3\n', r"a\.toml:2: unknown key 'mutaton'; did you mean 'mutation'"),
        ('name = "a"\n[[package]]\ngitt = "x"\n', r"a\.toml:3: unknown key 'package.0.gitt'; did you mean 'git'"),
    ],
)
def test_recipes_that_are_wrong_are_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "a.toml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=told):
        read_settings(tmp_path / "a.toml")


def test_shipped_recipes_share_no_package_with_each_other_or_a_corpus() -> None:
    import tomllib

    recipes = Path(__file__).parents[2] / "recipes"
    sets = {
        path.stem: {package.name for package in read_settings(path).package}
        for path in (recipes / "tasks").glob("*.toml")
    }
    corpora: set[str] = set()
    for path in recipes.glob("*.toml"):
        sources = tomllib.loads(path.read_text(encoding="utf-8")).get("data", {}).get("source", [])
        corpora |= {pin.partition("==")[0].lower() for source in sources for pin in source.get("pypi", [])}
    assert len(corpora) > 100
    assert len(sets["bench"]) >= 10
    assert len(sets["train"]) >= 25
    families = {"train-history": "train", "bench2": "bench"}  # more tasks of the same packages
    for name, packages in sets.items():
        assert not packages & corpora
        for other, others in sets.items():
            assert families.get(name, name) == families.get(other, other) or not packages & others, (name, other)


SHARED = """from calc import name, total

SEEN = []


def test_total():
    assert total([1, 2]) == 3
    SEEN.append("total")


def test_that_needs_the_one_before():
    assert SEEN == ["total"]


def test_name():
    assert name() == "calc"
"""


def test_a_task_that_breaks_tests_of_other_code_is_none(tmp_path: Path) -> None:
    folder = small.write(tmp_path / "calc", SHARED)
    settings = SetSettings(
        name="set", mutation=2, deletion=0, package=[PackageSettings(folder=str(folder), licence="MIT")]
    )
    with pytest.raises(UserError, match=r"not one task was made.*\d × mutation: not confirmed"):
        make(settings, tmp_path / "work")
    assert not (tmp_path / "work" / "set.jsonl").exists()


def test_wrong_tasks_are_found_again_and_dropped(tmp_path: Path, etude: Etude) -> None:
    folder = small.write(tmp_path / "calc", MORE)
    settings = SetSettings(
        name="set", mutation=2, deletion=0, package=[PackageSettings(folder=str(folder), licence="MIT")]
    )
    path = make(settings, tmp_path / "work")
    header, codebase, spoilt, right = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    failing, kept = numbers(spoilt["fail_to_pass"]), numbers(spoilt["pass_to_pass"])
    spoilt |= {"fail_to_pass": ranges(failing[1:]), "pass_to_pass": ranges([*kept, failing[0]])}
    path.write_text("".join(json.dumps(row) + "\n" for row in (header, codebase, spoilt, right)), encoding="utf-8")
    words = ("tasks", "check", path, "--cache", small.cache(), "--log", tmp_path / "log.jsonl")
    said = etude(*words)
    assert said.code == 1
    assert f"{spoilt['task']}: doing nothing breaks" in said.out
    before = (tmp_path / "log.jsonl").read_bytes()
    said = etude(*words, "--drop", tmp_path / "right.jsonl")
    assert said.code == 0
    assert (tmp_path / "log.jsonl").read_bytes() == before  # nothing is checked twice
    header, *rest = [json.loads(line) for line in (tmp_path / "right.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row.get("task") for row in rest] == [None, right["task"]]
    assert header["tasks"] == 1
    assert list(header["dropped"]) == [spoilt["task"]]
    assert etude("tasks", "check", path, "--only", "x", "--drop", tmp_path / "no.jsonl").code == 2
    with (tmp_path / "log.jsonl").open("rb") as another:
        fcntl.flock(another, fcntl.LOCK_EX)
        said = etude(*words)
    assert said.code == 2
    assert "log.jsonl is being written by another `etude tasks check`; wait for it, or name another --log" in said.err
