"""The one controller: turns decisions into grants, waiting and refusals.

Owns: who waits, who runs, the tenants' quotas. Promises: every change is synchronous, with no await between check and
change; a request with free room never touches an asyncio object; each request has exactly one end (grant, refusal or
departure), and a grant made in the instant of a cancel is given back. Talks to: `pool`, `bay`, `quotas`, `grant`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from gateway import policy
from gateway.errors import Axis, Reason, Refusal, Refused
from gateway.flow import refusals
from gateway.flow.bay import Bay
from gateway.flow.breaker import Breaker, Result, State
from gateway.flow.demand import Closed, Demand, Gate
from gateway.flow.explain import Explanation, explain
from gateway.flow.grant import Grant
from gateway.flow.pool import Pool, Route, prefers
from gateway.flow.queue import Level, Phase, Waiting
from gateway.flow.quotas import Account
from gateway.flow.shape import Shape
from gateway.flow.snapshot import Snapshot, take

Trigger = Callable[[str, str, Axis, Shape], None]
"""(model, backend, axis, shape): a request left the measured slices this way."""

_REMOVED = Closed(Refusal(Reason.BACKEND_UNAVAILABLE, "the backend is no longer in the policy"))


class Controller:
    """Admission for all backends of one process. `clock`: monotonic seconds, for departures only."""

    def __init__(
        self, queue: policy.Queue, clock: Callable[[], float], on_trigger: Trigger, breaker: policy.Breaker | None = None
    ) -> None:
        self._queue = queue
        self._clock = clock
        self._on_trigger = on_trigger
        self._breaker = breaker if breaker is not None else policy.Breaker()
        self._bays: dict[str, Bay] = {}
        self._routes: dict[tuple[str, ...], Route] = {}
        self._pools: list[Pool] = []
        self._accounts: dict[str, Account] = {}
        self._draining: Refusal | None = None
        self._arrivals = 0
        self._waiting = 0
        self._waiting_tokens = 0
        self._expiry: list[tuple[float, Waiting]] = []

    # what the backends are

    def set_backend(self, name: str, gate: Gate) -> None:
        """Put a gate before a backend (new or known). Waiting requests are judged again, in flight is counted again."""
        bay = self._bay(name)
        bay.listed = True
        bay.set_gate(gate)
        self._replan(bay)

    def remove_backend(self, name: str) -> None:
        """Forget a backend of the old policy; what is in flight there still settles."""
        bay = self._bay(name)
        bay.listed = False
        bay.set_gate(_REMOVED)
        self._replan(bay)

    def set_foreign(self, name: str, sequences: int) -> None:
        """Requests in flight on the backend that are not ours, to be added to its count (policy `foreign: count`)."""
        bay = self._bay(name)
        bay.occupancy.foreign = sequences
        self._pump_all(self._clock())

    def set_limits(self, queue: policy.Queue, breaker: policy.Breaker) -> None:
        """A new policy: bounds of the queue and thresholds of the breakers, from now on."""
        self._queue = queue
        self._breaker = breaker
        for bay in self._bays.values():
            bay.breaker.config = breaker

    def breaker(self, name: str) -> Breaker:
        """The backend's breaker, to reset it or to record a probe of the gateway's own."""
        return self._bay(name).breaker

    def report(self, name: str, result: Result, now: float) -> None:
        """What the gateway's own probe says about a backend, outside any grant."""
        breaker = self._bay(name).breaker
        if breaker.state is State.CLOSED or (permit := breaker.allow(now)) is None:
            permit = breaker.generation
            if breaker.state is not State.CLOSED:
                return
        breaker.record(permit, result, now)
        self.sweep(now)

    # the request path

    def request(self, demand: Demand, now: float) -> Grant | Waiting | Refusal:
        """Decide on one request. Waiting must be followed by `wait` or `leave`, a Grant by its `settle`."""
        if self._draining is not None:
            return self._draining
        if demand.caller_deadline is not None and demand.caller_deadline <= now:
            return refusals.caller_gone()
        account = None
        if demand.limits is not None:
            account = self._account(demand, now)
            refusal = account.check(demand.shape.tokens, now)
            if refusal is not None:
                return refusal
        route = self._routes.get(demand.backends) or self._route(demand.backends)
        answer: Grant | Waiting | Refusal | None = None
        if not route.pool.waiting:
            answer = self._straight(route, demand, now)
        if answer is None:
            answer = self._queued(route, demand, now, account)
        elif account is not None:
            account.take(demand.shape.tokens)
        return answer

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
            self._undo_quota(waiting.demand)
            self._pump(waiting.route.pool, self._clock())
        elif waiting.phase is Phase.GRANTED:
            waiting.phase = Phase.LEFT
            waiting.result.give_back(self._clock())

    def sweep(self, now: float) -> None:
        """Expire what has waited too long, refuse what has lost its last backend, and try again. Called every 50 ms."""
        while self._expiry and self._expiry[0][0] <= now:
            waiting = heappop(self._expiry)[1]
            if waiting.phase is Phase.WAITING:
                self._refuse(waiting, self._expired(waiting, now))
        for pool in self._pools:
            if pool.waiting:
                self._refuse_hopeless(pool, now)
                self._pump(pool, now)

    def drain(self, refusal: Refusal) -> None:
        """Refuse all that wait and all that come, with this refusal; what runs goes on."""
        self._draining = refusal
        for pool in self._pools:
            for level in pool.ranked:
                for waiting in level.entries():
                    self._refuse(waiting, refusal)

    # questions

    def explain(self, demand: Demand, now: float) -> Explanation:
        """What `request` would answer now, and why; nothing changes."""
        route = self._routes.get(demand.backends) or self._route(demand.backends)
        account = self._accounts.get(demand.tenant)
        return explain(route, demand, now, account, self._draining, self._queue, self._waiting, self._waiting_tokens)

    def snapshot(self, now: float) -> Snapshot:
        """In flight, reserved and waiting, for metrics and the console; O(in flight + waiting)."""
        return take(self._bays.values(), self._pools, now)

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
        bays = (self._bay(name) for name in backends)
        return all(
            bay.occupancy.envelope.settled(task, features, output_tokens, sequences, low, high) for bay in bays if bay.open
        )

    def default_output(
        self, backends: tuple[str, ...], task: str, features: frozenset[str], input_tokens: int, server_default: int | None
    ) -> int | None:
        """The output limit for a request that names none: the best of its open candidates; None when none holds the input."""
        open_ = (self._bay(name).occupancy.envelope for name in backends if self._bay(name).open)
        limits = (envelope.default_output(task, features, input_tokens, server_default) for envelope in open_)
        return max((limit for limit in limits if limit is not None), default=None)

    # inside

    def _bay(self, name: str) -> Bay:
        bay = self._bays.get(name)
        if bay is None:
            bay = self._bays[name] = Bay(name, Breaker(self._breaker))
        return bay

    def _route(self, backends: tuple[str, ...]) -> Route:
        """A new set of candidates. Pools that it connects become one, with everything that waits in them."""
        bays = tuple(self._bay(name) for name in backends)
        joined = {id(route.pool): route.pool for route in self._routes.values() if set(route.bays) & set(bays)}
        pools = list(joined.values())
        pool = pools[0] if pools else Pool()
        for other in pools[1:]:
            for route in self._routes.values():
                route.pool = pool if route.pool is other else route.pool
            pool.absorb(other, self._clock())
            self._pools.remove(other)
        if not pools:
            self._pools.append(pool)
        route = self._routes[backends] = Route(backends, bays, pool)
        return route

    def _account(self, demand: Demand, now: float) -> Account:
        assert demand.limits is not None
        account = self._accounts.get(demand.tenant)
        if account is None:
            account = self._accounts[demand.tenant] = Account(demand.limits, now)
        elif account.limits != demand.limits:
            account.adopt(demand.limits, now)
        return account

    def _straight(self, route: Route, demand: Demand, now: float) -> Grant | None:
        """The fast path, nobody waiting: the candidate with most room, or None."""
        shape = demand.shape
        best: tuple[Bay, int, int] | None = None
        best_room = 0
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
            if best is None or room > best_room or (room == best_room and prefers(demand.affinity, bay, best[0])):
                best, best_room = (bay, mask, blocks), room
        if best is None:
            return None
        pool = route.pool
        level = pool.levels.get(demand.priority) or pool.level(demand.priority)
        return self._grant(demand, *best, 0.0, level, now)

    def _grant(self, demand: Demand, bay: Bay, mask: int, blocks: int, queue_s: float, level: Level, now: float) -> Grant:
        breaker = bay.breaker
        permit = breaker.generation if breaker.state is State.CLOSED else breaker.allow(now)
        assert permit is not None
        grant = Grant(demand, bay, mask, blocks, permit, queue_s, self)
        grant.tenant = level.charge(demand.tenant, demand.weight, grant.cost)
        return grant

    def _queued(self, route: Route, demand: Demand, now: float, account: Account | None) -> Grant | Waiting | Refusal:
        pool = route.pool
        waiting = Waiting(demand, route, self._arrivals, now)
        self._arrivals += 1
        possible = pool.plan(waiting)
        refusal = refusals.hopeless(route, demand, waiting.masks, now) or self._too_much(pool, waiting, now)
        if refusal is not None:
            self._trigger(route, demand, refusal)
            return refusal
        assert possible
        if account is not None:
            account.take(demand.shape.tokens)
        pool.add(waiting, now)
        self._waiting += 1
        self._waiting_tokens += demand.shape.tokens
        heappush(self._expiry, (waiting.deadline, waiting))
        if len(self._expiry) > 2 * self._waiting + 1024:
            self._expiry = [item for item in self._expiry if item[1].phase is Phase.WAITING]
            heapify(self._expiry)
        self._pump(pool, now)
        if waiting.phase is Phase.GRANTED:
            waiting.phase = Phase.TAKEN
            grant: Grant = waiting.result
            return grant
        return waiting

    def _too_much(self, pool: Pool, waiting: Waiting, now: float) -> Refusal | None:
        """Early refusals: the wait would be too long, or the queue is full and nobody in it should make room."""
        demand = waiting.demand
        estimate = pool.wait_s(demand, waiting.cost)
        if estimate is not None and estimate > waiting.deadline - now:
            return refusals.would_wait(estimate, waiting.deadline - now)
        full = refusals.full(self._queue, self._waiting, self._waiting_tokens, demand, pool)
        if full is None:
            return None
        victim = pool.least_deserving(demand)
        if victim is None or refusals.full(
            self._queue, self._waiting - 1, self._waiting_tokens - victim.demand.shape.tokens, demand, pool
        ):
            return full
        self._refuse(victim, full)
        return None

    def _pump(self, pool: Pool, now: float) -> None:
        while pool.waiting and (pick := pool.pick(now)) is not None:
            entry, bay = pick.entry, pick.bay
            if entry.deadline <= now:
                self._refuse(entry, self._expired(entry, now))
                continue
            index = entry.route.bays.index(bay)
            queue_s = now - entry.enqueued_at
            level = pick.level
            entry.result = self._grant(entry.demand, bay, entry.masks[index], entry.blocks[index], queue_s, level, now)
            pool.granted(pick)
            self._uncount(entry)

    def _pump_all(self, now: float) -> None:
        for pool in self._pools:
            self._pump(pool, now)

    def after_settle(self, grant: Grant, now: float, used: int | None) -> None:
        """A grant has ended (called by the grant): refund what it did not use, and let the next ones in."""
        reserved = grant.tokens
        tenant = grant.tenant
        if used is not None and used < reserved and tenant is not None:
            tenant.charge(grant.cost * (used / reserved - 1))
        if grant.demand.limits is not None:
            self._accounts[grant.demand.tenant].settle(reserved, reserved if used is None else used)
        if self._waiting:
            pool = self._routes[grant.demand.backends].pool
            if pool.waiting:
                pool.drain.note(grant.cost, now)
                self._pump(pool, now)

    def after_give_back(self, grant: Grant, now: float) -> None:
        """A grant that nobody took: its cost and quota come back whole."""
        if grant.tenant is not None:
            grant.tenant.charge(-grant.cost)
        self._undo_quota(grant.demand)
        self._pump(self._routes[grant.demand.backends].pool, now)

    def _replan(self, bay: Bay) -> None:
        now = self._clock()
        pools = {id(route.pool): route.pool for route in self._routes.values() if bay in route.bays}
        for pool in pools.values():
            for waiting in pool.unload():
                pool.plan(waiting)
                pool.add(waiting, now)
            self._refuse_hopeless(pool, now)
            self._pump(pool, now)

    def _refuse_hopeless(self, pool: Pool, now: float) -> None:
        """Refuse what no candidate could take now or soon: lanes first, so that nothing is done while all is well."""
        hopeless = [lane for level in pool.ranked for lane in level.lanes.values() if not lane.hopeful(now)]
        for level in pool.ranked if hopeless else ():
            for waiting in level.entries():
                refusal = refusals.hopeless(waiting.route, waiting.demand, waiting.masks, now)
                if refusal is not None:
                    self._refuse(waiting, refusal)

    def _expired(self, waiting: Waiting, now: float) -> Refusal:
        demand = waiting.demand
        if demand.caller_deadline is not None and demand.caller_deadline <= min(demand.queue_deadline, now):
            return refusals.caller_gone()
        refusal = refusals.waited(now - waiting.enqueued_at, waiting.route.pool)
        return refusal

    def _refuse(self, waiting: Waiting, refusal: Refusal) -> None:
        self._end(waiting, Phase.REFUSED, refusal)
        self._undo_quota(waiting.demand)
        self._trigger(waiting.route, waiting.demand, refusal)

    def _end(self, waiting: Waiting, phase: Phase, result: Refusal | None) -> None:
        waiting.result = result
        waiting.route.pool.remove(waiting, phase)
        self._uncount(waiting)

    def _uncount(self, waiting: Waiting) -> None:
        self._waiting -= 1
        self._waiting_tokens -= waiting.demand.shape.tokens
        if waiting.future is not None and not waiting.future.done():
            waiting.future.set_result(None)

    def _undo_quota(self, demand: Demand) -> None:
        if demand.limits is not None:
            self._accounts[demand.tenant].undo(demand.shape.tokens)

    def _trigger(self, route: Route, demand: Demand, refusal: Refusal) -> None:
        if refusal.axis is not None:
            self._on_trigger(demand.model, refusals.nearest(route, demand.shape).name, refusal.axis, demand.shape)
