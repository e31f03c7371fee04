"""Everything at once, from a seed; then nothing is left over and every request was counted exactly once.

PLIMSOLL_CHAOS_SEED repeats a run's luck; when things meet is up to the machine.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.chaos.callers import Caller, Ledger
from tests.chaos.harbour import SimulatorProcess
from tests.chaos.weather import Weather
from tests.support.attested import AttestedGateway, Box, fetch_identity, record_from
from tests.support.client import ask, within

SEED = int(os.environ.get("PLIMSOLL_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
WORKERS = 40
FAIR = 400  # requests before the weather turns: they warm up what memory is compared with
SPARE_FILES = 4  # a scrape's own, and a poll's
TIMEOUTS = {
    "queue_s": 2, "connect_s": 0.5, "first_token_s": 1, "stall_s": 0.8, "execution_s": 8, "client_write_s": 0.5,
}  # fmt: skip
BREAKER = {"min_requests": 10, "consecutive_failures": 5, "cooldown_s": 0.3}


class Storm:
    """A gateway before two simulators of one model, its callers and its weather."""

    def __init__(self, gateway: AttestedGateway, backends: dict[str, SimulatorProcess]) -> None:
        self.gateway, self.backends, self.ledger = gateway, backends, Ledger()
        self.luck = random.Random(SEED)
        self.weather = Weather(gateway, backends, random.Random(self.luck.random()))

    async def callers(self, requests: int, seconds: float) -> None:
        """Send about that many requests, from many workers, for at most so many seconds."""
        end, due = self.ledger.total + requests, time.monotonic() + seconds

        async def work(caller: Caller) -> None:
            while self.ledger.total < end and time.monotonic() < due:
                await caller.go()
            caller.hang_up()

        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(work(Caller(self.gateway.port, self.ledger, random.Random(self.luck.random()))))

    async def rage(self, requests: int, seconds: float) -> None:
        """Callers in bad weather; fair weather after it."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.weather.blow())
            await self.callers(requests, seconds)
            self.weather.over.set()
        await self.weather.clear()

    async def calm(self) -> None:
        """Nothing is in flight, waits, is reserved, or is held open."""
        gateway = self.gateway
        await gateway.settled(10)
        assert await gateway.value("plimsoll_reserved_tokens") == 0
        for backend in self.backends.values():
            await within(10, lambda url=backend.url: idle(url), f"nothing is in flight at {backend.url}")

    async def counted(self) -> dict[tuple[str, str], int]:
        """Requests by outcome and reason, as the gateway counts them."""
        series = await self.gateway.series("plimsoll_requests_total")
        counts: Counter[tuple[str, str]] = Counter()
        for sample in series:
            counts[sample.labels["outcome"], sample.labels["reason"]] += int(sample.value)
        return dict(counts)

    async def accounts_are_right(self) -> None:
        """Each request was counted once, and written down once."""
        sent = self.ledger.total

        async def said() -> bool:  # those that left last may still be on their way
            return sum((await self.counted()).values()) >= sent

        await within(5, said, f"{sent} requests are counted: {await self.counted()} of {dict(self.ledger.sent)}")
        counts = await self.counted()
        assert sum(counts.values()) == sent, (counts, self.ledger.sent)
        await within(5, lambda: len(self.gateway.journal()) >= sent, "the journal is written")
        rows = self.gateway.journal()
        assert Counter((row["outcome"], row["reason"]) for row in rows) == Counter({k: n for k, n in counts.items() if n})
        assert len({row["request_id"] for row in rows}) == len(rows)
        defects = [row for row in rows if row["reason"] == "internal_error"]
        assert not defects and "Traceback" not in self.gateway.log(), (defects[:3], self.gateway.log()[-6000:])

    async def serves(self) -> None:
        """A request is answered, whatever was before."""
        got = await ask(self.gateway.port, model="tiny")
        self.ledger.sent["after"] += 1
        assert (got.status, got.whole) == (200, True), got


async def idle(url: str) -> bool:
    """Whether a backend works on nothing."""
    told = await asyncio.to_thread(fetch_identity, url)
    return told["runtime"]["foreign_in_flight"] == 0 and not told["runtime"]["gateway_in_flight"]


@asynccontextmanager
async def storm(folder: Path) -> AsyncIterator[Storm]:
    backends = {name: SimulatorProcess(folder / f"{name}.log", "--speed", "10") for name in ("port", "starboard")}
    try:
        await asyncio.gather(*(backend.start() for backend in backends.values()))
        urls = {name: backend.url for name, backend in backends.items()}
        gateway = AttestedGateway(
            folder, urls, [record_from(fetch_identity(urls["port"]), [Box(2048, 256, 16)])], {"tiny": list(backends)},
            timeouts=TIMEOUTS, breaker=BREAKER, queue={"max_requests": 200},
        )  # fmt: skip
        async with gateway:
            yield Storm(gateway, backends)
    finally:
        for backend in backends.values():
            await backend.end()


async def survives(folder: Path, requests: int, seconds: float, growth_kb: int) -> Storm:
    """A storm of that many requests or seconds; memory may grow by `growth_kb` after a first, fair, part."""
    print(f"PLIMSOLL_CHAOS_SEED={SEED}")
    async with storm(folder) as it:
        await it.callers(FAIR, seconds)
        await it.calm()
        files, memory = it.gateway.open_files(), it.gateway.rss_kb()
        await it.rage(requests, seconds)
        await it.calm()
        await it.serves()
        await it.accounts_are_right()
        await within(
            10, lambda: it.gateway.open_files() <= files + SPARE_FILES, f"{files} files are open, not {it.gateway.open_files()}"
        )
        grown = it.gateway.rss_kb() - memory
        print(f"{it.ledger.total} requests; {memory} kB resident before, {grown:+} kB after; {await it.counted()}")
        print(f"{dict(it.ledger.statuses)}; weather {dict(it.weather.seen)}")
        assert grown <= growth_kb, (memory, grown)
        return it


@pytest.mark.timeout(300)  # where much else runs
async def test_a_short_storm_leaves_nothing_behind(tmp_path):
    it = await survives(tmp_path, 2000, 60, 24_000)
    assert it.ledger.statuses[200] > 400 and it.ledger.cut + it.ledger.whole > 100  # it was not only refusals


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_long_storm_leaves_nothing_behind(tmp_path):
    it = await survives(tmp_path, 1_000_000, float(os.environ.get("PLIMSOLL_CHAOS_S", "120")), 40_000)
    assert it.ledger.total > 2000
