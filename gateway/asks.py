"""How this replica's requests are described to the others: what is asked for now, and the head of its queue.

Owns the numbers of its leases. Promises: a request keeps its lease's name from its first appearance, as head or in an ask. Talks
to: the controller, for who is next.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from gateway.flow.envelope import Envelope
from gateway.flow.grant import Grant
from gateway.flow.pool import AGED_SHARE
from gateway.flow.shared import SharedController
from gateway.flow.waiting import Waiting
from gateway.mooring import Mooring
from gateway.state.leases import Ask

SLACK_S = 10.0  # an execution may begin so long after its lease, connecting included


class Asks:
    """`owner()` names this replica; `longest_s()` is the longest execution."""

    def __init__(
        self, controller: SharedController, owner: Callable[[], str], longest_s: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        self._controller, self._owner, self._longest_s, self._clock = controller, owner, longest_s, clock
        self._numbers = itertools.count(1)

    def of(self, mooring: Mooring, grant: Grant, envelope: Envelope) -> Ask:
        """A provisional grant as it is asked for."""
        place = grant.place
        name = place.name if place is not None and place.name else self._name()
        return self._asked(mooring, envelope, name, grant.mask, grant.queue_s, grant.cost, grant)

    def head(self, mooring: Mooring) -> Ask | None:
        """The head of the local queue, as the others shall see it."""
        found, envelope = self._controller.head(mooring.name), self._controller.envelope(mooring.name)
        if found is None or envelope is None:
            return None
        waiting, mask = found
        waiting.name = waiting.name or self._name()
        waited_s = self._clock() - waiting.enqueued_at
        return self._asked(mooring, envelope, waiting.name, mask, waited_s, waiting.cost, waiting)

    def longest_s(self) -> float:
        """How long what is granted now may run at most."""
        return self._longest_s() + SLACK_S

    def _name(self) -> str:
        return f"{self._owner()}-{next(self._numbers):x}"

    def _asked(
        self, mooring: Mooring, envelope: Envelope, name: str, mask: int, waited_s: float, cost: float, what: Grant | Waiting
    ) -> Ask:
        demand, place = what.demand, what.place if isinstance(what, Grant) else what
        shape = demand.shape
        blocks = shape.sequences * -(-(shape.input_tokens + shape.output_tokens) // envelope.block_size)
        return Ask(
            name, mooring.rules_of(envelope), mask, shape, blocks, demand.priority, demand.tenant, demand.weight, cost, waited_s,
            self.longest_s(), AGED_SHARE * (place.deadline - place.enqueued_at) if place is not None else None,
        )  # fmt: skip
