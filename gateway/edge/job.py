"""One request under way: what has been found out about it, and the clocks that may end it.

Owns the deadlines of one request after dispatch, as numbers that a ticker compares. What its relay has to tell, it passes on
to the path. A task belongs to it only while it waits for something: once sent, the sockets' events carry it on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from gateway import policy as policies
from gateway.errors import Reason
from gateway.flow import deadlines

if TYPE_CHECKING:
    from gateway.edge.agreement import Provisional
    from gateway.edge.body import Parsed
    from gateway.edge.incoming import Incoming
    from gateway.edge.protocol import PlimsollProtocol
    from gateway.edge.rules import ModelPath, PathRules, TenantPath
    from gateway.flow.demand import Demand
    from gateway.flow.grant import Grant
    from gateway.flow.waiting import Waiting
    from gateway.forward.connection import Headers
    from gateway.forward.relay import End, Relay
    from gateway.observe.exchange import Exchange

_PATIENCE = (b"x-request-timeout", b"x-stainless-timeout", b"x-stainless-read-timeout")
_RETRIES = b"x-stainless-retry-count"
_ASKED = frozenset({*_PATIENCE, _RETRIES})
_WATCH_AFTER_S = 1.0  # of silence: from then on the engine's progress is sampled


class Path(Protocol):
    """Where a job goes on when its answer comes."""

    def stream_head(self, job: Job, status: int, headers: Headers) -> bytes:
        """The head to send before the first byte of a stream."""

    def ended(self, job: Job, end: End) -> None:
        """The exchange with the backend is over."""


class Job:
    """Everything known of one proxied request. `caller_due`: when its caller gives up, less what an answer needs."""

    __slots__ = (
        "answered", "caller_due", "client", "demand", "dispatched", "exchange", "grant", "incoming", "keep_alive",
        "limit_written", "model", "parsed", "path", "progress", "progress_at", "provisional", "relay", "retried", "retries",
        "rules", "started", "task", "tenant", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        path: Path,
        client: PlimsollProtocol,
        incoming: Incoming,
        rules: PathRules,
        tenant: TenantPath,
        exchange: Exchange,
    ) -> None:
        self.path = path
        self.client = client
        self.incoming = incoming
        self.rules = rules
        self.tenant = tenant
        self.exchange = exchange
        self.model: ModelPath | None = None
        self.parsed: Parsed | None = None
        self.demand: Demand | None = None
        self.task: asyncio.Task[None] | None = None  # while it waits for a thread, a count, a place or a connection
        self.started = False  # whether the task has begun: one that has not ends without a trace when it is cancelled
        self.retried = False
        self.waiting: Waiting | None = None  # its place in the queue, until the task takes it over
        self.provisional: Provisional | None = None  # a grant that others have to agree to, until the task takes it over
        self.grant: Grant | None = None
        self.relay: Relay | None = None
        self.dispatched = False  # under the present grant
        self.limit_written: int | None = None
        self.answered = False
        self.keep_alive = False  # whether the client's connection may be used again after the answer
        self.progress: int | None = None  # the engine's counter of iterations when it last moved
        self.progress_at = 0.0
        self.retries = 0
        self.caller_due: float | None = None
        if not _ASKED.isdisjoint(incoming.fields):
            self.retries = retries_of(incoming.fields)
            patience = deadlines.patience([incoming.fields.get(name) for name in _PATIENCE])
            self.caller_due = deadlines.caller_deadline(incoming.received_at, patience)

    # The relay's owner

    def stream_head(self, status: int, headers: Headers) -> bytes:
        return self.path.stream_head(self, status, headers)

    def first_token(self) -> None:
        if self.grant is not None:
            self.grant.prefill_done()

    def ended(self, end: End) -> None:
        self.path.ended(self, end)

    # Clocks

    def overdue(self, now: float, progress: Callable[[str], int | None]) -> Reason | None:
        """The reason to end a dispatched request now; None to go on. `progress(backend)`: iterations of its engine."""
        relay, sent = self.relay, self.exchange.dispatched_at
        if relay is None or sent is None or relay.over:
            return None
        timeouts, paused_at = self.rules.timeouts, self.client.paused_at
        if paused_at is not None and now >= paused_at + timeouts.client_write_s:
            return Reason.CLIENT_WRITE_TIMEOUT
        if self.caller_due is not None and now >= self.caller_due and not relay.begun:
            return Reason.CALLER_DEADLINE
        if now >= sent + timeouts.execution_s:
            return Reason.EXECUTION_TIMEOUT
        if relay.stream and relay.first_at is None and now >= sent + timeouts.first_token_s:
            return Reason.FIRST_TOKEN_TIMEOUT
        last = relay.last_at or sent
        if (
            paused_at is None
            and now - last >= min(_WATCH_AFTER_S, timeouts.stall_s / 4)
            and self._stalled(now, last, timeouts, progress)
        ):
            return Reason.STALL_TIMEOUT
        return None

    def _stalled(self, now: float, last: float, timeouts: policies.Timeouts, progress: Callable[[str], int | None]) -> bool:
        """Silent for stall_s while the engine stood still. Where its progress is unknown, only a stream that had begun stalls."""
        relay = self.relay
        assert relay is not None
        seen = progress(self.exchange.backend or "")
        if seen is None:
            return relay.stream and relay.first_at is not None and now - last >= timeouts.stall_s
        if seen != self.progress:
            self.progress, self.progress_at = seen, now
        return now - max(last, self.progress_at) >= timeouts.stall_s


def retries_of(fields: dict[bytes, bytes]) -> int:
    """How often the caller's client has sent this before, by its own count; 0 when it does not say."""
    value = fields.get(_RETRIES)
    return int(value) if value is not None and len(value) < 4 and value.isdigit() else 0
