"""Leases: what a replica holds on a backend, agreed between all replicas. The interface, and its words.

Owns no state. The rules that every store keeps, all on the store's own clock:

1. A lease is granted when one box of the asker's envelope holds the request and everything in flight, of whichever replica and
   however its own envelope looks, and sequences and KV blocks stay within that box's concurrency and the budget.
2. A replica is alive while it beats at least once a lease time. Leases of a replica that is not are *suspect*: they count until
   the backend's own count says that they are gone (`reap`), or until their execution deadline.
3. A replica that has not registered, or not since its connection was made anew, is granted nothing. To register is to say what
   it holds: what it names counts, what it does not name is gone.
4. A store that has lost its memory (another run, no epoch) grants nothing for one lease time.
5. Each replica shows the head of its queue. A request yields to another replica's head that is before it (priority, then the
   tenant's virtual time, then age) and fits; a head that does not fit is passed at most eight times, then room is held for it.
   Whoever makes room wakes the head that is next. A head that was woken and does not come for 200 ms loses its turn.
   A lower priority whose request is aged may pass more urgent ones with one grant in twenty, counted over all replicas.
6. Requests at the backend of gateways that never registered stop all granting.

Talks to: `memory` and `redis_store` implement it; `gateway.replicas` uses it.
"""

from __future__ import annotations

import hashlib
from asyncio import Future
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import NamedTuple, Protocol

import orjson

from gateway.errors import PlimsollError
from gateway.flow.shape import Shape

WOKEN_S = 0.2
OVERTAKINGS = 8
AGED_EVERY = 20
STRANGE_S = 2.5


class StateLost(PlimsollError):
    """The store did not answer, or cannot be used; what was asked may or may not have happened."""


class Row(NamedTuple):
    """One box of an envelope, as the store needs it. Sizes in tokens, `concurrency` in sequences, bounds inclusive."""

    task: str
    features: tuple[str, ...]
    input_min: int
    input_max: int
    output_min: int
    output_max: int
    concurrency: int


class Rules(NamedTuple):
    """An envelope: its boxes, widest first, and the budget in KV blocks (None: none). `digest` names it."""

    rows: tuple[Row, ...]
    budget: int | None
    digest: str
    text: bytes

    @classmethod
    def of(cls, rows: Iterable[Row], budget: int | None) -> Rules:
        """The rules with their digest: equal for every replica that qualified the same boxes."""
        boxes = tuple(rows)
        text = orjson.dumps({"boxes": [tuple(row) for row in boxes], "budget": -1 if budget is None else budget})
        return cls(boxes, budget, hashlib.sha256(text).hexdigest()[:12], text)

    def mask(self, shape: Shape) -> int:
        """Bit i is set where box i holds the shape; sequences are not looked at."""
        found = 0
        for index, row in enumerate(self.rows):
            inside = row.input_min <= shape.input_tokens <= row.input_max
            inside = inside and row.output_min <= shape.output_tokens <= row.output_max
            if inside and row.task == shape.task and shape.features <= frozenset(row.features):
                found |= 1 << index
        return found


class Ask(NamedTuple):
    """One request for a lease. `mask`: of its boxes in `rules`. `blocks`: KV blocks. `cost`: charged to the tenant.

    `waited_s`: how long it has waited already. `execution_s`: the longest it may run, from now.
    `aged_s`: when it has waited so long in all, it is aged; None: never.
    """

    lease: str
    rules: Rules
    mask: int
    shape: Shape
    blocks: int
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    cost: float = 1.0
    waited_s: float = 0.0
    execution_s: float = 600.0
    aged_s: float | None = None

    def packed(self) -> bytes:
        """As the script reads it."""
        shape, size = self.shape, len(self.rules.rows)
        bits = "".join("1" if self.mask >> index & 1 else "0" for index in range(size))
        return orjson.dumps((
            self.lease, bits, shape.task, sorted(shape.features), shape.input_tokens, shape.output_tokens, shape.sequences,
            self.blocks, self.priority, self.tenant, self.weight, self.cost, int(self.waited_s * 1000),
            int(self.execution_s * 1000), self.rules.digest,
            -1 if self.aged_s is None else int(self.aged_s * 1000),
        ))  # fmt: skip


class Verdict(StrEnum):
    GRANTED = "granted"
    DENIED = "denied"  # no room; the asker's head is registered now
    BEHIND = "behind"  # another replica's head goes first; a wake-up follows
    HELD = "held"  # room is held for another replica's head
    EARLY = "early"  # aged, but its level has had its turn: more urgent ones of the asker go first
    COLD = "cold"  # the store has lost its memory or sees strangers; again after `retry_s`
    UNREGISTERED = "unregistered"  # beat with everything held, then again
    OK = "ok"
    NEXT = "next"  # as OK, and the asker's own head may come
    ALIVE = "alive"  # there was nothing to reap


class View(NamedTuple):
    """What the *other* replicas hold: sequences, KV blocks, and the boxes that still hold everything in flight."""

    sequences: int
    blocks: int
    possible: int

    @classmethod
    def parse(cls, text: bytes) -> View:
        """From the script's `sequences blocks bits`; box 0 is the first bit of the text."""
        sequences, blocks, bits = text.split(b" ")
        possible = sum(1 << index for index, bit in enumerate(bits) if bit == 0x31)
        return cls(max(0, int(sequences)), max(0, int(blocks)), possible)


class Answer(NamedTuple):
    """`view` is the store's at that instant. `owners` (that live) and `suspects` are told by `beat`; `retry_s` with COLD."""

    verdict: Verdict
    view: View
    retry_s: float = 0.0
    owners: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()


Wake = Callable[[str, View], None]
"""(backend, view): this replica's head on the backend may come now."""


class LeaseStore(Protocol):
    """One replica's access to the store. Calls are made in order of the calls; each is one round trip.

    Every future fails with StateLost when there is no answer in time; cancelling one never disturbs another.
    """

    owner: str

    @property
    def connected(self) -> bool:
        """Whether it is worth asking."""

    def acquire(self, backend: str, ask: Ask, following: Ask | None) -> Future[Answer]:
        """A lease for `ask`, or the reason why not; `following` is the head of the local queue after it."""

    def settle(self, backend: str, lease: str, rules: Rules, refund: float) -> Future[Answer]:
        """The lease has ended; `refund` of its cost comes back to the tenant. An unknown lease changes nothing."""

    def beat(self, backend: str, rules: Rules, head: Ask | None, held: list[Ask] | None) -> Future[Answer]:
        """Still alive, with this head; with `held` (everything dispatched) it registers."""

    def reap(self, backend: str, owner: str) -> Future[Answer]:
        """The backend has nothing of a dead replica any more."""

    def strange(self, backend: str, owners: list[str]) -> Future[Answer]:
        """Owners of what is in flight at the backend; unknown ones stop all granting for a while."""

    def present(self, *, leaving: bool = False) -> Future[tuple[str, ...]]:
        """This replica is there, whether it uses any backend or not (or it leaves); the names of all that are, sorted.

        Kept alive as by `beat`.
        """

    def withdraw(self, backend: str) -> Future[Answer]:
        """This replica leaves, holding nothing."""
