"""Small finished episodes to be rewarded: real traces of a harness with scripted turns, and facts to vary."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_type_hints

from etude.agent.calls import Answer, Call, ToolSpec
from etude.agent.endpoint import message_format
from etude.agent.harness import Harness, HarnessSettings
from etude.agent.policies import ScriptedPolicy
from etude.agent.trace import Trace
from etude.rewards.interaction import interaction
from etude.rewards.quality import Quality
from etude.rewards.reward import Facts

TALK = message_format()
BEFORE = "class Box:\n    def size(self):\n        a = 1\n        b = 2\n        c = 3\n        return a + b + c\n"
CHANGE = {"src/boxes.py": (BEFORE, BEFORE.replace(" + c", " - c"))}
_NOTHING: dict[str, Any] = dict.fromkeys(get_type_hints(Quality), 0)
CLEAN = Quality(**_NOTHING | {"lines": 2, "files": 1})


class Tools:
    """Answers that are given by the name of the call: `refuse…` is refused, `todo` keeps what it is told is open."""

    plan_text = ""

    def __init__(self, names: Sequence[str]) -> None:
        self.specs = tuple(ToolSpec(name, "", ()) for name in names)

    async def run(self, calls: Sequence[Call]) -> list[Answer]:
        return [self._one(call) for call in calls]

    def _one(self, call: Call) -> Answer:
        details = {"open": int(call.arguments["open"])} if call.name == "todo" else {"rc": 0}
        return Answer(call, "answer", failed=call.name.startswith("refuse"), details=details)


def played(*turns: str, tools: Sequence[str] = ("read", "edit", "shell", "todo"), **limits: Any) -> Trace:
    """Run an episode of these turns."""
    policy = ScriptedPolicy(turns, TALK)
    harness = Harness(policy, TALK, Tools(tools), HarnessSettings(**limits), Trace("e", "t"), seed=1)
    return asyncio.run(harness.run("system", "task"))


def call(name: str, **arguments: str) -> str:
    return f"{TALK.write(Call(name, arguments))}\n"


def facts(trace: Trace | None = None, change: Any = CHANGE, **changed: Any) -> Facts:
    """Return an episode with nothing to blame, but for what is given."""
    trace = trace or played(call("read", path="a"), "I changed boxes.py.")
    seen = interaction(trace)
    return replace(Facts(trace, "pass", 1.0, 1.0, change, CLEAN if change else None, seen), **changed)
