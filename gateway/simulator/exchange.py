"""One HTTP request and its answer, with the faults of the wire.

Owns how bytes leave: JSON answers, event streams, and the ways to break them (reset, FIN without the last chunk, stall with or
without comments). Promises: a caller that leaves is noticed at once and ends the request; nothing is sent after that. Talks
to the server's connection for what ASGI cannot say.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

import orjson

from gateway.simulator.driver import ClientGoneError, Collector, Delta, EngineDriver
from gateway.simulator.errors import ApiError
from gateway.simulator.faults import Fault, FaultKind

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

CONNECTION_KEY = "plimsoll.simulator.connection"
MAX_BODY_BYTES = 64 * 1024 * 1024
_STALL_COMMENT_S = 0.5
_WIRE = (FaultKind.STALL, FaultKind.RESET, FaultKind.FIN, FaultKind.STREAM_ERROR)


class Connection(Protocol):
    """What the server's protocol offers beyond ASGI. `number` counts the server's connections."""

    number: int

    def reset(self) -> None:
        """Close with RST."""

    def finish(self) -> None:
        """Send what is buffered, then FIN."""

    def on_lost(self, callback: Callable[[], None] | None) -> None:
        """Call back when the peer has gone."""


class Exchange:
    """See the module. One per request; handlers get it ready, with the body read."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, driver: EngineDriver, keep_alive_s: float | None) -> None:
        self.scope = scope
        self.driver = driver
        self.fault: Fault | None = None
        self.body = b""
        self._receive = receive
        self._send = send
        self._keep_alive_s = keep_alive_s
        self._collector: Collector | None = None
        self._gone = asyncio.Event()
        self._content_events = 0
        self.streaming = False
        self.started_at = asyncio.get_running_loop().time()
        connection = (scope.get("extensions") or {}).get(CONNECTION_KEY)
        self._connection: Connection | None = connection
        if connection is not None:
            connection.on_lost(self._lost)

    @property
    def path(self) -> str:
        """The path asked for."""
        return str(self.scope["path"])

    def header(self, name: str) -> str | None:
        """First value of a request header."""
        wanted = name.encode("ascii")
        return next((value.decode("latin-1") for key, value in self.scope["headers"] if key == wanted), None)

    async def read_body(self) -> None:
        """Read the whole body. Raises ClientGoneError when the caller leaves before its end, ApiError when too large."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part = message.get("body", b"")
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise ApiError(400, "The body is too large.")
            parts.append(part)
            if not message.get("more_body"):
                self.body = b"".join(parts)
                return

    def close(self) -> None:
        """The request is over: stop listening for the caller's leaving."""
        if self._connection is not None:
            self._connection.on_lost(None)

    def watch(self, collector: Collector) -> None:
        """End `collector` when the caller leaves."""
        self._collector = collector
        if self._gone.is_set():
            collector.fail(ClientGoneError())

    async def news(self, collector: Collector) -> list[Delta]:
        """The collector's next news; meanwhile keep-alive comments, when the server is set to send them on streams."""
        if self._keep_alive_s is None or not self.streaming:
            return await collector.take()
        while True:
            try:
                async with asyncio.timeout(self._keep_alive_s):
                    return await collector.take()
            except TimeoutError:
                await self.write(b": keep-alive\n\n")

    async def json(self, status: int, content: Any, content_type: bytes = b"application/json") -> None:
        """Answer with JSON, or with bytes as they are."""
        raw = content if isinstance(content, bytes) else orjson.dumps(content)
        headers = [(b"content-type", content_type)] if raw else []
        headers.append((b"content-length", b"%d" % len(raw)))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        if status == 200 and self.fault is not None and self.fault.after is not None and self.fault.kind in _WIRE:
            await self.write(raw[: len(raw) // 2])
            await self.break_off()
            raw = raw[len(raw) // 2 :]
        await self._send({"type": "http.response.body", "body": raw})

    async def start_stream(self) -> None:
        """Begin an event stream."""
        self.streaming = True
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, raw: bytes) -> None:
        """Send bytes as they are. Raises ClientGoneError when nobody reads them any more."""
        if self._gone.is_set():
            raise ClientGoneError
        await self._send({"type": "http.response.body", "body": raw, "more_body": True})

    async def content(self, raw: bytes) -> None:
        """Send one content event; a wire fault strikes after so many of these."""
        fault = self.fault
        if fault is not None and fault.kind in _WIRE and fault.after is not None and self._content_events >= fault.after:
            await self.break_off()
        self._content_events += 1
        await self.write(raw)

    async def end_stream(self) -> None:
        """The last chunk of the chunked body."""
        await self._send({"type": "http.response.body", "body": b""})

    async def break_off(self) -> None:
        """Make the wire fault so. Comes back only from a stall that is over."""
        fault = self.fault
        if fault is None:
            return
        self.fault = None
        match fault.kind:
            case FaultKind.STALL:
                await self._stall(fault)
            case FaultKind.STREAM_ERROR:
                raise ApiError(500, "EngineCore encountered an issue.")
            case FaultKind.RESET | FaultKind.FIN if self._connection is not None:
                if fault.kind is FaultKind.RESET:
                    self._connection.reset()
                else:
                    self._connection.finish()
                raise ClientGoneError

    async def _stall(self, fault: Fault) -> None:
        """Stand still, the engine's work on this request too, until the time is over or the caller has gone."""
        if self._collector is not None:
            self.driver.pause(self._collector, True)
        loop = asyncio.get_running_loop()
        until = None if fault.seconds is None else loop.time() + fault.seconds
        while not self._gone.is_set() and (until is None or loop.time() < until):
            left = _STALL_COMMENT_S if until is None else min(_STALL_COMMENT_S, until - loop.time())
            try:
                async with asyncio.timeout(left):
                    await self._gone.wait()
            except TimeoutError:
                if fault.keepalive and self.streaming:
                    await self.write(b": keep-alive\n\n")
        if self._gone.is_set():
            raise ClientGoneError
        if self._collector is not None:
            self.driver.pause(self._collector, False)

    def _lost(self) -> None:
        self._gone.set()
        if self._collector is not None:
            self._collector.fail(ClientGoneError())
