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


class Bay:
    """A backend's place in the controller."""

    __slots__ = ("breaker", "composition", "gate", "hash", "listed", "live", "name", "occupancy", "open", "salt")

    def __init__(self, name: str, breaker: Breaker) -> None:
        self.name = name
        self.salt = crc32(name.encode())
        self.breaker = breaker
        self.gate: Gate = UNSEEN
        self.listed = False  # named by the present policy
        self.open = False
        self.hash = ""
        self.occupancy = Occupancy(_NOTHING)
        self.live: dict[Grant, None] = {}
        self.composition: dict[tuple[str, str, str], int] = {}  # (phase, class, size bucket) -> sequences

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

    def place(self, grant: Grant) -> None:
        """Count a new grant in flight."""
        self.occupancy.add(grant.mask, grant.shape[4], grant.blocks)
        self.live[grant] = None
        self.compose(grant.kind, grant.shape[4])

    def release(self, grant: Grant) -> None:
        """Count a grant out."""
        del self.live[grant]
        self.occupancy.remove(grant.mask, grant.shape[4], grant.blocks)
        self.compose(grant.kind, -grant.shape[4])

    def compose(self, kind: tuple[str, str, str], sequences: int) -> None:
        self.composition[kind] = self.composition.get(kind, 0) + sequences

    def ready(self, now: float) -> bool:
        """Open, and the breaker lets at least one request through."""
        return self.open and (self.breaker.state is State.CLOSED or self.breaker.would_allow(now))

    def refusal(self, now: float) -> Refusal | None:
        """Why nothing can be sent here now or for a while; None when it can, or when a probe is out."""
        if isinstance(self.gate, Closed):
            return self.gate.refusal
        wait = self.breaker.retry_after_s(now)
        if wait is None:
            return None
        return Refusal(Reason.BACKEND_UNAVAILABLE, f"the backend fails; it is tried again in {wait:.1f} s", retry_after_s=wait)
