"""The metric families and their Prometheus text.

Owns names, labels and help of every family, and turns a `Snapshot` into the exposition with prometheus_client.
Promises to read nothing but the snapshot and /proc, so that it can run in any thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client import GC_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from gateway.observe.histogram import cumulate

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

Sample = tuple[str, tuple[str, ...], float]  # family, label values, value
HistogramSample = tuple[str, tuple[str, ...], tuple[float, ...], tuple[int, ...], float]  # family, labels, bounds, counts, sum


class Snapshot(NamedTuple):
    """Numbers at one instant."""

    samples: tuple[Sample, ...]
    histograms: tuple[HistogramSample, ...]


COUNTERS: dict[str, tuple[tuple[str, ...], str]] = {
    "plimsoll_requests_total": (("model", "class", "outcome", "reason"), "Requests that ended, by how and why."),
    "plimsoll_tenant_requests_total": (("tenant", "outcome"), "Requests that ended, by tenant."),
    "plimsoll_tokens_total": (
        ("tenant", "kind"),
        "Tokens: read (input) and written (output) by the engine, reserved at admission, and wasted on answers that did "
        "not arrive whole.",
    ),
    "plimsoll_retest_triggers_total": (
        ("model", "backend", "axis"),
        "Demand or drift outside the measured slices, by the axis or the identity field.",
    ),
    "plimsoll_breaker_transitions_total": (("backend", "state"), "Times a backend's breaker entered a state."),
    "plimsoll_retries_total": (("backend", "result"), "Second attempts, and those the budget forbade."),
    "plimsoll_policy_reloads_total": (("result",), "Times the policy file was read again."),
    "plimsoll_observed_total": (
        ("decision",),
        "While enforcement is observe: requests by what would have been decided (admitted, waited, or the reason of the no).",
    ),
}

HISTOGRAMS: dict[str, tuple[tuple[str, ...], str]] = {
    "plimsoll_request_seconds": (("model", "class"), "From receipt to the end of the answer."),
    "plimsoll_queue_wait_seconds": (("model", "class", "outcome"), "Time in the gateway's queue."),
    "plimsoll_ttft_seconds": (("model", "class"), "From dispatch to the first content event, streams only."),
    "plimsoll_tpot_seconds": (("model", "class"), "Mean time per output token after the first, one value a stream."),
    "plimsoll_itl_seconds": (("model",), "Time between two content events of a stream."),
    "plimsoll_overhead_seconds": ((), "Time spent in the gateway itself: all but the queue and the backend."),
}
HISTOGRAM_NAMES = tuple(HISTOGRAMS)

GAUGES: dict[str, tuple[tuple[str, ...], str]] = {
    "plimsoll_queue_oldest_seconds": (("class",), "Age of the request that has waited longest."),
    "plimsoll_queue_requests": (("class",), "Requests waiting."),
    "plimsoll_queue_tokens": (("class",), "Tokens that the waiting requests would reserve."),
    "plimsoll_in_flight_sequences": (("model", "backend", "phase", "class"), "Sequences at the backend."),
    "plimsoll_reserved_tokens": (("backend",), "Tokens reserved by what is in flight."),
    "plimsoll_envelope_limit": (("model", "backend", "axis"), "The largest measured value on each axis."),
    "plimsoll_verdict": (("model", "backend", "decision", "reason"), "1 for the verdict in force."),
    "plimsoll_identity_info": (("backend", "hash", "vllm_version"), "1 for the identity that the backend shows."),
    "plimsoll_breaker_elsewhere": (("backend",), "Other replicas whose breaker for the backend is not closed."),
    "plimsoll_breaker_state": (("backend", "state"), "1 for the state the breaker is in."),
    "plimsoll_state_degraded": ((), "1 while shared admission state cannot be reached."),
    "plimsoll_policy_stale": ((), "1 while the policy file on disk is refused and an older one is in force."),
    "plimsoll_draining": ((), "1 once the gateway takes no new requests."),
    "plimsoll_journal_dropped_lines": ((), "Journal lines lost because the sink was too slow or failed, since start."),
    "plimsoll_series_folded": ((), "Times a series was folded or left out because the limit on series was reached."),
    "plimsoll_build_info": (("version",), "1 for the version that runs."),
}


class _Frozen(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        values: dict[str, dict[tuple[str, ...], float]] = {}
        for name, labels, value in self._snapshot.samples:
            values.setdefault(name, {})[labels] = value  # the last one wins: a series stands once
        for name, (labelnames, text) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=labelnames)
            for labels, value in values.get(name, {}).items():
                counter.add_metric(labels, value)
            yield counter
        for name, (labelnames, text) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=labelnames)
            for labels, value in values.get(name, {}).items():
                gauge.add_metric(labels, value)
            yield gauge
        yield from self._histogram_families()

    def _histogram_families(self) -> Iterator[Metric]:
        families = {name: HistogramMetricFamily(name, text, labels=names) for name, (names, text) in HISTOGRAMS.items()}
        for name, labels, bounds, counts, total in self._snapshot.histograms:
            families[name].add_metric(labels, buckets=cumulate(bounds, counts), sum_value=total)
        yield from families.values()


def render(snapshot: Snapshot) -> bytes:
    """The exposition (text format 0.0.4) of a snapshot, with the process's own numbers."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Frozen(snapshot))
    registry.register(PROCESS_COLLECTOR)
    registry.register(GC_COLLECTOR)
    return generate_latest(registry)
