"""What more of a training would give, from the curves of short runs: fitted, with intervals, and refused where they cannot tell.

Bits per byte against tokens follow a power law, L = E + A·n^(−b), or an exponential one; the share of tasks solved against
steps a saturating exponential, s = c − (c − s0)·exp(−n/τ), or a hyperbola. Curves of a dozen points cannot say which of the two,
and farther on they differ most: a power law goes on falling where an exponential has ended. So the forecast is the mean of both, and
half of the draws behind its interval are of each. For a given b or τ a curve is linear in its value at the first point and in its
limit, so those are solved exactly inside their bounds, and b or τ is looked for on a grid: no local minimum can be taken for the best
fit, and hundreds of curves are fitted at once.

The interval is of what will be measured. It holds three errors: of the fit (drawn again from the fitted curve with noise of uncertain
size, and fitted again) and, of three runs and more, how far they disagree; of the measurement itself; and a drift: by how
much more than noise explains a forecast from the first 60 % of the same curve missed its end, for each e-fold beyond what was seen.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Array = np.ndarray[Any, np.dtype[np.float64]]

HALF, DRAWS, TAIL, NORMAL = 500, 1000, 0.025, 1.96
FREE, FEWEST = 3, 6  # parameters of a curve; points, of which the first 60 % are one more than those
FIRST, FARTHEST = 0.6, 4.0  # of a curve, to predict its end; times what was seen
REPLICATES, PAIRS = 3, 4  # runs, whose spread is then a measure; that say what a bit per byte is worth
POWERS, RATES = np.geomspace(0.02, 3, 48), np.geomspace(0.05, 20, 48)  # b; spans of the curve in a τ


class Curve(NamedTuple):
    """What one run measured."""

    at: Array  # tokens or steps, rising
    values: Array
    weights: Array  # how much each counts, 1 on average
    bits: bool  # bits per byte, of which less is better; else a share between 0 and 1

    def part(self, share: float) -> Curve:
        """Return the first points."""
        at, values, weights = (each[: math.ceil(share * len(each))] for each in self[:3])
        return Curve(at, values, weights, self.bits)

    def end(self) -> tuple[float, float, float]:
        """Return where it ends, and with which value and weight: one episode more or less changes a share, so that is of a fifth."""
        size = 1 if self.bits else math.ceil(len(self.at) / 5)
        at, value = (float(np.average(each[-size:], weights=self.weights[-size:])) for each in self[:2])
        return at, value, float(self.weights[-size:].sum())


def bits_curve(points: Sequence[tuple[float, float]]) -> Curve:
    """Return the curve of (tokens, bits per byte), without the start (one point at least is later), and from an early peak on.

    A rise that falls later is the stability gap: the optimiser's, not what the data teach.
    """
    at, values = np.array(sorted(dict(point for point in points if point[0] > 0).items()), float).reshape(-1, 2).T
    start = top if (top := int(values.argmax())) < len(values) / 2 else 0
    return Curve(at[start:], values[start:], np.ones(len(at) - start), bits=True)


def share_curve(rows: Sequence[tuple[float, float, float]]) -> Curve:
    """Return the curve of (step, share, episodes): a step counts as many times as it saw episodes."""
    at, values, weights = np.array(sorted(row for row in rows if row[2] > 0), float).reshape(-1, 3).T
    return Curve(at, values, weights / (weights.mean() if len(weights) else 1), bits=False)


def _shapes(curve: Curve, at: Array) -> Array:
    """Return how much of the first value is left, for every curve that is tried."""
    passed = np.maximum(at - curve.at[0], 0) / np.ptp(curve.at)
    own = np.maximum(at / curve.at[0], 1) ** -POWERS[:, None] if curve.bits else 1 / (1 + RATES[:, None] * passed)
    return np.stack([own, np.exp(-RATES[:, None] * passed)])


def _fit(curve: Curve, values: Array, family: int) -> tuple[Array, Array, Array]:
    """Return the best shape for each row of values, its value at the first point and its limit: least squares inside the bounds."""
    first = _shapes(curve, curve.at)[family]
    limit, weighted = 1 - first, values * curve.weights
    ff, fl, ll = ((curve.weights * each).sum(1)[:, None] for each in (first * first, first * limit, limit * limit))
    rf, rl = first @ weighted.T, limit @ weighted.T
    low, high = 0.0, math.inf if curve.bits else 1.0
    det = np.maximum(ff * ll - fl * fl, 1e-12)
    tried = [((ll * rf - fl * rl) / det, (ff * rl - fl * rf) / det)]
    for bound in (each for each in (low, high) if math.isfinite(each)):  # else it lies on an edge
        tried.append((np.clip((rf - fl * bound) / ff, low, high), np.full_like(rf, bound)))
        tried.append((np.full_like(rf, bound), np.clip((rl - fl * bound) / np.maximum(ll, 1e-12), low, high)))
    p, q = (np.stack(each) for each in zip(*tried, strict=True))
    loss = p * p * ff + 2 * p * q * fl + q * q * ll - 2 * (p * rf + q * rl)
    loss[(p < low) | (p > high) | (q < low) | (q > high)] = np.inf
    which, best = np.unravel_index(loss.transpose(2, 0, 1).reshape(len(values), -1).argmin(1), loss.shape[:2])
    chosen = (which, best, np.arange(len(values)))
    return best, p[chosen], q[chosen]


def _continued(curve: Curve, values: Array, at: Array, family: int) -> Array:
    """Return where the curves fitted to rows of values are at some places: rows × places."""
    best, p, q = _fit(curve, values, family)
    return np.asarray(q[:, None] + (p - q)[:, None] * _shapes(curve, at)[family][best])


def _residuals(curve: Curve) -> list[Array]:
    """Return what each family leaves over."""
    return [curve.values - _continued(curve, curve.values[None], curve.at, family)[0] for family in (0, 1)]


def _drawn(curve: Curve, at: Array, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Return a curve's continuation, draws of it (places × DRAWS, half from each family), and draws of one measurement's noise."""
    values, draws, noises = [], [], []
    for family, left in enumerate(_residuals(curve)):
        values.append(_continued(curve, curve.values[None], at, family)[0])
        noise = np.sqrt((curve.weights * left**2).sum() / rng.chisquare(max(1, len(left) - FREE), HALF))
        again = curve.values - left + noise[:, None] * rng.standard_normal((HALF, len(left))) / np.sqrt(curve.weights)
        draws.append(_continued(curve, again, at, family).T)
        noises.append(noise * rng.standard_normal(HALF))
    return np.mean(values, axis=0), np.concatenate(draws, axis=1), np.concatenate(noises)


