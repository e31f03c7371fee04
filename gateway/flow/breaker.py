"""The circuit breaker of one backend: one table, time as an argument, generations against late news.

Owns: closed, open, half-open and what moves between them. Promises: a result of an earlier generation changes nothing;
a probe that is never dispatched, cancelled or inconclusive gives its place back; what counts as a failure is the
caller's judgement (`Result`). Talks to: the policy's `breaker` section.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from gateway import policy
from gateway.errors import PlimsollError

_BUCKETS = 10


class State(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Event(StrEnum):
    TRIPPED = "tripped"  # the failures crossed a threshold
    COOLED = "cooled"  # the cool-down is over
    PROBED = "probed"  # enough probes succeeded
    FAILED = "failed"  # a probe failed
    RESET = "reset"  # an operator said so
    HINTED = "hinted"  # another replica's breaker has opened: we ask for ourselves


class Result(StrEnum):
    """What a request says about its backend. Ignored: 4xx, cancels, a busy engine, deadlines of the caller's own."""

    SUCCESS = "success"
    FAILURE = "failure"
    IGNORED = "ignored"


TRANSITIONS: Mapping[State, Mapping[Event, State]] = {
    State.CLOSED: {Event.TRIPPED: State.OPEN, Event.HINTED: State.HALF_OPEN, Event.RESET: State.CLOSED},
    State.OPEN: {Event.COOLED: State.HALF_OPEN, Event.RESET: State.CLOSED},
    State.HALF_OPEN: {Event.PROBED: State.CLOSED, Event.FAILED: State.OPEN, Event.RESET: State.CLOSED},
}

Permit = int
"""The generation a request was let through in."""


class TransitionError(PlimsollError):
    """An event that the state does not know; nothing has changed."""


class Breaker:
    """One backend's breaker. `now` is monotonic seconds everywhere."""

    __slots__ = ("_at", "_consecutive", "_failures", "_probes_out", "_probes_won", "_successes", "config", "generation",
                 "opened_at", "state", "transitions")  # fmt: skip

    def __init__(self, config: policy.Breaker) -> None:
        self.config = config
        self.state = State.CLOSED
        self.generation = 0
        self.opened_at = 0.0
        self.transitions: dict[State, int] = dict.fromkeys(State, 0)
        self._at = 0
        self._forget()

    def _forget(self) -> None:
        self._successes = [0] * _BUCKETS
        self._failures = [0] * _BUCKETS
        self._consecutive = self._probes_out = self._probes_won = 0

    def apply(self, event: Event, now: float) -> State:
        """Take one transition of the table. Raises TransitionError, changing nothing, when it is not in it."""
        after = TRANSITIONS[self.state].get(event)
        if after is None:
            raise TransitionError(f"{event} means nothing to a breaker that is {self.state}")
        self.state = after
        self.generation += 1
        self.transitions[after] += 1
        self._forget()
        if after is State.OPEN:
            self.opened_at = now
        return after

    def allow(self, now: float) -> Permit | None:
        """A permit for one request, or None. In half-open a permit is one of the few probes."""
        if not self.would_allow(now):
            return None
        if self.state is State.OPEN:
            self.apply(Event.COOLED, now)
        if self.state is State.HALF_OPEN:
            self._probes_out += 1
        return self.generation

    def would_allow(self, now: float) -> bool:
        """What `allow` would say, changing nothing."""
        if self.state is State.CLOSED:
            return True
        if self.state is State.OPEN:
            return now >= self.opened_at + self.config.cooldown_s
        return self._probes_out + self._probes_won < self.config.probes

    def retry_after_s(self, now: float) -> float | None:
        """Seconds until half-open; None while requests may still be let through."""
        if self.state is not State.OPEN or self.would_allow(now):
            return None
        return self.opened_at + self.config.cooldown_s - now

    def record(self, permit: Permit, result: Result, now: float) -> bool:
        """What became of a permit. True when the state changed. Late results (another generation) change nothing."""
        if permit != self.generation:
            return False
        if self.state is State.HALF_OPEN:
            return self._probed(result, now)
        if result is Result.IGNORED:
            return False
        bucket = self._bucket(now)
        if result is Result.SUCCESS:
            self._successes[bucket] += 1
            self._consecutive = 0
            return False
        self._failures[bucket] += 1
        self._consecutive += 1
        if not self._tripped():
            return False
        self.apply(Event.TRIPPED, now)
        return True

    def _probed(self, result: Result, now: float) -> bool:
        self._probes_out -= 1
        if result is Result.IGNORED:
            return False
        if result is Result.FAILURE:
            self.apply(Event.FAILED, now)
            return True
        self._probes_won += 1
        if self._probes_won < self.config.probes:
            return False
        self.apply(Event.PROBED, now)
        return True

    def _tripped(self) -> bool:
        failed, total = sum(self._failures), sum(self._failures) + sum(self._successes)
        if self._consecutive >= self.config.consecutive_failures:
            return True
        return total >= self.config.min_requests and failed >= self.config.failure_rate * total

    def _bucket(self, now: float) -> int:
        """Index of the window's current tenth; tenths that have passed are emptied. An older `now` uses the newest."""
        tick = max(self._at, int(now * _BUCKETS / self.config.window_s))
        for stale in range(max(self._at, tick - _BUCKETS) + 1, tick + 1):
            self._successes[stale % _BUCKETS] = self._failures[stale % _BUCKETS] = 0
        self._at = tick
        return tick % _BUCKETS
