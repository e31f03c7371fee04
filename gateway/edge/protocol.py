"""The listener's side of a connection: which request is worked on, and when it is over.

Owns: one request at a time, bytes that come meanwhile, keep-alive, the deadlines of arriving requests, the notice that a
client has left.
Promises: a request is screened before its body is kept; a half-close is a departure; a refused upload is not kept.
Talks to: a `Reader` (bytes to requests), a `Front` (the data path), a `Handover` (what the ASGI app answers), and uvicorn, whose
`http=` class this is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.protocols.utils import get_remote_addr
from uvicorn.server import ServerState

from gateway.edge.handover import Handover
from gateway.edge.incoming import Incoming, Known
from gateway.edge.reader import Bounds, Reader, Store
from gateway.errors import Reason, Refusal
from gateway.forward.outbox import HOLD_BYTES, Outbox
from gateway.forward.relay import Brake

if TYPE_CHECKING:
    from gateway.edge.job import Job

__all__ = ["Bounds", "Front", "PlimsollProtocol"]

MAX_PENDING_BYTES = 65_536  # of later requests, while one is worked on
LINGER_S = 1.0  # how long bytes of a refused request are read and dropped, so that the client gets to read the answer
LINGER_BYTES = 4_194_304


class Front(Store, Protocol):
    """What stands behind the listener."""

    draining: bool
    outbox: Outbox

    def screen(self, client: PlimsollProtocol, incoming: Incoming) -> Refusal | bytes | None:
        """Judge a head: None to go on, a refusal, or a whole answer (a preflight's)."""

    def refuse(self, client: PlimsollProtocol, incoming: Incoming | None, refusal: Refusal) -> bytes:
        """The bytes of a refusal that closes the connection; the request is accounted for."""

    def serve(self, client: PlimsollProtocol, incoming: Incoming) -> None:
        """Work on a proxied request; ends with `client.finished`, perhaps before it returns. `client.job` is the work."""

    def left(self, job: Job) -> None:
        """The client left while `job` was worked on."""

    def departed(self, client: PlimsollProtocol, incoming: Incoming) -> None:
        """The client left before its request was whole."""

    def connected(self, client: PlimsollProtocol) -> bool: ...
    def disconnected(self, client: PlimsollProtocol) -> None: ...


class PlimsollProtocol:
    """One client connection, as the event loop and uvicorn know a protocol. `bound(front)` is what uvicorn gets as `http=`.

    A plain class, so that it can be compiled; the loop asks for the methods, not for a base.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        front: Front,
    ) -> None:
        self.front = front
        self.loop = _loop or asyncio.get_running_loop()
        self.client: tuple[str, int] | None = None
        self.known = Known()
        self.brake: Brake | None = None
        self.job: Job | None = None
        self.paused_at: float | None = None  # since when the client has not taken what was written
        self._state = server_state
        self._handover = Handover(config, server_state, app_state, self.loop)
        self._flow: FlowControl | None = None
        self._cycle: RequestResponseCycle | None = None  # of a request that the ASGI app answers
        self._reader = Reader(front)
        self._current: Incoming | None = None
        self._advancing = False
        self._pending = b""
        self._idle_since = time.monotonic()
        self._linger_until: float | None = None
        self._linger_bytes = 0
        self._over = False
        self._unsent = b""  # what is written at the end of this round of the loop

    @staticmethod
    def bound(front: Front) -> Callable[..., PlimsollProtocol]:
        """What makes the connections of `front`."""
        return partial(PlimsollProtocol, front=front)

    # What the data path uses

    def write(self, data: bytes) -> None:
        """Send bytes, at the latest at the end of this round of the loop. Nothing happens when the client has left."""
        if self._over:
            return
        if self._unsent:
            self._unsent += data
        else:
            self._unsent = data
            self.front.outbox.post(self)
        if len(self._unsent) > HOLD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write now what was kept for the end of the round."""
        data = self._unsent
        if data:
            self._unsent = b""
            self.transport.write(data)

    def finished(self, *, keep_alive: bool) -> None:
        """The answer to the current request is whole; go on with the next one or close."""
        current, self._current, self.job, self.brake = self._current, None, None, None
        if current is not None:
            self._reader.release(current)
        if self._over:
            return
        if not keep_alive or self.front.draining:
            self.hang_up()
            return
        self._idle_since = time.monotonic()
        if self._pending and not self._reader.ready:
            data, self._pending = self._pending, b""
            self._reader.feed(data)
        self._advance()

    def hang_up(self) -> None:
        """Close when what was written has been sent. Without a last chunk before it, the client sees a cut answer."""
        if not self._over:
            self.flush()
            self._over = True
            self.transport.close()

    def cut(self) -> None:
        """Close at once, dropping what was not sent."""
        self._over = True
        self._unsent = b""
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
        elif self.paused_at is not None and now > self.paused_at + self.front.bounds.client_write_s:
            self.cut()  # also where the next request is worked on: what is not read is held for nobody
        elif self._over or self._current is not None:
            return
        elif self._reader.receiving is not None:
            limit = self.front.bounds.body_timeout_s
            if now > self._reader.receiving.received_at + limit:
                self._refuse(Refusal(Reason.REQUEST_TIMEOUT, f"The request was not sent whole within {limit:g} seconds."))
        elif now > self._idle_since + self.front.bounds.keep_alive_s:
            self.hang_up()

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._state.connections.add(cast(Any, self))
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one without saying so
        self._flow = FlowControl(self.transport)
        self.client = get_remote_addr(self.transport)
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
            self._reader.feed(data)
            self._advance()

    def eof_received(self) -> bool | None:
        self.flush()
        self.leave()
        return None  # the transport closes itself

    def connection_lost(self, exc: Exception | None) -> None:
        self._over = True
        self._unsent = b""
        self.leave()
        self.front.disconnected(self)
        self._state.connections.discard(cast(Any, self))
        if self._cycle is not None:
            self._cycle.disconnected = self._cycle.disconnected or not self._cycle.response_complete
            self._cycle.message_event.set()
        if self._flow is not None:
            self._flow.resume_writing()

    def pause_writing(self) -> None:
        if self._flow is not None:
            self._flow.pause_writing()
        self.paused_at = time.monotonic()
        if self.brake is not None:
            self.brake.pause()

    def resume_writing(self) -> None:
        if self._flow is not None:
            self._flow.resume_writing()
        self.paused_at = None
        if self.brake is not None:
            self.brake.resume()

    def shutdown(self) -> None:
        """uvicorn is ending: idle connections close now, others when their answer is whole."""
        if self._current is None:
            self.hang_up()
        elif self._cycle is not None:
            self._cycle.keep_alive = False

    def leave(self) -> None:
        """The client has left: nothing is generated for nobody."""
        job, self.job = self.job, None
        if job is not None:
            self.front.left(job)
        receiving = self._reader.drop()
        if receiving is not None and receiving.head_done:
            self.front.departed(self, receiving)

    # From requests to work

    def _advance(self) -> None:
        """Take up the next request that is whole; refuse what is not worth receiving. Goes on past what was answered at once."""
        if self._advancing:  # one was answered at once: the loop below sees to the next, however many there are
            return
        self._advancing = True
        try:
            while self._current is None and not self._over and self._next():
                pass
        finally:
            self._advancing = False

    def _next(self) -> bool:
        """One step; whether a request was taken up, so that another may follow once it is answered."""
        reader = self._reader
        incoming = reader.ready.popleft() if reader.ready else reader.receiving
        if incoming is None or not incoming.whole:
            if reader.broken is not None:
                self._refuse(reader.broken)
                return False
            if incoming is None or not incoming.head_done:
                return False
        if not incoming.screened:
            incoming.screened = True
            verdict = self.front.screen(self, incoming)
            if verdict is not None:
                self._turn_away(incoming, verdict)
                return True
            if incoming.expects_continue and not incoming.whole:
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not incoming.whole:
            return False
        self._begin(incoming)
        return True

    def _begin(self, incoming: Incoming) -> None:
        self._current = incoming
        if incoming.route is not None and incoming.route.kind == "proxy":
            self.front.serve(self, incoming)
        else:
            self._begin_asgi(incoming)

    def _begin_asgi(self, incoming: Incoming) -> None:
        flow = self._flow
        assert flow is not None
        self.flush()  # the app writes to the transport itself
        self._cycle = self._handover.begin(incoming, self.transport, self.client, flow, self._asgi_done)

    def _asgi_done(self) -> None:
        cycle, self._cycle = self._cycle, None
        self.finished(keep_alive=cycle is not None and cycle.keep_alive and not self.transport.is_closing())

    # Turning away

    def _turn_away(self, incoming: Incoming, verdict: Refusal | bytes) -> None:
        self._reader.release(incoming)
        if isinstance(verdict, Refusal):
            self._answer_and_close(self.front.refuse(self, incoming, verdict), whole=incoming.whole)
        elif incoming.whole:
            self.write(verdict)
            self._idle_since = time.monotonic()
            if not incoming.keep_alive:
                self.hang_up()
        else:
            self._answer_and_close(verdict, whole=False)

    def _refuse(self, refusal: Refusal) -> None:
        self._answer_and_close(self.front.refuse(self, self._reader.receiving, refusal), whole=False)

    def _answer_and_close(self, data: bytes, *, whole: bool) -> None:
        """Closing on unread bytes resets the connection, which can take the answer with it: drop those for a moment."""
        self._reader.drop()
        self.write(data)
        if whole or not self.transport.can_write_eof():
            self.hang_up()
            return
        self.flush()
        self._over = True
        self._linger_until = time.monotonic() + LINGER_S
        self.transport.write_eof()

    def _linger(self, size: int) -> None:
        """What is beyond the bound stays in the client's kernel, so that it waits and reads: a reset would be seen first."""
        self._linger_bytes += size
        if self._linger_until is not None and self._linger_bytes > LINGER_BYTES:
            self.transport.pause_reading()
