"""Whole stories on virtual time, each with the margin it must keep."""

from __future__ import annotations

import heapq
import random
from itertools import pairwise

import pytest

from gateway import policy
from gateway.errors import Reason, Refusal
from gateway.flow.demand import Closed
from gateway.flow.pool import AGED_EVERY
from gateway.flow.queue import OVERTAKINGS
from gateway.flow.shape import NO_FEATURES, Shape
from tests.flow.helpers import box
from tests.flow.scenarios.sim import REFUSED_BY_LOAD, World, p95

SEEDS = (1, 2)


def one(inputs: int, outputs: int, sequences: int = 1) -> Shape:
    return Shape("generate", NO_FEATURES, inputs, outputs, sequences)


def small(rng: random.Random) -> Shape:
    return one(rng.randint(10, 200), rng.randint(10, 100))


def mixed(rng: random.Random) -> Shape:
    return one(rng.randint(10, 2000), rng.randint(10, 500))


@pytest.mark.parametrize("seed", SEEDS)
def test_one_noisy_tenant_gets_no_more_than_its_share(seed: int) -> None:
    world = World(seed)
    world.backend("b", box(concurrency=8))
    world.closed_loop(200, mixed, tenant="noisy")
    world.closed_loop(20, mixed, tenant="one")
    world.closed_loop(20, mixed, tenant="two")
    world.run(300)
    world.check_rule()
    shares = {name: world.served(name, 10) for name in ("noisy", "one", "two")}
    fair = sum(shares.values()) / 3
    assert all(abs(share - fair) <= 0.05 * fair + 8 * 2500 for share in shares.values()), (seed, shares)


@pytest.mark.parametrize("seed", SEEDS)
def test_backlogged_tenants_share_by_weight_of_what_was_used(seed: int) -> None:
    used = {"gold": 1.0, "silver": 0.5, "bronze": 0.8}  # the rest of each reservation is refunded
    world = World(seed, used_share=lambda tenant: used[tenant])
    world.backend("b", box(concurrency=8))
    for tenant, weight in (("gold", 4.0), ("silver", 2.0), ("bronze", 1.0)):
        world.closed_loop(40, mixed, tenant=tenant, weight=weight)
    world.run(400)
    shares = {name: world.served(name, 10) * used[name] for name in used}
    total = sum(shares.values())
    for name, weight in (("gold", 4), ("silver", 2), ("bronze", 1)):
        fair = total * weight / 7
        assert abs(shares[name] - fair) <= 0.05 * fair + 8 * 2500, (seed, shares)


def fifo_waits(arrivals: list[tuple[float, float]], servers: int) -> list[float]:
    """Waiting times of (arrival, service) under first come, first served, by its definition."""
    free = [0.0] * servers
    waits = []
    for at, service in arrivals:
        start = max(at, heapq.heappop(free))
        waits.append(start - at)
        heapq.heappush(free, start + service)
    return waits


@pytest.mark.parametrize("seed", SEEDS)
def test_short_requests_are_not_trapped_behind_long_ones(seed: int) -> None:
    world = World(seed)
    world.backend("b", box(concurrency=8))
    world.open_loop(9.6, lambda rng: one(100, 50) if rng.random() < 0.7 else one(2000, 500), until=200)
    world.run(200)
    served = [r for r in world.requests if r.granted is not None]
    waits = fifo_waits([(r.arrived, world.service(r.demand.shape)) for r in world.requests], 8)
    fifo_short = [w for w, r in zip(waits, world.requests, strict=True) if r.demand.shape.tokens < 1000]
    ours = [r.wait for r in served if r.demand.shape.tokens < 1000]
    assert p95(fifo_short) > 1.0, (seed, "the scenario must be congested to say anything")
    assert p95(ours) <= p95(fifo_short) / 4, (seed, p95(ours), p95(fifo_short))
    longs = [r for r in served if r.demand.shape.tokens > 1000]
    assert len(longs) > 0.5 * sum(r.demand.shape.tokens > 1000 for r in world.requests), (seed, "long ones must move too")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_batch_flood_delays_interactive_by_one_running_request_at_most(seed: int) -> None:
    world = World(seed, service=lambda shape: 1.0 if shape.output_tokens == 100 else 3.0)
    world.backend("b", box(concurrency=4))
    world.closed_loop(100, lambda rng: one(100, 101), tenant="bulk", level="batch")
    world.open_loop(0.6, lambda rng: one(100, 100), tenant="live", until=500, start=5.0)
    world.run(520)
    longest_running = 3.0
    interactive = [r for r in world.grants if r.demand.tenant == "live"]
    assert len(interactive) > 200
    # At 0.6/s of 1 s each on 4 places, interactive ones hardly ever queue behind each other: one running batch each.
    alone = [r for r in interactive if not any(o is not r and o.arrived <= r.arrived < o.granted for o in interactive)]  # type: ignore[operator]
    assert max(r.wait for r in alone) <= longest_running + 0.051, seed


