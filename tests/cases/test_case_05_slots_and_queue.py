"""Case 05: a slot is held for the whole answer, and the bound of the queue is a real one."""

from __future__ import annotations

import asyncio

from tests.cases.common import released_by, slot_is_free, streaming_for
from tests.support.client import ask, open_stream, within


async def test_nobody_else_gets_in_while_an_answer_is_streamed(tideway):
    gateway, upstream = tideway.gateway, tideway["one"]
    await gateway.reload(queue={"max_requests": 0})
    upstream.script = streaming_for(1.8)
    async with open_stream(tideway.port, model="one") as stream:
        for pause in (0.2, 0.6, 0.6):
            await asyncio.sleep(pause)
            got = await ask(tideway.port, model="one")
            assert (got.status, got.code) == (503, "queue_full")
            assert got.fields["x-should-retry"] == "true"
            assert int(got.fields["retry-after"]) >= 1 and int(got.fields["retry-after-ms"]) > 0
        body, whole = await stream.finish()
    assert whole and body.endswith(b"data: [DONE]\n\n")
    assert len(upstream.calls) == 1
    await slot_is_free(gateway)


async def test_one_runs_two_wait_and_three_are_refused_at_once(tideway):
    gateway, upstream, release = tideway.gateway, tideway["one"], asyncio.Event()
    await gateway.reload(queue={"max_requests": 2})
    upstream.script = released_by(release)
    sent = [asyncio.create_task(ask(tideway.port, model="one")) for _ in range(6)]

    async def three_refused() -> bool:
        return sum(task.done() for task in sent) == 3

    await within(2, three_refused, "three are refused while the first still runs")
    assert [task.result().code for task in sent if task.done()] == ["queue_full"] * 3

    async def counted() -> bool:
        return (await gateway.in_flight(), await gateway.queued(), len(upstream.calls)) == (1, 2, 1)

    await within(2, counted, "one runs and two wait")
    release.set()
    answers = await asyncio.gather(*sent)
    assert sorted(answer.status for answer in answers) == [200, 200, 200, 503, 503, 503]
    assert len(upstream.calls) == 3


async def test_a_second_is_never_beside_the_first(tideway):
    """The limit holds at the backend, where it counts, however many come and however they end."""
    gateway, upstream = tideway.gateway, tideway["one"]
    running = most = 0

    async def script(call):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        if len(upstream.calls) % 3 == 0:
            call.reset()
        else:
            await call.answer(b"{}")

    upstream.script = script
    await gateway.reload(breaker={"min_requests": 1000, "consecutive_failures": 1000})
    answers = await asyncio.gather(*(ask(tideway.port, model="one") for _ in range(24)))
    assert most == 1
    assert {(answer.status, answer.code if answer.status != 200 else None) for answer in answers} == {
        (200, None),
        (502, "upstream_reset"),
    }
    assert len(upstream.calls) == 24
