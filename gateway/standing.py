"""Where a record stands with each backend, in the words of operators: the same for a file, a push and the admin API.

Owns the rows of verdicts. Promises: a record that opens nothing names the one of the eight fields that decided, with the details;
one that was measured on none of the backends' configurations is held against all of them, and names the fields that differ.
Talks to: the fleet for what each backend is and for the judgements its gates rest on, `flow.gate` for the others.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Iterable, Iterator
from typing import Any

from gateway.evidence.record import Record
from gateway.evidence.states import Decision, Measurement, Provenance, Service, SliceState, Verdict
from gateway.fleet import Fleet
from gateway.flow.gate import Judgement, judged

log = logging.getLogger("plimsoll.records")

_GOOD = {
    "provenance_state": Provenance.COMPLETE,
    "measurement_state": Measurement.COMPLETE,
    "slice_state": SliceState.INSIDE,
    "service_state": Service.MET,
}


def verdict_row(judgement: Judgement) -> dict[str, Any]:
    """One judgement as JSON: the decision, the field that decided it (None: none failed), all eight, and the details."""
    verdict = judgement.verdict
    return {
        "model": judgement.model,
        "record": judgement.record,
        "decision": verdict.fields["final_decision"],
        "reason": verdict.fields["reason_class"],
        "failed": "signature" if judgement.problem else _failed(verdict),
        "slices_open": judgement.opens,
        "fields": verdict.fields,
        "details": [*([judgement.problem] if judgement.problem else []), *verdict.details],
    }


def of_record(fleet: Fleet, name: str, record: Record, now: dt.datetime) -> list[dict[str, Any]]:
    """The record on each backend that runs what it was measured on; where there is none, on every backend."""
    rows = [
        {"backend": backend, **verdict_row(judgement)}
        for backend, berth in fleet.berths.items()
        for judgement in (berth.decision.judgements if berth.decision is not None else ())
        if judgement.record == name
    ]
    return rows or [{"backend": backend, **verdict_row(each)} for backend, each in _on_all(fleet, name, record, now)]


def _on_all(fleet: Fleet, name: str, record: Record, now: dt.datetime) -> Iterator[tuple[str, Judgement]]:
    for backend, berth in fleet.berths.items():
        for model, view in berth.views.items():
            yield backend, judged(model, view, name, record, berth.watch.observation.identity, fleet.store, now)[0]


def tell(fleet: Fleet, names: Iterable[str], now: dt.datetime) -> None:
    """Log where records stand that have just come."""
    for name in names:
        for row in of_record(fleet, name, fleet.store.records[name], now):
            where = f"record {name[:16]} on backend {row['backend']} for {row['model']}: {row['decision']}"
            if row["slices_open"]:
                log.info("%s, %d slices open", where, row["slices_open"])
            else:
                why = f"{row['failed']}: {'; '.join(row['details'])}" if row["failed"] else "the policy does not admit it"
                log.warning("%s, no slice opens (%s) by %s", where, row["reason"], why)


def _failed(verdict: Verdict) -> str | None:
    if verdict.final_decision is Decision.PASS:
        return None
    bad = (name for name, good in _GOOD.items() if getattr(verdict, name) is not good)
    boundary = "security_boundary_state" if verdict.security_boundary_state == "MISSING" else None
    return next(bad, boundary)
