"""What one replica holds on one backend, and what it has learnt of the others there.

Owns the leases, the registration's state and the pause in which nothing is tried. Promises: a lease is sent under only while the
others still count it; it is given back once. Talks to: the store and the controller, through `Neighbours`.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from gateway.apart import APART, Apart
from gateway.flow.envelope import Envelope
from gateway.flow.shared import SharedController
from gateway.forward.watch import Counted
from gateway.shared_quotas import Taken
from gateway.state.leases import Answer, Ask, LeaseStore, Row, Rules, Verdict, View

BEATS = 4  # in one lease time
WANTED = 6  # lease times that a backend nobody asks for is still beaten for
SAFETY = 0.9  # of a lease time: after so long without a beat nothing is sent any more


class Neighbours(Protocol):
    """The whole that a mooring is part of. `apart`: the state is lost, and this replica goes on by itself (None: it does not)."""

    controller: SharedController
    store: LeaseStore
    apart: Apart | None


class Lease:
    """What was agreed for one grant. `sent`: the request may be at the backend."""

    __slots__ = ("_mooring", "ask", "quota", "sent", "void")

    def __init__(self, mooring: Mooring, ask: Ask) -> None:
        self._mooring, self.ask = mooring, ask
        self.sent = self.void = False
        self.quota: Taken | None = None
        mooring.held[ask.lease] = self

    def dispatch(self, now: float) -> bool:
        """Whether the request may be sent now; once it was, it counts until it ends."""
        if self.sent:
            return True
        if self.void or not self._mooring.trusted(now):
            return False
        self.sent = True
        return True

    def end(self, refund: float) -> None:
        """The request is over, or was never sent: the part of its cost that comes back is that of its tokens, too."""
        if self.quota is not None:
            self.quota.end(refund / self.ask.cost, sent=self.sent)
        if self._mooring.held.pop(self.ask.lease, None) is not None:
            self._mooring.settle(self.ask, refund)


class Mooring:
    """One backend as this replica shares it."""

    def __init__(self, name: str, neighbours: Neighbours) -> None:
        self.name, self._neighbours = name, neighbours
        self.held: dict[str, Lease] = {}
        self.rules: Rules | None = None
        self.registered: asyncio.Future[bool] | None = None  # the registration in force, or under way
        self.generation = 0  # of registrations: an acquire that one overtook is void
        self.valid_until = 0.0
        self.wanted_until = 0.0  # it is beaten for while anything is held, waits or was asked for not long ago
        self.beat_at = 0.0
        self.head = ""
        self.known: frozenset[str] = frozenset()  # owners that live
        self.suspects: dict[str, float] = {}  # and since when they are known as such here
        self.counted_at = 0.0  # when the backend was asked for the count that was looked at last
        self.paused = False
        self._envelope: Envelope | None = None
        self._timer: asyncio.TimerHandle | None = None

    def drop_unsent(self) -> None:
        """Leases under which nothing was sent are void: the others may not count them any more."""
        for lease in list(self.held.values()):
            if not lease.sent:
                lease.void = True
                del self.held[lease.ask.lease]

    def load(self) -> tuple[int, int]:
        """(sequences, KV blocks) that this replica has leases for."""
        asks = [lease.ask for lease in self.held.values()]
        return sum(ask.shape.sequences for ask in asks), sum(ask.blocks for ask in asks)

    def rules_of(self, envelope: Envelope) -> Rules:
        """The envelope as the store needs it."""
        if self.rules is None or self._envelope is not envelope:
            rows = (Row(b.task, tuple(sorted(b.features)), b.input_min, b.input_max, b.output_min, b.output_max, b.concurrency)
                    for b in envelope.boxes)  # fmt: skip
            self._envelope, self.rules = envelope, Rules.of(rows, envelope.budget_blocks)
        return self.rules

    def trusted(self, now: float) -> bool:
        """Whether the others still count this replica's leases as alive; apart from the shared state, its own word counts."""
        return now < self.valid_until or self._neighbours.apart is not None

    def settle(self, ask: Ask, refund: float) -> None:
        """Give a lease back; what that tells of the others is taken up."""
        self._neighbours.store.settle(self.name, ask.lease, ask.rules, refund).add_done_callback(self._settled)

    def _settled(self, done: asyncio.Future[Answer]) -> None:
        if not done.cancelled() and done.exception() is None:
            self.heard(done.result())

    def beaten(self, answer: Answer, sent_at: float, now: float, lease_s: float) -> None:
        """A beat that was sent at `sent_at` was taken: we are alive for the others, and know who else is."""
        self.valid_until = sent_at + SAFETY * lease_s
        self.beat_at = max(self.beat_at, sent_at + lease_s / BEATS)
        self.known = frozenset(answer.owners)
        self.suspects = {owner: self.suspects.get(owner, now) for owner in answer.suspects}
        self.paused = False
        self.heard(answer)

    def judge(self, counted: Counted) -> tuple[list[str], list[str]]:
        """By what the backend counts: the dead that have nothing there any more (once), and the strangers that have."""
        present = {name.removesuffix(APART) for name, requests in counted.by_gateway.items() if requests > 0}
        gone = [owner for owner, since in self.suspects.items() if counted.asked_at > since and owner not in present]
        for owner in gone:
            del self.suspects[owner]
        return gone, sorted(present - self.known - set(self.suspects) - set(gone))

    def heard(self, answer: Answer) -> None:
        """News of the others. A pause ends when this replica's head is next."""
        if answer.verdict is Verdict.NEXT or (answer.verdict in (Verdict.OK, Verdict.GRANTED) and not self.paused):
            self.resume(answer.view)

    def resume(self, view: View) -> None:
        """Go by this view from now on, and grant what fits."""
        self.paused = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._neighbours.controller.beside(self.name, *view)

    def pause(self, seconds: float, view: View) -> None:
        """Grant nothing here for a while, or until there is news."""
        self.resume(view._replace(possible=0))
        self.paused = True
        self._timer = asyncio.get_running_loop().call_later(seconds, self.resume, view)
