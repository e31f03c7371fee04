"""Case 12: on the streaming path an error keeps its status, its type and its body."""

from __future__ import annotations

import pytest

from tests.cases.common import Outcomes, request_id, saying, slot_is_free
from tests.support.client import ask
from tests.support.upstream import (
    COMPLETION,
    DONE,
    LAST_CHUNK,
    SSE_HEAD,
    ScriptedUpstream,
    chunk,
    completion,
    delta,
    event,
    response,
)

ERROR = event({"error": {"message": "engine died", "type": "server_error", "code": 500}})
NAMED = b"event: error\n" + event({"message": "engine died", "code": 500})
HTML = b"<html><body>503 Service Temporarily Unavailable</body></html>"

STATUSES = {
    "400 JSON": (
        b"400 Bad Request",
        b"application/json",
        b'{"error":{"message":"bad","code":400}}',
        ("served", "upstream_error"),
    ),
    "503 HTML": (b"503 Service Unavailable", b"text/html; charset=utf-8", HTML, ("failed", "upstream_error")),
    "500 text": (b"500 Internal Server Error", b"text/plain", b"Internal Server Error", ("failed", "upstream_error")),
    "200 JSON": (b"200 OK", b"application/json", COMPLETION, ("served", "ok")),
    "200 JSON error": (b"200 OK", b"application/json", b'{"error": {"message": "x", "code": 500}}', ("failed", "upstream_error")),
}


@pytest.mark.parametrize("name", STATUSES)
async def test_status_type_and_body_are_kept(harbour, name):
    status, kind, body, ended = STATUSES[name]
    harbour["one"].script = saying(response(body, b"content-type: " + kind, status=status), then="none")
    outcomes = await Outcomes(harbour.gateway, "one").take()
    got = await ask(harbour.port, model="one", stream=True)
    assert (got.status, got.fields["content-type"], got.body) == (int(status[:3]), kind.decode(), body)
    assert await outcomes.since() == {ended: 1}
    harbour["one"].script = completion
    await slot_is_free(harbour.gateway)


STREAMS = {
    "the first event is an error": ERROR,
    "the first event is an error, then DONE": ERROR + DONE,
    "an error after three, then DONE": delta("a") + delta("b") + delta("c") + ERROR + DONE,
    "a named error event": delta("a") + NAMED,
    "a named error event first": NAMED,
    "a named error event without a space": delta("a") + NAMED.replace(b"event: ", b"event:"),
    "a named error event, then DONE": delta("a") + delta("b") + NAMED + DONE,
    "an error after the finish": delta("a", "stop") + ERROR + DONE,
}


@pytest.mark.parametrize("name", STREAMS)
async def test_an_error_inside_a_stream_reaches_the_client_as_it_is(harbour, name):
    stream = STREAMS[name]
    harbour["one"].script = saying(SSE_HEAD + chunk(stream) + LAST_CHUNK, then="none")
    outcomes = await Outcomes(harbour.gateway, "one").take()
    got = await ask(harbour.port, model="one", stream=True)
    assert (got.status, got.body, got.whole) == (200, stream, True)
    assert await outcomes.since() == {("failed", "upstream_error"): 1}
    harbour["one"].script = completion
    await slot_is_free(harbour.gateway)


async def test_an_error_in_each_dialect(harbour):
    anthropic = {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}
    messages = {"model": "one", "max_tokens": 5, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    failed = {"type": "response.failed", "response": {"status": "failed", "error": {"code": "server_error"}}}
    asked = {"model": "one", "stream": True, "max_output_tokens": 5, "input": "hi"}
    for path, document, told in (("/v1/messages", messages, anthropic), ("/v1/responses", asked, failed)):
        stream = b"event: %b\n" % str(told["type"]).encode() + event(told)
        harbour["one"].script = saying(SSE_HEAD + chunk(stream) + LAST_CHUNK, then="none")
        got = await ask(harbour.port, document, path=path)
        assert (got.body, got.whole) == (stream, True)
        row = await harbour.gateway.account(request_id(got))
        assert (row["outcome"], row["reason"]) == ("failed", "upstream_error")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_204_does_not_hang(harbour, stream):
    harbour["one"].script = saying(b"HTTP/1.1 204 No Content\r\n\r\n", then="none")
    got = await ask(harbour.port, model="one", stream=stream)
    assert (got.status, got.body) == (204, b"")
    harbour["one"].script = completion
    await slot_is_free(harbour.gateway)


@pytest.mark.parametrize("status", [b"301 Moved", b"302 Found", b"307 Temporary Redirect", b"308 Permanent Redirect"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_redirect_is_not_followed(harbour, stream, status):
    elsewhere = ScriptedUpstream()
    await elsewhere.start()
    location = f"location: {elsewhere.url}/v1/chat/completions".encode()
    harbour["one"].script = saying(response(b"", location, status=status), then="none")
    got = await ask(harbour.port, model="one", stream=stream)
    assert (got.status, got.code) == (502, "upstream_error")
    assert "location" not in got.fields
    assert elsewhere.peers == []
    await elsewhere.stop()
    harbour["one"].script = completion
    await slot_is_free(harbour.gateway)
