"""The verdict: may this record be relied on for this backend, this target, now?

Owns: the order of the rules, the eight fields, and the slices that open the gate.
Promises: pure functions; nothing is extrapolated, and what is unknown DEFERs.
Talks to: `record` and `identity` for facts, `target` for what the product asks, `judge` for one slice, `states` for the words.

The rules, in order. The first failure decides the reason.

1. Provenance. A record or a backend with an identity field missing, without a configuration document, or a backend that is
   only probed: INCOMPLETE. The backend's four fields differ from the record's, a declaration contradicts what stock endpoints
   show, or its KV cache is below 98 % of the record's: MISMATCH, with the fields and triggers that changed.
2. Measurement. No level that can be judged, void or not steady; a statistic that the target limits is missing (with a
   confidence asked, its bound is missing or holds at a lower confidence): INCOMPLETE. Warm-up unknown: WARMUP_UNKNOWN.
   After `valid_until`: EXPIRED.
3. Slice. The target shape lies in no measured slice at its concurrency: OUTSIDE.
4. Service. A latency over its limit at any level up to the target's concurrency (at the upper bound when a confidence is
   asked), throughput under its minimum at the highest of these (at the lower bound), or more errors or timeouts than
   allowed at any of them: MISSED.
5. Boundary. Judged whatever the rest says: RECORDED or MISSING.

Rules 3 and 4 are NOT_EVALUATED after a failure before them. All good but the boundary note, or an identity that is only
declared: CONDITIONAL. Anything else that fails: DEFER.
"""

import datetime as dt
from collections.abc import Iterable
from dataclasses import replace
from decimal import Decimal
from enum import StrEnum

from gateway.evidence.identity import IDENTITY_FIELDS, FieldChange, Identity, ObservedIdentity, diff, triggers_of
from gateway.evidence.judge import Finding, Judged, judge, upper_ms
from gateway.evidence.record import Record, Slice, Trigger, instant, record_id
from gateway.evidence.states import (
    Boundary,
    Decision,
    Measurement,
    Provenance,
    QualifiedSlice,
    ReasonClass,
    Retest,
    Service,
    SliceState,
    Verdict,
)
from gateway.evidence.target import Target

__all__ = [
    "Boundary",
    "Decision",
    "Measurement",
    "Provenance",
    "QualifiedSlice",
    "ReasonClass",
    "Retest",
    "Service",
    "SliceState",
    "Target",
    "Verdict",
    "envelope_slices",
    "evaluate",
]

KV_FRACTION = Decimal("0.98")


def evaluate(record: Record, observed: ObservedIdentity | None, target: Target, now: dt.datetime) -> Verdict:
    """The verdict on `record` for a backend seen as `observed` (None: not reached), at wall time `now` (aware).

    With `target.slice` the best slice that contains it is judged; without, the best slice at its own corners.
    """
    provenance, changes, notes = _provenance(record, observed)
    judged = [judge(record, each, target) for each in record.slices]
    inside = [each for each in judged if each.inside]
    best = min(inside or judged, key=lambda each: each.rank)
    measurement, measured = _measurement(record, best, now)
    details = (*notes, *measured)
    slice_state, service = SliceState.NOT_EVALUATED, Service.NOT_EVALUATED
    if provenance is Provenance.COMPLETE and measurement is Measurement.COMPLETE:
        slice_state = SliceState.INSIDE if inside else SliceState.OUTSIDE
        if inside:
            service = Service.MISSED if best.missed else Service.MET
            details = (*details, *(finding.text for finding in best.missed))
        else:
            details = (*details, _outside(record, target))
    is_declared = _declared(record, observed)
    states = (provenance, measurement, slice_state, service)
    boundary = Boundary.RECORDED if _has_note(record) else Boundary.MISSING
    decision, reason = _decide(*states, boundary=boundary, declared=is_declared)
    retest = Retest.REQUIRED if not _RETEST.isdisjoint(states) else Retest.NOT_REQUIRED
    if is_declared and provenance is Provenance.COMPLETE:
        details = (*details, "the identity is declared by the operator, not attested by the server")
    if boundary is Boundary.MISSING:
        details = (*details, "the record does not say what the API key covers and which outer boundary is expected")
    triggers = _triggers(changes, states)
    return Verdict(*states, boundary, retest, decision, reason, details, changes, triggers)


