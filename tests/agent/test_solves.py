"""The whole way, for real: a scripted policy mends a bug of xmltodict 1.0.2 that 1.0.3 mended, in a sandbox, by tools, token by token."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from etude.agent.atif import from_atif, to_atif
from etude.agent.calls import Call
from etude.agent.changes import unified
from etude.agent.formats import ChatFormat, choose_format
from etude.agent.harness import SYSTEM, Harness, HarnessSettings
from etude.agent.policies import ScriptedPolicy
from etude.agent.search import Searcher
from etude.agent.summary import SummarySettings
from etude.agent.tools import Toolset, ToolSettings
from etude.agent.trace import Trace, from_json, samples, to_json
from etude.models.bases import resolve
from etude.models.load import load_tokeniser
from etude.progress import Reporter
from etude.sandbox.box import Place
from etude.sandbox.layers import write_layer
from etude.sandbox.local import open_sandbox
from etude.tasks.codebase import PackageSettings, unpack

if TYPE_CHECKING:
    from collections.abc import Callable

    from etude.sandbox.box import Entry

REQUEST = 'unparse({"a": {"@b": "c", "#text": None}}) writes the word None into the element. It should be empty.'
OLD = "                cdata = _convert_value_to_string(iv)\n                continue\n"
NEW = "                cdata = None if iv is None else _convert_value_to_string(iv)\n                continue\n"
CHECK = """import xmltodict
print(xmltodict.unparse({"a": {"@b": "c", "#text": None}}, full_document=False))"""
TESTS = "python3 -m pytest -q -p no:cacheprovider tests/test_dicttoxml.py"
# The test that 1.0.3 changed still says what 1.0.2 did.
RETEST = (
    'assert unparse({"a": {"@param": "test", "#text": None}}, full_document=False) == \'<a param="test">',
    "None</a>'",
    "</a>'",
)


def script(talk: ChatFormat) -> list[str]:
    """Return the turns of a careful engineer, one wrong one included."""

    def say(*calls: tuple[str, dict[str, object]], said: str = "", thinking: str = "") -> str:
        return talk.write(*(Call(name, arguments) for name, arguments in calls), said=said, thinking=thinking)

    return [
        say(
            ("grep", {"pattern": "cdata_key", "glob": "*.py"}),
            ("search", {"query": "convert a value to text when writing XML", "k": 3}),
            ("todo", {"items": "[ ] find where #text is written\n[ ] mend it\n[ ] run the tests"}),
            thinking="Where is #text read?",
        ),
        say(
            ("shell", {"command": f"python3 -c '{CHECK}'"}),
            ("read", {"path": "xmltodict.py", "start": 485, "end": 500}),
        ),
        say(("edit", {"path": "xmltodict.py", "old": "cdata", "new": "text"}), said="A first try."),
        say(("edit", {"path": "xmltodict.py", "old": OLD, "new": NEW})),
        say(("edit", {"path": "tests/test_dicttoxml.py", "old": RETEST[0] + RETEST[1], "new": RETEST[0] + RETEST[2]})),
        say(("shell", {"command": f"python3 -c '{CHECK}'"}), ("shell", {"command": TESTS})),
        say(("todo", {"items": "[x] find where #text is written\n[x] mend it\n[x] run the tests"})),
        say(said="A #text of None is now written as nothing; the tests of unparse pass."),
    ]


async def episode(
    layer: Path, cache: Path, summary: SummarySettings, extra: Callable[[ChatFormat, list[str]], list[str]]
) -> tuple[Trace, list[Entry]]:
    """Run the script through the harness that trains and ships."""
    tokeniser = load_tokeniser(resolve("sprout").folder)
    talk = choose_format(tokeniser)
    assert isinstance(talk, ChatFormat)
    policy = ScriptedPolicy(extra(talk, script(talk)), talk)
    python = Path(sys.prefix)
    place = Place((layer,), readonly=(python,), env={"PATH": f"{python}/bin:/usr/bin:/bin"})
    sandbox = await open_sandbox(place)
    try:
        trace = Trace("solves", REQUEST, made_by={"sandbox": sandbox.backend})
        tools = Toolset(sandbox, ToolSettings(), Searcher(cache))
        await Harness(policy, talk, tools, HarnessSettings(summary=summary), trace).run(SYSTEM, REQUEST)
        entries = await sandbox.diff()
        trace.diff = unified(entries, [layer])
        return trace, entries
    finally:
        await sandbox.close()


async def says(layers: tuple[Path, ...], command: str) -> str:
    """Return what a command prints in a fresh sandbox."""
    sandbox = await open_sandbox(Place(layers))
    try:
        return (await sandbox.exec(command)).out.decode()
    finally:
        await sandbox.close()


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the sources of xmltodict 1.0.2."""
    cache = tmp_path_factory.mktemp("cache")
    for folder in (cache, *cache.parents[:2]):
        folder.chmod(0o755)  # the sandbox runs as somebody else
    return unpack(PackageSettings(pypi="xmltodict==1.0.2"), cache, Reporter(quiet=True)).tree


def test_a_real_bug_in_a_real_package_is_mended(layer: Path, tmp_path: Path) -> None:
    trace, entries = asyncio.run(episode(layer, tmp_path, SummarySettings(kind="none"), lambda _, lines: lines))
    assert trace.stop == "finished"
    answers = [answer for node in trace.nodes for answer in node.details.get("answers", ())]
    told = {(answer["name"], answer["failed"]) for answer in answers}
    assert ("edit", True) in told
    assert ("edit", False) in told
    before, after = (answer["text"] for answer in answers if answer["name"] == "shell" and "<a b=" in answer["text"])
    assert '<a b="c">None</a>' in before
    assert '<a b="c"></a>' in after
    tested = [answer["text"] for answer in answers if answer["name"] == "shell"][-1]
    assert tested.startswith("[exit code 0]"), tested
    assert sorted(entry.path for entry in entries) == ["tests/test_dicttoxml.py", "xmltodict.py"]
    assert "+                cdata = None if iv is None else _convert_value_to_string(iv)" in trace.diff
    mended = write_layer(tmp_path / "mended", entries, (layer,))
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    assert asyncio.run(says((mended, layer), f"python3 -c '{CHECK}'")) == '<a b="c"></a>\n'
    assert asyncio.run(says((layer,), f"python3 -c '{CHECK}'")) == '<a b="c">None</a>\n'  # the layer is as it was


def test_a_chain_of_three_summaries_comes_back_token_for_token(layer: Path, tmp_path: Path) -> None:
    def with_summaries(talk: ChatFormat, lines: list[str]) -> list[str]:
        found: list[str] = []
        for number, line in enumerate(lines[:3], 1):
            found += [line, talk.write(said=f"Summary {number}: the bug is in _emit.", thinking="What matters?")]
        return [*found, *lines[3:]]

    own = SummarySettings(trigger=64, tokens=400, most=3)
    trace, _ = asyncio.run(episode(layer, tmp_path, own, with_summaries))
    assert trace.counts["restarts"] == 3
    assert trace.stop == "summaries"
    assert len(samples(trace)) == 4
    assert from_json(to_json(trace), "here") == trace
    back = from_atif(to_atif(trace), "here")
    assert samples(back) == samples(trace)
    assert back == trace
