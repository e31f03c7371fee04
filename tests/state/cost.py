"""What sharing costs, measured: `python -m tests.state.cost`. Real Redis on the loopback, one replica's store, one event loop.

Prints one JSON document: admissions (acquire and settle) a second, the time of one acquire alone and beside others, the scripts'
time inside Redis, and the cost of a beat. The figures of deploy/SCALING.md come from here.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from pathlib import Path

import uvloop

from gateway.state.leases import Verdict
from gateway.state.redis_store import RedisLeases
from tests.state.stores import MIXED, Replica, ask, connect
from tests.support.redis_server import RedisServer

REQUESTS = 6000


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[int(len(values) * part)]


async def admissions(replica: Replica, total: int, at_once: int) -> tuple[float, list[float]]:
    """(admissions a second, seconds of each acquire) with `at_once` requests under way."""
    took: list[float] = []

    async def worker(count: int) -> None:
        for _ in range(count):
            request = ask()
            begun = time.perf_counter()
            answer = await replica.acquire(request)
            took.append(time.perf_counter() - begun)
            assert answer.verdict is Verdict.GRANTED, answer
            replica.store.settle("b", request.lease, request.rules, 0.0)

    begun = time.perf_counter()
    await asyncio.gather(*(worker(total // at_once) for _ in range(at_once)))
    return total / (time.perf_counter() - begun), took


async def measure(server: RedisServer) -> dict[str, object]:
    replica = Replica("A")
    task = await connect(replica, server.url, "cost")
    await replica.register()
    server.client.hset("plimsoll:{v1:cost:b}:sum", "from", 0)
    keep = asyncio.create_task(_beats(replica))
    try:
        await admissions(replica, 500, 4)
        before, here = _cpu(server), time.process_time()
        rate, _ = await admissions(replica, REQUESTS, 6)
        redis_s, here_s = _cpu(server) - before, time.process_time() - here
        _, alone = await admissions(replica, 1500, 1)
        store = replica.store
        assert isinstance(store, RedisLeases)
        return {
            "admissions_per_s": round(rate),
            "acquire_alone_ms": {"p50": round(quantile(alone, 0.5) * 1e3, 3), "p99": round(quantile(alone, 0.99) * 1e3, 3)},
            "redis_cpu_us_per_admission": round(redis_s / REQUESTS * 1e6, 1),
            "replica_cpu_us_per_admission": round(here_s / REQUESTS * 1e6, 1),
            "operations_per_admission": 2,
        }
    finally:
        keep.cancel()
        task.cancel()


def _cpu(server: RedisServer) -> float:
    """Processor seconds that Redis has used."""
    used = server.client.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


async def _beats(replica: Replica) -> None:
    while True:
        await replica.store.beat("b", MIXED, None, None)
        await asyncio.sleep(0.2)


def main() -> None:
    program = shutil.which("redis-server")
    assert program is not None, "redis-server is not installed"
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(program, Path(folder))
        server.start()
        try:
            print(json.dumps(uvloop.run(measure(server)), indent=2))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