class Forecast(NamedTuple):
    """What comes at each of several places, the nearest first."""

    values: Array
    low: Array  # of what is measured there
    high: Array
    draws: Array  # of the curve there: places × DRAWS
    drift: float  # by how much both families miss, for each e-fold beyond what was seen


def predict(curves: Sequence[Curve], at: Sequence[float]) -> Forecast:
    """Continue curves of the same kind to some places, in rising order, whether or not that can be trusted."""
    curves, rng, places = comparable(curves), np.random.default_rng(0), np.array(at, float)
    checked = check(curves) if min(len(curve.part(FIRST).at) for curve in curves) > FREE else None
    drift = max(checked.drift, checked.forecast.drift) if checked else 0.0
    each = [_drawn(curve, places, rng) for curve in (curves if len(curves) >= REPLICATES else [_pooled(curves)])]
    values, draws, noise = (np.mean(part, axis=0) for part in zip(*each, strict=True))
    if len(each) > 1:
        spread = np.maximum.accumulate(np.std([own for own, *_ in each], axis=0, ddof=1)) * math.sqrt(1 + 1 / len(each))
        draws = draws + spread[:, None] * rng.standard_t(len(each) - 1, DRAWS)
    beyond = np.maximum(np.log(places / max(curve.at[-1] for curve in curves)), 0)
    draws = draws + (drift * beyond)[:, None] * rng.standard_normal(DRAWS)
    noise = noise / np.sqrt(np.mean([curve.end()[2] for curve in curves]))
    low, high = np.quantile(draws + noise, [TAIL, 1 - TAIL], axis=1)
    low = values - np.maximum.accumulate(np.maximum(values - low, 0))  # farther away is never known better
    high = values + np.maximum.accumulate(np.maximum(high - values, 0))
    low, high, draws = (np.clip(each, 0, math.inf if curves[0].bits else 1) for each in (low, high, draws))
    return Forecast(values, low, high, draws, drift)


