"""The listener against everything a client may send: one clear answer each, the same for any segmentation."""

from __future__ import annotations

import asyncio
import gzip

import orjson
import pytest

from gateway.edge.protocol import MAX_PENDING_BYTES
from tests.edge_path.site import KEY, POLICY, Site, policy_for, running
from tests.edge_path.wire import ask, post, until, wire
from tests.forward.scripted import Peer, response, serving

ANSWER = response(b'{"choices": []}', b"content-type: application/json")
KEY_LINE = f"authorization: Bearer {KEY}\r\n".encode()


async def script(peer: Peer) -> None:
    while True:
        peer.server.requests.append(await peer.request())
        await peer.say(ANSWER)


def gateway(up, text=POLICY):
    return running(Site(policy_for(up.port, text)))


WEBSOCKET = b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-key: eA==\r\n"
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n" + KEY_LINE + b"transfer-encoding: chunked\r\n\r\nffffff\r\n"

RAW = {
    # name: (segments, status, code or None)
    "no key": ([post(key=None)], 401, "invalid_api_key"),
    "a wrong key": ([post(key="sk-other")], 401, "invalid_api_key"),
    "a key that is not ascii": ([post(key="\xe9")], 401, "invalid_api_key"),
    "basic": ([post(None, "authorization: Basic eDp5", key=None)], 401, "invalid_api_key"),
    "two keys that differ": ([post(None, "x-api-key: other")], 401, "invalid_api_key"),
    "bearer in lower case": ([post(None, f"authorization: bearer {KEY}", key=None)], 200, None),
    "x-api-key": ([post(None, f"x-api-key: {KEY}", key=None)], 200, None),
    "an unknown path": ([post(path="/v1/other")], 404, "unknown_route"),
    "an unknown path without a key": ([post(path="/v1/other", key=None)], 401, "invalid_api_key"),
    "a trailing slash": ([post(path="/v1/chat/completions/")], 404, "unknown_route"),
    "two slashes": ([post(path="//v1/chat/completions")], 404, "unknown_route"),
    "a coded path": ([post(path="/v1/%63hat/completions")], 404, "unknown_route"),
    "dot segments": ([post(path="/v1/x/../chat/completions")], 404, "unknown_route"),
    "an absolute target": ([post(path="http://g/v1/chat/completions")], 404, "unknown_route"),
    "a query": ([post(path="/v1/chat/completions?x=1")], 200, None),
    "get": ([b"GET /v1/chat/completions HTTP/1.1\r\nhost: g\r\n" + KEY_LINE + b"\r\n"], 405, "method_not_allowed"),
    "propfind": ([b"PROPFIND /v1/chat/completions HTTP/1.1\r\nhost: g\r\n" + KEY_LINE + b"\r\n"], 405, "method_not_allowed"),
    "connect": ([b"CONNECT g:443 HTTP/1.1\r\nhost: g\r\n" + KEY_LINE + b"\r\n"], 404, "unknown_route"),
    "websocket": (
        [b"GET /v1/realtime HTTP/1.1\r\nhost: g\r\n" + WEBSOCKET + KEY_LINE + b"\r\n"],
        404, "unknown_route",
    ),
    "websocket on a known path": (
        [b"GET /v1/models HTTP/1.1\r\nhost: g\r\n" + WEBSOCKET + KEY_LINE + b"\r\n"],
        404, "unknown_route",
    ),
    "websocket without a key": (
        [b"GET /v1/realtime HTTP/1.1\r\nhost: g\r\n" + WEBSOCKET + b"\r\n"], 401, "invalid_api_key",
    ),
    "no host": ([post().replace(b"host: g\r\n", b"")], 400, "invalid_body"),
    "two hosts": ([post(None, "host: h")], 400, "invalid_body"),
    "length and chunked": ([post(None, "transfer-encoding: chunked")], 400, "invalid_body"),
    "two lengths": ([post(None, "content-length: 3")], 400, "invalid_body"),
    "a length that is no number": ([post().replace(b"content-length: ", b"content-length: +")], 400, "invalid_body"),
    "an unknown transfer coding": (
        [post().replace(b"content-length: ", b"transfer-encoding: xchunked\r\nx: ")], 400, "invalid_body",
    ),
    "a space before the colon": ([post(None, "x-a : b")], 400, "invalid_body"),
    "a folded header": ([post(None, "x-a: b\r\n c")], 400, "invalid_body"),
    "bare line feeds": ([post().replace(b"\r\n", b"\n")], 400, "invalid_body"),
    "a nul in a header": ([post(None, "x-a: b\x00c")], 400, "invalid_body"),
    "http/2 by guess": ([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], 400, "invalid_body"),
    "tls on a plain port": ([bytes.fromhex("160301020001000001fc0303")], 400, "invalid_body"),
    "one header of 100 kB at once": ([post(None, "x-a: " + "b" * 100_000)], 431, "headers_too_large"),
    "one header of 100 kB in pieces": (
        [post(None, "x-a: " + "b" * 100_000)[i : i + 5_000] for i in range(0, 100_400, 5_000)], 431, "headers_too_large",
    ),
    "one header of 5 MB": ([post(None, "x-a: " + "b" * 5_000_000)], 431, "headers_too_large"),
    "300 headers": ([post(None, *["x-a: b"] * 300)], 431, "headers_too_large"),
    "a body over the bound": ([post(b"x" * 1_000_001)], 413, "body_too_large"),
    "a length of 10 GB": ([post().replace(b"content-length: ", b"content-length: 1000000000")], 413, "body_too_large"),
    "a chunked body over the bound": (
        [CHUNKED + b"x" * 1_000_001],
        413, "body_too_large",
    ),
    "a large body without a key": ([post(b"x" * 900_000, key=None)], 401, "invalid_api_key"),
    "not json": ([post(b"{")], 400, "invalid_body"),
    "an unknown model": ([post({"model": "other", "messages": []})], 404, "model_not_found"),
    "gzip": ([post(gzip.compress(post().partition(b"\r\n\r\n")[2]), "content-encoding: gzip")], 200, None),
    "truncated gzip": ([post(gzip.compress(b"x" * 1000)[:-9], "content-encoding: gzip")], 400, "invalid_body"),
    "an unknown coding": ([post(b"x", "content-encoding: rot13")], 415, "unsupported_encoding"),
    "a bomb": ([post(gzip.compress(b"\0" * 5_000_000), "content-encoding: gzip")], 413, "body_too_large"),
}  # fmt: skip
SMALL = POLICY + "server: {{max_body_bytes: 1000000, body_timeout_s: 0.3, keep_alive_s: 0.5}}\n"


