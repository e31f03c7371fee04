"""Would it be admitted now, and why: the answer of the same functions that decide, changing nothing.

Talks to: `pool`, `refusals`, `backlog`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gateway import policy
from gateway.errors import Refusal
from gateway.flow import refusals
from gateway.flow.backlog import Backlog
from gateway.flow.demand import Demand
from gateway.flow.pool import Route, choose
from gateway.flow.waiting import Waiting


@dataclass(frozen=True, slots=True)
class Explanation:
    """`decision`; the backend and record it would go to; how many wait before it; the refusal, when it is one.

    `wait_s`: a low estimate, None while the drain rate is unknown. `rule` says in words what decided.
    """

    decision: Literal["admit", "wait", "refuse"]
    rule: str
    backend: str | None = None
    record: str | None = None
    ahead: int = 0
    wait_s: float | None = None
    refusal: Refusal | None = None


def explain(
    route: Route,
    demand: Demand,
    now: float,
    refusal: Refusal | None,
    queue: policy.Queue,
    backlog: Backlog,
) -> Explanation:
    """The decision on `demand` if it came now. `refusal`: what draining or the tenant's quotas say already."""
    pool = route.pool
    entry = Waiting(demand, route, 0, now)
    pool.plan(entry)
    if refusal is None and demand.caller_deadline is not None and demand.caller_deadline <= now:
        refusal = refusals.caller_gone()
    refusal = refusal or refusals.hopeless(route, demand, entry.masks, now)
    if refusal is not None:
        return Explanation("refuse", refusal.message, refusal=refusal)
    bay = choose(entry, now, ())
    if bay is not None and not pool.waiting:
        mask = entry.masks[route.bays.index(bay)]
        record = bay.occupancy.record_for(mask, demand.shape.sequences)
        return Explanation("admit", "a qualified slice holds it and everything in flight", bay.name, record)
    estimate = pool.wait_s(entry)
    if estimate is not None and estimate > entry.deadline - now:
        refusal = refusals.would_wait(estimate, entry.deadline - now)
    refusal = refusal or refusals.full(queue, backlog.requests, backlog.tokens, demand, pool)
    if refusal is not None:
        return Explanation("refuse", refusal.message, refusal=refusal)
    ahead = sum(level.waiting for level in pool.ranked if level.priority <= demand.priority)
    rule = f"{ahead} requests wait before it" if ahead else "no room beside what is in flight"
    return Explanation("wait", rule, ahead=ahead, wait_s=estimate)
