"""The upstream client: pooled HTTP/1.1 connections to one backend, one request at a time on each.

Owns: connecting (TCP, TLS, Unix socket), attestation of each new connection, reuse, and the framing of responses.
Promises: an answer reaches the sink of the request that asked for it and no other; what was cut is reported as
`lost`, never as `end`; a connection that said anything unasked, or asked to be closed, is not used again.
Talks to: a `Sink` per request, whose methods are called from the transport, never from inside the parser.

TTFT has one definition wherever this client is used: from `send` to the first SSE event with content, or to the
first body byte where the answer is not a stream.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, cast

import httptools

from gateway.forward.endpoint import Endpoint

MAX_HEADER_BYTES = 65_536
MAX_HEADERS = 200
MAX_INTERIM = 8  # 1xx answers before the real one
IDENTITY_PATH = b"/plimsoll/identity"
CONFIG_HEADER = b"x-plimsoll-config"
MAX_IDENTITY_BYTES = 1_048_576
# Above this size it is worth knowing whether the last byte left before the connection broke (see `Connection.written`).
TRACKED_BODY_BYTES = 65_536

Headers = list[tuple[bytes, bytes]]


class FailureKind(StrEnum):
    """How an exchange with a backend can break."""

    REFUSED = "refused"  # no connection: nothing was sent
    TIMEOUT = "timeout"  # no connection within connect_timeout_s
    TLS = "tls"
    IDENTITY = "identity"  # connected, but not to the configuration that was expected
    RESET = "reset"  # closed before the answer's head was whole
    TRUNCATED = "truncated"  # closed inside the answer
    MALFORMED = "malformed"  # not HTTP/1.1, or beyond the bounds


class ConnectFailed(Exception):
    """No usable connection; nothing of the request was sent."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    @property
    def may_retry(self) -> bool:
        """Whether another try may help at once: the connection was refused, or led to something unexpected."""
        return self.kind in (FailureKind.REFUSED, FailureKind.IDENTITY)


@dataclass(frozen=True, slots=True)
class UpstreamFailure:
    """An exchange that broke after `send`.

    `before_written`: the close was seen while bytes of the request had not yet been handed to the kernel, so the
    backend cannot have had the whole of it. False where that is not known.
    """

    kind: FailureKind
    before_written: bool
    message: str


class Sink(Protocol):
    """Receives one response: `head` once, `data` any number of times, then exactly one of `end` and `lost`.

    After `Connection.abort` none is called. `data` is all that one read brought, joined.
    """

    def head(self, status: int, headers: Headers) -> None: ...
    def data(self, data: bytes) -> None: ...
    def end(self) -> None: ...
    def lost(self, failure: UpstreamFailure) -> None: ...


