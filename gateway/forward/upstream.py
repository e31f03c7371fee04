"""The upstream client: pooled HTTP/1.1 connections to one backend, one request at a time on each.

Owns: connecting (TCP, TLS, Unix socket), the attestation of each new connection, reuse, and the head of every request.
Promises: nothing is sent over a connection that was not attested with the expected configuration, nor over one that has
been idle too long; a difference seen later is reported at once. Talks to: `connection`, and to whoever judges identities.

TTFT has one definition wherever this client is used: from `send` to the first SSE event with content, or to the
first body byte where the answer is not a stream.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from gateway.forward.connection import Connection, FailureKind, Headers, Sink, UpstreamFailure
from gateway.forward.endpoint import Endpoint
from gateway.forward.fetch import Answer, BrokenAnswer, fetch
from gateway.forward.outbox import Outbox

__all__ = [
    "Answer", "BrokenAnswer", "ConnectFailed", "Connection", "FailureKind", "Headers", "Sink", "Upstream", "UpstreamFailure",
    "fetch",
]  # fmt: skip

IDENTITY_PATH = b"/plimsoll/identity"
CONFIG_HEADER = b"x-plimsoll-config"
MAX_IDENTITY_BYTES = 1_048_576


class ConnectFailed(Exception):
    """No usable connection; nothing of the request was sent."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    @property
    def may_retry(self) -> bool:
        """Whether another try may help at once: the connection was refused, or led to something unexpected."""
        return self.kind in (FailureKind.REFUSED, FailureKind.IDENTITY)


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
        self.outbox = Outbox()
        self._connect_timeout_s = connect_timeout_s
        self._expect = expect
        self._on_identity = on_identity
        self._idle: deque[Connection] = deque()
        self._idle_s = idle_s
        self._max_idle = max_idle
        self._clock = clock
        self._api_key = api_key
        self.call_itself(instance)

    def call_itself(self, instance: str) -> None:
        """The name that requests bear from now on."""
        lines = [
            b"host: " + self.endpoint.host_header,
            b"accept-encoding: identity",
            b"x-plimsoll-gateway: " + instance.encode("ascii"),
        ]
        if self._api_key is not None:
            lines.append(b"authorization: Bearer " + self._api_key)
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
        connection = Connection(self)
        made: Any = lambda: connection  # noqa: E731  (a protocol to the loop, though not by its base)
        if endpoint.unix_path is not None:
            await loop.create_unix_connection(made, endpoint.unix_path)
        else:
            await loop.create_connection(
                made, endpoint.host, endpoint.port,
                ssl=endpoint.ssl, server_hostname=endpoint.server_name if endpoint.ssl else None,
            )  # fmt: skip
        if not connection.reusable:  # lost, or its pool retired, between being made and being handed to us
            connection.abort()
            raise ConnectFailed(FailureKind.REFUSED, "the backend closed the connection as soon as it was made")
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

    def retire(self) -> None:
        """Nothing more is sent here: idle connections close now, those in use when their answers have ended."""
        self.forget_idle()
        for connection in self.connections:
            connection.reusable = False

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

    def check_config(self, connection: Connection) -> None:
        """Compare a response's configuration with the connection's; a difference ends its reuse and is reported."""
        if not self.attest or connection.config is None:  # the latter: this is the identity request itself
            return
        value = connection.fields.get(CONFIG_HEADER)
        config = value.decode("latin-1") if value is not None else None
        if config != connection.config:
            connection.reusable = False
            self._on_identity(config, None)
