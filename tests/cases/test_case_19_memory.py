"""Case 19: on the way back everything has a bound, and nothing legal is cut."""

from __future__ import annotations

import asyncio

import pytest

from tests.cases.common import slot_is_free
from tests.support.client import ask, post, wire, within
from tests.support.upstream import COMPLETION, LAST_CHUNK, SSE_HEAD, STREAM, Call, chunk, completion, delta, event, response

MIB = 1_048_576
ALLOWED_KB = 32 * 1024


@pytest.mark.parametrize("pieces", [1, 64])
async def test_a_line_of_2_mib_passes_whole(harbour, pieces):
    call_ = {"index": 0, "id": "t", "type": "function", "function": {"name": "f", "arguments": "x" * 2 * MIB}}
    big = event({"choices": [{"index": 0, "delta": {"tool_calls": [call_]}, "finish_reason": None}]})
    step = len(big) // pieces + 1

    async def script(call: Call) -> None:
        await call.say(SSE_HEAD)
        await call.say(*(chunk(big[at : at + step]) for at in range(0, len(big), step)))
        await call.say(b"".join(map(chunk, STREAM)) + LAST_CHUNK)

    harbour["one"].script = script
    got = await ask(harbour.port, model="one", stream=True)
    assert got.whole and got.body == big + b"".join(STREAM)


async def test_a_line_that_never_ends_costs_no_memory(harbour):
    piece, total = chunk(b"x" * MIB), 0

    async def script(call: Call) -> None:
        nonlocal total
        await call.say(SSE_HEAD, chunk(delta("a") + b"data: "))
        while total < 300:
            call.peer.transport.write(piece)
            await call.peer.drained()
            total += 1

    harbour["one"].script = script
    before = most = harbour.gateway.rss_kb()
    received = 0
    async with wire(harbour.port) as client:
        await client.send(post(model="one", stream=True))
        while data := await client.reader.read(MIB):
            received += len(data)
            most = max(most, harbour.gateway.rss_kb())
    assert received > 2 * MIB  # it was forwarded, until it was cut as a stall or had ended
    assert most - before < ALLOWED_KB
    harbour["one"].script = completion
    await slot_is_free(harbour.gateway)


class Flood:
    """Streams as fast as it can; `sent` in MiB."""

    def __init__(self) -> None:
        self.sent = 0

    async def __call__(self, call: Call) -> None:
        piece = chunk(event(b"x" * (MIB - 8)))
        await call.say(SSE_HEAD, chunk(delta("a")))
        while self.sent < 200:
            call.peer.transport.write(piece)
            await call.peer.drained()
            self.sent += 1


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_client_that_reads_nothing_holds_the_backend_back(harbour, leaves):
    """It is ended by its own leaving, or by the limit on writing to it."""
    flood = harbour["one"].script = Flood()
    before = harbour.gateway.rss_kb()
    async with wire(harbour.port) as client:
        client.writer.transport.pause_reading()
        await client.send(post(model="one", stream=True))
        call = await harbour["one"].called()
        await asyncio.sleep(0.7)
        held = flood.sent
        assert held < 60
        assert harbour.gateway.rss_kb() - before < ALLOWED_KB
        if leaves:
            client.reset()
        await call.gone(4)
        assert flood.sent <= held + 20
    harbour["one"].script = completion
    await slot_is_free(harbour.gateway)


async def test_a_client_that_reads_slowly_gets_all_of_it(harbour):
    """Slow is not gone: as long as something is taken within the limit, the stream goes on."""
    piece = delta("y" * 200_000)

    async def script(call: Call) -> None:
        await call.say(SSE_HEAD)
        await call.say(*[chunk(piece)] * 60)
        await call.say(b"".join(map(chunk, STREAM)) + LAST_CHUNK)

    harbour["one"].script = script
    received = b""
    async with wire(harbour.port) as client:
        await client.send(post(None, "connection: close", model="one", stream=True))
        while data := await client.reader.read(500_000):
            received += data
            await asyncio.sleep(0.03)
    assert received.endswith(LAST_CHUNK) and b"[DONE]" in received
    assert received.count(piece) >= 1


async def test_an_answer_too_large_to_hold_is_refused_within_bounds(harbour):
    async def script(call: Call) -> None:
        await call.say(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(200):
            await call.say(chunk(b" " * MIB))

    harbour["one"].script = script
    before = harbour.gateway.rss_kb()
    got = await ask(harbour.port, model="one")
    assert (got.status, got.code) == (502, "upstream_reset")
    assert harbour.gateway.rss_kb() - before < 3 * ALLOWED_KB  # 32 MiB may be held
    harbour["one"].script = completion
    await slot_is_free(harbour.gateway)


async def test_headers_of_a_backend_have_a_bound(harbour):
    for lines in ((b"x-long: " + b"a" * 300_000,), tuple(b"x-%d: a" % n for n in range(5000))):

        async def script(call: Call, lines: tuple[bytes, ...] = lines) -> None:
            await call.say(response(COMPLETION, *lines))

        harbour["one"].script = script
        got = await ask(harbour.port, model="one")
        assert (got.status, got.code) == (502, "upstream_reset")


async def test_memory_does_not_grow_with_streams_that_were_dropped(harbour):
    async def round_of(count: int) -> None:
        for _ in range(count):
            async with wire(harbour.port) as client:
                await client.send(post(model="wide", stream=True))
                await client.until(b"\r\n\r\n")
        await harbour.gateway.settled()

    await round_of(50)
    before = harbour.gateway.rss_kb()
    await round_of(200)

    async def flat() -> bool:
        return harbour.gateway.rss_kb() - before < 4096

    await within(2, flat, "memory is where it was")
