from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gateway.errors import Outcome, Reason
from gateway.observe.exposition import COUNTERS, GAUGES, HISTOGRAMS, render
from gateway.observe.histogram import Histogram
from gateway.observe.metrics import OTHER, Metrics, Names

from .build import exchange

NAMES = Names(frozenset({"tiny"}), frozenset({"interactive"}), frozenset({"acme"}), frozenset({"a"}))


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    yield Metrics(NAMES)


def scrape(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What Prometheus would read, by (name, sorted labels)."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    labels = {key.rstrip("_"): text for key, text in labels.items()}
    return scrape(metrics).get((name, tuple(sorted(labels.items()))))


def test_a_served_request_is_counted_everywhere_once(metrics: Metrics) -> None:
    metrics.finish(exchange())
    assert value(metrics, "plimsoll_requests_total", model="tiny", class_="interactive", outcome="served", reason="ok") == 1
    assert value(metrics, "plimsoll_tenant_requests_total", tenant="acme", outcome="served") == 1
    assert value(metrics, "plimsoll_tokens_total", tenant="acme", kind="input") == 90
    assert value(metrics, "plimsoll_tokens_total", tenant="acme", kind="output") == 20
    assert value(metrics, "plimsoll_tokens_total", tenant="acme", kind="reserved") == 150
    assert value(metrics, "plimsoll_tokens_total", tenant="acme", kind="wasted") == 0
    assert value(metrics, "plimsoll_request_seconds_sum", model="tiny", class_="interactive") == pytest.approx(1.2)
    assert value(metrics, "plimsoll_queue_wait_seconds_sum", model="tiny", class_="interactive", outcome="served") == 0.5
    assert value(metrics, "plimsoll_ttft_seconds_sum", model="tiny", class_="interactive") == pytest.approx(0.1)
    assert value(metrics, "plimsoll_tpot_seconds_sum", model="tiny", class_="interactive") == pytest.approx(0.59 / 19)


def test_overhead_is_what_is_neither_queue_nor_backend(metrics: Metrics) -> None:
    metrics.finish(exchange())
    assert value(metrics, "plimsoll_overhead_seconds_sum") == pytest.approx(1.2 - 0.5 - 0.69)


def test_overhead_of_a_request_that_died_at_the_backend_leaves_the_wait_out(metrics: Metrics) -> None:
    metrics.finish(
        exchange(last_at=None, first_at=None, ended_at=70.502, outcome=Outcome.FAILED, reason=Reason.EXECUTION_TIMEOUT)
    )
    assert value(metrics, "plimsoll_overhead_seconds_sum") == pytest.approx(0.002)


def test_an_answer_that_did_not_arrive_whole_is_wasted(metrics: Metrics) -> None:
    metrics.finish(exchange(outcome=Outcome.CANCELLED, reason=Reason.CLIENT_CLOSED))
    assert value(metrics, "plimsoll_tokens_total", tenant="acme", kind="wasted") == 110


def test_a_refusal_touches_no_tokens_and_no_latency_of_the_backend(metrics: Metrics) -> None:
    metrics.finish(
        exchange(
            dispatched_at=None,
            first_at=None,
            last_at=None,
            admitted_at=None,
            outcome=Outcome.REFUSED,
            reason=Reason.QUEUE_TIMEOUT,
        )
    )
    assert value(metrics, "plimsoll_tokens_total", tenant="acme", kind="reserved") == 0
    assert value(metrics, "plimsoll_ttft_seconds_count", model="tiny", class_="interactive") == 0
    assert value(metrics, "plimsoll_queue_wait_seconds_count", model="tiny", class_="interactive", outcome="refused") == 1


def test_tpot_is_per_sequence(metrics: Metrics) -> None:
    x = exchange(output_tokens=40)
    assert x.shape is not None
    x.shape = x.shape._replace(sequences=2)
    metrics.finish(x)
    assert value(metrics, "plimsoll_tpot_seconds_sum", model="tiny", class_="interactive") == pytest.approx(0.59 / 19)


def test_names_from_clients_fold_into_other(metrics: Metrics) -> None:
    for n in range(5_000):
        metrics.finish(exchange(model=f"model-{n}", tenant=f"tenant-{n}", priority_class=f"class-{n}"))
        metrics.trigger(f"model-{n}", f"backend-{n}", "input")
    seen = scrape(metrics)
    assert value(metrics, "plimsoll_requests_total", model=OTHER, class_=OTHER, outcome="served", reason="ok") == 5_000
    assert value(metrics, "plimsoll_tenant_requests_total", tenant=OTHER, outcome="served") == 5_000
    assert len(seen) < 200


def test_series_stay_under_the_limit_whatever_the_policy_names() -> None:
    names = Names(*(frozenset(f"{kind}{n}" for n in range(60)) for kind in ("m", "c", "t", "b")))
    metrics = Metrics(names)
    ends = [(Outcome.FAILED, reason) for reason in Reason]
    total = 0
    for n in range(60):
        for m in range(60):
            outcome, reason = ends[(n * 60 + m) % len(ends)]
            metrics.finish(exchange(model=f"m{n}", priority_class=f"c{m}", tenant=f"t{m}", outcome=outcome, reason=reason))
            metrics.trigger(f"m{n}", f"b{m}", f"field-{n}-{m}")
            total += 1
    metrics.gauge(
        "plimsoll_verdict", lambda: [((f"m{n}", f"b{k}", "PASS", "QUALIFIED"), 1) for n in range(60) for k in range(60)]
    )
    seen = scrape(metrics)
    assert len(seen) <= 2_000
    assert sum(v for (name, _), v in seen.items() if name == "plimsoll_requests_total") == total
    assert sum(v for (name, _), v in seen.items() if name == "plimsoll_retest_triggers_total") == total
    assert seen[("plimsoll_series_folded", ())] > 0


def test_counters_survive_a_new_policy(metrics: Metrics) -> None:
    metrics.finish(exchange())
    metrics.set_names(Names(frozenset({"large"}), NAMES.classes, NAMES.tenants, NAMES.backends))
    metrics.finish(exchange(model="large"))
    for model in ("tiny", "large"):
        assert value(metrics, "plimsoll_requests_total", model=model, class_="interactive", outcome="served", reason="ok") == 1


def test_every_rare_event_has_its_counter(metrics: Metrics) -> None:
    metrics.total("plimsoll_breaker_transitions_total", lambda: [(("a", "open"), 1.0)])
    metrics.total("plimsoll_observed_total", lambda: [(("queue_full",), 1.0)])
    metrics.retry("a", "served")
    metrics.reload("refused")
    metrics.trigger("tiny", "a", "scheduler.max_num_seqs")
    metrics.gaps("tiny").observe(0.02)
    assert value(metrics, "plimsoll_breaker_transitions_total", backend="a", state="open") == 1
    assert value(metrics, "plimsoll_retries_total", backend="a", result="served") == 1
    assert value(metrics, "plimsoll_policy_reloads_total", result="refused") == 1
    assert value(metrics, "plimsoll_observed_total", decision="queue_full") == 1
    assert value(metrics, "plimsoll_retest_triggers_total", model="tiny", backend="a", axis="scheduler.max_num_seqs") == 1
    assert value(metrics, "plimsoll_itl_seconds_bucket", model="tiny", le="0.02") == 1


def test_gauges_are_read_when_scraped(metrics: Metrics) -> None:
    waiting = {"interactive": 3}
    metrics.gauge("plimsoll_queue_requests", lambda: [((name,), n) for name, n in waiting.items()])
    assert value(metrics, "plimsoll_queue_requests", class_="interactive") == 3
    waiting["interactive"] = 0
    assert value(metrics, "plimsoll_queue_requests", class_="interactive") == 0
    with pytest.raises(KeyError):
        metrics.gauge("plimsoll_unheard_of", list)


def test_the_process_shows_its_memory_and_descriptors(metrics: Metrics) -> None:
    seen = scrape(metrics)
    assert seen[("process_resident_memory_bytes", ())] > 1e6
    assert seen[("process_open_fds", ())] > 0


def test_every_family_is_documented_and_named_by_the_rules() -> None:
    for name, (labels, text) in {**COUNTERS, **GAUGES, **HISTOGRAMS}.items():
        assert name.startswith("plimsoll_") and text.endswith(".") and len(set(labels)) == len(labels)
    assert all(name.endswith("_total") for name in COUNTERS)
    assert all(name.endswith("_seconds") for name in HISTOGRAMS)


async def test_a_snapshot_is_rendered_elsewhere_while_counting_goes_on(metrics: Metrics) -> None:
    metrics.finish(exchange())
    rendering = asyncio.create_task(asyncio.to_thread(render, metrics.snapshot()))
    for _ in range(100):
        metrics.finish(exchange())
        await asyncio.sleep(0)
    text = (await rendering).decode()
    assert 'plimsoll_requests_total{class="interactive",model="tiny",outcome="served",reason="ok"} 1.0' in text


@given(st.lists(st.floats(0, 100, allow_nan=False), max_size=50))
def test_a_histogram_agrees_with_counting(values: list[float]) -> None:
    histogram = Histogram((0.1, 1.0, 10.0))
    for one in values:
        histogram.observe(one)
    assert histogram.cumulative() == [
        *((repr(bound), sum(one <= bound for one in values)) for bound in histogram.bounds),
        ("+Inf", len(values)),
    ]
    assert histogram.total == pytest.approx(sum(values))
