"""Case 03: a client that leaves before the first byte, wherever its request is then."""

from __future__ import annotations

import asyncio

import pytest

from tests.cases.common import released_by, silent, slot_is_free
from tests.support.client import ask, post, wire, within
from tests.support.upstream import completion


@pytest.mark.parametrize("how", ["fin", "rst", "half-close"])
@pytest.mark.parametrize("stream", [True, False])
async def test_one_that_waits_is_never_sent(harbour, stream, how):
    upstream, gateway, release = harbour["one"], harbour.gateway, asyncio.Event()
    upstream.script = released_by(release)
    first = asyncio.create_task(ask(harbour.port, model="one"))
    await upstream.called()
    async with wire(harbour.port) as second:
        await second.send(post(model="one", user="second", stream=stream))

        async def waits() -> bool:
            return await gateway.queued() == 1

        await within(3, waits, "the second waits")
        if how == "rst":
            second.reset()
        elif how == "half-close":
            second.writer.write_eof()
        else:
            second.writer.close()

        async def nobody_waits() -> bool:
            return await gateway.queued() == 0

        await within(3, nobody_waits, "the second has left the queue")
    release.set()
    assert (await first).status == 200
    await slot_is_free(gateway)
    assert len(upstream.calls) == 2  # the first, and the slot test


@pytest.mark.parametrize("how", ["fin", "rst", "half-close"])
@pytest.mark.parametrize("stream", [True, False])
async def test_one_in_prefill_is_stopped_at_the_backend(harbour, stream, how):
    upstream = harbour["one"]
    upstream.script = silent
    async with wire(harbour.port) as client:
        await client.send(post(model="one", stream=stream))
        call = await upstream.called()
        if how == "rst":
            client.reset()
        elif how == "half-close":
            client.writer.write_eof()
        else:
            client.writer.close()
        await call.gone(3)
    upstream.script = completion
    await slot_is_free(harbour.gateway)


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_half_an_upload_is_not_dispatched(harbour, how):
    upstream = harbour["one"]
    request = post(model="one", user="x" * 50)
    async with wire(harbour.port) as client:
        await client.send(request[: len(request) // 2], request[len(request) // 2 : -5])
        if how == "rst":
            client.reset()
    await harbour.gateway.settled()
    await slot_is_free(harbour.gateway)
    assert len(upstream.calls) == 1


async def test_leaving_while_the_text_is_counted_leaves_nothing_behind(harbour):
    upstream = harbour["one"]
    messages = [{"role": "user", "content": "naïve " * 2500}]
    for delay in (0, 0.001, 0.003, 0.01):
        async with wire(harbour.port) as client:
            await client.send(post({"model": "one", "messages": messages, "max_tokens": 4}))
            await asyncio.sleep(delay)
            client.reset()
    await harbour.gateway.settled()
    await slot_is_free(harbour.gateway)
    assert all(b"max_tokens" in call.body for call in upstream.calls)
