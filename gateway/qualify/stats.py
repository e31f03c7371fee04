"""Percentiles, rates, and how far they can be believed.

Owns: the one definition of TTFT, TPOT, ITL and end-to-end latency, and every confidence bound in a record.
Promises: pure functions; a bound that the samples cannot support is None, never a guess.
Talks to: nobody.

All times start at dispatch: the request's last byte handed to the connection (in an open loop: the intended instant).
    e2e   the end of the answer's body
    TTFT  the first event with content (not streamed: the first byte of the body)
    TPOT  (e2e - TTFT) / (output tokens - 1), for answers of two tokens or more
    ITL   the gap between one content event and the next

Requests come in waves that share a batch inside the engine, and waves come in repeats that share a state of the machine, so
they are not independent. The upper bound of a percentile is therefore the largest of three, each of which covers what
the others miss:
  1. the order statistic of the binomial distribution, for the *effective* number of samples: n over the design effect of the
     waves (Kish 1965), stratified by kind of wave;
  2. the bootstrap that draws repeats, and waves inside each (Efron 1979; Davison and Hinkley 1997, section 3.8);
  3. the Student t bound for the percentile of *one more repeat* like those measured: estimate + t s sqrt(1 + 1/R).
There is no bound with fewer than three repeats, with too few effective samples for an order statistic to exist (59 for p95 and
299 for p99, at 0.95), or when repeats differ from each other by more than requests inside a repeat do: three runs of a
machine that is never the same do not say how often it is slow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

MIN_REPEATS = 3
RESAMPLES = 400
_MAX_DRIFT = 1.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A percentile and its one-sided upper bound; `effective` is what the samples are worth as independent ones."""

    value: float
    upper: float | None
    effective: int


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate per second over all repeats, its one-sided lower bound, and the lowest and highest repeat."""

    value: float
    lower: float | None
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """Values with the repeat, the wave and the kind of wave each comes from, numbered from 0; no two repeats share a wave."""

    values: Floats
    repeat: Ints
    wave: Ints
    kind: Ints

    @classmethod
    def of(cls, rows: Sequence[tuple[float, int, int, str]]) -> Sampled:
        """From (value, repeat, wave, kind). A wave number that comes back in another repeat is another wave."""
        values = np.array([row[0] for row in rows], dtype=np.float64)
        repeat = _numbered([row[1] for row in rows])
        kind = _numbered([row[3] for row in rows])
        return cls(values, repeat, _numbered([(row[1], row[2], row[3]) for row in rows]), kind)


def _numbered(labels: Sequence[object]) -> Ints:
    """Each label as the place of its first appearance."""
    places: dict[object, int] = {}
    return np.array([places.setdefault(label, len(places)) for label in labels], dtype=np.int64)


def percentile(sampled: Sampled, q: float, confidence: float, *, seed: int = 0, resamples: int = RESAMPLES) -> Estimate | None:
    """The q-th quantile (0 < q < 1) with its upper bound at `confidence`. None without samples."""
    values = sampled.values
    if not len(values):
        return None
    estimate = float(np.quantile(values, q))
    effective = max(1, int(len(values) / design_effect(values > estimate, sampled)))
    rank = order_rank(effective, q, confidence)
    if rank is None or not _repeatable(sampled):
        return Estimate(estimate, None, effective)
    ordered = np.sort(values)
    by_order = float(ordered[min(len(values) - 1, math.ceil(rank / effective * len(values)) - 1)])
    by_bootstrap = _bootstrap(sampled, q, confidence, seed, resamples)
    by_repeat = estimate + student_t(confidence, _repeats(sampled) - 1) * _spread(sampled, q)
    return Estimate(estimate, max(estimate, by_order, by_bootstrap, by_repeat), effective)


def design_effect(tail: NDArray[np.bool_], sampled: Sampled) -> float:
    """How many of the samples are worth one independent sample, at least 1.

    From the wave totals of being in the tail, around the share of their kind: the plan fixes how many waves of each kind there
    are, so that a kind that is slow as a whole adds no chance (a stratified cluster sample).
    """
    n, share = len(tail), float(tail.mean())
    if share in (0.0, 1.0):
        return 1.0
    waves = int(sampled.wave.max()) + 1
    totals, sizes = np.bincount(sampled.wave, tail, minlength=waves), np.bincount(sampled.wave, minlength=waves)
    kinds = _first_of(sampled.kind, sampled.wave, waves)
    variance = 0.0
    for kind in range(int(kinds.max()) + 1):
        own = kinds == kind
        count = int(own.sum())
        if count > 1:
            excess = totals[own] - sizes[own] * totals[own].sum() / sizes[own].sum()
            variance += count / (count - 1) * float((excess**2).sum()) / n**2
    return max(1.0, variance * n / (share * (1 - share)))


def rate(amounts: list[float], seconds: list[float], confidence: float) -> Rate | None:
    """Amount per second from one (amount, seconds) for each repeat; the lower bound is that of one more repeat."""
    if not seconds or min(seconds) <= 0:
        return None
    each = np.array(amounts) / np.array(seconds)
    value, lower = sum(amounts) / sum(seconds), None
    if len(each) >= MIN_REPEATS:
        margin = student_t(confidence, len(each) - 1) * float(each.std(ddof=1)) * math.sqrt(1 + 1 / len(each))
        lower = max(0.0, value - margin)
    return Rate(value, lower, float(each.min()), float(each.max()))


def rising(times: Floats, values: Floats, blocks: int = 8, least_rise: float = 0.5) -> bool:
    """Whether `values` grow over `times`: a slope of block medians beyond chance (one-sided 0.99) that adds `least_rise`.

    The rise over the whole time is compared with the median. Fewer than three values a block: False.
    """
    if len(values) < 3 * blocks:
        return False
    order = np.argsort(times, kind="stable")
    medians = np.array([np.median(part) for part in np.array_split(values[order], blocks)])
    x = np.arange(blocks) - (blocks - 1) / 2
    slope = float((x * medians).sum() / (x**2).sum())
    residual = medians - medians.mean() - slope * x
    error = math.sqrt(float((residual**2).sum()) / (blocks - 2) / float((x**2).sum()))
    significant = slope > student_t(0.99, blocks - 2) * error
    return significant and slope * (blocks - 1) > least_rise * float(np.median(values))


@lru_cache(maxsize=4096)
def order_rank(n: int, q: float, confidence: float) -> int | None:
    """The least k for which the k-th smallest of n independent samples is an upper bound of the q-quantile at `confidence`.

    P(at most k - 1 of n lie below the quantile) >= confidence, binomial in q. None when even the largest is not.
    """
    total = 0.0
    for below in range(n):
        logarithm = math.lgamma(n + 1) - math.lgamma(below + 1) - math.lgamma(n - below + 1)
        total += math.exp(logarithm + below * math.log(q) + (n - below) * math.log1p(-q))
        if total >= confidence:
            return below + 1
    return None


@lru_cache(maxsize=256)
def student_t(probability: float, degrees: int) -> float:
    """The quantile of Student's t for 0.5 <= probability < 1, by bisection of its distribution function."""
    low, high = 0.0, 1.0
    while _student_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, degrees) < probability else (low, middle)
    return high


