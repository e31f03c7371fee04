"""The operators' listener: what the gateway sees, why it refused, and the few things a person may change.

Owns /admin/*, /openapi.json and /console. Promises: role operator alone; every change is written to the audit log with
the state before and after; a record that comes in on another address than loopback must be signed; a browser's Basic
credentials open pages, but change nothing without the console's own header, so that no other site can act in an operator's
name. Talks to `operations.Operations` and the audit log.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import inspect
import ipaddress
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.responses import Response
from starlette.types import Scope

from gateway.edge import admin_schema, openapi
from gateway.edge.keys import FailureLimiter, KeyRing, Principal
from gateway.edge.local import decoded, json_body, json_response
from gateway.edge.operations import Changed, Operations, Question
from gateway.edge.shell import Call, Endpoint, Handler, Rules, Shell
from gateway.errors import Reason, Refusal
from gateway.observe.audit import AuditLog, Entry
from gateway.observe.exchange import Exchange

OPERATOR = frozenset({"operator"})
CONSOLE_HEADER = b"x-plimsoll-console"
SIGNATURE_HEADER = "x-plimsoll-signature"  # public key, blank, signature; one line each
MAX_SIGNATURES = 16
_BACKENDS = b"/admin/backends/"
Body = TypeVar("Body", bound=BaseModel)


def admin_app(
    operations: Operations,
    rules: Callable[[], Rules],
    account: Callable[[Exchange], None],
    audit: AuditLog,
    wall: Callable[[], float] = time.time,
    limiter: FailureLimiter | None = None,
) -> Shell:
    """The ASGI application of `admin_listen`. `limiter`: the allowance of failed keys that its listener uses too."""
    admin = Admin(operations, audit, wall)
    exact, actions = admin.endpoints(), admin.actions()

    def find(path: bytes) -> tuple[Endpoint, bytes] | None:
        endpoint, name = exact.get(path), b""
        if endpoint is None and path.startswith(_BACKENDS):
            name, _, action = path[len(_BACKENDS) :].rpartition(b"/")
            endpoint = actions.get(action) if name else None
        return None if endpoint is None else (endpoint, name)

    return Shell(find, rules, account=account, identify=identify, challenge=_challenge, limiter=limiter)


def identify(keys: KeyRing, scope: Scope) -> Principal | None:
    """A key in the usual headers; or HTTP Basic with the key as password, for browsers: to read, or with the console's header."""
    found = keys.identify(scope["headers"])
    if found is not None:
        return found
    headers = dict(scope["headers"])
    scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"basic" or not (scope["method"] in ("GET", "HEAD") or CONSOLE_HEADER in headers):
        return None
    try:
        password = base64.b64decode(value, validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return None
    return keys.find(password)


def _challenge(path: bytes) -> str:
    """Only the console's page asks a browser to prompt."""
    return 'Basic realm="plimsoll: any name, an operator key", charset="UTF-8"' if path == b"/console" else "Bearer"


class Admin:
    """The handlers."""

    def __init__(self, operations: Operations, audit: AuditLog, wall: Callable[[], float]) -> None:
        self._operations = operations
        self._audit = audit
        self._wall = wall
        self._console = files("gateway.edge").joinpath("console.html").read_bytes()
        self._csp = content_security_policy(self._console)

    def endpoints(self) -> dict[bytes, Endpoint]:
        """The exact table of this listener."""
        ops = self._operations
        rows: dict[str, dict[str, Handler]] = {
            "/console": {"GET": self.console},
            "/openapi.json": {"GET": self.openapi},
            "/admin/status": {"GET": self.status},
            "/admin/records": {"GET": self.records, "POST": self.push_record},
            "/admin/retest": {"GET": self.retest},
            "/admin/retest/plan": {"POST": self.retest_plan},
            "/admin/explain": {"POST": self.explain},
            "/admin/journal": {"GET": self.journal},
            "/admin/audit": {"GET": self.audit_log},
            "/admin/reload": {"POST": self._action("policy reload", lambda _: ops.reload())},
        }
        return {path.encode(): Endpoint(path, handlers, OPERATOR) for path, handlers in rows.items()}

    def actions(self) -> dict[bytes, Endpoint]:
        """What may be done to a backend: the last part of /admin/backends/{name}/…"""
        ops = self._operations
        rows = {"drain": ops.drain_backend, "undrain": ops.undrain_backend, "reset-breaker": ops.reset_breaker}
        return {
            action.encode(): Endpoint(f"/admin/backends/{{name}}/{action}", {"POST": self._action(action, act)}, OPERATOR)
            for action, act in rows.items()
        }

    async def console(self, call: Call) -> Response:
        headers = {
            "content-type": "text/html; charset=utf-8",
            "content-security-policy": self._csp,
            "referrer-policy": "no-referrer",
        }
        return Response(self._console, headers=headers)

    async def openapi(self, call: Call) -> Response:
        return json_response(openapi.document(self._operations.status().version))

    async def status(self, call: Call) -> Response:
        return json_response(dataclasses.asdict(self._operations.status()))

    async def records(self, call: Call) -> Response:
        return json_response({"records": self._operations.records()})

    async def push_record(self, call: Call) -> Response | Refusal:
        body = await call.body()
        if isinstance(body, Refusal):
            return body
        signatures = tuple(call.request.headers.getlist(SIGNATURE_HEADER))
        if len(signatures) > MAX_SIGNATURES:
            return Refusal(Reason.INVALID_BODY, f"At most {MAX_SIGNATURES} signatures are read.")
        result = await self._operations.push_record(body, signatures, must_be_signed=not _is_loopback(call))
        what = "record push" if isinstance(result, Refusal) else f"record push {result.get('id', '')}"
        after = None if isinstance(result, Refusal) else result
        await self._note(call, what, result, None, after)
        return result if isinstance(result, Refusal) else json_response(result, 201 if result.get("new") else 200)

    async def retest(self, call: Call) -> Response:
        return json_response(await self._operations.retest())

    async def retest_plan(self, call: Call) -> Response | Refusal:
        asked = await _read(call, admin_schema.PlanRequest)
        if isinstance(asked, Refusal):
            return asked
        return _answer(await self._operations.retest_plan(asked.model, asked.share))

    async def explain(self, call: Call) -> Response | Refusal:
        asked = await _read(call, admin_schema.ExplainRequest)
        if isinstance(asked, Refusal):
            return asked
        question = Question(
            asked.model,
            asked.input_tokens,
            asked.output_tokens,
            asked.sequences,
            asked.task,
            frozenset(asked.features),
            asked.tenant,
        )
        return _answer(self._operations.explain(question))

    async def journal(self, call: Call) -> Response | Refusal:
        try:
            query = admin_schema.JournalQuery.model_validate(dict(call.request.query_params))
        except ValidationError as error:
            return _invalid(error)
        return json_response({"requests": self._operations.recent(query.limit, query.reason, query.tenant)})

    async def audit_log(self, call: Call) -> Response:
        return json_response({"entries": self._audit.recent()})

    def _action(self, what: str, act: Callable[[str], Any]) -> Handler:
        """A handler that takes an operator's action and notes it. `act` gets the name of the backend, where there is one."""

        async def handler(call: Call) -> Response | Refusal:
            name = decoded(call.tail) or ""
            result = act(name)
            if inspect.isawaitable(result):
                result = await result
            label = f"{what} {name}".strip()
            if isinstance(result, Changed):
                await self._note(call, label, result, result.before, result.after)
                return json_response({"before": result.before, "after": result.after})
            await self._note(call, label, result, None, None)
            return _refusal(result)

        return handler

    async def _note(self, call: Call, what: str, result: object, before: Any, after: Any) -> None:
        outcome = f"refused: {result.reason}" if isinstance(result, Refusal) else "done"
        client = call.request.client
        entry = Entry(call.principal.id, what, outcome, before, after, None if client is None else client.host)
        await self._audit.record(entry, self._wall())


def _is_loopback(call: Call) -> bool:
    """Whether the connection came in on an address of this host alone. One that is not known is taken to be another."""
    host = (call.request.scope.get("server") or ("",))[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def content_security_policy(page: bytes) -> str:
    """A policy under which the page may run its own script and style, named by digest, and talk to its own origin."""
    allowed = {}
    for tag in (b"script", b"style"):
        inside = page.partition(b"<%b>" % tag)[2].partition(b"</%b>" % tag)[0]
        allowed[tag] = base64.b64encode(hashlib.sha256(inside).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{allowed[b'script']}'; style-src 'sha256-{allowed[b'style']}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _refusal(result: object) -> Refusal:
    if not isinstance(result, Refusal):
        raise TypeError(f"an operation answered {type(result).__name__}")
    return result


def _answer(result: dict[str, Any] | Refusal) -> Response | Refusal:
    return result if isinstance(result, Refusal) else json_response(result)


async def _read(call: Call, kind: type[Body]) -> Body | Refusal:
    document = await json_body(call)
    if isinstance(document, Refusal):
        return document
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        return _invalid(error)


def _invalid(error: ValidationError) -> Refusal:
    first = error.errors(include_url=False, include_input=False)[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    return Refusal(Reason.INVALID_BODY, f"{param or 'The body'}: {first['msg']}.", param=param)
