"""Is a recorded history of acquire and settle one that a single counter could have produced, one call after the other?

The model is the rule itself: leases in one set, granted only where a box holds all of them. A call takes effect at one instant
between its beginning and its end (Wing and Gong). Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from gateway.state.leases import Ask, Verdict


class Event(NamedTuple):
    """One call: what was asked, what was answered (None: a settlement), and when it began and ended."""

    ask: Ask
    verdict: Verdict | None
    begun: float
    ended: float


def fits(held: frozenset[Ask], ask: Ask) -> bool:
    """Whether one box of the request holds it and everything that is held, in size and number."""
    total = ask.shape.sequences + sum(each.shape.sequences for each in held)
    return any(
        total <= row.concurrency and all(each.mask >> index & 1 for each in (*held, ask))
        for index, row in enumerate(ask.rules.rows)
    )


def _after(held: frozenset[Ask], event: Event) -> frozenset[Ask] | None:
    """The state after a call, None when its answer is impossible in this state."""
    if event.verdict is None:
        return held - {event.ask}
    if event.verdict is Verdict.GRANTED:
        return held | {event.ask} if fits(held, event.ask) else None
    if event.verdict is Verdict.DENIED:
        return None if fits(held, event.ask) else held
    return held  # it yielded to another, which is never wrong for the limit


def linearizable(history: list[Event]) -> bool:
    """Whether some order of the calls, none before another that had ended when it began, explains every answer."""
    events = sorted(history, key=lambda event: event.begun)
    seen: set[tuple[int, frozenset[Ask]]] = set()
    stack: list[tuple[int, frozenset[Ask]]] = [(0, frozenset())]
    everything = (1 << len(events)) - 1
    while stack:
        done, held = stack.pop()
        if done == everything:
            return True
        if (done, held) in seen:
            continue
        seen.add((done, held))
        left = [index for index in range(len(events)) if not done >> index & 1]
        first_end = min(events[index].ended for index in left)
        for index in left:
            if events[index].begun > first_end:
                break
            after = _after(held, events[index])
            if after is not None:
                stack.append((done | 1 << index, after))
    return False
