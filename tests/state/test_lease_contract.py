"""The rules of `gateway.state.leases`, held against both stores."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gateway.state.leases import OVERTAKINGS, Rules, Verdict, View
from tests.state.stores import LARGE, LEASE_S, MIXED, SMALL, World, ask, past_cold, world

GRANTED, DENIED = Verdict.GRANTED, Verdict.DENIED


@pytest_asyncio.fixture(params=["memory", "redis"])
async def replicas(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with world(request.param, request) as made:
        yield made


async def test_the_limit_holds_over_all_replicas(replicas: World) -> None:
    a, b = replicas["A"], replicas["B"]
    held = [ask() for _ in range(8)]
    await a.takes(*held[:5])
    await b.takes(*held[5:])
    answer = await b.acquire(ask())
    assert answer.verdict is DENIED and answer.view == View(5, 10, 0b11)
    await a.settle(held[0])
    assert (await b.acquire(ask())).verdict is GRANTED


async def test_one_request_may_take_several_sequences(replicas: World) -> None:
    await replicas["A"].takes(ask(sequences=5))
    assert (await replicas["B"].acquire(ask(sequences=4))).verdict is DENIED
    assert (await replicas["B"].acquire(ask(sequences=3))).verdict is GRANTED


async def test_one_box_must_hold_everything_in_flight_anywhere(replicas: World) -> None:
    a, b = replicas["A"], replicas["B"]
    large = ask(500)
    await a.takes(large, ask())
    assert (await b.acquire(ask())).verdict is DENIED  # two at once is all that was measured beside a large one
    answer = await a.settle(large)
    assert answer.view.possible == 0b11
    assert (await b.acquire(ask())).verdict is GRANTED
    assert (await replicas["C"].acquire(ask(500))).verdict is DENIED  # it would be the third
    assert (await replicas["C"].acquire(ask())).verdict is GRANTED


async def test_the_token_budget_is_shared(replicas: World) -> None:
    rules = Rules.of((SMALL,), 10)
    for replica in replicas.replicas.values():
        await replica.register(rules=rules)
    await replicas["A"].takes(ask(60, 36, rules=rules))  # six blocks
    assert (await replicas["B"].acquire(ask(60, 36, rules=rules))).verdict is DENIED
    assert (await replicas["B"].acquire(ask(32, 32, rules=rules))).verdict is GRANTED


async def test_replicas_with_other_records_never_mix_their_boxes(replicas: World) -> None:
    """B knows one box more than A; the same bit means another box to each."""
    middle = SMALL._replace(input_max=300, concurrency=4)
    other = Rules.of((SMALL, middle, LARGE), None)
    a, b = replicas["A"], replicas["B"]
    await a.takes(ask(500))  # outside `middle`, which A does not know
    await b.register(rules=other)
    answer = await b.acquire(ask(200, rules=other))
    assert answer.verdict is GRANTED  # in LARGE, where two may be
    assert (await b.acquire(ask(200, rules=other))).verdict is DENIED
    assert (await a.acquire(ask())).verdict is DENIED
    assert (await b.store.beat("b", other, None, None)).view == View(1, 32, 0b100)


async def test_a_release_wakes_the_replica_that_waits(replicas: World) -> None:
    a, b = replicas["A"], replicas["B"]
    held = [ask() for _ in range(8)]
    await a.takes(*held)
    waiting = ask()
    assert (await b.acquire(waiting)).verdict is DENIED
    await a.settle(held[0])
    async with asyncio.timeout(10):
        await b.woken.wait()
    assert b.wakes == [View(7, 14, 0b11)]
    assert (await b.acquire(waiting)).verdict is GRANTED


async def test_room_for_several_wakes_one_after_the_other(replicas: World) -> None:
    a, b, c = replicas["A"], replicas["B"], replicas["C"]
    block = ask(sequences=8)
    await a.takes(block)
    first, second = ask(waited_s=1.0), ask()  # of two that came in one millisecond, either may be first
    await b.acquire(first)
    await c.acquire(second)
    await a.settle(block)
    for replica, request in ((b, first), (c, second)):
        async with asyncio.timeout(10):
            await replica.woken.wait()
        await replica.takes(request)


async def test_a_newcomer_yields_to_a_more_urgent_head_that_fits(replicas: World) -> None:
    a, b, c = replicas["A"], replicas["B"], replicas["C"]
    block = ask(sequences=8)
    await a.takes(block)
    urgent = ask(priority=0)
    await b.acquire(urgent)
    await a.settle(block)
    assert (await c.acquire(ask(priority=1))).verdict is Verdict.BEHIND
    await b.takes(urgent)
    async with asyncio.timeout(10):
        await c.woken.wait()


async def test_a_head_that_does_not_come_loses_its_turn(replicas: World) -> None:
    a, b, c = replicas["A"], replicas["B"], replicas["C"]
    block = ask(sequences=8)
    await a.takes(block)
    await b.acquire(ask(priority=0))
    await a.settle(block)
    late = ask(priority=1)
    assert (await c.acquire(late)).verdict is Verdict.BEHIND
    await asyncio.sleep(0.25)  # the bound that is tested: 200 ms of the store's clock
    assert (await c.acquire(late)).verdict is GRANTED


async def test_tenants_share_by_weight_over_replicas(replicas: World) -> None:
    """Two replicas, a tenant each, one slot: grants follow the weights, whoever asks more often."""
    rules = Rules.of((SMALL._replace(concurrency=1),), None)
    shares = {"A": ("heavy", 3.0), "B": ("light", 1.0)}
    for replica in replicas.replicas.values():
        await replica.register(rules=rules)
    heads = {n: ask(rules=rules, tenant=t, weight=w, waited_s=1.0) for n, (t, w) in shares.items()}
    block = ask(rules=rules)
    await replicas["C"].takes(block)
    for name, head in heads.items():
        assert (await replicas[name].acquire(head)).verdict is DENIED
    await replicas["C"].settle(block)
    granted = {"A": 0, "B": 0}
    for turn in range(60):
        name = "BA"[turn % 2]
        tenant, weight = shares[name]
        following = ask(rules=rules, tenant=tenant, weight=weight, waited_s=1.0)
        answer = await replicas[name].acquire(heads[name], following)
        if answer.verdict is GRANTED:
            granted[name] += 1
            settled, heads[name] = heads[name], following
            await replicas[name].settle(settled)
    assert granted["A"] + granted["B"] > 15
    assert granted["A"] / granted["B"] == pytest.approx(3, rel=0.3)


async def test_room_is_held_for_a_head_that_was_passed_often_enough(replicas: World) -> None:
    a, b = replicas["A"], replicas["B"]
    first, *rest = [ask() for _ in range(OVERTAKINGS + 2)]
    await a.takes(first, ask())
    assert (await b.acquire(ask(500, waited_s=1.0))).verdict is DENIED
    for request in rest[:OVERTAKINGS]:
        answer = await a.acquire(request)
        assert answer.verdict is GRANTED
        await a.settle(request)
    assert (await a.acquire(rest[-1])).verdict is Verdict.HELD
    await a.settle(first)
    async with asyncio.timeout(10):
        await b.woken.wait()


async def test_a_dead_replica_is_suspect_until_the_backend_says_otherwise(replicas: World) -> None:
    a, b = replicas["A"], replicas["B"]
    await a.takes(*(ask() for _ in range(8)))
    await asyncio.sleep(LEASE_S + 0.05)
    answer = await b.register()
    assert answer.suspects == ("A",)
    assert (await b.acquire(ask())).verdict is DENIED
    assert (await b.store.reap("b", "A")).verdict is Verdict.OK
    assert (await b.acquire(ask())).verdict is GRANTED


async def test_what_lives_is_never_reaped(replicas: World) -> None:
    await replicas["A"].takes(*(ask() for _ in range(8)))
    assert (await replicas["B"].store.reap("b", "A")).verdict is Verdict.ALIVE
    assert (await replicas["B"].acquire(ask())).verdict is DENIED


async def test_a_suspect_ends_at_its_execution_deadline(replicas: World) -> None:
    a, b = replicas["A"], replicas["B"]
    await a.takes(*(ask(execution_s=LEASE_S + 0.2) for _ in range(8)))
    await asyncio.sleep(LEASE_S + 0.05)
    assert (await b.register()).suspects == ("A",)
    await asyncio.sleep(0.25)
    assert (await b.register()).suspects == ()
    assert (await b.acquire(ask())).verdict is GRANTED


async def test_a_replica_that_comes_back_says_what_it_holds(replicas: World) -> None:
    a, b = replicas["A"], replicas["B"]
    running, unused = ask(sequences=5), ask(sequences=3)
    await a.takes(running, unused)
    await asyncio.sleep(LEASE_S + 0.05)
    assert (await a.acquire(ask())).verdict is Verdict.UNREGISTERED
    assert (await a.store.beat("b", MIXED, None, None)).verdict is Verdict.UNREGISTERED
    await a.register([running])
    await b.register()
    assert (await b.acquire(ask(sequences=4))).verdict is DENIED
    assert (await b.acquire(ask(sequences=3))).verdict is GRANTED
    assert (await a.settle(unused)).verdict is Verdict.OK  # late news changes nothing
    assert (await b.acquire(ask())).verdict is DENIED


async def test_a_store_without_memory_grants_nothing_for_one_lease_time(replicas: World) -> None:
    a, b = replicas["A"], replicas["B"]
    running = ask(sequences=6)
    await a.takes(running)
    replicas.flush()
    assert (await b.acquire(ask())).verdict is Verdict.UNREGISTERED
    await b.register()
    answer = await b.acquire(ask())
    assert answer.verdict is Verdict.COLD and 0 < answer.retry_s <= LEASE_S
    await a.register([running])
    await past_cold(b)
    assert (await b.acquire(ask(sequences=3))).verdict is DENIED
    assert (await b.acquire(ask(sequences=2))).verdict is GRANTED


async def test_strangers_at_the_backend_stop_all_granting(replicas: World) -> None:
    a, b = replicas["A"], replicas["B"]
    await a.store.strange("b", ["A", "nobody"])
    assert (await b.acquire(ask())).verdict is Verdict.COLD
    await a.store.strange("b", ["A"])
    assert (await b.acquire(ask())).verdict is GRANTED


async def test_who_is_there_is_known_to_all_until_it_leaves_or_dies(replicas: World) -> None:
    a, b, c = (replicas[name].store for name in "ABC")
    for store in (a, b, c):
        await store.present()
    assert await a.present() == ("A", "B", "C")
    await b.present(leaving=True)
    assert await a.present() == ("A", "C")
    await asyncio.sleep(LEASE_S + 0.05)
    assert await c.present() == ("C",)


async def test_leaving_gives_the_place_over(replicas: World) -> None:
    a, b = replicas["A"], replicas["B"]
    await a.takes(*(ask() for _ in range(8)))
    await b.acquire(ask())
    await a.store.withdraw("b")
    async with asyncio.timeout(10):
        await b.woken.wait()
    assert (await b.acquire(ask())).verdict is GRANTED


async def test_a_settled_lease_cannot_be_settled_again_nor_by_another(replicas: World) -> None:
    a, b, c = replicas["A"], replicas["B"], replicas["C"]
    mine = ask(sequences=8)
    await a.takes(mine)
    await b.settle(mine)
    assert (await c.acquire(ask())).verdict is DENIED
    await a.settle(mine)
    await a.settle(mine)
    await c.takes(*(ask() for _ in range(8)))
    assert (await b.acquire(ask())).verdict is DENIED


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_the_counts_come_back_to_nothing(replicas: World, seed: int) -> None:
    """Random requests over three replicas: never outside one box, and everything settled leaves an empty store."""
    draw = random.Random(seed)
    live: list[tuple[str, object]] = []
    for _ in range(150):
        name = draw.choice("ABC")
        if live and draw.random() < 0.5:
            owner, request = live.pop(draw.randrange(len(live)))
            await replicas[owner].settle(request, draw.random())  # type: ignore[arg-type]
            continue
        request = ask(draw.choice((10, 500)), sequences=draw.choice((1, 2, 3)), tenant=draw.choice("xy"))
        if (await replicas[name].acquire(request)).verdict is GRANTED:
            live.append((name, request))
        running = [each for _, each in live]
        total = sum(each.shape.sequences for each in running)  # type: ignore[attr-defined]
        biggest = max((each.shape.input_tokens for each in running), default=0)  # type: ignore[attr-defined]
        assert total <= (8 if biggest <= 100 else 2)
        if not draw.randrange(8):
            for replica in replicas.replicas.values():  # alive, and no head left
                await replica.store.beat("b", MIXED, None, None)
    for owner, request in live:
        await replicas[owner].settle(request)  # type: ignore[arg-type]
    for replica in replicas.replicas.values():
        assert (await replica.register()).view == View(0, 0, 0b11)


async def test_the_aged_of_a_lower_class_get_one_grant_in_twenty_over_replicas(replicas: World) -> None:
    """One slot; A always has an interactive request waiting, B and C always an aged batch one: together one in twenty."""
    rules = Rules.of((SMALL._replace(concurrency=1),), None)
    made: dict[str, dict[str, object]] = {n: {"priority": 1, "waited_s": 60.0, "aged_s": 30.0} for n in "BC"}
    made["A"] = {"priority": 0, "waited_s": 1.0}
    heads = {name: ask(rules=rules, **more) for name, more in made.items()}
    for name, head in heads.items():
        await replicas[name].store.beat("b", rules, head, [])
    order: list[str] = []
    while len(order) < 84:
        for name, replica in replicas.replicas.items():
            following = ask(rules=rules, **made[name])
            answer = await replica.acquire(heads[name], following)
            if answer.verdict is GRANTED:
                order.append(name)
                settled, heads[name] = heads[name], following
                await replica.settle(settled)
            elif answer.verdict is Verdict.UNREGISTERED:
                await replica.store.beat("b", rules, heads[name], [])
    turns = [index for index, name in enumerate(order) if name != "A"]
    assert len(turns) in (4, 5)
    assert all(later - earlier >= 20 for earlier, later in itertools.pairwise(turns))


async def test_what_is_not_aged_never_passes_a_more_urgent_one(replicas: World) -> None:
    a, b = replicas["A"], replicas["B"]
    rules = Rules.of((SMALL._replace(concurrency=1),), None)
    batch = ask(rules=rules, priority=1, waited_s=1.0, aged_s=3600.0)
    head = ask(rules=rules)
    await a.store.beat("b", rules, head, [])
    await b.store.beat("b", rules, batch, [])
    for _ in range(25):
        following = ask(rules=rules)
        assert (await a.acquire(head, following)).verdict is GRANTED
        await a.settle(head)
        assert (await b.acquire(batch)).verdict is Verdict.BEHIND
        head = following


async def test_an_aged_one_beside_the_askers_own_urgent_ones_waits_for_its_turn(replicas: World) -> None:
    a = replicas["A"]
    urgent, aged = ask(), ask(priority=1, waited_s=60.0, aged_s=30.0)
    assert (await a.acquire(aged, urgent)).verdict is Verdict.EARLY
    for _ in range(19):
        following = ask()
        assert (await a.acquire(urgent, following)).verdict is GRANTED
        await a.settle(urgent)
        urgent = following
    assert (await a.acquire(aged, urgent)).verdict is GRANTED
    again = ask(priority=1, waited_s=60.0, aged_s=30.0)
    assert (await a.acquire(again, urgent)).verdict is Verdict.EARLY
