"""One replica among several: every provisional grant is agreed with the others before it is sent.

Owns, for each backend, the leases this replica holds, whether it is registered, and what it has learnt of the others. Promises:
one round trip before dispatch and none on the path of an answer; a request that leaves while it is asked for leaves no lease
behind; nothing is sent under a lease that the others may count as gone (a process that was frozen finds that out here);
whatever the shared state forgot is said again. Talks to: `flow.shared` (grants), a `LeaseStore` (agreement), the fleet's
watches (what backends count).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from gateway.errors import Refusal, Refused
from gateway.flow.envelope import Envelope
from gateway.flow.grant import Grant
from gateway.flow.pool import AGED_SHARE
from gateway.flow.shared import SharedController
from gateway.flow.waiting import Waiting
from gateway.forward.watch import Counted
from gateway.mooring import Lease, Mooring
from gateway.shared_quotas import SharedQuotas, Taken
from gateway.state.leases import WOKEN_S, Answer, Ask, LeaseStore, StateLost, Verdict, View

log = logging.getLogger("plimsoll.state")

TICK_S = 0.05
BEATS = 4  # in one lease time
WANTED = 6  # lease times that a backend nobody asks for is still beaten for
SAFETY = 0.9  # of a lease time: after so long without a beat nothing is sent any more
SLACK_S = 10.0  # an execution may begin so long after its lease, connecting included
TRIES = 3


class Replicas:
    """`apart`: the state is lost and the policy says to go on with a share. `on_degraded` hears of every change."""

    def __init__(
        self,
        controller: SharedController,
        *,
        share: bool,
        lease_s: float,
        longest_s: Callable[[], float],
        count_of: Callable[[str], Counted | None],
        on_degraded: Callable[[bool], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.controller = controller
        self.store: LeaseStore
        self.quotas: SharedQuotas | None = None
        controller.on_wait, controller.on_left = self._waits, self._left
        self.apart = False
        self._share, self._lease_s, self._longest_s = share, lease_s, longest_s
        self._on_degraded, self._clock, self._count_of = on_degraded, clock, count_of
        self._moorings: dict[str, Mooring] = {}
        self._numbers = itertools.count(1)
        self._lost: str | None = "not connected yet"
        self._refusal = controller.suspend()
        self._seen = 1  # replicas when the state was last there
        self._tasks: set[asyncio.Task[None]] = set()

    # The request path

    async def confirm(self, grant: Grant) -> Grant:
        """Have a provisional grant agreed, waiting for room where others hold it. Raises Refused."""
        taken = self._take(grant)
        if taken is None:
            return await self._agreed(grant)
        try:
            grant = await self._agreed(grant)
        except (Refused, asyncio.CancelledError):
            taken.undo()
            raise
        return await self._within_quota(grant, taken)

    def _take(self, grant: Grant) -> Taken | None:
        """Ask the tenant's quotas, in the same write as the lease; a request that waited has its place in the count."""
        if self.quotas is None:
            return None
        if self._lost is None:
            return self.quotas.take(grant.demand, grant.place)
        if grant.place is not None:
            self.quotas.left(grant.place)
        return None

    def _waits(self, waiting: Waiting) -> None:
        if self.quotas is not None and self._lost is None:
            self.quotas.waits(waiting, self.controller.turn_away)

    def _left(self, waiting: Waiting) -> None:
        if self.quotas is not None:
            self.quotas.left(waiting)

    async def _within_quota(self, grant: Grant, taken: Taken) -> Grant:
        """The tenant's quotas were asked in the same round trip; what they refuse goes back whole. Raises Refused."""
        try:
            refusal = await taken.refusal()
        except StateLost as lost:
            self.lost(str(lost))
            refusal = None  # it was agreed, and the quotas are counted here as well
        except asyncio.CancelledError:
            grant.give_back(self._clock())
            taken.undo()
            raise
        if refusal is not None:
            grant.give_back(self._clock())
            taken.undo()
            raise Refused(refusal)
        if isinstance(grant.lease, Lease):
            grant.lease.quota = taken
        return grant

    async def _agreed(self, grant: Grant) -> Grant:
        while True:
            mooring = self.mooring(grant.backend)
            envelope = self.controller.envelope(grant.backend)
            if self._lost is not None or envelope is None:
                return self._without(mooring, grant, envelope)
            mooring.wanted_until = self._clock() + WANTED * self._lease_s
            ask = self._ask(mooring, grant, envelope)
            answer = await self._acquire(mooring, grant, ask)
            if answer.verdict is Verdict.GRANTED:
                grant.lease = Lease(mooring, ask)
                mooring.heard(answer)
                return grant
            grant = await self._again(mooring, grant, ask, answer)

    async def _acquire(self, mooring: Mooring, grant: Grant, ask: Ask) -> Answer:
        for _ in range(TRIES):
            pending: asyncio.Future[Answer] | None = None
            try:
                if not mooring.trusted(self._clock()):
                    await self._register(mooring)
                generation, head = mooring.generation, self._head(mooring)
                pending = self.store.acquire(mooring.name, ask, head)
                answer = await asyncio.shield(pending)
                if answer.verdict is Verdict.UNREGISTERED:
                    await self._register(mooring)
            except asyncio.CancelledError:
                if pending is not None:
                    pending.add_done_callback(lambda done: self._orphan(mooring, ask, done))
                grant.give_back(self._clock())
                raise
            except StateLost as lost:
                self.lost(str(lost))
                return Answer(Verdict.UNREGISTERED, View(0, 0, 0))
            if answer.verdict is Verdict.GRANTED:
                mooring.head = head.lease if head is not None else ""
                if generation == mooring.generation:
                    return answer
            elif answer.verdict is not Verdict.UNREGISTERED:
                mooring.head = ask.lease
                return answer
        return Answer(Verdict.COLD, View(0, 0, 0), retry_s=TICK_S)

    async def _again(self, mooring: Mooring, grant: Grant, ask: Ask, answer: Answer) -> Grant:
        """Back to its place, and the next provisional grant for it."""
        if self._lost is not None:
            return grant
        waiting = self.controller.put_back(grant, self._clock())
        if isinstance(waiting, Refusal):
            raise Refused(waiting)
        waiting.name = ask.lease
        view = answer.view
        if answer.verdict is Verdict.DENIED:
            mooring.resume(view)
            again = waiting.result  # granted at once: what is counted here and there does not agree yet
            if isinstance(again, Grant) and again.backend == mooring.name:
                mooring.pause(TICK_S, view)
        elif answer.verdict is Verdict.EARLY:
            self.controller.not_due(grant)
            mooring.resume(view)
        elif answer.verdict is Verdict.BEHIND:
            mooring.pause(WOKEN_S * 1.25, view)
        else:
            mooring.pause(answer.retry_s if answer.verdict is Verdict.COLD else self._lease_s / BEATS, view)
        return await self.controller.wait(waiting)

    def _without(self, mooring: Mooring, grant: Grant, envelope: Envelope | None) -> Grant:
        """No agreement is to be had: apart from the others, or not at all."""
        if not self.apart or envelope is None:
            grant.give_back(self._clock())
            raise Refused(self._refusal)
        grant.lease = Lease(mooring, self._ask(mooring, grant, envelope))  # said to the others when they are back
        return grant

    def _orphan(self, mooring: Mooring, ask: Ask, done: asyncio.Future[Answer]) -> None:
        """The caller left while it was asked for; a lost connection needs nothing, for its session is over."""
        if not done.cancelled() and done.exception() is None and done.result().verdict is Verdict.GRANTED:
            mooring.settle(ask, ask.cost)

    def _ask(self, mooring: Mooring, grant: Grant, envelope: Envelope) -> Ask:
        place = grant.place
        name = place.name if place is not None and place.name else self._name()
        return self._asked(mooring, envelope, name, grant.mask, grant.queue_s, grant.cost, grant)

    def _asked(
        self, mooring: Mooring, envelope: Envelope, name: str, mask: int, waited_s: float, cost: float, what: Grant | Waiting
    ) -> Ask:
        demand, place = what.demand, what.place if isinstance(what, Grant) else what
        shape = demand.shape
        blocks = shape.sequences * -(-(shape.input_tokens + shape.output_tokens) // envelope.block_size)
        return Ask(
            name, mooring.rules_of(envelope), mask, shape, blocks, demand.priority, demand.tenant, demand.weight, cost, waited_s,
            self._longest_s() + SLACK_S, AGED_SHARE * (place.deadline - place.enqueued_at) if place is not None else None,
        )  # fmt: skip

    def _name(self) -> str:
        return f"{self.store.owner}-{next(self._numbers):x}"

    def _head(self, mooring: Mooring) -> Ask | None:
        """The head of the local queue, as the others shall see it."""
        found, envelope = self.controller.head(mooring.name), self.controller.envelope(mooring.name)
        if found is None or envelope is None:
            return None
        waiting, mask = found
        waiting.name = waiting.name or self._name()
        waited_s = self._clock() - waiting.enqueued_at
        return self._asked(mooring, envelope, waiting.name, mask, waited_s, waiting.cost, waiting)

    # Being one of several

    def mooring(self, backend: str) -> Mooring:
        """A backend's mooring, made on first use."""
        found = self._moorings.get(backend)
        if found is None:
            found = self._moorings[backend] = Mooring(backend, self)
        return found

    async def _register(self, mooring: Mooring) -> bool:
        """Say everything that this replica holds. One registration at a time; every acquire that it overtakes is void."""
        if mooring.registered is None or mooring.registered.done():
            mooring.registered = asyncio.ensure_future(self._say_all(mooring))
        return await asyncio.shield(mooring.registered)

    async def _say_all(self, mooring: Mooring) -> bool:
        now, envelope = self._clock(), self.controller.envelope(mooring.name)
        if envelope is None:
            return True  # a closed gate: there is nothing to be asked for
        if not mooring.trusted(now):
            for lease in list(mooring.held.values()):
                if not lease.sent:
                    lease.void = True
                    del mooring.held[lease.ask.lease]
        mooring.generation += 1
        held = [lease.ask for lease in mooring.held.values()]
        return self._beaten(mooring, now, await self._try(self.store.beat(
            mooring.name, mooring.rules_of(envelope), self._head(mooring), held)))  # fmt: skip

    async def _beat(self, mooring: Mooring, envelope: Envelope) -> None:
        now, head = self._clock(), self._head(mooring)
        mooring.head = head.lease if head is not None else ""
        mooring.beat_at = now + self._lease_s / BEATS
        answer = await self._try(self.store.beat(mooring.name, mooring.rules_of(envelope), head, None))
        if answer is not None and answer.verdict is Verdict.UNREGISTERED:
            await self._register(mooring)
        else:
            self._beaten(mooring, now, answer)

    def _beaten(self, mooring: Mooring, sent_at: float, answer: Answer | None) -> bool:
        if answer is None or answer.verdict is Verdict.UNREGISTERED:
            return False
        mooring.valid_until = sent_at + SAFETY * self._lease_s
        mooring.beat_at = max(mooring.beat_at, sent_at + self._lease_s / BEATS)
        mooring.known = frozenset(answer.owners)
        self._seen = max(1, len(answer.owners))
        now = self._clock()
        mooring.suspects = {owner: mooring.suspects.get(owner, now) for owner in answer.suspects}
        mooring.paused = False
        mooring.heard(answer)
        return True

    async def _try(self, pending: asyncio.Future[Answer]) -> Answer | None:
        try:
            return await pending
        except StateLost as lost:
            self.lost(str(lost))
            return None

    async def run(self, backends: Callable[[], Iterable[str]]) -> None:
        """Beat, show heads and clear up after the dead, until cancelled. `backends`: those of the policy."""
        while True:
            if self._lost is None:
                if self.quotas is not None:
                    self.quotas.in_flight.beat(self._clock())
                for name in backends():
                    self._look(self.mooring(name))
            await asyncio.sleep(TICK_S)

    def _look(self, mooring: Mooring) -> None:
        envelope, now = self.controller.envelope(mooring.name), self._clock()
        if envelope is None:
            return
        found = self.controller.head(mooring.name)
        head = found[0].name if found is not None else ""
        wanted = bool(mooring.held) or found is not None or now < mooring.wanted_until
        if (wanted and now >= mooring.beat_at) or (found is not None and not head) or head != mooring.head:
            self._start(self._beat(mooring, envelope))
        counted = self._count_of(mooring.name)
        if counted is not None and counted.asked_at > mooring.counted_at:
            mooring.counted_at = counted.asked_at
            self._hold_against(mooring, counted)

    def _hold_against(self, mooring: Mooring, counted: Counted) -> None:
        """What the backend counts: the dead that have nothing there are done with; strangers stop all granting."""
        present = {owner for owner, requests in counted.by_gateway.items() if requests > 0}
        for owner, since in list(mooring.suspects.items()):
            if counted.asked_at > since and owner not in present:
                del mooring.suspects[owner]
                self._start(self._tell(self.store.reap(mooring.name, owner)))
        strangers = present - mooring.known - set(mooring.suspects)
        if strangers:
            self._start(self._tell(self.store.strange(mooring.name, sorted(strangers))))

    async def _tell(self, pending: asyncio.Future[Answer]) -> None:
        await self._try(pending)

    def woken(self, backend: str, view: View) -> None:
        """This replica's head may come."""
        self.mooring(backend).resume(view)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Losing the others, and finding them again

    def state(self, why: str | None) -> None:
        """The store's connection: there (None), or lost and why."""
        if why is not None:
            self.lost(why)
        else:
            self._start(self._return())

    def lost(self, why: str) -> None:
        """Nothing can be agreed: refuse, or keep to a share of the limits of when the others were last seen."""
        if self._lost is not None:
            return
        self._lost = why
        log.error("the shared state is lost (%s): %s", why, "going on with a share" if self._share else "nothing is admitted")
        self._on_degraded(True)
        if self._share:
            self.apart = True
            self.controller.divide(self._seen)
        else:
            self.controller.suspend()

    async def _return(self) -> None:
        """Register everywhere, then admit again."""
        for mooring in list(self._moorings.values()):
            if self.controller.envelope(mooring.name) is not None and not await self._register(mooring):
                return
        if self._lost is None:
            return
        log.info("the shared state is there: %d replicas", self._seen)
        if self.quotas is not None:
            self.quotas.in_flight.restate()
        self._lost, self.apart = None, False
        self._on_degraded(False)
        self.controller.divide(1)
        self.controller.resume()

    async def leave(self) -> None:
        """Hand every place over. What still runs here stays counted until the backend says that it is gone."""
        if self._lost is not None:
            return
        if self.quotas is not None:
            self.quotas.in_flight.leave()
        for mooring in self._moorings.values():
            if not mooring.held:
                await self._try(self.store.withdraw(mooring.name))
