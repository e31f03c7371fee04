"""How many requests a tenant has in flight, over all replicas.

Owns the script, the keys (one for each tenant that has such a quota) and this replica's own count. Promises: together no more
than the quota wait or run; what a replica holds is forgotten one lease time after it has died; a claim whose caller left gives
itself back when its answer comes; what the state forgot is said again. The claim travels with the acquire in one write, or, for a
request that waits, beside it. Talks to: `link`, through the store's connection.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import hiredis

from gateway.errors import Reason, Refusal
from gateway.flow.demand import Demand
from gateway.flow.quotas import IN_FLIGHT_RETRY_S
from gateway.state.leases import StateLost
from gateway.state.redis_store import LAYOUT, RedisLeases

SCRIPT = files("gateway.state").joinpath("in_flight.lua").read_bytes()
BEATS = 4  # in one lease time


class Claim:
    """One request's place in its tenant's count. `granted` None: not answered, or lost."""

    __slots__ = ("_all", "_answer", "granted", "most", "released", "sent", "tenant")

    def __init__(self, everything: InFlight, tenant: str, most: int, answer: asyncio.Future[Any]) -> None:
        self._all, self.tenant, self.most, self._answer = everything, tenant, most, answer
        self.sent = everything.stated[tenant]
        self.granted: bool | None = None
        self.released = False
        answer.add_done_callback(self._answered)

    def _answered(self, done: asyncio.Future[Any]) -> None:
        if done.cancelled() or done.exception() is not None:
            return  # the connection is lost: everything is stated anew when it is back
        self.granted = bool(int(done.result()))
        self._all.answered(self)

    async def refusal(self) -> Refusal | None:
        """Why the request cannot be taken; None when it can. Raises StateLost."""
        try:
            granted = int(await asyncio.shield(self._answer))
        except hiredis.ReplyError as error:
            raise StateLost(f"Redis refused: {error}") from error
        return None if granted else self.refused()

    def refused(self) -> Refusal:
        """The words of the refusal."""
        text = f"this tenant already has {self.most} requests in flight at all replicas, as many as are allowed"
        fits = f"in flight: {self.most}"
        return Refusal(Reason.CONCURRENCY_LIMITED, text, fits=fits, retry_after_s=IN_FLIGHT_RETRY_S)

    def when_refused(self, then: Callable[[Refusal], None]) -> None:
        """Call `then` as soon as it turns out that the request cannot be taken."""

        def look(_: asyncio.Future[Any]) -> None:
            if self.granted is False and not self.released:
                then(self.refused())

        self._answer.add_done_callback(look)

    def release(self) -> None:
        """The request is over, or is not to be. Harmless a second time."""
        if not self.released:
            self.released = True
            self._all.released(self)


class InFlight:
    """The counts of all tenants. `lease_s` as of the leases."""

    def __init__(self, store: RedisLeases, namespace: str, lease_s: float) -> None:
        self._store, self._namespace, self._lease_s = store, namespace, lease_s
        self.held: Counter[str] = Counter()  # claims that are granted or under way
        self.stated: Counter[str] = Counter()  # how often a tenant's count was stated
        self._beat_at = 0.0

    def claim(self, demand: Demand) -> Claim | None:
        """Ask for one request more; None where the tenant has no such quota."""
        most = demand.limits.max_in_flight if demand.limits is not None else None
        if most is None:
            return None
        self.held[demand.tenant] += 1
        return Claim(self, demand.tenant, most, self._send("claim", demand.tenant, most))

    def answered(self, claim: Claim) -> None:
        """A claim's answer has come (called by the claim)."""
        if claim.granted and not claim.released:
            return
        if not claim.granted and not claim.released:
            self.held[claim.tenant] -= 1
        if self.stated[claim.tenant] != claim.sent:  # stated in the meantime, with it or without
            self._state(claim.tenant)
        elif claim.granted:
            self._tell("release", claim.tenant, 0)

    def released(self, claim: Claim) -> None:
        """A claim has ended (called by the claim)."""
        if claim.granted is not False:
            self.held[claim.tenant] -= 1
        if claim.granted:
            self._tell("release", claim.tenant, 0)

    def beat(self, now: float) -> None:
        """Keep what is held from being forgotten (`now`: monotonic seconds)."""
        if now < self._beat_at:
            return
        self._beat_at = now + self._lease_s / BEATS
        for tenant, count in self.held.items():
            if count:
                self._state(tenant)

    def restate(self) -> None:
        """The connection is new: say everything, nothings included."""
        for tenant in list(self.held):
            self._state(tenant)

    def leave(self) -> None:
        """Hold nothing any more."""
        for tenant in self.held:
            self._tell("state", tenant, 0)

    def _state(self, tenant: str) -> None:
        self.stated[tenant] += 1
        self._tell("state", tenant, self.held[tenant])

    def _tell(self, operation: str, tenant: str, number: int) -> None:
        self._send(operation, tenant, number).add_done_callback(lambda done: done.cancelled() or done.exception())

    def _send(self, operation: str, tenant: str, number: int) -> asyncio.Future[Any]:
        key = f"plimsoll:{{{LAYOUT}:{self._namespace}:tenant:{tenant}}}:in-flight"
        lease_ms = int(self._lease_s * 1000)
        return self._store.link.send("EVAL", SCRIPT, "1", key, operation, self._store.owner, str(lease_ms), str(number))
