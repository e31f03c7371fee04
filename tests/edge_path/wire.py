"""A client on a raw socket: sends exactly these bytes, reads one response at a time and notices when it was cut."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import asynccontextmanager
from dataclasses import dataclass

import orjson

from tests.edge_path.site import KEY


@dataclass
class Response:
    status: int
    fields: dict[str, str]
    lines: list[tuple[str, str]]
    body: bytes
    whole: bool

    def json(self):
        return orjson.loads(self.body)

    @property
    def code(self) -> str:
        return self.json()["error"]["code"]

    def events(self) -> list[bytes]:
        return [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]


class Wire:
    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    async def send(self, *segments: bytes) -> None:
        for segment in segments:
            self.writer.write(segment)
            await self.writer.drain()
            if len(segments) > 1:
                await asyncio.sleep(0.001)

    async def response(self, timeout: float = 10) -> Response:
        return await asyncio.wait_for(self._response(), timeout)

    async def _response(self) -> Response:
        head = await self.reader.readuntil(b"\r\n\r\n")
        first, *rest = head.decode("latin-1").split("\r\n")
        lines = [tuple(line.split(": ", 1)) for line in rest if line]
        fields = {name.lower(): value for name, value in lines}
        status = int(first.split(" ")[1])
        if status == 100:
            return Response(100, fields, lines, b"", True)
        if fields.get("transfer-encoding") == "chunked":
            body, whole = await self._chunks()
        elif "content-length" in fields:
            body, whole = await self.reader.readexactly(int(fields["content-length"])), True
        elif status in (204, 304):
            body, whole = b"", True
        else:
            body, whole = await self.reader.read(-1), True
        return Response(status, fields, lines, body, whole)

    async def _chunks(self) -> tuple[bytes, bool]:
        pieces: list[bytes] = []
        try:
            while size := int(await self.reader.readline() or b"x", 16):
                pieces.append(await self.reader.readexactly(size))
                await self.reader.readexactly(2)
            await self.reader.readexactly(2)
        except (asyncio.IncompleteReadError, ValueError, ConnectionError):
            return b"".join(pieces), False
        return b"".join(pieces), True

    async def until(self, needle: bytes, timeout: float = 10) -> bytes:
        """Read raw bytes up to and with `needle`."""
        return await asyncio.wait_for(self.reader.readuntil(needle), timeout)

    async def closed(self, timeout: float = 5) -> bytes:
        """What comes until the other side closes."""
        try:
            return await asyncio.wait_for(self.reader.read(-1), timeout)
        except ConnectionError:
            return b""

    def reset(self) -> None:
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@asynccontextmanager
async def wire(port: int):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


def post(
    document: object = None,
    *headers: str,
    path: str = "/v1/chat/completions",
    key: str | None = KEY,
    version: str = "1.1",
    **fields,
) -> bytes:
    """One POST. Without `document`: a small chat, with `fields` added to it."""
    if document is None:
        document = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, **fields}
    body = document if isinstance(document, bytes) else orjson.dumps(document)
    lines = [f"POST {path} HTTP/{version}", "host: g", "content-type: application/json", f"content-length: {len(body)}", *headers]
    if key is not None:
        lines.append(f"authorization: Bearer {key}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


async def ask(port: int, *args, **fields) -> Response:
    """One request on a connection of its own."""
    async with wire(port) as client:
        await client.send(post(*args, **fields))
        return await client.response()


async def until(condition, timeout: float = 5) -> None:
    """Wait for something that another task brings about."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.002)
