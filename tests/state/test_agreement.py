"""One replica's side of the agreement, without processes: freezing, leaving, losing the state, and a share without it."""

from __future__ import annotations

import asyncio
import time

import pytest

from gateway.apart import SETTLE_AFTER_S
from gateway.errors import Reason, Refused
from gateway.flow.grant import Grant
from gateway.flow.waiting import Waiting
from gateway.forward.watch import Counted
from gateway.replicas import TICK_S
from gateway.state.leases import Answer, Ask, StateLost
from gateway.state.memory import MemoryLeases, MemoryState
from tests.state.test_case_37_clocks import Clock, Site


class Slow(MemoryLeases):
    """Answers when the test says so; may be cut."""

    def __init__(self, state: MemoryState, owner: str, site: Site) -> None:
        super().__init__(state, owner, site.replicas.woken)
        self.held_back: list[tuple[asyncio.Future[Answer], Answer]] | None = None
        self.cut = False

    def acquire(self, backend: str, ask: Ask, following: Ask | None) -> asyncio.Future[Answer]:
        if self.cut:
            return self._lost()
        answer = super().acquire(backend, ask, following)
        if self.held_back is None:
            return answer
        later: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.held_back.append((later, answer.result()))
        return later

    def beat(self, *more: object) -> asyncio.Future[Answer]:
        return self._lost() if self.cut else super().beat(*more)  # type: ignore[arg-type]

    def settle(self, *more: object) -> asyncio.Future[Answer]:
        return self._lost() if self.cut else super().settle(*more)  # type: ignore[arg-type]

    def let_go(self) -> None:
        assert self.held_back is not None
        for later, answer in self.held_back:
            later.set_result(answer)
        self.held_back = None

    @staticmethod
    def _lost() -> asyncio.Future[Answer]:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        future.set_exception(StateLost("cut"))
        return future


class Two:
    """Two sites on one state past its first lease time."""

    def __init__(self, *, share: bool = False, lease_s: float = 30.0) -> None:
        self.state = MemoryState(time.monotonic, lease_s)
        self.a, self.b = (Site(Clock(0.0), share=share, lease_s=lease_s) for _ in range(2))
        self.stores = {name: Slow(self.state, name, site) for name, site in (("A", self.a), ("B", self.b))}

    async def __aenter__(self) -> Two:
        for store, site in zip(self.stores.values(), (self.a, self.b), strict=True):
            site.on(store)
            site.replicas.state(None)
        self.state.berth("b").since = 0.0
        await until(lambda: not self.a.degraded and not self.b.degraded)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.a.stop()
        await self.b.stop()

    @property
    def leases(self) -> int:
        return len(self.state.berth("b").leases)