@pytest.mark.parametrize("name", RAW)
async def test_one_clear_answer(name):
    segments, status, code = RAW[name]
    async with serving(script) as up:
        site = Site(policy_for(up.port, SMALL))
        async with running(site) as port:
            async with wire(port) as client:
                sending = asyncio.create_task(client.send(*segments))
                got = await client.response()
                await asyncio.gather(sending, return_exceptions=True)
            assert got.status == status
            assert got.fields["content-type"] == "application/json"
            assert "x-request-id" in got.fields
            if code is not None:
                assert got.code == code
                assert set(got.json()["error"]) == {"message", "type", "param", "code"}
            assert (got.fields.get("allow") == "POST") == (status == 405)
            assert len(up.requests) == (status == 200)
            assert (await ask(port)).status == 200  # alive
        assert len(site.accounts) == 2
        assert site.path.buffered_bytes == 0


@pytest.mark.parametrize("stop", [20, 70, -5])
async def test_a_dripped_request_is_cut_by_a_total_deadline(stop):
    async with serving(script) as up, gateway(up, SMALL) as port, wire(port) as client:
        whole = post()

        async def drip() -> None:
            await client.send(whole[:stop])
            for byte in whole[stop:]:
                await asyncio.sleep(0.25)
                await client.send(bytes([byte]))

        dripping = asyncio.create_task(drip())
        got = await client.response(3)
        dripping.cancel()
        assert (got.status, got.code) == (408, "request_timeout")
        assert up.requests == []


