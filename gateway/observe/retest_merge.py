"""One ledger out of those of several replicas: demand is added up, what all of them saw is one fact.

Owns the arithmetic. Requests are counted by the one replica that turned them away: their counts add up. An identity change is
seen by every replica that watches the backend: of those counts the largest holds, and equal changes within `SAME_S` are one.
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.observe.demand import Change
from gateway.observe.retest import IDENTITY, MAX_CHANGES, Ledger

SAME_S = 60.0


def merged(ledgers: Iterable[Ledger]) -> Ledger:
    """A ledger of its own with everything in it; the live tests of the first. Those that are given stay as they are."""
    total, changes = Ledger(), list[Change]()
    for number, ledger in enumerate(ledgers):
        if not number:
            total.live = ledger.live
        for model, hash_, axis, group in ledger.groups():
            total.group((model, hash_, axis), group.first).merge(group, facts=axis == IDENTITY)
        changes += ledger.changes
    total.changes = distinct(changes)[-MAX_CHANGES:]
    return total


def distinct(changes: Iterable[Change]) -> list[Change]:
    """In order of time; the same change of the same backend, seen again within `SAME_S`, is left out."""
    kept: list[Change] = []
    latest: dict[tuple[str, str, str | None, str | None], float] = {}
    for change in sorted(changes, key=lambda each: each.at):
        key = (change.model, change.backend, change.before, change.after)
        if change.at - latest.get(key, -SAME_S) >= SAME_S:
            kept.append(change)
            latest[key] = change.at
    return kept
