"""How fast a queue drains, for early refusals and for Retry-After.

Owns two decayed sums, cost granted and time spent with a queue. Promises: unknown (None) until half a second of
backlog was seen; nothing is measured while nobody waits, for then the rate says nothing about capacity.
"""

from __future__ import annotations

import math

_MEMORY_S = 10.0
_ENOUGH_S = 0.5


class DrainRate:
    """Cost units per second, exponentially forgotten over ten seconds of backlog."""

    __slots__ = ("_cost", "_last", "_time")

    def __init__(self) -> None:
        self._cost = 0.0
        self._time = 0.0
        self._last = 0.0

    def start(self, now: float) -> None:
        """A queue has formed. What was learned earlier fades with the idle time between."""
        self._fade(max(0.0, now - self._last))
        self._last = now

    def note(self, cost: float, now: float) -> None:
        """`cost` was released by a request that ended while others waited."""
        elapsed = max(0.0, now - self._last)
        self._fade(elapsed)
        self._cost += cost
        self._time += elapsed
        self._last = max(self._last, now)

    def _fade(self, elapsed: float) -> None:
        keep = math.exp(-elapsed / _MEMORY_S)
        self._cost *= keep
        self._time *= keep

    @property
    def per_s(self) -> float | None:
        """Cost units per second; None while unknown."""
        return self._cost / self._time if self._time >= _ENOUGH_S and self._cost > 0 else None

    def seconds_for(self, cost: float) -> float | None:
        """How long `cost` units take to drain; None while the rate is unknown."""
        rate = self.per_s
        return None if rate is None else cost / rate