async def test_a_legal_slow_upload_passes():
    async with serving(script) as up, gateway(up, SMALL.replace("0.3", "5")) as port, wire(port) as client:
        whole = post(None, "x-pad: " + "y" * 500)
        await client.send(*[whole[i : i + 40] for i in range(0, len(whole), 40)])
        assert (await client.response()).status == 200


async def test_an_idle_connection_is_closed():
    async with serving(script) as up, gateway(up, SMALL) as port, wire(port) as client:
        assert await client.closed(3) == b""


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("cut", [None, "head", "bytes"])
async def test_an_offer_of_h2c_is_plain_http(framing, cut):
    offer = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__")
    raw = post(None, *offer)
    if framing == "chunked":
        head, _, body = raw.partition(b"\r\n\r\n")
        lines = [line for line in head.split(b"\r\n") if not line.startswith(b"content-length")]
        raw = b"\r\n".join([*lines, b"transfer-encoding: chunked"]) + b"\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    at = raw.index(b"\r\n\r\n") + 4
    segments = {None: [raw], "head": [raw[:at], raw[at:]], "bytes": [raw[i : i + 1] for i in range(len(raw))]}[cut]
    async with serving(script) as up, gateway(up) as port, wire(port) as client:
        await client.send(*segments)
        assert (await client.response()).status == 200
        assert orjson.loads(up.requests[0].partition(b"\r\n\r\n")[2])["messages"]
        await client.send(post())
        assert (await client.response()).status == 200


async def test_expect_100_continue():
    async with serving(script) as up, gateway(up) as port, wire(port) as client:
        head, _, body = post(None, "expect: 100-continue").partition(b"\r\n\r\n")
        await client.send(head + b"\r\n\r\n")
        assert (await client.response()).status == 100
        await client.send(body)
        assert (await client.response()).status == 200


async def test_expect_with_a_wrong_key_is_refused_before_the_body():
    async with serving(script) as up, gateway(up) as port, wire(port) as client:
        head = post(None, "expect: 100-continue", key="wrong").partition(b"\r\n\r\n")[0]
        await client.send(head + b"\r\n\r\n")
        assert (await client.response()).status == 401


async def test_pipelined_requests_are_answered_in_turn():
    async with serving(script) as up, gateway(up) as port, wire(port) as client:
        await client.send(post(user="1") + post(user="2") + post(user="3"))
        for _ in range(3):
            assert (await client.response()).status == 200
        assert len(up.requests) == 3


async def test_pipelined_answers_keep_their_order_whoever_gives_them():
    """The data path, the ASGI app and a refusal write in turn on one connection."""
    models = b"GET /v1/models HTTP/1.1\r\nhost: g\r\n" + KEY_LINE + b"\r\n"
    async with serving(script) as up, gateway(up) as port, wire(port) as client:
        await client.send(post() + models + models + post() + post(model="nowhere") + models + post())
        bodies = [(await client.response()).body for _ in range(7)]
    app = b"GET /v1/models "
    assert [body if body == app else orjson.loads(body).keys() & {"choices", "error"} for body in bodies] == [
        {"choices"}, app, app, {"choices"}, {"error"}, app, {"choices"},
    ]  # fmt: skip


async def test_an_answer_reaches_a_client_that_half_closed_in_the_same_segment():
    """A refusal that is ready at once is not lost with the end of the client's side."""
    async with serving(script) as up, gateway(up) as port, wire(port) as client:
        client.writer.write(post(model="nowhere"))
        client.writer.write_eof()
        assert (await client.response()).code == "model_not_found"


