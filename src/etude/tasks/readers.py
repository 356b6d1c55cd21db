"""Parsers for the output of test runners: text in; outcomes of tests, unknown lines and inconsistencies out.

The output comes from the same sandbox as untrusted code, so a report is accepted only as a whole. Every runner states how many tests
there were: if that number is missing, differs or comes twice, no test of the report counts as passed. A test that is named twice has
its worse outcome. Unknown lines are counted. `faults` say what is wrong with a report; for runners that start one program for each
file of tests, a fault only affects the tests of that program.

An id is `group::name`: the group is a file, a package or a class, and the names of suites around a test are joined by ` > `.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args
from xml.etree import ElementTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ReaderName = Literal["junit", "tap", "tape", "prove", "go", "cargo", "jest", "mocha", "ctest", "unittest", "unity"]
Outcome = Literal["passed", "skipped", "failed"]
RANK: tuple[Outcome, ...] = get_args(Outcome)  # from the best to the worst
LONGEST_NAME, MOST_TESTS, LONGEST_TRACE = 500, 50_000, 6_000
ROOT = "/workspace/"
TESTS = "tests"  # the group of tests whose runner names no file
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, ElementTree.ParseError)


@dataclass
class Report:
    """How tests ended. With faults, parts are missing or inconsistent, and passes are not trusted."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    traces: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    unread: int = 0  # lines that are no part of a report
    # Tests of what is not closed yet.
    open: list[tuple[str, Outcome, str]] = field(default_factory=list)

    def add(self, group: str, name: str, outcome: Outcome, trace: str = "") -> None:
        """Add one test; it counts once its program, package or file is closed."""
        plain = " ".join(f"{group.removeprefix(ROOT) or TESTS}::{name}".split())
        self.open.append((plain[:LONGEST_NAME], outcome, trace[-LONGEST_TRACE:]))

    def count(self, *outcomes: Outcome) -> int:
        """Return the number of open tests with some outcomes, or of all open tests."""
        return sum(not outcomes or outcome in outcomes for _, outcome, _ in self.open)

    def close(self, fault: str = "") -> None:
        """Take over the open tests; with a fault none of them counts as passed."""
        for test, outcome, trace in self.open:
            now: Outcome = "failed" if fault and outcome == "passed" else outcome
            self.outcomes[test] = max(now, self.outcomes.get(test, "passed"), key=RANK.index)
            self.traces |= {test: trace} if trace and outcome == "failed" else {}
        self.open.clear()
        self.faults += [fault] if fault else []

    def agree(self, what: str, said: object, seen: object) -> str:
        """Return a fault if a stated number differs from the counted one, else nothing."""
        return "" if said == seen else f"{what}: {said} by its own count, {seen} seen"


def read(reader: ReaderName, text: str) -> Report:
    """Read what a runner printed."""
    report = Report()
    try:
        READERS[reader](report, text)
    except UNREADABLE as error:
        report.close(f"no report of {reader}: {type(error).__name__}: {error}"[:200])
    if report.count():
        report.close("the report ends too soon")
    if not report.outcomes or len(report.outcomes) > MOST_TESTS:
        report.faults.append("no test is reported" if not report.outcomes else "too many tests")
    if report.faults and reader not in SECTIONED:
        report.outcomes = {test: "failed" if it == "passed" else it for test, it in report.outcomes.items()}
    return report


def _junit(report: Report, text: str) -> None:
    """JUnit's XML: of pytest, node, mocha (xunit), CTest (--output-junit), Maven, Gradle, gotestsum and others."""
    if re.search(r"<!(DOCTYPE|ENTITY)", text):
        raise ValueError("it has entities")
    begin = min((at for word in ("<?xml", "<testsuite") if (at := text.find(word)) >= 0), default=0)
    report.unread = text[:begin].count("\n")
    root = ElementTree.fromstring(text[begin:])  # noqa: S314 - without entities, and bounded by what a sandbox may print
    _suite(report, root, "")
    faults = [_suite_fault(report, each) for each in {root: 0, **dict.fromkeys(root.iter("testsuite"))}]
    report.close(next(filter(None, faults), ""))