def test_aged_batch_gets_one_grant_in_twenty_and_no_more() -> None:
    world = World(4, service=lambda shape: 0.1, patience=200)
    world.backend("b", box(concurrency=2))
    world.closed_loop(20, small, tenant="live", until=150)
    world.closed_loop(20, small, tenant="bulk", level="batch", until=150)
    world.run(140)
    order = [r.demand.tenant for r in world.grants if r.granted > 100]  # type: ignore[operator]
    batch = [index for index, tenant in enumerate(order) if tenant == "bulk"]
    assert batch, "aged batch is never starved"
    assert min(b - a for a, b in pairwise(batch)) >= AGED_EVERY
    early = [r.demand.tenant for r in world.grants if 5 < r.granted < 90]  # type: ignore[operator]
    assert "bulk" not in early, "young batch waits while interactive does"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tight_request_gets_in_after_bounded_overtakings(seed: int) -> None:
    """Small ones keep 16 places busy; one long request fits only where 2 run at once."""
    world = World(seed, service=lambda shape: 1.0 if shape.input_tokens < 3000 else 4.0)
    world.backend("b", box(2048, 512, 16, name="a"), box(8192, 512, 2, name="c"))
    world.closed_loop(40, small, tenant="stream")
    world.run(20.0)
    tight = world.send(world.demand(one(6000, 100), "tight", ("b",)))
    world.run(60.0)
    world.check_rule()
    assert tight.granted is not None
    passed = [r for r in world.grants if tight.arrived < r.granted < tight.granted]  # type: ignore[operator]
    assert len(passed) <= OVERTAKINGS, (seed, len(passed))
    assert tight.wait <= 2 * 1.0 + 0.05, (seed, tight.wait)  # its overtakings, then the drain of what was in flight
    resumed = [r for r in world.grants if tight.granted <= r.granted <= tight.granted + 4.1]  # type: ignore[operator]
    assert any(r is not tight for r in resumed), "beside it the narrow slice is used"
    assert sum(r.granted > tight.ended for r in world.grants) > 100, "afterwards the wide slice is"  # type: ignore[operator]


def test_batch_does_not_slip_past_a_tight_interactive_request() -> None:
    """While an interactive request waits for the narrow slice, no batch request is put on that backend."""
    world = World(9, service=lambda shape: 1.0)
    world.backend("b", box(2048, 512, 16, name="a"), box(8192, 512, 2, name="c"))
    world.closed_loop(40, small, tenant="bulk", level="batch")
    world.run(20.5)
    tight = world.send(world.demand(one(6000, 100), "live", ("b",)))
    world.run(40)
    assert not [r for r in world.grants if tight.arrived < r.granted < tight.granted]  # type: ignore[operator]
    assert tight.wait <= 1.0


@pytest.mark.parametrize("seed", SEEDS)
def test_tight_requests_do_not_starve_the_small_ones_nor_break_the_rule(seed: int) -> None:
    world = World(seed, service=lambda shape: 0.2 if shape.input_tokens < 3000 else 0.5)
    world.backend("b", box(2048, 512, 16, name="a"), box(8192, 512, 3, name="c"), box(16384, 1024, 1, name="d"))
    sizes = (lambda rng: one(100, 50), lambda rng: one(6000, 100), lambda rng: one(12000, 600))
    for index, size in enumerate(sizes):
        world.closed_loop(40, size, tenant=f"t{index}")
    for second in range(1, 40):
        world.at(second, world.check_rule)
    world.run(40)
    assert all(world.served(f"t{index}") > 0 for index in range(3)), seed
    charged = {i: sum(grant_cost(r) for r in world.grants if r.demand.tenant == f"t{i}") for i in range(3)}
    assert max(charged.values()) <= 1.3 * min(charged.values()), (seed, charged)  # equal weights, equal charge


def grant_cost(request: object) -> float:
    shape = request.demand.shape  # type: ignore[attr-defined]
    return float(shape.tokens * (1 if shape.input_tokens <= 2048 else 16 / 3 if shape.input_tokens <= 8192 else 16))


def test_a_burst_after_idle_is_served_at_full_width_and_saves_no_credit() -> None:
    world = World(7, service=lambda shape: 1.0)
    world.backend("b", box(concurrency=4))
    world.closed_loop(8, lambda rng: one(100, 100), tenant="steady")
    world.run(100)
    for _ in range(40):
        world.send(world.demand(one(100, 100), "late", ("b",)))
    world.run(110.5)
    late, steady = world.served("late", 100), world.served("steady", 100)
    assert abs(late - steady) <= 4 * 200, "idle time is no credit: from now on they share"
    idle = World(8, service=lambda shape: 1.0)
    idle.backend("b", box(concurrency=4))
    burst = [idle.send(idle.demand(one(100, 100), "t", ("b",))) for _ in range(12)]
    idle.run(10)
    assert sorted(r.granted for r in burst) == pytest.approx([0] * 4 + [1] * 4 + [2] * 4)  # type: ignore[type-var]
    idle.check_ends()


