"""What the gateway weighs under a thousand slow streams, ten thousand idle connections, and readers that do not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.soak.crowd import Drops, disperse, gather_crowd, heaviest, room_for
from tests.support.client import post, within
from tests.support.gateway import Backend, GatewayProcess
from tests.support.upstream import LAST_CHUNK, SSE_HEAD, STREAM, Call, ScriptedUpstream, chunk, delta, event

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STREAMS, STREAMS_KB = 1000, 150_000
IDLERS, IDLERS_KB = 10_000, 300_000
DEAF, SENT_BYTES, DEAF_GROWTH_KB = 3, 200_000_000, 16_000
PIECE = event({"id": "c", "choices": [{"index": 0, "delta": {"content": "x" * 16_000}, "finish_reason": None}]})


@asynccontextmanager
async def before(folder: Path, script: Callable[[Call], object], **server: object) -> AsyncIterator[GatewayProcess]:
    """A gateway before one backend with this script."""
    async with AsyncExitStack() as stack:
        upstream = ScriptedUpstream()
        upstream.script = script  # type: ignore[assignment]
        await upstream.start()
        stack.push_async_callback(upstream.stop)
        gateway = GatewayProcess(
            folder, {"tiny": Backend(upstream, concurrency=2048)}, server=server, timeouts={"client_write_s": 120}
        )
        yield await stack.enter_async_context(gateway)


async def test_a_thousand_slow_streams(tmp_path):
    """Each brings an event a second."""
    room_for(8192)
    over = asyncio.Event()

    async def slowly(call: Call) -> None:
        await call.say(SSE_HEAD)
        while not over.is_set():
            await call.say(chunk(delta("word")))
            await asyncio.sleep(1)
        await call.say(b"".join(chunk(each) for each in STREAM) + LAST_CHUNK)

    async with before(tmp_path, slowly) as gateway:
        empty = gateway.rss_kb()
        crowd = await gather_crowd(gateway.port, STREAMS, post(model="tiny", stream=True), b"word")
        assert await gateway.in_flight() == STREAMS
        most = await heaviest(gateway, 5)
        print(f"\n{STREAMS} slow streams: {most / 1000:.1f} MB resident, {empty / 1000:.1f} MB without them")
        for each in crowd:
            each.until = b"[DONE]"
            each.answered.clear()
        over.set()
        await asyncio.wait_for(asyncio.gather(*(each.answered.wait() for each in crowd)), 60)
        assert not any(each.lost for each in crowd)  # none was cut
        disperse(crowd)
        await gateway.settled()
        assert most <= STREAMS_KB


async def test_ten_thousand_idle_connections(tmp_path):
    """Each has been answered once and is kept alive."""
    room_for(11_000)

    async def briefly(call: Call) -> None:
        await call.answer(b'{"id":"c","choices":[{"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}')

    async with before(tmp_path, briefly, keep_alive_s=600) as gateway:
        empty, files = gateway.rss_kb(), gateway.open_files()
        crowd = await gather_crowd(gateway.port, IDLERS, post(model="tiny"), b'"usage"')
        assert gateway.open_files() >= files + IDLERS and not any(each.lost for each in crowd)
        most = await heaviest(gateway, 3)
        print(f"\n{IDLERS} idle connections: {most / 1000:.1f} MB resident, {empty / 1000:.1f} MB without them")
        disperse(crowd)
        await within(30, lambda: gateway.open_files() <= files + 8, "the connections are closed")
        assert most <= IDLERS_KB


async def test_readers_that_do_not_read_are_not_buffered_for(tmp_path):
    """The backend has 200 MB for each of three deaf clients; TCP holds it back. One that reads at last gets every byte."""
    pieces = SENT_BYTES // len(PIECE) + 1

    async def gushes(call: Call) -> None:
        call.peer.transport.write(SSE_HEAD)
        for _ in range(pieces):
            call.peer.transport.write(chunk(PIECE))
            await call.peer.drained()
        await call.say(b"".join(chunk(each) for each in STREAM) + LAST_CHUNK)

    async with before(tmp_path, gushes) as gateway:
        empty, loop = gateway.rss_kb(), asyncio.get_running_loop()
        deaf = [Drops(post(model="tiny", stream=True), b"[DONE]", reads=False) for _ in range(DEAF)]
        for each in deaf:
            await loop.create_connection(lambda each=each: each, "127.0.0.1", gateway.port)
        await within(10, lambda: all(each.size for each in deaf), "the streams have begun")
        most = await heaviest(gateway, 5)
        assert max(each.size for each in deaf) < 1_000_000  # they have indeed not read
        first = deaf[0]
        first.reads = True
        first.transport.resume_reading()
        reading = await heaviest(gateway, 1)
        await asyncio.wait_for(first.answered.wait(), 120)
        assert not first.lost and first.size > SENT_BYTES
        reading = max(reading, gateway.rss_kb())
        print(
            f"\n{DEAF} deaf clients: {(most - empty) / 1000:+.1f} MB; while one reads 200 MB {(reading - empty) / 1000:+.1f} MB"
        )
        disperse(deaf)
        await gateway.settled()
        assert max(most, reading) - empty <= DEAF_GROWTH_KB
