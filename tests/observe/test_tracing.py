from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.errors import Outcome, Reason
from gateway.observe.tracing import NoTracer, OtelTracer, open_tracer

from .build import exchange

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


def traced(ratio: float, traceparent: str | None = None, **fields: object) -> list[object]:
    exporter = InMemorySpanExporter()
    tracer = OtelTracer(exporter, ratio, lambda: 1_000.0, draw=lambda: 0.5)
    tracer.finish(exchange(**fields), traceparent)
    tracer.close()
    return list(exporter.get_finished_spans())


def test_a_request_is_one_span_with_its_stretches_beneath() -> None:
    spans = {span.name: span for span in traced(1.0)}  # type: ignore[attr-defined]
    assert set(spans) == {"chat", "admission", "queue", "backend"}
    root = spans["chat"]
    assert (root.start_time, root.end_time) == (1_010_000_000_000, 1_011_200_000_000)
    assert all(span.parent.span_id == root.context.span_id for name, span in spans.items() if name != "chat")
    assert spans["queue"].end_time - spans["queue"].start_time == pytest.approx(5e8, abs=1e3)
    assert root.attributes["plimsoll.reason"] == "ok" and root.attributes["gen_ai.usage.output_tokens"] == 20


def test_the_ratio_decides_and_a_client_cannot() -> None:
    assert traced(0.4) == []
    assert traced(0.4, PARENT[:-2] + "01") == []


def test_a_clients_traceparent_names_the_parent() -> None:
    root = next(span for span in traced(1.0, PARENT) if span.name == "chat")  # type: ignore[attr-defined]
    assert root.context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert root.parent.span_id == 0xB7AD6B7169203331


@pytest.mark.parametrize(
    "bad", ["", "x", "00-" + "0" * 32 + "-b7ad6b7169203331-01", PARENT.upper(), PARENT + "-x", PARENT * 1000]
)
def test_a_malformed_traceparent_is_as_none(bad: str) -> None:
    root = next(span for span in traced(1.0, bad) if span.name == "chat")  # type: ignore[attr-defined]
    assert root.parent is None


def test_a_failure_is_an_error_span_and_a_refusal_has_no_backend() -> None:
    failed = traced(1.0, outcome=Outcome.FAILED, reason=Reason.UPSTREAM_RESET)
    assert next(s for s in failed if s.name == "chat").status.description == "upstream_reset"  # type: ignore[attr-defined]
    refused = traced(1.0, outcome=Outcome.REFUSED, dispatched_at=None, admitted_at=None, queue_s=0.0)
    assert [s.name for s in refused] == ["chat"]  # type: ignore[attr-defined]


def test_without_an_endpoint_nothing_is_imported() -> None:
    program = (
        "import sys; from gateway.observe.tracing import open_tracer; t = open_tracer(None, 1.0, lambda: 0.0); "
        "t.finish(None); t.close(); sys.exit(any(m.startswith('opentelemetry') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=30, check=False).returncode == 0
    assert isinstance(open_tracer("http://127.0.0.1:1/v1/traces", 0.0, lambda: 0.0), NoTracer)
