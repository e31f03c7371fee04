"""A configuration that changes: what one replica sees closes the gate at all of them. Real replicas, real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.evidence.canonical import digest
from tests.state.fleet import CountingUpstream, ReplicaProcess, complete
from tests.support.client import within
from tests.support.redis_server import RedisServer


class Trio:
    """Three replicas before one backend."""

    def __init__(self, upstream: CountingUpstream, replicas: list[ReplicaProcess]) -> None:
        self.upstream, self.replicas = upstream, replicas
        self.other = {**upstream.document, "scheduler": {"max_num_seqs": 9, "policy": "fcfs"}}

    async def all_are(self, gate: str, of: list[ReplicaProcess] | None = None) -> None:
        """Wait until the gates of these replicas are so."""
        for replica in of or self.replicas:

            async def so(replica: ReplicaProcess = replica) -> bool:
                return await replica.gate("a") == gate

            await within(10, so, f"a gate is {gate}")

    async def name_of(self, replica: ReplicaProcess) -> str:
        """What the replica calls itself at the backend."""
        assert await complete(replica.port) == 200
        return self.upstream.reached[-1][0]


@pytest_asyncio.fixture
async def trio(service, tmp_path: Path) -> AsyncIterator[Trio]:
    redis = RedisServer(service("redis-server"), tmp_path / "redis")
    redis.start()
    upstream = CountingUpstream(lambda: 0.02)
    await upstream.start()
    replicas = [ReplicaProcess(tmp_path / f"r{n}", upstream, redis.url) for n in range(3)]
    await asyncio.gather(*(replica.start() for replica in replicas))
    try:
        yield Trio(upstream, replicas)
    finally:
        await asyncio.gather(*(replica.stop() for replica in replicas))
        await upstream.stop()
        redis.stop()


@pytest.mark.timeout(120)
async def test_what_one_replica_sees_closes_all(trio: Trio) -> None:
    upstream, other = trio.upstream, digest(trio.other)
    names = [await trio.name_of(replica) for replica in trio.replicas]

    # The backend comes back as another: nothing is dispatched to it by any replica, and all say why.
    await upstream.restart(trio.other)
    await asyncio.gather(*(complete(replica.port) for replica in trio.replicas))
    await trio.all_are("configuration_changed")
    assert [gateway for gateway, seen in upstream.reached if seen == other] == []
    await upstream.restart(None)
    await trio.all_are("open")

    # Only the first sees another one: the others have it from the first alone, and close although they see the measured one.
    upstream.stranger, upstream.shown_to = trio.other, {names[0]}
    await trio.all_are("configuration_changed", trio.replicas[:1])
    await trio.all_are("mixed_identity", trio.replicas[1:])
    before = len(upstream.reached)
    assert await asyncio.gather(*(complete(replica.port) for replica in trio.replicas)) == [503] * 3
    assert len(upstream.reached) == before
