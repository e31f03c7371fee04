"""Streams: byte for byte, broken ones never finished, slow readers held back, clients that leave."""

from __future__ import annotations

import asyncio
import resource

import orjson
import pytest

from gateway.errors import Outcome, Reason
from tests.edge_path.site import Site, policy_for, running
from tests.edge_path.wire import ask, post, until, wire
from tests.forward.scripted import LAST_CHUNK, SSE_HEAD, Peer, chunk, response, serving


def event(document: object) -> bytes:
    return b"data: " + (document if isinstance(document, bytes) else orjson.dumps(document)) + b"\n\n"


def delta(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})
DONE = event(b"[DONE]")
STREAM = delta("") + delta("日本") + delta("🚢") + delta("x", "stop") + USAGE + DONE


def saying(*segments: bytes, then="stay"):
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(*segments)
        if then == "rst":
            peer.reset()
        elif then == "fin":
            peer.writer.close()
        else:
            await peer.gone()

    return script


CUTS = {
    "one read": [SSE_HEAD + chunk(STREAM) + LAST_CHUNK],
    "head apart": [SSE_HEAD, chunk(STREAM), LAST_CHUNK],
    "a byte a chunk": [SSE_HEAD, *[chunk(STREAM[i : i + 1]) for i in range(len(STREAM))], LAST_CHUNK],
    "inside usage": [
        SSE_HEAD + chunk(STREAM[: STREAM.index(b"usage") + 2]),
        chunk(STREAM[STREAM.index(b"usage") + 2 :]) + LAST_CHUNK,
    ],
}


