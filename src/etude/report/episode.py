"""An episode for people: what was thought, done and answered, in the order it happened.

Whatever a sandbox or a policy wrote may be hostile to a terminal: `visible` shows control characters, and never sends them.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from etude import errors
from etude.rewards.reward import total

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, RenderableType

    from etude.agent.trace import Node, Trace

FOLD = 8  # lines of an output that are shown
_MAIN = ("path", "command", "pattern", "query", "file")  # what a call is about, if it has one of these
_DIFF = {"+": "green", "-": "red", "@": "cyan"}
_KINDS = ("thinking", "calls", "said", "answers", "summary")


def visible(text: str) -> str:
    """Return a text that does nothing to a terminal; lines and tabs stay."""
    return errors.visible(text.replace("\r\n", "\n"), errors.LAYOUT)


def show(trace: Trace, console: Console, *, full: bool = False) -> None:
    console.print(_head(trace))
    live = Live(console, full=full)
    for node in trace.nodes:
        live.node(node)
    if trace.diff:
        console.print(_rule("what it changed"))
        console.print(shown_diff(trace.diff), soft_wrap=True)


def ending(trace: Trace) -> str:
    """Say why an episode ended."""
    whys = {"finished": "done", "malformed": "gave up: its calls could not be read"}
    return whys.get(trace.stop, f"stopped: limit of {trace.stop}")


def shown_diff(diff: str) -> Text:
    return _coloured(diff.rstrip("\n").split("\n"))


class Live:
    """Prints an episode node by node, as they come."""

    def __init__(self, console: Console, *, full: bool = False) -> None:
        self.console, self.fold, self.turns = console, None if full else FOLD, 0

    def node(self, node: Node) -> None:
        self.turns += node.kind == "turn" and "said" in node.details
        for part in _node(node, self.turns, self.fold):
            self.console.print(part, soft_wrap=isinstance(part, Text))


def reward_of(trace: Trace) -> float | None:
    """Return the reward of an episode of RL by the weights at its end; other traces have parts that do not add up to one."""
    weights = trace.made_by.get("reward_weights")
    return total(trace.rewards, weights) if weights else None


def _head(trace: Trace) -> Table:
    table = Table.grid(padding=(0, 2))
    made, sampled = trace.made_by, sum(len(node.tokens) for node in trace.nodes if node.sampled)
    parts = ", ".join(f"{name} {value:+.3g}" for name, value in trace.rewards.items())
    reward = reward_of(trace)
    kinds = [f"{kind} {count}" for kind in _KINDS if (count := trace.counts.get(f"tokens_{kind}"))]
    rows = {
        "episode": trace.id, "task": trace.task, "policy": str(made.get("policy", "")), "format": str(made.get("format", "")),
        "sandbox": str(made.get("sandbox", "")), "stop": trace.stop,
        "reward": "" if reward is None else f"{reward:.3g}", "parts": f"{parts} (without weights)" if parts else "",
        "tokens": f"{sampled} sampled" + (f" ({', '.join(kinds)})" if kinds else ""),
    }  # fmt: skip
    for name, value in rows.items():
        if value:
            table.add_row(Text(name, "dim"), Text(visible(value), "bold" if name == "reward" else ""))
    return table


def _node(node: Node, turns: int, fold: int | None) -> Iterator[RenderableType]:
    details = node.details
    if node.kind in {"turn", "summary"}:
        begun = node.kind == "turn" and "said" not in details  # the harness ended its thinking; the rest comes
        title = "summary" if node.kind == "summary" else "turn, begun" if begun else f"turn {turns}"
        yield _rule(f"{title} · {len(node.tokens)} tokens · {node.seconds:.1f} s")
        if thinking := details.get("thinking"):
            yield _lines(thinking, fold, "dim italic")
        if said := details.get("said", node.text):
            yield _lines(said, None)
        for call in details.get("calls", ()):
            yield from _call(call["name"], call["arguments"], fold)
        for fault in details.get("malformed", ()):
            yield Text(f"✗ malformed: {visible(fault)}", "red")
    elif "answers" in details:
        for answer in details["answers"]:
            mark, style = ("✗", "red") if answer.get("failed") else ("↳", "dim")
            yield Text(f"  {mark} {visible(str(answer.get('name', '')))} {answer.get('seconds', 0):.1f} s", style)
            yield _lines(answer["text"], fold, indent=4)
        if request := details.get("request"):
            yield _lines(request, fold, "yellow")
    elif node.kind == "restart":
        yield Rule(Text("context restarted from the summary", "bold magenta"), style="magenta", characters="═")
        yield _lines(node.text, fold, "magenta")
    else:
        yield _lines(node.text, fold, "dim" if node.kind == "opening" else "yellow")


def _call(name: str, arguments: dict[str, Any], fold: int | None) -> Iterator[RenderableType]:
    plain = {key: value if isinstance(value, str) else repr(value) for key, value in arguments.items()}
    texts = {visible(key): visible(value) for key, value in plain.items()}
    main = next((texts.pop(key) for key in _MAIN if key in texts), "")
    pair = (texts.pop("old").split("\n"), texts.pop("new").split("\n")) if {"old", "new"} <= texts.keys() else None
    short = [f"{key}={texts.pop(key)}" for key in list(texts) if len(texts[key]) <= 60 and "\n" not in texts[key]]
    yield Text.assemble((f"▸ {visible(name)} ", "bold cyan"), main, (f"  {' '.join(short)}" if short else "", "dim"))
    if pair:
        changes = list(difflib.unified_diff(pair[0], pair[1], lineterm="", n=2))[2:]
        yield _coloured(_folded([line for line in changes if not line.startswith("@@")], fold), "    ")
    for text in texts.values():
        yield _lines(text, fold, "green", indent=4)


def _rule(title: str) -> Rule:
    return Rule(Text(title, "bold"), align="left", style="dim")


def _lines(text: str, fold: int | None, style: str = "", indent: int = 2) -> Text:
    shown = visible(text).rstrip("\n").split("\n")
    return Text("\n".join(" " * indent + line for line in _folded(shown, fold)), style)


def _coloured(lines: Sequence[str], indent: str = "") -> Text:
    return Text("\n").join(Text(indent + visible(line), _DIFF.get(line[:1], "dim")) for line in lines)


def _folded(lines: Sequence[str], fold: int | None) -> list[str]:
    if fold is None or len(lines) <= fold + 1:  # one line more takes no more room than saying so
        return list(lines)
    return [*lines[:fold], f"… {len(lines) - fold} lines"]
