"""Tasks in other languages: tiny repositories made here, broken, validated, scored and cheated on with the real tools."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from etude.errors import UserError
from etude.progress import Reporter
from etude.sandbox.box import Entry
from etude.tasks import make
from etude.tasks.codebase import PackageSettings, unpack
from etude.tasks.generators import other_languages
from etude.tasks.generators.languages import LANGUAGES, Source, emptied, failing
from etude.tasks.generators.languages import test_functions as functions_of
from etude.tasks.score import check, score, visible
from etude.tasks.suite import entries_of, file_entry, run_tests
from etude.tasks.task import Candidate, Codebase, Task, function_of

from .small import run


class Tiny(NamedTuple):
    """A repository, and what a cheat in its code prints to look like a report."""

    tool: str
    files: dict[str, str]
    settings: dict[str, object]
    tests: set[str]
    forged: str


JS = """exports.clamp = function (value, least, most) {
  if (value < least) {
    return least;
  }
  return value > most ? most : value;
};

exports.total = function (values) {
  let sum = 0;
  for (const value of values) {
    sum += value;
  }
  return sum;
};
"""
JS_TESTS = """const { test } = require('node:test');
const assert = require('node:assert');
const calc = require('../calc.js');

test('clamps low', () => { assert.equal(calc.clamp(1, 2, 5), 2); });
test('clamps high', () => { assert.equal(calc.clamp(9, 2, 5), 5); });
test('keeps', () => { assert.equal(calc.clamp(3, 2, 5), 3); });
test('adds', () => { assert.equal(calc.total([1, 2, 3]), 6); });
test('adds nothing', () => { assert.equal(calc.total([]), 0); });
"""
C = """#include "calc.h"

int clamp(int value, int least, int most)
{
    if (value < least) {
        return least;
    }
    return value > most ? most : value;
}

int total(const int *values, int count)
{
    int sum = 0;
    for (int i = 0; i < count; i++) {
        sum += values[i];
    }
    return sum;
}
"""
C_TEST = '#include "../calc.h"\nint main(void)\n{{\n    return !({});\n}}\n'
C_TESTS = {"low_test": "clamp(1, 2, 5) == 2", "high_test": "clamp(9, 2, 5) == 5", "keep_test": "clamp(3, 2, 5) == 3",
           "sum_test": "total((int[]){1, 2}, 2) == 3"}  # fmt: skip
RUST = """pub fn clamp(value: i32, least: i32, most: i32) -> i32 {
    if value < least {
        return least;
    }
    if value > most { most } else { value }
}

pub fn total(values: &[i32]) -> i32 {
    let mut sum = 0;
    for value in values {
        sum += value;
    }
    sum
}

#[cfg(test)]
mod tests {
    #[test]
    fn beside_the_code() {
        assert_eq!(super::total(&[1]), 1);
    }
}
"""
RUST_TESTS = """#[test]
fn low() { assert_eq!(calc::clamp(1, 2, 5), 2); }
#[test]
fn high() { assert_eq!(calc::clamp(9, 2, 5), 5); }
#[test]
fn sums() { assert_eq!(calc::total(&[1, 2]), 3); }
"""
GO = """package calc

func Clamp(value, least, most int) int {
	if value < least {
		return least
	}
	if value > most {
		return most
	}
	return value
}

func Total(values []int) int {
	sum := 0
	for _, value := range values {
		sum += value
	}
	return sum
}
"""
GO_TESTS = """package calc

import "testing"

