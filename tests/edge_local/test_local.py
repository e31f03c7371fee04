from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from gateway.edge.keys import FailureLimiter
from gateway.edge.local import local_app
from gateway.edge.routes import ROUTES
from gateway.edge.shell import Rules, Shell
from gateway.errors import Outcome, Reason, Refusal

from .world import World, raw, serving


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def url(world: World) -> AsyncIterator[str]:
    async with serving(local_app(world, lambda: Rules(world.keys, world.rules.cors, 100_000, 0.5), world.account)) as address:
        yield address


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url) as client:
        yield client


def bearer(world: World, who: str) -> dict[str, str]:
    return {"authorization": f"Bearer {world.tokens[who]}"}


def error(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer, whose form is checked on the way."""
    assert response.headers["content-type"] == "application/json"
    document = response.json()
    assert set(document["error"]) == {"message", "type", "param", "code"}
    assert response.headers["x-plimsoll-reason"] == document["error"]["code"]
    assert response.headers["x-request-id"].startswith("req-")
    assert [len(response.headers.get_list(name)) for name in ("date", "server", "x-request-id")] == [1, 1, 1]
    return dict(document["error"])


ALLOWED = {
    "/v1/models": {"acme-1"}, "/v1/models/tiny": {"acme-1"}, "/tokenize": {"acme-1"}, "/detokenize": {"acme-1"},
    "/v1/messages/count_tokens": {"acme-1"}, "/health/live": {"kube", "prom", "ops"}, "/health/ready": {"kube", "prom", "ops"},
    "/metrics": {"prom", "ops"},
}  # fmt: skip
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND")


async def ask(app: Shell, method: str, path: str, headers: dict[str, str]) -> int:
    """One request straight into the application, without a socket; its status."""
    sent: list[Any] = []
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"", "client": ("::1", 1),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return int(sent[0]["status"])


async def test_every_route_method_and_role(world: World) -> None:
    """401 without a key whatever is asked; with one, exactly the table answers and nothing else does."""
    app = local_app(world, lambda: Rules(world.keys), world.account, FailureLimiter(burst=10_000))
    paths = [*(path.decode() for path in ROUTES), "/v1/models/tiny", "/", "/docs", "/invocations", "/admin/status", "/console"]
    for path in paths:
        route = ROUTES.get(path.encode())
        answered = ("GET", "HEAD") if path == "/v1/models/tiny" or (route and route.method == "GET") else ("POST",)
        for method in METHODS:
            assert await ask(app, method, path, {}) == 401, (method, path)
            for who in ("acme-1", "ops", "prom", "kube"):
                status = await ask(app, method, path, bearer(world, who))
                if who in ALLOWED.get(path, ()) and method in answered:
                    assert status in (200, 400), (method, path, who, status)
                else:
                    assert status in (403, 404, 405), (method, path, who, status)


TARGETS = (
    b"/%76%31/models", b"/v1/..%2fmetrics", b"/v1%2fmodels", b"/v1/%2e%2e/metrics", b"/health/../v1/models",
    b"/health%2f..%2fv1/models", b"/v1/models;x", b"/v1\\models", b"/%256detrics", b"/v1/models%00", b"//v1/models",
    b"/v1/models/", b"/V1/models", b"/./metrics", b"/metrics/", b"/metrics%20", b"/v1/./models", b"/%6detrics",
    b"/v1//models", b"*", b"/METRICS",
)  # fmt: skip


async def test_a_path_is_its_bytes(world: World, url: str) -> None:
    """Encodings, dots and doubled slashes open nothing: not without a key, nor with one that may read everything here."""
    for target in TARGETS:
        for method in (b"GET", b"HEAD", b"TRACE", b"PROPFIND"):
            answer = await raw(url, method + b" " + target + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert answer.split(b" ", 2)[1] in (b"400", b"401", b"404"), (method, target)
        for who in ("ops", "acme-1"):
            key = world.tokens[who].encode()
            head = b"GET " + target + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer " + key + b"\r\n\r\n"
            answer = await raw(url, head)
            assert answer.split(b" ", 2)[1] in (b"400", b"403", b"404"), (who, target)
            assert b"Traceback" not in answer and b"location:" not in answer.lower()


async def test_a_query_is_no_part_of_the_path(world: World, http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/models?x=1&y=%2f", headers=bearer(world, "acme-1"))).status_code == 200


async def test_every_listed_model_can_be_fetched(world: World, http: httpx.AsyncClient) -> None:
    listed = (await http.get("/v1/models", headers=bearer(world, "acme-1"))).json()
    assert listed["object"] == "list" and [m["id"] for m in listed["data"]] == ["tiny", "org/name"]
    assert listed["data"][0]["max_input_tokens"] == 2048 and listed["data"][0]["max_output_tokens"] == 512
    for path in ("/v1/models/tiny", "/v1/models/org/name", "/v1/models/org%2Fname", "/v1/models/%74iny"):
        assert (await http.get(path, headers=bearer(world, "acme-1"))).json() in listed["data"]


async def test_a_forbidden_model_and_an_unknown_one_are_the_same_bytes(world: World, http: httpx.AsyncClient) -> None:
    answers = [
        await http.get(f"/v1/models/{name}", headers=bearer(world, "zeta-1"))
        for name in ("org/name", "no-such", "%zz", "%ff", "tiny%2F")
    ]
    assert {answer.status_code for answer in answers} == {404}
    assert len({answer.content for answer in answers}) == 1
    assert error(answers[0])["code"] == "model_not_found"


async def test_token_routes_answer_for_the_callers_models_only(world: World, http: httpx.AsyncClient) -> None:
    body = {"model": "org/name", "prompt": "hello"}
    assert (await http.post("/tokenize", json=body, headers=bearer(world, "acme-1"))).json() == {
        "parser": "tokenize",
        "model": "org/name",
    }
    assert error(await http.post("/tokenize", json=body, headers=bearer(world, "zeta-1")))["code"] == "model_not_found"


async def test_errors_speak_the_dialect_of_their_route(world: World, http: httpx.AsyncClient) -> None:
    for headers in ({}, bearer(world, "ops"), bearer(world, "acme-1")):
        document = (await http.post("/v1/messages/count_tokens", content=b"{", headers=headers)).json()
        assert document["type"] == "error" and document["error"]["code"] in ("invalid_api_key", "not_permitted", "invalid_body")


async def test_a_bad_body_is_a_400(world: World, http: httpx.AsyncClient) -> None:
    headers = {**bearer(world, "acme-1"), "content-type": "application/json"}
    bodies = (b"", b"{", b"[]", b"null", b'{"a":1,"a":2}', b"[" * 20_000, b"\xff", b'{"model":"\\ud800"}', b"\xef\xbb\xbf{}")
    for body in bodies:
        response = await http.post("/tokenize", content=body, headers=headers)
        assert (response.status_code, error(response)["code"]) == (400, "invalid_body"), body


async def test_bodies_have_bounds(world: World, http: httpx.AsyncClient, url: str) -> None:
    headers = {**bearer(world, "acme-1"), "content-type": "application/json"}
    large = await http.post("/tokenize", content=b" " * 200_000, headers=headers)
    assert (large.status_code, error(large)["code"]) == (413, "body_too_large")

    async def dripped() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b" " * 10_000

    chunked = await http.post("/tokenize", content=dripped(), headers=headers)
    assert chunked.status_code == 413
    unsent = await raw(url, _post(world, b"content-length: 10", b""))
    assert unsent.startswith(b"HTTP/1.1 408 ")
    kind = await http.post("/tokenize", content=b"x", headers={**headers, "content-encoding": "snappy"})
    assert (kind.status_code, error(kind)["code"]) == (415, "unsupported_encoding")


def _post(world: World, line: bytes, body: bytes) -> bytes:
    key = world.tokens["acme-1"].encode()
    return (
        b"POST /tokenize HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer "
        + key
        + b"\r\n"
        + line
        + b"\r\n\r\n"
        + body
    )


async def test_health_tells_why_it_is_not_ready(world: World, http: httpx.AsyncClient) -> None:
    assert (await http.get("/health/ready", headers=bearer(world, "kube"))).status_code == 200
    world.not_ready = Refusal(Reason.DRAINING, "The gateway is shutting down.")
    response = await http.get("/health/ready", headers=bearer(world, "kube"))
    assert (response.status_code, error(response)["code"]) == (503, "draining")
    assert (await http.get("/health/live", headers=bearer(world, "kube"))).status_code == 200


async def test_metrics_are_an_exposition(world: World, http: httpx.AsyncClient) -> None:
    response = await http.get("/metrics", headers=bearer(world, "prom"))
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "plimsoll_requests" in {family.name for family in text_string_to_metric_families(response.text)}


async def test_an_unexpected_exception_says_nothing_of_itself(world: World, http: httpx.AsyncClient) -> None:
    world.broken = ValueError("secret path /etc/x")
    response = await http.get("/v1/models", headers=bearer(world, "acme-1"))
    assert (response.status_code, error(response)["code"]) == (500, "internal_error")
    assert b"secret" not in response.content and b"ValueError" not in response.content
    assert world.accounted[-1].outcome is Outcome.FAILED
    world.broken = None
    assert (await http.get("/v1/models", headers=bearer(world, "acme-1"))).status_code == 200


async def test_websockets_are_refused_before_accept(world: World, url: str) -> None:
    for path in ("/v1/realtime", "/v1/chat/completions", "/", "/health/live"):
        for headers in ({}, {"authorization": "Bearer wrong"}, bearer(world, "acme-1"), bearer(world, "ops")):
            with pytest.raises(InvalidStatus) as caught:
                async with connect(url.replace("http", "ws") + path, additional_headers=headers):
                    raise AssertionError("accepted")
            assert caught.value.response.status_code == 403


ORIGIN = {"origin": "https://chat.example"}
ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


async def test_preflight_needs_no_key_and_opens_nothing(http: httpx.AsyncClient) -> None:
    response = await http.options("/v1/models", headers={**ORIGIN, **ASKS})
    assert response.status_code == 204 and response.content == b""
    assert response.headers["access-control-allow-origin"] == "https://chat.example"
    assert "authorization" in response.headers["access-control-allow-headers"]
    for headers in (ASKS, ORIGIN, {}, {**ASKS, "origin": "https://evil.example"}):
        other = await http.options("/v1/models", headers=headers)
        assert other.status_code == 401, headers
        assert "access-control-allow-methods" not in other.headers


async def test_browsers_may_read_errors_too(world: World, http: httpx.AsyncClient) -> None:
    world.broken = ValueError()
    for headers, status in (({}, 401), (bearer(world, "acme-1"), 500)):
        response = await http.get("/v1/models", headers={**headers, **ORIGIN})
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == "https://chat.example"
        assert "x-request-id" in response.headers["access-control-expose-headers"]
    stranger = await http.get("/v1/models", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in stranger.headers


async def test_many_failures_from_one_address_are_slowed_and_a_good_key_still_passes(world: World) -> None:
    app = local_app(world, lambda: world.rules, world.account, FailureLimiter(rate_per_s=0.001, burst=20))
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as http:
        answers = [await http.get("/metrics", headers={"authorization": f"Bearer guess-{n}"}) for n in range(25)]
        assert [answer.status_code for answer in answers] == [401] * 20 + [429] * 5
        assert error(answers[-1])["code"] == "rate_limited" and int(answers[-1].headers["retry-after"]) >= 1
        assert (await http.get("/metrics", headers=bearer(world, "prom"))).status_code == 200


async def test_what_is_accounted(world: World, http: httpx.AsyncClient) -> None:
    await http.get("/metrics", headers=bearer(world, "prom"))
    await http.get("/health/live", headers=bearer(world, "kube"))
    assert world.accounted == []  # a scrape or probe that went well says nothing about the service
    await http.get("/metrics", headers={"authorization": "Bearer canary-key"})
    await http.get("/v1/models", headers=bearer(world, "acme-1"))
    denied, listed = world.accounted
    assert (denied.reason, denied.status, denied.key_id, denied.peer) == (Reason.INVALID_API_KEY, 401, None, "127.0.0.1")
    assert (listed.route, listed.outcome, listed.tenant, listed.key_id) == ("models", Outcome.SERVED, "acme", "acme-1")
    assert "canary" not in json.dumps(world.journal.recent())


async def test_a_removed_key_stops_at_once(world: World, http: httpx.AsyncClient) -> None:
    headers = bearer(world, "acme-1")
    assert (await http.get("/v1/models", headers=headers)).status_code == 200
    world.add_keys()
    assert (await http.get("/v1/models", headers=headers)).status_code == 401


async def test_a_client_that_leaves_midway_is_a_cancel(world: World, url: str) -> None:
    host, port = httpx.URL(url).host, httpx.URL(url).port
    _, writer = await asyncio.open_connection(host, port)
    writer.write(_post(world, b"content-length: 10", b"{"))
    await writer.drain()
    writer.transport.abort()
    async with asyncio.timeout(5):
        while not world.accounted:
            await asyncio.sleep(0.01)
    assert (world.accounted[0].outcome, world.accounted[0].status) == (Outcome.CANCELLED, 499)
