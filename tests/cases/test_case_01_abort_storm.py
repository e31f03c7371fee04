"""Case 01: a burst of client aborts leaves the connection pool usable."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.cases.common import Outcomes
from tests.support.client import ask, post, wire
from tests.support.upstream import Call, completion

CLIENTS, STORM_S = 24, 2.5


async def test_after_a_storm_of_aborts_every_request_is_answered(harbour):
    choices = random.Random(1)

    async def script(call: Call) -> None:
        await asyncio.sleep(choices.uniform(0, 0.02))
        await completion(call)

    upstream, gateway = harbour["eight"], harbour.gateway
    upstream.script = script
    files = gateway.open_files()
    outcomes = await Outcomes(gateway, "eight").take()
    end = asyncio.get_running_loop().time() + STORM_S

    async def rude() -> None:
        while asyncio.get_running_loop().time() < end:
            async with wire(harbour.port) as client:
                await client.send(post(model="eight", stream=choices.random() < 0.5))
                await asyncio.sleep(choices.uniform(0, 0.03))
                if choices.random() < 0.5:
                    client.reset()

    await asyncio.gather(*(rude() for _ in range(CLIENTS)))
    await gateway.settled()
    assert (await outcomes.since())["cancelled", "client_closed"] > 50  # it was a storm
    answers = await asyncio.gather(*(ask(harbour.port, model="eight") for _ in range(8)))
    assert [answer.status for answer in answers] == [200] * 8
    await gateway.breaker_is("eight", "closed")
    assert gateway.open_files() <= files + 12  # eight idle connections, and what a scrape takes


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_an_abort_in_the_instant_of_the_answer_spoils_no_connection(harbour, how):
    """The close and the answer cross: the next requests, on whatever connections are left, get their own answers."""
    upstream = harbour["eight"]
    for number in range(20):
        async with wire(harbour.port) as client:
            await client.send(post(model="eight", user=f"left-{number}"))
            await upstream.called(number + 1)
            if how == "rst":
                client.reset()
    await harbour.gateway.settled()
    assert [(await ask(harbour.port, model="eight")).json()["id"] for _ in range(5)] == ["c"] * 5
