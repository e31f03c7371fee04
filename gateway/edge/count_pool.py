"""Where tokens are counted: a few threads, and lanes in them, so that long texts never stand before short ones.

Owns the threads and the bounds on what waits for them. Promises: nothing waits beyond its deadline or without bound; texts over
`LARGE_BYTES` have one thread among themselves, which bounds their memory too (some 100 bytes a token) and leaves the others
to everyone else. Talks to nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from gateway.errors import Axis, Reason, Refusal, Refused

LARGE_BYTES = 262_144  # counted in about 50 ms
MAX_LARGE_WAITING = 32
T = TypeVar("T")


class _Lane:
    """A bounded thread pool. Threads cannot be killed: one whose deadline passed is counted as stuck until it ends."""

    def __init__(self, workers: int, waiting: int) -> None:
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="count")
        self._workers = workers
        self._capacity = workers + waiting
        self.pending = 0
        self._overdue = 0

    async def run(self, work: Callable[[], T], deadline: float) -> T:
        """`work` in a thread, until `deadline` (loop time). Raises Refused when there is no room or no time."""
        loop = asyncio.get_running_loop()
        if self.pending >= self._capacity or self._overdue >= self._workers:
            raise Refused(busy())
        future = self._executor.submit(work)
        self.pending += 1
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._ended) if not loop.is_closed() else None)
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            self._note_overdue(future, loop)
            raise Refused(uncountable("The input could not be counted in time.")) from None

    def _ended(self) -> None:
        self.pending -= 1

    def _note_overdue(self, future: Future[Any], loop: asyncio.AbstractEventLoop) -> None:
        if not future.running():
            return
        self._overdue += 1

        def recovered(_: Future[Any]) -> None:
            self._overdue -= 1

        future.add_done_callback(lambda done: loop.call_soon_threadsafe(recovered, done) if not loop.is_closed() else None)

    def close(self) -> None:
        """Take no more work."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class CountPool:
    """Two lanes: `workers` threads with room for `waiting` texts, and one for long texts."""

    def __init__(self, workers: int = 2, waiting: int = 256) -> None:
        self._short = _Lane(workers, waiting)
        self._long = _Lane(1, min(waiting, MAX_LARGE_WAITING))

    async def run(self, work: Callable[[], T], deadline: float, size: int = 0) -> T:
        """`work` on a text of `size` bytes, until `deadline` (loop time). Raises Refused when there is no room or no time."""
        lane = self._long if size > LARGE_BYTES else self._short
        return await lane.run(work, deadline)

    @property
    def pending(self) -> int:
        """Texts that wait or are being counted."""
        return self._short.pending + self._long.pending

    def close(self) -> None:
        """Take no more work."""
        self._short.close()
        self._long.close()


def uncountable(message: str) -> Refusal:
    return Refusal(Reason.OUT_OF_SLICE_INPUT, message, axis=Axis.INPUT)


def busy() -> Refusal:
    return Refusal(Reason.QUEUE_FULL, "Too many inputs are waiting to be counted.", axis=Axis.CONCURRENCY, retry_after_s=1.0)
