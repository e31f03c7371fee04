"""The ASGI application of one simulated server.

Owns the route table and the path of a request: identity middleware (the very class that runs in vLLM), key check, faults,
handler, errors. Promises: an error before the answer is vLLM's envelope; one inside a stream is an error event, followed by
[DONE] where vLLM sends it. Talks to the handlers.
"""

import secrets
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.evidence.attest import GENERATION_PATHS, IdentityMiddleware
from gateway.simulator import identity, ops
from gateway.simulator.audio import transcribe
from gateway.simulator.chat import DONE, chat, data
from gateway.simulator.completions import completions
from gateway.simulator.driver import ClientGoneError, EngineBusyError, EngineDeadError
from gateway.simulator.errors import ApiError
from gateway.simulator.exchange import CONNECTION_KEY, Exchange, Receive, Scope, Send
from gateway.simulator.faults import FaultError, FaultKind, parse_fault
from gateway.simulator.messages import count_tokens, messages
from gateway.simulator.pooling import embeddings, rerank, score
from gateway.simulator.responses import responses
from gateway.simulator.simulation import SeenRequest, Simulation

Handler = Callable[[Simulation, Exchange], Awaitable[None]]
FAULT_HEADER = "x-sim-fault"
_GUARDED = ("/v1", "/v2", "/inference", "/cohere")
_WIRE_FIRST = (FaultKind.RESET, FaultKind.FIN, FaultKind.STALL, FaultKind.STREAM_ERROR)

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", chat),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/responses", responses),
    ("POST", "/v1/messages", messages),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("POST", "/v1/embeddings", embeddings),
    ("POST", "/v1/score", score),
    ("POST", "/v1/rerank", rerank),
    ("POST", "/v1/audio/transcriptions", transcribe),
    ("POST", "/v1/audio/translations", transcribe),
    ("GET", "/v1/models", ops.models),
    ("POST", "/tokenize", ops.tokenize),
    ("POST", "/detokenize", ops.detokenize),
    ("GET", "/health", ops.health),
    ("GET", "/ping", ops.health),
    ("POST", "/ping", ops.health),
    ("GET", "/version", ops.version),
    ("GET", "/metrics", ops.metrics),
)


class _Endpoint:
    """One route as an ASGI application."""

    def __init__(self, simulation: Simulation, handler: Handler) -> None:
        self._simulation = simulation
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        simulation = self._simulation
        exchange = Exchange(scope, receive, send, simulation.driver, simulation.config.sse_keep_alive_s)
        try:
            await exchange.read_body()
            simulation.requests.append(_seen(exchange))
            await _strike(simulation, exchange)
            await self._handler(simulation, exchange)
        except ClientGoneError:
            return
        except ApiError as error:
            await _answer_error(exchange, error)
        except EngineBusyError as error:
            await _answer_error(exchange, ApiError(503, str(error)))
        except EngineDeadError as error:
            await _answer_error(exchange, ApiError(500, str(error)))
        finally:
            exchange.close()


def _seen(exchange: Exchange) -> SeenRequest:
    scope = exchange.scope
    headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
    connection: Any = (scope.get("extensions") or {}).get(CONNECTION_KEY)
    number = connection.number if connection is not None else 0
    return SeenRequest(scope["method"], exchange.path, headers, exchange.body, number, exchange.started_at)


async def _strike(simulation: Simulation, exchange: Exchange) -> None:
    """Choose the request's fault, and make it so when it comes before any answer."""
    if exchange.path not in GENERATION_PATHS:
        return
    header = exchange.header(FAULT_HEADER) if simulation.config.allow_control else None
    try:
        fault = exchange.fault = parse_fault(header) if header else simulation.faults.draw()
    except FaultError as error:
        raise ApiError(400, str(error)) from error
    if fault is None:
        return
    if fault.kind is FaultKind.ERROR_500:
        raise ApiError(500, "Internal server error")
    if fault.kind is FaultKind.BUSY_503:
        raise ApiError(503, "The server is overloaded: too many requests are queued.")
    if fault.kind in _WIRE_FIRST and fault.after is None:
        await exchange.break_off()


async def _answer_error(exchange: Exchange, error: ApiError) -> None:
    """The envelope, or the error event of a stream that has begun."""
    anthropic = exchange.path.startswith("/v1/messages")
    try:
        if not exchange.streaming:
            await exchange.json(error.status, error.anthropic_body() if anthropic else error.body())
            return
        if anthropic:
            await exchange.write(b"event: error\ndata: " + orjson.dumps(error.anthropic_body()) + b"\n\n")
        elif exchange.path.startswith("/v1/responses"):
            event = {"type": "error", "code": str(error.status), "message": error.message, "param": error.param}
            await exchange.write(b"event: error\ndata: " + orjson.dumps(event) + b"\n\n")
        else:
            await exchange.write(data(error.body()))
            await exchange.write(DONE)
        await exchange.end_stream()
    except ClientGoneError:
        return


class KeyMiddleware:
    """vLLM's `--api-key`: guards the API paths only."""

    def __init__(self, app: Callable[..., Awaitable[None]], keys: tuple[str, ...]) -> None:
        self._app = app
        self._expected = [f"Bearer {key}".encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """401 on a guarded path without the key."""
        if scope["type"] == "http" and self._expected and str(scope["path"]).startswith(_GUARDED):
            shown = next((value for key, value in scope["headers"] if key == b"authorization"), b"")
            if not any(secrets.compare_digest(shown, expected) for expected in self._expected):
                await _unauthorized(send)
                return
        await self._app(scope, receive, send)


async def _unauthorized(send: Send) -> None:
    raw = b'{"error":"Unauthorized"}'
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(raw))]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": raw})


async def _no_route(request: Request, error: Exception) -> Response:
    """An unknown path (404) and a wrong method (405) come from the framework, without the envelope."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    headers = error.headers if isinstance(error, HTTPException) else None
    return JSONResponse({"detail": HTTPStatus(status).phrase}, status, headers)


def build_app(simulation: Simulation, extra: tuple[tuple[str, str, Handler], ...] = ()) -> Starlette:
    """The whole application; `extra` are the control routes."""
    config = simulation.config
    marks = {"versions": identity.versions(config), "hardware": identity.hardware(config)}
    app = Starlette(
        routes=[Route(path, _Endpoint(simulation, handler), methods=[method]) for method, path, handler in (*ROUTES, *extra)],
        exception_handlers={404: _no_route, 405: _no_route},
        middleware=[Middleware(IdentityMiddleware, **marks), Middleware(KeyMiddleware, keys=config.api_keys)],
    )
    app.state.vllm_config = identity.vllm_config(config, simulation.model)
    app.state.args = identity.server_args(config)
    app.state.engine_client = simulation.driver
    return app
