"""Traces: one span a sampled request, with its wait and its time at the backend beneath it.

Owns the sampling decision and the spans' attributes. Promises: without an OTLP endpoint nothing of OpenTelemetry is imported and
`finish` is one comparison; spans are built after the request has ended and exported from the SDK's own thread; no
prompt, answer or key is in them. A client's `traceparent` is trusted for correlation only: it names the parent, it never
decides whether a request is sampled. Talks to the OpenTelemetry SDK (extra `otel`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from gateway.errors import Outcome, PlimsollError
from gateway.observe.exchange import Exchange

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")


class TracingError(PlimsollError):
    """Tracing was asked for and cannot be had."""


class Tracer(Protocol):
    """What the data path holds."""

    def finish(self, exchange: Exchange, traceparent: str | None = None) -> None: ...
    def close(self) -> None: ...


class NoTracer:
    """Tracing is off."""

    def finish(self, exchange: Exchange, traceparent: str | None = None) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to close."""


class OtelTracer:
    """Spans for `sample_ratio` of the requests. `wall_minus_monotonic` turns the exchange's clock into Unix time."""

    def __init__(
        self,
        exporter: SpanExporter,
        sample_ratio: float,
        wall_minus_monotonic: Callable[[], float],
        draw: Callable[[], float] = random.random,
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._provider = TracerProvider(resource=Resource.create({"service.name": "plimsoll"}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("plimsoll")
        self._ratio = sample_ratio
        self._offset = wall_minus_monotonic
        self._draw = draw

    def finish(self, exchange: Exchange, traceparent: str | None = None) -> None:
        """Emit the spans of an ended request, if it is in the sample. Never blocks: a full export queue drops."""
        if self._draw() >= self._ratio or exchange.ended_at is None:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        offset = self._offset()
        span = self._tracer.start_span(
            exchange.route,
            context=_parent(traceparent),
            kind=SpanKind.SERVER,
            start_time=_ns(exchange.received_at, offset),
            attributes=_attributes(exchange),
        )
        if exchange.outcome is Outcome.FAILED:
            span.set_status(Status(StatusCode.ERROR, exchange.reason.value))
        inside = set_span_in_context(span)
        for name, start, end in _parts(exchange, exchange.ended_at):
            child = self._tracer.start_span(name, context=inside, start_time=_ns(start, offset))
            child.end(_ns(end, offset))
        span.end(_ns(exchange.ended_at, offset))

    def close(self) -> None:
        """Export what is left, for a bounded time."""
        self._provider.force_flush(2000)
        self._provider.shutdown()


def open_tracer(otlp_endpoint: str | None, sample_ratio: float, wall_minus_monotonic: Callable[[], float]) -> Tracer:
    """The tracer a policy asks for. Raises TracingError when the extra is not installed."""
    if otlp_endpoint is None or sample_ratio <= 0:
        return NoTracer()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise TracingError("tracing.otlp_endpoint needs the extra: pip install 'plimsoll-gateway[otel]'") from error
    return OtelTracer(OTLPSpanExporter(endpoint=otlp_endpoint), sample_ratio, wall_minus_monotonic)


def _parts(x: Exchange, ended: float) -> list[tuple[str, float, float]]:
    """(name, start, end) of the stretches a request went through."""
    parts = []
    queued_until = x.admitted_at if x.admitted_at is not None else (None if x.queue_s <= 0 else ended)
    if queued_until is not None:
        parts.append(("admission", x.received_at, queued_until - x.queue_s))
        parts.append(("queue", queued_until - x.queue_s, queued_until))
    if x.dispatched_at is not None:
        parts.append(("backend", x.dispatched_at, x.last_at if x.last_at is not None else ended))
    return parts


def _attributes(x: Exchange) -> dict[str, str | int | bool | float]:
    shape = x.shape
    values: dict[str, str | int | bool | float | None] = {
        "plimsoll.request_id": x.request_id,
        "plimsoll.tenant": x.tenant,
        "plimsoll.class": x.priority_class,
        "plimsoll.backend": x.backend,
        "plimsoll.record": x.record,
        "plimsoll.outcome": x.outcome.value,
        "plimsoll.reason": x.reason.value,
        "plimsoll.attempts": x.attempts,
        "plimsoll.reserved_tokens": None if shape is None else shape.tokens,
        "http.response.status_code": x.status,
        "gen_ai.request.model": x.model,
        "gen_ai.request.max_tokens": None if shape is None else shape.output_tokens,
        "gen_ai.usage.input_tokens": x.input_tokens,
        "gen_ai.usage.output_tokens": x.output_tokens,
    }
    return {name: value for name, value in values.items() if value is not None}


def _parent(traceparent: str | None) -> Context | None:
    """The remote parent a W3C traceparent names; None for none or a malformed one."""
    found = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None or int(found[1], 16) == 0 or int(found[2], 16) == 0:
        return None
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    context = SpanContext(int(found[1], 16), int(found[2], 16), is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return set_span_in_context(NonRecordingSpan(context))


def _ns(moment: float, offset: float) -> int:
    return int((moment + offset) * 1e9)
