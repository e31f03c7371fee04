"""What a decision costs, as ratios within one run; `python -m tests.bench.decision` has the microseconds."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator

import pytest

from gateway.flow.controller import Controller
from gateway.flow.grant import Grant
from gateway.flow.shape import NO_FEATURES, Shape
from gateway.flow.waiting import Phase, Waiting
from tests.flow.helpers import box, controller, demand
from tests.flow.scenarios.sim import World
from tests.flow.scenarios.test_scenarios import one, small


def loaded(waiting: int, tenants: int) -> tuple[Controller, list[Grant]]:
    """A full backend with so many waiting requests of so many tenants."""
    made = controller(box(concurrency=4), max_requests=100_000)
    rng = random.Random(5)
    running = [made.request(demand(), 0.0) for _ in range(4)]
    for number in range(waiting):
        shape = Shape("generate", NO_FEATURES, rng.randint(1, 2000), rng.randint(1, 500), 1)
        assert isinstance(made.request(demand(shape, tenant=f"t{number % tenants}"), 0.0), Waiting)
    return made, [grant for grant in running if isinstance(grant, Grant)]


def cycle(made: Controller, running: list[Grant], rng: random.Random, tenants: int) -> float:
    """Seconds for one enqueue and one grant; the queue stays as long as it was."""
    shape = Shape("generate", NO_FEATURES, rng.randint(1, 2000), rng.randint(1, 500), 1)
    asked = demand(shape, tenant=f"t{rng.randrange(tenants)}")
    ending = running.pop(0)
    begun = time.process_time()
    made.request(asked, 1.0)
    ending.settle(1.0, 100, 50)
    spent = time.process_time() - begun
    bay = made._topology.bay("b")
    running[:] = list(bay.live)
    return spent


def median_cost(waiting: int, tenants: int, rounds: int) -> list[float]:
    made, running = loaded(waiting, tenants)
    rng = random.Random(6)
    return sorted(cycle(made, running, rng, tenants) for _ in range(rounds))


def test_enqueue_and_grant_cost_hardly_more_with_ten_thousand_waiting() -> None:
    ratios = []
    for _ in range(3):
        short, long = median_cost(10, 10, 400), median_cost(10_000, 200, 400)
        ratios.append(long[200] / short[200])
    assert min(ratios) <= 2.0, ratios


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No garbage collection: the world keeps every request it ever saw, and that is not what is measured."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_rule_holds_over_a_million_events(uncollected: None) -> None:
    world = World(99, patience=20)
    world.backend("a", box(concurrency=32), box(8192, 512, 4, name="c"))
    world.backend("b", box(concurrency=32))
    for tenant in range(8):
        world.closed_loop(16, small, tenant=f"t{tenant}", backends=("a", "b"), think=0.05)
    world.closed_loop(4, lambda rng: one(4000, 100), tenant="tight", backends=("a", "b"), think=10.0)
    begun = time.process_time()
    until = 0.0
    while world.events < 1_000_000:
        until += 50
        world.run(until)
        world.check_rule()
    print(f"{world.events} events in {time.process_time() - begun:.1f} s of processor time")


def test_granted_entries_are_taken_once() -> None:
    made, running = loaded(3, 1)
    running[0].settle(1.0, 1, 1)
    level = made._topology.pools[0].ranked[0]
    assert level.waiting == 2 and all(entry.phase is Phase.WAITING for entry in level.entries())
