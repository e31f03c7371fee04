"""Measuring levels: warm-up first, then every level of every cell, repeat by repeat.

Owns: the order of a run and what makes a part of it void. Promises: repeats are the outer loop, so that the drift of a machine
over the run lies between repeats and not between levels; a part that the load generator could not keep up with, or that a
prefix cache helped against the plan, is measured again, and void if that happens again.
Talks to: `session`, `load`, `sizes`, `prompts`, `counters`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple, Protocol

from gateway.qualify import counters, sizes
from gateway.qualify.client import Job, Place, clock
from gateway.qualify.counters import Counters
from gateway.qualify.levels import Measured, reached
from gateway.qualify.load import Amount, Heartbeat, Load, Wave
from gateway.qualify.plan import Cell, Plan, Poisson, Trace
from gateway.qualify.prompts import Prompts
from gateway.qualify.samples import RawSample
from gateway.qualify.session import QualifyError, Session
from gateway.qualify.sizes import Size

ATTEMPTS = 3
MAX_HIT_SHARE = 0.01
_PROBE_WORDS = 32


class Progress(Protocol):
    """Hears how a run goes on."""

    def stage(self, text: str, total: int | None) -> None: ...
    def advance(self) -> None: ...
    def note(self, text: str) -> None: ...


class LevelKey(NamedTuple):
    """A level of a cell of the plan."""

    cell: int
    concurrency: int


@dataclass(frozen=True, slots=True)
class _Part:
    samples: list[RawSample]
    counted: Counters
    lag_ms: float
    void: str | None


class Bench:
    """Measures levels of one plan on one session."""

    def __init__(self, session: Session, plan: Plan, progress: Progress, *, overhead: int = 0) -> None:
        self._session, self._plan, self._progress = session, plan, progress
        self.began = clock()
        self._nonce = secrets.token_hex(8)
        self._sent = 0
        self.overhead = overhead  # tokens that the chat template adds, known after warm-up
        self._load = Load(
            session.upstream, plan.timeouts, began=self.began, stopped=lambda: session.guard.changed,
            on_sample=lambda _: progress.advance(),
        )  # fmt: skip

    async def warm_up(self) -> int:
        """Send until steady; the number of requests. Raises `QualifyError` when it never settles, or nothing succeeds."""
        warmup = self._plan.warmup
        await self._session.check()
        if self._plan.route == "chat":
            self.overhead = await self._template_tokens()
        if warmup is None:
            return 0
        self._progress.stage("warm-up", None)
        sent = 0
        for index, cell in enumerate(self._plan.cells):
            sent += len(await self._window(index, cell, sizes.largest(cell), cell.concurrency[-1]))
        index, cell = max(enumerate(self._plan.cells), key=lambda pair: pair[1].concurrency[-1])
        medians: list[float] = []
        while sent < warmup.max_requests:
            width = min(cell.concurrency[-1], warmup.window)
            window = [
                s for _ in range(-(-warmup.window // width)) for s in await self._window(index, cell, sizes.middle(cell), width)
            ]
            sent += len(window)
            medians.append(_median(window))
            if sent >= warmup.requests and _steady(medians, warmup.tolerance):
                return sent
        raise QualifyError(f"not steady after {sent} warm-up requests; the last medians were {_words(medians[-4:])} ms")

    async def measure(self, keys: Sequence[LevelKey]) -> dict[LevelKey, Measured]:
        """Every level over all repeats. Raises `IdentityChanged` or `QualifyError`."""
        found: dict[LevelKey, Measured] = {}
        for repeat in range(self._plan.repeats):
            for key in keys:
                part = await self._part(key, repeat)
                before = found.get(key)
                found[key] = _joined(key, before, part) if before else _first(key, part)
        return {key: self._at_what_it_reached(key, each) for key, each in found.items()}

    async def _part(self, key: LevelKey, repeat: int) -> _Part:
        """One repeat of one level; again when it was void."""
        cell = self._plan.cells[key.cell]
        total = cell.per_repeat(key.concurrency, self._plan.repeats)
        for attempt in range(1, ATTEMPTS + 1):
            label = f"cell {key.cell + 1}, {key.concurrency} at once, repeat {repeat + 1} of {self._plan.repeats}"
            self._progress.stage(label, total)
            await self._session.check()
            part = await self._send(key, cell, repeat, attempt)
            await self._session.check()
            if part.void is None or attempt == ATTEMPTS:
                if len(part.samples) < total:
                    self._progress.note(f"{label}: ended by max_seconds after {len(part.samples)} of {total} requests")
                return part
            self._progress.note(f"{label}: void, {part.void}; measured again")
        raise AssertionError("unreachable: the last attempt returns")

    async def _send(self, key: LevelKey, cell: Cell, repeat: int, attempt: int) -> _Part:
        session, plan = self._session, self._plan
        seed = (plan.seed * 1_000_003 + key.cell * 10_007 + key.concurrency * 101 + repeat) * 11 + attempt
        amount = Amount(cell.per_repeat(key.concurrency, plan.repeats), cell.min_seconds, cell.max_seconds)
        waves = self._waves(key, cell, repeat, seed)
        before = await counters.read(session.http, session.base_url, session.api_key)
        async with Heartbeat() as heartbeat:
            if isinstance(cell.arrival, Poisson):
                rate = cell.arrival.poisson_per_s
                wanted = max(amount.requests, round(rate * cell.min_seconds))
                jobs = [job for _ in range(-(-wanted // key.concurrency)) for job in next(waves)]
                samples = await self._load.opened(jobs, rate, key.concurrency, amount, seed)
            else:
                samples = await self._load.closed(waves, cell.burst_every, amount)
        session.raise_if_changed()
        counted = (await counters.read(session.http, session.base_url, session.api_key)).since(before)
        return _Part(samples, counted, heartbeat.lag_ms, self._void(cell, heartbeat.lag_ms, counted))

    def _void(self, cell: Cell, lag_ms: float, counted: Counters) -> str | None:
        if lag_ms > self._plan.max_lag_ms:
            return f"the load generator was {lag_ms:.0f} ms late at the 99th percentile, {self._plan.max_lag_ms:g} ms are allowed"
        if cell.prefix_reuse == "none" and (counted.hit_share or 0.0) > MAX_HIT_SHARE:
            return f"the prefix cache served {counted.hit_share:.1%} of the prompt tokens, although prompts share nothing"
        return None

    def _waves(self, key: LevelKey, cell: Cell, repeat: int, seed: int) -> Iterator[Wave]:
        """Waves without end, their bodies made when they are taken."""
        prompts = self._prompts(cell, seed)
        for wave, group in enumerate(self._sizes(key, cell, seed)):
            yield [self._job(prompts, size, Place(key.cell, key.concurrency, repeat, wave, self._next())) for size in group]

    def _sizes(self, key: LevelKey, cell: Cell, seed: int) -> Iterator[list[Size]]:
        if isinstance(cell.prefix_reuse, Trace):
            traced = sizes.trace(cell.prefix_reuse.trace, cell)
            place = 0
            while True:
                yield [traced[(place + lane) % len(traced)] for lane in range(key.concurrency)]
                place += key.concurrency
        yield from sizes.waves(cell, key.concurrency, seed)

    def _prompts(self, cell: Cell, seed: int) -> Prompts:
        # Sizes repeat with the plan's seed; the tokens must not, or a second measurement would find its prompts in the cache.
        source = f"{self._nonce}/{seed}"
        return Prompts(self._plan.route, self._session.model, cell, self._session.vocabulary, source, self.overhead)

    def _job(self, prompts: Prompts, size: Size, place: Place) -> Job:
        identifier = f"{self._session.instance}-{place.index}".encode("ascii")
        request = self._session.upstream.request(prompts.path, identifier, b"application/json", prompts.body(size))
        return Job(place, size, request, streamed=self._plan.route != "embeddings")

    def _next(self) -> int:
        self._sent += 1
        return self._sent

    async def _window(self, index: int, cell: Cell, size: Size, width: int) -> list[RawSample]:
        """One burst of equal requests. Raises `QualifyError` when most fail: then there is nothing to measure."""
        prompts = self._prompts(cell, self._plan.seed + self._sent)
        wave = [self._job(prompts, size, Place(index, width, -1, self._sent, self._next())) for _ in range(width)]
        samples = await self._load.closed(iter([wave]), None, Amount(width, 0, self._plan.timeouts.execution_s))
        self._session.raise_if_changed()
        bad = [sample for sample in samples if sample.status != "ok"]
        if len(bad) * 2 > len(samples):
            raise QualifyError(f"{len(bad)} of {len(samples)} warm-up requests failed: {bad[0].status}, {bad[0].detail}")
        return samples

    async def _template_tokens(self) -> int:
        """What the chat template adds, from the server's own count of a prompt whose words are known."""
        cell = self._plan.cells[0].model_copy(update={"prefix_reuse": "none"})
        size = Size("warmup", _PROBE_WORDS, cell.output_tokens.min)
        sample = (await self._window(0, cell, size, 1))[0]
        if sample.input_tokens is None:
            raise QualifyError("the server does not tell usage.prompt_tokens, so chat prompts cannot be counted")
        return max(0, sample.input_tokens - _PROBE_WORDS)

    def _at_what_it_reached(self, key: LevelKey, measured: Measured) -> Measured:
        """An open loop claims the concurrency it held, not the one it was capped at."""
        if not isinstance(self._plan.cells[key.cell].arrival, Poisson):
            return measured
        return replace(measured, concurrency=max(1, min(key.concurrency, reached(measured.samples))))


def keys_of(plan: Plan) -> list[LevelKey]:
    """Every level of a plan, in its order."""
    return [LevelKey(index, level) for index, cell in enumerate(plan.cells) for level in cell.concurrency]


def _first(key: LevelKey, part: _Part) -> Measured:
    return Measured(key.concurrency, tuple(part.samples), part.counted, part.lag_ms, part.void)


def _joined(key: LevelKey, before: Measured, part: _Part) -> Measured:
    return Measured(
        key.concurrency,
        (*before.samples, *part.samples),
        before.counters.plus(part.counted),
        max(before.lag_ms, part.lag_ms),
        before.void or part.void,
    )


def _median(window: list[RawSample]) -> float:
    return median(sample.e2e_ms for sample in window if sample.e2e_ms is not None)


def _steady(medians: list[float], tolerance: float) -> bool:
    """The last three medians each within `tolerance` of the one before."""
    last = medians[-3:]
    return len(last) == 3 and all(abs(b - a) <= tolerance * a for a, b in pairwise(last))


def _words(values: list[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in values)
