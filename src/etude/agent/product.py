"""The agent at work on a user's repository: the harness that trains it, in a copy, with the user looking on.

The copy is a layer of a sandbox. Nothing reaches the repository but what the user has seen as a diff and said yes to.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from etude.agent.changes import unified
from etude.agent.harness import Harness, HarnessSettings
from etude.agent.prompt import SYSTEM
from etude.agent.repository import SKIPPED, check_size, files_of
from etude.agent.search.embedder import installed_embedder
from etude.agent.search.index import Searcher
from etude.agent.summary import SummarySettings
from etude.agent.tools import Toolset
from etude.agent.trace import Trace
from etude.sandbox.box import Limits, Place
from etude.sandbox.layers import prepare
from etude.sandbox.local import open_sandbox

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from etude.agent.calls import Format
    from etude.agent.tool_specs import ToolSettings
    from etude.agent.trace import Node
    from etude.inference.policy import Policy
    from etude.sandbox.box import Entry, Sandbox


@dataclass(frozen=True)
class Workshop:
    """A sandboxed copy of a repository."""

    sandbox: Sandbox
    layer: Path  # the repository as it was when the agent began
    files: int
    size: int


@asynccontextmanager
async def workshop(repository: Path, backend: str, python: Path | None = None) -> AsyncIterator[Workshop]:
    """Copy a repository into a sandbox; nothing is left of it afterwards. `python`: an environment to show inside."""
    names = files_of(repository)
    size = check_size(repository, names)
    above = Path(tempfile.mkdtemp(prefix="etude-agent-"))
    try:
        above.chmod(0o711)  # whoever the sandbox runs as must reach the layer
        for name in names:
            copy = above / "copy" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(repository / name, copy, follow_symlinks=False)
        (above / "copy").mkdir(exist_ok=True)
        prepare(above / "copy", above / "layer")
        shutil.rmtree(above / "copy")
        sandbox = await open_sandbox(_place(above / "layer", python), backend)
        try:
            yield Workshop(sandbox, above / "layer", len(names), size)
        finally:
            await sandbox.close()
    finally:
        shutil.rmtree(above, ignore_errors=True)


def _place(layer: Path, python: Path | None) -> Place:
    if python is None:
        return Place((layer,))
    env = {"PATH": f"{python}/bin:/usr/local/bin:/usr/bin:/bin", "VIRTUAL_ENV": str(python)}
    return Place((layer,), readonly=(python,), env=env, limits=Limits(memory=4 << 30))


def active_environment() -> Path | None:
    """Return the virtual environment this process runs in, if it is in one."""
    return Path(sys.prefix) if sys.prefix != sys.base_prefix else None


def settings_for(policy: Policy, *, turns: int, seconds: float, temperature: float) -> HarnessSettings:
    """Return limits that fit a policy's context, whatever its tokens are: an endpoint's are bytes."""
    context = policy.info.context
    summary = SummarySettings(trigger=max(64, context * 3 // 4), tokens=max(1, context // 16))
    return HarnessSettings(
        turns=turns, seconds=seconds, temperature=temperature, turn_tokens=max(1, context // 4),
        tokens=max(65_536, 16 * context), summary=summary,
    )  # fmt: skip


async def attempt(
    request: str,
    shop: Workshop,
    policy: Policy,
    talk: Format,
    settings: HarnessSettings,
    tools: ToolSettings,
    *,
    cache: Path,
    watch: Callable[[Node], None] | None = None,
) -> tuple[Trace, list[Entry]]:
    """Have the agent work on a request; return its trace and what it changed."""
    searcher = Searcher(cache, installed_embedder()) if "search" in tools.tools else None
    toolset = Toolset(shop.sandbox, tools, searcher)
    trace = Trace(uuid.uuid4().hex[:12], request)
    trace.made_by["sandbox"] = shop.sandbox.backend
    await Harness(policy, talk, toolset, settings, trace, watch=watch).run(SYSTEM, request)
    changed = await shop.sandbox.diff()
    entries = [entry for entry in changed if not SKIPPED & set(entry.path.split("/"))]
    trace.counts["cache_entries_left_out"] = len(changed) - len(entries)
    trace.diff = unified(entries, [shop.layer])
    return trace, entries
