"""25: callers leave while Redis is asked, or while it is told: no lease is orphaned, no answer goes to another."""

from __future__ import annotations

import asyncio

from tests.cases.shared.conftest import Pair
from tests.state.fleet import complete
from tests.support.client import post, wire

TIMES = 200


async def _leave(port: int, after_s: float) -> None:
    async with wire(port) as client:
        await client.send(post({"model": "tiny", "prompt": "hello", "max_tokens": 8}, path="/v1/completions"))
        await asyncio.sleep(after_s)


async def test_two_hundred_callers_leave_while_redis_is_asked(pair: Pair) -> None:
    pair.proxy.delay_s = 0.05  # there and back: 100 ms
    ports = [pair.x.port, pair.y.port]
    for batch in range(0, TIMES, 20):
        moments = [(ports[n % 2], 0.03 * (n % 5)) for n in range(batch, batch + 20)]
        await asyncio.gather(*(_leave(port, after_s) for port, after_s in moments))
    await pair.settled()
    pair.proxy.delay_s = 0.0
    assert await asyncio.gather(*(complete(port) for port in ports for _ in range(8))) == [200] * 16
