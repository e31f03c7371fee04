"""Case 17: what a client sends to identify itself stays here; what the backend is paid with never comes out."""

from __future__ import annotations

import json

import pytest

from tests.support.client import KEY, post, within
from tests.support.gateway import KEYS
from tests.support.quay import UPSTREAM_KEY
from tests.support.raw import dial, request, say
from tests.support.upstream import delta, response

CANARY = "canary-4f1d"
LINES = [
    f"cookie: session={CANARY}", f"x-goog-api-key: {CANARY}", f"proxy-authorization: Basic {CANARY}", f"x-auth-token: {CANARY}",
    f"openai-organization: {CANARY}", f"openai-project: {CANARY}", f"x-amz-security-token: {CANARY}", f"forwarded: for={CANARY}",
    f"x-forwarded-for: {CANARY}", f"x-real-ip: {CANARY}", f"referer: https://{CANARY}/", f"user-agent: {CANARY}",
    f"te: {CANARY}", f"trailer: {CANARY}", f"keep-alive: {CANARY}", f"x-hop: {CANARY}", "connection: keep-alive, x-hop",
    f"x-plimsoll-gateway: {CANARY}", f"x-plimsoll-config: {CANARY}", f"accept: {CANARY}/x", f"accept-encoding: {CANARY}",
    f"from: {CANARY}", f"x-vllm-x: {CANARY}", f"baggage: a={CANARY}", f"x-stainless-lang: {CANARY}",
]  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/completions": {"prompt": "hi", "max_tokens": 8},
    "/v1/responses": {"input": "hi", "max_output_tokens": 8},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
}
FORM = (
    b'--xx\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFFxxxx\r\n'
    b'--xx\r\ncontent-disposition: form-data; name="model"\r\n\r\n%b\r\n--xx--\r\n'
)


def raw_for(path: str, model: str, how: str, *lines: str) -> bytes:
    """A good request whose key is carried in the header `how`."""
    carried = f"authorization: Bearer {KEY}" if how == "authorization" else f"{how}: {KEY}"
    if "audio" in path:
        return request(
            "POST", path, "content-type: multipart/form-data; boundary=xx", carried, *lines, body=FORM % model.encode()
        )
    body = json.dumps({"model": model, **BODIES[path]}).encode()
    return request("POST", path, "content-type: application/json", carried, *lines, body=body)


def backend_of(path: str) -> str:
    if "audio" in path:
        return "speech"
    return "pool" if path in ("/v1/embeddings", "/v1/rerank", "/v1/score") else "keyed"


async def told(quay) -> str:
    """Everything that the gateway writes for others to read."""
    metrics = await say(quay.port, request("GET", "/metrics", key=KEYS["scraper"]))
    pages = [
        (await say(quay.admin_port, request("GET", path, key=KEYS["operator"]))).body.decode()
        for path in (
            "/admin/status",
            "/admin/journal",
            "/admin/audit",
            "/admin/records",
            "/admin/retest",
            "/console",
            "/openapi.json",
        )
    ]
    journal = (quay.gateway.folder / "journal.jsonl").read_text()
    return "\n".join([metrics.body.decode(), journal, quay.gateway.log(), *pages])


@pytest.mark.parametrize("how", ["authorization", "x-api-key", "api-key"])
async def test_no_canary_reaches_a_backend_or_a_log(quay, how):
    paths = [*BODIES, "/v1/audio/transcriptions", "/v1/audio/translations"]
    for path in paths:
        raw = raw_for(path, backend_of(path), how, *LINES)
        got = await say(quay.port, raw.replace(b" HTTP/1.1", f"?key={CANARY} HTTP/1.1".encode(), 1))
        assert got.status == 200, (path, got.body)
        assert CANARY not in repr(got.lines)
    for path in ("/v1/chat/completions", "/v1/completions"):  # a backend without a key of its own
        assert (await say(quay.port, raw_for(path, "bare", how, *LINES))).status == 200
    assert len(quay.calls) == len(paths) + 2
    known = {"host", "accept-encoding", "x-plimsoll-gateway", "x-request-id", "content-type", "content-length", "authorization"}
    for call in quay.calls:
        sent = call.head + call.body
        assert CANARY.encode() not in sent and KEY.encode() not in sent, call.head
        assert set(call.fields) <= known | {"anthropic-version"}, call.fields
        assert call.fields["accept-encoding"] == "identity"
        assert "?" not in call.path
        keyed = call not in quay["bare"].calls
        assert call.fields.get("authorization") == (f"Bearer {UPSTREAM_KEY}" if keyed else None)
    text = await told(quay)
    assert CANARY not in text and KEY not in text and UPSTREAM_KEY not in text


async def test_routes_of_the_gateway_itself_send_nothing_on(quay):
    for method, path in (("GET", "/v1/models"), ("GET", "/v1/realtime"), ("POST", "/tokenize"), ("GET", "/v1/models/bare")):
        body = b'{"model":"bare","prompt":"x"}' if method == "POST" else b""
        await say(quay.port, request(method, path, *LINES, key=KEY, body=body))
    assert quay.calls == []
    for upstream in quay.upstreams.values():
        assert all(CANARY.encode() not in call.head + call.body for call in upstream.own)
    assert CANARY not in await told(quay)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_key_of_the_backend_stays_inside_whatever_the_backend_does(quay, stream):
    """A backend that tells the key in headers that are not its answer, breaks off, and says nonsense."""
    leak = b"x-key: " + UPSTREAM_KEY.encode()

    async def headers(call):
        names = (b"set-cookie", b"www-authenticate", b"location", b"x-request-id", b"server")
        lines = [name + b": " + UPSTREAM_KEY.encode() for name in names]
        await call.say(response(b"{}", leak, *lines, status=b"401 Unauthorized"))

    async def broken(call):
        await call.say(b"HTTP/1.1 200 OK\r\n" + leak + b"\r\nbad header " + UPSTREAM_KEY.encode() + b"\r\n\r\n")
        call.fin()

    async def redirect(call):
        await call.say(response(b"", b"location: http://x/" + UPSTREAM_KEY.encode(), status=b"302 Found"))

    async def midway(call):
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n" + leak + b"\r\n\r\n"
        await call.say(head + b"%x\r\n%b\r\n" % (len(delta("a")), delta("a")))
        call.reset()

    for script, status in ((headers, 401), (broken, 502), (redirect, 502), (midway, 200 if stream else 502)):
        quay["keyed"].next_scripts.append(script)
        async with dial(quay.port) as client:
            await client.send(post(None, "connection: close", model="keyed", stream=stream))
            text = await client.closed()
        assert int(text.split(b" ")[1]) == status, script
        assert UPSTREAM_KEY.encode() not in text, script
    await quay["keyed"].stop()
    got = await say(quay.port, post(model="keyed"))
    await quay["keyed"].start()
    assert got.status == 502 and UPSTREAM_KEY.encode() not in got.body
    await within(3, lambda: quay.gateway.is_open("keyed"), "the gate opens again")
    assert UPSTREAM_KEY not in await told(quay)
