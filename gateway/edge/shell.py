"""The ASGI shell around the gateway's own routes: everything that must hold for each of them, in one place.

Owns the order of the checks: WebSockets are refused before accept; a CORS preflight is answered; then the key, the
path, the method, the role; then the handler. Promises: paths are compared as raw bytes, exactly, with no redirects; every
error is in the dialect of its route; an unknown exception becomes `internal_error` without a word of its text. Talks to the
key ring, to `answers` for the form of a refusal, and to whoever accounts for requests.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.edge import answers, decoding
from gateway.edge.keys import FailureLimiter, KeyRing, Principal
from gateway.edge.responses import Cors
from gateway.edge.routes import Dialect
from gateway.errors import Outcome, Reason, Refusal
from gateway.observe.exchange import Exchange


@dataclass(frozen=True, slots=True)
class Call:
    """A request that has passed the checks. `tail` is what followed a prefix path, as raw bytes."""

    request: Request
    principal: Principal
    tail: bytes
    body_limit: int
    body_timeout_s: float

    async def body(self) -> bytes | Refusal:
        """The decoded body, within the bounds of size and time. Raises ClientDisconnect."""
        declared = self.request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > self.body_limit:
            return decoding.too_large(self.body_limit)
        data = bytearray()
        try:
            async with asyncio.timeout(self.body_timeout_s):
                async for chunk in self.request.stream():
                    data += chunk
                    if len(data) > self.body_limit:
                        return decoding.too_large(self.body_limit)
        except TimeoutError:
            return Refusal(Reason.REQUEST_TIMEOUT, f"The body did not arrive within {self.body_timeout_s:g} s.")
        coding = self.request.headers.get("content-encoding")
        return decoding.decode(None if coding is None else coding.encode("latin-1"), bytes(data), self.body_limit)


Handler = Callable[[Call], Awaitable[Response | Refusal]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path: what each of its methods does, and who may use it. `name` is the label in the journal."""

    name: str
    handlers: Mapping[str, Handler]
    roles: frozenset[str]
    dialect: Dialect = "openai"

    @property
    def methods(self) -> tuple[str, ...]:
        """What Allow says: HEAD follows GET."""
        return (*self.handlers, "HEAD") if "GET" in self.handlers else tuple(self.handlers)


@dataclass(frozen=True, slots=True)
class Rules:
    """What a policy decides for a listener."""

    keys: KeyRing
    cors: Cors = field(default_factory=lambda: Cors(()))
    body_limit: int = 20_971_520
    body_timeout_s: float = 30.0


Find = Callable[[bytes], tuple[Endpoint, bytes] | None]
Identify = Callable[[KeyRing, Scope], Principal | None]


def by_bearer(keys: KeyRing, scope: Scope) -> Principal | None:
    """The principal whose key is in the request's headers."""
    return keys.identify(scope["headers"])


