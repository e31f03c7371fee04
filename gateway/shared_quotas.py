"""A tenant's requests and tokens a minute, over all replicas.

Owns the script and the keys, one for each tenant that has such a quota. Promises: what is refused burns nothing; the wait that is
told is exact on the server's clock; it travels with the acquire in one round trip. How many requests a tenant has in flight is
each replica's own count. Talks to: `link`, through the store's connection.
"""

from __future__ import annotations

import asyncio
from importlib.resources import files
from typing import Any

import hiredis

from gateway.errors import Reason, Refusal
from gateway.flow.demand import Demand
from gateway.state.leases import StateLost
from gateway.state.redis_store import LAYOUT, RedisLeases

SCRIPT = files("gateway.state").joinpath("quota.lua").read_bytes()


class Taken:
    """What one request took of its tenant's buckets; the answer is on its way."""

    __slots__ = ("_answer", "_demand", "_quotas")

    def __init__(self, quotas: SharedQuotas, demand: Demand, answer: asyncio.Future[Any]) -> None:
        self._quotas, self._demand, self._answer = quotas, demand, answer

    async def refusal(self) -> Refusal | None:
        """What the buckets said. Raises StateLost."""
        try:
            kind, wait_ms = await asyncio.shield(self._answer)
        except hiredis.ReplyError as error:
            raise StateLost(f"Redis refused: {error}") from error
        demand, wait_s = self._demand, int(wait_ms) / 1000
        limits = demand.limits
        if not kind or limits is None:
            return None
        if kind == b"r":
            text = f"this tenant's quota is {limits.requests_per_minute} requests a minute"
            return Refusal(Reason.RATE_LIMITED, text, retry_after_s=wait_s)
        text = f"the request reserves {demand.shape.tokens} tokens; this tenant's quota is {limits.tokens_per_minute} a minute"
        fits = f"reserved tokens: up to {limits.tokens_per_minute}"
        return Refusal(Reason.TOKENS_LIMITED, text, fits=fits, retry_after_s=wait_s if wait_s >= 0 else None)

    def undo(self) -> None:
        """It is not dispatched: what was taken goes back, as soon as that is known."""
        self._answer.add_done_callback(self._undone)

    def _undone(self, done: asyncio.Future[Any]) -> None:
        if not done.cancelled() and done.exception() is None and not done.result()[0]:
            self.back(1, 1.0)

    def back(self, requests: int, part: float) -> None:
        """Return so many requests and this part of the tokens."""
        self._quotas.back(self._demand, requests, int(self._demand.shape.tokens * part))


class SharedQuotas:
    """The buckets of all tenants."""

    def __init__(self, store: RedisLeases, namespace: str) -> None:
        self._store, self._namespace = store, namespace

    def take(self, demand: Demand) -> Taken | None:
        """Ask for one request and its reserved tokens; None where the tenant has no such quota."""
        answer = self._call("take", demand, 1, demand.shape.tokens)
        return Taken(self, demand, answer) if answer is not None else None

    def back(self, demand: Demand, requests: int, tokens: int) -> None:
        """Return what was not used."""
        sent = self._call("back", demand, requests, tokens)
        if sent is not None:
            sent.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _call(self, operation: str, demand: Demand, requests: int, tokens: int) -> asyncio.Future[Any] | None:
        limits = demand.limits
        if limits is None or (limits.requests_per_minute is None and limits.tokens_per_minute is None):
            return None
        key = f"plimsoll:{{{LAYOUT}:{self._namespace}:tenant:{demand.tenant}}}:quota"
        per_minute = [str(limit) if limit is not None else "" for limit in limits[:2]]
        return self._store.link.send("EVAL", SCRIPT, "1", key, operation, *per_minute, requests, tokens)
