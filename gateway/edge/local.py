"""The routes that the gateway answers by itself on its public listener.

Owns GET /v1/models and /v1/models/{id}, POST /tokenize, /detokenize and /v1/messages/count_tokens, the two health checks and
/metrics. Promises: a client learns of the models of its tenant and of no other; an id it may not use and one that does not
exist give the same bytes. Talks to `operations.Gateway`; `shell` has checked key, path, role and method before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import unquote_to_bytes

import orjson
from starlette.responses import Response

from gateway.edge import strict_json
from gateway.edge.body import model_not_found
from gateway.edge.keys import FailureLimiter
from gateway.edge.operations import Gateway, ModelCard
from gateway.edge.routes import MODEL, MODEL_PREFIX, ROUTES, Route
from gateway.edge.shell import Call, Endpoint, Handler, Rules, Shell
from gateway.errors import Reason, Refusal
from gateway.observe.exchange import Exchange
from gateway.observe.exposition import CONTENT_TYPE

_COUNTING = frozenset({"tokenize", "detokenize", "count_tokens"})


def local_app(
    gateway: Gateway, rules: Callable[[], Rules], account: Callable[[Exchange], None], limiter: FailureLimiter | None = None
) -> Shell:
    """The ASGI application of the public listener, for all that does not take the data path.

    `limiter` is the one the data path uses, so that an address has one allowance.
    """
    handlers = _handlers(gateway)
    endpoints = {path: _endpoint(route, handlers) for path, route in ROUTES.items()}
    model = _endpoint(MODEL, handlers)

    def find(path: bytes) -> tuple[Endpoint, bytes] | None:
        endpoint = endpoints.get(path)
        if endpoint is not None:
            return endpoint, b""
        if path.startswith(MODEL_PREFIX) and len(path) > len(MODEL_PREFIX):
            return model, path[len(MODEL_PREFIX) :]
        return None

    return Shell(find, rules, account=account, limiter=limiter)


def _endpoint(route: Route, handlers: dict[str, Handler]) -> Endpoint:
    return Endpoint(route.name, {route.method: handlers.get(route.name, _data_path_only)}, route.roles, route.dialect)


async def _data_path_only(call: Call) -> Refusal:
    """A proxied route with its right method belongs to the data path; here it can only be refused."""
    return Refusal(Reason.UNKNOWN_ROUTE, "This listener does not proxy requests.")


def _handlers(gateway: Gateway) -> dict[str, Handler]:
    async def models(call: Call) -> Response:
        cards = gateway.models(_tenant(call))
        return json_response({"object": "list", "data": [card_json(card) for card in cards]})

    async def model(call: Call) -> Response | Refusal:
        name = decoded(call.tail)
        for card in gateway.models(_tenant(call)):
            if card.id == name:
                return json_response(card_json(card))
        return model_not_found()

    async def live(call: Call) -> Response:
        return json_response({"status": "live"})

    async def ready(call: Call) -> Response | Refusal:
        refusal = gateway.ready()
        return json_response({"status": "ready"}) if refusal is None else refusal

    async def metrics(call: Call) -> Response:
        return Response(await gateway.metrics(), headers={"content-type": CONTENT_TYPE})

    counting = {route.name: _counting(gateway, route) for route in ROUTES.values() if route.parser in _COUNTING}
    return {"models": models, "model": model, "live": live, "ready": ready, "metrics": metrics, **counting}


def _counting(gateway: Gateway, route: Route) -> Handler:
    """A handler of one of the routes about tokens."""

    async def handler(call: Call) -> Response | Refusal:
        raw = await call.body()
        if isinstance(raw, Refusal):
            return raw
        kind = call.request.headers.get("content-type")
        result = await gateway.count(route, _tenant(call), None if kind is None else kind.encode("latin-1"), raw)
        return result if isinstance(result, Refusal) else json_response(result)

    return handler


async def json_body(call: Call) -> dict[str, Any] | Refusal:
    """The body as a checked JSON object: no duplicate keys, bounded depth."""
    kind = call.request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        return Refusal(Reason.UNSUPPORTED_ENCODING, "The body must be application/json.")
    raw = await call.body()
    if isinstance(raw, Refusal):
        return raw
    read = strict_json.read(raw)
    return read if isinstance(read, Refusal) else read.document


def card_json(card: ModelCard) -> dict[str, Any]:
    """A model in the shape of the OpenAI API, with the largest sizes that were measured."""
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "plimsoll",
        "max_input_tokens": card.max_input_tokens,
        "max_output_tokens": card.max_output_tokens,
    }


def json_response(document: Any, status: int = 200) -> Response:
    """A document as an answer."""
    return Response(orjson.dumps(document), status, {"content-type": "application/json"})


def _tenant(call: Call) -> str:
    """The tenant of a client key; the routes that ask are open to clients alone."""
    tenant = call.principal.tenant
    if tenant is None:
        raise RuntimeError("a route for clients was opened to a key without a tenant")
    return tenant


def decoded(tail: bytes) -> str | None:
    """A percent-encoded id as text, decoded once; None where it is not one."""
    parts = tail.split(b"%")[1:]
    if not all(len(part) >= 2 and all(byte in b"0123456789abcdefABCDEF" for byte in part[:2]) for part in parts):
        return None
    try:
        return unquote_to_bytes(tail).decode("utf-8")
    except UnicodeDecodeError:
        return None
