"""Whether the task is solved: the part that all others only colour.

1 if every test passes that should, else 0. Shares of tests are worth nothing unless a recipe says so. Only a whole pass is tried
again with spoilt tests, so a change that cheats its way to some of them would be paid unseen; and a share of the tests is often had
by special cases for what was shown. Where a weak policy solves nothing at all, `partial` gives it a slope to climb.
"""

from __future__ import annotations


def outcome(fail_to_pass: float, pass_to_pass: float, *, solved: bool, partial: float) -> float:
    """Return the part, from 0 to 1. Unsolved though all tests passed: the reports were forged, which is worth nothing."""
    if solved:
        return 1.0
    share = fail_to_pass * pass_to_pass  # nothing done repairs nothing, and what is broken besides counts against it
    return partial * share if share < 1 else 0.0
