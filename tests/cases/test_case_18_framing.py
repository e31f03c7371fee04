"""Case 18: length, coding and body of an answer agree, whatever the backend claims; there is one Date and one Server."""

from __future__ import annotations

import gzip
import json

import brotli
import pytest

from tests.support.client import KEY, post
from tests.support.raw import assert_envelope, dial, request, say
from tests.support.upstream import COMPLETION, DONE, LAST_CHUNK, STREAM, chunk, delta, response

TWICE = (b"date: Mon, 01 Jan 2001 00:00:00 GMT", b"server: uvicorn", b"connection: keep-alive", b"keep-alive: timeout=5")


def once(got) -> None:
    names = [name.lower() for name, _ in got.lines]
    for name in ("date", "server", "content-length", "content-type", "transfer-encoding", "x-request-id"):
        assert names.count(name) <= 1, (name, got.lines)
    assert names.count("date") == names.count("server") == 1
    assert "keep-alive" not in names
    assert not ("content-length" in names and "transfer-encoding" in names)


@pytest.mark.parametrize("accepts", [(), ("accept-encoding: gzip, br",)])
@pytest.mark.parametrize("coding", ["gzip", "br", "x-unknown", "identity"])
async def test_a_coded_answer_is_relayed_with_its_coding(quay, coding, accepts):
    body = {"gzip": gzip.compress, "br": brotli.compress}.get(coding, lambda data: data)(COMPLETION)
    quay["bare"].script = lambda call: call.answer(body, b"content-encoding: " + coding.encode(), *TWICE)
    got = await say(quay.port, post(None, *accepts, model="bare"))
    assert (got.status, got.body, got.fields["content-encoding"]) == (200, body, coding)
    assert int(got.fields["content-length"]) == len(body)
    once(got)
    assert quay["bare"].calls[0].fields["accept-encoding"] == "identity"


async def test_a_coded_stream_is_passed_on_as_it_comes(quay):
    body = gzip.compress(b"".join(STREAM))

    async def coded(call):
        await call.say(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n"
            + chunk(body[:20])
        )
        await call.say(chunk(body[20:]) + LAST_CHUNK)

    quay["bare"].script = coded
    got = await say(quay.port, post(model="bare", stream=True))
    assert (got.status, got.body, got.whole, got.fields["content-encoding"]) == (200, body, True, "gzip")
    once(got)


async def test_more_bytes_than_were_announced(quay):
    async def more(call):
        await call.say(response(COMPLETION) + b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil")

    quay["bare"].next_scripts.append(more)
    async with dial(quay.port) as client:
        for _ in range(2):  # the second must be its own answer, not what was left over from the first
            await client.send(post(model="bare"))
            got = await client.response()
            assert (got.status, got.body) == (200, COMPLETION)
            once(got)


@pytest.mark.parametrize("stream", [False, True])
async def test_fewer_bytes_than_were_announced(quay, stream):
    async def fewer(call):
        await call.say(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9000\r\n\r\n" + COMPLETION)
        call.fin()

    quay["bare"].script = fewer
    got = await say(quay.port, post(model="bare", stream=stream))
    assert_envelope(got, 502, "upstream_reset")
    assert len(quay["bare"].calls) == 1


CLAIMS = [
    b"content-length: -1",
    b"content-length: 12x",
    b"content-length: 3\r\ncontent-length: 4",
    b"content-length: 5\r\ntransfer-encoding: chunked",
    b"transfer-encoding: gzip, xx",
]


@pytest.mark.parametrize("claim", CLAIMS)
async def test_a_length_that_means_nothing(quay, claim):
    async def nonsense(call):
        await call.say(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + claim + b"\r\n\r\n" + b'{"a"' * 3)
        call.fin()

    quay["bare"].script = nonsense
    got = await say(quay.port, post(model="bare"))
    assert (got.status, got.fields["x-plimsoll-reason"]) == (502, "upstream_reset") or b'"a"' in got.body, got
    once(got)


async def test_a_length_on_a_stream(quay):
    body = b"".join(STREAM)
    quay["bare"].script = lambda call: call.answer(body, b"content-type: text/event-stream", *TWICE)
    got = await say(quay.port, post(model="bare", stream=True))
    assert (got.status, got.body, got.whole) == (200, body, True)
    once(got)


async def test_a_stream_with_a_length_that_is_too_large_is_not_made_whole(quay):
    async def cut(call):
        body = delta("a") + delta("b")
        await call.say(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 4000\r\n\r\n" + body)
        call.fin()

    quay["bare"].script = cut
    got = await say(quay.port, post(model="bare", stream=True))
    assert not got.whole and DONE not in got.body and b'"upstream_reset"' in got.body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
async def test_answers_without_a_body(quay, status, stream):
    async def empty(call):
        await call.say(b"HTTP/1.1 " + status + b"\r\netag: x\r\n\r\n")

    quay["bare"].script = empty
    async with dial(quay.port) as client:
        await client.send(post(model="bare", stream=stream))
        got = await client.response()
        assert got.status == (204 if status.startswith(b"204") else 502)
        if got.status == 204:
            assert "transfer-encoding" not in got.fields and "content-length" not in got.fields
        once(got)
        quay["bare"].script = lambda call: call.answer(COMPLETION)
        await client.send(post(model="bare"))
        assert (await client.response()).body == COMPLETION


async def test_head_tells_the_length_and_sends_nothing(quay):
    got = await say(quay.port, request("HEAD", "/v1/models", key=KEY))
    whole = await say(quay.port, request("GET", "/v1/models", key=KEY))
    assert (got.status, got.body) == (200, b"")
    assert got.fields["content-length"] == whole.fields["content-length"] == str(len(whole.body))
    once(got)


@pytest.mark.parametrize("change", ["nothing", "alias", "limit", "alias and limit", "unicode and spaces"])
async def test_an_edited_request_has_the_length_of_its_body(quay, change):
    fields: dict = {"model": "alias" if "alias" in change else "bare", "messages": [{"role": "user", "content": "hi"}]}
    if "limit" not in change:
        fields["max_tokens"] = 5
    raw = json.dumps(fields, indent=3).encode()
    if "unicode" in change:
        raw = raw.replace(b'"hi"', '"h\u00ed \\u00ed 🙂"'.encode())
    got = await say(quay.port, request("POST", "/v1/chat/completions", "content-type: application/json", key=KEY, body=raw))
    assert got.status == 200, got.body
    call = quay.calls[0]
    assert int(call.fields["content-length"]) == len(call.body) and call.peer.buffer == b""
    sent = call.json()
    assert sent["model"] == ("upstream/name" if "alias" in change else "bare")
    assert sent["messages"] == json.loads(raw)["messages"]
    if "limit" in change:
        assert sent["max_completion_tokens"] == int(got.fields["x-plimsoll-max-tokens"])
