"""What was asked for outside the slices, group by group, and identity changes: the rows of the retest ledger.

Owns their bounded memory and their JSON form. Talks to nobody.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from gateway.flow.shape import Shape
from gateway.observe.sizes import Sizes

MAX_KINDS = 32
_SIZES = ("input", "output", "sequences", "concurrency")
K = TypeVar("K")


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A backend showed another identity than before; `fields` are the paths that differ, where they are known."""

    at: float
    model: str
    backend: str
    before: str | None
    after: str | None
    fields: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values, for disk and for `retest list`."""
        return {**dataclasses.asdict(self), "fields": list(self.fields)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Change:
        """The inverse. Raises KeyError, TypeError or ValueError."""
        fields = tuple(str(field) for field in raw["fields"])
        return cls(float(raw["at"]), str(raw["model"]), str(raw["backend"]), raw["before"], raw["after"], fields)


class Group:
    """Demand of one model on one configuration that left the slices along one axis. Times are Unix seconds."""

    __slots__ = ("backends", "concurrency", "count", "first", "input", "kinds", "last", "output", "sequences")

    def __init__(self, now_wall: float) -> None:
        self.count = 0
        self.first = self.last = now_wall
        self.backends: dict[str, int] = {}
        self.kinds: dict[tuple[str, tuple[str, ...]], int] = {}  # (task, features)
        self.input, self.output, self.sequences, self.concurrency = Sizes(), Sizes(), Sizes(), Sizes()

    def add(self, backend: str, shape: Shape | None, wanted: int | None, now_wall: float) -> None:
        self.count += 1
        self.last = max(self.last, now_wall)
        _tally(self.backends, backend)
        if wanted is not None:
            self.concurrency.add(wanted)
        if shape is None:
            return
        _tally(self.kinds, (shape.task, tuple(sorted(shape.features))))
        self.input.add(shape.input_tokens)
        self.output.add(shape.output_tokens)
        self.sequences.add(shape.sequences)

    def merge(self, other: Group, *, facts: bool) -> None:
        """Add what another replica has counted; `facts`: all of them see the same, so that the larger count holds."""
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        if facts:
            for name, count in other.backends.items():
                _tally(self.backends, name, max(0, count - self.backends.get(name, 0)))
            self.count = max(self.count, other.count, sum(self.backends.values()))
        else:
            self.count += other.count
            for name, count in other.backends.items():
                _tally(self.backends, name, count)
        for kind, count in other.kinds.items():
            _tally(self.kinds, kind, count)
        for size in _SIZES:
            getattr(self, size).merge(getattr(other, size))

    def summary(self) -> dict[str, Any]:
        """Counts and the sizes at 50, 95, 99 and 100 % of what was asked."""
        sizes = {name: getattr(self, name) for name in _SIZES}
        quantiles = {
            name: {"p50": s.quantile(0.5), "p95": s.quantile(0.95), "p99": s.quantile(0.99), "max": s.largest}
            for name, s in sizes.items()
            if s.count
        }
        return {**self._counts(), "asked": quantiles}

    def to_json(self) -> dict[str, Any]:
        """Everything, for disk."""
        return {**self._counts(), "sizes": {name: getattr(self, name).to_json() for name in _SIZES}}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Group:
        """The inverse. Raises KeyError, TypeError or ValueError."""
        group = cls(float(raw["first"]))
        group.count, group.last = int(raw["count"]), float(raw["last"])
        group.backends = {str(name): int(n) for name, n in raw["backends"].items()}
        group.kinds = {(str(k["task"]), tuple(map(str, k["features"]))): int(k["count"]) for k in raw["kinds"]}
        for name in _SIZES:
            setattr(group, name, Sizes.from_json(raw["sizes"][name]))
        return group

    def _counts(self) -> dict[str, Any]:
        kinds = [{"task": task, "features": list(features), "count": n} for (task, features), n in self.kinds.items()]
        return {"count": self.count, "first": self.first, "last": self.last, "backends": dict(self.backends), "kinds": kinds}


def _tally(counts: dict[K, int], key: K, by: int = 1) -> None:
    """Count `key`; a table that is full counts only what it knows."""
    if key in counts or len(counts) < MAX_KINDS:
        counts[key] = counts.get(key, 0) + by
