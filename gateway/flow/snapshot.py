"""What runs and what waits, as plain data for metrics, the console and tests. Pure; talks to: `bay`, `pool`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from gateway.flow.bay import Bay
from gateway.flow.demand import Closed
from gateway.flow.pool import Pool


@dataclass(frozen=True, slots=True)
class BackendSnapshot:
    """One backend. `in_flight`: sequences by (model, phase, class); `by_size`: by (phase, class, size bucket).

    `reason` is why the gate is closed, None when it is open. `limits`: the envelope's maxima by axis.
    """

    name: str
    reason: str | None
    hash: str
    requests: int
    sequences: int
    reserved_tokens: int
    in_flight: dict[tuple[str, str, str], int]
    by_size: dict[tuple[str, str, str], int]
    limits: dict[str, int]
    breaker: str
    breaker_transitions: dict[str, int]


@dataclass(frozen=True, slots=True)
class ClassSnapshot:
    """One priority class: requests and reserved tokens that wait, and the age of the oldest in seconds."""

    requests: int = 0
    tokens: int = 0
    oldest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All of it, at one instant."""

    backends: tuple[BackendSnapshot, ...]
    classes: dict[str, ClassSnapshot]
    observed: dict[str, int] = field(default_factory=dict)  # under `observe`: requests by what would have been decided


def take(bays: Iterable[Bay], pools: Iterable[Pool], now: float, observed: dict[str, int]) -> Snapshot:
    """Read everything; O(in flight + waiting)."""
    classes: dict[str, ClassSnapshot] = {}
    for pool in pools:
        for level in pool.ranked:
            for entry in level.entries():
                name = entry.demand.priority_class
                so_far = classes.get(name, ClassSnapshot())
                classes[name] = ClassSnapshot(
                    so_far.requests + 1,
                    so_far.tokens + entry.demand.shape.tokens,
                    max(so_far.oldest_s, now - entry.enqueued_at),
                )
    return Snapshot(tuple(_backend(bay) for bay in bays if bay.listed), classes, observed)


def _backend(bay: Bay) -> BackendSnapshot:
    in_flight: Counter[tuple[str, str, str]] = Counter()
    for grant in bay.live:
        phase = "decode" if grant.decoding else "prefill"
        in_flight[(grant.demand.model, phase, grant.demand.priority_class)] += grant.shape.sequences
    return BackendSnapshot(
        name=bay.name,
        reason=bay.gate.refusal.reason.value if isinstance(bay.gate, Closed) else None,
        hash=bay.hash,
        requests=bay.occupancy.requests,
        sequences=bay.occupancy.sequences,
        reserved_tokens=sum(grant.tokens for grant in bay.live),
        in_flight=dict(in_flight),
        by_size=bay.composition(),
        limits=bay.occupancy.envelope.limits(),
        breaker=bay.breaker.state.value,
        breaker_transitions={state.value: count for state, count in bay.breaker.transitions.items()},
    )
