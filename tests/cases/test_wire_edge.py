"""What a hostile or odd client may do to HTTP/1.1 itself: one clear answer each, on both listeners, and nothing smuggled."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.client import KEY, post
from tests.support.gateway import KEYS
from tests.support.raw import assert_envelope, dial, request, say, stranger

INNER = post(model="bare", user="smuggled")
SMUGGLING: dict[str, list[str | bytes]] = {
    "length and chunked": ["transfer-encoding: chunked"],
    "chunked in capitals": ["Transfer-Encoding: CHUNKED"],
    "chunked twice": ["transfer-encoding: chunked", "transfer-encoding: chunked"],
    "chunked, then identity": ["transfer-encoding: chunked, identity"],
    "identity": ["transfer-encoding: identity"],
    "a coding before": ["transfer-encoding: gzip, chunked"],
    "a word that looks like it": ["transfer-encoding: xchunked"],
    "a blank in the name": ["transfer-encoding : chunked"],
    "a tab before the value": [b"transfer-encoding:\tchunked"],
    "a vertical tab": [b"transfer-encoding:\x0bchunked"],
    "quoted": ['transfer-encoding: "chunked"'],
    "two lengths": ["content-length: 3"],
    "two lengths in one": ["content-length: 3, 4"],
    "a negative length": ["content-length: -3"],
    "a hexadecimal length": ["content-length: 0x10"],
    "a folded line": [b"x-a: b\r\n content-length: 3"],
    "a folded line with a tab": [b"transfer-encoding:\r\n\tchunked"],
    "a bare carriage return": [b"x-a: b\rtransfer-encoding: chunked"],
    "a line without a colon": ["transfer-encoding chunked"],
    "a line that begins with a colon": [": b"],
    "a NUL in a name": [b"x-\x00a: b"],
    "two hosts": ["host: other"],
    "two content types": ["content-type: text/plain"],
}


def with_lines(lines: list[str | bytes], key: str) -> bytes:
    raw = post(None, model="bare", key=key)
    head, _, body = raw.partition(b"\r\n\r\n")
    extra = b"\r\n".join(line.encode() if isinstance(line, str) else line for line in lines)
    return head + b"\r\n" + extra + b"\r\n\r\n0\r\n\r\n" + INNER + body


@pytest.mark.parametrize("listener", ["public", "admin"])
@pytest.mark.parametrize("name", SMUGGLING)
async def test_smuggling(quay, name, listener):
    port, key = {"public": (quay.port, KEY), "admin": (quay.admin_port, KEYS["operator"])}[listener]
    async with dial(port) as client:
        await client.send(with_lines(SMUGGLING[name], key))
        got = await client.response()
        assert got.status in ((400,) if listener == "public" else (400, 404)), got.status
        assert_envelope(got, got.status)
        rest = await client.closed() if got.status == 400 else b""
        assert rest == b"", "nothing more is answered on a connection that cannot be understood"
    assert quay.calls == []


CHUNKED = request("POST", "/v1/chat/completions", "transfer-encoding: chunked", key=KEY).replace(b"content-length: 0\r\n", b"")
BARE_LF = {
    "between lines": post(model="bare").replace(b"\r\n", b"\n"),
    "at the end of the head": post(model="bare").replace(b"\r\n\r\n", b"\n\n"),
    "one of the lines": post(model="bare").replace(b"host: g\r\n", b"host: g\n"),
    "in chunks": CHUNKED + b'5\n{"a":\n0\n\n',
    "a chunk without an end": CHUNKED + b"1\r\nxx\r\n0\r\n\r\n",
    "a chunk of negative size": CHUNKED + b"-1\r\nx\r\n0\r\n\r\n",
    "a chunk of endless size": CHUNKED + b"f" * 40 + b"\r\nx\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("name", BARE_LF)
async def test_line_ends_and_chunks(quay, name):
    got = await say(quay.port, BARE_LF[name])
    assert got.status in (400, 413), got.status
    assert_envelope(got, got.status)
    assert quay.calls == []


async def test_trailers_and_chunk_extensions_are_dropped(quay):
    body = post(model="bare").partition(b"\r\n\r\n")[2]
    raw = (
        CHUNKED.replace(b"host: g\r\n", b"host: g\r\ntrailer: x-a\r\n")
        + b"%x;a=b\r\n%b\r\n0\r\nauthorization: Bearer sk-other\r\nx-a: canary\r\n\r\n"
    )
    raw = raw.replace(b"%x", b"%x" % len(body)).replace(b"%b", body)
    async with dial(quay.port) as client:
        await client.send(raw + request("GET", "/v1/models", key=KEY))
        assert (await client.response()).status == 200
        assert (await client.response()).status == 200
    assert b"canary" not in quay.calls[0].head and quay.calls[0].body.startswith(b"{")


async def test_expect_100_continue(quay):
    raw = post(None, "expect: 100-continue", model="bare")
    at = raw.index(b"\r\n\r\n") + 4
    async with dial(quay.port) as client:
        await client.send(raw[:at])
        assert (await client.response()).status == 100
        await client.send(raw[at:])
        assert (await client.response()).status == 200
        await client.send(raw)  # the body is there already
        got = await client.response()
        assert (await client.response() if got.status == 100 else got).status == 200
    for bad, status in ((post(None, "expect: 100-continue", key="sk-wrong"), 401),
                        (post(None, "expect: 100-continue", path="/nothing"), 404),
                        (request("POST", "/v1/models", "expect: 100-continue", "content-length: 9", key=KEY), 400)):  # fmt: skip
        async with dial(quay.port, stranger()) as client:
            await client.send(bad[: bad.index(b"\r\n\r\n") + 4])
            got = await client.response()
            assert got.status == status
    async with dial(quay.port) as client:
        await client.send(post(None, "expect: 100-continue", model="bare", version="1.0")[: at + 1])
        await client.send(b"")
        with pytest.raises(TimeoutError):  # HTTP/1.0 knows no interim answers
            await client.response(0.2)
    assert len(quay.calls) == 2


async def test_pipelining(quay):
    seen = [
        post(model="bare", user="1"),
        request("GET", "/v1/models", key=KEY),
        post(model="bare", user="2"),
        post(model="nothing"),
    ]
    for size in (10_000, 61):
        raw = b"".join(seen)
        async with dial(quay.port) as client:
            await client.send(*[raw[i : i + size] for i in range(0, len(raw), size)])
            assert [(await client.response()).status for _ in seen] == [200, 200, 200, 404]
    async with dial(quay.port) as client:
        await client.send(post(None, "connection: close", model="bare") + INNER)
        assert (await client.response()).status == 200
        assert await client.closed() == b""
    async with dial(quay.port) as client:
        await client.send(post(model="bare", key="sk-wrong") + INNER)
        assert (await client.response()).status == 401
        assert await client.closed() == b""
    assert len(quay.calls) == 5


async def test_a_half_close_is_a_departure(quay):
    gone = asyncio.Event()

    async def silent(call):
        await call.gone()
        gone.set()

    quay["bare"].script = silent
    async with dial(quay.port) as client:
        await client.send(post(model="bare"))
        await quay["bare"].called()
        client.writer.write_eof()
        await asyncio.wait_for(gone.wait(), 2)
        assert await client.closed() == b""
    async with dial(quay.port) as client:
        await client.send(post(model="bare")[:-5])
        client.writer.write_eof()
        assert await client.closed() == b""
    assert len(quay.calls) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0(quay, stream):
    for lines in ((), ("connection: keep-alive",)):
        async with dial(quay.port) as client:
            await client.send(post(None, *lines, model="bare", stream=stream, version="1.0").replace(b"host: g\r\n", b""))
            got = await client.response()
            assert got.status == 200 and "transfer-encoding" not in got.fields
            assert got.fields["connection"] == "close"
            assert await client.closed() == b""
            assert got.body and b"\r\n0\r\n" not in got.body
    async with dial(quay.port) as client:
        await client.send(request("GET", "/v1/models", key=KEY).replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert (await client.response()).status == 200
        assert await client.closed() == b""


@pytest.mark.parametrize("listener", ["public", "admin"])
async def test_rubbish_does_not_hurt(quay, listener):
    port = quay.port if listener == "public" else quay.admin_port
    seeds = [
        bytes(range(256)),
        b"\x16\x03\x01\x02" + bytes(200),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\r\n" * 500,
        b"GET " + b"/" * 70_000,
        b":" * 9000,
        b"GET / HTTP/1.1\r\n" + b"a" * 200_000,
        b"\n" * 9000,
        b"SSH-2.0-x\r\n",
    ]
    for seed in seeds:
        async with dial(port, stranger()) as client:
            await client.send(seed)
            client.writer.write_eof()
            text = await client.closed()
            assert text == b"" or text.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431", b"HTTP/1.1 401")), (seed[:20], text[:60])
    assert (await say(quay.port, post(model="bare"))).status == 200
