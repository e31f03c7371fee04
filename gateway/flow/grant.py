"""The permission to send one request to one backend, settled exactly once.

Owns: what was reserved. Promises: `settle` gives everything back, once; a second call raises and changes nothing; a
grant whose result is never reported gives its breaker probe back at settlement. Talks to: `bay`, and the controller
that made it, through `Settler`.
"""

from __future__ import annotations

from typing import Protocol

from gateway.errors import Refusal
from gateway.flow.bay import Bay, size_bucket
from gateway.flow.breaker import Permit, Result, State
from gateway.flow.demand import Demand, SettledTwice
from gateway.flow.lanes import Tenant
from gateway.flow.shape import Shape
from gateway.flow.waiting import Waiting


class Settler(Protocol):
    """Who made the grant, and is told once when it ends."""

    def after_settle(self, grant: Grant, now: float, used: int | None) -> None: ...

    def after_give_back(self, grant: Grant, now: float) -> None: ...


class Lease(Protocol):
    """What the shared state has agreed to, where there is one."""

    def dispatch(self, now: float) -> bool: ...

    def end(self, refund: float) -> None: ...


class Grant:
    """`record`: id of the narrowest record that holds the request and everything beside it. `queue_s`: seconds waited.

    `tokens`: reserved by the whole request. `cost`: charged to the tenant's virtual time.
    """

    __slots__ = ("_bay", "_owner", "_permit", "_tally", "blocks", "cost", "decoding", "demand", "hash", "lease", "mask",
                 "place", "queue_s", "record", "settled", "shape", "tenant", "tokens")  # fmt: skip

    def __init__(self, demand: Demand, bay: Bay, mask: int, blocks: int, permit: Permit, queue_s: float, owner: Settler) -> None:
        """Count it in flight on `bay`, whose occupancy must have room for it."""
        shape: Shape = demand.shape
        sequences = shape[4]
        tokens = sequences * (shape[2] + shape[3])
        occupancy = bay.occupancy
        self.demand = demand
        self.shape = shape
        self.mask = mask
        self.blocks = blocks
        self.queue_s = queue_s
        self.hash = bay.hash
        self.tokens = tokens
        self.cost = tokens * occupancy.envelope.factor(mask)
        self.tenant: Tenant | None = None
        self.place: Waiting | None = None  # where it waited, if it did
        self.lease: Lease | None = None
        self.decoding = False
        self.settled = False
        self._bay = bay
        self._permit: Permit | None = permit
        self._owner = owner
        occupancy.add(mask, sequences, blocks)
        bay.live[self] = None
        self._tally = bay.tally(demand.priority_class, size_bucket(tokens))
        self._tally.prefill += sequences
        self.record = occupancy.record_for(mask)

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self._bay.name

    @property
    def would(self) -> Refusal | None:
        """Under `enforcement: observe`, the refusal an enforcing gateway had said; here nothing."""
        return None

    def prefill_done(self) -> None:
        """The first token has come: from now on the request counts as decoding."""
        if not self.settled and not self.decoding:
            self.decoding = True
            self._tally.prefill -= self.shape[4]
            self._tally.decode += self.shape[4]

    def composition(self) -> dict[str, int]:
        """Sequences in flight on the backend as `phase:class:size`, this request included; asked at admission."""
        return {":".join(kind): count for kind, count in self._bay.composition().items()}

    def report(self, result: Result, now: float) -> None:
        """Tell the breaker what this request says about the backend; only the first report counts."""
        permit = self.take_permit()
        if permit is not None:
            self._bay.breaker.record(permit, result, now)

    def take_permit(self) -> Permit | None:
        """The breaker's permit, for whoever will report; None once it was taken or reported."""
        permit, self._permit = self._permit, None
        return permit

    def settle(self, now: float, input_tokens: int | None = None, output_tokens: int | None = None) -> None:
        """The response has ended. Token counts are the whole request's, None where nothing is known (the reservation
        stands then). Raises SettledTwice, changing nothing, on a second call."""
        used = None if input_tokens is None or output_tokens is None else input_tokens + output_tokens
        self._release(now, 0.0 if used is None or used >= self.tokens else self.cost * (1 - used / self.tokens))
        self._owner.after_settle(self, now, used)

    def give_back(self, now: float) -> None:
        """Nobody took the grant: as if it had never been made. Raises SettledTwice like `settle`."""
        self._release(now, self.cost)
        self._owner.after_give_back(self, now)

    def put_back(self, now: float) -> None:
        """Another replica holds the room: what was counted is uncounted, the request goes on waiting."""
        self._release(now, self.cost)
        if self.tenant is not None:
            self.tenant.charge(-self.cost)

    def may_dispatch(self, now: float) -> bool:
        """Whether it may be sent now: false when the shared state may have given its room to others since."""
        return self.lease is None or self.lease.dispatch(now)

    def _release(self, now: float, refund: float) -> None:
        if self.settled:
            raise SettledTwice(f"a grant on {self.backend} was settled twice")
        self.settled = True
        bay, sequences = self._bay, self.shape[4]
        if bay.breaker.state is not State.CLOSED:
            self.report(Result.IGNORED, now)
        del bay.live[self]
        bay.occupancy.remove(self.mask, sequences, self.blocks)
        if self.lease is not None:
            self.lease.end(refund)
        if self.decoding:
            self._tally.decode -= sequences
        else:
            self._tally.prefill -= sequences
