"""The same few replicas on either store, so that one suite runs against both."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from gateway.flow.shape import NO_FEATURES, Shape
from gateway.state.leases import Answer, Ask, LeaseStore, Row, Rules, Verdict, View
from gateway.state.memory import MemoryLeases, MemoryState
from gateway.state.redis_store import RedisLeases
from tests.support.redis_server import RedisServer

LEASE_S = 0.8
SMALL = Row("generate", (), 1, 100, 1, 100, 8)
LARGE = Row("generate", (), 1, 1000, 1, 1000, 2)
MIXED = Rules.of((SMALL, LARGE), None)
_numbers = itertools.count(1)


def ask(input_tokens: int = 10, output_tokens: int = 10, sequences: int = 1, rules: Rules = MIXED, **more: object) -> Ask:
    """A request for a lease with a name that no other has."""
    shape = Shape("generate", NO_FEATURES, input_tokens, output_tokens, sequences)
    blocks = sequences * -(-(input_tokens + output_tokens) // 16)
    return Ask(f"l{next(_numbers)}", rules, rules.mask(shape), shape, blocks, **more)  # type: ignore[arg-type]


class Replica:
    """One store access with its wake-ups recorded. `registered` with nothing held."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wakes: list[View] = []
        self.woken = asyncio.Event()
        self.store: LeaseStore

    def on_wake(self, backend: str, view: View) -> None:
        self.wakes.append(view)
        self.woken.set()

    async def register(self, held: list[Ask] | None = None, rules: Rules = MIXED) -> Answer:
        return await self.store.beat("b", rules, None, held or [])

    async def acquire(self, request: Ask, following: Ask | None = None) -> Answer:
        return await self.store.acquire("b", request, following)

    async def takes(self, *requests: Ask) -> None:
        """Each of these is granted."""
        for request in requests:
            assert (await self.acquire(request)).verdict is Verdict.GRANTED

    async def settle(self, request: Ask, refund: float = 0.0) -> Answer:
        return await self.store.settle("b", request.lease, request.rules, refund)


class World:
    """Replicas by name on one store that is past its first lease time."""

    def __init__(self, replicas: dict[str, Replica], flush: Callable[[], object], warm: Callable[[], object]) -> None:
        self.replicas, self.flush, self.warm = replicas, flush, warm

    def __getitem__(self, name: str) -> Replica:
        return self.replicas[name]


@asynccontextmanager
async def world(kind: str, request: pytest.FixtureRequest, names: str = "ABC", warm: bool = True) -> AsyncIterator[World]:
    """`kind`: memory or redis."""
    replicas = {name: Replica(name) for name in names}
    tasks: list[asyncio.Task[None]] = []
    if kind == "memory":
        state = MemoryState(time.monotonic, LEASE_S)
        for replica in replicas.values():
            replica.store = MemoryLeases(state, replica.name, replica.on_wake)
        made = World(replicas, state.flush, lambda: setattr(state.berth("b"), "since", 0.0))
    else:
        server: RedisServer = request.getfixturevalue("redis_server")
        namespace = f"n{next(_numbers)}"
        for replica in replicas.values():
            tasks.append(await connect(replica, server.url, namespace))
        key = f"plimsoll:{{v1:{namespace}:b}}:sum"
        made = World(replicas, server.client.flushdb, lambda: server.client.hset(key, "from", 0))
    try:
        for replica in replicas.values():
            await replica.register()
        if warm:
            made.warm()
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def connect(replica: Replica, url: str, namespace: str, timeout_s: float = 5.0) -> asyncio.Task[None]:
    """A store on Redis for a replica, connected."""
    up = asyncio.Event()
    store = RedisLeases(
        url, replica.name, namespace=namespace, lease_s=LEASE_S, timeout_s=timeout_s, on_wake=replica.on_wake,
        on_state=lambda why: up.set() if why is None else None,
    )  # fmt: skip
    replica.store = store
    task = asyncio.create_task(store.run())
    async with asyncio.timeout(10):
        await up.wait()
    return task


async def past_cold(replica: Replica) -> None:
    """Until the first lease time is over: a probe is granted, and given back."""
    async with asyncio.timeout(10):
        while True:
            probe = ask()
            answer = await replica.acquire(probe)
            if answer.verdict is Verdict.GRANTED:
                await replica.settle(probe)
                return
            if answer.verdict is Verdict.UNREGISTERED:
                await replica.register()
            await asyncio.sleep(max(answer.retry_s, 0.01))
