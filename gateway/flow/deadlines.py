"""How long the caller is prepared to wait, and when we answer so that it still hears us. Pure; talks to nobody."""

from __future__ import annotations

import math
from collections.abc import Iterable

MARGIN_MIN_S = 0.1
MARGIN_SHARE = 0.02


def patience(values: Iterable[str | bytes | None]) -> float | None:
    """The least of the timeouts a caller states, in seconds; what is not a positive finite number is ignored."""
    found = []
    for value in values:
        try:
            seconds = float(value) if value is not None else 0.0
        except ValueError:
            continue
        if 0 < seconds < math.inf:
            found.append(seconds)
    return min(found, default=None)


def caller_deadline(received_at: float, patience_s: float | None) -> float | None:
    """A little before the caller gives up (the larger of 100 ms and 2 %), in monotonic seconds; None: no patience told."""
    if patience_s is None:
        return None
    return received_at + max(0.0, patience_s - max(MARGIN_MIN_S, MARGIN_SHARE * patience_s))
