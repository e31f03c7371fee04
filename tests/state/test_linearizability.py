"""Histories of three replicas that ask at once, recorded on real Redis and in memory, and the checker that judges them."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from gateway.state.leases import Ask, Verdict
from tests.state.linear import Event, linearizable
from tests.state.stores import MIXED, Replica, ask, world

SIZES = ((10, 1), (10, 2), (500, 1))


async def _record(replica: Replica, history: list[Event], draw: random.Random, ticks: itertools.count[int], calls: int) -> None:
    """Ask and settle as fast as the answers come, several at a time."""
    held: list[Ask] = []

    async def one() -> None:
        if held and draw.random() < 0.5:
            request = held.pop(draw.randrange(len(held)))
            begun = next(ticks)
            await replica.settle(request)
            history.append(Event(request, None, begun, next(ticks)))
            return
        size, sequences = draw.choice(SIZES)
        request = ask(size, sequences=sequences)
        begun = next(ticks)
        answer = await replica.acquire(request)
        history.append(Event(request, answer.verdict, begun, next(ticks)))
        if answer.verdict is Verdict.GRANTED:
            held.append(request)

    for _ in range(calls // 3):
        await asyncio.gather(*(one() for _ in range(3)))
    while held:
        request = held.pop()
        begun = next(ticks)
        await replica.settle(request)
        history.append(Event(request, None, begun, next(ticks)))


@pytest.mark.parametrize("kind", ["memory", "redis"])
@pytest.mark.parametrize("seed", range(3))
async def test_what_replicas_see_is_one_history(kind: str, seed: int, request: pytest.FixtureRequest) -> None:
    async with world(kind, request) as replicas:
        history: list[Event] = []
        ticks = itertools.count()
        beats = [asyncio.create_task(_beat(replica)) for replica in replicas.replicas.values()]
        await asyncio.gather(
            *(_record(r, history, random.Random(f"{seed}{n}"), ticks, 24) for n, r in replicas.replicas.items())
        )  # fmt: skip
        for beat in beats:
            beat.cancel()
    assert {event.verdict for event in history} >= {None, Verdict.GRANTED, Verdict.DENIED}
    assert linearizable(history)


async def _beat(replica: Replica) -> None:
    while True:
        await asyncio.sleep(0.2)
        await replica.store.beat("b", MIXED, None, None)


def test_the_checker_sees_a_lease_too_many() -> None:
    granted = [Event(ask(500), Verdict.GRANTED, n, n + 0.5) for n in range(3)]
    assert linearizable(granted[:2]) and not linearizable(granted)


def test_the_checker_sees_a_denial_without_reason() -> None:
    first = Event(ask(500), Verdict.GRANTED, 0, 1)
    assert not linearizable([first, Event(ask(), Verdict.DENIED, 2, 3)])
    settled_meanwhile = [first, Event(ask(sequences=8), Verdict.DENIED, 2, 5), Event(first.ask, None, 3, 4)]
    assert linearizable(settled_meanwhile)
    assert not linearizable([first, Event(first.ask, None, 2, 3), Event(ask(sequences=8), Verdict.DENIED, 4, 5)])
