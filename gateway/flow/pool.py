"""Backends that share waiting requests, and the decision who goes where next.

Owns the levels of one pool (backends connected by common candidates). Promises: `pick` changes no count; a more urgent
class is never passed by a lower one on the backend it waits for, save one grant in twenty for the aged; the first in
fair order is passed at most OVERTAKINGS times before room is held for it, on one backend only. Talks to: `queue`, `bay`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from gateway.flow.bay import Bay
from gateway.flow.breaker import State
from gateway.flow.demand import Demand
from gateway.flow.drain_rate import DrainRate
from gateway.flow.lanes import Lane, Tenant
from gateway.flow.queue import OVERTAKINGS, Level
from gateway.flow.waiting import Phase, Waiting, size_class

AGED_SHARE = 0.5
"""A request is aged when it has waited this part of the time it may wait."""

AGED_EVERY = 20
"""While a more urgent class waits, an aged lower one gets at most one grant in this many."""


class Route:
    """The candidates of a demand, resolved: `bays` in the order of `backends`."""

    __slots__ = ("backends", "bays", "pool")

    def __init__(self, backends: tuple[str, ...], bays: tuple[Bay, ...], pool: Pool) -> None:
        self.backends = backends
        self.bays = bays
        self.pool = pool


class Pick(NamedTuple):
    """`entry` goes to `bay`; `passes` is the request that was before it in fair order and found no room there."""

    level: Level
    entry: Waiting
    bay: Bay
    passes: Waiting | None


class Pool:
    """Levels by priority, most urgent first."""

    __slots__ = ("bays", "drain", "levels", "ranked", "waiting")

    def __init__(self) -> None:
        self.bays: list[Bay] = []
        self.levels: dict[int, Level] = {}
        self.ranked: list[Level] = []
        self.waiting = 0
        self.drain = DrainRate()

    def level(self, priority: int) -> Level:
        """The level of a priority, made on first use."""
        level = self.levels.get(priority)
        if level is None:
            level = self.levels[priority] = Level(priority)
            self.ranked = [self.levels[key] for key in sorted(self.levels)]
        return level

    def plan(self, entry: Waiting) -> bool:
        """Set masks, blocks and cost from the present envelopes; False when no open backend could ever take it."""
        shape = entry.demand.shape
        masks, blocks, costs = [], [], []
        for bay in entry.route.bays:
            envelope = bay.occupancy.envelope
            mask = envelope.place(shape) if bay.open else 0
            masks.append(mask)
            blocks.append(envelope.blocks(shape))
            if mask:
                costs.append(envelope.cost(shape, mask))
        entry.masks, entry.blocks = tuple(masks), tuple(blocks)
        entry.cost = min(costs, default=0.0)
        entry.size = size_class(entry.cost)
        return bool(costs)

    def add(self, entry: Waiting, now: float) -> None:
        """Queue a planned entry."""
        if not self.waiting:
            self.drain.start(now)
        self.waiting += 1
        self.level(entry.demand.priority).add(entry)

    def remove(self, entry: Waiting, phase: Phase) -> None:
        """Take an entry out of the queue."""
        self.levels[entry.demand.priority].remove(entry, phase)
        self.waiting -= 1
        if not self.waiting:
            for bay in self.bays:
                bay.occupancy.alone()

    def unload(self) -> list[Waiting]:
        """Empty the queue, keeping virtual times; returns what waited."""
        self.waiting = 0
        return [entry for level in self.ranked for entry in level.unload()]

    def absorb(self, other: Pool, now: float) -> None:
        """Take over another pool's requests and tenants; each tenant keeps its distance to its level's clock."""
        self.bays += other.bays
        for level in other.ranked:
            mine = self.level(level.priority)
            for tenant in level.tenants.values():
                account = mine.tenant(tenant.name, tenant.weight)
                account.vtime = max(account.vtime, mine.clock + tenant.vtime - level.clock)
        for entry in other.unload():
            self.add(entry, now)

    def least_deserving(self, demand: Demand) -> Waiting | None:
        """Whom a full queue would rather lose than `demand`: the newest of the tenant with most waiting for its weight,
        in the least urgent level; None when that is no worse than the newcomer."""
        for level in reversed(self.ranked):
            if not level.waiting or level.priority < demand.priority:
                continue
            largest = max(level.tenants.values(), key=lambda tenant: tenant.waiting / tenant.weight)
            if level.priority == demand.priority:
                own = level.tenants.get(demand.tenant)
                mine = (1 if own is None else own.waiting + 1) / demand.weight
                if largest.waiting / largest.weight <= mine:
                    return None
            return largest.newest()
        return None

    def pick(self, now: float) -> Pick | None:
        """The next grant, or None when nobody may go now."""
        ready = [bay for bay in self.bays if bay.ready(now)]
        if all(bay.occupancy.full() for bay in ready):
            return None
        held: set[Bay] = set()
        levels = list(self._in_order(now))
        for level in levels:
            lanes = level.usable(ready)
            first = level.first(lanes)
            if first is None:
                continue
            pick = self._from_level(level, lanes, first, now, held)
            if pick is not None:
                return pick
            if level is not levels[-1]:
                held.update(_waited_for(lanes, first, now, held))
        return None

    @staticmethod
    def _from_level(level: Level, lanes: list[Lane], first: Waiting, now: float, held: set[Bay]) -> Pick | None:
        """The first in order if it fits; else hold room for it when it has been passed enough, and take the next that fits."""
        bay = choose(first, now, held)
        if bay is not None:
            return Pick(level, first, bay, None)
        if first.passed >= OVERTAKINGS and (target := hold_on(first, now, held)) is not None:
            held.add(target)
        entry = level.fitting(lanes, lambda waiting: choose(waiting, now, held) is not None)
        if entry is None or (bay := choose(entry, now, held)) is None:
            return None
        return Pick(level, entry, bay, first if bay in first.route.bays else None)

    def _in_order(self, now: float) -> Iterator[Level]:
        waiting = [level for level in self.ranked if level.waiting]
        aged = [level for level in waiting[1:] if level.since_aged >= AGED_EVERY - 1 and is_aged(level, now)]
        yield from aged
        yield from (level for level in waiting if level not in aged)

    def granted(self, pick: Pick) -> None:
        """Account for a pick that is being granted, and take it out of the queue."""
        level, entry = pick.level, pick.entry
        for other in self.ranked:
            if other.priority > level.priority and other.waiting:
                other.since_aged += 1
        if any(other.waiting for other in self.ranked if other.priority < level.priority):
            level.since_aged = 0
        level.overtaken(entry, pick.passes)
        self.remove(entry, Phase.GRANTED)

    def wait_s(self, entry: Waiting) -> float | None:
        """A low estimate of how long a planned newcomer would wait, from the drain rate; None while that is unknown."""
        demand = entry.demand
        ahead = sum(level.cost for level in self.ranked if level.priority < demand.priority)
        level = self.levels.get(demand.priority)
        tenant = level.tenants.get(demand.tenant) if level is not None else None
        if level is not None and tenant is not None and tenant.waiting:
            ahead += min(level.cost, before(tenant, entry.size) * level.weight / tenant.weight)
        return self.drain.seconds_for(ahead)


def _waited_for(lanes: list[Lane], first: Waiting, now: float, held: set[Bay]) -> set[Bay]:
    """The backends that less urgent classes must leave alone: one for every lane of this level."""
    heads = [first, *(share.head() for lane in lanes if (share := lane.lead()) is not None)]
    return {bay for entry in heads if (bay := hold_on(entry, now, held)) is not None}


def before(tenant: Tenant, size: int) -> float:
    """Cost of the tenant's waiting requests that go before a newcomer of this size class."""
    return sum(total for key, total in tenant.cost_by_size.items() if key <= size)