class Shell:
    """An ASGI application. `rules` is asked once a request, so that a reload takes effect at once."""

    def __init__(
        self,
        find: Find,
        rules: Callable[[], Rules],
        *,
        account: Callable[[Exchange], None],
        identify: Identify = by_bearer,
        challenge: Callable[[bytes], str] = lambda path: "Bearer",
        clock: Callable[[], float] = time.monotonic,
        limiter: FailureLimiter | None = None,
    ) -> None:
        self._find = find
        self._rules = rules
        self._account = account
        self._identify = identify
        self._challenge = challenge
        self._clock = clock
        self._limiter = limiter or FailureLimiter()
        self._http = ServerErrorMiddleware(self._serve, handler=self._failed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "WebSockets are not offered"})
        elif scope["type"] == "http":
            exchange = Exchange(f"req-{secrets.token_hex(12)}", "unknown", self._clock())
            exchange.peer = scope["client"][0] if scope.get("client") else None
            await self._http({**scope, "plimsoll.exchange": exchange}, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["plimsoll.exchange"]
        rules = self._rules()
        preflight = _preflight(scope, rules.cors)
        if preflight is not None:
            preflight.headers["x-request-id"] = exchange.request_id
            await preflight(scope, receive, send)
            return
        try:
            response = await self._answer(scope, receive, exchange, rules)
        except ClientDisconnect:
            exchange.outcome, exchange.reason, exchange.status = Outcome.CANCELLED, Reason.CLIENT_CLOSED, 499
            self._end(exchange)
            return
        exchange.status = response.status_code
        self._end(exchange)
        _dress(response, scope, exchange, rules.cors)
        await response(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, exchange: Exchange, rules: Rules) -> Response:
        path: bytes = scope["raw_path"].partition(b"?")[0]
        found = self._find(path)
        dialect = found[0].dialect if found is not None else "openai"
        checked = self._check(scope, path, found, exchange, rules)
        if isinstance(checked, Response):
            return checked
        endpoint, principal, tail = checked
        call = Call(Request(scope, receive), principal, tail, rules.body_limit, rules.body_timeout_s)
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        result = await endpoint.handlers[method](call)
        if isinstance(result, Refusal):
            return self._refuse(result, dialect, exchange)
        return result

    def _check(
        self, scope: Scope, path: bytes, found: tuple[Endpoint, bytes] | None, exchange: Exchange, rules: Rules
    ) -> tuple[Endpoint, Principal, bytes] | Response:
        """Key, path, method, role: the first that fails is the answer."""
        dialect = found[0].dialect if found is not None else "openai"
        principal = self._identify(rules.keys, scope)
        if principal is None:
            return self._unknown_caller(path, dialect, exchange)
        exchange.key_id, exchange.tenant = principal.id, principal.tenant
        if found is None:
            return self._refuse(Refusal(Reason.UNKNOWN_ROUTE, "There is no such route."), dialect, exchange)
        endpoint, tail = found
        exchange.route = endpoint.name
        if scope["method"] not in endpoint.methods:
            allowed = ", ".join(endpoint.methods)
            return self._refuse(
                Refusal(Reason.METHOD_NOT_ALLOWED, f"This route answers {allowed}."), dialect, exchange, allow=allowed
            )
        if principal.role not in endpoint.roles:
            return self._refuse(Refusal(Reason.NOT_PERMITTED, "This key may not use this route."), dialect, exchange)
        return endpoint, principal, tail

    def _unknown_caller(self, path: bytes, dialect: Dialect, exchange: Exchange) -> Response:
        wait_s = self._limiter.failed(exchange.peer, self._clock())
        if wait_s is not None:
            message = "Too many requests without a valid key came from this address."
            return self._refuse(Refusal(Reason.RATE_LIMITED, message, retry_after_s=wait_s), dialect, exchange)
        refusal = Refusal(Reason.INVALID_API_KEY, "No valid API key was given.")
        response = self._refuse(refusal, dialect, exchange)
        response.headers["www-authenticate"] = self._challenge(path)
        return response

    def _refuse(self, refusal: Refusal, dialect: Dialect, exchange: Exchange, allow: str | None = None) -> Response:
        exchange.outcome, exchange.reason, exchange.message = Outcome.REFUSED, refusal.reason, refusal.message
        return answers.refuse(refusal, dialect, allow=allow)

    async def _failed(self, request: Request, error: Exception) -> Response:
        """The answer to an exception nobody expected; the traceback goes to the server's log, not to the caller."""
        exchange: Exchange = request.scope["plimsoll.exchange"]
        found = self._find(request.scope["raw_path"].partition(b"?")[0])
        refusal = Refusal(Reason.INTERNAL_ERROR, "The gateway failed. The request id helps to find out why.")
        response = self._refuse(refusal, "openai" if found is None else found[0].dialect, exchange)
        exchange.outcome, exchange.status = Outcome.FAILED, response.status_code
        self._end(exchange)
        _dress(response, request.scope, exchange, self._rules().cors)
        return response

    def _end(self, exchange: Exchange) -> None:
        """Account for it; not for what operators, scrapers and probers may ask, which says nothing about the service."""
        exchange.ended_at = self._clock()
        theirs = exchange.tenant is None and exchange.key_id is not None and exchange.reason is not Reason.NOT_PERMITTED
        if not theirs or exchange.outcome is Outcome.FAILED:
            self._account(exchange)


def _dress(response: Response, scope: Scope, exchange: Exchange, cors: Cors) -> None:
    """Headers that every answer has."""
    response.headers["x-request-id"] = exchange.request_id
    response.headers.setdefault("cache-control", "no-store")
    response.headers.setdefault("x-content-type-options", "nosniff")
    response.raw_headers.extend(answers.header_lines(cors.lines(_header(scope, b"origin"))))


def _preflight(scope: Scope, cors: Cors) -> Response | None:
    """The answer to OPTIONS with an origin and the method it asks for; None for every other request."""
    if scope["method"] != "OPTIONS" or _header(scope, b"access-control-request-method") is None:
        return None
    return answers.preflight(cors, _header(scope, b"origin"))


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)
