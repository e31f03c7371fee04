"""One replica among several: it is there, says what it holds, and knows when nothing can be agreed.

Owns, for each backend, the leases this replica holds, whether it is registered, and what it has learnt of the others. Promises:
nothing is sent under a lease that the others may count as gone (a process that was frozen finds that out here); whatever the
shared state forgot is said again. Talks to: `agreeing` (what a request asks), a `LeaseStore`, the fleet's watches (what backends
count).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from gateway.agreeing import Agreeing
from gateway.apart import Apart
from gateway.asks import Asks
from gateway.flow.envelope import Envelope
from gateway.flow.shared import SharedController
from gateway.flow.waiting import Waiting
from gateway.forward.watch import Counted
from gateway.mooring import BEATS, Mooring
from gateway.shared_quotas import SharedQuotas
from gateway.state.leases import Answer, LeaseStore, StateLost, Verdict, View

log = logging.getLogger("plimsoll.state")

TICK_S = 0.05


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
        self.agreeing = Agreeing(self, self._asks, lease_s, clock)
        self._on_degraded, self._clock, self._count_of = on_degraded, clock, count_of
        self._moorings: dict[str, Mooring] = {}
        self.lost_why: str | None = "not connected yet"
        self.refusal = controller.suspend()
        self._present: tuple[str, ...] = ()  # the replicas, when the state was last there
        self._meet_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    def _waits(self, waiting: Waiting) -> None:
        if self.quotas is not None and self.lost_why is None:
            self.quotas.waits(waiting, self.controller.turn_away)

    def _left(self, waiting: Waiting) -> None:
        if self.quotas is not None:
            self.quotas.left(waiting)

    # Being one of several

    def mooring(self, backend: str) -> Mooring:
        """A backend's mooring, made on first use."""
        found = self._moorings.get(backend)
        if found is None:
            found = self._moorings[backend] = Mooring(backend, self)
        return found

    async def register(self, mooring: Mooring) -> bool:
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
            await self.register(mooring)
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
            now = self._clock()
            if self.lost_why is None:
                if self.quotas is not None:
                    self.quotas.in_flight.beat(now)
                if now >= self._meet_at:
                    self._meet_at = now + self._lease_s / BEATS
                    self._start(self._be_there())
                for name in backends():
                    self._look(self.mooring(name))
            else:
                if self.apart is not None:
                    apart = self.apart
                    ended = [apart.look(name, self._count_of(name), now) for name in backends()]
                    if any(ended):
                        self.controller.divide(apart.part)
                if self.store.connected and now >= self._meet_at:  # what was lost was an answer, and not the connection
                    self._meet_at = now + self._lease_s / BEATS
                    self._start(self._return())
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
        if self.lost_why is not None:
            return
        self.lost_why = why
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
            if self.controller.envelope(mooring.name) is not None and not await self.register(mooring):
                return
        if not await self._meet() or self.lost_why is None:
            return
        log.info("the shared state is there: %d replicas", len(self._present))
        if self.quotas is not None:
            self.quotas.in_flight.restate()
        self.lost_why, self.apart = None, None
        self._on_degraded(False)
        self.controller.divide(None)
        self.controller.resume()

    async def leave(self) -> None:
        """Hand every place over. What still runs here stays counted until the backend says that it is gone."""
        if self.lost_why is not None:
            return
        if self.quotas is not None:
            self.quotas.in_flight.leave()
        self.store.present(leaving=True)
        for mooring in self._moorings.values():
            if not mooring.held:
                await self._try(self.store.withdraw(mooring.name))
