"""Two real replicas on one Redis: one limit, one queue, and what happens when the state is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.state.fleet import CountingUpstream, ReplicaProcess, complete
from tests.support.client import within
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Pair:
    """Two replicas before one backend."""

    def __init__(self, upstream: CountingUpstream, redis: RedisServer, replicas: list[ReplicaProcess]) -> None:
        self.upstream, self.redis, self.replicas = upstream, redis, replicas

    async def nothing_left(self) -> None:
        """Everything is given back, here and in Redis."""
        for replica in self.replicas:
            await replica.settled()
        await within(5, lambda: self.redis.client.hlen("plimsoll:{v1:test:a}:lea") == 0, "no lease is left")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(service, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    folder: Path = tmp_path_factory.mktemp("pair")
    redis = RedisServer(service("redis-server"), folder / "redis")
    redis.start()
    upstream = CountingUpstream(lambda: 0.02)
    await upstream.start()
    replicas = [ReplicaProcess(folder / name, upstream, redis.url) for name in "xy"]
    await asyncio.gather(*(replica.start() for replica in replicas))
    try:
        yield Pair(upstream, redis, replicas)
    finally:
        await asyncio.gather(*(replica.stop() for replica in replicas))
        await upstream.stop()
        redis.stop()


async def test_both_together_keep_to_one_limit(pair: Pair) -> None:
    answers = await asyncio.gather(*(complete(replica.port) for replica in pair.replicas for _ in range(60)))
    assert set(answers) == {200}
    assert pair.upstream.violations == [] and pair.upstream.peak == 8
    await pair.nothing_left()
