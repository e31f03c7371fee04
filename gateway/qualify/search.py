"""The largest concurrency that meets the limits.

Owns: the walk: doubling until a level misses, then halving the gap. Promises: each level is judged by the statistics that a
record is judged by; the level found is measured afresh and only that sample is kept, for a search keeps lucky runs; when the
fresh sample misses, the next lower level that had passed is tried, afresh too.
Talks to: the measuring function it is given.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from decimal import Decimal

from gateway.evidence.record import Level
from gateway.qualify.levels import Measured, level
from gateway.qualify.session import QualifyError

Measure = Callable[[int], Awaitable[Measured]]


@dataclass(frozen=True, slots=True)
class Limits:
    """The objective: p95 in milliseconds and tokens per second, from dispatch. None: not judged."""

    e2e_ms: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    output_tokens_per_s: float | None = None

    @property
    def stated(self) -> bool:
        """Whether anything is judged at all."""
        return any(value is not None for value in (self.e2e_ms, self.ttft_ms, self.tpot_ms, self.output_tokens_per_s))


def misses(measured: Level, limits: Limits, void: str | None = None) -> str | None:
    """Why a level does not meet the limits, at its bounds; None when it does. A bound that is missing is a miss."""
    if void is not None:
        return void
    if measured.errors or measured.timeouts:
        return f"{measured.errors} errors and {measured.timeouts} timeouts"
    if measured.oversaturated:
        return "over-saturated"
    for name, limit in (("e2e_ms", limits.e2e_ms), ("ttft_ms", limits.ttft_ms), ("tpot_ms", limits.tpot_ms)):
        upper = getattr(measured, name).p95_upper
        if limit is not None and (upper is None or Decimal(upper) > Decimal(str(limit))):
            return f"{name} p95 is at most {upper or 'unknown'}, the limit is {limit:g}"
    least, lower = limits.output_tokens_per_s, measured.output_tokens_per_s_lower
    if least is not None and (lower is None or Decimal(lower) < Decimal(str(least))):
        return f"output is at least {lower or 'unknown'} tokens/s, {least:g} are wanted"
    return None


async def find(
    measure: Measure, limits: Limits, most: int, confidence: float, note: Callable[[str], None] = lambda _: None
) -> tuple[int, Measured]:
    """The level and its fresh sample. Raises `QualifyError` when not even one at a time meets the limits twice."""
    if not limits.stated:
        raise QualifyError("a search needs at least one limit to search by")

    async def passes(concurrency: int) -> tuple[bool, Measured]:
        measured = await measure(concurrency)
        reason = misses(level(measured, confidence), limits, measured.void)
        note(f"{concurrency} at once: {reason or 'meets the limits'}")
        return reason is None, measured

    passed = await _walk(passes, most)
    for candidate in sorted(passed, reverse=True):
        good, fresh = await passes(candidate)
        if good:
            return candidate, fresh
    raise QualifyError("no concurrency meets the limits, not even one request at a time")


async def _walk(passes: Callable[[int], Awaitable[tuple[bool, Measured]]], most: int) -> set[int]:
    """Every level that passed: 1, 2, 4, ... up to the first miss, then the middle of what is left between."""
    passed: set[int] = set()
    low, high, step = 0, most + 1, 1
    while step < high:
        if (await passes(step))[0]:
            passed.add(step)
            low, step = step, min(step * 2, most)
            if low == most:
                break
        else:
            high = step
    while high - low > 1:
        middle = (low + high) // 2
        if (await passes(middle))[0]:
            passed.add(middle)
            low = middle
        else:
            high = middle
    return passed
