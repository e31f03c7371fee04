"""Where the account of a request goes when it has ended: journal, metrics, traces, and the test of live latency."""

from __future__ import annotations

import logging
import time

from gateway.errors import Outcome
from gateway.fleet import Fleet
from gateway.flow.demand import Open
from gateway.flow.gate import GateDecision
from gateway.observe.exchange import Exchange
from gateway.observe.journal import Journal
from gateway.observe.metrics import Metrics
from gateway.observe.retest import LIVE_SLO, Ledger
from gateway.observe.tracing import NoTracer, Tracer

log = logging.getLogger("plimsoll")


class Accounts:
    """`write` for the data path, which counts its metrics itself; `finish` for everything else."""

    def __init__(self, journal: Journal, ledger: Ledger, metrics: Metrics, fleet: Fleet, tracer: Tracer) -> None:
        self._journal, self._ledger, self._metrics, self._fleet = journal, ledger, metrics, fleet
        self._trace = None if isinstance(tracer, NoTracer) else tracer.finish
        self._bounds: dict[str, tuple[GateDecision | None, dict[str, float]]] = {}

    def finish(self, exchange: Exchange) -> None:
        """Account for a request that did not take the data path."""
        self._metrics.finish(exchange)
        self._journal.write(exchange)

    def write(self, exchange: Exchange) -> None:
        """Account for a proxied request."""
        self._journal.write(exchange)
        if self._trace is not None:
            self._trace(exchange, exchange.traceparent)
        if exchange.dispatched_at is not None and exchange.outcome is Outcome.SERVED:
            self._live(exchange, exchange.dispatched_at)

    def _live(self, exchange: Exchange, dispatched_at: float) -> None:
        """Hold a served request against the p95 bound of the record that it was admitted under."""
        backend, record, ended, model = exchange.backend, exchange.record, exchange.ended_at, exchange.model
        if backend is None or record is None or ended is None or model is None:
            return
        bound = self._bound(backend, record)
        berth = self._fleet.berths.get(backend)
        if bound is None or berth is None or berth.hash is None:
            return
        if self._ledger.served(model, backend, berth.hash, ended - dispatched_at > bound, ended, time.time()):
            self._metrics.trigger(model, backend, LIVE_SLO)
            log.warning("backend %s: more requests of %s exceed the record's p95 bound than 5 %%: measure again", backend, model)

    def _bound(self, backend: str, record: str) -> float | None:
        """Seconds; the largest of the record's slices in force, None when it states none."""
        berth = self._fleet.berths.get(backend)
        decision = berth.decision if berth is not None else None
        known = self._bounds.get(backend)
        if known is None or known[0] is not decision:
            known = self._bounds[backend] = (decision, _bounds_of(decision))
        return known[1].get(record)


def _bounds_of(decision: GateDecision | None) -> dict[str, float]:
    """The largest p95 bound of each record's open slices, in seconds."""
    gate = decision.gate if decision is not None else None
    found: dict[str, float] = {}
    for box in gate.envelope.boxes if isinstance(gate, Open) else ():
        if box.e2e_p95_upper_s is not None:
            found[box.record] = max(box.e2e_p95_upper_s, found.get(box.record, 0.0))
    return found
