"""The verdict's rules, each by itself and in their order; a property over generated records."""

import datetime as dt
from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gateway.evidence import record as records
from gateway.evidence.checklist import exit_checklist
from gateway.evidence.identity import FieldChange, Identity
from gateway.evidence.target import Limits, Target, TargetSlice
from gateway.evidence.verdict import Decision, envelope_slices, evaluate
from tests.evidence.builders import CONFIG_A, edited, observed_for, raw_record

NOW = dt.datetime(2026, 2, 1, tzinfo=dt.UTC)
LIMITS = Limits(e2e_ms_p95=Decimal(1800), output_tokens_per_s_min=Decimal(120))
TARGET = Target(slice=TargetSlice(2048, 512, 8), limits=LIMITS)
PASS = {
    "provenance_state": "COMPLETE",
    "measurement_state": "COMPLETE",
    "slice_state": "INSIDE",
    "service_state": "MET",
    "security_boundary_state": "RECORDED",
    "retest_state": "NOT_REQUIRED",
    "final_decision": "PASS",
    "reason_class": "QUALIFIED",
}
NOT_JUDGED = {"slice_state": "NOT_EVALUATED", "service_state": "NOT_EVALUATED"}


def deferred(reason, *, retest):
    return {"final_decision": "DEFER", "reason_class": reason, **({"retest_state": "REQUIRED"} if retest else {})}


