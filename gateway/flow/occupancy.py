"""What is in flight on one backend, kept as counts, so that "would this still fit" is a few integer operations.

Owns: sequences, KV blocks and, for every box, how many requests in flight are *not* inside it. Promises: the set of
boxes that still hold everything (`possible`) is exact after any add, remove and rebase, and no count goes below zero.
Talks to: `envelope`.
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.errors import PlimsollError
from gateway.flow.envelope import Envelope


class OccupancyError(PlimsollError):
    """Something was taken out that was never put in: a defect, never a caller's doing."""


class Occupancy:
    """Counts for one backend. A request is given as its mask (from its envelope), sequences and KV blocks."""

    __slots__ = (
        "_outside",
        "allowed",
        "blocks",
        "envelope",
        "foreign",
        "others",
        "others_blocks",
        "possible",
        "requests",
        "sequences",
    )

    def __init__(self, envelope: Envelope) -> None:
        self.envelope = envelope
        self.foreign = 0  # sequences of unknown origin, under the policy `foreign: count`
        self.others = self.others_blocks = 0  # what other replicas are known to hold, while something waits for it here
        self.allowed = envelope.everything  # the boxes that hold what all replicas have in flight, as far as is known
        self._clear()

    def _clear(self) -> None:
        self.requests = self.sequences = self.blocks = 0
        self.possible = self.envelope.everything
        self._outside = [0] * len(self.envelope.boxes)

    def add(self, mask: int, sequences: int, blocks: int) -> None:
        """One more in flight."""
        self.requests += 1
        self.sequences += sequences
        self.blocks += blocks
        missing = self.envelope.everything & ~mask
        if missing:
            self.possible &= mask
            self._count(missing, 1)

    def remove(self, mask: int, sequences: int, blocks: int) -> None:
        """One less. Raises OccupancyError, and changes nothing, when the counts say it cannot have been there."""
        if self.requests < 1 or self.sequences < sequences or self.blocks < blocks:
            raise OccupancyError("a request ended that was not counted in flight")
        self.requests -= 1
        self.sequences -= sequences
        self.blocks -= blocks
        missing = self.envelope.everything & ~mask
        if missing:
            self._count(missing, -1)

    def _count(self, missing: int, step: int) -> None:
        while missing:
            bit = missing & -missing
            index = bit.bit_length() - 1
            self._outside[index] += step
            if not self._outside[index]:
                self.possible |= bit
            missing ^= bit

    def fits(self, mask: int, sequences: int, blocks: int) -> bool:
        """The rule: one box holds this and everything in flight, in size and number, and the KV budget holds."""
        mask &= self.possible & self.allowed
        if not mask:
            return False
        envelope = self.envelope
        if self.sequences + self.foreign + self.others + sequences > envelope.caps[(mask & -mask).bit_length() - 1]:
            return False
        return envelope.budget_blocks is None or self.blocks + self.others_blocks + blocks <= envelope.budget_blocks

    def room(self, mask: int) -> int:
        """Sequences of this mask that could still be added, budget aside; never negative."""
        return max(0, self.envelope.cap(mask & self.possible & self.allowed) - self.sequences - self.foreign - self.others)

    def full(self) -> bool:
        """Whether no request of any shape could be added."""
        return self.sequences + self.foreign + self.others >= self.envelope.cap(self.possible & self.allowed)

    def beside(self, sequences: int, blocks: int, allowed: int) -> None:
        """What other replicas hold, as the shared state has just told."""
        self.others, self.others_blocks, self.allowed = sequences, blocks, allowed

    def alone(self) -> None:
        """Nothing is known of other replicas: the shared state is asked before anything is sent."""
        self.beside(0, 0, self.envelope.everything)

    def to_drain(self, mask: int, sequences: int) -> int:
        """How much of what is in flight must end before the request could fit: the least over its boxes."""
        over = self.sequences + self.foreign + self.others + sequences
        needs = [max(self._outside[index], over - cap, 0) for index, cap in enumerate(self.envelope.caps) if mask >> index & 1]
        return min(needs, default=over)

    def record_for(self, mask: int, sequences: int = 0) -> str:
        """Id of the narrowest record whose box holds this mask, all in flight and `sequences` more; "" when none does."""
        mask &= self.possible
        total = self.sequences + self.foreign + sequences
        while mask:
            index = mask.bit_length() - 1
            if self.envelope.caps[index] >= total:
                return self.envelope.boxes[index].record
            mask ^= 1 << index
        return ""

    def rebase(self, envelope: Envelope, in_flight: Iterable[tuple[int, int, int]]) -> None:
        """Another envelope for the same engine: count again what is in flight, by its masks in the new one."""
        self.envelope = envelope
        self._clear()
        self.alone()  # the masks of others were of the old envelope
        for mask, sequences, blocks in in_flight:
            self.add(mask, sequences, blocks)
