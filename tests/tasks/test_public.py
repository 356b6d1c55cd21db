"""Folders of public benchmarks: read, graded, and refused by name where something would be left out."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from etude.errors import UserError
from etude.tasks.public import READERS, is_public, outcomes, passing, read_public

LOGS = {
    "parse_log_pytest": "PASSED a.py::one\nFAILED a.py::two[x - y] - assert 1\nSKIPPED [2] a.py:3: why\nXFAIL a.py::three\nERROR a.py::four\n",
    "parse_log_requests": "PASSED a.py::one[/home/me/x]\nPASSED a.py::two[//x/y]\nFAILED a.py::three[a*/b] - no\n",
    "parse_log_sphinx": "PASSED a.py::one two\nFAILED a.py::three - why\na.py::old PASSED\n\x1b[32mPASSED\x1b[0m a.py::five\n",
    "parse_log_django": "test_a (x.T) ... ok\ntest_b (x.T) ... FAIL\ntest_c (x.T) ... skipped 'why'\ntest_d (x.T) ... noise\nok\n"
    "FAIL: test_b (x.T)\ntest_e (x.T) ... ERROR\ntest_f (x.T) ... Internal Server Error: /x/\nok\n",
    "parse_log_sympy": "test_a ok\ntest_b F\ntest_c E\n____ sympy/x.py:test_d ____\n",
    "parse_log_jq": "PASS: tests/jqtest\n FAIL: tests/onig\n",
    "parse_log_redis": "[ok]: works (12 ms)\n[err]: breaks in tests/unit/x.tcl\n[skip]: later\n[ignore]: never\n",
    "parse_log_micropython_test": "pass  basics/a.py\nFAIL  basics/b.py\nskip  basics/c.py\n",
    "parse_log_googletest": "1: [       OK ] a.b (0 ms)\n1: [  FAILED  ] a.c (1 ms)\n",
}


def marked(log: str) -> str:
    return f"+ : '>>>>> Start Test Output'\n{log}+ : '>>>>> End Test Output'\n"


def test_logs_are_read_as_they_are_meant() -> None:
    assert outcomes(marked(LOGS["parse_log_pytest"]), "parse_log_pytest") == {
        "a.py::one": "PASSED", "a.py::two[x": "FAILED", "a.py::three": "XFAIL", "a.py::four": "ERROR",
    }  # fmt: skip
    assert outcomes(marked(LOGS["parse_log_redis"]), "parse_log_redis") == {
        "works": "PASSED", "breaks": "FAILED", "later": "SKIPPED", "never": "SKIPPED",
    }  # fmt: skip
    assert outcomes(LOGS["parse_log_jq"], "parse_log_jq") == {}  # it never came so far


def test_what_passes() -> None:
    tests = {
        "a": "PASSED",
        "b": "SKIPPED",
        "c": "XFAIL",
        "d": "FAILED",
        "p[x y]": "PASSED",
        "q[1]": "PASSED",
        "q[1 2]": "FAILED",
    }
    assert passing(tests, tuple("abcde")) == ["a", "c"]
    assert passing(tests, tuple("abcde"), kept=True) == ["a", "b", "c"]
    assert passing(tests, ("p[x", "q[1", "p")) == ["p[x"]  # cut short in the list; two that disagree decide nothing


def test_every_reader_says_what_the_package_says() -> None:
    """SWEBENCH_PACKAGE names a folder with the unpacked package swebench; only its log parsers are asked."""
    package = os.environ.get("SWEBENCH_PACKAGE", "")
    if not package:
        pytest.skip("SWEBENCH_PACKAGE names no folder with the package swebench")
    sys.path.insert(0, package)
    sys.modules.setdefault("unidiff", ModuleType("unidiff")).PatchSet = None  # type: ignore[attr-defined]
    for name in ("swebench", "swebench.harness"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [f"{package}/{name.replace('.', '/')}"]
    from swebench.harness.log_parsers import PARSER_REGISTRY  # type: ignore[import-not-found]

    for reader in READERS:
        for log in LOGS.values():
            assert READERS[reader](log) == PARSER_REGISTRY[reader](log, SimpleNamespace()), reader


def swebench(folder: Path, **about: str) -> Path:
    facts = {"instance_id": "org__repo-1", "repo": "org/repo", "base_commit": "a" * 40, "log_parser": "parse_log_pytest",
             "eval_type": "pass_and_fail", "image": "swebench/x:latest", "version": "1", **about}  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "task.yaml").write_text(json.dumps(facts))
    (folder / "tests.json").write_text(json.dumps({"FAIL_TO_PASS": ["t.py::new"], "PASS_TO_PASS": ["t.py::old"]}))
    (folder / "problem_statement.md").write_text("It breaks.\n")
    return folder


def harbor(folder: Path, settings: str = "") -> Path:
    (folder / "environment").mkdir(parents=True)
    (folder / "environment/Dockerfile").write_text("FROM x")
    (folder / "instruction.md").write_text("Do it.\n")
    (folder / "task.toml").write_text('[task]\nname = "set/one"\n' + settings)
    return folder


def test_folders_become_tasks(tmp_path: Path) -> None:
    swebench(tmp_path / "org__repo-1")
    harbor(tmp_path / "one", "[environment]\nmemory_mb = 512\n")
    (tmp_path / "no task").mkdir()
    second, first = read_public(tmp_path)
    assert (first.id, first.package, first.request, first.image) == (
        "org__repo-1",
        "org/repo",
        "It breaks.",
        "docker.io/swebench/x:latest",
    )
    assert first.task().fail_to_pass == ("t.py::new",)
    assert (second.id, second.package, second.request, second.image) == ("one", "set", "Do it.", "")
    assert [each.id for each in read_public(tmp_path, "org__")] == ["org__repo-1"]
    with pytest.raises(UserError, match="no task of a public benchmark whose name begins with 'nobody'"):
        read_public(tmp_path, "nobody")
    (tmp_path / "one/tests").mkdir()
    (tmp_path / "one/tests/etude.json").write_text("{}")
    assert not is_public(tmp_path / "one")  # ours: read as the task it was


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("[environment]\ngpus = 1\n", "environment.gpus"),
        ('[agent]\nuser = "dev"\n', "agent.user"),
        ("[[steps]]\nname = 'x'\n", "steps"),
    ],
)
def test_what_is_not_done_is_refused(tmp_path: Path, settings: str, named: str) -> None:
    with pytest.raises(UserError, match=f"{named} in its task.toml: not done here"):
        read_public(harbor(tmp_path / "one", settings))


def test_logs_nobody_reads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="its log is for parse_log_cargo with pass_and_fail, which is not read here"):
        read_public(swebench(tmp_path / "x", log_parser="parse_log_cargo"))
