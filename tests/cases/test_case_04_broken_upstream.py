"""Case 04: a broken backend is never turned into a finished answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest

from tests.cases.common import Outcomes, saying, slot_is_free
from tests.support.client import ask, open_stream
from tests.support.upstream import (
    COMPLETION,
    DONE,
    LAST_CHUNK,
    SSE_HEAD,
    Call,
    chunk,
    completion,
    delta,
    event,
    response,
    usage,
)


class Broken(NamedTuple):
    segments: tuple[bytes, ...]
    then: str
    asks: Mapping[str, object] = MappingProxyType({})


def each(*events: bytes) -> bytes:
    return b"".join(chunk(data) for data in events)


ROLE, THREE = delta(""), (delta("a"), delta("b"), delta("c"))
BEGIN = SSE_HEAD + each(ROLE, *THREE)
PLAIN_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
ALL = b"".join((ROLE, *THREE))
STREAMS = {
    "RST": Broken((BEGIN,), "rst"),
    "FIN without the last chunk": Broken((BEGIN,), "fin"),
    "FIN inside a data line": Broken((BEGIN, chunk(delta("lost")[:25])), "fin"),
    "FIN inside a chunk": Broken((BEGIN, chunk(delta("lost"))[:40]), "fin"),
    "RST inside a character": Broken((BEGIN, chunk(delta("é").split(b"\xa9")[0])), "rst"),
    "a clean end without a finish reason": Broken((BEGIN + LAST_CHUNK,), "stay"),
    "DONE without a finish reason": Broken((BEGIN + each(DONE) + LAST_CHUNK,), "stay"),
    "DONE without a finish reason, cut in two": Broken((BEGIN, chunk(DONE[:9]), chunk(DONE[9:]) + LAST_CHUNK), "stay"),
    "usage and DONE without a finish reason": Broken((BEGIN + each(usage(), DONE) + LAST_CHUNK,), "stay"),
    "one of two choices finished": Broken((BEGIN + each(delta("", "length"), DONE) + LAST_CHUNK,), "stay", {"n": 2}),
    "a content-length that is too long": Broken((PLAIN_HEAD + b"content-length: 9999\r\n\r\n" + ALL,), "fin"),
    "a content-length that is too short": Broken(
        (PLAIN_HEAD + b"content-length: %d\r\n\r\n" % (len(ALL) - 9) + ALL + delta("", "length") + DONE,), "stay"
    ),
    "no framing, then FIN": Broken((PLAIN_HEAD + b"\r\n" + ALL,), "fin"),
    "a chunk size that is none": Broken((BEGIN, b"zz\r\n" + delta("x") + b"\r\n"), "stay"),
}


def in_two(script: Broken, seen: asyncio.Event):
    """Says the first segment, and the rest once the caller has some of it: what breaks then is a stream under way."""

    async def run(call: Call) -> None:
        await call.say(script.segments[0])
        await seen.wait()
        await saying(*script.segments[1:], then=script.then)(call)

    return run


@pytest.mark.parametrize("name", STREAMS)
async def test_a_stream_that_breaks_ends_in_an_error_and_a_cut(harbour, name):
    upstream, seen = harbour["eight"], asyncio.Event()
    upstream.script = in_two(STREAMS[name], seen)
    outcomes = await Outcomes(harbour.gateway, "eight").take()
    async with open_stream(harbour.port, model="eight", **STREAMS[name].asks) as stream:
        seen.set()
        body, whole = await stream.finish()
    assert stream.status == 200
    assert not whole
    assert b"[DONE]" not in body
    assert b'"finish_reason": "stop"' not in body
    assert body.endswith(b"\n\n")
    frames = body.split(b"\n\n")[:-1]
    assert json.loads(frames[-1].removeprefix(b"data: "))["error"]["code"] == "upstream_reset"
    assert frames[0] + b"\n\n" == ROLE
    assert await outcomes.since() == {("failed", "upstream_reset"): 1}
    assert len(upstream.calls) == 1


JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
HALF = COMPLETION[: len(COMPLETION) // 2]
HELD = {
    "RST before any byte": Broken((), "rst"),
    "FIN before any byte": Broken((), "fin"),
    "RST after the head": Broken((JSON_HEAD + b"content-length: 500\r\n\r\n",), "rst"),
    "FIN inside the body": Broken((JSON_HEAD + b"content-length: %d\r\n\r\n" % len(COMPLETION) + HALF,), "fin"),
    "FIN inside a chunked body": Broken((JSON_HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(HALF),), "fin"),
    "no framing, half a document": Broken((JSON_HEAD + b"\r\n" + HALF,), "fin"),
    "a whole answer of half a document": Broken((response(HALF),), "stay"),
    "an empty answer": Broken((response(b""),), "stay"),
    "not HTTP": Broken((b"SSH-2.0-OpenSSH_9\r\n\r\n",), "stay"),
    "half a head": Broken((b"HTTP/1.1 200 OK\r\ncontent-ty",), "fin"),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", HELD)
async def test_an_answer_that_is_not_whole_is_a_502(harbour, name, stream):
    segments, then, _ = HELD[name]
    upstream = harbour["eight"]
    upstream.script = saying(*segments, then=then)
    outcomes = await Outcomes(harbour.gateway, "eight").take()
    got = await ask(harbour.port, model="eight", stream=stream)
    assert (got.status, got.code) == (502, "upstream_reset")
    assert got.fields["x-should-retry"] == "false"
    assert await outcomes.since() == {("failed", "upstream_reset"): 1}
    assert len(upstream.calls) == 1


async def test_the_slot_is_free_after_a_break(harbour):
    for script in (saying(BEGIN, then="rst"), saying(BEGIN, then="fin"), saying(BEGIN, chunk(delta("x")[:20]), then="fin")):
        harbour["one"].script = script
        await ask(harbour.port, model="one", stream=True)
        harbour["one"].script = completion
        await slot_is_free(harbour.gateway)


DIALECTS = {
    "/v1/completions": (
        {"model": "eight", "prompt": "hi", "max_tokens": 5, "stream": True},
        event({"choices": [{"index": 0, "text": "a", "finish_reason": None}]}),
        b"[DONE]",
        lambda error: error["error"]["code"],
    ),
    "/v1/messages": (
        {"model": "eight", "max_tokens": 5, "stream": True, "messages": [{"role": "user", "content": "hi"}]},
        b"event: content_block_delta\n" + event({"type": "content_block_delta", "delta": {"text": "a"}}),
        b"message_stop",
        lambda error: error["error"]["code"],
    ),
    "/v1/responses": (
        {"model": "eight", "stream": True, "max_output_tokens": 5, "input": "hi"},
        b"event: response.output_text.delta\n" + event({"type": "response.output_text.delta", "delta": "a"}),
        b"response.completed",
        lambda error: error["code"],
    ),
}


@pytest.mark.parametrize("ending", ["rst", "fin", "clean"])
@pytest.mark.parametrize("path", DIALECTS)
async def test_each_dialect_says_it_in_its_own_words(harbour, path, ending):
    document, first, done, code = DIALECTS[path]
    last = LAST_CHUNK if ending == "clean" else b""
    harbour["eight"].script = saying(SSE_HEAD + chunk(first) + last, then="stay" if ending == "clean" else ending)
    got = await ask(harbour.port, document, path=path)
    assert got.body.startswith(first) and done not in got.body and not got.whole
    told = got.body[len(first) :].decode().split("data: ", 1)[1]
    assert code(json.loads(told)) == "upstream_reset"
