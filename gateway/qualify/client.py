"""One measured request, over the same upstream client that the gateway serves with.

Owns: the stamps of one exchange and what its end is called.
Promises: the clock is read at the socket: just before the bytes are handed over, and when bytes of the answer arrive; every
request ends as exactly one sample; an answer with an error event, or without its finish, is not a success.
Talks to: `forward.upstream`, `forward.sse`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.forward.sse import Scanner
from gateway.forward.upstream import ConnectFailed, Connection, FailureKind, Headers, Upstream, UpstreamFailure
from gateway.qualify.plan import Limits
from gateway.qualify.samples import ErrorKind, RawSample, Status
from gateway.qualify.sizes import Size

MAX_ANSWER_BYTES = 64 * 1024 * 1024
MAX_DETAIL = 300
clock = time.perf_counter

_KINDS: dict[FailureKind, ErrorKind] = {
    FailureKind.IDENTITY: "identity",
    FailureKind.RESET: "reset",
    FailureKind.TRUNCATED: "truncated",
    FailureKind.MALFORMED: "malformed",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request stands in the run."""

    cell: int
    concurrency: int
    repeat: int
    wave: int
    index: int


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send."""

    place: Place
    size: Size
    request: bytes
    streamed: bool = True


class Exchange:
    """The sink of one request. `done` resolves to nothing when it has ended; it never fails."""

    def __init__(self, connection: Connection, limits: Limits, streamed: bool) -> None:
        loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = loop.create_future()
        self.status: Status = "ok"
        self.error: ErrorKind | None = None
        self.detail: str | None = None
        self.http_status: int | None = None
        self.sent_at = self.last_at = 0.0
        self.first_at: float | None = None
        self.events: list[tuple[float, int]] = []
        self.scanner = Scanner("openai")
        self._connection, self._streamed = connection, streamed
        self._held = bytearray()
        self._ended = False
        self._first = loop.call_later(limits.first_token_s, self._late, "no first token within first_token_s")
        self._all = loop.call_later(limits.execution_s, self._late, "no end within execution_s")

    def send(self, request: bytes) -> None:
        """Dispatch; the clock starts here."""
        self.sent_at = clock()
        self._connection.send(request, self)

    def head(self, status: int, headers: Headers) -> None:
        self.http_status = status

    def data(self, data: bytes) -> None:
        now = clock()
        if not self._streamed or self.http_status != 200:
            if self.first_at is None:
                self._saw_first(now)
            self._held += data[: MAX_ANSWER_BYTES - len(self._held)]
            return
        before = self.scanner.content_events
        self.scanner.feed(data)
        new = self.scanner.content_events - before
        if new:
            if self.first_at is None:
                self._saw_first(now)
            self.events.append((now - self.sent_at, new))

    def end(self) -> None:
        self.last_at = clock()
        if self.http_status != 200:
            self._fail("status", f"{self.http_status}: {bytes(self._held[:MAX_DETAIL]).decode('utf-8', 'replace')}")
        elif self._streamed:
            self.scanner.close()
            if self.scanner.error:
                self._fail("stream_error", f"an error event in the stream: {self.scanner.error_code}")
            elif not self.scanner.whole:
                self._fail("unfinished", "the stream ended without a finish_reason")
        self._finish()

    def lost(self, failure: UpstreamFailure) -> None:
        self.last_at = clock()
        self._fail(_KINDS.get(failure.kind, "reset"), failure.message)
        self._finish()

    def cancel(self) -> None:
        """Leave, unless it has ended. (A cancelled task has cancelled `done` itself, so that this cannot tell.)"""
        if not self._ended:
            self.status, self.last_at = "cancelled", clock()
            self._connection.abort()
            self._finish()

    def usage(self) -> tuple[int | None, int | None]:
        """Input and output tokens as the server counted them."""
        if self._streamed:
            return self.scanner.input_tokens, self.scanner.output_tokens
        try:
            usage = orjson.loads(bytes(self._held)).get("usage")
            return usage.get("prompt_tokens"), usage.get("completion_tokens", 0)
        except (orjson.JSONDecodeError, AttributeError):
            return None, None

    def _saw_first(self, now: float) -> None:
        self.first_at = now
        self._first.cancel()

    def _late(self, what: str) -> None:
        self.status, self.detail, self.last_at = "timeout", what, clock()
        self._connection.abort()
        self._finish()

    def _fail(self, kind: ErrorKind, detail: str) -> None:
        self.status, self.error, self.detail = "error", kind, detail[:MAX_DETAIL]

    def _finish(self) -> None:
        self._ended = True
        self._first.cancel()
        self._all.cancel()
        if not self.done.done():
            self.done.set_result(None)


async def connection_for(upstream: Upstream) -> Connection | ConnectFailed:
    """A connection to send on, attested where the upstream attests; or why there is none."""
    try:
        return upstream.take() or await upstream.connect()
    except ConnectFailed as failure:
        return failure


def unsent(job: Job, failure: ConnectFailed, intended_at: float, began: float, in_flight: int, open_loop: bool) -> RawSample:
    """The sample of a request for which there was no connection."""
    kind: ErrorKind = "identity" if failure.kind is FailureKind.IDENTITY else "connect"
    now = clock() - began
    return RawSample(
        **_place(job), intended_at=intended_at - began, sent_at=now, first_at=None, last_at=now, input_tokens=None,
        output_tokens=None, in_flight=in_flight, status="error", error=kind, detail=str(failure), open_loop=open_loop,
    )  # fmt: skip


def sample(job: Job, exchange: Exchange, intended_at: float | None, began: float, in_flight: int) -> RawSample:
    """The sample of a request that ended. `intended_at` None: a closed loop."""
    read, written = exchange.usage()
    good = exchange.status == "ok"
    return RawSample(
        **_place(job),
        intended_at=(exchange.sent_at if intended_at is None else intended_at) - began,
        sent_at=exchange.sent_at - began,
        first_at=None if exchange.first_at is None else exchange.first_at - began,
        last_at=exchange.last_at - began,
        input_tokens=read if good else None,
        output_tokens=written if good else None,
        in_flight=in_flight, status=exchange.status, error=exchange.error, detail=exchange.detail,
        http_status=exchange.http_status, event_times=tuple((round(at, 6), n) for at, n in exchange.events),
        open_loop=intended_at is not None,
    )  # fmt: skip


def _place(job: Job) -> dict[str, Any]:
    place, size = job.place, job.size
    return {
        "cell": place.cell, "concurrency": place.concurrency, "repeat": place.repeat, "wave": place.wave, "index": place.index,
        "kind": size.kind, "asked_input": size.input_tokens, "asked_output": size.output_tokens,
    }  # fmt: skip
