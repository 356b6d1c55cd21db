"""The reward of an episode: named parts that add up, each with a weight and logged by its name.

The outcome is from 0 to 1, every other part from −1 to 0, and their weights together are far below the outcome's. So a solved task is
always worth more than an unsolved one, whatever the manners; manners decide between episodes that are alike in outcome. Length and
conduct weigh more than style and communication: they are counted, while those are read by blunt rules, which a policy would
learn to please. Every episode is scored by all parts, failed and malformed ones too: what is not scored is a place to hide.

Length and faults are bent by one concave cost, Composer 2's cost of effort:

    C(x) = ((1 + kx)^(1−q) − 1) / (k(1−q)),   C'(x) = (1 + kx)^−q

The slope is 1 at the beginning and falls: on an easy task every turn saved is felt, while a hard one may take long, as the thousandth
step hardly costs more. q = 0 is linear, q = 1 the logarithm ln(1 + kx)/k; above 1 the whole cost stays below 1/(k(q−1)). With our
k = 1 and q = 2 it is x/(1 + x): never 1, so that its weight is the most it can ever take away, and no episode is too long to be worth
solving. A fault costs a half, each more costs less, yet something.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from etude.errors import UserError, nearest
from etude.rewards.interaction import final_message, mentions, names_of
from etude.rewards.quality import touched

if TYPE_CHECKING:
    from collections.abc import Mapping

    from etude.agent.trace import Trace
    from etude.rewards.interaction import Interaction
    from etude.rewards.quality import Change, Quality

PARTS = ("outcome", "length", "style", "communication", "conduct")
EFFORT = {  # by price: what the harness calls it, and how many of it the price is for
    "thinking_tokens": ("tokens_thinking", 1000),
    "call_tokens": ("tokens_calls", 1000),
    "answer_tokens": ("tokens_answers", 1000),
    "said_tokens": ("tokens_said", 1000),
    "calls": ("calls", 1),
    "turns": ("turns", 1),
}
# In faults, whose unit is one forgotten scratch file, or one malformed call.
LINT, LITTER, UNPARSABLE = 0.25, 0.5, 4.0  # of a finding; of a print or a dead line left; of a file
CROWDED = 4.0  # of code that is nothing but comments, as many as of code that does not parse
SILENT = 2.0
OPEN_TODO, REFUSED, NO_CALL = 0.5, 0.125, 3.0
USUAL_COMMENTS = 0.2  # share of lines that hold one, where the reference has fewer
FULL_LINES = 20
TERMINALS = frozenset({"shell", "bash"})
MUCH_TERMINAL, FEW_CALLS = 0.8, 5


class LengthSettings(BaseModel):
    """Prices of effort, and how the cost bends.

    The report on Composer 2 keeps k, q and the prices to itself; ours make x = 1 of an ordinary repair: fifteen turns, twenty calls,
    five thousand tokens written, ten thousand read. Reading is cheaper than writing; calls made together save turns. All that is
    said counts, not only the last message: what is free would become the place to think in. Summaries do not count: memory that
    costs is made short, not good, and their length has a limit of its own. In groups that nobody solves the cost teaches to give up
    soon; where a weak policy does that, lower `failed`.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    k: float = Field(default=1.0, gt=0, description="steepness of the penalty")
    q: float = Field(default=2.0, ge=0, description="concavity of the penalty (0 = linear; above 1 it is bounded)")
    thinking_tokens: float = Field(default=0.1, ge=0, description="price of a thousand tokens of thinking")
    call_tokens: float = Field(default=0.1, ge=0, description="price of a thousand tokens of calls")
    answer_tokens: float = Field(default=0.01, ge=0, description="price of a thousand tokens of tool output")
    said_tokens: float = Field(default=0.1, ge=0, description="price of a thousand tokens of text to the user")
    calls: float = Field(default=0.01, ge=0, description="price of a tool call")
    turns: float = Field(default=0.02, ge=0, description="price of a turn, for which the user waits")
    failed: float = Field(default=1.0, ge=0, le=1, description="share of the penalty on unsolved episodes")

    @model_validator(mode="after")
    def _has_a_price(self) -> LengthSettings:
        if not any(getattr(self, name) for name in EFFORT):
            raise ValueError("all prices of effort are 0; set the reward's weight of length to 0 instead")
        return self


