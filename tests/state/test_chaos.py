"""Three replicas, one Redis, one limit, and everything that can go wrong with processes: the backend never sees too much.

The short form runs with the other tests; the long ones are marked slow: two minutes with wall clocks that are wrong by 30 s and
step by 60, and losses of Redis while each replica keeps to its share. What is done to whom is drawn from a seed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.state.fleet import CountingUpstream, ReplicaProcess, complete
from tests.support.client import within
from tests.support.gateway import KEYS
from tests.support.redis_pair import RedisPair
from tests.support.redis_server import RedisServer

LEASE_S = 1.0
LEASES, HEADS = "plimsoll:{v1:test:a}:lea", "plimsoll:{v1:test:a}:head"
IN_FLIGHT = [f"plimsoll:{{v1:test:tenant:{tenant}}}:in-flight" for tenant in ("acme", "other")]
TENANTS = {"acme": {"max_in_flight": 500}, "other": {"class": "batch", "max_in_flight": 500}}


class Chaos:
    """Load on every replica, and one disturbance after the other."""

    def __init__(self, upstream: CountingUpstream, redis: Any, replicas: list[ReplicaProcess], seed: int) -> None:
        self.upstream, self.redis, self.replicas = upstream, redis, replicas
        self.draw = random.Random(seed)
        self.statuses: Counter[int] = Counter()
        self.good: Counter[str] = Counter()  # answers by kind of client
        self.ended = asyncio.Event()

    async def client(self, number: int) -> None:
        """Requests of mixed sizes, one after the other, each to some replica."""
        draw = random.Random(number)
        while not self.ended.is_set():
            replica = draw.choice(self.replicas)
            prompt = "x" * (150 if draw.random() < 0.1 else 20)
            n = draw.choice((1, 1, 1, 2)) if len(prompt) < 100 else 1
            key = KEYS["other"] if number % 6 == 5 else KEYS["client"]  # of a lower class
            status = await complete(replica.port, prompt, key, n=n, timeout=20)
            self.statuses[status] += 1
            if status == 200:
                self.good["large" if len(prompt) > 100 else "small"] += 1
                self.good["batch" if number % 6 == 5 else "interactive"] += 1
            if status != 200:
                await asyncio.sleep(0.02)

    async def disturb(self, kind: str) -> None:
        """One disturbance, from its beginning to its end."""
        replica = self.draw.choice(self.replicas)
        assert replica.process is not None
        if kind == "freeze a replica":
            replica.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(self.draw.uniform(0.5, 2.2) * LEASE_S)
            replica.process.send_signal(signal.SIGCONT)
        elif kind == "kill a replica":
            replica.process.kill()
            await replica.process.wait()
            (replica.folder / "log").unlink()
            await replica.start()
        elif kind == "restart a replica":
            await replica.stop()
            (replica.folder / "log").unlink()
            await replica.start()
        elif kind == "freeze redis":
            self.redis.freeze()
            await asyncio.sleep(self.draw.uniform(0.3, 1.5) * LEASE_S)
            self.redis.thaw()
        elif kind == "flush redis":
            self.redis.client.flushall()
        elif kind == "restart redis":
            self.redis.stop()
            await asyncio.sleep(self.draw.uniform(0.1, 1.0))
            await asyncio.to_thread(self.redis.start)
        elif kind == "fail over":
            await self.redis.fail_over(self.draw.uniform(0.0, 1.0))
        elif kind == "skew a clock":
            replica.set_clock(self.draw.choice((-30, 30)))
        elif kind == "redis is away for long":
            self.redis.stop()
            await asyncio.sleep(6)  # what was agreed before has ended, and is seen to have
            served = self.upstream.served
            await asyncio.sleep(4)
            print(f"{self.upstream.served - served} served apart in 4 s")
            assert self.upstream.served > served + 40, "each goes on with its share"
            await asyncio.to_thread(self.redis.start)
        await asyncio.sleep(1.5 * LEASE_S)

    async def run(self, kinds: list[str], clients: int) -> None:
        load = [asyncio.create_task(self.client(number)) for number in range(clients)]
        await asyncio.sleep(1.5)
        for kind in kinds:
            before = len(self.upstream.violations)
            await self.disturb(kind)
            assert self.upstream.violations[before:] == [], kind
        served = self.upstream.served
        await within(15, lambda: self.upstream.served > served + 20, "traffic flows again after all of it")
        self.ended.set()
        await asyncio.gather(*load)

    async def nothing_left(self) -> None:
        """Leases, queues and what is in flight are exactly nothing."""
        for replica in self.replicas:
            await replica.settled(10)
        await within(10, lambda: self.redis.client.hlen(LEASES) == 0, "no lease is left")
        await within(10, lambda: not self.redis.client.exists(*IN_FLIGHT), "no tenant has anything in flight")
        assert self.redis.client.hlen(HEADS) == 0
        counts = {
            k: int(v) for k, v in self.redis.client.hgetall("plimsoll:{v1:test:a}:sum").items() if k[:1] in b"sbo" and b"|" in k
        }
        assert set(counts.values()) <= {0}, counts
        for key in self.redis.client.scan_iter("plimsoll:*"):
            assert self.redis.client.pttl(key) > 0, key


async def chaos(
    service, folder: Path, kinds: list[str], clients: int, seed: int, *, skewed: bool = False, degraded: str = "closed"
) -> Chaos:
    redis = RedisServer(service("redis-server"), folder / "redis")
    redis.start()
    try:
        return await played(redis, folder, kinds, clients, seed, skewed=skewed, degraded=degraded)
    finally:
        redis.stop()


async def played(redis: Any, folder: Path, kinds: list[str], clients: int, seed: int, *, skewed: bool, degraded: str) -> Chaos:
    """`redis`: what is disturbed with the replicas, a server or a pair."""
    draw = random.Random(seed)
    upstream = CountingUpstream(lambda: draw.uniform(0.02, 0.3))
    await upstream.start()
    replicas = [
        ReplicaProcess(
            folder / f"r{n}", upstream, redis.url, lease_s=LEASE_S, degraded=degraded, tenants=TENANTS,
            timeouts={"queue_s": 10, "execution_s": 20},
        )
        for n in range(3)
    ]  # fmt: skip
    for replica, wrong_by_s in zip(replicas, (30, -30), strict=False):
        if skewed:
            replica.set_clock(wrong_by_s)
    await asyncio.gather(*(replica.start() for replica in replicas))
    made = Chaos(upstream, redis, replicas, seed)
    try:
        await made.run(kinds, clients)
        await made.nothing_left()
    finally:
        await asyncio.gather(*(replica.stop() for replica in replicas))
        await upstream.stop()
    print(json.dumps({"statuses": made.statuses, "good": made.good, "served": upstream.served, "peak": upstream.peak}))
    return made


SHORT = ["freeze a replica", "kill a replica", "flush redis", "freeze redis", "restart redis"]


async def test_the_limit_holds_whatever_dies(service, tmp_path: Path) -> None:
    made = await chaos(service, tmp_path, SHORT, 16, seed=int(os.environ.get("PLIMSOLL_SEED", "1")))
    assert made.upstream.violations == []
    assert 4 <= made.upstream.peak <= 8
    assert made.statuses[200] > 100 and set(made.statuses) <= {0, 200, 503}


async def test_the_limit_holds_when_redis_fails_over_and_forgets(service, tmp_path: Path) -> None:
    """The one that is promoted lacks what was written last; every gateway is there to say what it holds."""
    pair = RedisPair(service("redis-server"), tmp_path, lag_s=0.5)
    await pair.start()
    try:
        made = await played(pair, tmp_path, ["fail over"] * 2, 16, 5, skewed=False, degraded="closed")
    finally:
        await pair.close()
    assert made.upstream.violations == []
    assert 4 <= made.upstream.peak <= 8
    assert made.statuses[200] > 30 and set(made.statuses) <= {0, 200, 503}


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_the_limit_holds_for_two_minutes(service, tmp_path: Path) -> None:
    service("faketime")
    seed = int(os.environ.get("PLIMSOLL_SEED", "7"))
    kinds = [*SHORT, "restart a replica", "skew a clock", "skew a clock"] * 6
    random.Random(seed).shuffle(kinds)
    made = await chaos(service, tmp_path, kinds, 24, seed, skewed=True)
    assert made.upstream.violations == []
    assert made.statuses[200] > 1000 and set(made.statuses) <= {0, 200, 503}
    assert min(made.good[kind] for kind in ("large", "small", "batch", "interactive")) > 10, made.good


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_shares_hold_while_redis_is_away(service, tmp_path: Path) -> None:
    """All lose it at once, with large requests and small ones in flight; each goes on with its part."""
    made = await chaos(service, tmp_path, ["redis is away for long"] * 3, 24, seed=3, degraded="share")
    assert made.upstream.violations == []
    assert made.statuses[200] > 500 and set(made.statuses) <= {0, 200, 503}
