"""Case 02: a client that leaves in the middle of a stream frees its slot, stops the backend, and disturbs nobody."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import pytest

from tests.cases.common import chatty, slot_is_free, two_then_silent
from tests.support.client import get, open_stream
from tests.support.gateway import KEYS
from tests.support.upstream import SSE_HEAD, Call, chunk, completion, event


@pytest.mark.parametrize("script", [chatty, two_then_silent], ids=["chatty", "silent"])
@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_the_slot_is_free_and_the_backend_hears_of_it(harbour, how, script):
    upstream = harbour["one"]
    upstream.script = script
    async with open_stream(harbour.port, model="one") as stream:
        await stream.read_past(b"finish_reason")
        await stream.read_past(b"finish_reason")
        stream.leave(how)
        left = time.monotonic()
        gone = await upstream.calls[0].gone(3)
        assert gone - left < 2.5  # the script would have held on for much longer
    upstream.script = completion
    await slot_is_free(harbour.gateway)


async def slowest_poll(port: int, seconds: float) -> float:
    """The longest that the liveness probe took."""
    worst, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        assert (await get(port, "/health/live", KEYS["prober"])).status == 200
        worst = max(worst, time.monotonic() - began)
        await asyncio.sleep(0.1)
    return worst


async def test_thirty_large_streams_dropped_at_once_do_not_hold_up_the_probe(harbour):
    piece = chunk(event(b"x" * 65_536))

    async def five_mib(call: Call) -> None:
        await call.say(SSE_HEAD)
        for _ in range(80):
            await call.say(piece)
        await call.gone()

    harbour["wide"].script = five_mib
    usual = await slowest_poll(harbour.port, 0.5)
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(open_stream(harbour.port, model="wide")) for _ in range(30)]
        for stream in streams:
            stream.leave("rst")
        worst = await slowest_poll(harbour.port, 1.5)
    assert worst < max(0.25, 8 * usual)
    await harbour.gateway.settled()
