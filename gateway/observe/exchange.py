"""What is known of one request, filled in as it travels; metrics, journal and traces read it once, when it has ended."""

from __future__ import annotations

from gateway.errors import Outcome, Reason
from gateway.flow.shape import Shape


class Exchange:
    """One request's account. Times are monotonic seconds, None until they happened.

    `input_tokens` and `output_tokens` are what the backend's usage said, or (`usage_estimated`) what was
    counted from its stream; None when nothing is known. Names come from the policy, never from the client.
    """

    __slots__ = (
        "admitted_at", "attempts", "backend", "client_request_id", "composition", "dispatched_at", "ended_at", "events",
        "first_at", "input_tokens", "key_id", "last_at", "message", "model", "outcome", "output_tokens", "peer", "priority_class",
        "queue_s", "reason", "received_at", "record", "request_id", "response_bytes", "route", "shape", "status", "stream",
        "tenant", "traceparent", "usage_estimated",
    )  # fmt: skip

    def __init__(self, request_id: str, route: str, received_at: float) -> None:
        self.request_id = request_id
        self.client_request_id: str | None = None
        self.route = route
        self.received_at = received_at
        self.peer: str | None = None
        self.traceparent: str | None = None  # as the caller sent it: for correlation only
        self.key_id: str | None = None
        self.tenant: str | None = None
        self.priority_class: str | None = None
        self.model: str | None = None
        self.backend: str | None = None
        self.record: str | None = None
        self.shape: Shape | None = None
        self.stream = False
        self.admitted_at: float | None = None
        self.dispatched_at: float | None = None
        self.first_at: float | None = None  # first content byte from the backend
        self.last_at: float | None = None
        self.ended_at: float | None = None
        self.queue_s = 0.0
        self.composition: dict[str, int] | None = None  # what was in flight and how old the queue was, at admission
        self.attempts = 0
        self.events = 0  # SSE data events relayed
        self.response_bytes = 0
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.usage_estimated = False
        self.status = 0
        self.outcome = Outcome.SERVED
        self.reason = Reason.OK
        self.message: str | None = None
