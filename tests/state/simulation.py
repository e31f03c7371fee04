"""A fleet in virtual time: many replicas before one backend, on the model of the store, counting what they ask of it.

Owns the clients' side as far as it matters for the store: one request asks at once, a denied one waits in its replica's queue, a
wake-up or a settlement that says so lets the head ask again. Deterministic. Run it as `python -m tests.state.simulation`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from gateway.flow.shape import NO_FEATURES, Shape
from gateway.state.leases import Ask, Row, Rules, Verdict, View
from gateway.state.memory import MemoryLeases, MemoryState

LEASE_S = 10.0
ROUND_TRIP_S = 0.0005


@dataclass(frozen=True)
class Result:
    """`per_admission`: operations of the store for each admission, beats apart; waits in seconds."""

    offered: float
    admitted: int
    per_admission: float
    beats_per_s: float
    denied: int
    behind: int
    peak: int
    wait_p99_s: float
    longest_wait_s: float
    least_served: int
    most_served: int


class Fleet:
    """`load`: offered work as a share of what the backend's `cap` can do."""

    def __init__(self, replicas: int, cap: int, load: float, service_s: float, seed: int) -> None:
        self.now = 0.0
        self.draw = random.Random(seed)
        self.service_s, self.rate = service_s, load * cap / service_s
        self.rules = Rules.of((Row("generate", (), 1, 100, 1, 100, cap),), None)
        self.state = MemoryState(lambda: self.now, LEASE_S)
        self.stores = [MemoryLeases(self.state, f"r{n}", self._wake(n)) for n in range(replicas)]
        self.queues: list[deque[tuple[Ask, float]]] = [deque() for _ in range(replicas)]
        self.counts: Counter[str] = Counter()
        self.served: Counter[int] = Counter()
        self.waits: list[float] = []
        self.running = self.peak = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def _wake(self, replica: int) -> Callable[[str, View], None]:
        return lambda _backend, _view: self.at(self.now + ROUND_TRIP_S / 2, lambda: self._head_asks(replica))

    def run(self, seconds: float) -> Result:
        """Arrivals for so long, then everything drains."""
        for replica in range(len(self.stores)):
            self.at(replica * LEASE_S / 4 / len(self.stores), lambda replica=replica: self._beat(replica, seconds))
        self.state.berth("b").since = 0.0
        self.at(LEASE_S / 4, lambda: self._arrive(seconds))
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()
        asked = self.counts["acquire"] + self.counts["settle"]
        waits = sorted(self.waits)
        admitted = len(waits)
        return Result(
            self.rate, admitted, round(asked / admitted, 2), self.counts["beat"] / seconds, self.counts["denied"],
            self.counts["behind"], self.peak, round(waits[int(admitted * 0.99)], 3), round(waits[-1], 3),
            min(self.served[n] for n in range(len(self.stores))), max(self.served.values()),
        )  # fmt: skip

    def _beat(self, replica: int, until: float) -> None:
        self.counts["beat"] += 1
        held = (
            [h.ask for h in self.state.berth("b").leases.values() if h.owner == f"r{replica}"] if self.now < LEASE_S / 4 else None
        )
        head = self.queues[replica][0][0] if self.queues[replica] else None
        answer = self.stores[replica].beat("b", self.rules, head, held).result()
        if answer.verdict is Verdict.NEXT:
            self._head_asks(replica)
        if self.now < until or self.running or any(self.queues):
            self.at(self.now + LEASE_S / 4, lambda: self._beat(replica, until))

    def _arrive(self, until: float) -> None:
        if self.now < until:
            self.at(self.now + self.draw.expovariate(self.rate), lambda: self._arrive(until))
        replica = self.draw.randrange(len(self.stores))
        ask = Ask(f"l{next(self._order)}", self.rules, 1, Shape("generate", NO_FEATURES, 10, 10, 1), 2, tenant=f"t{replica % 3}")
        self.queues[replica].append((ask, self.now))
        if len(self.queues[replica]) == 1:
            self._head_asks(replica)

    def _head_asks(self, replica: int) -> None:
        queue = self.queues[replica]
        if not queue:
            return
        ask, since = queue[0]
        following = queue[1][0]._replace(waited_s=self.now - queue[1][1]) if len(queue) > 1 else None
        self.counts["acquire"] += 1
        answer = self.stores[replica].acquire("b", ask._replace(waited_s=self.now - since), following).result()
        self.counts[answer.verdict.value] += 1
        if answer.verdict is Verdict.BEHIND:
            self.at(self.now + 0.25, lambda: self._again(replica, ask))
        if answer.verdict is not Verdict.GRANTED:
            return
        queue.popleft()
        self.running += 1
        self.peak = max(self.peak, self.running)
        self.served[replica] += 1
        self.waits.append(self.now - since)
        self.at(self.now + ROUND_TRIP_S + self.draw.expovariate(1 / self.service_s), lambda: self._settle(replica, ask))
        if queue and answer.view.sequences + self.running <= self.rules.rows[0].concurrency:
            self._head_asks(replica)

    def _again(self, replica: int, ask: Ask) -> None:
        if self.queues[replica] and self.queues[replica][0][0] is ask:
            self._head_asks(replica)

    def _settle(self, replica: int, ask: Ask) -> None:
        self.running -= 1
        self.counts["settle"] += 1
        answer = self.stores[replica].settle("b", ask.lease, self.rules, 0.0).result()
        if answer.verdict is Verdict.NEXT:
            self._head_asks(replica)


async def simulate(replicas: int, cap: int, load: float, seconds: float, service_s: float = 1.0, seed: int = 1) -> Result:
    """One fleet, from nothing to nothing."""
    return Fleet(replicas, cap, load, service_s, seed).run(seconds)


async def main() -> None:
    """The table of deploy/SCALING.md."""
    for replicas, cap, load in ((3, 8, 0.7), (3, 8, 1.1), (100, 64, 0.7), (100, 64, 0.95), (100, 64, 1.1)):
        result = await simulate(replicas, cap, load, 60.0)
        print(json.dumps({"replicas": replicas, "cap": cap, "load": load, **result.__dict__}))


if __name__ == "__main__":
    asyncio.run(main())