class RewardSettings(BaseModel):
    """Weights of the parts, and what two of them need to know."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    outcome: float = Field(default=1.0, ge=0, description="weight of tests passed")
    length: float = Field(default=0.1, ge=0, description="weight of the length penalty")
    style: float = Field(default=0.05, ge=0, description="weight of lint, too many comments, files left behind")
    communication: float = Field(default=0.05, ge=0, description="weight of unproven claims, no report, a vague report")
    conduct: float = Field(default=0.1, ge=0, description="weight of malformed calls, open to-dos, edits by shell only")
    partial: float = Field(default=0.0, ge=0, le=0.5, description="partial credit, times the share of tests passed")
    effort: LengthSettings = LengthSettings()

    @model_validator(mode="after")
    def _rewards_something(self) -> RewardSettings:
        if not any(weights(self).values()):
            raise ValueError(f"all weights of the reward are 0: nothing can be learnt; set one of {', '.join(PARTS)}")
        return self


@dataclass(frozen=True)
class Facts:
    """What is known of a finished episode."""

    trace: Trace
    outcome: Literal["pass", "fail"]
    fail_to_pass: float  # share of the failing tests that pass now
    pass_to_pass: float
    change: Change  # the files it changed, before and after; empty: none
    quality: Quality | None  # None: nothing was changed
    interaction: Interaction


def parts(facts: Facts, settings: RewardSettings) -> dict[str, float]:
    """Return every part without its weight, by the names of PARTS."""
    trace, solved = facts.trace, facts.outcome == "pass"
    return {
        "outcome": outcome(facts.fail_to_pass, facts.pass_to_pass, solved=solved, partial=settings.partial),
        "length": length(trace.counts, settings.effort, solved=solved),
        "style": style(facts.quality),
        "communication": communication(trace, facts.change, facts.interaction),
        "conduct": conduct(trace, facts.interaction),
    }


def outcome(fail_to_pass: float, pass_to_pass: float, *, solved: bool, partial: float) -> float:
    """Return 1 if every test passes that should, else 0, or as much of `partial` as the share of tests that pass.

    Shares are worth nothing unless a recipe says so. Only a whole pass is run again with spoilt tests, so a change that cheats its
    way to some of them would be paid unseen; and a share of the tests is often had by special cases for what was shown. Where a weak
    policy solves nothing at all, `partial` gives it a slope to climb. Unsolved though all tests passed: the reports were forged,
    which is worth nothing.
    """
    if solved:
        return 1.0
    share = fail_to_pass * pass_to_pass  # nothing done repairs nothing, and what is broken besides counts against it
    return partial * share if share < 1 else 0.0


def cost(x: float, k: float = 1.0, q: float = 2.0) -> float:
    """Return C(x) for x ≥ 0, precise also where q is almost 1."""
    growth, bend = math.log1p(k * x), 1.0 - q
    return (math.expm1(bend * growth) / bend if bend else growth) / k


def penalty(faults: float) -> float:
    return -cost(faults)


def length(counts: Mapping[str, int], settings: LengthSettings, *, solved: bool) -> float:
    """Return −C(effort), for unsolved episodes the share of it that they pay."""
    return -cost(effort(counts, settings), settings.k, settings.q) * (1.0 if solved else settings.failed)


def effort(counts: Mapping[str, int], settings: LengthSettings) -> float:
    return float(sum(getattr(settings, name) * counts.get(key, 0) / per for name, (key, per) in EFFORT.items()))


def style(quality: Quality | None) -> float:
    """Return what the code left behind costs, above −1 and at most 0: faults that a reviewer would send back.

    Lint findings are common and small; a file that is no longer Python is four faults at once. Comments count where they crowd the
    code: policies that pay for thinking have been seen to do it in comments. The measure is the reference's own share of commented
    lines, or what is usual, whichever is larger: of 10,876 functions of eight lines or more, in packages that we install, nine in
    ten have a comment on at most a fifth of their lines. A few lines say little of a share, so it counts in full from twenty changed
    lines on.

    An episode that changed no code has no faults to show, and would be the best-mannered of a group that solves nothing. It counts
    as one fault, since a change was asked for. Limits: thinking in docstrings is not seen; taste neither.
    """
    return penalty(faults(quality))


def faults(quality: Quality | None) -> float:
    if quality is None or not quality.lines:
        return 1.0
    litter = quality.debug_prints + quality.commented_code
    files = quality.scratch_files + UNPARSABLE * quality.unparsable
    return LINT * quality.lint + LITTER * litter + files + CROWDED * crowding(quality)


def crowding(quality: Quality) -> float:
    """Return how far the share of commented lines is above the usual one, from 0 to 1."""
    usual = max(USUAL_COMMENTS, quality.reference_comment_density or 0.0)
    above = max(0.0, (quality.comment_density or 0.0) - usual)
    return above / (1.0 - usual) * min(1.0, quality.lines / FULL_LINES) if above else 0.0


def communication(trace: Trace, change: Change, seen: Interaction) -> float:
    """Return what the final message costs, from −2/3 to 0: it should say what changed, and nothing that was not seen to be true.

    One fault is a claim ("fixed", "all tests pass") with no passing tests after the last edit; one is a message that names nothing of
    what was changed, neither file nor function. To end without a message, be it at a limit, is both at once: so to say something is
    never worse than to say nothing, and an honest "I could not" is best of all where nothing was changed. Limits are those of
    interaction.py; a function named by an everyday word is mentioned by luck.
    """
    return penalty(SILENT if seen.silent else float(seen.unverified) + vague(trace, change))


def vague(trace: Trace, change: Change) -> bool:
    """Return whether something was changed and the final message names none of it."""
    functions = {name for path, pair in change.items() if path.endswith(".py") for name in touched(pair)}
    return bool(change) and not mentions(final_message(trace), names_of({*change, *functions}))


def conduct(trace: Trace, seen: Interaction) -> float:
    """Return what the use of tools costs, above −1 and at most 0.

    A malformed call is a whole fault. Where such episodes went unscored, policies have learnt to break calls on tasks they expected to
    fail. To-dos left open are half a fault each: a plan is a promise. A call that its tool refused is an eighth: looking for a file
    that is not there is part of the work. Commands that exit with another code than 0 are not refused: a failing test costs nothing.
    An episode without any call is three faults, as many broken calls as end one: else babble is the way out of breaking calls, and
    sprout took it (lab notes).

    The terminal can do what all tools do, and policies collapse to it, past what the product sees and shows. Above four fifths of the
    calls it begins to cost, up to a fault; not in episodes of fewer than five calls, nor where there is no other tool.
    """
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


def behaviour(facts: Facts) -> dict[str, float]:
    """Return what monitors watch: numbers of one episode whose drift shows a habit. What has no meaning here is left out."""
    trace, seen, quality, counts = facts.trace, facts.interaction, facts.quality, facts.trace.counts
    used = [name for name in trace.made_by.get("tools", ()) if f"calls_{name}" in counts]
    values: dict[str, float | None] = {
        **{name: counts.get(key, 0) for name, (key, _) in EFFORT.items()},
        "malformed": seen.malformed, "failed_calls": counts.get("failed_calls", 0), "open_todos": seen.open_todos,
        "unverified": seen.unverified, "silent": seen.silent, "vague": vague(trace, facts.change),
        "final_chars": len(final_message(trace)), "summaries": counts.get("restarts", 0),
        "calls_per_turn": counts.get("calls", 0) / counts["turns"] if counts.get("turns") else None,
        "shell_share": terminal_share(trace), "distinct_tools": len(used),
        "files_changed": len(facts.change), "lines_changed": quality.lines if quality else 0,
        "comment_density": quality.comment_density if quality else None, "lint": quality.lint if quality else None,
        "scratch_files": quality.scratch_files if quality else None,
    }  # fmt: skip
    return {name: float(value) for name, value in values.items() if value is not None}


def weights(settings: RewardSettings) -> dict[str, float]:
    return {name: getattr(settings, name) for name in PARTS}


def reweighted(now: Mapping[str, float], wanted: Mapping[str, float]) -> dict[str, float]:
    """Return the weights of a running run with those that a user wants changed; UserError if that cannot be."""
    for name in sorted(wanted.keys() - set(PARTS)):
        raise UserError(f"the reward has no part {name!r}{nearest(name, PARTS)}")
    try:
        return weights(RewardSettings.model_validate({**now, **wanted}))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(f"reward weights {dict(wanted)}: {first['msg'].removeprefix('Value error, ')}") from None


def total(values: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the reward: the weighted sum of its parts."""
    return sum(weights[name] * value for name, value in values.items())