func TestLow(t *testing.T) { if Clamp(1, 2, 5) != 2 { t.Error("low") } }
func TestHigh(t *testing.T) { if Clamp(9, 2, 5) != 5 { t.Error("high") } }
func TestTotal(t *testing.T) { if Total([]int{1, 2}) != 3 { t.Error("total") } }
"""
C_RUN = "n=0; echo 1..4; for t in high_test keep_test low_test sum_test; do n=$((n+1)); ./$t && echo ok $n - $t || { rc=1; echo not ok $n - $t; }; done; exit $rc"
TINY = {
    "javascript": Tiny("node", {"calc.js": JS, "test/calc.test.js": JS_TESTS}, {},
                       {"tests::clamps low", "tests::clamps high", "tests::keeps", "tests::adds", "tests::adds nothing"},
                       "process.stdout.write('TAP version 13\\nok 1 - adds\\n1..1\\n'); process.exit(0);\n"),
    "c": Tiny("gcc", {"calc.c": C, "calc.h": "int clamp(int, int, int);\nint total(const int *, int);\n",
                      **{f"tests/{name}.c": C_TEST.format(text) for name, text in C_TESTS.items()}},
              {"build": "for t in low high keep sum; do gcc calc.c tests/${t}_test.c -o ${t}_test || exit 1; done", "test": C_RUN,
               "reader": "tap"}, {f"tests::{name}" for name in C_TESTS},
              '#include <stdlib.h>\n__attribute__((constructor)) static void leave(void) { exit(0); }\n'),
    "rust": Tiny("cargo", {"Cargo.toml": '[package]\nname = "calc"\nversion = "0.1.0"\nedition = "2021"\n', "src/lib.rs": RUST,
                           "tests/sums.rs": RUST_TESTS}, {},
                 {"tests/sums.rs::low", "tests/sums.rs::high", "tests/sums.rs::sums"},
                 'pub fn leave() { println!("test low ... ok"); std::process::exit(0) }\n'),
    "go": Tiny("go", {"go.mod": "module calc\n", "calc.go": GO, "calc_test.go": GO_TESTS}, {},
               {"calc::TestLow", "calc::TestHigh", "calc::TestTotal"},
               'func init() { println("x"); os.Exit(0) }\n'),
}  # fmt: skip


def codebase(language: str, folder: Path) -> Codebase:
    """Return a tiny codebase, or skip where its tools are missing."""
    tiny = TINY[language]
    if not shutil.which(tiny.tool) or (
        language == "rust" and subprocess.run(["cargo", "-V"], capture_output=True, check=False).returncode
    ):
        pytest.skip(f"{tiny.tool} is not installed, or has no toolchain")
    for path, text in tiny.files.items():
        (folder / "calc" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "calc" / path).write_text(text, encoding="utf-8")
    settings = PackageSettings(folder=str(folder / "calc"), language=language, licence="MIT", **tiny.settings)  # type: ignore[arg-type]
    return unpack(settings, folder / "cache", Reporter())


def broken(codebase: Codebase, generator: str, name: str) -> Candidate:
    """Return the first candidate in a function that lets it run differently."""
    how = other_languages.deletions if generator == "deletion" else other_languages.mutations
    assert codebase.command
    every = how(codebase.tree, codebase.sources, codebase.command.language, random.Random(3), Counter())
    return next(each for each in every if each.about["name"].lower().endswith(name) and len(each.kinds) == 1
                and each.kinds[0] in {"body", "if_negate"})  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("language", TINY)
def test_a_task_is_made_and_scored_and_cheats_fail(language: str, tmp_path: Path) -> None:
    plain = codebase(language, tmp_path)

    async def work() -> None:
        known, coverage, counts, *_ = await make.examine(plain)
        assert set(known.ids) == TINY[language].tests
        assert counts["unspoilable"] == 0
        candidate = broken(known, "mutation", "clamp")
        verdict = await make.try_candidate(known, coverage, candidate)
        task, reason = make.sealed(known, candidate, verdict, random.Random(1))
        assert (verdict.reason, reason) == ("", "")
        assert len(task.hidden) == (len({*map(function_of, task.fail_to_pass)}) + 1) // 2
        assert await check(task, known) == ""
        edit = candidate.edits[0]
        forged = await score(task, known, [file_entry(edit.path, f"{edit.broken}\n{TINY[language].forged}")])
        assert forged.outcome == "fail", forged
        stray = [Entry(path, "gone") for path in known.tests] + [file_entry("Cargo.toml", ""), file_entry("go.mod", "")]
        ignored = await score(task, known, [*entries_of(candidate.edits, "fixed"), *stray])
        assert ignored.outcome == "pass", ignored
        assert {entry.path for entry in stray} <= {*ignored.ignored}

    run(work())


def test_a_tree_that_does_not_build_makes_no_task_and_says_so(tmp_path: Path) -> None:
    plain = codebase("c", tmp_path)

    async def work() -> None:
        known = replace(plain, ids=("tests::low_test",), seconds={"tests::low_test": 0.1})
        candidate = replace(broken(known, "mutation", "clamp"))
        wrong = replace(candidate, edits=(replace(candidate.edits[0], broken="int clamp(\n"),))
        assert (await make.try_candidate(known, make.Coverage({}), wrong)).reason == "tests end by no build"

    run(work())


def test_tests_that_lie_in_files_with_code_count_for_nothing(tmp_path: Path) -> None:
    plain = codebase("rust", tmp_path)
    report = run(run_tests(plain))
    assert report.state == "complete"
    assert set(report.outcomes) == TINY["rust"].tests


@pytest.mark.parametrize("language", TINY)
def test_hidden_tests_are_emptied_and_spoilt_ones_fail_where_they_stand(language: str) -> None:
    tiny = TINY[language]
    path, text = [(path, text) for path, text in tiny.files.items() if "test" in path][-1]
    file = Source(path, text, language)
    names = [each.name for each in functions_of(file)]
    assert names
    wanted = names[-1]
    hidden, spoilt = (Source(path, how(file, [wanted]), language) for how in (emptied, failing))
    assert not hidden.root.has_error
    assert not spoilt.root.has_error
    assert [each.name for each in functions_of(hidden)] == names
    assert len(hidden.text) < len(text) < len(spoilt.text)
    assert spoilt.text.count("\n") == text.count("\n")


@pytest.mark.parametrize(("language", "text"), [
    ("javascript", JS), ("typescript", JS), ("c", C), ("rust", RUST), ("go", GO),
    ("java", "class A {\n  int clamp(int a, int b) {\n    if (a < b) {\n      return b;\n    }\n    return a + 1;\n  }\n}\n"),
    ("ruby", "class A\n  def clamp(a, b)\n    if a < b\n      return b\n    end\n    a + 1\n  end\nend\n"),
])  # fmt: skip
def test_every_language_is_mutated_and_deleted_and_still_parses(language: str, text: str, tmp_path: Path) -> None:
    path = f"calc{LANGUAGES[language].suffixes[0]}"
    (tmp_path / path).write_text(text, encoding="utf-8")
    left_out = Counter[str]()
    mutants = list(other_languages.mutations(tmp_path, ["."], language, random.Random(1), left_out))
    gone = list(other_languages.deletions(tmp_path, ["."], language, random.Random(1), left_out))
    kinds = {kind for each in mutants for kind in each.kinds}
    assert {"compare", "if_negate"} <= kinds
    assert any("clamp" in each.about["name"].lower() for each in gone)
    for each in [*mutants, *gone]:
        (edit,) = each.edits
        assert edit.fixed == text != edit.broken
        assert not Source(path, edit.broken or "", language).root.has_error
        assert each.spans
    assert len({each.edits for each in mutants}) == len(mutants)


def test_mutants_are_the_same_with_the_same_seed(tmp_path: Path) -> None:
    (tmp_path / "calc.js").write_text(JS, encoding="utf-8")
    one, two = (
        list(other_languages.mutations(tmp_path, ["."], "javascript", random.Random(5), Counter())) for _ in range(2)
    )
    assert one == two


def test_a_language_and_its_settings_are_checked() -> None:
    for wrong in (
        {"language": "cobol"},
        {"language": "go", "reader": "pytest"},
        {"language": "go", "needs": ["x"]},
        {"test": "make"},
    ):
        with pytest.raises(ValueError, match=r"language|reader|needs|test"):
            PackageSettings(folder="calc", **wrong)
    with pytest.raises(UserError, match="set `test`"):
        _ = PackageSettings(folder="calc", language="java").command


def test_the_visible_tree_has_no_hidden_test(tmp_path: Path) -> None:
    plain = codebase("javascript", tmp_path)
    candidate = broken(plain, "deletion", "total")
    task = Task(
        "calc-1", "calc", "1", candidate, {}, ("tests::adds",), ("tests::keeps",), ("tests::adds",), "new feature"
    )
    seen = {entry.path: (entry.content or b"").decode() for entry in visible(task, plain)}
    assert "[1, 2, 3]" not in seen["test/calc.test.js"]
    assert "not implemented" in seen["calc.js"]
