"""The listener's side of a connection: requests out of bytes, within bounds, and answers into the transport.

Owns: parsing, every bound on what a client may send (headers, bodies, pipelined bytes, time), keep-alive, the notice
that a client has left, and the way out to the ASGI app for routes that are not proxied.
Promises: the verdict on a request does not depend on how it was cut into segments; a request is screened before its
body is kept; at most one request of a connection is worked on; a half-close is a departure.
Talks to: a `Front` (the data path), and uvicorn, whose protocol this is when passed as `http=`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol
from urllib.parse import unquote

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway.edge.incoming import Incoming
from gateway.errors import Reason, Refusal
from gateway.forward.relay import Brake

MAX_HEAD_BYTES = 65_536
MAX_HEADERS = 200
MAX_PENDING_BYTES = 65_536  # of later requests, while one is worked on
LINGER_S = 1.0  # how long bytes of a refused request are read and dropped, so that the client gets to read the answer
LINGER_BYTES = 4_194_304
_HOP = frozenset({b"upgrade", b"http2-settings", b"connection"})


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one client may ask of the listener. Bytes and seconds."""

    max_body_bytes: int
    body_timeout_s: float
    keep_alive_s: float
    max_connections: int
    max_connections_per_address: int | None
    max_buffered_bytes: int
    client_write_s: float


class Front(Protocol):
    """What stands behind the listener."""

    bounds: Bounds
    buffered_bytes: int
    draining: bool

    def screen(self, client: PlimsollProtocol, incoming: Incoming) -> Refusal | bytes | None:
        """Judge a head: None to go on, a refusal, or a whole answer (a preflight's)."""

    def refuse(self, client: PlimsollProtocol, incoming: Incoming | None, refusal: Refusal) -> bytes:
        """The bytes of a refusal that closes the connection; the request is accounted for."""

    def serve(self, client: PlimsollProtocol, incoming: Incoming) -> Coroutine[Any, Any, None]:
        """Work on a proxied request; ends with `client.finished`."""

    def departed(self, client: PlimsollProtocol, incoming: Incoming) -> None:
        """The client left before its request was whole."""

    def connected(self, client: PlimsollProtocol) -> bool: ...
    def disconnected(self, client: PlimsollProtocol) -> None: ...


