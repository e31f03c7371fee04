"""Case 11: a WebSocket handshake is refused before accept, whoever asks and however it carries its key."""

from __future__ import annotations

import pytest

from tests.support.gateway import KEYS
from tests.support.raw import assert_envelope, request, say, stranger

HANDSHAKE = (
    "connection: Upgrade",
    "upgrade: websocket",
    "sec-websocket-version: 13",
    "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
)
CARRIED = {
    "no key": ((), None, 401),
    "a wrong key": ((), "sk-wrong", 401),
    "the right key": ((), KEYS["client"], 404),
    "an operator's key": ((), KEYS["operator"], 404),
    "the key in the subprotocol": ((f"sec-websocket-protocol: realtime, openai-insecure-api-key.{KEYS['client']}",), None, 401),
    "the key in the query": ((), None, 401),
    "a bad origin": (("origin: https://evil.example",), KEYS["client"], 404),
    "a bad origin and no key": (("origin: https://evil.example",), None, 401),
    "two upgrades": (("upgrade: h2c",), KEYS["client"], 404),
}


@pytest.mark.parametrize("listener", ["public", "admin"])
@pytest.mark.parametrize(
    "path", ["/v1/realtime", "/v1/nothing", "/v1/chat/completions", "/v1/models", "/console", "/admin/status"]
)
async def test_handshakes_are_refused(quay, listener, path):
    port, source = {"public": quay.port, "admin": quay.admin_port}[listener], stranger()
    for name, (lines, key, status) in CARRIED.items():
        target = f"{path}?api_key={KEYS['client']}" if "query" in name else path
        got = await say(port, request("GET", target, *HANDSHAKE, *lines, key=key), source=source)
        allowed = {status} if status == 401 else {403, 404, 405}
        assert got.status in allowed, (name, got.status)
        assert_envelope(got, got.status)
        assert "sec-websocket-accept" not in got.fields
    assert quay.calls == []


async def test_a_handshake_with_a_body_or_by_post_is_refused_and_what_follows_is_not_proxied(quay):
    hidden = request(
        "POST", "/v1/chat/completions", "content-type: application/json", key=KEYS["client"], body=b'{"model": "bare"}'
    )
    for method in ("GET", "POST"):
        raw = request(method, "/v1/chat/completions", *HANDSHAKE, key=KEYS["client"])
        got = await say(quay.port, raw + hidden)
        assert got.status in (404, 405)
    assert quay.calls == []
