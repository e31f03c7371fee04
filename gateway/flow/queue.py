"""Who is next: fair order over tenants, bounded overtaking inside one. The maths is in the package's docstring.

Owns the waiting requests of one priority level. Promises: virtual time never runs backwards; enqueue, removal and
picking cost O(lanes + log n); every entry is in the queue exactly while its phase is WAITING. Whether an entry fits a
backend is asked of the caller. Talks to: `lanes`, `waiting`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from gateway.flow.lanes import Lane, Share, Tenant
from gateway.flow.waiting import Phase, Waiting

if TYPE_CHECKING:
    from gateway.flow.bay import Bay
    from gateway.flow.pool import Route

OVERTAKINGS_INSIDE = 4
"""How many grants of its own tenant may pass the tenant's oldest request before it is the tenant's next."""

OVERTAKINGS = 8
"""How many grants may pass the first in order, which finds no room, before room is held for it."""

LOOK_AHEAD = 8
"""Tenants tried in one lane when the first one's smallest request does not fit the KV budget."""


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
        self.lanes: dict[tuple[Route, tuple[int, ...], int], Lane] = {}
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

    def usable(self, ready: Collection[Bay]) -> list[Lane]:
        """The lanes that at least one of the ready backends could serve, room aside."""
        return [lane for lane in self.lanes.values() if not lane.bays.isdisjoint(ready)]

    @staticmethod
    def first(lanes: list[Lane]) -> Waiting | None:
        """Who is next by fair order in these lanes, whether or not there is room."""
        best: Tenant | None = None
        for lane in lanes:
            share = lane.lead()
            if share is not None and (best is None or _before(share.tenant, best)):
                best = share.tenant
        if best is None:
            return None
        oldest = best.oldest()
        due = oldest is not None and oldest.passed >= OVERTAKINGS_INSIDE
        if due and oldest is not None and oldest.share is not None and oldest.share.lane in lanes:
            return oldest
        return min((share.head() for lane in lanes if (share := best.shares.get(lane)) is not None), key=_size)

    @staticmethod
    def fitting(lanes: list[Lane], fits: Callable[[Waiting], bool]) -> Waiting | None:
        """Who is next by fair order in these lanes among those for whom `fits` holds."""
        best: Waiting | None = None

        def judge(entry: Waiting) -> bool | None:
            if best is not None and _rank(entry) >= _rank(best):
                return None
            return fits(entry)

        for lane in lanes:
            best = lane.search(LOOK_AHEAD, judge) or best
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
