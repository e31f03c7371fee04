"""One replica among several: every provisional grant is agreed with the others before it is sent.

Owns, for each backend, the leases this replica holds, whether it is registered, and what it has learnt of the others. Promises:
one round trip before dispatch and none on the path of an answer; a request that leaves while it is asked for leaves no lease
behind; nothing is sent under a lease that the others may count as gone (a process that was frozen finds that out here);
whatever the shared state forgot is said again. Talks to: `flow.shared` (grants), a `LeaseStore` (agreement), the fleet's
watches (what backends count).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NamedTuple

from gateway.apart import Apart
from gateway.asks import Asks
from gateway.errors import Refusal, Refused
from gateway.flow.envelope import Envelope
from gateway.flow.grant import Grant
from gateway.flow.shared import SharedController
from gateway.flow.waiting import Waiting
from gateway.forward.watch import Counted
from gateway.mooring import BEATS, Lease, Mooring
from gateway.shared_quotas import SharedQuotas, Taken
from gateway.state.leases import WOKEN_S, Answer, Ask, LeaseStore, StateLost, Verdict, View

log = logging.getLogger("plimsoll.state")

TICK_S = 0.05
WANTED = 6  # lease times that a backend nobody asks for is still beaten for
TRIES = 3


class Asked(NamedTuple):
    """An acquire that is under way for a provisional grant."""

    mooring: Mooring
    ask: Ask
    head: Ask | None
    generation: int
    pending: asyncio.Future[Answer]


class Replicas:
    """`apart`: not None while the state is lost and the policy says to go on with a share. `on_degraded` hears of changes."""

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
        self.apart: Apart | None = None
        self._share, self._lease_s = share, lease_s
        self._asks = Asks(controller, lambda: self.store.owner, longest_s, clock)
        self._on_degraded, self._clock, self._count_of = on_degraded, clock, count_of
        self._moorings: dict[str, Mooring] = {}
        self._lost: str | None = "not connected yet"
        self._refusal = controller.suspend()
        self._present: tuple[str, ...] = ()  # the replicas, when the state was last there
        self._meet_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    # The request path

    def ask(self, grant: Grant) -> Asked | None:
        """Ask for a provisional grant, and wait for nothing. None where something has to be seen to first: `confirm` does."""
        envelope = self.controller.envelope(grant.backend)
        if self._lost is not None or envelope is None or (self.quotas is not None and self.quotas.concern(grant.demand)):
            return None
        mooring, now = self.mooring(grant.backend), self._clock()
        if not mooring.trusted(now):
            return None
        mooring.wanted_until = now + WANTED * self._lease_s
        ask, head = self._asks.of(mooring, grant, envelope), self._asks.head(mooring)
        return Asked(mooring, ask, head, mooring.generation, self.store.acquire(mooring.name, ask, head))

    def agreed(self, grant: Grant, asked: Asked) -> bool:
        """Whether the answer, which has come, is the lease; if not, `confirm` goes on from it."""
        mooring, pending = asked.mooring, asked.pending
        if pending.exception() is not None or asked.generation != mooring.generation:
            return False
        answer = pending.result()
        if answer.verdict is not Verdict.GRANTED:
            return False
        mooring.head = asked.head.lease if asked.head is not None else ""
        grant.lease = Lease(mooring, asked.ask)
        mooring.heard(answer)
        return True

    def withdraw(self, grant: Grant, asked: Asked | None) -> None:
        """The caller has left before the answer was taken up: nothing stays leased for it."""
        if asked is not None:
            asked.pending.add_done_callback(lambda done: self._orphan(asked.mooring, asked.ask, done))
        grant.give_back(self._clock())

    async def confirm(self, grant: Grant, asked: Asked | None = None) -> Grant:
        """Have a provisional grant agreed, waiting for room where others hold it. Raises Refused.

        `asked`: what was asked for it already."""
        taken = self._take(grant) if asked is None else None
        if taken is None:
            return await self._agreed(grant, asked)
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

    async def _agreed(self, grant: Grant, asked: Asked | None = None) -> Grant:
        while True:
            mooring = self.mooring(grant.backend)
            if asked is not None:
                ask = asked.ask
            else:
                envelope = self.controller.envelope(grant.backend)
                if self._lost is not None or envelope is None:
                    if self._without(mooring, grant, envelope):
                        return grant
                    grant = await self.controller.wait(self._back(grant))
                    continue
                mooring.wanted_until = self._clock() + WANTED * self._lease_s
                ask = self._asks.of(mooring, grant, envelope)
            answer = await self._acquire(mooring, grant, ask, asked)
            asked = None
            if answer.verdict is Verdict.GRANTED:
                grant.lease = Lease(mooring, ask)
                mooring.heard(answer)
                return grant
            grant = await self._again(mooring, grant, ask, answer)

    async def _acquire(self, mooring: Mooring, grant: Grant, ask: Ask, asked: Asked | None) -> Answer:
        for _ in range(TRIES):
            pending: asyncio.Future[Answer] | None = None
            try:
                if asked is not None:
                    generation, head, pending, asked = asked.generation, asked.head, asked.pending, None
                else:
                    if not mooring.trusted(self._clock()):
                        await self._register(mooring)
                    generation, head = mooring.generation, self._asks.head(mooring)
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
        waiting = self._back(grant)
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

    def _back(self, grant: Grant) -> Waiting:
        waiting = self.controller.put_back(grant, self._clock())
        if isinstance(waiting, Refusal):
            raise Refused(waiting)
        return waiting

    def _without(self, mooring: Mooring, grant: Grant, envelope: Envelope | None) -> bool:
        """No agreement is to be had: apart from the others (false: not yet, there is no room), or not at all. Raises Refused."""
        if self.apart is None or envelope is None or not grant.mask:
            grant.give_back(self._clock())
            raise Refused(self._refusal)
        if not self.controller.allows(grant, *mooring.load()):
            return False
        grant.lease = Lease(mooring, self._asks.of(mooring, grant, envelope))  # said to the others when they are back
        return True

    def _orphan(self, mooring: Mooring, ask: Ask, done: asyncio.Future[Answer]) -> None:
        """The caller left while it was asked for; a lost connection needs nothing, for its session is over."""
        if not done.cancelled() and done.exception() is None and done.result().verdict is Verdict.GRANTED:
            mooring.settle(ask, ask.cost)

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
            mooring.drop_unsent()
        mooring.generation += 1
        held = [lease.ask for lease in mooring.held.values()]
        return self._beaten(mooring, now, await self._try(self.store.beat(
            mooring.name, mooring.rules_of(envelope), self._asks.head(mooring), held)))  # fmt: skip

    async def _beat(self, mooring: Mooring, envelope: Envelope) -> None:
        now, head = self._clock(), self._asks.head(mooring)
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
        mooring.beaten(answer, sent_at, self._clock(), self._lease_s)
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
                if self._clock() >= self._meet_at:
                    self._meet_at = self._clock() + self._lease_s / BEATS
                    self._start(self._be_there())
                for name in backends():
                    self._look(self.mooring(name))
            elif self.apart is not None:
                apart, now = self.apart, self._clock()
                ended = [apart.look(name, self._count_of(name), now) for name in backends()]
                if any(ended):
                    self.controller.divide(apart.part)
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
        gone, strangers = mooring.judge(counted)
        for owner in gone:
            self._start(self._tell(self.store.reap(mooring.name, owner)))
        if strangers:
            self._start(self._tell(self.store.strange(mooring.name, strangers)))

    async def _meet(self) -> bool:
        """Be there, and learn who else is."""
        try:
            self._present = await self.store.present()
        except StateLost as lost:
            self.lost(str(lost))
            return False
        return True

    async def _be_there(self) -> None:
        await self._meet()

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
        if self._share:
            now, moorings = self._clock(), self._moorings.values()
            for mooring in moorings:
                mooring.drop_unsent()
            known = frozenset().union(*(mooring.known for mooring in moorings))
            held = {mooring.name: mooring.load() for mooring in moorings}
            ends_at = now + self._asks.longest_s()
            self.apart = Apart(known.union(self._present), self.store.owner, held, now, ends_at)
            self.controller.divide(self.apart.part)
        else:
            self.controller.suspend()
        self._on_degraded(True)

    async def _return(self) -> None:
        """Register everywhere, then admit again."""
        for mooring in list(self._moorings.values()):
            if self.controller.envelope(mooring.name) is not None and not await self._register(mooring):
                return
        if not await self._meet() or self._lost is None:
            return
        log.info("the shared state is there: %d replicas", len(self._present))
        if self.quotas is not None:
            self.quotas.in_flight.restate()
        self._lost, self.apart = None, None
        self._on_degraded(False)
        self.controller.divide(None)
        self.controller.resume()

    async def leave(self) -> None:
        """Hand every place over. What still runs here stays counted until the backend says that it is gone."""
        if self._lost is not None:
            return
        if self.quotas is not None:
            self.quotas.in_flight.leave()
        self.store.present(leaving=True)
        for mooring in self._moorings.values():
            if not mooring.held:
                await self._try(self.store.withdraw(mooring.name))
