"""Which backends there are, which requests may go to which, and which share a queue.

Owns the bays, routes and pools. Promises: backends that some demand names together are in one pool; joining two pools
keeps everything that waits in them and every tenant's distance to its clock. Talks to: `bay`, `pool`.
"""

from __future__ import annotations

from collections.abc import Iterator

from gateway import policy
from gateway.flow.bay import Bay
from gateway.flow.breaker import Breaker
from gateway.flow.envelope import Envelope
from gateway.flow.pool import Pool, Route


class Topology:
    """Grows with the names of the policies seen, never with what clients send."""

    def __init__(self, breaker: policy.Breaker) -> None:
        self._breaker = breaker
        self.bays: dict[str, Bay] = {}
        self.routes: dict[tuple[str, ...], Route] = {}
        self.pools: list[Pool] = []

    def set_breaker(self, config: policy.Breaker) -> None:
        """New thresholds for every backend; states stay."""
        self._breaker = config
        for bay in self.bays.values():
            bay.breaker.config = config

    def bay(self, name: str) -> Bay:
        """The backend's place, made on first use with its gate closed."""
        bay = self.bays.get(name)
        if bay is None:
            bay = self.bays[name] = Bay(name, Breaker(self._breaker))
        return bay

    def route(self, backends: tuple[str, ...], now: float) -> Route:
        """The candidates of a demand, resolved."""
        return self.routes.get(backends) or self._connect(backends, now)

    def _connect(self, backends: tuple[str, ...], now: float) -> Route:
        """A new set of candidates. Pools that it connects become one."""
        bays = tuple(self.bay(name) for name in backends)
        pools = [pool for pool in self.pools if not set(pool.bays).isdisjoint(bays)]
        if not pools:
            pools = [Pool()]
            self.pools.append(pools[0])
        pool = pools[0]
        for other in pools[1:]:
            for route in self.routes.values():
                route.pool = pool if route.pool is other else route.pool
            pool.absorb(other, now)
            self.pools.remove(other)
        pool.bays += [bay for bay in dict.fromkeys(bays) if bay not in pool.bays]
        route = self.routes[backends] = Route(backends, bays, pool)
        return route

    def pools_of(self, bay: Bay) -> list[Pool]:
        """The pool a backend is in, as a list of none or one."""
        return [pool for pool in self.pools if bay in pool.bays]

    def envelopes(self, backends: tuple[str, ...]) -> Iterator[Envelope]:
        """The envelopes of those candidates that are open."""
        return (bay.occupancy.envelope for bay in map(self.bay, backends) if bay.open)
