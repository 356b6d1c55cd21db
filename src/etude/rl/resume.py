"""How a half-finished episode goes on after a kill: what was sampled is kept, what was run is run again.

A policy and tools that remember: every completion and every round of answers is appended to a file. An episode that is begun again
with that file plays itself up to where it broke off. Its calls are run in the fresh sandbox, which so becomes what the old one was,
while the policy is shown the very tokens it saw. If a command now answers otherwise, the sandbox is not what it was; if a prompt does,
neither is the harness. Then the memory is worth nothing.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Self

from etude.agent.calls import Answer
from etude.files import digest_of
from etude.inference.policy import Completion, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from etude.agent.calls import Call, ToolSpec
    from etude.agent.harness import Tools
    from etude.inference.policy import Policy, PolicyInfo, Sampling

# How long something took (and the rules pytest draws around that), and where it lay in memory or under /tmp, is chance.
CHANCE = re.compile(r"\d+(?:\.\d+)?(?=\s?(?:ms|s|seconds?)\b)|={4,}|0x[0-9a-f]{6,}|/tmp/\S+")


class Diverged(Exception):  # noqa: N818 - a state, not a mistake
    """The episode did not go again as it is remembered."""


class Memory:
    """The file: a line that says whose it is, then one a completion or a round of answers.

    A line is written by one write, and not flushed to the disk: a power cut may cost an episode what it has done, a kill does not.
    """

    def __init__(self, path: Path, **owner: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+", buffering=0)
        self._file.seek(0)
        whole, newline, _torn = self._file.read().rpartition(b"\n")
        try:
            first, *lines = map(json.loads, whole.split(b"\n"))
        except ValueError:  # empty, or spoilt by a power cut
            first, lines = None, []
        self.past: list[Any] = lines[::-1] if first == owner else []  # the next one last
        self.replayed = 0
        self._file.truncate(len(whole + newline) if self.past else 0)
        if not self.past:
            self._write(owner)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file, which stays where it is."""
        self._file.close()

    def recall(self, kind: str) -> Any:
        """Return what came next, if that is remembered."""
        if not self.past:
            return None
        self.replayed += 1
        found = self.past.pop()
        if kind not in found:
            raise Diverged(f"no {kind} came next")
        return found[kind]

    def keep(self, kind: str, value: Any) -> None:
        """Remember what came next."""
        self._write({kind: value})

    def _write(self, line: Any) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")


class RememberedPolicy:
    """A policy whose completions are remembered."""

    def __init__(self, policy: Policy, memory: Memory) -> None:
        self._policy, self._memory = policy, memory

    @property
    def info(self) -> PolicyInfo:
        """Return what the policy tells of itself."""
        return self._policy.info

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        on_tokens: Callable[[list[Token]], None] | None = None,
    ) -> Completion:
        """Return the remembered completion of this prompt, or a new one."""
        asked = digest_of(list(prompt))
        if past := self._memory.recall("completion"):
            if past["prompt"] != asked:
                raise Diverged("another prompt")
            tokens = [Token(*each) for each in past["tokens"]]
            if on_tokens:
                on_tokens(tokens)
            return Completion(tokens, past["finish_reason"], past["stopped_by"], past["cached"])
        done = await self._policy.generate(prompt, sampling, session=session, on_tokens=on_tokens)
        self._memory.keep("completion", {
            "prompt": asked, "tokens": [token[:4] for token in done.tokens], "finish_reason": done.finish_reason,
            "stopped_by": done.stopped_by, "cached": done.cached,
        })  # fmt: skip
        return done

    async def close(self) -> None:
        """Leave the policy to whoever opened it."""


class RememberedTools:
    """Tools whose answers are remembered."""

    def __init__(self, tools: Tools, memory: Memory) -> None:
        self._tools, self._memory = tools, memory

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """Return what the policy is told of them."""
        return self._tools.specs

    @property
    def plan_text(self) -> str:
        """Return the to-do list."""
        return self._tools.plan_text

    async def run(self, calls: Sequence[Call]) -> list[Answer]:
        """Run calls. Where their answers are remembered these are returned, if the new ones are the same but for chance."""
        past = self._memory.recall("answers")
        answers = await self._tools.run(calls)
        if past is None:
            self._memory.keep("answers", [[a.text, a.failed, a.seconds, dict(a.details)] for a in answers])
            return answers
        if [alike(text) for text, *_ in past] != [alike(answer.text) for answer in answers]:
            raise Diverged("another answer")
        return [Answer(call, *each) for call, each in zip(calls, past, strict=True)]


def alike(text: str) -> str:
    """Return what two runs of the same command on the same files have in common."""
    return CHANCE.sub("#", text)
