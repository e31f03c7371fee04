"""What a record may say, and what makes its id."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.evidence import record as records
from gateway.evidence.record import RecordError
from tests.evidence.builders import edited, raw_record

BAD = [
    ("schema", "capacity-evidence-record/v2", "schema"),
    ("surprise", 1, "surprise"),
    ("identity.alias", "tiny", "alias"),
    ("identity.server_configuration_hash", "sha256:" + "0" * 64, "does not hash"),
    ("configuration.scheduler.max_num_seqs", 9, "does not hash"),
    ("configuration.scheduler.max_num_seqs", 8.0, "float"),
    ("configuration.scheduler.max_num_seqs", 2**53, "2\\^53"),
    ("protocol.repeats", 3.0, "repeats"),
    ("protocol.repeats", True, "repeats"),
    ("protocol.repeats", "3", "repeats"),
    ("protocol.warmup_state", "probably", "warmup_state"),
    ("protocol.started_at", "2026-13-01T00:00:00Z", "started_at"),
    ("protocol.started_at", "2026-01-01T00:00:00+02:00", "started_at"),
    ("valid_until", "soon", "valid_until"),
    ("slices", [], "slices"),
    ("slices.0.features", ["penalties", "logprobs"], "sorted"),
    ("slices.0.features", ["telepathy"], "features"),
    ("slices.0.input_tokens", {"min": 9, "max": 8}, "over max"),
    ("slices.0.input_tokens.max", 2049, "observed was 1..2048"),
    ("slices.0.output_tokens.min", 0, "observed was 1..512"),
    ("slices.0.concurrency", {"min": 0, "max": 8}, "concurrency"),
    ("slices.0.concurrency", {"min": 1, "max": 7}, "does not hold every level"),
    ("slices.0.levels", [], "levels"),
    ("slices.0.levels.0.concurrency", 8, "rise"),
    ("slices.0.levels.1.errors", 1201, "more than requests"),
    ("slices.0.levels.1.errors", -1, "errors"),
    ("slices.0.levels.1.e2e_ms.p95", "1640.0000000001", "p95"),
    ("slices.0.levels.1.e2e_ms.p95", "01640", "p95"),
    ("slices.0.levels.1.e2e_ms.p95", "-5", "p95"),
    ("slices.0.levels.1.e2e_ms.p95", "NaN", "p95"),
    ("slices.0.levels.1.e2e_ms.p95", 1640.5, "float"),
    ("slices.0.levels.1.e2e_ms.p95", "899", "percentiles fall"),
    ("slices.0.levels.1.e2e_ms.p95_upper", "1639", "p95 and p95_upper fall"),
    ("slices.0.levels.1.e2e_ms", {"p95_upper": "5"}, "without p95"),
    ("slices.0.levels.1.output_tokens_per_s_lower", "131.1", "fall"),
    ("samples", {"file": "../../etc/passwd", "sha256": "0" * 64}, "samples.file"),
    ("retest_triggers", [], "retest_triggers"),
    ("retest_triggers", ["moon_phase"], "retest_triggers"),
    ("supersedes", {"record": "12", "changed": [], "rebuilt": []}, "supersedes"),
]


@pytest.mark.parametrize(("path", "value", "named"), BAD)
def test_an_inconsistent_record_is_refused_and_the_fault_is_named(path, value, named):
    with pytest.raises(RecordError, match=named):
        records.load(json.dumps(edited(raw_record(), path, value)).encode())


def test_the_layout_of_the_file_does_not_change_the_id():
    raw = raw_record()
    shuffled = dict(reversed(list(raw.items())))
    one = records.load(json.dumps(raw, indent=3).encode())
    two = records.load(json.dumps(shuffled, ensure_ascii=True, separators=(",", ":")).encode())
    assert records.record_id(one) == records.record_id(two)
    assert records.load(records.dump(one)) == one


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("slices.0.levels.1.e2e_ms.p95", "1641"),
        ("protocol.seed", 8),
        ("valid_until", None),
        ("security_boundary_note.external_boundary", "none"),
        ("capabilities.prefix_caching", False),
        ("slices.0.levels.1.void", True),
    ],
)
def test_any_change_is_another_record(path, value):
    assert records.record_id(records.validate(edited(raw_record(), path, value))) != records.record_id(
        records.validate(raw_record())
    )


def test_what_is_not_known_of_a_latency_is_left_out_and_stays_so():
    raw = edited(raw_record(), "slices.0.levels.1.tpot_ms", {})
    assert records.as_json(records.validate(raw))["slices"][0]["levels"][1]["tpot_ms"] == {}


def test_a_record_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        records.validate(raw_record()).valid_until = None


def test_a_record_that_is_too_large_is_not_parsed():
    with pytest.raises(RecordError, match="more than"):
        records.load(b" " * (records.MAX_RECORD_BYTES + 1))


@settings(deadline=None)
@given(st.floats(0, 1e12, allow_nan=False))
def test_decimals_written_by_us_are_decimals_read_by_us(value):
    text = records.decimal_text(value)
    level = records.Level(concurrency=1, requests=1, errors=0, timeouts=0, requests_per_s=text)
    assert abs(float(level.requests_per_s) - value) <= 0.0005 + value * 1e-12