async def test_pipelined_requests_in_small_pieces():
    async with serving(script) as up, gateway(up) as port, wire(port) as client:
        raw = post() * 3
        await client.send(*[raw[i : i + 37] for i in range(0, len(raw), 37)])
        for _ in range(3):
            assert (await client.response()).status == 200


async def test_a_flood_behind_a_running_request_ends_the_connection():
    async def silent(peer: Peer) -> None:
        await peer.request()
        await peer.gone()

    async with serving(silent) as up:
        site = Site(policy_for(up.port))
        async with running(site) as port, wire(port) as client:
            await client.send(post())
            await until(lambda: site.in_flight() == 1)
            await client.send(b"x" * (MAX_PENDING_BYTES + 1))
            await client.closed()
            await until(lambda: site.in_flight() == 0)


async def test_a_refusal_behind_a_good_request_closes_after_both_answers():
    async with serving(script) as up, gateway(up) as port, wire(port) as client:
        await client.send(post() + post(key="wrong") + post())
        assert (await client.response()).status == 200
        assert (await client.response()).status == 401
        assert await client.closed() == b""
        assert len(up.requests) == 1


async def test_http_1_0_and_connection_close_are_honoured():
    async with serving(script) as up, gateway(up) as port:
        for raw in (post(version="1.0"), post(None, "connection: close"), post(None, "connection: keep-alive", version="1.0")):
            async with wire(port) as client:
                await client.send(raw)
                got = await client.response()
                assert (got.status, got.fields["connection"]) == (200, "close")
                assert await client.closed() == b""


async def test_what_is_not_proxied_goes_to_the_application_whole():
    async with serving(script) as up, gateway(up) as port, wire(port) as client:
        await client.send(post(b"abc", path="/tokenize"))
        assert (await client.response()).body == b"POST /tokenize abc"
        await client.send(b"GET /v1/models/org%2Fname?x=1 HTTP/1.1\r\nhost: g\r\n" + KEY_LINE + b"\r\n")
        assert (await client.response()).body == b"GET /v1/models/org%2Fname "
        await client.send(post())
        assert (await client.response()).status == 200


CORS = POLICY + "server: {{cors_origins: ['https://app.example']}}\n"


async def test_cors():
    ask_first = b"OPTIONS /v1/chat/completions HTTP/1.1\r\nhost: g\r\norigin: %b\r\naccess-control-request-method: POST\r\n\r\n"
    async with serving(script) as up, gateway(up, CORS) as port:
        async with wire(port) as client:
            await client.send(ask_first % b"https://app.example")
            got = await client.response()
            assert (got.status, got.fields["access-control-allow-origin"]) == (204, "https://app.example")
            assert "authorization" in got.fields["access-control-allow-headers"]
            await client.send(ask_first % b"https://evil.example")
            assert (await client.response()).status == 401
        for more, status in (({}, 200), ({"key": None}, 401), ({"max_tokens": 10**6}, 400)):
            got = await ask(port, None, "origin: https://app.example", **more)
            assert (got.status, got.fields["access-control-allow-origin"]) == (status, "https://app.example")
            got = await ask(port, None, "origin: https://evil.example", **more)
            assert "access-control-allow-origin" not in got.fields
        assert len(up.requests) == 2


async def test_the_number_of_connections_is_bounded():
    async with serving(script) as up:
        site = Site(policy_for(up.port, POLICY + "server: {{max_connections_per_address: 2}}\n"))
        async with running(site) as port, wire(port), wire(port):
            await until(lambda: len(site.path.connections) == 2)
            async with wire(port) as third:
                got = await third.response()
                assert (got.status, got.code) == (503, "queue_full")
            await until(lambda: len(site.path.connections) == 2)


async def test_failed_keys_are_limited_and_good_ones_are_not():
    async with serving(script) as up, gateway(up) as port:
        codes = [(await ask(port, key="wrong")).status for _ in range(25)]
        assert codes[0] == 401 and codes[-1] == 429
        assert (await ask(port)).status == 200
