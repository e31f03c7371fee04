"""Case 06: the key is checked for every path, and a path is compared as the bytes that came, so that no spelling opens it."""

from __future__ import annotations

import pytest

from tests.support.gateway import KEYS
from tests.support.raw import assert_envelope, dial, request, say, stranger

WRITTEN = [
    "/%76%31/models", "/v1/..%2fmetrics", "/v1%2fmodels", "/v1/%2e%2e/metrics", "/health/../v1/models",
    "/health%2f..%2fv1/models", "/v1/models;x", "/v1\\models", "/%256detrics", "/v1/models%00", "/tokenize", "/invocations",
    "/load", "/version", "/docs", "/openapi.json", "/no/such/path",
]  # fmt: skip
SPELLINGS = [
    "/", "//", "*", "//v1/models", "/v1//models", "/v1/models/", "/v1/models//", "/v1/./models", "/v1/x/../models",
    "/./metrics", "/metrics/", "/metrics/.", "/metrics//", "/metrics%2f", "/metrics%", "/metrics%zz", "/metrics%c0%ae",
    "/%6Detrics", "/%6detrics/..%2fv1", "/METRICS", "/Metrics", "/V1/models", "/V1/CHAT/COMPLETIONS",
    "/v1/chat/completions/", "/v1/chat/completions%20", "/v1/chat/completions;a=b", "/v1/chat/./completions",
    "/v1/chat%2Fcompletions", "/v1/chat/completions%00", "/v1/chat/completions%0d%0a", "/v1/chat/completions%23",
    "/v1/chat/completions%3fx", "http://g/v1/models", "http://g/metrics", "HTTP://127.0.0.1/v1/chat/completions",
    "http://g:80//metrics", "https://user:word@g/metrics", "file:///etc/passwd", "/v1/completions/../../metrics",
    "/..;/metrics", "/v1/..;/metrics", "/.well-known/x", "/health", "/health/live/", "/health/live/../../metrics",
    "/health/live%2f..%2f..%2fmetrics", "/admin", "/admin/", "/admin/status", "/admin/status/", "/admin/../metrics",
    "/admin%2fstatus", "/ADMIN/status", "/console", "/console/", "/console/../admin/status", "/admin/backends/keyed/Drain",
    "/admin/backends/../status", "/admin/backends//drain", "/pooling", "/classify", "/v1/embeddings/",
    "/reset_prefix_cache", "/sleep", "/wake_up", "/server_info", "/collective_rpc", "/is_sleeping", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter", "/ping", "/metrics?/v1/models", "/plimsoll/identity", "/plimsoll/tokenizer",
]  # fmt: skip
BYTES = [b"/v1/models\x00", b"/v1/\xffmodels", b"/v1/mod\xc3\xa9ls", b"/v1/models\t", b"/metrics\x0b", b"/v1/models#x", b"/\x7f"]
METHODS = ["GET", "HEAD", "POST", "TRACE", "PROPFIND", "OPTIONS", "PUT", "DELETE"]


def listeners(quay):
    return {"public": quay.port, "admin": quay.admin_port}


@pytest.mark.parametrize("listener", ["public", "admin"])
async def test_nothing_answers_without_a_key(quay, listener):
    port, source = listeners(quay)[listener], stranger()
    for target in [*WRITTEN, *SPELLINGS, *BYTES]:
        methods = METHODS if target in WRITTEN else ["GET", "POST"]
        for number, method in enumerate(methods):
            got = await say(port, request(method, target), source=f"{source[:-1]}{number}")
            assert got.status in (400, 401), (method, target, got.status)
            if method == "HEAD":
                assert got.body == b"", target
            else:
                assert_envelope(got, got.status)
    assert quay.calls == []


@pytest.mark.parametrize("listener", ["public", "admin"])
@pytest.mark.parametrize("role", ["client", "operator", "scraper"])
async def test_no_spelling_opens_a_route_for_a_key_that_is_known(quay, listener, role):
    port = listeners(quay)[listener]
    exact = {"public": {"/tokenize"}, "admin": {"/openapi.json", "/admin/status", "/console"}}[listener]
    wanted = {"/metrics?/v1/models"} if (listener, role) != ("admin", "client") else set()
    for target in [*WRITTEN, *SPELLINGS, *BYTES]:
        if target in exact | wanted:
            continue
        for method in ("GET", "POST"):
            got = await say(port, request(method, target, key=KEYS[role]))
            assert got.status in (400, 403, 404, 405), (role, method, target, got.status, got.body[:100])
            assert_envelope(got, got.status)
    assert quay.calls == []


@pytest.mark.parametrize("segment", [1, 7, 10_000])
async def test_a_path_is_the_same_however_it_is_cut(quay, segment):
    for target, status in (("/v1/models", 200), ("/v1/models/", 404), ("/%76%31/models", 404), ("//v1/models", 404)):
        raw = request("GET", target, key=KEYS["client"])
        got = await say(quay.port, *[raw[i : i + segment] for i in range(0, len(raw), segment)])
        assert got.status == status, target


@pytest.mark.parametrize("listener", ["public", "admin"])
async def test_an_endless_target_is_refused(quay, listener):
    raw = request("GET", "/" + "a" * 300_000)
    assert (await say(listeners(quay)[listener], raw, source=stranger())).status in (400, 414, 431)


async def test_connect_and_made_up_methods_and_versions(quay):
    for raw in (
        b"CONNECT 127.0.0.1:80 HTTP/1.1\r\nhost: g\r\n\r\n",
        b"GET /v1/models\r\n\r\n",
        b"GET  /v1/models HTTP/1.1\r\nhost: g\r\n\r\n",
        b"get /v1/models HTTP/1.1\r\nhost: g\r\n\r\n",
        b"WORD /v1/models HTTP/1.1\r\nhost: g\r\n\r\n",
        b"\r\n\r\nGET",
        b"\x00" * 40,
        b"GET /v1/models HTTP/9.9\r\nhost: g\r\n\r\n",
        b"GET /v1/models HTTP/2.0\r\nhost: g\r\n\r\n",
        b"GET /v1/models ICE/1.0\r\n\r\n",
    ):
        for port in listeners(quay).values():
            async with dial(port, stranger()) as client:
                await client.send(raw)
                client.writer.write_eof()
                text = await client.closed()
                assert text == b"" or text.startswith((b"HTTP/1.1 400", b"HTTP/1.1 401")), (raw, text[:100])
    assert quay.calls == []
