"""A scripted HTTP server on a raw socket: what it says, byte for byte and segment for segment, is the test's choice."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

Script = Callable[["Peer"], Awaitable[None]]


QUIET = (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError)


class Peer:
    """One accepted connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: Server) -> None:
        self.reader, self.writer, self.server = reader, writer, server

    async def request(self) -> bytes:
        """One whole request (content-length framing). Raises IncompleteReadError at the end of the connection."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        size = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                size = int(line.split(b":")[1])
        return head + await self.reader.readexactly(size)

    async def say(self, *segments: bytes) -> None:
        """Send each segment so that the other side reads it by itself."""
        for segment in segments:
            self.writer.write(segment)
            await self.writer.drain()
            await asyncio.sleep(0.002)

    def reset(self) -> None:
        """Close with RST."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def gone(self) -> None:
        """Return when the other side has closed."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass


class Server:
    """The listening side: `peers` counts connections; `requests` is for scripts that keep what they read."""

    def __init__(self) -> None:
        self.port = 0
        self.peers = 0
        self.requests: list[bytes] = []


@asynccontextmanager
async def serving(script: Script, *, unix_path: str | None = None, ssl=None):
    """Run `script` for each connection; its exceptions other than a closed connection fail the test."""
    server, running = Server(), []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.peers += 1
        task = asyncio.get_running_loop().create_task(script(Peer(reader, writer, server)))
        task.add_done_callback(lambda _: writer.close())
        running.append(task)

    if unix_path:
        listener = await asyncio.start_unix_server(accept, unix_path)
    else:
        listener = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=ssl, limit=2**20)
        server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        for task in running:
            task.cancel()
        for result in await asyncio.gather(*running, return_exceptions=True):
            if result is not None and not isinstance(result, QUIET):
                raise result


def response(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    lines = [b"HTTP/1.1 " + status, b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
