"""Case 35: a preflight is answered without a key and opens nothing; errors can be read by the pages they are meant for."""

from __future__ import annotations

import pytest

from tests.support.client import KEY, open_stream, post
from tests.support.gateway import KEYS
from tests.support.quay import ORIGIN
from tests.support.raw import assert_envelope, dial, request, say, stranger

ASKS = (f"origin: {ORIGIN}", "access-control-request-method: POST", "access-control-request-headers: authorization, content-type")
EVIL = ("https://evil.example", "https://app.example.evil.example", "http://app.example", "https://app.example:444", "null", "",
        "https://APP.example", f"{ORIGIN}/")  # fmt: skip


async def test_a_preflight_is_answered_and_nothing_happens(quay):
    for path in ("/v1/chat/completions", "/v1/models", "/v1/messages", "/tokenize", "/v1/audio/transcriptions"):
        got = await say(quay.port, request("OPTIONS", path, *ASKS), source=stranger())
        assert got.status in (200, 204) and got.body == b""
        assert got.fields["access-control-allow-origin"] == ORIGIN
        assert "POST" in got.fields["access-control-allow-methods"]
        allowed = got.fields["access-control-allow-headers"].lower().replace(" ", "").split(",")
        assert {"authorization", "content-type", "x-api-key", "anthropic-version"} <= set(allowed)
        assert "origin" in got.fields["vary"].lower()
        assert got.fields["x-request-id"]
        assert "access-control-allow-credentials" not in got.fields
    assert quay.calls == []
    assert await quay.gateway.in_flight() == 0


@pytest.mark.parametrize("origin", EVIL)
async def test_an_origin_that_is_not_allowed_gets_nothing(quay, origin):
    lines = (f"origin: {origin}", *ASKS[1:])
    got = await say(quay.port, request("OPTIONS", "/v1/chat/completions", *lines), source=stranger())
    assert got.status == 401
    for answer in (
        got,
        await say(quay.port, post(None, lines[0], model="bare")),
        await say(quay.port, post(None, lines[0], model="x")),
    ):
        assert not [name for name in answer.fields if name.startswith("access-control")]


async def test_options_opens_nothing(quay):
    for lines in ((), (f"origin: {ORIGIN}",), (ASKS[1],)):
        for path in ("/metrics", "/v1/models", "/v1/chat/completions", "/admin/status"):
            assert (await say(quay.port, request("OPTIONS", path, *lines), source=stranger())).status == 401
            got = await say(quay.port, request("OPTIONS", path, *lines, key=KEY))
            assert got.status in (403, 404, 405)
    got = await say(quay.port, request("GET", "/metrics", *ASKS), source=stranger())
    assert got.status == 401
    assert (await say(quay.port, request("OPTIONS", "/metrics", *ASKS, key=KEYS["scraper"]))).body == b""
    assert quay.calls == []


async def test_errors_and_answers_can_be_read_by_the_page(quay):
    origin = f"origin: {ORIGIN}"

    async def fails(call):
        await call.answer(b"oh", status=b"500 Internal Server Error")

    async def gone(call):
        call.reset()

    wanted = [
        (post(None, origin, key="sk-wrong"), 401), (post(None, origin, path="/no"), 404), (post(None, origin, model="no"), 404),
        (post(b"{", origin), 400), (post(None, origin, model="bare", max_tokens=100_000), 400),
        (post(None, origin, model="bare", key="sk-poor-8", max_tokens=500, n=3), 429),
        (post(None, origin, "x-a: " + "b" * 70_000), 431), (request("GET", "/v1/chat/completions", origin, key=KEY), 405),
        (request("GET", "/v1/models/no", origin, key=KEY), 404), (request("GET", "/metrics", origin, key=KEY), 403),
        (request("GET", "/v1/models", origin, key=KEY), 200), (post(None, origin, model="bare"), 200),
    ]  # fmt: skip
    answers = [(await say(quay.port, raw, source=stranger() if status == 401 else None), status) for raw, status in wanted]
    for script, status in ((fails, 500), (gone, 502)):
        quay["bare"].next_scripts.append(script)
        answers.append((await say(quay.port, post(None, origin, model="bare")), status))
    for got, status in answers:
        assert got.status == status, got.body
        if status != 431:  # too large to be read: nobody knows what was in it
            assert got.fields["access-control-allow-origin"] == ORIGIN, status
            exposed = got.fields["access-control-expose-headers"].lower()
            assert "x-request-id" in exposed and "retry-after" in exposed
            assert [name.lower() for name, _ in got.lines].count("access-control-allow-origin") == 1
    async with open_stream(quay.port, None, origin, model="bare") as stream:
        assert b"access-control-allow-origin: https://app.example" in stream.head


async def test_what_follows_a_preflight_on_its_connection_is_answered(quay):
    ask = request("OPTIONS", "/v1/chat/completions", *ASKS)
    async with dial(quay.port) as client:
        await client.send(ask + ask + post(model="bare") + ask)
        assert [(await client.response()).status for _ in range(4)] == [204, 204, 200, 204]
    async with dial(quay.port) as client:
        await client.send(ask * 400)
        assert [(await client.response()).status for _ in range(400)] == [204] * 400
    async with dial(quay.port) as client:
        await client.send(request("OPTIONS", "/v1/models", *ASKS, "connection: close") + post(model="bare"))
        assert (await client.response()).status == 204
        assert await client.closed() == b""
    async with dial(quay.port) as client:
        await client.send(ask + request("GET", "/v1/models", key="sk-wrong"))
        assert (await client.response()).status == 204
        assert_envelope(await client.response(), 401)
    assert len(quay.calls) == 1


async def test_the_operators_listener_answers_no_other_origin(quay):
    """Pages of the origins that callers come from have no business there."""
    for raw in (
        request("OPTIONS", "/admin/reload", f"origin: {ORIGIN}", "access-control-request-method: POST"),
        request("GET", "/admin/status", f"origin: {ORIGIN}", key=KEYS["operator"]),
    ):
        got = await say(quay.admin_port, raw)
        assert got.status == (401 if raw.startswith(b"OPTIONS") else 200)
        assert not [name for name in got.fields if name.startswith("access-control-")], got.fields