def comparable(curves: Sequence[Curve]) -> Sequence[Curve]:
    """Return those that go at least half as far as the longest: where a shorter one ended its schedule, others were in theirs."""
    return [curve for curve in curves if 2 * curve.at[-1] >= max(each.at[-1] for each in curves)]


def _pooled(curves: Sequence[Curve]) -> Curve:
    at, values, weights = (np.concatenate([curve[part] for curve in curves]) for part in range(3))
    order = np.argsort(at, kind="stable")
    return Curve(at[order], values[order], weights[order], curves[0].bits)


class Check(NamedTuple):
    """A forecast from the beginning of curves, and what came."""

    forecast: Forecast
    came: float
    naive: float  # it stays where it is
    drift: float


def check(curves: Sequence[Curve], share: float = FIRST) -> Check:
    """Predict the end of curves from their beginning."""
    curves = comparable(curves)
    parts, ends = [curve.part(share) for curve in curves], np.array([curve.end() for curve in curves])
    where, came, _ = (float(each) for each in ends.mean(0))
    found = predict(parts, [where])
    beyond, error = math.log(where / max(part.at[-1] for part in parts)), float(found.values[0] - came)
    known = float(found.high[0] - found.low[0]) / (2 * NORMAL)
    drift = math.sqrt(max(0.0, error**2 - known**2)) / beyond  # what noise does not explain
    return Check(found, came, float(np.mean([part.end()[1] for part in parts])), drift)


def doubt(curves: Sequence[Curve], at: float) -> str:
    """Say why no forecast can be made, or nothing."""
    if fewest := [curve for curve in comparable(curves) if len(curve.at) < FEWEST]:
        return f"{len(fewest[0].at)} points are too few; {FEWEST} are needed"
    curve = _pooled(comparable(curves))
    if at > FARTHEST * curve.at[-1]:
        return f"{at:,.0f} is more than {FARTHEST:g} times the {curve.at[-1]:,.0f} that was seen"
    third = len(curve.at) // 3
    cuts = (slice(third), slice(-third, None))
    begin, end = (float(np.average(curve.values[cut], weights=curve.weights[cut])) for cut in cuts)
    squares = min(float((curve.weights * left**2).sum()) for left in _residuals(curve))
    error = math.sqrt(squares / (len(curve.at) - FREE) * 2 / third)
    gain = begin - end if curve.bits else end - begin
    if gain < -2 * error:
        return f"it {'rises' if curve.bits else 'falls'}: more of it makes this worse"
    if gain < 2 * error:
        return "it is flat, as far as its noise lets see"
    checked = check(curves)
    value, low, high = (float(each[0]) for each in checked.forecast[:3])
    if low <= checked.came <= high and abs(value - checked.came) <= abs(checked.naive - checked.came):
        return ""
    told = f"{value:.3f} [{low:.3f}, {high:.3f}] was predicted from the first {FIRST:.0%} of these curves"
    return f"{told} where {checked.came:.3f} came; they had stood at {checked.naive:.3f}"


def worth(pairs: Sequence[tuple[float, float]]) -> Array | None:
    """Return draws of by how much the share solved rises for each bit per byte less; None of runs too few or all alike."""
    x, y = np.array(pairs, float).reshape(-1, 2).T
    if len(x) < PAIRS or np.ptp(x) == 0:
        return None
    (slope, _), errors = np.polyfit(-x, y, 1, cov=True)
    return float(slope) + math.sqrt(errors[0, 0]) * np.random.default_rng(1).standard_t(len(x) - 2, DRAWS)


def better(gains: Mapping[str, Array]) -> str:
    """Return whose gain is above that of all others in 97.5 % of the draws; nothing if they cannot be told apart."""
    first = max(gains, key=lambda name: float(np.median(gains[name])))
    apart = np.random.default_rng(2).permutation(gains[first])  # two stages do not err together
    sure = [np.mean(apart > gains[name]) >= 1 - TAIL for name in gains if name != first]
    return first if sure and all(sure) else ""
