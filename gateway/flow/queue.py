"""Who is next: fair order over tenants, bounded overtaking inside one. The maths is in the package's docstring.

Owns the waiting requests of one priority level. Promises: virtual time never runs backwards; enqueue, removal and
picking cost O(lanes + log n); every entry is in the queue exactly while its state is WAITING. Knows nothing of
backends: whether an entry fits is asked of the caller. Talks to: `demand`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import Any

from gateway.flow.demand import Demand

OVERTAKINGS_INSIDE = 4
"""How many grants of its own tenant may pass the tenant's oldest request before it is the tenant's next."""

OVERTAKINGS = 8
"""How many grants may pass the first in order, which finds no room, before room is held for it."""

LOOK_AHEAD = 8
"""Tenants tried in one lane when the first one's smallest request does not fit the KV budget."""


class Phase(Enum):
    WAITING = 1
    GRANTED = 2
    REFUSED = 3
    TAKEN = 4  # the waiter has its grant
    LEFT = 5


class Waiting:
    """One request in the queue; the handle that `Controller.wait` and `leave` take."""

    __slots__ = ("blocks", "cost", "deadline", "demand", "enqueued_at", "future", "hold", "masks", "order", "passed", "phase",
                 "result", "route", "share", "size", "tenant")  # fmt: skip

    def __init__(self, demand: Demand, route: Any, order: int, now: float) -> None:
        self.demand = demand
        self.route = route
        self.order = order
        self.enqueued_at = now
        self.deadline = demand.queue_deadline
        if demand.caller_deadline is not None:
            self.deadline = min(self.deadline, demand.caller_deadline)
        self.masks: tuple[int, ...] = ()
        self.blocks: tuple[int, ...] = ()
        self.cost = 0.0
        self.size = 0  # see `size_class`
        self.passed = 0
        self.hold: str | None = None  # the backend whose room is held for this one
        self.phase = Phase.WAITING
        self.result: Any = None
        self.future: asyncio.Future[None] | None = None
        self.share: Share | None = None
        self.tenant: Tenant | None = None

    def __lt__(self, other: Waiting) -> bool:
        return self.order < other.order


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

    __slots__ = ("_heap", "_stamp", "masks", "route", "sequences", "shares")

    def __init__(self, route: Any, masks: tuple[int, ...], sequences: int) -> None:
        self.route = route
        self.masks = masks
        self.sequences = sequences
        self.shares = 0
        self._stamp = 0
        self._heap: list[tuple[float, int, int, Share]] = []

    def hopeful(self, now: float) -> bool:
        """Whether one of its backends may take a request now or when room is free."""
        return any(mask and bay.refusal(now) is None for bay, mask in zip(self.route.bays, self.masks, strict=True))

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

    def in_order(self, limit: int) -> Iterator[Share]:
        """Up to `limit` shares by virtual time. The lane must not be changed while iterating."""
        taken: list[tuple[float, int, int, Share]] = []
        try:
            while len(taken) < limit and (share := self.lead()) is not None:
                taken.append(heappop(self._heap))
                yield share
        finally:
            for item in taken:
                heappush(self._heap, item)


