"""15: Redis is away, frozen or unusable: a verdict at once, nobody is blamed, a metric says so, and it heals by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from tests.cases.shared.conftest import Pair
from tests.support.client import ask, within

VERDICT_S = 0.9  # the bound is 250 ms; the rest is for a loaded machine

Change = Callable[[Pair], None]


def _no_auth(pair: Pair) -> None:
    pair.redis.client.config_set("requirepass", "secret")
    for kind in ("normal", "pubsub"):
        pair.redis.client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")


LOSSES: dict[str, tuple[Change, Change]] = {
    "closed": (lambda pair: pair.redis.stop(), lambda pair: pair.redis.start()),
    "frozen": (lambda pair: pair.redis.freeze(), lambda pair: pair.redis.thaw()),
    "oom": (
        lambda pair: pair.redis.client.config_set("maxmemory", 1),
        lambda pair: pair.redis.client.config_set("maxmemory", 0),
    ),
    "noauth": (_no_auth, lambda pair: pair.redis.client.config_set("requirepass", "")),
    "readonly": (lambda pair: pair.redis.client.replicaof("127.0.0.1", 1), lambda pair: pair.redis.client.replicaof("NO", "ONE")),
}


@pytest.mark.parametrize("loss", LOSSES)
async def test_redis_lost_and_back(pair: Pair, loss: str) -> None:
    held = await pair.hold(pair.x, 2)
    begin, end = LOSSES[loss]
    await asyncio.to_thread(begin, pair)
    try:
        await asyncio.sleep(0)
        for replica in pair.replicas.values():
            begun = time.monotonic()
            answer = await ask(replica.port, {"model": "tiny", "prompt": "hi", "max_tokens": 8}, path="/v1/completions")
            assert time.monotonic() - begun < VERDICT_S
            assert (answer.status, answer.code) == (503, "backend_unavailable")
            assert answer.fields["x-should-retry"] == "true"
            assert await replica.value("plimsoll_state_degraded") == 1
    finally:
        await asyncio.to_thread(end, pair)
    await pair.serving()
    await within(5, lambda: pair.leases() == 2, "what ran all the time is known again, and nothing else")
    for replica in pair.replicas.values():
        assert await replica.value("plimsoll_state_degraded") == 0
    pair.upstream.release.set()
    assert [await task for task in held] == [200, 200]


async def test_a_flush_forgets_nothing_that_runs(pair: Pair) -> None:
    held = await pair.hold(pair.x, 8)
    pair.redis.client.flushall()
    await within(10, lambda: pair.leases() == 8, "the replica says again what it holds")
    waiting = asyncio.create_task(ask(pair.y.port, {"model": "tiny", "prompt": "hi", "max_tokens": 8}, path="/v1/completions"))
    await asyncio.sleep(1.2)  # longer than a lease time: nothing may have been granted
    assert not waiting.done() and len(pair.upstream.running) == 8
    pair.upstream.release.set()
    assert (await waiting).status == 200
    await asyncio.gather(*held)


async def test_forgotten_functions_are_sent_again(pair: Pair) -> None:
    pair.redis.client.function_flush()
    await pair.serving()
