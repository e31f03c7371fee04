"""Exact bytes on the wire, from an address of one's own: what an outsider can send, and all that comes back.

Every address of 127.0.0.0/8 is this host, so that a test with thousands of bad keys does not use up the allowance of another.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl as tls
from contextlib import asynccontextmanager

from tests.edge_path.wire import Response, Wire

_numbers = itertools.count(2)


def stranger() -> str:
    """A source address that nothing else in this run uses."""
    number = next(_numbers)
    return f"127.{10 + number // 62500}.{number // 250 % 250}.{number % 250 + 1}"


@asynccontextmanager
async def dial(port: int, source: str | None = None, ssl: tls.SSLContext | None = None, name: str | None = None):
    """A connection to this host, from `source`."""
    local = None if source is None else (source, 0)
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, limit=2**24, local_addr=local, ssl=ssl, server_hostname=name
    )
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


async def say(port: int, *segments: bytes, source: str | None = None, timeout: float = 5) -> Response:
    """Send these bytes on a connection of their own and read one response (to HEAD: its head)."""
    async with dial(port, source) as client:
        sending = asyncio.create_task(client.send(*segments))
        try:
            if segments[0].startswith(b"HEAD "):
                return await asyncio.wait_for(head_only(client), timeout)
            return await client.response(timeout)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


async def head_only(client: Wire) -> Response:
    """The answer to HEAD: whatever follows its head within a moment is its body, which must be empty."""
    head = await client.reader.readuntil(b"\r\n\r\n")
    first, *rest = head.decode("latin-1").split("\r\n")
    lines = [tuple(line.split(": ", 1)) for line in rest if line]
    body = b""
    try:
        body = await asyncio.wait_for(client.reader.read(1), 0.02)
    except (TimeoutError, ConnectionError):
        pass
    return Response(int(first.split(" ")[1]), {n.lower(): v for n, v in lines}, lines, body, True)


def request(method: str | bytes, target: str | bytes, *lines: str | bytes, key: str | None = None, body: bytes = b"") -> bytes:
    """The bytes of a request, with `host` and, where there is a body, its length."""
    raw = [_b(method) + b" " + _b(target) + b" HTTP/1.1", b"host: g", *(_b(line) for line in lines)]
    if key is not None:
        raw.append(b"authorization: Bearer " + _b(key))
    if body or method in ("POST", "PUT", "PATCH"):
        raw.append(b"content-length: %d" % len(body))
    return b"\r\n".join(raw) + b"\r\n\r\n" + body


def _b(text: str | bytes) -> bytes:
    return text.encode("latin-1") if isinstance(text, str) else text


def assert_envelope(got: Response, status: int, code: str | None = None, dialect: str = "openai") -> None:
    """An error as callers are promised it: status, one JSON object of four names, a request id, the reason in a header."""
    assert got.status == status, (got.status, got.body[:300])
    assert got.fields["content-type"].split(";")[0] == "application/json", got.fields
    assert got.fields["x-request-id"]
    document = got.json()
    error = document["error"]
    if dialect == "anthropic":
        assert document["type"] == "error" and error["type"] and error["message"], document
    else:
        assert set(error) == {"message", "type", "param", "code"}, error
    assert got.fields["x-plimsoll-reason"] == (code or error.get("code")), got.fields
    if code is not None and dialect != "anthropic":
        assert error["code"] == code, error
    names = [name.lower() for name, _ in got.lines]
    assert names.count("date") == 1 and names.count("server") == 1 and names.count("x-request-id") == 1, names
    for word in ("Traceback", "Exception", "orjson", "pydantic", ".py", "/root", "/usr/"):
        assert word not in got.body.decode("utf-8", "replace"), got.body
