"""The search finds the largest level that holds, and keeps only a fresh sample of it."""

import pytest

from gateway.qualify.levels import Measured, level
from gateway.qualify.search import Limits, find, misses
from gateway.qualify.session import QualifyError
from tests.qualify.support import sample


def measured(concurrency: int, latency_ms: float, marker: int = 0, **changes: object) -> Measured:
    """Three repeats of equal requests that took `latency_ms`."""
    samples = tuple(
        sample(
            repeat=r, wave=i, start=float(i), first_at=i + 0.001, last_at=i + latency_ms / 1000, index=marker,
            concurrency=concurrency, **changes,
        )
        for r in range(3)
        for i in range(70)
    )  # fmt: skip
    return Measured(concurrency, samples)


class Server:
    """Slower the more there is at once; `lucky` levels look fast the first time only."""

    def __init__(self, holds: int, lucky: frozenset[int] = frozenset()) -> None:
        self.holds, self.lucky = holds, lucky
        self.asked: list[int] = []

    async def measure(self, concurrency: int) -> Measured:
        again = self.asked.count(concurrency)
        self.asked.append(concurrency)
        fast = concurrency <= self.holds or (concurrency in self.lucky and not again)
        return measured(concurrency, 50.0 if fast else 500.0, marker=len(self.asked))


@pytest.mark.parametrize(("holds", "most"), [(1, 1), (1, 256), (6, 64), (7, 64), (300, 100), (255, 256), (128, 256)])
async def test_the_largest_level_that_holds_is_found_in_few_steps(holds: int, most: int) -> None:
    server = Server(holds)
    level_found, fresh = await find(server.measure, Limits(e2e_ms=100), most, 0.95)
    assert level_found == min(holds, most)
    assert fresh.samples[0].index == len(server.asked)  # the last sample taken, not one that the search saw
    assert len(server.asked) <= 2 * most.bit_length() + 2


async def test_a_lucky_run_is_not_kept() -> None:
    server = Server(holds=5, lucky=frozenset({8, 6}))
    level_found, fresh = await find(server.measure, Limits(e2e_ms=100), 64, 0.95)
    assert level_found <= 5
    assert misses(level(fresh, 0.95), Limits(e2e_ms=100)) is None
    assert server.asked.count(8) == 2


async def test_nothing_holds() -> None:
    with pytest.raises(QualifyError, match="not even one"):
        await find(Server(0).measure, Limits(e2e_ms=100), 64, 0.95)


async def test_a_search_needs_a_limit() -> None:
    with pytest.raises(QualifyError, match="at least one limit"):
        await find(Server(4).measure, Limits(), 64, 0.95)


def test_what_counts_as_a_miss() -> None:
    good = level(measured(4, 50.0), 0.95)
    assert misses(good, Limits(e2e_ms=100, ttft_ms=5, tpot_ms=50)) is None
    assert "e2e_ms" in (misses(good, Limits(e2e_ms=40)) or "")
    assert "tokens/s" in (misses(good, Limits(output_tokens_per_s=10_000)) or "")
    assert misses(good, Limits(e2e_ms=100), "the generator was late") == "the generator was late"
    few = level(Measured(4, measured(4, 50.0).samples[:9]), 0.95)
    assert "unknown" in (misses(few, Limits(e2e_ms=100)) or "")  # no bound is no pass
    failed = level(Measured(4, (*measured(4, 50.0).samples, sample(status="timeout"))), 0.95)
    assert misses(failed, Limits(e2e_ms=100)) == "0 errors and 1 timeouts"
