"""Does the backend still hold what its record says? A sequential test on live traffic.

A record promises that at most 5 % of the requests inside its slice take longer than the p95 bound. Each served request is
one Bernoulli trial (over the bound or not). The test is an e-process: the likelihood ratios of several alternatives p1
against p0 = 0.05, averaged. Under any p <= p0 the average is a supermartingale that starts at 1, so by Ville's inequality it
ever reaches 1 / alpha with probability at most alpha (Ville 1939; Wald 1945 for the ratio). It may thus be looked at after
every request. Because a long good past would hide a later change, the test starts anew after `WINDOW_REQUESTS` requests or
`WINDOW_S` seconds: the stated false-alarm rate is alpha for each such window.

Owns the counts of one backend's window. An alarm is a trigger for measuring again, never by itself a verdict.
"""

from __future__ import annotations

import math

P0 = 0.05
ALPHA = 0.001
ALTERNATIVES = (0.075, 0.1, 0.15, 0.25, 0.5)
WINDOW_REQUESTS = 20_000
WINDOW_S = 86_400.0


def evidence(over: int, total: int) -> float:
    """The e-value of `over` slow requests among `total`: how strongly they speak against p <= 5 %."""
    logs = [over * math.log(p / P0) + (total - over) * math.log((1 - p) / (1 - P0)) for p in ALTERNATIVES]
    top = max(logs)
    if top > 700:
        return math.inf
    return math.exp(top) * sum(math.exp(value - top) for value in logs) / len(logs)


class LiveTest:
    """One window of one (model, backend, configuration)."""

    __slots__ = ("_fired", "_since", "over", "total")

    def __init__(self, now: float) -> None:
        self._since = now
        self._fired = False
        self.total = 0
        self.over = 0

    def observe(self, over_bound: bool, now: float) -> bool:
        """Count one served request (`now` monotonic seconds); True at the request that raises the alarm, once a window."""
        if self.total >= WINDOW_REQUESTS or now - self._since >= WINDOW_S:
            self._since, self._fired, self.total, self.over = now, False, 0, 0
        self.total += 1
        if not over_bound:
            return False  # the evidence only falls
        self.over += 1
        if self._fired or evidence(self.over, self.total) < 1 / ALPHA:
            return False
        self._fired = True
        return True
