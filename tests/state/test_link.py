"""The one connection to Redis: answers belong to their commands whoever left, and a verdict falls in time."""

from __future__ import annotations

import asyncio
import time

import pytest

from gateway.state.leases import StateLost
from gateway.state.link import Link
from tests.state.test_agreement import until
from tests.support.redis_server import RedisServer


class Heard:
    """What a link told."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.ups: list[str] = []
        self.losses: list[str] = []
        self.link = Link(url, timeout_s=timeout_s, on_up=self.ups.append, on_lost=self.losses.append, on_message=lambda *_: None)

    async def __aenter__(self) -> Heard:
        self.task = asyncio.create_task(self.link.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_an_answer_never_reaches_another_command(redis_server: RedisServer) -> None:
    async with Heard(redis_server.url, 5.0) as heard:
        await until(lambda: heard.link.up)
        sent = [heard.link.send("ECHO", str(number)) for number in range(300)]
        for future in sent[::3]:
            future.cancel()
        for number, future in enumerate(sent):
            if number % 3:
                assert await future == str(number).encode()


@pytest.mark.parametrize(
    "error",
    [
        "LOADING Redis is loading",
        "NOAUTH Authentication required.",
        "OOM command not allowed",
        "NOREPLICAS Not enough good replicas",
    ],
)
async def test_a_server_that_cannot_serve_is_never_up(error: str) -> None:
    asked = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):
            asked.set()
            writer.write(f"-{error}\r\n".encode())

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with Heard(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0", 1.0) as heard:
        await asyncio.wait_for(asked.wait(), 5)
        with pytest.raises(StateLost):
            await heard.link.send("PING")
        assert heard.ups == []
    server.close()


async def test_a_frozen_server_is_lost_in_time_and_found_again(service, tmp_path) -> None:
    server = RedisServer(service("redis-server"), tmp_path)
    server.start()
    async with Heard(server.url, 0.2) as heard:
        await until(lambda: heard.link.up)
        server.freeze()
        begun = time.monotonic()
        with pytest.raises(StateLost):
            await heard.link.send("PING")
        assert time.monotonic() - begun >= 0.2 and len(heard.losses) == 1
        server.thaw()
        await until(lambda: heard.link.up, 10)
        assert len(heard.ups) == 2 and heard.ups[0] == heard.ups[1]
    server.stop()