def _suite_fault(report: Report, suite: ElementTree.Element) -> str:
    """Return a fault if a suite states another number of tests, or more failures than there are."""
    said = {name: int(n) for name in ("tests", "failures", "errors") if (n := suite.get(name, "")).isdecimal()}
    cases = list(suite.iter("testcase"))
    bad = sum(_junit_outcome(each) == "failed" for each in cases)
    failures = said.get("failures", 0)
    if failures > bad:
        return report.agree(f"failures of {suite.get('name')}", failures + said.get("errors", 0), bad)
    return report.agree(f"tests of {suite.get('name')}", said.get("tests", len(cases)), len(cases))


def _junit_outcome(case: ElementTree.Element) -> Outcome:
    bad = case.find("failure") is not None or case.find("error") is not None or case.get("failure") is not None
    if bad or case.get("status") == "fail":
        return "failed"
    return "skipped" if case.find("skipped") is not None or case.get("status") in {"notrun", "disabled"} else "passed"


def _suite(report: Report, node: ElementTree.Element, above: str) -> None:
    for child in node:
        if child.tag == "testcase":
            failures = [each for each in child if each.tag in {"failure", "error"}]
            trace = "\n".join(f"{each.get('message', '')}\n{each.text or ''}".strip() for each in failures)
            group = child.get("file") or child.get("classname") or ""
            report.add(group, above + child.get("name", ""), _junit_outcome(child), trace)
        elif child.tag == "testsuite":
            inner = f"{above}{child.get('name')} > " if node.tag == "testsuite" else ""
            _suite(report, child, inner)


POINT = re.compile(r"( *)(not )?ok\b(?: (\d+))?(?: ?- ?| |$)(.*)")
PLAN = re.compile(r"( *)1\.\.(\d+)( .*)?")
DIRECTIVE = re.compile(r"(?i)\s*(?<!\\)#\s*(skip|todo)\b.*")


class _Tap:
    """TAP 12 to 14: node:test with its subtests, Perl's with theirs, and tape, whose comments are the titles of its tests."""

    def __init__(self, report: Report, group: str, *, numbered: bool = False, titled: bool = False) -> None:
        self.report, self.group, self.numbered, self.titled = report, group, numbered, titled
        self.levels: dict[int, list[tuple[str, Outcome, list[str]]]] = {}
        self.plans: dict[int, int] = {}
        self.counts: Counter[int] = Counter()
        self.title, self.trace, self.in_yaml, self.fault = "", list[str](), False, ""

    def line(self, line: str) -> None:
        plain = line.strip()
        if self.in_yaml:
            self.in_yaml = plain != "..."
            self.trace += [line] if self.in_yaml else []
        elif plain == "---" and line.startswith("  "):
            self.in_yaml = True
        elif plan := PLAN.fullmatch(line):
            depth = len(plan[1])
            self.fault = self.fault or ("two plans" if depth in self.plans else "")
            self.plans[depth] = int(plan[2])
        elif point := POINT.fullmatch(line):
            self.point(len(point[1]), point)
        elif plain.startswith("Bail out!"):
            self.fault = plain[:100]
        elif plain.startswith("#"):
            self.title = plain.lstrip("# ")
        else:
            self.report.unread += bool(plain) and not plain.startswith("TAP version")

    def point(self, depth: int, point: re.Match[str]) -> None:
        self.counts[depth] += 1
        number = int(point[3] or self.counts[depth])
        if number != self.counts[depth]:
            self.fault = self.fault or f"number {number} where {self.counts[depth]} should be"
        if self.titled and not self.title:
            self.fault = self.fault or "a point before any title"
        name = DIRECTIVE.sub("", point[4]).strip().replace("\\#", "#")
        aside = DIRECTIVE.search(point[4])
        outcome: Outcome = "skipped" if aside else "failed" if point[2] else "passed"
        name = self.title if self.titled else f"{number} {name}".strip() if self.numbered else name or str(number)
        deeper = [level for level in self.levels if level > depth]
        for level in {*deeper, *(each for each in self.plans if each > depth)}:
            self.agreed(level)
        children = [each for level in sorted(deeper) for each in self.levels.pop(level)]
        if children and outcome == "failed" and all(each[1] != "failed" for each in children):
            children = [(inner, "failed", trace) for inner, _, trace in children]
        self.trace = []
        joined = [(f"{name} > {inner}", each, trace) for inner, each, trace in children]
        self.levels.setdefault(depth, []).extend(joined or [(name, outcome, self.trace)])

    def agreed(self, depth: int) -> None:
        said, seen = self.plans.pop(depth, -1), self.counts.pop(depth, 0)
        self.fault = self.fault or ("a plan is missing" if said < 0 else self.report.agree("tests", said, seen))

    def end(self) -> None:
        if not (self.levels or self.plans):
            return
        for depth in {0, *self.levels, *self.plans}:
            self.agreed(depth)
        for name, outcome, trace in (each for level in self.levels.values() for each in level):
            self.report.add(self.group, name, outcome, "\n".join(trace))
        self.report.close("the report ends too soon" if self.in_yaml else self.fault)


