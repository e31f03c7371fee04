"""From bytes to a demand: who asks, for which route, with what body, of what shape.

Owns the order of the checks before admission. Promises: the key is checked before a body is kept; large bodies are
decoded and parsed in a thread; whatever is wrong comes out as one typed refusal. Talks to: `keys`, `routes`, `body`,
the model's token counter, and the controller for what the envelope would make of a size.
"""

from __future__ import annotations

import asyncio
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

    async def read(self, job: Job) -> Parsed:
        """Decode and parse the body; the model is one that the tenant may use. Raises Refused."""
        incoming, route = job.incoming, job.incoming.route
        assert route is not None
        raw = incoming.take_body()
        coding = incoming.fields.get(b"content-encoding")
        if coding is not None or len(raw) > THREAD_BYTES:
            found = await asyncio.to_thread(self._parse, job, route, coding, raw)
        else:
            found = body.parse(route, incoming.fields.get(b"content-type"), raw, job.tenant.lookup)
        if isinstance(found, Refusal):
            raise Refused(found)
        job.parsed = found
        job.model = job.rules.models[found.rules.name]
        job.exchange.model = found.rules.name
        job.exchange.stream = found.stream
        return found

    def _parse(self, job: Job, route: Route, coding: bytes | None, raw: bytes) -> Parsed | Refusal:
        decoded = body.decode(coding, raw, job.rules.max_body_bytes)
        if isinstance(decoded, Refusal):
            return decoded
        return body.parse(route, job.incoming.fields.get(b"content-type"), decoded, job.tenant.lookup)

    async def demand(self, job: Job, parsed: Parsed, now: float) -> Demand:
        """The request as admission sees it: its shape, its deadlines, its tenant's share. Raises Refused."""
        model, tenant = job.model, job.tenant
        assert model is not None
        due = now + model.queue_s
        counter = self._models.counter(parsed.rules.name)
        low, tokens = counter.bound(parsed)  # the upper bound where it settles the matter, the exact count where not
        output = parsed.output_tokens
        if tokens is None or not self._controller.settled(
            model.backends, parsed.task, parsed.features, output, parsed.sequences, low, tokens
        ):
            tokens = await self._count(job, parsed, counter, low, due)
        if output is None:
            output = self._default_output(parsed, model.backends, tokens)
            if not job.rules.observe:
                job.limit_written = output
        shape = job.exchange.shape = parsed.shape(tokens, output)
        affinity = zlib.crc32(parsed.compact[:1024]) if len(model.backends) > 1 else None
        return Demand(
            parsed.rules.name, model.backends, shape, tenant.name, tenant.weight, tenant.priority_class, tenant.priority,
            due, job.caller_due, affinity, tenant.limits,
        )  # fmt: skip

    async def _count(self, job: Job, parsed: Parsed, counter: Counter, low: int, due: float) -> int:
        """The exact count. Raises Refused; with `observe`, what cannot be counted is outside every slice, and let through."""
        assert job.model is not None
        if not self._controller.has_open(job.model.backends):
            return low  # whatever its size, the gate decides; there may not even be a tokenizer yet
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
