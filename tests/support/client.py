"""Clients on raw sockets. `Wire`, `post` and `ask` are the ones the tests of the path use; streams are read as they come."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import Any

from tests.edge_path.site import KEY
from tests.edge_path.wire import Response, Wire, ask, post, until, wire

__all__ = ["KEY", "Response", "Stream", "Wire", "ask", "open_stream", "post", "until", "wire"]


class Stream:
    """A streamed answer that is read event by event; `head` is the response's head."""

    def __init__(self, client: Wire, head: bytes) -> None:
        self.client, self.head = client, head

    @property
    def status(self) -> int:
        return int(self.head.split(b" ", 2)[1])

    async def read_past(self, needle: bytes, timeout: float = 5) -> bytes:
        """Raw bytes (chunk framing included) up to and with `needle`."""
        return await self.client.until(needle, timeout)

    async def rest(self, timeout: float = 10) -> bytes:
        """Everything until the connection is closed."""
        return await self.client.closed(timeout)

    async def finish(self, timeout: float = 10) -> tuple[bytes, bool]:
        """The rest of a chunked body, decoded, until its last chunk or the cut; and whether the last chunk was there."""
        return await asyncio.wait_for(self.client._chunks(), timeout)

    def leave(self, how: str = "fin") -> None:
        """Go: by FIN, or by RST."""
        if how == "rst":
            self.client.reset()
        else:
            self.client.writer.close()


@asynccontextmanager
async def open_stream(port: int, *args: Any, **fields: Any):
    """A streamed request whose head has been read."""
    async with wire(port) as client:
        await client.send(post(*args, stream=True, **fields))
        yield Stream(client, await client.until(b"\r\n\r\n"))


async def get(port: int, path: str, key: str, timeout: float = 5) -> Response:
    """One GET on a connection of its own."""
    async with wire(port) as client:
        await client.send(f"GET {path} HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {key}\r\nconnection: close\r\n\r\n".encode())
        return await client.response(timeout)


async def within(seconds: float, condition, what: str) -> None:
    """Wait for `condition` (sync or async); fails saying `what` when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.01)