def _tap(report: Report, text: str, *, titled: bool = False) -> None:
    tap = _Tap(report, "", titled=titled)
    for line in text.splitlines():
        tap.line(line)
    tap.end()


PROVED = re.compile(r"ok|Dubious, .*|Failed \d+/\d+ subtests ?.*|skipped: .*|All \d+ subtests .*")


def _prove(report: Report, text: str) -> None:
    """`prove -v`: a line with each file, its TAP, and one result at the end."""
    tap = _Tap(report, "")
    *lines, last = text.rstrip().splitlines()
    for line in lines:
        if begun := re.fullmatch(r"(\S+\.t) \.+ ?", line):
            tap.end()
            tap = _Tap(report, begun[1], numbered=True)
        elif tap.group and PROVED.fullmatch(line):
            tap.fault = tap.fault or (line if line.startswith("Dubious") and not _failed(tap) else "")
            tap.end()
            tap = _Tap(report, "")
        elif tap.group:
            tap.line(line)
        else:
            report.unread += bool(line)
    tap.end()
    if not re.fullmatch(r"Result: (PASS|FAIL)", last):
        report.faults.append("prove gave no result")


def _failed(tap: _Tap) -> bool:
    return any(outcome == "failed" for level in tap.levels.values() for _, outcome, _ in level)


def _go(report: Report, text: str) -> None:
    """`go test -json`: a line for each event; a package ends with an event of its own."""
    events: dict[str, list[dict[str, Any]]] = {}
    for line in text.splitlines():
        if not line.startswith("{"):
            report.unread += bool(line.strip())
            continue
        event = json.loads(line)
        if "Package" in event:
            events.setdefault(event["Package"], []).append(event)
    for package, some in events.items():
        _go_package(report, package, some)


def _go_package(report: Report, package: str, events: Iterable[dict[str, Any]]) -> None:
    printed: dict[str, list[str]] = {}
    begun, ended, whole = set[str](), set[str](), ""
    outcomes: dict[str, Outcome] = {"pass": "passed", "fail": "failed", "skip": "skipped"}
    for event in events:
        action, test = event["Action"], event.get("Test", "")
        if action == "output":
            printed.setdefault(test, []).append(event.get("Output", ""))
        elif action in outcomes and not test:
            whole = action
        elif action in outcomes:
            ended.add(test)
            report.add(package, test, outcomes[action], "".join(printed.get(test, [])))
        elif action == "run":
            begun.add(test)
    silent = whole == "fail" and not report.count("failed")
    unended = "a test did not end" if begun - ended or not whole else ""
    odd = "tests failed and the package did not" if whole != "fail" and report.count("failed") else ""
    for test in begun - ended:
        report.add(package, test, "failed", "".join(printed.get(test, [])))
    report.close(f"{package} failed, and none of its tests" if silent else unended or odd)


CARGO_RESULT = r"test result: (?:ok|FAILED)\. (\d+) passed; (\d+) failed; (\d+) ignored; (\d+) measured"


