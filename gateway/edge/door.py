"""The listener's side of the data path: who may come in, who is turned away at the head, and the account of every request.

Owns: the connections, the numbers of requests, and the accounts that have ended and are not yet written. Promises: each request
is counted exactly once, also one that never got further than its head. Talks to: `intake` (judging heads), `responses`, metrics,
journal.
"""

from __future__ import annotations

import secrets
import time
from itertools import count
from typing import Protocol

from gateway.edge import responses, routes
from gateway.edge.connections import Connections
from gateway.edge.dispatch import jitter
from gateway.edge.incoming import Incoming
from gateway.edge.intake import Intake
from gateway.edge.job import Job, retries_of
from gateway.edge.protocol import PlimsollProtocol
from gateway.edge.reader import Bounds
from gateway.edge.rules import PathRules
from gateway.errors import Outcome, Reason, Refusal
from gateway.forward.outbox import Outbox
from gateway.observe.exchange import Exchange
from gateway.observe.metrics import Metrics

DRAINING = Refusal(Reason.DRAINING, "The gateway is shutting down.", retry_after_s=1.0)
_BATCH = 64


class Journal(Protocol):
    """Where each request's account is written."""

    def write(self, exchange: Exchange) -> None: ...


class Door:
    """What `DataPath` is to connections, apart from the work itself. `rules` is replaced when the policy is reloaded."""

    def __init__(self, rules: PathRules, bounds: Bounds, intake: Intake, metrics: Metrics, journal: Journal) -> None:
        self.rules = rules
        self.bounds = bounds
        self.buffered_bytes = 0
        self.draining = False
        self.jobs: set[Job] = set()
        self.connections = Connections()
        self.outbox = Outbox()
        self._intake = intake
        self._metrics = metrics
        self._journal = journal
        self._numbers = count(1)
        self._prefix = secrets.token_hex(6)
        self._ended: list[Exchange] = []  # not yet in metrics and journal, for a tick at most

    def screen(self, client: PlimsollProtocol, incoming: Incoming) -> Refusal | bytes | None:
        """Judge a head: None to go on, a refusal, or the whole answer to a preflight."""
        rules = self.rules
        if incoming.cleared is rules and not self.draining:
            return None
        if rules.has_cors and incoming.method == b"OPTIONS" and b"access-control-request-method" in incoming.fields:
            ours = b"x-request-id: %b\r\n" % self._exchange(client, incoming).request_id.encode()
            answer = rules.cors.preflight(incoming.fields.get(b"origin"), ours)
            if answer is not None:
                return answer
        refusal = self._intake.screen(client, incoming, rules)
        if refusal is None and self.draining and incoming.route is not None and incoming.route.kind == "proxy":
            return DRAINING
        if refusal is None and incoming.principal is not None and incoming.principal.expires is None:
            incoming.cleared = rules
        return refusal

    def refuse(self, client: PlimsollProtocol, incoming: Incoming | None, refusal: Refusal) -> bytes:
        """The bytes of a refusal before any work was done; it is accounted for here."""
        exchange = self._exchange(client, incoming)
        exchange.outcome, exchange.reason, exchange.message = Outcome.REFUSED, refusal.reason, refusal.message
        exchange.status = responses.status_of(refusal.reason)
        self._account(exchange, time.monotonic())
        ours = b"x-request-id: %b\r\n" % (exchange.client_request_id or exchange.request_id).encode()
        fields = incoming.fields if incoming is not None else {}
        if self.rules.has_cors:
            ours += self.rules.cors.lines(fields.get(b"origin"))
        # The dialect is the route's, also where the key failed before the route was looked at.
        route = routes.find(incoming.path) if incoming is not None else None
        allow = route.method.encode() if route is not None and refusal.reason is Reason.METHOD_NOT_ALLOWED else None
        answer = responses.render(
            refusal, route.dialect if route is not None else "openai", ours,
            jitter=jitter(), retries=retries_of(fields), keep_alive=False, allow=allow,
        )  # fmt: skip
        return responses.head_of(answer) if incoming is not None and incoming.method == b"HEAD" else answer

    def departed(self, client: PlimsollProtocol, incoming: Incoming) -> None:
        """A client left before its request was whole."""
        exchange = self._exchange(client, incoming)
        exchange.outcome, exchange.reason, exchange.status = Outcome.CANCELLED, Reason.CLIENT_CLOSED, 499
        self._account(exchange, time.monotonic())

    def connected(self, client: PlimsollProtocol) -> bool:
        """Count a connection; False when there are too many, from everywhere or from its address."""
        return self.connections.add(client, self.bounds)

    def disconnected(self, client: PlimsollProtocol) -> None:
        """Forget a connection."""
        self.connections.discard(client)

    # Accounts

    def _exchange(self, client: PlimsollProtocol, incoming: Incoming | None) -> Exchange:
        started = incoming.received_at if incoming is not None else time.monotonic()
        route = incoming.route.name if incoming is not None and incoming.route is not None else "unknown"
        exchange = Exchange(f"req-{self._prefix}{next(self._numbers):x}", route, started)
        exchange.peer = client.address
        if incoming is not None:
            if incoming.principal is not None:
                exchange.key_id, exchange.tenant = incoming.principal.id, incoming.principal.tenant
            client_id = incoming.fields.get(b"x-request-id")
            if client_id is not None:
                exchange.client_request_id = responses.acceptable_id(client_id)
            parent = incoming.fields.get(b"traceparent")
            if parent is not None and len(parent) <= 64:
                exchange.traceparent = parent.decode("latin-1")
        return exchange

    def _account(self, exchange: Exchange, now: float) -> None:
        """Count it and write it down: at once while there is little to do, else together with others, which costs half."""
        exchange.ended_at = now
        self._ended.append(exchange)
        if not self.jobs or len(self._ended) >= _BATCH:
            self.settle_accounts()

    def settle_accounts(self) -> None:
        """Bring metrics and journal up to date with every request that has ended."""
        ended, self._ended = self._ended, []
        for exchange in ended:
            self._metrics.finish(exchange)
            self._journal.write(exchange)

    def _attempt_id(self) -> bytes:
        """An id that no other request to any backend bears."""
        return b"%b-%x" % (self._prefix.encode(), next(self._numbers))
