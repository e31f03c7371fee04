"""One answer on its way from a backend to a client, pushed: what the backend's socket brings is written at once.

Owns: the decision between passing on (event streams) and holding (everything else, within a bound), chunked framing,
backpressure in both directions, and coalescing of what comes faster than anyone reads. Promises: bytes of a stream are
not changed; nothing that did not end whole is made to look so; its owner hears of the end exactly once, and of nothing after it.
Talks to: a `Client` to write to, the `Connection` it drains, a `Scanner` that reads along, the `Owner` whose answer it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

from gateway.errors import Reason
from gateway.forward.sse import Scanner
from gateway.forward.upstream import Connection, FailureKind, Headers, UpstreamFailure

COALESCE_S = 0.001  # reads closer than this are gathered for as long; streams at a model's pace never are
MAX_HELD_BYTES = 33_554_432
LAST_CHUNK = b"0\r\n\r\n"
_DONE = b"[DONE]"
_EVENT_ENDS = (b"\n\n", b"\r\r", b"\r\n\r\n")
_UNFINISHED = UpstreamFailure(FailureKind.TRUNCATED, False, "the stream ended without a finish reason")
_TOO_LONG = UpstreamFailure(FailureKind.MALFORMED, False, f"the answer is larger than {MAX_HELD_BYTES} bytes")


class Brake(Protocol):
    """What produces the bytes that a slow client does not take."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Client(Protocol):
    """Where the answer goes. `brake` is told to pause and resume as the client takes the bytes."""

    brake: Brake | None

    def write(self, data: bytes) -> None: ...


class Owner(Protocol):
    """Whose answer it is. Called from the transport; after `ended` nothing more is."""

    def stream_head(self, status: int, headers: Headers) -> bytes:
        """The head to send before the first byte of a stream."""

    def first_token(self) -> None:
        """The first content has come."""

    def ended(self, end: End) -> None:
        """The answer is over."""


class Window:
    """The time in which streams that are faster than anyone reads are gathered: one for all of them, so that their bytes are
    passed on together, which spares everybody between here and the reader a wake-up for each. None waits longer than
    COALESCE_S."""

    def __init__(self) -> None:
        self._waiting: list[Relay] = []

    def join(self, relay: Relay) -> None:
        """Call `relay.gathered()` when the window that is open now, or the one that this opens, ends."""
        if not self._waiting:
            asyncio.get_running_loop().call_later(COALESCE_S, self._end)
        self._waiting.append(relay)

    def _end(self) -> None:
        waiting, self._waiting = self._waiting, []
        now = time.monotonic()
        for relay in waiting:
            relay.gathered(now)


class Whole(Enum):
    """The backend's answer has ended as it should."""

    WHOLE = auto()


End = Whole | UpstreamFailure | Reason
"""How a relay ends: whole, broken by the backend, or stopped by us for a reason."""


