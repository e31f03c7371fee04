"""The permission to send one request to one backend, settled exactly once.

Owns: what was reserved. Promises: `settle` gives everything back, once; a second call raises and changes nothing; a
grant whose result is never reported gives its breaker probe back at settlement. Talks to: `bay`, and the controller
that made it, through one callback.
"""

from __future__ import annotations

from typing import Protocol

from gateway.flow.bay import Bay, size_bucket
from gateway.flow.breaker import Permit, Result
from gateway.flow.demand import Demand, SettledTwice
from gateway.flow.queue import Tenant
from gateway.flow.shape import Shape


class Settler(Protocol):
    """Who made the grant, and is told once when it ends."""

    def after_settle(self, grant: Grant, now: float, used: int | None) -> None: ...

    def after_give_back(self, grant: Grant, now: float) -> None: ...


class Grant:
    """`record`: id of the narrowest record that holds the request and everything beside it. `queue_s`: seconds waited."""

    __slots__ = ("_bay", "_owner", "_permit", "blocks", "cost", "demand", "hash", "kind", "mask", "queue_s", "record",
                 "settled", "shape", "tenant")  # fmt: skip

    def __init__(self, demand: Demand, bay: Bay, mask: int, blocks: int, permit: Permit, queue_s: float, owner: Settler) -> None:
        self.demand = demand
        self.shape: Shape = demand.shape
        self.mask = mask
        self.blocks = blocks
        self.queue_s = queue_s
        self.hash = bay.hash
        self.record = ""
        self.cost = 0.0
        self.tenant: Tenant | None = None
        self.settled = False
        self.kind = ("prefill", demand.priority_class, size_bucket(demand.shape.tokens))
        self._bay = bay
        self._permit: Permit | None = permit
        self._owner = owner

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self._bay.name

    def prefill_done(self) -> None:
        """The first token has come: from now on the request counts as decoding."""
        if not self.settled and self.kind[0] == "prefill":
            self._bay.compose(self.kind, -self.shape.sequences)
            self.kind = ("decode", *self.kind[1:])
            self._bay.compose(self.kind, self.shape.sequences)

    def composition(self) -> dict[str, int]:
        """Sequences in flight on the backend by phase, class and size, this one included; asked at admission."""
        return {":".join(kind): count for kind, count in self._bay.composition.items() if count}

    def report(self, result: Result, now: float) -> None:
        """Tell the breaker what this request says about the backend; only the first report counts."""
        permit, self._permit = self._permit, None
        if permit is not None:
            self._bay.breaker.record(permit, result, now)

    def settle(self, now: float, input_tokens: int | None = None, output_tokens: int | None = None) -> None:
        """The response has ended. Token counts are the whole request's, None where nothing is known (the reservation
        stands then). Raises SettledTwice, changing nothing, on a second call."""
        self._release(now)
        used = None if input_tokens is None or output_tokens is None else input_tokens + output_tokens
        self._owner.after_settle(self, now, used)

    def give_back(self, now: float) -> None:
        """Nobody took the grant: as if it had never been made. Raises SettledTwice like `settle`."""
        self._release(now)
        self._owner.after_give_back(self, now)

    def _release(self, now: float) -> None:
        if self.settled:
            raise SettledTwice(f"a grant on {self.backend} was settled twice")
        self.settled = True
        if self._permit is not None:
            self.report(Result.IGNORED, now)
        self._bay.release(self)
