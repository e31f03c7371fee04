"""One backend as the controller sees it: its gate, what is in flight, its breaker.

Owns: the gate, the occupancy and the set of live grants, changed together so that they always agree. Promises: what
is in flight survives a change of the gate and is counted again by the new envelope. Talks to: `envelope`,
`occupancy`, `breaker`, `grant`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

from gateway.errors import Reason, Refusal
from gateway.flow.breaker import Breaker, State
from gateway.flow.demand import Closed, Gate, Open
from gateway.flow.envelope import Envelope
from gateway.flow.occupancy import Occupancy

if TYPE_CHECKING:
    from gateway.flow.grant import Grant

_NOTHING = Envelope(boxes=())
UNSEEN = Closed(Refusal(Reason.NO_QUALIFIED_RECORD, "the backend has not been checked yet", retry_after_s=30))
NOTHING_QUALIFIES = Closed(Refusal(Reason.NO_QUALIFIED_RECORD, "no slice of any record qualifies", retry_after_s=30))

SIZES = ((1024, "le1k"), (8192, "le8k"), (32768, "le32k"))


def size_bucket(tokens: int) -> str:
    """A request's reserved tokens as one of four labels."""
    for limit, name in SIZES:
        if tokens <= limit:
            return name
    return "gt32k"


class Tally:
    """Sequences in flight of one class and size, by phase."""

    __slots__ = ("decode", "prefill")

    def __init__(self) -> None:
        self.prefill = 0
        self.decode = 0


class Bay:
    """A backend's place in the controller."""

    __slots__ = ("breaker", "gate", "hash", "listed", "live", "name", "occupancy", "open", "salt", "tallies", "whole")

    def __init__(self, name: str, breaker: Breaker) -> None:
        self.name = name
        self.salt = crc32(name.encode())
        self.breaker = breaker
        self.gate: Gate = UNSEEN
        self.listed = False  # named by the present policy
        self.open = False
        self.whole: Open | None = None  # the open gate before it was divided among replicas that cannot agree
        self.hash = ""
        self.occupancy = Occupancy(_NOTHING)
        self.live: dict[Grant, None] = {}
        self.tallies: dict[tuple[str, str], Tally] = {}  # by class and size bucket

    def set_gate(self, gate: Gate) -> None:
        """Put another gate before the backend; what is in flight is counted by the new envelope."""
        if isinstance(gate, Open) and not gate.envelope.boxes:
            gate = NOTHING_QUALIFIES
        self.gate = gate
        self.open = isinstance(gate, Open)
        if isinstance(gate, Open):
            self.hash = gate.hash
            envelope = gate.envelope
            for grant in self.live:
                grant.mask, grant.blocks = envelope.mask(grant.shape), envelope.blocks(grant.shape)
            self.occupancy.rebase(envelope, ((g.mask, g.shape.sequences, g.blocks) for g in self.live))

    def tally(self, priority_class: str, size: str) -> Tally:
        """The running count of a class and size bucket; both come from closed lists."""
        tally = self.tallies.get((priority_class, size))
        if tally is None:
            tally = self.tallies[(priority_class, size)] = Tally()
        return tally

    def composition(self) -> dict[tuple[str, str, str], int]:
        """Sequences in flight by (phase, class, size bucket), zeros left out."""
        found: dict[tuple[str, str, str], int] = {}
        for (name, size), tally in self.tallies.items():
            if tally.prefill:
                found[("prefill", name, size)] = tally.prefill
            if tally.decode:
                found[("decode", name, size)] = tally.decode
        return found

    def ready(self, now: float) -> bool:
        """Open, and the breaker lets at least one request through."""
        return self.open and (self.breaker.state is State.CLOSED or self.breaker.would_allow(now))

    def refusal(self, now: float) -> Refusal | None:
        """Why nothing can be sent here now or for a while; None when it can, or when a probe is out."""
        if isinstance(self.gate, Closed):
            return self.gate.refusal
        wait = None if self.breaker.state is State.CLOSED else self.breaker.retry_after_s(now)
        if wait is None:
            return None
        return Refusal(Reason.BACKEND_UNAVAILABLE, f"the backend fails; it is tried again in {wait:.1f} s", retry_after_s=wait)
