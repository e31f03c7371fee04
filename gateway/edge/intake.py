"""From bytes to a demand: who asks, for which route, with what body, of what shape.

Owns the order of the checks before admission. Promises: the key is checked before a body is kept; large bodies are
decoded and parsed in a thread; whatever is wrong comes out as one typed refusal. Talks to: `keys`, `routes`, `body`,
the model's token counter, and the controller for what the envelope would make of a size.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from typing import Protocol

from gateway.edge import body, routes
from gateway.edge.body import Parsed
from gateway.edge.incoming import Incoming
from gateway.edge.job import Job
from gateway.edge.keys import FailureLimiter
from gateway.edge.protocol import PlimsollProtocol
from gateway.edge.reader import body_too_large
from gateway.edge.routes import Route
from gateway.edge.rules import PathRules
from gateway.edge.tokens import Counter
from gateway.errors import Reason, Refusal, Refused
from gateway.flow.controller import Controller
from gateway.flow.demand import Demand

THREAD_BYTES = 131_072  # larger bodies would hold up every other request for longer than a millisecond
UNCOUNTED = 2**53 - 1
COMPLETIONS_DEFAULT = 16  # vLLM's own limit for /v1/completions without one
_METHODS = {"GET": b"GET", "POST": b"POST"}
_BODILESS = frozenset({b"GET", b"HEAD", b"OPTIONS"})


class Models(Protocol):
    """What is known of a model's backends beside their gate."""

    def counter(self, model: str) -> Counter:
        """Who counts the model's input tokens."""

    def server_default(self, model: str) -> int | None:
        """The output limit the server would use for a chat without one; None when it has none or none is known."""


