"""Sending: a closed loop of C workers with synchronised bursts, or an open loop of Poisson arrivals.

Owns: when each request is dispatched, how many are in flight, and how late the generator itself was.
Promises: a burst of C is dispatched in one turn of the event loop, over connections that are open already; in an open loop a
request's latency starts at its intended instant, however late it was sent; when the run is cancelled every request in
flight is aborted. Talks to: `client` for one exchange.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random
from types import TracebackType
from typing import Self

from gateway.forward.upstream import ConnectFailed, Connection, Upstream
from gateway.qualify.client import Exchange, Job, clock, connection_for, sample, unsent
from gateway.qualify.plan import Limits
from gateway.qualify.samples import RawSample

Wave = list[Job]
_BEAT_S = 0.01
_BLOCK_WAVES = 16


@dataclass(frozen=True, slots=True)
class Amount:
    """How much to send: at least `requests` and `min_seconds`, unless `max_seconds` end it."""

    requests: int
    min_seconds: float
    max_seconds: float


class Heartbeat:
    """Measures how late this process gets its turn: a beat every 10 ms. `lag_ms` is the 99th percentile."""

    def __init__(self) -> None:
        self._late: list[float] = []

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._task.cancel()

    async def _beat(self) -> None:
        while True:
            due = clock() + _BEAT_S
            await asyncio.sleep(_BEAT_S)
            self._late.append(clock() - due)

    @property
    def lag_ms(self) -> float:
        """0 before the first beat."""
        late = sorted(self._late)
        return max(0.0, late[math.ceil(0.99 * len(late)) - 1] * 1000) if late else 0.0


class Load:
    """Sends jobs to one upstream. `stopped()` says why the run must end, or None; nothing is sent after that."""

    def __init__(
        self,
        upstream: Upstream,
        limits: Limits,
        *,
        began: float,
        stopped: Callable[[], str | None] = lambda: None,
        on_sample: Callable[[RawSample], None] = lambda _: None,
    ) -> None:
        self._upstream, self._limits, self._began = upstream, limits, began
        self._stopped, self._on_sample = stopped, on_sample
        self._in_flight = 0

    async def closed(self, waves: Iterator[Wave], burst_every: int | None, amount: Amount) -> list[RawSample]:
        """Waves of C jobs: each block of `burst_every` waves begins with C dispatched at once and ends with all answered.

        Inside a block every worker sends its next job as soon as its last was answered. `burst_every` None: one block.
        """
        samples: list[RawSample] = []
        start, width = clock(), 0
        while not self._stopped() and not _enough(amount, len(samples), clock() - start):
            first = next(waves)
            width = len(first)
            left = math.ceil((amount.requests - len(samples)) / width)
            size = min(left, burst_every) if burst_every and left > 0 else left if left > 0 else burst_every or _BLOCK_WAVES
            samples += await self._block([first, *islice(waves, size - 1)], start + amount.max_seconds)
        return samples

    async def opened(self, jobs: list[Job], rate: float, cap: int, amount: Amount, seed: int) -> list[RawSample]:
        """Poisson arrivals at `rate` a second, at most `cap` in flight; what waits for room is late, and its latency says so."""
        rng = Random(seed)  # noqa: S311 - a reproducible draw, not a secret
        room, start = asyncio.Semaphore(cap), clock()
        due = start
        samples: list[RawSample] = []
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                due += rng.expovariate(rate)
                if self._stopped() or due - start > amount.max_seconds:
                    break
                await asyncio.sleep(max(0.0, due - clock()))
                group.create_task(self._arrival(job, due, room, samples))
        return samples

    async def one(self, job: Job) -> RawSample:
        """One job, alone."""
        connection = await connection_for(self._upstream)
        return await self._finish(job, self._dispatch(job, connection), None)

    async def _block(self, block: list[Wave], until: float) -> list[RawSample]:
        connections = await asyncio.gather(*(connection_for(self._upstream) for _ in block[0]))
        # No await between the first dispatch and the last: this is the burst.
        first = [self._dispatch(job, connection) for job, connection in zip(block[0], connections, strict=True)]
        lanes = [self._lane([wave[lane] for wave in block], first[lane], until) for lane in range(len(block[0]))]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(lane) for lane in lanes]
        return [each for task in tasks for each in task.result()]

    async def _lane(self, jobs: list[Job], sent: _Sent, until: float) -> list[RawSample]:
        samples = [await self._finish(jobs[0], sent, None)]
        for job in jobs[1:]:
            if self._stopped() or clock() > until:
                break
            samples.append(await self.one(job))
        return samples

    async def _arrival(self, job: Job, due: float, room: asyncio.Semaphore, samples: list[RawSample]) -> None:
        async with room:
            connection = await connection_for(self._upstream)
            samples.append(await self._finish(job, self._dispatch(job, connection), due))

    def _dispatch(self, job: Job, connection: Connection | ConnectFailed) -> _Sent:
        """Send now, synchronously."""
        if isinstance(connection, ConnectFailed):
            return _Sent(connection, self._in_flight + 1)
        exchange = Exchange(connection, self._limits, job.streamed)
        self._in_flight += 1
        sent = _Sent(exchange, self._in_flight)
        exchange.send(job.request)
        return sent

    async def _finish(self, job: Job, sent: _Sent, intended: float | None) -> RawSample:
        """Wait for the end. Cancelled: the request is aborted, and counted off."""
        exchange = sent.exchange
        if isinstance(exchange, ConnectFailed):
            made = unsent(
                job, exchange, clock() if intended is None else intended, self._began, sent.in_flight, intended is not None
            )
            await asyncio.sleep(_BEAT_S)  # a server that refuses connections is not hammered
        else:
            try:
                await exchange.done
            finally:
                exchange.cancel()
                self._in_flight -= 1
            made = sample(job, exchange, intended, self._began, sent.in_flight)
        self._on_sample(made)
        return made


@dataclass(frozen=True, slots=True)
class _Sent:
    exchange: Exchange | ConnectFailed
    in_flight: int


def _enough(amount: Amount, sent: int, seconds: float) -> bool:
    return seconds >= amount.max_seconds or (sent >= amount.requests and seconds >= amount.min_seconds)