def _cargo(report: Report, text: str) -> None:
    """`cargo test`, with both streams in one: tests are named by the file that their program is made from."""
    group, expected, traces, heading = "", -1, dict[str, list[str]](), ""
    kinds: dict[str, Outcome] = {"ok": "passed", "FAILED": "failed"}
    for line in text.splitlines():
        unended = "a program of tests did not end" if expected >= 0 or report.open else ""
        if begun := re.fullmatch(r" +(?:Running (?:unittests )?(\S+) \(.*\)|Doc-tests (\S+))", line):
            report.close(unended)
            group, expected = begun[1] or f"doc {begun[2]}", -1
        elif begun := re.fullmatch(r"running (\d+) tests?", line):
            report.close(unended)
            expected, heading, traces = int(begun[1]), "", {}
        elif ended := re.fullmatch(r"test (.+?)(?: - should panic)? \.\.\. (ok|FAILED|ignored\b.*)", line):
            report.add(group, ended[1], kinds.get(ended[2], "skipped"))
        elif ended := re.match(CARGO_RESULT, line):
            seen = [report.count(each) for each in ("passed", "failed", "skipped")]
            said = [int(each) for each in ended.groups()]
            fault = report.agree("tests", said[:3], seen) or report.agree("tests", expected, sum(said))
            named = [(test, it, traces.get(test.partition("::")[2], [])) for test, it, _ in report.open]
            report.open = [(test, it, "\n".join(trace)) for test, it, trace in named]
            report.close(fault or ("" if group else "tests of no program"))
            group, expected, heading = "", -1, ""
        elif head := re.fullmatch(r"---- (.+) stdout ----", line):
            heading = head[1]
        elif heading:
            traces.setdefault(heading, []).append(line)
        else:
            report.unread += bool(line.strip())
    if expected >= 0 or report.count():
        report.close("a program of tests did not end")


def _json(report: Report, text: str) -> Any:
    """Return the one object that is printed; anything behind it is a fault, lines before it are counted."""
    begin = re.search(r"(?m)^\{", text)
    if begin is None:
        raise ValueError("there is no object")
    report.unread = text[: begin.start()].count("\n")
    return json.loads(text[begin.start() :])


def _jest(report: Report, text: str) -> None:
    """`jest --json`, and vitest's reporter of that name."""
    whole = _json(report, text)
    kinds: dict[str, Outcome] = {"passed": "passed", "failed": "failed"}
    broken = 0
    for file in whole["testResults"]:
        broken += file["status"] == "failed" not in {each["status"] for each in file["assertionResults"]}
        for test in file["assertionResults"]:
            name = " > ".join([*test["ancestorTitles"], test["title"]])
            trace = "\n".join(test.get("failureMessages") or [])
            report.add(file["name"], name, kinds.get(test["status"], "skipped"), trace)
    said = (whole["numTotalTests"], whole["numPassedTests"], whole["numFailedTests"])
    fault = report.agree("tests", said, (report.count(), report.count("passed"), report.count("failed")))
    report.close(fault or ("a file failed, and none of its tests" if broken else ""))


def _mocha(report: Report, text: str) -> None:
    """`mocha --reporter json`."""
    whole = _json(report, text)
    bad, left = ({each["fullTitle"] for each in whole[name]} for name in ("failures", "pending"))
    for test in whole["tests"]:
        title, full = test["title"], test["fullTitle"]
        around = full.removesuffix(title).strip()
        outcome: Outcome = "failed" if full in bad or test.get("err") else "skipped" if full in left else "passed"
        trace = str((test.get("err") or {}).get("stack", ""))
        report.add(test.get("file") or "", f"{around} > {title}" if around else title, outcome, trace)
    stats, names = whole["stats"], {each["fullTitle"] for each in whole["tests"]}
    fault = report.agree("tests", stats["tests"], report.count())
    fault = fault or report.agree("passes", stats["passes"], report.count("passed"))
    report.close(fault or ("a hook failed" if bad - names else ""))


CTEST = re.compile(
    r"\s*\d+/(\d+) Test +#\d+: (.+?) \.*\s*(?:\*\*\*)?(Passed|Skipped|Not Run.*?|Failed|Timeout|Exception.*?)\s+[\d.]+ sec.*"
)


