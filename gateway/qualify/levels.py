"""From raw samples to what a record says of them.

Owns: the statistics of a level, whether it counts, and which bounds a slice may claim.
Promises: pure; errors, timeouts and cancellations stay apart from the successes and never enter a percentile; a slice claims no
size beyond the observed ones, and an end of the range only where several samples stand.
Talks to: `stats` for the numbers, `evidence.record` for the words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from gateway.evidence.record import Level, Range, Slice, Statistics, decimal_text
from gateway.qualify import stats
from gateway.qualify.counters import Counters
from gateway.qualify.plan import Cell
from gateway.qualify.samples import RawSample, sampled
from gateway.qualify.stats import Sampled

MAX_GAPS = 20_000
_WORK = 2_000_000
_QUANTILES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
_FEWEST_AT_AN_END = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """One level of one cell: all its samples, what the server counted meanwhile, why it does not count (None: it does)."""

    concurrency: int
    samples: tuple[RawSample, ...]
    counters: Counters = field(default_factory=Counters)
    lag_ms: float = 0.0
    void: str | None = None

    @property
    def good(self) -> list[RawSample]:
        """The samples that succeeded."""
        return [each for each in self.samples if each.status == "ok"]


def level(measured: Measured, confidence: float) -> Level:
    """The record's entry for one level. Times in milliseconds, rates per second."""
    good, count = measured.good, _counts(measured.samples)
    seconds = repeat_seconds(measured.samples)
    tokens = [_of_repeat(good, repeat, tokens=True) for repeat in seconds]
    requests = [_of_repeat(good, repeat, tokens=False) for repeat in seconds]
    token_rate = stats.rate(tokens, list(seconds.values()), confidence) if sum(tokens) else None
    request_rate = stats.rate(requests, list(seconds.values()), confidence)
    queue, preempted = measured.counters.queue_ms, measured.counters.preemptions
    return Level(
        concurrency=measured.concurrency,
        requests=len(measured.samples),
        errors=count["error"],
        timeouts=count["timeout"],
        cancelled=count["cancelled"],
        preemptions=None if preempted is None else round(preempted),
        duration_s=decimal_text(sum(seconds.values())),
        e2e_ms=statistics(sampled(good, "e2e_ms"), confidence),
        ttft_ms=statistics(sampled(good, "ttft_ms"), confidence),
        tpot_ms=statistics(sampled(good, "tpot_ms"), confidence),
        itl_ms=statistics(gaps(good), confidence),
        queue_ms=Statistics() if queue is None else Statistics(mean=decimal_text(queue)),
        queue_source=None if queue is None else "vllm_metrics",
        output_tokens_per_s=None if token_rate is None else decimal_text(token_rate.value),
        output_tokens_per_s_lower=_lower(token_rate),
        requests_per_s=None if request_rate is None else decimal_text(request_rate.value),
        requests_per_s_lower=_lower(request_rate),
        void=measured.void is not None,
        oversaturated=oversaturated(good),
    )


