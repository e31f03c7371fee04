"""Two real replicas on one real Redis, before one backend that counts; started once for the cases about shared state.

Redis is reached through a proxy that can be slow. The limit is eight sequences, two beside a large one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.state.fleet import CountingUpstream, ReplicaProcess, complete
from tests.support.client import within
from tests.support.delay_proxy import DelayProxy
from tests.support.redis_server import RedisServer

LEASE_S = 1.0
TAG = "plimsoll:{v1:test:a}:"


class Pair:
    """The replicas `x` and `y`, their backend, their Redis and the proxy before it."""

    def __init__(
        self, upstream: CountingUpstream, redis: RedisServer, proxy: DelayProxy, replicas: dict[str, ReplicaProcess]
    ) -> None:
        self.upstream, self.redis, self.proxy, self.replicas = upstream, redis, proxy, replicas

    @property
    def x(self) -> ReplicaProcess:
        return self.replicas["x"]

    @property
    def y(self) -> ReplicaProcess:
        return self.replicas["y"]

    async def name_of(self, replica: ReplicaProcess) -> str:
        """What a replica calls itself at the backend."""
        assert await complete(replica.port) == 200
        return self.upstream.reached[-1][0]

    def leases(self) -> int:
        """How many are held, as Redis knows."""
        return int(self.redis.client.hlen(TAG + "lea"))

    async def hold(self, replica: ReplicaProcess, count: int) -> list[asyncio.Task[int]]:
        """Requests that run until `upstream.release` is set; all are at the backend when this returns."""
        before = len(self.upstream.running)
        tasks = [asyncio.create_task(complete(replica.port, "hold")) for _ in range(count)]
        await within(10, lambda: len(self.upstream.running) == before + count, f"{count} requests are held")
        return tasks

    async def restart(self, replica: ReplicaProcess) -> None:
        """Start a replica whose process has ended."""
        (replica.folder / "log").unlink()
        await replica.start()

    async def serving(self) -> None:
        """Both replicas serve."""
        for replica in self.replicas.values():

            async def served(replica: ReplicaProcess = replica) -> bool:
                return await complete(replica.port) == 200

            await within(15, served, "a replica serves")

    async def settled(self) -> None:
        """Nothing is in flight, nothing waits, nothing is leased; and no key would stay for ever."""
        for replica in self.replicas.values():
            await replica.settled(10)
        await within(10, lambda: self.leases() == 0, "no lease is left")
        for key in self.redis.client.scan_iter("plimsoll:*"):
            assert self.redis.client.pttl(key) > 0, key


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_pair(service, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    folder: Path = tmp_path_factory.mktemp("pair")
    redis = RedisServer(service("redis-server"), folder / "redis")
    redis.start()
    proxy = DelayProxy(redis.port)
    await proxy.start()
    upstream = CountingUpstream(lambda: 0.02)
    await upstream.start()
    url = f"redis://127.0.0.1:{proxy.port}/0"
    replicas = {name: ReplicaProcess(folder / name, upstream, url, lease_s=LEASE_S, breaker={"cooldown_s": 0.5}) for name in "xy"}
    await asyncio.gather(*(replica.start() for replica in replicas.values()))
    try:
        yield Pair(upstream, redis, proxy, replicas)
    finally:
        await asyncio.gather(*(replica.stop() for replica in replicas.values()))
        await upstream.stop()
        await proxy.stop()
        redis.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def pair(shared_pair: Pair) -> AsyncIterator[Pair]:
    """Serving before the test; after it nothing is left, and the backend never saw more than was measured."""
    await shared_pair.serving()
    yield shared_pair
    shared_pair.proxy.delay_s = 0.0
    shared_pair.upstream.release.set()
    await shared_pair.settled()
    shared_pair.upstream.release = asyncio.Event()
    violations, shared_pair.upstream.violations = shared_pair.upstream.violations, []
    assert violations == []
    for replica in shared_pair.replicas.values():
        assert "Traceback" not in replica.log()
