"""A tenant's own quotas: requests a minute, tokens a minute, requests in flight.

Owns one account a tenant. Promises: what is refused burns nothing; Retry-After is the exact second at which the same
request would pass, other things equal; a request larger than the whole quota is told so at once, with no Retry-After;
an older `now` never refills a bucket. Talks to: `demand`.
"""

from __future__ import annotations

from gateway.errors import Reason, Refusal
from gateway.flow.demand import Demand, Limits

IN_FLIGHT_RETRY_S = 1.0


class Bucket:
    """A token bucket that holds one minute's worth and refills evenly. Level may be read after `advance` only."""

    __slots__ = ("_at", "level", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self.level = float(per_minute)
        self._at = now

    def advance(self, now: float) -> None:
        """Refill up to `now`; a clock that steps back refills nothing."""
        if now > self._at:
            self.level = min(float(self.per_minute), self.level + (now - self._at) * self.per_minute / 60)
            self._at = now

    def wait_s(self, amount: float) -> float | None:
        """Seconds until `amount` is there: 0 now, None never."""
        if amount <= self.level:
            return 0.0
        return None if amount > self.per_minute else (amount - self.level) * 60 / self.per_minute

    def give_back(self, amount: float) -> None:
        """Put unused units back, never above the minute's worth. A negative amount takes more, into debt if need be."""
        self.level = min(float(self.per_minute), self.level + amount)


class Account:
    """What one tenant has used. `in_flight` counts requests that wait or run."""

    __slots__ = ("in_flight", "limits", "requests", "tokens")

    def __init__(self, limits: Limits, now: float) -> None:
        self.in_flight = 0
        self.limits = Limits()
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.adopt(limits, now)

    def adopt(self, limits: Limits, now: float) -> None:
        """Take new limits after a reload; a quota that did not change keeps its level."""
        if limits.requests_per_minute != self.limits.requests_per_minute:
            self.requests = _bucket(limits.requests_per_minute, now)
        if limits.tokens_per_minute != self.limits.tokens_per_minute:
            self.tokens = _bucket(limits.tokens_per_minute, now)
        self.limits = limits

    def check(self, tokens: int, now: float) -> Refusal | None:
        """Whether a request of `tokens` reserved tokens passes now; takes nothing."""
        most = self.limits.max_in_flight
        if most is not None and self.in_flight >= most:
            text = f"this tenant already has {self.in_flight} requests in flight, of {most} allowed"
            return Refusal(Reason.CONCURRENCY_LIMITED, text, fits=f"in flight: {most}", retry_after_s=IN_FLIGHT_RETRY_S)
        if self.requests is not None:
            self.requests.advance(now)
            wait = self.requests.wait_s(1)
            if wait:
                text = f"this tenant's quota is {self.requests.per_minute} requests a minute"
                return Refusal(Reason.RATE_LIMITED, text, retry_after_s=wait)
        if self.tokens is not None:
            self.tokens.advance(now)
            return _tokens_refusal(self.tokens, tokens)
        return None

    def take(self, tokens: int) -> None:
        """Burn what `check` allowed."""
        self.in_flight += 1
        if self.requests is not None:
            self.requests.level -= 1
        if self.tokens is not None:
            self.tokens.level -= tokens

    def undo(self, tokens: int) -> None:
        """The request was refused after all, or left before it was dispatched: as if it had never come."""
        self.in_flight -= 1
        if self.requests is not None:
            self.requests.give_back(1)
        if self.tokens is not None:
            self.tokens.give_back(tokens)

    def settle(self, reserved: int, used: int) -> None:
        """The request has ended: tokens reserved but not used come back."""
        self.in_flight -= 1
        if self.tokens is not None:
            self.tokens.give_back(reserved - used)


class Quotas:
    """The accounts of all tenants that have quotas; those without never touch it."""

    __slots__ = ("_accounts",)

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def check(self, demand: Demand, now: float) -> Refusal | None:
        """Whether the tenant's quotas let the request through now; takes nothing."""
        limits = demand.limits
        if limits is None:
            return None
        account = self._accounts.get(demand.tenant)
        if account is None:
            account = self._accounts[demand.tenant] = Account(limits, now)
        elif account.limits != limits:
            account.adopt(limits, now)
        return account.check(demand.shape.tokens, now)

    def take(self, demand: Demand) -> None:
        """Burn what `check` allowed."""
        if demand.limits is not None:
            self._accounts[demand.tenant].take(demand.shape.tokens)

    def undo(self, demand: Demand) -> None:
        """The request was never dispatched."""
        if demand.limits is not None:
            self._accounts[demand.tenant].undo(demand.shape.tokens)

    def settle(self, demand: Demand, used: int | None) -> None:
        """The request has ended; `used` tokens, None: the reservation stands."""
        if demand.limits is not None:
            reserved = demand.shape.tokens
            self._accounts[demand.tenant].settle(reserved, reserved if used is None else used)


def _bucket(per_minute: int | None, now: float) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, now)


def _tokens_refusal(bucket: Bucket, tokens: int) -> Refusal | None:
    wait = bucket.wait_s(tokens)
    if wait == 0:
        return None
    fits = f"reserved tokens: up to {bucket.per_minute}"
    if wait is None:
        text = f"the request reserves {tokens} tokens; this tenant's quota is {bucket.per_minute} a minute, so it never fits"
        return Refusal(Reason.TOKENS_LIMITED, text, fits=fits)
    text = f"the request reserves {tokens} tokens, more than is left of this tenant's {bucket.per_minute} a minute"
    return Refusal(Reason.TOKENS_LIMITED, text, fits=fits, retry_after_s=wait)
