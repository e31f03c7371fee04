"""The retry budget: second tries as a share of first ones, so that retries cannot multiply an outage. Pure."""

from __future__ import annotations

from gateway import policy

_WINDOW_S = 10.0


class RetryBudget:
    """Tokens: each request adds `budget_ratio`, each second `budget_min_per_s`, a retry takes one; ten seconds' worth is kept.

    `now` is monotonic seconds.
    """

    __slots__ = ("_at", "_rate", "_ratio", "_requests", "_tokens")

    def __init__(self, config: policy.Retries, now: float) -> None:
        self._ratio = config.budget_ratio
        self._rate = config.budget_min_per_s
        self._tokens = self._rate
        self._requests = 0
        self._at = now

    def set_limits(self, config: policy.Retries) -> None:
        """A new policy."""
        self._ratio, self._rate = config.budget_ratio, config.budget_min_per_s

    def request(self) -> None:
        """A request was admitted; what it adds is reckoned when somebody asks."""
        self._requests += 1

    def take(self, now: float) -> bool:
        """Whether a second try may be made; it is then counted."""
        self._advance(now)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def _advance(self, now: float) -> None:
        """What accrued since the last look; more than a window's worth is not saved up."""
        earned = self._requests * self._ratio + max(0.0, now - self._at) * self._rate
        self._tokens = min(self._tokens + earned, self._ceiling())
        self._requests, self._at = 0, max(now, self._at)

    def _ceiling(self) -> float:
        return max(self._rate * _WINDOW_S, 1.0 if self._ratio or self._rate else 0.0, self._ratio * 100)
