"""The words between the request path and the controller: what is asked, and which gate stands before a backend.

Owns no state. Talks to: `envelope`, `errors`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gateway.errors import PlimsollError, Refusal
from gateway.flow.envelope import Envelope
from gateway.flow.shape import Shape


class Limits(NamedTuple):
    """A tenant's own quotas; None is no quota. Tokens are reserved ones, settled at what was used."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_in_flight: int | None = None


class Demand(NamedTuple):
    """One request that wants a backend. Deadlines are monotonic seconds.

    `priority`: lower goes first. `queue_deadline`: the end of waiting. `caller_deadline`: after it nobody listens.
    `affinity`: a hash of the prompt's head, to break ties between backends; None: no preference.
    """

    model: str
    backends: tuple[str, ...]
    shape: Shape
    tenant: str
    weight: float
    priority_class: str
    priority: int
    queue_deadline: float
    caller_deadline: float | None = None
    affinity: int | None = None
    limits: Limits | None = None


@dataclass(frozen=True, slots=True)
class Open:
    """The backend may be used inside `envelope`; `hash` is the configuration it was measured on."""

    envelope: Envelope
    hash: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The backend may not be used now, and this is why."""

    refusal: Refusal


Gate = Open | Closed


class SettledTwice(PlimsollError):
    """A grant was settled a second time: a defect in the caller; the first settlement stands."""
