"""The FLOPs of training and sampling, and whose they are: the base's or its makers' own.

**Model FLOPs** are counted from the shape of the model, attention as causal. For a model with N multiplied parameters (every weight
that meets every token: experts count by the share that is routed to, the input embedding is a lookup and does not count, a tied head
does) one token costs

    2 N  +  Σ over layers  2 · heads · (d_qk + d_v) · keys

floating-point operations forward, where `keys` is how many positions the token attends to: position i of a causal
sequence sees i + 1, a sliding window w sees min(i + 1, w). Training costs three times the forward pass.
The common short cut `6 N D` leaves attention out, which is wrong by a factor of up to six in long-context training.
Masked-out positions are not counted, though a dense kernel may compute them: these are the model's FLOPs, not the chip's.

**Shares.** No one number says how much of a model's compute is its base's, so three conventions stand side by side:
- cumulative: the base with all that it was itself made from;
- immediate: only what made the released base from its own parent (of Kimi K2.5 the 15 trillion tokens on top of K2);
- device-hours: time instead of operations, which weighs sampling far more.
"Own" is every stage since the nearest base, with rollouts that were thrown away; runs that led nowhere are in no record.
A base reached on several ways, as in a merge, counts once. What is not known makes a sum a lower bound, and is named.

**Thresholds of the EU AI Act** for general-purpose models, from the Commission's guidelines of 18 July 2025: a model is taken to be
general-purpose from 10^23 FLOP up, and to carry systemic risk from 10^25 up; whoever modifies such a model becomes the provider of the
modified one if that took more than a third of the original's compute. Where that is not known, a third of the threshold stands in for
it. Training compute includes rollouts and the writing of synthetic data. Facts for engineering, not legal advice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from etude.lineage.record import Compute, Lineage, Origin, Record


@dataclass(frozen=True)
class Attention:
    """The attention of one layer."""

    heads: int
    qk_dim: int  # width of a head's queries and keys
    v_dim: int  # width of a head's values
    window: int | None = None  # keys seen at most; None: all before


@dataclass(frozen=True)
class ComputeShape:
    """What the FLOPs of a model depend on."""

    multiplied_parameters: int
    attention: tuple[Attention, ...]


def attended_keys(start: int, length: int, window: int | None = None) -> int:
    """Return the number of (query, key) pairs for the positions start … start + length − 1 of a causal sequence."""
    end = start + length
    if window is None or end <= window:
        return _triangle(end) - _triangle(start)
    growing = max(min(window, end) - start, 0)  # positions that still see all before them
    before = _triangle(start + growing) - _triangle(start) if growing else 0
    return before + (length - growing) * window


def forward_flops(shape: ComputeShape, length: int, start: int = 0) -> int:
    """Return the FLOPs to process `length` tokens of one sequence whose first `start` are already cached."""
    flops = 2 * shape.multiplied_parameters * length
    for layer in shape.attention:
        flops += 2 * layer.heads * (layer.qk_dim + layer.v_dim) * attended_keys(start, length, layer.window)
    return flops


def training_flops(shape: ComputeShape, length: int) -> int:
    """Return the FLOPs of a forward and a backward pass over one sequence."""
    return 3 * forward_flops(shape, length)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


@dataclass(frozen=True)
class Amount:
    """A value between `low` and `high`. With something unknown in it, it is a lower bound, and `high` is infinite."""

    value: float
    low: float
    high: float
    unknown: tuple[str, ...] = ()

    def __add__(self, other: Amount) -> Amount:
        """Add worst cases: errors of one method are alike, so they do not cancel out."""
        return Amount(self.value + other.value, self.low + other.low, self.high + other.high, self._missing(other))

    def share_of_sum(self, other: Amount) -> Amount:
        """Return this as a share of both together, the most being where the other is least."""
        low = self.low / (self.low + other.high) if self.low else 0.0
        high = self.high / (self.high + other.low) if math.isfinite(self.high) else 1.0
        return Amount(self.value / (self.value + other.value), low, high, self._missing(other))

    def _missing(self, other: Amount) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.unknown, *other.unknown)))

    def __str__(self) -> str:
        """Return it for people, in FLOP."""
        if self.unknown:
            what = f"not known: {', '.join(self.unknown)}"
            return f"at least {self.low:.2e} FLOP ({what})" if self.low else what
        return f"{self.value:.2e} FLOP ({self.low:.1e} to {self.high:.1e})"


NOTHING = Amount(0.0, 0.0, 0.0)


def not_known(what: str) -> Amount:
    """Return an amount of which only the name is known."""
    return Amount(0.0, 0.0, math.inf, (what,))


def exactly(value: float) -> Amount:
    """Return an amount that is known to the last digit."""
    return Amount(value, value, value)


GENERAL = 1e23
SYSTEMIC = 1e25


@dataclass(frozen=True)
class Standing:
    """One rule: `undecided` where the intervals overlap, or a part is not known."""

    rule: str
    verdict: Literal["above", "below", "undecided"]
    sentence: str


def standings(own: Amount, bases: Mapping[str, Amount]) -> tuple[Standing, ...]:
    """Compare. `bases`: the base's compute by convention, the first for the totals; empty: there is no base."""
    total = own + next(iter(bases.values()), NOTHING)
    known = {f"a third of the base, {convention}": base for convention, base in bases.items() if base.value}
    stand_ins = {
        "a third of the base, which is not known: if it is general-purpose, of 1e23": exactly(GENERAL),
        "a third of the base, which is not known: if it carries systemic risk, of 1e25": exactly(SYSTEMIC),
    }
    thirds = known or (stand_ins if bases else {})
    limits = {"general-purpose model, 1e23 FLOP": GENERAL, "systemic risk, 1e25 FLOP": SYSTEMIC}
    return (
        *(_standing(rule, "own compute", own, base, 1 / 3) for rule, base in thirds.items()),
        *(_standing(rule, "all compute", total, exactly(limit)) for rule, limit in limits.items()),
    )


