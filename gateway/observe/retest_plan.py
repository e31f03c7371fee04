"""From demand to a plan: which cells a qualification must measure so that a chosen share of what was refused would fit.

Owns the arithmetic. Emits the plan as plain values; the qualify package owns the schema and checks it. Each of the d sizes of a
request is covered at 1 - (1 - share) / d, so that by the union bound all d together cover at least `share`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.observe.demand import Group
from gateway.observe.sizes import Sizes


class NoDemand(ValueError):
    """Nothing was asked for outside the slices, so there is nothing to plan."""


def covering(groups: Iterable[Group], share: float) -> dict[str, Any]:
    """The box that covers `share` (0..1) of the demand: task, features, input, output (tokens), concurrency (sequences).

    Features are the union of what was asked, for the commonest task. Raises NoDemand.
    """
    chosen = [group for group in groups if group.kinds]
    if not chosen:
        raise NoDemand("no request was turned away for its size, so there is no demand to cover")
    totals: dict[str, int] = {}
    for group in chosen:
        for (task, _), count in group.kinds.items():
            totals[task] = totals.get(task, 0) + count
    task = max(sorted(totals), key=lambda name: totals[name])
    features = sorted({f for group in chosen for (kind, names) in group.kinds if kind == task for f in names})
    each = 1 - (1 - share) / 4
    return {
        "task": task,
        "features": features,
        "input": _covers([group.input for group in chosen], each) or 1,
        "output": _covers([group.output for group in chosen], each) or 0,
        "concurrency": max(
            _covers([group.sequences for group in chosen], each) or 1,
            _covers([group.concurrency for group in chosen], each) or 1,
        ),
        "requests_seen": sum(group.count for group in chosen),
    }


def _covers(sizes: Iterable[Sizes], share: float) -> int | None:
    merged = Sizes()
    for one in sizes:
        merged.merge(one)
    return merged.quantile(share)
