"""Distributions of token counts in bounded memory: quarter-octave buckets, at most 19 % wide.

Owns the arithmetic of the buckets. A quantile is the upper edge of its bucket (never above the largest value seen), so that
what is planned from it covers what was asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

_PER_OCTAVE = 4
_LARGEST = 2**53


class Sizes:
    """Counts of non-negative integers by size; at most 214 buckets, whatever was asked for."""

    __slots__ = ("buckets", "count", "largest", "smallest")

    def __init__(self) -> None:
        self.buckets: dict[int, int] = {}
        self.count = 0
        self.smallest: int | None = None
        self.largest: int | None = None

    def add(self, value: int) -> None:
        """Count one value; above 2^53 it counts as 2^53."""
        value = min(max(value, 0), _LARGEST)
        index = bucket(value)
        self.buckets[index] = self.buckets.get(index, 0) + 1
        self.count += 1
        self.smallest = value if self.smallest is None else min(self.smallest, value)
        self.largest = value if self.largest is None else max(self.largest, value)

    def merge(self, other: Sizes) -> None:
        """Add what `other` has seen."""
        for index, count in other.buckets.items():
            self.buckets[index] = self.buckets.get(index, 0) + count
        self.count += other.count
        self.smallest = min((v for v in (self.smallest, other.smallest) if v is not None), default=None)
        self.largest = max((v for v in (self.largest, other.largest) if v is not None), default=None)

    def quantile(self, share: float) -> int | None:
        """A value that at least `share` (0..1) of what was seen does not exceed; None when nothing was seen."""
        if self.largest is None:
            return None
        needed, running = math.ceil(share * self.count - 1e-9), 0
        for index in sorted(self.buckets):
            running += self.buckets[index]
            if running >= needed:
                return min(edge(index), self.largest)
        return self.largest

    def to_json(self) -> dict[str, object]:
        """The document kept on disk."""
        rows = [[index, count] for index, count in sorted(self.buckets.items())]
        return {"smallest": self.smallest, "largest": self.largest, "buckets": rows}

    @classmethod
    def from_json(cls, raw: Mapping[str, object]) -> Sizes:
        """The inverse of `to_json`. Raises ValueError, TypeError or KeyError for anything else."""
        sizes = cls()
        rows = raw["buckets"]
        if not isinstance(rows, list):
            raise TypeError("buckets is a list")
        sizes.buckets = {int(index): int(count) for index, count in rows}
        sizes.count = sum(sizes.buckets.values())
        sizes.smallest, sizes.largest = _integer(raw["smallest"]), _integer(raw["largest"])
        if (sizes.largest is None) != (sizes.count == 0) or min(sizes.buckets.values(), default=0) < 0:
            raise ValueError("the counts and the extremes disagree")
        return sizes


def bucket(value: int) -> int:
    """The bucket of a value: -1 for 0, else the least i with value <= edge(i)."""
    if value < 1:
        return -1
    index = math.ceil(_PER_OCTAVE * math.log2(value))
    return index - 1 if index > 0 and value <= edge(index - 1) else index


def edge(index: int) -> int:
    """The largest integer that belongs to bucket `index`."""
    return 0 if index < 0 else math.floor(2 ** (index / _PER_OCTAVE) + 1e-9)


def _integer(value: object) -> int | None:
    if value is not None and not isinstance(value, int):
        raise TypeError("an extreme is an integer or null")
    return value
