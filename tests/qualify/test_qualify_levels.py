"""What a record says of raw samples, and what it must not say."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.qualify import levels, samples
from gateway.qualify.counters import Counters
from gateway.qualify.levels import Measured
from gateway.qualify.samples import SamplesError
from tests.qualify.support import plan, sample


def spread(n: int = 180, **changes: object) -> list[samples.RawSample]:
    """Successes over three repeats with sizes over the whole box."""
    return [
        sample(
            repeat=i % 3, wave=i // 12, index=i, start=(i % 3) * 100 + i * 0.05, input_tokens=1 + i % 64, output_tokens=1 + i % 8,
            last_at=(i % 3) * 100 + i * 0.05 + 0.05 + 0.001 * (i % 17), **changes,
        )
        for i in range(n)
    ]  # fmt: skip


def test_latencies_are_defined_once() -> None:
    one = sample(start=5.0, event_times=((0.03, 1), (0.05, 2), (0.1, 1)))
    assert one.ttft_ms == pytest.approx(30)
    assert one.e2e_ms == pytest.approx(100)
    assert one.tpot_ms == pytest.approx(10)
    assert one.itl_ms == pytest.approx((20, 0, 50))


def test_an_open_loop_counts_from_the_intended_instant() -> None:
    late = sample(start=5.0, intended_at=2.0, open_loop=True)
    assert late.e2e_ms == pytest.approx(3100)
    assert late.ttft_ms == pytest.approx(3030)


def test_failures_are_counted_apart_and_enter_no_percentile() -> None:
    good = spread()
    bad = [
        sample(status="error", error="status", last_at=900.0, input_tokens=None, output_tokens=None),
        sample(status="timeout", last_at=900.0, first_at=None, input_tokens=None, output_tokens=None),
        sample(status="cancelled", last_at=900.0, input_tokens=None, output_tokens=None),
    ]
    clean, mixed = levels.level(Measured(4, tuple(good)), 0.95), levels.level(Measured(4, (*good, *bad)), 0.95)
    assert (mixed.requests, mixed.errors, mixed.timeouts, mixed.cancelled) == (183, 1, 1, 1)
    assert mixed.e2e_ms == clean.e2e_ms
    assert mixed.output_tokens_per_s != clean.output_tokens_per_s  # the time that failures took is time


def test_a_level_has_bounds_on_the_right_side() -> None:
    found = levels.level(Measured(4, tuple(spread())), 0.95)
    assert float(found.e2e_ms.p95_upper or 0) >= float(found.e2e_ms.p95 or 0) > 0
    assert 0 < float(found.output_tokens_per_s_lower or 0) <= float(found.output_tokens_per_s or 0)
    assert float(found.e2e_ms.p50_upper or 0) <= float(found.e2e_ms.p95_upper or 0)


def test_one_repeat_supports_no_bound() -> None:
    found = levels.level(Measured(4, tuple(s for s in spread() if s.repeat == 0)), 0.95)
    assert found.e2e_ms.p95 is not None
    assert found.e2e_ms.p95_upper is None
    assert found.output_tokens_per_s_lower is None


def test_queue_time_and_preemptions_are_the_servers_own() -> None:
    counted = Counters(queue_s=9.0, queued=180, preemptions=2, prefix_queries=None, prefix_hits=None)
    found = levels.level(Measured(4, tuple(spread()), counted), 0.95)
    assert (found.queue_ms.mean, found.queue_source, found.preemptions) == ("50", "vllm_metrics", 2)
    silent = levels.level(Measured(4, tuple(spread())), 0.95)
    assert (silent.queue_ms.mean, silent.queue_source, silent.preemptions) == (None, None, None)


def test_counters_of_a_server_that_started_again_are_unknown() -> None:
    before, after = Counters(queue_s=9, queued=90, preemptions=4), Counters(queue_s=1, queued=10, preemptions=4)
    delta = after.since(before)
    assert (delta.queue_ms, delta.preemptions) == (None, 0)


def test_a_slice_claims_what_every_level_was_seen_to_hold() -> None:
    low = Measured(1, tuple(spread(concurrency=1)))
    narrow = tuple(s for s in spread(360) if (s.output_tokens or 0) >= 5)
    made = levels.slice_of(plan().cells[0], [low, Measured(4, narrow)], 0.95)
    assert made is not None
    assert (made.output_tokens.min, made.output_tokens.max) == (5, 8)
    assert made.observed_output_tokens is not None
    assert made.observed_output_tokens.min == 1
    assert [level.concurrency for level in made.levels] == [1, 4]


def test_a_range_measured_near_its_top_does_not_claim_its_bottom() -> None:
    assert levels.claimed([1, *[100] * 200, *range(90, 110)]) is not None
    found = levels.claimed([1, 2, *range(90, 290)])
    assert found is not None
    assert found.min >= 90


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=200))
def test_a_claim_never_leaves_what_was_seen(values: list[int]) -> None:
    found = levels.claimed(values)
    assert found is not None
    assert min(values) <= found.min <= found.max <= max(values)


def test_a_void_level_is_kept_as_void_and_claims_nothing() -> None:
    wide = tuple(spread())
    narrow = tuple(sample(repeat=i % 3, wave=i, input_tokens=64, output_tokens=8) for i in range(60))
    made = levels.slice_of(plan().cells[0], [Measured(1, wide), Measured(4, narrow, void="late")], 0.95)
    assert made is not None
    assert [level.void for level in made.levels] == [False, True]
    assert made.input_tokens.min < 5


def test_nothing_succeeded_no_slice() -> None:
    failed = tuple(sample(status="error", error="reset", input_tokens=None, output_tokens=None) for _ in range(9))
    assert levels.slice_of(plan().cells[0], [Measured(1, failed)], 0.95) is None


def test_an_open_loop_holds_what_it_held_often() -> None:
    seen = [sample(in_flight=2) for _ in range(100)] + [sample(in_flight=9) for _ in range(3)]
    assert levels.reached(seen) == 2


def test_growing_waits_are_said_to_be_over_saturated() -> None:
    def growing(slope: float) -> list[samples.RawSample]:
        return [
            sample(repeat=r, wave=i, start=i * 0.1, first_at=i * 0.1 + 0.03 + slope * i, last_at=i * 0.1 + 9 + 0.001 * (i % 5))
            for r in range(3)
            for i in range(80)
        ]

    assert levels.oversaturated(growing(0.01))
    assert not levels.oversaturated(growing(0.0))


def test_raw_samples_come_back_as_they_were(tmp_path: Path) -> None:
    before = [*spread(20), sample(status="error", error="status", detail="500: é", http_status=500, event_times=((0.5, 3),))]
    name, packed = samples.encode(before)
    (tmp_path / name).write_bytes(packed)
    assert name == f"{hashlib.sha256(packed).hexdigest()}.jsonl.zst"
    assert samples.read(tmp_path / name, hashlib.sha256(packed).hexdigest()) == before


def test_changed_or_broken_samples_are_refused(tmp_path: Path) -> None:
    _, packed = samples.encode(spread(20))
    path = tmp_path / "x.jsonl.zst"
    path.write_bytes(packed)
    with pytest.raises(SamplesError, match="digest differs"):
        samples.read(path, "0" * 64)
    for broken in (packed[:40], b"plain text", b""):
        path.write_bytes(broken)
        with pytest.raises(SamplesError):
            samples.read(path)
    with pytest.raises(SamplesError, match="cannot be read"):
        samples.read(tmp_path / "missing")
