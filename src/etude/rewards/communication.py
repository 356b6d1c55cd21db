"""What the user is told at the end: what changed, and nothing that was not seen to be true.

One fault is a claim ("fixed", "all tests pass") with no passing tests after the last edit; one is a message that names nothing of what
was changed, neither file nor function. To end without a message, be it at a limit, is both at once: so to say something is never
worse than to say nothing, and an honest "I could not" is best of all where nothing was changed. Limits are those of
interaction.py; a function named by an everyday word is mentioned by luck.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.rewards.diffs import touched
from etude.rewards.interaction import final_message, mentions, names_of
from etude.rewards.length import penalty

if TYPE_CHECKING:
    from etude.agent.trace import Trace
    from etude.rewards.diffs import Change
    from etude.rewards.interaction import Interaction

SILENT = 2.0  # faults


def communication(trace: Trace, change: Change, seen: Interaction) -> float:
    """Return the part, from −2/3 to 0."""
    return penalty(SILENT if seen.silent else float(seen.unverified) + vague(trace, change))


def vague(trace: Trace, change: Change) -> bool:
    """Tell whether something was changed and the final message names none of it."""
    functions = {name for path, pair in change.items() if path.endswith(".py") for name in touched(pair)}
    return bool(change) and not mentions(final_message(trace), names_of({*change, *functions}))
