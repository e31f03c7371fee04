"""A tenant's quota over two replicas, on real Redis."""

from __future__ import annotations

import asyncio
import random

import pytest

from gateway.errors import Reason, Refused
from gateway.flow.demand import Demand, Limits
from gateway.flow.grant import Grant
from gateway.shared_in_flight import Claim
from gateway.shared_quotas import SharedQuotas
from gateway.state.redis_store import RedisLeases
from tests.state.test_agreement import until
from tests.state.test_case_37_clocks import Clock, Site
from tests.support.redis_server import RedisServer


class Limited(Site):
    """A site whose tenant has a quota, connected to Redis."""

    def __init__(self, name: str, url: str, namespace: str, limits: Limits, lease_s: float = 5.0) -> None:
        super().__init__(Clock(0.0), lease_s=lease_s)
        self.limits = limits
        self.redis = RedisLeases(url, name, namespace=namespace, lease_s=lease_s, timeout_s=5.0,
                                 on_wake=self.replicas.woken, on_state=self.replicas.state)  # fmt: skip
        self.replicas.quotas = SharedQuotas(self.redis, namespace, lease_s)
        self.on(self.redis)
        self.tasks.append(asyncio.create_task(self.redis.run()))

    def demand(self, tenant: str = "t", wait_s: float = 5.0) -> Demand:
        return super().demand(tenant, wait_s)._replace(limits=self.limits)


async def pair(server: RedisServer, namespace: str, limits: Limits, lease_s: float = 5.0) -> list[Limited]:
    sites = [Limited(name, server.url, namespace, limits, lease_s) for name in "AB"]
    await until(lambda: not any(site.degraded for site in sites))
    server.client.hset(f"plimsoll:{{v1:{namespace}:b}}:sum", mapping={"run": sites[0].redis.link.run_of("b"), "from": 0})
    return sites


async def refused(site: Limited) -> Reason:
    with pytest.raises(Refused) as caught:
        await site.admit()
    assert caught.value.refusal.retry_after_s
    return caught.value.refusal.reason


async def test_requests_a_minute_hold_over_replicas(redis_server: RedisServer) -> None:
    sites = await pair(redis_server, "quota-r", Limits(requests_per_minute=4))
    for site in (*sites, *sites):
        grant = await site.admit()
        assert isinstance(grant, Grant) and grant.may_dispatch(site.clock())
        grant.settle(site.clock())
    assert await refused(sites[1]) is Reason.RATE_LIMITED
    await until(lambda: redis_server.client.hlen("plimsoll:{v1:quota-r:b}:lea") == 0)  # what was refused holds nothing
    for site in sites:
        await site.stop()


async def test_tokens_come_back_when_they_are_not_used(redis_server: RedisServer) -> None:
    sites = await pair(redis_server, "quota-t", Limits(tokens_per_minute=40))  # 20 a request
    first, second = [await site.admit() for site in sites]
    assert await refused(sites[0]) is Reason.TOKENS_LIMITED
    assert first.may_dispatch(sites[0].clock()) and second.may_dispatch(sites[1].clock())
    first.settle(sites[0].clock(), 1, 1)  # 18 come back
    second.give_back(sites[1].clock())  # nothing was used: all 20 come back
    level = "plimsoll:{v1:quota-t:tenant:t}:quota"
    await until(lambda: float(redis_server.client.hget(level, "t") or 0) >= 38)
    for site in sites:
        await site.stop()


async def test_more_than_a_minute_is_worth_is_never(redis_server: RedisServer) -> None:
    (site, other) = await pair(redis_server, "quota-n", Limits(tokens_per_minute=10))
    taken = site.replicas.quotas.take(site.demand())  # type: ignore[union-attr]
    assert taken is not None
    refusal = await taken.refusal()
    assert refusal is not None and refusal.retry_after_s is None
    for each in (site, other):
        await each.stop()


COUNT = "plimsoll:{{v1:{}:tenant:t}}:in-flight"


