"""The controller of one replica among several: what it grants is provisional until the shared state has agreed.

Owns what the plain controller does not need: grants that go back to their place, what other replicas hold, the head of the
queue that they see, and the time in which nothing can be agreed. Promises: as the controller; a request whose grant goes back
keeps its arrival, its overtakings and its quota; what others hold is believed only while something waits here, for only then
are there wake-ups that keep it true. Talks to: `gateway.replicas`, which does the asking.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from gateway.errors import Reason, Refusal
from gateway.flow import refusals
from gateway.flow.bay import Bay
from gateway.flow.controller import Controller
from gateway.flow.demand import Closed, Demand, Gate, Open
from gateway.flow.envelope import Box, Envelope
from gateway.flow.grant import Grant
from gateway.flow.pool import Route
from gateway.flow.waiting import Phase, Waiting

_NOT_NOW = Refusal(Reason.BACKEND_UNAVAILABLE, "the state that the replicas share cannot be reached", retry_after_s=1.0)
_OUT_OF_SLICE = frozenset({
    Reason.OUT_OF_SLICE_INPUT, Reason.OUT_OF_SLICE_OUTPUT, Reason.OUT_OF_SLICE_SEQUENCES, Reason.NO_QUALIFIED_RECORD,
})  # fmt: skip


class Part(NamedTuple):
    """What one of `replicas` that cannot agree keeps to on a backend. `rank`: its place among them, from 0.

    `sequences` and `blocks`: all it may have in flight while what was agreed before may still run elsewhere; None: its part.
    """

    replicas: int
    rank: int
    sequences: int | None = None
    blocks: int | None = None


class SharedController(Controller):
    """`Controller` with the calls that sharing needs."""

    _drained: Refusal | None = None
    _part_of: Callable[[str], Part] | None = None
    on_wait: Callable[[Waiting], None] | None = None
    """Hears of every request that has to wait."""
    on_left: Callable[[Waiting], None] | None = None
    """Hears of every request that waited and comes to nothing."""

    def relaxes(self, refusal: Refusal) -> bool:
        """As in the controller: what is only observed is agreed with nobody, so that it may go where nothing can be agreed."""
        return refusal is _NOT_NOW or super().relaxes(refusal)

    # Without agreement

    def drain(self, refusal: Refusal) -> None:
        """As in the controller; it outlasts a suspension."""
        self._drained = refusal
        super().drain(refusal)

    def suspend(self) -> Refusal:
        """Nothing can be agreed: refuse all that wait and all that come until `resume`. The refusal that is told."""
        if self._drained is None:
            super().drain(_NOT_NOW)
        return _NOT_NOW

    def resume(self) -> None:
        """Agreement is possible again."""
        self._draining = self._drained

    def divide(self, part_of: Callable[[str], Part] | None) -> None:
        """Without agreement, keep to a part of the limits of each backend (None: the whole again); what is in flight stays
        counted. Called again when a part has changed."""
        self._part_of = part_of
        for bay in list(self._topology.bays.values()):
            if bay.whole is not None:
                self.set_backend(bay.name, bay.whole)

    def set_backend(self, name: str, gate: Gate) -> None:
        """As in the controller, with the part of the limits that is in force."""
        bay = self._topology.bay(name)
        bay.whole = gate if isinstance(gate, Open) else None
        if self._part_of is not None and isinstance(gate, Open):
            gate = divided(gate, self._part_of(name))
        super().set_backend(name, gate)

    def decide(self, demand: Demand, now: float) -> Grant | Waiting | Refusal:
        """As in the controller, with the part of the limits that is in force."""
        answer = super().decide(demand, now)
        return self._in_time(demand, answer) if isinstance(answer, Refusal) else answer

    def allows(self, grant: Grant, sequences: int, blocks: int) -> bool:
        """Whether a provisional grant is inside the part in force, beside what this replica holds already."""
        bay = self._topology.bay(grant.backend)
        if not bay.open or not grant.mask:
            return False
        envelope, shape = bay.occupancy.envelope, grant.shape
        if sequences + shape.sequences > envelope.cap(grant.mask):
            return False
        return envelope.budget_blocks is None or blocks + grant.blocks <= envelope.budget_blocks

    def _fits_the_whole(self, demand: Demand) -> bool:
        bays = map(self._topology.bay, demand.backends) if self._part_of is not None else ()
        return any(bay.whole is not None and bay.whole.envelope.place(demand.shape) for bay in bays)

    def _refuse(self, waiting: Waiting, refusal: Refusal) -> None:
        super()._refuse(waiting, self._in_time(waiting.demand, refusal))

    def _in_time(self, demand: Demand, refusal: Refusal) -> Refusal:
        """What only a part of the limits is too small for may be tried again."""
        return _NOT_NOW if refusal.reason in _OUT_OF_SLICE and self._fits_the_whole(demand) else refusal

    def _trigger(self, route: Route, demand: Demand, refusal: Refusal) -> None:
        if not self._fits_the_whole(demand):  # else it is the loss that refuses, and no measurement would help
            super()._trigger(route, demand, refusal)

    # With agreement

    def leave(self, waiting: Waiting) -> None:
        """As in the controller."""
        super().leave(waiting)
        if self.on_left is not None:
            self.on_left(waiting)

    def turn_away(self, waiting: Waiting, refusal: Refusal) -> None:
        """Refuse one that still waits; who has its grant already finds out by itself."""
        if waiting.phase is Phase.WAITING:
            self._refuse(waiting, refusal)

    def _queued(self, route: Route, demand: Demand, now: float) -> Grant | Waiting | Refusal:
        answer = super()._queued(route, demand, now)
        if isinstance(answer, Waiting) and self.on_wait is not None and self._observer is None:
            self.on_wait(answer)
        return answer

    def _end(self, waiting: Waiting, phase: Phase, result: Refusal | None) -> None:
        super()._end(waiting, phase, result)
        if self.on_left is not None:
            self.on_left(waiting)

    def put_back(self, grant: Grant, now: float) -> Waiting | Refusal:
        """The room of a grant is held elsewhere: the request goes on waiting at its old place, or is refused."""
        grant.put_back(now)
        demand, place = grant.demand, grant.place
        route = self._topology.route(demand.backends, now)
        if place is None:
            waiting = Waiting(demand, route, self._arrivals, now)
            self._arrivals += 1
        else:
            waiting = Waiting(demand, route, place.order, place.enqueued_at)
            waiting.passed, waiting.hold, waiting.name = place.passed, place.hold, place.name
        route.pool.plan(waiting)
        refusal = self._draining or refusals.hopeless(route, demand, waiting.masks, now)
        if refusal is None and place is None:
            refusal = self._too_much(route.pool, waiting, now)
        if refusal is not None:
            self._quotas.undo(demand)
            self._trigger(route, demand, refusal)
            return self._in_time(demand, refusal)
        route.pool.add(waiting, now)
        self._backlog.add(waiting)
        return waiting

    def beside(self, name: str, sequences: int, blocks: int, allowed: int) -> None:
        """What the other replicas hold on a backend; then whatever may go now, goes. Without a queue it is not kept."""
        bay = self._topology.bay(name)
        now = self._clock()
        for pool in self._topology.pools_of(bay):
            if pool.waiting:
                bay.occupancy.beside(sequences, blocks, allowed)
                self._pump(pool, now)

    def not_due(self, grant: Grant) -> None:
        """The level of a grant that has gone back had its aged turn at another replica: counted from there on."""
        pool = self._topology.route(grant.demand.backends, self._clock()).pool
        pool.level(grant.demand.priority).since_aged = 0

    def fits(self, grant: Grant) -> bool:
        """Whether, by what is known here, there would be room for a grant that has gone back."""
        return self._topology.bay(grant.backend).occupancy.fits(grant.mask, grant.shape.sequences, grant.blocks)

    def head(self, name: str) -> tuple[Waiting, int] | None:
        """The first in order of those that could go to a backend, room aside, and its mask there."""
        bay = self._topology.bay(name)
        for pool in self._topology.pools_of(bay):
            for level in pool.ranked if pool.waiting else ():
                first = level.first(level.usable([bay]))
                if first is not None and bay in first.route.bays:
                    return first, first.masks[first.route.bays.index(bay)]
        return None

    def envelope(self, name: str) -> Envelope | None:
        """The whole envelope of a backend whose gate is open."""
        bay = self._topology.bay(name)
        return bay.whole.envelope if bay.whole is not None and bay.listed else None

    def waits_for(self, name: str) -> bool:
        """Whether anything waits in the queue that a backend serves."""
        bay: Bay = self._topology.bay(name)
        return any(pool.waiting for pool in self._topology.pools_of(bay))


def divided(gate: Open, part: Part) -> Gate:
    """The gate with one box of the envelope, the widest (of several the largest), and the part of its concurrency and of the
    budget; closed where nothing is left. `gateway.apart` has the maths."""
    boxes = gate.envelope.boxes
    if part.replicas <= 1 or not boxes:
        return gate
    box = max(boxes, key=lambda each: (each.concurrency, each.input_max + each.output_max, len(each.features), each.record))
    share = box.concurrency // part.replicas + (part.rank < box.concurrency % part.replicas)
    tokens = None if gate.envelope.kv_tokens is None else gate.envelope.kv_tokens // part.replicas
    if part.sequences is not None and part.blocks is not None:
        share = min(share, part.sequences) if all(_inside(box, other) for other in boxes) else 0
        tokens = None if tokens is None else min(tokens, part.blocks * gate.envelope.block_size)
    if not share:
        return Closed(_NOT_NOW)
    return replace(gate, envelope=Envelope((box._replace(concurrency=share),), tokens, gate.envelope.block_size))


def _inside(box: Box, other: Box) -> bool:
    """Whether every shape of `box` is one of `other`."""
    inputs = other.input_min <= box.input_min and box.input_max <= other.input_max
    outputs = other.output_min <= box.output_min and box.output_max <= other.output_max
    return box.task == other.task and box.features <= other.features and inputs and outputs
