"""Several replicas, one limit: together they fill it, and never pass it; whoever waits is woken by whoever makes room."""

from __future__ import annotations

import asyncio

from tests.cases.shared.conftest import Pair
from tests.state.fleet import complete
from tests.support.client import within


async def test_both_together_keep_to_one_limit(pair: Pair) -> None:
    pair.upstream.peak = 0
    answers = await asyncio.gather(*(complete(r.port) for r in pair.replicas.values() for _ in range(60)))
    assert set(answers) == {200}
    assert pair.upstream.peak == 8


async def test_what_one_replica_gives_back_the_other_gets_at_once(pair: Pair) -> None:
    held = await pair.hold(pair.x, 8)
    waiting = asyncio.create_task(complete(pair.y.port))
    await within(5, lambda: pair.redis.client.hlen("plimsoll:{v1:test:a}:head") == 1, "the other replicas see who waits")
    assert not waiting.done()
    pair.upstream.release.set()
    assert await waiting == 200
    assert [await task for task in held] == [200] * 8


async def test_a_large_request_waits_for_the_small_ones_of_the_other(pair: Pair) -> None:
    held = await pair.hold(pair.x, 3)
    large = asyncio.create_task(complete(pair.y.port, "x" * 150))
    await within(5, lambda: pair.redis.client.hlen("plimsoll:{v1:test:a}:head") == 1, "it waits")
    pair.upstream.release.set()
    assert await large == 200
    await asyncio.gather(*held)
