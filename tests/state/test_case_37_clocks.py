"""37: the clocks of two replicas are a minute apart, and one steps back: the same total, and no lease is swept early.

Only the clock of Redis decides anything between replicas; a replica's own clock measures its own intervals. Here each replica
has a monotonic clock of its own that is wrong by 30 s.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from gateway import policy
from gateway.errors import Refusal, Refused
from gateway.flow.demand import Demand, Open
from gateway.flow.envelope import Box, Envelope
from gateway.flow.grant import Grant
from gateway.flow.shape import NO_FEATURES, Shape
from gateway.flow.shared import SharedController
from gateway.forward.watch import Counted
from gateway.replicas import Replicas
from gateway.state.leases import LeaseStore
from gateway.state.memory import MemoryLeases, MemoryState
from gateway.state.redis_store import RedisLeases
from tests.state.stores import LEASE_S
from tests.support.redis_server import RedisServer

GATE = Open(Envelope((Box("generate", NO_FEATURES, 1, 100, 1, 100, 8, "r"),)), "h")


class Clock:
    """Monotonic time that is wrong, and may be made to step."""

    def __init__(self, wrong_by_s: float) -> None:
        self.wrong_by_s = wrong_by_s

    def __call__(self) -> float:
        return time.monotonic() + self.wrong_by_s


class Site:
    """One replica in this process: controller and agreement, no HTTP."""

    def __init__(self, clock: Clock, *, share: bool = False, lease_s: float = LEASE_S) -> None:
        self.clock = clock
        self.controller = SharedController(policy.Queue(), clock, lambda *_: None)
        self.degraded = True
        self.counted: Counted | None = None  # by the backend
        self.replicas = Replicas(
            self.controller, share=share, lease_s=lease_s, longest_s=lambda: 60.0, count_of=lambda _: self.counted,
            on_degraded=lambda degraded: setattr(self, "degraded", degraded), clock=clock,
        )  # fmt: skip
        self.controller.set_backend("b", GATE)
        self.tasks: list[asyncio.Task[None]] = []

    def on(self, store: LeaseStore) -> None:
        """Use this store, and live."""
        self.replicas.store = store
        self.tasks.append(asyncio.create_task(self.replicas.run(lambda: ("b",))))

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def demand(self, tenant: str = "t", wait_s: float = 5.0) -> Demand:
        shape = Shape("generate", NO_FEATURES, 10, 10, 1)
        return Demand("m", ("b",), shape, tenant, 1.0, "interactive", 0, self.clock() + wait_s)

    async def admit(self, **more: object) -> Grant:
        """As the request path does it. Raises Refused."""
        answer = self.controller.request(self.demand(**more), self.clock())  # type: ignore[arg-type]
        if isinstance(answer, Refusal):
            raise Refused(answer)
        if not isinstance(answer, Grant):
            answer = await self.controller.wait(answer)
        return await self.replicas.agreeing.confirm(answer)


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_a_minute_apart_and_stepping_back(kind: str, request: pytest.FixtureRequest) -> None:
    fast, slow = Site(Clock(30.0)), Site(Clock(-30.0))
    state = MemoryState(time.monotonic, LEASE_S)
    if kind == "memory":
        for name, site in (("fast", fast), ("slow", slow)):
            site.on(MemoryLeases(state, name, site.replicas.woken))
            site.replicas.state(None)
    else:
        server: RedisServer = request.getfixturevalue("redis_server")
        for name, site in (("fast", fast), ("slow", slow)):
            store = RedisLeases(server.url, name, namespace="clocks", lease_s=LEASE_S, timeout_s=5.0,
                                on_wake=site.replicas.woken, on_state=site.replicas.state)  # fmt: skip
            site.on(store)
            site.tasks.append(asyncio.create_task(store.run()))
    try:
        async with asyncio.timeout(15):
            while fast.degraded or slow.degraded:
                await asyncio.sleep(0.01)
            grants = [await site.admit() for _ in range(4) for site in (fast, slow)]
            fast.clock.wrong_by_s -= 10.0  # a step back in the middle
            await asyncio.sleep(2.5 * LEASE_S)  # leases are kept by beats, not swept by whose clock is ahead
            extra = asyncio.create_task(slow.admit())
            await asyncio.sleep(0.1)
            assert not extra.done()
            fast_grant = grants[0]
            fast_grant.settle(fast.clock())
            slow_grant = await extra
            for grant, site in [*zip(grants[1:], [slow, fast] * 4, strict=False), (slow_grant, slow)]:
                assert grant.may_dispatch(site.clock())
                grant.settle(site.clock())
    finally:
        await fast.stop()
        await slow.stop()