def _ctest(report: Report, text: str) -> None:
    """`ctest`; a test is a program."""
    said = re.findall(r"(?m)^\d+% tests passed, (\d+) tests? failed(?: out of (\d+))?", text)
    for line in text.splitlines():
        if test := CTEST.fullmatch(line):
            disabled = test[3] == "Skipped" or "Disabled" in test[3]
            report.add("", test[2], "passed" if test[3] == "Passed" else "skipped" if disabled else "failed")
        else:
            report.unread += bool(line.strip())
    if len(said) != 1:
        raise ValueError("there is no summary, or there are two")
    fault = report.agree("failures", int(said[0][0]), report.count("failed"))
    report.close(fault or (report.agree("tests", int(said[0][1]), report.count()) if said[0][1] else ""))


UNITTEST: dict[str, Outcome] = {"ok": "passed", "FAIL": "failed", "ERROR": "failed", "unexpected success": "failed"}
STATUS = r"(ok|FAIL|ERROR|unexpected success|expected failure|skipped .*)"


def _unittest(report: Report, text: str) -> None:
    """`python -m unittest -v -b`, with both streams in one; without -b, what tests print breaks its lines."""
    lines, waiting, tests = text.splitlines(), "", set[str]()
    for line in lines:
        if begun := re.fullmatch(rf"( *)(\w+) \(([\w.]+)\)(?: [\[(].*?)?(?: \.\.\. {STATUS}?)?", line):
            name = f"{begun[3].removesuffix(f'.{begun[2]}')}::{begun[2]}"
            waiting = "" if begun[4] else name
            tests |= {name} if not begun[1] else set()
            _unittest_ended(report, name, begun[4])
        elif waiting and (ended := re.fullmatch(rf"(?:(?! \.\.\. ).)* \.\.\. {STATUS}", line)):
            _unittest_ended(report, waiting, ended[1])
            waiting = ""
        else:
            report.unread += bool(line.strip())
    ran = re.findall(r"(?m)^Ran (\d+) tests? in [\d.]+s$", text)
    last = re.fullmatch(r"(OK|FAILED)(?: \(.*\))?", lines[-1].strip())
    if len(ran) != 1 or last is None:
        raise ValueError("there is no summary, or there are two")
    named = {test for test, _, _ in report.open}
    fault = report.agree("tests", int(ran[0]), len(tests)) or report.agree("outcomes", len(tests), len(named))
    report.close(fault or report.agree("failures", last[1] == "FAILED", report.count("failed") > 0))


def _unittest_ended(report: Report, name: str, status: str | None) -> None:
    if status:
        group, _, test = name.partition("::")
        report.add(group, test, UNITTEST.get(status, "skipped"))


def _unity(report: Report, text: str) -> None:
    """Unity's lines, for C; also behind `1: `, as `ctest -V` prints them."""
    kinds: dict[str, Outcome] = {"PASS": "passed", "FAIL": "failed", "IGNORE": "skipped"}
    for line in (re.sub(r"^\d+: ", "", each) for each in text.splitlines()):
        if test := re.fullmatch(r"(\S+?):\d+:(\w+):(PASS|FAIL|IGNORE)(?::(.*))?", line):
            report.add(test[1], test[2], kinds[test[3]], line)
        elif ended := re.fullmatch(r"(\d+) Tests (\d+) Failures (\d+) Ignored ?", line):
            seen = [report.count(), report.count("failed"), report.count("skipped")]
            report.close(report.agree("tests", [int(each) for each in ended.groups()], seen))
        else:
            report.unread += bool(line.strip())


READERS: dict[ReaderName, Callable[[Report, str], None]] = {
    "junit": _junit, "tap": _tap, "tape": partial(_tap, titled=True), "prove": _prove, "go": _go, "cargo": _cargo,
    "jest": _jest, "mocha": _mocha, "ctest": _ctest, "unittest": _unittest, "unity": _unity,
}  # fmt: skip
SECTIONED = {"prove", "go", "cargo", "unity"}  # a program for each file or package
# Read from standard output alone; of the others both streams are read.
ONE_STREAM = {"junit", "tap", "tape", "go", "jest", "mocha"}