def _standing(rule: str, what: str, amount: Amount, whole: Amount, part: float = 1.0) -> Standing:
    limit = Amount(whole.value * part, whole.low * part, whole.high * part, whole.unknown)
    verdict: Literal["above", "below", "undecided"] = "undecided"
    if amount.low > limit.high:
        verdict = "above"
    elif amount.high <= limit.low:
        verdict = "below"
    shown = str(limit) if limit.low < limit.high else f"{limit.value:.2e}"
    return Standing(rule, verdict, f"{what} {amount}, limit {shown}")


# How far the FLOPs may lie from what was written down, if the record does not say: factors below and above.
USUAL = {
    "measured": (0.98, 1.02),
    "operations": (0.9, 1.1),  # norms, softmax and the optimiser are left out; padding is counted
    "hardware": (0.6, 1.7),  # hours · peak · utilisation, assumed between a quarter and a half
    "disclosed": (0.8, 1.25),  # rounded, and rarely clear what it includes
    "imputed": (0.7, 2.0),  # 6·N·D: the embedding lookup is counted, attention and stages after pretraining are not
}
DIFFERENT = "hours of different devices do not compare"
LORA = 2 / 3  # of what is counted is computed: weights that stay as they are need no gradient
ROLES = {"teacher": "wrote or scored what was learnt from", "judge": "judged", "compared": "was measured"}


@dataclass(frozen=True)
class Known:
    """What is known of a model that some base continues but that is in no record."""

    pretraining: Compute | None
    continues: str | None


@dataclass(frozen=True)
class Item:
    """One line of the ledger. `generation` 0: own; 1: made the base from its parent; then what that was made from."""

    name: str
    generation: int
    compute: Compute | None  # None: not known
    flops: Amount
    record: str | None = None


