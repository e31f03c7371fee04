"""Admission that only watches (`enforcement: observe`): everything real is let through, everything is still decided.

Owns the difference between what is sent and what would have been sent. Promises: the decision is the enforcing
controller's own, run against the virtual set of what it would have admitted; a virtual request leaves that set when the
real one ends. Quotas, the caller's deadline, draining, breakers and backends that cannot be reached hold as ever; only
evidence, slices, concurrency and budgets are relaxed. Talks to: `controller`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from gateway.errors import Reason, Refusal
from gateway.flow.breaker import Result
from gateway.flow.controller import Controller
from gateway.flow.demand import Demand, SettledTwice
from gateway.flow.grant import Grant
from gateway.flow.pool import prefers
from gateway.flow.queue import Phase, Waiting

RELAXED = frozenset({
    Reason.OUT_OF_SLICE_INPUT, Reason.OUT_OF_SLICE_OUTPUT, Reason.OUT_OF_SLICE_SEQUENCES, Reason.OUT_OF_SLICE_FEATURE,
    Reason.NO_QUALIFIED_RECORD, Reason.CONFIGURATION_CHANGED, Reason.MIXED_IDENTITY, Reason.BACKEND_NOT_EXCLUSIVE,
    Reason.QUEUE_FULL, Reason.QUEUE_TIMEOUT,
})  # fmt: skip
"""What an observing gateway counts and lets through."""


class ObservedGrant:
    """A real request on its way, and the virtual decision beside it. The same face as `Grant`.

    `would`: the refusal an enforcing gateway had said by now; None while it would have been admitted or would wait.
    """

    __slots__ = ("_decision", "_observer", "backend", "demand", "queue_s", "settled", "shape")

    def __init__(self, observer: Observer, demand: Demand, backend: str, decision: Grant | Waiting | Refusal) -> None:
        self._observer = observer
        self._decision = decision
        self.backend = backend
        self.demand = demand
        self.shape = demand.shape
        self.queue_s = 0.0
        self.settled = False

    @property
    def _grant(self) -> Grant | None:
        decision = self._decision
        if isinstance(decision, Waiting):
            decision = decision.result
        return decision if isinstance(decision, Grant) else None

    @property
    def record(self) -> str:
        """The record that would have held it; "" when none would."""
        grant = self._grant
        return grant.record if grant is not None else ""

    @property
    def hash(self) -> str:
        """The configuration hash of the backend it was sent to; "" while that is unknown."""
        return self._observer.controller.hash_of(self.backend)

    @property
    def would(self) -> Refusal | None:
        decision = self._decision.result if isinstance(self._decision, Waiting) else self._decision
        return decision if isinstance(decision, Refusal) else None

    def prefill_done(self) -> None:
        grant = self._grant
        if grant is not None:
            grant.prefill_done()

    def composition(self) -> dict[str, int]:
        grant = self._grant
        return grant.composition() if grant is not None else {}

    def report(self, result: Result, now: float) -> None:
        """The backend really answered, or failed: the breaker is real."""
        grant = self._grant
        if grant is not None and grant.backend == self.backend and not grant.settled:
            grant.report(result, now)
        else:
            self._observer.controller.report(self.backend, result, now)

    def settle(self, now: float, input_tokens: int | None = None, output_tokens: int | None = None) -> None:
        """The real response has ended. Raises SettledTwice on a second call."""
        if self.settled:
            raise SettledTwice(f"an observed grant on {self.backend} was settled twice")
        self.settled = True
        self._observer.ended(self._decision, self.backend, now, input_tokens, output_tokens)


class Observer:
    """Stands where the controller stands. `running`: real requests by backend."""

    def __init__(self, controller: Controller, reachable: Callable[[str], bool]) -> None:
        """`reachable`: whether the backend answers at all, whatever its evidence says."""
        self.controller = controller
        self.running: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()  # admitted, waited, or the reason it would have been refused for
        self._reachable = reachable

    def request(self, demand: Demand, now: float) -> ObservedGrant | Refusal:
        """Decide, then send it anyway, unless the refusal is one of those that always hold."""
        decision = self.controller.request(demand, now)
        if isinstance(decision, Refusal) and decision.reason not in RELAXED:
            return decision
        backend = decision.backend if isinstance(decision, Grant) else self._least_loaded(demand, now)
        if backend is None:
            if isinstance(decision, Waiting):
                self.controller.leave(decision)
            return decision if isinstance(decision, Refusal) else _unreachable()
        if isinstance(decision, Grant):
            self.counts["admitted"] += 1
        elif isinstance(decision, Refusal):
            self.counts[decision.reason.value] += 1
        self.running[backend] += 1
        return ObservedGrant(self, demand, backend, decision)

    def ended(
        self, decision: Grant | Waiting | Refusal, backend: str, now: float, input_tokens: int | None, output_tokens: int | None
    ) -> None:
        """A real request has ended: its virtual twin leaves the virtual set, or the virtual queue."""
        self.running[backend] -= 1
        if isinstance(decision, Waiting):
            self.counts["waited" if not isinstance(decision.result, Refusal) else decision.result.reason.value] += 1
            if decision.phase is Phase.GRANTED:
                decision.phase = Phase.TAKEN
                decision = decision.result
            elif decision.phase is Phase.WAITING:
                self.controller.leave(decision)
        if isinstance(decision, Grant):
            decision.settle(now, input_tokens, output_tokens)

    def _least_loaded(self, demand: Demand, now: float) -> str | None:
        best: str | None = None
        for name in demand.backends:
            if not self._reachable(name) or not self.controller.breaker(name).would_allow(now):
                continue
            if best is None or self.running[name] < self.running[best] or self._tie(demand, name, best):
                best = name
        return best

    def _tie(self, demand: Demand, name: str, other: str) -> bool:
        if self.running[name] != self.running[other]:
            return False
        return prefers(demand.affinity, self.controller.bay(name), self.controller.bay(other))


def _unreachable() -> Refusal:
    return Refusal(Reason.BACKEND_UNAVAILABLE, "no backend of the model can be reached", retry_after_s=1)
