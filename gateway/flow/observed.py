"""Admission that only watches (`enforcement: observe`): everything real is let through, everything is still decided.

Owns the difference between what is sent and what would have been sent. Promises: the decision is the enforcing one,
run against the virtual set of what it would have admitted; a virtual request leaves that set, or the virtual queue, when
the real one ends. Quotas, the caller's deadline, draining, breakers and backends that cannot be reached hold as ever; only
evidence, slices, concurrency and budgets are relaxed. Talks to: `topology`; the controller through `Decider`.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from gateway.errors import Reason, Refusal
from gateway.flow.bay import UNSEEN, Bay
from gateway.flow.breaker import Result
from gateway.flow.demand import Closed, Demand, SettledTwice
from gateway.flow.grant import Grant
from gateway.flow.pool import prefers
from gateway.flow.topology import Topology
from gateway.flow.waiting import Phase, Waiting

RELAXED = frozenset({
    Reason.OUT_OF_SLICE_INPUT, Reason.OUT_OF_SLICE_OUTPUT, Reason.OUT_OF_SLICE_SEQUENCES, Reason.OUT_OF_SLICE_FEATURE,
    Reason.NO_QUALIFIED_RECORD, Reason.CONFIGURATION_CHANGED, Reason.MIXED_IDENTITY, Reason.BACKEND_NOT_EXCLUSIVE,
    Reason.QUEUE_FULL, Reason.QUEUE_TIMEOUT,
})  # fmt: skip
"""What an observing gateway counts and lets through."""


class Decider(Protocol):
    """The enforcing decision."""

    def decide(self, demand: Demand, now: float) -> Grant | Waiting | Refusal: ...

    def leave(self, waiting: Waiting) -> None: ...

    def relaxes(self, refusal: Refusal) -> bool:
        """Whether it is one that observing only counts."""


class ObservedGrant(Grant):
    """A real request on its way, and the virtual decision beside it."""

    __slots__ = ("_decision", "_observer")

    def __init__(self, observer: Observer, demand: Demand, bay: Bay, decision: Grant | Waiting | Refusal, now: float) -> None:
        self.demand = demand
        self.shape = demand.shape
        self.tokens = demand.shape.tokens
        self.queue_s = 0.0
        self.hash = bay.hash
        self.record = decision.record if isinstance(decision, Grant) else ""
        self.settled = False
        self.lease = None  # nothing is asked of other replicas: nothing is held back
        self._bay = bay
        self._permit = decision.take_permit() if isinstance(decision, Grant) else bay.breaker.allow(now)
        self._decision = decision
        self._observer = observer

    @property
    def would(self) -> Refusal | None:
        """The refusal an enforcing gateway had said by now; None while it would have been admitted or would wait."""
        decision = self._decision.result if isinstance(self._decision, Waiting) else self._decision
        return decision if isinstance(decision, Refusal) else None

    def prefill_done(self) -> None:
        """The first token has come."""
        decision = self._decision.result if isinstance(self._decision, Waiting) else self._decision
        if isinstance(decision, Grant):
            decision.prefill_done()

    def settle(self, now: float, input_tokens: int | None = None, output_tokens: int | None = None) -> None:
        """The real response has ended. Raises SettledTwice on a second call."""
        if self.settled:
            raise SettledTwice(f"an observed grant on {self.backend} was settled twice")
        self.settled = True
        self.report(Result.IGNORED, now)
        self._observer.ended(self._decision, self.backend, now, input_tokens, output_tokens)

    def give_back(self, now: float) -> None:
        """Nothing was sent."""
        self.settle(now, 0, 0)


class Observer:
    """Stands before the decider. `running`: real requests by backend; `counts`: admitted, waited, or the reason of the no."""

    def __init__(self, decider: Decider, topology: Topology) -> None:
        self.running: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self._decider = decider
        self._topology = topology

    def request(self, demand: Demand, now: float) -> Grant | Refusal:
        """Decide, then send it anyway, unless the refusal is one of those that always hold."""
        decision = self._decider.decide(demand, now)
        if isinstance(decision, Refusal) and not self._decider.relaxes(decision):
            return decision
        bay = self._topology.bay(decision.backend) if isinstance(decision, Grant) else self._least_loaded(demand, now)
        if bay is None:
            if isinstance(decision, Waiting):
                self._decider.leave(decision)
            return Refusal(Reason.BACKEND_UNAVAILABLE, "no backend of the model can be reached", retry_after_s=1)
        if isinstance(decision, Grant):
            self.counts["admitted"] += 1
        elif isinstance(decision, Refusal):
            self.counts[decision.reason.value] += 1
        self.running[bay.name] += 1
        return ObservedGrant(self, demand, bay, decision, now)

    def ended(
        self, decision: Grant | Waiting | Refusal, backend: str, now: float, input_tokens: int | None, output_tokens: int | None
    ) -> None:
        """A real request has ended: its virtual twin leaves the virtual set, or the virtual queue."""
        self.running[backend] -= 1
        if isinstance(decision, Waiting):
            self.counts[decision.result.reason.value if isinstance(decision.result, Refusal) else "waited"] += 1
            if decision.phase is Phase.GRANTED:
                decision.phase = Phase.TAKEN
                decision = decision.result
            else:
                self._decider.leave(decision)
        if isinstance(decision, Grant):
            decision.settle(now, input_tokens, output_tokens)

    def _least_loaded(self, demand: Demand, now: float) -> Bay | None:
        """The reachable candidate with fewest real requests; affinity on ties."""
        best: Bay | None = None
        for bay in map(self._topology.bay, demand.backends):
            if not reachable(bay) or not bay.breaker.would_allow(now):
                continue
            more = 0 if best is None else self.running[bay.name] - self.running[best.name]
            if best is None or more < 0 or (more == 0 and prefers(demand.affinity, bay, best)):
                best = bay
        return best


def reachable(bay: Bay) -> bool:
    """Whether the backend answers at all, whatever its evidence says."""
    gate = bay.gate
    return gate is not UNSEEN and not (isinstance(gate, Closed) and gate.refusal.reason is Reason.BACKEND_UNAVAILABLE)