def as_measured(record: Record) -> ObservedIdentity:
    """A backend that is exactly what the record was measured on, for questions about the record alone."""
    known = record.identity
    return ObservedIdentity(
        source="declared" if record.protocol.identity_source == "declared" else "attested",
        identity=Identity(known.model_revision, known.vllm_version, known.server_configuration_hash, known.hardware_profile),
        document=record.configuration,
        kv_cache_tokens=record.protocol.kv_cache_tokens,
    )


def envelope_slices(
    record: Record, observed: ObservedIdentity | None, target: Target, now: dt.datetime
) -> tuple[QualifiedSlice, ...]:
    """The slices of `record` that open the gate of this backend: PASS, or CONDITIONAL where the target admits that.

    Each is judged at its own corners; one that was helped by a warm prefix cache counts only where the target names its regime.
    """
    own = replace(target, slice=None)
    identity = record_id(record)
    found = []
    for each in record.slices:
        verdict = evaluate(record.model_copy(update={"slices": (each,)}), observed, own, now)
        if verdict.final_decision is Decision.PASS or (
            verdict.final_decision is Decision.CONDITIONAL and target.admit_conditional
        ):
            found.append(_qualified(identity, each, target, verdict.final_decision))
    return tuple(found)


def _qualified(identity: str, each: Slice, target: Target, decision: Decision) -> QualifiedSlice:
    return QualifiedSlice(
        record=identity,
        task=each.task,
        features=frozenset(each.features),
        prefix_reuse=each.prefix_reuse,
        input_min=each.input_tokens.min,
        input_max=each.input_tokens.max,
        output_min=each.output_tokens.min,
        output_max=each.output_tokens.max,
        concurrency=each.levels[-1].concurrency,
        e2e_p95_ms=upper_ms(each, "e2e_ms", target.confidence is not None),
        ttft_p95_ms=upper_ms(each, "ttft_ms", target.confidence is not None),
        decision=decision,
    )


def _provenance(record: Record, observed: ObservedIdentity | None) -> tuple[Provenance, tuple[FieldChange, ...], tuple[str, ...]]:
    """Rule 1: (state, the fields that changed, sentences)."""
    unknown = [f"record: {name} is not known" for name in IDENTITY_FIELDS if getattr(record.identity, name) is None]
    if not record.configuration:
        unknown.append("record: it holds no configuration document")
    if observed is None:
        unknown.append("backend: its identity is not known")
    else:
        unknown += _unknown_of_backend(record, observed)
    if observed is not None and (changes := _changes(record, observed)):
        return Provenance.MISMATCH, changes, tuple(f"changed: {change}" for change in changes)
    if unknown:
        return Provenance.INCOMPLETE, (), tuple(unknown)
    return Provenance.COMPLETE, (), ()


def _unknown_of_backend(record: Record, observed: ObservedIdentity) -> list[str]:
    unknown = [f"backend: {name} is not known" for name in observed.identity.missing]
    if observed.source == "probed":
        unknown.append(f"backend: stock endpoints do not show {', '.join(observed.unknown)}")
    if record.protocol.kv_cache_tokens is not None and observed.kv_cache_tokens is None:
        unknown.append("backend: the size of its KV cache is not known")
    return unknown


def _changes(record: Record, observed: ObservedIdentity) -> tuple[FieldChange, ...]:
    """What differs between the record's server and the backend: configuration fields where both documents are whole."""
    pairs = [(name, getattr(record.identity, name), getattr(observed.identity, name)) for name in IDENTITY_FIELDS]
    top = tuple(FieldChange(*pair) for pair in pairs if None not in pair and pair[1] != pair[2])
    fields: tuple[FieldChange, ...] = ()
    if top and record.configuration and observed.document and observed.source != "probed":
        fields = diff(record.configuration, observed.document)
    measured, seen = record.protocol.kv_cache_tokens, observed.kv_cache_tokens
    shrunk = measured is not None and seen is not None and seen < measured * KV_FRACTION
    cache = (FieldChange("kv_cache_size_tokens", measured, seen),) if shrunk else ()
    return (*top, *fields, *observed.contradictions, *cache)


