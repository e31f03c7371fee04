"""What the breakers of the other replicas say, and ours said to them.

Owns the states that others told lately, in bounded memory. Promises: a hint never changes a breaker; an opening that is news is
answered with true, once, so that this replica asks the backend for itself. Time is an argument (monotonic seconds). Talks to
nobody: `sharing` carries the words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gateway.flow.breaker import State

AGAIN_S = 5.0  # what is not closed is said again, for those who come later
KEPT_S = 3 * AGAIN_S
MOST_OWNERS = 1000  # of hints for one backend


class BreakerHints:
    """`tell(backend, state)` sends a word to all others."""

    def __init__(self, tell: Callable[[str, State], None]) -> None:
        self._tell = tell
        self._ours: dict[str, tuple[State, float]] = {}
        self._theirs: dict[str, dict[str, float]] = {}  # backend -> owner -> when it last said that its breaker is not closed

    def look(self, states: Iterable[tuple[str, State]], now: float) -> None:
        """Say what has changed here, and again what is not closed."""
        for name, state in states:
            known, at = self._ours.get(name, (State.CLOSED, now))
            if state is not known or (state is not State.CLOSED and now - at >= AGAIN_S):
                self._ours[name] = (state, now)
                self._tell(name, state)

    def heard(self, owner: str, backend: str, state: str, now: float) -> bool:
        """Take another replica's word; true when its breaker is open and was not, as far as was known."""
        theirs = self._theirs.setdefault(backend, {})
        for gone in [each for each, at in theirs.items() if now - at > KEPT_S]:
            del theirs[gone]
        if state == State.CLOSED:
            theirs.pop(owner, None)
            return False
        news = owner not in theirs
        if news and len(theirs) >= MOST_OWNERS:
            return False
        theirs[owner] = now
        return news and state == State.OPEN

    def elsewhere(self, backend: str, now: float) -> int:
        """How many other replicas have a breaker for the backend that is not closed."""
        return sum(now - at <= KEPT_S for at in self._theirs.get(backend, {}).values())
