"""Case 26: compressed, unbounded and unsized bodies: decoded within a bound or refused, and never kept for a stranger."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import zlib
from contextlib import AsyncExitStack

import brotli
import pytest
import zstandard

from tests.support.client import KEY, post
from tests.support.quay import MAX_BODY_BYTES
from tests.support.raw import assert_envelope, dial, request, say, stranger

PLAIN = json.dumps({"model": "bare", "messages": [{"role": "user", "content": "compressed " * 50}], "max_tokens": 4}).encode()


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


def zstd_without_size(data: bytes) -> bytes:
    packer = zstandard.ZstdCompressor(write_content_size=False)
    return packer.compress(data)


CODINGS = {
    "gzip": ("gzip", gzip.compress(PLAIN)),
    "x-gzip": ("x-gzip", gzip.compress(PLAIN)),
    "gzip in capitals": ("GZIP", gzip.compress(PLAIN)),
    "gzip in two members": ("gzip", gzip.compress(PLAIN[:100]) + gzip.compress(PLAIN[100:])),
    "deflate": ("deflate", zlib.compress(PLAIN)),
    "deflate without its header": ("deflate", raw_deflate(PLAIN)),
    "br": ("br", brotli.compress(PLAIN)),
    "zstd": ("zstd", zstandard.compress(PLAIN)),
    "zstd without a size": ("zstd", zstd_without_size(PLAIN)),
    "identity": ("identity", PLAIN),
}
BROKEN = {
    "truncated gzip": ("gzip", gzip.compress(PLAIN)[:-9], 400),
    "truncated deflate": ("deflate", zlib.compress(PLAIN)[:-9], 400),
    "truncated br": ("br", brotli.compress(PLAIN)[:-3], 400),
    "truncated zstd": ("zstd", zstandard.compress(PLAIN)[:-5], 400),
    "gzip with rubbish behind": ("gzip", gzip.compress(PLAIN) + b"rubbish", 400),
    "not gzip at all": ("gzip", PLAIN, 400),
    "an empty body": ("gzip", b"", 400),
    "two stacked": ("gzip, br", brotli.compress(gzip.compress(PLAIN)), 415),
    "the same twice": ("gzip, gzip", gzip.compress(gzip.compress(PLAIN)), 415),
    "unknown": ("rot13", PLAIN, 415),
    "compress": ("compress", PLAIN, 415),
    "a bomb of gzip": ("gzip", gzip.compress(bytes(200_000_000), 1), 413),
    "a bomb of deflate": ("deflate", zlib.compress(bytes(100_000_000), 1), 413),
    "a bomb of br": ("br", brotli.compress(bytes(100_000_000), quality=1), 413),
}


@pytest.mark.parametrize("name", CODINGS)
async def test_a_coding_is_decoded(quay, name):
    coding, body = CODINGS[name]
    got = await say(quay.port, post(body, f"content-encoding: {coding}"))
    assert got.status == 200, got.body
    sent = quay.calls[0]
    assert sent.json()["messages"] == json.loads(PLAIN)["messages"]
    assert "content-encoding" not in sent.fields and int(sent.fields["content-length"]) == len(sent.body)


@pytest.mark.parametrize("name", BROKEN)
async def test_what_cannot_be_decoded_is_told_so(quay, name):
    coding, body, status = BROKEN[name]
    before = quay.gateway.rss_kb()
    got = await say(quay.port, post(body, f"content-encoding: {coding}"), timeout=20)
    assert_envelope(got, status)
    assert "JSON" not in got.json()["error"]["message"]
    assert quay.gateway.rss_kb() - before < 80_000
    assert quay.calls == []


async def test_a_gigabyte_in_ten_kilobytes(quay):
    packer = zstandard.ZstdCompressor(level=1, write_content_size=True).compressobj(size=10**9)
    block = bytes(10**7)
    body = b"".join(packer.compress(block) for _ in range(100)) + packer.flush()
    assert len(body) < 100_000
    before = quay.gateway.rss_kb()
    assert_envelope(await say(quay.port, post(body, "content-encoding: zstd"), timeout=20), 413, "body_too_large")
    assert quay.gateway.rss_kb() - before < 80_000


async def test_a_length_that_is_too_large_is_refused_unread(quay):
    for size in (MAX_BODY_BYTES + 1, 10**10):
        raw = request("POST", "/v1/chat/completions", f"content-length: {size}", key=KEY).replace(b"content-length: 0\r\n", b"")
        assert_envelope(await say(quay.port, raw), 413, "body_too_large")
    for size in (2**63 - 1, 2**64, 10**30):
        raw = request("POST", "/v1/chat/completions", f"content-length: {size}", key=KEY).replace(b"content-length: 0\r\n", b"")
        assert (await say(quay.port, raw)).status in (400, 413)


async def test_chunks_over_the_bound_are_refused_without_the_rest(quay):
    head = request("POST", "/v1/chat/completions", "transfer-encoding: chunked", key=KEY).replace(b"content-length: 0\r\n", b"")
    async with dial(quay.port) as client:
        sent = 0

        async def send() -> None:
            nonlocal sent
            await client.send(head)
            for _ in range(100):
                await client.send(b"100000\r\n" + bytes(2**20) + b"\r\n")
                sent += 2**20

        sending = asyncio.create_task(send())
        assert_envelope(await client.response(), 413, "body_too_large")
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    assert sent < 2 * MAX_BODY_BYTES


async def test_a_client_that_writes_before_it_reads_gets_the_answer_and_not_a_reset(quay):
    head = request("POST", "/v1/chat/completions", "transfer-encoding: chunked", key=KEY).replace(b"content-length: 0\r\n", b"")
    async with dial(quay.port) as client:
        transport = client.writer.transport
        transport.pause_reading()
        transport.write(head)
        loop = asyncio.get_running_loop()
        until = loop.time() + 0.4  # well within the second in which a refused request's bytes are taken
        while loop.time() < until:
            transport.write(b"100000\r\n" + bytes(2**20) + b"\r\n")
            while transport.get_write_buffer_size() and loop.time() < until:
                await asyncio.sleep(0.002)
        transport.resume_reading()
        assert_envelope(await client.response(), 413, "body_too_large")


@pytest.mark.parametrize("size", [129 * 1024, 2 * 2**20, MAX_BODY_BYTES - 1000])
@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_legal_sizes_pass(quay, size, framing):
    url = "data:image/png;base64," + base64.b64encode(bytes(size * 3 // 4 - 400)).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = json.dumps({"model": "images", "messages": [{"role": "user", "content": content}], "max_tokens": 4}).encode()
    assert size * 0.95 < len(body) <= MAX_BODY_BYTES
    raw = post(body)
    if framing == "chunked":
        head = raw.partition(b"\r\n\r\n")[0].replace(b"content-length: %d" % len(body), b"transfer-encoding: chunked")
        pieces = [body[i : i + 65_536] for i in range(0, len(body), 65_536)]
        raw = head + b"\r\n\r\n" + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    got = await say(quay.port, raw, timeout=20)
    assert got.status == 200, got.body[:300]
    assert quay.calls[0].json()["messages"][0]["content"] == content


async def test_strangers_upload_nothing(quay):
    """200 uploads at once without a key: each is refused at its head, and nothing of it is kept."""
    before = quay.gateway.rss_kb()
    part = request("POST", "/v1/chat/completions", "content-length: 2000000").replace(b"content-length: 0\r\n", b"") + bytes(
        100_000
    )
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(dial(quay.port, stranger())) for _ in range(200)]
        sending = [asyncio.create_task(client.send(part)) for client in clients]
        for client in clients:
            assert (await client.response()).status == 401
        await asyncio.gather(*sending, return_exceptions=True)
        assert quay.gateway.rss_kb() - before < 40_000
    assert quay.calls == []


async def test_uploads_beyond_what_is_kept_at_once_are_refused(quay):
    """200 uploads of 2 MB with a good key that do not end: what is held stays within the bound, the rest is told to come back."""
    part = request("POST", "/v1/chat/completions", "content-length: 2000000", key=KEY).replace(b"content-length: 0\r\n", b"")
    part += bytes(1_900_000)
    before = quay.gateway.rss_kb()
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(dial(quay.port)) for _ in range(200)]
        sending = [asyncio.create_task(client.send(part)) for client in clients]
        answers = await asyncio.gather(*(client.response(20) for client in clients), return_exceptions=True)
        await asyncio.gather(*sending, return_exceptions=True)
    statuses = {answer.status for answer in answers if not isinstance(answer, BaseException)}
    assert statuses <= {503, 408} and statuses
    assert quay.gateway.rss_kb() - before < 400_000
    assert (await say(quay.port, post(model="bare"))).status == 200