def _measurement(record: Record, best: Judged, now: dt.datetime) -> tuple[Measurement, tuple[str, ...]]:
    """Rule 2, on the slice that will be judged."""
    lacking = [*best.lacking]
    if record.protocol.repeats < 1:
        lacking.append(Finding("repeats", "the measurement has no repeat"))
    if lacking:
        return Measurement.INCOMPLETE, tuple(finding.text for finding in lacking)
    if record.protocol.warmup_state == "unknown":
        return Measurement.WARMUP_UNKNOWN, ("it is not known whether the server was warm",)
    if record.valid_until is not None and now >= instant(record.valid_until):
        return Measurement.EXPIRED, (f"valid until {record.valid_until}",)
    return Measurement.COMPLETE, ()


def _decide(
    provenance: Provenance,
    measurement: Measurement,
    slice_state: SliceState,
    service: Service,
    *,
    boundary: Boundary,
    declared: bool,
) -> tuple[Decision, ReasonClass]:
    for state in (provenance, measurement, slice_state, service):
        reason = _DEFERS.get((type(state), state))
        if reason is not None:
            return Decision.DEFER, reason
    if declared:
        return Decision.CONDITIONAL, ReasonClass.IDENTITY_DECLARED
    if boundary is Boundary.MISSING:
        return Decision.CONDITIONAL, ReasonClass.BOUNDARY_NOTE_MISSING
    return Decision.PASS, ReasonClass.QUALIFIED


def _declared(record: Record, observed: ObservedIdentity | None) -> bool:
    return record.protocol.identity_source == "declared" or (observed is not None and observed.source == "declared")


def _has_note(record: Record) -> bool:
    note = record.security_boundary_note
    return note is not None and bool(note.api_key_covers.strip()) and bool(note.external_boundary.strip())


def _outside(record: Record, target: Target) -> str:
    wanted = target.slice
    boxes = "; ".join(
        f"{s.task} {s.input_tokens.min}-{s.input_tokens.max} in, {s.output_tokens.min}-{s.output_tokens.max} out, "
        f"concurrency up to {s.levels[-1].concurrency}, prefix reuse {s.prefix_reuse}"
        for s in record.slices[:8]
    )
    if wanted is None:
        return f"every slice was helped by a prefix reuse that the target does not name; measured: {boxes}"
    asked = " with ".join((target.task, *sorted(target.features)))
    return f"wanted: {asked}, {wanted.input} in, {wanted.output} out, concurrency {wanted.concurrency}; measured: {boxes}"


def _triggers(changes: tuple[FieldChange, ...], states: Iterable[StrEnum]) -> tuple[Trigger, ...]:
    pulled = set(triggers_of(changes))
    if SliceState.OUTSIDE in states:
        pulled.add("target_slice")
    return tuple(sorted(pulled))


# Keyed by type too: members of two StrEnums with the same text (INCOMPLETE) are equal to each other.
_DEFERS: dict[tuple[type[StrEnum], StrEnum], ReasonClass] = {
    (type(state), state): reason
    for state, reason in (
        (Provenance.INCOMPLETE, ReasonClass.PROVENANCE_INCOMPLETE),
        (Provenance.MISMATCH, ReasonClass.IDENTITY_CHANGED),
        (Measurement.INCOMPLETE, ReasonClass.MEASUREMENT_INCOMPLETE),
        (Measurement.WARMUP_UNKNOWN, ReasonClass.WARMUP_UNKNOWN),
        (Measurement.EXPIRED, ReasonClass.EVIDENCE_EXPIRED),
        (SliceState.OUTSIDE, ReasonClass.OUT_OF_SLICE),
        (Service.MISSED, ReasonClass.SLO_MISSED),
    )
}
_RETEST = frozenset({Provenance.MISMATCH, Measurement.EXPIRED, Measurement.WARMUP_UNKNOWN, SliceState.OUTSIDE, Service.MISSED})