@st.composite
def cases(draw):
    """A record that qualifies, with the backend and target it qualifies for."""
    tokens_in, tokens_out = draw(st.integers(1, 100_000)), draw(st.integers(1, 50_000))
    concurrency = draw(st.integers(2, 512))
    raw = raw_record(tokens_in=tokens_in, tokens_out=tokens_out, concurrency=concurrency)
    p50 = draw(st.integers(1, 10_000))
    for level in raw["slices"][0]["levels"]:
        p95 = p50 + draw(st.integers(0, 5_000))
        level["e2e_ms"] = {"p50": str(p50), "p95": str(p95), "p95_upper": str(p95 + draw(st.integers(0, 500)))}
        level["output_tokens_per_s_lower"] = str(draw(st.integers(1, 500)))
        level["output_tokens_per_s"] = str(int(level["output_tokens_per_s_lower"]) + draw(st.integers(0, 9)))
    confident = draw(st.booleans())
    levels = raw["slices"][0]["levels"]
    worst = max(int(level["e2e_ms"]["p95_upper" if confident else "p95"]) for level in levels)
    rate = int(levels[-1]["output_tokens_per_s_lower" if confident else "output_tokens_per_s"])
    wanted = TargetSlice(
        draw(st.integers(1, tokens_in)), draw(st.integers(1, tokens_out)), draw(st.integers(concurrency // 2 + 1, concurrency))
    )
    limits = Limits(
        e2e_ms_p95=Decimal(worst + draw(st.integers(0, 100))), output_tokens_per_s_min=Decimal(rate - draw(st.integers(0, rate)))
    )
    target = Target(slice=wanted, limits=limits, confidence=Decimal("0.95") if confident else None)
    return raw, observed_for(CONFIG_A), target


def _break_revision(raw, seen, target):
    return edited(raw, "identity.model_revision", None), seen, target


def _break_version(raw, seen, target):
    return edited(raw, "identity.vllm_version", None), seen, target


def _break_hardware(raw, seen, target):
    return edited(raw, "identity.hardware_profile", None), seen, target


def _break_backend_hardware(raw, seen, target):
    return raw, replace(seen, identity=replace(seen.identity, hardware_profile=None)), target


def _break_hash(raw, seen, target):
    return raw, replace(seen, identity=replace(seen.identity, server_configuration_hash="sha256:" + "0" * 64)), target


def _break_kv(raw, seen, target):
    return raw, replace(seen, kv_cache_tokens=int(65536 * 0.979)), target


def _break_kv_known(raw, seen, target):
    return raw, replace(seen, kv_cache_tokens=None), target


def _break_probed(raw, seen, target):
    return raw, replace(seen, source="probed"), target


def _break_warmup(raw, seen, target):
    return edited(raw, "protocol.warmup_state", "unknown"), seen, target


def _break_validity(raw, seen, target):
    return edited(raw, "valid_until", "2026-02-01T00:00:00Z"), seen, target


def _break_level(raw, seen, target):
    return edited(raw, "slices.0.levels.-1.void", True), seen, target


def _break_steady(raw, seen, target):
    return edited(raw, "slices.0.levels.-1.oversaturated", True), seen, target


def _break_completed(raw, seen, target):
    return edited(raw, "slices.0.levels.-1.requests", 0), seen, target


def _break_statistic(raw, seen, target):
    return edited(raw, "slices.0.levels.-1.e2e_ms", {"p50": "1"}), seen, target


def _break_input(raw, seen, target):
    wanted = replace(target.slice, input=raw["slices"][0]["input_tokens"]["max"] + 1)
    return raw, seen, replace(target, slice=wanted)


def _break_output(raw, seen, target):
    wanted = replace(target.slice, output=raw["slices"][0]["output_tokens"]["max"] + 1)
    return raw, seen, replace(target, slice=wanted)


def _break_concurrency(raw, seen, target):
    wanted = replace(target.slice, concurrency=raw["slices"][0]["concurrency"]["max"] + 1)
    return raw, seen, replace(target, slice=wanted)


def _break_feature(raw, seen, target):
    return raw, seen, replace(target, features=frozenset({"logprobs"}))


def _break_task(raw, seen, target):
    return raw, seen, replace(target, task="pool")


def _break_reuse(raw, seen, target):
    return edited(raw, "slices.0.prefix_reuse", "shared_prefix:512"), seen, target


def _break_latency(raw, seen, target):
    return raw, seen, replace(target, limits=replace(target.limits, e2e_ms_p95=Decimal("0.5")))


def _break_rate(raw, seen, target):
    return raw, seen, replace(target, limits=replace(target.limits, output_tokens_per_s_min=Decimal(100_000)))


def _break_errors(raw, seen, target):
    return edited(raw, "slices.0.levels.0.errors", 1), seen, target


def _break_timeouts(raw, seen, target):
    return edited(raw, "slices.0.levels.-1.timeouts", 1), seen, target


def _break_note(raw, seen, target):
    return edited(raw, "security_boundary_note", None), seen, target


def _break_half_note(raw, seen, target):
    return edited(raw, "security_boundary_note", {"api_key_covers": "/v1", "external_boundary": "  "}), seen, target


def _break_attestation(raw, seen, target):
    return raw, replace(seen, source="declared"), target


INCOMPLETE = {"provenance_state": "INCOMPLETE", **NOT_JUDGED, **deferred("PROVENANCE_INCOMPLETE", retest=False)}
MISMATCH = {"provenance_state": "MISMATCH", **NOT_JUDGED, **deferred("IDENTITY_CHANGED", retest=True)}
UNMEASURED = {"measurement_state": "INCOMPLETE", **NOT_JUDGED, **deferred("MEASUREMENT_INCOMPLETE", retest=False)}
OUTSIDE = {"slice_state": "OUTSIDE", "service_state": "NOT_EVALUATED", **deferred("OUT_OF_SLICE", retest=True)}
MISSED = {"service_state": "MISSED", **deferred("SLO_MISSED", retest=True)}
NO_NOTE = {"security_boundary_state": "MISSING", "final_decision": "CONDITIONAL", "reason_class": "BOUNDARY_NOTE_MISSING"}
FLIPS = {
    _break_revision: INCOMPLETE,
    _break_version: INCOMPLETE,
    _break_hardware: INCOMPLETE,
    _break_backend_hardware: INCOMPLETE,
    _break_kv_known: INCOMPLETE,
    _break_probed: INCOMPLETE,
    _break_hash: MISMATCH,
    _break_kv: MISMATCH,
    _break_warmup: {"measurement_state": "WARMUP_UNKNOWN", **NOT_JUDGED, **deferred("WARMUP_UNKNOWN", retest=True)},
    _break_validity: {"measurement_state": "EXPIRED", **NOT_JUDGED, **deferred("EVIDENCE_EXPIRED", retest=True)},
    _break_level: UNMEASURED,
    _break_steady: UNMEASURED,
    _break_completed: UNMEASURED,
    _break_statistic: UNMEASURED,
    _break_input: OUTSIDE,
    _break_output: OUTSIDE,
    _break_concurrency: OUTSIDE,
    _break_feature: OUTSIDE,
    _break_task: OUTSIDE,
    _break_reuse: OUTSIDE,
    _break_latency: MISSED,
    _break_rate: MISSED,
    _break_errors: MISSED,
    _break_timeouts: MISSED,
    _break_note: NO_NOTE,
    _break_half_note: NO_NOTE,
    _break_attestation: {"final_decision": "CONDITIONAL", "reason_class": "IDENTITY_DECLARED"},
}
ORDER = {
    "PROVENANCE_INCOMPLETE": 1,
    "IDENTITY_CHANGED": 1,
    "MEASUREMENT_INCOMPLETE": 2,
    "WARMUP_UNKNOWN": 2,
    "EVIDENCE_EXPIRED": 2,
    "OUT_OF_SLICE": 3,
    "SLO_MISSED": 4,
    "IDENTITY_DECLARED": 5,
    "BOUNDARY_NOTE_MISSING": 6,
}


def verdict_of(raw, seen, target):
    return evaluate(records.validate(raw), seen, target, NOW)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_changing_one_precondition_flips_exactly_the_fields_that_depend_on_it(case):
    assert verdict_of(*case).fields == PASS
    for break_it, flipped in FLIPS.items():
        verdict = verdict_of(*break_it(*case))
        assert verdict.fields == {**PASS, **flipped}, break_it.__name__
        assert verdict.details, break_it.__name__


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.sampled_from(list(FLIPS)), st.sampled_from(list(FLIPS)))
def test_of_two_failures_the_earlier_rule_gives_the_reason(case, first, second):
    assume({first, second} != {_break_probed, _break_attestation})  # the later one takes the other's place: one source
    one, two = FLIPS[first], FLIPS[second]
    reason = verdict_of(*second(*first(*case))).reason_class
    lowest = min(ORDER[one["reason_class"]], ORDER[two["reason_class"]])
    assert ORDER[reason] == lowest


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_the_boundary_note_is_judged_whatever_the_rest_says(case):
    for break_it in FLIPS:
        verdict = verdict_of(*break_it(*_break_note(*case)))
        assert verdict.security_boundary_state == "MISSING"


def test_a_backend_that_was_not_reached_is_not_known():
    assert verdict_of(raw_record(), None, TARGET).fields == {**PASS, **INCOMPLETE}


def test_a_record_without_its_configuration_is_incomplete():
    assert verdict_of(edited(raw_record(), "configuration", {}), observed_for(CONFIG_A), TARGET).fields == {**PASS, **INCOMPLETE}


def test_a_changed_configuration_names_the_fields_and_the_triggers():
    other = edited(edited(CONFIG_A, "scheduler.max_num_seqs", 16), "parallelism.tensor_parallel_size", 2)
    verdict = verdict_of(raw_record(), observed_for(other), TARGET)
    assert FieldChange("scheduler.max_num_seqs", 8, 16) in verdict.changes
    assert {"batching_limits", "parallelism"} <= set(verdict.triggers)


def test_a_declaration_that_stock_endpoints_contradict_is_a_mismatch():
    seen = observed_for(CONFIG_A, source="declared", contradictions=(FieldChange("model.max_model_len", 8192, 4096),))
    verdict = verdict_of(raw_record(), seen, TARGET)
    assert verdict.fields == {**PASS, **MISMATCH}
    assert "max_model_len" in verdict.triggers


def test_a_probed_version_that_differs_is_a_mismatch_not_merely_unknown():
    seen = replace(observed_for({}, source="probed"), identity=Identity(vllm_version="0.33.0"))
    assert verdict_of(raw_record(), seen, TARGET).provenance_state == "MISMATCH"


@pytest.mark.parametrize(("tokens", "decision"), [(65536, "PASS"), (64226, "PASS"), (64225, "DEFER"), (70000, "PASS")])
def test_a_kv_cache_below_98_percent_of_the_records_defers(tokens, decision):
    assert verdict_of(raw_record(), observed_for(CONFIG_A, kv_cache_tokens=tokens), TARGET).final_decision == decision


def test_a_warmup_that_was_left_out_and_stated_is_allowed():
    assert verdict_of(edited(raw_record(), "protocol.warmup_state", "omitted"), observed_for(CONFIG_A), TARGET).fields == PASS


def test_expiry_is_the_instant_itself():
    raw = edited(raw_record(), "valid_until", "2026-02-01T00:00:00.000001Z")
    assert verdict_of(raw, observed_for(CONFIG_A), TARGET).fields == PASS


def test_the_bound_decides_only_when_a_confidence_is_asked():
    raw = edited(raw_record(), "slices.0.levels.1.e2e_ms", {"p50": "900", "p95": "1790", "p95_upper": "1810"})
    seen = observed_for(CONFIG_A)
    assert verdict_of(raw, seen, TARGET).service_state == "MISSED"
    assert verdict_of(raw, seen, replace(TARGET, confidence=None)).service_state == "MET"


def test_a_bound_at_a_lower_confidence_than_asked_is_not_enough():
    raw = edited(raw_record(), "protocol.confidence", "0.9")
    verdict = verdict_of(raw, observed_for(CONFIG_A), TARGET)
    assert verdict.fields == {**PASS, **UNMEASURED}
    assert verdict_of(edited(raw, "protocol.confidence", "0.99"), observed_for(CONFIG_A), TARGET).fields == PASS


def test_a_missing_bound_is_an_incomplete_measurement_and_not_a_missed_objective():
    raw = edited(raw_record(), "slices.0.levels.1.e2e_ms", {"p50": "900", "p95": "1000"})
    assert verdict_of(raw, observed_for(CONFIG_A), TARGET).fields == {**PASS, **UNMEASURED}
    assert verdict_of(raw, observed_for(CONFIG_A), replace(TARGET, confidence=None)).fields == PASS


def test_few_errors_among_many_requests_are_not_averaged_away():
    raw = edited(raw_record(), "slices.0.levels.1.timeouts", 1)
    assert verdict_of(raw, observed_for(CONFIG_A), TARGET).service_state == "MISSED"
    allowed = replace(TARGET, limits=replace(LIMITS, timeouts_max=1))
    assert verdict_of(raw, observed_for(CONFIG_A), allowed).fields == PASS


def test_a_level_above_the_targets_concurrency_does_not_count_against_it():
    raw = edited(raw_record(), "slices.0.levels.1.e2e_ms", {"p50": "900", "p95": "5000", "p95_upper": "5100"})
    seen, low = observed_for(CONFIG_A), replace(TARGET, slice=TargetSlice(2048, 512, 4))
    assert verdict_of(raw, seen, low).fields == PASS
    assert verdict_of(raw, seen, replace(TARGET, slice=TargetSlice(2048, 512, 5))).service_state == "MISSED"


def test_a_concurrency_that_is_claimed_but_has_no_level_is_not_measured():
    raw = edited(raw_record(), "slices.0.concurrency.max", 12)
    at_12 = replace(TARGET, slice=TargetSlice(2048, 512, 12))
    assert verdict_of(raw, observed_for(CONFIG_A), at_12).fields == {**PASS, **UNMEASURED}


def _two_slices():
    raw = raw_record()
    wide = edited(raw_record(tokens_in=8192, tokens_out=2048, concurrency=2)["slices"][0], "levels.1.e2e_ms.p95_upper", "1790")
    return {**raw, "slices": [raw["slices"][0], wide]}


def test_without_a_target_slice_each_slice_is_judged_at_its_own_corners():
    whole = replace(TARGET, slice=None)
    assert verdict_of(_two_slices(), observed_for(CONFIG_A), whole).fields == PASS


def test_the_envelope_holds_the_slices_that_qualify_with_their_bounds():
    raw = edited(_two_slices(), "slices.1.levels.1.e2e_ms", {"p50": "900", "p95": "1640", "p95_upper": "1900"})
    found = envelope_slices(records.validate(raw), observed_for(CONFIG_A), TARGET, NOW)
    assert [(s.input_max, s.output_max, s.concurrency, s.e2e_p95_ms) for s in found] == [(2048, 512, 8, Decimal(1671))]
    assert found[0].record == records.record_id(records.validate(raw))
    relaxed = replace(TARGET, limits=replace(LIMITS, e2e_ms_p95=Decimal(2000)))
    assert len(envelope_slices(records.validate(raw), observed_for(CONFIG_A), relaxed, NOW)) == 2


def test_a_conditional_slice_opens_the_gate_only_where_the_target_admits_it():
    record, seen = records.validate(raw_record()), observed_for(CONFIG_A, source="declared")
    assert envelope_slices(record, seen, TARGET, NOW) == ()
    admitted = envelope_slices(record, seen, replace(TARGET, admit_conditional=True), NOW)
    assert [each.decision for each in admitted] == [Decision.CONDITIONAL]


def test_a_slice_that_a_warm_cache_helped_counts_only_where_production_has_that_reuse():
    record = records.validate(edited(raw_record(), "slices.0.prefix_reuse", "shared_prefix:512"))
    seen = observed_for(CONFIG_A)
    assert envelope_slices(record, seen, TARGET, NOW) == ()
    assert len(envelope_slices(record, seen, replace(TARGET, prefix_reuse=("shared_prefix:512",)), NOW)) == 1


@pytest.mark.parametrize(
    "break_it", [f for f in FLIPS if f not in (_break_input, _break_output, _break_concurrency, _break_feature, _break_task)]
)
def test_nothing_that_does_not_pass_is_in_the_envelope(break_it):
    raw, seen, target = break_it(raw_record(), observed_for(CONFIG_A), TARGET)
    assert envelope_slices(records.validate(raw), seen, target, NOW) == ()


def test_the_checklist_answers_every_question_and_names_what_is_open():
    record = records.validate(raw_record())
    rows = exit_checklist(record, evaluate(record, observed_for(CONFIG_A), TARGET, NOW))
    assert all(row.answered for row in rows)
    assert rows[-1].answer == "PASS (QUALIFIED)"
    bare = edited(edited(raw_record(), "security_boundary_note", None), "protocol.warmup_state", "unknown")
    bare = edited(edited(bare, "identity.model_revision", None), "slices.0.levels.0.output_tokens_per_s_lower", None)
    bare = edited(bare, "slices.0.levels.0.output_tokens_per_s", None)
    record = records.validate(bare)
    open_rows = [row.question for row in exit_checklist(record, evaluate(record, None, TARGET, NOW)) if not row.answered]
    assert open_rows == ["exact model revision", "slice 1: concurrency 4", "warm-up state", "security boundary note"]
