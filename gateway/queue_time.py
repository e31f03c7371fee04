"""How long a request may wait: from what was promised at arrival, minus what the record says execution takes. Pure.

`queue_s` defaults to `arrival_slo.e2e_ms_p95` minus the record's upper bound on the p95 of execution; 10 s where there is
no arrival promise. A stated `queue_s` beyond that difference breaks the promise by design, and is refused.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping

from gateway.errors import PlimsollError
from gateway.evidence.record import Record
from gateway.evidence.target import Target
from gateway.evidence.verdict import as_measured, envelope_slices
from gateway.flow.envelope import Box
from gateway.policy import Model, Policy

DEFAULT_QUEUE_S = 10.0
LEAST_QUEUE_S = 0.05


class QueueTimeError(PlimsollError):
    """The policy lets requests wait longer than its own promise at arrival allows."""


def queue_s(model: Model, stated: float | None, boxes: Iterable[Box]) -> float:
    """Seconds a request of `model` may wait, given the slices now in force; a stated time is capped by the promise.

    Never below `LEAST_QUEUE_S`: where the promise leaves no time at all, a request is refused almost at once, not never.
    """
    promise = model.target.arrival_slo.e2e_ms_p95
    if promise is None:
        return stated if stated is not None else DEFAULT_QUEUE_S
    bounds = [box.e2e_p95_upper_s for box in boxes if box.e2e_p95_upper_s is not None]
    allowed = max(LEAST_QUEUE_S, promise / 1000 - max(bounds, default=0.0))
    return allowed if stated is None else min(stated, allowed)


def check_queue_times(rules: Policy, records: Mapping[str, Record]) -> list[str]:
    """What the wait of each model comes to with the records at hand. Raises QueueTimeError where a promise cannot hold."""
    notes = []
    for name, model in rules.models.items():
        promise, stated = model.target.arrival_slo.e2e_ms_p95, rules.timeouts.queue_s
        bound = _largest_bound(model, records.values())
        if promise is None or bound is None:
            continue
        allowed = promise / 1000 - bound
        if allowed <= 0:
            raise QueueTimeError(
                f"models.{name}: arrival_slo.e2e_ms_p95 is {promise:g}, but execution alone is bounded by {bound * 1000:.0f} ms"
            )
        if stated is not None and stated > allowed:
            raise QueueTimeError(
                f"timeouts.queue_s is {stated:g}, but models.{name} promises {promise:g} ms from arrival and execution may take "
                f"{bound * 1000:.0f} ms: at most {allowed:.3f} s may be spent waiting"
            )
        notes.append(f"model {name}: requests wait at most {stated if stated is not None else allowed:.3f} s")
    return notes


def _largest_bound(model: Model, records: Iterable[Record]) -> float | None:
    """The largest upper bound, in seconds, of the slices that would open a gate if their server were there."""
    target, found = Target.from_policy(model.target), []
    for record in records:
        for each in envelope_slices(record, as_measured(record), target, dt.datetime.now(dt.UTC)):
            if each.e2e_p95_ms is not None:
                found.append(float(each.e2e_p95_ms) / 1000)
    return max(found, default=None)