async def test_requests_in_flight_hold_over_replicas(redis_server: RedisServer) -> None:
    """Running ones and waiting ones together; what ends at one replica makes room at the other."""
    a, b = sites = await pair(redis_server, "in-flight", Limits(max_in_flight=3))
    first, second, third = await a.admit(), await a.admit(), await b.admit()
    assert await refused(b) is Reason.CONCURRENCY_LIMITED
    assert await refused(a) is Reason.CONCURRENCY_LIMITED
    assert (await b.admit(tenant="other")).settled is False
    assert first.may_dispatch(a.clock())
    first.settle(a.clock())
    await until(lambda: sum(int(each.split()[0]) for each in redis_server.client.hvals(COUNT.format("in-flight"))) == 2)
    fourth = await b.admit()
    for grant, site in ((second, a), (third, b), (fourth, b)):
        grant.give_back(site.clock())
    await until(lambda: redis_server.client.hlen(COUNT.format("in-flight")) == 0)
    for site in sites:
        await site.stop()


async def test_those_that_wait_are_in_flight_too(redis_server: RedisServer) -> None:
    a, b = sites = await pair(redis_server, "in-wait", Limits())
    full = [await site.admit(tenant="other") for site in sites for _ in range(4)]
    for site in sites:
        site.limits = Limits(max_in_flight=3)
    waiting = [asyncio.create_task(site.admit()) for site in (a, a, b)]
    key = COUNT.format("in-wait")
    await until(lambda: sum(int(each.split()[0]) for each in redis_server.client.hvals(key)) == 3)
    assert await refused(b) is Reason.CONCURRENCY_LIMITED  # at once, although it would have had to wait
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    await until(lambda: sum(int(each.split()[0]) for each in redis_server.client.hvals(key)) == 2)
    later = asyncio.create_task(b.admit())
    for number, grant in enumerate(full):
        grant.settle(sites[number // 4].clock())
    got = [await each for each in (*waiting[1:], later)]
    for grant, site in zip(got, (a, b, b), strict=True):
        grant.settle(site.clock())
    await until(lambda: redis_server.client.hlen(key) == 0)
    for site in sites:
        await site.stop()


async def test_a_dead_replica_holds_nothing_for_long_and_a_flush_is_made_good(redis_server: RedisServer) -> None:
    a, b = await pair(redis_server, "in-dead", Limits(max_in_flight=2), lease_s=1.0)
    key = COUNT.format("in-dead")
    await a.admit()
    mine = await b.admit()
    assert await refused(b) is Reason.CONCURRENCY_LIMITED
    redis_server.client.delete(key)
    await until(lambda: redis_server.client.hlen(key) == 2)  # each says again what it holds
    await a.stop()  # which tells nobody
    await until(lambda: list(redis_server.client.hkeys(key)) == [b"B"])
    second = await b.admit()
    for grant in (mine, second):
        grant.settle(b.clock())
    await b.stop()


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_the_order_nothing_is_left_and_never_too_much(redis_server: RedisServer, seed: int) -> None:
    """Claims of two replicas, released before or after their answers, with restatements in between."""
    namespace, most, draw = f"in-any-{seed}", 4, random.Random(seed)
    sites = await pair(redis_server, namespace, Limits(max_in_flight=most))
    counts = [site.replicas.quotas.in_flight for site in sites]  # type: ignore[union-attr]
    claims: list[Claim] = []
    for _ in range(200):
        kind = draw.random()
        if kind < 0.45 or not claims:
            claim = draw.choice(counts).claim(sites[0].demand())
            assert claim is not None
            claims.append(claim)
        elif kind < 0.85:
            claims.pop(draw.randrange(len(claims))).release()
        elif kind < 0.95:
            draw.choice(counts).restate()
        else:
            await asyncio.gather(*(claim.refusal() for claim in claims))
            assert sum(claim.granted is True for claim in claims) <= most
    for claim in claims:
        claim.release()
    for count in counts:
        count.restate()
    await until(lambda: redis_server.client.hlen(COUNT.format(namespace)) == 0)
    assert [dict(+count.held) for count in counts] == [{}, {}]
    for site in sites:
        await site.stop()
