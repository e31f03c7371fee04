"""The retry budget: second tries as a share of first ones, so that retries cannot multiply an outage. Pure."""

from __future__ import annotations

from gateway import policy

_WINDOW_S = 10.0


class RetryBudget:
    """Tokens: each request adds `budget_ratio`, each second `budget_min_per_s`, a retry takes one; ten seconds' worth is kept.

    `now` is monotonic seconds.
    """

    __slots__ = ("_at", "_rate", "_ratio", "_tokens")

    def __init__(self, config: policy.Retries, now: float) -> None:
        self._ratio = config.budget_ratio
        self._rate = config.budget_min_per_s
        self._tokens = self._rate
        self._at = now

    def set_limits(self, config: policy.Retries) -> None:
        """A new policy."""
        self._ratio, self._rate = config.budget_ratio, config.budget_min_per_s

    def request(self, now: float) -> None:
        """A request was admitted."""
        self._advance(now)
        self._tokens += self._ratio

    def take(self, now: float) -> bool:
        """Whether a second try may be made; it is then counted."""
        self._advance(now)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def _advance(self, now: float) -> None:
        """What accrued since the last look; more than a window's worth is not saved up."""
        if now > self._at:
            self._tokens = min(self._tokens + (now - self._at) * self._rate, self._ceiling())
            self._at = now

    def _ceiling(self) -> float:
        return max(self._rate * _WINDOW_S, 1.0 if self._ratio or self._rate else 0.0, self._ratio * 100)
