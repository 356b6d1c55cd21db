"""Names, paths and messages that strangers chose: whatever prints them, they do nothing to a terminal."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

from etude.agent.trace import Trace, write_traces
from etude.progress import Console, Reporter
from tests.conftest import Etude

HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07", "\x1b]52;c;aGk=\x07", "\x9b31m", "\r\x1b[1Aerror: all is well", "\x08\x08\x08done", "a\u202eb\u2066c",
    "\u200bzero\u2060width", "[bold red]markup[/]", "\x00nul\x7f", "\u2028line\u2029end", "\x1bPq#0\x1b\\", "\ufeffbom\U000e0041tag",
)  # fmt: skip
OURS = re.compile("\x1b\\[[0-9;]*m")  # colours that we set ourselves


def harmless(text: str) -> bool:
    return not any(
        unicodedata.category(char)[0] == "C" or char in "\u2028\u2029"
        for char in re.sub("[\n\t]", "", OURS.sub("", text))
    )


@pytest.mark.parametrize("words", HOSTILE)
def test_a_console_shows_what_it_was_given_and_sends_nothing_else(words: str) -> None:
    for steer in ({}, {"force_terminal": True, "width": 300}):
        out = io.StringIO()
        reporter = Reporter(Console(file=out, **steer))  # type: ignore[arg-type]
        reporter.say(f"before {words} after", style="red")
        with reporter.task(words, 2, words) as task:
            task.next_line = 0.0
            task.advance()
        lines = (
            re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", out.getvalue()) if steer else out.getvalue()
        )  # a bar moves the cursor
        assert harmless(lines.replace("\r", "")), lines
        assert "after" in lines


@pytest.fixture
def foreign(tmp_path: Path) -> dict[str, list[object]]:
    """Files with hostile words in every place that a command prints, and the commands."""
    everything = "".join(HOSTILE)
    traces = tmp_path / "traces.jsonl"
    trace = Trace(everything, everything)
    trace.stop, trace.rewards, trace.diff = everything, {everything: 1.0}, f"+{everything}"
    trace.made_by = {"policy": everything, "format": everything, "sandbox": everything}
    write_traces(traces, [trace])
    run = tmp_path / "run"
    run.mkdir()
    stages = [{"name": words, "kind": words} for words in HOSTILE if "\x00" not in words]
    (run / "run.json").write_text(
        json.dumps({"name": everything, "stages": stages, "command": everything, "in": everything})
    )
    header = {"record": "set", "name": everything, "tasks": 1, "tries": {everything: 1}, "seconds": 1,
              "kept": {everything: {everything: 1}}, "left_out": {everything: everything}}  # fmt: skip
    (tmp_path / "tasks.jsonl").write_text(json.dumps(header) + "\n")
    return {
        "trace list": ["trace", "list", traces],
        "trace show": ["trace", "show", traces, "--full"],
        "trace show, no such episode": ["trace", "show", traces, "--episode", everything.replace("\x00", "")],
        "status": ["status", run],
        "status --json": ["status", run, "--json"],
        "summary": ["summary", run],
        "tasks show": ["tasks", "show", tmp_path / "tasks.jsonl"],
        "lineage show": ["lineage", "show", tmp_path / HOSTILE[0]],
        "bench": ["bench", HOSTILE[0], "--tasks", tmp_path / HOSTILE[3]],
        "base": ["bases", HOSTILE[1]],
        "no such command": [HOSTILE[2]],
        "no such option": ["bases", f"--{HOSTILE[0]}"],
        "bad value": ["serve", "sprout", "--port", HOSTILE[3]],
        "run": ["run", tmp_path / HOSTILE[6]],
        "--set": ["run", tmp_path / "mine.toml", "--set", HOSTILE[3]],
        "tools": ["agent", "go", "--tools", HOSTILE[0]],
    }


def test_no_command_sends_control_codes_of_strangers(
    etude: Etude, foreign: dict[str, list[object]], tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text('name = "mine"\n')
    for name, words in foreign.items():
        said = etude(*words)
        assert said.code in {0, 2}, (name, said)
        assert harmless(said.out + said.err), (name, said)
        if said.code:
            error = said.err[said.err.index("error:") :] if "error:" in said.err else said.err
            assert not error.startswith("error:") or len(error.splitlines()) == 1, (name, error)


def test_json_of_hostile_words_reads_back_the_same(etude: Etude, foreign: dict[str, list[object]]) -> None:
    said = etude(*foreign["status --json"])
    assert [stage["name"] for stage in json.loads(said.out)["stages"]] == [
        each for each in HOSTILE if "\x00" not in each
    ]


POOL = """
import etude.cli.main as command
from etude.work import in_processes
command.app = lambda **_: print(sorted(in_processes(abs, [-1, -2], 2, lambda: None)))
if __name__ == "__main__":
    command.main()
"""


def test_workers_import_nothing_from_the_current_folder(tmp_path: Path) -> None:
    """It may be anybody's repository, and Python looks there first when it is started with -c or -m."""
    for name in ("multiprocessing", "json", "etude"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/etude").write_text(POOL)
    words = [sys.executable, str(tmp_path / "bin/etude")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, (tmp_path / "mark").exists()) == ("[(0, 1), (1, 2)]\n", False), done.stderr