def _student_cdf(t: float, degrees: int) -> float:
    """For t >= 0 and whole degrees, the finite series of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2 == 1
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 if odd else 1, degrees - 1, 2):
        term *= cosine * cosine * k / (k + 1)
        total += term
    central = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return 0.5 + central / 2


def _repeats(sampled: Sampled) -> int:
    return int(sampled.repeat.max()) + 1


def _spread(sampled: Sampled, q: float) -> float:
    """s sqrt(1 + 1/R) of the quantile over repeats."""
    each = np.array([np.quantile(sampled.values[sampled.repeat == r], q) for r in range(_repeats(sampled))])
    return float(each.std(ddof=1)) * math.sqrt(1 + 1 / len(each))


def _repeatable(sampled: Sampled) -> bool:
    """Enough repeats, each with samples, whose medians differ less than the requests inside a repeat."""
    parts = [sampled.values[sampled.repeat == r] for r in range(_repeats(sampled))]
    if len(parts) < MIN_REPEATS:
        return False
    between = float(np.std([np.median(part) for part in parts], ddof=1))
    within = float(np.mean([part.std() for part in parts]))
    # Identical requests have next to no spread inside a repeat; a drift of 2 % is then no reason to refuse.
    return between <= max(_MAX_DRIFT * within, 0.02 * float(np.median(sampled.values)))


def _bootstrap(sampled: Sampled, q: float, confidence: float, seed: int, resamples: int) -> float:
    """The `confidence` quantile of the q-quantile over resamples of repeats, and in each of the waves of each kind."""
    rng = np.random.default_rng(seed)
    repeats, waves = _repeats(sampled), int(sampled.wave.max()) + 1
    home, kind = (_first_of(labels, sampled.wave, waves) for labels in (sampled.repeat, sampled.kind))
    weights = np.zeros((resamples, waves))
    drawn = rng.integers(0, repeats, (resamples, repeats))
    for r in range(repeats):
        times = (drawn == r).sum(axis=1)
        for k in range(int(kind.max()) + 1):
            members = np.flatnonzero((home == r) & (kind == k))
            if len(members):
                chances = np.full(len(members), 1 / len(members))
                weights[:, members] = rng.multinomial(times * len(members), chances)
    order = np.argsort(sampled.values)
    cumulative = np.cumsum(weights[:, sampled.wave[order]], axis=1)
    places = (cumulative >= q * cumulative[:, -1:]).argmax(axis=1)
    return float(np.quantile(sampled.values[order][places], confidence))


def _first_of(labels: Ints, wave: Ints, waves: int) -> Ints:
    """The label of each wave."""
    found = np.zeros(waves, dtype=np.int64)
    found[wave] = labels
    return found
