"""One slice of a record held against a target: is the shape inside, is enough measured, are the limits met?

Owns: which levels speak for a concurrency, and which statistic speaks for a limit.
Promises: pure; a level that is void or was not steady is no evidence; a statistic that is missing is never guessed.
Talks to: `record`, `target`. The order of decisions is `verdict`'s.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

from gateway.evidence.record import Level, Record, Slice, Statistics
from gateway.evidence.target import Target

_LATENCIES = (("e2e_ms", "e2e_ms_p95"), ("ttft_ms", "ttft_ms_p95"), ("tpot_ms", "tpot_ms_p95"))


class Finding(NamedTuple):
    """Something that is not as it has to be: which statistic, and a sentence with the numbers."""

    what: str
    text: str


@dataclass(frozen=True, slots=True)
class Judged:
    """One slice against one target. `lacking`: what the measurement does not hold; `missed`: limits not met."""

    slice: Slice
    inside: bool
    lacking: tuple[Finding, ...]
    missed: tuple[Finding, ...]

    @property
    def rank(self) -> tuple[bool, bool]:
        """Lower is better: a whole measurement first, then one that meets its limits."""
        return bool(self.lacking), bool(self.missed)


def judge(record: Record, each: Slice, target: Target) -> Judged:
    """Judge `each` at the target's shape, or at its own corners when the target names none."""
    inside = contains(each, target)
    wanted = target.slice.concurrency if target.slice is not None and inside else each.concurrency.max
    levels = covering(each, wanted)
    if not levels:
        nothing = Finding("concurrency", f"no level was measured at concurrency {wanted} or more")
        return Judged(each, inside, (nothing,), ())
    lacking = [*_unusable(levels), *_confidence(record, target)]
    for level in levels:
        lacking += _lacking(level, target, last=level is levels[-1], task=each.task)
    missed = () if lacking else tuple(_missed(levels, target))
    return Judged(each, inside, tuple(lacking), missed)


def contains(each: Slice, target: Target) -> bool:
    """Whether the target lies inside the slice: shape, features, concurrency, and a reuse regime that production has.

    A target without a slice lies inside every slice whose reuse regime counts.
    """
    wanted = target.slice
    if each.prefix_reuse != "none" and each.prefix_reuse not in target.prefix_reuse:
        return False
    return wanted is None or (
        each.task == target.task
        and target.features <= frozenset(each.features)
        and each.input_tokens.min <= wanted.input <= each.input_tokens.max
        and each.output_tokens.min <= wanted.output <= each.output_tokens.max
        and each.concurrency.min <= wanted.concurrency <= each.concurrency.max
    )


def covering(each: Slice, concurrency: int) -> tuple[Level, ...]:
    """The levels up to the lowest one that reaches `concurrency`; empty when none does."""
    reach = [level.concurrency for level in each.levels if level.concurrency >= concurrency]
    return tuple(level for level in each.levels if level.concurrency <= reach[0]) if reach else ()


def upper_ms(each: Slice, name: str, bound: bool) -> Decimal | None:
    """The largest p95 of a latency over all levels, in milliseconds: its bound or its estimate. None if one lacks it."""
    values = [_p95(getattr(level, name), bound) for level in each.levels]
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def _unusable(levels: tuple[Level, ...]) -> Iterator[Finding]:
    for level in levels:
        if level.void:
            yield Finding("void", f"concurrency {level.concurrency}: the level is void")
        if level.oversaturated:
            yield Finding("oversaturated", f"concurrency {level.concurrency}: load outgrew the server, no steady state")
        if level.requests - level.errors - level.timeouts - level.cancelled < 1:
            yield Finding("requests", f"concurrency {level.concurrency}: no request was completed")


def _confidence(record: Record, target: Target) -> Iterator[Finding]:
    """The record's bounds must hold at least at the confidence that is asked."""
    stated = record.protocol.confidence
    if target.confidence is None or not _limited(target):
        return
    if stated is None:
        yield Finding("confidence", "the record does not say at which confidence its bounds hold")
    elif Decimal(stated) < target.confidence:
        yield Finding("confidence", f"the record's bounds hold at {stated}, {target.confidence} is asked")


def _limited(target: Target) -> bool:
    limits = target.limits
    return any(getattr(limits, limit) is not None for limit in ("output_tokens_per_s_min", *(pair[1] for pair in _LATENCIES)))


def _lacking(level: Level, target: Target, *, last: bool, task: str) -> Iterator[Finding]:
    """Statistics that must be there: e2e p50 and p95, the rate, and whatever the target limits."""
    place = f"concurrency {level.concurrency}: "
    if level.e2e_ms.p50 is None or level.e2e_ms.p95 is None:
        yield Finding("e2e_ms", place + "end-to-end p50 and p95 are not measured")
    rate = level.output_tokens_per_s if task == "generate" else level.requests_per_s
    if rate is None:
        yield Finding("rate", place + "throughput is not measured")
    bound = target.confidence is not None
    for name, limit in _LATENCIES:
        if getattr(target.limits, limit) is not None and _p95(getattr(level, name), bound) is None:
            yield Finding(name, f"{place}{name} has no p95{' bound' if bound else ''}")
    if last and target.limits.output_tokens_per_s_min is not None and _rate(level, bound) is None:
        yield Finding("output_tokens_per_s", f"{place}output_tokens_per_s has no {'lower bound' if bound else 'value'}")


def _missed(levels: tuple[Level, ...], target: Target) -> Iterator[Finding]:
    limits, bound = target.limits, target.confidence is not None
    word = "upper bound of p95" if bound else "p95"
    for level in levels:
        place = f"concurrency {level.concurrency}: "
        for name, key in _LATENCIES:
            limit, value = getattr(limits, key), _p95(getattr(level, name), bound)
            if limit is not None and value is not None and value > limit:
                yield Finding(name, f"{place}{name} {word} is {value}, the limit is {limit}")
        if level.errors > limits.errors_max:
            yield Finding("errors", f"{place}{level.errors} errors, {limits.errors_max} allowed")
        if level.timeouts > limits.timeouts_max:
            yield Finding("timeouts", f"{place}{level.timeouts} timeouts, {limits.timeouts_max} allowed")
    least, rate = limits.output_tokens_per_s_min, _rate(levels[-1], bound)
    if least is not None and rate is not None and rate < least:
        yield Finding("output_tokens_per_s", f"output is {rate} tokens/s, {least} is the minimum")


def _p95(statistics: Statistics, bound: bool) -> Decimal | None:
    value = statistics.p95_upper if bound else statistics.p95
    return Decimal(value) if value is not None else None


def _rate(level: Level, bound: bool) -> Decimal | None:
    value = level.output_tokens_per_s_lower if bound else level.output_tokens_per_s
    return Decimal(value) if value is not None else None
