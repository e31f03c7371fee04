"""A tenant's requests and tokens a minute, over all replicas.

Owns the script and the keys, one for each tenant that has such a quota. Promises: what is refused burns nothing; the wait that is
told is exact on the server's clock; it travels with the acquire in one round trip, as the count of those in flight does
(`shared_in_flight`). Talks to: `link`, through the store's connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import hiredis

from gateway.errors import Reason, Refusal
from gateway.flow.demand import Demand
from gateway.flow.waiting import Waiting
from gateway.shared_in_flight import Claim, InFlight
from gateway.state.leases import StateLost
from gateway.state.redis_store import LAYOUT, RedisLeases

SCRIPT = files("gateway.state").joinpath("quota.lua").read_bytes()


class Taken:
    """What one request took of its tenant's quotas; the answers are on their way."""

    __slots__ = ("_answer", "_claim", "_demand", "_quotas")

    def __init__(self, quotas: SharedQuotas, demand: Demand, answer: asyncio.Future[Any] | None, claim: Claim | None) -> None:
        self._quotas, self._demand, self._answer, self._claim = quotas, demand, answer, claim

    async def refusal(self) -> Refusal | None:
        """What the quotas said. Raises StateLost."""
        refusal = await self._claim.refusal() if self._claim is not None else None
        return await self._spent() if refusal is None and self._answer is not None else refusal

    async def _spent(self) -> Refusal | None:
        assert self._answer is not None
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
        if self._claim is not None:
            self._claim.release()
        if self._answer is not None:
            self._answer.add_done_callback(self._undone)

    def _undone(self, done: asyncio.Future[Any]) -> None:
        if not done.cancelled() and done.exception() is None and not done.result()[0]:
            self._quotas.back(self._demand, 1, self._demand.shape.tokens)

    def end(self, part: float, *, sent: bool) -> None:
        """The request is over: this part of its tokens was not used, and of one that was not `sent` the whole comes back."""
        if self._claim is not None:
            self._claim.release()
        if part > 0 and self._answer is not None:
            self._quotas.back(self._demand, 0 if sent else 1, int(self._demand.shape.tokens * part))


class SharedQuotas:
    """The buckets and the counts of all tenants."""

    def __init__(self, store: RedisLeases, namespace: str, lease_s: float) -> None:
        self._store, self._namespace = store, namespace
        self.in_flight = InFlight(store, namespace, lease_s)
        self._claims: dict[Waiting, Claim] = {}  # of requests that wait

    def waits(self, waiting: Waiting, turn_away: Callable[[Waiting, Refusal], None]) -> None:
        """A request that has to wait is one in flight, too: `turn_away` it when its tenant has too many."""
        claim = self.in_flight.claim(waiting.demand)
        if claim is not None:
            self._claims[waiting] = claim
            claim.when_refused(lambda refusal: turn_away(waiting, refusal))

    def left(self, waiting: Waiting) -> None:
        """It waits no more, and comes to nothing. Harmless for one that was never counted."""
        claim = self._claims.pop(waiting, None)
        if claim is not None:
            claim.release()

    @staticmethod
    def concern(demand: Demand) -> bool:
        """Whether there is anything to ask for."""
        return demand.limits is not None and any(limit is not None for limit in demand.limits)

    def take(self, demand: Demand, place: Waiting | None = None) -> Taken | None:
        """Ask for one request, its reserved tokens and a place in the count, unless it waited in one; None without any quota."""
        claim = self._claims.pop(place, None) if place is not None else None
        claim = claim or self.in_flight.claim(demand)
        answer = self._call("take", demand, 1, demand.shape.tokens)
        return None if answer is None and claim is None else Taken(self, demand, answer, claim)

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