class Connection(asyncio.Protocol):
    """One connection. Parser callbacks only note what they saw; `data_received` then tells the sink."""

    __slots__ = (
        "_body", "_close_delimited", "_complete", "_excess", "_head_bytes", "_head_done", "_headers", "_interim",
        "_keep_alive", "_parser", "_paused", "_sink", "_status", "_told_head", "_transport", "_upstream", "config",
        "idle_since", "pooled", "reusable", "written",
    )  # fmt: skip

    _transport: asyncio.Transport

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._parser = httptools.HttpResponseParser(self)
        self._sink: Sink | None = None
        self._paused = False
        self.config: str | None = None  # the hash this connection was attested with
        self.idle_since = 0.0
        self.reusable = True
        self.pooled = False  # only once it is attested
        self.written = True  # the last byte of the request was handed to the kernel; True where that is not tracked
        self._expect_response()

    def _expect_response(self) -> None:
        self._headers: Headers = []
        self._body: list[bytes] = []
        self._status = 0
        self._head_bytes = 0
        self._interim = 0
        self._head_done = self._told_head = self._complete = self._excess = self._close_delimited = self._keep_alive = False

    # What callers use

    def send(self, request: bytes, sink: Sink) -> None:
        """Dispatch one request. The connection must come fresh from `take` or `connect`."""
        if self._sink is not None or not self.reusable:
            raise RuntimeError("a connection carries one request at a time")
        self._sink = sink
        if len(request) > TRACKED_BODY_BYTES:
            self.written = False
            self._transport.set_write_buffer_limits(high=0)  # resume_writing then means: all is with the kernel
            self._transport.write(request)
            if self._transport.get_write_buffer_size() == 0:
                self.written = True
        else:
            self._transport.write(request)

    def abort(self) -> None:
        """Drop the connection and with it the request; the sink hears nothing more. Safe to call twice."""
        self._sink = None
        self.reusable = False
        self._transport.abort()

    def pause(self) -> None:
        """Stop reading, so that TCP holds the backend back."""
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again after `pause`."""
        if self._paused:
            self._paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without saying so
        self._upstream.opened(self)

    def resume_writing(self) -> None:
        self.written = True

    def data_received(self, data: bytes) -> None:
        sink = self._sink
        if sink is None:  # nobody asked: whatever this is, the next caller must not get it
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._complete:
                self._fail(FailureKind.MALFORMED, f"not a usable HTTP/1.1 response: {error}")
                return
            self._excess = True
        if not self._head_done:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEADER_BYTES:
                self._fail(FailureKind.MALFORMED, "the response's headers are too large")
            return
        self._deliver(sink)

    def eof_received(self) -> None:
        self._closed_by_peer("closed by the backend")
        self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._closed_by_peer(str(error) if error else "closed")
        self._upstream.closed(self)

    def _deliver(self, sink: Sink) -> None:
        if not self._told_head:
            self._told_head = True
            self._upstream.check_config(self, self._headers)
            sink.head(self._status, self._headers)
        if self._body and self._sink is sink:
            body = self._body
            data = body[0] if len(body) == 1 else b"".join(body)
            self._body = []
            sink.data(data)
        if self._complete and self._sink is sink:
            self._finish(sink)

    def _finish(self, sink: Sink) -> None:
        keep = self.reusable and self.written and self._keep_alive and not self._excess
        self._sink = None
        if keep:
            self.resume()
            self._expect_response()
            if self.pooled:
                self._upstream.release(self)
        else:
            self.abort()
        sink.end()

    def _closed_by_peer(self, message: str) -> None:
        self.reusable = False
        sink = self._sink
        if sink is None:
            return
        if self._head_done and self._close_delimited:
            self._complete = True
            self._deliver(sink)
        elif self._head_done:
            self._fail(FailureKind.TRUNCATED, f"{message} inside the response")
        else:
            self._fail(FailureKind.RESET, f"{message} before the response")

    def _fail(self, kind: FailureKind, message: str) -> None:
        sink, before_written = self._sink, not self.written
        self.abort()
        if sink is not None:
            sink.lost(UpstreamFailure(kind, before_written, message))

    # Parser callbacks: an exception here would surface as a parser error, so they only take notes

    def on_message_begin(self) -> None:
        if self._complete:
            self._excess = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_done:  # a trailer, or another response that nobody asked for
            return
        self._headers.append((name.lower(), value))
        if len(self._headers) > MAX_HEADERS:
            raise httptools.HttpParserError("too many headers")

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        self._status = self._parser.get_status_code()
        if self._status < 200:
            self._interim += 1
            if self._interim > MAX_INTERIM or self._status == 101:
                raise httptools.HttpParserError("unasked interim responses")
            return
        if sum(len(name) + len(value) for name, value in self._headers) > MAX_HEADER_BYTES:
            raise httptools.HttpParserError("headers too large")
        self._head_done = True
        names = {name for name, _ in self._headers}
        framed = b"content-length" in names or b"transfer-encoding" in names or self._status in (204, 304)
        self._close_delimited = not framed
        self._keep_alive = self._parser.should_keep_alive()  # the parser forgets it once the message is complete

    def on_body(self, body: bytes) -> None:
        if not self._excess:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._head_done:
            self._complete = True
        else:
            self._headers = []  # an interim answer; the real one follows


class Upstream:
    """The connections to one backend. `take` is synchronous; only `connect` waits.

    `expect()` is the configuration hash that may be dispatched to now (None: nothing is compared).
    `on_identity(hash, payload)` hears what a new connection said of itself and returns whether it may be used;
    it also hears `(hash or None, None)` when a later response, or a failed identity request, disagrees.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        api_key: bytes | None,
        instance: str,
        connect_timeout_s: float,
        attest: bool,
        expect: Callable[[], str | None] = lambda: None,
        on_identity: Callable[[str | None, bytes | None], bool] = lambda _hash, _payload: True,
        idle_s: float = 3.0,
        max_idle: int = 512,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.endpoint = endpoint
        self.attest = attest
        self.connections: set[Connection] = set()
        self._connect_timeout_s = connect_timeout_s
        self._expect = expect
        self._on_identity = on_identity
        self._idle: deque[Connection] = deque()
        self._idle_s = idle_s
        self._max_idle = max_idle
        self._clock = clock
        lines = [
            b"host: " + endpoint.host_header,
            b"accept-encoding: identity",
            b"x-plimsoll-gateway: " + instance.encode("ascii"),
        ]
        if api_key is not None:
            lines.append(b"authorization: Bearer " + api_key)
        self._constant = b" HTTP/1.1\r\n" + b"\r\n".join(lines) + b"\r\n"

    @property
    def idle(self) -> int:
        """Connections kept for reuse."""
        return len(self._idle)

    def request(self, path: bytes, request_id: bytes, content_type: bytes, body: bytes, extra: bytes = b"") -> bytes:
        """The bytes of one POST: only headers built here. `extra` is whole header lines, each ending in CRLF."""
        return b"POST %b%b%bx-request-id: %b\r\ncontent-type: %b\r\n%bcontent-length: %d\r\n\r\n%b" % (
            self.endpoint.prefix, path, self._constant, request_id, content_type, extra, len(body), body,
        )  # fmt: skip

    def get(self, path: bytes) -> bytes:
        """The bytes of one GET."""
        return b"GET %b%b%b\r\n" % (self.endpoint.prefix, path, self._constant)

    def take(self) -> Connection | None:
        """An idle connection, the most recently used first; None when there is none that is fresh and expected."""
        if not self._idle:
            return None
        oldest, expected = self._clock() - self._idle_s, self._expect()
        while self._idle:
            connection = self._idle.pop()
            if not connection.reusable:
                continue
            if connection.idle_since >= oldest and (not self.attest or connection.config == expected):
                return connection
            connection.abort()
        return None

    async def connect(self) -> Connection:
        """A new connection, attested where the backend is. Raises ConnectFailed."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                connection = await self._open()
                if self.attest:
                    await self._attest(connection)
                connection.pooled = True
                return connection
        except TimeoutError as error:
            raise ConnectFailed(FailureKind.TIMEOUT, f"no connection within {self._connect_timeout_s:g} s") from error
        except ssl.SSLError as error:
            raise ConnectFailed(FailureKind.TLS, f"TLS failed: {error.reason or type(error).__name__}") from error
        except OSError as error:
            raise ConnectFailed(FailureKind.REFUSED, f"cannot connect: {error.strerror or type(error).__name__}") from error

    async def _open(self) -> Connection:
        loop, endpoint = asyncio.get_running_loop(), self.endpoint
        if endpoint.unix_path is not None:
            _, connection = await loop.create_unix_connection(lambda: Connection(self), endpoint.unix_path)
        else:
            _, connection = await loop.create_connection(
                lambda: Connection(self), endpoint.host, endpoint.port,
                ssl=endpoint.ssl, server_hostname=endpoint.server_name if endpoint.ssl else None,
            )  # fmt: skip
        return connection

    async def _attest(self, connection: Connection) -> None:
        try:
            answer = await fetch(connection, self.get(IDENTITY_PATH), MAX_IDENTITY_BYTES)
        except BaseException:
            connection.abort()
            raise
        config = dict(answer.headers).get(CONFIG_HEADER)
        connection.config = config.decode("latin-1") if config is not None else None
        payload = answer.body if answer.status == 200 else None
        if not self._on_identity(connection.config, payload) or payload is None:
            connection.abort()
            raise ConnectFailed(FailureKind.IDENTITY, f"the identity (status {answer.status}) is not the expected one")
        if not connection.reusable:
            raise ConnectFailed(FailureKind.REFUSED, "the backend closed the connection after its identity")

    def sweep(self, now: float) -> None:
        """Close what has been idle too long. Called by a ticker."""
        while self._idle and (self._idle[0].idle_since < now - self._idle_s or not self._idle[0].reusable):
            self._idle.popleft().abort()

    def close(self) -> None:
        """Abort every connection; sinks of running requests hear nothing (cancel those first)."""
        self._idle.clear()
        for connection in list(self.connections):
            connection.abort()

    def forget_idle(self) -> None:
        """Close the idle connections: what they were attested with no longer counts."""
        while self._idle:
            self._idle.pop().abort()

    # What connections report

    def opened(self, connection: Connection) -> None:
        self.connections.add(connection)

    def closed(self, connection: Connection) -> None:
        self.connections.discard(connection)

    def give_back(self, connection: Connection) -> None:
        """Return a connection that was taken and not used."""
        if connection.reusable:
            self.release(connection)

    def release(self, connection: Connection) -> None:
        if len(self._idle) >= self._max_idle:
            self._idle.popleft().abort()
        connection.idle_since = self._clock()
        self._idle.append(connection)

    def check_config(self, connection: Connection, headers: Headers) -> None:
        """Compare a response's configuration with the connection's; a difference ends its reuse and is reported."""
        if not self.attest or connection.config is None:  # the latter: this is the identity request itself
            return
        for name, value in headers:
            if name == CONFIG_HEADER:
                config = value.decode("latin-1")
                if config == connection.config:
                    return
                break
        else:
            config = None
        connection.reusable = False
        self._on_identity(config, None)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response, held."""

    status: int
    headers: Headers
    body: bytes


