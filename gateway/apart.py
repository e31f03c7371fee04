"""Going on without agreement (`degraded: share`): what this replica keeps to when the shared state is lost.

Owns who was there when it was lost, and what this replica held then. The maths: of R replicas that were there, each keeps to one
box of the envelope, the same for all, and to C // R of its concurrency, the first C mod R of them (by name) to one more; so that
together they never pass C, and whatever they run is inside that box. What was agreed before the loss may be elsewhere. Until it
has ended at the others, this replica's total does not grow: at most what it held itself, so that all totals together stay at
what was agreed. What a replica sends without agreement bears another name at the backend; so it has ended when the backend's
own count, asked after the loss, has shown each of the others with nothing under its plain name, or when the longest execution
is over. Pure; time is an argument.
Talks to: `replicas`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.flow.shared import Part
from gateway.forward.watch import Counted

SETTLE_AFTER_S = 3.0  # all have noticed the loss by then, and call themselves by the other name
APART = "~apart"  # behind a replica's name, at the backend, for what it sends without agreement


class Apart:
    """`names`: the replicas that were there. `held`: (sequences, KV blocks) agreed for this one, by backend. `ends_at`: when what
    was agreed must have ended everywhere."""

    def __init__(self, names: Iterable[str], owner: str, held: Mapping[str, tuple[int, int]], now: float, ends_at: float) -> None:
        everybody = sorted({*names, owner})
        self.replicas, self.rank = len(everybody), everybody.index(owner)
        self._owner, self._held, self._since, self._ends_at = owner, dict(held), now, ends_at
        self._others = frozenset(everybody) - {owner}
        self._seen: dict[str, set[str]] = {}  # others, by backend, ...
        self._quiet: dict[str, set[str]] = {}  # ... and those that had nothing agreed there since
        self._settled: set[str] = set()

    def part(self, backend: str) -> Part:
        """What to keep to on a backend now."""
        if self.replicas == 1 or backend in self._settled:
            return Part(self.replicas, self.rank)
        return Part(self.replicas, self.rank, *self._held.get(backend, (0, 0)))

    def look(self, backend: str, counted: Counted | None, now: float) -> bool:
        """Take the backend's own count (None: it has none). True once: what was agreed before the loss has ended there."""
        if backend in self._settled or self.replicas == 1:
            return False
        if now >= self._ends_at or (counted is not None and self._all_quiet(backend, counted)):
            self._settled.add(backend)
            return True
        return False

    def _all_quiet(self, backend: str, counted: Counted) -> bool:
        present = {name for name, requests in counted.by_gateway.items() if requests > 0 and not name.endswith(APART)}
        present.discard(self._owner)
        others = self._seen.setdefault(backend, set(self._others))
        others |= present
        quiet = self._quiet.setdefault(backend, set())
        if counted.asked_at - self._since >= SETTLE_AFTER_S:
            quiet |= others - present
        return quiet >= others
