"""A load that goes on, and memory that does not grow. PLIMSOLL_SOAK_S says for how many seconds (600)."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time

import pytest

from tests.soak.test_memory import before
from tests.support.client import post, wire
from tests.support.upstream import Call, completion

SECONDS = float(os.environ.get("PLIMSOLL_SOAK_S", "600"))
CLIENTS = 24
GROWTH_KB = 6_000
WARM = 0.25  # of the run: caches, pools and the allocator's arenas fill up meanwhile

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 120)]


class Load:
    """Clients that ask, listen and leave until `end` (monotonic)."""

    def __init__(self, port: int, end: float) -> None:
        self.port, self.end, self.requests = port, end, 0

    async def client(self, luck: random.Random) -> None:
        """Connections of some requests each; every tenth client leaves before its answer."""
        while time.monotonic() < self.end:
            async with wire(self.port) as connection:
                for _ in range(luck.randint(1, 50)):
                    words = " ".join(str(luck.random()) for _ in range(luck.choice((1, 10, 100))))
                    document = {"model": "tiny", "messages": [{"role": "user", "content": words}], "max_tokens": 8}
                    await connection.send(post(document | {"stream": luck.random() < 0.5}))
                    self.requests += 1
                    if luck.random() < 0.1:
                        break
                    got = await connection.response()
                    assert (got.status, got.whole) == (200, True), got
                    if time.monotonic() > self.end:
                        break


def spread(samples: list[tuple[float, int]]) -> str:
    """The samples in ten parts, each by its median, in MB."""
    size = max(1, len(samples) // 10)
    medians = (statistics.median(kb for _, kb in samples[at : at + size]) for at in range(0, len(samples), size))
    return " ".join(f"{kb / 1000:.1f}" for kb in medians)


async def test_memory_stays_flat(tmp_path):
    async def soon(call: Call) -> None:
        call.peer.upstream.calls.clear()  # nobody looks at them, and there are millions
        await asyncio.sleep(0.002)
        await completion(call)

    async with before(tmp_path, soon) as gateway:
        begin = time.monotonic()
        load = Load(gateway.port, begin + SECONDS)
        work = asyncio.gather(*(load.client(random.Random(number)) for number in range(CLIENTS)))
        samples: list[tuple[float, int]] = []
        while not work.done():
            await asyncio.sleep(min(1.0, SECONDS / 100))
            samples.append((time.monotonic() - begin, gateway.rss_kb()))
        await work
        await gateway.settled()
        print(f"\n{load.requests} requests in {SECONDS:g} s; MB resident, tenth by tenth: {spread(samples)}")
        counted = await gateway.value("plimsoll_requests_total")
        assert counted == load.requests
        warm = [kb for at, kb in samples if WARM * SECONDS <= at < 2 * WARM * SECONDS]
        late = [kb for at, kb in samples if at >= (1 - WARM) * SECONDS]
        assert statistics.median(late) - statistics.median(warm) <= GROWTH_KB
