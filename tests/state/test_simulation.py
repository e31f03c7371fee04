"""A large fleet on the model of the store: the limit holds, nothing starves, and the store is asked as often as was promised."""

from __future__ import annotations

from tests.state.simulation import LEASE_S, simulate


async def test_below_saturation_two_operations_a_request() -> None:
    result = await simulate(replicas=20, cap=64, load=0.5, seconds=10)
    assert result.admitted > 200 and result.peak <= 64
    assert result.per_admission <= 2.05
    assert result.longest_wait_s < 0.5


async def test_overloaded_the_limit_holds_and_every_replica_is_served() -> None:
    result = await simulate(replicas=20, cap=16, load=1.2, seconds=20)
    assert result.peak == 16
    assert result.least_served > 0
    assert result.per_admission <= 5
    assert result.longest_wait_s < 20


async def test_beats_are_four_in_a_lease_time_a_replica() -> None:
    result = await simulate(replicas=10, cap=16, load=0.2, seconds=20)
    assert abs(result.beats_per_s - 10 * 4 / LEASE_S) <= 1.5