class BrokenAnswer(OSError):
    """`fetch` got no whole answer within its bounds."""


class _Collect:
    """A sink that holds a whole answer up to `limit` bytes."""

    def __init__(self, connection: Connection, limit: int) -> None:
        self.done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._connection, self._limit = connection, limit
        self._status = 0
        self._headers: Headers = []
        self._body = bytearray()

    def head(self, status: int, headers: Headers) -> None:
        self._status, self._headers = status, headers

    def data(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > self._limit:
            self._connection.abort()
            self._settle(BrokenAnswer(f"more than {self._limit} bytes"))

    def end(self) -> None:
        self._settle(Answer(self._status, self._headers, bytes(self._body)))

    def lost(self, failure: UpstreamFailure) -> None:
        self._settle(BrokenAnswer(failure.message))

    def _settle(self, result: Answer | BrokenAnswer) -> None:
        if self.done.done():
            return
        if isinstance(result, Answer):
            self.done.set_result(result)
        else:
            self.done.set_exception(result)


async def fetch(connection: Connection, request: bytes, limit: int) -> Answer:
    """Send `request` and hold the whole answer, at most `limit` bytes. Raises BrokenAnswer; aborts when cancelled."""
    sink = _Collect(connection, limit)
    connection.send(request, sink)
    try:
        return await sink.done
    except asyncio.CancelledError:
        connection.abort()
        raise
