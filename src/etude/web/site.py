"""Which address shows what: the one table that the server answers by and the export writes by.

Addresses end in .html and have no other parts than these, so none leads out of what is shown:

    index.html                           all runs
    compare.html?run=A&run=B             several beside each other
    agents.html, agents/ID.html          sessions of the agent, one of them; of a server alone
    run/RUN/index.html                   one run; recipe.html, family.html
    run/RUN/STAGE/index.html             a stage; step-N, steps-N-M, group-N, rollout-N-M, rollout-N-M-NODE;
                                         task-N, trial-N, trial-N-NODE
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from etude.errors import UserError
from etude.web import episode, learning, overview, results
from etude.web.agents import AGENTS
from etude.web.html import Html, frame, note
from etude.web.overview import page_of
from etude.web.reading import why

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from etude.web.agents import Agents
    from etude.web.overview import View
    from etude.web.reading import Run, Shelf, Stage

OF_RUN: dict[str, Callable[[Run], View]] = {
    "index": overview.run, "recipe": overview.recipe, "family": results.family,
}  # fmt: skip
OF_KIND: dict[str, Callable[[Stage], View]] = {
    "rl": learning.learning, "bench": results.bench, "release": results.release, "base": results.plain,
    "compare": results.plain, "merge": results.plain,
}  # fmt: skip
NUMBERED: dict[tuple[str, int], Callable[..., View]] = {
    ("step", 1): learning.step, ("steps", 2): learning.steps, ("group", 1): learning.group,
    ("rollout", 2): episode.rollout, ("rollout", 3): episode.tokens,
    ("task", 1): results.task, ("trial", 1): results.trial, ("trial", 2): results.trial_tokens,
}  # fmt: skip
NAME = re.compile(r"([a-z]+)((?:-[0-9]{1,9}){0,3})\.html")
READABLE = (OSError, UserError, ValueError)


class Site:
    """The pages of some runs."""

    def __init__(self, shelf: Shelf, agents: Agents | None = None) -> None:
        self.shelf, self.agents = shelf, agents

    def view(self, path: str, asked: Sequence[tuple[str, str]] = ()) -> View:
        """Return what is at an address, its parts unquoted. KeyError: nothing is."""
        parts = path.split("/")
        match parts:
            case ["index.html"] | [""]:
                return overview.runs(self.shelf)
            case ["compare.html"]:
                return overview.compare([self.shelf.run(value) for name, value in asked if name == "run"])
            case ["agents.html"] if self.agents:
                return self.agents.all()
            case ["agents", name] if self.agents and name.endswith(".html"):
                return self.agents.one(name.removesuffix(".html"))
            case ["run", key, name] if name.removesuffix(".html") in OF_RUN and name.endswith(".html"):
                return OF_RUN[name.removesuffix(".html")](self.shelf.run(key))
            case ["run", key, stage, name]:
                return self._of_stage(self.shelf.run(key).stage(stage), name, asked)
        raise KeyError(path)

    def _of_stage(self, stage: Stage, name: str, asked: Sequence[tuple[str, str]]) -> View:
        if (found := NAME.fullmatch(name)) is None:
            raise KeyError(name)
        numbers = [int(each) for each in found[2].split("-")[1:]]
        try:
            if found[1] == "index" and not numbers:
                if stage.kind == "data":
                    return results.data(stage, next((value for key, value in asked if key == "q"), "")[:200])
                return OF_KIND.get(stage.kind, learning.training)(stage)
            return NUMBERED[found[1], len(numbers)](stage, *numbers)
        except READABLE as error:
            kind = "empty" if stage.state in {"waiting", "running"} else "warning"
            return page_of(stage, note(why(error), kind))

    def mark(self, key: str) -> str:
        """Return what changes with a run, with the sessions of the agent, or, without a key, with any run."""
        if self.agents and key == AGENTS:
            return self.agents.mark
        return self.shelf.run(key).mark if key else "".join(each.mark for each in self.shelf.runs)

    def page(self, path: str, asked: Sequence[tuple[str, str]] = (), *, served: bool = True, token: str = "") -> Html:
        """Return a whole page. `served`: by a server, from which news may come."""
        view, depth = self.view(path, asked), path.count("/")
        events = f"{'../' * depth}events?run={view.run}" if view.live and served else ""
        return frame(
            view.title, view.body, depth=depth, crumbs=view.crumbs, events=events, token=token, state=view.state,
            agents=self.agents is not None and view.run != AGENTS,
        )  # fmt: skip
