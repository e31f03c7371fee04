"""Every clock of a request as data: which deadline is due next, and which reason wins when several are over.

Owns the rules; the times themselves live with the request. Promises: pure; a deadline that is not running is None; of
those that are over, the one that was due first wins, and at the same instant the order of `_PRECEDENCE`. The queue's
deadline never counts against the execution clock, which starts at dispatch. Talks to: the policy's `timeouts` section.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gateway import policy
from gateway.errors import Reason

MARGIN_MIN_S = 0.1
MARGIN_SHARE = 0.02

_PRECEDENCE = (
    Reason.CALLER_DEADLINE,
    Reason.CLIENT_WRITE_TIMEOUT,
    Reason.EXECUTION_TIMEOUT,
    Reason.FIRST_TOKEN_TIMEOUT,
    Reason.STALL_TIMEOUT,
    Reason.UPSTREAM_UNREACHABLE,
    Reason.QUEUE_TIMEOUT,
)
_RANK = {reason: rank for rank, reason in enumerate(_PRECEDENCE)}


class Progress(NamedTuple):
    """What has happened to one request. Monotonic seconds; None: not yet.

    `stream`: the answer is streamed. `progress_at`: the last content event, or engine progress seen, whichever is later.
    `blocked_at`: since when the client takes no bytes. `caller_at`: the caller's own deadline, margin taken off.
    """

    received_at: float
    stream: bool
    queue_at: float | None = None
    caller_at: float | None = None
    admitted_at: float | None = None
    dispatched_at: float | None = None
    first_at: float | None = None
    progress_at: float | None = None
    blocked_at: float | None = None


class Due(NamedTuple):
    """A deadline: the instant, and the reason if it passes."""

    at: float
    reason: Reason


def caller_deadline(received_at: float, patience_s: float | None) -> float | None:
    """A little before the caller gives up (the larger of 100 ms and 2 %), so that it hears why; None: no patience told."""
    if patience_s is None:
        return None
    return received_at + max(0.0, patience_s - max(MARGIN_MIN_S, MARGIN_SHARE * patience_s))


def patience(values: tuple[str | bytes | None, ...]) -> float | None:
    """The least of the timeouts a caller states, in seconds; what is not a positive finite number is ignored."""
    found = []
    for value in values:
        try:
            seconds = float(value) if value is not None else 0.0
        except ValueError:
            continue
        if 0 < seconds < float("inf"):
            found.append(seconds)
    return min(found, default=None)


def next_due(limits: policy.Timeouts, at: Progress) -> Due | None:
    """The deadline that comes first; None when none is running."""
    return min(_running(limits, at), key=_order, default=None)


def expired(limits: policy.Timeouts, at: Progress, now: float) -> Reason | None:
    """The reason to end the request with at `now`, None while no deadline is over."""
    due = next_due(limits, at)
    return due.reason if due is not None and due.at <= now else None


def _order(due: Due) -> tuple[float, int]:
    return due.at, _RANK[due.reason]


def _running(limits: policy.Timeouts, at: Progress) -> Iterator[Due]:
    """The deadlines that run in the request's present phase: waiting, connecting, executing."""
    if at.caller_at is not None and not (at.stream and at.first_at is not None):
        yield Due(at.caller_at, Reason.CALLER_DEADLINE)
    if at.admitted_at is None:
        if at.queue_at is not None:
            yield Due(at.queue_at, Reason.QUEUE_TIMEOUT)
        return
    if at.dispatched_at is None:
        yield Due(at.admitted_at + limits.connect_s, Reason.UPSTREAM_UNREACHABLE)
        return
    yield Due(at.dispatched_at + limits.execution_s, Reason.EXECUTION_TIMEOUT)
    if at.stream and at.first_at is None:
        yield Due(at.dispatched_at + limits.first_token_s, Reason.FIRST_TOKEN_TIMEOUT)
    if at.stream and at.first_at is not None and at.blocked_at is None:
        yield Due(max(at.first_at, at.progress_at or 0.0) + limits.stall_s, Reason.STALL_TIMEOUT)
    if at.blocked_at is not None:
        yield Due(at.blocked_at + limits.client_write_s, Reason.CLIENT_WRITE_TIMEOUT)
