"""Waiting requests sorted so that the next one is found without looking at all: by lane, then by tenant, then by size.

Owns the heaps. Promises: entries that have ended and keys that have moved are skipped, and cleared out before they
outnumber what lives; a push or a look costs O(log n). Talks to: `waiting`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from gateway.flow.waiting import Phase, Waiting

if TYPE_CHECKING:
    from gateway.flow.bay import Bay
    from gateway.flow.pool import Route


class Tenant:
    """One tenant's account in one level: virtual time used, and what it has waiting."""

    __slots__ = ("_arrivals", "cost_by_size", "index", "name", "shares", "vtime", "waiting", "weight")

    def __init__(self, name: str, index: int) -> None:
        self.name = name
        self.index = index
        self.weight = 1.0
        self.vtime = 0.0
        self.waiting = 0
        self.shares: dict[Lane, Share] = {}
        self.cost_by_size: dict[int, float] = {}
        self._arrivals: deque[Waiting] = deque()

    def oldest(self) -> Waiting | None:
        """The earliest arrival still waiting."""
        arrivals = self._arrivals
        while arrivals and arrivals[0].phase is not Phase.WAITING:
            arrivals.popleft()
        return arrivals[0] if arrivals else None

    def newest(self) -> Waiting | None:
        """The latest arrival still waiting."""
        arrivals = self._arrivals
        while arrivals and arrivals[-1].phase is not Phase.WAITING:
            arrivals.pop()
        return arrivals[-1] if arrivals else None

    def arrived(self, entry: Waiting) -> None:
        self._arrivals.append(entry)
        if len(self._arrivals) > 2 * self.waiting + 64:
            self._arrivals = deque(e for e in self._arrivals if e.phase is Phase.WAITING)

    def forget_arrivals(self) -> None:
        self._arrivals.clear()

    def charge(self, cost: float) -> None:
        """Move virtual time by cost / weight (negative: a refund) and tell every lane this tenant waits in."""
        self.vtime += cost / self.weight
        for share in self.shares.values():
            share.moved()


class Share:
    """One tenant's requests in one lane, smallest size class first, then arrival."""

    __slots__ = ("_heap", "lane", "live", "tenant", "version")

    def __init__(self, tenant: Tenant, lane: Lane) -> None:
        self.tenant = tenant
        self.lane = lane
        self.live = 0
        self.version = 0
        self._heap: list[tuple[int, int, Waiting]] = []

    def push(self, entry: Waiting) -> None:
        self.live += 1
        heappush(self._heap, (entry.size, entry.order, entry))
        if len(self._heap) > 2 * self.live + 64:
            self._heap = [item for item in self._heap if item[2].phase is Phase.WAITING]
            heapify(self._heap)

    def head(self) -> Waiting:
        """The next live entry; only asked while `live` > 0."""
        while self._heap[0][2].phase is not Phase.WAITING:
            heappop(self._heap)
        return self._heap[0][2]

    def moved(self) -> None:
        """The tenant's virtual time has changed: what the lane's heap says of it is stale."""
        self.lane.push(self)


class Lane:
    """Requests that are alike for the envelope: same candidate backends, same masks, same number of sequences."""

    __slots__ = ("_heap", "_stamp", "bays", "masks", "route", "sequences", "shares")

    def __init__(self, route: Route, masks: tuple[int, ...], sequences: int) -> None:
        self.route = route
        self.masks = masks
        self.sequences = sequences
        self.bays: frozenset[Bay] = frozenset(bay for bay, mask in zip(route.bays, masks, strict=True) if mask)
        self.shares = 0
        self._stamp = 0
        self._heap: list[tuple[float, int, int, Share]] = []

    def hopeful(self, now: float) -> bool:
        """Whether one of its backends may take a request now or when room is free."""
        return any(bay.refusal(now) is None for bay in self.bays)

    def push(self, share: Share) -> None:
        self._stamp += 1
        share.version = self._stamp
        heappush(self._heap, (share.tenant.vtime, share.tenant.index, share.version, share))
        if len(self._heap) > 4 * self.shares + 64:
            self._heap = [item for item in self._heap if item[2] == item[3].version]
            heapify(self._heap)

    def lead(self) -> Share | None:
        """The share of the tenant with the least virtual time."""
        heap = self._heap
        while heap:
            share = heap[0][3]
            if share.live and heap[0][2] == share.version:
                return share
            heappop(heap)
        return None

    def search(self, limit: int, judge: Callable[[Waiting], bool | None]) -> Waiting | None:
        """The first head, by virtual time and among up to `limit` shares, of which `judge` says True; None ends the search.

        `judge` must not change the lane."""
        taken: list[tuple[float, int, int, Share]] = []
        found: Waiting | None = None
        try:
            while len(taken) < limit and (share := self.lead()) is not None:
                taken.append(heappop(self._heap))
                head = share.head()
                verdict = judge(head)
                if verdict:
                    found = head
                if verdict is not False:
                    break
        finally:
            for item in taken:
                heappush(self._heap, item)
        return found
