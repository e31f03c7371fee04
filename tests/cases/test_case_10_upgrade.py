"""Case 10: an offer of h2c is declined in silence: the request is answered as the HTTP/1.1 it is, with its whole body."""

from __future__ import annotations

import json

import pytest

from tests.support.client import KEY, post
from tests.support.raw import dial, request

OFFER = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__")
OTHERS = {
    "h2c": OFFER,
    "capitals": ("Connection: upgrade, http2-settings", "Upgrade: H2C", "HTTP2-Settings: AAMAAABkAAQAAP__"),
    "tls": ("connection: upgrade", "upgrade: TLS/1.2, HTTP/1.1"),
    "h2c among others": ("connection: keep-alive, upgrade", "upgrade: foo/2, h2c"),
    "no settings": ("connection: upgrade", "upgrade: h2c"),
}


def chunked(raw: bytes, size: int = 7) -> bytes:
    """The same request with its body in chunks."""
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")]
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(body[i : i + size]), body[i : i + size]) for i in range(0, len(body), size))
    return b"\r\n".join([*lines, b"transfer-encoding: chunked"]) + b"\r\n\r\n" + pieces + b"0\r\n\r\n"


@pytest.mark.parametrize("offer", OTHERS)
@pytest.mark.parametrize("form", ["one segment", "two segments", "chunked"])
async def test_the_body_arrives_and_the_connection_goes_on(quay, offer, form):
    raw = post(None, *OTHERS[offer], model="bare")
    at = raw.index(b"\r\n\r\n") + 4
    segments = {"one segment": [raw], "two segments": [raw[:at], raw[at:]], "chunked": [chunked(raw)]}[form]
    async with dial(quay.port) as client:
        await client.send(*segments)
        got = await client.response()
        assert (got.status, got.json()["object"]) == (200, "chat.completion")
        await client.send(post(model="bare", user="second"))
        assert (await client.response()).status == 200
    first, second = quay["bare"].calls
    assert first.json()["messages"] == json.loads(raw[at:])["messages"]
    assert "user" in second.json()
    for call in (first, second):
        assert not {"upgrade", "http2-settings", "connection"} & set(call.fields)


async def test_an_offer_does_not_open_what_is_closed(quay):
    async with dial(quay.port) as client:
        await client.send(post(None, *OFFER, model="bare", key="sk-wrong"))
        assert (await client.response()).status == 401
    async with dial(quay.port) as client:  # what would be the other protocol's first bytes is another, invalid request
        await client.send(request("GET", "/v1/models", *OFFER, key=KEY) + b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert (await client.response()).status == 200
        assert (await client.response()).status == 400
    assert quay.calls == []