@pytest.mark.parametrize("seed", SEEDS)
def test_departures_leave_no_slot_behind(seed: int) -> None:
    world = World(seed, service=lambda shape: 0.5, patience=5)
    world.backend("b", box(concurrency=4))
    world.open_loop(20, small, until=100, leaves=lambda rng: rng.choice([None, 0.0, 0.25, 0.5, 0.500001, 1.0, 3.0]))
    for tick in range(1, 200):
        world.at(tick / 2, world.check_rule)
    world.run(120)
    world.check_ends()
    outcomes = {request.outcome for request in world.requests}
    assert {"served", "left"} <= outcomes <= {"served", "left", *REFUSED_BY_LOAD}, seed
    busy = sum(world.service(r.demand.shape) for r in world.grants)
    assert busy >= 0.97 * 4 * 100, (seed, "departures must not idle the engine")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_record_swapped_mid_run_is_kept_from_then_on(seed: int) -> None:
    world = World(seed, service=lambda shape: 0.3)
    world.backend("b", box(2048, 512, 16))
    world.closed_loop(30, mixed, tenant="t", think=0.01, until=60)
    world.run(20)
    world.backend("b", box(1024, 512, 4, name="c"))
    world.run(20.31)  # what ran before has ended
    for tick in range(100):
        world.at(20.31 + tick * 0.2, world.check_rule)
    world.run(40)
    assert all(r.demand.shape.input_tokens <= 1024 for r in world.grants if r.granted > 20), seed  # type: ignore[operator]
    assert {r.outcome for r in world.requests} >= {"served", Reason.OUT_OF_SLICE_INPUT.value}
    world.backend("b", box(2048, 512, 16, name="d"))
    world.run(61)
    world.check_ends()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_backend_lost_and_back(seed: int) -> None:
    world = World(seed, service=lambda shape: 0.3, patience=4)
    world.backend("a", box(concurrency=4))
    world.backend("b", box(concurrency=4))
    world.closed_loop(20, small, tenant="t", backends=("a", "b"), think=0.05, until=60)
    world.run(20)
    world.gate("b", Closed(Refusal(Reason.BACKEND_UNAVAILABLE, "gone", retry_after_s=1)))
    world.run(40)
    assert not [r for r in world.grants if r.backend == "b" and 20 < r.granted < 40], seed  # type: ignore[operator]
    assert all(r.outcome == "served" for r in world.requests if 20 < r.arrived < 35), (seed, "the other one serves")
    world.backend("b", box(concurrency=4))
    world.run(61)
    after = [r for r in world.grants if r.granted > 40]  # type: ignore[operator]
    share = sum(r.backend == "b" for r in after) / len(after)
    assert 0.4 < share < 0.6, (seed, share)
    world.check_ends()


@pytest.mark.parametrize("seed", SEEDS)
def test_two_backends_with_different_envelopes(seed: int) -> None:
    world = World(seed, service=lambda shape: 0.2)
    world.backend("wide", box(2048, 512, 8))
    world.backend("long", box(16384, 512, 2, name="c"))
    both = ("wide", "long")
    world.closed_loop(12, small, tenant="small", backends=both, until=50)
    world.closed_loop(2, lambda rng: one(9000, 100), tenant="large", backends=both, until=50)
    for tick in range(1, 100):
        world.at(tick / 2, world.check_rule)
    world.run(52)
    world.check_ends()
    assert all(r.backend == "long" for r in world.grants if r.demand.tenant == "large"), seed
    assert world.served("large", 1) > 0
    busy = sum(0.2 for r in world.grants if r.backend == "wide")
    assert busy > 0.95 * 8 * 50, (seed, "the wide one is never idle while small ones wait")


@pytest.mark.parametrize("load", [0.5, 1.0, 2.0, 4.0])
def test_goodput_does_not_collapse_under_overload(load: float) -> None:
    """Open-loop arrivals at a multiple of capacity; goodput counts answers inside 10 s from arrival."""
    world = World(11, service=lambda shape: 1.0 + 0.001 * shape.tokens, patience=6)
    world.backend("b", box(concurrency=8))
    mean_service = 1.0 + 0.001 * (1005 + 255)
    world.open_loop(load * 8 / mean_service, mixed, until=300)
    world.run(300)
    good = sum(r.outcome == "served" and r.ended - r.arrived <= 10 for r in world.requests)  # type: ignore[operator]
    assert good / 300 >= 0.9 * min(load, 1.0) * 8 / mean_service * 0.95, (load, good)
    late = [r for r in world.grants if r.wait > 6]
    assert not late


def test_early_refusal_spares_the_wait() -> None:
    """At 8 × load most of what is refused hears it on arrival, once the drain rate is known."""
    world = World(12, service=lambda shape: 0.5, patience=2, queue=policy.Queue(max_requests=100_000))
    world.backend("b", box(concurrency=4))
    world.open_loop(64, lambda rng: one(100, 50), until=60)
    world.run(63)
    refused = [r for r in world.requests if r.outcome == "queue_timeout" and r.arrived > 10]
    at_once = [r for r in refused if r.ended == r.arrived]
    assert len(refused) > 1000
    served = [r for r in world.requests if r.outcome == "served" and r.arrived > 10]
    assert len(served) >= 0.97 * 8 * 50, "refusing early must not idle the engine"
    assert len(at_once) > 0.5 * len(refused)
