"""What kind of code was left: faults that a reviewer would send back, in the unit of one forgotten scratch file.

Lint findings are common and small; a file that is no longer Python is four faults at once. Comments count where they crowd the code:
policies that pay for thinking have been seen to do it in comments. The measure is the reference's own share of commented lines, or
what is usual, whichever is larger: of 10,876 functions of eight lines or more, in packages that we install, nine in ten have a
comment on at most a fifth of their lines. A few lines say little of a share, so it counts in full from twenty changed lines on.

An episode that changed no code has no faults to show, and would be the best-mannered of a group that solves nothing. It counts
as one fault, since a change was asked for. Limits: thinking in docstrings is not seen; taste neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.rewards.length import penalty

if TYPE_CHECKING:
    from etude.rewards.quality import Quality

USUAL_COMMENTS = 0.2  # share of lines that hold one, where the reference has fewer
CROWDED = 4.0  # faults of code that is nothing but comments, as many as of code that does not parse
FULL_LINES = 20
LINT, LITTER, UNPARSABLE = 0.25, 0.5, 4.0  # faults of a finding; of a print or a dead line left; of a file


def style(quality: Quality | None) -> float:
    """Return the part, above −1 and at most 0."""
    return penalty(faults(quality))


def faults(quality: Quality | None) -> float:
    """Return how much there is to blame; of no change at all, one fault."""
    if quality is None or not quality.lines:
        return 1.0
    litter = quality.debug_prints + quality.commented_code
    found = LINT * quality.lint + LITTER * litter + quality.scratch_files + UNPARSABLE * quality.unparsable
    return found + CROWDED * crowding(quality)


def crowding(quality: Quality) -> float:
    """Return how far the share of commented lines is above the usual one, from 0 to 1."""
    usual = max(USUAL_COMMENTS, quality.reference_comment_density or 0.0)
    above = max(0.0, (quality.comment_density or 0.0) - usual)
    return above / (1.0 - usual) * min(1.0, quality.lines / FULL_LINES) if above else 0.0