async def until(condition, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_caller_that_leaves_while_it_is_asked_for_leaves_no_lease() -> None:
    async with Two() as two:
        store = two.stores["A"]
        (await two.a.admit()).settle(two.a.clock())
        store.held_back = []
        asked = asyncio.create_task(two.a.admit())
        await until(lambda: bool(store.held_back))
        assert two.leases == 1
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert two.a.controller.snapshot(two.a.clock()).backends[0].requests == 0
        store.let_go()
        await until(lambda: two.leases == 0)


async def test_a_caller_that_leaves_while_there_is_no_room_leaves_no_place_in_the_order() -> None:
    async with Two() as two:
        held = [await two.b.admit() for _ in range(8)]
        store = two.stores["A"]
        store.held_back = []
        asked = asyncio.create_task(two.a.admit())
        await until(lambda: bool(store.held_back))
        assert "A" in two.state.berth("b").heads
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        store.let_go()
        await until(lambda: "A" not in two.state.berth("b").heads, 1.0)  # well before a beat is due, which is in 7.5 s
        for grant in held:
            grant.settle(two.b.clock())


async def test_a_lost_answer_over_a_connection_that_stays_is_returned_from() -> None:
    async with Two(lease_s=1.0) as two:
        two.stores["A"].cut = True
        with pytest.raises(Refused):
            await two.a.admit()
        assert two.a.degraded
        two.stores["A"].cut = False
        await until(lambda: not two.a.degraded)
        (await two.a.admit()).settle(two.a.clock())


async def test_what_was_granted_before_a_freeze_is_not_sent_after_it() -> None:
    """The answer comes, the process is frozen for longer than a lease time, and wakes up."""
    async with Two(lease_s=1.0) as two:
        grant = await two.a.admit()
        two.a.clock.wrong_by_s += 2.0  # as much time as it slept through
        assert not grant.may_dispatch(two.a.clock())
        grant.give_back(two.a.clock())
        await until(lambda: two.leases == 0)


async def test_what_was_sent_before_a_freeze_counts_after_it() -> None:
    async with Two() as two:
        sent, unsent = await two.a.admit(), await two.a.admit()
        assert sent.may_dispatch(two.a.clock())
        two.state.flush()
        two.state.berth("b").since = 0.0
        two.a.clock.wrong_by_s += 60.0
        (await two.a.admit()).settle(two.a.clock())  # which finds out, and registers
        assert two.leases == 1
        assert not unsent.may_dispatch(two.a.clock()) and sent.may_dispatch(two.a.clock())


async def test_without_the_state_nothing_is_admitted_and_nobody_is_blamed() -> None:
    async with Two() as two:
        held = [await two.a.admit() for _ in range(8)]
        waiting = asyncio.create_task(two.b.admit())
        await asyncio.sleep(0.02)
        for store in two.stores.values():
            store.cut = True
        two.a.replicas.lost("cut")
        two.b.replicas.lost("cut")
        with pytest.raises(Refused) as refused:
            await waiting
        assert refused.value.refusal.reason is Reason.BACKEND_UNAVAILABLE
        with pytest.raises(Refused):
            await two.a.admit()
        for grant in held[:3]:
            grant.settle(two.a.clock())
        for store, site in zip(two.stores.values(), (two.a, two.b), strict=True):
            store.cut = False
            store.reconnect()
            site.replicas.state(None)
        await until(lambda: not two.a.degraded and not two.b.degraded)
        assert two.leases == 5  # settled while it was away: said by not being named
        assert [isinstance(await two.b.admit(), Grant) for _ in range(3)] == [True] * 3


async def test_a_share_of_the_limit_while_the_state_is_away() -> None:
    """What was agreed goes on where it was; the rest of a share is taken when the backend says that nothing else runs."""
    async with Two(share=True) as two:
        for site in (two.a, two.b):
            await until(lambda: site.replicas._present == ("A", "B"))  # noqa: B023
        held = [await two.a.admit() for _ in range(6)]
        assert all(grant.may_dispatch(two.a.clock()) for grant in held)
        for store, site in zip(two.stores.values(), (two.a, two.b), strict=True):
            store.cut = True
            site.replicas.lost("cut")
        assert two.a.degraded and two.b.degraded
        with pytest.raises(Refused) as refused:
            await two.b.admit()  # it held nothing, and does not know what the other holds
        assert refused.value.refusal.reason is Reason.BACKEND_UNAVAILABLE
        await over_the_share(two.a)  # six of four
        for grant in held[:3]:
            grant.settle(two.a.clock())
        held.append(await two.a.admit())
        two.b.counted = Counted(two.b.clock() + SETTLE_AFTER_S + 1, {"A": 1})
        await asyncio.sleep(3 * TICK_S)
        with pytest.raises(Refused):
            await two.b.admit()
        two.b.counted = Counted(two.b.clock() + SETTLE_AFTER_S + 2, {})
        await until(lambda: bool(two.b.controller.envelope("b")) and two.b.controller.has_open(("b",)))
        alone = [await two.b.admit() for _ in range(4)]
        assert all(grant.may_dispatch(two.b.clock()) for grant in alone)
        await over_the_share(two.b)
        for store, site in zip(two.stores.values(), (two.a, two.b), strict=True):
            store.cut = False
            store.reconnect()
            site.replicas.state(None)
        await until(lambda: two.leases == 8)  # what was sent without agreement is said afterwards


async def over_the_share(site: Site) -> None:
    """One more than the share waits, and is refused in time."""
    more = asyncio.create_task(site.admit(wait_s=0.05))
    await asyncio.sleep(0.06)
    site.controller.sweep(site.clock())
    with pytest.raises(Refused):
        await more


async def test_who_was_being_asked_for_when_the_state_went_waits_for_its_share() -> None:
    """Provisional grants were agreed with nobody: only those that fit the share go."""
    async with Two(share=True) as two:
        await until(lambda: two.a.replicas._present == ("A", "B"))
        (await two.a.admit()).settle(two.a.clock())
        store = two.stores["A"]
        sent, unsent = [await two.a.admit() for _ in range(2)], await two.a.admit()
        assert all(grant.may_dispatch(two.a.clock()) for grant in sent)
        store.held_back = []
        asked = [asyncio.create_task(two.a.admit()) for _ in range(5)]
        await until(lambda: len(store.held_back or ()) == 5)
        store.cut = True
        two.a.replicas.lost("cut")
        for later, _ in store.held_back:
            later.set_exception(StateLost("cut"))
        store.held_back = None
        await asyncio.sleep(3 * TICK_S)
        assert not any(each.done() for each in asked)  # two were agreed, and two are running
        assert not unsent.may_dispatch(two.a.clock())  # the others may not count it any more
        unsent.give_back(two.a.clock())
        sent.pop().settle(two.a.clock())
        await until(lambda: sum(each.done() for each in asked) == 1)
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_a_turn_of_the_aged_that_another_replica_took_is_waited_for_again() -> None:
    """One slot is free at a time; the batch request comes to it in its turn over all replicas, and nothing stands still."""
    async with Two(lease_s=300.0) as two:
        site, berth = two.a, two.state.berth("b")
        held = [await site.admit() for _ in range(8)]
        batch = site.controller.request(site.demand(wait_s=100)._replace(priority=1, priority_class="batch"), site.clock())
        served: list[str] = []

        async def admit(waiting: object, name: str) -> None:
            assert isinstance(waiting, Waiting)
            grant = await site.replicas.agreeing.confirm(await site.controller.wait(waiting))
            served.append(name)
            held.append(grant)

        site.clock.wrong_by_s += 60.0  # the batch request is aged
        tasks = [asyncio.create_task(admit(batch, "batch"))]
        tasks += [
            asyncio.create_task(admit(site.controller.request(site.demand(wait_s=60), site.clock()), "urgent")) for _ in range(45)
        ]
        await asyncio.sleep(0)
        for number in range(1, 41):
            held.pop(0).settle(site.clock())
            await until(lambda: len(served) == number)  # noqa: B023
            if number == 10:
                berth.turns[1] = berth.more_urgent(1)  # the batch request of another replica had its turn
        assert served.count("batch") == 1 and 28 <= served.index("batch") <= 39
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