class Intake:
    """The checks of one listener. `controller` is asked, never changed."""

    def __init__(self, controller: Controller, models: Models, limiter: FailureLimiter) -> None:
        self._controller = controller
        self._models = models
        self._limiter = limiter

    def screen(self, client: PlimsollProtocol, incoming: Incoming, rules: PathRules) -> Refusal | None:
        """Judge a head, before anything of the body is kept. Sets `principal` and `route`."""
        fields = incoming.fields
        if incoming.repeats():
            return Refusal(Reason.INVALID_BODY, "A header that must stand once stands twice.")
        if b"host" not in fields and not incoming.http_1_0:
            return Refusal(Reason.INVALID_BODY, "The Host header is missing.")
        incoming.principal = principal = client.known.principal(rules.keys, incoming)
        if principal is None:
            wait_s = self._limiter.failed(client.address, incoming.received_at)
            if wait_s is not None:
                return Refusal(Reason.RATE_LIMITED, "Too many failed attempts.", retry_after_s=wait_s)
            return Refusal(Reason.INVALID_API_KEY, "A valid API key is needed.")
        route = routes.find(incoming.path)
        if route is None:
            return Refusal(Reason.UNKNOWN_ROUTE, "There is no such route.")
        incoming.route = route
        if _METHODS[route.method] != incoming.method and not (route.kind != "proxy" and incoming.method in _BODILESS):
            return Refusal(Reason.METHOD_NOT_ALLOWED, f"This route answers {route.method}.")
        if principal.role not in route.roles:
            return Refusal(Reason.NOT_PERMITTED, "This key may not use this route.")
        if b"upgrade" in fields and incoming.websocket:
            return Refusal(Reason.UNKNOWN_ROUTE, "WebSockets are not offered.")
        size = fields.get(b"content-length")
        if size is not None and int(size) > rules.max_body_bytes:
            return body_too_large(rules.max_body_bytes)
        return None

    def read_now(self, job: Job) -> Parsed | None:
        """Parse the body; the model is one that the tenant may use. None where a thread has to do it. Raises Refused."""
        incoming, route = job.incoming, job.incoming.route
        assert route is not None
        fields = incoming.fields
        if incoming.size > THREAD_BYTES or b"content-encoding" in fields:
            return None
        return self._found(job, body.parse(route, fields.get(b"content-type"), incoming.take_body(), job.tenant.lookup))

    async def read(self, job: Job) -> Parsed:
        """The same in a thread, decoding included. Raises Refused."""
        incoming, route = job.incoming, job.incoming.route
        assert route is not None
        raw, coding = incoming.take_body(), incoming.fields.get(b"content-encoding")
        return self._found(job, await asyncio.to_thread(self._parse, job, route, coding, raw))

    def _parse(self, job: Job, route: Route, coding: bytes | None, raw: bytes) -> Parsed | Refusal:
        decoded = body.decode(coding, raw, job.rules.max_body_bytes)
        if isinstance(decoded, Refusal):
            return decoded
        return body.parse(route, job.incoming.fields.get(b"content-type"), decoded, job.tenant.lookup)

    @staticmethod
    def _found(job: Job, found: Parsed | Refusal) -> Parsed:
        if isinstance(found, Refusal):
            raise Refused(found)
        job.parsed = found
        job.model = job.rules.models[found.rules.name]
        job.exchange.model = found.rules.name
        job.exchange.stream = found.stream
        return found

    def demand_now(self, job: Job, parsed: Parsed) -> Demand | None:
        """The request as admission sees it: its shape, its deadlines, its tenant's share. None where it must be counted."""
        model = job.model
        assert model is not None
        low, tokens = self._models.counter(parsed.rules.name).bound(parsed)
        if tokens is None or not self._controller.settled(
            model.backends, parsed.task, parsed.features, parsed.output_tokens, parsed.sequences, low, tokens
        ):
            return None
        return self._demand(job, parsed, tokens, time.monotonic() + model.queue_s)

    async def demand(self, job: Job, parsed: Parsed) -> Demand:
        """The same, with the input counted where the bound does not tell. Raises Refused."""
        demand = self.demand_now(job, parsed)  # not yet asked where a thread has parsed, and a gate may have changed since
        if demand is not None:
            return demand
        assert job.model is not None
        due = time.monotonic() + job.model.queue_s
        return self._demand(job, parsed, await self._count(job, parsed, due), due)

    def _demand(self, job: Job, parsed: Parsed, tokens: int, due: float) -> Demand:
        model, tenant, output = job.model, job.tenant, parsed.output_tokens
        assert model is not None
        if output is None:
            output = self._default_output(parsed, model.backends, tokens)
            if not job.rules.observe:
                job.limit_written = output
        shape = job.exchange.shape = parsed.shape(tokens, output)
        affinity = zlib.crc32(parsed.compact[:1024]) if len(model.backends) > 1 else None
        job.demand = Demand(
            parsed.rules.name, model.backends, shape, tenant.name, tenant.weight, tenant.priority_class, tenant.priority,
            due, job.caller_due, affinity, tenant.limits,
        )  # fmt: skip
        return job.demand

    async def _count(self, job: Job, parsed: Parsed, due: float) -> int:
        """The exact count. Raises Refused; with `observe`, what cannot be counted is outside every slice, and let through."""
        assert job.model is not None
        counter = self._models.counter(parsed.rules.name)
        if not self._controller.has_open(job.model.backends):
            return counter.bound(parsed)[0]  # whatever its size, the gate decides; there may not even be a tokenizer yet
        try:
            return await counter.count(parsed, due if job.caller_due is None else min(due, job.caller_due))
        except Refused as refused:
            if not job.rules.observe or refused.refusal.axis is None:
                raise
            return UNCOUNTED

    def _default_output(self, parsed: Parsed, backends: tuple[str, ...], tokens: int) -> int:
        """The limit for a request that names none; 1 where no slice holds its input, so that the refusal says so."""
        default = COMPLETIONS_DEFAULT if parsed.route.parser == "completions" else self._models.server_default(parsed.rules.name)
        found = self._controller.default_output(backends, parsed.task, parsed.features, tokens, default)
        return found if found is not None else 1