class PlimsollProtocol(HttpToolsProtocol):
    """One client connection. `bound(front)` gives the class to pass to uvicorn."""

    front: ClassVar[Front]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.brake: Brake | None = None
        self.paused_at: float | None = None  # since when the client has not taken what was written
        self._receiving: Incoming | None = None
        self._ready: deque[Incoming] = deque()
        self._current: Incoming | None = None
        self._task: asyncio.Task[None] | None = None
        self._pending = b""
        self._head_bytes = 0
        self._broken: Refusal | None = None
        self._upgrading = False
        self._idle_since = time.monotonic()
        self._linger_until: float | None = None
        self._linger_bytes = 0
        self._over = False

    @classmethod
    def bound(cls, front: Front) -> type[PlimsollProtocol]:
        """A class of its own whose connections belong to `front`."""
        return type("BoundProtocol", (cls,), {"front": front})

    # What the data path uses

    def write(self, data: bytes) -> None:
        """Send bytes. Nothing happens when the client has left."""
        if not self._over:
            self.transport.write(data)

    def finished(self, *, keep_alive: bool) -> None:
        """The answer to the current request is whole; go on with the next one or close."""
        current, self._current, self._task, self.brake = self._current, None, None, None
        if current is not None:
            self._release(current)
        if self._over:
            return
        if not keep_alive or self.front.draining:
            self.hang_up()
            return
        self._idle_since = time.monotonic()
        if self._pending and not self._ready:
            data, self._pending = self._pending, b""
            self._feed(data)
        else:
            self._advance()

    def hang_up(self) -> None:
        """Close when what was written has been sent. Without a last chunk before it, the client sees a cut answer."""
        if not self._over:
            self._over = True
            self.transport.close()

    def cut(self) -> None:
        """Close at once, dropping what was not sent."""
        self._over = True
        self.transport.abort()

    @property
    def busy(self) -> bool:
        """Whether a request is worked on."""
        return self._current is not None

    @property
    def address(self) -> str | None:
        """The client's address; None on a Unix socket."""
        return self.client[0] if self.client else None

    def sweep(self, now: float) -> None:
        """Called by the ticker: ends what took too long. A request that is worked on has deadlines of its own."""
        if self._linger_until is not None:
            if now > self._linger_until:
                self.cut()
        elif self._over:
            if self.paused_at is not None and now > self.paused_at + self.front.bounds.client_write_s:
                self.cut()
        elif self._current is not None:
            return
        elif self._receiving is not None:
            if now > self._receiving.received_at + self.front.bounds.body_timeout_s:
                limit = self.front.bounds.body_timeout_s
                self._refuse(Refusal(Reason.REQUEST_TIMEOUT, f"The request was not sent whole within {limit:g} seconds."))
        elif now > self._idle_since + self.front.bounds.keep_alive_s:
            self.hang_up()

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if not self.front.connected(self):
            self._refuse(Refusal(Reason.QUEUE_FULL, "There are too many connections.", retry_after_s=1.0))

    def data_received(self, data: bytes) -> None:
        if self._over:
            self._linger(len(data))
        elif self._current is not None:
            self._pending += data
            if len(self._pending) > MAX_PENDING_BYTES:
                self.leave()
                self.cut()
        else:
            self._feed(data)

    def eof_received(self) -> None:
        self.leave()

    def connection_lost(self, exc: Exception | None) -> None:
        self._over = True
        self.leave()
        self.front.disconnected(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.paused_at = time.monotonic()
        if self.brake is not None:
            self.brake.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.paused_at = None
        if self.brake is not None:
            self.brake.resume()

    def shutdown(self) -> None:
        """uvicorn is ending: idle connections close now, others when their answer is whole."""
        if self._current is None:
            self.hang_up()
        elif self._task is None:
            super().shutdown()

    def leave(self) -> None:
        """The client has left: nothing is generated for nobody."""
        task, receiving = self._task, self._receiving
        self._task = self._receiving = None
        if task is not None:
            task.cancel()
        if receiving is not None:
            self._release(receiving)
            if receiving.head_done:
                self.front.departed(self, receiving)
        while self._ready:
            self._release(self._ready.pop())

    def _release(self, incoming: Incoming) -> None:
        """The bytes of a body are not held any more."""
        self.front.buffered_bytes -= incoming.size
        incoming.size = 0

    # From bytes to requests

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._upgrading:
                self._without_upgrade(data[upgrade.args[0] :])
                return
        except httptools.HttpParserError:
            if self._broken is None:
                self._broken = Refusal(Reason.INVALID_BODY, "This is not a valid HTTP/1.1 request.")
        receiving = self._receiving
        if receiving is not None and not receiving.head_done:
            self._head_bytes += len(data)
            if self._head_bytes > 2 * MAX_HEAD_BYTES:
                self._broken = _head_too_large()
        elif len(data) > 2 * MAX_HEAD_BYTES and data.find(b"\r\n\r\n") > 2 * MAX_HEAD_BYTES:
            self._broken = _head_too_large()
        self._advance()

    def _without_upgrade(self, rest: bytes) -> None:
        """An offer to upgrade is declined by taking it out: the request is read again as the HTTP/1.1 it also is."""
        receiving, self._receiving, self._upgrading = self._receiving, None, False
        if receiving is None:
            return
        lines = [b"%b %b HTTP/1.1\r\n" % (receiving.method, receiving.target)]
        lines += [b"%b: %b\r\n" % (name, value) for name, value in receiving.headers if name not in _HOP]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._feed(b"".join((*lines, b"\r\n", rest)))

    def _advance(self) -> None:
        """Take up the next request that is whole; refuse what is not worth receiving."""
        if self._current is not None or self._over:
            return
        incoming = self._ready.popleft() if self._ready else None
        if incoming is None:
            if self._broken is not None:
                self._refuse(self._broken)
                return
            incoming = self._receiving
            if incoming is None or not incoming.head_done:
                return
        if not incoming.screened:
            incoming.screened = True
            verdict = self.front.screen(self, incoming)
            if verdict is not None:
                self._turn_away(incoming, verdict)
                return
            if incoming.expects_continue and not incoming.whole:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if incoming.whole:
            self._begin(incoming)

    def _begin(self, incoming: Incoming) -> None:
        self._current = incoming
        if incoming.route is not None and incoming.route.kind == "proxy":
            self._task = self.loop.create_task(self.front.serve(self, incoming))
        else:
            self._begin_asgi(incoming)

    def _begin_asgi(self, incoming: Incoming) -> None:
        """Hand a whole request to the ASGI app through uvicorn's own cycle."""
        path, _, query = incoming.target.partition(b"?")
        self.scope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": "1.0" if incoming.http_1_0 else "1.1",
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme or "http",
            "method": incoming.method.decode("ascii"),
            "root_path": self.root_path,
            "path": unquote(path.decode("latin-1")),
            "raw_path": path,
            "query_string": query,
            "headers": incoming.headers,
            "state": self.app_state.copy(),
        }
        self.cycle = RequestResponseCycle(
            scope=self.scope, transport=self.transport, flow=self.flow, logger=self.logger, access_logger=self.access_logger,
            access_log=False, default_headers=self.server_state.default_headers, message_event=asyncio.Event(),
            expect_100_continue=False, keep_alive=incoming.keep_alive and not incoming.http_1_0, on_response=self._asgi_done,
        )  # fmt: skip
        self.cycle.body = bytearray(incoming.take_body())
        self.cycle.more_body = False
        self.cycle.message_event.set()
        self._start_asgi_task(self.cycle, self.app)

    def _asgi_done(self) -> None:
        self.finished(keep_alive=self.cycle.keep_alive and not self.transport.is_closing())

    # Turning away

    def _turn_away(self, incoming: Incoming, verdict: Refusal | bytes) -> None:
        self._release(incoming)
        if isinstance(verdict, Refusal):
            self._answer_and_close(self.front.refuse(self, incoming, verdict), whole=incoming.whole)
        elif incoming.whole:
            self.transport.write(verdict)
            self._idle_since = time.monotonic()
        else:
            self._answer_and_close(verdict, whole=False)

    def _refuse(self, refusal: Refusal) -> None:
        receiving = self._receiving
        self._answer_and_close(self.front.refuse(self, receiving, refusal), whole=False)

    def _answer_and_close(self, data: bytes, *, whole: bool) -> None:
        """Closing on unread bytes resets the connection, which can take the answer with it: drop those for a moment."""
        if self._receiving is not None:
            self._release(self._receiving)
            self._receiving = None
        self.transport.write(data)
        if whole or not self.transport.can_write_eof():
            self.hang_up()
            return
        self._over = True
        self._linger_until = time.monotonic() + LINGER_S
        self.transport.write_eof()

    def _linger(self, size: int) -> None:
        self._linger_bytes += size
        if self._linger_until is not None and self._linger_bytes > LINGER_BYTES:
            self.cut()

    # Parser callbacks: an exception here would surface as a parser error, so they only take notes

    def on_message_begin(self) -> None:
        self._receiving = Incoming(time.monotonic())
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        if self._receiving is not None:
            self._receiving.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        receiving = self._receiving
        if receiving is None or receiving.head_done:  # the latter is a trailer
            return
        receiving.headers.append((name.lower(), value))
        if len(receiving.headers) > MAX_HEADERS:
            self._broken = self._broken or _head_too_large()
            raise httptools.HttpParserError("too many headers")

    def on_headers_complete(self) -> None:
        receiving, parser = self._receiving, self.parser
        if receiving is None:
            return
        receiving.method = parser.get_method()
        receiving.fields = dict(receiving.headers)
        size = len(receiving.target)
        for name, value in receiving.headers:
            size += len(name) + len(value) + 4
        if size > MAX_HEAD_BYTES:
            self._broken = self._broken or _head_too_large()
            raise httptools.HttpParserError("headers too large")
        if parser.should_upgrade() and receiving.method != b"CONNECT" and not receiving.websocket:
            self._upgrading = True  # the parser will now leave the body out
            return
        receiving.keep_alive = parser.should_keep_alive()
        receiving.http_1_0 = parser.get_http_version() == "1.0"
        receiving.expects_continue = receiving.fields.get(b"expect", b"").lower() == b"100-continue"
        receiving.head_done = True

    def on_body(self, body: bytes) -> None:
        receiving, front = self._receiving, self.front
        if receiving is None:
            return
        receiving.body.append(body)
        receiving.size += len(body)
        front.buffered_bytes += len(body)
        if receiving.size > front.bounds.max_body_bytes:
            self._broken = self._broken or body_too_large(front.bounds.max_body_bytes)
        elif front.buffered_bytes > front.bounds.max_buffered_bytes:
            self._broken = self._broken or Refusal(Reason.QUEUE_FULL, "Too many uploads at once.", retry_after_s=1.0)

    def on_message_complete(self) -> None:
        receiving = self._receiving
        if receiving is None or not receiving.head_done or self._broken is not None:
            return
        receiving.whole = True
        self._ready.append(receiving)
        self._receiving = None


def body_too_large(limit: int) -> Refusal:
    """The refusal of a body over `limit` bytes."""
    return Refusal(Reason.BODY_TOO_LARGE, f"The body is larger than {limit} bytes.", fits=f"at most {limit} bytes")


def _head_too_large() -> Refusal:
    fits = f"at most {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers"
    return Refusal(Reason.HEADERS_TOO_LARGE, "The request's headers are too large.", fits=fits)
