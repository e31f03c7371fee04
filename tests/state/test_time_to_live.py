"""No key is ever without a time to live, not even between two commands: whoever writes it may be killed there."""

from __future__ import annotations

import random

import pytest

from gateway.state.leases import StateLost, Verdict
from tests.state.stores import MIXED, ask, world
from tests.state.test_news import Reader
from tests.support.redis_server import RedisServer


def endless(server: RedisServer) -> list[bytes]:
    """Keys that would stay for ever."""
    return [key for key in server.client.scan_iter("plimsoll:*") if server.client.pttl(key) == -1]


@pytest.mark.parametrize("seed", range(2))
async def test_of_leases(request: pytest.FixtureRequest, redis_server: RedisServer, seed: int) -> None:
    draw = random.Random(seed)
    redis_server.client.flushdb()
    async with world("redis", request) as replicas:
        live = []
        for _ in range(120):
            name = draw.choice("ABC")
            if live and draw.random() < 0.4:
                owner, held = live.pop()
                await replicas[owner].settle(held, draw.random())
            elif draw.random() < 0.2:
                waiting = ask(draw.choice((10, 500)), tenant=draw.choice("xyz"), priority=draw.choice((0, 1)))
                await replicas[name].store.beat("b", MIXED, draw.choice((waiting, None)), None)
            else:
                wanted = ask(draw.choice((10, 500)), sequences=draw.choice((1, 2)), tenant=draw.choice("xyz"))
                if (await replicas[name].acquire(wanted, draw.choice((None, ask())))).verdict is Verdict.GRANTED:
                    live.append((name, wanted))
            assert endless(redis_server) == []


async def test_of_a_tenant_that_waits_before_any_was_granted(request: pytest.FixtureRequest, redis_server: RedisServer) -> None:
    redis_server.client.flushdb()
    async with world("redis", request, warm=False) as replicas:
        assert (await replicas["A"].acquire(ask())).verdict is Verdict.COLD
        assert endless(redis_server) == []


async def test_of_records_wherever_their_writer_ends(redis_server: RedisServer) -> None:
    redis_server.client.flushdb()
    reader = Reader("A")
    await reader.connect(redis_server.url, "ttl")
    link = reader.replica.store.link  # type: ignore[attr-defined]
    send, ends_after = link.send, 0

    def cut(*words: object) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise StateLost("ended here")
        return send(*words)

    link.send = cut
    whole = False
    while not whole:
        redis_server.client.flushdb()
        reader.news.forgotten()
        left = ends_after
        try:
            await reader.news.share([("ab" * 32, lambda: b"raw", ("by one",))])
            whole = True
        except StateLost:
            ends_after += 1
        assert endless(redis_server) == []
    assert ends_after >= 4
    reader.task.cancel()
