"""A tenant's quota over two replicas, on real Redis."""

from __future__ import annotations

import asyncio

import pytest

from gateway.errors import Reason, Refused
from gateway.flow.demand import Demand, Limits
from gateway.flow.grant import Grant
from gateway.shared_quotas import SharedQuotas
from gateway.state.redis_store import RedisLeases
from tests.state.test_agreement import until
from tests.state.test_case_37_clocks import Clock, Site
from tests.support.redis_server import RedisServer


class Limited(Site):
    """A site whose tenant has a quota, connected to Redis."""

    def __init__(self, name: str, url: str, namespace: str, limits: Limits) -> None:
        super().__init__(Clock(0.0), lease_s=5.0)
        self.limits = limits
        self.redis = RedisLeases(url, name, namespace=namespace, lease_s=5.0, timeout_s=5.0,
                                 on_wake=self.replicas.woken, on_state=self.replicas.state)  # fmt: skip
        self.replicas.quotas = SharedQuotas(self.redis, namespace)
        self.on(self.redis)
        self.tasks.append(asyncio.create_task(self.redis.run()))

    def demand(self, tenant: str = "t", wait_s: float = 5.0) -> Demand:
        return super().demand(tenant, wait_s)._replace(limits=self.limits)


async def pair(server: RedisServer, namespace: str, limits: Limits) -> list[Limited]:
    sites = [Limited(name, server.url, namespace, limits) for name in "AB"]
    await until(lambda: not any(site.degraded for site in sites))
    server.client.hset(f"plimsoll:{{v1:{namespace}:b}}:sum", mapping={"run": sites[0].redis._run, "from": 0})
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
