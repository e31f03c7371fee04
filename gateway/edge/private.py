"""The operators' listener in front of its ASGI app: the same bounds on bytes, time and connections as the public one.

Owns its connections. Promises: what is not HTTP/1.1 gets the same answer as on the public listener; nothing of a body is kept
for a caller whose key is not known; no WebSocket is accepted. Talks to the key ring, and to whoever accounts for requests.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

from gateway.edge import responses
from gateway.edge.admin import identify
from gateway.edge.connections import Connections
from gateway.edge.dispatch import jitter
from gateway.edge.incoming import Incoming
from gateway.edge.job import Job
from gateway.edge.keys import FailureLimiter
from gateway.edge.protocol import Bounds, PlimsollProtocol
from gateway.edge.reader import body_too_large
from gateway.edge.shell import Rules
from gateway.errors import Outcome, Reason, Refusal
from gateway.forward.outbox import Outbox
from gateway.observe.exchange import Exchange

SWEEP_S = 0.25


class Private:
    """The `Front` of `admin_listen`. `rules` is asked once a request, so that a reload takes effect at once."""

    def __init__(
        self, rules: Callable[[], Rules], bounds: Bounds, account: Callable[[Exchange], None], limiter: FailureLimiter
    ) -> None:
        self.bounds = bounds
        self.buffered_bytes = 0
        self.draining = False
        self.connections = Connections()
        self.outbox = Outbox()
        self._rules = rules
        self._account = account
        self._limiter = limiter

    def screen(self, client: PlimsollProtocol, incoming: Incoming) -> Refusal | None:
        """Judge a head; a whole request of a stranger is left to the app, which knows when to ask a browser for a key."""
        if incoming.repeats():
            return Refusal(Reason.INVALID_BODY, "A header that must stand once stands twice.")
        scope = {"headers": incoming.headers, "method": incoming.method.decode("ascii")}
        known = identify(self._rules().keys, scope) is not None
        if not known and not incoming.whole:
            wait_s = self._limiter.failed(client.address, incoming.received_at)
            if wait_s is not None:
                return Refusal(Reason.RATE_LIMITED, "Too many failed attempts.", retry_after_s=wait_s)
            return Refusal(Reason.INVALID_API_KEY, "A valid API key is needed.")
        if known and incoming.websocket:
            return Refusal(Reason.UNKNOWN_ROUTE, "WebSockets are not offered.")
        size = incoming.fields.get(b"content-length")
        return body_too_large(self.bounds.max_body_bytes) if size and int(size) > self.bounds.max_body_bytes else None

    def refuse(self, client: PlimsollProtocol, incoming: Incoming | None, refusal: Refusal) -> bytes:
        """The bytes of a refusal that closes the connection."""
        now = time.monotonic()
        exchange = Exchange(f"req-{secrets.token_hex(12)}", "unknown", now if incoming is None else incoming.received_at)
        exchange.peer, exchange.ended_at = client.address, now
        exchange.outcome, exchange.reason, exchange.message = Outcome.REFUSED, refusal.reason, refusal.message
        exchange.status = responses.status_of(refusal.reason)
        self._account(exchange)
        ours = b"x-request-id: %b\r\n" % exchange.request_id.encode()
        answer = responses.render(refusal, "openai", ours, jitter=jitter(), retries=0, keep_alive=False)
        return responses.head_of(answer) if incoming is not None and incoming.method == b"HEAD" else answer

    def serve(self, client: PlimsollProtocol, incoming: Incoming) -> None:
        """Nothing is proxied here: `screen` names no route."""
        raise RuntimeError("the operators' listener proxies nothing")

    def left(self, job: Job) -> None:
        """There is no work that could be left."""

    def departed(self, client: PlimsollProtocol, incoming: Incoming) -> None:
        """A client that leaves before its request is whole has asked nothing."""

    def connected(self, client: PlimsollProtocol) -> bool:
        """Count a connection; False when there are too many."""
        return self.connections.add(client, self.bounds)

    def disconnected(self, client: PlimsollProtocol) -> None:
        """Forget a connection."""
        self.connections.discard(client)

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.connections.sweep(time.monotonic())
