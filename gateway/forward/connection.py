"""One connection to a backend: the framing of requests and responses, and nothing else.

Owns: the response parser and its bounds. Promises: an answer reaches the sink of the request that asked for it and no
other; what was cut is reported as `lost`, never as `end`; a connection that said anything unasked, or asked to be closed,
is not used again. Talks to: a `Sink` per request, whose methods are called from the transport, never from inside the
parser; and the `Owner` that made it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, cast

import httptools

from gateway.forward.outbox import Outbox

MAX_HEADER_BYTES = 65_536
MAX_HEADERS = 200
MAX_INTERIM = 8  # 1xx answers before the real one
MAX_KNOWN_HEAD_BYTES = 2048
# Above this size it is worth asking the kernel whether the last byte left before the connection broke (`Connection.written`).
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


class Owner(Protocol):
    """The pool that a connection belongs to."""

    outbox: Outbox

    def opened(self, connection: Connection) -> None: ...
    def closed(self, connection: Connection) -> None: ...
    def release(self, connection: Connection) -> None: ...
    def check_config(self, connection: Connection) -> None: ...


class Connection:
    """One connection, as the event loop knows a protocol. Parser callbacks only take notes; `data_received` tells the sink."""

    __slots__ = (
        "_body",
        "_close_delimited",
        "_complete",
        "_excess",
        "_fed",
        "_framing_bytes",
        "_head_bytes",
        "_head_done",
        "_headers",
        "_interim",
        "_keep_alive",
        "_known_fields",
        "_known_head",
        "_known_headers",
        "_known_size",
        "_owner",
        "_parser",
        "_paused",
        "_sink",
        "_status",
        "_told_head",
        "_transport",
        "_unsent",
        "config",
        "fields",
        "idle_since",
        "pooled",
        "reusable",
        "written",
    )  # fmt: skip

    _transport: asyncio.Transport

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._parser = httptools.HttpResponseParser(self)
        self._sink: Sink | None = None
        self._paused = False
        # The last answer that came whole in one read: its head as it was sent, what it said, and the size of all of it.
        self._known_size = -1  # no read is as long
        self._known_head = b""
        self._known_headers: Headers = []
        self._known_fields: dict[bytes, bytes] = {}
        self.config: str | None = None  # the hash this connection was attested with
        self.idle_since = 0.0
        self.reusable = True
        self.pooled = False  # only once it is attested
        self.written = True  # the last byte of the request was handed to the kernel
        self._unsent = b""  # a request that is written at the end of this round of the loop
        self._expect_response()

    def _expect_response(self) -> None:
        self._headers: Headers = []
        self._body: list[bytes] = []
        self._status = 0
        self.fields: dict[bytes, bytes] = {}  # the last value of each header
        self._head_bytes = self._fed = self._framing_bytes = 0
        self._interim = 0
        self._head_done = self._told_head = self._complete = self._excess = self._close_delimited = self._keep_alive = False

    # What callers use

    def send(self, request: bytes, sink: Sink) -> None:
        """Dispatch one request. The connection must come fresh from `take` or `connect`."""
        if self._sink is not None or not self.reusable:
            raise RuntimeError("a connection carries one request at a time")
        self._sink = sink
        self.written = False
        if len(request) > TRACKED_BODY_BYTES:
            self._transport.set_write_buffer_limits(high=0)  # resume_writing then means: all is with the kernel
            self._transport.write(request)
            if self._transport.get_write_buffer_size() == 0:
                self.written = True
        else:
            self._unsent = request
            self._owner.outbox.post(self)

    def flush(self) -> None:
        """Write the request that was sent in this round, unless the connection was dropped since."""
        request = self._unsent
        if request:
            self._unsent = b""
            self.written = True
            self._transport.write(request)

    def abort(self) -> None:
        """Drop the connection and with it the request; the sink hears nothing more. Safe to call twice."""
        self._sink = None
        self._unsent = b""
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
        self._owner.opened(self)

    def pause_writing(self) -> None:
        """One request is all that is ever written."""

    def resume_writing(self) -> None:
        self.written = True

    def data_received(self, data: bytes) -> None:
        sink = self._sink
        if sink is None:  # nobody asked: whatever this is, the next caller must not get it
            self.abort()
            return
        if self._unsent:  # it speaks of an earlier request, or of its patience: the present one has not left
            self._fail(FailureKind.RESET, "the backend spoke before it was asked")
            return
        self._fed = len(data)
        if self._fed == self._known_size and not self._head_bytes and data.startswith(self._known_head) and not self._told_head:
            self._repeated(sink, data)
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
        if self._complete and not self._told_head and not self._head_bytes:
            self._remember(data)
        if self._body or self._complete or not self._told_head:
            self._framing_bytes = 0
        else:
            self._framing_bytes += len(data)  # trailers and the like, which the parser holds as long as they go on
            if self._framing_bytes > MAX_HEADER_BYTES:
                self._fail(FailureKind.MALFORMED, "the response's trailers are too large")
                return
        self._deliver(sink)

    def eof_received(self) -> None:
        self._closed_by_peer("closed by the backend")
        self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._closed_by_peer(str(error) if error else "closed")
        self._owner.closed(self)

    def _deliver(self, sink: Sink) -> None:
        if not self._told_head:
            self._told_head = True
            self._owner.check_config(self)
            sink.head(self._status, self._headers)
        if self._body and self._sink is sink:
            body = self._body
            data = body[0] if len(body) == 1 else b"".join(body)
            self._body = []
            sink.data(data)
        if self._complete and self._sink is sink:
            self._finish(sink)

    def _repeated(self, sink: Sink, data: bytes) -> None:
        """An answer whose head is, byte for byte, that of the last one, and which is as long: it needs no parser."""
        self._status = 200
        self._headers, self.fields = self._known_headers, self._known_fields
        self._body = [data[len(self._known_head) :]]
        self._head_done = self._keep_alive = self._complete = True
        self._deliver(sink)

    def _remember(self, data: bytes) -> None:
        """An answer that came whole in one read: its head needs no parser the next time it looks the same."""
        fields = self.fields
        if len(self._body) != 1 or self._status != 200 or self._interim or self._excess or not self._keep_alive:
            return
        size = len(self._body[0])
        head = data[: len(data) - size]
        if (
            len(head) <= MAX_KNOWN_HEAD_BYTES
            and head.endswith(b"\r\n\r\n")
            and fields.get(b"content-length") == b"%d" % size
            and b"transfer-encoding" not in fields
        ):
            self._known_size, self._known_head = len(data), head
            self._known_headers, self._known_fields = self._headers, fields

    def _finish(self, sink: Sink) -> None:
        keep = self.reusable and self.written and self._keep_alive and not self._excess
        self._sink = None
        if keep:
            self.resume()
            self._expect_response()
            if self.pooled:
                self._owner.release(self)
        else:
            self.abort()
        sink.end()

    def _closed_by_peer(self, message: str) -> None:
        self.reusable = False
        self._unsent = b""
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
            if self._interim > MAX_INTERIM or self._status == 101 or self._status < 100:
                raise httptools.HttpParserError("unasked interim responses")
            return
        headers = self._headers
        if self._head_bytes + self._fed > MAX_HEADER_BYTES and sum(len(n) + len(v) for n, v in headers) > MAX_HEADER_BYTES:
            raise httptools.HttpParserError("headers too large")
        self._head_done = True
        fields = self.fields = dict(headers)
        framed = b"content-length" in fields or b"transfer-encoding" in fields
        self._close_delimited = not framed and self._status not in (204, 304)
        self._keep_alive = self._parser.should_keep_alive()  # the parser forgets it once the message is complete

    def on_body(self, body: bytes) -> None:
        if not self._excess:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._head_done:
            self._complete = True
        else:
            self._headers = []  # an interim answer; the real one follows