def statistics(values: Sampled, confidence: float) -> Statistics:
    """p50, p95, p99 with their upper bounds where the samples support them, and the mean. Empty without samples."""
    if not len(values.values):
        return Statistics()
    made = {"mean": decimal_text(float(values.values.mean()))}
    resamples = max(100, min(stats.RESAMPLES, _WORK // len(values.values)))
    ceiling = math.inf
    for name, q in reversed(_QUANTILES):
        estimate = stats.percentile(values, q, confidence, resamples=resamples)
        if estimate is not None:
            made[name] = decimal_text(estimate.value)
            if estimate.upper is not None:
                # What bounds a higher percentile bounds a lower one too.
                ceiling = min(ceiling, estimate.upper)
                made[name + "_upper"] = decimal_text(ceiling)
    return Statistics(**made)


def gaps(good: Sequence[RawSample]) -> Sampled:
    """Inter-token gaps of all answers; of very many, every n-th."""
    rows = [(gap, sample.repeat, sample.wave, sample.kind) for sample in good for gap in sample.itl_ms]
    return Sampled.of(rows[:: max(1, len(rows) // MAX_GAPS)])


def slice_of(cell: Cell, measured: Sequence[Measured], confidence: float) -> Slice | None:
    """The slice that a cell's levels support; None when no request of any succeeded.

    Its ranges are what every level that counts was seen to hold, inside the box of the plan.
    """
    counting = [each for each in measured if each.void is None and each.good] or [each for each in measured if each.good]
    if not counting:
        return None
    inputs = _common([_tokens(each, "input") for each in counting])
    outputs = _common([_tokens(each, "output") for each in counting])
    if inputs is None or outputs is None:
        return None
    every = [sample for each in counting for sample in each.good]
    levels = tuple(level(each, confidence) for each in measured if each.samples)
    return Slice(
        task=cell.task,
        features=cell.all_features,
        prefix_reuse=cell.reuse,
        input_tokens=inputs,
        output_tokens=outputs,
        concurrency=Range(min=1, max=levels[-1].concurrency),
        observed_input_tokens=_observed([sample.input_tokens for sample in every]),
        observed_output_tokens=_observed([sample.output_tokens for sample in every]),
        levels=levels,
    )


def narrowed(cell: Cell, made: Slice | None) -> list[str]:
    """In words, what the slice of a cell claims less than the cell asked for."""
    if made is None:
        return ["no slice: no request succeeded, or no sizes are common to its levels"]
    asked = (("input", cell.input_tokens, made.input_tokens), ("output", cell.output_tokens, made.output_tokens))
    return [
        f"{side} tokens are claimed from {claim.min} to {claim.max}, the plan asked for {wish.min} to {wish.max}: "
        f"an end needs {_FEWEST_AT_AN_END} samples of every level, or one in a hundred, at it or beyond"
        for side, wish, claim in asked
        if claim.min > wish.min or claim.max < wish.max
    ]


def claimed(values: Sequence[int]) -> Range | None:
    """The range that sampled sizes support: at each end at least 3 samples, or 1 in 100, lie at or beyond the bound."""
    if not values:
        return None
    ordered = sorted(values)
    place = min((len(ordered) - 1) // 2, max(_FEWEST_AT_AN_END, len(ordered) // 100) - 1)
    return Range(min=ordered[place], max=ordered[-1 - place])


def oversaturated(good: Sequence[RawSample]) -> bool:
    """Whether in most repeats the wait for the first token, or the number in flight, grew from start to end."""
    repeats = sorted({sample.repeat for sample in good})
    growing = 0
    for repeat in repeats:
        part = [sample for sample in good if sample.repeat == repeat]
        times = np.array([sample.start for sample in part])
        waits = np.array([_or_zero(sample.ttft_ms if sample.ttft_ms is not None else sample.e2e_ms) for sample in part])
        crowd = np.array([float(sample.in_flight) for sample in part if sample.open_loop])
        growing += stats.rising(times, waits) or stats.rising(times[: len(crowd)], crowd)
    return growing * 2 > len(repeats)


def repeat_seconds(samples: Sequence[RawSample]) -> dict[int, float]:
    """Seconds from the first dispatch to the last end, by repeat."""
    spans: dict[int, tuple[float, float]] = {}
    for sample in samples:
        end = sample.sent_at if sample.last_at is None else sample.last_at
        first, last = spans.get(sample.repeat, (sample.start, end))
        spans[sample.repeat] = (min(first, sample.start), max(last, end))
    return {repeat: last - first for repeat, (first, last) in sorted(spans.items()) if last > first}


def reached(samples: Sequence[RawSample]) -> int:
    """The concurrency an open loop held: that in flight at dispatch for at least one request in twenty."""
    seen = sorted(sample.in_flight for sample in samples)
    return seen[int(0.95 * (len(seen) - 1))] if seen else 0


def _counts(samples: Sequence[RawSample]) -> dict[Literal["ok", "error", "timeout", "cancelled"], int]:
    return {status: sum(each.status == status for each in samples) for status in ("ok", "error", "timeout", "cancelled")}


def _of_repeat(good: Sequence[RawSample], repeat: int, *, tokens: bool) -> float:
    return float(sum((each.output_tokens or 0) if tokens else 1 for each in good if each.repeat == repeat))


def _lower(rate: stats.Rate | None) -> str | None:
    return None if rate is None or rate.lower is None else decimal_text(min(rate.lower, rate.value))


def _tokens(measured: Measured, side: Literal["input", "output"]) -> Range | None:
    values = [sample.input_tokens if side == "input" else sample.output_tokens for sample in measured.good]
    return claimed([value for value in values if value is not None])


def _common(ranges: list[Range | None]) -> Range | None:
    known = [each for each in ranges if each is not None]
    if not known or len(known) < len(ranges):
        return None
    low, high = max(each.min for each in known), min(each.max for each in known)
    return Range(min=low, max=high) if low <= high else None


def _observed(values: Sequence[int | None]) -> Range | None:
    known = [value for value in values if value is not None]
    return Range(min=min(known), max=max(known)) if known else None


def _or_zero(value: float | None) -> float:
    return 0.0 if value is None else value
