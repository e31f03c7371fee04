"""Requests out of bytes, within bounds: the parser's side of one client connection.

Owns: the HTTP/1.1 parser and every bound on a head and a body. Promises: the verdict on a request does not depend on how
it was cut into segments; an offer to upgrade is declined and the request read as the HTTP/1.1 it also is; parser
callbacks only take notes. Talks to: a `Store` that knows how many bytes of bodies are held over all connections.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import httptools

from gateway.edge.incoming import Incoming
from gateway.errors import Reason, Refusal

MAX_HEAD_BYTES = 65_536
MAX_HEADERS = 200
MAX_KNOWN_HEAD_BYTES = 4096
MAX_PIECES = 64  # of a body, before small ones are put together: each costs tens of bytes beside its own
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


class Store(Protocol):
    """The bounds in force, and the bytes of bodies now held."""

    bounds: Bounds
    buffered_bytes: int


class Reader:
    """`ready`: whole requests in order. `receiving`: the one that is arriving. `broken`: why nothing more can be read."""

    __slots__ = ("_fed", "_framing_bytes", "_head_bytes", "_known", "_known_head", "_known_size", "_parser", "_store",
                 "_upgrading", "broken", "ready", "receiving")  # fmt: skip

    def __init__(self, store: Store) -> None:
        self.ready: deque[Incoming] = deque()
        self.receiving: Incoming | None = None
        self.broken: Refusal | None = None
        self._store = store
        self._head_bytes = 0  # of the head that is arriving, before the present read
        self._framing_bytes = 0  # of reads that brought a body nothing
        self._fed = 0
        self._upgrading = False
        self._known: Incoming | None = None  # the last request that came whole in one read, with its head as it was sent
        self._known_head = b""
        self._known_size = 0
        self._new_parser()

    def _new_parser(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        # What follows a request with `connection: close` is then an ordinary request, answered by the close.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed(self, data: bytes) -> None:
        """The next bytes. Never raises: what cannot be read is in `broken`."""
        size = len(data)
        if size == self._known_size and self.receiving is None and data.startswith(self._known_head) and self._repeated(data):
            return
        self._fed = size
        arriving = self.receiving
        fresh = arriving is None and not self.ready
        before = arriving.size if arriving is not None else 0
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._upgrading:
                self._without_upgrade(data[upgrade.args[0] :])
                return
        except httptools.HttpParserError:
            if self.broken is None:
                self.broken = Refusal(Reason.INVALID_BODY, "This is not a valid HTTP/1.1 request.")
        receiving = self.receiving
        if fresh and receiving is None and len(self.ready) == 1:
            self._remember(self.ready[0], data)
        if receiving is not None and not receiving.head_done:
            self._head_bytes += len(data)
            if self._head_bytes > 2 * MAX_HEAD_BYTES:  # the names and values alone are held to the bound itself
                self.broken = _head_too_large()
        elif receiving is not None and receiving is arriving and receiving.size == before:
            self._framing_bytes += len(data)  # trailers and the like, which the parser holds as long as they go on
            if self._framing_bytes > 2 * MAX_HEAD_BYTES:
                self.broken = _head_too_large()
        elif len(data) > 2 * MAX_HEAD_BYTES and data.find(b"\r\n\r\n") > 2 * MAX_HEAD_BYTES:
            self.broken = _head_too_large()

    def _remember(self, whole: Incoming, data: bytes) -> None:
        """`data` brought exactly this request, from its first byte to its last: its head then needs no parser next time."""
        head_size = len(data) - whole.size
        fields = whole.fields
        if (
            whole.size
            and whole.keep_alive
            and head_size <= MAX_KNOWN_HEAD_BYTES
            and not whole.expects_continue
            and fields.get(b"content-length") == b"%d" % whole.size
            and b"transfer-encoding" not in fields
            and b"upgrade" not in fields
            and self.broken is None
            and data.find(b"\r\n\r\n") == head_size - 4
        ):
            self._known, self._known_head, self._known_size = whole, data[:head_size], len(data)

    def _repeated(self, data: bytes) -> bool:
        """Take up a request whose head is the known one and whose body has the same length. False: the parser must judge."""
        known, store = self._known, self._store
        body = data[len(self._known_head) :]
        held = store.buffered_bytes + len(body)
        if known is None or self.broken is not None or len(body) > store.bounds.max_body_bytes:
            return False
        if held > store.bounds.max_buffered_bytes:
            return False
        store.buffered_bytes = held
        self._known = again = known.again(time.monotonic(), body)  # with what screening finds out about it
        self.ready.append(again)
        return True

    def release(self, incoming: Incoming) -> None:
        """The bytes of a body are not held any more."""
        self._store.buffered_bytes -= incoming.size
        incoming.size = 0

    def drop(self) -> Incoming | None:
        """Forget all that has not been taken up; returns the request that was arriving."""
        receiving, self.receiving = self.receiving, None
        if receiving is not None:
            self.release(receiving)
        while self.ready:
            self.release(self.ready.pop())
        return receiving

    def _without_upgrade(self, rest: bytes) -> None:
        """An offer to upgrade is declined by taking it out of the head; the parser had left the body unread."""
        receiving, self.receiving, self._upgrading = self.receiving, None, False
        if receiving is None:
            return
        lines = [b"%b %b HTTP/1.1\r\n" % (receiving.method, receiving.target)]
        lines += [b"%b: %b\r\n" % (name, value) for name, value in receiving.headers if name not in _HOP]
        self._new_parser()
        self.feed(b"".join((*lines, b"\r\n", rest)))

    # Parser callbacks: an exception here surfaces as a parser error, which is what `broken` then explains

    def on_message_begin(self) -> None:
        self.receiving = Incoming(time.monotonic())
        self._head_bytes = self._framing_bytes = 0

    def on_url(self, url: bytes) -> None:
        if self.receiving is not None:
            self.receiving.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        receiving = self.receiving
        if receiving is None or receiving.head_done:  # the latter is a trailer
            return
        headers = receiving.headers
        headers.append((name.lower(), value))
        if len(headers) > MAX_HEADERS:
            self._refuse(_head_too_large())

    def on_headers_complete(self) -> None:
        receiving, parser = self.receiving, self._parser
        if receiving is None:
            return
        receiving.method = parser.get_method()
        fields = receiving.fields = dict(receiving.headers)
        if self._head_bytes + self._fed > MAX_HEAD_BYTES and receiving.head_size() > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())
        if parser.should_upgrade() and receiving.method != b"CONNECT" and not receiving.websocket:
            self._upgrading = True  # the parser will now leave the body out
            return
        receiving.keep_alive = parser.should_keep_alive()
        if not receiving.keep_alive or b"connection" in fields:
            receiving.http_1_0 = parser.get_http_version() == "1.0"
        receiving.expects_continue = (
            b"expect" in fields and fields[b"expect"].lower() == b"100-continue" and not receiving.http_1_0
        )
        receiving.head_done = True

    def on_body(self, body: bytes) -> None:
        receiving, store = self.receiving, self._store
        if receiving is None:
            return
        pieces = receiving.body
        if len(pieces) < MAX_PIECES:
            pieces.append(body)
        else:
            self._put_together(pieces, body)
        receiving.size += len(body)
        store.buffered_bytes += len(body)
        if receiving.size > store.bounds.max_body_bytes:
            self._refuse(body_too_large(store.bounds.max_body_bytes))
        elif store.buffered_bytes > store.bounds.max_buffered_bytes:
            self._refuse(Refusal(Reason.QUEUE_FULL, "Too many uploads at once.", retry_after_s=1.0))

    @staticmethod
    def _put_together(pieces: list[bytes | bytearray], body: bytes) -> None:
        if len(pieces) == MAX_PIECES:
            pieces.append(bytearray())
        last = pieces[-1]
        assert isinstance(last, bytearray)
        last += body

    def on_message_complete(self) -> None:
        receiving = self.receiving
        if receiving is None or not receiving.head_done:
            return
        receiving.whole = True
        self.ready.append(receiving)
        self.receiving = None

    def _refuse(self, refusal: Refusal) -> None:
        self.broken = refusal
        raise httptools.HttpParserError(refusal.message)


def body_too_large(limit: int) -> Refusal:
    """The refusal of a body over `limit` bytes."""
    return Refusal(Reason.BODY_TOO_LARGE, f"The body is larger than {limit} bytes.", fits=f"at most {limit} bytes")


def _head_too_large() -> Refusal:
    fits = f"at most {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers"
    return Refusal(Reason.HEADERS_TOO_LARGE, "The request's headers are too large.", fits=fits)