@pytest.mark.parametrize("name", CUTS)
async def test_a_stream_passes_byte_for_byte(name):
    async with serving(saying(*CUTS[name])) as up:
        site = Site(policy_for(up.port))
        async with running(site) as port:
            got = await ask(port, stream=True)
    assert (got.status, got.body, got.whole) == (200, STREAM, True)
    assert got.fields["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in got.fields
    [account] = site.accounts
    assert (account.outcome, account.reason) == (Outcome.SERVED, Reason.OK)
    assert (account.input_tokens, account.output_tokens, account.usage_estimated) == (7, 3, False)
    assert site.in_flight() == 0


async def test_a_stream_without_usage_is_estimated():
    async with serving(saying(SSE_HEAD + chunk(delta("a") + delta("b", "stop") + DONE) + LAST_CHUNK)) as up:
        site = Site(policy_for(up.port))
        async with running(site) as port:
            await ask(port, stream=True)
    assert (site.accounts[0].output_tokens, site.accounts[0].usage_estimated) == (2, True)


BROKEN = {
    "rst": ([SSE_HEAD + chunk(delta("a")) + chunk(delta("b"))], "rst"),
    "fin without the last chunk": ([SSE_HEAD + chunk(delta("a")) + chunk(delta("b"))], "fin"),
    "fin inside an event": ([SSE_HEAD + chunk(delta("a")) + chunk(delta("b")[:20])], "fin"),
    "a clean end without a finish reason": ([SSE_HEAD + chunk(delta("a") + delta("b")) + LAST_CHUNK], "stay"),
    "DONE without a finish reason": ([SSE_HEAD + chunk(delta("a") + delta("b") + DONE) + LAST_CHUNK], "stay"),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_stream_never_looks_finished(name):
    segments, then = BROKEN[name]
    async with serving(saying(*segments, then=then)) as up:
        site = Site(policy_for(up.port))
        async with running(site) as port:
            got = await ask(port, stream=True)
        assert up.peers == 1
    assert got.status == 200
    assert not got.whole  # no terminating chunk
    assert b"[DONE]" not in got.body and b'"stop"' not in got.body
    last = orjson.loads(got.events()[-1])
    assert last["error"]["code"] == "upstream_reset"
    assert got.body.endswith(b"\n\n")
    assert (site.accounts[0].outcome, site.accounts[0].reason) == (Outcome.FAILED, Reason.UPSTREAM_RESET)
    assert site.in_flight() == 0


async def test_an_error_event_of_the_backend_reaches_the_client_and_counts_as_failed():
    stream = delta("a") + event({"error": {"message": "engine died", "code": 500}}) + DONE
    async with serving(saying(SSE_HEAD + chunk(stream) + LAST_CHUNK)) as up:
        site = Site(policy_for(up.port))
        async with running(site) as port:
            got = await ask(port, stream=True)
    assert (got.body, got.whole) == (stream, True)
    assert (site.accounts[0].outcome, site.accounts[0].reason) == (Outcome.FAILED, Reason.UPSTREAM_ERROR)
    assert site.yard.suspected == ["a"]


@pytest.mark.parametrize("name", ["rst before any byte", "head then rst"])
async def test_before_the_first_byte_a_failure_is_a_status(name):
    segments = [] if name == "rst before any byte" else [SSE_HEAD]
    async with serving(saying(*segments, then="rst")) as up, running(Site(policy_for(up.port))) as port:
        got = await ask(port, stream=True)
    assert (got.status, got.code) == (502, "upstream_reset")


async def test_a_whole_completion_instead_of_a_stream_is_relayed():
    answer = response(b'{"choices": []}', b"content-type: application/json")
    async with serving(saying(answer)) as up, running(Site(policy_for(up.port))) as port:
        got = await ask(port, stream=True)
    assert (got.status, got.body, got.fields["content-type"]) == (200, b'{"choices": []}', "application/json")


ERROR_SHAPES = {
    "/v1/messages": (
        {"model": "tiny", "max_tokens": 5, "stream": True, "messages": [{"role": "user", "content": "hi"}]},
        b"event: content_block_delta\n" + event({"type": "content_block_delta", "delta": {"text": "a"}}),
        b"event: error\ndata: ",
        lambda document: document["type"] == "error" and document["error"]["type"] == "api_error",
    ),
    "/v1/responses": (
        {"model": "tiny", "stream": True, "max_output_tokens": 5, "input": "hi"},
        b"event: response.output_text.delta\n" + event({"type": "response.output_text.delta", "delta": "a"}),
        b"event: error\ndata: ",
        lambda document: document["type"] == "error" and document["code"] == "upstream_reset",
    ),
}


@pytest.mark.parametrize("path", ERROR_SHAPES)
async def test_each_dialect_has_its_error_event(path):
    document, first, start, right = ERROR_SHAPES[path]
    async with serving(saying(SSE_HEAD + chunk(first), then="rst")) as up, running(Site(policy_for(up.port))) as port:
        got = await ask(port, document, path=path)
    assert got.body.startswith(first)
    rest = got.body[len(first) :]
    assert rest.startswith(start) and right(orjson.loads(rest[len(start) :]))
    assert not got.whole


async def test_http_1_0_gets_a_plain_body_and_a_close():
    async with serving(saying(SSE_HEAD + chunk(STREAM) + LAST_CHUNK)) as up, running(Site(policy_for(up.port))) as port:
        got = await ask(port, None, version="1.0", stream=True)
    assert "transfer-encoding" not in got.fields
    assert got.body == STREAM


async def test_a_2_mib_event_passes_whole():
    big = delta("x" * 2_000_000)
    async with (
        serving(saying(SSE_HEAD + chunk(big) + chunk(STREAM) + LAST_CHUNK)) as up,
        running(Site(policy_for(up.port))) as port,
    ):
        got = await ask(port, stream=True)
    assert got.body == big + STREAM


async def test_a_slow_reader_holds_the_backend_back_and_then_gets_all():
    total, sent, piece = 30_000_000, 0, b"data: " + b"x" * 100_000 + b"\n\n"

    async def script(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        await peer.say(SSE_HEAD)
        while sent < total:
            peer.writer.write(chunk(piece))
            await peer.writer.drain()
            sent += len(piece)
        await peer.say(chunk(STREAM) + LAST_CHUNK)
        await peer.gone()

    async with serving(script) as up:
        site = Site(policy_for(up.port))
        async with running(site) as port, wire(port) as client:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            client.writer.transport.pause_reading()
            await client.send(post(stream=True))
            await until(lambda: any(connection.paused_at for connection in site.path.connections))
            held = 0
            while held != sent:  # until the backend is really stuck
                held = sent
                await asyncio.sleep(0.1)
            assert held < total / 2
            client.writer.transport.resume_reading()
            got = await client.response(30)
            assert (got.whole, got.body.endswith(STREAM)) == (True, True)
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150_000  # KiB; the test's own copies included


LEAVING = {
    "in prefill, fin": ([], "fin"),
    "in prefill, rst": ([], "rst"),
    "mid-stream, fin": ([SSE_HEAD + chunk(delta("a"))], "fin"),
    "mid-stream, rst": ([SSE_HEAD + chunk(delta("a"))], "rst"),
    "mid-stream, half-close": ([SSE_HEAD + chunk(delta("a"))], "half"),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", LEAVING)
async def test_a_client_that_leaves_ends_the_request(name, stream):
    segments, how = LEAVING[name]
    told = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(*segments)
        await peer.gone()
        told.set()

    async with serving(script) as up:
        site = Site(policy_for(up.port), concurrency=1)
        async with running(site) as port:
            async with wire(port) as client:
                await client.send(post(stream=stream))
                await until(lambda: site.in_flight() == 1)
                if segments and stream:
                    await client.until(b"finish_reason")
                if how == "rst":
                    client.reset()
                elif how == "half":
                    client.writer.write_eof()
                else:
                    client.writer.close()
                await asyncio.wait_for(told.wait(), 2)
            await until(lambda: site.in_flight() == 0 and len(site.accounts) == 1)
    [account] = site.accounts
    assert (account.outcome, account.reason, account.status) == (Outcome.CANCELLED, Reason.CLIENT_CLOSED, 499)


async def test_a_client_that_leaves_the_queue_is_never_sent():
    seen, release = [], asyncio.Event()

    async def script(peer: Peer) -> None:
        while True:
            seen.append(await peer.request())
            await release.wait()
            await peer.say(response(b"{}"))

    async with serving(script) as up:
        site = Site(policy_for(up.port), concurrency=1)
        async with running(site) as port:
            first = asyncio.create_task(ask(port))
            await until(lambda: site.in_flight() == 1)
            async with wire(port) as second:
                await second.send(post(user="second"))
                await until(lambda: site.waiting() == 1)
            await until(lambda: site.waiting() == 0)
            release.set()
            assert (await first).status == 200
            assert (await ask(port)).status == 200
    assert len(seen) == 2
    assert [account.outcome for account in site.accounts] == [Outcome.CANCELLED, Outcome.SERVED, Outcome.SERVED]


async def test_half_an_upload_and_a_close_dispatches_nothing():
    async with serving(saying()) as up:
        site = Site(policy_for(up.port))
        async with running(site) as port:
            async with wire(port) as client:
                await client.send(post()[:-10])
                await until(lambda: site.path.buffered_bytes > 0)
            await until(lambda: len(site.accounts) == 1)
        assert up.peers == 0
    assert site.accounts[0].outcome is Outcome.CANCELLED
    assert site.path.buffered_bytes == 0


async def test_a_burst_of_aborts_leaves_nothing_behind():
    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await asyncio.sleep(0.005)
            await peer.say(response(b"{}"))

    async with serving(script) as up:
        site = Site(policy_for(up.port), concurrency=8)
        async with running(site) as port:

            async def rude(delay: float) -> None:
                for _ in range(8):
                    async with wire(port) as client:
                        await client.send(post())
                        await asyncio.sleep(delay)
                        client.reset()

            await asyncio.gather(*[rude(0.0011 * n) for n in range(16)])
            await until(lambda: site.in_flight() == 0 and site.waiting() == 0)
            for _ in range(8):
                assert (await ask(port)).status == 200
    assert site.controller.breaker("a").state == "closed"
    assert len(site.accounts) <= 16 * 8 + 8