@dataclass(frozen=True)
class Share:
    """Own against base in one convention, in FLOP or in device-hours. `own_share` None: `why`."""

    convention: Literal["cumulative", "immediate", "device-hours"]
    base: Amount
    own: Amount
    own_share: Amount | None
    why: str = ""

    def __str__(self) -> str:
        """Return it for people."""
        share, base = self.own_share, "" if self.convention == "device-hours" else f"; base {self.base}"
        if share is None:
            return f"{self.convention}: no share known{base}; {self.why}"
        between = f"{percent(share.value)} ({percent(share.low)} to {percent(share.high)})"
        shown = f"at most {percent(share.high)}" if share.unknown else between
        return f"{self.convention}: own share {shown}{base}{self.why and f'; {self.why}'}"


@dataclass(frozen=True)
class Shares:
    """All that is to be said of the compute behind a model."""

    bases: tuple[str, ...]  # the nearest ones; none: made from nothing
    items: tuple[Item, ...]  # own ones first, then back in time
    own: Amount  # FLOPs
    total: Amount
    shares: tuple[Share, ...]
    sampling_flops: float | None  # of the own; None: an old record of rl does not count it separately
    sandbox_seconds: float  # likewise
    standings: tuple[Standing, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON; null: not known, or without an upper end."""
        plain = asdict(self)
        for item, entry in zip(self.items, plain["items"], strict=True):
            entry["compute"] = item.compute and item.compute.model_dump(mode="json")
        return dict(_finite(plain))

    def lines(self) -> list[str]:
        """Return it in words, a line a fact."""
        since = f"since {' and '.join(self.bases)}" if self.bases else "(it has no base)"
        held = f"; sandboxes {self.sandbox_seconds / 3600:,.2f} hours" if self.sandbox_seconds else ""
        apart = "sampling is not counted separately: this rl was recorded before it was"
        if self.sampling_flops is not None:
            learning = self.own.value - self.sampling_flops
            apart = f"of it sampling {self.sampling_flops:.2e} FLOP, kept or not, and learning {learning:.2e}{held}"
        return [
            f"own compute {since}: {self.own}",
            apart,
            *map(str, self.shares if self.bases else ()),
            *(f"EU, {each.rule}: {each.verdict}: {each.sentence}" for each in self.standings),
            *self.notes,
        ]


def compute_shares(lineage: Lineage, known: Mapping[str, Known] | None = None) -> Shares:
    """Add up a model's tree. `known`: by title, models without a record that bases continue."""
    items = sorted(_items(lineage, known or {}), key=lambda item: item.generation)
    own, base = [item for item in items if not item.generation], [item for item in items if item.generation]
    spent, cumulative = _total(own), _total(base)
    immediate = _total(item for item in base if item.generation == 1)
    bases = {"cumulative": cumulative} | ({} if immediate == cumulative else {"immediate": immediate})
    records, names = since_base(lineage)
    return Shares(
        bases=tuple(names),
        items=tuple(items),
        own=spent,
        total=spent + cumulative,
        shares=(_share("cumulative", cumulative, spent), _share("immediate", immediate, spent), _hours(base, own)),
        sampling_flops=_sampling(records),
        sandbox_seconds=sum(record.compute.sandbox_seconds or 0.0 for record in records),
        standings=standings(spent, bases if names else {}),
        notes=tuple(_notes(records)),
    )


def since_base(lineage: Lineage) -> tuple[list[Record], list[str]]:
    """Return the model's own records, the newest first, and the names of the bases they lead back to."""
    own, bases, waiting = [], [], [lineage.records[lineage.head]]
    for record in waiting:  # which grows meanwhile
        if record.origin:
            bases.append(record.origin.name)
            continue
        own.append(record)
        weights = [parent for parent in record.parents if parent.role == "weights"]
        bases += [parent.name for parent in weights if not parent.record]
        above = [lineage.records[parent.record] for parent in weights if parent.record]
        waiting += [parent for parent in above if parent not in waiting]
    return own, list(dict.fromkeys(bases))


def _items(lineage: Lineage, known: Mapping[str, Known]) -> Iterator[Item]:
    """Walk back along weights, own records first, each record once and each foreign base once, by its weights."""
    waiting, seen = [(0, lineage.head, False)], set()
    while waiting:
        waiting.sort()
        generation, key, counted = waiting.pop(0)
        record = lineage.records[key]
        if key in seen:
            continue
        seen.add(key)
        edges = [parent for parent in record.parents if parent.role == "weights"]
        # A base that another run took over as it was is the same base, not a generation.
        if record.origin and (counted or generation == 0):
            generation, counted = generation + 1, False
        if record.origin and not edges and record.model_digest not in seen:
            seen.add(record.model_digest)
            yield from _foreign(record.origin, generation, known)
        if record.compute.model_flops:
            yield Item(record.stage, generation, record.compute, _interval(record.compute, record), key)
            counted = True
        for parent in edges:
            if parent.record:
                waiting.append((generation, parent.record, counted))
            elif parent.model_digest not in seen:
                seen.add(parent.model_digest)
                yield _unrecorded(f"{parent.name}, which carries no record", generation + 1, None)


def _foreign(origin: Origin, generation: int, known: Mapping[str, Known]) -> Iterator[Item]:
    """Yield the pretraining of a base that others made, and of what it continues."""
    yield _unrecorded(f"pretraining of {origin.name}", generation, origin.pretraining)
    name = origin.continues
    while name is not None:
        generation += 1
        about = known.get(name, Known(None, None))
        yield _unrecorded(f"pretraining of {name}", generation, about.pretraining)
        name = about.continues


def _unrecorded(name: str, generation: int, compute: Compute | None) -> Item:
    return Item(name, generation, compute, _interval(compute) if compute else not_known(name))


def _interval(compute: Compute, record: Record | None = None) -> Amount:
    below, above = USUAL[compute.method]
    below *= LORA if record and record.recipe.stage.get("lora") else 1.0
    value, low, high = compute.model_flops, compute.low, compute.high
    return Amount(value, value * below if low is None else low, value * above if high is None else high)


def _total(items: Iterable[Item]) -> Amount:
    return sum((item.flops for item in items), NOTHING)


def _share(convention: Literal["cumulative", "immediate"], base: Amount, own: Amount) -> Share:
    known = base.value or (own.value and not base.unknown)
    return Share(convention, base, own, own.share_of_sum(base) if known else None, "" if known else "nothing is known")


def _hours(base: list[Item], own: list[Item]) -> Share:
    """Compare time on devices, which says something only where they are alike."""
    before, since = (sum(map(_time, side), NOTHING) for side in (base, own))
    both, spent = before + since, defaultdict[str, float](float)
    for compute in (item.compute for item in (*base, *own)):
        if compute and compute.device_seconds:
            spent[compute.device or "a device that is not named"] += compute.device_seconds / 3600
    listed = [f"{hours:,.2f} hours on {device}" for device, hours in spent.items()]
    if both.unknown or len(spent) != 1:
        why = f"hours not known: {', '.join(both.unknown)}" if both.unknown else DIFFERENT
        return Share("device-hours", before, since, None, "; ".join(filter(None, (", ".join(listed), why))))
    return Share("device-hours", before, since, since.share_of_sum(before), listed[0])


def _time(item: Item) -> Amount:
    if item.compute is None or item.compute.device_seconds is None:
        return not_known(item.name)
    return exactly(item.compute.device_seconds / 3600)


def _sampling(records: list[Record]) -> float | None:
    if any(record.kind == "rl" and record.compute.sampling_flops is None for record in records):
        return None
    return sum(record.compute.sampling_flops or 0.0 for record in records)


def _notes(records: list[Record]) -> Iterator[str]:
    """Yield what the sums do not hold."""
    for record in records:
        for parent in record.parents:
            if parent.role in ROLES:
                yield f"{parent.name} {ROLES[parent.role]} ({record.stage}); its own training counts only if it is an ancestor too"
    yield "runs that led nowhere, and work lost to a kill, are in no record"


def percent(share: float) -> str:
    """Return a share in percent, with the digits that tell it from 0 and from 100."""
    small = 100 * min(share, 1 - share)
    digits = min(max(1 - math.floor(math.log10(small)), 0), 12) if small > 0 else 0
    return f"{100 * share:.{digits}f} %"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if value == math.inf else value
