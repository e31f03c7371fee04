"""A provisional grant becomes a lease: what one request asks of the others, and what it does with the answer.

Owns nothing but questions that are under way. Promises: one round trip where there is room; a request that leaves while it is
asked for leaves no lease behind; what the others have no room for goes back to its place in the queue; an answer that a loss or
a new registration has overtaken counts for nothing. Talks to: the store (agreement), `flow.shared` (grants), the tenant's quotas,
the whole of which this replica is a part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

from gateway.apart import Apart
from gateway.asks import Asks
from gateway.errors import Refusal, Refused
from gateway.flow.envelope import Envelope
from gateway.flow.grant import Grant
from gateway.flow.shared import SharedController
from gateway.flow.waiting import Waiting
from gateway.mooring import BEATS, WANTED, Lease, Mooring
from gateway.shared_quotas import SharedQuotas, Taken
from gateway.state.leases import WOKEN_S, Answer, Ask, LeaseStore, StateLost, Verdict, View

AGAIN_S = 0.05  # until what is counted here and there may agree
TRIES = 3


class Whole(Protocol):
    """What a request's agreement is part of. `lost_why`: nothing can be agreed now; `refusal`: what is told then."""

    controller: SharedController
    store: LeaseStore
    quotas: SharedQuotas | None
    apart: Apart | None
    lost_why: str | None
    refusal: Refusal

    def mooring(self, backend: str) -> Mooring: ...
    async def register(self, mooring: Mooring) -> bool: ...
    def lost(self, why: str) -> None: ...


class Asked(NamedTuple):
    """An acquire that is under way for a provisional grant."""

    mooring: Mooring
    ask: Ask
    head: Ask | None
    generation: int
    pending: asyncio.Future[Answer]


class Agreeing:
    """The `Agreement` of the data path."""

    def __init__(self, whole: Whole, asks: Asks, lease_s: float, clock: Callable[[], float]) -> None:
        self._whole, self._asks, self._lease_s, self._clock = whole, asks, lease_s, clock

    def ask(self, grant: Grant) -> Asked | None:
        """Ask for a provisional grant, and wait for nothing. None where something has to be seen to first: `confirm` does."""
        envelope = self._whole.controller.envelope(grant.backend)
        if (
            self._whole.lost_why is not None
            or envelope is None
            or (self._whole.quotas is not None and self._whole.quotas.concern(grant.demand))
        ):
            return None
        mooring, now = self._whole.mooring(grant.backend), self._clock()
        if not mooring.trusted(now):
            return None
        mooring.wanted_until = now + WANTED * self._lease_s
        ask, head = self._asks.of(mooring, grant, envelope), self._asks.head(mooring)
        return Asked(mooring, ask, head, mooring.generation, self._whole.store.acquire(mooring.name, ask, head))

    def agreed(self, grant: Grant, asked: Asked) -> bool:
        """Whether the answer, which has come, is the lease; if not, `confirm` goes on from it."""
        mooring, pending = asked.mooring, asked.pending
        if pending.exception() is not None or asked.generation != mooring.generation or self._whole.lost_why is not None:
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
        """Ask the tenant's quotas, in the round trip of the lease; a request that waited has its place in the count."""
        if self._whole.quotas is None:
            return None
        if self._whole.lost_why is None:
            return self._whole.quotas.take(grant.demand, grant.place)
        if grant.place is not None:
            self._whole.quotas.left(grant.place)
        return None

    async def _within_quota(self, grant: Grant, taken: Taken) -> Grant:
        """The tenant's quotas were asked in the same round trip; what they refuse goes back whole. Raises Refused."""
        try:
            refusal = await taken.refusal()
        except StateLost as lost:
            self._whole.lost(str(lost))
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
            mooring = self._whole.mooring(grant.backend)
            if asked is not None:
                ask = asked.ask
            else:
                envelope = self._whole.controller.envelope(grant.backend)
                if self._whole.lost_why is not None or envelope is None:
                    if self._without(mooring, grant, envelope):
                        return grant
                    grant = await self._whole.controller.wait(self._back(grant))
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
                        await self._whole.register(mooring)
                    generation, head = mooring.generation, self._asks.head(mooring)
                    pending = self._whole.store.acquire(mooring.name, ask, head)
                answer = await asyncio.shield(pending)
                if answer.verdict is Verdict.UNREGISTERED:
                    await self._whole.register(mooring)
            except asyncio.CancelledError:
                if pending is not None:
                    pending.add_done_callback(lambda done: self._orphan(mooring, ask, done))
                grant.give_back(self._clock())
                raise
            except StateLost as lost:
                self._whole.lost(str(lost))
                return Answer(Verdict.UNREGISTERED, View(0, 0, 0))
            if answer.verdict is Verdict.GRANTED:
                mooring.head = head.lease if head is not None else ""
                if generation == mooring.generation and self._whole.lost_why is None:
                    return answer
            elif answer.verdict is not Verdict.UNREGISTERED:
                mooring.head = ask.lease
                return answer
        return Answer(Verdict.COLD, View(0, 0, 0), retry_s=AGAIN_S)

    async def _again(self, mooring: Mooring, grant: Grant, ask: Ask, answer: Answer) -> Grant:
        """Back to its place, and the next provisional grant for it."""
        if self._whole.lost_why is not None:
            return grant
        waiting = self._back(grant)
        waiting.name = ask.lease
        view = answer.view
        if answer.verdict is Verdict.DENIED:
            mooring.resume(view)
            again = waiting.result  # granted at once: what is counted here and there does not agree yet
            if isinstance(again, Grant) and again.backend == mooring.name:
                mooring.pause(AGAIN_S, view)
        elif answer.verdict is Verdict.EARLY:
            self._whole.controller.not_due(grant)
            mooring.resume(view)
        elif answer.verdict is Verdict.BEHIND:
            mooring.pause(WOKEN_S * 1.25, view)
        else:
            mooring.pause(answer.retry_s if answer.verdict is Verdict.COLD else self._lease_s / BEATS, view)
        return await self._whole.controller.wait(waiting)

    def _back(self, grant: Grant) -> Waiting:
        waiting = self._whole.controller.put_back(grant, self._clock())
        if isinstance(waiting, Refusal):
            raise Refused(waiting)
        return waiting

    def _without(self, mooring: Mooring, grant: Grant, envelope: Envelope | None) -> bool:
        """No agreement is to be had: apart from the others (false: not yet, there is no room), or not at all. Raises Refused."""
        if self._whole.apart is None or envelope is None or not grant.mask:
            grant.give_back(self._clock())
            raise Refused(self._whole.refusal)
        if not self._whole.controller.allows(grant, *mooring.load()):
            return False
        grant.lease = Lease(mooring, self._asks.of(mooring, grant, envelope))  # said to the others when they are back
        return True

    def _orphan(self, mooring: Mooring, ask: Ask, done: asyncio.Future[Answer]) -> None:
        """The caller left while it was asked for; a lost connection needs nothing, for its session is over."""
        if done.cancelled() or done.exception() is not None:
            return
        verdict = done.result().verdict
        if verdict is Verdict.GRANTED:
            mooring.settle(ask, ask.cost)
        elif verdict is not Verdict.UNREGISTERED:
            mooring.head = ask.lease  # the others see it as our head, until the next tick finds that it is not
