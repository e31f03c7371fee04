"""Histograms for the hot path: a list of integers and a sum, nothing else.

Owns the buckets of every duration the gateway reports. `observe` is one bisect and two additions; labels,
text and cumulative sums are made by `metrics.py` when somebody scrapes. Talks to nobody.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

# Upper bounds in seconds. Each list ends below infinity; the last count is what lies above.
ANSWER_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
WAIT_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 15.0, 30.0, 60.0)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
OVERHEAD_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 1.0)


class Histogram:
    """Counts per bucket; `counts` has one more entry than `bounds`, for what lies above the last."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration; an upper bound belongs to its own bucket, as Prometheus has it."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def merge(self, other: Histogram) -> None:
        """Add what `other` has seen; both have the same bounds."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound as text, count at or below it), ending with +Inf: what an exposition shows."""
        return cumulate(self.bounds, self.counts)

    @property
    def series(self) -> int:
        """Time series one child costs: its buckets, +Inf, sum and count."""
        return len(self.bounds) + 3


def cumulate(bounds: tuple[float, ...], counts: Iterable[int]) -> list[tuple[str, float]]:
    """Bucket counts to the running totals an exposition shows."""
    running, rows = 0, []
    for bound, count in zip((*map(repr, bounds), "+Inf"), counts, strict=True):
        running += count
        rows.append((bound, float(running)))
    return rows
