"""Gauges are read when they are scraped: this module says who knows each of them. Nothing here is on the request path."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from gateway.fleet import Fleet
from gateway.flow.breaker import State
from gateway.flow.controller import Controller
from gateway.flow.snapshot import ClassSnapshot, Snapshot
from gateway.observe.metrics import Metrics

_FRESH_S = 0.2  # one snapshot serves all gauges of a scrape


class Facts(NamedTuple):
    """What the gauges need to ask of the gateway as a whole."""

    classes: Callable[[], tuple[str, ...]]
    draining: Callable[[], bool]
    degraded: Callable[[], bool]
    breakers_elsewhere: Callable[[str], int]
    policy_stale: Callable[[], bool]
    journal_dropped: Callable[[], int]
    version: str


class Gauges:
    """Registers every gauge with `metrics`."""

    def __init__(self, metrics: Metrics, controller: Controller, fleet: Fleet, facts: Facts) -> None:
        self._controller, self._fleet, self._facts = controller, fleet, facts
        self._taken: tuple[float, Snapshot] | None = None
        readers = {
            "plimsoll_queue_oldest_seconds": lambda: self._classes(lambda c: c.oldest_s),
            "plimsoll_queue_requests": lambda: self._classes(lambda c: c.requests),
            "plimsoll_queue_tokens": lambda: self._classes(lambda c: c.tokens),
            "plimsoll_in_flight_sequences": self._in_flight,
            "plimsoll_reserved_tokens": lambda: ((((b.name,), b.reserved_tokens)) for b in self._snapshot().backends),
            "plimsoll_envelope_limit": self._limits,
            "plimsoll_verdict": self._verdicts,
            "plimsoll_identity_info": self._identities,
            "plimsoll_breaker_state": self._breakers,
            "plimsoll_breaker_elsewhere": lambda: (
                ((name,), float(facts.breakers_elsewhere(name))) for name in self._fleet.berths
            ),
            "plimsoll_state_degraded": lambda: [((), float(facts.degraded()))],
            "plimsoll_policy_stale": lambda: [((), float(facts.policy_stale()))],
            "plimsoll_draining": lambda: [((), float(facts.draining()))],
            "plimsoll_journal_dropped_lines": lambda: [((), float(facts.journal_dropped()))],
            "plimsoll_build_info": lambda: [((facts.version,), 1.0)],
        }
        for name, read in readers.items():
            metrics.gauge(name, read)
        metrics.total("plimsoll_observed_total", lambda: (((what,), n) for what, n in self._snapshot().observed.items()))
        metrics.total("plimsoll_breaker_transitions_total", self._transitions)

    def _snapshot(self) -> Snapshot:
        now = time.monotonic()
        if self._taken is None or now - self._taken[0] > _FRESH_S:
            self._taken = (now, self._controller.snapshot(now))
        return self._taken[1]

    def _classes(self, value: Callable[[ClassSnapshot], float]) -> Iterator[tuple[tuple[str, ...], float]]:
        known = self._snapshot().classes
        return (((name,), value(known.get(name, ClassSnapshot()))) for name in self._facts.classes())

    def _in_flight(self) -> Iterator[tuple[tuple[str, ...], float]]:
        """Every combination of model, phase and class that may occur is there, so that zero is said and not missing."""
        for backend in self._snapshot().backends:
            berth = self._fleet.berths.get(backend.name)
            rows = {
                (m, p, c): 0 for m in (berth.views if berth else ()) for p in ("prefill", "decode") for c in self._facts.classes()
            }
            rows.update(backend.in_flight)
            for (model, phase, class_), sequences in rows.items():
                yield (model, backend.name, phase, class_), sequences

    def _limits(self) -> Iterator[tuple[tuple[str, ...], float]]:
        for backend in self._snapshot().backends:
            berth = self._fleet.berths.get(backend.name)
            for model in berth.views if berth and berth.hash else ():
                for axis, limit in backend.limits.items():
                    yield (model, backend.name, axis), limit

    def _verdicts(self) -> Iterator[tuple[tuple[str, ...], float]]:
        """The best verdict of a model's records on each backend; without a record, DEFER for the gate's reason."""
        order = ("PASS", "CONDITIONAL", "DEFER")
        for name, berth in self._fleet.berths.items():
            decision = berth.decision
            for model in berth.views:
                of_model = [j.verdict.fields for j in decision.judgements if j.model == model] if decision else []
                best = min(of_model, key=lambda fields: order.index(fields["final_decision"]), default=None)
                if best is not None:
                    yield (model, name, best["final_decision"], best["reason_class"]), 1.0
                else:
                    reason = "IDENTITY_CHANGED" if decision and decision.changes else "PROVENANCE_INCOMPLETE"
                    yield (model, name, "DEFER", reason), 1.0

    def _identities(self) -> Iterator[tuple[tuple[str, ...], float]]:
        for name, berth in self._fleet.berths.items():
            identity = berth.watch.observation.identity
            if identity is not None:
                yield (name, identity.hash or "unknown", identity.identity.vllm_version or "unknown"), 1.0

    def _transitions(self) -> Iterator[tuple[tuple[str, ...], float]]:
        for backend in self._snapshot().backends:
            for state, count in backend.breaker_transitions.items():
                yield (backend.name, state), count

    def _breakers(self) -> Iterator[tuple[tuple[str, ...], float]]:
        for backend in self._snapshot().backends:
            for state in State:
                yield (backend.name, state.value), float(backend.breaker == state.value)
