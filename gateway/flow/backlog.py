"""How much waits in all, and which wait ends next.

Owns the totals that bound the queue and a heap of deadlines. Promises: the heap holds at most twice what waits, plus a
constant; expiry is in order of deadline. Talks to: `queue`.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from gateway.flow.waiting import Phase, Waiting

_SLACK = 1024


class Backlog:
    """`requests` and reserved `tokens` that wait, over all pools."""

    __slots__ = ("_deadlines", "requests", "tokens")

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0
        self._deadlines: list[tuple[float, Waiting]] = []

    def add(self, waiting: Waiting) -> None:
        """One more waits."""
        self.requests += 1
        self.tokens += waiting.demand.shape.tokens
        heappush(self._deadlines, (waiting.deadline, waiting))
        if len(self._deadlines) > 2 * self.requests + _SLACK:
            self._deadlines = [item for item in self._deadlines if item[1].phase is Phase.WAITING]
            heapify(self._deadlines)

    def remove(self, waiting: Waiting) -> None:
        """One waits no more."""
        self.requests -= 1
        self.tokens -= waiting.demand.shape.tokens

    def expired(self, now: float) -> Iterator[Waiting]:
        """What still waits although its deadline is over, earliest first; the caller takes each out."""
        while self._deadlines and self._deadlines[0][0] <= now:
            waiting = heappop(self._deadlines)[1]
            if waiting.phase is Phase.WAITING:
                yield waiting
