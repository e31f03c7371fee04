"""The one controller: turns decisions into grants, waiting and refusals.

Owns: who waits and who runs. Promises: every change is synchronous, with no await between check and change; a request
with free room never touches an asyncio object; each request has exactly one end (grant, refusal or departure), and a
grant made in the instant of a cancel is given back. Talks to: `topology`, `pool`, `quotas`, `backlog`, `grant`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway import policy
from gateway.errors import Axis, Reason, Refusal, Refused
from gateway.flow import refusals
from gateway.flow.backlog import Backlog
from gateway.flow.bay import Bay
from gateway.flow.breaker import Breaker, Result, State
from gateway.flow.demand import Closed, Demand, Gate
from gateway.flow.explain import Explanation, explain
from gateway.flow.grant import Grant
from gateway.flow.observed import RELAXED, Observer
from gateway.flow.pool import Pool, Route, prefers
from gateway.flow.queue import Level
from gateway.flow.quotas import Quotas
from gateway.flow.shape import Shape
from gateway.flow.snapshot import Snapshot, take
from gateway.flow.topology import Topology
from gateway.flow.waiting import Phase, Waiting

Trigger = Callable[[str, str, Axis, Shape], None]
"""(model, backend, axis, shape): a request left the measured slices this way."""

_REMOVED = Closed(Refusal(Reason.BACKEND_UNAVAILABLE, "the backend is no longer in the policy"))


class Controller:
    """Admission for all backends of one process. `clock`: monotonic seconds, for events that bring no time along."""

    def __init__(
        self, queue: policy.Queue, clock: Callable[[], float], on_trigger: Trigger, breaker: policy.Breaker | None = None
    ) -> None:
        self._queue = queue
        self._clock = clock
        self._on_trigger = on_trigger
        self._topology = Topology(breaker if breaker is not None else policy.Breaker())
        self._routes = self._topology.routes
        self._quotas = Quotas()
        self._backlog = Backlog()
        self._observer: Observer | None = None
        self._draining: Refusal | None = None
        self._arrivals = 0

    # what the backends are

    def set_backend(self, name: str, gate: Gate) -> None:
        """Put a gate before a backend (new or known). Waiting requests are judged again, in flight is counted again."""
        self._change(name, gate, listed=True)

    def remove_backend(self, name: str) -> None:
        """Forget a backend of the old policy; what is in flight there still settles."""
        self._change(name, _REMOVED, listed=False)

    def _change(self, name: str, gate: Gate, *, listed: bool) -> None:
        now = self._clock()
        bay = self._topology.bay(name)
        bay.listed = listed
        if bay.gate == gate:
            return
        bay.set_gate(gate)
        for pool in self._topology.pools_of(bay):
            for waiting in pool.unload():
                pool.plan(waiting)
                pool.add(waiting, now)
            self._refuse_hopeless(pool, now)
            self._pump(pool, now)

    def set_foreign(self, name: str, sequences: int) -> None:
        """Requests in flight on the backend that are not ours, to be added to its count (policy `foreign: count`)."""
        bay = self._topology.bay(name)
        bay.occupancy.foreign = sequences
        for pool in self._topology.pools_of(bay):
            self._pump(pool, self._clock())

    def set_limits(self, queue: policy.Queue, breaker: policy.Breaker) -> None:
        """A new policy: bounds of the queue and thresholds of the breakers, from now on."""
        self._queue = queue
        self._topology.set_breaker(breaker)

    def set_enforcement(self, *, observe: bool) -> None:
        """Whether decisions are only counted (policy `enforcement: observe`), from the next request on."""
        if observe != (self._observer is not None):
            self._observer = Observer(self, self._topology) if observe else None

    def relaxes(self, refusal: Refusal) -> bool:
        """Whether a refusal is one that observing only counts."""
        return refusal.reason in RELAXED

    def breaker(self, name: str) -> Breaker:
        """The backend's breaker, to be read or reset."""
        return self._topology.bay(name).breaker

    def report(self, name: str, result: Result, now: float) -> None:
        """What the gateway's own probe says about a backend, outside any grant."""
        permit = self.breaker(name).allow(now)
        if permit is not None:
            self.breaker(name).record(permit, result, now)
            self.sweep(now)

    # the request path

    def request(self, demand: Demand, now: float) -> Grant | Waiting | Refusal:
        """Decide on one request. Waiting must be followed by `wait` or `leave`, a Grant by its `settle`."""
        return self.decide(demand, now) if self._observer is None else self._observer.request(demand, now)

    def decide(self, demand: Demand, now: float) -> Grant | Waiting | Refusal:
        """The enforcing decision, also when it is only watched."""
        if self._draining is not None:
            return self._draining
        if demand.caller_deadline is not None and demand.caller_deadline <= now:
            return refusals.caller_gone()
        if demand.limits is not None and (refusal := self._quotas.check(demand, now)) is not None:
            return refusal
        route = self._routes.get(demand.backends) or self._topology.route(demand.backends, now)
        if not route.pool.waiting and (grant := self._straight(route, demand, now)) is not None:
            if demand.limits is not None:
                self._quotas.take(demand)
            return grant
        return self._queued(route, demand, now)

    async def wait(self, waiting: Waiting) -> Grant:
        """Wait for the grant. Raises Refused; when cancelled, the place or the grant just made is given back."""
        try:
            if waiting.phase is Phase.WAITING:
                waiting.future = asyncio.get_running_loop().create_future()
                await waiting.future
            if isinstance(waiting.result, Grant):
                waiting.phase = Phase.TAKEN
                return waiting.result
            raise Refused(waiting.result)
        finally:
            if waiting.phase is not Phase.TAKEN:
                self.leave(waiting)

    def leave(self, waiting: Waiting) -> None:
        """The caller is gone: out of the queue, or the grant nobody took is given back. Harmless when called late."""
        if waiting.phase is Phase.WAITING:
            self._end(waiting, Phase.LEFT, None)
            self._pump(waiting.route.pool, self._clock())
        elif waiting.phase is Phase.GRANTED:
            waiting.phase = Phase.LEFT
            waiting.result.give_back(self._clock())

    def sweep(self, now: float) -> None:
        """Expire what has waited too long, refuse what has lost its last backend, and try again. Called every 50 ms."""
        for waiting in self._backlog.expired(now):
            self._refuse(waiting, refusals.expired(waiting, now))
        for pool in self._topology.pools if self._backlog.requests else ():
            self._refuse_hopeless(pool, now)
            self._pump(pool, now)

    def drain(self, refusal: Refusal) -> None:
        """Refuse all that wait and all that come, with this refusal; what runs goes on."""
        self._draining = refusal
        for pool in self._topology.pools:
            for level in pool.ranked:
                for waiting in level.entries():
                    self._refuse(waiting, refusal)

    # questions

    def explain(self, demand: Demand, now: float) -> Explanation:
        """What `request` would answer now, and why; nothing changes."""
        route = self._topology.route(demand.backends, now)
        refusal = self._draining or self._quotas.check(demand, now)
        return explain(route, demand, now, refusal, self._queue, self._backlog)

    def snapshot(self, now: float) -> Snapshot:
        """In flight, reserved and waiting, for metrics and the console; O(in flight + waiting)."""
        observed = dict(self._observer.counts) if self._observer is not None else {}
        return take(self._topology.bays.values(), self._topology.pools, now, observed)

    def hash_of(self, name: str) -> str:
        """The configuration hash behind the backend's gate, "" when it was never open."""
        return self._topology.bay(name).hash

    def settled(
        self,
        backends: tuple[str, ...],
        task: str,
        features: frozenset[str],
        output_tokens: int | None,
        sequences: int,
        low: int,
        high: int,
    ) -> bool:
        """Whether on every open candidate the decision is the same for all input sizes in [low, high]."""
        bay_of = self._topology.bay
        for name in backends:  # a loop, for this is asked of every request
            bay = bay_of(name)
            if bay.open and not bay.occupancy.envelope.settled(task, features, output_tokens, sequences, low, high):
                return False
        return True

    def has_open(self, backends: tuple[str, ...]) -> bool:
        """Whether any candidate's gate is open."""
        return any(True for _ in self._topology.envelopes(backends))

    def default_output(
        self, backends: tuple[str, ...], task: str, features: frozenset[str], input_tokens: int, server_default: int | None
    ) -> int | None:
        """The output limit for a request that names none: the best of its open candidates; None when none holds the input."""
        envelopes = self._topology.envelopes(backends)
        limits = (envelope.default_output(task, features, input_tokens, server_default) for envelope in envelopes)
        return max((limit for limit in limits if limit is not None), default=None)

    # inside

    def _straight(self, route: Route, demand: Demand, now: float) -> Grant | None:
        """The fast path, nobody waiting: the candidate with most room, or None."""
        shape = demand.shape
        best: Bay | None = None
        best_mask = best_blocks = best_room = 0
        for bay in route.bays:
            if not bay.open:
                continue
            occupancy = bay.occupancy
            envelope = occupancy.envelope
            mask = envelope.mask(shape)
            blocks = 0 if envelope.budget_blocks is None else envelope.blocks(shape)
            if not mask or not occupancy.fits(mask, shape[4], blocks):
                continue
            if bay.breaker.state is not State.CLOSED and not bay.breaker.would_allow(now):
                continue
            room = occupancy.room(mask) if len(route.bays) > 1 else 0
            if best is None or room > best_room or (room == best_room and prefers(demand.affinity, bay, best)):
                best, best_mask, best_blocks, best_room = bay, mask, blocks, room
        if best is None:
            return None
        pool = route.pool
        level = pool.levels.get(demand.priority) or pool.level(demand.priority)
        return self._grant(demand, best, best_mask, best_blocks, 0.0, level, now)

    def _grant(self, demand: Demand, bay: Bay, mask: int, blocks: int, queue_s: float, level: Level, now: float) -> Grant:
        breaker = bay.breaker
        permit = breaker.generation if breaker.state is State.CLOSED else breaker.allow(now)
        assert permit is not None
        grant = Grant(demand, bay, mask, blocks, permit, queue_s, self)
        grant.tenant = level.charge(demand.tenant, demand.weight, grant.cost)
        return grant

    def _queued(self, route: Route, demand: Demand, now: float) -> Grant | Waiting | Refusal:
        pool = route.pool
        waiting = Waiting(demand, route, self._arrivals, now)
        self._arrivals += 1
        pool.plan(waiting)
        refusal = refusals.hopeless(route, demand, waiting.masks, now) or self._too_much(pool, waiting, now)
        if refusal is not None:
            self._trigger(route, demand, refusal)
            return refusal
        self._quotas.take(demand)
        pool.add(waiting, now)
        self._backlog.add(waiting)
        self._pump(pool, now)
        if waiting.phase is Phase.GRANTED:
            waiting.phase = Phase.TAKEN
            grant: Grant = waiting.result
            return grant
        return waiting

    def _too_much(self, pool: Pool, waiting: Waiting, now: float) -> Refusal | None:
        """Early refusals: the wait would be too long, or the queue is full and nobody in it should make room."""
        demand = waiting.demand
        estimate = pool.wait_s(waiting)
        if estimate is not None and estimate > waiting.deadline - now:
            return refusals.would_wait(estimate, waiting.deadline - now)
        backlog = self._backlog
        full = refusals.full(self._queue, backlog.requests, backlog.tokens, demand, pool)
        if full is None:
            return None
        victim = pool.least_deserving(demand)
        if victim is None:
            return full
        tokens = backlog.tokens - victim.demand.shape.tokens
        if refusals.full(self._queue, backlog.requests - 1, tokens, demand, pool) is not None:
            return full
        self._refuse(victim, full)
        return None

    def _pump(self, pool: Pool, now: float) -> None:
        """Grant whatever may go now, in order."""
        while pool.waiting and (pick := pool.pick(now)) is not None:
            entry, bay = pick.entry, pick.bay
            if entry.deadline <= now:
                self._refuse(entry, refusals.expired(entry, now))
                continue
            index = entry.route.bays.index(bay)
            queue_s = now - entry.enqueued_at
            grant = self._grant(entry.demand, bay, entry.masks[index], entry.blocks[index], queue_s, pick.level, now)
            grant.place = entry
            pool.granted(pick)
            self._conclude(entry, grant)

    def after_settle(self, grant: Grant, now: float, used: int | None) -> None:
        """A grant has ended (called by the grant): refund what it did not use, and let the next ones in."""
        reserved = grant.tokens
        tenant = grant.tenant
        if used is not None and used < reserved and tenant is not None:
            tenant.charge(grant.cost * (used / reserved - 1))
        demand = grant.demand
        if demand.limits is not None:
            self._quotas.settle(demand, used)
        if self._backlog.requests:
            pool = self._routes[demand.backends].pool
            if pool.waiting:
                pool.drain.note(grant.cost, now)
                self._pump(pool, now)

    def after_give_back(self, grant: Grant, now: float) -> None:
        """A grant that nobody took (called by the grant): its cost and quota come back whole."""
        if grant.tenant is not None:
            grant.tenant.charge(-grant.cost)
        self._quotas.undo(grant.demand)
        self._pump(self._routes[grant.demand.backends].pool, now)

    def _refuse_hopeless(self, pool: Pool, now: float) -> None:
        """Refuse what no candidate could take now or soon; lanes are asked first, so that it costs little while all is well."""
        if all(lane.hopeful(now) for level in pool.ranked for lane in level.lanes.values()):
            return
        for level in pool.ranked:
            for waiting in level.entries():
                refusal = refusals.hopeless(waiting.route, waiting.demand, waiting.masks, now)
                if refusal is not None:
                    self._refuse(waiting, refusal)

    def _refuse(self, waiting: Waiting, refusal: Refusal) -> None:
        self._end(waiting, Phase.REFUSED, refusal)
        self._trigger(waiting.route, waiting.demand, refusal)

    def _end(self, waiting: Waiting, phase: Phase, result: Refusal | None) -> None:
        """Out of the queue without a grant."""
        waiting.route.pool.remove(waiting, phase)
        self._quotas.undo(waiting.demand)
        self._conclude(waiting, result)

    def _conclude(self, waiting: Waiting, result: Grant | Refusal | None) -> None:
        waiting.result = result
        self._backlog.remove(waiting)
        if waiting.future is not None and not waiting.future.done():
            waiting.future.set_result(None)

    def _trigger(self, route: Route, demand: Demand, refusal: Refusal) -> None:
        if refusal.axis is not None:
            self._on_trigger(demand.model, refusals.nearest(route, demand.shape).name, refusal.axis, demand.shape)
