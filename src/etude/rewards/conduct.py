"""How the tools were used: calls that cannot be read or cannot work, plans left open, the terminal for everything.

A malformed call is a whole fault. Where such episodes went unscored, policies have learnt to break calls on tasks they expected to
fail. To-dos left open are half a fault each: a plan is a promise. A call that its tool refused is an eighth: looking for a file
that is not there is part of the work. Commands that exit with another code than 0 are not refused, so a failing test costs nothing.
An episode without any call is three faults, as many broken calls as end one: else babble is the way out of breaking calls, and
sprout took it (lab notes).

The terminal can do what all tools do, and policies collapse to it, past what the product sees and shows. Above four fifths of the
calls it begins to cost, up to a fault; not in episodes of fewer than five calls, nor where there is no other tool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.rewards.length import penalty

if TYPE_CHECKING:
    from etude.agent.trace import Trace
    from etude.rewards.interaction import Interaction

TERMINALS = frozenset({"shell", "bash"})
OPEN_TODO, REFUSED, NO_CALL = 0.5, 0.125, 3.0  # faults
MUCH_TERMINAL, FEW_CALLS = 0.8, 5


def conduct(trace: Trace, seen: Interaction) -> float:
    """Return the part, above −1 and at most 0."""
    refused = trace.counts.get("failed_calls", 0)
    idle = 0.0 if seen.malformed or trace.counts.get("calls", 0) else NO_CALL
    return penalty(seen.malformed + OPEN_TODO * seen.open_todos + REFUSED * refused + collapse(trace) + idle)


def collapse(trace: Trace) -> float:
    """Return how far the calls have collapsed to the terminal, from 0 to 1."""
    share = terminal_share(trace)
    if share is None or trace.counts["calls"] < FEW_CALLS:
        return 0.0
    return max(0.0, share - MUCH_TERMINAL) / (1.0 - MUCH_TERMINAL)


def terminal_share(trace: Trace) -> float | None:
    """Return the share of calls that went to the terminal; None if there were none, or nothing else was offered."""
    calls = trace.counts.get("calls", 0)
    if not calls or TERMINALS.issuperset(trace.made_by.get("tools", ())):
        return None
    return sum(trace.counts.get(f"calls_{name}", 0) for name in TERMINALS) / calls