class Level:
    """The waiting requests of one priority. `clock` is its virtual time: the start tag of the latest grant."""

    __slots__ = ("_arrivals", "clock", "cost", "lanes", "priority", "since_aged", "tenants", "waiting", "weight")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.clock = 0.0
        self.waiting = 0
        self.cost = 0.0
        self.weight = 0.0  # of the tenants that wait
        self.since_aged = 0  # grants to more urgent levels while this one waited
        self.tenants: dict[str, Tenant] = {}
        self.lanes: dict[tuple[Any, tuple[int, ...], int], Lane] = {}
        self._arrivals: deque[Waiting] = deque()

    def tenant(self, name: str, weight: float) -> Tenant:
        """The tenant's account, made on first use."""
        tenant = self.tenants.get(name)
        if tenant is None:
            tenant = self.tenants[name] = Tenant(name, len(self.tenants))
        if weight != tenant.weight:
            self.weight += weight - tenant.weight if tenant.waiting else 0.0
            tenant.weight = weight
        return tenant

    def charge(self, name: str, weight: float, cost: float) -> Tenant:
        """Charge a grant to a tenant: its start tag is the tenant's virtual time, never behind the level's clock
        unless it has more waiting. Returns the account, for the refund."""
        tenant = self.tenants.get(name)
        if tenant is None or tenant.weight != weight:
            tenant = self.tenant(name, weight)
        start = tenant.vtime
        if start > self.clock:
            self.clock = start
        elif not tenant.waiting:
            tenant.vtime = self.clock
        if tenant.shares:
            tenant.charge(cost)
        else:
            tenant.vtime += cost / weight
        return tenant

    def add(self, entry: Waiting) -> None:
        """Queue an entry whose masks, blocks and cost are set."""
        demand = entry.demand
        tenant = self.tenant(demand.tenant, demand.weight)
        if not tenant.waiting and tenant.vtime < self.clock:
            tenant.vtime = self.clock
        key = (entry.route, entry.masks, demand.shape.sequences)
        lane = self.lanes.get(key)
        if lane is None:
            lane = self.lanes[key] = Lane(*key)
        share = tenant.shares.get(lane)
        if share is None:
            share = tenant.shares[lane] = Share(tenant, lane)
            lane.shares += 1
            lane.push(share)
        entry.phase, entry.share, entry.tenant = Phase.WAITING, share, tenant
        share.push(entry)
        self._count(tenant, entry, 1)
        tenant.arrived(entry)
        self._arrivals.append(entry)
        if len(self._arrivals) > 2 * self.waiting + 64:
            self._arrivals = deque(e for e in self._arrivals if e.phase is Phase.WAITING)

    def remove(self, entry: Waiting, phase: Phase) -> None:
        """Take a waiting entry out, for whatever reason `phase` names."""
        share, tenant = entry.share, entry.tenant
        assert share is not None and tenant is not None and entry.phase is Phase.WAITING
        entry.phase = phase
        self._count(tenant, entry, -1)
        share.live -= 1
        if not share.live:
            share.version = -1
            lane = share.lane
            del tenant.shares[lane]
            lane.shares -= 1
            if not lane.shares:
                del self.lanes[(lane.route, lane.masks, lane.sequences)]

    def _count(self, tenant: Tenant, entry: Waiting, sign: int) -> None:
        self.waiting += sign
        tenant.waiting += sign
        if tenant.waiting == (1 if sign > 0 else 0):
            self.weight += sign * tenant.weight
        cost = entry.cost * sign
        self.cost = self.cost + cost if self.waiting else 0.0
        sizes = tenant.cost_by_size
        sizes[entry.size] = sizes.get(entry.size, 0.0) + cost
        if not tenant.waiting:
            sizes.clear()

    def oldest(self) -> Waiting | None:
        """The earliest arrival still waiting in this level."""
        arrivals = self._arrivals
        while arrivals and arrivals[0].phase is not Phase.WAITING:
            arrivals.popleft()
        return arrivals[0] if arrivals else None

    def entries(self) -> list[Waiting]:
        """All that wait, in order of arrival."""
        return [entry for entry in self._arrivals if entry.phase is Phase.WAITING]

    def unload(self) -> list[Waiting]:
        """Empty the queue but keep every tenant's virtual time; returns what waited, in order, to be added again."""
        entries = self.entries()
        for entry in entries:
            self.remove(entry, Phase.LEFT)
        self._arrivals.clear()
        for tenant in self.tenants.values():
            tenant.forget_arrivals()
        return entries

    def first(self, usable: Callable[[Lane], bool]) -> Waiting | None:
        """Who is next by fair order, whether or not there is room; lanes that are not `usable` are passed by."""
        best: Share | None = None
        lanes = [lane for lane in self.lanes.values() if usable(lane)]
        for lane in lanes:
            share = lane.lead()
            if share is not None and (best is None or _before(share.tenant, best.tenant)):
                best = share
        if best is None:
            return None
        tenant = best.tenant
        oldest = tenant.oldest()
        if oldest is not None and oldest.passed >= OVERTAKINGS_INSIDE and oldest.share is not None and usable(oldest.share.lane):
            return oldest
        shares = [share for lane in lanes if (share := tenant.shares.get(lane)) is not None]
        return min((share.head() for share in shares), key=_size)

    def fitting(self, fits: Callable[[Waiting], bool], usable: Callable[[Lane], bool]) -> Waiting | None:
        """Who is next by fair order among those for whom `fits` holds."""
        best: Waiting | None = None
        for lane in self.lanes.values():
            if not usable(lane):
                continue
            for share in lane.in_order(LOOK_AHEAD):
                entry = share.head()
                if best is not None and _rank(entry) >= _rank(best):
                    break
                if fits(entry):
                    best = entry
                    break
        return best

    def overtaken(self, entry: Waiting, first: Waiting | None) -> None:
        """`entry` is about to be granted: count it against those it passes."""
        tenant = entry.tenant
        oldest = tenant.oldest() if tenant is not None else None
        if oldest is not None and oldest is not entry:
            oldest.passed += 1
        if first is not None and first is not entry and first is not oldest:
            first.passed += 1


def _before(one: Tenant, other: Tenant) -> bool:
    return (one.vtime, one.index) < (other.vtime, other.index)


def _size(entry: Waiting) -> tuple[int, int]:
    return entry.size, entry.order


def _rank(entry: Waiting) -> tuple[float, int, int, int]:
    tenant = entry.tenant
    assert tenant is not None
    return tenant.vtime, tenant.index, entry.size, entry.order


def size_class(cost: float) -> int:
    """Costs within a factor of four are alike: among them the earlier goes first."""
    return int(cost).bit_length() // 2
