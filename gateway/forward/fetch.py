"""One request and its whole answer, held: for identities, probes and whatever else is small."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gateway.forward.connection import Connection, Headers, UpstreamFailure


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