class Relay:
    """The sink of one dispatched request.

    With a `scanner` it is taken for a stream until its head says otherwise; `on_gap` is then called with the seconds
    between later reads that bring content. Without one nothing is passed on: the owner finds status, headers and `held`.
    """

    __slots__ = (
        "_connection", "_full", "_gathering", "_last", "_on_gap", "_read_at", "_size", "_window", "begun", "bytes_out", "chunked",
        "client", "first_at", "headers", "held", "last_at", "over", "owner", "scanner", "status", "stream",
    )  # fmt: skip

    def __init__(
        self,
        client: Client,
        owner: Owner,
        scanner: Scanner | None,
        window: Window,
        *,
        chunked: bool,
        on_gap: Callable[[float], None] | None,
    ) -> None:
        self.client = client
        self.owner = owner
        self.scanner = scanner
        self.stream = scanner is not None
        self.chunked = chunked
        self.over = False  # the owner knows of the end, or does not care any more
        self.status = 0
        self.headers: Headers = []
        self.held: list[bytes] = []
        self.begun = False  # bytes of the answer are with the client
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.bytes_out = 0
        self._connection: Connection | None = None
        self._on_gap = on_gap
        self._size = 0
        self._last = b""
        self._full = False
        self._read_at = 0.0
        self._window = window
        self._gathering = False

    def dispatch(self, connection: Connection, request: bytes) -> None:
        """Send the request; from here on the connection belongs to this relay until its end."""
        self._connection = connection
        self.client.brake = self
        connection.send(request, self)

    def stop(self, reason: Reason) -> None:
        """End it from our side: the backend's connection is dropped, so that it stops generating."""
        if not self.over:
            self._drop()
            self._resolve(reason)

    def abandon(self) -> None:
        """Nobody waits for the end any more."""
        self.over = True
        self._drop()

    @property
    def mid_event(self) -> bool:
        """Whether what the client has may end inside an event, so that another cannot be appended as it is."""
        return self._last != b"" and not self._last.endswith(_EVENT_ENDS)

    @property
    def claims_json(self) -> bool:
        """Whether the answer calls itself a JSON document that can be read here."""
        fields = dict(self.headers)
        plain = fields.get(b"content-encoding", b"identity").lower() == b"identity"
        return plain and fields.get(b"content-type", b"").lower().startswith(b"application/json")

    # The sink's side

    def head(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        if not self.stream:
            return
        fields = dict(headers)
        self.stream = status == 200 and fields.get(b"content-type", b"").lower().startswith(b"text/event-stream")
        if fields.get(b"content-encoding", b"identity").lower() != b"identity":
            self.scanner = None  # it cannot be read along

    def data(self, data: bytes) -> None:
        now = time.monotonic()
        if not self.stream:
            self._hold(data, now)
            return
        scanner = self.scanner
        if scanner is None:
            self._content(now)
        else:
            seen = scanner.content_events
            scanner.feed(data)
            if scanner.content_events != seen:
                self._content(now)
            if scanner.done and not scanner.whole and not scanner.error:
                self._false_end(data)
                return
        self._pass(data)
        if now - self._read_at < COALESCE_S:
            self._gather()
        self._read_at = now

    def end(self) -> None:
        self._let_go()
        if not self.stream:
            self._resolve(Whole.WHOLE)
            return
        scanner = self.scanner
        if scanner is not None:
            scanner.close()
            if not scanner.whole and not scanner.error:
                self._resolve(_UNFINISHED)
                return
        if not self.begun:
            self._pass(b"")
        if self.chunked:
            self.client.write(LAST_CHUNK)
        self._resolve(Whole.WHOLE)

    def lost(self, failure: UpstreamFailure) -> None:
        self._let_go()
        self._resolve(failure)

    # Backpressure: two reasons to hold the backend back, the client's buffer and the gathering of small reads

    def pause(self) -> None:
        self._full = True
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        self._full = False
        if not self._gathering and self._connection is not None:
            self._connection.resume()

    def _gather(self) -> None:
        if not self._gathering and self._connection is not None:
            self._gathering = True
            self._connection.pause()
            self._window.join(self)

    def gathered(self, now: float) -> None:
        """The window has ended: read what has come meanwhile."""
        self._gathering = False
        self._read_at = now  # what waits already came within the window: it begins the next one
        if not self._full and self._connection is not None:
            self._connection.resume()

    # Inside

    def _content(self, now: float) -> None:
        if self.first_at is None:
            self.first_at = now
            self.owner.first_token()
        elif self.last_at is not None and self._on_gap is not None:
            self._on_gap(now - self.last_at)
        self.last_at = now

    def _pass(self, data: bytes) -> None:
        self.bytes_out += len(data)
        self._last = data
        if self.chunked and data:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if not self.begun:
            self.begun = True
            data = self.owner.stream_head(self.status, self.headers) + data
        self.client.write(data)

    def _hold(self, data: bytes, now: float) -> None:
        if self.first_at is None:
            self.first_at = now
            self.owner.first_token()
        self.last_at = now
        self._size += len(data)
        self.held.append(data)
        if self._size > MAX_HELD_BYTES:
            self.held = []
            self._drop()
            self._resolve(_TOO_LONG)

    def _false_end(self, data: bytes) -> None:
        """`[DONE]` without a finish reason: what comes before it is passed on, the claim is not."""
        at = data.rfind(b"data", 0, max(0, data.rfind(_DONE)))
        if at > 0:
            self._pass(data[:at])
        self._drop()
        self._resolve(_UNFINISHED)

    def _drop(self) -> None:
        connection = self._connection
        self._let_go()
        if connection is not None:
            connection.abort()

    def _let_go(self) -> None:
        self._connection = None

    def _resolve(self, end: End) -> None:
        if not self.over:
            self.over = True
            self.owner.ended(end)
