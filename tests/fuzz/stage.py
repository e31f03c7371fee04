"""The real data path with no sockets: a client's transport and a backend made of memory, and checks of what passes either.

Owns: one event loop for all inputs. Promises: whatever reaches the backend is one whole request for a proxied route, under
the backend's key and nothing of the client's; after a client has left nothing is held for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from typing import Any

import httptools
import uvicorn
from uvicorn.server import ServerState

from gateway.edge.protocol import PlimsollProtocol
from gateway.edge.routes import ROUTES
from gateway.forward.connection import Connection
from gateway.forward.upstream import Upstream
from tests.edge_path.site import KEY, POLICY, Site, policy_for
from tests.support.upstream import COMPLETION, STREAM, response

PROXIED = {path for path, route in ROUTES.items() if route.kind == "proxy"}
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
# 500 is not among them, nor 501 or 505: everything an input can cause has a typed refusal.
USUAL = {100, 200, 400, 401, 403, 404, 405, 408, 413, 415, 429, 431, 502, 503, 504}
NEVER_OPENS = "breaker: {{min_requests: 1000000000, consecutive_failures: 1000000000}}\n"  # inputs must not affect each other
STREAMED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(b"".join(STREAM))


class Transport(asyncio.Transport):
    """The client's side of a connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop, peer: tuple[str, int]) -> None:
        super().__init__()
        self.loop, self.peer = loop, peer
        self.out = bytearray()
        self.closed = False
        self.protocol: asyncio.Protocol | None = None

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": self.peer, "sockname": ("127.0.0.1", 80)}.get(name, default)

    def write(self, data: bytes) -> None:
        if not self.closed:
            self.out += data

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.loop.call_soon(self.protocol.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def get_write_buffer_size(self) -> int:
        return 0


class BackendTransport(Transport):
    """The gateway's side of a connection to a backend: checks what is sent, and answers it."""

    def write(self, data: bytes) -> None:
        check_sent(bytes(data))
        body = data.partition(b"\r\n\r\n")[2]
        answer = STREAMED + b"".join(STREAM) if b'"stream":true' in body else response(COMPLETION)
        self.loop.call_soon(self._answer, answer)

    def _answer(self, answer: bytes) -> None:
        if not self.closed:
            self.protocol.data_received(answer)


class Memory(Upstream):
    """The upstream client, whose connections lead nowhere."""

    async def connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        connection, transport = Connection(self), BackendTransport(loop, ("127.0.0.1", 1))
        transport.protocol = connection
        connection.connection_made(transport)
        connection.pooled = True
        return connection


class Seen:
    """What one message looks like to a parser."""

    def __init__(self) -> None:
        self.messages, self.target, self.headers = 0, b"", []

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_message_complete(self) -> None:
        self.messages += 1


def check_sent(data: bytes) -> None:
    """One request, of a route that is proxied, with the backend's key and nothing of the client's."""
    seen = Seen()
    parser = httptools.HttpRequestParser(seen)
    parser.feed_data(data)
    assert seen.messages == 1, data
    assert seen.target in PROXIED and parser.get_method() == b"POST", data
    names = [name for name, _ in seen.headers]
    assert len(set(names)) == len(names), names
    fields = dict(seen.headers)
    assert fields[b"authorization"] == b"Bearer backend-key", fields
    assert not {b"cookie", b"x-api-key", b"api-key", b"upgrade", b"proxy-authorization"} & set(names), names
    assert KEY.encode() not in data.partition(b"\r\n\r\n")[0], data


async def fixed(scope: Any, receive: Any, send: Any) -> None:
    """What stands for the gateway's own routes here."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


class Stage:
    """One gateway for any number of inputs."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.trouble: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.trouble.append(context))
        self.site = self.loop.run_until_complete(self._make())
        self.config = uvicorn.Config(
            fixed, http=PlimsollProtocol.bound(self.site.path), lifespan="off", access_log=False, ws="none"
        )
        self.config.load()
        self.state = ServerState()
        self.count = 0

    async def _make(self) -> Site:
        site = Site(policy_for(9, POLICY + NEVER_OPENS))
        site.path.bounds = dataclasses.replace(site.path.bounds, max_body_bytes=65_536, max_buffered_bytes=262_144)
        for name, old in site.upstreams.items():
            site.upstreams[name] = Memory(old.endpoint, api_key=b"backend-key", instance="g", attest=False, connect_timeout_s=1)
        return site

    def turn(self, times: int = 1) -> None:
        """Let the loop run what is due."""
        for _ in range(times):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    def play(self, segments: list[bytes], *, one_by_one: bool = False) -> bytes:
        """A connection that sends these segments and leaves; what it was answered. Raises AssertionError.

        `one_by_one`: each once what the one before asked for is answered, as a client does that keeps its connection.
        """
        self.count += 1
        number = self.count
        transport = Transport(self.loop, (f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}", 1))
        protocol = self.config.http_protocol_class(self.config, self.state, {}, self.loop)
        transport.protocol = protocol
        protocol.connection_made(transport)
        for segment in segments:
            if transport.closed:
                break
            self.loop.call_soon(protocol.data_received, segment)
            self.turn()
            if one_by_one:
                self._settle(protocol)
        self._settle(protocol)
        transport.close()
        self.turn()
        self._check(bytes(transport.out))
        return bytes(transport.out)

    def _settle(self, protocol: PlimsollProtocol) -> None:
        """Let the loop run until nothing is worked on. Raises AssertionError where that does not come."""
        self.turn(2)
        for turn in range(5000):
            if not self.site.path.jobs and not protocol.busy:
                break
            if turn < 50:
                self.turn()
            else:  # a thread is at work: a body that has to be decoded
                self.loop.run_until_complete(asyncio.sleep(0.001))
        self.turn()  # at whose end the last answer is written
        assert not self.site.path.jobs and not protocol.busy, "a request hangs"

    def _check(self, out: bytes) -> None:
        site = self.site
        assert not self.trouble, self.trouble
        statuses = {int(found) for found in STATUS.findall(out)}
        assert statuses <= USUAL, (statuses, out[:300])
        assert site.in_flight() == 0 and site.waiting() == 0, "a slot is stuck"
        assert site.path.buffered_bytes == 0, "bytes are held for nobody"
        assert not len(site.path.connections), "a connection is counted that has left"
        assert b"backend-key" not in out and b"Traceback" not in out
        site.accounts.clear()
        site.triggers.clear()