def is_aged(level: Level, now: float) -> bool:
    """Whether the oldest of a level has waited half of what it may."""
    oldest = level.oldest()
    if oldest is None:
        return False
    return now - oldest.enqueued_at >= AGED_SHARE * (oldest.deadline - oldest.enqueued_at)


def choose(entry: Waiting, now: float, held: Collection[Bay]) -> Bay | None:
    """The backend that can take the entry now: most room first, prefix affinity on ties."""
    best: Bay | None = None
    best_room = 0
    demand = entry.demand
    sequences = demand.shape[4]
    for bay, mask, blocks in zip(entry.route.bays, entry.masks, entry.blocks, strict=True):
        if not mask or not bay.open or bay in held or not bay.occupancy.fits(mask, sequences, blocks):
            continue
        if bay.breaker.state is not State.CLOSED and not bay.breaker.would_allow(now):
            continue
        room = bay.occupancy.room(mask)
        if best is None or room > best_room or (room == best_room and prefers(demand.affinity, bay, best)):
            best, best_room = bay, room
    return best


def prefers(affinity: int | None, bay: Bay, other: Bay) -> bool:
    """Rendezvous hashing on ties: whether the affinity weighs `bay` above `other`; never without an affinity."""
    return affinity is not None and _weight(affinity, bay.salt) > _weight(affinity, other.salt)


def _weight(affinity: int, salt: int) -> int:
    mixed = ((affinity ^ (salt * 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    return mixed ^ (mixed >> 31)


def hold_on(entry: Waiting, now: float, held: Collection[Bay]) -> Bay | None:
    """The one backend whose room is held for an entry: that chosen before while it is usable, else the soonest to drain."""
    best: Bay | None = None
    least = 0
    bays: tuple[Bay, ...] = entry.route.bays
    for bay, mask in zip(bays, entry.masks, strict=True):
        if not mask or bay in held or not bay.ready(now):
            continue
        if bay.name == entry.hold:
            return bay
        need = bay.occupancy.to_drain(mask, entry.demand.shape[4])
        if best is None or need < least:
            best, least = bay, need
    if best is not None and entry.passed >= OVERTAKINGS:
        entry.hold = best.name
    return best
