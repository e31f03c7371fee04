"""Writes that are done together, at the end of each round of the event loop.

Owns: who has something to write. Promises: everything posted while sockets were being read is written before the loop waits
again, in the order in which it was posted. Talks to: whoever posts.

The loop reads every socket that is ready, one after the other. An answer written between two reads wakes its reader on another
core, who is done and asleep again before the next one comes; written one right after the other, the first wakes it and it finds
the rest. That saves a wake-up for nearly each write, on both sides, and costs nobody more than the rest of the round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

HOLD_BYTES = 65_536
"""More than this is written at once, so that a reader who is slow is noticed before more is read for it."""


class Writer(Protocol):
    """Has something to write, or had: `flush` must also be fine with nothing left."""

    def flush(self) -> None: ...


class Outbox:
    """Those who have something to write in this round of the loop. `soon` has a function called at its end (the loop's own)."""

    def __init__(self, soon: Callable[[Callable[[], None]], object] | None = None) -> None:
        self._waiting: list[Writer] = []
        self._soon = soon

    def post(self, writer: Writer) -> None:
        """Have `writer` flushed when every socket that can be read now has been."""
        self._waiting.append(writer)
        if len(self._waiting) == 1:
            soon = self._soon if self._soon is not None else asyncio.get_running_loop().call_soon
            soon(self._flush)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        done = 0
        try:
            for writer in waiting:
                done += 1
                writer.flush()
        finally:  # what goes wrong with one is the loop's to report, and no other's answer is lost over it
            for writer in waiting[done:]:
                self.post(writer)
