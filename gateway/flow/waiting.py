"""One waiting request: the handle between the request path, the queue and the controller.

Owns nothing but its own fields. Promises: `phase` tells its one end. Talks to: `demand`.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import TYPE_CHECKING, Any

from gateway.flow.demand import Demand

if TYPE_CHECKING:
    from gateway.flow.lanes import Share, Tenant
    from gateway.flow.pool import Route


class Phase(Enum):
    WAITING = 1
    GRANTED = 2
    REFUSED = 3
    TAKEN = 4  # the waiter has its grant
    LEFT = 5


class Waiting:
    """One request in the queue; the handle that `Controller.wait` and `leave` take."""

    __slots__ = ("blocks", "cost", "deadline", "demand", "enqueued_at", "future", "hold", "masks", "name", "order", "passed",
                 "phase", "result", "route", "share", "size", "tenant")  # fmt: skip

    def __init__(self, demand: Demand, route: Route, order: int, now: float) -> None:
        self.demand = demand
        self.route = route
        self.order = order
        self.enqueued_at = now
        self.deadline = demand.queue_deadline
        if demand.caller_deadline is not None:
            self.deadline = min(self.deadline, demand.caller_deadline)
        self.masks: tuple[int, ...] = ()
        self.blocks: tuple[int, ...] = ()
        self.cost = 0.0
        self.size = 0  # see `size_class`
        self.passed = 0
        self.name = ""  # of the lease it asks for, where replicas share one limit
        self.hold: str | None = None  # the backend whose room is held for this one
        self.phase = Phase.WAITING
        self.result: Any = None
        self.future: asyncio.Future[None] | None = None
        self.share: Share | None = None
        self.tenant: Tenant | None = None

    def __lt__(self, other: Waiting) -> bool:
        return self.order < other.order

    def __hash__(self) -> int:  # said here, because a compiled class that compares has none by itself
        return id(self)


def size_class(cost: float) -> int:
    """Costs within a factor of four are alike: among them the earlier goes first."""
    return int(cost).bit_length() // 2
