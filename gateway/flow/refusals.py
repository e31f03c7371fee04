"""The words of every no that admission says. Pure; no state, no clock. Talks to: `bay`, `pool`."""

from __future__ import annotations

from gateway import policy
from gateway.errors import Axis, Reason, Refusal
from gateway.flow.bay import Bay
from gateway.flow.demand import Closed, Demand
from gateway.flow.pool import Pool, Route
from gateway.flow.shape import Shape
from gateway.flow.waiting import Waiting

_AXES = (Axis.FEATURE, Axis.INPUT, Axis.OUTPUT, Axis.SEQUENCES)


def hopeless(route: Route, demand: Demand, masks: tuple[int, ...], now: float) -> Refusal | None:
    """Why no candidate will take the request, now or once room is free; None while one may.

    A size outside every open envelope is the caller's to change; unless a backend that is closed for a while would have
    held it. Of several closed backends the one that may be back first speaks.
    """
    closed = []
    possible = [bay for bay, mask in zip(route.bays, masks, strict=True) if mask]
    for bay in possible:
        refusal = bay.refusal(now)
        if refusal is None:
            return None
        closed.append(refusal)
    shut = [bay for bay in route.bays if isinstance(bay.gate, Closed)]
    if not possible:
        opened = [bay for bay in route.bays if bay.open]
        holders = [bay for bay in shut if bay.occupancy.envelope.place(demand.shape)]
        if opened and not holders:
            return nearest(route, demand.shape).occupancy.envelope.explain(demand.shape)
    closed += [bay.gate.refusal for bay in shut if isinstance(bay.gate, Closed)]
    if not closed:
        return Refusal(Reason.BACKEND_UNAVAILABLE, "the model has no backend")
    return min(closed, key=lambda refusal: (refusal.retry_after_s is None, refusal.retry_after_s or 0.0))


def nearest(route: Route, shape: Shape) -> Bay:
    """The candidate whose envelope the shape leaves last: later axes are nearer misses; open ones before closed ones."""

    def misses_by(bay: Bay) -> tuple[bool, int]:
        envelope = bay.occupancy.envelope
        if not bay.open or envelope.place(shape):
            return bay.open, len(_AXES)
        axis = envelope.explain(shape).axis
        return True, _AXES.index(axis) if axis is not None else 0

    return max(route.bays, key=misses_by)


def retry_after_s(pool: Pool) -> float:
    """When room is likely: the time the whole queue takes to drain at its present rate, 1 to 60 s; 1 while unknown."""
    estimate = pool.drain.seconds_for(sum(level.cost for level in pool.ranked))
    return 1.0 if estimate is None else min(60.0, max(1.0, estimate))


def full(queue: policy.Queue, waiting: int, tokens: int, demand: Demand, pool: Pool) -> Refusal | None:
    """The queue's bounds in requests and tokens; None while one more fits."""
    if waiting >= queue.max_requests:
        text = f"the backends are busy and the queue is full: {waiting} requests wait, of {queue.max_requests} allowed"
    elif queue.max_tokens is not None and tokens + demand.shape.tokens > queue.max_tokens:
        text = f"the backends are busy and the queue is full: {tokens} tokens wait, of {queue.max_tokens} allowed"
    else:
        return None
    return Refusal(Reason.QUEUE_FULL, text, axis=Axis.CONCURRENCY, retry_after_s=retry_after_s(pool))


def would_wait(estimate_s: float, patience_s: float) -> Refusal:
    """Refused on arrival: waiting would be in vain."""
    text = f"the backends are busy: the wait is about {estimate_s:.1f} s, longer than the {max(0.0, patience_s):.1f} s allowed"
    after = min(60.0, max(1.0, estimate_s - patience_s))
    return Refusal(Reason.QUEUE_TIMEOUT, text, axis=Axis.CONCURRENCY, retry_after_s=after)


def expired(waiting: Waiting, now: float) -> Refusal:
    """Waited in vain: the queue's deadline is over, or the caller's own, whichever came first."""
    demand = waiting.demand
    if demand.caller_deadline is not None and demand.caller_deadline <= min(demand.queue_deadline, now):
        return caller_gone()
    text = f"no room within {now - waiting.enqueued_at:.1f} s"
    return Refusal(Reason.QUEUE_TIMEOUT, text, axis=Axis.CONCURRENCY, retry_after_s=retry_after_s(waiting.route.pool))


def caller_gone() -> Refusal:
    """The caller's own patience is over."""
    return Refusal(Reason.CALLER_DEADLINE, "the caller's own timeout is over; nothing was sent to a backend")
